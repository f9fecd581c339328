"""Perplexity against the share of heads taken out of SmolLM2-135M: `python benchmarks/prune_smollm2.py`.

Every measure chooses heads on the first 80 % of Python's help topics (--calibrate), and the model without them is measured
on the last 20 % (--evaluate). Heads go in whole groups of three, or one of each group, so that the pruned model is a
checkpoint of even groups. `random` is the mean of three seeds and the floor. `greedy` tries candidates and measures again
after each round of --again steps. Nothing is trained in between.

A choice for the largest share holds those for the smaller ones: they are its first steps. Takes about twenty minutes on two
idle cores; `--measures gradient,random --shares 5` is a quick look.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from manyheads.bench.timing import machine
from manyheads.cli.output import Bars, sizes
from manyheads.convert.adopt import adopt
from manyheads.convert.source import load_source
from manyheads.convert.text import Texts, default_text
from manyheads.convert.verify import quality
from manyheads.edit import Step, mask, select
from manyheads.stack.pretrained import ManyheadsForCausalLM

MEASURES = ("greedy", "ablation", "gradient", "gradient-by-layer", "output", "random")
SEEDS = (0, 1, 2)


def perplexities(
    model: ManyheadsForCausalLM, steps: Sequence[Step], shares: Sequence[int], tokens: Tensor
) -> dict[int, tuple[float, float]]:
    """By the share to take out: the share of heads that went, and perplexity without them."""
    found = {}
    for share in shares:
        last = next(index for index, step in enumerate(steps, 1) if step.kept <= 1 - share / 100)
        heads: dict[int, list[int]] = {}
        for step in steps[:last]:
            heads.setdefault(step.layer, []).extend(step.heads)
        with mask(model, heads):  # the pruned model computes the same; tests hold it to that
            found[share] = 1 - steps[last - 1].kept, quality(model, tokens).perplexity
    return found


def plot(rows: dict[str, dict[int, tuple[float, float]]], base: float, file: Path) -> str | None:
    """A chart where altair is installed; otherwise None."""
    try:
        import altair  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    points = [
        {"measure": name, "heads out, %": 100 * out, "perplexity": perplexity}
        for name, row in rows.items()
        for out, perplexity in ((0.0, base), *row.values())
    ]
    chart = altair.Chart(altair.Data(values=points)).mark_line(point=True)
    chart = chart.encode(
        x="heads out, %:Q", y=altair.Y("perplexity:Q", scale=altair.Scale(type="log")), color="measure:N"
    )
    try:
        chart.save(file)
    except (ImportError, ValueError):  # drawing an SVG takes a package more
        return None
    return file.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--measures", default=",".join(MEASURES))
    parser.add_argument("--shares", default="5,10,20,30", help="per cent of the heads to take out")
    parser.add_argument("--calibrate", default="4x128", help="windows x tokens; a pass for each head of ablation")
    parser.add_argument("--evaluate", default="3x1024")
    parser.add_argument("--again", type=int, default=3, help="steps in a round of greedy")
    parser.add_argument("--tries", type=int, default=12, help="candidates in a round of greedy")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "prune.md")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    shares = sorted({*map(int, options.shares.split(","))})
    source = load_source(options.model)
    model, tokenizer = adopt(source.model), source.tokenizer
    assert tokenizer is not None
    (c, c_length), (e, e_length) = sizes(options.calibrate), sizes(options.evaluate)
    text = Texts.from_text(
        tokenizer, default_text(), calibration_windows=c, calibration_length=c_length, evaluation_windows=e,
        evaluation_length=e_length,
    )  # fmt: skip
    base = quality(model, text.evaluation).perplexity
    rows: dict[str, dict[int, tuple[float, float]]] = {}
    seconds: dict[str, float] = {}
    with Bars() as bars:
        for name in options.measures.split(","):
            began, each = time.perf_counter(), []
            for seed in SEEDS if name == "random" else SEEDS[:1]:
                again = options.again if name == "greedy" else None
                choice = select(
                    model, text.calibration, 1 - shares[-1] / 100, by=name, again=again, tries=options.tries, seed=seed,
                    progress=lambda stage, *step, name=name: bars(f"{name}: {stage}", *step),
                )  # fmt: skip
                seconds.setdefault(name, time.perf_counter() - began)
                each.append(perplexities(model, choice.steps, shares, text.evaluation))
            rows[name] = {
                share: (mean(one[share][0] for one in each), math.exp(mean(math.log(one[share][1]) for one in each)))
                for share in shares
            }
            print(name, {share: round(value, 2) for share, (_, value) in rows[name].items()}, flush=True)
    picture = plot(rows, base, options.out.with_suffix(".svg"))
    heads = sum(layer.heads for layer in model.attentions)
    lines = [
        f"# Heads taken out of {source.name}",
        "",
        f"Measured with `python benchmarks/prune_smollm2.py`: {heads} query heads in {len(model.attentions)} layers, chosen by "
        f"{c} windows of {c_length}",
        f"tokens of Python's help topics (first 80 %), evaluated on {e} windows of {e_length} tokens of the rest, without any "
        "training.",
        f"Perplexity of the whole model: {base:.2f}. Heads go in whole groups or one of each group, so that the shares are "
        "nearly those of the",
        "heading. `greedy` measures again after every "
        f"{options.again} steps, with {options.tries} candidates tried; `random` is the geometric mean of {len(SEEDS)} seeds.",
        "",
        "| chosen by | " + " | ".join(f"{share} % out" for share in shares) + " | seconds to choose |",
        "|---|" + "---|" * (len(shares) + 1),
        *(
            f"| {name} | " + " | ".join(f"{row[share][1]:.2f}" for share in shares) + f" | {seconds[name]:.0f} |"
            for name, row in rows.items()
        ),
        "",
        *([f"![perplexity by share of heads]({picture})", ""] if picture else []),
        machine(),
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
