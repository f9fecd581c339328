"""Pruned models: the function of the masked model, and everything that a model must be able to do."""

import pytest
import torch
from tests.convert.tiny import model, tokens
from tests.edit.models import grouped, logits, multi_head
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import manyheads as mh
from manyheads.convert.export import save, to_family
from manyheads.edit import EditError, Kept, groups_of, load_heads, mask, prune, save_heads, sliced
from manyheads.stack import ManyheadsConfig, ManyheadsForCausalLM

KINDS = ("llama", "biased", "qwen2", "qwen3", "mistral")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "regroup"),
    [
        ({0: [0, 1, 2]}, "refuse"), ({0: [0, 4], 1: [3, 4, 5]}, "refuse"), ({0: [0], 1: [0, 1, 3]}, "map"),
        ({0: [0], 1: [0, 1, 3]}, "repeat"), ({0: [0, 1, 2, 4], 1: [1, 2, 3, 4, 5]}, "refuse"),
    ],
)  # fmt: skip
def test_pruned_is_masked_in_full_passes_and_decoding(kind, heads, regroup):
    made, ids = grouped(kind), tokens(3)
    before = logits(made, ids)
    with mask(made, heads):
        want = logits(made, ids)
    assert (want - before).abs().max() > 0.1
    small = prune(made, heads, regroup=regroup)
    torch.testing.assert_close(logits(small, ids), want, rtol=0, atol=1e-10)
    with torch.no_grad():
        cache = mh.Cache()
        steps = [small(part, cache=cache).logits for part in ids.split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), want, rtol=0, atol=1e-10)
    assert torch.equal(logits(made, ids), before) and not any(layer.taps for layer in small.attentions)


def test_float32_within_1e_5():
    made, ids = mh.adopt(model(initializer_range=0.1)), tokens()
    heads = {0: [0, 1], 1: [1, 2]}
    with mask(made, heads):
        want = logits(made, ids)
    torch.testing.assert_close(logits(prune(made, heads), ids), want, rtol=0, atol=1e-5)


def test_a_stock_model_is_adopted_and_numbers_count_from_0_on():
    small = prune(model(), {1: [3, 2]})
    assert small.config.heads == [4, 2] and small.config.specs[1].startswith("gqa(kv_heads=1, head_dim=8)")
    for wrong in ({-1: [3, 2]}, {1: [-1, -2]}):
        with pytest.raises(ValueError, match=r"there is no -1 in .*: layers and heads count from 0 on"):
            prune(small, wrong)


@pytest.mark.parametrize("regroup", ["map", "repeat"])
def test_saved_and_loaded_it_says_and_caches_the_same(regroup, tmp_path):
    made, ids = grouped(bos_token_id=None), tokens(2)
    small = prune(made.float(), {0: [0, 1, 2], 1: [0, 1, 3]}, regroup=regroup)
    save(small, tmp_path / "small")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert torch.equal(logits(loaded, ids), logits(small, ids)) and loaded.config.heads == [3, 3]
    texts = [each.generate(ids[:, :5], max_new_tokens=8, do_sample=False, pad_token_id=0) for each in (small, loaded)]
    assert torch.equal(*texts)
    kept = mh.Cache()
    loaded(ids[:1], cache=kept)
    key_heads = {"map": [1, 2], "repeat": [1, 3]}[regroup]
    assert kept.bytes() == sum(key_heads) * 2 * 8 * 4 * ids.shape[1]


def test_it_is_smaller_and_trains():
    made, ids = grouped(), tokens(2)
    made.attentions[1].project.q_proj.weight.requires_grad_(False)
    small = prune(made.train(), {1: [0, 1, 2]})
    assert small.training and not small.attentions[1].project.q_proj.weight.requires_grad
    small(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in small.parameters() if p.requires_grad)
    assert all(p.grad is None for p in made.parameters())
    count = lambda each: sum(p.numel() for p in each.parameters())
    assert count(made) - count(small) == 48 * 8 * (3 + 1 + 1 + 3)
    tied = prune(model("tied"), {0: [0, 1]})
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight


def test_weights_are_copied_or_shared_as_asked():
    made = grouped()
    copied, shared = prune(made, {0: [0, 1, 2]}), prune(made, {0: [0, 1, 2]}, share=True)
    embedding = made.get_input_embeddings().weight
    assert copied.get_input_embeddings().weight is not embedding and shared.get_input_embeddings().weight is embedding
    assert made.attentions[0].heads == 6 and made.config.heads == [6, 6]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_counts_make_a_stock_model(kind, tmp_path):
    made, ids = grouped(kind), tokens(2)
    small = prune(made.float(), {0: [0, 1, 2], 1: [3, 4, 5]})
    assert to_family(small, tmp_path / "stock").loads_as == type(made.model).__name__
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert type(stock).__module__.startswith("transformers") and stock.config.num_attention_heads == 3
    torch.testing.assert_close(logits(stock, ids), logits(small, ids), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="layer 1"):
        to_family(prune(made, {0: [0, 1, 2]}), tmp_path / "other")


