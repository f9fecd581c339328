"""Adopted models give what they gave before, in every variant of their family."""

import copy
from typing import Any

import pytest
import torch
from tests.convert.tiny import looks_alike
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    StaticCache,
)

from manyheads.convert.adopt import AdoptError, adopt, adopted_config, family_of
from manyheads.stack import ManyheadsForCausalLM

COMMON: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0, "initializer_range": 0.15,
}  # fmt: skip


def rope(kind, **options):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | options}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 8.0, "original_max_position_embeddings": 32}
GEMMA = {
    "head_dim": 10, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 0.7, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
CAP = "softmax(cap=0.7)"
GLOBAL_LOCAL = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5e2, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
}
GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

CASES: dict[str, tuple[type, dict[str, Any], str]] = {
    "llama": (LlamaConfig, {}, "gqa(kv_heads=2) + rope"),
    "llama, biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}, "gqa(kv_heads=2, bias=qkvo) + rope"),
    "llama, tied": (LlamaConfig, {"tie_word_embeddings": True}, "gqa(kv_heads=2) + rope"),
    "llama, untied": (LlamaConfig, {"tie_word_embeddings": False}, "gqa(kv_heads=2) + rope"),
    "llama, as many key heads": (LlamaConfig, {"num_key_value_heads": 6}, "gqa + rope"),
    "llama, one key head": (LlamaConfig, {"num_key_value_heads": 1}, "gqa(kv_heads=1) + rope"),
    "llama, 9 and 3 heads": (
        LlamaConfig,
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
        "gqa(kv_heads=3) + rope",
    ),
    "llama, wide heads": (LlamaConfig, {"head_dim": 10}, "gqa(kv_heads=2, head_dim=10) + rope"),
    "llama, another base": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e2}},
        "base=500.0)",
    ),
    "llama, linear": (LlamaConfig, rope("linear", factor=4.0), "rope(scaling=linear, factor=4.0)"),
    "llama, llama3": (LlamaConfig, rope("llama3", **LLAMA3), "scaling=llama3, factor=4.0, original=32"),
    "llama, yarn": (LlamaConfig, rope("yarn", **YARN), "scaling=yarn, factor=8.0, original=32"),
    "llama, yarn by hand": (
        LlamaConfig,
        rope("yarn", **YARN, beta_fast=8.0, beta_slow=2.0, attention_factor=1.3, truncate=False),
        "fast=8.0, slow=2.0, truncate=false, magnitude=1.3",
    ),
    "llama, a fraction that it ignores": (
        LlamaConfig,
        rope("default", partial_rotary_factor=0.5),
        "gqa(kv_heads=2) + rope",
    ),
    "qwen2": (Qwen2Config, {}, "gqa(kv_heads=2, bias=qkv) + rope"),
    "qwen2, some layers slide": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        "gqa(kv_heads=2, bias=qkv) + rope + window(size=5)",
    ),
    "qwen3": (Qwen3Config, {"head_dim": 10}, "gqa(kv_heads=2, head_dim=10) + qk-norm + rope"),
    "qwen3, heads that do not divide": (
        Qwen3Config,
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 40, "head_dim": 6},
        "gqa(kv_heads=3, head_dim=6) + qk-norm + rope",
    ),
    "qwen3, eps": (Qwen3Config, {"head_dim": 8, "rms_norm_eps": 1e-3}, "qk-norm(eps=0.001)"),
    "qwen3, biases, some layers slide": (
        Qwen3Config,
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        "+ window(size=5)",
    ),
    "mistral": (MistralConfig, {"sliding_window": None}, "gqa(kv_heads=2) + rope"),
    "mistral, slides": (MistralConfig, {"sliding_window": 5}, "gqa(kv_heads=2) + rope + window(size=5)"),
    "phi3": (Phi3Config, {"sliding_window": None}, "gqa(kv_heads=2) + rope"),
    "phi3, half turns, slides": (
        Phi3Config,
        {"sliding_window": 5, "num_key_value_heads": 6} | rope("default", partial_rotary_factor=0.5),
        "gqa + rope(fraction=0.5) + window(size=5)",
    ),
    "gemma2, some layers slide": (Gemma2Config, GEMMA, f"gqa(kv_heads=2, head_dim=10, scale={7**-0.5}) + rope + {CAP}"),
    "gemma2, biases, no cap, the scale of its width": (
        Gemma2Config,
        GEMMA | {"attn_logit_softcapping": None, "attention_bias": True, "query_pre_attn_scalar": 10},
        "gqa(kv_heads=2, head_dim=10, bias=qkvo) + rope",
    ),
    "gemma3, some layers slide": (
        Gemma3TextConfig,
        GEMMA | {"rms_norm_eps": 1e-3, "rope_parameters": GLOBAL_LOCAL},
        f"scale={7**-0.5}) + qk-norm(eps=0.001, centred=true) + rope(base=500.0, scaling=linear, factor=4.0)",
    ),
    "gpt2": (GPT2Config, GPT2, "gqa(bias=qkvo) + rope(pairing=none)"),
    "gpt2, scaled by layer": (
        GPT2Config,
        GPT2 | {"scale_attn_by_inverse_layer_idx": True},
        f"gqa(bias=qkvo, scale={8**-0.5 / 2}) + rope(pairing=none)",
    ),
    "gpt2, not scaled": (
        GPT2Config,
        GPT2 | {"scale_attn_weights": False},
        "gqa(bias=qkvo, scale=1.0) + rope(pairing=none)",
    ),
}
FUSED = {case for case in CASES if case.startswith(("phi3", "gpt2"))}
every = pytest.mark.parametrize("case", CASES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*generation flags.*"),
    pytest.mark.filterwarnings("ignore:.*RoPE scaling factor.*"),
]


