"""Oracles of the adapter `mhr`."""

import copy
from dataclasses import replace

import pytest
import torch
from tests.oracles.reference import close, differ
from torch import nn

from manyheads import OptionError, adapt
from manyheads.core.spec import read_one
from manyheads.experts.adapters import find_adapter
from manyheads.experts.adapters.mhr import MHR

D, F, H, S, R, TASKS = 12, 8, 4, 3, 2, 5


def make(spec="", bias=True, seed=0, **options):
    """A linear layer with an adapter whose every number is drawn anew, in float64, and the adapters of its model."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"layer": nn.Linear(D, F, bias=bias)}).double().eval()
    chosen = (
        read_one(spec, find_adapter) if spec else MHR(**{**dict(splits=H, skills=S, rank=R, tasks=TASKS), **options})
    )
    found = adapt(model, chosen, ["layer"])
    for parameter in found.parameters():
        nn.init.normal_(parameter)
    return model["layer"], found


def frozen(layer, x):
    return nn.functional.linear(x, layer.weight, layer.bias)


def update(found, task):
    """(alpha/r) A_τ B_τ `[D, F]` of the one adapter."""
    with found.tasks(task):
        layer = found.model["layer"]
        return layer(torch.eye(D).double()) - frozen(layer, torch.eye(D).double())


def x_of(batch=3, tokens=4):
    return torch.randn(batch, tokens, D, dtype=torch.float64)


@pytest.mark.parametrize("form", ["lora", "ia3"])
def test_nothing_changes_at_the_start(form):
    model = nn.ModuleDict({"layer": nn.Linear(D, F)}).double()
    x = x_of()
    want = model["layer"](x)
    found = adapt(model, f"mhr(splits=4, skills=3, tasks=5, form={form})", ["layer"])
    with found.tasks([0, 4, 2]):
        got = model["layer"](x)
    close(got, want)


def test_written_out():
    layer, found = make(alpha=3.0)
    adapter, x, ids = found["layer"], x_of(), [4, 0, 4]
    with found.tasks(ids):
        y = layer(x)
    for b, task in enumerate(ids):
        a = adapter.logits[task].sigmoid()
        w = a / a.sum(-1, keepdim=True)
        close(w.sum(-1), torch.ones(H).double())
        big_a = torch.cat([sum(w[q, s] * adapter.lora_a[q, s] for s in range(S)) for q in range(H)], 0)
        big_b = torch.cat([sum(w[q, s] * adapter.lora_b[q, s] for s in range(S)) for q in range(H)], 1)
        close(y[b], frozen(layer, x[b]) + 3.0 / R * (x[b] @ big_a) @ big_b)


def test_one_skill_is_an_ordinary_adapter():
    layer, found = make(skills=1)
    adapter, x = found["layer"], x_of()
    a, b = adapter.lora_a[:, 0].flatten(0, 1), adapter.lora_b[:, 0].transpose(0, 1).flatten(1)
    with found.tasks([3, 1, 0]):
        close(layer(x), frozen(layer, x) + x @ a @ b / R)


def test_equal_rows_in_all_splits_are_poly():
    """One split over the concatenated stock."""
    layer, found = make()
    adapter = found["layer"]
    adapter.logits.data[:] = adapter.logits.data[:, :1]
    poly_layer, poly = make(splits=1)
    poly_layer.load_state_dict({k: v for k, v in layer.state_dict().items() if "adapter" not in k}, strict=False)
    one = poly["layer"]
    one.logits.data = adapter.logits.data[:, :1]
    one.lora_a.data = adapter.lora_a.data.transpose(0, 1).flatten(1, 2)[None]
    one.lora_b.data = adapter.lora_b.data.permute(1, 2, 0, 3).flatten(2)[None]
    x = x_of()
    with found.tasks([0, 1, 2]), poly.tasks([0, 1, 2]):
        close(layer(x), poly_layer(x))


def test_zero_logits_are_the_mean_adapter():
    layer, found = make()
    found["layer"].logits.data.zero_()
    x = x_of()
    with found.tasks(2):
        want = layer(x)
    found.few_shot("mean")
    close(layer(x), want)


def test_infinite_logits_splice_skills():
    layer, found = make(splits=2)
    adapter, picks, x = found["layer"], (2, 0), x_of()
    adapter.logits.data[1] = -torch.inf
    for q, s in enumerate(picks):
        adapter.logits.data[1, q, s] = torch.inf
    a = torch.cat([adapter.lora_a[q, s] for q, s in enumerate(picks)], 0)
    b = torch.cat([adapter.lora_b[q, s] for q, s in enumerate(picks)], 1)
    with found.tasks(1):
        close(layer(x), frozen(layer, x) + x @ a @ b / R)


def test_rank_of_an_update():
    """Parameters are mixed before the product: r at most, where a sum of skills' outputs has up to S r."""
    _, found = make()
    for task in range(TASKS):
        assert torch.linalg.matrix_rank(update(found, task)) == R
    adapter = found["layer"]
    apart = sum(torch.block_diag(*adapter.lora_a[:, s]) @ torch.block_diag(*adapter.lora_b[:, s]) for s in range(S))
    assert torch.linalg.matrix_rank(apart) > R


