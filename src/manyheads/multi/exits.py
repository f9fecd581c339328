"""Heads at several depths of a trunk that learn one target, and leaving at the first that is sure."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from manyheads.core.check import OptionError, is_number
from manyheads.multi.head import Head, read_head
from manyheads.multi.heads.classification import Classification
from manyheads.multi.heads.tokens import Tokens
from manyheads.multi.model import MultiHead, naming
from manyheads.multi.tree import named


class _Enough(Exception):
    """Every row has left; the rest of the trunk need not run."""


def exits(name: str, head: Head | str, at: str | Sequence[str], *, weight: float | None = None) -> dict[str, Head]:
    """The head `name` at the end, and one as it, `name@module`, at each submodule: deep supervision.

    The loss is L_end + Σ_l weight · L_l; weight: of each early one, by default the head's own over their number.

    Source: Deeply-Supervised Nets (arXiv 1409.5185), MHEX (arXiv 2501.01311).
    """
    last, at = read_head(head), named(at)
    if len(set(at)) != len(at) or not at:
        raise ValueError(f"head {name!r}: early exits at {at}; name different submodules, at least one")
    each = last.weight / len(at) if weight is None else weight
    target = name if last.target is None else last.target
    early = {f"{name}@{tap}": replace(last, features=tap, target=target, weight=each) for tap in at}
    return {**early, name: last}


def leave_early(
    model: MultiHead, *inputs: Any, exits: str | Sequence[str], confidence: float, mask: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Classes `[B]` and the exit `[B]` that each row took: the first whose highest probability reaches `confidence`.

    The trunk stops where the last row has left: a batch saves what its hardest row does, a single row all it can.
    exits: names of classification heads, in the order in which the trunk runs what they read; rows that none is sure
    of take the last. confidence: from 0 to 1.
    """
    exits = named(exits)
    if not exits:
        raise ValueError("name at least one exit")
    if not (is_number(confidence) and 0 <= confidence <= 1):
        raise OptionError(f"confidence is a probability, from 0 to 1, not {confidence!r}")
    for name in exits:
        with naming(name):
            if name not in model.heads:
                raise ValueError(f"there is no such head; there are {', '.join(map(repr, model.heads))}")
            if not isinstance(model.heads[name], Classification) or isinstance(model.heads[name], Tokens):
                raise ValueError("it classifies no rows, so how sure it is cannot be told")
    found: list[Any] = []  # highest probabilities and their classes
    ran: list[str] = []

    def look(name: str) -> Any:
        def hook(module: torch.nn.Module, given: Any, output: Any) -> None:
            logits = model.run_alone(name, output, more.get("attention_mask") if mask is None else mask)
            ran.append(name)
            found.append(logits.float().softmax(-1).max(-1))
            sure = torch.stack([top for top, _ in found]).amax(0) >= confidence
            if bool(sure.all()):
                raise _Enough

        return hook

    if len(nodes := {model.node(name) for name in exits}) != 1:
        raise ValueError(f"exits {exits} are in different branches of the trunk, which runs one of them")
    with model.standing(nodes.pop()), torch.no_grad(), ExitStack() as hooks:
        for name in exits:
            place = model.trunk.get_submodule(model.tap(name))
            hooks.callback(place.register_forward_hook(look(name)).remove)
        with suppress(_Enough):
            model.run_trunk(*inputs, mask=mask, **more)
    if not ran or ran != exits[: len(ran)]:
        raise ValueError(f"exits {exits} are not in the order in which the trunk runs them: {ran}")
    tops, classes = (torch.stack(each) for each in zip(*found, strict=True))
    sure = tops >= confidence
    sure[-1] = True
    taken = sure.int().argmax(0)
    return classes.gather(0, taken[None]).squeeze(0), taken
