"""Which layer reads whose cached rows, or weighs by whose weights: what fits is settled before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from manyheads.attention import Attention
from manyheads.core.feed import Feed
from manyheads.core.part import SCORING, Heads, OptionError, Part, Site, Transform
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


def sites(
    kv_source: Sequence[int | None], attn_source: Sequence[int | None] | None = None, causal: bool = True,
    bank: Bank | None = None, max_len: int | None = None,
) -> list[Site]:  # fmt: skip
    """Where each layer of a stack sits."""
    shared, layers = None if bank is None else bank.share, len(kv_source)
    taken = [None] * layers if attn_source is None else attn_source
    return [
        Site(
            layer, layers, causal, max_len=max_len, kv_source=source, attn_source=taken[layer], lends=layer in taken,
            shared=shared,
        )
        for layer, source in enumerate(kv_source)
    ]  # fmt: skip


def check_layers(
    specs: Sequence[str | Spec], dim: int, heads: Sequence[int], kv_source: Sequence[int | None],
    attn_source: Sequence[int | None] | None = None, causal: bool = True, max_len: int | None = None,
) -> None:  # fmt: skip
    """Raise a ValueError that names the layer whose spec does not fit, or the layers that cannot share."""
    where = sites(kv_source, attn_source, causal, max_len=max_len)
    _check_order("read the rows", kv_source)
    _check_order("take the attention weights", [site.attn_source for site in where])
    seen: set[tuple[str, int, int | None, int | None]] = set()
    for site, line, count in zip(where, specs, heads, strict=True):
        kind = str(line), count, site.kv_source, site.attn_source
        if kind in seen:
            continue
        try:
            Spec.parse(line).resolve(site).layouts(dim, count, site)
        except OptionError as error:
            raise type(error)(f"layer {site.layer}: {error}") from None
        seen.add(kind)
    _check_followers(specs, dim, heads, where)
    kin = Kin(specs, dim, heads, causal)
    for site in where:
        layer, source, owner = site.layer, site.kv_source, site.attn_source
        if source is not None and owner is not None:
            raise ValueError(
                f"layer {layer} reads the rows of layer {source} and takes the attention weights of layer {owner}; one "
                "of the two leaves it something of its own"
            )
        if source is not None:
            why = kin.why_no_rows(layer, source)
            other = where[source].attn_source
            if other is not None:
                why = f"layer {source} makes no keys, it takes the attention weights of layer {other}"
            if why is not None:
                raise ValueError(f"layer {layer} cannot read the rows of layer {source}: {why}")
        if owner is not None:
            why = kin.why_no_weights(layer, owner)
            if why is not None:
                raise ValueError(f"layer {layer} cannot take the attention weights of layer {owner}: {why}")


def _check_followers(specs: Sequence[str | Spec], dim: int, heads: Sequence[int], where: Sequence[Site]) -> None:
    """A part that reads what another layer hands on finds it there."""
    known = {line: Spec.parse(line) for line in {*map(str, specs)}}
    every = [known[str(line)] for line in specs]

    def laid(layer: int, name: str) -> tuple[Part, Heads] | None:
        steps = every[layer].resolve(where[layer]).layouts(dim, heads[layer], where[layer])
        return next(((part, before) for part, before, _ in steps if part.name == name), None)

    for site, spec in zip(where, every, strict=True):
        for part in spec.parts:
            if part.lent(site) or (source := part.follows(site)) is None:
                continue
            own, other = laid(site.layer, part.name), laid(source, part.name)
            why = f"whose spec is {specs[source]}; give it {part.name} too"
            if own is not None and other is not None:
                again, (wanted, has) = other[0].follows(where[source]), (each.agrees(of) for each, of in (own, other))
                if again is not None and not part.chains:
                    why = f"which follows layer {again} itself; name that one"
                else:
                    why = "" if wanted == has else f"which has {has}, and this one {wanted}"
            if why:
                raise OptionError(f"{part.name}: layer {site.layer} follows layer {source}, {why}")


def check_ffns(ffns: Sequence[str | Feed], dim: int, hidden: int | None, causal: bool = True) -> list[Feed]:
    """The feed-forwards of all layers; one that does not fit raises an `OptionError` that names its layer."""
    found = []
    for site, line in zip(sites([None] * len(ffns), causal=causal), ffns, strict=True):
        try:
            feed = Feed.parse(line)
            feed.check(dim, hidden, site)
        except OptionError as error:
            raise type(error)(f"layer {site.layer}: {error}") from None
        found.append(feed)
    return found


def _check_order(what: str, sources: Sequence[int | None]) -> None:
    """A source is an earlier layer that has what it gives."""
    for layer, source in enumerate(sources):
        if source is None:
            continue
        why = None
        if not 0 <= source < layer:
            why = f"a source is an earlier layer, so one of 0 to {layer - 1}" if layer else "the first layer has none"
        elif sources[source] is not None:
            why = f"layer {source} has none, it uses those of layer {sources[source]}; name that layer"
        if why is not None:
            raise ValueError(f"layer {layer} cannot {what} of layer {source}: {why}")


class Kin:
    """Which layers of a stack could share, by their specs. Each layer is laid out once, without weights."""

    def __init__(self, specs: Sequence[str | Spec], dim: int, heads: Sequence[int], causal: bool = True) -> None:
        self.specs, self.dim, self.heads, self.causal = specs, dim, heads, causal
        self._made: dict[int, Attention] = {}

    def _layer(self, index: int) -> Attention:
        if index not in self._made:
            site = Site(index, len(self.specs), causal=self.causal)
            with torch.device("meta"):
                self._made[index] = Attention(self.specs[index], self.dim, self.heads[index], site=site)
        return self._made[index]

    def why_no_rows(self, reader: int, owner: int) -> str | None:
        """Why a layer cannot read the cached rows of an earlier one, or None."""
        ours, theirs = self._layer(reader), self._layer(owner)
        wanted, given = (
            {name: entry._replace(keep=None, first=0) for name, entry in layer.entries.items()}
            for layer in (ours, theirs)
        )
        if wanted != given:
            return f"it reads {_rows(ours)}, layer {owner} writes {_rows(theirs)}"
        if _positions(ours) != _positions(theirs):
            return f"positions enter its scores by {_positions(ours)}, those of layer {owner} by {_positions(theirs)}"
        if theirs.layout.keep_keys is not None:
            return f"layer {owner} keeps {theirs.layout.keep_keys} keys, older ones are another layer's"
        near, far = _newest(theirs), _newest(ours)
        if near is not None and (far is None or far > near):
            return f"layer {owner} keeps its newest {near} rows, layer {reader} looks at {far or 'all'}"
        first, wanted = theirs.layout.first, ours.layout.first
        if near is not None and wanted > first:
            return f"layer {owner} keeps its first {first} rows, layer {reader} looks at {wanted}"
        return None

    def why_no_weights(self, reader: int, owner: int) -> str | None:
        """Why a layer cannot weigh its values by the attention weights of an earlier one, or None."""
        ours, theirs = self._layer(reader), self._layer(owner)
        if theirs.scan is not None:
            return f"layer {owner} ({theirs.spec}) has a state in place of keys"
        for stage in ("tokens", *sorted(SCORING)):
            own, lent = (str(Spec(tuple(layer.spec.by_stage[stage]))) for layer in (ours, theirs))
            if own != lent:
                return f"they come about by {lent or f'no {stage} part'}, its own spec says {own or 'none'}"
        if theirs.project.views != ("expanded",) or theirs.project.turns_values:
            return f"layer {owner} ({theirs.spec}) does not weigh values as they stand"
        if any(type(piece).axes is not Transform.axes for piece in theirs.late_transforms):
            return f"layer {owner} makes several keys of a token"
        for name, what in _LENT.items():
            mine, lent = getattr(ours.layout, name), getattr(theirs.layout, name)
            if mine != lent:
                return f"it has {mine} {what}, layer {owner} has {lent}"
        return None


_LENT = {"q": "score heads", "kv": "value heads", "out": "head outputs", "keep": "newest rows kept"}
"""What of a layout a layer has in common with one whose attention weights it takes."""


def _newest(layer: Attention) -> int | None:
    keep = layer.layout.keep
    return None if keep is None else keep - layer.layout.first


def _rows(layer: Attention) -> str:
    return " and ".join(
        f"{name!r} ({entry.heads} x {entry.width}{f', one slot for {entry.stride} tokens' if entry.stride > 1 else ''}"
        f"{f', {entry.packing}' if entry.packing is not None else ''})"
        for name, entry in layer.entries.items()
    )


def _positions(layer: Attention) -> str:
    parts = " + ".join(str(Spec((part,))) for part in layer.spec.by_stage["position"]) or "nothing"
    return f"{parts} when rows are {'written' if layer.rotate_at == 'write' else 'read'}"
