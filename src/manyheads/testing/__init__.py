"""The laws that every part holds to, and the combinations to hold them on. Use it on a part of your own:

>>> from manyheads.testing import check
>>> check("gqa(kv_heads=2) + mypart(option=3)")
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
    shared_rows,
    singles,
)

__all__ = [
    "LAWS",
    "Case",
    "check",
    "combinations",
    "cross",
    "illegal_pairs",
    "legal_pairs",
    "matrix",
    "precision",
    "samples",
    "shared_rows",
    "singles",
]
