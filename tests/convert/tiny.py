"""What the conversion tests share: lone layers with random weights in float64, and tiny models of every family."""

from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

import manyheads as mh
from manyheads.convert.moves.gqa import ToGQA
from manyheads.convert.moves.mla import ToMLA
from manyheads.convert.stats import Pairs, measure
from manyheads.core.cache import Cache
from manyheads.inspect import measures
from manyheads.inspect.measures import measure as measure_heads
from manyheads.stack.seam import SeamAttention

DIM, HEADS, WIDTH = 24, 4, 6
BASE = "gqa(kv_heads=2, bias=qkvo)"
"""Two groups of two heads, pairs of which turn at three frequencies."""


def layer(spec=BASE, seed=0, dim=DIM, heads=HEADS, std=0.3):
    """A float64 layer whose every weight is drawn anew."""
    torch.manual_seed(seed)
    made = SeamAttention(spec, dim, heads).double().eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=std)
    return made.requires_grad_(False)


def inputs(seed=1, windows=4, tokens=16, dim=DIM):
    """Inputs whose channels are correlated and of different size, as those of a network are."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(dim, dim, generator=generator, dtype=torch.float64) * 0.8 ** torch.arange(dim)
    return torch.randn(windows, tokens, dim, generator=generator, dtype=torch.float64) @ mix


def measured(attention, x, metric=None):
    return measure(attention, x, torch.eye(x.shape[-1], dtype=x.dtype) if metric is None else metric)


def out(attention, x):
    return attention(x, position_ids=torch.arange(x.shape[1])[None])[0]


def decode(attention, x, block=1):
    """The same through a cache, `block` tokens at a time."""
    cache, outs, start = Cache(), [], 0
    for part in x.split(block, 1):
        where = torch.arange(start, start + part.shape[1])[None]
        outs.append(attention(part, position_ids=where, cache=cache)[0])
        start += part.shape[1]
    return torch.cat(outs, 1)


def error(attention, source, x):
    """Relative squared error of a converted layer's output."""
    want = out(source, x)
    return ((out(attention, x) - want).pow(2).sum() / want.pow(2).sum()).item()


def everything(attention):
    """Every (pair, slot) component that turns."""
    pairs = Pairs.of(attention)
    return tuple((p, s) for p in range(len(pairs.re)) if pairs.index[p] >= 0 for s in range(attention.layout.kv))


def whole(attention):
    """The latent move at which nothing is lost."""
    return ToMLA(10**6, everything(attention))


MOVES = {"mla": whole, "gqa": lambda attention: ToGQA(attention.layout.kv)}

GEMMA = {"sliding_window": 5, "head_dim": 8, "query_pre_attn_scalar": 5}
KINDS = {
    "llama": (LlamaConfig, {}),
    "tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "biased": (LlamaConfig, {"attention_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralConfig, {"sliding_window": 5}),
    "phi3": (Phi3Config, {}),
    "gemma2": (Gemma2Config, GEMMA | {"attn_logit_softcapping": 0.7}),
    "gemma3": (Gemma3TextConfig, GEMMA | {"sliding_window_pattern": 2}),
}
VOCAB = 61


def model(kind="llama", layers=2, dtype=torch.float32, **options):
    """A tiny random model whose norm weights and biases are random too."""
    torch.manual_seed(0)
    config, own = KINDS[kind]
    fields = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, **own, **options,
    }  # fmt: skip
    made = AutoModelForCausalLM.from_config(config(**fields)).to(dtype).eval()
    for name, parameter in made.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif "bias" in name:
            nn.init.normal_(parameter, std=0.3)
    return made


def looks_alike(stock, adopted, given, outputs):
    """What heads do, what measures say of it, and what a model gives without a head, of a stock model and adopted."""
    seen = []
    for one in (stock, adopted):
        with torch.no_grad(), mh.capture(one, what=("weights", "out", "lse")) as tape:
            one(**given)
        seen.append(tape)
    assert list(seen[0]) == list(seen[1])
    for ours, theirs in zip(seen[1].values(), seen[0].values(), strict=True):
        for what in ("weights", "out", "lse"):
            torch.testing.assert_close(getattr(ours, what), getattr(theirs, what), atol=1e-4, rtol=1e-4)
    last = list(seen[0])[-1]
    with torch.no_grad():
        before, taken = outputs(adopted, given), []
        for one in (stock, adopted):
            with mh.ablate(one, {last: [1]}):
                taken.append(outputs(one, given))
        after = outputs(adopted, given)
    torch.testing.assert_close(taken[1], taken[0], atol=1e-5, rtol=1e-5)
    for name, out in before.items():
        assert torch.equal(after[name], out) and not torch.allclose(out, taken[1][name], atol=1e-4)
    tables = [measure_heads(one, given, {"it": measures.entropy}, fewest=1)["it"] for one in (stock, adopted)]
    for layer in tables[0]:
        torch.testing.assert_close(tables[1][layer], tables[0][layer], atol=1e-5, rtol=1e-5)


def tokens(windows=8, length=16, seed=1):
    return torch.randint(0, VOCAB, (windows, length), generator=torch.Generator().manual_seed(seed))


def saved(made, folder: Path, shard="1GB"):
    made.save_pretrained(folder, max_shard_size=shard)
    return folder
