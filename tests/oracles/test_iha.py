"""Oracles of `iha`."""

import pytest
import torch
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
    weights,
)

from manyheads import Attention, Cache, OptionError, Spec, SpecError
from manyheads.core.mask import Axis
from manyheads.core.position import angles, inverse_frequencies, rotate

WIDTH, EYE = 6, torch.eye(HEADS).double()


def copies(pseudo, kv=HEADS, collapse=None):
    """Changes that make every pseudo-head a copy of its head, with R of `collapse` or 1/P."""
    q, k = (torch.eye(n).double()[..., None].repeat(1, 1, pseudo) for n in (HEADS, kv))
    r = torch.full((HEADS, pseudo), 1 / pseudo).double() if collapse is None else collapse
    return {"transforms__0__q": q, "transforms__0__k": k, "transforms__0__v": k, "transforms__0__collapse": r}


def turn(x, positions):
    theta = inverse_frequencies(WIDTH, 10000.0)
    return rotate(x, *angles(torch.as_tensor(positions)[None], theta, x.dtype), "half")


def brute_force(layer, x, order, window=TOKENS):
    """By loops over (t, p) and (s, p'), from the equations."""
    piece, p, kv = layer.transforms[0], layer.project, layer.project.kv_heads
    q, k, v = (heads_of(f(x), n) for f, n in ((p.q_proj, HEADS), (p.k_proj, kv), (p.v_proj, kv)))
    q, k, v = (torch.einsum("bmtd,mhp->bhptd", t, mix) for t, mix in ((q, piece.q), (k, piece.k), (v, piece.v)))
    pseudo, tokens = q.shape[2:4]
    out = torch.zeros(len(x), HEADS, tokens, pseudo, WIDTH).double()

    def placed(t, token, rank):
        return turn(t[:, None, None], [token if order == "token" else token * pseudo + rank])[:, 0, 0]

    for h in range(HEADS):
        g = h // (HEADS // kv)
        for t in range(tokens):
            for a in range(pseudo):
                query, scores, values = placed(q[:, h, a, t], t, a), [], []
                for s in range(max(0, t - window + 1), t + 1):
                    for b in range(pseudo):
                        if order == "interleaved" and s == t and b > a:
                            continue
                        scores.append((query * placed(k[:, g, b, s], s, b)).sum(-1) * WIDTH**-0.5)
                        values.append(v[:, g, b, s])
                w = torch.stack(scores, -1).softmax(-1)
                out[:, h, t, a] = (w[..., None] * torch.stack(values, 1)).sum(1)
    r = piece.collapse
    o = torch.einsum("bhtpv,hp->bhtv", out, r) if r.ndim == 2 else torch.einsum("bgtpv,hgp->bhtv", out, r)
    return join(o, p.o_proj)


