"""Scans against softmax attention of equal parameters: `python benchmarks/scans.py`, both sides in one run.

A long pass (forward and training step at T=4,096) beside plain `scaled_dot_product_attention` of the same width, its
memory at growing lengths, and a decode step after 2,048 and after 32,768 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from algebra import DIM, HEADS, base_for, passes

import manyheads as mh
from manyheads.bench.timing import interleaved, kept_for_backward
from manyheads.core.mask import Axis

TOKENS, CONTEXTS, LENGTHS = 4096, (2048, 32768), (2048, 4096, 8192)
BLOCK, PLAIN = 2048, "gqa"


SPECS = (
    "retention", "gated_linear", "delta", "aft", "mhla(block=512, blocks=128)", "linear-attention", "softmax-linear-attention", "retnet",
    "gated-linear-attention", "delta_net", "gated_delta_net", "mamba2", "mamba", "mossnet(experts=4)",
)  # fmt: skip
"""Scans alone, and the layers that papers build of them."""


def decoding(layer: mh.Attention, context: int) -> Callable[[], Any]:
    """One more token after `context` of them. A state is what the tokens leave; rows are those of 2,048, repeated."""
    cache, some = mh.Cache(), mh.Cache()
    read = context if layer.scan is not None else BLOCK
    with torch.no_grad():
        for part in torch.randn(1, read, DIM).split(BLOCK, 1):
            layer(part, cache=some)
        if layer.scan is None:
            token = {name: torch.zeros(1, entry.heads, 1, entry.width) for name, entry in layer.entries.items()}
            rows = some.write(0, token, layer.entries, Axis(1, read))
            many = {name: rows[name][:, :, :read].repeat(1, 1, context // read, 1) for name in token}
            cache.write(0, many, layer.entries, Axis(context, 0))
        else:
            cache = some
    x = torch.randn(1, 1, DIM)

    def step() -> None:
        with torch.no_grad():
            layer(x, cache=cache)

    return step


def measure(spec: str, rounds: int) -> str:
    site = mh.Site(max_len=2 * CONTEXTS[-1])
    layer = mh.Attention(spec, DIM, HEADS, site=site)
    parameters = sum(p.numel() for p in layer.parameters())
    base, plain = mh.Attention(base_for(parameters), DIM, HEADS), mh.Attention(PLAIN, DIM, HEADS)
    x, cells = torch.randn(1, TOKENS, DIM), [f"`{spec}`", f"{parameters:,}"]
    for what in ("forward", "train"):
        sides = {"scan": layer, "base": base, "plain": plain}
        timed = interleaved({side: passes(each, x)[what] for side, each in sides.items()}, rounds)
        against = [timed[side].ratio(timed["scan"]) for side in ("plain", "base")]
        cells.append(f"{timed['scan'].median:.0f} ({against[0]:.2f}, {against[1]:.2f})")
    passes_of = (partial(layer, torch.randn(1, length, DIM)) for length in LENGTHS)
    cells.append(" / ".join(f"{kept_for_backward(run, layer.parameters()) / 2**20:.0f}" for run in passes_of))
    layer.eval(), base.eval()
    for context in CONTEXTS:
        sides = {"scan": decoding(layer, context), "base": decoding(base, context)}
        timed = interleaved(sides, 4 * rounds, warmup=3)
        cells.append(f"{timed['scan'].median:.2f} ({timed['base'].ratio(timed['scan']):.2f})")
    cells.append(f"{layer.spec.cost(DIM, HEADS, site).cache_bytes(CONTEXTS[-1]):,}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="*", help="default: all of `SPECS`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scans.md")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    lines = [
        f"# Scans beside softmax attention: D={DIM}, H={HEADS}, fp32, one sequence, threads: {torch.get_num_threads()}",
        "",
        f"Measured with `python benchmarks/scans.py`, all sides in one run, median of {options.rounds} rounds. Forward and training step at",
        f"T={TOKENS:,}, in milliseconds; in brackets: times `{PLAIN}` (eight heads of 64, fused attention), and times multi-head",
        f"attention of the part's parameters. Kept: for backward, of {', '.join(f'{n:,}' for n in LENGTHS)} tokens.",
        "Decode: one step after 2,048 and after 32,768 tokens, in brackets times the base of equal parameters. State: bytes a",
        "sequence after 32,768 tokens.",
        "",
        "| spec | parameters | forward | training step | kept, MB | decode at 2,048, ms | at 32,768, ms | state, bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for spec in options.specs or SPECS:
        lines.append(measure(spec, options.rounds))
        print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
