"""A model as a stock DeepSeek-V3 checkpoint: unmodified classes load it, and no code of ours is needed to run it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerBase

from manyheads.attention.project.gqa import GQAProject
from manyheads.convert.export.atomic import new_folder
from manyheads.convert.export.frequencies import rope_config
from manyheads.convert.export.latent import Widths, read, rope_of, widths
from manyheads.convert.export.refuse import check, check_widths
from manyheads.convert.export.reload import compare_reloaded
from manyheads.convert.export.report import ExportReport
from manyheads.convert.export.shards import write_shards
from manyheads.convert.export.stock import EPS, layer_tensors
from manyheads.stack.pretrained import ManyheadsForCausalLM

_KERNEL_RANK, _KERNEL_ROPE, _KERNEL_NOPE = 512, 64, 32


@torch.no_grad()
def to_deepseek(
    model: ManyheadsForCausalLM,
    folder: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
    pad_rank: int | None = None,
) -> ExportReport:
    """Write a model as `DeepseekV3ForCausalLM` to a new folder, reload it with the stock class and compare.

    Served, with the same function up to rounding: latent layers with and without norms, and grouped-query layers
    (see `export.latent`), on Llama-like bodies; ranks may differ by layer. Norms that the stock class adds are made
    constant (see `export.stock`). The file is for inference: latents of about 1e-6 do not survive an optimiser's steps.

    Args:
        model: is left as it is.
        folder: must not exist.
        dtype: float32 or bfloat16, default the model's. One rounding, after everything is folded.
        pad_rank: latent width of the file, filled up with zeros; kernels for MLA want 512. Un-rotated key channels
            are then filled up to 32 as well.

    Raises:
        ExportError: the stock class cannot hold the model (said before anything is written), or the file reads back
            as another model.
        FileExistsError: `folder` exists.
        OSError: the disk is full.
    """
    dtype = dtype or model.dtype
    check(model, dtype)
    layers = [widths(attention) for attention in model.attentions]
    check_widths(model.attentions, layers, pad_rank)
    to = _widest(layers, model.attentions[0].dim, pad_rank)
    config = _config(model, to, dtype)
    with torch.device("meta"):
        numbers = sum(parameter.numel() for parameter in DeepseekV3ForCausalLM(_parsed(config)).parameters())
    bounds: list[float] = []
    with new_folder(folder, needed=numbers * dtype.itemsize) as work:
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        size = write_shards(((name, each.to(dtype)) for name, each in _tensors(model, to, bounds)), work)
        model.generation_config.save_pretrained(work)
        if tokenizer is not None:
            tokenizer.save_pretrained(work)
        found = compare_reloaded(model, work, dtype)
    kind = "default" if config["rope_scaling"] is None else config["rope_scaling"]["rope_type"]
    return ExportReport(
        folder=Path(folder), format="deepseek", loads_as="DeepseekV3ForCausalLM", dtype=config["dtype"], bytes=size,
        cache_floats=to.rank + to.rope, difference=found.difference, kl=found.kl, rank=to.rank, rope_dim=to.rope,
        nope_dim=to.nope, v_dim=to.v, rope_type=kind, bound=max(bounds), lossless=_lossless(model),
        transformers_only=_transformers_only(to, kind), notes=_notes(model, layers, to, dtype),
    )  # fmt: skip


def _widest(layers: list[Widths], dim: int, pad_rank: int | None) -> Widths:
    """Widths that hold every layer. When any needs a query latent, the others get one of the width of x."""
    latent_queries = any(layer.q_rank for layer in layers)
    return layers[0]._replace(
        rank=pad_rank or max(layer.rank for layer in layers),
        nope=max(*(layer.nope for layer in layers), _KERNEL_NOPE if pad_rank else 0),
        v=max(layer.v for layer in layers),
        q_rank=max(layer.q_rank or dim for layer in layers) if latent_queries else 0,
        bias=any(layer.bias for layer in layers),
    )


def _config(model: ManyheadsForCausalLM, to: Widths, dtype: torch.dtype) -> dict[str, Any]:
    """config.json; rope_theta and rope_scaling are read by old and new versions of transformers alike."""
    base: Any = model.config.base
    heads = model.attentions[0].heads
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": str(dtype).removeprefix("torch."),
        "transformers_version": transformers.__version__,
        "vocab_size": len(_weight(model.get_input_embeddings())),
        "hidden_size": base.hidden_size,
        "intermediate_size": base.intermediate_size,
        "num_hidden_layers": base.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": to.rank,
        "q_lora_rank": to.q_rank or None,
        "qk_nope_head_dim": to.nope,
        "qk_rope_head_dim": to.rope,
        "v_head_dim": to.v,
        "hidden_act": "silu",
        "attention_bias": to.bias,
        "attention_dropout": getattr(base, "attention_dropout", 0.0),
        "rms_norm_eps": EPS,
        "rope_interleave": True,
        **rope_config(to.theta, rope_of(model.attentions[0]).base, base.max_position_embeddings),
        "max_position_embeddings": base.max_position_embeddings,
        "initializer_range": base.initializer_range,
        "use_cache": True,
        "tie_word_embeddings": False,
        **{name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **_dense(base.num_hidden_layers),
    }


def _dense(layers: int) -> dict[str, Any]:
    """No layer has experts; the numbers are what servers need to find."""
    return {
        "first_k_dense_replace": layers, "moe_layer_freq": 1, "n_routed_experts": 1, "n_shared_experts": 1,
        "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0,
    }  # fmt: skip


def _parsed(config: dict[str, Any]) -> DeepseekV3Config:
    return DeepseekV3Config.from_dict(json.loads(json.dumps(config)))


def _tensors(model: ManyheadsForCausalLM, to: Widths, bounds: list[float]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the file, float32, a layer at a time.

    A source eps other than the stock 1e-6 is met by scaling the residual stream by a = √(1e-6/eps), since
    RMSNorm_{1e-6}(a·h) = RMSNorm_eps(h): embeddings and all that is added to the stream are scaled, norms are not.
    """
    inner: Any = model.model.get_submodule(model.model.base_model_prefix)
    a = (EPS / inner.norm.variance_epsilon) ** 0.5
    yield "model.embed_tokens.weight", _wide(_weight(model.get_input_embeddings())) * a
    for index, (block, attention) in enumerate(zip(inner.layers, model.attentions, strict=True)):
        prefix = f"model.layers.{index}."
        gain = _wide(block.input_layernorm.weight)
        tensors, bound = layer_tensors(read(attention), to, gain, a)
        bounds.append(bound)
        yield from ((f"{prefix}self_attn.{name}", tensor) for name, tensor in tensors.items())
        yield f"{prefix}input_layernorm.weight", gain
        yield f"{prefix}post_attention_layernorm.weight", _wide(block.post_attention_layernorm.weight)
        yield f"{prefix}mlp.gate_proj.weight", _wide(block.mlp.gate_proj.weight)
        yield f"{prefix}mlp.up_proj.weight", _wide(block.mlp.up_proj.weight)
        yield f"{prefix}mlp.down_proj.weight", _wide(block.mlp.down_proj.weight) * a
    yield "model.norm.weight", _wide(inner.norm.weight)
    yield "lm_head.weight", _wide(_weight(model.get_output_embeddings()))


