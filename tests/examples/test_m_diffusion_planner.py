"""Heads that are one and come apart, each after its own reward."""

import copy

import torch
from examples.m_diffusion_planner import (
    MOMENTS,
    REWARDS,
    Planner,
    advantages,
    clipped,
    imitate,
    log_probability,
    mean,
    plans,
    reinforce,
)  # fmt: skip


def inputs(rows=5):
    return torch.randn(rows, MOMENTS), torch.randint(6, (rows,)), torch.rand(rows)


def test_heads_are_one_until_they_are_untied_and_then_say_the_same():
    torch.manual_seed(0)
    model, given = Planner(list(REWARDS)), inputs()
    own = sum(p.numel() for p in model.heads.parameters())
    before = {name: model(*given, name) for name in REWARDS}
    model.untie()
    assert sum(p.numel() for p in model.heads.parameters()) == 3 * own
    assert all(torch.equal(model(*given, name), said) for name, said in before.items())


def test_advantages_know_no_shift_and_no_scale_and_equal_rewards_teach_nothing():
    rewards = torch.randn(4, 16)
    torch.testing.assert_close(advantages(3 * rewards + 7), advantages(rewards), rtol=1e-3, atol=1e-4)
    assert (advantages(torch.full((4, 16), 2.0)) == 0).all()


def test_the_first_update_is_the_policy_gradient():
    old, gain = torch.randn(9), torch.randn(9)
    now = old.clone().requires_grad_()
    clipped(now, old, gain).backward()
    torch.testing.assert_close(now.grad, -gain / 9)
    far = (old + 1).requires_grad_()  # beyond the clip what would pull further gives nothing
    clipped(far, old, gain).backward()
    assert ((far.grad != 0) == (gain < 0)).all()


def test_steps_are_gaussians():
    plan, centre, sigma = torch.randn(5, MOMENTS), torch.randn(5, MOMENTS), torch.tensor(0.4)
    found = log_probability(plan, centre, sigma) - log_probability(centre, centre, sigma)
    normal = torch.distributions.Normal(centre, sigma)
    torch.testing.assert_close(found, (normal.log_prob(plan) - normal.log_prob(centre)).sum(-1))


def trained(steps):
    torch.manual_seed(0)
    model = Planner(list(REWARDS))
    imitate(model, "normal", steps)
    first = copy.deepcopy(model)
    model.untie()
    return model, first


def test_a_head_learns_alone():
    model, first = trained(5)
    given = inputs()
    others = {name: model(*given, name) for name in ("normal", "gentle")}
    reinforce(model, first, "fast", 2)
    assert all(torch.equal(model(*given, name), said) for name, said in others.items())
    assert not torch.equal(model(*given, "fast"), others["normal"])
    moved = {}
    for beta in (0.0, 1e6):
        again, _ = trained(5)
        reinforce(again, first, "fast", 5, beta)
        moved[beta] = (mean(again, *given, "fast") - mean(first, *given, "fast")).abs().max()
    assert moved[1e6] < moved[0.0]


def test_rewards_lead_heads_apart():
    model, first = trained(300)
    free = torch.full((256,), 1.5)
    start = plans(first, free, "fast")[-1]
    assert abs(start.mean() - 1.65) < 0.15  # as drivers do
    for head in ("fast", "gentle"):
        reinforce(model, first, head, 30)
    fast, gentle = (plans(model, free, head)[-1] for head in ("fast", "gentle"))
    assert fast.mean() > start.mean() + 0.1 > gentle.mean() + 0.2
    for head, plan in (("fast", fast), ("gentle", gentle)):
        assert REWARDS[head](plan, free).mean() > REWARDS[head](start, free).mean()
