"""Encoders and encoder-decoder models keep their class, and what they compute, with our attention inside."""

import copy
import itertools

import pytest
import torch
from tests.convert.tiny import looks_alike
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    CamembertConfig,
    CamembertModel,
    DeiTConfig,
    DeiTModel,
    DynamicCache,
    ElectraConfig,
    ElectraForPreTraining,
    EncoderDecoderCache,
    GPT2Config,
    RobertaConfig,
    RobertaForTokenClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
    ViTMSNConfig,
    ViTMSNModel,
    WhisperConfig,
    WhisperForAudioClassification,
    WhisperForConditionalGeneration,
    WhisperModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from manyheads import Attention, Cache
from manyheads.convert.adopt import AdoptError, adopt, adopted_config
from manyheads.core.part import Site
from manyheads.inspect import layers_of
from manyheads.stack.seam import SeamAttention

SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {
    **SIZES, "vocab_size": 61, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
IMAGE = {**SIZES, "image_size": 16, "patch_size": 4, "initializer_range": 0.3}
SOUND = {
    "vocab_size": 61, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
    "max_source_positions": 12, "max_target_positions": 40, "init_std": 0.3, "decoder_start_token_id": 1,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
WORDS, PIXELS, SOUNDS, BOTH = "gqa(bias=qkvo)", "gqa(bias=qkvo)", "gqa(bias=qvo)", ("gqa(bias=qvo)",)
CASES = {
    "bert": (BertModel, BertConfig, TEXT, WORDS),
    "bert, a classifier": (BertForSequenceClassification, BertConfig, TEXT, WORDS),
    "bert, of masked words": (BertForMaskedLM, BertConfig, TEXT, WORDS),
    "electra": (ElectraForPreTraining, ElectraConfig, TEXT | {"embedding_size": 20}, WORDS),
    "roberta": (RobertaForTokenClassification, RobertaConfig, TEXT, WORDS),
    "xlm-roberta": (XLMRobertaModel, XLMRobertaConfig, TEXT, WORDS),
    "camembert": (CamembertModel, CamembertConfig, TEXT, WORDS),
    "vit": (ViTModel, ViTConfig, IMAGE, PIXELS),
    "vit, a classifier without biases": (ViTForImageClassification, ViTConfig, IMAGE | {"qkv_bias": False}, "bias=o)"),
    "deit": (DeiTModel, DeiTConfig, IMAGE, PIXELS),
    "vit_msn": (ViTMSNModel, ViTMSNConfig, IMAGE, PIXELS),
    "whisper": (WhisperForConditionalGeneration, WhisperConfig, SOUND, SOUNDS),
    "whisper, without its head": (WhisperModel, WhisperConfig, SOUND, SOUNDS),
    "whisper, a classifier": (WhisperForAudioClassification, WhisperConfig, SOUND, SOUNDS),
}
every = pytest.mark.parametrize("case", CASES)
pytestmark = pytest.mark.filterwarnings("ignore:.*generation flags.*")


def stock(case):
    """A random model whose norms and biases are random too."""
    kind, config, options, _ = CASES[case]
    torch.manual_seed(0)
    model = kind(config(**options)).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name.lower() else 0.0, 0.3)
    return model


def both(case):
    original = stock(case)
    return original, adopt(copy.deepcopy(original))


def inputs(case, padded=True):
    generator = torch.Generator().manual_seed(1)
    if CASES[case][2] is SOUND:
        found = {"input_features": torch.randn(3, 8, 24, generator=generator)}
        if "classifier" not in case:
            ids = torch.randint(3, 61, (3, 9), generator=generator)
            found |= {"decoder_input_ids": ids, "decoder_attention_mask": left(9)} if padded else {
                "decoder_input_ids": ids
            }  # fmt: skip
        return found
    if "vit" in case or "deit" in case:
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator)}
    ids = torch.randint(3, 61, (3, 9), generator=generator)
    return {"input_ids": ids, "attention_mask": left(9).flip(1)} if padded else {"input_ids": ids}


def left(tokens, padding=(0, 4, 2)):
    return (torch.arange(tokens)[None] >= torch.tensor(padding)[:, None]).long()


def outputs(model, given):
    """What it returns, padding left out."""
    out, found = model(**given), {}
    mask = next((given[name] for name in ("attention_mask", "decoder_attention_mask") if name in given), None)
    for name in ("logits", "last_hidden_state", "pooler_output"):
        if (tensor := getattr(out, name, None)) is not None:
            rows = mask is not None and tensor.shape[:2] == mask.shape
            found[name] = tensor[mask.bool()] if rows else tensor
    assert found
    return found


@every
def test_outputs(case):
    original, adopted = both(case)
    assert type(adopted) is type(original) and adopt(adopted) is adopted
    with torch.no_grad():
        for padded in (False, True):
            given = inputs(case, padded)
            want = outputs(original, given)
            torch.testing.assert_close(outputs(adopted, given), want, atol=1e-5, rtol=1e-5)
    layers = layers_of(adopted)
    assert len(layers) == len(layers_of(original)) and all(isinstance(each.module, SeamAttention) for each in layers)
    assert all(CASES[case][3].strip(")") in str(each.module.spec) for each in layers)


