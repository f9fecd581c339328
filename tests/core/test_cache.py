"""The cache: growth in place, bytes from storage, going back, forking, slots, and the library's stock caches."""

import itertools

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, StaticCache

import manyheads as mh
from manyheads.core.buffers import SLACK, Growing, Slots
from manyheads.core.cache import Cache, Trial, write_stock
from manyheads.core.entries import Entry, State
from manyheads.core.mask import Axis

DIM, HEADS = 24, 4


def make(spec, **options):
    layer = mh.Attention(spec, DIM, HEADS, **options).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def tokens(n, batch=2):
    return torch.randn(batch, n, DIM, dtype=torch.float64)


def rows(n, batch=1, width=2):
    return torch.randn(batch, 1, n, width)


def same(got, want):
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


# Growing


def test_growth_is_in_place_for_runs_of_steps():
    """A step writes one row; the storage moves a few times in hundreds of steps, and never loses a row."""
    growing, fed, places = Growing(), [], []
    for n in [5] + [1] * 300:
        fed.append(rows(n))
        seen = growing.append(fed[-1])
        places.append(growing.buffer.data_ptr())
    assert torch.equal(seen, torch.cat(fed, 2))
    moves = sum(a != b for a, b in itertools.pairwise(places))
    assert moves <= 5
    assert growing.buffer.shape[2] <= 305 + 64 + 305 // 8


def test_a_window_keeps_what_can_be_seen_and_uses_its_storage_again():
    growing, fed = Growing(keep=3), torch.empty(1, 1, 0, 2)
    for n in [2, 1, 4, 1] + [1] * 400:
        new = rows(n)
        seen = growing.append(new)
        assert torch.equal(seen, torch.cat([fed[:, :, -3:], new], 2)[:, :, -(3 + n) :])
        fed = torch.cat([fed, new], 2)
        assert growing.rows().shape[2] == min(3, fed.shape[2])
    assert growing.buffer.shape[2] <= 3 + 1 + SLACK + 64


@pytest.mark.parametrize("steps", [5, 100, 131, 300])
def test_going_back_in_a_window_gives_the_rows_of_then_or_none(steps):
    """Whatever is still there is right, up to SLACK tokens always works, and lost rows are never invented."""
    fed = [rows(1) for _ in range(steps)]
    for back in (1, 7, SLACK, SLACK + 1, 120, steps):
        growing = Growing(keep=4)
        for row in fed:
            growing.append(row)
        place = growing.before(back)
        if place is None:
            assert back > min(SLACK, steps), f"{back} of {steps} is refused"
            continue
        growing.drop(back)
        left = fed[: steps - back]
        want = torch.cat(left, 2)[:, :, -4:] if left else torch.empty(1, 1, 0, 2)
        assert torch.equal(growing.rows(), want)


def test_gradient_flows_through_stored_rows():
    growing, parts = Growing(), [rows(2).requires_grad_(), rows(1).requires_grad_(), rows(3).requires_grad_()]
    for part in parts:
        seen = growing.append(part)
    grads = torch.autograd.grad(seen.pow(2).sum(), parts)
    for part, grad in zip(parts, grads, strict=True):
        torch.testing.assert_close(grad, 2 * part)


# A cache of a layer


SPECS = ["gqa", "gqa(kv_heads=2)", "gqa(kv_heads=1)", "mla(rank=8, rope_dim=4)", "mfa", "mfa(key_reuse=true)"]
SPECS += ["gqa + window(3)", "gqa + alibi", "mtla(stride=2)", "mtla(stride=3)", "gqa + window([2, 9, 4, 1])"]


def decode(layer, x, blocks, cache, **options):
    out, at = [], 0
    with torch.no_grad():
        for n in blocks:
            cut = {name: value[:, at : at + n] for name, value in options.items()}
            out.append(layer(x[:, at : at + n], cache=cache, **cut))
            at += n
    return torch.cat(out, 1)


@pytest.mark.parametrize("spec", SPECS)
def test_decoding_in_any_blocks_equals_the_full_pass(spec):
    layer, x = make(spec), tokens(11)
    full = layer(x)
    for blocks in ([11], [5, 1, 1, 4], [1] * 11, [3, 5, 3]):
        same(decode(layer, x, blocks, Cache()), full)


