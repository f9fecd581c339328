"""The page that `manyheads shrink` leaves behind: one offline HTML file with what was gained and what it cost.

`write_report` takes the JSON value that `manyheads shrink --json` prints (its shape is `_RESULT` below) and fills
`report.html`, which lies next to this module.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, takewhile, zip_longest
from pathlib import Path
from typing import Any

from manyheads.bench.page import (
    Column,
    Html,
    Row,
    change_of,
    checked,
    el,
    facts,
    figure_of,
    figures_table,
    join,
    label_of,
    look_of,
    number,
    pareto,
    swatch,
    table_of,
    trace_of,
    write_page,
)

_PLANNED: dict[str, Any] = {
    "method": str, "reasons": [str], "tried": [{"name": str, "cost": float, "loss": float, "kl": float}],
}  # fmt: skip
# The shape of a result. A key that ends in "?" may be missing or null; "*" stands for any key.
_ROW: dict[str, Any] = {
    "name": str, "spec": str, "kv_floats_per_token_layer": float, "kv_bytes_per_token": float,
    "perplexity": float, "perplexity_second?": float, "kl": float, "top1": float,
    "decode_ms": {"*": float}, "peak_mb": float, "sample": str, "damage?": [float], "damage_healed?": [float],
    "stages?": {"*": float}, "plan?": bool, "folder?": str, "specs?": [str], "planned?": _PLANNED,
}  # fmt: skip
_RESULT: dict[str, Any] = {
    "model": str, "date": str, "prompt": str, "machine": str, "seconds": {"*": float},
    "text": {"calibration": str, "evaluation": str, "second?": str,
             "tokens_calibration": float, "tokens_evaluation": float},
    "source": _ROW, "candidates": [_ROW],
}  # fmt: skip
_DAMAGE = (("damage", "before healing", "dot"), ("damage_healed", "healed", "solid"))
_STAGES = {"rope": "positions split off", "rank": "rank cut", "heal": "healed", "distil": "trained end to end"}
_SHARES = {1: "The whole", 0.75: "Three quarters of the", 0.5: "Half the", 0.25: "A quarter of the"}
_TOLERATED = 1.25  # the headline is the smallest cache whose perplexity stays below this multiple of the source's


def write_report(result: Mapping[str, Any], path: Path) -> Path:
    """Write the report of one `manyheads shrink` run and return its path.

    Args:
        result: the JSON value that `manyheads shrink --json` prints.
        path: the HTML file to write; an older one is replaced, and only once the new one is complete.

    Raises:
        ValueError: a key of `result` is missing or holds the wrong type; the text names it.
        ImportError: plotly is not installed.
    """
    run = checked(result, _RESULT, "result")
    rows: list[Row] = [run["source"], *run["candidates"]]
    columns = _columns(rows, run["text"]["second"] is not None)
    headline = _headline(run["source"], run["candidates"])
    finding = _finding(run["source"], headline)
    texts = {
        "model": el("p", run["model"], " · ", run["date"], class_="kicker"),
        "finding": el("h1", finding),
        "detail": _detail(run, headline),
        "tiles": _tiles(run["source"], headline, columns),
        "texts": _texts(run["text"]),
        "figures": _figures_table(rows, columns),
        "damage": _damage_table(run["candidates"]),
        "stages": _stages_table(run["candidates"]),
        "plans": _plans(run["candidates"]),
        "prompt": el("p", "Each continues the prompt ", el("q", run["prompt"]), "."),
        "samples": join(_sample(row, run["source"], index) for index, row in enumerate(rows)),
        "method": _method(run),
    }
    charts = {"quality": _quality(rows, columns), "damage": _damage(run["candidates"])}
    if any(row["planned"] for row in run["candidates"]):
        charts["plans"] = _tried(run["candidates"])
    return write_page(path, "report.html", f"{run['model']}: {finding}", texts, charts)


def _columns(rows: Sequence[Row], second: bool) -> dict[str, Column]:
    """The columns of the table of figures, by key; one for decoding at each context length that was measured."""

    def by(key: str) -> Callable[[Row], float | None]:
        return lambda row: row[key]

    def decode(context: str) -> Callable[[Row], float | None]:
        return lambda row: row["decode_ms"].get(context)

    found = {context for row in rows for context in row["decode_ms"]}
    if wrong := [context for context in found if not context.isdecimal()]:
        raise ValueError(f"'decode_ms' maps context lengths to milliseconds, but {wrong[0]!r} is no length")
    contexts = sorted(map(int, found))
    whole = all(row["kv_floats_per_token_layer"].is_integer() for row in rows)
    return {
        "floats": Column("Cache per layer", "floats / token", by("kv_floats_per_token_layer"), 0 if whole else 1),
        "bytes": Column("KV cache", "bytes / token", by("kv_bytes_per_token"), 0),
        "perplexity": Column("Perplexity", "evaluation text", by("perplexity"), 2),
        **({"second": Column("Perplexity", "second text", by("perplexity_second"), 2)} if second else {}),
        "kl": Column("KL to source", "nats / token", by("kl"), 4, compare=False),
        "top1": Column("Top-1 agreement", "% of tokens", lambda row: 100 * row["top1"], 1, compare=False),
        **{f"decode {c}": Column(f"Decode at {c:,}", "ms / token", decode(f"{c}"), 1) for c in contexts},
        "peak": Column("Peak memory", "MB", by("peak_mb"), 0),
    }


# --- what was found


def _headline(source: Row, candidates: Sequence[Row]) -> Row | None:
    """The smallest cache at tolerated damage; where all damage is worse, the least damaged candidate."""
    good = [row for row in candidates if row["perplexity"] <= _TOLERATED * source["perplexity"]]
    if good:
        return min(good, key=lambda row: (row["kv_bytes_per_token"], row["perplexity"]))
    return min(candidates, key=lambda row: row["perplexity"], default=None)


def _finding(source: Row, row: Row | None) -> str:
    if row is None:
        return "No candidate: only the source was measured"
    share = row["kv_bytes_per_token"] / source["kv_bytes_per_token"] if source["kv_bytes_per_token"] else math.nan
    words = next((text for known, text in _SHARES.items() if abs(share - known) < 0.005), None)
    before, after = (number(r["perplexity"], 2) for r in (source, row))
    return f"{words or f'{number(100 * share, 0)} % of the'} cache, perplexity {before} → {after} on unseen text"


def _detail(run: Row, row: Row | None) -> Html:
    if row is None:
        return Html()
    parts = ["The candidate ", el("b", row["name"]), " is ", el("code", row["spec"]), "."]
    if row["perplexity_second"] is not None and run["source"]["perplexity_second"] is not None:
        pair = [number(r["perplexity_second"], 2) for r in (run["source"], row)]
        parts.append(f" On a second text, which it was not calibrated on either: {pair[0]} → {pair[1]}.")
    return el("p", *parts, class_="lead")


def _tiles(source: Row, row: Row | None, columns: Mapping[str, Column]) -> Html:
    if row is None:
        return Html()
    longest = [key for key in columns if key.startswith("decode")][-1:]

    def tile(column: Column) -> Html:
        change = f"{change_of(column.get(row), column.get(source)) or '–'} against the source"
        value = el("dd", column.text(row), " ", el("small", column.unit))
        return el("div", el("dt", column.title), value, el("dd", change if column.compare else "with the source"))

    return el("dl", *(tile(columns[key]) for key in ("bytes", "perplexity", "top1", *longest)), class_="tiles")


# --- charts


def _quality(rows: Sequence[Row], columns: Mapping[str, Column]) -> dict[str, Any]:
    """Perplexity against bytes: filled marks for the evaluation text, open ones for the second, a line of the best."""
    best = pareto((row["kv_bytes_per_token"], row["perplexity"]) for row in rows)
    line = {"shape": "hv", "color": "var(--muted)", "width": 1.5, "dash": "dot"}
    data = [trace_of("lines", [x for x, _ in best], [y for _, y in best], line=line, hoverinfo="skip")]
    for index, (row, place) in enumerate(zip(rows, _places(rows), strict=True)):
        name, look, size = label_of(row["name"]), look_of(index), row["kv_bytes_per_token"]
        hover = "<br>".join([f"<b>{name}</b>", *(f"{c.title}: {c.text(row)} {c.unit}" for c in columns.values())])
        shared = {"hovertemplate": hover + "<extra></extra>", "cliponaxis": False}
        if row["perplexity_second"] is not None:
            mark = {**look, "symbol": f"{look['symbol']}-open", "size": 9}
            data.append(trace_of("markers", [size], [row["perplexity_second"]], marker=mark, **shared))
        label = {"text": [f"\u2002{name}\u2002"], "textposition": place, "textfont": {"color": look["color"]}}
        data.append(
            trace_of("markers+text", [size], [row["perplexity"]], marker={**look, "size": 12}, **label, **shared)
        )
    values = [y for trace in data for y in trace["y"] if 0 < y < math.inf]
    y = {"type": "log", "dtick": "D2"} if values and max(values) > 4 * min(values) else {}
    x = {"range": [0, 1.06 * max(row["kv_bytes_per_token"] for row in rows) or 1], "tickformat": "~s"}
    return figure_of(data, ("KV cache, bytes per token", x), ("perplexity (lower is better)", y), showlegend=False)


def _places(rows: Sequence[Row]) -> list[str]:
    """Where each label stands: fanned out vertically among rows of about one size, and inside the picture."""
    widest = max(row["kv_bytes_per_token"] for row in rows) or 1
    share = [row["kv_bytes_per_token"] / widest for row in rows]
    places = []
    for index, row in enumerate(rows):
        column = [other["perplexity"] for at, other in enumerate(rows) if abs(share[at] - share[index]) < 0.1]
        lowest, highest, right = row["perplexity"] == min(column), row["perplexity"] == max(column), share[index] > 0.7
        height = "bottom" if lowest and not highest else "top" if highest and not right else "middle"
        places.append(f"{height} {'left' if right else 'right'}")
    return places


def _damage(candidates: Sequence[Row]) -> dict[str, Any]:
    """Relative output error of each layer, one colour a candidate: dotted before healing, solid after."""
    data = []
    for index, row in enumerate(candidates, start=1):
        look, name = look_of(index), label_of(row["name"])
        drawn = [(when, dash, row[key]) for key, when, dash in _DAMAGE if row[key]]
        for when, dash, errors in drawn:
            line = {"color": look["color"], "dash": dash, "width": 2}
            hover = f"<b>{name}</b>, {when}<br>layer %{{x}}: %{{y:.2%}}<extra></extra>"
            group = {"name": name, "legendgroup": f"{index}", "showlegend": when == drawn[-1][0]}
            trace = trace_of("lines+markers", list(range(len(errors))), errors, line=line, hovertemplate=hover, **group)
            data.append({**trace, "marker": {**look, "size": 6}})
    y = {"tickformat": ".0%", "rangemode": "tozero"}
    return figure_of(data, ("layer", {"zeroline": False}), ("relative output error", y), showlegend=True)


def _tried(candidates: Sequence[Row]) -> dict[str, Any]:
    """Divergence against cost of every whole plan that was tried, one colour a method, a line of the best."""
    points: dict[str, list[Mapping[str, Any]]] = {}
    for row in candidates:
        for each in row["planned"]["tried"] if row["planned"] else ():
            if each["name"] != "source":
                points.setdefault(each["name"], []).append(each)
    best = pareto((100 * each["cost"], each["kl"]) for tried in points.values() for each in tried)
    line = {"shape": "hv", "color": "var(--muted)", "width": 1.5, "dash": "dot"}
    data = [trace_of("lines", *zip(*best, strict=True), line=line, hoverinfo="skip", showlegend=False)]
    for index, (name, tried) in enumerate(points.items(), start=1):
        tried = sorted(tried, key=lambda each: each["cost"])
        hover = f"<b>{label_of(name)}</b>, %{{x:.1f}} % of the source's<br>KL %{{y:.4f}} nats<extra></extra>"
        x, y = [100 * each["cost"] for each in tried], [each["kl"] for each in tried]
        look = {"name": label_of(name), "marker": {**look_of(index), "size": 10}, "hovertemplate": hover}
        data.append(trace_of("lines+markers", x, y, line={"color": look_of(index)["color"], "width": 1}, **look))
    y = {"type": "log"} if all(y > 0 for trace in data for y in trace["y"]) else {"rangemode": "tozero"}
    x = {"ticksuffix": " %", "rangemode": "tozero"}
    return figure_of(data, ("cost, share of the source's", x), ("KL to the source, nats a token", y), showlegend=True)


# --- tables and text


def _named(row: Row, index: int) -> Html:
    return join([swatch(index), el("b", row["name"]), " ", el("small", "source") if index == 0 else None])


def _figures_table(rows: Sequence[Row], columns: Mapping[str, Column]) -> Html:
    names = [join([_named(row, index), el("code", row["spec"])]) for index, row in enumerate(rows)]
    return figures_table("In small print: the difference to the source", "Model", names, rows, columns.values())


def _damage_table(candidates: Sequence[Row]) -> Html:
    series = [(f"{row['name']}, {when}", row[key]) for row in candidates for key, when, _ in _DAMAGE if row[key]]
    layers = enumerate(zip_longest(*(values for _, values in series)))
    body = ([f"{layer}", *(number(None if v is None else 100 * v, 2) for v in values)] for layer, values in layers)
    table = table_of("Relative output error, % of each layer", ["Layer", *(name for name, _ in series)], body, "layers")
    return el("details", el("summary", "The same as a table"), table) if series else Html()


def _stages_table(candidates: Sequence[Row]) -> Html:
    staged = [(index, row) for index, row in enumerate(candidates, start=1) if row["stages"]]
    known = dict.fromkeys([*_STAGES, *(key for _, row in staged for key in row["stages"])])
    keys = [key for key in known if any(key in row["stages"] for _, row in staged)]
    head = ["Candidate", *(join([_STAGES.get(key, key), el("small", "nats / token")]) for key in keys)]
    body = ([_named(row, index), *(number(row["stages"].get(key), 4) for key in keys)] for index, row in staged)
    return table_of("Loss after each stage of the conversion", head, body, "stages") if staged else Html()


def _plans(candidates: Sequence[Row]) -> Html:
    """What plans were chosen from, and why each layer became what it is."""
    planned = [(index, row) for index, row in enumerate(candidates, start=1) if row["planned"]]
    if not planned:
        return Html()
    body = [
        [join([_named(row, index), " ", el("small", each["name"])]), number(100 * each["cost"], 1),
         number(each["kl"], 4), number(each["loss"], 4)]
        for index, row in planned for each in row["planned"]["tried"] if each["name"] != "source"
    ]  # fmt: skip
    label = "Divergence from the source against cost, of each plan that was tried. A table with the numbers follows."
    return el(
        "section",
        el("h2", "What the plans were chosen from", id_="plans-title"),
        el("p", "Each is put into the whole model without healing, and tried on text that no fit has seen."),
        el("figure", el("div", class_="chart", id_="plans", role="group", aria_label=label)),
        table_of("Whole plans", ["Plan", "Cost, %", "KL", "Loss"], body, "tried"),
        *(
            el("details", el("summary", f"{row['name']}, layer by layer"), el("ul", *_lines(row["planned"]["reasons"])))
            for _, row in planned
        ),
        aria_labelledby="plans-title",
    )


def _lines(texts: Sequence[str]) -> list[Html]:
    return [el("li", text) for text in texts]


def _sample(row: Row, source: Row, index: int) -> Html:
    """One model's text; what it shares with the source's text from the start is set back."""
    text = row["sample"]
    pairs = zip(text, source["sample"] if index else "", strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    notes = [el("p", el("code", row["spec"]))]
    if row["folder"] is not None:
        notes.append(el("p", "Saved in ", el("code", row["folder"])))
    if row["specs"]:
        notes.append(el("details", el("summary", "Spec of each layer"), el("ul", *_runs(row["specs"]))))
    plan = " (a plan that mixes moves)" if row["plan"] else None
    body = el("blockquote", el("span", text[:same], class_="same") if same else None, text[same:])
    return el("article", el("h3", _named(row, index), plan), body, *notes)


def _runs(specs: Sequence[str]) -> Iterable[Html]:
    """Neighbouring layers of one spec, as one list item."""
    for spec, group in groupby(enumerate(specs), key=lambda pair: pair[1]):
        layers = [layer for layer, _ in group]
        name = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        yield el("li", f"{name}: ", el("code", spec))


def _texts(text: Mapping[str, Any]) -> Html:
    second = [" Open marks: ", el("i", text["second"]), "."] if text["second"] is not None else []
    return el("p", "Filled marks: ", el("i", text["evaluation"]), ".", *second)


def _method(run: Row) -> Html:
    text, seconds = run["text"], run["seconds"]
    spent = ", ".join(f"{name} {number(value, 0)} s" for name, value in seconds.items())
    known = {
        "Model": run["model"],
        "Calibration text": f"{text['calibration']} ({number(text['tokens_calibration'], 0)} tokens)",
        "Evaluation text": f"{text['evaluation']} ({number(text['tokens_evaluation'], 0)} tokens), unseen",
        "Second text": text["second"],
        "Machine": run["machine"],
        "Time": f"{number(sum(seconds.values()), 0)} s in all: {spent}" if seconds else None,
        "Date": run["date"],
    }
    return facts(known)
