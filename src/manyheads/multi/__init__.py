"""One trunk, many output heads: labels that are missing, losses in balance, several guesses, early exits.

>>> model = mh.multi.MultiHead(trunk, {"age": mh.multi.Regression(), "kind": "classification(classes=3)"}, width=64)
>>> model(x, targets={"age": age, "kind": kind}).loss.backward()

`Head` is the contract of a head (`multi/head.py`), `multi/heads` has a file for each kind.
"""

from manyheads.multi.balance import Aggregated, Sum, Uncertainty
from manyheads.multi.between import Between, read_between, register_between
from manyheads.multi.betweens import ATINet, Lasso, MedusaUFL, MMoE
from manyheads.multi.betweens.mmoe import diversity
from manyheads.multi.branching import alike, grow, mean_gradients, realities, vote, where_to_branch
from manyheads.multi.calibration import calibration, coverage, reliability
from manyheads.multi.exits import exits, leave_early
from manyheads.multi.head import MISSING, Head, read_head, register_head
from manyheads.multi.heads import (
    Classification,
    Density,
    Energy,
    Gramian,
    Hypotheses,
    Matryoshka,
    MultiLabel,
    Ordinal,
    Ranking,
    Regression,
    Span,
    Tokens,
)
from manyheads.multi.heads.energy import element_energies, force_losses, forces
from manyheads.multi.heads.hypotheses import choose
from manyheads.multi.joined import joined, union
from manyheads.multi.model import MultiHead, Output, collate
from manyheads.multi.pool import pooled
from manyheads.multi.rates import Averaged, Balanced
from manyheads.multi.trunk import load_trunk
from manyheads.multi.two_step import two_step

__all__ = [
    "MISSING",
    "ATINet",
    "Aggregated",
    "Averaged",
    "Balanced",
    "Between",
    "Classification",
    "Density",
    "Energy",
    "Gramian",
    "Head",
    "Hypotheses",
    "Lasso",
    "MMoE",
    "Matryoshka",
    "MedusaUFL",
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
    "alike",
    "calibration",
    "choose",
    "collate",
    "coverage",
    "diversity",
    "element_energies",
    "exits",
    "force_losses",
    "forces",
    "grow",
    "joined",
    "leave_early",
    "load_trunk",
    "mean_gradients",
    "pooled",
    "read_between",
    "read_head",
    "realities",
    "register_between",
    "register_head",
    "reliability",
    "two_step",
    "union",
    "vote",
    "where_to_branch",
]
