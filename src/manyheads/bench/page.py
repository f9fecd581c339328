"""What the pages of this room share: escaping, figures, tables, charts, and the shell that they are filled into.

Whatever comes from a result is escaped: text enters a page only through `el`, which escapes everything that is not
`Html` already, and charts enter as JSON without any `<`. A page is one offline file: `page.html` holds style and
script, and each page has a body of its own next to it.
"""

import gzip
import math
import os
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from numbers import Real
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, NoReturn

_KINDS = {str: "text", float: "a number", bool: "true or false"}
_SYMBOLS = ("circle", "square", "triangle-up", "cross", "x", "star", "hexagon")
_COLOURS = 8  # --c0 to --c7 in page.html

Row = Mapping[str, Any]


def write_page(
    path: Path, body: str, title: str, texts: Mapping[str, Any], charts: Mapping[str, Mapping[str, Any]],
    packed: Mapping[str, bytes] | None = None, *, room: str = "manyheads.bench",
) -> Path:  # fmt: skip
    """Fill a body into the shell and write it; an older file is replaced, and only once the new one is complete.

    Args:
        body: name of the template of what is inside `<body>`, in the package `room`.
        texts: what the body's places are filled with. charts: figures, by the id of their place. packed: data that a
            script of the body unpacks, by name.

    Raises:
        ImportError: plotly is not installed.
    """
    try:
        from plotly.io import to_json
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("the report draws with plotly: pip install 'manyheads[report]'") from error

    def script(name: str, figure: Mapping[str, Any]) -> str:
        drawn = str(to_json(figure, engine="json")).replace("<", r"\u003c")
        return f'<script type="application/json" id="{name}-figure">{drawn}</script>'

    page = _template("page.html").substitute(
        title=el("title", title),
        body=_template(body, room).substitute(texts),
        packed="\n".join(pack(*each) for each in {"plotly": get_plotlyjs().encode(), **(packed or {})}.items()),
        figures="\n".join(script(*chart) for chart in charts.items()),
    )
    return _write_whole(Path(path), page)


def pack(name: str, data: bytes) -> "Html":
    """Gzip in base64, which the page unpacks by its name: a script of plotly's size is a third as large so."""
    return Html(
        f'<script type="application/gzip" id="{name}">{b64encode(gzip.compress(data, mtime=0)).decode()}</script>'
    )


def _template(name: str, room: str = "manyheads.bench") -> Template:
    return Template(resources.files(room).joinpath(name).read_text(encoding="utf-8"))


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


