"""Small models of every kind that can be looked into."""

import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 8192}

DECODERS = {
    "llama": (LlamaForCausalLM, LlamaConfig, GROUPED),
    "mistral": (MistralForCausalLM, MistralConfig, {**GROUPED, "sliding_window": 5}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, GROUPED),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**GROUPED, "head_dim": 8}),
}


def decoder(kind="llama", **more):
    torch.manual_seed(0)
    model, config, sizes = DECODERS[kind]
    return sharpen(model(config(**{**sizes, **more})).eval())


def gpt2(**more):
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **more}
    config = GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
    return sharpen(GPT2LMHeadModel(config).eval())


def bert(**more):
    torch.manual_seed(0)
    return sharpen(BertModel(BertConfig(**SIZES, **more)).eval())


def vit():
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return sharpen(ViTModel(ViTConfig(**sizes, image_size=16, patch_size=4)).eval())


def t5():
    torch.manual_seed(0)
    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).eval()


def sharpen(model):
    """Larger weights, so that maps are far from even."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model


def ids(batch=2, tokens=9, vocab=99, seed=1):
    return torch.randint(vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))
