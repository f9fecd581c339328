"""One trunk, many output heads: labels that are missing, losses in balance, several guesses, early exits.

>>> model = mh.multi.MultiHead(trunk, {"age": mh.multi.Regression(), "kind": "classification(classes=3)"}, width=64)
>>> model(x, targets={"age": age, "kind": kind}).loss.backward()

`Head` is the contract of a head (`multi/head.py`), `multi/heads` has a file for each kind.
"""

from manyheads.multi.balance import Aggregated, Sum, Uncertainty
from manyheads.multi.exits import exits, leave_early
from manyheads.multi.head import MISSING, Head, read_head, register_head
from manyheads.multi.heads import (
    Classification,
    Density,
    Hypotheses,
    Matryoshka,
    MultiLabel,
    Ordinal,
    Ranking,
    Regression,
    Span,
    Tokens,
)
from manyheads.multi.heads.hypotheses import choose
from manyheads.multi.model import MultiHead, Output, collate, pooled

__all__ = [
    "MISSING",
    "Aggregated",
    "Classification",
    "Density",
    "Head",
    "Hypotheses",
    "Matryoshka",
    "MultiHead",
    "MultiLabel",
    "Ordinal",
    "Output",
    "Ranking",
    "Regression",
    "Span",
    "Sum",
    "Tokens",
    "Uncertainty",
    "choose",
    "collate",
    "exits",
    "leave_early",
    "pooled",
    "read_head",
    "register_head",
]
