"""Sharing across the layers of a pretrained model: the conversion, both searches, attention maps."""

import copy
import itertools
import math

import pytest
import torch
from tests.convert.tiny import model, tokens
from transformers import AutoModelForCausalLM

from manyheads import Cache, OptionError
from manyheads.bench.figures import cache_figures
from manyheads.convert import share as sharing_module
from manyheads.convert.adopt import adopt
from manyheads.convert.export.native import save
from manyheads.convert.plan import BudgetError, Shape, make_goal, shape_of
from manyheads.convert.share import (
    apart,
    blocks,
    distances,
    kvsharer,
    least_damage,
    loss,
    pair_damage,
    share_layers,
    sharing,
    shrink_shared,
    similarity,
)
from manyheads.convert.shrink import shrink
from manyheads.convert.source import load_source
from manyheads.convert.stream import InMemory
from manyheads.stack.maps import resolve

LAYERS = 4


@pytest.fixture(params=["llama", "qwen3", "biased"])
def adopted(request):
    return adopt(model(request.param, LAYERS))


def logits(of, windows, **options):
    with torch.no_grad():
        return of(windows, **options).logits


def twins(of, reader, owner):
    """Make a reader's own keys and values those of an owner just below: equal weights on an equal input."""
    inner = of.model.model.layers
    with torch.no_grad():
        for linear in (inner[owner].self_attn.project.o_proj, inner[owner].mlp.down_proj):
            for parameter in linear.parameters():
                parameter.zero_()
        inner[reader].input_layernorm.load_state_dict(inner[owner].input_layernorm.state_dict())
        a, b = inner[reader].self_attn, inner[owner].self_attn
        for name in ("k_proj", "v_proj"):
            getattr(a.project, name).load_state_dict(getattr(b.project, name).state_dict())
        for mine, yours in zip(a.transforms, b.transforms, strict=True):
            mine.load_state_dict(yours.state_dict())


def test_nothing_shared_is_the_model(adopted):
    want = logits(adopted, tokens())
    assert torch.equal(logits(share_layers(adopted), tokens()), want)


def test_equal_rows_make_sharing_a_no_op(adopted):
    twins(adopted, 2, 1)
    want = logits(adopted, tokens())
    torch.testing.assert_close(logits(share_layers(adopted, [None, None, 1, None]), tokens()), want, atol=1e-5, rtol=0)


def test_equal_weights_make_taking_them_a_no_op(adopted):
    twins(adopted, 2, 1)
    a, b = adopted.attentions[2].project, adopted.attentions[1].project
    a.q_proj.load_state_dict(b.q_proj.state_dict())
    want = logits(adopted, tokens())
    shared = share_layers(adopted, attn_source=[None, None, 1, None])
    torch.testing.assert_close(logits(shared, tokens()), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "options", [{"kv_source": "cla(2)"}, {"kv_source": "mlkv(1)"}, {"attn_source": "echoatt(1)"}], ids=str
)
def test_what_is_left(adopted, options, tmp_path):
    before = {id(p) for p in adopted.parameters()}
    shared = share_layers(adopted, **options)
    assert {id(p) for p in shared.parameters()} < before, "the very parameters, some fewer"
    full, cache, outs = logits(shared, tokens(2), use_cache=False), Cache(), []
    for part in tokens(2).split((9, 1, 6), 1):
        outs.append(logits(shared, part, cache=cache))
    torch.testing.assert_close(torch.cat(outs, 1), full, atol=1e-4, rtol=1e-4)
    costs = [layer.spec.cost(layer.dim, layer.heads, layer.site) for layer in shared.attentions]
    assert cache.bytes() == 2 * sum(cost.cache_bytes(16) for cost in costs)
    readers = [s for s in zip(shared.config.kv_source, shared.config.attn_source, strict=True) if s != (None, None)]
    assert len(readers) in (1, 2, 3)
    save(shared, tmp_path / "shared")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "shared")
    assert torch.equal(logits(again, tokens(2), use_cache=False), full)
    with pytest.raises(OptionError, match="reads from another layer"):
        shape_of(again.config)


