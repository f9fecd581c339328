"""Oracles of `rcmha`: the parts `conv` and `relative`, and the preset of both."""

import pytest
import torch
import torch.nn.functional as F
from tests.oracles.reference import (
    DIM,
    HEADS,
    TOKENS,
    batch,
    close,
    decoded,
    differ,
    heads_of,
    join,
    make,
    triangle,
    twin,
)

from manyheads import Attention, Cache, OptionError, Site, Spec, SpecError
from manyheads.core.mask import Axis
from manyheads.core.registry import find

WIDTH, CONTEXT = 6, 16
RCMHA = f"rcmha(context={CONTEXT})"
TABLES = ("content_bias", "embedding", "position_bias")


def rewired(layer, spec=None, **changes):
    return twin(layer, spec or str(layer.spec), **changes)


def without_convolution(layer, spec=None):
    """Every filter passes the current row on."""
    tap = {}
    for name in "qkv":
        filters = getattr(layer.transforms[0], name)
        tap[f"transforms__0__{name}__weight"] = torch.zeros_like(filters.weight)
        tap[f"transforms__0__{name}__weight"][0] = 1
        tap[f"transforms__0__{name}__bias"] = torch.zeros_like(filters.bias)
    return rewired(layer, spec, **tap)


def without_positions(layer):
    return rewired(layer, **{f"positions__0__{n}": torch.zeros_like(getattr(layer.positions[0], n)) for n in TABLES})


def convolved(filters, u):
    """`conv1d` of `[B, heads, T, d]`, left-padded, a channel at a time."""
    taps, width = len(filters.weight), u.shape[1] * u.shape[3]
    kernel = filters.weight.flip(0).expand(-1, u.shape[1], -1, -1).squeeze(2).permute(1, 2, 0).reshape(width, 1, taps)
    bias = filters.bias.expand(u.shape[1], -1, -1).reshape(-1)
    flat = F.pad(u.transpose(2, 3).flatten(1, 2), (taps - 1, 0))
    return F.conv1d(flat, kernel, bias, groups=width).unflatten(1, (u.shape[1], -1)).transpose(2, 3)


def projections(layer, x):
    p = layer.project
    return tuple(heads_of(f(x), HEADS) for f in (p.q_proj, p.k_proj, p.v_proj))


def attended(layer, q, k, v, mask=None):
    """The paper's scores, by direct indexing P + (j - i)."""
    p, t = layer.positions[0], q.shape[2]
    at = p.context + torch.arange(t) - torch.arange(t)[:, None]
    e, b = p.embedding[at], p.position_bias[at]  # [T, S, H, d], [T, S, H]
    scores = (q + p.content_bias) @ k.transpose(-1, -2) + torch.einsum("bhid,ijhd->bhij", q, e) + b.permute(2, 0, 1)
    scores = (scores * WIDTH**-0.5).masked_fill(~(triangle(t) if mask is None else mask), -torch.inf)
    return join(scores.softmax(-1) @ v, layer.project.o_proj)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 3, 5])
def test_written_out(taps, per_head):
    layer, x = make(f"rcmha(taps={taps}, per_head={per_head}, context={CONTEXT})".lower()), batch()
    filters = layer.transforms[0]
    q, k, v = (convolved(getattr(filters, n), u) for n, u in zip("qkv", projections(layer, x), strict=True))
    close(layer(x), attended(layer, q, k, v))


def test_grouped_keys():
    """Filters on the key heads; u, E and β of each query head."""
    layer, x = make(f"gqa(kv_heads=2) + rcmha(per_head=true, context={CONTEXT})"), batch()
    filters, p = layer.transforms[0], layer.project
    q, k, v = (
        convolved(getattr(filters, n), heads_of(f(x), h))
        for n, f, h in (("q", p.q_proj, HEADS), ("k", p.k_proj, 2), ("v", p.v_proj, 2))
    )
    close(layer(x), attended(layer, q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))


def test_starts_as_attention_without_positions():
    """Identity filters and the tables' first values."""
    layer, x = without_convolution(make(RCMHA)), batch()
    fresh = Attention(f"relative(context={CONTEXT})", DIM, HEADS).positions[0]
    layer = rewired(layer, **{f"positions__0__{n}": getattr(fresh, n).detach().double() for n in TABLES})
    close(layer(x), twin(layer, "gqa + rope(none)")(x))


