"""Weights from dictionaries that layers share (arXiv 2508.04581): what must hold of the part and of the conversion."""

import copy
from itertools import pairwise

import pytest
import torch
from tests.convert.tiny import model, tokens
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, make, twin
from tests.oracles.stacks import hold_to_the_laws, make_stack
from tests.oracles.test_directshare import fresh, logits, numbers
from transformers import AutoModelForCausalLM

from manyheads import Spec
from manyheads.convert import masa as conversion
from manyheads.convert.export import save, to_family
from manyheads.convert.masa import as_gqa, cut, drift, freeze, masa, matrix_pca, moments, rest
from manyheads.core.cost import Cost
from manyheads.core.part import OptionError, Site
from manyheads.stack import ManyheadsConfig, ManyheadsForCausalLM, Stack
from manyheads.stack.bank import Bank

KINDS = ["llama", "biased", "qwen2", "qwen3"]


def matrices(layers=5, rows=4, columns=6, seed=0):
    return torch.randn(layers, rows, columns, generator=torch.Generator().manual_seed(seed)).double()


def combined(stack):
    return [layer.project.combined for layer in stack.attentions]


def set_coefficients(stack, table):
    """c of layer l `[S]` for every type: row l of a table."""
    with torch.no_grad():
        for maps, row in zip(combined(stack), table, strict=True):
            for each in maps.values():
                each.coefficients.copy_(row)


def dense(stack, layers):
    """The stack of `gqa` with the weights that are formed."""
    plain = make_stack("gqa(kv_heads=2)", layers)
    state = {name: tensor for name, tensor in stack.state_dict().items() if name in plain.state_dict()}
    for number, maps in enumerate(combined(stack)):
        state |= {f"blocks.{number}.attention.project.{kind}_proj.weight": each.weight for kind, each in maps.items()}
    plain.load_state_dict(state)
    return plain


@pytest.mark.parametrize("options", ["", ", types=qkvo", ", types=qkvo, coeff=free", ", ranks=[1, 0, 2]"])
def test_the_laws(options):
    hold_to_the_laws(f"masa(kv_heads=2, atoms=2{options})", 3)


def test_layers_are_those_of_their_formed_weights():
    stack = make_stack("masa(kv_heads=2, atoms=2, types=qkvo, ranks=[1, 2, 0, 3])", 3)
    x = batch()
    close(stack(x), dense(stack, 3)(x))
    one = combined(stack)[1]["k"]
    by_hand = sum(c * d for c, d in zip(one.mixed, one.dictionary, strict=True)) + one.rest[0] @ one.rest[1]
    close(one.weight, by_hand)


def test_as_many_atoms_as_layers_are_layers_of_their_own_and_one_is_tying():
    stack = make_stack("masa(kv_heads=2, atoms=3, types=qkvo, coeff=free)", 3)
    set_coefficients(stack, torch.eye(3))
    for kind in "qkvo":
        maps = [each[kind] for each in combined(stack)]
        close(torch.stack([each.weight for each in maps]), maps[0].dictionary)
    tied = make_stack("masa(kv_heads=2, atoms=1, types=qkvo)", 3)
    set_coefficients(tied, torch.ones(3, 1))
    first, *others = [each["v"].weight for each in combined(tied)]
    assert all(torch.equal(each, first) for each in others)


def test_outputs_are_linear_in_coefficients():
    layer, x = make("masa(atoms=3, coeff=free)"), batch()
    one = layer.project.q_proj
    a, b = torch.randn(2, 3, dtype=torch.float64)

    def out(c):
        with torch.no_grad():
            one.coefficients.copy_(c)
            return one(x)

    close(out(2 * a - 3 * b), 2 * out(a) - 3 * out(b))
    differ(out(a), out(b))