@pytest.mark.parametrize("collapse", ["head", "global"])
@pytest.mark.parametrize("order", ["interleaved", "block", "token"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_brute_force(kv_heads, order, collapse):
    layer, x = make(f"gqa(kv_heads={kv_heads}) + iha(pseudo=3, order={order}, collapse={collapse})"), batch(5)
    close(layer(x), brute_force(layer, x, order))


@pytest.mark.parametrize("order", ["interleaved", "block", "token"])
def test_windows_are_in_tokens(order):
    layer, x = make(f"gqa + iha(pseudo=2, order={order}) + window(3)"), batch(6)
    close(layer(x), brute_force(layer, x, order, window=3))


@pytest.mark.parametrize("order", ["interleaved", "block", "token"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_one_pseudo_head_folds_into_the_projections(kv_heads, order):
    base = f"gqa(kv_heads={kv_heads})"
    layer, x = make(f"{base} + iha(pseudo=1, order={order})"), batch()
    one = torch.ones(HEADS, 1).double()
    layer = twin(layer, str(layer.spec), transforms__0__collapse=one)
    changes = {}
    for name in "qkv":
        rows = getattr(layer.project, f"{name}_proj").weight.detach().unflatten(0, (-1, WIDTH))
        mixer = getattr(layer.transforms[0], name).detach()[..., 0]
        changes[f"project__{name}_proj__weight"] = torch.einsum("mdD,mh->hdD", rows, mixer).flatten(0, 1)
    close(twin(layer, base, **changes)(x), layer(x))
    plain = twin(layer, str(layer.spec), **copies(1, kv_heads))
    close(plain(x), twin(layer, base)(x))


@pytest.mark.parametrize("pseudo", [1, 2, 5])
def test_copies_in_token_order_are_the_base_layer(pseudo):
    """Each key is there P times, so no weight changes. In the other orders places differ."""
    layer, x = make(f"gqa(kv_heads=2) + iha(pseudo={pseudo}, order=token)"), batch()
    shares = torch.rand(HEADS, pseudo).double()
    shares = shares / shares.sum(-1, keepdim=True)
    want = twin(layer, "gqa(kv_heads=2)")(x)
    close(twin(layer, str(layer.spec), **copies(pseudo, 2, shares))(x), want)
    for order in ("interleaved", "block") if pseudo > 1 else ():
        other = twin(layer, f"gqa(kv_heads=2) + iha(pseudo={pseudo}, order={order})", **copies(pseudo, 2, shares))
        differ(other(x), want)
        if order == "block":  # without rotation only the rank of a pseudo-token is left
            close(
                twin(other, f"{other.spec}".replace("rope", "rope(none)"))(x),
                twin(other, "gqa(kv_heads=2) + rope(none)")(x),
            )


@pytest.mark.parametrize("collapse", ["head", "global"])
def test_start(collapse):
    spec, x = f"gqa + iha(pseudo=3, order=token, collapse={collapse}", batch()
    plain = make("gqa")
    for noise in (0.0, 0.01):
        layer = Attention(f"{spec}, noise={noise})", DIM, HEADS).double()
        layer.load_state_dict(layer.state_dict() | plain.state_dict())
        gap = (layer(x) - plain(x)).abs().max()
        assert gap < 1e-6 if noise == 0 else 1e-4 < gap < 1  # 1/3 was a float32
    layer = Attention(spec.replace("token", "interleaved") + ")", DIM, HEADS)
    assert torch.equal(layer.transforms[0].q, torch.eye(HEADS)[..., None].expand(-1, -1, 3))


def test_equal_copies_have_equal_gradients():
    """Why the order `token` starts with noise."""
    for order, equal in (("token", True), ("interleaved", False)):
        layer = make(f"gqa + iha(pseudo=2, order={order})")
        layer = twin(layer, str(layer.spec), **copies(2))
        layer(batch()).pow(2).sum().backward()
        for name in "qkv":
            grad = getattr(layer.transforms[0], name).grad
            close(grad[..., 0], grad[..., 1]) if equal else differ(grad[..., 0], grad[..., 1])


def test_zero_pseudo_heads_take_softmax_mass():
    """o' = o · Z / (Z + (P - 1) n), Z the sum of exp(score) over the n visible tokens."""
    pseudo, first = 3, torch.tensor([1.0, 0, 0]).double()
    layer, x = make(f"gqa + iha(pseudo={pseudo}, order=token)"), batch()
    zeros = EYE[..., None] * first
    changes = {f"transforms__0__{name}": zeros for name in "qkv"}
    layer = twin(layer, str(layer.spec), transforms__0__collapse=first.repeat(HEADS, 1), **changes)
    p, at = layer.project, torch.arange(TOKENS)
    q, k, v = (heads_of(f(x), HEADS) for f in (p.q_proj, p.k_proj, p.v_proj))
    s = (turn(q, at) @ turn(k, at).transpose(-1, -2) * WIDTH**-0.5).masked_fill(~triangle(), -torch.inf)
    z, n = s.exp().sum(-1), at + 1
    o = s.softmax(-1) @ v * (z / (z + (pseudo - 1) * n))[..., None]
    close(layer(x), join(o, p.o_proj))


def test_permuting_pseudo_heads():
    """Of keys and values together, and of queries with R, where they share their token's place."""
    layer, x, order = make("gqa(kv_heads=2) + iha(pseudo=3, order=token)"), batch(), torch.tensor([2, 0, 1])
    mix = {name: p.detach()[..., order] for name, p in layer.transforms[0].named_parameters()}
    keys = twin(layer, str(layer.spec), transforms__0__k=mix["k"], transforms__0__v=mix["v"])
    queries = twin(layer, str(layer.spec), transforms__0__q=mix["q"], transforms__0__collapse=mix["collapse"])
    close(keys(x), layer(x))
    close(queries(x), layer(x))
    placed = twin(layer, "gqa(kv_heads=2) + iha(pseudo=3)")
    differ(twin(keys, str(placed.spec))(x), placed(x))


@pytest.mark.parametrize("order", ["interleaved", "block", "token"])
def test_global_collapse(order):
    """Per head it is zero for other heads; in general W_O of (g, p) is Σ_h R[h, g, p] W_O[h]."""
    layer, x = make(f"gqa + iha(pseudo=2, order={order})"), batch()
    wide = torch.diag_embed(layer.transforms[0].collapse.detach().T).permute(1, 2, 0)
    spec = f"gqa + iha(pseudo=2, order={order}, collapse=global)"
    close(twin(layer, spec, transforms__0__collapse=wide)(x), layer(x))
    many, w = make(spec), layer.project.o_proj.weight.detach().unflatten(1, (HEADS, WIDTH))
    r = many.transforms[0].collapse.detach()
    got, total = twin(layer, spec, transforms__0__collapse=r), 0
    for g in range(HEADS):
        for p in range(2):
            alone = torch.zeros_like(r)
            alone[g, g, p] = 1
            moved = torch.zeros_like(w)
            moved[:, g] = torch.einsum("h,Dhd->Dd", r[:, g, p], w)
            changes = {"transforms__0__collapse": alone, "project__o_proj__weight": moved.flatten(1)}
            total = total + twin(got, spec, **changes)(x)
    close(got(x), total)


def test_turning_by_token_then_by_rank():
    """RoPE(tP + p) = RoPE(p) RoPE(tP), so rows may be mixed after the common turn."""
    x, pseudo = torch.randn(1, HEADS, TOKENS, WIDTH).double(), 3
    at = torch.arange(TOKENS)
    for rank in range(pseudo):
        close(turn(turn(x, at * pseudo), torch.full((TOKENS,), rank)), turn(x, at * pseudo + rank), 1e-6)


def test_rows_are_turned_before_the_cache_only_in_token_order():
    assert make("gqa + iha(order=token)").rotate_at == "write"
    assert make("gqa + iha(order=token) + qk-norm").rotate_at == "read"
    assert make("gqa + iha").rotate_at == "select"  # once for all pseudo-tokens of a token


def test_given_masks_are_about_tokens():
    layer, x, seen = make("gqa + iha(pseudo=2, order=block)"), batch(), torch.rand(2, 1, TOKENS, TOKENS) < 0.6
    doubled = seen.repeat_interleave(2, 2).repeat_interleave(2, 3)
    p, piece, at = layer.project, layer.transforms[0], torch.arange(2 * TOKENS)
    q, k, v = (
        hook(heads_of(f(x), HEADS), None)
        for hook, f in ((piece.on_q, p.q_proj), (piece.on_k, p.k_proj), (piece.on_v, p.v_proj))
    )
    w = weights(turn(q, at), turn(k, at), WIDTH**-0.5, doubled).nan_to_num(0.0)
    close(
        layer(x, mask=seen),
        join(torch.einsum("bhtpv,hp->bhtv", (w @ v).unflatten(2, (-1, 2)), piece.collapse), p.o_proj),
    )


def test_the_paper_s_form_is_one_plain_triangle():
    layer, x = make("gqa + iha(pseudo=2)"), batch()
    layer.few_rows = 0  # fewer queries would take the mixing upon themselves
    calls, split = [], type(layer.transforms[0]).split

    def spy(call, flow):
        calls.extend(split(layer.transforms[0], call, flow))
        return calls[-1:]

    layer.transforms[0].split = spy
    layer(x)
    layer(x, mask=torch.arange(TOKENS)[None] >= torch.tensor([0, 4])[:, None])
    assert [call.mask.is_causal for call in calls] == [True, False]
    assert calls[0].q.shape == (2, HEADS, 2 * TOKENS, WIDTH)
    assert layer.explain(100).kernel == "sdpa" and layer.explain(1).kernel == "sdpa"
    assert "40 query rows" in str(Attention("iha(pseudo=2)", DIM, HEADS).explain(20))


@pytest.mark.parametrize("order", ["interleaved", "block", "token"])
@pytest.mark.parametrize("rest", ["", " + window(3)", " + alibi", " + qk-norm", " + complexformer"])
def test_decode(order, rest):
    layer, x, cache = make(f"gqa(kv_heads=2) + iha(pseudo=2, order={order}){rest}"), batch(), Cache()
    for block in (1, 4):
        close(decoded(layer, x, block), layer(x))
    decoded(layer, x, 3, cache)
    assert cache.bytes() == 2 * 2 * 2 * WIDTH * (2 if "window" in rest else TOKENS) * 8  # raw rows, not pseudo-rows
    y = layer(x.requires_grad_())
    (gradient,) = torch.autograd.grad(y[:, 4].sum(), x)
    assert not gradient[:, 5:].any()


def test_pseudo_tokens_have_places_of_their_own_and_the_time_of_their_token():
    q, k = make("gqa + iha(pseudo=2)").transforms[0].axes(Axis(TOKENS, 0), Axis(4, 5))
    assert q.position.tolist() == [list(range(2 * TOKENS))] and k.position.tolist() == [list(range(10, 18))]
    assert k.time.tolist() == [[5, 5, 6, 6, 7, 7, 8, 8]]


@pytest.mark.parametrize(("kv_heads", "pseudo", "collapse"), [(4, 2, "head"), (2, 3, "head"), (2, 4, "global")])
def test_cost(kv_heads, pseudo, collapse):
    base = f"gqa(kv_heads={kv_heads})"
    cost = Spec.parse(f"{base} + iha(pseudo={pseudo}, collapse={collapse})").cost(DIM, HEADS)
    plain = Spec.parse(base).cost(DIM, HEADS)
    r = HEADS * pseudo if collapse == "head" else HEADS**2 * pseudo
    assert cost.parameters - plain.parameters == pseudo * (HEADS**2 + 2 * kv_heads**2) + r
    assert cost.cache_floats == 2 * kv_heads * WIDTH and cost.pair_flops == pseudo**2 * plain.pair_flops


def test_refusals():
    with pytest.raises(OptionError, match="iha: pseudo=0 pseudo-heads a head; at least 1"):
        Attention("iha(pseudo=0)", DIM, HEADS)
    with pytest.raises(OptionError, match="2 of the 8 key channels belong to no head"):
        Attention("mla(view=expanded) + iha", DIM, HEADS)
    assert Attention("mla(view=expanded, rope_dim=0) + iha", DIM, HEADS).transforms[0].pseudo == HEADS
    with pytest.raises(SpecError, match="nearest legal: mla\\(view=expanded\\)"):
        Attention("mla + iha", DIM, HEADS)
    for other in ("talking_heads", "differential", "iha"):
        with pytest.raises(SpecError, match=f"'{other}' needs 'one map'.* which 'iha' breaks"):
            Attention(f"iha + {other}", DIM, HEADS)
