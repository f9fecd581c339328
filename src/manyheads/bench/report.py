"""The page that `manyheads shrink` leaves behind: one offline HTML file with what was gained and what it cost.

`write_report` takes the JSON value that `manyheads shrink --json` prints (its shape is `_RESULT` below) and fills
`report.html`, which lies next to this module. Whatever comes from the result is escaped: text enters the page only
through `_el`, which escapes everything that is not `_Html` already, and figures enter as JSON without any `<`.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from itertools import groupby, takewhile, zip_longest
from numbers import Real
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, NoReturn

# The shape of a result. A key that ends in "?" may be missing or null; "*" stands for any key.
_ROW: dict[str, Any] = {
    "name": str, "spec": str, "kv_floats_per_token_layer": float, "kv_bytes_per_token": float,
    "perplexity": float, "perplexity_second?": float, "kl": float, "top1": float,
    "decode_ms": {"*": float}, "peak_mb": float, "sample": str, "damage?": [float], "damage_healed?": [float],
    "stages?": {"*": float}, "plan?": bool, "folder?": str, "specs?": [str],
}  # fmt: skip
_RESULT: dict[str, Any] = {
    "model": str, "date": str, "prompt": str, "machine": str, "seconds": {"*": float},
    "text": {"calibration": str, "evaluation": str, "second?": str,
             "tokens_calibration": float, "tokens_evaluation": float},
    "source": _ROW, "candidates": [_ROW],
}  # fmt: skip
_KINDS = {str: "text", float: "a number", bool: "true or false"}
_SYMBOLS = ("circle", "square", "triangle-up", "cross", "x", "star", "hexagon")
_COLOURS = 8  # --c0 to --c7 in report.html
_DAMAGE = (("damage", "before healing", "dot"), ("damage_healed", "healed", "solid"))
_STAGES = {"rope": "positions split off", "rank": "rank cut", "heal": "healed"}
_SHARES = {1: "The whole", 0.75: "Three quarters of the", 0.5: "Half the", 0.25: "A quarter of the"}
_TOLERATED = 1.25  # the headline is the smallest cache whose perplexity stays below this multiple of the source's

Row = Mapping[str, Any]


def write_report(result: Mapping[str, Any], path: Path) -> Path:
    """Write the report of one `manyheads shrink` run and return its path.

    Args:
        result: the JSON value that `manyheads shrink --json` prints.
        path: the HTML file to write; an older one is replaced, and only once the new one is complete.

    Raises:
        ValueError: a key of `result` is missing or holds the wrong type; the text names it.
        ImportError: plotly is not installed.
    """
    try:
        from plotly.io import to_json
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("the report draws with plotly: pip install 'manyheads[report]'") from error

    def drawn(figure: dict[str, Any]) -> str:
        return str(to_json(figure, engine="json")).replace("<", r"\u003c")

    run = _checked(result, _RESULT, "result")
    rows: list[Row] = [run["source"], *run["candidates"]]
    columns = _columns(rows, run["text"]["second"] is not None)
    headline = _headline(run["source"], run["candidates"])
    finding = _finding(run["source"], headline)
    page = Template(resources.files("manyheads.bench").joinpath("report.html").read_text(encoding="utf-8")).substitute(
        title=_el("title", f"{run['model']}: {finding}"),
        model=_el("p", run["model"], " · ", run["date"], class_="kicker"),
        finding=_el("h1", finding),
        detail=_detail(run, headline),
        tiles=_tiles(run["source"], headline, columns),
        texts=_texts(run["text"]),
        figures=_figures_table(rows, columns),
        damage=_damage_table(run["candidates"]),
        stages=_stages_table(run["candidates"]),
        prompt=_el("p", "Each continues the prompt ", _el("q", run["prompt"]), "."),
        samples=_join(_sample(row, run["source"], index) for index, row in enumerate(rows)),
        method=_method(run),
        plotly=get_plotlyjs(),
        quality=drawn(_quality(rows, columns)),
        damage_figure=drawn(_damage(run["candidates"])),
    )
    return _write_whole(Path(path), page)


def _write_whole(path: Path, page: str) -> Path:
    """Write through a temporary neighbour, so that `path` is complete or untouched."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "x", encoding="utf-8", errors="xmlcharrefreplace") as file:
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


# --- input