def test_any_mix_of_atoms_with_the_inverse_mix_of_coefficients_is_the_same():
    stack, x = make_stack("masa(kv_heads=2, atoms=3, coeff=free)", 4), batch()
    want = stack(x)
    mix = torch.randn(3, 3, dtype=torch.float64) + 3 * torch.eye(3)
    with torch.no_grad():
        for kind in "qkv":
            maps = [each[kind] for each in combined(stack)]
            weight = maps[0].atoms[f"{kind}_proj"].weight
            weight.copy_(torch.tensordot(mix, maps[0].dictionary, 1).flatten(0, 1))
            for each in maps:
                each.coefficients.copy_(torch.linalg.solve(mix.T, each.coefficients))
    close(stack(x), want, 1e-9)


def test_gradients_of_atoms_and_coefficients():
    stack, x = make_stack("masa(kv_heads=2, atoms=2, types=qkvo, coeff=free)", 3), batch()
    plain = dense(stack, 3)
    for each in (stack, plain):
        each(x).pow(2).sum().backward()
    for kind in "qkvo":
        maps = [each[kind] for each in combined(stack)]
        of_weights = torch.stack([getattr(layer.project, f"{kind}_proj").weight.grad for layer in plain.attentions])
        c = torch.stack([each.coefficients for each in maps])
        got = maps[0].atoms[f"{kind}_proj"].weight.grad.unflatten(0, (2, -1))
        close(got, torch.einsum("ls,lij->sij", c, of_weights), 1e-9)
        for each, gradient in zip(maps, of_weights, strict=True):
            close(each.coefficients.grad, torch.einsum("sij,ij->s", each.dictionary, gradient), 1e-9)


@pytest.mark.parametrize("types", ["qkv", "qkvo"])
@pytest.mark.parametrize("coeff", ["free", "mlp"])
def test_parameters_are_those_of_the_formula(types, coeff):
    layers, atoms, e = 6, 2, 64
    stack = Stack(f"masa(types={types}, coeff={coeff})", DIM, HEADS, layers, ffn="none")
    counted = sum(p.numel() for name, p in stack.named_parameters() if "norm" not in name)
    own = layers * DIM * DIM * (4 - len(types))
    wanted = own + len(types) * (atoms * DIM * DIM + (layers * atoms if coeff == "free" else 0))
    if coeff == "mlp":
        wanted += layers * e + len(types) * (e * (2 * e + atoms) + layers)
    assert counted == wanted == stack.cost.parameters
    assert stack.cost.cache_floats == Stack("gqa", DIM, HEADS, layers).cost.cache_floats


def test_the_published_size():
    """D = 1536, 24 layers, 8 atoms: 226.5M numbers become 75.5M (and the coefficients)."""
    sites = [Site(layer, 24, shared=Bank().share) for layer in range(24)]
    wide, plain = (
        sum((Spec.parse(line).cost(1536, 12, site) for site in sites), Cost()).parameters
        for line in ("masa(types=qkvo, coeff=free)", "gqa")
    )
    assert plain == 226_492_416 and wide == 75_497_472 + 4 * 8 * 24


def test_layers_start_as_large_as_others():
    stack = Stack("masa(atoms=4, types=qkvo)", 256, 4, 3, std=0.1)
    for each in combined(stack):
        assert each["q"].weight.std().item() == pytest.approx(0.1, rel=0.1)
        assert each["o"].weight.std().item() == pytest.approx(0.1 / 6**0.5, rel=0.1)
        close(each["k"].mixed.norm(), torch.tensor(1.0), 1e-5)
    first, second, _ = (each["q"].mixed for each in combined(stack))
    differ(first, second)


def test_readers_takers_loops_and_groups():
    rows = make_stack("masa(kv_heads=2, atoms=2)", 4, kv_source="cla(2)")
    assert {*combined(rows)[1]} == {"q"} and rows.cost.parameters == sum(
        p.numel() for name, p in rows.named_parameters() if "norm" not in name
    )
    taken = make_stack("masa(kv_heads=2, atoms=2)", 2, attn_source=[None, 0])
    assert {*combined(taken)[1]} == {"v"}
    for options in ({"kv_source": "cla(2)"}, {"attn_source": [None, 0, None, 2]}, {"loops": 2}):
        hold_to_the_laws("masa(kv_heads=2, atoms=2)", 4, **options)
    apart = Stack(["masa(atoms=2)"] * 2 + ["masa(atoms=3, group=1)"] * 2, DIM, HEADS, 4)
    assert combined(apart)[0]["q"].atoms is combined(apart)[1]["q"].atoms is not combined(apart)[2]["q"].atoms


