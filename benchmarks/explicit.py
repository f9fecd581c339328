"""Parts that work on explicit scores, against the same mechanism written out: `python benchmarks/explicit.py`.

The other side holds the whole map of every head in plain PyTorch, reads the layer's own weights and gives the same
output. At the long context only the layer runs: what it adds to memory is set against one map of all heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from entmax import entmax15
from torch import Tensor

import manyheads as mh
from manyheads.bench.timing import PeakMemory, interleaved

DIM, HEADS, TOKENS, BATCH, LONG = 512, 8, 1024, 4, 8192


def talking_heads(layer: Any, scores: Tensor, seen: Tensor, x: Tensor) -> Tensor:
    scores = torch.einsum("bhts,hg->bgts", scores, layer.attends[0].logits)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhts,hg->bgts", weights, layer.attends[0].weights)


def capped(layer: Any, scores: Tensor, seen: Tensor, x: Tensor) -> Tensor:
    return (30 * torch.tanh(scores / 30)).masked_fill(~seen, -torch.inf).softmax(-1)


def sparse(layer: Any, scores: Tensor, seen: Tensor, x: Tensor) -> Tensor:
    return entmax15(scores.masked_fill(~seen, torch.finfo(scores.dtype).min), dim=-1)


def signed(layer: Any, scores: Tensor, seen: Tensor, x: Tensor) -> Tensor:
    return scores.sign() * scores.abs().masked_fill(~seen, -torch.inf).softmax(-1)


def composed(layer: Any, scores: Tensor, seen: Tensor, x: Tensor) -> Tensor:
    program = layer.attends[0]

    def step(a: Tensor, name: str) -> Tensor:
        total = a
        for side, token in ((program.q[name](x), "t"), (program.k[name](x), "s")):
            w1, w2, g = side.split([program.rank, program.rank, 1], 1)
            mixed = torch.einsum(f"bhts,br{token}h->brts", a, w1)
            gate = g[:, 0].transpose(1, 2)
            total = total + torch.einsum(f"brts,br{token}h->bhts", mixed, w2)
            total = total + a * (gate[..., None] if token == "t" else gate[:, :, None])
        if name in program.static:
            total = total + torch.einsum("bhts,hg->bgts", a, program.static[name])
        return total

    weights = step(scores, "scores").masked_fill(~seen, -torch.inf).softmax(-1)
    return step(weights, "weights")


def met(layer: Any, scores: Tensor, seen: Tensor, x: Tensor) -> Tensor:
    p, program = layer.project, layer.attends[0]
    q, k = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (p.q_proj, p.k_proj))
    maps = (q[:, :, None] @ k[:, None].transpose(-1, -2) * q.shape[-1] ** -0.5).flatten(1, 2)
    inner = program.inner_out(program.inner_in(maps).relu())
    return program.cross_out(program.cross_in(inner).relu()).masked_fill(~seen, -torch.inf).softmax(-1)


def convolved(layer: Any, scores: Tensor, seen: Tensor, x: Tensor) -> Tensor:
    program = layer.attends[0]

    def step(a: Tensor, name: str) -> Tensor:
        kernel = program.kernels[name]
        _, rows, keys = kernel.shape
        a = F.pad(a.masked_fill(~seen, 0.0), (keys // 2, keys // 2, rows - 1, 0))
        a = F.conv2d(a, kernel[:, None], groups=len(kernel)).masked_fill(~seen, 0.0)
        return torch.einsum("bhts,gh->bgts", a, program.mixes[name][0])

    return step(step(scores, "scores").masked_fill(~seen, -torch.inf).softmax(-1), "weights")


WRITTEN: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "gqa + rope(none) + talking_heads": talking_heads,
    "gqa + rope(none) + softmax(cap=30.0)": capped,
    "gqa + rope(none) + entmax(alpha=1.5)": sparse,
    "gqa + rope(none) + cog-attention(soft_ends=false)": signed,
    "gqa + rope(none) + dcmha": composed,
    "gqa + rope(none) + emha": met,
    "gqa + rope(none) + mta": convolved,
}


def written(layer: Any, map_of: Callable[[Any, Tensor, Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    p = layer.project
    q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (p.q_proj, p.k_proj, p.v_proj))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return p.o_proj((map_of(layer, scores, seen, x) @ v).transpose(1, 2).flatten(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "explicit.md")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    lines = [
        f"# Explicit scores: D={DIM}, H={HEADS}, fp32, forward and backward",
        "",
        f"Measured with `python benchmarks/explicit.py`, both sides in one run, median of {options.rounds} rounds. The first",
        f"columns at T={TOKENS}, B={BATCH}; the last, added to memory at the peak, at T={LONG:,}, B=1, where one map of all heads is "
        f"{HEADS * LONG**2 * 4 / 2**20:,.0f} MB.",
        "",
        f"| spec | layer, ms | written out, ms | times as long | to reach | MB at {LONG:,} |",
        "|---|---|---|---|---|---|",
    ]
    for spec, map_of in WRITTEN.items():
        torch.manual_seed(0)
        layer = mh.Attention(spec, DIM, HEADS)
        x = torch.randn(BATCH, TOKENS, DIM)
        torch.testing.assert_close(layer(x), written(layer, map_of, x), atol=1e-4, rtol=1e-4)
        sides: dict[str, Callable[[], Any]] = {
            "layer": lambda layer=layer, x=x: layer(x).sum().backward(),
            "written": lambda layer=layer, x=x, f=map_of: written(layer, f, x).sum().backward(),
        }
        timed = interleaved(sides, options.rounds)
        with PeakMemory() as peak:
            layer(torch.randn(1, LONG, DIM)).sum().backward()
        lines.append(
            f"| `{spec}` | {timed['layer'].median:.0f} | {timed['written'].median:.0f} | "
            f"{timed['written'].ratio(timed['layer']):.2f} | ≤ 1.3 | {peak.added_mb:,.0f} |"
        )
        print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
