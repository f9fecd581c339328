"""Models merged without training (arXiv 2305.03053): matching, a trunk with heads, exact cases, refusals."""

import copy

import pytest
import torch
from tests.convert.tiny import model, tokens
from tests.oracles.reference import close, differ
from transformers import AutoModelForCausalLM

from manyheads.convert.adopt import adopt
from manyheads.convert.export import save_plainly
from manyheads.convert.zipit import Matching, MergeError, correlations, permute_stream, zip_features, zip_models
from manyheads.core.part import OptionError

KINDS = ["llama", "tied", "biased", "qwen2", "qwen3"]
ACROSS = Matching(0.0, 0.0)


def random(*sizes, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logits(each):
    with torch.no_grad():
        return each(tokens(), use_cache=False).logits


def features(*parts):
    z = torch.cat(parts, 1)
    return correlations(z.T @ z / len(z), z.mean(0))


# --- matching


@pytest.mark.parametrize(("models", "how"), [(2, Matching()), (2, ACROSS), (2, Matching(0.5, 1.0)), (3, Matching())])
def test_clusters_are_a_partition_and_their_maps_a_projection(models, how):
    m, u = zip_features(features(random(200, 7 * models)), models, how)
    assert m.shape == (7, 7 * models) and (u.sum(1) == 1).all() and ((u == 0) | (u == 1)).all()
    assert u.sum() == 7 * models
    close(m @ u, torch.eye(7, dtype=torch.float64))
    close((u @ m) @ (u @ m), u @ m)


@pytest.mark.parametrize("how", [Matching(), ACROSS])
def test_copies_and_permuted_copies_pair_up(how):
    a, order = random(300, 6), torch.tensor([3, 0, 5, 1, 4, 2])
    m, u = zip_features(features(a, a[:, order]), 2, how)
    close(m[:, :6] * 2, torch.eye(6, dtype=torch.float64))
    close(u[6:], torch.eye(6, dtype=torch.float64)[order])


def test_across_models_only_is_the_planted_permutation():
    a, order = random(400, 8), torch.randperm(8, generator=torch.Generator().manual_seed(1))
    b = a[:, order] + 0.3 * random(400, 8, seed=2)
    _, u = zip_features(features(a, b), 2, ACROSS)
    assert torch.equal(u[8:].argmax(1), order)


def test_a_budget_lets_a_model_merge_its_own_and_keep_anothers():
    a, b = random(500, 4), random(500, 4, seed=9)
    a[:, 1] = a[:, 0] + 0.01 * random(500, seed=3)
    b[:, :3] = a[:, [0, 2, 3]]
    free, none = (zip_features(features(a, b), 2, Matching(0.3, beta)).unmerge for beta in (1.0, 0.0))
    assert free[0].argmax() == free[1].argmax() and free[:, free[7].argmax()].sum() == 1  # b's own feature survives
    assert none[0].argmax() != none[1].argmax()
    close(none[:4].sum(0), torch.ones(4, dtype=torch.float64))


def test_likeness_is_blind_to_size():
    z = random(100, 6)
    close(features(z * torch.tensor([1.0, 5, 0.1, 2, 3, 7])), features(z), 1e-9)


def test_matchings_that_do_not_fit_are_refused():
    for given in ({"alpha": 2.0}, {"beta": -0.1}, {"beta": 1.5}):
        with pytest.raises(OptionError, match="alpha is at most 1, beta from 0 to 1"):
            Matching(**given)


# --- models


def permuted(kind="llama", stream=False):
    """A model of the same function: hidden channels, key heads, their query heads and value channels renumbered."""
    other = adopt(model(kind))
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for index, layer in enumerate(other.attentions):
            mlp = other.model.model.layers[index].mlp
            order = torch.randperm(40, generator=g)
            for name in ("gate_proj", "up_proj"):
                getattr(mlp, name).weight.copy_(getattr(mlp, name).weight[order])
            mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, order])
            project, channels = layer.project, torch.randperm(8, generator=g)
            heads = torch.arange(4).view(2, 2).flip(0)[:, [1, 0]].flatten()
            for name, count, order in (("q", 4, heads), ("k", 2, [1, 0]), ("v", 2, [1, 0])):
                for tensor in getattr(project, f"{name}_proj").parameters():
                    rows = tensor.unflatten(0, (count, 8))[order].clone()
                    tensor.copy_((rows[:, channels] if name == "v" else rows).flatten(0, 1))
            o = project.o_proj.weight.unflatten(1, (4, 8))[:, heads][:, :, channels]
            project.o_proj.weight.copy_(o.flatten(1))
        if stream:
            permute_stream(other, torch.randperm(32, generator=g))
    return other


