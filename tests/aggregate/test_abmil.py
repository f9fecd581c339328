"""Attention-based multiple-instance pooling (arXiv 1802.04712)."""

import pytest
import torch

from manyheads.aggregate import build


def bags(rows=4, tokens=6, width=5):
    return torch.randn(rows, tokens, width, dtype=torch.float64)


def pool(line, width=5):
    return build(line, width).double()


def test_by_its_equations():
    x, agg = bags(), pool("abmil(heads=2, gated=true, hidden=3)")
    found = agg(x)
    hidden = torch.tanh(x @ agg.v.weight.T + agg.v.bias) * torch.sigmoid(x @ agg.u.weight.T + agg.u.bias)
    e = hidden @ agg.w.weight.T  # [B, N, R]
    a = e.exp() / e.exp().sum(1, keepdim=True)
    z = torch.cat([(a[..., [r]] * x).sum(1) for r in range(2)], -1)
    torch.testing.assert_close(found.out[:, 0], z)
    torch.testing.assert_close(found.weights[:, :, 0], a.mT)
    apart = pool("abmil(heads=2, gated=true, hidden=3, concat=false)")
    apart.load_state_dict(agg.state_dict())
    torch.testing.assert_close(apart(x).out.flatten(1), z)
    torch.testing.assert_close(apart(x).weights[:, 0], a.mT)


def test_counts():
    assert sum(p.numel() for p in pool("abmil").parameters()) == 5 * 128 + 128 + 128
    gated = pool("abmil(heads=3, gated=true, hidden=7)")
    assert sum(p.numel() for p in gated.parameters()) == 2 * (5 * 7 + 7) + 7 * 3


def test_one_token_and_zero_scores():
    x, agg = bags(), pool("abmil")
    one = agg(x[:, :1])
    torch.testing.assert_close(one.out, x[:, :1])
    assert (one.weights == 1).all()
    torch.nn.init.zeros_(agg.w.weight)
    torch.testing.assert_close(agg(x).out[:, 0], x.mean(1))


def test_tokens_twice_change_nothing():
    x, agg = bags(), pool("abmil(gated=true)")
    torch.testing.assert_close(agg(torch.cat([x, x], 1)).out, agg(x).out)


def test_an_open_gate_is_half_the_plain_form():
    x, gated, plain = bags(), pool("abmil(gated=true)"), pool("abmil")
    torch.nn.init.zeros_(gated.u.weight)
    torch.nn.init.zeros_(gated.u.bias)
    plain.v.load_state_dict(gated.v.state_dict())
    plain.w.weight.data = gated.w.weight.data / 2
    torch.testing.assert_close(gated(x).out, plain(x).out)


def test_a_constant_on_scores_changes_nothing(monkeypatch):
    x, agg = bags(), pool("abmil")
    before, scores = agg(x).out, agg.scores
    bias = torch.full((), 5.0, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(agg, "scores", lambda x: scores(x) + bias)
    found = agg(x).out
    torch.testing.assert_close(found, before)
    assert abs(torch.autograd.grad(found.square().sum(), bias)[0].item()) < 1e-12


def test_sharp_scores_choose_the_largest_and_nothing_overflows():
    x, agg = bags(), pool("abmil")
    agg.w.weight.data *= 1e5
    best = agg.scores(x)[:, 0].argmax(-1)
    torch.testing.assert_close(agg(x).out[:, 0], x[torch.arange(4), best])
    state = agg.init(4)
    for token in x.split(1, 1):
        state = agg.update(state, token)
    torch.testing.assert_close(agg.finalize(state).out, agg(x).out)


def test_a_state_passes_the_gradient_of_one_pass():
    x, agg = bags(), pool("abmil(gated=true)")
    whole = torch.autograd.grad(agg(x).out.square().sum(), list(agg.parameters()))
    parts = agg.merge(agg.update(agg.init(4), x[:, :2]), agg.update(agg.init(4), x[:, 2:]))
    torch.testing.assert_close(
        torch.autograd.grad(agg.finalize(parts).out.square().sum(), list(agg.parameters())), whole
    )


def test_the_largest_weight_finds_the_positive_instance():
    """Bags of five; a positive one holds one instance of another kind, of which nothing but the bag's label tells."""
    x, labels = 0.3 * torch.randn(200, 5, 4), torch.arange(200) % 2
    hidden = torch.zeros(200, 5)
    hidden[torch.arange(200), torch.randint(5, (200,))] = labels.float()
    x[..., 0] += 1.2 * hidden
    agg, head = build("abmil(gated=true, hidden=8)", 4), torch.nn.Linear(4, 1)
    optimiser = torch.optim.Adam([*agg.parameters(), *head.parameters()], 0.02)
    for _ in range(250):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(head(agg(x).out)[:, 0, 0], labels.float())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    weights = agg(x).weights[:, 0, 0].detach()
    good, bad = weights[hidden == 1], weights[labels == 1][hidden[labels == 1] == 0]
    assert (good[:, None] > bad).float().mean() > 0.9
    assert (weights[labels == 1].argmax(-1) == hidden[labels == 1].argmax(-1)).float().mean() > 0.9


def test_relu_is_the_pooling_of_spectra():
    x, agg = bags(), pool("abmil(activation=relu)")
    e = torch.relu(x @ agg.v.weight.T + agg.v.bias) @ agg.w.weight.T
    torch.testing.assert_close(agg(x).out[:, 0], (e.softmax(1) * x).sum(1))
    same = x[:, :1].expand(-1, 4, -1)
    torch.testing.assert_close(agg(same).out, x[:, :1])  # of equal tokens, that token


@pytest.mark.parametrize("line", ["abmil(heads=0)", "abmil(hidden=0)", "abmil(activation=sine)", "abmil(depth=2)"])
def test_refusals(line):
    with pytest.raises(ValueError, match=r"at least 1|is none of|no option"):
        build(line, 8)
