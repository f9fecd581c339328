import time

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from manyheads.bench import timing
from manyheads.bench.timing import (
    Machine,
    PeakMemory,
    Timing,
    bandwidth,
    decode_ms,
    decoder,
    interleaved,
    kv_bytes,
    kv_bytes_per_token,
    peak_rss_mb,
)
from manyheads.convert.verify import _cache_name

CACHE = _cache_name(LlamaForCausalLM)
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
BYTES = 2 * 2 * 8 * 2 * 4  # keys and values, heads, width, layers, float32


@pytest.fixture
def model():
    return LlamaForCausalLM(CONFIG).eval()


def test_timing():
    once = Timing((4.0, 1.0, 2.0, 3.0, 10.0))
    assert once.median == 3 and once.spread == (2, 4)
    assert str(once) == "3 ms (2 to 4)"
    assert Timing((2.0,)).spread == (2, 2)
    assert once.ratio(Timing(tuple(2 * sample for sample in once.samples))) == 2
    with pytest.raises(ValueError):
        once.ratio(Timing((1.0,)))


def test_interleaved_rotates():
    calls = []
    result = interleaved({name: (lambda name=name: calls.append(name)) for name in "abc"}, rounds=3, warmup=2)
    assert "".join(calls[6:]) == "abcbcacab"
    assert len(calls) == 15 and all(len(result[name].samples) == 3 for name in "abc")
    with pytest.raises(ValueError, match="nothing to time"):
        interleaved({}, rounds=3)


def test_interleaved_measures_milliseconds():
    result = interleaved({"long": lambda: time.sleep(0.02), "short": lambda: time.sleep(0.002)}, rounds=3)
    assert 20 <= result["long"].median < 200
    assert result["short"].ratio(result["long"]) > 1.5


def calls_of(model):
    """(rows, tokens, cached before) of each forward."""
    seen = []

    def note(module, args, kwargs):
        cache = kwargs[CACHE]
        seen.append((*args[0].shape, cache.get_seq_length() if cache is not None else 0))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def test_decode_prefills_in_parts_then_steps(model, monkeypatch):
    monkeypatch.setattr(timing, "_ROWS", 10)
    seen = calls_of(model)
    assert len(decode_ms(model, context=23, steps=4, warmup=2).samples) == 4
    assert seen == [(1, 10, 0), (1, 10, 10), (1, 3, 20), *((1, 1, 23 + step) for step in range(6))]


def test_decode_repeats_one_prefilled_sequence(model):
    seen = calls_of(model)
    decode_ms(model, context=9, batch=3, steps=1, warmup=0)
    assert seen == [(1, 9, 0), (3, 1, 9)]


def test_decode_fills_every_sequence_of_a_given_cache(model):
    seen, made = calls_of(model), []

    def static():
        made.append(StaticCache(CONFIG, max_cache_len=16))
        return made[-1]

    decoder(model, 9, 3, static)()
    assert [call[:2] for call in seen] == [(3, 9), (3, 1)] and len(made) == 1


def test_decode_fills_every_sequence_where_the_cache_does_not_repeat(model, monkeypatch):
    monkeypatch.setattr(DynamicCache, "batch_repeat_interleave", lambda self, repeats: None)
    seen = calls_of(model)
    decoder(model, 9, 3)()
    assert seen == [(1, 9, 0), (3, 9, 0), (3, 1, 9)]


def test_decode_refuses(model):
    with pytest.raises(ValueError, match="at least 1"):
        decode_ms(model, context=0)


@torch.no_grad()
def filled(model, cache, tokens=10, rows=2):
    model(torch.ones(rows, tokens, dtype=torch.long), use_cache=True, **{CACHE: cache})
    return cache


def test_bytes_of_stock_caches(model):
    dynamic = filled(model, DynamicCache())
    assert kv_bytes(dynamic) == 20 * BYTES
    assert kv_bytes_per_token(dynamic, 20) == BYTES
    assert kv_bytes(filled(model, StaticCache(CONFIG, max_cache_len=16))) == 2 * 16 * BYTES
    assert kv_bytes(DynamicCache()) == 0


def test_bytes_are_of_storage(model):
    cache = filled(model, DynamicCache())
    layer = cache.layers[0]
    layer.values = layer.keys  # one storage, two names
    assert kv_bytes(cache) == 20 * BYTES * 3 // 4
    layer.keys = layer.values = torch.empty(2, 2, 100, 8)[:, :, :10]  # room for more is paid for
    assert kv_bytes(cache) == 20 * BYTES // 2 + 2 * 2 * 100 * 8 * 4


def test_a_cache_may_count_itself():
    class Own:
        def bytes(self):
            return 1200

    assert kv_bytes_per_token(Own(), 10) == 120
    with pytest.raises(ValueError, match="at least 1"):
        kv_bytes_per_token(Own(), 0)


def take(megabytes):
    held = torch.ones(megabytes * 2**18)
    time.sleep(0.03)
    del held


@pytest.mark.parametrize("resettable", [True, False])
def test_peak_memory(resettable, monkeypatch):
    if not resettable:
        monkeypatch.setattr(timing, "_reset_peak", lambda: False)
    take(200)
    with PeakMemory() as outer:
        take(120)
        with PeakMemory() as inner:
            take(60)
        with PeakMemory() as later:
            pass
    assert outer.added_mb == pytest.approx(120, abs=25)
    assert inner.added_mb == pytest.approx(60, abs=25)
    assert later.added_mb < 25
    assert peak_rss_mb() >= outer.start_mb + 170  # before the block, and not forgotten
    assert not PeakMemory._open


def test_floor():
    machine = Machine(read=50, matmul=100)
    assert machine.floor_ms(bytes=5e8) == 10
    assert machine.floor_ms(bytes=5e8, flops=2e9) == 20


def test_bandwidth():
    machine = bandwidth(megabytes=32, size=256, rounds=2)
    assert 0.1 < machine.read < 5000 and 0.1 < machine.matmul < 1e6
