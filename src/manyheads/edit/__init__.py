"""Trained models with other heads: pruned, masked, merged, regrouped, grown, widened and split."""

from manyheads.edit.groups import keep_of
from manyheads.edit.grow import grow, split_heads, widen
from manyheads.edit.mask import load_heads, mask, save_heads
from manyheads.edit.merge import Errors, Merged, alike_heads, merge_heads
from manyheads.edit.prune import prune
from manyheads.edit.regroup import Regrouped, regroup
from manyheads.edit.select import Choice, Step, select
from manyheads.edit.slices import EditError, Groups, Kept, groups_of, sliced

__all__ = [
    "Choice", "EditError", "Errors", "Groups", "Kept", "Merged", "Regrouped", "Step", "alike_heads", "groups_of",
    "grow", "keep_of", "load_heads", "mask", "merge_heads", "prune", "regroup", "save_heads", "select", "sliced",
    "split_heads", "widen",
]  # fmt: skip
