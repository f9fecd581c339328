"""Merging key/value heads along principal directions (arXiv 2406.07056): what must hold of it."""

import copy

import pytest
import torch
from tests.convert.tiny import DIM, HEADS, WIDTH, decode, error, inputs, layer, measured, model, out, tokens
from tests.oracles.reference import close, differ
from transformers import AutoModelForCausalLM

from manyheads.convert.export import ExportError, to_family
from manyheads.convert.moves.common import linear_rows
from manyheads.convert.moves.gqa import ToGQA
from manyheads.convert.plan import make_goal, shape_of
from manyheads.convert.shrink import shrink
from manyheads.convert.stats import Pairs
from manyheads.convert.stream import InMemory

MHA = "gqa(bias=qkvo)"
STILL = ["gqa(bias=qkvo) + alibi", "gqa(bias=qkvo) + rope(pairing=none)"]
BASES = ["activations", "weights"]


def merged(source, x, groups=2, basis="activations"):
    return ToGQA(groups, "lowrank", basis)(source, measured(source, x))


def rows(linear, heads):
    return linear_rows(linear).view(heads, -1, DIM + 1)


def with_bias(x):
    """Inputs of all tokens, the constant channel last."""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1).flatten(0, 1)


def set_heads(linear, heads):
    linear.weight.copy_(heads[..., :-1].reshape_as(linear.weight))
    linear.bias.copy_(heads[..., -1].reshape_as(linear.bias))


def test_one_head_a_group_changes_nothing():
    source, x = layer(MHA), inputs()
    assert torch.equal(out(merged(source, x, HEADS), x), out(source, x))


@pytest.mark.parametrize("basis", BASES)
def test_values_of_the_rank_of_one_head_are_exact(basis):
    """Keys are equal in a group; values are not, but span no more than one head's width."""
    source, x = layer(MHA), inputs()
    k = rows(source.project.k_proj, HEADS)
    set_heads(source.project.k_proj, k[[0, 0, 2, 2]])
    few, mix = rows(layer(MHA, seed=5).project.v_proj, HEADS)[:2], torch.randn(2, 2, WIDTH, WIDTH, dtype=torch.float64)
    set_heads(source.project.v_proj, torch.einsum("gmvw,gwd->gmvd", mix, few))
    made = merged(source, x, basis=basis)
    close(out(made, x), out(source, x), 1e-7)
    close(decode(made, x), out(source, x), 1e-7)


def value_error(source, made, x):
    """Σ |v - Ψ v'|² over a group's heads and tokens, with Ψ read off the folded outputs by least squares."""
    v, few = rows(source.project.v_proj, HEADS).unflatten(0, (2, 2)), rows(made.project.v_proj, 2)
    ones, lost = with_bias(x), 0.0
    for group in range(2):
        y, z = ones @ v[group].flatten(0, 1).T, ones @ few[group].T
        lost += (y - z @ torch.linalg.lstsq(z, y).solution).pow(2).sum()
    return lost


