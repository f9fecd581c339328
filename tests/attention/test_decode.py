"""What a decoding step makes: no tensor as large as the rows it reads, whatever acts on them when they are read."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyheads import Attention, Cache, Site, SpecError
from manyheads.core.kernel import Call, attend
from manyheads.core.mask import Axis, Mask
from manyheads.core.registry import all_parts
from manyheads.testing import Case
from manyheads.testing.conformance import decode

BATCH, HEADS, WIDTH, CONTEXT = 1, 8, 32, 512
ROWS = BATCH * HEADS * CONTEXT * WIDTH  # numbers in the keys of all heads

SIZED = {
    "cog-attention": "cog-attention(soft_ends=false)",
    "moh": "moh(top=6)",
    "longheads": "longheads(chunk=32, chunks=4)",
    "qada": "qada(window=64)",
    "softmax": "softmax(cap=30.0)",
    "window": "window(128)",
}
SHARE = {
    "longheads": 0.26,  # the keys of its chunks
    "gla": 0.63,  # a rotary key beside each block, copied into it
    "mlra": 0.76,  # the same
    "mhla": 0.63,  # the sums of its blocks, which hold a key and a value for every channel
    "masa": 0.51,  # its weights, which are combinations made anew
    "typed_mla": 1.07,  # its rows beside the kinds of their tokens
    "smha": 1.01,  # rows put back beside the heads that hold none of them
    "super-attention": 4.1,  # a row of its own for each pair of positions, and raw rows that each new value is made of
}
"""How much of `ROWS` the largest tensor may be where it may be more than a quarter."""


class Largest(TorchDispatchMode):
    """The largest tensor made inside that has memory of its own."""

    numbers, made = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for each in tree_leaves(out):
            new = isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given
            if new and each.numel() > self.numbers:
                self.numbers, self.made = each.numel(), f"{func} {[*each.shape]}"
        return out


def largest(spec, monkeypatch):
    """Of one step at `CONTEXT`, small tiles standing for a long context."""
    for module in ("core.kernels.grouped", "attention.transform.iha"):
        for name in ("SPREAD_BYTES", "MADE_BYTES"):
            monkeypatch.setattr(sys.modules[f"manyheads.{module}"], name, ROWS, raising=False)
    layer, cache = Attention(spec, HEADS * WIDTH, HEADS, site=Site(max_len=2 * CONTEXT)).eval(), Cache()
    with torch.no_grad():
        layer(torch.randn(BATCH, CONTEXT, HEADS * WIDTH), cache=cache)
        layer(torch.randn(BATCH, 1, HEADS * WIDTH), cache=cache)
        with Largest() as step:
            layer(torch.randn(BATCH, 1, HEADS * WIDTH), cache=cache)
    return step


@pytest.mark.parametrize("name", all_parts())
def test_a_step_makes_nothing_as_large_as_the_rows(name, monkeypatch):
    torch.manual_seed(0)
    try:
        step = largest(SIZED.get(name, name), monkeypatch)
    except SpecError as error:
        pytest.skip(str(error))
    assert step.numbers <= SHARE.get(name, 0.251) * ROWS, step.made


@pytest.mark.parametrize(
    "spec",
    [
        "gqa(kv_heads=2) + head_composition(kv_heads=8)",
        "mhe(combine=add)",
        "qkv-sharing(kv_heads=4) + rope(pairing=interleaved)",
        "qkv-sharing(tie=qkv)",
        "gqa(kv_heads=2) + talking_heads",
        "gqa(kv_heads=4) + iha(pseudo=3, order=block)",
        "gqa(kv_heads=4) + mgk",
        "gqa + gda",
        "gqa + longheads(chunk=32, chunks=32)",
    ],
)
def test_nor_do_these(spec, monkeypatch):
    assert largest(spec, monkeypatch).numbers <= 0.3 * ROWS


@pytest.mark.parametrize(
    "spec",
    [
        "gqa(kv_heads=2) + head_composition(kv_heads=4) + kha + rope(none)",
        "gqa + head_composition",
        "gqa + iha(pseudo=3)",
        "gqa(kv_heads=2) + iha(pseudo=2, order=token, collapse=global)",
        "gqa(kv_heads=2) + mgk(positions=6, learned=true)",
        "gta + kha",
        "mhe",
        "mhe(combine=add) + rope(scaling=yarn, factor=4.0)",
        "qkv-sharing(kv_heads=2) + window(7)",
    ],
)
def test_few_tokens_at_a_time_give_what_many_do(spec):
    """The full pass is so long that it works on rows, the blocks on queries."""
    case = Case(spec, tokens=41)
    layer, seen = case.layer(), []
    keys = layer.project.keys
    layer.project.keys = lambda q, flow: seen.append((flow.q.length, flow.few)) or keys(q, flow)
    layer(case.x), layer(case.x[:, :1])
    assert seen == [(41, False), (1, True)]
    decode(case)


def call_of(heads, groups, values, wide=1, beside=1, tables=0, t=1):
    q = torch.randn(2, heads, t, max(1, tables) * wide * 6, dtype=torch.float64)
    k, v = (torch.randn(2, rows, 9, 6, dtype=torch.float64) for rows in (groups * wide, values * beside))
    spread = tuple(torch.randn(1, 1, 9, 6, dtype=torch.float64) for _ in range(tables))
    return Call(q, k, v, Mask(Axis(t, 0), Axis(9, 0), ()), 0.3, beside=beside, spread=spread)


@pytest.mark.parametrize("t", [1, 5])
@pytest.mark.parametrize("form", [
    dict(wide=2), dict(beside=3), dict(tables=2), dict(wide=2, beside=2, tables=2), dict(groups=1, wide=4),
])  # fmt: skip
def test_rows_as_they_are_cached_are_read_as_whole_ones(form, t, monkeypatch):
    monkeypatch.setattr(sys.modules["manyheads.core.kernels.grouped"], "SPREAD_BYTES", 1000)
    call = call_of(**{"heads": 8, "groups": 4, "values": 4, "t": t, **form})
    whole = call.whole
    assert whole.key_rows == whole.beside == 1 and not whole.spread and whole.k.shape[1] == whole.v.shape[1]
    k, v = (x.repeat_interleave(8 // x.shape[1], 1) for x in (whole.k, whole.v))
    want = (call.q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v
    for kernel in ("grouped", "sdpa", "tiled"):
        torch.testing.assert_close(attend(call, kernel=kernel).o, want, atol=1e-12, rtol=1e-12)


def test_heads_that_are_one_are_read_once():
    """Expanded rows, and heads cut out of more, are not copied."""
    call = call_of(8, 8, 8)
    rows = torch.randn(2, 16, 600, 6, dtype=torch.float64)
    cut = Call(call.q, rows[:, 8:], rows[:, :1].expand(-1, 8, -1, -1), Mask(Axis(1, 0), Axis(600, 0), ()), 0.3)
    with Largest() as step:
        o = attend(cut, kernel="grouped").o
    assert step.numbers <= 2 * 8 * 600, step.made
    torch.testing.assert_close(o, attend(cut, kernel="tiled").o, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    "spec",
    [
        "gqa(kv_heads=2) + mgk + softmax(cap=3.0)",  # a cap finds the level of a key in its score
        "gqa(kv_heads=2) + iha(pseudo=2) + window(3, first=2)",  # the first tokens go by position
        "gqa + iha + window(4, first=3)",
        "multi_value(groups=2, key_dim=4, expand=1, scale=1.0) + head_composition(kv_heads=2)",
    ],
)
def test_what_works_on_scores_and_positions_finds_them_where_queries_are_few(spec):
    decode(Case(spec, tokens=41))