@pytest.mark.parametrize("spec", SPECS)
def test_positions_count_on_from_each_sequences_own_tokens(spec):
    """Left and right padding, and a sequence that has not begun yet: nobody has to pass positions.

    A window counts padding between tokens, so that it holds without.
    """
    layer, x = make(spec), tokens(9, batch=3)
    valid = torch.tensor([[1] * 9, [0] * 5 + [1] * 4, [0, 1, 1, 0, 0, 1, 1, 1, 1]]).bool()
    if "window" in spec:
        valid[2] = valid[1]
    for blocks in ([5, 1, 1, 1, 1], [5, 4], [3, 2, 4], [1, 1, 1, 2, 4]):
        got = decode(layer, x, blocks, Cache(), mask=valid)
        for row in range(3):
            alone = layer(x[row : row + 1, valid[row]])[0]
            same(got[row, valid[row]], alone)
    unmasked = Cache()
    first = decode(layer, x[:2], [5], unmasked, mask=valid[:2])
    rest = torch.cat([layer(x[:2, t : t + 1], cache=unmasked) for t in range(5, 9)], 1).detach()
    same(torch.cat([first, rest], 1)[0], layer(x[:1])[0])
    same(rest[1], layer(x[1:2, 5:])[0])


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        ("gqa", 2 * 4 * 6 * 10),
        ("gqa(kv_heads=1)", 2 * 6 * 10),
        ("mla(rank=8, rope_dim=4)", 12 * 10),
        ("mtla(stride=2, rank=8, rope_dim=4)", 12 * 5),
        ("mtla(stride=4, rank=8, rope_dim=4)", 12 * 3),
        ("gqa(kv_heads=2) + window(4)", 2 * 2 * 6 * 3),
    ],
)
def test_bytes_are_what_storage_holds(spec, numbers):
    layer, cache = make(spec), Cache()
    decode(layer, tokens(10), [4, 1, 5], cache)
    assert cache.bytes() == 2 * numbers * 8
    assert cache.reserved_bytes() >= cache.bytes()
    site = cache.site(0)
    assert cache.bytes() == sum(t.nbytes for t in site.tensors())
    assert cache.reserved_bytes() == sum(t.untyped_storage().nbytes() for t in site.buffers())


def test_rows_are_kept_in_the_dtype_an_entry_asks_for():
    cache, entries = Cache(), {"k": Entry(1, 2, dtype=torch.bfloat16)}
    cache.write(0, {"k": rows(3)}, entries, Axis(3, 0))
    assert cache.bytes() == 3 * 2 * 2


def test_every_site_reports_its_length_in_tokens():
    """Prefill 5 with 4 heads: 5 at every layer; a window's kept rows are told apart from the tokens seen."""
    layers = [make(spec, site=mh.Site(layer=i, layers=3)) for i, spec in enumerate(["gqa", "gqa + window(3)", "mla"])]
    cache, x = Cache(), tokens(5)
    for _ in range(2):
        for layer in layers:
            layer(x, cache=cache)
    assert cache.length() == 10 and cache.get_seq_length() == 10
    assert [cache.length(i) for i in range(3)] == [10, 10, 10]
    assert [next(cache.site(i).tensors()).shape[2] for i in range(3)] == [10, 2, 10]
    assert cache.get_mask_sizes(1, 0) == (11, 0)
    cache.reset()
    assert cache.length() == 0 and cache.bytes() == 0


@pytest.mark.parametrize("spec", [s for s in SPECS if "mtla" not in s])
def test_rollback(spec):
    """After going back, the rest is as if the tokens had never been."""
    layer, x = make(spec), tokens(9)
    cache = Cache()
    decode(layer, x, [5], cache)
    decode(layer, tokens(3), [2, 1], cache)
    cache.rollback(3)
    assert cache.length() == cache.length(0) == 5
    same(decode(layer, x[:, 5:], [1, 3], cache), layer(x)[:, 5:])


