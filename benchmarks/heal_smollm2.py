"""SmolLM2-135M at half its cache, healed end to end: `python benchmarks/heal_smollm2.py`.

Starts from the model that `benchmarks/shrink_smollm2.py` makes (give its folder with --models, or it is made here), and
trains its attention for up to 300 steps of 2 x 512 tokens to predict what SmolLM2 predicts. The text is that of the
conversion: Python's help topics, first 80 % of the characters; the last 20 % (5 windows of 2,048 tokens) evaluate. The job
stays in --out.partial when it is interrupted, and the same command goes on with it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from manyheads.bench.heal import heal_model
from manyheads.bench.job import shrink_model
from manyheads.cli.output import Bars
from manyheads.convert.distil import Distil

KV = "50%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=Distil.lr)
    parser.add_argument("--every", type=int, default=Distil.every)
    parser.add_argument("--models", type=Path, help="output of shrink_smollm2.py --models, default: made anew")
    parser.add_argument("--healed", type=Path, help="a new folder for the healed model, default a temporary one")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "heal_smollm2.md")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    training = Distil(steps=options.steps, batch=(2, 512), lr=options.lr, every=options.every)
    with tempfile.TemporaryDirectory() as folder, Bars() as bars:
        models = options.models or Path(folder) / "shrunk"
        if not models.exists():
            shrink_model("smollm2", KV, out=models, contexts=(), progress=bars)
        healed = options.healed or Path(folder) / "healed"
        if healed.exists():
            result = json.loads((healed / "result.json").read_text(encoding="utf-8"))
        else:
            result = heal_model(models / "mla-50", "smollm2", options=training, out=healed, resume=True, progress=bars)
    rows, length = result["options"]["batch"]
    lines = [
        "# SmolLM2-135M at half its cache, healed end to end",
        "",
        f"Measured with `python benchmarks/heal_smollm2.py`: {result['steps']} steps of {rows} x {length} tokens of "
        f"{result['text']['training']}, attention",
        f"only, {result['seconds_per_step']:.1f} s a step; the weights are those of step {result['best']}. Evaluation: "
        f"{result['text']['evaluation']}.",
        "",
        "| model | held-out loss | perplexity | KL | top-1 |",
        "|---|---|---|---|---|",
        *(
            f"| {row['name']} | {row['loss']:.4f} | {row['perplexity']:.2f} | {row['kl']:.4f} | {row['top1']:.1%} |"
            for row in result["rows"]
        ),
        "",
        "The training's own held-out windows, the last tenth of its text:",
        "",
        "| step | loss | cross-entropy | KL |",
        "|---|---|---|---|",
        *(f"| {h['step']} | {h['loss']:.4f} | {h['ce']:.4f} | {h['kl']:.4f} |" for h in result["curve"]),
        "",
        f"{result['machine']}",
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
