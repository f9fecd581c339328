"""Every part against multi-head attention of equal parameters: `python benchmarks/algebra.py`, all sides in one run.

A part is measured in the smallest layer that holds it, with its own defaults where they fit a layer of this size. The
base beside it has as many parameters, by its head width. Parts that need the whole sequence are measured, base and all,
without a causal order and without decoding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import manyheads as mh
from manyheads.bench.timing import PeakMemory, interleaved
from manyheads.core.registry import all_parts

DIM, HEADS, TOKENS, BATCH, CONTEXT, LONG = 512, 8, 1024, 4, 2048, 8192
SIZED: dict[str, str] = {
    "gqa": "gqa(kv_heads=2)",
    "mfa": "mfa(width=128)",
    "mla": "mla(rank=128, rope_dim=32)",
    "mtla": "mtla(rank=128, rope_dim=32)",
    "window": "gqa + window(256)",
    "softmax": "gqa + softmax(cap=30.0)",
    "cog-attention": "gqa + cog-attention(soft_ends=false)",
    "moh": "gqa + moh(top=6)",
    "linear": "gqa + features + linear",
    "mhla": "gqa + mhla(blocks=64)",
    "umoe": "umoe(experts=16, top=3, hidden=128)",
}
"""Specs of parts whose defaults need numbers, or say nothing, at this size."""


def spec_of(name: str) -> str:
    part = all_parts()[name]
    return SIZED.get(name, name if part.stage == "project" else f"gqa + {name}")


def base_for(parameters: int) -> str:
    """Multi-head attention whose parameters come nearest."""
    width = max(2, round(parameters / (4 * DIM * HEADS) / 2) * 2)
    return f"gqa(head_dim={width})"


def passes(layer: nn.Module, x: Tensor) -> dict[str, Callable[[], Any]]:
    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def train() -> None:
        layer(x).sum().backward()
        layer.zero_grad()

    return {"forward": forward, "train": train}


def arithmetic(spec: mh.Spec | str, site: mh.Site) -> float:
    """FLOPs of a forward pass of one sequence that looks at every pair of tokens that `site` allows."""
    cost = mh.Spec.parse(spec).resolve(site).cost(DIM, HEADS, site)
    pairs = TOKENS * (TOKENS + 1) // 2 if site.causal else TOKENS**2
    return TOKENS * cost.token_flops + pairs * cost.pair_flops


def decoding(layer: mh.Attention) -> Callable[[], Any]:
    cache = mh.Cache()
    with torch.no_grad():
        for part in torch.randn(BATCH, CONTEXT, DIM).split(512, 1):
            layer(part, cache=cache)
    x = torch.randn(BATCH, 1, DIM)

    def step() -> None:
        with torch.no_grad():
            layer(x, cache=cache)

    return step


def measure(name: str, rounds: int) -> dict[str, Any]:
    spec, site = spec_of(name), mh.Site(max_len=2 * CONTEXT)
    try:
        layer = mh.Attention(spec, DIM, HEADS, site=site)
    except mh.SpecError:
        site = mh.Site(causal=False, max_len=TOKENS)
        layer = mh.Attention(spec, DIM, HEADS, site=site)
    parameters = sum(p.numel() for p in layer.parameters())
    base = mh.Attention(base_for(parameters), DIM, HEADS, site=site)
    x = torch.randn(BATCH, TOKENS, DIM)
    found: dict[str, Any] = {"name": name, "spec": spec, "parameters": parameters, "base": base_for(parameters)}
    found["arithmetic"] = arithmetic(layer.spec, site) / arithmetic(base.spec, site)
    found["kernel"] = layer.explain(TOKENS).kernel
    for what in ("forward", "train"):
        sides = {side: passes(each, x)[what] for side, each in (("part", layer), ("base", base))}
        timed = interleaved(sides, rounds)
        found[what] = timed["part"].median
        found[f"{what} ratio"] = timed["base"].ratio(timed["part"])
    for side, each in (("part", layer), ("base", base)):
        with PeakMemory() as peak:
            passes(each, x)["train"]()
        found[f"{side} MB"] = peak.added_mb
    if site.causal:
        timed = interleaved({"part": decoding(layer.eval()), "base": decoding(base.eval())}, 4 * rounds, warmup=3)
        found["decode"] = timed["part"].median
        found["decode ratio"] = timed["base"].ratio(timed["part"])
        found["decode kernel"] = layer.explain(1).kernel
        found["cache"] = layer.spec.cost(DIM, HEADS, site).cache_bytes(CONTEXT)
    return found


def row(found: dict[str, Any]) -> str:
    decode = (
        f"{found['decode']:.2f} ({found['decode ratio']:.2f}) | {found['cache'] / 1024:,.0f} | "
        if "decode" in found
        else "– | – | "
    )
    kernels = found["kernel"] + (f", {found['decode kernel']}" if "decode" in found else "")
    return (
        f"| `{found['spec']}` | {found['parameters']:,} | {found['arithmetic']:.2f} | {found['forward']:.0f} ({found['forward ratio']:.2f}) | "
        f"{found['train']:.0f} ({found['train ratio']:.2f}) | {found['part MB']:.0f} ({found['base MB']:.0f}) | "
        f"{decode}{kernels} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "algebra.md")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    lines = [
        f"# Every part against multi-head attention of equal parameters: D={DIM}, H={HEADS}, fp32",
        "",
        f"Measured with `python benchmarks/algebra.py`, part and base in one run, median of {options.rounds} rounds. Forward and",
        f"training step at T={TOKENS}, B={BATCH}; decode step at a context of {CONTEXT:,}, B={BATCH}. In brackets: times the base, whose",
        "parameters are the part's; memory: added at the peak of a training step, the base's in brackets. Arithmetic: FLOPs of a",
        "forward pass, times the base's: with as many parameters a part may have more or wider heads, and so more to compute.",
        "",
        "| spec | parameters | arithmetic | forward, ms | training step, ms | memory, MB | decode, ms | cache, KB a sequence | kernels |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in options.parts or all_parts():
        lines.append(row(measure(name, options.rounds)))
        print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
