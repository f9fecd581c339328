"""A family's model as our own decoder, whose blocks can do what a family's cannot: other residuals, loops."""

from __future__ import annotations

import torch

from manyheads.convert.adopt.family import AdoptError
from manyheads.stack.config import OWN
from manyheads.stack.pretrained import ManyheadsConfig, ManyheadsForCausalLM

NAMES = {
    "model.embed_tokens.": "decoder.embedding.",
    "model.norm.": "decoder.norm.",
    "lm_head.": "decoder.head.",
    "model.layers.": "decoder.stack.blocks.",
    ".input_layernorm.": ".attention_norm.",
    ".self_attn.": ".attention.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".mlp.": ".ffn.",
}
"""What a Llama-like model calls its modules, and what ours are called."""


def to_own(model: ManyheadsForCausalLM) -> ManyheadsForCausalLM:
    """An adopted model of RMS norms and SwiGLU (Llama, Mistral, Qwen2, Qwen3) as our decoder, with its very tensors.

    The logits stay (fp32 within 1e-5); text that is padded on the left counts positions from its first token. A model
    with weights that our decoder has no place for raises `AdoptError`.
    """
    base, old = model.config.base, model.config
    if base is None:
        return model
    if getattr(base, "hidden_act", None) != "silu":
        raise AdoptError(f"its feed-forward is a {getattr(base, 'hidden_act', None)!r}; that of our decoder is 'silu'")
    fields = {name: getattr(base, name) for name in OWN if hasattr(base, name)}
    tokens = {name: getattr(old, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = ManyheadsConfig(
        specs=old.specs, heads=old.heads, kv_source=old.kv_source, attn_source=old.attn_source, notes=old.notes,
        aux_weight=old.aux_weight, tie_word_embeddings=old.tie_word_embeddings, dtype=model.dtype, **tokens, **fields,
    )  # fmt: skip
    state = {}
    for name, tensor in model.model.state_dict(keep_vars=True).items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        state[f"model.{name}"] = tensor
    with torch.device("meta"):
        made = ManyheadsForCausalLM(config)
    wanted = {name: [*tensor.shape] for name, tensor in made.state_dict().items()}
    wrong = {name for name in {*wanted, *state} if name not in state or wanted.get(name) != [*state[name].shape]}
    if wrong:
        raise AdoptError(
            f"our decoder has no place for all of a {type(model.model).__name__}: {', '.join(sorted(wrong))}"
        )
    made.load_state_dict(state, assign=True)
    made.tie_weights()
    if model.generation_config is not None:
        made.generation_config = model.generation_config
    return made.train(model.training)
