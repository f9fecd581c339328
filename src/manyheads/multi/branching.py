"""Trunks that branch by a plan: parallel realities, where tasks part by what their models see, gradients by task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.core.check import OptionError
from manyheads.core.linkage import agglomerate
from manyheads.multi.head import Head, read_head
from manyheads.multi.model import MultiHead
from manyheads.multi.tree import named

Plan = list[tuple[str, list[list[str]]]]
"""Splits in order: behind which submodule, into which groups of heads."""


def realities(
    trunk: nn.Module | str, name: str, head: Head | str, at: str | Sequence[str], *, ways: int = 2, **options: Any
) -> MultiHead:
    """A trunk that splits `ways` ways behind each of L submodules and never merges: ways^L heads of one target.

    Heads are `name/0`, `name/1`, …, by branches from the first split on; each is the plain model of its path
    (`extract`). The loss is the sum over heads, so modules that more of them share get more of it. Branches draw
    weights of their own.

    Args:
        at: submodules in the order in which they run; children read one output. options: of `MultiHead`.

    ASSUMED: both children of a split read the same activation, and losses are summed.

    Source: ANDHRA, arXiv 2411.19213.
    """
    at = named(at)
    if ways < 1 or not at:
        raise OptionError(f"ways={ways} behind {at}; at least 1 way behind one submodule")
    one = read_head(head)
    one = replace(one, target=name if one.target is None else one.target)
    count = ways ** len(at)
    names = [f"{name}/{number}" for number in range(count)]
    model = MultiHead(trunk, dict.fromkeys(names, one), **options)
    if ways == 1:
        return model
    size = count
    for place in at:
        for start in range(0, count, size):
            step = size // ways
            model.split(place, [names[i : i + step] for i in range(start, start + size, step)], fresh=True)
        size //= ways
    return model


def vote(classes: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
    """`[B]`: the class that most heads say, of those said equally often the lowest. classes: `[B]` of each head."""
    if not len(classes):
        raise ValueError("no head votes")
    said = torch.stack([*classes.values()] if isinstance(classes, Mapping) else [*classes])
    return said.mode(0).values


def grow(model: MultiHead, plan: Sequence[tuple[str, Sequence[Sequence[str]]]]) -> MultiHead:
    """Split by a plan, in order; the first group of each keeps the modules that are there."""
    for at, groups in plan:
        model.split(at, groups)
    return model


@torch.no_grad()
def alike(models: Mapping[str, nn.Module], inputs: Sequence[Any], at: Sequence[str]) -> Tensor:
    """How alike the features of K models are behind L submodules, `[L, K, K]` in [0, 1]: linear CKA.

    ‖X_iᵀ X_j‖² / (‖X_iᵀ X_i‖ ‖X_jᵀ X_j‖), X the centred features of all rows of all batches.

    Args:
        models: a trunk by task, all of one architecture, in evaluation mode. inputs: batches, each a tensor.
    """
    seen: dict[tuple[int, str], list[Tensor]] = {}

    def keep(number: int, place: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            seen.setdefault((number, place), []).append(first.flatten(1).double())

        return hook

    handles = [
        model.get_submodule(place).register_forward_hook(keep(number, place))
        for number, model in enumerate(models.values())
        for place in at
    ]
    try:
        for batch in inputs:
            for model in models.values():
                model(batch)
    finally:
        for handle in handles:
            handle.remove()
    found = torch.empty(len(at), len(models), len(models), dtype=torch.float64)
    for layer, place in enumerate(at):
        kernels = []
        for number in range(len(models)):
            x = torch.cat(seen[number, place])
            x = x - x.mean(0)
            kernels.append((x @ x.T).flatten())  # ‖Xᵀ Y‖² is the inner product of X Xᵀ and Y Yᵀ
        unit = nn.functional.normalize(torch.stack(kernels), dim=-1)
        found[layer] = unit @ unit.T
    return found


def where_to_branch(alike: Tensor, names: Sequence[str], at: Sequence[str], *, least: float = 0.8) -> Plan:
    """A plan: tasks share a submodule as long as the features of any two of them are alike enough behind it.

    Of each group it is asked submodule by submodule; where some pair is less alike than `least`, the group falls into
    groups without such a pair (of pairs the most alike are joined first), and they part in front of that submodule.

    Args:
        alike: `[L, K, K]`. names: of the K heads. at: the L submodules, in the order in which they run.

    ASSUMED: the paper searches by representation similarity and gives no rule; its code takes the plan as given.

    Source: CerberusDet, arXiv 2407.12632.
    """
    if tuple(alike.shape) != (len(at), len(names), len(names)):
        raise ValueError(f"alike is {list(alike.shape)}, not [{len(at)} submodules, {len(names)} heads, {len(names)}]")
    plan: Plan = []
    groups = [list(range(len(names)))]
    for layer in range(len(at)):
        before = "" if layer == 0 else at[layer - 1]
        parted = []
        for group in groups:
            parts = _parts(alike[layer], group, least)
            if len(parts) > 1:
                plan.append((before, [[names[each] for each in part] for part in parts]))
            parted += parts
        groups = parted
    return plan


def _parts(alike: Tensor, group: list[int], least: float) -> list[list[int]]:
    """Complete linkage."""
    first = agglomerate(-alike[group][:, group], 1, "complete", within=-least).tolist()
    return [[each for each, at in zip(group, first, strict=True) if at == part] for part in sorted({*first})]


def mean_gradients(
    model: MultiHead, heads: str | Sequence[str], *, clip: float | None = 10.0, clip_first: bool = False
) -> float:
    """After backward of these heads' losses: each gradient of the trunk by how many of them it serves; the norm.

    Modules that several heads share get the mean of their gradients, heads the plain one. Heads that were skipped in
    this step are not counted.

    Args:
        clip: the largest norm of all gradients. clip_first: clip the sums, as the authors' code does, where the bound
            depends on the number of tasks.

    Source: CerberusDet, arXiv 2407.12632.
    """
    served: dict[str, int] = {}
    for name in named(heads):
        for key in model.serving(name):
            served[key] = served.get(key, 0) + 1
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))) if clip_first else 0.0
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            parameter.grad /= max(1, served.get(key, 1))
    return norm if clip_first else float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")))
