"""Preference pairs in one row: the prompt once, then its answers, each of which sees the prompt and itself.

Row of a prompt p_0 … p_{P-1} and answers a, b, …:

    p_0 … p_{P-1}   a_0 … a_{A-1}   p_{P-1}   b_0 … b_{B-1}   p_{P-1} …

Every answer but the first begins with a copy of the prompt's last token, whose logits are for the answer's first token.
A query i sees a key j of its own pair if j <= i and j is of the prompt or of i's answer; where an answer has a copy, it
does not see the original. Positions go on from the prompt in every answer, so that each gets what it would get alone,
and so does its gradient. P + A + B + 1 tokens are computed in place of 2P + A + B.

Source: Wang and Hegde 2024, arXiv 2410.20305.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.core.mask import Axis, Mask, causal, cols_of, rows_of

IGNORED = -100


@dataclass(frozen=True, eq=False)
class Branches:
    """A rule: keys of the prompt (branch 0) and of the query's own branch; hidden keys only from branch 0 and 1.

    branch `[B, N]`; hidden bool `[B, N]`, the last prompt tokens that later branches have copies of.
    """

    branch: Tensor
    hidden: Tensor

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        query, key = rows_of(_take(self.branch, q)), cols_of(_take(self.branch, k))
        return (key == query) | ((key == 0) & ~(cols_of(_take(self.hidden, k)) & (query > 1)))


def _take(t: Tensor, axis: Axis) -> Tensor:
    return t if axis.rows is None else t.gather(1, axis.rows.expand(len(t), -1))


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows of prompts with their answers, `[B, N]` each.

    labels: the token that a place predicts, -100 where none counts. pair: number of the pair, -1 on padding. branch:
    0 in the prompt, 1, 2, … in its answers. hidden: see `Branches`. pairs, answers: how many there are.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    pair: Tensor
    branch: Tensor
    hidden: Tensor
    pairs: int
    answers: int

    @property
    def mask(self) -> Mask:
        """For our layers. Time is position, so that windows reach as far back as they would in the answer alone."""
        axis = Axis(
            self.input_ids.shape[1], None, None, self.position_ids, self.pair, self.pair >= 0,
            device=self.input_ids.device,
        )  # fmt: skip
        return Mask(axis, axis, (causal, Branches(self.branch, self.hidden)))

    @property
    def attention_mask(self) -> Tensor:
        """bool `[B, 1, N, N]` for any transformers model with `sdpa`; padding sees itself, so that no row is empty."""
        return self.mask.tile() | torch.eye(self.input_ids.shape[1], dtype=torch.bool, device=self.input_ids.device)

    def inputs(self) -> dict[str, Tensor]:
        """Arguments of a transformers causal language model."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "attention_mask": self.attention_mask}

    def to(self, device: torch.device | str) -> Packed:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def log_probs(self, logits: Tensor) -> Tensor:
        """Of each answer of each pair, `[pairs, answers]`, from logits `[B, N, V]`."""
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        counts = self.labels != IGNORED
        each = -F.cross_entropy(wide.transpose(1, 2), self.labels, ignore_index=IGNORED, reduction="none")
        # a label of the first answer may stand on the prompt's last token, which is of branch 0
        place = self.pair * self.answers + self.branch.clamp_min(1) - 1
        total = each.new_zeros(self.pairs * self.answers)
        return total.index_add(0, place[counts], each[counts]).view(self.pairs, self.answers)


