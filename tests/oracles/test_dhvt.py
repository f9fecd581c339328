"""What `dhvt` is held to: its equations, its ends, its costs, its refusals."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, differ, heads_of, join, make, twin, weights

from manyheads import Attention, OptionError, Site, SpecError
from manyheads.core.mask import Axis

BOTH_WAYS = Site(causal=False)
SPEC, TOKENS, WIDTH = "dhvt + gqa(bias=qkvo)", 9, DIM // HEADS


def layer_of(spec=SPEC, **options):
    return make(spec, site=BOTH_WAYS, **options)


def head_tokens(layer, x):
    """t + E `[B, H, D]`, written out a group of channels at a time."""
    piece, made = layer.tokens[0], []
    for group in x.mean(1).split(x.shape[-1] // layer.heads, -1):
        t = group @ piece.token.weight.T + piece.token.bias
        t = t.view(len(x), layer.heads, -1)
        centred = (t - t.mean(-1, keepdim=True)) / (t.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        made.append(torch.nn.functional.gelu(centred * piece.norm.weight + piece.norm.bias).flatten(1))
    return torch.stack(made, 1) + piece.place


def attended(layer, x, mask=None):
    """Plain attention with biases over all tokens of x."""
    p = layer.project
    q, k, v = (heads_of(f(x), HEADS) for f in (p.q_proj, p.k_proj, p.v_proj))
    full = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    return join(weights(q, k, WIDTH**-0.5, full if mask is None else mask) @ v, p.o_proj)


def folded(y):
    """The class token plus the mean of the head tokens, and the patches."""
    y, u = y.split([y.shape[1] - HEADS, HEADS], 1)
    return torch.cat([y[:, :1] + u.mean(1, keepdim=True), y[:, 1:]], 1)


def test_written_out():
    layer, x = layer_of(), batch()
    y = attended(layer, torch.cat([x, head_tokens(layer, x)], 1))
    assert y.shape[1] == TOKENS + HEADS
    close(layer(x), folded(y))
    assert layer(x).shape == x.shape


def test_without_its_part_it_is_plain_attention():
    layer, x = layer_of(), batch()
    close(twin(layer, "gqa(bias=qkvo)")(x), attended(layer, x))
    differ(layer(x), attended(layer, x))


def test_blocked_head_tokens_only_reach_the_class_token(monkeypatch):
    layer, x = layer_of(), batch()
    apart = torch.zeros(13, 13, dtype=torch.bool)
    apart[:TOKENS, :TOKENS] = apart[TOKENS:, TOKENS:] = True
    piece = type(layer.tokens[0])
    monkeypatch.setattr(piece, "rules", lambda self, flow: (lambda q, k: apart[None, None],))
    monkeypatch.setattr(piece, "widen", lambda self, rule, flow: rule)
    layer = twin(layer, SPEC)
    plain, y = attended(layer, x), layer(x)
    close(y[:, 1:], plain[:, 1:])
    u = attended(layer, head_tokens(layer, x))
    close(y[:, :1], plain[:, :1] + u.mean(1, keepdim=True))


def test_permuting_patches():
    layer, x = layer_of(), batch()
    order = torch.cat([torch.zeros(1).long(), 1 + torch.randperm(TOKENS - 1)])
    close(layer(x[:, order]), layer(x)[:, order])


def test_head_tokens_depend_on_means_only():
    layer, x = layer_of(), batch()
    ripple = torch.randn_like(x)
    ripple[:, 0] = 0
    ripple[:, 1:] -= ripple[:, 1:].mean(1, keepdim=True)
    close(entered(layer, x + ripple)[:, TOKENS:], entered(layer, x)[:, TOKENS:])
    differ(entered(layer, x + 1)[:, TOKENS:], entered(layer, x)[:, TOKENS:])


def entered(layer, x, mask=None):
    return layer._enter(layer._flow(x, None, mask, None, None, None)).x


def test_one_head():
    layer, x = layer_of(heads=1), batch()
    t = x.mean(1, keepdim=True) @ layer.tokens[0].token.weight.T + layer.tokens[0].token.bias
    norm = layer.tokens[0].norm
    want = torch.nn.functional.gelu(torch.nn.functional.layer_norm(t, (DIM,), norm.weight, norm.bias))
    close(entered(layer, x)[:, TOKENS:], want + layer.tokens[0].place)


def test_every_head_trains_the_shared_map():
    layer, x = layer_of(), batch().requires_grad_()
    for h in range(HEADS):
        layer.zero_grad()
        entered(layer, x)[:, TOKENS + h].pow(2).sum().backward()
        assert layer.tokens[0].token.weight.grad.abs().sum() > 0


def test_padding_is_neither_in_the_mean_nor_a_key():
    """And the class token is the first token that is none."""
    layer, x = layer_of(), batch()
    valid = torch.arange(TOKENS + 3)[None].expand(2, -1) >= 3
    padded = torch.cat([100 * torch.ones(2, 3, DIM).double(), x], 1)
    close(layer(padded, mask=valid)[:, 3:], layer(x))
    right = torch.cat([x, 100 * torch.ones(2, 3, DIM).double()], 1)
    close(layer(right, mask=valid.flip(1))[:, :TOKENS], layer(x))


@pytest.mark.parametrize("rows", [1, TOKENS + 3])
def test_padding_said_by_a_mask(rows):
    layer, x = layer_of(), batch()
    padded = torch.cat([x, 100 * torch.ones(2, 3, DIM).double()], 1)
    mask = (torch.arange(TOKENS + 3) < TOKENS).expand(1, 1, rows, -1)
    close(layer(padded, mask=mask)[:, :TOKENS], layer(x))


def test_a_mask_speaks_of_tokens_only():
    """Head tokens see all and are seen by all."""
    layer, x = layer_of(), batch()
    mask = torch.rand(TOKENS, TOKENS) < 0.6
    mask |= torch.eye(TOKENS, dtype=torch.bool)
    wide = torch.ones(TOKENS + HEADS, TOKENS + HEADS, dtype=torch.bool)
    wide[:TOKENS, :TOKENS] = mask
    y = folded(attended(layer, torch.cat([x, head_tokens(layer, x)], 1), wide))
    close(layer(x, mask=mask[None, None]), y)


def test_head_tokens_are_outside_windows():
    layer, x = layer_of(SPEC + " + window(2)"), batch()
    at = torch.arange(TOKENS)
    wide = torch.ones(TOKENS + HEADS, TOKENS + HEADS, dtype=torch.bool)
    wide[:TOKENS, :TOKENS] = (at[:, None] - at).abs() < 2
    close(layer(x), folded(attended(layer, torch.cat([x, head_tokens(layer, x)], 1), wide)))


def test_head_tokens_do_not_rotate():
    layer, x = layer_of("dhvt + gqa + rope"), batch()
    _, axis = layer.tokens[0].enter(x, Axis(TOKENS, 0), layer._flow(x, None, None, None, None, None))
    q = torch.randn(2, HEADS, TOKENS + HEADS, WIDTH).double()
    turned = layer.positions[0].turn(q, axis)
    close(turned[:, :, TOKENS:], q[:, :, TOKENS:])
    differ(turned[:, :, 1:TOKENS], q[:, :, 1:TOKENS])


def test_stays_on_the_fused_path():
    layer = layer_of()
    assert layer.explain(50).kernel == "sdpa"
    assert layer.explain(30).kernel == "sdpa"
    assert "34 query rows" in str(layer.explain(30))  # 30 and 4 head tokens
    assert "30 query rows" in str(twin(layer, "gqa(bias=qkvo)").explain(30))


def test_refusals():
    with pytest.raises(SpecError, match=r"'dhvt' needs 'bidirectional'.*causal=False"):
        Attention(SPEC, DIM, HEADS)
    with pytest.raises(SpecError, match="'dhvt' needs 'self'"):
        Attention(SPEC, DIM, HEADS, site=Site(causal=False, cross=True))
    with pytest.raises(SpecError, match="'head tokens'"):
        Attention("dhvt + " + SPEC, DIM, HEADS, site=BOTH_WAYS)
    with pytest.raises(OptionError, match=r"dhvt: dim=26 .* heads=4; dim may be 24"):
        Attention("dhvt + gqa(head_dim=6)", 26, HEADS, site=BOTH_WAYS)
    segment = torch.tensor([[0] * 4 + [1] * 5])
    with pytest.raises(ValueError, match="packed documents would share"):
        layer_of()(batch(), positions=Axis(TOKENS, 0, segment=segment))


def test_cost_and_first_values():
    base, cost = (make(s, site=BOTH_WAYS).spec.cost(DIM, HEADS, BOTH_WAYS) for s in ("gqa(bias=qkvo)", SPEC))
    assert cost.parameters - base.parameters == WIDTH * DIM + DIM + 2 * WIDTH + HEADS * DIM
    assert (cost.cache_floats, cost.state_floats) == (base.cache_floats, 0)
    place = Attention("dhvt", 192, HEADS, site=BOTH_WAYS).tokens[0].place
    assert abs(place.std() - 0.02) < 0.002
