"""From grouped-query attention to keys that are the values too: one of them is cached.

v_g ≈ B_g k_g, the linear regression of a head's values on its own keys before rotation, where tokens weigh by what
reads them; W_O B_g reads the keys in place of W_O v_g. A constant that values have and keys have not goes into the
output's bias, because the weights of a head sum to one. Below half of the source's cache key heads are merged first
(`gqa.py`).

The paper trains such layers from scratch and has no conversion: `copy` (B = 1) is its layer on the source's weights,
and `fitted` the same layer where it starts best.

Source: Do Transformers Need Three Projections? 2026, arXiv 2606.04032.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from manyheads.attention.project.gqa import GQA, GQAProject
from manyheads.attention.project.qkv_sharing import QKVSharing, QKVSharingProject
from manyheads.convert.moves.common import between, like, linear_rows, regression, set_rows
from manyheads.convert.moves.gqa import ToGQA
from manyheads.convert.stats import AttentionStats
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.seam import SeamAttention


@dataclass(frozen=True)
class ToTied:
    """The move: `gqa` to `qkv-sharing(kv_heads)`; kv_heads divides G, and caches kv_heads·d numbers a token.

    Exact where kv_heads = G and each head's values are a linear map of its keys (and a constant, with biases).
    """

    kv_heads: int
    how: Literal["fitted", "copy"] = "fitted"

    def refusal(self, spec: Spec) -> str | None:
        """Why a layer with this spec cannot be converted, or None."""
        gqa = next((part for part in spec.parts if isinstance(part, GQA)), None)
        if gqa is None:
            return f"keys become values in gqa, not in {spec}"
        if gqa.v_dim not in (None, gqa.head_dim):
            return f"a key that is the value has its width, which in {spec} it has not"
        if name := between(spec):
            return f"{name} sits between the keys and the scores, so that one row cannot be both key and value"
        return ToGQA(self.kv_heads).refusal(spec)

    def target(self, attention: SeamAttention) -> Spec:
        """The spec of the converted layer."""
        merged = ToGQA(self.kv_heads).target(attention).by_stage["project"][0]
        assert isinstance(merged, GQA)
        part = QKVSharing(kv_heads=self.kv_heads, head_dim=merged.head_dim, bias=merged.bias != "none")
        return Spec(tuple(part if other.stage == "project" else other for other in attention.spec.parts))

    def __call__(self, attention: SeamAttention, stats: AttentionStats) -> SeamAttention:
        """The converted layer."""
        if why := self.refusal(attention.spec):
            raise OptionError(why)
        spec = self.target(attention)
        merged = ToGQA(self.kv_heads)(attention, stats)
        project, layout = cast(GQAProject, merged.project), merged.layout
        each, width = layout.q // layout.kv, layout.v_width
        new = like(attention, spec)
        kept = {name: tensor for name, tensor in merged.state_dict().items() if not name.startswith("project.")}
        new.load_state_dict(kept, strict=False)
        made = cast(QKVSharingProject, new.project)
        k, v = (linear_rows(linear).view(layout.kv, width, -1) for linear in (project.k_proj, project.v_proj))
        maps, rest = torch.eye(width).to(k).expand(layout.kv, -1, -1), k.new_zeros(layout.kv, width)
        if self.how == "fitted":
            maps, rest = _regression(k, v, stats.rows, constant=made.o_proj.bias is not None)
        set_rows(made.q_proj, linear_rows(project.q_proj) * (layout.scale / new.layout.scale))
        set_rows(made.k_proj, k.flatten(0, 1))
        o = linear_rows(project.o_proj)
        heads = o[:, :-1].view(layout.dim, layout.q, width)
        mapped = torch.einsum("ehv,hvw->ehw", heads, maps.repeat_interleave(each, 0)).flatten(1)
        bias = o[:, -1] + torch.einsum("ehv,hv->e", heads, rest.repeat_interleave(each, 0))
        set_rows(made.o_proj, torch.cat([mapped, bias[:, None]], 1))
        return new


def _regression(k: Tensor, v: Tensor, moment: Tensor, constant: bool) -> tuple[Tensor, Tensor]:
    """B `[G, d, d]` and c `[G, d]` with v ≈ B k + c; c is zero without a constant."""
    if constant:
        one = torch.zeros_like(k[:, :1])
        one[..., -1] = 1
        k = torch.cat([k, one], 1)
    maps = regression(k, v, moment)
    width = v.shape[1]
    return maps[..., :width], maps[..., width] if constant else maps.new_zeros(len(maps), width)
