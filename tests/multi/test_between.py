"""What stands between trunk and heads: the laws of all kinds, and each kind's equations."""

import pytest
import torch
import torch.nn.functional as F
from tests.multi.models import gradients, same
from torch import nn

from manyheads.core.part import OptionError
from manyheads.multi import ATINet, Lasso, MedusaUFL, MMoE, MultiHead, diversity, read_between
from manyheads.multi.between import KINDS, Views

D = torch.float64
NAMES = ["a.x", "b", "c"]


class Scales(nn.Module):
    """Maps of two sizes; of one size where `halve` is False."""

    def __init__(self, halve: bool = True) -> None:
        super().__init__()
        self.fine = nn.Conv2d(3, 4, 3, padding=1)
        self.coarse = nn.Conv2d(4, 6 if halve else 4, 3, stride=2 if halve else 1, padding=1)

    def forward(self, x):
        return self.coarse(self.fine(x).tanh())


def rows() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())


KIND = {
    "mmoe(experts=3)": (rows, (4, 5)),
    "mmoe(experts=4, width=3, layers=0, exclusive=exclusivity, bias=true)": (rows, (4, 5)),
    "mmoe(experts=4, width=3, layers=2, exclusive=exclusion, leaky=true)": (lambda: Scales(), (2, 3, 4, 4)),
    "mmoe(experts=2, width=3, recurrent=gru)": (rows, (2, 3, 5)),
    "medusa-ufl(taps=[fine, coarse], norm=none)": (lambda: Scales(), (2, 3, 4, 4)),
    "medusa-ufl(taps=[0, 2], kernel=1, width=3, scale_norm=sigmoid, start=2.0, norm=none)": (rows, (2, 3, 5)),
    "lasso(taps=[0, 2], start=even, l1=0.1)": (rows, (2, 3, 5)),
    "lasso(taps=[fine, coarse], start=even, scale=softmax)": (lambda: Scales(False), (2, 3, 4, 4)),
    "ati-net(widths=[12, 9], norm=none)": (lambda: Scales(), (2, 3, 4, 4)),
    "ati-net(widths=[4], kernel=1, residual=true, masks=false, norm=none)": (rows, (4, 5)),
}


def built(line, names=NAMES, seed=0, **options) -> tuple[MultiHead, torch.Tensor, dict]:
    trunk, shape = KIND[line]
    torch.manual_seed(seed)
    head = "regression" if len(shape) == 2 else "regression(pool=mean)"
    width = {
        "": 6,
        "fine": 4,
        "coarse": 6 if trunk().__class__ is Scales and "lasso" not in line else 4,
        "0": 6,
        "2": 6,
    }
    net = MultiHead(trunk(), dict.fromkeys(names, head), width=width, between=line, **options).to(D)
    targets = {name: torch.randn(shape[0], dtype=D) for name in sorted(names)}
    return net, torch.randn(shape, dtype=D), targets


def test_every_kind_is_tried():
    assert {read_between(line).name for line in KIND} == set(KINDS)


@pytest.mark.parametrize("line", KIND)
def test_all_heads_are_each_alone_and_gradients_add_up_and_every_weight_learns(line):
    net, x, targets = built(line)
    every = net.eval()(x).outputs
    for name in NAMES:
        torch.testing.assert_close(net(x, heads=[name]).outputs[name], every[name])
    net.train()
    whole = net(x, targets=targets)
    whole.loss.backward()
    total = gradients(net)
    closed = {key for key, p in net.named_parameters() if p.grad is None or not (p.grad != 0).any()}
    assert not [key for key in closed if "experts" not in key or "exclusive" not in line]
    summed = {key: torch.zeros_like(p) for key, p in net.named_parameters()}
    for name in NAMES:
        net.zero_grad()
        net(x, targets={name: targets[name]}).loss.backward()
        for key, gradient in gradients(net).items():
            summed[key] += 0 if gradient is None else gradient
        others = [other for other in NAMES if other != name]
        assert all(p.grad is None for other in others for p in net.net(other).parameters())
        if net.between.apart:
            mine = [f"of {other.replace('.', '%2E')}." for other in others]
            assert all(p.grad is None for key, p in net.named_parameters() if any(each in key for each in mine))
    same({k: torch.zeros_like(summed[k]) if g is None else g for k, g in total.items()}, summed)