def stock(case):
    """A random model whose norms and biases are random too, so that a weight in the wrong place shows."""
    kind, options, _ = CASES[case]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**{**COMMON, **options})).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name or ".ln_" in name else 0.0, 0.3)
    return model


def both(case):
    """The model as it was, and adopted."""
    original = stock(case)
    return original, adopt(copy.deepcopy(original))


def prompts(padding=(0, 5, 2), tokens=14):
    ids = torch.randint(3, 61, (len(padding), tokens), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(tokens)[None] >= torch.tensor(padding)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@every
def test_specs(case):
    said = CASES[case][2]
    lines = adopted_config(CASES[case][0](**{**COMMON, **CASES[case][1]})).specs
    assert lines[-1].endswith(said) if said.startswith("gqa") else said in lines[-1]
    if "some" in case:
        assert {"window" in lines[0], "window" in lines[-1]} == {False, True}


@every
def test_logits(case):
    original, adopted = both(case)
    inputs = prompts()
    seen = inputs["attention_mask"].bool()
    with torch.no_grad():
        whole = original(inputs["input_ids"]).logits
        torch.testing.assert_close(adopted(inputs["input_ids"]).logits, whole, atol=1e-5, rtol=0)
        padded = original(**inputs).logits[seen]
        torch.testing.assert_close(adopted(**inputs).logits[seen], padded, atol=1e-5, rtol=0)
        far = torch.randint(3, 61, (1, 80))
        torch.testing.assert_close(adopted(far).logits, original(far).logits, atol=1e-5, rtol=0)


@every
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}], ids=str)
def test_text(case, options):
    original, adopted = both(case)
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    assert torch.equal(adopted.generate(**prompts(), **options), original.generate(**prompts(), **options))


@every
def test_parameters_are_the_very_objects(case):
    original = stock(case)
    before = {id(parameter): parameter.data_ptr() for parameter in original.parameters()}
    memory = {parameter.untyped_storage().data_ptr() for parameter in original.parameters()}
    adopted = adopt(original)
    after = {id(parameter): parameter.data_ptr() for parameter in adopted.parameters()}
    assert before == after or case in FUSED
    assert memory == {parameter.untyped_storage().data_ptr() for parameter in adopted.parameters()} or "gpt2" in case
    assert adopted.model is original and adopt(adopted) is adopted


def as_stock(adopted, values):
    """Tensors by parameter of an adopted model, under the names of the family's."""
    path, found = adopted.config.attention_path, dict(values)
    for index in range(len(adopted.attentions)):
        place = path.format(index) + "."
        ours = {name.removeprefix(place): found.pop(name) for name in [*found] if name.startswith(place)}
        found |= {place + name: t for name, t in family_of(adopted.config.base).tensors(ours).items()}
    return found


@every
def test_gradients(case):
    original, adopted = both(case)
    inputs = prompts()
    seen = inputs["attention_mask"].bool()
    labels = inputs["input_ids"].where(seen & seen.roll(1, 1), -100)  # none that padding predicts
    for model in (original, adopted):
        model.train()(**inputs, labels=labels).loss.backward()
    want = {name: parameter.grad for name, parameter in original.named_parameters()}
    got = as_stock(adopted, ((name, parameter.grad) for name, parameter in adopted.model.named_parameters()))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-3)


@every
def test_save_and_load(case, tmp_path):
    original, adopted = both(case)
    adopted.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is ManyheadsForCausalLM and again.config.specs == adopted.config.specs
    tied = original.config.tie_word_embeddings
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == tied
    with torch.no_grad():
        assert torch.equal(again(**prompts()).logits, adopted(**prompts()).logits)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("phi3", "gemma", "gpt2"))])
def test_heads_do_what_they_did(case):
    looks_alike(*both(case), {"input_ids": prompts()["input_ids"]}, lambda model, given: {"it": model(**given).logits})


def test_mode_dtype_and_generation_settings_stay():
    original = stock("qwen3").bfloat16().train()
    original.generation_config.max_new_tokens = 3
    adopted = adopt(original)
    assert adopted.training and all(layer.training for layer in adopted.attentions)
    assert adopted.dtype == torch.bfloat16 and {p.dtype for p in adopted.parameters()} == {torch.bfloat16}
    assert adopted.eval().generate(**prompts()).shape == (3, 17)


