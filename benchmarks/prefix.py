"""What sharing a prompt saves: `python benchmarks/prefix.py`.

Decoding: 32 requests that share a prompt of 1,024 tokens and have 64 of their own, one step of a layer, against the same
requests in a plain cache, there with the faster of two kernels. Training: a DPO step of pairs packed after one prompt,
against chosen and rejected apart.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import manyheads as mh
from manyheads.attention.prefixes import with_shared
from manyheads.bench.timing import Timing, interleaved, machine, settle
from manyheads.core.kernel import using
from manyheads.core.prefix import PrefixCache
from manyheads.stack import ManyheadsConfig, ManyheadsForCausalLM
from manyheads.stack.pairs import dpo_loss, pack

REQUESTS, SHARED, OWN = 32, 1024, 64
WAYS = ((1, torch.float32), (2, torch.float32), (1, torch.bfloat16))
LAYERS = [
    ("gqa(kv_heads=3)", 576, 9),
    ("gqa(kv_heads=8)", 2048, 32),
    ("gqa", 576, 9),
    ("mla(rank=160, rope_dim=32, nope_dim=64, v_dim=64, norm=false)", 576, 9),
]


class Timed(mh.Attention):
    """Keeps how long scores, softmax and weighted sums took."""

    spent = 0.0

    def _heads(self, *args: Any) -> torch.Tensor:
        return self.timed(super()._heads, *args)

    def timed(self, run: Any, *args: Any) -> torch.Tensor:
        start = time.perf_counter()
        o = run(*args)
        self.spent = 1e3 * (time.perf_counter() - start)
        return o


def timed_shared(layer: Timed, *args: Any) -> torch.Tensor:
    return layer.timed(with_shared, layer, *args)


@torch.no_grad()
@mock.patch("manyheads.attention.layer.with_shared", timed_shared)
def decoding(rounds: int, threads: int, dtype: torch.dtype = torch.float32) -> list[str]:
    torch.set_num_threads(threads)
    lines = [
        "| layer | attention apart, ms | shared, ms | times faster | whole layer, times | largest difference | bytes of apart |",
        "|---|---|---|---|---|---|---|",
    ]
    for spec, dim, heads in LAYERS:
        layer = Timed(spec, dim, heads).eval().to(dtype)
        prompt, own = torch.randn(1, SHARED, dim, dtype=dtype), torch.randn(REQUESTS, OWN, dim, dtype=dtype)
        settle()
        root, apart = PrefixCache(), mh.Cache()
        layer(prompt, cache=root)
        shared = root.branch(REQUESTS)
        layer(own, cache=shared)
        layer(prompt, cache=apart)
        apart.batch_repeat_interleave(REQUESTS)
        layer(own, cache=apart)
        assert shared.bytes() * REQUESTS * (SHARED + OWN) == apart.bytes() * (SHARED + REQUESTS * OWN)
        share, x = shared.bytes() / apart.bytes(), torch.randn(REQUESTS, 1, dim, dtype=dtype)
        difference = (layer(x, cache=shared) - layer(x, cache=apart)).abs().max().item()
        inside: dict[str, list[float]] = {name: [] for name in ("apart", "apart, sdpa", "shared")}

        def step(name: str, cache: mh.Cache, layer: Timed = layer, x: torch.Tensor = x, inside: Any = inside) -> None:
            layer(x, cache=cache)
            cache.rollback(1)  # every round reads as many rows
            inside[name].append(layer.spent)

        def fused(cache: mh.Cache = apart, step: Any = step) -> None:
            with using("sdpa"):
                step("apart, sdpa", cache)

        sides = {
            "apart": lambda cache=apart, step=step: step("apart", cache), "apart, sdpa": fused,
            "shared": lambda cache=shared, step=step: step("shared", cache),
        }  # fmt: skip
        timed = interleaved(sides, rounds, warmup=3)
        within = {name: Timing(tuple(times[-rounds:])) for name, times in inside.items()}
        best = min(("apart", "apart, sdpa"), key=lambda name: within[name].median)
        low, high = within["shared"].spread
        lines.append(
            f"| `{spec}`, dim {dim}, {heads} heads | {within[best].median:.1f} | {within['shared'].median:.1f} "
            f"({low:.1f} to {high:.1f}) | {within['shared'].ratio(within[best]):.1f} | "
            f"{timed['shared'].ratio(timed[best]):.1f} | {difference:.0e} | {share:.1%} |"
        )
        print(lines[-1], flush=True)
    return lines


def training(rounds: int) -> list[str]:
    lines = [
        "| prompt | each answer | packed, ms | apart, ms | times faster | tokens, times fewer | difference of the loss |",
        "|---|---|---|---|---|---|---|",
    ]
    config = ManyheadsConfig(
        specs="gqa(kv_heads=2)", vocab_size=1000, hidden_size=128, num_hidden_layers=4, num_attention_heads=8
    )
    model = ManyheadsForCausalLM(config).train()
    for p, r in ((512, 128), (256, 64), (128, 128)):
        draw = lambda n: torch.randint(1000, (n,)).tolist()
        pairs = [(draw(p), (draw(r), draw(r))) for _ in range(4)]
        packed = pack(pairs)
        sides = [pack([(prompt, (answers[i],)) for prompt, answers in pairs]) for i in (0, 1)]
        both = torch.cat([side.input_ids for side in sides])
        reference = torch.zeros(len(pairs), 2)
        losses: dict[str, float] = {}

        def shared(packed: Any = packed, reference: Any = reference, losses: Any = losses) -> None:
            model.zero_grad()
            loss = dpo_loss(packed.log_probs(model(**packed.inputs(), use_cache=False).logits), reference)
            loss.backward()
            losses["packed"] = loss.item()

        def apart(sides: Any = sides, both: Any = both, reference: Any = reference, losses: Any = losses) -> None:
            model.zero_grad()
            logits = model(both, use_cache=False).logits.chunk(2)
            lp = torch.cat([side.log_probs(of) for side, of in zip(sides, logits, strict=True)], 1)
            loss = dpo_loss(lp, reference)
            loss.backward()
            losses["apart"] = loss.item()

        timed = interleaved({"packed": shared, "apart": apart}, rounds, warmup=1)
        fewer = 2 * (p + r) / (p + 2 * r + 1)
        lines.append(
            f"| {p} | {r} | {timed['packed'].median:.0f} | {timed['apart'].median:.0f} | "
            f"{timed['packed'].ratio(timed['apart']):.2f} | {fewer:.2f} | {abs(losses['packed'] - losses['apart']):.0e} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "prefix.md")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lines = [
        "# Prompts shared",
        "",
        f"Measured with `python benchmarks/prefix.py` ({machine()}), median of {options.rounds} rounds, all sides in",
        "turn.",
    ]
    for threads, dtype in WAYS:
        one = f"{'one thread' if threads == 1 else f'{threads} threads'}, {str(dtype).removeprefix('torch.')}"
        lines += [
            "",
            f"## Decoding: {REQUESTS} requests, {SHARED:,} tokens shared, {OWN} of their own; {one}",
            "",
            *decoding(options.rounds, threads, dtype),
        ]
    torch.set_num_threads(1)
    lines += [
        "",
        "`attention` is scores, softmax, weighted sums and the merge (quartiles in brackets); the whole layer also has its",
        "projections. Apart is the faster of two kernels, all requests in one batch. Bytes are as the tree says,",
        "(s + b p) / b (s + p) of those of a cache each.",
        "",
        "Apart reads every request's rows from memory, and waits for it. Shared computes: the shared rows stay in the",
        "processor's caches, and the same multiplications run near its peak. So the ratio is that of memory to arithmetic,",
        "and whatever else uses the memory meanwhile makes apart alone slower. Absorbed latents are many query rows a key",
        "even for one request: apart each row read serves all heads already, and there is less to gain. In bfloat16 apart",
        "reads half the bytes, and this processor multiplies no faster.",
        "",
        "## Training: a DPO step of four pairs, 4 layers of dim 128, one thread",
        "",
        *training(max(3, options.rounds // 3)),
    ]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
