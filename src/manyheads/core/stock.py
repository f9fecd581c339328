"""Attention layers of stock transformers models: found by how they call attention, watched where they do.

A watched module's call goes through the model's own attention function with the model's own tensors, so that its
outputs stay the same bits. The function is reached through transformers' registry of attention functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from manyheads.core.kernel import Bias, Call, attend
from manyheads.core.mask import Axis, Given, Mask, Rule, causal
from manyheads.core.tap import Tap

_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_watched: dict[int, tuple[Tap, ...]] = {}
_own: dict[str, Any] = {}
"""What was in the registry before the first module was watched, by name; None where nothing was."""


def calls_attention(module: nn.Module) -> bool:
    """Whether a module calls attention through transformers' registry."""
    code = getattr(_forward(module), "__code__", None)
    return code is not None and _REGISTRY in code.co_names and type(module).__module__.startswith("transformers.")


def _forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def heads_of(module: nn.Module) -> int | None:
    """Its query heads."""
    config = getattr(module, "config", None)
    names = ("num_heads", "num_attention_heads", "n_heads", "n_head")
    found = (getattr(place, name, None) for place in (module, config) for name in names)
    return next((int(count) for count in found if isinstance(count, int)), None)


def output_of(model: nn.Module, name: str, module: nn.Module) -> nn.Module | None:
    """The output projection of a module: its own, or that of the block around it (BERT)."""
    parent = model.get_submodule(name.rpartition(".")[0])
    for place, names in ((module, ("o_proj", "out_proj", "c_proj", "o", "dense")), (parent, ("output.dense",))):
        for path in names:
            try:
                return place.get_submodule(path)
            except AttributeError:
                continue
    return None


def watch(module: nn.Module, tap: Tap) -> None:
    """Let a tap stand by at a module."""
    if not _watched:
        _install()
    _watched[id(module)] = (*_watched.get(id(module), ()), tap)


def unwatch(module: nn.Module, tap: Tap) -> None:
    """Take the tap away; with the last one the registry is as it was."""
    left = tuple(each for each in _watched.get(id(module), ()) if each is not tap)
    if left:
        _watched[id(module)] = left
        return
    _watched.pop(id(module), None)
    if not _watched:
        _restore()


def _install() -> None:
    mapping = AttentionInterface._global_mapping
    for name in ("eager", *mapping):
        _own[name] = mapping.get(name)
        AttentionInterface.register(name, partial(_attention, name))


def _restore() -> None:
    mapping = AttentionInterface._global_mapping
    for name, function in _own.items():
        if function is None:
            mapping.pop(name, None)
        else:
            mapping[name] = function
    _own.clear()


def _eager(module: nn.Module) -> Callable[..., Any]:
    """The eager function of a module's own file, which no registry has."""
    forward = _forward(module)
    named = [name for name in forward.__code__.co_names if name.endswith("eager_attention_forward")]
    return forward.__globals__[named[0] if named else "eager_attention_forward"]


def _attention(
    name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    function = _own.get(name) or _eager(module)
    taps = _watched.get(id(module), ())
    if not taps:
        return function(module, query, key, value, attention_mask, *args, **kwargs)
    call, unlike = _call_of(name, module, query, key, value, attention_mask, kwargs)
    asked = call
    for tap in taps:
        asked = tap.ask(asked, None)
    rescored = asked.program or asked.mask is not call.mask or asked.bias is not call.bias
    if rescored or asked.k.shape[1] != key.shape[1]:
        if unlike:
            raise ValueError(f"scores of {type(module).__name__} cannot be changed: {unlike}")
        y, weights = attend(asked).o.transpose(1, 2), None
    else:
        y, weights = function(module, asked.q, asked.k, asked.v, attention_mask, *args, **kwargs)
    read = out = y.transpose(1, 2)
    for tap in taps:
        out = tap.out(out, None)
    for tap in taps:
        tap.see(asked, read, out, None, unlike)
    return (y if out is read else out.transpose(1, 2).contiguous()), weights


def _call_of(
    name: str, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: Any, options: dict[str, Any]
) -> tuple[Call, str | None]:
    """The attention problem that a function is called with, and what of it is not known."""
    t, s, device = q.shape[2], k.shape[2], q.device
    scale = options.get("scaling")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    ordered = options.get("is_causal")
    ordered = bool(getattr(module, "is_causal", True)) if ordered is None else bool(ordered)
    cross = bool(getattr(module, "is_cross_attention", False)) or (not ordered and t != s)
    # without a mask, several queries are the first ones: a static cache has room behind them
    start = 0 if cross or (given is None and t > 1) else max(0, s - t)
    rules: tuple[Rule, ...] = ()
    unlike, valid, biases = None, None, []
    if options.get("s_aux") is not None:
        unlike = "a learned sink, which is no key, takes a share of them"
    if given is None:
        if ordered and t > 1 and name != "eager":
            rules = (causal,)
    elif not isinstance(given, Tensor):
        unlike = f"its mask is a {type(given).__name__}; use attention 'sdpa'"
    elif given.ndim == 2:
        valid = given[:, -s:].bool()
        rules = (causal,) if ordered else ()
        window = options.get("sliding_window")
        rules = (*rules, _window(window)) if window else rules
    else:
        given = given[..., :s]
        seen = given if given.dtype == torch.bool else given > torch.finfo(given.dtype).min / 2
        rules = (Given(seen),)
        if ordered and not cross and s > t and bool(seen.any()):  # the newest key that is seen is the newest query's
            start = max(0, int(seen.flatten(0, -2).any(0).nonzero().max()) + 1 - t)
        if t == s and not cross:  # a token that may not see itself is padding
            valid = seen[:, 0, 0] if seen.shape[-2] == 1 else seen[:, 0].diagonal(dim1=-2, dim2=-1)
        if given.dtype != torch.bool:
            biases.append(given.masked_fill(~seen, 0.0))
    if isinstance(options.get("position_bias"), Tensor):
        biases.append(options["position_bias"])
    axes = [Axis(n, at, device=device) for n, at in ((t, start), (s, 0))]
    if valid is not None:
        axes[1] = replace(axes[1], valid=valid)  # not the queries': those of padding attend too
    return Call(q, k, v, Mask(axes[0], axes[1], rules), scale, _bias(biases), options.get("softcap")), unlike


def _window(width: int) -> Rule:
    return lambda q, k: k.time[:, None, None, :] > q.time[:, None, :, None] - width


def _bias(biases: list[Tensor]) -> Bias | None:
    if not biases:
        return None

    def tile(rows: slice, keys: slice) -> Tensor:
        def cut(x: Tensor) -> Tensor:
            x = x[..., rows, :] if x.shape[-2] > 1 else x
            return x[..., keys] if x.shape[-1] > 1 else x

        parts = [cut(x) for x in biases]
        return sum(parts[1:], parts[0])

    return tile


def stock_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every attention layer, in the order of the model's modules."""
    for name, module in model.named_modules():
        if calls_attention(module):
            yield name, module


__all__ = ["calls_attention", "heads_of", "output_of", "stock_layers", "unwatch", "watch"]