def test_freezing_keeps_the_function_and_drops_the_networks(tmp_path):
    x = batch()
    for options in ({}, {"loops": 2}):
        stack = make_stack("masa(kv_heads=2, atoms=2)", 3, **options)
        want = stack(x)
        freeze(stack)
        close(stack(x), want)
        assert not any("mixer" in name or "embedded" in name or "length" in name for name in stack.state_dict())
        assert stack.cost.parameters == sum(p.numel() for n, p in stack.named_parameters() if "norm" not in n)
        assert all("coeff=free" in str(layer.spec) for layer in stack.attentions)
        with pytest.raises(OptionError, match="no layer makes its coefficients by a network"):
            freeze(stack)
    sizes = dict(vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
    of = ManyheadsForCausalLM(ManyheadsConfig(specs="masa(kv_heads=2, atoms=2)", **sizes)).eval()
    want = logits(of)
    of.save_pretrained(tmp_path / "trained")
    close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "trained")), want, 1e-6)
    freeze(of)
    of.save_pretrained(tmp_path / "frozen")
    again, said = AutoModelForCausalLM.from_pretrained(tmp_path / "frozen", output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    close(logits(again), want, 1e-6)


def test_matrix_pca():
    w = matrices()
    sigma = torch.linalg.svdvals(w.flatten(1))
    errors = []
    for size in range(1, 6):
        d, c = matrix_pca(w, size)
        flat = d.flatten(1)
        close(flat @ flat.T, torch.eye(size, dtype=torch.float64), 1e-9)
        close(c, w.flatten(1) @ flat.T, 1e-9)
        errors.append((w - torch.tensordot(c, d, 1)).pow(2).sum())
        close(errors[-1], sigma[size:].pow(2).sum(), 1e-9)
        basis = torch.linalg.qr(torch.randn(24, size, dtype=torch.float64)).Q
        other = (w.flatten(1) - w.flatten(1) @ basis @ basis.T).pow(2).sum()
        assert errors[-1] <= other + 1e-9
    assert all(b <= a for a, b in pairwise(errors)) and errors[-1] < 1e-9
    low = torch.tensordot(torch.randn(5, 2, dtype=torch.float64), matrices(2), 1)
    for size in (2, 4):
        d, c = matrix_pca(low, size)
        close(torch.tensordot(c, d, 1), low, 1e-6)
    same = matrices(1).expand(4, -1, -1)
    d, c = matrix_pca(same, 1)
    close(torch.tensordot(c, d, 1), same, 1e-9)
    with pytest.raises(OptionError, match="atoms=6 for 5 matrices; 1 to 5"):
        matrix_pca(w, 6)


def test_rests_in_the_metric_of_the_inputs():
    w = matrices(1, 5, 6)[0]
    x = torch.randn(40, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64)
    moment = x.T @ x / 40
    a, b = rest(w, moment, 5)
    close(a @ b, w, 1e-6)
    u, s, v = torch.linalg.svd(w, full_matrices=False)
    a, b = rest(w, torch.eye(6), 2)
    close(a @ b, u[:, :2] * s[:2] @ v[:2], 1e-6)

    def loss(a, b):
        return (x @ (w - a @ b).T).pow(2).sum()

    assert loss(*rest(w, moment, 2)) < loss(a, b)


def test_drifts_and_cuts():
    assert cut([0.1, 0.9, 0.2, 0.5], 3) == [0, 2, 4] and cut([0.1, 0.2], 1) == [0]
    with pytest.raises(OptionError, match="groups=4 of 3 layers; 1 to 3"):
        cut([0.1, 0.2], 4)
    each = model(layers=4)
    with torch.no_grad():
        for linear in (each.model.layers[2].self_attn.o_proj, each.model.layers[2].mlp.down_proj):
            linear.weight.zero_()
    found = drift(each, tokens(3, 5))
    assert len(found) == 3 and found[1] == pytest.approx(0, abs=1e-9) and found[0] > 0


@pytest.mark.parametrize("output", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_converted_models(kind, output, tmp_path):
    each = fresh(kind)
    want, before, size = logits(each), numbers(each), each.attentions[0].project.q_proj.weight.numel()
    close(logits(masa(copy.deepcopy(each), 0.0, output=output)), want, 1e-4)
    shared = masa(each, 0.5, output=output)
    kinds = 3 + output
    small = size * each.attentions[0].layout.kv // 4
    assert before - numbers(shared) == 2 * (2 * small + size * (1 + output)) - 4 * 2 * kinds
    got = logits(shared)
    save(shared, tmp_path / "own")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    close(logits(loaded), got, 1e-5)
    assert numbers(loaded) == numbers(shared)
    report = to_family(shared, tmp_path / "family")
    assert report.notes
    close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "family")), got, 1e-4)