def test_rollback_of_a_padded_batch():
    layer, x = make("gqa(kv_heads=2)"), tokens(9)
    valid = torch.tensor([[1] * 9, [0] * 4 + [1] * 5]).bool()
    cache = Cache()
    decode(layer, x, [6], cache, mask=valid)
    decode(layer, tokens(2), [2], cache)
    cache.rollback(2)
    same(decode(layer, x[:, 6:], [1, 2], cache)[1], layer(x, mask=valid)[1, 6:])


def test_a_refusal_to_go_back_says_why_and_changes_nothing():
    """Slots, states, rows that are gone, and more tokens than there were; no other site has moved either."""
    plain, slots = make("gqa"), make("mtla", site=mh.Site(layer=1, layers=2))
    cache, x = Cache(), tokens(6)
    for layer in (plain, slots):
        layer(x, cache=cache)
    with pytest.raises(ValueError, match="cannot go back 2 tokens: 'latent' merges tokens into slots in place"):
        cache.rollback(2)
    assert not cache.is_croppable
    assert [cache.length(), cache.length(0), cache.length(1)] == [6, 6, 6]

    window, at = make("gqa + window(3)"), Cache()
    decode(window, tokens(200), [1] * 200, at)
    assert at.is_croppable
    at.rollback(SLACK)
    with pytest.raises(ValueError, match=rf"a window keeps {SLACK} rows more than it sees"):
        at.rollback(130)
    with pytest.raises(ValueError, match=rf"cannot go back 999 tokens: it has seen {200 - SLACK}"):
        at.rollback(999)

    state = Cache()
    plain(x, cache=state)
    state.state(0)["sum"] = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="the state 'sum' keeps no history"):
        state.rollback(1)
    assert State((3,)).history is False


@pytest.mark.parametrize("spec", SPECS)
def test_forks_are_independent_and_the_prefix_is_untouched(spec):
    """One prefill, three suffixes, each as in the full run; the prefix stays the same to the bit."""
    layer, prefix = make(spec), tokens(20, batch=1)
    cache = Cache()
    decode(layer, prefix, [20], cache)
    frozen = [t.clone() for t in cache.site(0).tensors()]
    for n in (1, 2, 5):
        suffix, fork = tokens(n, batch=1), cache.fork(torch.tensor([0]))
        same(decode(layer, suffix, [1] * n, fork), layer(torch.cat([prefix, suffix], 1))[:, 20:])
        assert cache.length() == 20 and fork.length() == 20 + n
        assert all(torch.equal(a, b) for a, b in zip(frozen, cache.site(0).tensors(), strict=True))
    both, suffixes = cache.fork(torch.tensor([0, 0])), tokens(2)
    got = decode(layer, suffixes, [2], both)
    same(got[1:], layer(torch.cat([prefix, suffixes[1:]], 1))[:, 20:])


@pytest.mark.parametrize("spec", SPECS)
def test_reorder_and_repeat_of_the_batch(spec):
    """Beams: sequences move with their rows, positions, padding and slots."""
    layer, x = make(spec), tokens(7)
    valid = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7]).bool()
    full = layer(x, mask=valid)

    def begun():
        cache = Cache()
        decode(layer, x, [4], cache, mask=valid)
        return cache

    cache = begun()
    cache.reorder(torch.tensor([1, 0]))
    same(decode(layer, x[:, 4:].flip(0), [1, 2], cache), full[:, 4:].flip(0))
    cache = begun()
    cache.batch_repeat_interleave(2)
    same(decode(layer, x[:, 4:].repeat_interleave(2, 0), [1, 2], cache), full[:, 4:].repeat_interleave(2, 0))
    cache = begun()
    cache.batch_select_indices(torch.tensor([1]))
    same(decode(layer, x[1:, 4:], [1, 2], cache), full[1:, 4:])


def test_reordering_keeps_room_to_grow():
    """Beam search reorders at every step: the rows are copied once a step, not twice."""
    layer, cache = make("gqa"), Cache()
    decode(layer, tokens(4), [4], cache)
    cache.reorder(torch.tensor([1, 0]))
    place = next(cache.site(0).buffers()).data_ptr()
    decode(layer, tokens(3), [1, 1, 1], cache)
    assert next(cache.site(0).buffers()).data_ptr() == place