@pytest.mark.parametrize("line", KIND)
def test_permuted_heads_give_permuted_outputs_and_a_part_of_them_is_a_model(line):
    net, x, _ = built(line)
    turned = built(line, NAMES[::-1])[0]
    turned.load_state_dict(net.state_dict())
    every = net.eval()(x).outputs
    for name, output in turned.eval()(x).outputs.items():
        torch.testing.assert_close(output, every[name])
    few = net.extract(["b", "c"])
    for name in ("b", "c"):
        torch.testing.assert_close(few(x).outputs[name], every[name], rtol=0, atol=0)
    if net.between.apart:
        assert sum(p.numel() for p in few.parameters()) < sum(p.numel() for p in net.parameters())
    before = net.eval()(x).outputs
    net.add("new.one", "regression" if x.dim() == 2 else "regression(pool=mean)")
    after = net(x).outputs
    assert after["new.one"].shape == after["b"].shape
    assert not net.between.apart or all(torch.equal(before[name], after[name]) for name in NAMES)


@pytest.mark.parametrize("line", [line for line in KIND if "ati" not in line])
def test_it_goes_with_branches_with_missing_labels_micro_batches_and_a_gradient_aggregator(line):
    net, x, targets = built(line)
    aggregated = built(line, balance=lambda matrix: matrix.sum(0))[0]
    targets["b"][0] = float("nan")
    targets["c"][:] = float("nan")
    for each in (net, aggregated):
        each(x, targets=targets).loss.backward()
    assert all(p.grad is None for p in net.net("c").parameters())
    same(gradients(net), gradients(aggregated), 1e-5, 1e-7)
    whole = gradients(net)
    net.zero_grad()
    counts = net.label_counts(targets)
    for row in range(len(x)):
        part = {name: each[row : row + 1] for name, each in targets.items()}
        net(x[row : row + 1], targets=part, counts=counts).loss.backward()
    same({k: 0 * whole[k] if g is None else g for k, g in gradients(net).items() if whole[k] is not None},
         {k: g for k, g in whole.items() if g is not None})  # fmt: skip
    first = next(name for name, _ in net.trunk.named_children())
    before = net.eval()(x).outputs
    net.split(first, [["b"], ["a.x", "c"]])
    after = net(x).outputs
    assert all(torch.equal(before[name], after[name]) for name in NAMES)


def test_heads_with_features_of_their_own_read_past_it():
    heads = {"a": "regression", "past": "regression(features=1)"}
    net = MultiHead(rows(), heads, width=6, between="mmoe(experts=2, width=3)")
    assert net.widths == {"a": 3, "past": 6}
    x = torch.randn(2, 5)
    torch.testing.assert_close(net(x).outputs["past"], net.net("past")(net.trunk[:2](x)))
    with pytest.raises(ValueError, match="head 'a' reads what is between"):
        net.run_alone("a", torch.randn(2, 6))


# mmoe


def moe(names=NAMES, **options) -> tuple[Views, torch.Tensor]:
    torch.manual_seed(0)
    return MMoE(**options).build([5], names).to(D), torch.randn(4, 5, dtype=D)


def seen(views: Views, x: torch.Tensor, names=NAMES) -> dict[str, torch.Tensor]:
    return views([x], list(names), lambda said, some: dict.fromkeys(some, said), None)


