"""What `directional_routing` is held to: its equations, its ends, its costs, its refusals."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, make, twin

from manyheads import Attention, Cache, Links, OptionError, Site, SpecError

BOTH_WAYS = Site(causal=False)
SPEC = "gqa + directional_routing"
WIDTH = DIM // HEADS


def flow_of(layer, x, r=None):
    memo = {} if r is None else {layer.gates[0]: lambda _: r}
    return layer._flow(x, None, None, None, None, Links(memo=memo))


def routed(layer, o, r=None):
    """The gate on head outputs `[B, H, T, d]`, with `r` (a number or `[H, K]`) in place of the router's."""
    if r is not None:
        piece = layer.gates[0]
        r = torch.as_tensor(r, dtype=torch.float64).expand(piece.directions.shape[:2])[None, None]
    return layer.gates[0].gate(o, flow_of(layer, torch.zeros(len(o), o.shape[2], DIM).double(), r))


def strength(layer, x, links=None):
    seen = []
    memo = {layer.gates[0]: lambda r: seen.append(r) or r}
    layer(x, links=Links(memo=memo))
    return seen[0]


def outputs(size=2, tokens=5):
    return torch.randn(size, HEADS, tokens, WIDTH).double()


def orthonormal(k):
    return torch.linalg.qr(torch.randn(HEADS, WIDTH, k).double())[0].transpose(1, 2).contiguous()


def test_switched_off_is_the_base_layer():
    layer, x = make(SPEC), batch()
    off = Links(memo={layer.gates[0]: lambda r: 0 * r})
    assert torch.equal(layer(x, links=off), twin(layer, "gqa")(x))
    differ(layer(x), twin(layer, "gqa")(x))


def test_first_strengths_and_those_for_pretrained_models():
    for start, want in ((0.0, 0.5), (-2.0, 4.5397868702434395e-05)):
        layer, x = Attention(f"{SPEC}(start={start})", DIM, HEADS).double(), batch()
        layer.gates[0].router[-1].weight.data.zero_()
        close(strength(layer, x), torch.full((2, 9, HEADS, 4), want).double())
        plain = make("gqa")
        layer.load_state_dict(layer.state_dict() | plain.state_dict())
        if start:
            close(layer(x), plain(x), 1e-3)


def test_written_out():
    """A loop over directions, and the matrix form I - Σ r u uᵀ."""
    layer, x = make(SPEC), batch()
    piece, o, r = layer.gates[0], outputs(tokens=9), strength(layer, x)
    got, loop, matrix = piece.gate(o, flow_of(layer, x)), o.clone(), torch.empty_like(o)
    u = piece.directions / piece.directions.norm(dim=-1, keepdim=True)
    for h in range(HEADS):
        for k in range(4):
            loop[:, h] -= r[:, :, h, k, None] * (o[:, h] @ u[h, k])[..., None] * u[h, k]
        fold = torch.eye(WIDTH) - torch.einsum("btk,ki,kj->btij", r[:, :, h], u[h], u[h])
        matrix[:, h] = torch.einsum("bti,btij->btj", o[:, h], fold)
    close(got, loop)
    close(got, matrix)


def test_router_written_out():
    layer, x = make(SPEC), batch()
    h, piece = x.cumsum(1) / torch.arange(1, 10)[:, None], layer.gates[0]
    for linear in piece.router[0:6:2]:
        h = torch.nn.functional.gelu(h @ linear.weight.T + linear.bias)
    r = torch.sigmoid(5 * (h @ piece.router[6].weight.T + piece.bias.flatten()))
    close(strength(layer, x), r.unflatten(-1, (HEADS, 4)))
    flat = twin(layer, SPEC + "(temperature=1e-9)")
    close(strength(flat, x), torch.full((2, 9, HEADS, 4), 0.5).double(), 1e-6)


def test_one_direction_is_projected_out():
    layer, o = make(SPEC + "(k=1)"), outputs()
    u = torch.nn.functional.normalize(layer.gates[0].directions, dim=-1)
    once = routed(layer, o, 1.0)
    close((once * u).sum(-1), torch.zeros(2, HEADS, 5).double())
    close(routed(layer, once, 1.0), once)
    assert (once.norm(dim=-1) <= o.norm(dim=-1)).all()


def test_norm_with_orthonormal_directions():
    layer, o = make(SPEC + "(k=3)"), outputs()
    layer = twin(layer, str(layer.spec), gates__0__directions=7 * orthonormal(3))
    r, u = torch.rand(HEADS, 3).double(), layer.gates[0].directions / 7
    along = torch.einsum("bhtd,hkd->bhtk", o, u)
    removed = ((2 * r - r**2)[None, :, None] * along**2).sum(-1)
    close(routed(layer, o, r).pow(2).sum(-1), o.pow(2).sum(-1) - removed)


