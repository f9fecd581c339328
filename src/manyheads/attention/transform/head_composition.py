"""Composition of key heads and of value heads out of the heads that are cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.attention.mixing import mixed
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Part, Site, Transform
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class HeadComposition(Part):
    """K_j = Σ_i W_K[i, j] k_i and V_j = Σ_i W_V[i, j] v_i: G heads attended to, composed of the c heads cached.

    k, v `[B, c, S, d]` are the projection's, W_K and W_V `[c, G]` are for the layer, the same for every token and
    channel; queries are not mixed. The composition happens when rows are read, so the cache holds 2·c·d numbers a token
    however many heads are made of them: `gqa(kv_heads=2) + head_composition(kv_heads=4)` halves it. It commutes with
    rotation, so that rotated keys are cached. On its own it could be folded into the projections; the norm behind it,
    part `head_norm`, is what makes it more than another parametrisation, and `mea` is the preset of both.

    Options: kv_heads G (default: as many as are cached).

    Choices the paper leaves open: composite j starts as component ⌊j·c/G⌋, which is the identity for G = c and
    otherwise grouped-query attention; a `qk-norm` named behind it norms composites, before rotation, which then happens
    at read too. Weights of a trained model come from `virtual_heads`.

    Source: Explicit Multi-head Attention 2026, arXiv 2601.19611.
    """

    name: ClassVar[str] = "head_composition"
    stage: ClassVar = "transform"
    paper: ClassVar[str] = "arXiv 2601.19611"
    at: ClassVar = "read"
    examples: ClassVar = ({"kv_heads": 4}, {"kv_heads": 2})

    kv_heads: int | None = None

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"several keys"})

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"head keys", "paired heads"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        composites = heads.kv if self.kv_heads is None else self.kv_heads
        if composites < 1:
            raise OptionError(f"head_composition: kv_heads={composites}; at least 1")
        if composites != heads.kv and heads.content_width < heads.qk_width:
            raise OptionError(
                f"head_composition: kv_heads={composites}, but {heads.qk_width - heads.content_width} of the "
                f"{heads.qk_width} key channels belong to no head; kv_heads may be {heads.kv} here"
            )
        return heads._replace(kv=composites)

    def build(self, before: Heads, after: Heads, site: Site) -> HeadCompositionTransform:
        return HeadCompositionTransform(before.kv, after.kv, after.q)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        weights = before.kv * after.kv
        return Cost(2 * weights, token_flops=2 * weights * (before.content_width + before.v_width))


class HeadCompositionTransform(Transform):
    linear = commutes = mixes = True

    def __init__(self, components: int, composites: int, queries: int) -> None:
        super().__init__()
        self.each = queries // composites
        start = torch.eye(components)[:, torch.arange(composites) * components // composites]
        self.k, self.v = nn.Parameter(start.clone()), nn.Parameter(start.clone())

    def on_k(self, k: Tensor, flow: Flow) -> Tensor:
        return mixed(k, self.k)

    def on_v(self, v: Tensor, flow: Flow) -> Tensor:
        return mixed(v, self.v)

    def k_adjoint(self, q: Tensor, flow: Flow) -> Tensor:
        """Σ_i W_K[i, j] q·k_i: each component's share of the query."""
        return (q[..., None, :] * self._of_queries(self.k)[..., None]).flatten(-2)

    def v_after(self, o: Tensor, flow: Flow) -> Tensor:
        return (o.unflatten(-1, (self.v.shape[0], -1)) * self._of_queries(self.v)[..., None]).sum(-2)

    def _of_queries(self, mixer: Tensor) -> Tensor:
        """`[H, 1, c]`, the column of each query head's composite."""
        return mixer.T.repeat_interleave(self.each, 0)[:, None]


def virtual_heads(weight: Tensor, heads: int, components: int) -> tuple[Tensor, Tensor]:
    """The best composition of trained heads out of fewer: component weights `[c·d, D]` and their mixer `[c, heads]`.

    weight `[heads·d, D]` of a key or value projection (a bias may be its last column). Each head is one column of a
    matrix whose truncated SVD is taken; the squared error is the sum of the squared singular values left out.
    """
    columns = weight.unflatten(0, (heads, -1)).flatten(1).T
    u, s, mixer = torch.linalg.svd(columns, full_matrices=False)
    made = (u * s)[:, :components].T
    return made.reshape(-1, weight.shape[1]), mixer[:components].contiguous()
