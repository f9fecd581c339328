"""Expert parts against dense ones of equal parameters: `python benchmarks/experts.py`, all sides in one run.

A feed-forward of experts stands beside a dense one that has as many parameters, and beside one that has as many as a
token uses; attention of experts beside multi-head attention likewise, at two lengths of the cache; an adapter beside an
ordinary low-rank one of equal parameters on the same linear layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from algebra import BATCH, DIM, HEADS, TOKENS, base_for, passes
from scans import CONTEXTS, decoding
from torch import nn

import manyheads as mh
from manyheads.bench.timing import interleaved
from manyheads.core.cost import Cost
from manyheads.core.feed import Feed
from manyheads.core.spec import read_one
from manyheads.experts.adapters.adapter import find_adapter

FEEDS = (
    "moe(experts=8, top=2, hidden=1024)", "moe(experts=32, top=4, hidden=256, shared=2)",
    "mh_moe(heads=4, experts=32, top=4, hidden=256)", "uome(experts=8, hidden=4096)",
    "umoe(experts=32, top=4, hidden=128, fixed=1)",
)  # fmt: skip
ATTENTION = ("bam(experts=2)", "bam(experts=4, kv=shared)", "smha", "umoe(experts=16, top=3, hidden=128)")
ADAPTERS = ("mhr(splits=8, skills=8, rank=4, tasks=0)", "headwise-moe(heads=8, experts=4, rank=4)")


def times(sides: Mapping[str, Callable[[], Any]], rounds: int, **more: int) -> str:
    """Of the first of the sides, in ms; in brackets times each of the others."""
    timed = interleaved(sides, rounds, **more)
    (first, mine), *others = timed.items()
    shown = f"{mine.median:,.0f}" if mine.median >= 100 else f"{mine.median:.3g}"
    return f"{shown} ({', '.join(f'{other.ratio(timed[first]):.2f}' for _, other in others)})"


def dense(parameters: int) -> nn.Module:
    """A feed-forward of three maps whose parameters come nearest."""
    made = Feed.parse("swiglu").build(DIM, max(1, round(parameters / (3 * DIM))), mh.Site())
    assert made is not None
    return made


def row(name: str, cost: Cost, sides: Mapping[str, nn.Module], rounds: int, steps: list[str]) -> str:
    """The cells of a long pass, and those of `steps`, which are there already."""
    x = torch.randn(BATCH, TOKENS, DIM)
    long = [times({s: passes(m, x)[what] for s, m in sides.items()}, rounds) for what in ("forward", "train")]
    return " | ".join([f"| `{name}`", f"{cost.parameters:,}", f"{cost.active:,}", *long, *steps]) + " |"


def feed_row(line: str, rounds: int) -> str:
    feed = Feed.parse(line)
    cost, module = feed.cost(DIM, None, mh.Site()), feed.build(DIM, None, mh.Site())
    assert module is not None
    sides = {"experts": module, "equal": dense(cost.parameters), "active": dense(cost.active)}
    token = torch.randn(BATCH, 1, DIM)
    step = {side: passes(each, token)["forward"] for side, each in sides.items()}
    return row(line, cost, sides, rounds, [times(step, 8 * rounds, warmup=3)])


def attention_row(line: str, rounds: int) -> str:
    site = mh.Site(max_len=2 * CONTEXTS[-1])
    layer = mh.Attention(line, DIM, HEADS, site=site)
    cost = layer.spec.cost(DIM, HEADS, site)
    others = {side: base_for(count) for side, count in (("equal", cost.parameters), ("active", cost.active))}
    sides = {"experts": layer, **{side: mh.Attention(spec, DIM, HEADS, site=site) for side, spec in others.items()}}
    steps = [
        times({side: decoding(each.eval(), context) for side, each in sides.items()}, 4 * rounds, warmup=3)
        for context in CONTEXTS
    ]
    return row(line, cost, sides, rounds, [*steps, f"{cost.cache_bytes(CONTEXTS[-1]):,}"])


def adapted(line: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(DIM, DIM, bias=False))
    mh.adapt(model, line, ["0"])
    return model


def adapter_row(line: str, rounds: int) -> str:
    options = read_one(line, find_adapter)
    cost = options.cost(DIM, DIM)
    plain = f"mhr(splits=1, skills=1, tasks=0, rank={max(1, round(cost.parameters / (2 * DIM)))})"
    sides = {"experts": adapted(line), "equal": adapted(plain), "none": nn.Linear(DIM, DIM, bias=False)}
    token = torch.randn(BATCH, 1, DIM)
    step = {side: passes(each, token)["forward"] for side, each in sides.items()}
    return row(line, cost, sides, rounds, [times(step, 8 * rounds, warmup=3)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "experts.md")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    shape = f"D={DIM}, fp32, threads: {torch.get_num_threads()}"
    columns = "| parameters | a token uses | forward, ms | training step, ms |"
    lines = [
        f"# Experts beside dense parts: {shape}",
        "",
        f"Measured with `python benchmarks/experts.py`, all sides in one run, median of {options.rounds} rounds. Forward and training step at",
        f"T={TOKENS:,}, B={BATCH}, in milliseconds.",
        "",
        f"Feed-forwards. A step: {BATCH} sequences, one token each. In brackets: times `swiglu` of as many parameters, and times",
        "`swiglu` of as many as a token uses.",
        "",
        f"| feed-forward {columns} a step, ms |",
        "|---|---|---|---|---|---|",
    ]

    def add(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    for line in FEEDS:
        add(feed_row(line, options.rounds))
    lines += [
        "",
        f"Attention, H={HEADS}. Decode: one step of one sequence. In brackets: times multi-head attention of as many parameters, and",
        f"of as many as a token uses. Cache: bytes a sequence after {CONTEXTS[-1]:,} tokens.",
        "",
        f"| attention {columns} decode at {CONTEXTS[0]:,}, ms | at {CONTEXTS[1]:,}, ms | cache, bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in ATTENTION:
        add(attention_row(line, options.rounds))
    lines += [
        "",
        f"Adapters on a linear layer, {DIM} to {DIM}. In brackets: times an ordinary low-rank adapter of as many parameters, and",
        "times the linear layer alone (which trains).",
        "",
        f"| adapter {columns} a step, ms |",
        "|---|---|---|---|---|---|",
    ]
    for line in ADAPTERS:
        add(adapter_row(line, options.rounds))
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