def test_directions_that_are_alike_can_make_outputs_grow():
    """Projections are of the output itself: r = 1 on two equal directions reflects, on four it more than doubles."""
    layer, o = make(SPEC), outputs()
    same = torch.randn(HEADS, 1, WIDTH).double().expand(-1, 4, -1).contiguous()
    layer = twin(layer, SPEC, gates__0__directions=same)
    u = torch.nn.functional.normalize(same[:, 0], dim=-1)
    before, after = (torch.einsum("bhtd,hd->bht", each, u) for each in (o, routed(layer, o, 1.0)))
    close(after, -3 * before)


def test_length_and_sign_of_directions_do_not_matter():
    layer, x = make(SPEC), batch()
    v = layer.gates[0].directions.detach() * torch.randn(HEADS, 4, 1).double()
    close(twin(layer, SPEC, gates__0__directions=v)(x), layer(x))


def test_linear_in_the_outputs_and_before_the_bias_of_the_projection():
    layer, x = make("gqa(bias=o) + directional_routing"), batch()
    a, b, r = outputs(), outputs(), torch.rand(HEADS, 4).double()
    close(routed(layer, 2 * a - b, r), 2 * routed(layer, a, r) - routed(layer, b, r))
    bias = layer.project.o_proj.bias.detach()
    moved = twin(layer, str(layer.spec), project__o_proj__bias=bias + 1)
    close(moved(x), layer(x) + 1)


def test_scalar_gates_commute():
    after, x = make(SPEC + " + mae(width=4)", site=BOTH_WAYS), batch()
    before = make("gqa + mae(width=4) + directional_routing", site=BOTH_WAYS)
    swap = {"gates.0": "gates.1", "gates.1": "gates.0"}
    state = {name.replace(name[:7], swap.get(name[:7], name[:7])): v for name, v in after.state_dict().items()}
    before.load_state_dict(state)
    close(before(x), after(x))


def test_causal_pool_sees_no_future_and_ends_as_the_sequence():
    layer, x = make(SPEC), batch()
    other = torch.cat([x[:, :5], batch(4)], 1)
    assert torch.equal(layer(other)[:, :5], layer(x)[:, :5])
    whole = make(SPEC, site=BOTH_WAYS)
    whole.load_state_dict(layer.state_dict())
    close(strength(whole, x), strength(layer, x)[:, -1:])
    differ(strength(whole, x), strength(layer, x)[:, :1])


def test_sequence_pool_is_refused_where_it_would_leak():
    with pytest.raises(SpecError, match=r"needs 'bidirectional'.*nearest legal: directional_routing\(pool=causal\)"):
        Attention(SPEC + "(pool=sequence)", DIM, HEADS)
    layer, x = make(SPEC, site=BOTH_WAYS), batch()
    assert layer.gates[0].pool == "sequence"
    other = torch.cat([x[:, :5], batch(4)], 1)
    differ(strength(layer, other), strength(layer, x))
    close(strength(layer, x[:, torch.randperm(9)]), strength(layer, x))
    with pytest.raises(SpecError, match=r"needs 'self'.*pool=sequence"):
        Attention(SPEC + "(pool=causal)", DIM, HEADS, site=Site(causal=False, cross=True))


def test_token_pool_reads_the_token():
    layer, x = make(SPEC + "(pool=token)"), batch()
    close(strength(layer, x)[:, 3:4], strength(layer, x[:, 3:4]))


@pytest.mark.parametrize("options", ["", "(pool=token)"])
def test_decode(options):
    layer, x, cache = make(SPEC + options), batch(), Cache()
    close(decoded(layer, x, cache=cache), layer(x))
    assert cache.bytes() == 2 * layer.spec.cost(DIM, HEADS).cache_bytes(9, 8)
    assert bool(layer.spec.cost(DIM, HEADS).state_floats) == (options == "")


def test_cost():
    """The published sizes: 1.337M for a router, 12 · 4 · 128 for the directions, 12 layers."""
    base, cost = (Attention(spec, 24, 4).spec.cost(24, 4) for spec in ("gqa", SPEC))
    assert cost.parameters - base.parameters == 8 * (24 + 8 + 8 + 16) + 3 * 8 + 16 + 4 * 4 * 6
    base, cost = (Attention(spec, 1536, 12).spec.cost(1536, 12) for spec in ("gqa", SPEC))
    assert cost.parameters - base.parameters == 1_336_880 + 73_728 // 12
    assert cost.cache_floats == base.cache_floats
    with pytest.raises(OptionError, match="k=0 directions"):
        Attention(SPEC + "(k=0)", DIM, HEADS)
    with pytest.raises(OptionError, match="hidden=0"):
        Attention(SPEC + "(hidden=0)", DIM, HEADS)
    with pytest.raises(SpecError, match="'directions'"):
        Attention(SPEC + " + directional_routing", DIM, HEADS)