@pytest.mark.parametrize("spec", ["gqa(kv_heads=2)", "mla(rank=8, rope_dim=4)", "gqa + window(3)", "mtla(stride=2)"])
def test_gradient_flows_through_a_cached_pass(spec):
    """Two blocks with a cache have the gradient of one pass."""
    layer, x = make(spec), tokens(6).requires_grad_()
    want = torch.autograd.grad(layer(x).pow(2).sum(), [x, *layer.parameters()])
    cache = Cache()
    got = torch.cat([layer(x[:, :2], cache=cache), layer(x[:, 2:5], cache=cache), layer(x[:, 5:], cache=cache)], 1)
    for mine, theirs in zip(torch.autograd.grad(got.pow(2).sum(), [x, *layer.parameters()]), want, strict=True):
        same(mine, theirs)


# Slots


def merge(x, valid, position, stride):
    """Of each sequence: the newest row of every slot, by hand."""
    slots = {}
    for t in range(x.shape[0]):
        if valid[t]:
            slots[int(position[t]) // stride] = (int(position[t]), x[t])
    return slots


@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("blocks", [[1] * 13, [13], [4, 1, 5, 3], [2, 2, 1, 8]])
def test_a_slot_holds_its_newest_token(stride, blocks):
    """Left padding shifts no slot; several tokens a write; lengths that are no multiple of the stride."""
    x, padding = torch.randn(3, 1, 13, 2), torch.tensor([0, 1, 6])
    valid = torch.arange(13)[None] >= padding[:, None]
    position = (valid.long().cumsum(-1) - 1).clamp_min(0)
    slots, at = Slots(stride), 0
    for n in blocks:
        cut = slice(at, at + n)
        axis = Axis(n, at, position[:, cut], valid=valid[:, cut])
        seen = slots.write(x[:, :, cut], axis)
        at += n
        held = slots.seen()
        for b in range(3):
            want = merge(x[b, 0, :at], valid[b], position[b], stride)
            assert held.axis.validity[b].nonzero().flatten().tolist() == sorted(want)
            for slot, (place, row) in want.items():
                assert torch.equal(held[""][b, 0, slot], row)
                assert held.axis.position[b, slot] == place
                assert held.axis.time[b, slot] == place + padding[b]
        if n > 1:
            assert torch.equal(seen[""][:, :, -n:], x[:, :, cut]), "an earlier query must not see a slot's future"


def test_a_slot_of_padding_stays_empty_while_storage_grows():
    """Rows that are not kept never come back as a slot when the storage grows."""
    slots, n = Slots(2), 400
    valid = torch.ones(2, n, dtype=torch.bool)
    valid[1, 3:300] = False  # right padding, then decoding goes on
    position = (valid.long().cumsum(-1) - 1).clamp_min(0)
    for first in range(0, n, 4):
        cut = slice(first, first + 4)
        slots.write(torch.ones(2, 1, 4, 1), Axis(4, first, position[:, cut], valid=valid[:, cut]))
        held = slots.seen().axis.validity
        for b in range(2):
            told = int(valid[b, : first + 4].sum())
            assert held[b].sum() == (told + 1) // 2, f"after {first + 4} tokens"


# Stock caches


def static_cache(length=16):
    config = LlamaConfig(
        hidden_size=DIM, num_attention_heads=HEADS, num_key_value_heads=HEADS, num_hidden_layers=1, vocab_size=8
    )
    return StaticCache(config, max_cache_len=length)


@pytest.mark.parametrize("make_stock", [DynamicCache, static_cache])
@pytest.mark.parametrize("widths", [((2, 3),), ((2, 3), (2, 3)), ((2, 5), (1, 3)), ((1, 2), (3, 1), (2, 4))])
def test_entries_survive_a_stock_cache(make_stock, widths):
    """One, two or three entries, of any heads and widths, come back as they went in."""
    cache = make_stock()
    entries = {f"e{i}": Entry(*each) for i, each in enumerate(widths)}
    fed = {name: [] for name in entries}
    for n in (3, 1, 2):
        new = {name: torch.randn(2, entry.heads, n, entry.width) for name, entry in entries.items()}
        got = write_stock(cache, 0, new, entries)
        for name in entries:
            fed[name].append(new[name])
            want = torch.cat(fed[name], 2)
            assert torch.equal(got[name][:, :, : want.shape[2]], want)


@pytest.mark.parametrize("make_stock", [DynamicCache, static_cache])
@pytest.mark.parametrize("spec", [s for s in SPECS if "mtla" not in s])
def test_layers_run_in_stock_caches(spec, make_stock):
    layer, x = make(spec), tokens(11)
    same(decode(layer, x, [5, 1, 2, 3], make_stock()), layer(x))


def test_a_stock_sliding_cache_serves_a_window():
    config = LlamaConfig(
        hidden_size=DIM, num_attention_heads=HEADS, num_hidden_layers=1, vocab_size=8, sliding_window=4,
        layer_types=["sliding_attention"],
    )  # fmt: skip
    layer, x = make("gqa + window(4)"), tokens(12)
    same(decode(layer, x, [6, 1, 1, 3, 1], DynamicCache(config=config)), layer(x))


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("mtla", {}, "the entry 'latent' .stride 2, .* does not fit a DynamicCache"),
        ("gqa", {"mask": torch.ones(2, 4, dtype=torch.bool)}, "forgets padding; give a 4-D mask"),
        ("gqa", {"positions": Axis(4, 0, valid=torch.ones(2, 4, dtype=torch.bool))}, "forgets padding"),
    ],
)
def test_what_a_stock_cache_cannot_hold_is_refused(spec, options, words):
    with pytest.raises(ValueError, match=words) as error:
        make(spec)(tokens(4), cache=DynamicCache(), **options)
    assert "manyheads.Cache" in str(error.value)


