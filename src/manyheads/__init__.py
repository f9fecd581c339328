"""Everything made of many heads: attention heads and how they are computed, mixed, shared, chosen and converted."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyheads import aggregate, decode, edit, inspect, learn, multi
    from manyheads.attention import Attention
    from manyheads.attention.explain import explain
    from manyheads.bench.compare import compare
    from manyheads.bench.heal import heal_model as heal
    from manyheads.bench.job import shrink_model as shrink
    from manyheads.convert.adopt import adopt
    from manyheads.core.cache import Cache
    from manyheads.core.cost import Cost
    from manyheads.core.flow import Links
    from manyheads.core.mask import Axis, Mask
    from manyheads.core.part import OptionError, Site
    from manyheads.core.prefix import PrefixCache
    from manyheads.core.spec import Spec, SpecError
    from manyheads.experts.adapters import adapt, adapters
    from manyheads.experts.adapters import load as load_adapters
    from manyheads.inspect import ablate, capture, steer
    from manyheads.stack import Decoder, Encoder, Stack

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "Axis",
    "Cache",
    "Cost",
    "Decoder",
    "Encoder",
    "Links",
    "Mask",
    "OptionError",
    "PrefixCache",
    "Site",
    "Spec",
    "SpecError",
    "Stack",
    "ablate",
    "adapt",
    "adapters",
    "adopt",
    "aggregate",
    "capture",
    "compare",
    "decode",
    "edit",
    "explain",
    "heal",
    "inspect",
    "learn",
    "load_adapters",
    "multi",
    "shrink",
    "steer",
]

_HOMES = {
    "Attention": "attention", "Axis": "core.mask", "Cache": "core.cache", "Cost": "core.cost", "Decoder": "stack",
    "Encoder": "stack", "Links": "core.flow", "Mask": "core.mask", "OptionError": "core.part",
    "PrefixCache": "core.prefix", "Site": "core.part", "Spec": "core.spec", "SpecError": "core.spec", "Stack": "stack",
    "ablate": "inspect", "adapt": "experts.adapters", "adapters": "experts.adapters", "adopt": "convert.adopt",
    "capture": "inspect", "compare": "bench.compare", "explain": "attention.explain", "heal": "bench.heal:heal_model",
    "load_adapters": "experts.adapters:load", "shrink": "bench.job:shrink_model", "steer": "inspect",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes seconds, and `manyheads --help` needs none of it."""
    if name in ("aggregate", "decode", "edit", "inspect", "learn", "multi"):  # rooms of their own
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, own = _HOMES[name].partition(":")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), own or name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
