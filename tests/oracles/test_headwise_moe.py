"""Oracles of the adapter `headwise-moe`, and of what is measured around it."""

import pytest
import torch
from tests.oracles.reference import close
from torch import nn

from manyheads import OptionError, adapt
from manyheads.experts.adapters import backward_transfer, effective_compositions
from manyheads.experts.adapters.headwise import Headwise

D, F, H, E, R = 12, 8, 4, 3, 2


def make(seed=0, **options):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"layer": nn.Linear(D, F)}).double().eval()
    found = adapt(model, Headwise(**{**dict(heads=H, experts=E, rank=R), **options}), ["layer"])
    for parameter in found.parameters():
        nn.init.normal_(parameter)
    return model["layer"], found


def x_of(tokens=16):
    return torch.randn(2, tokens, D, dtype=torch.float64)


def delta(layer, x):
    return layer(x) - nn.functional.linear(x, layer.weight, layer.bias)


def test_nothing_changes_at_the_start():
    model, x = nn.ModuleDict({"layer": nn.Linear(D, F)}).double(), x_of()
    want = model["layer"](x)
    adapter = adapt(model, "headwise-moe(heads=4)", ["layer"])["layer"]
    assert torch.equal(model["layer"](x), want)
    assert 0 < adapter.router.abs().max() < 0.1


@pytest.mark.parametrize("top", [1, 2, 3])
def test_written_out(top):
    """A loop over tokens, slices and chosen experts; weights renormalised where several are chosen."""
    layer, found = make(top=top, alpha=3.0)
    adapter, x = found["layer"], x_of(3)
    want = torch.zeros(2, 3, F).double()
    for b in range(2):
        for t in range(3):
            for j, part in enumerate(x[b, t].chunk(H)):
                p = (part @ adapter.router[j]).softmax(-1)
                chance, chosen = p.topk(top)
                for w, e in zip(chance / (chance.sum() if top > 1 else 1), chosen, strict=True):
                    want[b, t] += 3.0 / R * w * (part @ adapter.lora_a[j, e]) @ adapter.lora_b[j, e]
    close(delta(layer, x), want)


def test_one_slice_is_a_mixture_with_one_router():
    layer, found = make(heads=1, top=2)
    adapter, x = found["layer"], x_of()
    p = (x @ adapter.router[0]).softmax(-1)
    kept = p * torch.zeros_like(p).scatter(-1, p.topk(2, -1).indices, 1)
    each = torch.einsum("btd,edr,erf->btef", x, adapter.lora_a[0], adapter.lora_b[0])
    close(delta(layer, x), (each * (kept / kept.sum(-1, keepdim=True))[..., None]).sum(2))


def test_one_expert_is_a_block_diagonal_adapter_and_merges():
    layer, found = make(experts=1, alpha=3.0)
    adapter, x = found["layer"], x_of()
    a, b = torch.block_diag(*adapter.lora_a[:, 0]), adapter.lora_b[:, 0].flatten(0, 1)
    assert a.shape == (D, H * R)
    want = layer(x)
    close(delta(layer, x), 3.0 / R * x @ a @ b)
    found.merge()
    assert not hasattr(layer, "adapter")
    close(layer(x), want)


def test_a_choice_of_tokens_does_not_merge():
    with pytest.raises(ValueError, match="only with one expert"):
        make()[1].merge()