def test_layers_that_are_alike_cost_nothing():
    each = fresh()
    with torch.no_grad():
        for layer in each.attentions[1:]:
            layer.load_state_dict(each.attentions[0].state_dict())
    want = logits(each)
    close(logits(masa(each, 0.7, output=True)), want, 1e-4)


def test_rests_help_and_groups_have_their_own():
    each, ids = fresh(), tokens()
    want = logits(each)

    def loss(**options):
        return (logits(masa(copy.deepcopy(each), 0.5, output=True, **options)) - want).pow(2).mean().item()

    seen = moments(each, ids)
    assert loss(rank=8, inputs=seen) < loss(rank=4, inputs=seen) < loss()
    maps = [getattr(layer.project, f"{kind}_proj") for layer in each.attentions for kind in "qo"]
    assert not any(each._forward_pre_hooks for each in maps)
    close(logits(masa(copy.deepcopy(each), 0.5, rank=32)), want, 1e-4)
    grouped = masa(copy.deepcopy(each), 0.5, groups=cut(drift(each, ids), 2))
    groups = [layer.spec.parts[0].group for layer in grouped.attentions]
    assert groups == sorted(groups) and {*groups} == {0, 1}


def test_lone_layers_and_refusals():
    layer, x = make("masa(atoms=2, types=qkvo)"), batch()
    close(decoded(layer, x), layer(x))
    formed = {f"project__{kind}_proj__weight": each.weight for kind, each in layer.project.combined.items()}
    close(layer(x), twin(layer, "gqa", **formed)(x))
    assert as_gqa(fresh().attentions[0]).spec.parts[0].name == "gqa"
    for line, said in (
        ("masa(atoms=0)", "masa: atoms=0, embed=64, group=0; atoms and embed are 1 or more"),
        ("masa(ranks=[1, 2])", r"masa: ranks=\[1, 2\]; one, 0 or more, for each type of qkv"),
        ("masa(kv_heads=3)", "masa: kv_heads=3 of 4 query heads"),
    ):
        with pytest.raises(OptionError, match=said):
            make(line)
    with pytest.raises(OptionError, match=r"masa: layer 1 combines 3 atoms of \[24, 24\] for its q_proj; give it ano"):
        Stack(["masa(atoms=2)", "masa(atoms=3)"], DIM, HEADS)
    with pytest.raises(OptionError, match=r"share=1 of the matrices; from 0 to less than 1"):
        masa(fresh(), 1.0)
    with pytest.raises(OptionError, match=r"groups=\[1\]: first layers in order, the first being 0, of 4 layers"):
        masa(fresh(), groups=[1])
    with pytest.raises(OptionError, match="rank=99 of what is left of a weight; 0 to 32 here"):
        masa(fresh(), rank=99)
    with pytest.raises(OptionError, match="layer 0 is masa"):
        masa(conversion.masa(fresh()))
    assert str(make("masa(atoms=2)", site=Site(1, 2)).spec) == "masa(atoms=2) + rope"
