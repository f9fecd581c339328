"""Oracles of `mw-mha`."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, heads_of, join, make, triangle, twin

from manyheads import Attention, Cache, OptionError, Site, Spec
from manyheads.core.kernel import using

ENCODER = Site(causal=False)
WIDTH, N = DIM // HEADS, 12


def spec(windows, extra=""):
    return f"gqa(bias=qkvo) + mw-mha(windows={[*windows]}{extra})"


def tables(layer, windows):
    """The bias table of each head, None for a global one."""
    parts = layer.positions[0].table.split([max(2 * w - 1, 0) for w in windows])
    return [part if len(part) else None for part in parts]


def written_out(layer, x, windows):
    """Every window of every head on its own."""
    p, heads = layer.project, []
    q, k, v = (heads_of(f(x), HEADS) for f in (p.q_proj, p.k_proj, p.v_proj))
    for h, (w, table) in enumerate(zip(windows, tables(layer, windows), strict=True)):
        w, outs = w or x.shape[1], []
        for first in range(0, x.shape[1], w):
            cut = slice(first, first + w)
            scores = q[:, h, cut] @ k[:, h, cut].transpose(-1, -2) * WIDTH**-0.5
            if table is not None:
                at = torch.arange(scores.shape[-1])
                scores = scores + table[at[:, None] - at + w - 1]
            outs.append(scores.softmax(-1) @ v[:, h, cut])
        heads.append(torch.cat(outs, 1))
    return join(torch.stack(heads, 1), p.o_proj)


@pytest.mark.parametrize("windows", [(2, 3, 4, 0), (1, 6, 12, 2), (5, 7, 0, 30)])
def test_written_out(windows):
    """5, 7 and 30 do not divide the 12 tokens: the last window is shorter."""
    layer, x = make(spec(windows), site=ENCODER), batch(N)
    close(layer(x), written_out(layer, x, windows))


def test_all_global_is_plain_attention():
    layer, x = make(spec([0] * HEADS), site=ENCODER), batch(N)
    close(layer(x), twin(layer, "gqa(bias=qkvo)")(x))
    assert not len(layer.positions[0].table)


def test_windows_of_the_whole_sequence_with_empty_tables_are_plain_attention():
    layer, x = make(spec([N] * HEADS), site=ENCODER), batch(N)
    differ(layer(x), twin(layer, "gqa(bias=qkvo)")(x))
    layer.positions[0].table.data.zero_()
    close(layer(x), twin(layer, "gqa(bias=qkvo)")(x))


def test_windows_of_one_return_the_value():
    layer, x = make(spec([1] * HEADS), site=ENCODER), batch(N)
    close(layer(x), layer.project.o_proj(layer.project.v_proj(x)))


@pytest.mark.parametrize("window", [2, 3, 6])
def test_nothing_outside_the_window_matters(window):
    layer, x = make(spec([window] * HEADS), site=ENCODER), batch(N).requires_grad_()
    for t in range(N):
        (gradient,) = torch.autograd.grad(layer(x)[:, t].sum(), x)
        assert ((gradient != 0).any(-1)[0] == (torch.arange(N) // window == t // window)).all()


def test_a_constant_on_a_table_changes_nothing():
    windows = (2, 3, 4, 12)
    layer, x = make(spec(windows), site=ENCODER), batch(N)
    want = layer(x)
    for c, table in enumerate(tables(layer, windows), 1):
        table.data += c
    close(layer(x), want)


def test_permuting_whole_windows():
    layer, x = make(spec([2, 4, 4, 1]), site=ENCODER), batch(N)
    order = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7])
    close(layer(x[:, order]), layer(x)[:, order])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_the_loop():
    windows = (2, 3, 0, 5)
    layer, x = make(spec(windows), site=ENCODER), batch(N)
    layer.positions[0].table.data.zero_()
    plain = twin(layer, f"gqa(bias=qkvo) + multi_window(windows={[*windows]})")
    with torch.no_grad(), using("flex"):
        got = plain(x)
    close(got, written_out(layer, x, windows))


@pytest.mark.parametrize("window", [3, 4, 6])
def test_shifted_windows_are_rolled_ones_that_do_not_wrap(window):
    """As the authors: roll by w // 2, attend in windows, hide what wrapped around, roll back."""
    odd = make(f"gqa + multi_window(windows={[window] * HEADS}, shift=true)", site=Site(1, 2, causal=False))
    even, x = make(str(odd.spec), site=Site(0, 2, causal=False)), batch(N)
    rolled, at = x.roll(-(window // 2), 1), torch.arange(N)
    region = (at >= N - window // 2).long()
    mask = (at[:, None] // window == at // window) & (region[:, None] == region)
    plain = twin(odd, "gqa")
    close(odd(x), plain(rolled, mask=mask[None, None]).roll(window // 2, 1))
    close(even(x), twin(even, "gqa")(x, mask=(at[:, None] // window == at // window)[None, None]))


@pytest.mark.parametrize(("windows", "kept"), [((2, 3, 4, 5), 4), ((1, 1, 1, 1), 1), ((2, 0, 3, 4), N)])
def test_causal_use(windows, kept):
    layer, x, cache = make(f"gqa + mw-mha(windows={[*windows]})"), batch(N), Cache()
    close(decoded(layer, x, 1, cache), layer(x))
    close(decoded(layer, x, 5), layer(x))
    assert cache.bytes() == len(x) * kept * 2 * DIM * 8 == len(x) * layer.spec.cost(DIM, HEADS).cache_bytes(N, 8)
    at = torch.arange(N)
    mask = torch.stack([triangle(N) & ((at[:, None] // w == at // w) if w else True) for w in windows])[None]
    plain = twin(layer, f"gqa + window_bias(windows={[*windows]})")
    close(layer(x), plain(x, mask=mask))


def test_windows_follow_each_sequences_own_positions():
    layer, x = make("gqa + mw-mha(windows=[2, 3, 0, 5])"), batch(N)
    valid = torch.arange(N)[None] >= torch.tensor([[0], [4]])
    close(layer(x, mask=valid)[1, 4:], layer(x[1:, 4:])[0])


def test_cost_and_first_tables():
    windows = [2, 5, 10, 25, 50, 125, 0, 0]
    layer = Attention("gqa + mw-mha", 384, 8, site=ENCODER)
    base = Spec.parse("gqa").cost(384, 8, ENCODER).parameters
    assert layer.spec.cost(384, 8, ENCODER).parameters - base == sum(2 * w - 1 for w in windows if w)
    for table in tables(layer, windows)[2:6]:
        assert 0 < table.abs().max() <= 2 * (0.02 / len(table)) ** 0.5
    assert tables(layer, windows)[5].var().item() == pytest.approx(0.774 * 0.02 / 249, rel=0.25)


def test_the_preset_is_both_parts():
    assert str(Spec.parse("mw-mha(windows=[2, 0])")) == "window_bias(windows=[2, 0]) + multi_window(windows=[2, 0])"


@pytest.mark.parametrize("part", ["multi_window", "window_bias"])
def test_refusals(part):
    with pytest.raises(OptionError, match=rf"{part}: windows \[2, 3\] for 4 heads; give one for each"):
        Attention(f"{part}(windows=[2, 3])", DIM, HEADS)
    with pytest.raises(OptionError, match=rf"{part}: windows \[2, 3, -1, 0\]"):
        Attention(f"{part}(windows=[2, 3, -1, 0])", DIM, HEADS)
    with pytest.raises(OptionError, match="both take the slot 'position'"):
        Attention("rope + window_bias(windows=[2, 3, 1, 0])", DIM, HEADS)