def test_a_stock_attention_layer_may_share_our_cache():
    """`update` stores k and v as a transformers cache does."""
    cache, fed = Cache(), []
    for n in (3, 1):
        fed.append((rows(n), rows(n)))
        for layer in range(2):
            k, v = cache.update(*fed[-1], layer)
            assert torch.equal(k, torch.cat([a for a, _ in fed], 2))
            assert torch.equal(v, torch.cat([b for _, b in fed], 2))
    assert cache.length() == cache.length(1) == 4
    cache.crop(-1)
    assert cache.length() == cache.length(1) == 3


# Trial


@pytest.mark.parametrize("graded", [False, True])
def test_a_trial_leaves_what_it_goes_on_from(graded):
    layer, x, cache = make("gqa + window(4)"), tokens(9), Cache()
    with torch.set_grad_enabled(graded):
        layer(x[:, :5], cache=cache)
        held = [row.clone() for row in cache.layers[0].tensors()]
        first, second = Trial(cache), Trial(cache)
        same(layer(x[:, 5:], cache=first), layer(x)[:, 5:])
        again = layer(x[:, 5:], positions=Axis(4, 5), cache=first)  # in the place of what was written
        same(again, layer(x)[:, 5:])
        layer(2 * x[:, 5:8], cache=second)
        assert cache.length() == cache.length(0) == 5 and first.length() == first.length(0) == 9
        for now, then in zip(cache.layers[0].tensors(), held, strict=True):
            assert torch.equal(now, then)
        further = Trial(second)
        layer(x[:, 8:], cache=further)
        assert (second.length(), further.length()) == (8, 9)
        layer(x[:, 5:8], cache=(last := Trial(cache)))
        cache.take(last)
        same(layer(x[:, 8:], cache=cache), layer(x)[:, 8:])
        assert cache.length() == 9


def test_a_graph_through_a_trial_is_not_written_over():
    layer, x, cache = make("gqa"), tokens(9), Cache()
    for name, weight in layer.named_parameters():
        weight.requires_grad_("q_proj" in name)
    y = layer(x[:, :4], cache=(first := Trial(cache)))
    layer(x[:, 4:], cache=Trial(first))
    y.sum().backward()
    assert layer.project.q_proj.weight.grad.any()