def test_mmoe_is_its_equation_and_with_one_expert_the_shared_bottom():
    views, x = moe(experts=3, width=4, layers=2, bias=True)
    with torch.no_grad():
        for gate in views.gates.values():
            gate.bias.normal_()
    found = seen(views, x)
    for name in NAMES:
        gate = views.gates.of(name)
        weights = (x @ gate.proj.weight.T + gate.proj.bias).softmax(-1)
        torch.testing.assert_close(weights.sum(-1), torch.ones(4, dtype=D))
        torch.testing.assert_close(
            found[name], sum(weights[:, [e]] * views.experts[e](x) for e in range(3)) + gate.bias
        )
    one, _ = moe(experts=1)
    assert all(torch.equal(each, one.experts[0](x)) for each in seen(one, x).values())
    order = torch.tensor([2, 0, 1])  # experts in another order, with the columns of the gates
    with torch.no_grad():
        for gate in views.gates.values():
            gate.proj.weight.copy_(gate.proj.weight[order])
            gate.proj.bias.copy_(gate.proj.bias[order])
    views.experts = nn.ModuleList([views.experts[e] for e in order])
    for name, each in seen(views, x).items():
        torch.testing.assert_close(each, found[name])


@pytest.mark.parametrize("mode", ["exclusivity", "exclusion"])
def test_closed_gates_are_zero_and_so_is_what_comes_back_through_them(mode):
    views, x = moe(experts=6, exclusive=mode, alpha=0.5)
    owners = MMoE(experts=6, exclusive=mode).owners(3)
    assert sum(owner is not None for owner in owners) == 3
    for number, name in enumerate(NAMES):
        closed = [o is not None and (o == number) != (mode == "exclusivity") for o in owners]
        weights = views.weights(x, name)
        assert (weights[:, torch.tensor(closed)] == 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(4, dtype=D))
        views.zero_grad()
        seen(views, x)[name].sum().backward()
        for expert, shut in zip(views.experts, closed, strict=True):
            assert all((p.grad == 0).all() for p in expert.parameters()) == shut
    leaky, x = moe(experts=6, exclusive=mode, leaky=True)
    assert all((leaky.weights(x, name) > 0).all() for name in NAMES)


def test_single_tasks_no_exclusive_experts_and_gates_that_would_all_be_closed():
    plain, same_ = moe(experts=4)[0], moe(experts=4, exclusive="exclusivity", alpha=0.0)[0]
    assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), same_.parameters(), strict=True))
    assert all(gate.open.all() for gate in same_.gates.values())
    apart, x = moe(experts=3)
    with torch.no_grad():
        for number, name in enumerate(NAMES):
            apart.gates.of(name).proj.weight.zero_()
            apart.gates.of(name).proj.bias.copy_(1e4 * F.one_hot(torch.tensor(number), 3))
    for number, each in enumerate(seen(apart, x).values()):
        torch.testing.assert_close(each, apart.experts[number](x))
    with pytest.raises(OptionError, match=r"head 'a\.x' may use none of experts=1"):
        moe(names=["a.x", "b"], experts=1, exclusive="exclusion", alpha=1.0)
    with pytest.raises(OptionError, match="may use none of experts=2"):
        moe(experts=2, exclusive="exclusivity", alpha=1.0)
    full = MultiHead(rows(), dict.fromkeys(NAMES, "regression"), width=6,
                     between=MMoE(experts=2, exclusive="exclusivity", alpha=0.5))  # fmt: skip
    full.between.owned = [True, True]
    with pytest.raises(ValueError, match="head 'z': every expert belongs to another head"):
        full.add("z", "regression")
    assert [*full.heads] == [*full.widths] == NAMES and len(full.nets) == 3
    with pytest.raises(ValueError, match=r"recurrent=lstm reads tokens .* not \[4, 5\]"):
        views, x = moe(recurrent="lstm")
        seen(views, x)


def test_gates_speak_of_samples_and_padding_says_nothing():
    views, _ = moe(experts=3, width=4)
    x, mask = torch.randn(2, 6, 5, dtype=D), torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    x[1, 4:] = float("nan")
    short = views([x[1:, :4]], NAMES, lambda said, some: dict.fromkeys(some, said), None)
    padded = views([x], NAMES, lambda said, some: dict.fromkeys(some, said), mask)
    for name in NAMES:
        torch.testing.assert_close(padded[name][1:, :4], short[name])


