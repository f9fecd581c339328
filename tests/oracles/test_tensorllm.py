"""All heads' weights as one tensor of low Tucker rank (arXiv 2501.15674): what must hold of it."""

import copy

import pytest
import torch
from tests.convert.tiny import BASE, DIM, HEADS, WIDTH, inputs, layer, out
from tests.oracles.gauge import bounded, gauge_gqa, orthogonal
from tests.oracles.reference import close, differ

from manyheads.convert.methods import read_method
from manyheads.convert.moves.tensorllm import ToTensor, numbers, tensorise, tensors_of
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec

MHA = "gqa(bias=qkvo)"
FULL = (DIM, WIDTH, 4)


def tensor(seed=0, spec=MHA):
    (found,) = tensors_of(layer(spec, seed)).values()
    return found


def random(*sizes, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("spec", [MHA, BASE, "gqa(kv_heads=1)"])
def test_full_ranks_are_the_source(spec):
    source, x = layer(spec), inputs()
    close(out(ToTensor(FULL)(source), x), out(source, x), 1e-9)
    differ(out(ToTensor((5, 3, 2))(source), x), out(source, x), 1e-3)


def test_slices_are_the_four_weights():
    source = layer(MHA)
    found = tensor()
    assert found.shape == (DIM, WIDTH, 4, HEADS)
    for h in range(HEADS):
        rows = slice(h * WIDTH, (h + 1) * WIDTH)
        for n, name in enumerate("qkv"):
            assert torch.equal(found[:, :, n, h], getattr(source.project, f"{name}_proj").weight[rows].T)
        assert torch.equal(found[:, :, 3, h], source.project.o_proj.weight[:, rows])
    assert {names: t.shape[2:] for names, t in tensors_of(layer(BASE)).items()} == {
        ("q", "o"): (2, HEADS), ("k", "v"): (2, 2),
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [(5, 3, 2), (12, 6, 4), (24, 2, 3)])
def test_errors_are_what_the_core_leaves_and_fall(ranks):
    whole = tensor()
    found = tensorise(whole, ranks, 30)
    close((whole - found.dense).pow(2).sum(), whole.pow(2).sum() - found.core.pow(2).sum(), 1e-8)
    assert found.errors[-1] == pytest.approx((whole - found.dense).pow(2).sum().item())
    assert all(later <= earlier + 1e-9 for earlier, later in zip(found.errors, found.errors[1:], strict=False))
    tails = 0.0
    for mode, rank in enumerate(ranks):
        values = torch.linalg.svdvals(whole.movedim(mode, 0).flatten(1))
        tails += values[rank:].pow(2).sum().item()
    assert found.errors[-1] <= found.errors[0] <= tails + 1e-9
    for factor in found.factors:
        close(factor.T @ factor, torch.eye(factor.shape[1], dtype=torch.float64))


def test_one_head_whose_other_modes_are_whole_is_the_svd():
    whole = random(12, 3, 4, 1)
    found = tensorise(whole, (5, 3, 4))
    left = torch.linalg.svd(whole.flatten(1))[0][:, :5]
    close(found.factors[0] @ found.factors[0].T, left @ left.T, 1e-9)


def test_planted_factors_are_found_at_once():
    factors = [torch.linalg.qr(random(n, r, seed=n))[0] for n, r in ((24, 5), (6, 3), (4, 2))]
    whole = torch.einsum("abch,xa,yb,zc->xyzh", random(5, 3, 2, 7), *factors)
    close(tensorise(whole, (5, 3, 2), 0).dense, whole, 1e-10)


def test_heads_are_free():
    whole = tensor()
    one = whole[..., :1].expand(-1, -1, -1, 3)
    core = tensorise(one, (5, 3, 2)).core
    close(core[..., 0], core[..., 2])
    order = [2, 0, 3, 1]
    close(tensorise(whole[..., order], (5, 3, 2)).dense, tensorise(whole, (5, 3, 2)).dense[..., order], 1e-8)


def test_a_rotation_of_the_models_channels_is_one_of_the_first_factor():
    whole, turn = tensor(), orthogonal(DIM)
    turned = tensorise(torch.einsum("xw,wyzh->xyzh", turn, whole), (5, 3, 2))
    close(turned.dense, torch.einsum("xw,wyzh->xyzh", turn, tensorise(whole, (5, 3, 2)).dense), 1e-7)


def test_what_is_truncated_depends_on_the_gauge():
    torch.manual_seed(0)
    source, x = layer("gqa"), inputs()
    b = [bounded(WIDTH) for _ in range(HEADS)]
    other = gauge_gqa(source, b=b)
    close(out(source, x), other(x), 1e-9)
    made = copy.deepcopy(source)
    made.load_state_dict(other.state_dict())
    differ(out(ToTensor((8, 4, 3))(made), x), out(ToTensor((8, 4, 3))(source), x), 1e-2)


def test_factored_use_is_dense_use():
    found, x = tensorise(tensor(), (7, 4, 3)), random(5, DIM)
    z = x @ found.factors[0]  # once for all heads and kinds of weights
    for kind in range(4):
        for head in range(HEADS):
            close(z @ found.maps[kind, head] @ found.factors[1].T, x @ found.dense[:, :, kind, head])


def test_counted_numbers_and_the_published_ratio():
    found = tensorise(tensor(), (7, 4, 3))
    assert found.numbers == numbers(DIM, WIDTH, HEADS, (7, 4, 3))
    whole = 4 * 4096 * 256 * 16
    assert whole / numbers(4096, 256, 16, (64, 4, 2)) == pytest.approx(247.30, abs=0.01)
    assert whole / numbers(4096, 256, 16, (64, 16, 2)) == pytest.approx(224.4, abs=0.1)


def test_only_the_layers_asked_for_change():
    source = layer(MHA)
    for layers, same in (((1,), True), ((0, 1), False), (None, False)):
        made = ToTensor((5, 3, 2), layers)(source)
        assert made.spec == source.spec
        assert torch.equal(made.project.q_proj.weight, source.project.q_proj.weight) is same
        assert torch.equal(made.project.q_proj.bias, source.project.q_proj.bias)


def test_refusals():
    assert "weights of gqa" in ToTensor().refusal(Spec.parse("mla(rank=9, rope_dim=4)"))
    assert "one width" in ToTensor().refusal(Spec.parse("gqa(v_dim=5)"))
    with pytest.raises(OptionError, match="weights of gqa"):
        ToTensor()(layer("mla(rank=9, rope_dim=4)"))
    assert read_method("tensorllm([64, 4, 2], layers=[26])").ranks == (64, 4, 2)
