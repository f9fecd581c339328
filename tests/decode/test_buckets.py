"""Several RoPE bases side by side, logits mixed by confidence."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import manyheads as mh
from manyheads.core.part import OptionError
from manyheads.decode.buckets import attention_buckets, choose_bases, mix_logits, waveform, weights_of


def decoder(spec="gqa(kv_heads=2)"):
    return mh.Decoder(30, spec, 32, 4, 2, std=0.3).double().eval()


def under(model, base, spec="gqa(kv_heads=2)", **options):
    """The same weights under another base."""
    other = decoder(f"{spec} + rope(base={base})")
    other.load_state_dict(model.state_dict())
    return other


IDS = torch.arange(16).view(2, 8) % 30
BASES = (10.0, 300.0, 5000.0)


@pytest.mark.parametrize("spec", ["gqa(kv_heads=2)", "mla(rank=8, rope_dim=4)", "gqa + kha"])
@pytest.mark.parametrize("confidence", ["logit", "probability", "entropy"])
@torch.no_grad()
def test_each_run_is_the_model_under_its_base(spec, confidence):
    model = decoder(spec)
    each = torch.stack([under(model, base, spec)(IDS) for base in BASES])
    before = model(IDS)
    with attention_buckets(model, BASES, confidence):
        found = model(IDS)
    torch.testing.assert_close(found, mix_logits(each, confidence))
    assert torch.equal(model(IDS), before)
    assert (each[0] - each[2]).abs().max() > 1e-3


@pytest.mark.parametrize("spec", ["gqa(kv_heads=2)", "mla(rank=8, rope_dim=4)", "gqa + kha", "mfa(width=8)"])
@torch.no_grad()
def test_step_by_step_is_the_full_pass_and_caches_never_mix(spec):
    model, cache = decoder(spec), mh.Cache()
    mask = torch.tensor([[True] * 8, [False] * 2 + [True] * 6])
    with attention_buckets(model, BASES):
        whole = model(IDS, mask=mask)
        steps = [model(IDS[:, t : t + 1], mask=mask[:, t : t + 1], cache=cache) for t in range(8)]
        torch.testing.assert_close(torch.cat(steps, 1)[mask], whole[mask])
    alone = mh.Cache()
    other = under(model, BASES[1], spec)
    other(IDS, mask=mask, cache=alone)
    for name, row in alone.site(0).read(alone.axis).tensors.items():
        mine = cache.site(0).read(cache.axis).tensors[name]
        torch.testing.assert_close(mine[2:4][:, :, 2:], row[:, :, 2:])


@torch.no_grad()
def test_equal_bases_are_the_plain_model_and_their_order_does_not_count():
    model = decoder()
    wanted = under(model, 500.0)(IDS)
    for bases in ((500.0,), (500.0, 500.0)):
        with attention_buckets(model, bases):
            torch.testing.assert_close(model(IDS), wanted)
    with attention_buckets(model, BASES):
        one = model(IDS)
    with attention_buckets(model, BASES[::-1]):
        torch.testing.assert_close(model(IDS), one)


@torch.no_grad()
def test_the_first_token_is_the_same_under_every_base():
    model = decoder()
    wanted = model(IDS[:, :1])
    with attention_buckets(model, BASES):
        torch.testing.assert_close(model(IDS[:, :1]), wanted)


@torch.no_grad()
def test_an_adopted_model_generates_what_the_mixture_chooses():
    config = LlamaConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, initializer_range=0.3,
    )  # fmt: skip
    stock = LlamaForCausalLM(config).double().eval()
    weights = {name: value.clone() for name, value in stock.state_dict().items()}
    model = mh.adopt(stock).eval()
    prompt = torch.randint(3, 30, (2, 5))
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])

    def logits(ids, mask, base):
        other = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "rope_parameters": {
            "rope_type": "default", "rope_theta": base}})).double().eval()  # fmt: skip
        other.load_state_dict(weights)
        position = (mask.cumsum(1) - 1).clamp_min(0)
        return other(ids, attention_mask=mask, position_ids=position).logits[:, -1]

    with attention_buckets(model, BASES):
        found = model.generate(prompt, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0,
                               eos_token_id=None)  # fmt: skip
    ids = prompt
    for _ in range(3):
        z = mix_logits(torch.stack([logits(ids, mask, base) for base in BASES]))
        ids = torch.cat([ids, z.argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
    assert torch.equal(found, ids)


def test_a_mixture_of_logits_is_a_geometric_mean():
    z = torch.randn(3, 2, 7, dtype=torch.float64)
    for confidence in ("logit", "probability", "entropy"):
        w = weights_of(z, confidence)
        torch.testing.assert_close(w.sum(0), torch.ones(2, dtype=torch.float64))
        mean = (z.log_softmax(-1) * w[..., None]).sum(0).exp()
        torch.testing.assert_close(mix_logits(z, confidence).softmax(-1), mean / mean.sum(-1, keepdim=True))
    torch.testing.assert_close(weights_of(z), z.amax(-1).softmax(0))
    shifted = z + torch.tensor([2.0, 0, 0])[:, None, None]
    assert (weights_of(shifted)[0] > weights_of(z)[0] + 1e-3).all()
    torch.testing.assert_close(weights_of(shifted, "entropy"), weights_of(z, "entropy"))


@torch.no_grad()
def test_attention_to_a_copy_follows_the_waveform():
    """Queries and keys that are one constant vector, before rotation: scores over distance are the waveform's."""
    layer = mh.Attention("gqa + rope(base=200.0)", 16, 1).double()
    for linear in (layer.project.q_proj, layer.project.k_proj):
        linear.weight.zero_()
        linear.weight[:, 0] = 1
    x = torch.zeros(1, 40, 16, dtype=torch.float64)
    x[..., 0] = 4
    with mh.capture(layer, what=("scores",), queries=39) as tape:
        layer(x)
    scores = tape[0].scores[0, 0, 0].flip(0)
    torch.testing.assert_close(scores / scores[0], waveform(200.0, 16, 40), atol=1e-6, rtol=1e-6)


