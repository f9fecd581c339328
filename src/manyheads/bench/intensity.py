"""FLOPs per byte of what a layer does when it decodes: which operators wait for memory, and up to which batch.

Closed forms, nothing is run; a multiply-add is 2 FLOPs. B sequences, S cached tokens each, q new tokens a sequence at
once. Sources: The New LLM Bottleneck 2025, arXiv 2507.15465 (intensities of MLA and of experts, whose formulas are
derived here); Hardware-Centric Analysis of MLA 2025, arXiv 2506.02523 (orders of execution; that "reuse" and
"recompute" are of the product of W_UQ and W_UK is ASSUMED).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

from manyheads.core.check import check_whole
from manyheads.core.part import Site
from manyheads.core.spec import Spec


@dataclass(frozen=True)
class Device:
    """FLOPs and bytes a second at their peak; a real device reaches less of both. memory: bytes in all."""

    name: str
    flops: float
    bandwidth: float
    memory: float = 0.0

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on an operator waits for arithmetic, not for memory."""
        return self.flops / self.bandwidth


H100 = Device("H100, bf16", 989e12, 3.35e12, 80e9)
H200 = Device("H200, bf16", 989e12, 4.8e12, 141e9)
DEVICES = {"h100": H100, "h200": H200}
"""Vendors' numbers."""


@dataclass(frozen=True)
class Operator:
    """One operator of a pass: what it computes and what it moves."""

    name: str
    flops: int
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else inf

    def bound(self, device: Device) -> Literal["memory", "compute"]:
        return "compute" if self.intensity >= device.ridge else "memory"

    def seconds(self, device: Device) -> float:
        """As if arithmetic and memory were busy at the same time, each at its peak."""
        return max(self.flops / device.flops, self.bytes / device.bandwidth)


def seconds(operators: Iterable[Operator], device: Device) -> float:
    """Of operators one after the other."""
    return sum(each.seconds(device) for each in operators)


def operators(
    spec: str | Spec, dim: int = 512, heads: int = 8, *, batch: int = 1, context: int = 4096, queries: int = 1,
    prefix: int = 0, weight_bytes: float = 2, cache_bytes: float = 2, site: Site | None = None,
) -> list[Operator]:  # fmt: skip
    """What an attention layer of a spec does for one decoding step of B sequences.

    `weights`: its linear layers, 2 B q P FLOPs on P weights. `cache`: scores and weighted sums over cached rows, each
    sequence over its own, of which the first `prefix` tokens are the same for all and are read once; a latent is read
    absorbed. `state`: what is kept for each sequence whatever its length, read and written. Operators without bytes
    are left out. Selected keys are counted as if all were read, rows dropped from the cache are not.

    Args:
        context: S, the new tokens included. weight_bytes, cache_bytes: of one number (2 for bf16).

    Raises:
        ValueError: numbers that do not fit; OptionError: parts that exclude each other.
    """
    check_whole(dim=dim, heads=heads, batch=batch, context=context, queries=queries)
    if not 0 <= prefix <= context or queries > context:
        raise ValueError(f"a prefix of {prefix} and {queries} queries in a context of {context} tokens")
    spec = Spec.parse(spec) if isinstance(spec, str) else spec
    site = Site() if site is None else site
    cost = spec.cost(dim, heads, site)
    rows = cost if site.kv_source is None else spec.cost(dim, heads, site._replace(kv_source=None))
    n, narrow = batch * queries, sum(floats for _, floats in rows.windows)
    lasting = rows.cache_floats - narrow
    seen = context if lasting or not rows.windows else min(context, max(kept for kept, _ in rows.windows) + queries)
    held = lasting * context + sum(floats * min(context, kept + queries) for kept, floats in rows.windows)
    shared = lasting * prefix
    read = float(batch * (held - shared) + shared)
    found = [
        Operator("weights", n * cost.token_flops, cost.parameters * weight_bytes),
        Operator("cache", n * seen * cost.pair_flops, read * cache_bytes),
        Operator("state", 0, 2 * batch * cost.state_floats * cache_bytes),
    ]
    return [each for each in found if each.bytes]


def experts(
    count: int, top: int, parameters: int, tokens: int, *, shared: int = 0, weight_bytes: float = 2,
    balanced: bool = False,
) -> list[Operator]:  # fmt: skip
    """A mixture of experts for `tokens` tokens: each goes to `top` of `count` experts of so many parameters.

    Only experts that get a token are read: E (1 - (1 - k/E)^n) in the mean; all of them if `balanced` (of n k ≥ E
    tokens). shared: parameters that serve all tokens.
    """
    check_whole(count=count, top=top, parameters=parameters, tokens=tokens)
    if top > count:
        raise ValueError(f"a token goes to {top} of {count} experts")
    read = min(count, tokens * top) if balanced else touched(count, top, tokens)
    found = [Operator("experts", 2 * tokens * top * parameters, read * parameters * weight_bytes)]
    if shared:
        found.append(Operator("shared experts", 2 * tokens * shared, shared * weight_bytes))
    return found


def touched(count: int, top: int, tokens: int) -> float:
    """How many of `count` experts get one of `tokens` tokens in the mean, each of which goes to `top` at random."""
    return count * (1 - (1 - top / count) ** tokens)


def exchanged(tokens: int, top: int, dim: int, itemsize: float = 2) -> float:
    """Bytes that go to experts on other devices and back, a layer: 2 n k D numbers."""
    return 2 * tokens * top * dim * itemsize


