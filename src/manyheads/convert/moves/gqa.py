"""From grouped-query attention to fewer key/value heads.

- `mean`, `first` and `random` of each group are the classic starts (Ainslie et al. 2023, arXiv 2305.13245). Queries and
  outputs stay, so that heads which agree only up to a change of basis are lost.
- `lowrank` (Yu et al. 2024, arXiv 2406.07056): the d principal directions of a group's stacked values make its value
  head, v' = Ψᵀ[v_1; …], and W_O reads v_j as Ψ_j v'. Keys without RoPE alike: q_j·k_j ≈ (Ψ_jᵀ q_j)·k'. With RoPE a map
  that folds into the weights commutes with the rotation, as complex numbers do, one for each head and frequency: a_p is
  the principal direction of the group's numbers z_p, k'_p = a_pᴴ z_p, and queries take conj(a_jp). (The paper projects
  rotated keys, which is no stock layer.) Directions are those of activations, or of the weights.
- `fitted`: the same maps, chosen so that one shared head carries the most of what queries feel, and of what the output
  feels of values. It costs the same and is better.

Everything is folded in: the layer is `gqa` again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from manyheads.attention.project.gqa import GQA, GQAProject
from manyheads.convert.methods import Slots
from manyheads.convert.moves.common import between, like, linear_rows, set_rows
from manyheads.convert.moves.gauge import gauge
from manyheads.convert.stats import AttentionStats, Pairs, power
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.seam import SeamAttention

_TAKES = {"fitted": "RoPE's pairs", "lowrank": "RoPE's pairs, or alibi"}


@dataclass(frozen=True)
class ToGQA:
    """The move: `gqa` with G key heads to `gqa` with `kv_heads`, which must divide G.

    how: see above; basis: of `lowrank`. All but `random` are exact when the heads of a group are equal, and all are the
    identity when kv_heads = G.
    """

    kv_heads: int
    how: Literal["fitted", "lowrank", "mean", "first", "random"] = "fitted"
    basis: Literal["activations", "weights"] = "activations"

    def refusal(self, spec: Spec) -> str | None:
        """Why a layer with this spec cannot be converted, or None."""
        names = [part.name for part in spec.parts]
        if "gqa" not in names:
            return f"key heads are merged in gqa, not in {spec}"
        if self.how not in ("fitted", "lowrank"):
            return None
        if name := between(spec):
            return f"how={self.how} moves scales onto queries, which {name} does not pass on; use mean"
        takes = ["rope"] if self.how == "fitted" else ["rope", "alibi"]
        if any(part.name not in takes for part in spec.parts if part.stage == "position") or not {*names} & {*takes}:
            return f"the {self.how} merge takes {_TAKES[self.how]}, not {spec}; use mean"
        return None

    def target(self, attention: SeamAttention) -> Spec:
        """The spec of the converted layer."""
        groups = attention.layout.kv
        if self.kv_heads < 1 or groups % self.kv_heads:
            fits = [g for g in range(1, groups + 1) if groups % g == 0]
            raise OptionError(f"{groups} key heads cannot be merged into {self.kv_heads}; kv_heads may be {fits}")
        parts = [
            dataclasses.replace(part, kv_heads=self.kv_heads) if isinstance(part, GQA) else part
            for part in attention.spec.parts
        ]
        return Spec(tuple(parts))

    def __call__(self, attention: SeamAttention, stats: AttentionStats) -> SeamAttention:
        """The converted layer."""
        why = self.refusal(attention.spec)
        if why is not None:
            raise OptionError(why)
        project, layout = cast(GQAProject, attention.project), attention.layout
        new = like(attention, self.target(attention))
        k = linear_rows(project.k_proj).view(layout.kv, layout.qk_width, -1)
        v = linear_rows(project.v_proj).view(layout.kv, layout.v_width, -1)
        q = linear_rows(project.q_proj).view(layout.q, layout.qk_width, -1)
        o = project.o_proj.weight.detach().double().view(layout.dim, layout.q, layout.v_width)
        if self.kv_heads == layout.kv:
            pass
        elif self.how in ("fitted", "lowrank"):
            k, q = (self._merge_keys if layout.rotary is not None else self._merge_still_keys)(attention, stats, k, q)
            v, o = self._merge_values(attention, stats, v, o)
        elif self.how == "random":
            generator = torch.Generator().manual_seed(attention.site.layer)
            k, v = self._fresh(k, generator), self._fresh(v, generator)
        else:
            k, v = (rows.unflatten(0, (self.kv_heads, -1)) for rows in (k, v))
            k, v = (k[:, 0], v[:, 0]) if self.how == "first" else (k.mean(1), v.mean(1))
        merged = ("project.k_proj", "project.v_proj")
        kept = {name: t for name, t in attention.state_dict().items() if not name.startswith(merged)}
        new.load_state_dict(kept, strict=False)
        made = cast(GQAProject, new.project)
        for linear, rows in ((made.q_proj, q), (made.k_proj, k), (made.v_proj, v)):
            set_rows(linear, rows.flatten(0, 1))
        with torch.no_grad():
            made.o_proj.weight.copy_(o.flatten(1))
        return new

    def _fresh(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """New heads, as large as the old ones and the same in every run; without biases."""
        new = rows.new_zeros(self.kv_heads, *rows.shape[1:])
        drawn = torch.randn(new[..., :-1].shape, generator=generator, dtype=rows.dtype).to(rows.device)
        new[..., :-1] = drawn * rows[..., :-1].std()
        return new

    def _moment(self, stats: AttentionStats, fitted: Tensor) -> Tensor:
        """Of the inputs, as the way of merging sees them."""
        if self.how == "fitted":
            return fitted
        return stats.plain if self.basis == "activations" else torch.eye(len(stats.plain)).to(stats.plain)

    def _merge_keys(
        self, attention: SeamAttention, stats: AttentionStats, k: Tensor, q: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One key head a group: each frequency's first principal component over its heads."""
        pairs, layout = Pairs.of(attention), attention.layout
        members, each = layout.kv // self.kv_heads, layout.q // layout.kv
        moment = self._moment(stats, stats.keys)
        slots: Slots = "fitted" if self.how == "fitted" else "complex"
        keys, queries = [], []
        for index in range(self.kv_heads):
            group = slice(index * members, (index + 1) * members)
            found = gauge(attention, stats, group, slots, moment=moment)
            keys.append(torch.einsum("pg,gpd->pd", found.inverse[:, 0], pairs.join(k[group])))
            heads = pairs.join(q[group.start * each : group.stop * each])
            felt = found.mix[:, :, 0].T.conj().repeat_interleave(each, 0)  # [heads, P]
            queries.append(felt[..., None] * heads)
        moment = stats.keys + 0j
        size = [torch.einsum("pd,de,pe->p", key, moment, key.conj()).real.clamp_min(1e-12).sqrt() for key in keys]
        merged = torch.stack([pairs.split(key / s[:, None]) for key, s in zip(keys, size, strict=True)])
        turned = torch.cat([pairs.split(query * s[:, None]) for query, s in zip(queries, size, strict=True)])
        return merged, turned

    def _merge_still_keys(
        self, attention: SeamAttention, stats: AttentionStats, k: Tensor, q: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One key head a group where nothing rotates: the principal directions of its heads' stacked keys."""
        each, moment = attention.layout.q // attention.layout.kv, self._moment(stats, stats.keys)
        groups = k.unflatten(0, (self.kv_heads, -1))
        down = torch.stack([_principal(group.flatten(0, 1), moment, k.shape[1]) for group in groups])  # [G', d, m·d]
        read = down.unflatten(-1, (-1, k.shape[1])).transpose(1, 2).flatten(0, 1)  # [G, d, d]
        return down @ groups.flatten(1, 2), read.repeat_interleave(each, 0) @ q

    def _merge_values(
        self, attention: SeamAttention, stats: AttentionStats, v: Tensor, o: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One value head a group: the best rank-v map of its heads' values, in the output's metric if fitted."""
        layout = attention.layout
        members, each, width = layout.kv // self.kv_heads, layout.q // layout.kv, layout.v_width
        outers = torch.eye(width).to(v).expand(layout.kv, -1, -1)
        if self.how == "fitted":
            outers = felt_values(attention, stats, o)
        moment = self._moment(stats, stats.rows)
        merged, outputs = [], []
        for index in range(self.kv_heads):
            group = slice(index * members, (index + 1) * members)
            outer = torch.block_diag(*outers[group])
            rows = outer @ v[group].flatten(0, 1)
            down = _principal(rows, moment, width)
            up = torch.linalg.solve(outer, down.T).unflatten(0, (members, width))  # [members, v, v]
            merged.append(down @ rows)
            heads = o[:, group.start * each : group.stop * each].unflatten(1, (members, each))
            outputs.append(torch.einsum("emhv,mvw->emhw", heads, up).flatten(1, 2))
        return torch.stack(merged), torch.cat(outputs, 1)


def principal_values(
    attention: SeamAttention, stats: AttentionStats, v: Tensor, o: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """One value for all heads, `[width, D + 1]`, and how each key head's is read off it, `[G, v, width]`.

    The best map of v `[G, v, D + 1]` in the metric of the output; o is W_O `[D, H, v]`.
    """
    outer = torch.block_diag(*felt_values(attention, stats, o))
    rows = outer @ v.flatten(0, 1)
    down = _principal(rows, stats.rows, width)
    short = width - len(down)  # more than all values
    read = torch.nn.functional.pad(torch.linalg.solve(outer, down.T), (0, short))
    return torch.nn.functional.pad(down @ rows, (0, 0, 0, short)), read.unflatten(0, (len(v), -1))


def felt_values(attention: SeamAttention, stats: AttentionStats, o: Tensor) -> Tensor:
    """The roots of what the output feels of each key head's values, `[G, v, v]`."""
    layout = attention.layout
    seen = torch.einsum("fe,ehd->fhd", stats.metric.double(), o)
    felt = torch.einsum("fhd,fhe,h->hde", seen, seen, stats.value.double())
    felt = felt.unflatten(0, (layout.kv, layout.q // layout.kv)).sum(1)
    return torch.stack([power(block, 0.5) for block in felt])


def _principal(rows: Tensor, moment: Tensor, count: int) -> Tensor:
    """The first principal directions of rows · x, as rows of their own."""
    return torch.linalg.eigh(rows @ moment @ rows.T)[1].flip(-1)[:, :count].T
