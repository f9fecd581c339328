"""Multi-head temporal latent attention: latents merged along time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.attention.latent import LatentProject, latent_cost, latent_layout, latent_widths, views_of
from manyheads.core.cost import Cost
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis, Rule, cols_of, rows_of
from manyheads.core.part import Heads, OptionError, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class MTLA(Part):
    """MLA whose every `stride` consecutive latents share a slot: ĉ_i = Σ w_m c_m over the tokens m ≤ i of i's chunk.

    Gate w_m = σ((F_c pe_j + b_c)·(F_p c_m + b_p)), j = m // stride, pe_j the sinusoidal encoding of the chunk index,
    both maps rank → rank // 4; not normalised. A query sees every completed chunk's final merge and its own chunk so
    far; a slot's rotary key is that of its newest token. Latents are layer-normed (with bias), as in the authors' code,
    q_rank's too. Caches (rank + rope_dim) / stride numbers a token. Chunks follow each sequence's own positions, so
    padding shifts nothing (the authors' code counts one step for the whole batch). A slot is overwritten in place:
    a cache that holds one refuses to roll back.

    Options: stride; the others as in `mla`. The stride belongs to the checkpoint: it is not meant to change later.

    Source: MTLA 2025, arXiv 2505.13544.
    """

    name: ClassVar[str] = "mtla"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2505.13544"
    examples: ClassVar = (
        {"stride": 3, "rank": 10, "rope_dim": 4, "v_dim": 5},
        {"stride": 2, "q_rank": 7},
        {"stride": 1, "view": "expanded"},
    )

    stride: int = 2
    rank: int | None = None
    rope_dim: int | None = None
    nope_dim: int | None = None
    v_dim: int | None = None
    q_rank: int = 0
    view: Literal["auto", "expanded", "absorbed"] = "auto"

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"} if self.view == "expanded" else ())

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"causal", "self"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"cached heads", "token keys", "final rows"})

    @property
    def hint(self) -> dict[str, str]:
        return {"gives head keys": "mtla(view=expanded)"}

    def widths(self, heads: Heads) -> tuple[int, int, int, int]:
        return latent_widths(self.name, heads, self.rank, self.nope_dim, self.rope_dim, self.v_dim)

    def layout(self, heads: Heads, site: Site) -> Heads:
        rank, nope, rope, v = self.widths(heads)
        if self.stride < 1:
            raise OptionError(f"mtla: stride={self.stride} tokens a slot; at least 1")
        if rank < 4:
            raise OptionError(f"mtla: rank={rank} leaves the gate's maps no width; at least 4")
        return latent_layout(heads, nope, rope, v)

    def build(self, before: Heads, after: Heads, site: Site) -> MTLAProject:
        rank, nope, rope, _ = self.widths(before)
        views = views_of(self.view)
        return MTLAProject(
            after, site, self.stride, rank=rank, nope=nope, rope=rope, q_rank=self.q_rank, norm="layer", views=views
        )

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        base = latent_cost(self.widths(before), after, site, self.q_rank, 2, False, False)
        rank = self.widths(before)[0]
        gate = 2 * (rank * (rank // 4) + rank // 4) if site.kv_source is None else 0
        return base._replace(
            parameters=base.parameters + gate,
            cache_floats=base.cache_floats / self.stride,
            token_flops=base.token_flops + 2 * gate,
            pair_flops=base.pair_flops // self.stride,
            windows=base.windows if self.stride == 1 else (),  # slots are kept, whoever may see them
        )


class MTLAProject(LatentProject):
    def __init__(self, heads: Heads, site: Site, stride: int, **options: object) -> None:
        super().__init__(heads, site, **options)  # type: ignore[arg-type]
        self.stride = stride
        if site.kv_source is None:
            self.gate_chunk = nn.Linear(self.rank, self.rank // 4)
            self.gate_latent = nn.Linear(self.rank, self.rank // 4)
            self.entries = {"latent": Entry(1, self.rank + self.rope, stride=stride)}

    def write(self, flow: Flow) -> dict[str, Tensor]:
        c, k = self.latent(flow)
        position = flow.new.position.expand(len(c), -1)
        chunk = position // self.stride
        gated = self._gate(c, chunk) * c * flow.new.validity[..., None]
        merged = gated
        for back in range(1, min(self.stride, c.shape[1])):
            same = chunk[:, back:] == chunk[:, :-back]
            if flow.new.segment is not None:  # packed documents have chunks of their own
                same = same & (flow.new.segment[:, back:] == flow.new.segment[:, :-back])
            merged = merged + nn.functional.pad(gated[:, :-back] * same[..., None], (0, 0, back, 0))
        if "latent" in flow.past:
            merged = merged + self._begun(flow, chunk, position)
        return {"latent": torch.cat([merged, k], -1)[:, None]}

    def _gate(self, c: Tensor, chunk: Tensor) -> Tensor:
        """w `[B, T, 1]`, from the two maps on in float32 or wider."""
        wide = torch.promote_types(c.dtype, torch.float32)
        place = _sinusoid(chunk, self.rank, wide).to(c.dtype)
        logit = (self.gate_chunk(place).to(wide) * self.gate_latent(c)).sum(-1, keepdim=True)
        return torch.sigmoid(logit).to(c.dtype)

    def _begun(self, flow: Flow, chunk: Tensor, position: Tensor) -> Tensor:
        """What earlier passes put into the chunks that this pass continues, `[B, T, rank]`."""
        past = flow.past["latent"]
        rows, newest = past[""][:, 0], past.axis.position
        slot = chunk.clamp_max(rows.shape[1] - 1)
        written = newest.gather(1, slot)
        begun = (chunk < rows.shape[1]) & (written >= 0) & (written < position) & (written // self.stride == chunk)
        old = rows.gather(1, slot[..., None].expand(-1, -1, rows.shape[-1]))[..., : self.rank]
        return old * begun[..., None]

    def rules(self, flow: Flow) -> tuple[Rule, ...]:
        return (self._own_or_complete,)

    def _own_or_complete(self, q: Axis, k: Axis) -> Tensor:
        own = cols_of(k.time) == rows_of(q.time)
        return own | cols_of((k.position + 1) % self.stride == 0)


def _sinusoid(index: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """sin on even and cos on odd channels, base 10^4, `[*index.shape, width]`."""
    rate = 10000.0 ** (-torch.arange(0, width, 2, device=index.device, dtype=dtype) / width)
    angle = index[..., None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width]