def _checked(value: Any, shape: Any, where: str) -> Any:
    """A copy of `value` in which every key of `shape` is present; a ValueError names what does not fit."""
    if isinstance(shape, list):
        if not isinstance(value, Sequence) or isinstance(value, str):
            _refuse(where, "a list", value)
        return [_checked(item, shape[0], f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(shape, dict):
        if not isinstance(value, Mapping):
            _refuse(where, "an object", value)
        if "*" in shape:
            return {str(key): _checked(item, shape["*"], f"{where}[{key!r}]") for key, item in value.items()}
        return {key.rstrip("?"): _field(value, key, kind, where) for key, kind in shape.items()}
    fits = isinstance(value, Real) and not isinstance(value, bool) if shape is float else isinstance(value, shape)
    if not fits:
        _refuse(where, _KINDS[shape], value)
    return shape(value)


def _field(value: Mapping[str, Any], key: str, shape: Any, where: str) -> Any:
    name, optional = key.rstrip("?"), key.endswith("?")
    if value.get(name) is None and optional:
        return None
    if name not in value:
        raise ValueError(f"{where}[{name!r}] is missing")
    return _checked(value[name], shape, f"{where}[{name!r}]")


def _refuse(where: str, wanted: str, value: Any) -> NoReturn:
    shown = repr(value)
    raise ValueError(f"{where} should be {wanted}, but it is {shown if len(shown) < 60 else shown[:57] + '...'}")


# --- HTML and numbers


class _Html(str):
    """Text that is HTML already; `_el` escapes every other text."""


def _el(tag: str, *children: Any, **attributes: Any) -> _Html:
    """One element. Names of attributes are written as Python can: `class_`, `aria_label`; None leaves one out."""
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    inside = "".join(f' {names[n]}="{escape(str(v))}"' for n, v in attributes.items() if v is not None)
    return _Html(f"<{tag}{inside}>{_join(children)}</{tag}>")


def _join(children: Iterable[Any]) -> _Html:
    return _Html("".join(c if isinstance(c, _Html) else escape(str(c)) for c in children if c is not None))


def _number(value: float | None, digits: int) -> str:
    """1,234.50 with a real minus sign; a dash where nothing was measured."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:,.{digits}f}".replace("inf", "∞").replace("-", "−")


def _change(value: float | None, base: float | None) -> str | None:
    """Relative difference to the source, signed; None where there is none to state."""
    if value is None or not base or not math.isfinite(value / base):
        return None
    percent = round(100 * (value / base - 1), 1)
    return f"{percent:+,.1f} %".replace("-", "−") if percent else "±0 %"


class _Column(NamedTuple):
    """One figure of every row; smaller is better wherever a difference to the source is shown."""

    title: str
    unit: str
    get: Callable[[Row], float | None]
    digits: int
    compare: bool = True

    def text(self, row: Row) -> str:
        return _number(self.get(row), self.digits)


def _columns(rows: Sequence[Row], second: bool) -> dict[str, _Column]:
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
        "floats": _Column("Cache per layer", "floats / token", by("kv_floats_per_token_layer"), 0 if whole else 1),
        "bytes": _Column("KV cache", "bytes / token", by("kv_bytes_per_token"), 0),
        "perplexity": _Column("Perplexity", "evaluation text", by("perplexity"), 2),
        **({"second": _Column("Perplexity", "second text", by("perplexity_second"), 2)} if second else {}),
        "kl": _Column("KL to source", "nats / token", by("kl"), 4, compare=False),
        "top1": _Column("Top-1 agreement", "% of tokens", lambda row: 100 * row["top1"], 1, compare=False),
        **{f"decode {c}": _Column(f"Decode at {c:,}", "ms / token", decode(f"{c}"), 1) for c in contexts},
        "peak": _Column("Peak memory", "MB", by("peak_mb"), 0),
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
    before, after = (_number(r["perplexity"], 2) for r in (source, row))
    return f"{words or f'{_number(100 * share, 0)} % of the'} cache, perplexity {before} → {after} on unseen text"


def _detail(run: Row, row: Row | None) -> _Html:
    if row is None:
        return _Html()
    parts = ["The candidate ", _el("b", row["name"]), " is ", _el("code", row["spec"]), "."]
    if row["perplexity_second"] is not None and run["source"]["perplexity_second"] is not None:
        pair = [_number(r["perplexity_second"], 2) for r in (run["source"], row)]
        parts.append(f" On a second text, which it was not calibrated on either: {pair[0]} → {pair[1]}.")
    return _el("p", *parts, class_="lead")


def _tiles(source: Row, row: Row | None, columns: Mapping[str, _Column]) -> _Html:
    if row is None:
        return _Html()
    longest = [key for key in columns if key.startswith("decode")][-1:]

    def tile(column: _Column) -> _Html:
        change = f"{_change(column.get(row), column.get(source)) or '–'} against the source"
        value = _el("dd", column.text(row), " ", _el("small", column.unit))
        return _el("div", _el("dt", column.title), value, _el("dd", change if column.compare else "with the source"))

    return _el("dl", *(tile(columns[key]) for key in ("bytes", "perplexity", "top1", *longest)), class_="tiles")


# --- charts


def _look(index: int) -> dict[str, Any]:
    """Colour and symbol of row `index` (0 is the source), the same in every chart; the page resolves var()."""
    if index == 0:
        return {"symbol": "diamond", "color": "var(--ink)"}
    return {"symbol": _SYMBOLS[(index - 1) % len(_SYMBOLS)], "color": f"var(--c{(index - 1) % _COLOURS})"}


def _label(text: str) -> str:
    """Text for plotly, which reads some HTML in labels."""
    return escape(text if len(text) <= 28 else text[:27] + "…", quote=False)


def _quality(rows: Sequence[Row], columns: Mapping[str, _Column]) -> dict[str, Any]:
    """Perplexity against bytes: filled marks for the evaluation text, open ones for the second, a line of the best."""
    best = _pareto((row["kv_bytes_per_token"], row["perplexity"]) for row in rows)
    line = {"shape": "hv", "color": "var(--muted)", "width": 1.5, "dash": "dot"}
    data = [_trace("lines", [x for x, _ in best], [y for _, y in best], line=line, hoverinfo="skip")]
    for index, (row, place) in enumerate(zip(rows, _places(rows), strict=True)):
        name, look, size = _label(row["name"]), _look(index), row["kv_bytes_per_token"]
        hover = "<br>".join([f"<b>{name}</b>", *(f"{c.title}: {c.text(row)} {c.unit}" for c in columns.values())])
        shared = {"hovertemplate": hover + "<extra></extra>", "cliponaxis": False}
        if row["perplexity_second"] is not None:
            mark = {**look, "symbol": f"{look['symbol']}-open", "size": 9}
            data.append(_trace("markers", [size], [row["perplexity_second"]], marker=mark, **shared))
        label = {"text": [f"\u2002{name}\u2002"], "textposition": place, "textfont": {"color": look["color"]}}
        data.append(_trace("markers+text", [size], [row["perplexity"]], marker={**look, "size": 12}, **label, **shared))
    values = [y for trace in data for y in trace["y"] if 0 < y < math.inf]
    y = {"type": "log", "dtick": "D2"} if values and max(values) > 4 * min(values) else {}
    x = {"range": [0, 1.06 * max(row["kv_bytes_per_token"] for row in rows) or 1], "tickformat": "~s"}
    return _figure(data, ("KV cache, bytes per token", x), ("perplexity (lower is better)", y), showlegend=False)


def _pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates, from left to right."""
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if math.isfinite(point[1]) and (not best or point[1] < best[-1][1]):
            best.append(point)
    return best


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
        look, name = _look(index), _label(row["name"])
        drawn = [(when, dash, row[key]) for key, when, dash in _DAMAGE if row[key]]
        for when, dash, errors in drawn:
            line = {"color": look["color"], "dash": dash, "width": 2}
            hover = f"<b>{name}</b>, {when}<br>layer %{{x}}: %{{y:.2%}}<extra></extra>"
            group = {"name": name, "legendgroup": f"{index}", "showlegend": when == drawn[-1][0]}
            trace = _trace("lines+markers", list(range(len(errors))), errors, line=line, hovertemplate=hover, **group)
            data.append({**trace, "marker": {**look, "size": 6}})
    y = {"tickformat": ".0%", "rangemode": "tozero"}
    return _figure(data, ("layer", {"zeroline": False}), ("relative output error", y), showlegend=True)


def _trace(mode: str, x: Sequence[float], y: Sequence[float], **more: Any) -> dict[str, Any]:
    return {"type": "scatter", "mode": mode, "x": x, "y": y, **more}


def _figure(data: list[dict[str, Any]], x: tuple[str, Any], y: tuple[str, Any], **layout: Any) -> dict[str, Any]:
    """A figure of titled axes; colours, fonts and margins are the page's."""
    axes = {f"{axis}axis": {"title": {"text": title}, **more} for axis, (title, more) in {"x": x, "y": y}.items()}
    return {"data": data, "layout": {"template": {}, **axes, **layout}}


# --- tables and text


def _table(caption: str, head: Sequence[Any], body: Iterable[Sequence[Any]], id_: str) -> _Html:
    """A table that scrolls sideways by keyboard too; the first cell of each row heads it."""
    heading = _el("tr", *(_el("th", title, scope="col") for title in head))
    cells = ([_el("th", first, scope="row"), *(_el("td", cell) for cell in rest)] for first, *rest in body)
    rows = (_el("tr", *row) for row in cells)
    title = _el("caption", caption, id_=f"{id_}-caption")
    table = _el("table", title, _el("thead", heading), _el("tbody", *rows), id_=id_)
    return _el("div", table, class_="scroll", role="region", tabindex=0, aria_labelledby=f"{id_}-caption")


def _named(row: Row, index: int) -> _Html:
    swatch = _el("span", class_="swatch", style=f"--colour: {_look(index)['color']}", aria_hidden="true")
    return _join([swatch, _el("b", row["name"]), " ", _el("small", "source") if index == 0 else None])


def _figures_table(rows: Sequence[Row], columns: Mapping[str, _Column]) -> _Html:
    def cell(column: _Column, index: int) -> _Html:
        value, base = column.get(rows[index]), column.get(rows[0])
        change = _change(value, base) if index and column.compare else None
        tone = "worse" if change and change[0] == "+" else "better" if change and change[0] == "−" else None
        return _join([column.text(rows[index]), change and _el("small", change, class_=tone)])

    head = ["Model", *(_join([c.title, _el("small", c.unit)]) for c in columns.values())]
    body = (
        [_join([_named(row, index), _el("code", row["spec"])]), *(cell(c, index) for c in columns.values())]
        for index, row in enumerate(rows)
    )
    return _table("In small print: the difference to the source", head, body, "figures")


def _damage_table(candidates: Sequence[Row]) -> _Html:
    series = [(f"{row['name']}, {when}", row[key]) for row in candidates for key, when, _ in _DAMAGE if row[key]]
    layers = enumerate(zip_longest(*(values for _, values in series)))
    body = ([f"{layer}", *(_number(None if v is None else 100 * v, 2) for v in values)] for layer, values in layers)
    table = _table("Relative output error, % of each layer", ["Layer", *(name for name, _ in series)], body, "layers")
    return _el("details", _el("summary", "The same as a table"), table) if series else _Html()


def _stages_table(candidates: Sequence[Row]) -> _Html:
    staged = [(index, row) for index, row in enumerate(candidates, start=1) if row["stages"]]
    known = dict.fromkeys([*_STAGES, *(key for _, row in staged for key in row["stages"])])
    keys = [key for key in known if any(key in row["stages"] for _, row in staged)]
    head = ["Candidate", *(_join([_STAGES.get(key, key), _el("small", "nats / token")]) for key in keys)]
    body = ([_named(row, index), *(_number(row["stages"].get(key), 4) for key in keys)] for index, row in staged)
    return _table("Loss after each stage of the conversion", head, body, "stages") if staged else _Html()


def _sample(row: Row, source: Row, index: int) -> _Html:
    """One model's text; what it shares with the source's text from the start is set back."""
    text = row["sample"]
    pairs = zip(text, source["sample"] if index else "", strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    notes = [_el("p", _el("code", row["spec"]))]
    if row["folder"] is not None:
        notes.append(_el("p", "Saved in ", _el("code", row["folder"])))
    if row["specs"]:
        notes.append(_el("details", _el("summary", "Spec of each layer"), _el("ul", *_runs(row["specs"]))))
    plan = " (a plan that mixes moves)" if row["plan"] else None
    body = _el("blockquote", _el("span", text[:same], class_="same") if same else None, text[same:])
    return _el("article", _el("h3", _named(row, index), plan), body, *notes)


def _runs(specs: Sequence[str]) -> Iterable[_Html]:
    """Neighbouring layers of one spec, as one list item."""
    for spec, group in groupby(enumerate(specs), key=lambda pair: pair[1]):
        layers = [layer for layer, _ in group]
        name = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        yield _el("li", f"{name}: ", _el("code", spec))


def _texts(text: Mapping[str, Any]) -> _Html:
    second = [" Open marks: ", _el("i", text["second"]), "."] if text["second"] is not None else []
    return _el("p", "Filled marks: ", _el("i", text["evaluation"]), ".", *second)


def _method(run: Row) -> _Html:
    text, seconds = run["text"], run["seconds"]
    spent = ", ".join(f"{name} {_number(value, 0)} s" for name, value in seconds.items())
    facts = {
        "Model": run["model"],
        "Calibration text": f"{text['calibration']} ({_number(text['tokens_calibration'], 0)} tokens)",
        "Evaluation text": f"{text['evaluation']} ({_number(text['tokens_evaluation'], 0)} tokens), unseen",
        "Second text": text["second"],
        "Machine": run["machine"],
        "Time": f"{_number(sum(seconds.values()), 0)} s in all: {spent}" if seconds else None,
        "Date": run["date"],
    }
    pairs = (_el("div", _el("dt", name), _el("dd", fact)) for name, fact in facts.items() if fact)
    return _el("dl", *pairs, class_="facts")