def pack(
    groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], *, length: int | None = None, multiple: int = 1,
    pad: int = 0,
) -> Packed:  # fmt: skip
    """Prompts with their answers, as token ids, in rows.

    Args:
        groups: (prompt, answers), the same number of answers for each.
        length: put several groups in a row of so many tokens, longest first; by default a row for each.
        multiple: pad rows to a multiple of so many tokens. pad: the token of padding.

    Raises:
        ValueError: no groups, an empty prompt, uneven numbers of answers, or a group longer than `length`.
    """
    if not groups:
        raise ValueError("there are no pairs to pack")
    answers = len(groups[0][1])
    for number, (prompt, of) in enumerate(groups, 1):
        if not prompt:
            raise ValueError(f"pair {number} has an empty prompt, so nothing predicts the first token of its answers")
        if len(of) != answers or not of:
            raise ValueError(f"pair {number} has {len(of)} answers; the first has {answers}")
    laid = [_lay(index, *group) for index, group in enumerate(groups)]
    sizes = [len(one["input_ids"]) for one in laid]
    if length is not None and max(sizes) > length:
        raise ValueError(f"pair {sizes.index(max(sizes)) + 1} has {max(sizes)} tokens; a row has {length}")
    rows = [[index] for index in range(len(laid))] if length is None else _first_fit(sizes, length)
    widest = max(sum(sizes[index] for index in row) for row in rows)
    widest = -(-widest // multiple) * multiple
    empty = {"input_ids": pad, "position_ids": 1, "labels": IGNORED, "pair": -1, "branch": 0, "hidden": 0}

    def column(name: str) -> Tensor:
        joined = [[value for index in row for value in laid[index][name]] for row in rows]
        return torch.tensor([row + [empty[name]] * (widest - len(row)) for row in joined])

    columns = {name: column(name) for name in empty}
    return Packed(**columns | {"hidden": columns["hidden"].bool()}, pairs=len(groups), answers=answers)


def _lay(index: int, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """The columns of one group."""
    ids, positions, branch = [*prompt], [*range(len(prompt))], [0] * len(prompt)
    labels = [IGNORED] * (len(prompt) - 1)
    for number, answer in enumerate(answers, 1):
        copy = [] if number == 1 else [prompt[-1]]
        ids += [*copy, *answer]
        positions += range(len(prompt) - len(copy), len(prompt) + len(answer))
        branch += [number] * (len(copy) + len(answer))
        labels += [*answer, IGNORED]
    hidden = [0] * len(ids)
    hidden[len(prompt) - 1] = 1
    return {
        "input_ids": ids, "position_ids": positions, "labels": labels, "pair": [index] * len(ids), "branch": branch,
        "hidden": hidden,
    }  # fmt: skip


def _first_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """First-fit decreasing: which groups each row holds."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        row = next((row for row, left in enumerate(room) if left >= sizes[index]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(length)
        rows[row].append(index)
        room[row] -= sizes[index]
    return rows


@dataclass(frozen=True)
class PairCollator:
    """`pack` as the collator of a data loader, of examples with token ids `prompt`, `chosen` and `rejected`."""

    length: int | None = None
    multiple: int = 1
    pad: int = 0

    def __call__(self, examples: Sequence[Mapping[str, Sequence[int]]]) -> Packed:
        groups = [(each["prompt"], (each["chosen"], each["rejected"])) for each in examples]
        return pack(groups, length=self.length, multiple=self.multiple, pad=self.pad)


def check(model: nn.Module) -> None:
    """Raise where answers in one row would hear of each other: what runs over the row in order, not by the mask."""
    for layer in model.modules():
        if not isinstance(layer, Attention):
            continue
        reason = next((f"{type(piece).__name__} keeps a state" for piece in layer._pieces() if piece.states), None)
        broken = [part.name for part in layer.spec.parts if part.breaks & {"token keys", "final rows"}]
        if reason is None and broken:
            reason = f"{broken[0]} reads neighbouring tokens"
        if reason is None and layer.ruling:
            reason = "its window would count places in the row; run a Decoder with mask=packed.mask"
        if reason is not None:
            raise ValueError(f"answers cannot share a row at layer {layer.site.layer} ({layer.spec}): {reason}")


def dpo_loss(policy: Tensor, reference: Tensor, beta: float = 0.1) -> Tensor:
    """Mean of -log σ(β ((lp_chosen - ref_chosen) - (lp_rejected - ref_rejected))), from `[pairs, 2]` each.

    Source: Rafailov et al. 2023, arXiv 2305.18290.
    """
    for name, given in (("policy", policy), ("reference", reference)):
        if given.ndim != 2 or given.shape[1] != 2:
            raise ValueError(f"{name} has shape {[*given.shape]}; log-probabilities are [pairs, 2], chosen first")
    margin = policy - reference
    return -F.logsigmoid(beta * (margin[:, 0] - margin[:, 1])).mean()


def dpo_step(model: Any, packed: Packed, reference: Tensor, beta: float = 0.1) -> Tensor:
    """The loss of a batch; reference: `log_probs` of the model it started from, without gradient."""
    check(model)
    return dpo_loss(packed.log_probs(model(**packed.inputs(), use_cache=False).logits), reference, beta)