def untouched(model, said):
    """Adopting raises, and the model is what it was."""
    modules = {name: id(module) for name, module in model.named_modules()}
    state = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    implementation, hooks = model.config._attn_implementation, sum(len(m._forward_pre_hooks) for m in model.modules())
    with pytest.raises(AdoptError, match=said):
        adopt(model)
    assert modules == {name: id(module) for name, module in model.named_modules()}
    for name, p in model.named_parameters():
        assert state[name][0] == id(p) and torch.equal(state[name][1], p)
    assert model.config._attn_implementation == implementation
    assert hooks == sum(len(m._forward_pre_hooks) for m in model.modules())


def test_an_unknown_family_is_refused():
    config = OPTConfig(vocab_size=61, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4)
    untouched(AutoModelForCausalLM.from_config(config), r"'opt' are not adopted .*llama, mistral, phi3, qwen2, qwen3")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Gemma2Config(**COMMON, head_dim=8, use_bidirectional_attention=True), "gemma2 .*: it looks both ways"),
        (Gemma3TextConfig(**COMMON, head_dim=8, use_bidirectional_attention=True), "gemma3_text .*: it looks both"),
        (GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True), "gpt2 .*: it has cross-"),
    ],
    ids=["gemma2", "gemma3", "gpt2"],
)
def test_what_no_causal_layer_does_is_refused(config, said):
    untouched(AutoModelForCausalLM.from_config(config), said)


def test_a_model_without_its_head_is_refused():
    untouched(AutoModel.from_config(LlamaConfig(**COMMON)), "a LlamaModel is no causal language model")


def test_dropout_stays_where_it_was(tmp_path):
    """GPT-2 drops outputs inside its attention module, which no module around it does."""
    config = GPT2Config(**COMMON, attn_pdrop=0.25, resid_pdrop=0.5)
    adopted = adopt(AutoModelForCausalLM.from_config(config))
    adopted.save_pretrained(tmp_path)
    for model in (adopted, AutoModelForCausalLM.from_pretrained(tmp_path)):
        layer = model.train().attentions[1]
        assert (layer.dropout, layer.output_dropout) == (0.25, 0.5)
        layer.dropout = 0.0
        x = torch.randn(2, 30, 48)
        y, dropped = layer.eval()(x)[0], layer.train()(x)[0]
        kept = dropped != 0
        assert 0.4 < kept.float().mean() < 0.6
        torch.testing.assert_close(dropped[kept], 2 * y[kept])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_changes_with_length_is_refused(kind):
    """Also that of Phi-3 with long contexts, which turns by other frequencies beyond its first 4,096 tokens."""
    options: dict[str, Any] = {"factor": 2.0}
    if kind == "longrope":
        options |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    config = LlamaConfig(**COMMON, **rope(kind, **options))
    said = f"rope type '{kind}' is not adopted: its frequencies change with the length"
    untouched(AutoModelForCausalLM.from_config(config), said)
    if kind == "longrope":
        untouched(AutoModelForCausalLM.from_config(Phi3Config(**COMMON, **rope(kind, **options))), said)


def test_a_fraction_that_the_family_cannot_run_is_refused():
    config = LlamaConfig(**COMMON, **rope("linear", factor=2.0, partial_rotary_factor=0.5))
    untouched(
        AutoModelForCausalLM.from_config(config), "partial_rotary_factor=0.5 with rope type 'linear': llama cannot"
    )


def test_weights_of_an_unknown_variant_are_refused():
    model = stock("llama")
    model.model.layers[1].self_attn.sink = torch.nn.Parameter(torch.zeros(6))
    untouched(model, "attention weights do not fit the spec gqa.*sink")


def test_a_model_with_other_widths_than_its_config_is_refused():
    model = stock("llama")
    model.model.layers[1].self_attn.k_proj = torch.nn.Linear(48, 8, bias=False)
    untouched(model, "attention weights do not fit the spec gqa.*k_proj")


@pytest.mark.slow
def test_compiled_static_decode():
    original, adopted = both("llama, 9 and 3 heads")
    ids = prompts((0, 0))["input_ids"]
    with torch.no_grad():
        want = original(ids).logits
        step = torch.compile(adopted.forward, fullgraph=True)
        cache = StaticCache(adopted.config.get_text_config(), max_cache_len=32)
        got = [adopted(ids[:, :8], cache=cache).logits]
        for at in range(8, 14):
            place = torch.full((2, 1), at)
            mask = (torch.arange(32) <= at)[None, None, None].expand(2, 1, 1, -1)
            got.append(step(input_ids=ids[:, at : at + 1], attention_mask=mask, position_ids=place, cache=cache).logits)
    torch.testing.assert_close(torch.cat(got, 1), want, atol=1e-4, rtol=1e-4)
