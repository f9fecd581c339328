"""Which layer reads from which, by name: the layouts that were published, as lists for any number of layers.

A map stands wherever a list of sources does (`kv_source="cla(2)"`, `attn_source="shared-attention([3, 4])"`), as a line
of text, as an object, or written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from manyheads.core.part import OptionError
from manyheads.core.spec import Spec, read_one

Sources = list[int | None]
"""For each layer None, or the earlier layer that it reads from."""

Line = str | Spec


@dataclass(frozen=True)
class SourceMap:
    """A map from layers to sources."""

    name: ClassVar[str]

    def sources(self, layers: int) -> Sources:
        raise NotImplementedError

    def specs(self, lines: Sequence[Line]) -> list[Line]:
        """The layers' specs, with what the layout asks of them."""
        return list(lines)


@dataclass(frozen=True)
class CLA(SourceMap):
    """Layer l reads the keys and values of layer factor · ⌊l / factor⌋; the last group may be short.

    Keys are shared after rotation. Norms of their own for queries and for keys (the authors' detail) differ by gains,
    which fold into W_Q and W_K, W_V.

    Source: Brandon et al. 2024, arXiv 2405.12981.
    """

    name: ClassVar[str] = "cla"

    factor: int = 2

    def sources(self, layers: int) -> Sources:
        if self.factor < 1:
            raise OptionError(f"cla: groups of {self.factor} layers; at least 1 (nothing is shared)")
        return reading([layer - layer % self.factor for layer in range(layers)])