def test_diversity_is_the_mean_distance_over_the_largest():
    said = torch.tensor([[0.0, 0], [3, 4], [0, 0]])
    assert diversity(said) == pytest.approx(2 / 3) and diversity(said[::2]) == 0
    with pytest.raises(ValueError, match="at least 2 experts"):
        diversity(said[:1])


# medusa-ufl


def ufl(**options):
    torch.manual_seed(0)
    options = {"taps": ("fine", "coarse"), "width": 3} | options
    net = MultiHead(Scales(), dict.fromkeys(NAMES, "tokens(classes=2)"), width={"fine": 4, "coarse": 6},
                    between=MedusaUFL(**options)).to(D)  # fmt: skip
    return net, torch.randn(2, 3, 4, 4, dtype=D)


def test_medusa_costs_what_it_says_a_head_and_runs_the_trunk_once():
    net, x = ufl()
    each = sum(18 * width * 3 for width in (4, 6)) + 2 * 3 * 2 + 2 + 9 * 9 + 3 + 2 * 3
    assert [sum(p.numel() for p in reader.parameters()) for reader in net.between.readers.values()] == [each] * 3
    passes = []
    net.trunk.register_forward_hook(lambda *_: passes.append(1))
    assert net(x).outputs["b"].shape == (2, 16, 2) and passes == [1]
    net(x, targets={"b": torch.ones(2, 16)}).loss.backward()
    assert all(p.grad is None for p in net.between.readers.of("c").parameters())


def test_medusa_weighs_scales_at_each_place():
    reader = ufl()[0].between.readers.of("b")
    fine, coarse = torch.randn(2, 4, 4, 4, dtype=D), torch.randn(2, 6, 2, 2, dtype=D)
    masked = [m(f).sigmoid() * v(f) for m, v, f in zip(reader.masks, reader.values, (fine, coarse), strict=True)]
    up = [masked[0], F.interpolate(masked[1], (4, 4), mode="bilinear")]
    weights = reader.scales(torch.cat(up, 1)).softmax(1)
    expected = weights[:, :1] * up[0] + weights[:, 1:] * up[1]
    torch.testing.assert_close(reader.mix([fine, coarse], (4, 4)), expected)
    with torch.no_grad():  # masks of 1 leave the plain conv, of 0 nothing of the image
        for mask in reader.masks:
            mask.weight.zero_()
            mask.bias = nn.Parameter(torch.full((3,), 1e3, dtype=D))
        reader.scales.weight.zero_()
        reader.scales.bias.copy_(torch.tensor([1e3, 0.0]))
        torch.testing.assert_close(reader.mix([fine, coarse], (4, 4)), reader.values[0](fine))
        for mask in reader.masks:
            mask.bias.fill_(-1e3)
        assert (reader.mix([fine, coarse], (4, 4)) == 0).all()
    reader = ufl(taps=("fine",))[0].between.readers.of("b")
    masked = reader.masks[0](fine).sigmoid() * reader.values[0](fine)
    torch.testing.assert_close(reader.mix([fine], (4, 4)), masked)
    started = ufl(start=2.0)[0].between.readers.of("b")
    assert all((mask.bias == 2).all() for mask in started.masks)
    constant = torch.ones(1, 2, 2, 2, dtype=D)
    assert (F.interpolate(constant, (4, 4), mode="bilinear") == 1).all()


def test_medusa_adds_tasks_to_a_frozen_trunk():
    net, x = ufl()
    before = net.eval()(x).outputs
    net.freeze().add("new", "tokens(classes=2)").train()
    statistics = [each.clone() for each in net.trunk.buffers()]
    net(x, targets={"new": torch.ones(2, 16)}).loss.backward()
    assert all(p.grad is None for p in net.trunk.parameters())
    assert all(torch.equal(one, two) for one, two in zip(statistics, net.trunk.buffers(), strict=True))
    after = net.eval()(x).outputs
    assert all(torch.equal(before[name], after[name]) for name in NAMES)