@pytest.mark.parametrize("until", [None, 0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_two_copies_are_the_model(kind, until):
    source = adopt(model(kind))
    merged = zip_models([source, copy.deepcopy(source)], tokens(), until)
    assert len(merged.members) == (1 if until is None else 2)
    for member, own in zip(merged.members, merged.logits(tokens()), strict=True):
        close(logits(member), logits(source), 1e-4)
        close(own, logits(source), 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_permuted_copy_is_found(kind):
    source, other = adopt(model(kind)), permuted(kind)
    close(logits(other), logits(source), 1e-4)
    close(logits(zip_models([source, other], tokens(32, 24)).members[0]), logits(source), 1e-3)


@pytest.mark.parametrize("kind", ["llama", "tied", "biased"])
def test_so_is_one_whose_stream_is_permuted_too(kind):
    source, other = adopt(model(kind)), permuted(kind, stream=True)
    close(logits(other), logits(source), 1e-4)
    merged = zip_models([source, other], tokens(32, 24), stream="matched")
    close(logits(merged.members[0]), logits(source), 1e-3)
    differ(logits(zip_models([source, other], tokens(32, 24)).members[0]), logits(source), 1e-2)


def tuned(kind="llama", noise=0.05):
    torch.manual_seed(3)
    other = adopt(model(kind))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return other


@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_a_trunk_is_common_and_heads_are_apart(kind, tmp_path):
    sources = adopt(model(kind)), tuned(kind)
    merged = zip_models(sources, tokens(), 1)
    first, second = merged.members
    assert first.model.model.layers[0] is second.model.model.layers[0]
    assert first.get_input_embeddings() is second.get_input_embeddings()
    for member, source in zip(merged.members, sources, strict=True):
        for a, b in zip(
            member.model.model.layers[1].parameters(), source.model.model.layers[1].parameters(), strict=True
        ):
            assert torch.equal(a, b)
        assert torch.equal(member.get_output_embeddings().weight, source.get_output_embeddings().weight)
    for n, (member, own) in enumerate(zip(merged.members, merged.logits(tokens()), strict=True)):
        close(own, logits(member), 1e-4)
        report = save_plainly(member, tmp_path / str(n))
        assert report.loads_as == "LlamaForCausalLM" and report.difference < 1e-3
        close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / str(n))), logits(member), 1e-4)
    whole = sum(p.numel() for source in sources for p in source.parameters())
    assert merged.parameters < whole or kind == "tied"


def test_nothing_merged_is_the_models_and_the_order_only_relabels():
    sources = adopt(model()), tuned()
    for member, source in zip(zip_models(sources, tokens(), 0).members, sources, strict=True):
        assert torch.equal(logits(member), logits(source))
    ab, ba = (zip_models(each, tokens(), None, how=ACROSS).members[0] for each in (sources, sources[::-1]))
    close(logits(ab), logits(ba), 1e-3)


def test_the_models_given_are_left_alone():
    sources = adopt(model()), tuned()
    before = [logits(each) for each in sources]
    zip_models(sources, tokens(), 1)
    for each, want in zip(sources, before, strict=True):
        assert torch.equal(logits(each), want)


def test_models_that_do_not_fit_are_refused_by_tensor():
    source = adopt(model())
    for other, said in (
        (model(intermediate_size=48), r"model 2 .*mlp.gate_proj.weight is \[48, 32\] there and \[40, 32\] here"),
        (model(vocab_size=70), "embed_tokens.weight"), (model(layers=3), "layers.2.* there and nothing here"),
        (model("biased"), "bias is .* there and nothing here"),
        (model("mistral"), "layer 0 of model 2 is .*window"),
    ):  # fmt: skip
        with pytest.raises(MergeError, match=said):
            zip_models([source, adopt(other)], tokens())
    with pytest.raises(MergeError, match="takes two or more"):
        zip_models([source], tokens())
    for until in (-1, 3):
        with pytest.raises(MergeError, match="the model has 2 layers, so 0 to 2"):
            zip_models([source, source], tokens(), until)