@dataclass(frozen=True)
class MLKV(SourceMap):
    """`kv_layers` layers have keys and values: 0 and ⌊i · L / kv_layers⌋; the others read the nearest one below.

    Source: Zuhri et al. 2024, arXiv 2406.09297. Its code hands keys on before rotation, and reads them rotated from the
    cache: they are rotated here.
    """

    name: ClassVar[str] = "mlkv"

    kv_layers: int = 1

    def sources(self, layers: int) -> Sources:
        if not 1 <= self.kv_layers <= layers:
            raise OptionError(f"mlkv: {self.kv_layers} layers with keys and values of {layers}; 1 to {layers}")
        return nearest([index * layers // self.kv_layers for index in range(self.kv_layers)], layers)


@dataclass(frozen=True)
class MixAttention(SourceMap):
    """One full layer in `period`, the others windowed; layers of a kind read layers of that kind.

    The windowed layers between two full ones come in `runs` that share the rows of their first; the full layers share
    those of the first full one, or of each `reuse`-th (2: MA-Pairs).

    Options: window: the size to put on windowed layers (none: the specs say it already). period, runs, reuse; offset:
    the first full layer (MA-Offset; layers before it are the end of a period).

    Choices: a window counts the query itself; a last run of one layer joins the run before, as in the 22 layers of
    MA-Pairs.

    Source: Rajput et al. 2024, arXiv 2409.15012.
    """

    name: ClassVar[str] = "mixattention"

    window: int | None = None
    period: int = 6
    runs: tuple[int, ...] = (2, 3)
    reuse: int | None = None
    offset: int = 0

    def full(self, layer: int) -> bool:
        """Whether a layer sees everything."""
        return (layer - self.offset) % self.period == 0

    def sources(self, layers: int) -> Sources:
        if min(self.runs, default=0) < 1 or sum(self.runs) != self.period - 1:
            raise OptionError(
                f"mixattention: runs={[*self.runs]} hold {sum(self.runs)} windowed layers; of period={self.period} "
                f"there are {self.period - 1}"
            )
        if not 0 <= self.offset < self.period or (self.reuse is not None and self.reuse < 1):
            raise OptionError(
                f"mixattention: offset={self.offset} is 0 to {self.period - 1}, reuse={self.reuse} at least 1"
            )
        first_of = [sum(self.runs[:run]) for run, length in enumerate(self.runs) for _ in range(length)]
        owners: list[int] = []
        for layer in range(layers):
            turn, phase = divmod(layer - self.offset, self.period)
            if phase:
                owners.append(max(0, layer - (phase - 1) + first_of[phase - 1]))
            else:
                group = 0 if self.reuse is None else turn - turn % self.reuse
                owners.append(self.offset + group * self.period)
        if layers > 1 and owners[-1] == layers - 1 and not (self.full(layers - 1) or self.full(layers - 2)):
            owners[-1] = owners[-2]
        return reading(owners)

    def specs(self, lines: Sequence[Line]) -> list[Line]:
        if self.window is None:
            return list(lines)
        return [line if self.full(layer) else _windowed(line, self.window) for layer, line in enumerate(lines)]


@dataclass(frozen=True)
class YOCO(SourceMap):
    """Decoder-decoder: all layers from `split` on read the keys and values of layer `split`, made once from its input.

    Layers below are a self-decoder, of constant memory where they are windowed or scans. A norm of its own before the
    shared keys and values has a gain that folds into their weights. With it a stack reads a prompt by the self-decoder
    and one layer (`newest=1`; a model of ours does in `generate`).

    YOCO-U runs the self-decoder several times with the same weights, each time with caches of its own, and its layers
    from `split` on know no positions: `yoco(window=512, positions=false)` in a stack of `loops=3, looped=L/2`. S tokens
    take 2·G·d·S numbers for the whole model, and min(S, W - 1) · 2·G·d for each loop and windowed layer, where no later
    query sees the W-th.

    Options: split (default L/2). window: the size to put on the layers below (none: the specs say what they are).
    positions: false puts `rope(none)` on those from `split` on.

    Source: Sun et al. 2024, arXiv 2405.05254; its cache of 1024 tokens below, `window=1024`. YOCO-U: 2026, arXiv
    2604.01220.
    """

    name: ClassVar[str] = "yoco"

    split: int | None = None
    window: int | None = None
    positions: bool = True

    def at(self, layers: int) -> int:
        split = layers // 2 if self.split is None else self.split
        if not 0 <= split < layers:
            raise OptionError(f"yoco: split={split} of {layers} layers; 0 to {layers - 1}")
        return split

    def sources(self, layers: int) -> Sources:
        return reading([min(layer, self.at(layers)) for layer in range(layers)])

    def specs(self, lines: Sequence[Line]) -> list[Line]:
        split = self.at(len(lines))
        near = [line if self.window is None else _windowed(line, self.window) for line in lines[:split]]
        return [*near, *(line if self.positions else f"{line} + rope(none)" for line in lines[split:])]


@dataclass(frozen=True)
class Owners(SourceMap):
    """The layers of a list have their own, and every other reads the nearest of them below."""

    name: ClassVar[str] = "owners"

    layers: tuple[int, ...] = (0,)

    def sources(self, layers: int) -> Sources:
        return nearest(self.layers, layers)


@dataclass(frozen=True)
class SharedAttention(SourceMap):
    """The listed layers take the attention weights of the nearest layer below that is not listed.

    Spans with leaders of their own have a layer between them that is not listed.

    Source: Liao & Vargas 2024, arXiv 2407.12866.
    """

    name: ClassVar[str] = "shared-attention"

    layers: tuple[int, ...] = ()

    def sources(self, layers: int) -> Sources:
        return nearest(sorted({*range(layers)} - {*_within(self.name, self.layers, layers)}), layers)


@dataclass(frozen=True)
class EchoAtt(SourceMap):
    """Blocks of a leader and `followers` layers that take its attention weights, from layer `first` to `last`.

    Default: all but the first and the last layer, whose weights are unlike all others. Which inner layers are alike is
    measured on a model by `manyheads.convert.share.similarity`.

    Source: Rajabzadeh et al. 2024, arXiv 2409.14595.
    """

    name: ClassVar[str] = "echoatt"

    followers: int = 1
    first: int = 1
    last: int | None = None

    def sources(self, layers: int) -> Sources:
        last = layers - 2 if self.last is None else self.last
        if self.followers < 0 or not 0 <= self.first <= last + 1 <= layers:
            raise OptionError(
                f"echoatt: followers={self.followers}, layers {self.first} to {last} of {layers}; followers is 0 or "
                f"more, layers are 0 to {layers - 1}"
            )
        each = self.followers + 1
        return reading(
            [layer - (layer - self.first) % each if self.first <= layer <= last else layer for layer in range(layers)]
        )


MAPS: dict[str, type[SourceMap]] = {
    kind.name: kind for kind in (CLA, MLKV, MixAttention, YOCO, Owners, SharedAttention, EchoAtt)
}


def find_map(name: str) -> type[SourceMap]:
    """The map of that name; an unknown one raises with the names there are."""
    if name not in MAPS:
        raise OptionError(f"no map {name!r}; there are {', '.join(MAPS)}")
    return MAPS[name]


Map = str | SourceMap | Sequence[int | None] | None
"""A map, its text, or the list that it would make; None: every layer has its own."""


def read_map(value: Map) -> SourceMap | Sequence[int | None] | None:
    """A line of text as the map that it names; anything else as it is."""
    return read_one(value, find_map) if isinstance(value, str) else value


def sources_of(value: Map, layers: int) -> Sources:
    """The list that a map, a line of text or a list means; None: every layer has its own."""
    value = read_map(value)
    if value is None:
        return [None] * layers
    made = value.sources(layers) if isinstance(value, SourceMap) else list(value)
    if len(made) != layers:
        raise OptionError(f"{len(made)} sources for {layers} layers; give one for each layer (None: its own)")
    return made


def specs_of(value: Map, lines: Sequence[Line]) -> list[Line]:
    """The layers' specs, with what the layout of a map asks of them."""
    value = read_map(value)
    return value.specs(lines) if isinstance(value, SourceMap) else list(lines)


def reading(owners: Sequence[int]) -> Sources:
    """Sources from the owner of each layer, which may be the layer itself."""
    return [None if owner == layer else owner for layer, owner in enumerate(owners)]


def nearest(owners: Sequence[int], layers: int) -> Sources:
    """Sources where each layer reads the nearest owner below."""
    owners = sorted({*_within("owners", owners, layers)})
    if not owners or owners[0] != 0:
        raise OptionError(f"layer 0 has no layer below to read from; owners {owners} must begin with 0")
    return reading([max(owner for owner in owners if owner <= layer) for layer in range(layers)])


def resolve(sources: Sequence[int | None]) -> Sources:
    """The map without chains: a layer that reads a reader reads what that one reads.

    >>> resolve([None, None, None, 1, None, 3])
    [None, None, None, 1, None, 1]
    """
    done: Sources = []
    for layer, source in enumerate(sources):
        if source is not None and not 0 <= source < layer:
            raise OptionError(f"layer {layer} cannot read layer {source}: a source is an earlier layer")
        done.append(source if source is None or done[source] is None else done[source])
    return done


def _windowed(line: Line, size: int) -> str:
    return f"{line} + window({size})"


def _within(name: str, listed: Sequence[int], layers: int) -> Sequence[int]:
    wrong = [layer for layer in listed if not 0 <= layer < layers]
    if wrong:
        raise OptionError(f"{name}: there is no layer {wrong[0]}; layers are 0 to {layers - 1}")
    return listed