@pytest.mark.parametrize("options", [{}, {"form": "ia3"}, {"correction": True}, {"gate": "straight"}, {"gate": "l2"}])
def test_permuting_skills(options):
    layer, found = make(**options)
    x, order = x_of(), torch.randperm(S)
    with found.tasks([1, 2, 3]):
        want = layer(x)
        for parameter in found.parameters():
            parameter.data = (
                parameter.data[:, :, order] if parameter.shape == (TASKS, H, S) else parameter.data[:, order]
            )
        close(layer(x), want)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"alpha": 3.0}, {"form": "ia3"}, {"correction": True}, {"gate": "straight"}, {"gate": "l2"}, {"gate": "sample"},
     {"tasks": 0}, {"dropout": 0.5}],
)  # fmt: skip
def test_merging(options, bias):
    layer, found = make(bias=bias, **options)
    x, names = x_of(), {"weight", "bias"} if bias else {"weight"}
    task = 0 if options.get("tasks") == 0 else 3
    with found.tasks(task):
        want = layer(x)
    layer.train()
    found.merge(task)
    assert set(layer.state_dict()) == names and not layer._forward_hooks
    close(layer.eval()(x), want)


def test_ia3():
    layer, found = make(form="ia3")
    adapter, x = found["layer"], x_of()
    a = adapter.logits[2].sigmoid()
    w = a / a.sum(-1, keepdim=True)
    scale = (w[..., None] * adapter.scale).sum(1).flatten()
    with found.tasks(2):
        close(layer(x), frozen(layer, x) * scale)


def weights(found, task=0, times=1):
    return found["layer"].weights(torch.full((times,), task))


def test_correction():
    _, found = make(correction=True)
    close(weights(found, 2)[0], found["layer"].logits[2].sigmoid() * (H / S) ** 0.5)


def test_sampling_is_for_training_and_is_right_in_the_mean():
    _, found = make(gate="sample")
    adapter = found["layer"]
    want = adapter.logits[1].sigmoid()
    close(weights(found, 1)[0], want / want.sum(-1, keepdim=True))
    assert torch.equal(weights(found, 1), weights(found, 1))
    found.model.train()
    assert not torch.equal(weights(found, 1), weights(found, 1))
    samples = weights(found, 1, 20000)
    close(samples.sum(-1), torch.ones(20000, H).double())
    assert samples.std(0).min() > 0.05  # one for each sequence
    z = adapter.logits.detach()[1]
    u = torch.rand(20000, H, S).double()
    a = (z + u.log() - (1 - u).log()).sigmoid()
    torch.testing.assert_close(samples.mean(0), (a / a.sum(-1, keepdim=True)).mean(0), atol=0.02, rtol=0)
    assert (samples.mean(0) - weights(find_eval(found), 1)[0]).abs().max() < 0.1
    (slope,) = torch.autograd.grad(weights(found.model.train() and found, 1)[0, 0, 0], adapter.logits)
    assert slope[1, 0].abs().max() > 0 and not slope[0].any()


def find_eval(found):
    found.model.eval()
    return found


def test_straight_through():
    _, found = make(gate="straight", correction=True)
    adapter = found["layer"]
    w = weights(found, 1)[0] / (H / S) ** 0.5
    close(w, adapter.logits[1].sigmoid().round())
    (slope,) = torch.autograd.grad(w.sum(), adapter.logits)
    a = adapter.logits[1].sigmoid()
    close(slope[1], a * (1 - a))


def test_l2():
    _, found = make(gate="l2")
    close(weights(found, 3)[0].norm(dim=-1), torch.ones(H).double())
    close(weights(found, 3)[0], found["layer"].logits[3] / found["layer"].logits[3].norm(dim=-1, keepdim=True))


def test_dropout():
    _, found = make(dropout=0.5, correction=True)
    close(weights(found, 1)[0], found["layer"].logits[1].sigmoid() * (H / S) ** 0.5)
    found.model.train()
    w = weights(found, 1, 4000)
    assert 0.45 < (w == 0).double().mean() < 0.55
    torch.testing.assert_close(w.mean(0), weights(find_eval(found), 1)[0], atol=0.1, rtol=0)


