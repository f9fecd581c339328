"""What of attention is needed: four of its principles taken away one at a time, in every layer or in one of two.

Tokens mix; weights depend on the tokens; they are softmaxes of products; queries and keys come from the current layer.
Each model below drops one, by a spec of ours, and learns two tasks in turn, on sequences of random words. *Back*: say
the word of three places ago. *Recall*: a sequence is pairs of a key and its value, drawn anew for each sequence; at a
key that was there before, say its value. Accuracies are of what can be known; chance is 1/16 and, of values, 1/8.

Predicted: without mixing, nothing is learned. Weights by position alone do `back` and not `recall`. Maps that all
layers take from the first, which sees embeddings only, do `back` and not `recall`: a value must be found by the key
before it, which is known there only after a layer. A layer of weights by position with a standard one behind it does
both: principles are needed, but not in each layer. What fails at `recall` but mixes says a value of the sequence, about
every third time the right one. Of the two other forms than softmax, weights with signs do `back`, plain products are
too blunt for it; neither does `recall` so soon.

Source: Deconstructing attention 2025, arXiv 2510.11602, of which the abstract alone was read; the variants are choices.
The paper trains language models; these are two layers of width 64 without feed-forwards, and two toy tasks. What a
variant saves in parameters is not given to it elsewhere.

    python examples/attention_deconstruction.py [--seeds 1] [--steps 300]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import manyheads as mh

WORDS, LENGTH, DIM, HEADS, BACK = 16, 32, 64, 4, 3
STATIC = "gqa(scale=0.0) + pair-bias(of=distance, channels=32)"
MODELS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "standard": (["gqa", "gqa"], {}),
    "no mixing": (["gqa + window(size=1)"] * 2, {}),
    "uniform weights": (["gqa(scale=0.0) + rope(none)"] * 2, {}),
    "weights by position": ([STATIC] * 2, {}),
    "no softmax": (["gqa + linear(normaliser=false)"] * 2, {}),
    "signed weights": (["gqa + cog-attention(soft_ends=false)"] * 2, {}),
    "maps of the first layer": (["gqa", "gqa"], {"attn_source": [None, 0]}),
    "by position, then standard": ([STATIC, "gqa"], {}),
}
"""Specs of the two layers, and options of `Decoder`."""


def model(name: str) -> mh.Decoder:
    specs, options = MODELS[name]
    return mh.Decoder(WORDS + 1, specs, DIM, HEADS, ffn="none", tied=False, std=0.05, **options)


def back(batch: int) -> tuple[Tensor, Tensor]:
    """Ids `[B, T]` and what is to be said at each place, -100 where that cannot be known."""
    ids = torch.randint(WORDS, (batch, LENGTH))
    return ids, F.pad(ids[:, :-BACK], (BACK, 0), value=-100)


def recall(batch: int) -> tuple[Tensor, Tensor]:
    """Pairs of a key, of the first half of the words, and a value, of the other."""
    half = WORDS // 2
    keys = torch.randint(half, (batch, LENGTH // 2))
    values = torch.randint(half, WORDS, (batch, half)).gather(1, keys)
    seen = (keys[:, :, None] == keys[:, None]).tril(-1).any(-1)
    answers = torch.stack([values.masked_fill(~seen, -100), torch.full_like(values, -100)], -1)
    return torch.stack([keys, values], -1).flatten(1), answers.flatten(1)


TASKS = {"back": back, "recall": recall}


def accuracy(name: str, task: str, seed: int, steps: int) -> float:
    """On fresh sequences, after training."""
    torch.manual_seed(seed)
    decoder, draw = model(name), TASKS[task]
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(steps):
        ids, answers = draw(32)
        optimizer.zero_grad()
        F.cross_entropy(decoder(ids).flatten(0, 1), answers.flatten(), ignore_index=-100).backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        ids, answers = draw(512)
        return (decoder(ids).argmax(-1) == answers)[answers >= 0].double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    print(f"accuracy in %, chance {100 / WORDS:.0f}" + "".join(f"{task:>20}" for task in TASKS))
    for name in MODELS:
        found = ([accuracy(name, task, seed, given.steps) for seed in range(given.seeds)] for task in TASKS)
        each = (" ".join(f"{100 * one:.0f}" for one in some) for some in found)
        print(f"{name:27}" + "".join(f"{one:>20}" for one in each), flush=True)


if __name__ == "__main__":
    main()
