"""Training that takes a looped model over into one whose loops share their cached rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.core.part import OptionError
from manyheads.stack.stack import Stack


def aligned(
    student: nn.Module, teacher: nn.Module, *args: Any, valid: Tensor | None = None, **given: Any
) -> tuple[Any, Tensor]:
    """A student's output, and how far what its attention gives is from its teacher's, in every layer of every loop.

    >>> melted = Decoder(1000, "gqa", 64, 8, 4, loops=4, melt="melt(transition=0.5)")
    >>> melted.load_state_dict(looped.state_dict(), strict=False)  # all but the gates
    >>> for step, ids in enumerate(batches):          # first: from rows of each loop to shared ones
    ...     melted.stack.on_step(step / steps)
    ...     cross_entropy(melted(ids), ids).backward()
    >>> logits, far = aligned(melted, looped, ids)    # then: beside the model that it was
    >>> (cross_entropy(logits, ids) + 1.0 * far).backward()

    With o `[B, S, D]` the outputs of attention, 1/(N T) Σ_{layer, loop} mean over tokens of ||o - o'||². Gradients are
    the student's alone.

    Args:
        student, teacher: stacks, or models around one, of as many layers that run as often. args, given: of a pass.
        valid: bool `[B, S]`, False on padding, whose outputs do not count.

    The source leaves open whether o is before or after the output projection (here after it), and how tokens are
    averaged.

    Source: arXiv 2605.07721.
    """
    stacks = [_stack(who, model) for who, model in (("student", student), ("teacher", teacher))]
    runs = [len(stack.attentions) for stack in stacks]
    if runs[0] != runs[1] or stacks[0].dim != stacks[1].dim:
        sizes = [f"{run} times a layer of width {stack.dim}" for run, stack in zip(runs, stacks, strict=True)]
        raise OptionError(f"aligned: the student runs {sizes[0]}, the teacher {sizes[1]}; they agree in both")
    with _Outputs(stacks[1]) as theirs, torch.no_grad():
        teacher(*args, **given)
    with _Outputs(stacks[0]) as ours:
        out = student(*args, **given)
    return out, alignment(ours.outputs, theirs.outputs, valid)


def alignment(ours: Sequence[Tensor], theirs: Sequence[Tensor], valid: Tensor | None = None) -> Tensor:
    """The same of outputs `[B, S, D]`, one for each layer of each loop."""
    tokens = torch.stack([(a - b.detach()).square().sum(-1) for a, b in zip(ours, theirs, strict=True)])
    return tokens.mean() if valid is None else tokens[:, valid].mean()


def _stack(who: str, model: nn.Module) -> Stack:
    found = [each for each in model.modules() if isinstance(each, Stack)]
    if len(found) != 1:
        raise OptionError(f"aligned: the {who} is a {type(model).__name__} with {len(found)} stacks of ours, not one")
    return found[0]


class _Outputs:
    """Listens to what a stack's attention layers give in one pass, which may run in chunks."""

    def __init__(self, stack: Stack) -> None:
        self.layers, self.hooks = stack.attentions, ExitStack()
        self.heard: dict[int, list[Tensor]] = {id(layer): [] for layer in self.layers}

    def __enter__(self) -> _Outputs:
        for layer in {id(layer): layer for layer in self.layers}.values():
            heard = self.heard[id(layer)]
            hook = layer.register_forward_hook(lambda module, args, out, heard=heard: heard.append(out))
            self.hooks.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.close()

    @property
    def outputs(self) -> list[Tensor]:
        """`[B, S, D]`, by layer in the order they run. A layer that runs n times was heard n times a chunk."""
        keys = [id(layer) for layer in self.layers]
        return [torch.cat(self.heard[key][keys[:at].count(key) :: keys.count(key)], 1) for at, key in enumerate(keys)]