@pytest.mark.parametrize(("how", "moves"), [("all", {"lora_a", "lora_b", "added.0"}), ("routing", {"added.0"}),
                                            ("mean", {"lora_a", "lora_b"})])  # fmt: skip
def test_few_shot(how, moves):
    """A step with weight decay moves what it should, in MHR-z exactly h S numbers a layer; other tasks stay."""
    layer, found = make()
    adapter, x = found["layer"], x_of()
    old = update(found, 1)
    task = found.few_shot(how)
    assert task == (None if how == "mean" else TASKS)
    if how != "mean":
        assert adapter.tasks == TASKS + 1 and adapter.added[0].abs().max() <= 1e-3
    optimizer = torch.optim.AdamW([p for p in found.model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    before = copy.deepcopy(found.model.state_dict())
    with found.tasks(task):
        layer(x).pow(2).sum().backward()
    optimizer.step()
    moved = {name: (value != before[name]).sum() for name, value in found.model.state_dict().items()}
    assert {name.removeprefix("layer.adapter.") for name, count in moved.items() if count} == moves
    if how == "routing":
        assert sum(moved.values()) == H * S
        close(update(found, 1), old)
    if how == "mean":
        assert adapter.options == MHR(H, 1, R, 0) and sum(p.numel() for p in found.parameters()) == R * (D + F)
        with pytest.raises(ValueError, match="no task"):
            found.merge(1)


def test_a_second_few_shot_task():
    layer, found = make()
    assert (found.few_shot("routing"), found.few_shot("routing")) == (TASKS, TASKS + 1)
    trains = [name for name, p in found["layer"].named_parameters() if p.requires_grad]
    assert trains == ["added.1"]
    with found.tasks([TASKS, TASKS + 1, 0]):
        layer(x_of())


def test_tasks_of_a_batch_are_those_alone():
    layer, found = make()
    x, ids = x_of(), [2, 0, 2]
    with found.tasks(torch.tensor(ids)):
        y, repeated = layer(x), layer(x.repeat_interleave(2, 0))
        flat = layer(x.flatten(0, 1))
    for b, task in enumerate(ids):
        with found.tasks(task):
            close(y[b], layer(x[b : b + 1])[0])
    close(repeated[::2], y)
    close(flat.unflatten(0, (3, -1)), y)
    differ(y[0], y[1])


def test_tasks_share_skills_in_their_gradients():
    """A task's gradient is its own on Z and on the skills that it uses."""
    layer, found = make()
    adapter = found["layer"]
    adapter.logits.data[0, :, 2] = -torch.inf
    with found.tasks(0):
        layer(x_of()).sum().backward()
    assert not adapter.logits.grad[1:].any() and adapter.logits.grad[0].any()
    assert not adapter.lora_a.grad[:, 2].any() and adapter.lora_a.grad[:, :2].any()


def test_first_values_and_cost():
    model = nn.ModuleDict({"layer": nn.Linear(64, 32)})
    options = MHR(splits=4, skills=8, rank=16, tasks=10)
    adapter = adapt(model, options, ["layer"])["layer"]
    bound = (3 * 64) ** -0.5
    assert 0.95 * bound < adapter.lora_a.abs().max() <= bound and not adapter.lora_b.any()
    assert 0.9e-3 < adapter.logits.abs().max() <= 1e-3
    count = sum(p.numel() for p in adapter.parameters())
    assert count == options.cost(64, 32).parameters == 8 * 16 * (64 + 32) + 10 * 4 * 8
    poly = replace(options, splits=1)
    assert options.cost(64, 32).parameters - poly.cost(64, 32).parameters == 10 * 8 * 3
    assert replace(options, form="ia3").cost(64, 32).parameters == 8 * 32 + 10 * 4 * 8


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("mhr(splits=5)", r"splits may be \[1, 2, 4\]"),
        ("mhr(skills=0)", "must be positive"),
        ("mhr(dropout=1.0)", "no chance"),
        ("mhr(gate=l2, correction=true)", "no correction"),
        ("mhr(form=iaa)", "none of lora, ia3"),
        ("mrh", r"did you mean mhr\?"),
        ("mhr + mhr", r"expected the end, found '\+'"),
    ],
)
def test_refusals(spec, why):
    with pytest.raises(OptionError, match=why):
        adapt(nn.ModuleDict({"layer": nn.Linear(D, F)}), spec, ["layer"])


def test_ia3_divides_outputs_only():
    adapt(nn.ModuleDict({"layer": nn.Linear(5, F)}), "mhr(splits=4, form=ia3)", ["layer"])
