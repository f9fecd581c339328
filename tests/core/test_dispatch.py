"""Rows sent to experts: three ways that are one function, and what each of them works."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from manyheads.core.dispatch import Blocks, Everyone, Sorted, group
from manyheads.core.experts import Experts
from manyheads.core.router import Choice

KINDS = (Sorted, Blocks, Everyone)


def loop(x, weight, chosen, kept):
    """Every expert on every token, with zeros for those not chosen: `[N, k, F]`."""
    rows = x.expand(-1, chosen.shape[1], -1)
    on = [((chosen == expert) & kept)[..., None] * (rows @ each) for expert, each in enumerate(weight)]
    return torch.stack(on).sum(0)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("tokens", "top", "experts"), [(7, 2, 5), (50, 3, 8), (1, 2, 8), (3, 8, 8), (64, 1, 4), (9, 7, 8), (2, 1, 1)]
)
def test_each_way_is_a_loop_over_experts(tokens, top, experts, shared, dropped):
    """Outputs and gradients, of rows apart and summed under gates; choices that are not kept come to nothing."""
    x = torch.randn(tokens, 1 if shared else top, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(experts, 6, 4, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(tokens, top, dtype=torch.float64, requires_grad=True)
    kept = torch.rand(tokens, top) < 0.5 if dropped else torch.ones(tokens, top, dtype=torch.bool)
    for chosen in (torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)]),
                   torch.arange(top).expand(tokens, -1)):  # fmt: skip
        want = loop(x, weight, chosen, kept)
        total = (want * gates[..., None]).sum(1)
        wanted = torch.autograd.grad(want.pow(2).sum() + total.pow(3).sum(), (x, weight, gates))
        for kind in KINDS:
            groups = kind(chosen, experts, kept if dropped else None)
            y, summed = groups.each(x, torch.matmul, weight), groups.sum(x, gates, torch.matmul, weight)
            torch.testing.assert_close(y, want)
            torch.testing.assert_close(summed, total)
            loss = y.pow(2).sum() + summed.pow(3).sum()
            got = torch.autograd.grad(loss, (x, weight, gates), allow_unused=True, materialize_grads=True)
            for mine, theirs in zip(got, wanted, strict=True):
                torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_kept(kind):
    x, chosen = torch.randn(5, 1, 6, requires_grad=True), torch.zeros(5, 2, dtype=torch.long)
    y = kind(chosen, 4, torch.zeros(5, 2, dtype=torch.bool)).sum(
        x, torch.ones(5, 2), torch.matmul, torch.randn(4, 6, 3)
    )
    assert y.shape == (5, 3) and not y.any()


@pytest.mark.parametrize("experts", [4, 64])
def test_work(experts):
    """Sorted rows: that of the chosen, to the number; blocks: at most about twice, with the most uneven load too."""
    x, weight, chosen = torch.randn(256, 1, 8), torch.randn(experts, 8, 16), torch.zeros(256, 2, dtype=torch.long)
    chosen[:, 1] = 1
    for kind, most in ((Sorted, 1), (Blocks, 2)):
        with FlopCounterMode(display=False) as counter:
            kind(chosen, experts).each(x, torch.matmul, weight)
        assert 1 <= counter.get_total_flops() / (2 * 256 * 2 * 8 * 16) <= most


def test_the_way_is_chosen_from_shapes():
    def kind(tokens, top, experts, size):
        return type(group(torch.zeros(tokens, top, dtype=torch.long), experts, size=size))

    assert kind(1000, 8, 8, 10**6) is Everyone  # all are chosen
    assert kind(4, 2, 8, 4096) is Everyone  # little to do
    assert kind(1000, 2, 8, 10**6) is Sorted
    assert type(group(torch.zeros(1000, 2, dtype=torch.long, device="meta"), 8, size=10**6)) is Blocks


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", ["swiglu", "geglu", "silu", "gelu", "relu", "none"])
def test_experts_are_feed_forwards(act, bias):
    bank, x = Experts(5, 6, 4, act, bias=bias).double(), torch.randn(9, 1, 6, dtype=torch.float64)
    for parameter in bank.parameters():
        torch.nn.init.normal_(parameter)
    chosen, gates = torch.rand(9, 5).topk(2, -1).indices, torch.rand(9, 2, dtype=torch.float64)
    inner = {"swiglu": "silu", "geglu": "gelu", "none": None}.get(act, act)
    f = getattr(torch.nn.functional, inner) if inner else lambda t: t
    for n in range(9):
        want = 0
        for j in range(2):
            e = int(chosen[n, j])

            def through(name, rows, e=e):
                y = rows @ getattr(bank, name)[e].T
                return y + getattr(bank, name + "_bias")[e] if bias else y

            if act in ("swiglu", "geglu"):
                hidden = f(through("gate_proj", x[n, 0])) * through("up_proj", x[n, 0])
            else:
                hidden = f(through("up_proj", x[n, 0]))
            want = want + gates[n, j] * through("down_proj", hidden)
        torch.testing.assert_close(bank(x, Choice(chosen, gates))[n], want)
    torch.testing.assert_close(bank.alone(x[:, 0], 3), bank(x, Choice(torch.full((9, 1), 3), torch.ones(9, 1))))