@every
def test_parameters_are_the_very_objects_and_have_the_gradients_they_had(case):
    original = stock(case)
    twin, names = copy.deepcopy(original), {id(p): name for name, p in original.named_parameters()}
    adopted = adopt(original)
    assert adopted is original and {id(p) for p in adopted.parameters()} == names.keys()
    for model in (twin, adopted):
        sum(out.pow(2).sum() for out in outputs(model.train(), inputs(case)).values()).backward()
    want = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    got = {names[id(p)]: p.grad for p in adopted.parameters() if p.grad is not None}
    assert got.keys() == want.keys()
    for name, grad in got.items():
        torch.testing.assert_close(grad, want[name], atol=1e-4 * (1 + want[name].abs().max().item()), rtol=1e-3)


@every
def test_capture_ablate_and_measures_say_what_they_said_of_the_stock_model(case):
    original, adopted = both(case)
    given = inputs(case, padded=False)
    looks_alike(original, adopted, given, outputs)


@every
def test_saving_is_refused_and_the_state_is_there(case, tmp_path):
    original, adopted = both(case)
    with pytest.raises(AdoptError, match=f"a {type(original).__name__} whose attention is adopted has no config"):
        adopted.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    torch.save(adopted.state_dict(), tmp_path / "state.pt")
    fresh = adopt(CASES[case][0](original.config))
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
    with torch.no_grad():
        torch.testing.assert_close(outputs(fresh.eval(), inputs(case)), outputs(adopted, inputs(case)), atol=0, rtol=0)


def test_what_is_no_encoder_is_refused():
    for model, said in (
        (BertModel(BertConfig(**TEXT, is_decoder=True)), "this bert model cannot be adopted: as a decoder"),
        (BertLMHeadModel(BertConfig(**TEXT)), "a BertLMHeadModel makes a decoder of a bert"),
    ):
        modules = {name: id(module) for name, module in model.named_modules()}
        with pytest.raises(AdoptError, match=said):
            adopt(model)
        assert modules == {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(AdoptError, match="a whisper is no causal language model"):
        adopted_config(WhisperConfig(**SOUND))


def test_weights_of_an_unknown_variant_are_refused_before_anything_moves():
    model = stock("whisper")
    model.model.decoder.layers[2].encoder_attn.sink = torch.nn.Parameter(torch.zeros(2))
    modules = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(AdoptError, match=r"do not fit the spec gqa\(bias=qvo\).*sink"):
        adopt(model)
    assert modules == {name: id(module) for name, module in model.named_modules()}


# --- Whisper decodes


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_text_of_sound(options):
    original, adopted = both("whisper")
    given = {"input_features": inputs("whisper")["input_features"], "max_new_tokens": 10, "do_sample": False}
    with torch.no_grad():
        want = original.generate(**given, **options)
        assert want.shape[1] > 9 and torch.equal(adopted.generate(**given, **options), want)


@pytest.mark.parametrize(
    "make", [lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), Cache], ids=["stock", "ours"]
)
@pytest.mark.parametrize("block", [1, 4])
def test_cached_decoding_is_the_full_pass(make, block):
    original, adopted = both("whisper")
    given, cache = inputs("whisper", padded=False), make()
    ids = given["decoder_input_ids"]
    with torch.no_grad():
        want = original(**given).logits
        memory = adopted.model.encoder(given["input_features"])
        parts, context = [], memory.last_hidden_state.clone()
        for index, some in enumerate(ids.split(block, 1)):
            if index:
                memory.last_hidden_state.zero_()  # what is read again is in the cache
            parts.append(adopted(encoder_outputs=memory, decoder_input_ids=some, cache=cache, use_cache=True).logits)
        torch.testing.assert_close(torch.cat(parts, 1), want, atol=1e-5, rtol=1e-5)
        memory.last_hidden_state = context[:, :5]
        if isinstance(cache, Cache):
            with pytest.raises(ValueError, match="the cache holds a context of 12, not 5"):
                adopted(encoder_outputs=memory, decoder_input_ids=ids[:, :1], cache=cache)


@pytest.mark.parametrize("spec", ["gqa(kv_heads=2)", "mla"])
def test_a_stock_cache_keeps_a_context_of_any_layout(spec):
    """Also rows that are no keys and values of heads, which are packed into its two tensors."""
    layer = Attention(spec, 32, 4, site=Site(3, 2, causal=False, cross=True)).double().eval()
    x, context = torch.randn(2, 5, 32).double(), torch.randn(2, 7, 32).double()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with torch.no_grad():
        first = layer(x[:, :3], context=context, cache=cache)
        rest = layer(x[:, 3:], context=0 * context, cache=cache)
        torch.testing.assert_close(torch.cat([first, rest], 1), layer(x, context=context), atol=1e-10, rtol=0)
        assert cache.is_updated == {1: True}
        with pytest.raises(ValueError, match="the cache holds a context of 7, not 9"):
            layer(x, context=torch.randn(2, 9, 32).double(), cache=cache)


def test_a_stock_cache_without_a_place_for_contexts_is_refused():
    adopted = both("whisper")[1]
    layer = adopted.model.decoder.layers[0].encoder_attn
    with pytest.raises(ValueError, match=r"a DynamicCache would take the context anew .*EncoderDecoderCache"):
        layer(torch.randn(1, 2, 32), key_value_states=torch.randn(1, 5, 32), cache=DynamicCache())


def test_families_have_names_of_their_own():
    """No two adapters of a model type name the same modules."""
    from manyheads.convert.adopt import FAMILIES

    for a, b in itertools.combinations(FAMILIES, 2):
        assert not {*a.model_types} & {*b.model_types} or a.path != b.path
    assert GPT2Config.model_type in {kind for family in FAMILIES for kind in family.model_types}