def _weight(module: nn.Module) -> Tensor:
    return cast(Tensor, module.weight)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.float32)


def _lossless(model: ManyheadsForCausalLM) -> tuple[str, ...]:
    said = {"gqa": "grouped-query attention of the source", "mla": "latent attention as converted"}
    parts = {part.name for spec in model.specs for part in spec.parts}
    return (*(text for name, text in said.items() if name in parts), "feed-forwards, norms and the output head")


def _transformers_only(to: Widths, kind: str) -> tuple[str, ...]:
    """What vLLM's reading of the same file does otherwise."""
    said = []
    if kind != "default":
        said.append(f"rope type {kind!r}: vLLM replaces it by a scaling of its own, so the text is wrong there")
    if to.bias:
        said.append("attention biases: vLLM drops them without a word, so the text is wrong there")
    if to.nope < _KERNEL_NOPE:
        said.append(f"{to.nope} un-rotated key channels: vLLM may want {_KERNEL_NOPE}; pad_rank fills them up")
    if (to.rank, to.rope) != (_KERNEL_RANK, _KERNEL_ROPE):
        said.append(
            f"head width {to.rank} + {to.rope}: vLLM's MLA kernels take 512 + 64 (pad_rank=512 with rope_dim 64); "
            "with VLLM_MLA_DISABLE=1 it runs, and caches all heads"
        )
    return tuple(said)


def _notes(model: ManyheadsForCausalLM, layers: list[Widths], to: Widths, dtype: torch.dtype) -> tuple[str, ...]:
    said = ["for inference only: training moves latents of about 1e-6 by more than their size"]
    if model.config.tie_word_embeddings:
        said.append("tied embeddings are written twice (the residual scale and vLLM both need them apart)")
    ranks = sorted({layer.rank for layer in layers})
    if ranks != [to.rank]:
        span = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        said.append(f"ranks of {span} are padded with zeros to {to.rank}")
    eps = model.config.base.rms_norm_eps
    if eps != EPS:
        said.append(f"the residual stream is scaled by √(1e-6/{eps:g}), so that norms with eps 1e-6 do the same")
    if to.q_rank and any(not layer.q_rank for layer in layers):
        said.append(f"layers without a query latent get one of {to.q_rank}")
    groups = max((layer.layout.kv for layer in model.attentions if isinstance(layer.project, GQAProject)), default=1)
    if groups > 1:
        said.append(
            f"{groups} rotary keys stacked into one: the cache is the source's, scores cost {groups} times more"
        )
    if dtype == torch.bfloat16:
        said.append("bfloat16: one rounding, after scales and gains are folded")
    return tuple(said)
