"""Latent attention whose low rank depends on what kind of token it is: image or text, say."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor

from manyheads.attention.latent import LatentProject, latent_cost, latent_layout, latent_widths, views_of
from manyheads.core.check import check_whole
from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class TypedMLA(Part):
    """Token t of kind m_t has c_t = W_a^m x_t `[R]` and, per head, k = [W_UK^m c_t ; k_r], v = W_UV^m c_t.

    Queries, the rotary key k_r and W_O are shared, and there is one softmax over all tokens. As M kinds of rank R side
    by side, c̃_t holds c_t in block m_t and zeros elsewhere, which makes it `mla` of rank M·R: expanded, keys and
    values are W_U c̃; absorbed, a query meets [W_UK^1ᵀ q ; …] and each token reads the block of its kind. Cached are
    c_t, k_r and m_t: R + rope_dim + 1 numbers a token (m_t takes a whole number, where a bit would do).

    Kinds are `Links.types`, int `[B or 1, T]`; without them all tokens are of kind 0.

    Options: kinds M. rank R, rope_dim, nope_dim, v_dim, bias, out_bias, scale, view: as in `mla`; there is no norm.

    Source: MHA2MLA-VLM 2026, arXiv 2601.11464.
    """

    name: ClassVar[str] = "typed_mla"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2601.11464"
    examples: ClassVar = (
        {"rank": 9, "rope_dim": 4},
        {"kinds": 3, "view": "absorbed", "v_dim": 5},
        {"view": "expanded", "bias": True, "out_bias": True},
    )

    kinds: int = 2
    rank: int | None = None
    rope_dim: int | None = None
    nope_dim: int | None = None
    v_dim: int | None = None
    bias: bool = False
    out_bias: bool = False
    scale: float | None = None
    view: Literal["auto", "expanded", "absorbed"] = "auto"

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"} if self.view == "expanded" else ())

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"cached heads"} | ({"formed keys"} if self.view == "absorbed" else set()))

    @property
    def hint(self) -> dict[str, str]:
        return dict.fromkeys(("gives head keys", "gives formed keys"), "typed_mla(view=expanded)")

    def widths(self, heads: Heads) -> tuple[int, int, int, int]:
        """rank, nope, rope and value widths with the defaults filled in."""
        return latent_widths(self.name, heads, self.rank, self.nope_dim, self.rope_dim, self.v_dim)

    def layout(self, heads: Heads, site: Site) -> Heads:
        check_whole(kinds=self.kinds)
        _, nope, rope, v = self.widths(heads)
        return latent_layout(heads, nope, rope, v, self.scale)

    def build(self, before: Heads, after: Heads, site: Site) -> TypedLatentProject:
        return TypedLatentProject(self, self.widths(before), after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        rank, nope, rope, v = self.widths(before)
        whole = latent_cost((self.kinds * rank, nope, rope, v), after, site, 0, 0, self.bias, self.out_bias)
        cached = Fraction(rank + rope + 1 if site.kv_source is None else 0)
        return whole._replace(cache_floats=cached, windows=windows(after.keep, cached))


class TypedLatentProject(LatentProject):
    def __init__(self, options: TypedMLA, widths: tuple[int, int, int, int], heads: Heads, site: Site) -> None:
        rank, nope, rope, _ = widths
        super().__init__(
            heads, site, rank=options.kinds * rank, nope=nope, rope=rope, norm="none", bias=options.bias,
            out_bias=options.out_bias, views=views_of(options.view),
        )  # fmt: skip
        self.kinds, self.block = options.kinds, rank
        if site.kv_source is None:
            self.entries = {"latent": Entry(1, rank + rope + 1)}

    def write(self, flow: Flow) -> dict[str, Tensor]:
        blocks, k = self.latent(flow)
        kind = blocks.new_zeros(1, 1, dtype=torch.long) if flow.links.types is None else flow.links.types.long()
        if flow.links.types is not None and kind.shape[1] != blocks.shape[1]:
            raise ValueError(f"links.types tells the kinds of {kind.shape[1]} tokens; this pass has {blocks.shape[1]}")
        kind = kind.expand(blocks.shape[:2])[..., None]
        c = blocks.unflatten(-1, (self.kinds, -1)).take_along_dim(kind[..., None], 2)[:, :, 0]
        return {"latent": torch.cat([c, k, kind.to(c.dtype)], -1)[:, None]}

    def latents(self, rows: Tensor) -> Tensor:
        c, k, kind = rows.split([self.block, self.rope, 1], -1)
        of = torch.arange(self.kinds, device=rows.device)
        blocks = torch.where(kind[..., None] == of[:, None], c[..., None, :], 0)
        return torch.cat([blocks.flatten(-2), k], -1)

    def rotary(self, name: str) -> slice | None:
        found = super().rotary(name)
        if found is None or name != "latent":
            return found
        return slice(self.block, self.block + found.stop - found.start)
