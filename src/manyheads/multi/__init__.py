"""One trunk, many output heads: labels that are missing, losses in balance, several guesses, early exits.

>>> model = mh.multi.MultiHead(trunk, {"age": mh.multi.Regression(), "kind": "classification(classes=3)"}, width=64)
>>> model(x, targets={"age": age, "kind": kind}).loss.backward()

`Head` is the contract of a head (`multi/head.py`), `multi/heads` has a file for each kind.
"""

from manyheads.multi import environments
from manyheads.multi.balance import Aggregated, Sum, Uncertainty
from manyheads.multi.best_of import averages, best_output
from manyheads.multi.between import Between, read_between, register_between
from manyheads.multi.betweens import ATINet, Lasso, MedusaUFL, MMoE
from manyheads.multi.betweens.mmoe import diversity
from manyheads.multi.branching import alike, grow, mean_gradients, realities, vote, where_to_branch
from manyheads.multi.calibration import calibration, coverage, reliability
from manyheads.multi.curriculum import Curriculum
from manyheads.multi.data_map import DataMap, memberships
from manyheads.multi.exits import exits, leave_early
from manyheads.multi.flow_map import flow_map_loss, sample_flow
from manyheads.multi.grouping import affinity, cross_errors, error_affinity, grouping
from manyheads.multi.head import MISSING, Head, read_head, register_head
from manyheads.multi.heads import (
    Classification,
    Density,
    Energy,
    Explanation,
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
from manyheads.multi.heads.explanation import Gate, explain, saliency
from manyheads.multi.heads.hypotheses import choose
from manyheads.multi.joined import joined, union
from manyheads.multi.latent_control import (
    LatentControl,
    Trajectory,
    affordable,
    capability_loss,
    decide,
    resolution_loss,
)
from manyheads.multi.model import MultiHead, Output, collate
from manyheads.multi.pool import pooled
from manyheads.multi.priors import PriorHeads
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
    "Curriculum",
    "DataMap",
    "Density",
    "Energy",
    "Explanation",
    "Gate",
    "Gramian",
    "Head",
    "Hypotheses",
    "Lasso",
    "LatentControl",
    "MMoE",
    "Matryoshka",
    "MedusaUFL",
    "MultiHead",
    "MultiLabel",
    "Ordinal",
    "Output",
    "PriorHeads",
    "Ranking",
    "Regression",
    "Span",
    "Sum",
    "Tokens",
    "Trajectory",
    "Uncertainty",
    "affinity",
    "affordable",
    "alike",
    "averages",
    "best_output",
    "calibration",
    "capability_loss",
    "choose",
    "collate",
    "coverage",
    "cross_errors",
    "decide",
    "diversity",
    "element_energies",
    "environments",
    "error_affinity",
    "exits",
    "explain",
    "flow_map_loss",
    "force_losses",
    "forces",
    "grouping",
    "grow",
    "joined",
    "leave_early",
    "load_trunk",
    "mean_gradients",
    "memberships",
    "pooled",
    "read_between",
    "read_head",
    "realities",
    "register_between",
    "register_head",
    "reliability",
    "resolution_loss",
    "saliency",
    "sample_flow",
    "two_step",
    "union",
    "vote",
    "where_to_branch",
]
