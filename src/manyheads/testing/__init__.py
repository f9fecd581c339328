"""The laws that every part holds to, and the combinations to hold them on. Use it on a part of your own:

>>> from manyheads.testing import check, check_feed
>>> check("gqa(kv_heads=2) + mypart(option=3)")
>>> check_feed("moe(experts=4, top=2)")
"""

from manyheads.testing.conformance import (
    LAWS,
    Case,
    check,
    combinations,
    cross,
    illegal_pairs,
    legal_pairs,
    matrix,
    precision,
    samples,
    singles,
)
from manyheads.testing.feeds import FEED_LAWS, FeedCase, check_feed, feed_samples
from manyheads.testing.sharing import shared_rows, shared_weights

__all__ = [
    "FEED_LAWS",
    "LAWS",
    "Case",
    "FeedCase",
    "check",
    "check_feed",
    "combinations",
    "cross",
    "feed_samples",
    "illegal_pairs",
    "legal_pairs",
    "matrix",
    "precision",
    "samples",
    "shared_rows",
    "shared_weights",
    "singles",
]
