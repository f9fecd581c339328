"""Heads of a model merged, regrouped, widened and split."""

from manyheads.edit.grow import grow, split_heads, widen
from manyheads.edit.merge import Errors, Merged, alike_heads, merge_heads
from manyheads.edit.regroup import Regrouped, regroup

__all__ = [
    "Errors", "Merged", "Regrouped", "alike_heads", "grow", "merge_heads", "regroup", "split_heads", "widen",
]  # fmt: skip
