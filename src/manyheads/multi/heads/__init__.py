"""The kinds of head, a file each."""

from manyheads.multi.heads.classification import Classification
from manyheads.multi.heads.density import Density
from manyheads.multi.heads.energy import Energy
from manyheads.multi.heads.explanation import Explanation
from manyheads.multi.heads.gramian import Gramian
from manyheads.multi.heads.hypotheses import Hypotheses
from manyheads.multi.heads.matryoshka import Matryoshka
from manyheads.multi.heads.multi_label import MultiLabel
from manyheads.multi.heads.ordinal import Ordinal
from manyheads.multi.heads.ranking import Ranking
from manyheads.multi.heads.regression import Regression
from manyheads.multi.heads.span import Span
from manyheads.multi.heads.tokens import Tokens

__all__ = [
    "Classification",
    "Density",
    "Energy",
    "Explanation",
    "Gramian",
    "Hypotheses",
    "Matryoshka",
    "MultiLabel",
    "Ordinal",
    "Ranking",
    "Regression",
    "Span",
    "Tokens",
]
