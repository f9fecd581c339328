"""Several models grown from one seed, mixed into one: attention by `bam`, feed-forwards as experts of `moe`.

Source: Zhang et al. 2024, arXiv 2408.08274.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from manyheads.convert.adopt.family import make
from manyheads.core.feed import Feed
from manyheads.core.part import Part, Site
from manyheads.core.registry import find_feed
from manyheads.core.spec import Spec, printed
from manyheads.stack.config import ManyheadsConfig
from manyheads.stack.pretrained import ManyheadsForCausalLM
from manyheads.stack.sources import per_layer

BLOCK = "model.decoder.stack.blocks."


def upcycle(
    config: ManyheadsConfig, states: Sequence[Mapping[str, Tensor]], *, kv: Literal["expert", "shared"] = "expert",
    top: int = 1, renormalise_topk: bool = True,
) -> ManyheadsForCausalLM:  # fmt: skip
    """One model of N dense ones, `ManyheadsForCausalLM` with our own decoder.

    What became an expert is copied; everything else (norms, embeddings, the head, and with kv=shared keys and values)
    is the mean; routers are new. N equal models give the model that they are, whatever the routers say, if gates sum to
    one.

    Args:
        config: of each of them (a family's models first become ours by `to_own(adopt(model))`); attention by `gqa` in
            every layer, feed-forwards `swiglu`, `gelu` or `none`.
        states: their state dicts.
        kv: whether experts keep keys and values of their own, see `bam`.
        top: feed-forward experts a token.
        renormalise_topk: gates of the chosen sum to one (their gradient is that of p / stop(Σ p), so that one expert
            trains its router too). False is the paper's p_i, which makes a new model's feed-forwards N times too weak.
    """
    specs, ffns = _lines(config, len(states), kv, top, renormalise_topk)
    mixed = copy.deepcopy(config)
    mixed.specs, mixed.ffn = specs, ffns
    model = ManyheadsForCausalLM(mixed)
    wanted = {*states[0]}
    for index, state in enumerate(states):
        if {*state} != wanted or any(state[name].shape != states[0][name].shape for name in wanted):
            odd = sorted({*state} ^ wanted) or [name for name in state if state[name].shape != states[0][name].shape]
            raise ValueError(f"model {index} and model 0 do not agree about {odd[0]}")
    made = {}
    for name in states[0]:
        new, tensor = _mixed(name, [state[name] for state in states], shared=kv == "shared")
        made[new] = tensor
    missing, unexpected = model.load_state_dict(made, strict=False)
    if unexpected or any("router" not in name for name in missing):
        raise ValueError(f"not of such a model: {[*unexpected, *(n for n in missing if 'router' not in n)]}")
    nn.Module.to(model, next(iter(states[0].values())).dtype)
    return model


def _lines(config: ManyheadsConfig, count: int, kv: str, top: int, renormalise: bool) -> tuple[list[str], list[str]]:
    """Spec and feed-forward of every layer of the mixture."""
    if not count:
        raise ValueError("no models to mix")
    if config.base is not None or any(source is not None for source in (*config.kv_source, *config.attn_source)):
        raise ValueError("models to mix are our own decoder (base=None), each layer with rows of its own")
    layers = config.num_hidden_layers
    specs = [_spec(line, count, kv, Site(layer, layers)) for layer, line in enumerate(config.specs)]
    ffns = [_ffn(line, count, top, renormalise) for line in per_layer(config.ffn, layers, "feed-forwards")]
    return specs, ffns


def _spec(line: str, count: int, kv: str, site: Site) -> str:
    parts: list[Part] = []
    for part in Spec.parse(line).resolve(site).parts:
        if part.stage == "project":
            options = {field.name: getattr(part, field.name) for field in fields(part)}
            taken = {name: options.pop(name, None) for name in ("kv_heads", "head_dim", "bias")}
            if part.name != "gqa" or any(value is not None for value in options.values()):
                raise ValueError(f"layer {site.layer}: experts are plain gqa, not {printed(part)}")
            if taken["bias"] not in ("none", "qkv"):
                raise ValueError(f"layer {site.layer}: the output of an expert has no bias, so not {printed(part)}")
            part = make("bam", experts=count, kv=kv, **taken)
        elif "alike heads" in part.breaks:
            raise ValueError(f"layer {site.layer}: {part.name} tells heads apart by number, and experts renumber them")
        parts.append(part)
    return str(Spec(tuple(parts)))


def _ffn(line: str, count: int, top: int, renormalise: bool) -> str:
    feed, dense = Feed.parse(line), {"swiglu": {}, "gelu": {"act": "gelu", "bias": True}}
    if feed.name == "none":
        return "none"
    if feed.name not in dense:
        raise ValueError(f"a feed-forward {feed} does not become an expert; swiglu and gelu do")
    renorm = "detach" if renormalise else "none"
    options: dict[str, Any] = {"experts": count, "top": top, "renorm": renorm, "z": 0.1, **dense[feed.name]}
    return str(find_feed("moe")(**options))


def _mixed(name: str, tensors: Sequence[Tensor], shared: bool) -> tuple[str, Tensor]:
    """The name and the value of a tensor of the mixture, from those of the models."""
    if name.startswith(BLOCK):
        _, slot, *rest = name.removeprefix(BLOCK).split(".")
        if slot == "ffn":
            module, kind = rest
            own = module if kind == "weight" else f"{module}_bias"
            return name.replace(f"ffn.{module}.{kind}", f"ffn.experts.{own}"), torch.stack([*tensors])
        if slot == "attention" and rest[0] == "project":
            module = rest[1]
            if module == "o_proj":
                return name, torch.cat([*tensors], 1)
            if module == "q_proj" or not shared:
                return name, torch.cat([*tensors])
    wide = torch.stack([tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors])
    return name, wide.mean(0).to(tensors[0].dtype)
