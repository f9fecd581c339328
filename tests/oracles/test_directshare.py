"""Heads that share weights across layers (arXiv 2402.11819): what must hold of matching and sharing."""

import copy

import pytest
import torch
from tests.convert.tiny import model, saved, tokens
from tests.oracles.reference import batch, close, decoded, differ, make, twin
from transformers import AutoModelForCausalLM

from manyheads.convert.adopt import adopt
from manyheads.convert.directshare import Sharing, as_gqa, direct_share, match_heads, regulariser, signature
from manyheads.convert.export import save, to_family
from manyheads.core.part import OptionError, Site

KINDS = ["llama", "biased", "qwen2", "qwen3"]


def fresh(kind="llama", layers=4, **options):
    return adopt(model(kind, layers=layers, **options))


def logits(each):
    with torch.no_grad():
        return each(tokens(), use_cache=False).logits


def numbers(each):
    return sum({p.data_ptr(): p.numel() for p in each.parameters()}.values())


def by_hand(each, share, of):
    """Every head against every earlier one."""
    found = []
    for layer, ours in enumerate(each.attentions):
        for group in range(ours.layout.kv if layer else 0):
            best = (-2.0, None)
            for earlier in range(layer):
                for other in range(ours.layout.kv):
                    cosine = (signature(ours, of)[group] @ signature(each.attentions[earlier], of)[other]).item()
                    if cosine > best[0] + 1e-12:
                        best = cosine, earlier * ours.layout.kv + other
            found.append((*best, layer * ours.layout.kv + group))
    found.sort(key=lambda entry: (-entry[0], entry[2]))
    return {group: match for _, match, group in found[: int(share * len(each.attentions) * ours.layout.kv)]}


