"""Which layer reads whose cached rows: what fits is settled before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from manyheads.attention import Attention
from manyheads.core.feed import Feed
from manyheads.core.part import OptionError, Site
from manyheads.core.spec import Spec
from manyheads.stack.bank import Bank

T = TypeVar("T")


def per_layer(value: T | Sequence[T], layers: int, what: str) -> list[T]:
    """One value a layer, from one for all or from a list of them."""
    if isinstance(value, (str, Spec)) or not isinstance(value, Sequence):
        return [value] * layers  # type: ignore[list-item]
    if len(value) != layers:
        raise ValueError(f"{len(value)} {what} for {layers} layers; give one, or one for each layer")
    return list(value)


def sites(kv_source: Sequence[int | None], causal: bool = True, bank: Bank | None = None) -> list[Site]:
    """Where each layer of a stack sits."""
    shared = None if bank is None else bank.share
    return [
        Site(layer, len(kv_source), causal=causal, kv_source=source, shared=shared)
        for layer, source in enumerate(kv_source)
    ]


def check_layers(
    specs: Sequence[str | Spec], dim: int, heads: Sequence[int], kv_source: Sequence[int | None], causal: bool = True
) -> None:
    """Raise a ValueError that names the layer whose spec does not fit, or the layers whose rows cannot be shared."""
    seen: set[tuple[str, int, int | None]] = set()
    for site, line, count in zip(sites(kv_source, causal), specs, heads, strict=True):
        if (str(line), count, site.kv_source) in seen:
            continue
        try:
            Spec.parse(line).resolve(site).layouts(dim, count, site)
        except OptionError as error:
            raise type(error)(f"layer {site.layer}: {error}") from None
        seen.add((str(line), count, site.kv_source))
    for reader, owner in enumerate(kv_source):
        if owner is not None:
            why = _why_not(specs, dim, heads, kv_source, reader, owner, causal)
            if why is not None:
                raise ValueError(f"layer {reader} cannot read the rows of layer {owner}: {why}")


def check_ffns(ffns: Sequence[str | Feed], dim: int, hidden: int | None, causal: bool = True) -> list[Feed]:
    """The feed-forwards of all layers; one that does not fit raises an `OptionError` that names its layer."""
    found = []
    for site, line in zip(sites([None] * len(ffns), causal), ffns, strict=True):
        try:
            feed = Feed.parse(line)
            feed.check(dim, hidden, site)
        except OptionError as error:
            raise type(error)(f"layer {site.layer}: {error}") from None
        found.append(feed)
    return found


def _why_not(
    specs: Sequence[str | Spec], dim: int, heads: Sequence[int], kv_source: Sequence[int | None], reader: int,
    owner: int, causal: bool,
) -> str | None:  # fmt: skip
    if not 0 <= owner < reader:
        return f"a source is an earlier layer, so one of 0 to {reader - 1}" if reader else "the first layer has none"
    if kv_source[owner] is not None:
        return f"layer {owner} has none, it reads those of layer {kv_source[owner]}; name that layer"
    with torch.device("meta"):
        ours, theirs = (
            Attention(specs[layer], dim, heads[layer], site=Site(layer, len(specs), causal=causal))
            for layer in (reader, owner)
        )
    wanted, given = ({n: e._replace(keep=None, first=0) for n, e in layer.entries.items()} for layer in (ours, theirs))
    if wanted != given:
        return f"it reads {_rows(ours)}, layer {owner} writes {_rows(theirs)}"
    if _positions(ours) != _positions(theirs):
        return f"positions enter its scores by {_positions(ours)}, those of layer {owner} by {_positions(theirs)}"
    near, far = _newest(theirs), _newest(ours)
    if near is not None and (far is None or far > near):
        return f"layer {owner} keeps its newest {near} rows, layer {reader} looks at {far or 'all'}"
    first, wanted = theirs.layout.first, ours.layout.first
    if near is not None and wanted > first:
        return f"layer {owner} keeps its first {first} rows, layer {reader} looks at {wanted}"
    return None


def _newest(layer: Attention) -> int | None:
    keep = layer.layout.keep
    return None if keep is None else keep - layer.layout.first


def _rows(layer: Attention) -> str:
    return " and ".join(
        f"{name!r} ({entry.heads} x {entry.width}{f', one slot for {entry.stride} tokens' if entry.stride > 1 else ''})"
        for name, entry in layer.entries.items()
    )


def _positions(layer: Attention) -> str:
    parts = " + ".join(str(Spec((part,))) for part in layer.spec.by_stage["position"]) or "nothing"
    return f"{parts} when rows are {'written' if layer.rotate_at == 'write' else 'read'}"