def test_the_baselines():
    """Identity filters leave RMHA, zero tables MDHA."""
    layer, x = make(RCMHA), batch()
    close(without_convolution(layer)(x), twin(layer, f"relative(context={CONTEXT})")(x))
    close(without_positions(layer)(x), twin(layer, "conv + rope(none)")(x))
    differ(layer(x), without_positions(layer)(x))


def test_filters_shared_by_heads_are_equal_filters():
    layer, x = make("conv + rope(none)"), batch()
    each = {
        name.replace(".", "__"): value.repeat_interleave(HEADS, -3)
        for name, value in layer.state_dict().items()
        if name.startswith("transforms")
    }
    close(twin(layer, "conv(per_head=true) + rope(none)", **each)(x), layer(x))


@pytest.mark.parametrize("memory", [0, 4])
def test_the_shift_trick_is_direct_indexing(memory):
    """A zero column on the right of `[T, M + T]`, read again in rows of M + T, moves row i by T - 1 - i columns.

    So what stands at distance 0 of the last query comes to stand at distance 0 of each.
    """
    layer, t = make(f"relative(context={CONTEXT})"), TOKENS - memory
    p, q = layer.positions[0], torch.randn(2, HEADS, TOKENS, WIDTH).double()[:, :, memory:]
    distances = torch.arange(-TOKENS + 1, 1)  # of the last query from each key
    table = torch.einsum("bhid,rhd->bhir", q, p.embedding[p.context + distances])
    shifted = F.pad(table, (0, 1)).flatten(2)[..., t - 1 :][..., : t * TOKENS].unflatten(2, (t, TOKENS))
    i, j = torch.arange(memory, TOKENS)[:, None], torch.arange(TOKENS)
    direct = torch.einsum("bhid,ijhd->bhij", q, p.embedding[p.context + j - i])
    seen = j <= i
    close(shifted[..., seen], direct[..., seen])


def test_only_distances_matter():
    layer, x, at = make(RCMHA), batch(), torch.arange(TOKENS)[None]
    close(layer(x, positions=at + 1000), layer(x))
    differ(layer(x, positions=2 * at), layer(x))


def test_farther_distances_share_the_last_row():
    layer, x = make("relative(context=3)"), batch()
    wide = make(f"relative(context={CONTEXT})")
    at = torch.arange(-CONTEXT, CONTEXT).clamp(-3, 2) + 3
    tables = {f"positions__0__{n}": getattr(layer.positions[0], n).detach()[at] for n in TABLES[1:]}
    tables["positions__0__content_bias"] = layer.positions[0].content_bias.detach()
    wide = twin(layer, str(wide.spec), **tables)
    close(layer(x), wide(x))
    close(decoded(layer, x), wide(x))


def test_masks_and_encoders_read_the_rows_of_later_keys():
    mask = triangle()
    mask[:4, :4] = True
    layer, x = make(f"relative(context={CONTEXT})"), batch()
    close(layer(x, mask=mask[None, None]), attended(layer, *projections(layer, x), mask=mask))
    encoder = make(f"relative(context={CONTEXT})", site=Site(causal=False))
    close(encoder(x), attended(encoder, *projections(encoder, x), mask=torch.ones_like(mask)))


@pytest.mark.parametrize("block", [1, 2, 4, 7])
@pytest.mark.parametrize("spec", [RCMHA, "rcmha(taps=5, per_head=true, context=4)"])
def test_decode(spec, block):
    """Token by token and in segments whose memory is the cache: equal to the full pass from the first row on."""
    layer, x = make(spec), batch()
    close(decoded(layer, x, block), layer(x))


def test_what_the_authors_segments_leave_out():
    """Queries of a segment that see no projections before it: only its first taps - 1 rows differ."""
    layer, x = make(RCMHA), batch()
    filters = layer.transforms[0]
    q, k, v = projections(layer, x)
    cut = torch.cat([convolved(filters.q, part) for part in q.split([5, 4], 2)], 2)
    out = attended(layer, cut, convolved(filters.k, k), convolved(filters.v, v))
    differ(out[:, 5:7], layer(x)[:, 5:7])
    close(torch.cat([out[:, :5], out[:, 7:]], 1), torch.cat([layer(x)[:, :5], layer(x)[:, 7:]], 1))