def test_bases_that_cover_troughs():
    bases = choose_bases(3, 16, 600, first=100.0, step=50.0, last=900.0)
    assert bases[0] == 100 and len(set(bases)) == 3
    waves = torch.stack([waveform(base, 16, 600) for base in bases])
    own = waves[0]
    troughs = [s for s in range(1, 599) if own[s] < own[s - 1] and own[s] <= own[s + 1]]
    assert waves.amax(0)[troughs].mean() > own[troughs].mean() + 0.1
    for other in range(150, 901, 50):
        pair = torch.maximum(own, waveform(float(other), 16, 600))[troughs]
        assert pair.sum() <= torch.maximum(own, waves[1])[troughs].sum() + 1e-12
    assert math.isclose(float(waveform(500.0, 8, 3)[0]), 1)


def test_what_cannot_be_is_refused():
    def enter(model, *args):
        with attention_buckets(model, *args):
            pass

    with pytest.raises(OptionError, match="bases are one or more positive numbers"):
        enter(decoder(), [])
    with pytest.raises(OptionError, match="bases are one or more positive numbers"):
        enter(decoder(), [100.0, -1.0])
    with pytest.raises(OptionError, match="confidence='max' is none of logit, probability, entropy"):
        enter(decoder(), BASES, "max")
    with pytest.raises(ValueError, match="has no rotary base to vary"):
        enter(decoder("gqa + alibi"))
    with pytest.raises(ValueError, match="no attention of ours; adopt it first"):
        enter(torch.nn.Linear(2, 2))
    with pytest.raises(OptionError, match="with a trough"):
        choose_bases(2, 16, 2)
    with pytest.raises(OptionError, match="but there are 3 bases"):
        choose_bases(5, 16, 600, first=100.0, step=50.0, last=200.0)