# lasso


def test_a_mix_that_begins_with_the_last_layer_is_the_plain_model_bit_for_bit():
    torch.manual_seed(0)
    plain = MultiHead(rows(), dict.fromkeys(NAMES, "regression"), width=6)
    torch.manual_seed(0)
    mixed = MultiHead(rows(), dict.fromkeys(NAMES, "regression"), width=6, between="lasso(taps=[0, 3])")
    x = torch.randn(4, 5)
    assert all(torch.equal(each, mixed(x).outputs[name]) for name, each in plain(x).outputs.items())


def test_a_layer_gets_the_gradients_of_heads_by_their_weights():
    views = Lasso(taps=("0", "1", "2"), scale="free", start="even").build([5] * 3, NAMES).to(D)
    layers = [torch.randn(4, 5, dtype=D, requires_grad=True) for _ in range(3)]
    with torch.no_grad():
        views.mixes.of("b").alpha[1] = 0
        views.mixes.of("c").alpha.normal_()
    found = views(layers, NAMES, lambda x, names: dict.fromkeys(names, x), None)
    g = {name: torch.randn(4, 5, dtype=D) for name in NAMES}
    sum((found[name] * g[name]).sum() for name in NAMES).backward()
    for m, layer in enumerate(layers):
        torch.testing.assert_close(layer.grad, sum(views.mix(name)[m] * g[name] for name in NAMES))
    layers[1].grad = None
    views(layers, ["b"], lambda x, names: dict.fromkeys(names, x), None)["b"].sum().backward()
    assert (layers[1].grad == 0).all()


def test_shrinking_makes_exact_zeros_and_leaves_a_column_its_best_layer():
    views = Lasso(taps=("0", "1", "2")).build([5] * 3, ["a"]).to(D)
    alpha = views.mixes.of("a").alpha
    with torch.no_grad():
        alpha.copy_(torch.tensor([0.6, -0.8, 0.0]) * 3)
    views.shrink(0.0)
    torch.testing.assert_close(alpha.detach(), torch.tensor([0.6, -0.8, 0.0], dtype=D))
    views.shrink(0.65)
    assert alpha.tolist() == [0, -1, 0]
    views.shrink(1e6)
    assert alpha.tolist() == [0, -1, 0]
    free = Lasso(taps=("0", "1"), scale="free").build([5] * 2, ["a"])
    free.shrink(2.0)
    assert free.mix("a").tolist() == [0, 0]


def test_the_penalty_is_the_length_in_l1():
    net, x, targets = built("lasso(taps=[0, 2], start=even, l1=0.1)")
    out = net(x, targets=targets)
    torch.testing.assert_close(out.loss, sum(out.losses.values()) + 0.1 * 3 * 2**0.5)
    torch.testing.assert_close(net.eval()(x, targets=targets).loss, sum(out.losses.values()))


# ati-net


def ati(names=NAMES, **options):
    torch.manual_seed(0)
    return ATINet(**{"widths": (4, 3), "norm": "none"} | options).build([5], names).to(D), torch.randn(
        2, 5, 3, 3, dtype=D
    )


def test_ati_exchanges_gated_features_of_all_others():
    views, z = ati()
    first = {name: views.task(name).down(z) for name in NAMES}
    for name, own in views.exchanged(z).items():
        heard = {a: views.task(name).heard.of(a) for a in NAMES if a != name}
        torch.testing.assert_close(
            own, first[name] + sum(c["gate"](first[a]).sigmoid() * c["value"](first[a]) for a, c in heard.items())
        )
    mixed = sum(views.task(name).up(own) for name, own in views.exchanged(z).items()) / 3
    for name, view in seen(views, z).items():
        torch.testing.assert_close(view, views.task(name).mask(z) * mixed)
    alone, z = ati(["a"])
    assert torch.equal(alone.exchanged(z)["a"], alone.task("a").down(z))
    with torch.no_grad():
        for pair in (views.task("b").heard.of(other) for other in ("a.x", "c")):
            pair["gate"].weight.zero_()
            pair["gate"].bias.fill_(-1e3)
    assert torch.equal(views.exchanged(z)["b"], views.task("b").down(z))


