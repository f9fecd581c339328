"""Decode speed on SmolLM2-135M against stock transformers, every side in one run: `python benchmarks/decode.py`.

Speed does not depend on what the weights are, so the converted models have the specs of a 50 % and a 25 % conversion
and random attention weights. Beside each figure stands the fraction of the roofline: the least time in which this
machine, by its measured rates, can read the weights and the cache and multiply, over the time taken.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel

from manyheads.bench.timing import Timing, bandwidth, decoder, interleaved
from manyheads.convert.adopt import adopt
from manyheads.convert.source import load_source
from manyheads.stack import ManyheadsConfig, ManyheadsForCausalLM

SPECS = {
    "50 %": "mla(rank=160, rope_dim=32, nope_dim=64, v_dim=64, norm=false) + rope(base=100000)",
    "25 %": "mla(rank=80, rope_dim=16, nope_dim=64, v_dim=64, norm=false) + rope(base=100000)",
}
SETTINGS = [(1, 128), (1, 8000), (16, 2048)]
TO_REACH = {
    (16, 2048): {"adopted": 1.9, "50 %": 1.9, "25 %": 2.6},
    (1, 8000): {"adopted": 1.4},
    (1, 128): {"adopted": 1.0},
}


def models() -> dict[str, PreTrainedModel]:
    """Stock, adopted and converted, sharing every weight outside attention."""
    stock = load_source("smollm2").model
    shared = {id(p): p for name, p in stock.named_parameters() if "self_attn" not in name}
    out: dict[str, PreTrainedModel] = {"stock": stock, "adopted": adopt(copy.deepcopy(stock, dict(shared)))}
    for name, spec in SPECS.items():
        config = ManyheadsConfig(base=copy.deepcopy(stock.config), specs=spec)
        model = ManyheadsForCausalLM(config).eval()
        rest = {key: value for key, value in out["adopted"].state_dict().items() if "self_attn" not in key}
        model.load_state_dict(rest, strict=False)
        out[name] = model
    return out


def floor(model: PreTrainedModel, batch: int, context: int, cache_bytes: float) -> tuple[float, float]:
    """Bytes that a step must read, and FLOPs that it must compute."""
    config = model.config.get_text_config()
    weights = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)
    weights += config.vocab_size * config.hidden_size  # the tied output head
    attention = config.num_hidden_layers * config.num_attention_heads * batch * context * 4 * 64
    specs = getattr(model, "specs", None)
    if specs and "mla" in str(specs[0]):
        pair = specs[0].cost(config.hidden_size, config.num_attention_heads).pair_flops
        attention = config.num_hidden_layers * batch * context * pair
    return 4 * weights + cache_bytes, 2 * weights * batch + attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "decode.md")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    machine = bandwidth()
    lines = [
        "# Decode speed, SmolLM2-135M, fp32",
        "",
        f"Measured with `python benchmarks/decode.py`, all sides in one run, in rotating order, median of {options.rounds}",
        f"rounds. This machine reads {machine.read:.0f} GB/s and multiplies {machine.matmul:.0f} GFLOP/s. Stock is",
        "transformers with its default attention and `DynamicCache`.",
        "",
        "| batch | context | model | ms a step | times stock | to reach | share of roofline | cache MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    sides = models()
    for batch, context in SETTINGS:
        steps = {
            name: decoder(
                model, context, batch, (lambda: DynamicCache(config=sides["stock"].config)) if name == "stock" else None
            )
            for name, model in sides.items()
        }
        timed: dict[str, Timing] = interleaved(steps, options.rounds, warmup=3)
        for name, timing in timed.items():
            layer = {"stock": 384, "adopted": 384, "50 %": 192, "25 %": 96}[name]
            cache = layer * 4.0 * 30 * batch * context
            best = machine.floor_ms(*floor(sides[name], batch, context, cache))
            ratio = timing.ratio(timed["stock"])
            goal = TO_REACH[batch, context].get(name, "")
            lines.append(
                f"| {batch} | {context} | {name} | {timing.median:.1f} | {ratio:.2f} | {goal} | "
                f"{best / timing.median:.0%} | {cache / 2**20:.0f} |"
            )
            print(lines[-1], flush=True)
        del steps
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