def test_filters_never_look_ahead():
    layer, x = make(RCMHA), batch().requires_grad_()
    for at in range(TOKENS):
        (gradient,) = torch.autograd.grad(layer(x)[:, at].sum(), x)
        assert not gradient[:, at + 1 :].any() and gradient[:, at].any()


def test_filter_gradient():
    """That of the sum of three taps, written out."""
    layer, u = make("conv").transforms[0].k, torch.randn(2, HEADS, TOKENS, WIDTH).double()
    grad = torch.randn_like(u)
    lags = [F.pad(u, (0, 0, lag, 0))[:, :, :TOKENS] for lag in range(3)]
    (got,) = torch.autograd.grad(convolved(layer, u), layer.weight, grad)
    close(torch.autograd.grad(layer(lags), layer.weight, grad)[0], got)
    close(got[:, 0, 0], torch.stack([(grad * lag).sum((0, 1, 2)) for lag in lags]))


def test_documents_and_padding():
    layer, x = make(RCMHA), batch()
    valid = torch.arange(TOKENS)[None] >= torch.tensor([[0], [3]])
    close(layer(x, mask=valid)[1, 3:], layer(x[1:, 3:])[0])
    holes = torch.tensor([True, True, False, True, False, False, True, True, True])
    close(layer(x, mask=holes.expand(2, -1))[:, holes], layer(x[:, holes]))
    place = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3]])
    segment = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2]])
    packed = layer(x, positions=Axis(TOKENS, 0, given_position=place, segment=segment))
    close(packed, torch.cat([layer(part) for part in x.split([4, 1, 4], 1)], 1))


def test_cost():
    """3(3d + d) shared or 3·4·H·d filters; 2P·H(d + 1) + H·d of positions; 2·H·d numbers cached, a state of 6·H·d."""
    base = make("gqa").spec.cost(DIM, HEADS)
    tables = 2 * CONTEXT * HEADS * (WIDTH + 1) + HEADS * WIDTH
    for per_head, filters in (("false", 3 * 4 * WIDTH), ("true", 3 * 4 * HEADS * WIDTH)):
        layer, cache = make(f"rcmha(per_head={per_head}, context={CONTEXT})"), Cache()
        assert sum(p.numel() for p in layer.parameters()) - base.parameters == filters + tables
        decoded(layer, batch(size=1), 4, cache)
        assert cache.bytes() == 8 * (TOKENS * 2 * HEADS * WIDTH + 6 * HEADS * WIDTH)
        assert sum(t.untyped_storage().nbytes() for t in cache.site(0).state.values()) == 8 * 6 * HEADS * WIDTH


def test_the_preset():
    assert str(Spec.parse("rcmha")) == "conv + relative"
    assert str(Spec.parse("rcmha(taps=4, per_head=true, context=9)")) == (
        "conv(taps=4, per_head=true) + relative(context=9)"
    )


@pytest.mark.parametrize("line", ["conv(taps=0)", "relative(context=0)"])
def test_refusals(line):
    with pytest.raises(OptionError, match=r"(conv: taps|relative: context)=0.*at least 1"):
        Attention(line, DIM, HEADS)


@pytest.mark.parametrize(
    ("line", "site", "said"),
    [
        ("mla(view=expanded) + conv", Site(), "which 'mla' breaks"),
        ("mtla + conv", Site(), "which 'mtla' breaks"),
        ("mfa(width=8, key_reuse=true) + conv", Site(), "mfa\\(key_reuse=false\\)"),
        ("conv", Site(causal=False), "needs 'causal'"),
        ("conv", Site(cross=True), "needs 'self'"),
        ("conv + conv(taps=2)", Site(), "both take the slot 'conv'"),
        ("relative + rope", Site(), "both take the slot 'position'"),
    ],
)
def test_what_they_exclude(line, site, said):
    with pytest.raises(SpecError, match=said):
        Attention(line, DIM, HEADS, site=site)


def test_behind_a_transform_at_read_there_is_nothing_to_cache():
    class Reading(find("kha")):
        name, at = "reading", "read"

    conv = find("conv")
    Spec((conv(), Reading())).resolve(Site())
    with pytest.raises(SpecError, match=r"'conv' needs 'cached heads'.*which 'reading' breaks"):
        Spec((Reading(), conv())).resolve(Site())