def balanced_batch(device: Device, count: int = 1, top: int = 1, queries: int = 1, weight_bytes: float = 2) -> int:
    """The smallest batch at which an expert (of one: a linear layer) waits for arithmetic: 2 B q k / (E b) ≥ ridge."""
    check_whole(count=count, top=top, queries=queries)
    return ceil(device.ridge * weight_bytes * count / (2 * queries * top))


def largest_batch(memory: float, weights: float, cache: float, context: int) -> int:
    """How many sequences fit: (memory - weights) / (S · bytes cached a token by all layers)."""
    check_whole(context=context)
    if cache <= 0 or weights > memory:
        raise ValueError(
            f"{weights:g} bytes of weights in {memory:g}, {cache:g} cached a token; the rest must hold a cache"
        )
    return int((memory - weights) // (context * cache))


@dataclass(frozen=True)
class Latent:
    """The widths of a layer of latent attention; q_rank 0: queries straight from x."""

    dim: int
    heads: int
    rank: int
    rope: int
    nope: int
    v: int
    q_rank: int = 0

    def __post_init__(self) -> None:
        check_whole(dim=self.dim, heads=self.heads, rank=self.rank, nope=self.nope, v=self.v)
        check_whole(0, rope=self.rope, q_rank=self.q_rank)

    @property
    def crossover(self) -> float:
        """New tokens a sequence up to which reading latents takes fewer FLOPs than forming keys and values of them."""
        narrow = 2 * self.rank - self.nope - self.v
        return self.rank * (self.nope + self.v) / narrow if narrow > 0 else inf


V3 = Latent(dim=7168, heads=128, rank=512, rope=64, nope=128, v=128, q_rank=1536)
"""DeepSeek-V3."""

ORDERS = ("chain", "reuse", "recompute", "expand")


def latent_orders(
    shape: Latent, *, batch: int = 1, context: int = 4096, queries: int = 1, weight_bytes: float = 2,
    cache_bytes: float = 2, stored_output: bool = False,
) -> dict[str, list[Operator]]:  # fmt: skip
    """The orders in which a layer of latent attention can be computed, which all give the same; n = B q new tokens.

    `chain`: W_UQ, then W_UKᵀ, on each query; heads read the latents. `reuse`: the product of the two `[H, r_q, r]` is
    kept in memory. `recompute`: the product is formed at each step, and not written. `expand`: keys and values of all
    heads are formed from all latents. stored_output: in the first three, W_O W_UV is one matrix `[D, H r]`.

    Weights, latents and what is computed on are read once; what operators hand to each other stays on the chip.
    """
    check_whole(batch=batch, context=context, queries=queries)
    if queries > context:
        raise ValueError(f"{queries} queries in a context of {context} tokens")
    s, n, h, r, d_n, d_r, d_v = shape, batch * queries, shape.heads, shape.rank, shape.nope, shape.rope, shape.v
    r_q, pairs, rows = shape.q_rank or shape.dim, n * context, batch * context

    def linear(name: str, *weights: int, tokens: int = n) -> Operator:
        numbers = sum(weights)
        return Operator(name, 2 * tokens * numbers, numbers * weight_bytes)

    common = [linear("latents of new tokens", s.dim * (r + d_r))]
    if s.q_rank:
        common.append(linear("latent of queries", s.dim * r_q))
    if d_r:
        common.append(linear("rotary queries", h * r_q * d_r))
    factors = h * d_n * (r_q + r)
    scores = {
        "chain": [linear("queries", factors)],
        "reuse": [linear("queries", h * r_q * r)],
        "recompute": [Operator("queries", 2 * h * r_q * d_n * r + 2 * n * h * r_q * r, factors * weight_bytes)],
    }
    core = Operator("attention", 2 * pairs * h * (2 * r + d_r), rows * (r + d_r) * cache_bytes)
    out = [linear("values and output", h * r * s.dim)]
    if not stored_output:
        out = [linear("values", h * d_v * r), linear("output", h * d_v * s.dim)]
    found = {name: [*common, *scores[name], core, *out] for name in ORDERS[:3]}
    found["expand"] = [
        *common,
        linear("queries", h * d_n * r_q),
        Operator("keys and values", 2 * rows * h * (d_n + d_v) * r, h * (d_n + d_v) * r * weight_bytes),
        Operator("attention", 2 * pairs * h * (d_n + d_r + d_v), rows * (r + d_r) * cache_bytes),
        linear("output", h * d_v * s.dim),
    ]
    return found


def fastest(orders: Mapping[str, list[Operator]], device: Device) -> str:
    """The order that takes least time on a device; the first of equals."""
    return min(orders, key=lambda name: seconds(orders[name], device))


def energy(operators: Iterable[Operator], flop: float, byte: float) -> float:
    """Joules, of what a FLOP and a byte from memory take on a device."""
    return sum(each.flops * flop + each.bytes * byte for each in operators)


__all__ = [
    "DEVICES",
    "H100",
    "H200",
    "ORDERS",
    "V3",
    "Device",
    "Latent",
    "Operator",
    "balanced_batch",
    "energy",
    "exchanged",
    "experts",
    "fastest",
    "largest_batch",
    "latent_orders",
    "operators",
    "seconds",
    "touched",
]  # fmt: skip
