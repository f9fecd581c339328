"""The atlas of a model's heads: every measure as a grid of layers and heads, roles, and a page that shows them."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.bench.timing import machine
from manyheads.inspect import measures
from manyheads.inspect.capture import CaptureError, capture
from manyheads.inspect.flow_routes import flow_share
from manyheads.inspect.layers import Layer, layers_of
from manyheads.inspect.measures.table import HeadTable, measure
from manyheads.inspect.roles import ROLES, drawn_twice, roles


@dataclass(frozen=True)
class Shown:
    """A measure of the atlas. ends: of its colours, None where the values decide. digits: in the table."""

    name: str
    title: str
    unit: str
    says: str
    ends: tuple[float | None, float | None] = (0, 1)
    digits: int = 2


_LENGTH: tuple[float | None, float | None] = (0, None)
SHOWN: tuple[Shown, ...] = (
    Shown("entropy", "Entropy", "share of ln n", "How evenly it spreads its weights: 0 on one key, 1 on all alike."),
    Shown("distance", "Distance", "tokens", "How far back it looks, in the mean.", _LENGTH, 1),
    Shown("local", "Near", "weight", "Weight on the newest 32 tokens."),
    Shown("sink", "First token", "weight", "Weight on the first token of the text, a resting place of many heads."),
    Shown("self", "Own token", "weight", "Weight on the query's own token."),
    Shown("previous", "Token before", "weight", "Weight on the token before."),
    Shown("position", "Position alone", "R²", "How much of its map its mean at each distance explains."),
    Shown("duplicate", "Duplicates", "weight", "Weight on earlier copies of a token; tokens drawn at random, twice."),
    Shown("induction", "Induction", "weight", "Weight on what came after an earlier copy of a token; likewise."),
    Shown("importance", "Importance", "nats", "⟨|∂loss/∂gate|⟩ over texts, about what taking it out does.", _LENGTH, 4),
    Shown("output", "Output", "length", "How much it adds to the stream, in the mean.", _LENGTH, 2),
    Shown(
        "nearest", "Nearest map", "nats", "Divergence to the most similar map of its layer; at most 0.69.", _LENGTH, 3
    ),
    Shown("twin", "Nearest output", "CKA", "How alike another head of its layer adds: 1 for a copy, turned or scaled."),
    Shown("rank", "Rank", "directions", "Effective rank of W_Q W_Kᵀ: along how many it compares tokens.", _LENGTH, 1),
    Shown("tail", "Tail", "weight", "Weight that is not on a query's 16 highest keys."),
    Shown(
        "near",
        "Near is enough",
        "share of queries",
        "Of queries with keys further away: how often the first 4 and the newest 32 have 60 % of its weight.",
    ),
    Shown("flow", "Flow", "share", "How much of the stream behind its layer came through it, by closeness to it."),
    Shown("successor", "Successor", "share", "Of numbers, days, months, letters: how often it alone writes the next."),
    Shown("outliers", "Out of noise", "directions", "Of W_Q and W_K, beyond the Marchenko-Pastur edge.", _LENGTH, 0),
)
Progress = Callable[[str, int, int], None]
Decode = Callable[[int], str]


TOKENS = 64
"""Of the first text, whose maps a page shows."""
NEAREST, WRITTEN = 3, 6
"""Other heads of the layer that a page names beside a head, and tokens that it says the head writes."""


@dataclass(frozen=True, eq=False)
class Maps:
    """Every head's map of the first tokens of a text, in 256 steps from its lowest to its highest weight.

    codes: uint8 `[H, T, T]` by layer; a weight is low + code · (high - low) / 255, half a step off at most. ends: (low,
    high) of each head by layer. words: the tokens. near: of each head by layer, the heads whose outputs are most alike,
    with their CKA. writes: the tokens whose logits it raises most, in the mean over these tokens; none where the model
    has no logits.
    """

    words: tuple[str, ...]
    codes: dict[int, Tensor]
    ends: dict[int, list[tuple[float, float]]]
    near: dict[int, list[list[tuple[int, float]]]]
    writes: dict[int, list[list[str]]]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        ids: Tensor,
        layers: Sequence[int],
        words: Sequence[str],
        alike: HeadTable,
        decode: Decode,
    ) -> Maps:
        """Of one text `[1, T]`. alike: `[H, H]` by layer."""
        codes, ends, writes = {}, {}, {}
        by_number = {layer.number: layer for layer in layers_of(model)}
        for number in layers:
            with torch.no_grad(), capture(model, layers=number, what=("weights", "out")) as tape:
                model(ids)
            out = tape[number].out
            assert out is not None
            writes[number] = _written(model, by_number[number], out[0], decode)
            weights = tape[number].weights
            assert weights is not None
            low, high = weights[0].amin((1, 2)), weights[0].amax((1, 2))
            step = ((high - low) / 255).clamp_min(1e-12)[:, None, None]
            codes[number] = ((weights[0] - low[:, None, None]) / step).round().to(torch.uint8).cpu()
            ends[number] = list(zip(low.tolist(), high.tolist(), strict=True))
        near = {number: _nearest(alike[number]) for number in layers if number in alike}
        return cls(tuple(words), codes, ends, near, writes)

    def weights(self, layer: int) -> Tensor:
        """What the codes of a layer say, `[H, T, T]`."""
        low, high = torch.tensor(self.ends[layer]).T[..., None, None]
        return low + self.codes[layer] * (high - low) / 255


@dataclass(frozen=True, eq=False)
class Atlas:
    """What is known of a model's heads. tables: by the name of a `Shown`; labels: roles by (layer, head).

    against: of another model on the same text, which it is shown beside.
    """

    model: str
    text: str
    tokens: str
    tables: dict[str, HeadTable]
    labels: dict[tuple[int, int], tuple[str, ...]]
    heads: dict[int, int]
    names: dict[int, str]
    bottlenecks: int | None
    notes: tuple[str, ...]
    seconds: float
    date: str
    machine: str
    maps: Maps | None = None
    against: Atlas | None = None
    report: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Of plain values, undefined ones null."""
        shown = {each.name: each for each in SHOWN}
        return {
            "model": self.model, "date": self.date, "machine": self.machine, "seconds": self.seconds,
            "text": self.text, "tokens": self.tokens,
            "layers": [{"layer": n, "name": self.names[n], "heads": count} for n, count in self.heads.items()],
            "measures": {
                name: {"title": shown[name].title, "unit": shown[name].unit, "says": shown[name].says,
                       "values": {str(n): [x if x == x else None for x in row.tolist()] for n, row in table.items()}}
                for name, table in self.tables.items()
            },
            "roles": [{"layer": n, "head": head, "roles": list(of)} for (n, head), of in sorted(self.labels.items())],
            "bottlenecks": self.bottlenecks, "notes": list(self.notes),
            **({} if self.against is None else {"against": self.against.to_json()}),
        }  # fmt: skip