def test_a_slice_moves_its_own_router_and_bank_only():
    """The Jacobian of each slice's chances and contribution is zero in all other slices."""
    _, found = make(top=2)
    adapter, x = found["layer"], x_of(1)[0, 0]

    def chances(x):
        return adapter.route(x).chance

    def parts(x):
        z = torch.einsum("hd,hedr->her", x.unflatten(-1, (H, -1)), adapter.lora_a)
        z = z * adapter.gates(adapter.route(x))[..., None]
        return torch.einsum("her,herf->hf", z, adapter.lora_b)

    for of in (chances, parts):
        jacobian = torch.autograd.functional.jacobian(of, x).unflatten(-1, (H, -1))  # [h, ., h', D/h]
        for j in range(H):
            for other in range(H):
                assert bool(jacobian[j, :, other].any()) == (j == other)
    moved = x.clone()
    moved[: D // H] += 5 * torch.randn(D // H)
    before, after = adapter.route(x).chosen, adapter.route(moved).chosen
    assert torch.equal(before[1:], after[1:])


def test_gradient_locality():
    """Tokens whose route leaves out an expert give it exactly no gradient."""
    layer, found = make()
    adapter, x = found["layer"], x_of()
    chosen = adapter.route(x).chosen[..., 0]
    for j in range(H):
        for e in range(E):
            without = x[(chosen[..., j] != e)]
            slopes = torch.autograd.grad(layer(without).pow(2).sum(), (adapter.lora_a, adapter.lora_b))
            assert all(not slope[j, e].any() for slope in slopes)
            one = x[chosen[..., j] == e]
            if len(one):
                slopes = torch.autograd.grad(layer(one).pow(2).sum(), (adapter.lora_a, adapter.lora_b))
                assert all(slope[j, e].any() for slope in slopes)


def test_every_route_is_reachable():
    """E^h of them; 4 experts in 8 slices are 65,536, about as many as one router has that takes 5 of 26."""
    _, found = make(heads=2, experts=3)
    adapter = found["layer"]
    with found.routes() as seen:
        found.model["layer"](torch.randn(4, 500, D).double())
    (chosen,) = seen["layer"]
    assert chosen.shape == (4, 500, 2, 1)
    assert len(chosen[..., 0].flatten(0, 1).unique(dim=0)) == 3**2
    found.model["layer"](torch.randn(1, 1, D).double())
    assert len(seen["layer"]) == 1 and adapter.shared.routes is None


def test_permuting_slices():
    layer, found = make(top=2)
    adapter, x, order = found["layer"], x_of(), torch.randperm(H)
    want = delta(layer, x)
    for parameter in adapter.parameters():
        parameter.data = parameter.data[order]
    moved = x.unflatten(-1, (H, -1))[..., order, :].flatten(-2)
    close(delta(layer, moved), want)


def test_permuting_experts():
    layer, found = make(top=2)
    adapter, x, order = found["layer"], x_of(), torch.randperm(E)
    want = layer(x)
    for name in ("lora_a", "lora_b"):
        getattr(adapter, name).data = getattr(adapter, name).data[:, order]
    adapter.router.data = adapter.router.data[..., order]
    close(layer(x), want)


def test_balance_loss():
    """1 where even, E where one expert takes all; in training alone, and only where asked for."""
    layer, found = make(balance=0.5)
    adapter, x = found["layer"], x_of()
    layer.train()
    routing = adapter.route(x)
    load = torch.nn.functional.one_hot(routing.chosen[..., 0], E).double()
    want = sum(
        E * (routing.chance[..., j, :].mean((0, 1)) * load[..., j, :].mean((0, 1))).sum() for j in range(H)
    ) / H  # fmt: skip
    layer(x)
    close(found.loss(), 0.5 * want)
    adapter.router.data.zero_()
    layer(x)
    close(found.loss(), torch.tensor(0.5).double())
    adapter.router.data[..., 1] = 100 * x[0, 0].view(H, -1)
    layer(x[:1, :1])
    close(found.loss(), torch.tensor(0.5 * E).double())
    for quiet in (make(balance=0.0)[1], make(balance=0.5)[1]):
        quiet.model["layer"](x)
        assert quiet.loss() == 0


def test_cost():
    for options in (Headwise(heads=H, experts=E, rank=R), Headwise(heads=2, experts=4, rank=3, top=2)):
        model = nn.ModuleDict({"layer": nn.Linear(D, F)})
        found = adapt(model, options, ["layer"])
        h, e, r, k = options.heads, options.experts, options.rank, options.top
        count = sum(p.numel() for p in found.parameters())
        assert count == options.cost(D, F).parameters == h * e * r * (D // h + F) + D * e
        assert options.active(D, F) == h * k * r * (D // h + F) + D * e


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("headwise-moe(heads=5)", r"heads may be \[1, 2, 3, 4, 6, 12\]"),
        ("headwise-moe(top=5)", "top may be 1 to 4"),
        ("headwise-moe(rank=0)", "must be positive"),
    ],
)
def test_refusals(spec, why):
    with pytest.raises(OptionError, match=why):
        adapt(nn.ModuleDict({"layer": nn.Linear(D, F)}), spec, ["layer"])


def test_effective_compositions():
    one = effective_compositions(torch.zeros(5, 2), torch.ones(5, dtype=torch.long))
    assert one.each.tolist() == [1.0] and one.mean == 1.0
    uniform = effective_compositions(torch.zeros(8), torch.arange(4).repeat(2))
    assert uniform.mean == pytest.approx(4.0)
    skewed = effective_compositions(torch.zeros(10), torch.tensor([0] * 9 + [1]))
    assert skewed.mean == pytest.approx(1 / (0.9**2 + 0.1**2)) == pytest.approx(1.2195, abs=1e-4)


def test_effective_compositions_of_routes():
    """Weighed by use; choices within a slice have no order; several labels count jointly."""
    routes = torch.tensor([[[0, 1]], [[1, 0]], [[0, 2]], [[2, 0]], [[2, 0]], [[0, 2]]])
    labels = torch.tensor([[0, 0], [0, 1], [1, 1], [1, 1], [1, 1], [1, 1]])
    found = effective_compositions(routes, labels)
    assert sorted(zip(found.each.tolist(), found.usage.tolist(), strict=True)) == [
        (pytest.approx(1.0), pytest.approx(4 / 6)), (pytest.approx(2.0), pytest.approx(2 / 6))
    ]  # fmt: skip
    assert found.mean == pytest.approx((2 * 2 + 1 * 4) / 6)
    with pytest.raises(ValueError, match="for every token"):
        effective_compositions(routes, labels[:2])


def test_backward_transfer():
    scores = torch.tensor([[0.9, 0.1, 0.0], [0.7, 0.8, 0.0], [0.5, 0.9, 0.6]])
    assert backward_transfer(scores) == pytest.approx(((0.5 - 0.9) + (0.9 - 0.8)) / 2)
    with pytest.raises(ValueError, match="two tasks"):
        backward_transfer(scores[:2])
