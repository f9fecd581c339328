"""What looking into SmolLM2-135M costs and shows: `python benchmarks/inspect_smollm2.py`.

Needles: invented facts in Python's help topics, 256 tokens a prompt, answered greedily: intact, with the heads that copied
most taken out, and with as many random ones (of the same layers, three draws). The heads are found on other facts than
those that are asked, which are in digits or in words. Then what capture adds to a decoding step, and an atlas, whole.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from manyheads import capture
from manyheads.bench.timing import Timing, interleaved, machine
from manyheads.convert.source import load_source
from manyheads.convert.text import default_text, windows
from manyheads.convert.verify import cached
from manyheads.inspect.atlas import atlas, write_atlas
from manyheads.inspect.measures import knock_out, needles, ordinals, retrieval_heads
from manyheads.inspect.measures.needle import KnockOut, Needles

DIGITS = (
    ("The secret code of the blue garden is", " 7 4 9 1 3"), ("The number of the safe in the cellar is", " 2 8 0 6 5"),
    ("The telephone number of the baker is", " 5 5 1 9 4"), ("The key of the northern gate is", " 3 0 7 2 8"),
    ("The magic number of the wizard is", " 9 6 2 4 1"), ("The combination of the blue lock is", " 1 7 3 8 0"),
    ("The code that opens the green door is", " 6 2 9 5 7"), ("The number on the soldier's coat is", " 4 1 8 3 6"),
)  # fmt: skip
WORDS = (
    ("The password of the old library is", " orange tiger moon"),
    ("The favourite food of Captain Morris is", " pickled lemon cake"), ("The name of the third ship was", " Silver Walnut"),
    ("The meeting with the mayor takes place at", " half past eleven"), ("The treasure is hidden under", " a broken piano"),
    ("The capital of the island of Velor is", " Marantha City"), ("The key to the tower is kept by", " Doctor Elwood"),
    ("The colour of the queen's horse is", " pale violet"),
)  # fmt: skip
STEPS = 12
"""Tokens an answer may have."""
ROUNDS = 9


def prompts(tokenizer: Any, haystack: torch.Tensor, facts: tuple[tuple[str, str], ...], length: int) -> Needles:
    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    asked = [ids("\n\nQuestion: complete the sentence from the text above.\nAnswer: " + fact) for fact, _ in facts]
    given = needles(haystack, [ids(f"\n{fact}{end}.\n") for fact, end in facts], asked, length, (0.2, 0.5, 0.8))
    spans = []  # of the needle, what is to be written
    for at, (first, _) in enumerate(given.spans):
        fact, end = facts[at // 3]
        start = first + len(ids(f"\n{fact}"))
        spans.append((start, start + len(ids(end))))
    return Needles(given.prompts, tuple(spans))


def steps(model: Any, ids: torch.Tensor, **what: Any) -> Callable[[], None]:
    """A function that decodes eight tokens one by one behind the ids, looked at or not."""

    start, cache = ids.shape[1] - 8, DynamicCache(config=model.config)
    with torch.no_grad():
        cached(model, ids[:, :start], cache, logits_to_keep=1)

    def run() -> None:
        with torch.no_grad(), capture(model, **what) if what else nullcontext():
            for at in range(start, start + 8):
                cached(model, ids[:, at : at + 1], cache, logits_to_keep=1)
        cache.crop(-8)

    return run


def overhead(model: Any, ids: torch.Tensor, rounds: int) -> dict[str, Timing]:
    newest = {"queries": slice(-1, None)}
    ways = {
        "nothing": steps(model, ids), "out, all heads": steps(model, ids, what="out", **newest),
        "weights, one head of one layer": steps(model, ids, layers=15, heads=3, **newest),
        "weights, all heads": steps(model, ids, **newest),
    }  # fmt: skip
    return interleaved(ways, rounds)


def table_of(found: list[KnockOut], heads: int) -> list[str]:
    """A row for each model: recall of each kind of facts, and the prompts whose needle was found."""
    names = ["intact", f"{heads} heads that copy out"]
    names += [f"{heads} random heads of the same layers out, draw {at}" for at in range(1, 1 + len(found[0].random))]
    each = [(kind.intact, kind.without, *kind.random) for kind in found]
    return [
        f"| {name} | "
        + " | ".join(f"{float(seen.mean()):.2f} | {float((seen > 0.5).double().mean()):.0%}" for seen in row)
        + " |"
        for name, *row in zip(names, *each, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256, help="of a prompt with a needle")
    parser.add_argument("--facts", type=int, default=len(DIGITS), help="of each kind; half of them find the heads")
    parser.add_argument("--heads", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of timing a step")
    parser.add_argument("--atlas", default="2x512", help="windows of the atlas")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "inspect.md")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    began = time.perf_counter()
    loaded = load_source("smollm2")
    model: Any = loaded.model.eval()
    text, tokenizer = default_text(), loaded.tokenizer
    assert tokenizer is not None
    haystack = windows(tokenizer, text, count=1, length=max(512, options.tokens))[0]
    half = max(1, options.facts // 2)
    find = prompts(tokenizer, haystack, DIGITS[:half] + WORDS[:half], options.tokens)
    asked = [prompts(tokenizer, haystack, kind[half : options.facts], options.tokens) for kind in (DIGITS, WORDS)]
    scores = retrieval_heads(model, find, STEPS)
    best = scores.top(options.heads)
    heads: dict[int, list[int]] = {}
    for layer, head, _ in best:
        heads.setdefault(layer, []).append(head)
    found = [knock_out(model, ask, heads, STEPS) for ask in asked]
    timings = overhead(model, haystack[None, : options.tokens], options.rounds)
    count, length = (int(each) for each in options.atlas.split("x"))
    ids = windows(tokenizer, text, count=count, length=length)
    with tempfile.TemporaryDirectory() as folder:
        page = atlas(
            model, ids, name="smollm2", text="Python's help topics", ordinals=list(ordinals(tokenizer).values())
        )
        report = write_atlas(page, Path(folder)).report
        size = report.stat().st_size / 2**20 if report else 0.0
    base = timings["nothing"]
    lines = [
        "# Looking into SmolLM2-135M",
        "",
        "Measured with `python benchmarks/inspect_smollm2.py`.",
        "",
        f"Needles: {len(find)} prompts of {options.tokens} tokens to find the heads, {len(asked[0])} others of each kind to",
        "ask. Recall: the share of a needle's tokens that is written; found: prompts with more than half of them.",
        "",
        "| heads | recall of digits | found | recall of words | found |",
        "|---|---|---|---|---|",
        *table_of(found, options.heads),
        "",
        "Taken out: "
        + ", ".join(f"{layer}.{head} ({score:.2f})" for layer, head, score in best)
        + ", with their scores.",
        "",
        f"Decoding 8 tokens behind {options.tokens - 8} others, {options.rounds} rounds side by side, and what capture adds:",
        "",
        "| captured of the newest query | time | of a run without |",
        "|---|---|---|",
        *(f"| {name} | {each} | {base.ratio(each):.2f} |" for name, each in timings.items()),
        "",
        f"Atlas of {count} windows of {length} tokens: {page.seconds:.0f} s, a page of {size:.1f} MB.",
        "",
        f"The whole in {time.perf_counter() - began:.0f} s. {machine()}",
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