def atlas(
    model: nn.Module, ids: Tensor, *, name: str = "model", text: str = "text", progress: Progress | None = None,
    ordinals: Sequence[Sequence[int]] | None = None, words: Sequence[str] | None = None, decode: Decode = str,
) -> Atlas:  # fmt: skip
    """Measure every head of a model on token ids `[windows, tokens]`, and on tokens drawn at random, twice in a row.

    ordinals: token ids in their order (see `measures.ordinals`), for successor heads. words: the first window's tokens
    as text, to show beside their maps. decode: a token id as text, for what heads write.

    What a model does not have (logits to be right about, weights) is left out, with a note.
    """
    tell = progress or (lambda stage, done, total: None)
    began, layers = time.perf_counter(), layers_of(model)
    ids = ids.to(next(model.parameters()).device)
    batches = list(ids.split(max(1, 2048 // ids.shape[1])))
    readable, notes = _readable(model, ids[:1, :16])
    tell("measure", 0, 1)
    tables = measure(model, batches, {"output": measures.output_size})
    idle = [layer.name for layer in layers if layer.number not in tables["output"]]
    layers = [layer for layer in layers if layer.number in tables["output"]]
    if idle:
        notes.append(f"{len(idle)} layers do not run on text alone, the first is {idle[0]}")
    alike = measures.cka(model, batches)
    tables["twin"] = _of_others(alike, torch.max)
    labels: dict[tuple[int, int], tuple[str, ...]] = {}
    if readable:
        tables |= measure(model, batches, OF_TEXT, readable)
        tables["nearest"] = _of_others(tables["nearest"], torch.min)
        try:
            tables["flow"] = flow_share(model, batches, readable)
        except (ValueError, CaptureError) as error:
            notes.append(f"flow is left out: {error}")
    tell("measure", 1, 1)
    if readable:
        tell("roles", 0, 1)
        twice = drawn_twice(model)
        try:
            found = roles(model, batches[0], twice, layers=readable, ordinals=ordinals)
        except ValueError as error:
            notes.append(f"successor heads are left out: {error}")
            found = roles(model, batches[0], twice, layers=readable)
        tables |= {key: found.scores[key] for key in ("duplicate", "induction", "successor") if key in found.scores}
        labels = found.labels
        tell("roles", 1, 1)
    tell("importance", 0, 1)
    try:
        tables["importance"] = measures.importance(model, list(ids.split(1)))
    except ValueError as error:
        notes.append(f"importance is left out: {error}")
    tell("importance", 1, 1)
    ranks, bottlenecks = measures.qk_rank(model, [layer.number for layer in layers]), None
    if ranks:
        tables |= {"rank": ranks["effective_rank"], "outliers": ranks["outliers"]}
        bottlenecks = int(ranks["bottleneck"].grid.nansum())
    left = len(layers) - (len(ranks["outliers"]) if ranks else 0)
    if left:
        notes.append(f"ranks are left out in {left} layers, whose queries and keys are no linear functions of x")
    given = [each for each in SHOWN if each.name in tables]
    none = [each for each in given if all(bool(row.isnan().all()) for row in tables[each.name].values())]
    if none:
        notes.append(f"left out, as undefined for every head: {', '.join(each.title for each in none)}")
    shown = {each.name: tables[each.name] for each in given if each not in none}
    return Atlas(
        name, text, f"{len(ids)} × {ids.shape[1]}", shown, labels,
        {x.number: x.heads for x in layers}, {x.number: x.name for x in layers}, bottlenecks, tuple(notes),
        time.perf_counter() - began, datetime.date.today().isoformat(), machine(),
        _maps(model, ids, readable, words, alike, decode),
    )  # fmt: skip


def _maps(
    model: nn.Module, ids: Tensor, layers: list[int], words: Sequence[str] | None, alike: HeadTable, decode: Decode
) -> Maps | None:
    if not layers:
        return None
    first = ids[:1, :TOKENS]
    said = [str(token) for token in first[0].tolist()] if words is None else list(words)[: first.shape[1]]
    return Maps.of(model, first, layers, said, alike, decode)


def _nearest(alike: Tensor) -> list[list[tuple[int, float]]]:
    """Of each head of a layer the most similar others, the nearest first."""
    others = alike.clone().nan_to_num(-1.0).fill_diagonal_(-1.0)
    best = others.topk(min(NEAREST, len(others)), -1)
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[(head, value) for head, value in zip(*row, strict=True) if value >= 0] for row in rows]


@torch.no_grad()
def _written(model: nn.Module, layer: Layer, out: Tensor, decode: Decode) -> list[list[str]]:
    """Of each head the tokens that the mean of what it adds, out `[H, T, d]` times its W_O, raises most."""
    try:
        logits = measures.unembedding(model)(torch.einsum("hd,hde->he", out.mean(1), layer.output_weight().to(out)))
    except ValueError:
        return [[] for _ in out]
    return [
        [decode(token) for token in row] for row in logits.topk(min(WRITTEN, logits.shape[-1]), -1).indices.tolist()
    ]


OF_TEXT = {
    "entropy": partial(measures.entropy, normalised=True), "distance": measures.distance,
    "local": measures.local_mass, "sink": measures.sink_mass, "self": measures.self_mass,
    "previous": measures.previous_token, "position": measures.position_bias, "nearest": measures.js_divergence,
    "tail": measures.truncation.tail_mass, "near": partial(measures.far.local, window=32),
}  # fmt: skip


def _readable(model: nn.Module, ids: Tensor) -> tuple[list[int], list[str]]:
    """Layers whose weights can be told, and why those of others cannot."""
    found, notes = [], []
    for layer in layers_of(model):
        try:
            with torch.no_grad(), capture(model, layers=layer.number) as tape:
                model(ids)
        except CaptureError as error:
            notes.append(str(error))
        except ValueError:
            notes.append(f"{layer.name} has no weights: {layer.none}")
        else:
            if tape.passes(layer.number):
                found.append(layer.number)
    return found, notes


def _of_others(table: HeadTable, best: Callable[..., Any]) -> HeadTable:
    """Of each head's values for the heads of its layer, the lowest or highest of another head."""
    rows = {}
    for layer, values in table.items():
        if len(values) < 2:
            rows[layer] = torch.full((len(values),), torch.nan, dtype=torch.float64)
            continue
        none = torch.inf if best is torch.min else -torch.inf
        others = values.clone().nan_to_num(none)
        others.fill_diagonal_(none)
        found = best(others, -1).values
        rows[layer] = found.masked_fill(found.isinf(), torch.nan)
    return HeadTable(table.name, rows)


def write_atlas(found: Atlas, folder: Path) -> Atlas:
    """Write `result.json` and `report.html`; what is returned says so, or that plotly is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        from manyheads.inspect.atlas_page import write_report

        found = replace(found, report=write_report(found, folder / "report.html"))
    except ImportError as error:
        found = replace(found, notes=(*found.notes, f"no report.html: {error}"))
    text = json.dumps(found.to_json(), ensure_ascii=False, indent=1, allow_nan=False)
    (folder / "result.json").write_text(text + "\n", encoding="utf-8")
    return found


__all__ = ["ROLES", "SHOWN", "Atlas", "Shown", "atlas", "write_atlas"]