def checked(value: Any, shape: Any, where: str) -> Any:
    """A copy of `value` in which every key of `shape` is present; a ValueError names what does not fit."""
    if isinstance(shape, list):
        if not isinstance(value, Sequence) or isinstance(value, str):
            _refuse(where, "a list", value)
        return [checked(item, shape[0], f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(shape, dict):
        if not isinstance(value, Mapping):
            _refuse(where, "an object", value)
        if "*" in shape:
            return {str(key): checked(item, shape["*"], f"{where}[{key!r}]") for key, item in value.items()}
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
    return checked(value[name], shape, f"{where}[{name!r}]")


def _refuse(where: str, wanted: str, value: Any) -> NoReturn:
    shown = repr(value)
    raise ValueError(f"{where} should be {wanted}, but it is {shown if len(shown) < 60 else shown[:57] + '...'}")


# --- HTML and numbers


class Html(str):
    """Text that is HTML already; `el` escapes every other text."""


def el(tag: str, *children: Any, **attributes: Any) -> Html:
    """One element. Names of attributes are written as Python can: `class_`, `aria_label`; None leaves one out."""
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    inside = "".join(f' {names[n]}="{escape(str(v))}"' for n, v in attributes.items() if v is not None)
    return Html(f"<{tag}{inside}>{join(children)}</{tag}>")


def join(children: Iterable[Any]) -> Html:
    return Html("".join(c if isinstance(c, Html) else escape(str(c)) for c in children if c is not None))


def number(value: float | None, digits: int) -> str:
    """1,234.50 with a real minus sign; a dash where nothing was measured."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:,.{digits}f}".replace("inf", "∞").replace("-", "−")


def change_of(value: float | None, base: float | None) -> str | None:
    """Relative difference to the first row, signed; None where there is none to state."""
    if value is None or not base or not math.isfinite(value / base):
        return None
    percent = round(100 * (value / base - 1), 1)
    return f"{percent:+,.1f} %".replace("-", "−") if percent else "±0 %"


class Column(NamedTuple):
    """One figure of every row, compared with the first row's; better: the sign of a good difference, 0 for neither."""

    title: str
    unit: str
    get: Callable[[Row], float | None]
    digits: int
    compare: bool = True
    better: int = -1
    give: Callable[[Row], float | None] | None = None

    def text(self, row: Row) -> str:
        """The figure, and what it may be off by."""
        give = None if self.give is None else self.give(row)
        return number(self.get(row), self.digits) + ("" if give is None else f" ± {number(give, self.digits)}")


# --- charts


def look_of(index: int) -> dict[str, Any]:
    """Colour and symbol of row `index` (0: the base), the same in every chart; the page resolves var()."""
    if index == 0:
        return {"symbol": "diamond", "color": "var(--ink)"}
    return {"symbol": _SYMBOLS[(index - 1) % len(_SYMBOLS)], "color": f"var(--c{(index - 1) % _COLOURS})"}


def label_of(text: str) -> str:
    """Text for plotly, which reads some HTML in labels."""
    return escape(text if len(text) <= 28 else text[:27] + "…", quote=False)


def pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates, from left to right."""
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if math.isfinite(point[1]) and (not best or point[1] < best[-1][1]):
            best.append(point)
    return best


def trace_of(mode: str, x: Sequence[float], y: Sequence[float], **more: Any) -> dict[str, Any]:
    return {"type": "scatter", "mode": mode, "x": x, "y": y, **more}


def figure_of(data: list[dict[str, Any]], x: tuple[str, Any], y: tuple[str, Any], **layout: Any) -> dict[str, Any]:
    """A figure of titled axes; colours, fonts and margins are the page's."""
    axes = {f"{axis}axis": {"title": {"text": title}, **more} for axis, (title, more) in {"x": x, "y": y}.items()}
    return {"data": data, "layout": {"template": {}, **axes, **layout}}


# --- tables


def table_of(caption: str, head: Sequence[Any], body: Iterable[Sequence[Any]], id_: str) -> Html:
    """A table that scrolls sideways by keyboard too; the first cell of each row heads it."""
    heading = el("tr", *(el("th", title, scope="col") for title in head))
    cells = ([el("th", first, scope="row"), *(el("td", cell) for cell in rest)] for first, *rest in body)
    rows = (el("tr", *row) for row in cells)
    title = el("caption", caption, id_=f"{id_}-caption")
    table = el("table", title, el("thead", heading), el("tbody", *rows), id_=id_)
    return el("div", table, class_="scroll", role="region", tabindex=0, aria_labelledby=f"{id_}-caption")


def facts(pairs: Mapping[str, Any]) -> Html:
    """Names and what is known of them; those without are left out."""
    rows = (el("div", el("dt", name), el("dd", fact)) for name, fact in pairs.items() if fact)
    return el("dl", *rows, class_="facts")


def swatch(index: int) -> Html:
    """A dot in the colour of row `index`."""
    return el("span", class_="swatch", style=f"--colour: {look_of(index)['color']}", aria_hidden="true")


def named(index: int, spec: str) -> Html:
    """A spec beside its dot; lines end between its parts, and inside one only where it is wider than its place."""
    first, *rest = spec.replace(" + ", "\u00a0+ + ").split(" + ")
    dotted = el("span", swatch(index), first, class_="part dotted")
    return Html(" ".join([dotted, *(el("span", part, class_="part") for part in rest)]))


def figures_table(
    caption: str, head: str, names: Sequence[Html], rows: Sequence[Row], columns: Iterable[Column]
) -> Html:
    """The columns of every row under its name, and in small print the difference to the first row."""
    columns = list(columns)

    def cell(column: Column, index: int) -> Html:
        value, base = column.get(rows[index]), column.get(rows[0])
        change = change_of(value, base) if index and column.compare else None
        sign = {"+": 1, "−": -1}.get(change[0], 0) if change else 0
        tone = {1: "better", -1: "worse"}.get(sign * column.better)
        return join([column.text(rows[index]), change and el("small", change, class_=tone)])

    heads = [head, *(join([c.title, el("small", c.unit)]) for c in columns)]
    body = ([name, *(cell(c, index) for c in columns)] for index, name in enumerate(names))
    return table_of(caption, heads, body, "figures")
