"""A model that `compare` trains: what it is made of, and what that costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from manyheads.attention import Attention
from manyheads.core.feed import Feed
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.decoder import Decoder

VOCAB = 256
"""Tokens are bytes."""


class Costs(NamedTuple):
    """What a model costs.

    parameters: trained numbers, counted. flops: of training, a token (a backward pass counts as two forward ones).
    cache: bytes a token over all layers once `context` tokens are cached.
    """

    parameters: int
    flops: float
    cache: float


@dataclass(frozen=True)
class Design:
    """Each field but the spec is an argument of `Decoder`; a new one needs no other change than its default here."""

    spec: str
    dim: int = 128
    heads: int = 4
    layers: int = 4
    ffn: str = "swiglu"
    residual: str = "sum"
    hidden: int | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `Decoder`."""
        return {name: value for name, value in asdict(self).items() if name != "spec"} | {"specs": self.spec}

    def build(self) -> Decoder:
        return Decoder(VOCAB, **self.arguments)

    def check(self, context: int) -> None:
        """Raise an `OptionError` if there is no such model, or none that reads `context` tokens."""
        for layer in self._meta().stack.attentions:
            site = layer.site._replace(max_len=context)  # parts of a fixed length say here that it is too short
            try:
                Spec.parse(self.spec).resolve(site).layouts(self.dim, self.heads, site)
            except OptionError as error:
                raise type(error)(f"with context={context}: {error}") from None

    def blame(self, context: int) -> str | None:
        """Why there is no such model, in words: the option without which there would be one, or else the spec."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "spec" or value == field.default:
                continue
            if replace(self, **{field.name: field.default}).refusal(context) is None:
                alone = replace(self, spec="gqa").refusal(context) is not None
                return f"{field.name}={value!r}" + ("" if alone else f" and {self.spec!r}")
        return None

    def refusal(self, context: int) -> Exception | None:
        """What `check` raises."""
        try:
            self.check(context)
        except (ValueError, ImportError) as error:
            return error
        return None

    @property
    def inner(self) -> int | None:
        """The width of the feed-forward, or of one of its experts."""
        return Feed.parse(self.ffn).width(self.dim, self.hidden)

    def costs(self, context: int, itemsize: int = 4) -> Costs:
        """Exact where the parts' costs are: weights are counted on a model without storage."""
        model = self._meta()
        layers = model.stack.attentions
        costs = [layer.spec.cost(layer.dim, layer.heads, layer.site) for layer in layers]
        pairs = (cost.pair_flops * _keys_seen(layer, context) for cost, layer in zip(costs, layers, strict=True))
        flops = sum(cost.token_flops for cost in costs) + sum(pairs) + 2 * VOCAB * self.dim
        flops += model.stack.ffn_cost.token_flops
        cached = sum(cost.cache_bytes(context, itemsize) for cost in costs)
        return Costs(sum(p.numel() for p in model.parameters()), 3 * flops, cached / context)

    def _meta(self) -> Decoder:
        with torch.device("meta"):
            return self.build()


def _keys_seen(layer: Attention, context: int) -> float:
    """Keys that a query of a causal pass over `context` tokens sees, on average."""
    keep = layer.layout.keep  # rows that are kept for later queries; a query sees its own one as well
    most = context if keep is None else min(keep + 1, context)
    return (most * (most + 1) / 2 + (context - most) * most) / context
