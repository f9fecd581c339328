"""From grouped-query attention to fewer key/value heads.

mean and first are the classic starts (Ainslie et al. 2023, arXiv 2305.13245). The fitted merge is better and costs the
same: heads of a group are first brought into agreement by what changes nothing. For keys that is one complex number
for each head and frequency (it commutes with RoPE and moves onto the queries), chosen so that one shared head carries
the most of what the queries feel; for values any matrix, which moves into the output projection.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from manyheads.attention.project.gqa import GQA, GQAProject
from manyheads.convert.moves.common import like, linear_rows, set_rows
from manyheads.convert.moves.gauge import gauge
from manyheads.convert.stats import AttentionStats, Pairs, power
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.seam import SeamAttention


@dataclass(frozen=True)
class ToGQA:
    """The move: `gqa` with G key heads to `gqa` with `kv_heads`, which must divide G.

    how: `fitted`, or `mean` or `first` of each group (queries and outputs untouched). All are exact when the heads of a
    group are equal, and the identity when kv_heads = G.
    """

    kv_heads: int
    how: Literal["fitted", "mean", "first"] = "fitted"

    def refusal(self, spec: Spec) -> str | None:
        """Why a layer with this spec cannot be converted, or None."""
        names = [part.name for part in spec.parts]
        if "gqa" not in names:
            return f"key heads are merged in gqa, not in {spec}"
        if self.how == "fitted" and ("qk-norm" in names or "rope" not in names):
            return "the fitted merge moves scales onto queries, which qk-norm undoes, and needs RoPE's pairs; use mean"
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
        elif self.how == "fitted":
            k, q = self._merge_keys(attention, stats, k, q)
            v, o = self._merge_values(attention, stats, v, o)
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

    def _merge_keys(
        self, attention: SeamAttention, stats: AttentionStats, k: Tensor, q: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One key head a group: each frequency's first principal component over its heads."""
        pairs, layout = Pairs.of(attention), attention.layout
        members, each = layout.kv // self.kv_heads, layout.q // layout.kv
        keys, queries = [], []
        for index in range(self.kv_heads):
            group = slice(index * members, (index + 1) * members)
            slots = gauge(attention, stats, group)
            keys.append(torch.einsum("pg,gpd->pd", slots.inverse[:, 0], pairs.join(k[group])))
            heads = pairs.join(q[group.start * each : group.stop * each])
            felt = slots.mix[:, :, 0].T.conj().repeat_interleave(each, 0)  # [heads, P]
            queries.append(felt[..., None] * heads)
        moment = stats.keys + 0j
        size = [torch.einsum("pd,de,pe->p", key, moment, key.conj()).real.clamp_min(1e-12).sqrt() for key in keys]
        merged = torch.stack([pairs.split(key / s[:, None]) for key, s in zip(keys, size, strict=True)])
        turned = torch.cat([pairs.split(query * s[:, None]) for query, s in zip(queries, size, strict=True)])
        return merged, turned

    def _merge_values(
        self, attention: SeamAttention, stats: AttentionStats, v: Tensor, o: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One value head a group: the best rank-v map of its heads' values under the metric of the output."""
        layout = attention.layout
        members, each, width = layout.kv // self.kv_heads, layout.q // layout.kv, layout.v_width
        seen = torch.einsum("fe,ehd->fhd", stats.metric.double(), o)
        felt = torch.einsum("fhd,fhe,h->hde", seen, seen, stats.value.double()).unflatten(0, (layout.kv, each)).sum(1)
        merged, outputs = [], []
        for index in range(self.kv_heads):
            group = slice(index * members, (index + 1) * members)
            outer = torch.block_diag(*(power(block, 0.5) for block in felt[group]))
            rows = outer @ v[group].flatten(0, 1)
            basis = torch.linalg.eigh(rows @ stats.rows @ rows.T)[1].flip(-1)[:, :width]
            up = torch.linalg.solve(outer, basis).unflatten(0, (members, width))  # [members, v, v]
            merged.append(basis.T @ rows)
            heads = o[:, group.start * each : group.stop * each].unflatten(1, (members, each))
            outputs.append(torch.einsum("emhv,mvw->emhw", heads, up).flatten(1, 2))
        return torch.stack(merged), torch.cat(outputs, 1)
