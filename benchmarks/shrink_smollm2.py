"""Quality of SmolLM2-135M after conversion: `python benchmarks/shrink_smollm2.py`, all sides in one run.

Protocol: fp32; text = the pydoc topics joined in sorted key order, first 80 % of characters to calibrate (16,384 tokens),
last 20 % to evaluate (first 5 windows of 2,048 tokens); layer-wise healing, no end-to-end training. The public converter
is TransMLA, its better setting at each size, measured once on the same protocol.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from manyheads.bench.job import shrink_model
from manyheads.bench.timing import PeakMemory

PUBLIC = {192: "20.4", 96: "42.1"}
TO_REACH = {384: "10.04", 192: "≤ 12.5 (stretch 11.3)", 96: "≤ 19 (stretch 15.5)"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv", action="append", help="budgets, default 50%% and 25%%")
    parser.add_argument("--models", type=Path, help="a new folder for the converted models, default a temporary one")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "shrink_smollm2.md")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    with tempfile.TemporaryDirectory() as folder, PeakMemory() as peak:
        out = options.models or Path(folder) / "job"
        result = shrink_model("smollm2", options.kv or ["50%", "25%"], out=out, contexts=())
    text, seconds = result["text"], result["seconds"]
    lines = [
        "# SmolLM2-135M, converted and healed layer by layer",
        "",
        "Measured with `python benchmarks/shrink_smollm2.py`, all sides in one run. Evaluation: 5 windows of 2,048 tokens of",
        f"{text['evaluation']}; calibration: {text['tokens_calibration']:,} tokens of the other 80 %. The second text is",
        f"{text['second']}.",
        "",
        "| numbers cached a token and layer | model | perplexity | to reach | public converter | second text | KL | top-1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (result["source"], *result["candidates"]):
        floats = round(row["kv_floats_per_token_layer"])
        lines.append(
            f"| {floats} ({floats / 384:.0%}) | {row['name']} | {row['perplexity']:.2f} | {TO_REACH.get(floats, '')} | "
            f"{PUBLIC.get(floats, '')} | {row['perplexity_second']:.2f} | {row['kl']:.3f} | {row['top1']:.1%} |"
        )
    steps = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    lines += ["", f"Time: {steps}. Peak memory of the whole job, evaluation included: {peak.mb:,.0f} MB.", ""]
    lines += [f"- {row['name']}: `{row['spec']}`" for row in result["candidates"]]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
