"""The first two of MOHAWK's stages, for one layer: recurrent heads learn their teachers' maps, then the layer's output.

0. The sizes of C and δ, which the sources leave open, by least squares of the maps.
1. Maps. The mean over heads and sequences of ‖M^T - M^S‖_F: M^T a replaced head's attention weights, M^S what the head
   in its place multiplies values with (`DiscreteHeads.matrix`). What makes no map (v, the gate, W_O) stays.
2. Output. The mean over tokens of ‖y^T - y^S‖₂; the recurrent heads and their slice of W_O learn.

Neither norm is squared. In both the layer gets the teacher's inputs, layers are independent, and kept heads do not
learn. The third stage, all weights end to end towards the teacher's predictions, is `manyheads.convert.distil`.

Source: Bick et al. 2024, arXiv 2408.10189; for some heads of a layer: arXiv 2602.11374.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyheads.attention.discrete import DiscreteHeads
from manyheads.convert.moves.retrieval import recurrent
from manyheads.convert.relations import projected
from manyheads.convert.stats import positions_of
from manyheads.convert.training import rate
from manyheads.core.mask import Axis
from manyheads.core.part import OptionError
from manyheads.stack.seam import SeamAttention

EPS = 1e-12
"""Of a squared norm: the root has no gradient at zero."""


class Matched(NamedTuple):
    """Loss of each stage on its first and its last batch."""

    maps: tuple[float, float]
    outputs: tuple[float, float]


@dataclass(frozen=True)
class Mohawk:
    """Options of the two stages.

    steps of each, of about `batch` tokens (whole windows). rate: Adam's, relative to each weight's own size, warmed up
    over a tenth of the steps, then a cosine to a tenth.
    """

    steps: int = 48
    batch: int = 2048
    rate: float = 0.01
    seed: int = 0
    bfloat16: bool = False

    def __call__(
        self, student: SeamAttention, teacher: SeamAttention, kept: Sequence[int], x: Tensor, y: Tensor,
        positions: Tensor | None = None,
    ) -> Matched:  # fmt: skip
        """Train a layer in place.

        Args:
            student: made by `ToRetrieval(kept)`. teacher: the layer that it was made from.
            x: `[N, T, D]`, the teacher's inputs; y: its outputs. positions: `[N, T]`; None: 0, 1, ….
        """
        heads, count = recurrent(student), teacher.layout.q
        replaced = [head for head in range(count) if head not in kept]
        if heads.heads != len(replaced):
            raise OptionError(f"{heads.heads} recurrent heads, where {len(replaced)} of {count} were replaced")
        where = positions_of(x, positions)
        held = student.requires_grad_(False)
        some = slice(max(1, self.batch // x.shape[1]))
        if self.steps:
            fit_size(heads, attention_maps(teacher, x[some], where[some], replaced), x[some])
        with torch.enable_grad():
            maps = self._train(
                [heads.in_proj, heads.conv, heads.skip],
                x,
                lambda rows: map_loss(heads, attention_maps(teacher, x[rows], where[rows], replaced), x[rows]),
            )
            weight = student.project.o_proj.weight
            own = slice(-len(replaced) * heads.width, None)
            outputs = self._train(
                [heads, weight],
                x,
                lambda rows: output_loss(held(x[rows], position_ids=where[rows])[0], y[rows]),
                lambda: None if weight.grad is None else weight.grad[:, : own.start].zero_(),
            )
        student.requires_grad_(True)
        return Matched(maps, outputs)

    def _train(
        self, trained: Sequence[nn.Module | Tensor], x: Tensor, loss_of: Callable[[Tensor], Tensor],
        mask: Callable[[], object] = lambda: None,
    ) -> tuple[float, float]:  # fmt: skip
        weights = [w for each in trained for w in ([each] if isinstance(each, Tensor) else each.parameters())]
        groups = [{"params": [w], "size": w.detach().float().pow(2).mean().sqrt().item() or 0.1} for w in weights]
        for weight in weights:
            weight.requires_grad_(True)
        adam = torch.optim.Adam(groups, lr=self.rate, betas=(0.9, 0.95), eps=1e-12)
        generator, count = torch.Generator().manual_seed(self.seed), max(1, min(len(x), self.batch // x.shape[1]))
        losses: list[float] = []
        for step in range(self.steps):
            rows = torch.randperm(len(x), generator=generator)[:count].to(x.device)
            for group in adam.param_groups:
                group["lr"] = group["size"] * rate(step, self.steps, self.rate, self.steps // 10)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bfloat16):
                loss = loss_of(rows)
            adam.zero_grad()
            loss.backward()
            mask()
            adam.step()
            losses.append(loss.item())
        for weight in weights:
            weight.requires_grad_(False)
            weight.grad = None
        return (losses[0], losses[-1]) if losses else (float("nan"), float("nan"))


@torch.no_grad()
def fit_size(heads: DiscreteHeads, maps: Tensor, x: Tensor) -> None:
    """Give C and δ of each head the sizes at which Σ (M^T - M^S)² is least, of maps `[B, n, T, T]` on x `[B, T, D]`.

    Products of queries and keys are larger than weights that sum to one, and rates that go by a weight's size would
    take long to make them smaller.
    """
    one = torch.eye(x.shape[1], dtype=maps.dtype, device=x.device)
    ours = heads.matrix(x) - heads.skip * one
    dot = lambda a, b: (a * b).sum((0, 2, 3)).double()
    one = one.expand_as(ours)
    gram = torch.stack([dot(ours, ours), dot(ours, one), dot(one, ours), dot(one, one)], -1).unflatten(-1, (2, 2))
    aimed = torch.stack([dot(ours, maps), dot(one, maps)], -1)[..., None]
    size, skip = (torch.linalg.pinv(gram) @ aimed)[..., 0].to(heads.skip.dtype).unbind(-1)
    for rows in heads.in_proj.parameters():
        rows.unflatten(0, (heads.heads, -1))[:, : heads.state].mul_(size.view(-1, *[1] * rows.ndim))
    assert heads.conv.bias is not None
    heads.conv.bias[..., : heads.state] *= size[:, None, None]
    heads.skip.copy_(skip[:, None, None])


def map_loss(heads: DiscreteHeads, maps: Tensor, x: Tensor) -> Tensor:
    """The mean over batch and heads of ‖M^T - M^S‖_F, of maps M^T `[B, n, T, T]` and inputs x `[B, T, D]`."""
    apart = maps - heads.matrix(x)
    return (apart.pow(2).sum((-2, -1)) + EPS).sqrt().mean()


def output_loss(ours: Tensor, theirs: Tensor) -> Tensor:
    """The mean over tokens of ‖y^T - y^S‖₂, `[B, T, D]` each."""
    return ((theirs - ours).pow(2).sum(-1) + EPS).sqrt().mean()


@torch.no_grad()
def attention_maps(attention: SeamAttention, x: Tensor, positions: Tensor, heads: Sequence[int]) -> Tensor:
    """Softmax weights `[B, n, T, T]` of some heads of a `gqa` layer without transforms, on its inputs x `[B, T, D]`."""
    layout, axis = attention.layout, Axis(x.shape[1], 0, positions, device=x.device)
    found = projected(attention, x)
    q, k = (each.unflatten(-1, (-1, layout.qk_width)).transpose(1, 2) for each in (found.q, found.k))
    q, k = attention._turn(q, "q", axis)[:, [*heads]], attention._turn(k, "k", axis)
    k = k[:, [head * layout.kv // layout.q for head in heads]]
    whole = Axis(x.shape[1], 0, device=x.device)
    seen = attention._mask(attention._flow(x[:1], whole, None, None, None, None), whole, whole, None).tile()
    scores = (q @ k.mT * layout.scale).to(torch.promote_types(x.dtype, torch.float32))
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)