def test_ordinary_training(adopted):
    shared, inputs = share_layers(adopted, "cla(2)").train(), tokens(4)
    optimiser, losses = torch.optim.Adam(shared.parameters(), 1e-2), []
    for _ in range(12):
        out = shared(inputs, labels=inputs)
        optimiser.zero_grad(), out.loss.backward(), optimiser.step()
        losses.append(out.loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_the_model_comes_back(adopted):
    want, modules = logits(adopted, tokens()), adopted.attentions
    with sharing(adopted, "cla(2)"):
        assert not torch.equal(logits(adopted, tokens()), want)
        inside = adopted.attentions
    with pytest.raises(RuntimeError), sharing(adopted, attn_source="echoatt(1)"):
        raise RuntimeError
    assert adopted.attentions == modules != inside and not any(layer.site.lends for layer in modules)
    assert torch.equal(logits(adopted, tokens()), want)


def test_an_own_decoder_shares():
    from tests.stack.tiny import batch
    from tests.stack.tiny import model as stacked

    own, inputs = stacked("gqa"), batch()
    shared = share_layers(own, "cla(2)")
    shared.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert shared.model.decoder.stack.kv_source == [None, 0, None, 2] == shared.config.kv_source


def test_what_layers_borrow_stays_borrowed():
    """Experts that attention has in common with the feed-forward are still one, and saved once, where it reads."""
    from tests.stack.tiny import batch
    from tests.stack.tiny import model as stacked

    sizes = "experts=3, hidden=8, fixed=1, shared_fixed=true"
    own, inputs = stacked({"specs": f"umoe({sizes}, top=2, qk_dim=8)", "ffn": f"umoe({sizes}, top=2)"}), batch()
    before = {id(p) for p in own.parameters()}
    shared = share_layers(own, "cla(2)")
    assert {id(p) for p in shared.parameters()} < before
    again = AutoModelForCausalLM.from_config(shared.config).eval()
    again.load_state_dict(shared.state_dict())
    assert torch.equal(logits(again, inputs["input_ids"]), logits(shared, inputs["input_ids"]))


def test_loops_are_refused():
    from tests.stack.tiny import model as stacked

    with pytest.raises(OptionError, match="2 loops run with the weights of the first"):
        share_layers(stacked({"specs": "gqa", "loops": 2}), "cla(2)")


def test_refusals_come_first(adopted):
    want = logits(adopted, tokens())
    for options, said in (
        ({"kv_source": [None, 2, None, None]}, "layer 1 cannot read the rows of layer 2"),
        ({"kv_source": [None, 0]}, "2 sources for 4 layers"),
        ({"attn_source": "shared-attention([0])"}, "layer 0 has no layer below"),
    ):
        with pytest.raises(ValueError, match=said):
            share_layers(adopted, **options)
    assert torch.equal(logits(adopted, tokens()), want)
    shared = share_layers(adopted, "cla(2)")
    with pytest.raises(OptionError, match="layer 1 reads from another layer already"):
        share_layers(shared, "cla(4)")


# --- folding keys and values (mlkv)


def test_folds():
    of = adopt(model("llama", LAYERS))
    own = [layer.project.k_proj.weight.detach().clone() for layer in of.attentions]
    mean = share_layers(copy.deepcopy(of), "owners([0, 3])", fold="mean").attentions
    torch.testing.assert_close(mean[0].project.k_proj.weight, torch.stack(own[:3]).mean(0))
    assert torch.equal(mean[3].project.k_proj.weight, own[3])
    running = share_layers(copy.deepcopy(of), "owners([0, 3])", fold="running").attentions[0].project.k_proj.weight
    torch.testing.assert_close(running, own[0] / 4 + own[1] / 4 + own[2] / 2)
    pair = [share_layers(copy.deepcopy(of), "cla(2)", fold=fold).attentions[2].project for fold in ("mean", "running")]
    torch.testing.assert_close(pair[0].v_proj.weight, pair[1].v_proj.weight)


@pytest.mark.parametrize("fold", ["mean", "running"])
def test_equal_weights_fold_to_themselves(fold):
    of = adopt(model("biased", LAYERS))
    first = of.attentions[0].project
    for layer in of.attentions[1:]:
        for name in ("k_proj", "v_proj"):
            getattr(layer.project, name).load_state_dict(getattr(first, name).state_dict())
    before = {name: p.detach().clone() for name, p in first.named_parameters()}
    after = share_layers(of, "mlkv(1)", fold=fold).attentions[0].project
    for name, parameter in after.named_parameters():
        torch.testing.assert_close(parameter, before[name])


# --- kvsharer


def test_distances(adopted):
    table = distances(adopted, tokens())
    assert torch.equal(table, table.T) and not table.diagonal().any() and (table[0, 1:] > 0).all()
    caches = [Cache() for _ in tokens()]
    for window, cache in zip(tokens(), caches, strict=True):
        logits(adopted, window[None], cache=cache)

    def mean(layer, name):
        return torch.stack([cache.site(layer).growing[name].rows()[0] for cache in caches]).mean(0)

    want = sum((mean(3, name) - mean(1, name)).norm(dim=-1).mean() for name in "kv") / 2
    torch.testing.assert_close(table[3, 1], want)


def test_a_distance():
    a, b = ({name: torch.randn(2, 5, 6) for name in "kv"} for _ in range(2))

    def each(change, of):
        return {name: change(rows) for name, rows in of.items()}

    assert apart(a, a) == 0 and apart(a, b) == apart(b, a) > 0
    assert apart(each(lambda r: 3 * r, a), each(lambda r: 3 * r, b)) == pytest.approx(3 * apart(a, b))
    assert apart(each(lambda r: r + 2, a), each(lambda r: r + 2, b)) == pytest.approx(apart(a, b), rel=1e-5)
    assert math.isnan(apart(a, {"latent": a["k"]}))


def similar(of, windows, source):
    """Mean cosine of flattened last hidden states, written out."""

    def hidden(one):
        with torch.no_grad():
            return one.model.model(windows, use_cache=False).last_hidden_state.flatten(1)

    whole = hidden(of)
    with sharing(of, source):
        return torch.nn.functional.cosine_similarity(hidden(of), whole, dim=-1).mean().item()


def test_first_accepted_pair_is_the_most_distant_admissible(adopted):
    windows = tokens()
    table = distances(adopted, windows)
    alike = {
        (i, j): similar(adopted, windows, [j if layer == i else None for layer in range(LAYERS)])
        for i, j in itertools.combinations(range(LAYERS - 1, -1, -1), 2)
    }
    threshold = sum(sorted(alike.values())[2:4]) / 2  # half of the pairs do not pass
    found = kvsharer(adopted, windows, 1, threshold=threshold)
    want = max((pair for pair in alike if alike[pair] > threshold), key=lambda pair: table[pair].item())
    assert found.shared[0][:2] == want and found.shared[0][2] == pytest.approx(alike[want], abs=1e-5)
    assert found.kv_source[want[0]] == want[1] and found.kv_source.count(None) == LAYERS - 1


def test_thresholds_and_counts(adopted):
    windows = tokens()
    assert kvsharer(adopted, windows, 3, threshold=1.0).shared == ()
    assert kvsharer(adopted, windows, 0).kv_source == [None] * LAYERS
    found = kvsharer(adopted, windows, 3, threshold=-1.0)
    assert len(found.shared) == 3 and found.kv_source == resolve(found.kv_source) and found.kv_source[0] is None
    table = distances(adopted, windows)
    ranked = sorted(((i, j) for i in range(LAYERS) for j in range(i)), key=lambda p: -table[p].item())
    first = list(dict.fromkeys(i for i, _ in ranked))
    assert [reader for reader, _, _ in found.shared] == first[:3], "the first admissible pairs"
    similar_first = kvsharer(adopted, windows, 1, threshold=-1.0, order="similar").shared[0]
    assert similar_first[:2] == ranked[-1]
    for reader, _, alike in found.shared[:1]:
        assert similar(adopted, windows, [found.shared[0][1] if i == reader else None for i in range(4)]) == (
            pytest.approx(alike, abs=1e-5)
        )
    with pytest.raises(OptionError, match="4 layers cannot read others of 4; 0 to 3 can"):
        kvsharer(adopted, windows, 4)


def test_windowed_owners_are_never_read_by_full_layers():
    of = adopt(model("qwen2", LAYERS, use_sliding_window=True, sliding_window=5, max_window_layers=2))
    assert "window" in of.config.specs[2] and "window" not in of.config.specs[1]
    table, _ = pair_damage(of, tokens(2))
    assert table.isfinite().sum() == 6  # full layers come first here, so that every pair fits
    found = kvsharer(of, tokens(2), 3, threshold=-1.0)
    assert len(found.shared) == 3
    share_layers(of, found.kv_source)


# --- measured damage


def test_damage_of_pairs_and_the_search(adopted):
    windows = tokens()
    table, own = pair_damage(adopted, windows)
    assert own == pytest.approx(loss(adopted, windows)) and table.isnan().sum() == 16 - 6
    with sharing(adopted, [None, None, None, 1]):
        assert loss(adopted, windows) - own == pytest.approx(table[3, 1].item(), abs=1e-5)
    found = least_damage(adopted, windows, 1, tries=6, table=table)
    best = min(((i, j) for i in range(4) for j in range(i)), key=lambda pair: table[pair].item())
    assert found.shared[0][:2] == best and found.source == pytest.approx(own)
    found = least_damage(adopted, windows, 2, table=table)
    shared = share_layers(adopted, found.kv_source)
    assert found.kv_source.count(None) == 2
    assert loss(shared, windows) == pytest.approx(found.shared[-1][2], abs=1e-5)


def test_damage_of_a_no_op_is_zero(adopted):
    twins(adopted, 2, 1)
    table, _ = pair_damage(adopted, tokens())
    assert abs(table[2, 1]) < 1e-5


# --- attention maps (echoatt)


def test_similarity(adopted):
    table = similarity(adopted, tokens(3))
    torch.testing.assert_close(table.diagonal(), torch.ones(LAYERS))
    torch.testing.assert_close(table, table.T)
    assert (table >= 0).all() and (table < 1 + 1e-5).all() and table[0, 1] < 0.999
    twins(adopted, 2, 1)
    adopted.attentions[2].project.q_proj.load_state_dict(adopted.attentions[1].project.q_proj.state_dict())
    assert similarity(adopted, tokens(3))[2, 1] == pytest.approx(1.0, abs=1e-5)


def test_blocks():
    table = torch.eye(8)
    table[2, 3] = table[3, 2] = 0.9
    table[5, 6] = table[6, 5] = 0.8
    table[3, 4] = table[4, 3] = 0.85
    assert blocks(table, 1, 1) == [None, None, None, 2, None, None, None, None]
    assert blocks(table, 1, 2) == [None, None, None, 2, None, None, 5, None], "3 is taken"
    assert blocks(table, 2, 0) == [None] * 8
    with pytest.raises(OptionError, match="3 blocks of 3 layers; there are 6 inner layers"):
        blocks(table, 2, 3)


# --- within a budget


def job(tmp_path, to, budget):
    """A job of one goal on a llama of 4 layers that each cache 4 · (8 + 8) numbers a token."""
    layers = InMemory(model("llama", LAYERS))
    goal = make_goal(budget, to, shape_of(layers))
    return layers, goal, shrink(layers, tokens(), [goal], tmp_path)[0]


def test_a_budget_is_spent_on_as_few_readers_as_it_needs(tmp_path):
    layers, goal, damage = job(tmp_path, "share", "75%")
    made = load_source(tmp_path / goal.name).model
    assert goal.owners == 3 and made.config.kv_source.count(None) == 3
    want = kvsharer(layers.model, tokens().reshape(-1, tokens().shape[1]), 1)
    assert made.config.kv_source == want.kv_source
    assert made.config.notes["shared"] == [[*pair] for pair in want.shared]
    with sharing(layers.model, want.kv_source):
        assert torch.equal(logits(made, tokens(2)), logits(layers.model, tokens(2)))
    floats, size = cache_figures(made)
    whole, of = cache_figures(layers.model)
    assert (floats, size) == (0.75 * whole, 0.75 * of)
    reader = want.shared[0][0]
    assert [each.fitted == 0 for each in damage] == [layer < reader for layer in range(LAYERS)]
    assert layers.model.config.kv_source == [None] * LAYERS


def test_a_budget_spent_by_measured_damage_costs_no_more_than_the_first_guess(tmp_path):
    layers, goal, _ = job(tmp_path, "share(search=damage)", "75%")
    made = load_source(tmp_path / goal.name).model
    windows = sharing_module._pieces(tokens())
    want = least_damage(layers.model, windows, 1)
    assert made.config.kv_source == want.kv_source
    other = kvsharer(layers.model, windows, 1)
    with sharing(layers.model, other.kv_source):
        assert want.shared[0][2] <= loss(layers.model, windows) + 1e-6


def test_a_finished_job_is_taken_as_it_is(tmp_path, monkeypatch):
    layers, goal, damage = job(tmp_path, "share", "50%")
    monkeypatch.setattr(sharing_module, "kvsharer", None)
    assert shrink(layers, tokens(), [goal], tmp_path)[0] == damage


@pytest.mark.parametrize(
    "budget, owners", [("25%", 1), ("50%", 2), ("74%", 2), ("75%", 3), ("99%", 3), ("24", 3), ("8", 1)]
)
def test_budgets(budget, owners):
    shape = Shape(2, 8, 8, layers=LAYERS)
    assert make_goal(budget, "share", shape).owners == owners


def test_a_share_of_many_layers_is_not_lost_to_rounding():
    shape = Shape(3, 64, 64, layers=30)
    assert [make_goal(f"{share}%", "share", shape).owners for share in (80, 70, 10, 3.34)] == [24, 21, 3, 1]


def test_budgets_that_do_not_fit():
    shape = Shape(2, 8, 8, layers=LAYERS)
    with pytest.raises(BudgetError, match=r"no share fits 20% .* the smallest is 8 \(25%\)"):
        make_goal("20%", "share", shape)
    with pytest.raises(BudgetError, match="leaves nothing to shrink"):
        make_goal("100%", "share", shape)


def test_what_the_search_does_not_find_is_refused_and_nothing_is_written(tmp_path):
    layers = InMemory(model("llama", LAYERS))
    with pytest.raises(OptionError, match=r"2 of 4 layers were to read others; with 0 .* threshold=1"):
        shrink_shared(layers, tokens(), 2, tmp_path / "out", threshold=1.0)
    with pytest.raises(OptionError, match="0 of 4 layers with rows of their own; there may be 1 to 4"):
        shrink_shared(layers, tokens(), 0, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- a real model


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    """The model, and windows `(count, length)` of the text that searches see, and of the text that they do not."""
    from manyheads.convert.text import default_text, split, windows

    source = load_source(smollm2_gguf)
    seen, rest = split(default_text())
    cut = lambda text: lambda count, length: windows(source.tokenizer, text, count=count, length=length)
    return adopt(source.model), cut(seen), cut(rest)


@pytest.fixture(scope="module")
def damage(smollm2):
    """The loss that a pair adds on text that no search sees."""
    of, _, rest = smollm2
    text = rest(2, 128)
    own, layers = loss(of, text), len(of.attentions)

    def added(reader, owner):
        with sharing(of, [owner if layer == reader else None for layer in range(layers)]):
            return loss(of, text) - own

    return added


@pytest.fixture(scope="module")
def lowest_tenth(smollm2, damage):
    """Where the lowest tenth of pairs ends, of every eighth of all."""
    every = [(reader, owner) for reader in range(len(smollm2[0].attentions)) for owner in range(reader)]
    spread = sorted(damage(*each) for each in every[::8])
    return spread[len(spread) // 10]


@pytest.mark.slow
def test_layer_5_of_smollm2_reads_layer_0_at_less_than_a_layer_reads_the_one_below(smollm2, damage):
    adjacent = sorted(damage(layer, layer - 1) for layer in range(1, len(smollm2[0].attentions), 2))
    assert damage(5, 0) < 0.1 < adjacent[len(adjacent) // 2]


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="measured: 27 reads 11 at 0.115 nats, where the lowest tenth ends at 0.066")
def test_the_pair_that_kvsharer_finds_is_among_the_least_harmful(smollm2, damage, lowest_tenth):
    """Distance is no damage: the authors' own rule, which asks only that the last hidden states stay alike."""
    of, seen, _ = smollm2
    (pair,) = kvsharer(of, seen(30, 64), 1).shared
    assert damage(*pair[:2]) <= lowest_tenth
