"""What a stock DeepSeek-V3 checkpoint cannot hold, said before a byte is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from manyheads.attention import Attention
from manyheads.attention.latent import LatentProject
from manyheads.attention.position.rope import Rope
from manyheads.convert.export.latent import Widths, rope_of
from manyheads.convert.export.report import ExportError
from manyheads.core.part import Part
from manyheads.core.spec import Spec
from manyheads.stack.pretrained import ManyheadsForCausalLM

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Base families whose blocks, apart from attention, are the stock class's: RMSNorm, gated SiLU, nothing between."""

_WHY = {
    "qk-norm": "normalises every head's queries and keys, and the stock class has no norm there",
    "window": "hides distant keys, and the stock class sees them all",
    "softmax": "caps its scores, and the stock class does not",
    "moh": "weighs heads by token, and the stock class weighs them alike",
}
_BLOCK = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def check(model: ManyheadsForCausalLM, dtype: torch.dtype) -> None:
    """Raise `ExportError` for the first thing that the stock class cannot express, with its layer and the reason."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ExportError(
            f"{str(dtype).removeprefix('torch.')} cannot hold latents of about 1e-6; give dtype=torch.bfloat16 or "
            "torch.float32"
        )
    for index, layer in enumerate(model.attentions):
        for why in _against_layer(layer):
            raise ExportError(f"layer {index}: {why}")
    counts = sorted({layer.heads for layer in model.attentions})
    if len(counts) > 1:
        raise ExportError(f"layers have {' and '.join(map(str, counts))} query heads; the stock class has one number")
    _check_blocks(model)


def _against_layer(layer: Attention) -> Iterator[str]:
    if layer.site.kv_source is not None:
        yield f"reads the cached rows of layer {layer.site.kv_source}; in the stock class every layer has its own"
    if layer.site.attn_source is not None:
        yield f"takes the attention weights of layer {layer.site.attn_source}; in the stock class it makes its own"
    for part in layer.spec.parts:
        if not _fits(part):
            why = _WHY.get(part.name, "has no place in the stock class (gqa or mla with rope has)")
            yield f"its part {part.name!r} {why}"
    for name, entry in layer.entries.items():
        if entry.packing is not None:
            yield f"caches {name!r} as {entry.packing}; the stock class caches floats"
    rope, project = rope_of(layer), layer.project
    if project.rotary("q") is None:
        yield "no channel of its keys rotates; the stock class needs a rotary key"
    if isinstance(project, LatentProject) and rope.fraction != 1.0:
        yield f"rope(fraction={rope.fraction}) leaves part of the rotary key still; the stock class turns it whole"


def _fits(part: Part) -> bool:
    return part.name in ("gqa", "mla") or isinstance(part, Rope) or (part.name == "softmax" and part == type(part)())


def _check_blocks(model: ManyheadsForCausalLM) -> None:
    """Everything around attention, by tensor names, so that an unknown extra is refused and not dropped."""
    base: Any = model.config.base
    inner = model.model.get_submodule(model.model.base_model_prefix)
    own = f".{model.config.attention_path.rsplit('.', 1)[-1]}."
    expected = {"embed_tokens.weight", "norm.weight"}
    expected |= {f"layers.{index}.{name}.weight" for index in range(len(model.attentions)) for name in _BLOCK}
    found = {name for name, _ in inner.named_parameters(remove_duplicate=False) if own not in name}
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        found.add("lm_head.bias")
    for name in sorted(found ^ expected):
        raise ExportError(
            f"{_layer_of(name)}the {base.model_type} model {'has' if name in found else 'lacks'} {name}; a block of "
            "the stock class is two RMSNorms and one gated feed-forward (no experts, LayerNorms, more norms or biases)"
        )
    if base.hidden_act not in ("silu", "swish"):
        raise ExportError(f"layer 0: its feed-forward uses {base.hidden_act!r}; the stock class is served with SiLU")
    if base.model_type not in FAMILIES:
        raise ExportError(
            f"models of type {base.model_type!r} may compute more than the stock class; known: {', '.join(FAMILIES)}"
        )
    eps = {cast(float, norm.variance_epsilon) for norm in inner.modules() if hasattr(norm, "variance_epsilon")}
    if len(eps) > 1:
        raise ExportError(f"its norms have different eps {sorted(eps)}; one residual scale serves one eps")


def _layer_of(name: str) -> str:
    words = name.split(".")
    return f"layer {words[1]}: " if words[0] == "layers" else ""


def check_widths(layers: Sequence[Attention], found: Sequence[Widths], pad_rank: int | None) -> None:
    """One table of frequencies for all layers, and a padded rank that holds the widest."""
    for index, layer in enumerate(found):
        if not torch.equal(layer.theta, found[0].theta):
            ours, first = (f"{len(found[i].theta)} pairs, {Spec((rope_of(layers[i]),))}" for i in (index, 0))
            raise ExportError(
                f"layer {index}: its rotary key ({ours}) turns by other frequencies than layer 0's ({first}); the "
                "stock class has one table for all layers. Convert every layer with one list rope(pairs=[…]), or use "
                "the format 'manyheads'"
            )
    widest = max(layer.rank for layer in found)
    if pad_rank is not None and pad_rank < widest:
        raise ExportError(f"pad_rank={pad_rank} is below the largest rank, {widest}")
