"""Adopted models give what they gave before, in every variant of their family."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    StaticCache,
)

from manyheads.convert.adopt import AdoptError, adopt, adopted_config
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
}
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
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
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
        assert "window" not in lines[0] and "window" in lines[-1]


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
    adopted = adopt(original)
    after = {id(parameter): parameter.data_ptr() for parameter in adopted.parameters()}
    assert before == after
    assert adopted.model is original and adopt(adopted) is adopted


@every
def test_gradients(case):
    original, adopted = both(case)
    grads = []
    for model in (original, adopted):
        inputs = prompts()
        model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
        grads.append(sorted(p.grad.norm().item() for p in model.parameters()))
    torch.testing.assert_close(torch.tensor(grads[0]), torch.tensor(grads[1]), atol=1e-5, rtol=1e-4)


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
    config = GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    untouched(AutoModelForCausalLM.from_config(config), r"'gpt2' are not adopted .*llama, mistral, qwen2, qwen3")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_changes_with_length_is_refused(kind):
    options: dict[str, Any] = {"factor": 2.0}
    if kind == "longrope":
        options |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    config = LlamaConfig(**COMMON, **rope(kind, **options))
    untouched(AutoModelForCausalLM.from_config(config), f"rope type '{kind}' is not adopted")


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
