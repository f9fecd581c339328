"""A running model on merged tokens: the same bits where nothing merges, tokens and FLOPs, and all of it undone."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaModel, ViTConfig, ViTModel

import manyheads as mh
from manyheads.aggregate import build, merging
from manyheads.core.kernel import using


def vit(attention="sdpa"):
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=4, intermediate_size=32, image_size=24, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation=attention,
    )  # fmt: skip
    return ViTModel(config, add_pooling_layer=False).double().eval()


def encoder(spec="gqa(kv_heads=2) + rope", **options):
    return mh.Encoder(spec, 16, 4, 4, **options).double().eval()


def features(model, given):
    y = model(given)
    return y if isinstance(y, torch.Tensor) else y.last_hidden_state


@pytest.fixture
def image():
    return torch.randn(2, 3, 24, 24, dtype=torch.float64)


@pytest.fixture
def x():
    return torch.randn(2, 20, 16, dtype=torch.float64)


@pytest.mark.parametrize("line", ["atc(keep=1)", "token_prune_merge(keep=1)", "httm(ratio=0)"])
@torch.no_grad()
def test_where_nothing_merges_the_bits_are_the_same(line, image, x):
    for model, given in ((vit(), image), (vit("eager"), image), (encoder(), x)):
        before = features(model, given)
        with merging(model, line) as merged:
            inside = features(model, given)
        assert torch.equal(inside, before) and torch.equal(features(model, given), before)
        assert len({*merged.tokens.values()}) == 1 and merged.assign is None


@torch.no_grad()
def test_tokens_are_what_the_options_say(image, x):
    model = vit()
    with merging(model, "atc(keep=0.7)") as merged:
        y = model(image).last_hidden_state
    counts = [37, 37, 26, 18]  # of 36 patches 36, 25 and 17, and behind the last layer given 12
    assert [merged.tokens[i] for i in range(4)] == [(n, n) for n in counts]
    assert y.shape[1] == 13 and merged.size.sum(1).tolist() == [37.0, 37.0]
    with merging(model, "token_prune_merge(keep=0.5)", layers=[0]) as merged:
        assert model(image).last_hidden_state.shape[1] == 19
    with merging(model, "httm(ratio=[0.9, 0.7], outliers=0.0)") as merged:
        assert model(image).last_hidden_state.shape[1] == 37
    assert merged.tokens == {i: (4, 12) for i in range(4)}
    model = encoder()
    with merging(model, "atc(keep=0.5, protect=[])", layers=[1], restore=True) as merged:
        assert model(x).shape == x.shape
    assert merged.tokens[1] == (20, 20) and merged.tokens[2] == merged.tokens[3] == (10, 10)


@torch.no_grad()
def test_flops_are_those_that_are_counted(image, x):
    for model, given, line in ((vit("eager"), image, "atc(keep=0.5)"), (encoder("gqa"), x, "httm(ratio=0.5)"),
                               (vit("eager"), image, "httm(ratio=0)")):  # fmt: skip
        with using("tiled"), merging(model, line) as merged, FlopCounterMode(display=False) as counter:
            model(given)
        counted = counter.get_flop_counts()
        total = counter.get_total_flops()
        aside = sum(sum(ops.values()) for name, ops in counted.items() if name.endswith("patch_embeddings"))
        assert merged.flops <= total - aside <= 1.35 * merged.flops  # the matching is the difference
    plain = merged.flops
    assert plain == total - aside


@torch.no_grad()
def test_fewer_tokens_are_fewer_flops(image):
    model, flops = vit(), []
    for keep in (1.0, 0.7, 0.4):
        with merging(model, f"atc(keep={keep})") as merged:
            model(image)
        flops.append(merged.flops)
    assert flops[0] > 1.2 * flops[1] and flops[1] > 1.2 * flops[2]


@torch.no_grad()
def test_a_layer_by_hand(image):
    model = vit()
    states = model(image, output_hidden_states=True).hidden_states
    with mh.capture(model, what=("k",)) as tape:
        model(image)
    found = build("atc(keep=0.5)", 16)(states[2], cond=tape[1].k.mean(1))
    with merging(model, "atc(keep=0.5)", layers=[1], restore=True) as merged:
        y = model(image).last_hidden_state
    torch.testing.assert_close(merged.assign, found.assign)
    torch.testing.assert_close(merged.size.double(), found.size)
    z = found.out
    for layer in model.layers[2:]:
        attention, inner = layer.attention, layer.layernorm_before(z)
        q, k, v = (f(inner).unflatten(-1, (4, 4)).transpose(1, 2)
                   for f in (attention.q_proj, attention.k_proj, attention.v_proj))  # fmt: skip
        scores = q @ k.mT / 2 + found.size.log()[:, None, None]
        z = z + attention.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        z = z + layer.mlp(layer.layernorm_after(z))
    back = z.gather(1, found.assign[..., None].expand(-1, -1, 16))
    torch.testing.assert_close(y, model.layernorm(back))


@torch.no_grad()
def test_pruning_reads_the_attention_of_the_class_token(image):
    model = vit()
    with mh.capture(model, queries=0) as tape:
        states = model(image, output_hidden_states=True).hidden_states
    found = build("token_prune_merge", 16)(states[1], cond=tape[0].weights[:, :, 0].mean(1))
    with merging(model, "token_prune_merge", layers=[0]) as merged:
        model(image)
    torch.testing.assert_close(merged.assign, found.assign)


@torch.no_grad()
def test_merged_copies_attend_as_all_of_them():
    """Two of each token, without positions: merged to one, sizes make the model the same function."""
    model, x = encoder("gqa"), torch.randn(2, 6, 16, dtype=torch.float64)
    many = torch.cat([x, x], 1)
    with merging(model, "atc(keep=0.5, protect=[])", layers=[0], restore=True) as merged:
        y = model(many)
    assert merged.size.tolist() == [[2.0] * 6] * 2
    torch.testing.assert_close(y, model(many))


LINES = ["atc(keep=0.6)", "token_prune_merge", "token_prune_merge(score=received)", "httm(0.5)"]
SPECS = ["gqa(kv_heads=2) + rope", "gqa + alibi", "mla(rank=8, rope_dim=2) + kha"]


@pytest.mark.parametrize(
    ("line", "spec"), [(line, spec) for line in LINES for spec in SPECS if (line[:4], spec) != ("httm", "gqa + alibi")]
)
@torch.no_grad()
def test_padding_and_batch_mates_change_nothing(line, spec, x):
    model, mask = encoder(spec), torch.arange(20) < torch.tensor([[20], [13]])
    with merging(model, line, restore=True):
        both = model(torch.where(mask[..., None], x, 3.0), mask=mask)
        alone = model(x[1:, :13])
    torch.testing.assert_close(both[1:, :13], alone)


@torch.no_grad()
def test_an_adopted_model_merges_as_the_stock_one(image):
    model = vit()
    for line in ("atc(keep=0.6)", "httm(ratio=0.5)", "token_prune_merge"):
        with merging(model, line) as stock:
            wanted = model(image).last_hidden_state
        ours = mh.adopt(vit_copy(model))
        with merging(ours, line) as merged:
            found = ours(image).last_hidden_state
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
        assert merged.tokens == stock.tokens


def vit_copy(model):
    other = vit()
    other.load_state_dict(model.state_dict())
    return other


def test_gradients_pass(image):
    model = vit().train()
    with merging(model, "atc(keep=0.5)"):
        model(image).last_hidden_state[:, 0].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.layers.parameters())


def test_all_is_undone_after_an_error(x):
    model = encoder("gqa")
    with pytest.raises(RuntimeError, match="here"), merging(model, "atc"):
        raise RuntimeError("here")
    assert not any(block.attention.taps for block in model.stack.blocks)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("line", ["atc(keep=0.5)", "token_prune_merge", "httm"])
def test_a_model_merges_once_at_a_time(line, x):
    model, other = encoder("gqa"), encoder("gqa")
    with merging(model, "atc(keep=0.5)"), merging(other, line):
        for one in (model, other):
            with pytest.raises(ValueError, match="this model merges already"):
                entered(one, line)
        assert model(x).shape[1] < x.shape[1]


def entered(model, line, **options):
    with merging(model, line, **options):
        pass


def test_models_that_cannot_merge_are_refused(x):
    with pytest.raises(ValueError, match="no attention layer that can be seen"):
        entered(torch.nn.Linear(2, 2), "atc")
    with pytest.raises(ValueError, match="layer 0 is causal"):
        entered(mh.Decoder(10, "gqa", 16, 4, 2), "atc")
    tiny = LlamaConfig(vocab_size=10, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=8)
    with pytest.raises(ValueError, match="layer 0 is causal"):
        entered(LlamaModel(tiny), "httm")
    with pytest.raises(ValueError, match=r"layers=\[7\] are not layers of this model, each once; it has 0 to 3"):
        entered(encoder(), "atc", layers=[7])
    for line in ("atc(protect=[3])", "token_prune_merge(of=1)"):
        with pytest.raises(ValueError, match=r"what is protected \(the class token too\) comes first"):
            entered(encoder(), line)
    with pytest.raises(ValueError, match="goes by tokens that merging changes"):
        entered(encoder("gqa + window(3)"), "atc")
    with pytest.raises(ValueError, match="moh goes by tokens that merging changes"):
        entered(encoder("gqa + moh(top=2)"), "httm")
    with pytest.raises(ValueError, match="more than one attention"):
        entered(encoder(loops=2), "atc")
    with pytest.raises(ValueError, match="is attention outside of a list of layers"):
        entered(mh.Attention("gqa", 16, 4, site=mh.Site(causal=False)), "atc")
    biased, plain, mixed = encoder("gqa + alibi"), encoder(), encoder(residual="mhar(heads=2)")
    with pytest.raises(ValueError, match="a mask or a bias over pairs"), merging(biased, "httm"):
        biased(x)
    with pytest.raises(ValueError, match="over pairs of tokens"), merging(plain, "atc"):
        plain(x, mask=torch.rand(2, 1, 20, 20) < 0.9)
    with pytest.raises(ValueError, match="more than the sum"), merging(mixed, "atc"):
        mixed(x)
