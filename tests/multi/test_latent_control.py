"""Heads on what a frozen model's states were while it answered."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from manyheads.multi.latent_control import (
    LatentControl,
    Trajectory,
    affordable,
    capability_loss,
    decide,
    resolution_loss,
)  # fmt: skip

TINY = dict(width=24, places=6, layers=1, heads=2)


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2)
    ).eval()


def head(outputs=2, **options):
    torch.manual_seed(0)
    return Trajectory(8, outputs, **(TINY | options)).double().eval()


def states(rows=3, tokens=9, seed=0):
    return torch.randn(rows, tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_batch_of_unlike_lengths_is_its_rows():
    x, mask = states(), torch.zeros(3, 9, dtype=torch.bool)
    mask[0, 2:7], mask[1], mask[2, 8] = True, True, True
    found = head()(x, mask)
    for row in range(3):
        torch.testing.assert_close(found[row], head()(x[row : row + 1, mask[row]])[0])
    torch.testing.assert_close(head()(x.masked_fill(~mask[..., None], 9.0), mask), found)


def test_a_state_that_stays_says_the_same_however_long():
    x = states(1, 1)
    for tokens in (2, 5, 40):
        torch.testing.assert_close(head()(x.expand(1, tokens, -1)), head()(x))


def test_time_matters_and_size_is_as_published():
    x = states()
    assert not torch.allclose(head()(x.flip(1)), head()(x))
    count = sum(p.numel() for p in Trajectory(2048).parameters())
    assert 2e6 < count < 3e6


def test_the_model_gives_the_same_and_learns_nothing():
    net = model()
    ids = torch.randint(30, (2, 10))
    before = net(ids).logits
    control = LatentControl(net, **TINY).eval()
    with torch.no_grad():
        for each in (control.capability, control.resolution):
            each.decide[-1].weight.zero_()
            each.decide[-1].bias.zero_()
    capable, better = control(ids, 4)
    assert (capable == 0.5).all() and (better == 0.5).all() and better.shape == (2, 3)
    (capable.sum() + better.sum()).backward()
    assert all(p.grad is None for p in net.parameters()) and torch.equal(net(ids).logits, before)
    assert not any("model" in name for name in control.state_dict())
    last, middle = control.states(ids)
    hidden = net(ids, output_hidden_states=True).hidden_states
    assert torch.equal(last, hidden[3]) and torch.equal(middle, hidden[2])


def test_the_answer_alone_is_read(monkeypatch):
    control, ids = LatentControl(model(), **TINY).eval(), torch.randint(30, (2, 10))
    kept = [x.clone() for x in control.states(ids)]
    monkeypatch.setattr(control, "states", lambda *given: kept)
    prompt = torch.tensor([3, 5])
    found = control(ids, prompt)[0]
    kept[0][0, :3], kept[0][1, :5] = 7.0, 7.0
    torch.testing.assert_close(control(ids, prompt)[0], found)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[:, 8:] = 0
    short = control(ids, prompt, mask)[1]
    kept[1][:, 8:] = 7.0
    torch.testing.assert_close(control(ids, prompt, mask)[1], short)
    few = control(ids, prompt, first=2)[0]
    kept[0][0, 5:], kept[0][1, 7:] = 1.0, 1.0
    torch.testing.assert_close(control(ids, prompt, first=2)[0], few)


def test_losses_by_hand():
    p, y = torch.tensor([0.2, 0.9, 0.6]), torch.tensor([0.0, 1.0, 0.25])
    w = torch.tensor([2.0, 1.0, 1.75])
    gap = (p - y).square()
    torch.testing.assert_close(capability_loss(p, y), (w * gap).sum() / w.sum())
    torch.testing.assert_close(capability_loss(p, y, severe=False), gap.mean())
    w = w * torch.tensor([4.0, 1.0, 4.0])
    torch.testing.assert_close(capability_loss(p, y, balance=(10, 40)), (w * gap).sum() / w.sum())
    w = torch.tensor([1.0, 10.0, 1.0])
    torch.testing.assert_close(capability_loss(p, y, balance=(990, 10), severe=False), (w * gap).sum() / w.sum())
    s = torch.tensor([[0.7, 0.2, 0.4], [0.1, 0.8, 0.3]])
    want = -(torch.tensor([0.3, 0.8, 0.6]).log().sum() + torch.tensor([0.9, 0.8, 0.7]).log().sum()) / 2
    torch.testing.assert_close(resolution_loss(s, torch.tensor([0, 2])), want)


def test_decisions():
    capable, better = (
        torch.tensor([0.9, 0.5, 0.8, 0.95]),
        torch.tensor([[0.1, 0.2, 0.3], [0.9, 0, 0], [0.2, 0.6, 0.5], [0, 0, 0.5]]),
    )
    assert decide(capable, better) == ["direct", "escalate", "information", "cannot"]
    assert decide(capable, better, resolve=1.1, least=0) == ["direct"] * 4
    assert decide(capable, least=1.1) == ["escalate"] * 4
    counts = [decide(capable, least=level).count("escalate") for level in (0, 0.6, 0.85, 0.92, 1.1)]
    assert counts == sorted(counts)


def test_a_budget_is_kept():
    capable = torch.rand(50)
    for budget in (1.0, 3.0, 7.7, 11.0, 30.0):
        least = affordable(capable, 1.0, 10.0, budget)
        moved = decide(capable, least=least).count("escalate") / 50
        assert 1 + 10 * moved <= budget + 1e-9 and (moved == 1 or 1 + 10 * (moved + 0.02) > budget)


def test_a_label_that_is_linear_in_the_states_is_learned():
    net = head(1, dropout=0.0, places=3).float().train()
    direction = torch.randn(8)

    def draw(rows):
        x = torch.randn(rows, 7, 8) * 0.3 + torch.randn(rows, 1, 8)
        return x, (x.mean(1) @ direction > 0).float()

    optimiser = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(60):
        x, y = draw(48)
        optimiser.zero_grad()
        capability_loss(net(x)[:, 0].sigmoid(), y).backward()
        optimiser.step()
    x, y = draw(400)
    with torch.no_grad():
        said = net.eval()(x)[:, 0]
    assert (said[y == 1][:, None] > said[y == 0]).double().mean() > 0.95


def test_what_is_refused():
    with pytest.raises(ValueError, match="width=20"):
        Trajectory(8, width=20)
    with pytest.raises(ValueError, match="an answer without tokens"):
        head()(states(), torch.zeros(3, 9).bool())
    with pytest.raises(ValueError, match="their mask"):
        head()(states(), torch.ones(3, 8).bool())
    with pytest.raises(ValueError, match="not alike"):
        capability_loss(torch.rand(3), torch.rand(4))
    with pytest.raises(ValueError, match="budget=1"):
        affordable([0.5], 2.0, 1.0, 1.0)
