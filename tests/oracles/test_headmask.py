"""What `headmask` is held to: its equations, its ends, its costs, its refusals."""

import copy

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, make, twin
from torch import nn

from manyheads import Attention, Links
from manyheads.attention.gate.headmask import at_random, gates_of, importance, mask_top
from manyheads.stack import Stack

SPEC = "gqa(kv_heads=2) + headmask"
WIDTH = DIM // HEADS


def stack(layers=3, **options):
    model = Stack(SPEC, DIM, HEADS, layers, **options).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def masked(layer, *silent):
    xi = torch.ones(HEADS).double()
    xi[list(silent)] = 0
    return Links(memo={layer.gates[0]: xi})


def drawn(model, n, **options):
    return Links(memo=mask_top(at_random(model), n, **options))


@pytest.mark.parametrize("train", [True, False])
def test_without_a_draw_it_is_the_base_layer(train):
    layer, x = make(SPEC).train(train), batch()
    plain = twin(layer, "gqa(kv_heads=2)")
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer(x, links=drawn(layer, 0)), plain(x))
    close(decoded(layer, x), plain(x))
    assert layer.spec.cost(DIM, HEADS) == plain.spec.cost(DIM, HEADS)


def test_masking_a_head_is_a_hole_in_the_output_projection():
    layer, x = make(SPEC), batch()
    hole = layer.project.o_proj.weight.detach().clone()
    hole[:, WIDTH : 2 * WIDTH] = 0
    close(layer(x, links=masked(layer, 1)), twin(layer, SPEC, project__o_proj__weight=hole)(x))


def test_a_masked_head_learns_nothing():
    layer, x = make(SPEC), batch()
    layer(x, links=masked(layer, 1)).pow(2).sum().backward()
    p = layer.project
    for gradient in (
        p.q_proj.weight.grad.unflatten(0, (HEADS, WIDTH)),
        p.o_proj.weight.grad.unflatten(1, (HEADS, -1)).transpose(0, 1),
    ):
        assert [bool(head.any()) for head in gradient] == [True, False, True, True]
    assert p.k_proj.weight.grad[:WIDTH].any()  # shared with head 0
    layer.zero_grad()
    layer(x, links=masked(layer, 0, 1)).pow(2).sum().backward()
    for shared in (p.k_proj, p.v_proj):
        assert not shared.weight.grad[:WIDTH].any() and shared.weight.grad[WIDTH:].any()


def test_rescaled_heads_keep_the_sum_of_weights():
    layer, x = make("gqa(kv_heads=2) + headmask(rescale=true)"), batch()
    plain = twin(layer, SPEC)
    close(layer(x, links=masked(layer, 1)), 4 / 3 * plain(x, links=masked(plain, 1)))
    close(layer(x, links=masked(layer, 0, 1, 2, 3)), torch.zeros_like(x))


def test_a_draw_silences_exactly_n_heads_evenly_and_empties_no_layer():
    model, n, times = stack(), 5, 400
    silent = torch.zeros(3, HEADS)
    for _ in range(times):
        draw = torch.stack([xi for xi in mask_top(at_random(model), n).values()])
        assert (draw == 0).sum() == n and (draw.sum(-1) > 0).all()
        silent += draw == 0
    assert (silent / times - n / 12).abs().max() < 0.1
    full = torch.stack(list(mask_top(at_random(model), 12, allow_empty=True).values()))
    assert not full.any()


def test_too_many_heads():
    with pytest.raises(ValueError, match="10 heads to silence in 3 layers; 0 to 9"):
        drawn(stack(), 10)
    with pytest.raises(ValueError, match="13 heads to silence in 3 layers; 0 to 12"):
        drawn(stack(), 13, allow_empty=True)


def test_one_pool_for_encoder_decoder_and_cross_attention():
    encoder, decoder = stack(causal=False), stack(cross=SPEC)
    both = nn.ModuleList([encoder, decoder])
    assert len(gates_of(both)) == 9
    masks, x = mask_top(at_random(both), 18), batch()
    assert sum((xi == 0).sum() for xi in masks.values()) == 18

    def run(memo):
        return decoder(x, context=encoder(x, links=Links(memo=dict(memo))), links=Links(memo=dict(memo)))

    for gate in gates_of(both):
        differ(run(masks | {gate: 1 - masks[gate]}), run(masks))


