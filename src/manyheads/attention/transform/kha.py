"""Knocking-heads attention: one small transform that all heads share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, Part, Site, Transform
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class KHA(Part):
    """Each head's features go through a d × d map that is the same for all heads, before qk-norm and rotation.

    linear: q'_h = q_h T_q, k'_g = k_g T_k, v'_g = v_g T_v, all T = I at the start.
    mlp: v'_g = 2 ((v_g W_up) ∘ σ(v_g W_gate)) W_down with W_up = W_down = I, W_gate = 0 at the start, where it is the
    identity too.

    Options: kind. on: "v", where the authors find most of the gain, or "qkv" for T_q and T_k too; by default "qkv" for
    linear and "v" for mlp (both have 3 d² parameters). In a latent projection the maps act on the content channels,
    which are what `Heads.content` names; the linear form needs no keys to exist there.

    Choices the paper leaves open: maps are for each layer (not shared over depth); what is cached is the transformed
    value, so that the transform runs once a token.

    Source: Knocking-Heads Attention 2025, arXiv 2510.23052.
    """

    name: ClassVar[str] = "kha"
    stage: ClassVar = "transform"
    paper: ClassVar[str] = "arXiv 2510.23052"
    at: ClassVar = "either"
    examples: ClassVar = ({}, {"kind": "mlp"}, {"on": "v"}, {"kind": "mlp", "on": "qkv"})

    kind: Literal["linear", "mlp"] = "linear"
    on: Literal["qkv", "v"] | None = None

    @property
    def maps_qk(self) -> bool:
        return self.on == "qkv" or (self.on is None and self.kind == "linear")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"head keys"} if self.kind == "mlp" else ())

    @property
    def hint(self) -> dict[str, str]:
        return {"head keys": "kha(kind=linear)"}

    def build(self, before: Heads, after: Heads, site: Site) -> KHATransform:
        return KHATransform(self, before, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        width, rows = before.content_width**2, before.v_width**2
        own = before.read or site.kv_source is None
        q, k = width * self.maps_qk, width * (self.maps_qk and own)
        v = rows * (3 if self.kind == "mlp" else 1) if own else 0
        return Cost(q + k + v, token_flops=2 * (before.q * q + before.kv * (k + v)))


class KHATransform(Transform):
    def __init__(self, options: KHA, heads: Heads, site: Site) -> None:
        super().__init__()
        self.linear = options.kind == "linear"

        def identity(width: int) -> nn.Parameter:
            return nn.Parameter(torch.eye(width))

        own = heads.read or site.kv_source is None
        self.q = identity(heads.content_width) if options.maps_qk else None
        self.k = identity(heads.content_width) if options.maps_qk and own else None
        self.v = identity(heads.v_width) if own else None
        self.gate = self.down = None
        if own and not self.linear:
            self.gate = nn.Parameter(torch.zeros(heads.v_width, heads.v_width))
            self.down = identity(heads.v_width)

    def on_q(self, q: Tensor, flow: Flow) -> Tensor:
        return q if self.q is None else q @ self.q

    def on_k(self, k: Tensor, flow: Flow) -> Tensor:
        return k if self.k is None else k @ self.k

    def on_v(self, v: Tensor, flow: Flow) -> Tensor:
        if self.v is None:
            return v
        up = v @ self.v
        if self.gate is None or self.down is None:
            return up
        return 2 * (up * torch.sigmoid(v @ self.gate)) @ self.down

    def k_adjoint(self, q: Tensor, flow: Flow) -> Tensor:
        return q if self.k is None else q @ self.k.T

    def v_after(self, o: Tensor, flow: Flow) -> Tensor:
        return self.on_v(o, flow)
