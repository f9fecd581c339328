"""From grouped-query to latent attention: one latent and one rotary key in place of every head's keys and values.

The steps, each in the metric of the layer's output (see `manyheads.convert.stats`):

1. Gauge (exact). Pair p of every key head is a complex number that turns by e^{iθΔ}; any complex matrix that mixes
   the heads' numbers of one frequency commutes with the turning, so slots can be chosen per frequency: the principal
   components over key heads, weighed by how much queries feel each head.
2. Which (frequency, slot) components keep turning in the shared rotary key: those whose rotation, over the distances
   that attention really spans, matters most. The others stop turning and take the mean of their rotation,
   m = E e^{-iθΔ}, as a constant factor.
3. Joint low rank of what stands still, [K ; V]: the best rank-r latent under the activation metric on the input side
   and the metric of score and value errors on the output side.

RoRoPE is step 1 with real matrices and no weighing, and TransMLA's step 2 keeps a fixed stride of frequencies.

Sources: TransMLA 2025, arXiv 2502.07864 (gauge, removal, joint rank); CARE 2026, arXiv 2603.17946 (activation metric).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from manyheads.attention.latent import LatentProject
from manyheads.attention.position.rope import Rope
from manyheads.attention.project.gqa import GQAProject
from manyheads.attention.project.mla import MLA
from manyheads.convert.moves.common import like, linear_rows, set_rows
from manyheads.convert.moves.gauge import Gauge, gauge
from manyheads.convert.stats import AttentionStats, Pairs, power
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.seam import SeamAttention


def choose(damage: Tensor, count: int) -> tuple[tuple[int, int], ...]:
    """The `count` (pair, slot) components whose rotation matters most; pass the sum over layers for one choice.

    Fewer where fewer turn at all: partial RoPE leaves channels that have no rotation to keep.
    """
    top = [index for index in damage.flatten().argsort(descending=True).tolist()[:count] if damage.flatten()[index] > 0]
    return tuple(sorted(divmod(index, damage.shape[1]) for index in top))


@dataclass(frozen=True)
class ToMLA:
    """The move: `gqa` with RoPE to `mla(rank, rope_dim = 2·len(turning), norm=false)`.

    rank: width of the latent; one above the exact one (2·G·d - rope_dim, or the width of x) is clipped. turning:
    components of the shared rotary key, from `choose`. Biases are carried over; parts other than projection and RoPE
    stay as they are.
    """

    rank: int
    turning: tuple[tuple[int, int], ...]

    def refusal(self, spec: Spec) -> str | None:
        """Why a layer with this spec cannot be converted, or None."""
        names = [part.name for part in spec.parts]
        if "gqa" not in names or "rope" not in names:
            return f"a latent is made from gqa with rope, not from {spec}"
        between = [part.name for part in spec.parts if part.stage == "transform"]
        if between:
            return f"{between[0]} sits between the projection and the rotation, so keys are not linear in a latent"
        return None

    def clipped(self, attention: SeamAttention) -> int:
        """The rank, or the one at which nothing is lost any more."""
        layout = attention.layout
        biased = "qkv" in attention.spec.by_stage["project"][0].bias  # type: ignore[attr-defined]
        exact = layout.kv * (layout.qk_width + layout.v_width) - 2 * len(self.turning)
        return min(self.rank, exact, layout.dim + biased)

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
            bias="qkv" in gqa.bias,  # type: ignore[attr-defined]
            out_bias=gqa.bias in ("o", "qkvo"),  # type: ignore[attr-defined]
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
        slots = gauge(attention, stats) if slots is None else slots
        project, layout, pairs = cast(GQAProject, attention.project), attention.layout, Pairs.of(attention)
        each, width = layout.q // layout.kv, layout.qk_width
        group = torch.arange(layout.q) // each
        wq = linear_rows(project.q_proj).view(layout.q, width, -1)
        slot_rows = slots.inverse @ pairs.join(linear_rows(project.k_proj).view(layout.kv, width, -1)).transpose(0, 1)
        p, s = (torch.tensor([one[side] for one in self.turning], dtype=torch.long) for side in (0, 1))
        rope_k = slot_rows[p, s]  # [n, D + 1] complex
        felt = slots.mix[p[:, None], group[None], s[:, None]].T.conj()  # [H, n]
        rope_q = felt[..., None] * pairs.join(wq)[:, p]
        still = torch.ones(slots.damage.shape, dtype=slot_rows.dtype)
        still[p, s] = 0
        content = torch.einsum("gp,pgs,ps,psd->gpd", slots.mean, slots.mix, still, slot_rows)
        down, up = self._low_rank(attention, stats, pairs.split(content), group)
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

    def _low_rank(
        self, attention: SeamAttention, stats: AttentionStats, content: Tensor, group: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Step 3: down `[rank, D + 1]` with latents of unit size, and up `[H·(d + v), rank]`."""
        layout, project = attention.layout, cast(GQAProject, attention.project)
        each, g, d, v = layout.q // layout.kv, layout.kv, layout.qk_width, layout.v_width
        rows = torch.cat([content.flatten(0, 1), linear_rows(project.v_proj)])
        query = (stats.query.double() * layout.scale**2).view(g, each, d, d).sum(1)
        o_proj = torch.einsum(
            "fe,ehd->fhd", stats.metric.double(), project.o_proj.weight.double().view(layout.dim, layout.q, v)
        )
        value = torch.einsum("fhd,fhe,h->hde", o_proj, o_proj, stats.value.double()).view(g, each, v, v).sum(1)
        outer = torch.block_diag(*(power(block, 0.5) for block in (*query, *value)))
        seen = outer @ rows
        _, basis = torch.linalg.eigh(seen @ stats.rows @ seen.T)
        basis = basis.flip(-1)[:, : self.clipped(attention)]
        down, up = basis.T @ seen, torch.linalg.solve(outer, basis)
        size = torch.einsum("rd,de,re->r", down, stats.rows, down).clamp_min(1e-12).sqrt()
        down, up = down / size[:, None], up * size
        keys, values = up[: g * d].view(g, d, -1), up[g * d :].view(g, v, -1)
        return down, torch.cat([keys[group], values[group]], 1).flatten(0, 1)
