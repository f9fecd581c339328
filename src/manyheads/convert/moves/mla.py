"""From grouped-query to latent attention: one latent and one rotary key in place of every head's keys and values.

1. Gauge (exact). Pair p of every key head is a complex number that turns by e^{iθΔ}; any complex matrix that mixes
   the heads' numbers of one frequency commutes with the turning, so slots can be chosen per frequency (`gauge.py`).
2. Which (frequency, slot) components keep turning in the shared rotary key. The others stop, at angle zero or at the
   mean of their rotation, m = E e^{-iθΔ}, a constant factor.
3. Low rank of what stands still, [K ; V] (`low_rank.py`).

Every step has several choices (`methods.Latent`). By default all are made in the metric of the layer's output (see
`manyheads.convert.stats`): slots are principal components over key heads, weighed by how much queries feel each head;
what keeps turning is what matters most over the distances that attention really spans; and the latent is the best one
under the activation metric on the input side and the metric of score and value errors on the output side.

With slots=heads the rotary key is made of each key head's own pairs, side by side; a query is zero beside its own
head's. That is a layer with a rotary key for each key head, at the same cache, and needs no other kernel.

Sources: TransMLA 2025, arXiv 2502.07864 (gauge, removal, folding, balance, joint rank); MHA2MLA 2025, arXiv 2502.14837
(heads, choices of pairs, SVD); CARE 2026, arXiv 2603.17946 (activation metric, ranks by layer).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from manyheads.attention.latent import LatentProject
from manyheads.attention.position.rope import Rope
from manyheads.attention.project.gqa import GQAProject
from manyheads.attention.project.mla import MLA
from manyheads.convert.methods import Keep, Latent, Slots
from manyheads.convert.moves.common import between, like, linear_rows, set_rows
from manyheads.convert.moves.gauge import Gauge, gauge
from manyheads.convert.moves.low_rank import low_rank, spectra
from manyheads.convert.stats import AttentionStats, Pairs
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.seam import SeamAttention


def choose(damage: Tensor, count: int) -> tuple[tuple[int, int], ...]:
    """The `count` (pair, slot) components whose rotation matters most; pass the sum over layers for one choice.

    Fewer where fewer turn at all: partial RoPE leaves channels that have no rotation to keep.
    """
    top = [index for index in damage.flatten().argsort(descending=True).tolist()[:count] if damage.flatten()[index] > 0]
    return tuple(sorted(divmod(index, damage.shape[1]) for index in top))


def chosen(
    attention: SeamAttention, stats: AttentionStats, keep: Keep, slots: Slots, count: int, fold: int = 1
) -> tuple[tuple[int, int], ...]:
    """The (pair, slot) components that a rule keeps turning, `count` in all: of each key head's own pairs, or of the
    first slots of each frequency (the first ones of a fold, in the order of its kept frequencies)."""
    frequencies = int((Pairs.of(attention).index >= 0).sum())
    groups = attention.layout.kv if slots == "heads" else 1
    kept = min(max(1, count // groups), frequencies)
    if keep == "uniform":
        kept = max(n for n in range(1, kept + 1) if frequencies % n == 0)
    if keep == "norm":
        size = stats.sizes[:, :frequencies].view(groups, -1, frequencies).sum(1)
        return tuple(sorted((p, g) for g in range(groups) for p in size[g].argsort(descending=True).tolist()[:kept]))
    step = frequencies // kept if keep == "uniform" else 1
    first = frequencies - kept if keep == "low" else 0
    pairs = range(first, first + kept * step, step)
    if slots == "heads":
        return tuple((pair, g) for pair in pairs for g in range(groups))
    taken = Counter[int]()
    components = []
    for pair in pairs:
        components.append((pair, taken[pair // fold]))
        taken[pair // fold] += 1
    return tuple(components)


DEFAULT = Latent()


@dataclass(frozen=True)
class ToMLA:
    """The move: `gqa` with RoPE to `mla(rank, rope_dim = 2·len(turning), norm=false)`.

    rank: width of the latent; one above the exact one (2·G·d - rope_dim, or the width of x) is clipped. turning:
    (pair, slot) components of the shared rotary key, from `choose` or `chosen`; in a fold of frequencies, the slot is
    one of the fold's and the pair says how it turns. how: the choices of each step; fold: of frequencies, where `how`
    leaves it open. keys: how much of the rank is the key's latent with latents=split, by default half. Biases are
    carried over; parts other than projection and RoPE stay as they are.
    """

    rank: int
    turning: tuple[tuple[int, int], ...]
    how: Latent = DEFAULT
    fold: int | None = None
    keys: int | None = None

    def refusal(self, spec: Spec) -> str | None:
        """Why a layer with this spec cannot be converted, or None."""
        names = [part.name for part in spec.parts]
        if "gqa" not in names or "rope" not in names:
            return f"a latent is made from gqa with rope, not from {spec}"
        if name := between(spec):
            return f"{name} sits between the projection and the rotation, so keys are not linear in a latent"
        return None

    def clipped(self, attention: SeamAttention) -> int:
        """The rank, or the one at which nothing is lost any more."""
        return sum(self.ranks(attention))

    def ranks(self, attention: SeamAttention) -> tuple[int, ...]:
        """The rank of the joint latent, or of the key's and the value's; none above what loses nothing."""
        layout = attention.layout
        biased = "v" in attention.spec.by_stage["project"][0].bias  # type: ignore[attr-defined]
        keys, values = layout.kv * layout.qk_width - 2 * len(self.turning), layout.kv * layout.v_width
        width = layout.dim + biased
        if self.how.latents == "joint":
            return (min(self.rank, keys + values, width),)
        keys, values = min(keys, width), min(values, width)
        key = min(self.rank // 2 if self.keys is None else self.keys, keys)
        value = min(self.rank - key, values)
        return (min(self.rank - value, keys) if self.keys is None else key), value

    def target(self, attention: SeamAttention) -> Spec:
        """The spec of the converted layer."""
        layout, pairs = attention.layout, Pairs.of(attention)
        gqa = attention.spec.by_stage["project"][0]
        rope = cast(Rope, attention.spec.by_stage["position"][0])
        turning = layout.rotary.stop - layout.rotary.start if layout.rotary else 0
        mla = MLA(
            rank=self.clipped(attention),
            rope_dim=2 * len(self.turning),
            nope_dim=layout.qk_width,
            v_dim=layout.v_width,
            norm=False,
            bias="v" in gqa.bias,  # type: ignore[attr-defined]
            out_bias=gqa.bias in ("o", "qkvo", "qvo"),  # type: ignore[attr-defined]
            scale=layout.scale,
        )
        kept = tuple(int(pairs.index[pair]) for pair, _ in self.turning)
        if -1 in kept:
            raise OptionError(f"pair {self.turning[kept.index(-1)][0]} does not turn in {attention.spec}")
        position = dataclasses.replace(rope, pairing="half", fraction=1.0, pairs=kept, of=rope.of or turning)
        others = [part for part in attention.spec.parts if part.stage not in ("project", "position")]
        return Spec((mla, position if kept else Rope(pairing="none"), *others)).resolve(attention.site)

    def __call__(self, attention: SeamAttention, stats: AttentionStats, slots: Gauge | None = None) -> SeamAttention:
        """The converted layer."""
        why = self.refusal(attention.spec)
        if why is not None:
            raise OptionError(why)
        slots = self.gauge(attention, stats) if slots is None else slots
        project, layout, pairs = cast(GQAProject, attention.project), attention.layout, Pairs.of(attention)
        each, width = layout.q // layout.kv, layout.qk_width
        group = torch.arange(layout.q) // each
        wq = linear_rows(project.q_proj).view(layout.q, width, -1)
        fold = slots.fold
        components = self._components(attention, slots)
        p, s = (torch.tensor([one[side] for one in self.turning], dtype=torch.long) for side in (0, 1))
        rope_k = components[p // fold, s]  # [n, D + 1] complex
        felt = slots.mix.unflatten(1, (fold, layout.kv))[p // fold, :, :, s].conj()  # [n, f, G]
        rope_q = torch.einsum("nfh,hnfd->hnd", felt[..., group], pairs.join(wq).unflatten(1, (-1, fold))[:, p // fold])
        content = self._content(attention, slots, components)
        down, up = low_rank(attention, stats, pairs.split(content), self.ranks(attention), self.how)
        keys, values = up.split([layout.kv * width, layout.kv * layout.v_width])
        keys, values = keys.view(layout.kv, width, -1), values.view(layout.kv, layout.v_width, -1)
        up = torch.cat([keys[group], values[group]], 1).flatten(0, 1)
        size = torch.einsum("nd,de,ne->n", rope_k, stats.keys + 0j, rope_k.conj())
        size = size.real.clamp_min(1e-12).sqrt()[:, None]
        rope_k, rope_q = rope_k / size, rope_q * size
        new = like(attention, self.target(attention))
        q = torch.cat([wq, rope_q.real, rope_q.imag], 1).flatten(0, 1)
        made = cast(LatentProject, new.project)
        set_rows(made.q_proj, q)
        set_rows(made.kv_a_proj, torch.cat([down, rope_k.real, rope_k.imag]))
        set_rows(made.kv_b_proj, up)
        made.o_proj.load_state_dict(project.o_proj.state_dict())
        for stage in ("selects", "attends", "gates"):
            getattr(new, stage).load_state_dict(getattr(attention, stage).state_dict())
        return new

    def gauge(self, attention: SeamAttention, stats: AttentionStats) -> Gauge:
        """The slots that the turning components are of."""
        found = gauge(attention, stats, slots=self.how.slots, fold=(self.fold or self.how.fold or 1))
        if self.how.stopped == "mean":
            return found
        return dataclasses.replace(found, mean=Pairs.of(attention).gain.to(found.mean.dtype).expand_as(found.mean))

    def spectra(self, attention: SeamAttention, stats: AttentionStats) -> list[Tensor]:
        """What each direction of the latent, or of the two, is worth to this layer."""
        slots = self.gauge(attention, stats)
        content = self._content(attention, slots, self._components(attention, slots))
        return spectra(attention, stats, Pairs.of(attention).split(content), self.how)

    def _components(self, attention: SeamAttention, slots: Gauge) -> Tensor:
        """All slots as complex rows `[P/f, f·G, D + 1]`."""
        layout, project = attention.layout, cast(GQAProject, attention.project)
        rows = Pairs.of(attention).join(linear_rows(project.k_proj).view(layout.kv, layout.qk_width, -1))
        return slots.inverse @ rows.transpose(0, 1).unflatten(0, (-1, slots.fold)).flatten(1, 2)

    def _content(self, attention: SeamAttention, slots: Gauge, components: Tensor) -> Tensor:
        """Key heads without what goes on turning, complex rows `[G, P, D + 1]`."""
        still = components.new_ones(components.shape[:2])
        for pair, slot in self.turning:
            still[pair // slots.fold, slot] = 0
        left = torch.einsum("pgs,ps,psd->pgd", slots.mix, still, components)
        left = left.unflatten(1, (slots.fold, -1)).flatten(0, 1).transpose(0, 1)
        return slots.mean[..., None] * left