def test_a_generator_draws_the_same_everywhere():
    model, other = stack(), stack()
    draws = [
        mask_top(at_random(m, torch.Generator().manual_seed(step)), 5)
        for m, step in ((model, 3), (other, 3), (model, 4))
    ]
    one, same, next_ = (torch.stack(list(draw.values())) for draw in draws)
    assert torch.equal(one, same) and not torch.equal(one, next_)


def test_masks_stay_when_a_block_is_computed_again():
    model, x = stack().train(), batch()
    links, gradients = drawn(model, 5), []
    for again in (False, True):
        model.checkpoint(again)
        model.zero_grad()
        model(x, links=Links(memo=dict(links.memo))).pow(2).sum().backward()
        gradients.append(model.blocks[0].attention.project.q_proj.weight.grad.clone())
    close(*gradients)


def one_by_one(model, x, losses):
    """|∂L_b/∂ξ| of each example in a pass of its own, `[B, layers, H]`."""
    found = []
    for b in range(len(x)):
        probes = {gate: torch.ones(HEADS).double().requires_grad_() for gate in gates_of(model)}
        loss = losses(model(x, links=Links(memo=dict(probes))))[b]
        found.append(torch.stack(torch.autograd.grad(loss, list(probes.values()))).abs())
    return torch.stack(found)


def quadratic(y):
    return (y - 1).pow(2).sum((1, 2))


def test_importance_is_the_mean_over_examples_of_the_size_of_the_slope():
    model, x = stack(), batch(size=3)
    scores = torch.stack(list(importance(model, lambda links: quadratic(model(x, links=links)), 3).values()))
    close(scores, one_by_one(model, x, quadratic).mean(0))
    shared = {gate: torch.ones(HEADS).double().requires_grad_() for gate in gates_of(model)}
    loss = quadratic(model(x, links=Links(memo=dict(shared)))).sum()
    slopes = torch.stack(torch.autograd.grad(loss, list(shared.values()))).abs() / 3
    assert (scores >= slopes - 1e-9).all() and (scores > slopes * 1.01).any()


def test_importance_is_output_times_gradient():
    layer, x, kept = make(SPEC), batch(), {}
    original = layer.gates[0].gate

    def spy(o, flow):
        kept["o"] = o
        return original(o, flow)

    layer.gates[0].gate = spy
    (scores,) = importance(layer, lambda links: quadratic(layer(x, links=links)), 2).values()
    layer.gates[0].gate = original
    loss = quadratic(layer.project.output(kept["o"], None)).sum()
    (slope,) = torch.autograd.grad(loss, kept["o"])
    close(scores, (kept["o"] * slope).sum((2, 3)).abs().mean(0))


def test_importance_is_the_change_without_the_head_where_the_loss_is_linear():
    layer, x, c = make(SPEC), batch(), torch.randn(9, DIM).double()

    def losses(links):
        return (layer(x, links=links) * c).sum((1, 2))

    (scores,) = importance(layer, losses, 2).values()
    changes = torch.stack([(losses(masked(layer, h)) - losses(Links())).abs().mean() for h in range(HEADS)])
    close(scores, changes)


def test_the_most_important_heads_fall_silent():
    model, x = stack(), batch()
    loud = model.blocks[1].attention.project.o_proj.weight
    loud.data[:, 2 * WIDTH : 3 * WIDTH] *= 50
    scores = importance(model, lambda links: quadratic(model(x, links=links)), 2)
    masks = torch.stack(list(mask_top(scores, 1).values()))
    assert (masks == 0).nonzero().tolist() == [[1, 2]]
    gate = gates_of(model)[1]
    scores = {g: torch.arange(4.0) + 10 * (g is gate) for g in gates_of(model)}
    assert mask_top(scores, 4)[gate].tolist() == [1, 0, 0, 0]  # its last head is passed over
    assert mask_top(scores, 4, allow_empty=True)[gate].tolist() == [0, 0, 0, 0]


def test_normalised_importance():
    model, x = stack(), batch()

    def losses(links):
        return quadratic(model(x, links=links))

    plain, normed = importance(model, losses, 2), importance(model, losses, 2, normalise=True)
    for gate, score in plain.items():
        close(normed[gate], score / score.norm())


def test_importance_leaves_no_trace():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(9).double(), nn.Dropout(0.5)
            self.attention = Attention(SPEC, DIM, HEADS).double()

        def forward(self, x, links):
            return self.attention(self.drop(self.norm(x)), links=links)

    model, x = Noisy().train(), batch()
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    importance(model, lambda links: quadratic(model(x, links)), 2)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