def test_a_pair_with_zero_weights_brings_nothing_back():
    views, z = ati()
    with torch.no_grad():
        for p in views.task("b").heard.of("a.x")["value"].parameters():
            p.zero_()
    views.exchanged(z)["b"].sum().backward()
    assert all((p.grad == 0).all() for p in views.task("a.x").down.parameters())
    assert any((p.grad != 0).any() for p in views.task("c").down.parameters())


def test_ati_options_and_what_it_costs():
    plain, z = ati(legacy=True, masks=False)
    assert torch.equal(seen(plain, z)["b"], z)
    views, z = ati(masks=False, residual=True)
    mixed = sum(views.task(name).up(own) for name, own in views.exchanged(z).items()) / 3
    torch.testing.assert_close(seen(views, z)["b"], z + mixed)
    views, z = ati()
    with torch.no_grad():
        views.task("b").mask[-3].weight.zero_()
        views.task("b").mask[-3].bias.fill_(1e3)
    bare = ati(masks=False)[0]
    bare.load_state_dict({k: v for k, v in views.state_dict().items() if "mask" not in k})
    torch.testing.assert_close(seen(views, z)["b"], seen(bare, z)["b"])  # a mask of 1 shows what is shared
    layers = sum((a + 1) * b for a, b in ((5, 4), (4, 3), (3, 4), (4, 5)))
    assert sum(p.numel() for p in bare.parameters()) == 3 * layers + 3 * 2 * 2 * (9 * 3 * 3 + 3)
    net = MultiHead(Scales(), dict.fromkeys(NAMES, "tokens(classes=2)"), width=6, between="ati-net")
    with pytest.raises(ValueError, match="lets heads speak to each other"):
        net.split("fine", [["b"], ["a.x", "c"]])


@pytest.mark.parametrize(("line", "says"), [
    ("mmoe(experts=0)", "experts=0"),
    ("mmoe(alpha=1.5)", r"alpha=1.5 is not in \[0, 1\]"),
    ("mmoe(taps=[0, 2])", "it reads one"),
    ("medusa-ufl(kernel=2)", "kernel=2; an odd number"),
    ("medusa-ufl(width=0)", "width=0"),
    ("lasso(taps=[0])", "at least 2 submodules"),
    ("lasso(taps=[0, 2], l1=-1.0)", "negative"),
    ("lasso(taps=[0, 2], scale=softmax)", "start=even"),
    ("ati-net(widths=[])", "at least one"),
    ("ati-net(legacy=true, residual=true)", "adds nothing"),
    ("moe", "there is no 'moe' between trunk and heads; there are ati-net, lasso, medusa-ufl, mmoe"),
    ("lasso(taps=[0, 9])", "the trunk has no submodule '9'"),
])  # fmt: skip
def test_options_that_cannot_be(line, says):
    with pytest.raises(ValueError, match=says):
        MultiHead(rows(), {"a": "regression"}, width=6, between=line)


def test_features_that_do_not_fit():
    net = MultiHead(rows(), {"a": "regression"}, width=6, between="medusa-ufl")
    with pytest.raises(ValueError, match=r"medusa-ufl: kernel=3 reads maps .* kernel=1 would fit"):
        net(torch.randn(2, 5))
    net = MultiHead(rows(), {"a": "regression"}, width={"0": 6, "3": 6}, between="lasso(taps=[0, 3])")
    with pytest.raises(ValueError, match=r"lasso: .*\[5, 6\] wide; a mix is of equal ones"):
        MultiHead(rows(), {"a": "regression"}, width={"0": 5, "3": 6}, between="lasso(taps=[0, 3])")