def test_pruned_again_it_is_as_pruned_at_once():
    made, ids = grouped(), tokens(2)
    twice = prune(prune(made, {0: [0]}, regroup="map"), {0: [1, 3]})
    torch.testing.assert_close(logits(twice, ids), logits(prune(made, {0: [0, 2, 4]}, regroup="map"), ids))
    even = prune(prune(made, {0: [0]}, regroup="map"), {0: [4]})
    assert even.config.specs[0].startswith("gqa(kv_heads=2, head_dim=8) + ")


@pytest.mark.parametrize(
    "spec",
    [
        "mla(rank=12, rope_dim=4)", "mla(rank=12, rope_dim=4, q_rank=6)", "gqa(kv_heads=2) + head_gate",
        "gqa(group=2) + window(size=4)", "dha(k_heads=2, v_heads=3, v_map=[0, 1, 2, 1])", "gqa(v_dim=5) + kha",
    ],
)  # fmt: skip
def test_decoders_of_our_own_and_other_projections(spec, tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    made, ids = ManyheadsForCausalLM(ManyheadsConfig(specs=spec, **sizes)).double().eval(), tokens(2)
    with mask(made, {1: [2, 3]}):
        want = logits(made, ids)
    small = prune(made, {1: [2, 3]})
    torch.testing.assert_close(logits(small, ids), want, rtol=0, atol=1e-10)
    save(small, tmp_path / "small")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "small").config.heads == [4, 2]


def test_a_layer_of_chosen_heads_in_any_order():
    layer = grouped().attentions[0]
    groups = groups_of(layer)
    assert groups.keys == groups.values == (0, 0, 0, 1, 1, 1) and groups.even == 2
    turned = sliced(layer, Kept((3, 4, 5, 0, 1, 2), (1, 0), (1, 0), groups))
    x = torch.randn(2, 5, 48, dtype=torch.float64)
    where = torch.arange(5)[None]
    torch.testing.assert_close(turned(x, position_ids=where)[0], layer(x, position_ids=where)[0])


def refused(made, heads, **options):
    with pytest.raises(ValueError) as error:
        prune(made, heads, **options)
    return str(error.value)


def test_what_does_not_fit_is_said_in_one_sentence():
    made = grouped()
    assert "there is no layer 2; this model has layers 0 to 1" in refused(made, {2: [0]})
    assert "there is no head 6 in layer 1" in refused(made, {1: [6]})
    assert "layer 0 would lose all its 6 heads; at least one stays" in refused(made, {0: range(6)})
    said = refused(made, {0: [1]})
    assert "2 key heads, each read by 3 query heads; without 1 they are left with 2, 3 readers" in said
    assert "Take whole groups (0, 1, 2) or 1 of each group (1, 3), or regroup: 'map'" in said
    assert prune(made, {0: [1, 3]}).config.heads == [4, 6] and prune(made, {0: [0, 1, 2]}).config.heads == [3, 6]
    assert "heads are given by layer" in refused(made, {}) and "no heads are chosen" in refused(made, {0: []})
    assert "regroup='some'; uneven groups are one of refuse, repeat, map" in refused(made, {0: [1]}, regroup="some")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("retnet", "mixes heads or counts them"), ("gqa + alibi", "mixes heads or counts them"),
        ("gqa + talking_heads", "mask them instead"), ("selective_ssm", "selective_ssm is none"),
    ],
)  # fmt: skip
def test_mixers_without_heads_and_parts_that_mix_them(spec, said):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = ManyheadsForCausalLM(ManyheadsConfig(specs=spec, **sizes)).eval()
    for layer in made.attentions:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    assert said in refused(made, {0: [0]})


def test_layers_that_share():
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    made = ManyheadsForCausalLM(ManyheadsConfig(specs="gqa", kv_source=[None, 0, None], **sizes)).eval()
    assert "rows of layer 0 are read by another" in refused(made, {0: [0]})
    assert "layer 1 shares rows" in refused(made, {1: [0]})
    assert prune(made, {2: [0]}).config.heads == [4, 4, 3]
    looped = ManyheadsForCausalLM(ManyheadsConfig(specs="gqa", loops=2, **sizes)).eval()
    assert "runs its blocks 2 times" in refused(looped, {0: [0]})


def test_stock_models_are_masked_and_give_the_same_bits_afterwards():
    stock = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()
    ids = tokens(2)
    before = stock(ids).logits
    with mask(stock, {0: [0, 1, 2, 3]}):
        assert not torch.allclose(stock(ids).logits, before)
    assert torch.equal(stock(ids).logits, before)


def test_masks_are_files(tmp_path):
    made, file = grouped(), tmp_path / "heads.json"
    save_heads(file, made, {1: [2, 0], 0: 5})
    assert load_heads(file, made) == {0: [5], 1: [0, 2]}
    ids = tokens(2)
    with mask(made, {0: 5, 1: [0, 2]}):
        want = logits(made, ids)
    with mask(made, file):
        assert torch.equal(logits(made, ids), want)
    with pytest.raises(EditError, match=r"about layers of \[6, 6\] heads; this model has \[4, 4\]"):
        load_heads(file, multi_head())
    file.write_text("[1]")
    with pytest.raises(EditError, match="no file of masked heads"):
        load_heads(file, made)
