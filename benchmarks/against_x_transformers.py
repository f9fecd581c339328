"""Training step of single layers against x-transformers: `python benchmarks/against_x_transformers.py` (pip install x-transformers).

Same widths, no positions on either side, fp32; x-transformers with its flash setting where it has one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from x_transformers.x_transformers import Attention as Theirs  # pyright: ignore[reportMissingImports]

import manyheads as mh
from manyheads.bench.timing import interleaved

DIM, HEADS, BATCH, TOKENS = 512, 8, 4, 1024
SIDES: dict[str, tuple[str, dict[str, Any], str]] = {
    "MHA": ("gqa + rope(none)", {"flash": True}, "1 (parity)"),
    "GQA, 2 kv heads": ("gqa(kv_heads=2) + rope(none)", {"flash": True, "kv_heads": 2}, "1 (parity)"),
    "latent KV of 128": (
        "mla(rank=128, rope_dim=0, nope_dim=64, v_dim=64, norm=false) + rope(none)",
        {"use_latent_kv": True, "dim_latent_kv": 128},
        "2",
    ),
    "talking heads": ("gqa + rope(none) + talking_heads", {"pre_talking_heads": True, "post_talking_heads": True}, "2"),
}


def step(layer: nn.Module) -> Callable[[], None]:
    x = torch.randn(BATCH, TOKENS, DIM)

    def run() -> None:
        y = layer(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
        layer.zero_grad()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "x_transformers.md")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    lines = [
        f"# Forward and backward against x-transformers {version('x-transformers')}: "
        f"D={DIM}, H={HEADS}, T={TOKENS}, B={BATCH}, fp32",
        "",
        f"Measured with `python benchmarks/against_x_transformers.py`, all sides in one run, median of {options.rounds} rounds.",
        "",
        "| layer | parameters, ours and theirs | manyheads, ms | x-transformers, ms | times faster | to reach |",
        "|---|---|---|---|---|---|",
    ]
    for name, (spec, theirs, goal) in SIDES.items():
        sides = {"ours": mh.Attention(spec, DIM, HEADS), "theirs": Theirs(DIM, heads=HEADS, causal=True, **theirs)}
        sizes = ", ".join(f"{sum(p.numel() for p in side.parameters()):,}" for side in sides.values())
        timed = interleaved({side: step(layer) for side, layer in sides.items()}, options.rounds, warmup=2)
        lines.append(
            f"| {name} | {sizes} | {timed['ours'].median:.0f} | {timed['theirs'].median:.0f} | "
            f"{timed['ours'].ratio(timed['theirs']):.2f} | {goal} |"
        )
        print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
