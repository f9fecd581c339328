"""Prefill and training step of the layer against plain SDPA: `python benchmarks/layer.py`.

The other side is the same grouped-query layer written by hand with `scaled_dot_product_attention`, same weights' shapes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyheads as mh
from manyheads.bench.timing import PeakMemory, interleaved

DIM, HEADS, KV, BATCH, TOKENS = 576, 9, 3, 4, 1024


class Plain(nn.Module):
    """Grouped-query attention with RoPE, nothing else."""

    def __init__(self) -> None:
        super().__init__()
        width = DIM // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, n * width, bias=False) for n in (HEADS, KV, KV, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        theta = 1e4 ** (-torch.arange(0, DIM // HEADS, 2) / (DIM // HEADS))
        angle = torch.arange(x.shape[1])[:, None] * theta
        cos, sin = angle.cos(), angle.sin()
        q, k = _turn(q, cos, sin), _turn(k, cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(o.transpose(1, 2).flatten(2))


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def step(layer: nn.Module, x: Tensor, train: bool) -> Callable[[], None]:
    def run() -> None:
        if not train:
            with torch.no_grad():
                layer(x)
            return
        layer(x).sum().backward()
        layer.zero_grad()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "layer.md")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    x = torch.randn(BATCH, TOKENS, DIM)
    sides = {"plain": Plain(), "manyheads": mh.Attention(f"gqa(kv_heads={KV})", DIM, HEADS)}
    lines = [
        f"# The layer against plain SDPA: D={DIM}, H={HEADS}, G={KV}, B={BATCH}, T={TOKENS}, fp32",
        "",
        f"Measured with `python benchmarks/layer.py`, both sides in one run, median of {options.rounds} rounds.",
        "",
        "| pass | plain, ms | manyheads, ms | ratio | to reach | plain, peak MB | manyheads, peak MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for train in (False, True):
        steps = {name: step(layer, x, train) for name, layer in sides.items()}
        timed = interleaved(steps, options.rounds, warmup=3)
        peaks = {}
        for name, run in steps.items():
            with PeakMemory() as peak:
                run()
            peaks[name] = peak.mb
        ratio = timed["plain"].ratio(timed["manyheads"])  # how many times faster plain is
        lines.append(
            f"| {'training step' if train else 'prefill'} | {timed['plain'].median:.1f} | "
            f"{timed['manyheads'].median:.1f} | {ratio:.3f} | ≤ 1.05 | "
            f"{peaks['plain']:.0f} | {peaks['manyheads']:.0f} |"
        )
        print(lines[-1])
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