def test_values_lose_the_dropped_eigenvalues_and_no_pooling_loses_less():
    source, x = layer(MHA), inputs()
    made, mean = merged(source, x), ToGQA(2, "mean")(source, measured(source, x))
    v, ones = rows(source.project.v_proj, HEADS).unflatten(0, (2, 2)), with_bias(x)
    dropped = sum(torch.linalg.eigvalsh((s := ones @ v[g].flatten(0, 1).T).T @ s)[:-WIDTH].sum() for g in range(2))
    close(value_error(source, made, x), dropped, 1e-9)
    assert value_error(source, mean, x) > 1.05 * dropped


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("spec", [MHA, *STILL])
def test_the_folded_layer_is_the_source_with_reconstructed_values(spec, basis):
    """W_O reads Ψ_j v': the outputs of the source whose value heads are ΨΨᵀv, keys being the folded ones."""
    source, x = layer(spec), inputs()
    made, other = merged(source, x, basis=basis), copy.deepcopy(source)
    moment = torch.eye(DIM + 1, dtype=torch.float64) if basis == "weights" else with_bias(x).T @ with_bias(x)
    v = rows(source.project.v_proj, HEADS).unflatten(0, (2, 2)).flatten(1, 2)
    psi = torch.linalg.eigh(v @ moment @ v.transpose(1, 2))[1][..., -WIDTH:]
    set_heads(other.project.v_proj, psi @ psi.transpose(1, 2) @ v)
    for name, heads in (("q_proj", HEADS), ("k_proj", 2)):
        folded = rows(getattr(made.project, name), heads)
        set_heads(getattr(other.project, name), folded.repeat_interleave(HEADS // heads, 0))
    close(out(other, x), out(made, x), 1e-9)
    differ(out(made, x), out(source, x), 1e-3)
    close(decode(made, x), out(made, x), 1e-9)


@pytest.mark.parametrize("spec", STILL)
def test_without_rope_scores_are_those_of_reconstructed_keys(spec):
    source, x = layer(spec), inputs()
    made, ones = merged(source, x), with_bias(x)
    k = rows(source.project.k_proj, HEADS).unflatten(0, (2, 2)).flatten(1, 2)
    psi = torch.linalg.eigh(k @ ones.T @ ones @ k.transpose(1, 2))[1][..., -WIDTH:]
    again = (psi @ psi.transpose(1, 2) @ k).view(HEADS, WIDTH, -1)
    want = torch.einsum("hde,hdf->hef", rows(source.project.q_proj, HEADS), again)
    few = rows(made.project.k_proj, 2).repeat_interleave(2, 0)
    close(torch.einsum("hde,hdf->hef", rows(made.project.q_proj, HEADS), few), want, 1e-9)


def complex_rows(source, name, heads):
    return Pairs.of(source).join(rows(getattr(source.project, name), heads))


def test_with_rope_scores_are_those_of_keys_along_the_principal_direction_of_each_pair():
    source, x = layer(MHA), inputs()
    made, ones = merged(source, x), with_bias(x) + 0j
    k, q = (complex_rows(source, name, HEADS) for name in ("k_proj", "q_proj"))
    for group in range(2):
        z = k[2 * group : 2 * group + 2].transpose(0, 1)  # [P, 2, D + 1]
        a = torch.linalg.eigh(z @ ones.T @ ones @ z.mH)[1][..., -1:]
        again = (a @ a.mH @ z).transpose(0, 1)
        few = complex_rows(made, "k_proj", 2)[group]
        for j in range(2):
            h = 2 * group + j
            want = torch.einsum("pd,pe->pde", q[h].conj(), again[j])
            got = torch.einsum("pd,pe->pde", complex_rows(made, "q_proj", HEADS)[h].conj(), few)
            close(got, want, 1e-9)  # of each pair: turning by any angle keeps them equal


def test_heads_that_are_scaled_and_turned_copies_of_one_are_merged_exactly():
    source, x = layer(MHA), inputs()
    pairs, k = Pairs.of(source), complex_rows(source, "k_proj", HEADS)
    turn = torch.randn(HEADS, WIDTH // 2, 1, dtype=torch.complex128)
    set_heads(source.project.k_proj, pairs.split(turn * k[[0, 0, 2, 2]]))
    v = rows(source.project.v_proj, HEADS)
    set_heads(source.project.v_proj, v[[0, 0, 2, 2]])
    made = merged(source, x)
    close(out(made, x), out(source, x), 1e-7)
    differ(out(ToGQA(2, "mean")(source, measured(source, x)), x), out(source, x), 1e-2)


def test_equal_directions_are_mean_pooling_with_rescaled_queries():
    """Two heads whose numbers weigh and correlate alike: k' ∝ mean of the group."""
    source, x = layer(MHA), inputs()
    pairs, even = Pairs.of(source), complex_rows(source, "k_proj", HEADS)[[0, 2]]
    root = torch.linalg.cholesky(with_bias(x).T @ with_bias(x)) + 0j
    seen, odd = even @ root, 0.1 * torch.randn_like(even) @ root  # sizes are those of activations
    odd = odd - (odd * seen.conj()).sum(-1, keepdim=True) / seen.abs().pow(2).sum(-1, keepdim=True) * seen
    odd = odd @ torch.linalg.inv(root)
    set_heads(source.project.k_proj, pairs.split(torch.stack([even + odd, even - odd], 1).flatten(0, 1)))
    made = merged(source, x)
    few = complex_rows(made, "k_proj", 2)
    ratio = few / even
    close(ratio, ratio[..., :1].expand_as(ratio), 1e-6)
    scale = complex_rows(made, "q_proj", HEADS) / complex_rows(source, "q_proj", HEADS)
    close(scale, scale[..., :1].expand_as(scale), 1e-6)
    close(scale.unflatten(0, (2, 2))[..., 0], (1 / ratio[..., 0].conj())[:, None].expand(-1, 2, -1), 1e-6)


@pytest.mark.parametrize("spec", [MHA, *STILL])
def test_white_inputs_make_both_bases_the_same(spec):
    source, x = layer(spec), inputs()
    stats = measured(source, x)
    stats = stats._replace(plain=3.0 * torch.eye(DIM + 1, dtype=torch.float64))
    a, b = (ToGQA(2, "lowrank", basis)(source, stats) for basis in BASES)
    close(out(a, x), out(b, x), 1e-9)


@pytest.mark.parametrize("spec", ["gqa(bias=qkvo) + alibi", MHA, f"{MHA} + rope(fraction=0.7)"])
@pytest.mark.parametrize("basis", BASES)
def test_it_merges_better_than_pooling(spec, basis):
    sources = [layer(spec, seed) for seed in range(3)]
    x = inputs()
    ours, pooled = (
        sum(error(move(source, measured(source, x)), source, x) for source in sources)
        for move in (ToGQA(2, "lowrank", basis), ToGQA(2, "mean"))
    )
    assert ours < pooled


def test_a_merged_layer_can_be_merged_again():
    source, x = layer(MHA), inputs()
    two = merged(source, x)
    one = merged(two, x, 1)
    assert one.layout.kv == 1
    close(decode(one, x), out(one, x), 1e-9)


@pytest.mark.parametrize("kind", ["llama", "tied", "biased", "qwen2", "mistral"])
@pytest.mark.parametrize("line", ["kv_head_lowrank", "gqa_uptrain"])
def test_the_converted_model_is_a_stock_one(kind, line, tmp_path):
    source = model(kind)
    layers = InMemory(source)
    goal = make_goal("50%", line, shape_of(layers))
    shrink(layers, tokens(), [goal], tmp_path, bfloat16=False)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / goal.name)
    report = to_family(made, tmp_path / "stock")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert report.loads_as == type(stock).__name__ == type(made.model).__name__
    assert stock.config.num_key_value_heads == 1 and report.cache_floats == goal.floats == 16
    assert report.difference < 1e-4
    for part in stock.model.layers[0].self_attn.k_proj.parameters():
        assert len(part) == 8
    close(stock(tokens()).logits, made(tokens()).logits, 1e-4)


def test_what_no_stock_class_holds_is_refused_before_anything_is_written(tmp_path):
    layers = InMemory(model())
    shrink(layers, tokens(), [make_goal("50%", "mla", shape_of(layers))], tmp_path, bfloat16=False)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "mla-50")
    with pytest.raises(ExportError, match=r"layer 0 is mla\(.*has gqa.*'deepseek' for latent layers"):
        to_family(made, tmp_path / "stock")
    assert not (tmp_path / "stock").exists()
