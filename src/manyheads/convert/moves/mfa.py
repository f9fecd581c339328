"""From grouped-query attention to one wide key and value head that all query heads read.

- Keys. Slots of all key heads (`gauge.py`) lie side by side in one head of width C: as many (frequency, slot)
  components as fit, those first that scores feel most, each turning as it did.
- Values. The C directions of all heads' values that the output feels most; with key_reuse none: v_g ≈ B_g k, the linear
  regression of each head's values on the whole wide key before rotation (α = 0, so the value is the key itself).
- W_O reads them back. With C = G·d keys lose nothing, and with key_reuse that is half of the source's cache.
- Queries go through a common low rank, which loses nothing from the rank of all query heads together on.

The paper trains such layers from scratch; this conversion is the library's own.

Source of the layer: Hu et al. 2024, arXiv 2412.19255.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from manyheads.attention.position.rope import Rope
from manyheads.attention.project.gqa import GQA, GQAProject
from manyheads.attention.project.mfa import MFA, MFAProject
from manyheads.convert.moves.common import between, like, linear_rows, regression
from manyheads.convert.moves.gauge import gauge
from manyheads.convert.moves.gqa import principal_values
from manyheads.convert.stats import AttentionStats, Pairs, power
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.seam import SeamAttention


@dataclass(frozen=True)
class ToMFA:
    """The move: `gqa` with RoPE on whole heads to `mfa(width, key_reuse)`, with rope(pairs=…) of the frequencies kept.

    width: C, even; above G·d it is clipped. Exact at C = G·d; with key_reuse where values are a linear map of all keys.
    """

    width: int
    key_reuse: bool = False
    q_rank: int | None = None

    def refusal(self, spec: Spec) -> str | None:
        """Why a layer with this spec cannot be converted, or None."""
        gqa = next((part for part in spec.parts if isinstance(part, GQA)), None)
        rope = next((part for part in spec.parts if isinstance(part, Rope)), None)
        if gqa is None or rope is None or rope.pairing == "none":
            return f"a wide head is made from gqa with rope, not from {spec}"
        if gqa.bias != "none":
            return f"mfa has no biases, and {spec} has"
        if rope.fraction != 1.0:
            return f"a wide head turns whole, and {spec} leaves channels still"
        if name := between(spec):
            return f"{name} sits between the projection and the rotation, so keys of heads cannot be mixed"
        return None

    def clipped(self, attention: SeamAttention) -> int:
        """The width, or the one at which nothing is lost any more."""
        return min(self.width // 2 * 2, attention.layout.kv * attention.layout.qk_width)

    def __call__(self, attention: SeamAttention, stats: AttentionStats) -> SeamAttention:
        """The converted layer."""
        if why := self.refusal(attention.spec):
            raise OptionError(why)
        project, layout, pairs = cast(GQAProject, attention.project), attention.layout, Pairs.of(attention)
        width, group = self.clipped(attention), torch.arange(layout.q) // (layout.q // layout.kv)
        if width < 2:
            raise OptionError(f"a wide head of {self.width} channels turns nothing; at least 2")
        found = gauge(attention, stats)
        rows = pairs.join(linear_rows(project.k_proj).view(layout.kv, layout.qk_width, -1))
        slots = found.inverse @ rows.transpose(0, 1)  # [P, G, D + 1]
        size = torch.einsum("psd,de,pse->ps", slots, stats.keys + 0j, slots.conj()).real
        p, s = torch.unravel_index(
            size.flatten().argsort(descending=True, stable=True)[: width // 2].sort()[0], size.shape
        )
        key, size = slots[p, s], size[p, s].clamp_min(1e-12).sqrt()[:, None]
        key = torch.cat([(key / size).real, (key / size).imag])  # [C, D + 1]
        queries = pairs.join(linear_rows(project.q_proj).view(layout.q, layout.qk_width, -1))
        felt = found.mix.conj()[p[:, None], group, s[:, None]].T[..., None]  # [H, C/2, 1]
        queries = queries[:, p] * felt * size * (layout.scale * width**0.5)
        new = like(attention, self._target(attention, pairs.index[p].tolist(), width))
        kept = {name: t for name, t in attention.state_dict().items() if not name.startswith("project.")}
        new.load_state_dict(kept, strict=False)
        made = cast(MFAProject, new.project)
        down, up = self._queries(torch.cat([queries.real, queries.imag], 1).flatten(0, 1)[:, :-1], stats, made)
        o = project.o_proj.weight.detach().double().view(layout.dim, layout.q, layout.v_width)
        v = linear_rows(project.v_proj).view(layout.kv, layout.v_width, -1)
        if self.key_reuse:
            read = regression(key.expand(layout.kv, -1, -1), v, stats.rows)  # [G, v, C]
            _set(made.value_map, torch.eye(width))  # and α = 0: training starts from the key as it is
        else:
            value, read = principal_values(attention, stats, v, o, width)
            _set(made.v_proj, value[:, :-1])
        _set(made.q_a_proj, down)
        _set(made.q_b_proj, up)
        _set(made.k_proj, key[:, :-1])
        _set(made.o_proj, torch.einsum("ehv,hvw->ehw", o, read[group]).flatten(1))
        return new

    def _target(self, attention: SeamAttention, kept: list[int], width: int) -> Spec:
        layout, rank = attention.layout, self._rank(attention)
        rope = cast(Rope, attention.spec.by_stage["position"][0])
        part = MFA(width=width, q_rank=rank, key_reuse=self.key_reuse, norm=False)
        turns = dataclasses.replace(rope, pairing="half", pairs=tuple(kept), of=rope.of or layout.qk_width)
        others = [other for other in attention.spec.parts if other.stage not in ("project", "position")]
        return Spec((part, turns, *others)).resolve(attention.site)

    def _rank(self, attention: SeamAttention) -> int:
        """Of the queries: nothing is lost at the rank of all query heads together."""
        whole = min(attention.dim, attention.layout.q * attention.layout.qk_width)
        return whole if self.q_rank is None else min(self.q_rank, whole)

    def _queries(self, rows: Tensor, stats: AttentionStats, made: MFAProject) -> tuple[Tensor, Tensor]:
        """All query heads' rows `[H·C, D]` as up · down, best on the inputs."""
        rank = made.q_a_proj.out_features
        root = power(stats.plain[:-1, :-1], 0.5)
        seen = rows @ root
        basis = torch.linalg.eigh(seen.T @ seen)[1].flip(-1)[:, :rank]
        return torch.linalg.solve(root, basis).T, seen @ basis


@torch.no_grad()
def _set(linear: torch.nn.Linear, rows: Tensor) -> None:
    linear.weight.copy_(rows)
