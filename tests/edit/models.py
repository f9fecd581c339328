"""Tiny models whose heads are edited, and what is asked of the result."""

import copy

import torch
from tests.convert.tiny import model, tokens
from tests.oracles.reference import close
from transformers import AutoModelForCausalLM

from manyheads.convert.adopt import adopt
from manyheads.convert.export import save, save_plainly
from manyheads.convert.verify import decode_equals_forward
from manyheads.core.cache import Cache
from manyheads.edit.layers import Rows, put, with_rows
from manyheads.stack import ManyheadsConfig, ManyheadsForCausalLM

KINDS = ("llama", "biased", "qwen2", "qwen3", "mistral")


def adopted(kind="llama", dtype=torch.float64, **options):
    """Width 32, 4 heads of 8 channels on 2 key heads, unless told otherwise."""
    return adopt(model(kind, dtype=dtype, **options))


def own(specs="gqa(kv_heads=2)", heads=4, layers=2, dtype=torch.float64, **options):
    """Our own decoder of the same size."""
    torch.manual_seed(0)
    config = ManyheadsConfig(
        specs=specs, hidden_size=32, intermediate_size=40, num_hidden_layers=layers, num_attention_heads=heads,
        vocab_size=61, initializer_range=0.2, tie_word_embeddings=True, bos_token_id=1, pad_token_id=0, **options,
    )  # fmt: skip
    made = ManyheadsForCausalLM(config).to(dtype).eval()
    for name, parameter in made.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def logits(each, windows=None):
    with torch.no_grad():
        return each(tokens() if windows is None else windows, use_cache=False).logits


def with_copies(each, pairs, kinds="qkv", scale=1.0):
    """The model with some heads as copies of others, {head: of}, in every layer; W_O stays each head's own."""
    each = copy.deepcopy(each)
    made = {}
    for number, layer in enumerate(each.attentions):
        rows = Rows.of(layer)._asdict()
        for to, of in pairs.items():
            for kind in kinds:
                rows[kind][to] = rows[kind][of] * scale
        made[number] = with_rows(layer, Rows(**rows))
    put(each, made)
    return each


def same(got, want, tolerance=1e-10):
    """The same function, token by token too."""
    close(logits(got), logits(want), tolerance)
    assert decode_equals_forward(got, tokens(2)) < (1e-8 if got.dtype == torch.float64 else 1e-4)


def counted(each):
    """Parameters and cached bytes are what the specs cost."""
    costs = [layer.spec.cost(layer.dim, layer.heads, layer.site) for layer in each.attentions]
    assert [sum(p.numel() for p in layer.parameters()) for layer in each.attentions] == [c.parameters for c in costs]
    cache, ids = Cache(), tokens(2, 4)  # all that a window of 5 keeps
    with torch.no_grad():
        each(ids, cache=cache, use_cache=True)
    size = torch.finfo(each.dtype).bits // 8
    assert cache.bytes() == sum(c.cache_floats for c in costs) * ids.numel() * size
    return costs


def reloads(each, folder, plainly=None):
    """Saved and loaded through the Auto classes it writes the same text; plainly: the stock class that holds it."""
    each = each.float()
    ids = tokens(2, 6)
    asked = dict(max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids))
    want = each.generate(ids, **asked)
    report = save(each, folder / "own")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "own")
    assert [str(s) for s in loaded.specs] == [str(s) for s in each.specs] and report.difference < 1e-5
    assert torch.equal(loaded.generate(ids, **asked), want)
    if plainly is not None:
        report = save_plainly(each, folder / "plain")
        assert report.loads_as == plainly and report.difference < 1e-4
        stock = AutoModelForCausalLM.from_pretrained(folder / "plain")
        assert type(stock).__name__ == plainly and torch.equal(stock.generate(ids, **asked), want)


def multi_head(bias=None, **options):
    """Float64, 4 heads of 8 channels with keys of their own."""
    more = {} if bias is None else {bias: True}
    return adopt(model(dtype=torch.float64, num_key_value_heads=4, **more, **options))


def grouped(kind="llama", **options):
    """Float64, 6 query heads of 8 channels, 3 a key head."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    return adopt(model(kind, dtype=torch.float64, **sizes, **options))
