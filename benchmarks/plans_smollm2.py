"""Plans against every single method, on SmolLM2-135M: `python benchmarks/plans_smollm2.py`.

For each budget the plan of `--to auto` and every method that reaches the budget are put into the whole model, as fitted and
without healing, and measured on text that no fit has seen: the last 20 % of Python's help topics, where the first 80 %
calibrate. One survey serves all.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from manyheads.bench import job
from manyheads.bench.timing import machine
from manyheads.cli.output import Bars
from manyheads.convert.plan import make_goal, shape_of
from manyheads.convert.planner import SINGLES, make_plan, single_goals, try_all
from manyheads.convert.source import load_source
from manyheads.convert.stream import InMemory
from manyheads.convert.survey import Calibration, stretched, survey, turning_damage

METHODS = tuple(dict.fromkeys([*SINGLES, "transmla", "mha2mla", "care", "gqa_uptrain"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budgets", default="75%,50%,33%,25%,12.5%")
    parser.add_argument("--windows", type=int, default=3, help="of 1,024 tokens, to evaluate on")
    parser.add_argument("--work", type=Path, help="folder that keeps the survey and the plans, for another run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "plans.md")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    lines = []
    with tempfile.TemporaryDirectory() as folder, Bars() as bars:
        work = options.work or Path(folder)
        source = load_source("smollm2")
        layers = InMemory(source.model)
        tried = job.Tried.cut(source, None, [], job.CALIBRATION, (options.windows, 1024))
        fast = torch.cpu._is_avx512_bf16_supported()
        count, length = tried.calibration.shape
        text = Calibration(tried.calibration, stretched(count, length, 4096), fast)
        windows = Calibration(tried.evaluation, torch.arange(1024).expand_as(tried.evaluation), fast)
        survey(layers, text, work / "survey", bars)
        damage = turning_damage(work / "survey", len(layers.config.specs))
        for budget in options.budgets.split(","):
            goal = make_goal(budget, "auto", shape_of(layers))
            plan = make_plan(layers, text, goal, work, damage, bars)
            singles = single_goals(layers.config, goal, METHODS)
            rows = try_all(layers, windows, goal, work / "survey", damage, plan.options or None, singles, bars)
            taken = plan.method or "mixed"
            best = min((row["kl"] for row in rows if row["name"] not in ("source", taken)), default=0.0)
            for row in sorted(rows, key=lambda row: row["kl"]):
                name = f"**plan: {row['name']}**" if row["name"] == taken else row["name"]
                perplexity = torch.tensor(row["loss"]).exp()
                lines.append(f"| {budget} | {name} | {row['cost']:.1%} | {perplexity:.2f} | {row['kl']:.4f} |")
            mine = next(row["kl"] for row in rows if row["name"] == taken)
            print(f"{budget}: {taken} {mine:.4f}, the best of the others {best:.4f}", flush=True)
    head = [
        "# Plans against single methods, SmolLM2-135M, as fitted and without healing",
        "",
        f"Measured with `python benchmarks/plans_smollm2.py`: {options.windows} windows of 1,024 tokens of text that no",
        "fit has seen; the plan was chosen on other text. `mha2mla` is meant as a start for training.",
        "",
        "| budget | method | cache | perplexity | KL to the source |",
        "|---|---|---|---|---|",
    ]
    options.out.write_text("\n".join([*head, *lines, "", machine()]) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
