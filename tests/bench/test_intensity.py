"""FLOPs and bytes of decoding: known numbers, a counter of real passes, and orders that give the same."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from manyheads import Attention, Cache
from manyheads.bench import intensity
from manyheads.bench.intensity import H100, H200, V3, Device, Latent, Operator, latent_orders, operators
from manyheads.core.kernel import using


def named(*args, **options):
    return {each.name: each for each in operators(*args, **options)}


def test_known_intensities():
    core = lambda spec, **more: named(spec, 1024, 8, **more)["cache"].intensity
    assert core("gqa") == core("gqa(kv_heads=8)") == 1 and core("gqa(kv_heads=2)") == 4 and core("gqa(kv_heads=1)") == 8
    assert core("gqa(kv_heads=2)", cache_bytes=1) == 8
    assert core("gqa", batch=7, context=99) == 1 and core("gqa", queries=5, context=99) == 5
    mla = "mla(rank=512, rope_dim=64, nope_dim=128, v_dim=128)"
    assert named(mla, 7168, 128)["cache"].intensity == pytest.approx(241.78, abs=0.01)
    assert named("gqa", 64, 4, batch=6, queries=2)["weights"].intensity == 12
    assert round(H100.ridge) == 295 and round(H200.ridge) == 206


def test_a_prefix_that_sequences_share_is_read_once():
    alone = named("gqa", batch=1, context=100, prefix=60)
    assert alone == named("gqa", batch=1, context=100)
    whole = named("gqa", batch=8, context=100, prefix=100)["cache"]
    assert whole.intensity == 8 * alone["cache"].intensity
    half = named("gqa", batch=8, context=100, prefix=50)["cache"]
    assert half.bytes == alone["cache"].bytes * (8 * 50 + 50) / 100
    with pytest.raises(ValueError, match="a prefix of 101"):
        operators("gqa", context=100, prefix=101)


@pytest.mark.parametrize("spec", ["gqa(kv_heads=2)", "gqa(head_dim=8, v_dim=3)", "mla(rank=9, rope_dim=4)",
                                  "mla(rank=9, rope_dim=4, q_rank=7)"])  # fmt: skip
def test_flops_are_those_of_a_real_step(spec):
    layer, cache = Attention(spec, 24, 4).eval(), Cache()
    with torch.no_grad():
        layer(torch.randn(3, 10, 24), cache=cache)
        with FlopCounterMode(display=False) as counter, using("grouped"):  # what is fused is not counted
            layer(torch.randn(3, 1, 24), cache=cache)
    found = operators(spec, 24, 4, batch=3, context=11)
    assert sum(each.flops for each in found) == counter.get_total_flops()
    assert named(spec, 24, 4, batch=3, context=11, cache_bytes=4)["cache"].bytes == cache.bytes()


def test_states_and_windows():
    found = named("retnet", 64, 4, batch=2, context=1000)
    assert "cache" not in found and found["state"].bytes > 0
    short, long = (named("gqa + window(size=16)", 64, 4, context=n)["cache"] for n in (100, 1000))
    assert short == long and short.bytes == named("gqa", 64, 4, context=16)["cache"].bytes


def test_time_is_the_slower_of_both_and_grows():
    device = Device("toy", 100.0, 10.0)
    assert device.ridge == 10 and Operator("a", 100, 10.0).bound(device) == "compute"
    assert Operator("a", 99, 10.0).bound(device) == "memory" and Operator("a", 50, 20.0).seconds(device) == 2.0
    for key in ("batch", "context"):
        times = [intensity.seconds(operators("gqa", **{key: n}), H200) for n in (1, 8, 64, 512, 4096)]
        assert times == sorted(times)


def test_experts():
    dense = intensity.experts(1, 1, 1000, 40)[0]
    assert intensity.experts(8, 8, 125, 40)[0].flops == dense.flops
    assert intensity.experts(8, 8, 125, 40)[0].bytes == pytest.approx(dense.bytes)  # all experts are a dense layer
    routed = intensity.experts(256, 8, 1000, 320, balanced=True)[0]
    assert routed.intensity == pytest.approx(320 * 8 / 256)
    assert intensity.touched(256, 8, 1) == pytest.approx(8) and intensity.touched(256, 8, 10_000) == pytest.approx(256)
    assert intensity.balanced_batch(H100, 256, 8) == pytest.approx(32 * H100.ridge, abs=1)
    assert intensity.balanced_batch(H100) == 296
    assert intensity.experts(8, 2, 10, 4, shared=20)[1] == Operator("shared experts", 160, 40)
    assert intensity.exchanged(4, 2, 16) == 2 * 4 * 2 * 16 * 2
    assert intensity.largest_batch(100.0, 20.0, 2.0, 10) == 4
    with pytest.raises(ValueError, match="3 of 2 experts"):
        intensity.experts(2, 3, 10, 1)
    with pytest.raises(ValueError, match="must hold a cache"):
        intensity.largest_batch(10.0, 20.0, 2.0, 10)


# --- orders of a layer of latent attention


class Orders:
    """A layer of latent attention, computed in each order; x of new tokens `[B, Q, D]`, latents of all tokens."""

    def __init__(self, shape: Latent):
        torch.manual_seed(0)
        s = self.s = shape
        r_q = s.q_rank or s.dim
        new = lambda *size: torch.randn(*size, dtype=torch.float64) / 4
        self.dq, self.dkv = (new(s.dim, s.q_rank) if s.q_rank else None), new(s.dim, s.rank + s.rope)
        self.uq, self.rq = new(s.heads, r_q, s.nope), new(s.heads, r_q, s.rope)
        self.uk, self.uv = new(s.heads, s.nope, s.rank), new(s.heads, s.v, s.rank)
        self.o = new(s.heads, s.v, s.dim)
        self.product = self.uq @ self.uk
        self.values = self.uv.mT @ self.o

    def __call__(self, name, x, past, mask, stored):
        s = self.s
        latent = torch.cat([past, x @ self.dkv], 1)
        c, k_r = latent.split([s.rank, s.rope], -1)
        c_q = x if self.dq is None else x @ self.dq
        flat = lambda a, w: (a.transpose(0, 1).flatten(1, 2) @ w).unflatten(1, (len(x), -1)).transpose(0, 1)
        wide = lambda a: a[:, None].expand(-1, s.heads, -1, -1)
        q_r = flat(wide(c_q), self.rq)
        if name == "expand":
            q, k, v = flat(wide(c_q), self.uq), flat(wide(c), self.uk.mT), flat(wide(c), self.uv.mT)
            scores = q @ k.mT
        else:
            if name == "chain":
                q = flat(flat(wide(c_q), self.uq), self.uk)
            else:
                q = flat(wide(c_q), self.product if name == "reuse" else self.uq @ self.uk)
            scores = q @ wide(c).mT
            v = wide(c)
        scores = scores + q_r @ wide(k_r).mT
        z = (scores * (s.nope + s.rope) ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v
        if name != "expand" and not stored:
            z = flat(z, self.uv.mT)
        out = self.values if stored and name != "expand" else self.o
        return z.transpose(1, 2).flatten(2) @ out.flatten(0, 1)


@pytest.mark.parametrize("q_rank", [0, 6])
@pytest.mark.parametrize("stored", [False, True])
def test_all_orders_give_the_same_and_take_what_is_said(q_rank, stored):
    shape = Latent(dim=10, heads=3, rank=8, rope=2, nope=4, v=5, q_rank=q_rank)
    layer, x, past = Orders(shape), torch.randn(2, 3, 10).double(), torch.randn(2, 6, 10).double()
    mask = torch.ones(3, 9, dtype=torch.bool).tril(6)
    mask[1, 2] = False
    found = latent_orders(shape, batch=2, context=9, queries=3, stored_output=stored)
    outs = {}
    for name, each in found.items():
        with FlopCounterMode(display=False) as counter:
            outs[name] = layer(name, x, past, mask, stored)
        assert sum(op.flops for op in each) == counter.get_total_flops(), name
    for out in outs.values():
        torch.testing.assert_close(out, outs["chain"], atol=1e-12, rtol=1e-12)


def test_numbers_of_a_large_model():
    found = latent_orders(V3)
    weights = {name: next(op for op in each if op.name == "queries").bytes // 2 for name, each in found.items()}
    assert weights["reuse"] == 100_663_296 and weights["chain"] == weights["recompute"] == 33_554_432
    reuse, recompute = ({op.name: op for op in found[name]} for name in ("reuse", "recompute"))
    assert recompute["queries"].flops - reuse["queries"].flops == 2 * 128 * 1536 * 128 * 512
    assert {k: v for k, v in reuse.items() if k != "queries"} == {k: v for k, v in recompute.items() if k != "queries"}
    assert round(V3.crossover) == 171 and Latent(8, 2, 2, 0, 2, 2).crossover == float("inf")


def test_the_best_order_changes_once_with_the_number_of_queries():
    def flops(name, q):
        kept = ("attention", "keys and values")
        return sum(op.flops for op in latent_orders(V3, context=1024, queries=q)[name] if op.name in kept)

    best = [flops("chain", q) < flops("expand", q) for q in (1, 64, 170, 171, 512)]
    assert best == [True, True, True, False, False]
    assert intensity.fastest(latent_orders(V3, context=4096), H200) == "chain"
    assert intensity.fastest(latent_orders(V3, context=1024, queries=1024), H200) == "expand"
    small = Latent(dim=64, heads=4, rank=8, rope=4, nope=16, v=16, q_rank=8)
    assert intensity.fastest(latent_orders(small), H200) == "reuse"  # products pay for small latents
    assert intensity.energy([Operator("a", 10, 4)], 0.5, 2.0) == 13
    with pytest.raises(ValueError, match="9 queries"):
        latent_orders(small, context=8, queries=9)
