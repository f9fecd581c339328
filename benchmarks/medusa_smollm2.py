"""What drafts bring to SmolLM2-135M: `python benchmarks/medusa_smollm2.py`.

Trains a drafter of each kind on text that the model writes itself (or reads them with --drafters), then writes on from
prompts that none has seen: tokens a step and how often drafts are right by depth, for trees chosen at several costs of a
row; what a pass costs by rows; and the time that plain decoding, the drafters and prompt look-up take, with the trees
that were chosen.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from manyheads import adopt, decode
from manyheads.bench.timing import machine, settle
from manyheads.convert.source import load_source
from manyheads.convert.text import default_text, split, windows
from manyheads.decode import Decoded, Distillation, LearnedDrafter, PromptLookup, SlowDraft, costs, generate, plan

PROMPT, NEW = 16, 96
HELD = 16
"""Prompts; they lie behind the text that training begins from."""
ROWS = (1, 2, 4, 8, 16, 32)


def trained(model: Any, tokenizer: Any, text: str, out: Path, minutes: float, kind: str) -> tuple[LearnedDrafter, str]:
    """A drafter made in about so many minutes: a tenth of one tells how many texts and steps they have room for."""
    began = time.perf_counter()
    how = Distillation(kind, texts=16, steps=4, together=16, length=16)  # type: ignore[arg-type]
    marks: dict[str, list[float]] = {"text": [], "heads": []}
    decode.train(
        model, text, out / "try", how, tokenizer=tokenizer,
        progress=lambda stage, *_: marks[stage].append(time.perf_counter()),
    )  # fmt: skip
    written = (marks["text"][-1] - marks["text"][0]) / 16  # seconds of a token of 16 texts
    step = (marks["heads"][-1] - marks["heads"][1]) / 3 * (112 / 16)  # of a step of 8 texts of 112 tokens
    left = 60 * minutes - (time.perf_counter() - began)
    texts = max(32, min(512, int(0.4 * left / (written * 112 / 16) / 32) * 32))
    steps = max(20, min(1000, int(0.55 * left / step)))
    how = Distillation(kind, texts=texts, steps=steps)  # type: ignore[arg-type]
    began = time.perf_counter()

    def progress(stage: str, done: int, total: int) -> None:
        if done % max(1, total // 5) == 0:
            print(f"{stage} {done}/{total}, {time.perf_counter() - began:.0f} s", flush=True)

    made = decode.train(model, text, out / "drafter", how, tokenizer=tokenizer, name="smollm2", progress=progress)
    took = (time.perf_counter() - began) / 60
    return made, f"{texts} texts of {how.length} tokens, {steps} steps of {how.batch} texts, {took:.1f} minutes"


def percent(values: list[float]) -> str:
    return " / ".join("–" if value != value else f"{100 * value:.0f}" for value in values)


def acceptance(model: Any, drafters: dict[str, LearnedDrafter], prompts: torch.Tensor) -> list[str]:
    """By depth and tree; all prompts in one batch, which changes no text."""
    lines = [
        "| drafter | tree, chosen for rows at | nodes | depth | tokens a step | right by depth, % |",
        "|---|---|---|---|---|---|",
    ]
    for (kind, drafter), price in product(drafters.items(), (0.0, 0.02, 0.1)):
        tree = plan(drafter.odds, lambda rows, price=price: 1 + price * (rows - 1), most=16).tree
        if len(tree) == 1:
            lines.append(f"| {kind} | {price:.0%} of a plain step | 1 | 0 | 1.00 | |")
            continue
        found = generate(model, prompts, drafter, NEW, tree=tree, stop=())
        lines.append(
            f"| {kind} | {price:.0%} of a plain step | {len(tree)} | {tree.depth} | {found.tokens_per_step:.2f} | "
            f"{percent(found.acceptance.by_depth)} |"
        )
        print(lines[-1], flush=True)
    return lines


def price(model: Any, batches: tuple[int, ...]) -> list[str]:
    lines = ["| batch | " + " | ".join(map(str, ROWS)) + " |", "|---" * (1 + len(ROWS)) + "|"]
    for batch in batches:
        cost = costs(model, batch, PROMPT + NEW // 2, ROWS)
        lines.append(f"| {batch} | " + " | ".join(f"{1e3 * each:.1f}" for each in cost.seconds) + " |")
        print(lines[-1], flush=True)
    return lines


def chosen(found: Decoded) -> str:
    """The tree that most steps were drafted with."""
    if not found.plans:
        return "none"
    starts = [step for step, _ in found.plans]
    ends = [*starts[1:], 10**6]
    share = {each.tree: 0 for _, each in found.plans}
    for (start, each), end in zip(found.plans, ends, strict=True):
        share[each.tree] += min(end, found.steps) - start
    tree = max(share, key=lambda tree: share[tree])
    return "plain" if len(tree) == 1 else f"{len(tree)} nodes, depth {tree.depth}"


def clock(
    model: Any, drafters: dict[str, LearnedDrafter], prompts: torch.Tensor, batches: dict[int, int], again: int
) -> list[str]:
    """Each text is written `again` times by each kind, in turn; the fastest counts, so that less of what else runs on
    the machine is in it. The second plain kind says how much still is."""
    lines = [
        "| batch | | tokens a second | times as fast as plain | slowest text | tokens a step | most used tree |",
        "|---|---|---|---|---|---|---|",
    ]
    kinds = {"plain": None, "plain, again": None, **drafters, "look-up": PromptLookup()}
    for batch, texts in batches.items():
        taken: dict[str, list[float]] = {name: [] for name in kinds}
        steps: dict[str, list[float]] = {name: [] for name in kinds}
        trees: dict[str, str] = {}
        settle()
        for turn in range(-1, texts):  # the first text warms up
            ids = prompts[(turn * batch) % (len(prompts) - batch + 1) :][:batch]
            fastest = dict.fromkeys(kinds, float("inf"))
            written: set[str] = set()
            for time_ in range(again if turn >= 0 else 1):
                order = [*kinds]
                first = (turn + time_) % len(order)
                for name in order[first:] + order[:first]:
                    began = time.perf_counter()
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", SlowDraft)
                        found = generate(model, ids, kinds[name], NEW, stop=())
                    fastest[name] = min(fastest[name], time.perf_counter() - began)
                    written.add(str(found.tokens))
                    if turn >= 0:
                        steps[name].append(found.tokens_per_step)
                        trees[name] = chosen(found)
            assert len(written) == 1, "a draft changed a text"
            if turn >= 0:
                for name in kinds:
                    taken[name].append(fastest[name])
        for name in kinds:
            ratios = [plain / own for plain, own in zip(taken["plain"], taken[name], strict=True)]
            lines.append(
                f"| {batch} | {name} | {batch * NEW / median(taken[name]):.1f} | {median(ratios):.2f} | {min(ratios):.2f} | "
                f"{sum(steps[name]) / len(steps[name]):.2f} | {trees[name]} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=25.0, help="of training, each")
    parser.add_argument("--kinds", default="medusa,jakiro,mtp", help="to train")
    parser.add_argument("--drafters", type=Path, nargs="+", help="folders that decode train wrote; nothing is trained")
    parser.add_argument("--texts", default="8,4", help="to time at batch 1, and at batch 8")
    parser.add_argument("--again", type=int, default=2, help="times that each text is written")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "medusa.md")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    source = load_source("smollm2")
    model, tokenizer = adopt(source.model), source.reader()
    begun, asked = split(default_text())
    drafters: dict[str, LearnedDrafter] = {}
    made: dict[str, str] = {}
    if options.drafters:
        for folder in options.drafters:
            drafter = decode.load(folder, model, tokenizer)
            drafters[drafter.kind], how = drafter, json.loads((folder / "drafter.json").read_text())["training"]
            made[drafter.kind] = (
                f"{how['texts']} texts of {how['length']} tokens, {how['steps']} steps of {how['batch']}"
            )
    else:
        for kind in options.kinds.split(","):
            with tempfile.TemporaryDirectory() as folder:
                drafters[kind], made[kind] = trained(model, tokenizer, begun, Path(folder), options.minutes, kind)
    prompts = windows(tokenizer, asked, count=HELD, length=PROMPT, spread=True)
    batches: dict[int, int] = dict(zip((1, 8), map(int, options.texts.split(",")), strict=True))
    lines = [
        "# Several tokens a step", "",
        f"Measured with `python benchmarks/medusa_smollm2.py` ({machine()}): SmolLM2-135M in fp32, greedy, {NEW} tokens after",
        f"{PROMPT} of text that no drafter has seen ({HELD} prompts).",
        "", "| drafter | parameters | words | trained on |", "|---|---|---|---|",
        *(
            f"| {kind} | {sum(p.numel() for p in each.parameters()):,} | {len(each.words):,} | {made[kind]} |"
            for kind, each in drafters.items()
        ),
        "", "## How often it is right", "", "On held-out texts of the model, %:", "",
        "| drafter | the token ahead | the first choice | the best 3 | the best 10 |", "|---|---|---|---|---|",
        *(
            f"| {kind} | {depth + 2} | "
            + " | ".join(f"{100 * float(each.odds[depth, :k].sum()):.0f}" for k in (1, 3, 10)) + " |"
            for kind, each in drafters.items() for depth in range(each.depth)
        ),
        "", *acceptance(model, drafters, prompts),
        "", "## What a pass costs, ms by rows a sequence", "", *price(model, (*batches,)),
        "", "## Time", "",
        *clock(model, drafters, prompts, batches, options.again),
        "", f"{options.texts.replace(',', ' and ')} texts at the two sizes, the same for all; each is written {options.again} times by "
        "each, in turn, and begins with",
        "what earlier ones taught of costs. The faster time counts. The slowest text is the least ratio of a text; what else runs",
        "on the machine is in it, which the second plain row shows.",
    ]  # fmt: skip
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