@pytest.mark.parametrize("of", ["q", "qk", "qkv"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_matches_are_those_of_a_search_by_hand(share, of):
    each = fresh(num_key_value_heads=4)
    found = match_heads(each, share, of=of)
    assert found.matches == by_hand(each, share, of)
    assert len(found.matches) == min(int(share * 16), 12)
    assert all(match // 4 < group // 4 for group, match in found.matches.items())
    assert all(-1 <= score <= 1 for score in found.scores.values())
    assert all(found.root(group) not in found.matches for group in range(16))


def test_scores_do_not_depend_on_size_and_follow_a_permutation():
    each = fresh(num_key_value_heads=4)
    plain = match_heads(each, 1.0)
    with torch.no_grad():
        for name in "qk":
            weight = getattr(each.attentions[1].project, f"{name}_proj").weight
            weight.mul_(3)
    assert match_heads(each, 1.0).scores == pytest.approx(plain.scores)
    order = [2, 0, 3, 1]
    with torch.no_grad():
        for name in "qkv":
            weight = getattr(each.attentions[2].project, f"{name}_proj").weight
            weight.copy_(weight.view(4, 8, -1)[order].flatten(0, 1))
    moved = match_heads(each, 1.0)
    for new, old in enumerate(order):
        assert moved.matches[8 + new] == plain.matches[8 + old]


def test_copies_are_found_and_cost_nothing():
    each = fresh(num_key_value_heads=4)
    with torch.no_grad():
        for name in "qkv":
            ours, theirs = (getattr(each.attentions[n].project, f"{name}_proj").weight for n in (2, 0))
            ours[8:16] = theirs[24:32]
        each.attentions[2].project.o_proj.weight[:, 8:16] = each.attentions[0].project.o_proj.weight[:, 24:32]
    want, found = logits(each), match_heads(each, 0.07)
    assert found.matches == {2 * 4 + 1: 3} and found.scores[9] == pytest.approx(1)
    close(logits(direct_share(each, found)), want, 1e-5)


@pytest.mark.parametrize("output", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_replaced_heads_are_their_roots_and_stored_once(kind, output, tmp_path):
    each = fresh(kind)
    before, found = numbers(each), match_heads(each, 0.5)
    dense, groups = copy.deepcopy(each), each.attentions[0].layout.kv
    with torch.no_grad():  # rows overwritten in a model without a bank
        for group in found.matches:
            root = found.root(group)
            (to, a), (of, b) = divmod(group, groups), divmod(root, groups)
            source = each.attentions[of].project
            for name in "qkv":
                for new, old in zip(
                    getattr(dense.attentions[to].project, f"{name}_proj").parameters(),
                    getattr(source, f"{name}_proj").parameters(), strict=True,
                ):  # fmt: skip
                    new.unflatten(0, (groups, -1))[a] = old.unflatten(0, (groups, -1))[b]
            if output:
                o = dense.attentions[to].project.o_proj.weight.unflatten(1, (groups, -1))
                o[:, a] = source.o_proj.weight.unflatten(1, (groups, -1))[:, b]
    shared = direct_share(each, found, output=output)
    close(logits(shared), logits(dense), 1e-5)
    for group in found.matches:
        (to, a), (of, b) = divmod(group, groups), divmod(found.root(group), groups)
        ours, theirs = shared.attentions[to].project.groups[a], shared.attentions[of].project.groups[b]
        assert ours is theirs and ours.q_proj.weight.data_ptr() == theirs.q_proj.weight.data_ptr()
    size = sum(p.numel() for p in shared.attentions[1].project.groups[0].parameters())
    assert before - numbers(shared) == len(found.matches) * size
    costs = shared.attentions[0].spec.cost(32, 4, shared.attentions[0].site)
    for layer in shared.attentions[1:]:
        costs = costs + layer.spec.cost(32, 4, layer.site)
    counted = {id(p): p.numel() for layer in shared.attentions for p in layer.parameters()}
    counted |= {id(p): p.numel() for p in shared.model.bank.parameters()}
    assert costs.parameters == sum(counted.values())
    save(shared, tmp_path / "own")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    close(logits(loaded), logits(shared), 1e-5)
    assert numbers(loaded) == numbers(shared)
    report = to_family(shared, tmp_path / "family")
    assert report.notes and report.loads_as == type(dense.model).__name__
    close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "family")), logits(dense), 1e-4)


def test_nothing_shared_is_the_source():
    each = fresh()
    want = logits(each)
    close(logits(direct_share(each, match_heads(each, 0.0))), want, 1e-5)
    assert all(str(spec).startswith("directshare(kv_heads=2)") for spec in each.specs)


def test_chains_end_at_a_root_or_are_undone():
    sharing = Sharing(4, 1, {1: 0, 2: 1, 3: 2}, {1: 1.0, 2: 1.0, 3: 1.0})
    assert [sharing.root(n) for n in range(4)] == [0, 0, 0, 0] and sharing.roots(3) == (0,)
    each = fresh(num_key_value_heads=4)
    own, rooted = (match_heads(each, 1.0, chain=chain) for chain in ("own", "root"))
    assert own.matches.items() <= rooted.matches.items() and len(own.matches) < len(rooted.matches)
    assert all(match not in own.matches for match in own.matches.values())


def test_the_regulariser_is_zero_at_equality_with_finite_opposite_gradients():
    each = fresh(num_key_value_heads=4)
    found = match_heads(each, 0.07)
    ((group, match),) = found.matches.items()
    loss = regulariser(each, found)
    loss.backward()
    want = 0.0
    for name in "qkv":
        a, b = (
            getattr(each.attentions[n // 4].project, f"{name}_proj").weight.view(4, 8, -1)[n % 4]
            for n in (group, match)
        )
        want += (a - b).norm()
        grads = [
            getattr(each.attentions[n // 4].project, f"{name}_proj").weight.grad.view(4, 8, -1)[n % 4]
            for n in (group, match)
        ]
        close(grads[0], -grads[1], 1e-6)
        close(grads[0].norm(), torch.tensor(1.0), 1e-5)  # of a norm that is not squared
    close(loss, want, 1e-5)
    with torch.no_grad():
        for name in "qkv":
            weights = [getattr(each.attentions[n // 4].project, f"{name}_proj").weight for n in (group, match)]
            weights[0].view(4, 8, -1)[group % 4].copy_(weights[1].view(4, 8, -1)[match % 4])
    each.zero_grad()
    loss = regulariser(each, found)
    loss.backward()
    assert loss == 0 and all(p.grad is None or p.grad.isfinite().all() for p in each.parameters())


def test_a_lone_layer_owns_its_groups():
    layer, x = make("directshare(roots=[0, 5, 5, 2])"), batch()
    assert layer.project.groups[1] is layer.project.groups[2]
    close(decoded(layer, x), layer(x))
    rows = {
        f"project__{kind}_proj__weight": torch.cat([getattr(g, f"{kind}_proj").weight for g in layer.project.groups])
        for kind in "qkv"
    }
    o = torch.cat([g.o_proj.weight for g in layer.project.groups], 1)
    close(layer(x), twin(layer, "gqa", **rows, project__o_proj__weight=o)(x))
    differ(layer(x), make("directshare")(x))
    assert as_gqa(adopt(model()).attentions[0]).spec.parts[0].name == "gqa"


def test_refusals(tmp_path):
    with pytest.raises(OptionError, match=r"share=1\.2 of the heads; from 0 to 1"):
        match_heads(fresh(), 1.2)
    each = fresh()
    with pytest.raises(OptionError, match="4 layers of 2 head groups were matched, the model has 2 of 2"):
        direct_share(fresh(layers=2), match_heads(each))
    direct_share(each, match_heads(each))
    with pytest.raises(OptionError, match="layer 0 is directshare"):
        match_heads(each)
    with pytest.raises(OptionError, match="must number a group for each of 4"):
        make("directshare(roots=[0, 1])")
    with pytest.raises(OptionError, match="no keys whose weights"):
        make("directshare", site=Site(1, 2, kv_source=0))
    assert saved(model(), tmp_path / "m").exists()
