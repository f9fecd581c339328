"""The page that `manyheads multi train` leaves behind: curves of each head, how sure they are, models of one head."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from manyheads.bench.page import (
    Html,
    checked,
    el,
    facts,
    figure_of,
    join,
    label_of,
    look_of,
    named,
    number,
    table_of,
    trace_of,
    write_page,
)
from manyheads.bench.timing import machine

SHAPE: dict[str, Any] = {
    "table": str, "rows": float, "held_out": float, "epochs": float, "best_epoch": float, "parameters": float,
    "balance": str, "seed": float, "batch": float, "lr": float, "width": float, "layers": float, "inputs": float,
    "heads": {"*": {"kind": str, "better": str, "labels": float, "held_out_labels": float, "metrics": {"*": float}}},
}  # fmt: skip
"""What of a result has to be there; the rest of it is drawn where it is there."""


def write_heads(result: Mapping[str, Any], folder: Path) -> Path:
    """Write `report.html` into a folder, of what `train_table` returned.

    Raises:
        ImportError: plotly is not installed.
    """
    checked(result, SHAPE, "result")
    heads, single = result["heads"], result.get("single")
    finding = _finding(result)
    curved = [(at, name) for at, name in enumerate(heads) if _known(result["curves"][name])]
    texts = {
        "kicker": el("p", f"{Path(result['table']).name} · {len(heads)} heads on one trunk · {date.today()}",
                     class_="kicker"),
        "finding": el("h1", finding),
        "detail": el("p", _detail(result), class_="lead"),
        "tiles": _tiles(heads, single),
        "curves": join(_place(f"curve-{at}", at, name, _curve_says(result, name)) for at, name in curved),
        "calibration": _calibration(heads),
        "figures": _figures(heads, single),
        "notes": el("ul", *(el("li", each) for each in _notes(result))) if _notes(result) else Html(),
        "single": _single(result),
        "method": _method(result),
    }  # fmt: skip
    charts = {f"curve-{at}": _curve(result, name, at) for at, name in curved}
    sure = [(at, each["calibration"]) for at, each in enumerate(heads.values()) if each.get("calibration")]
    charts |= {f"sure-{at}": _sure(found, at) for at, found in sure}
    return write_page(Path(folder) / "report.html", "heads.html", finding, texts, charts)


def first_metric(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    return next(iter(metrics.items()), None)


def ahead(name: str, result: Mapping[str, Any]) -> bool | None:
    """Whether a head's first metric is better than its model alone; None where one of them has none."""
    here, other = result["heads"][name], (result.get("single") or {"heads": {}})["heads"].get(name)
    one, two = first_metric(here["metrics"]), first_metric((other or {}).get("metrics", {}))
    if one is None or two is None or one[1] == two[1]:
        return None
    return (one[1] > two[1]) == (here["better"] == "higher")


def _finding(result: Mapping[str, Any]) -> str:
    heads = result["heads"]
    if result.get("single"):
        better = [ahead(name, result) for name in heads]
        return f"One trunk is better than models of one head for {better.count(True)} of {len(heads)} heads"
    said = []
    for name, each in list(heads.items())[:3]:
        if first := first_metric(each["metrics"]):
            said.append(f"{name} {first[0]} {number(first[1], 3)}")
    return f"{len(heads)} heads: {', '.join(said)}" + (" …" if len(heads) > 3 else "")


def _detail(result: Mapping[str, Any]) -> str:
    held, rows = (number(result[key], 0) for key in ("held_out", "rows"))
    text = f"{held} of {rows} rows were held out. The weights are those of epoch {result['best_epoch']} of "
    text += f"{result['epochs']}, where the held-out loss of all heads was lowest: these rows chose when to stop, so "
    text += "their figures flatter a little."
    single = result.get("single")
    if single:
        alone, one = (number(each["parameters"], 0) for each in (single, result))
        text += f" Alone, {len(single['heads'])} models have {alone} parameters in all, the one of all heads {one}."
        text += " One seed does not say what is chance."
    return text


def _tiles(heads: Mapping[str, Any], single: Mapping[str, Any] | None) -> Html:
    tiles = []
    for name, each in heads.items():
        first = first_metric(each["metrics"])
        if first is None:
            continue
        alone = first_metric((single["heads"].get(name) or {}).get("metrics", {})) if single else None
        below = el("dd", f"alone {number(alone[1], 3)}") if alone else None
        tiles.append(el("div", el("dt", name), el("dd", number(first[1], 3), " ", el("small", first[0])), below))
    return el("dl", *tiles, class_="tiles")


def _place(id_: str, index: int, name: str, says: str) -> Html:
    """A chart under the head's name."""
    chart = el("div", class_="chart", id_=id_, role="group", aria_label=f"{name}: {says}")
    return el("figure", el("h3", el("b", named(index, name)), " ", el("small", says)), chart)


def _known(curves: Mapping[str, Any]) -> bool:
    return any(value is not None for curve in curves.values() for value in curve)


def _curve_says(result: Mapping[str, Any], name: str) -> str:
    first = first_metric(result["heads"][name]["metrics"])
    return "loss" if first is None else f"loss, and {first[0]} on the right"


def _curve(result: Mapping[str, Any], name: str, index: int) -> dict[str, Any]:
    """Training and held-out loss by epoch, the held-out metric on an axis of its own, and a line at the best epoch."""
    curves = result["curves"][name]
    epochs, colour = list(range(1, len(curves["held_out"]) + 1)), look_of(index)["color"]
    first = first_metric(result["heads"][name]["metrics"])
    lines = [
        ("train", "train loss", {"dash": "dot", "width": 1.5}, "y"),
        ("held_out", "held-out loss", {"width": 2}, "y"),
        ("metric", first[0] if first else "", {"dash": "dash", "width": 1.5}, "y2"),
    ]
    data = []
    for key, title, line, axis in lines:
        if any(value is not None for value in curves[key]) and title:
            look = {"color": "var(--muted)" if axis == "y2" else colour, **line}
            hover = f"epoch %{{x}}: {label_of(title)} %{{y:.4f}}<extra></extra>"
            data.append(trace_of("lines", epochs, curves[key], line=look, yaxis=axis, name=label_of(title),
                                 hovertemplate=hover))  # fmt: skip
    best = {"type": "line", "x0": result["best_epoch"], "x1": result["best_epoch"], "yref": "paper", "y0": 0, "y1": 1,
            "line": {"color": "var(--muted)", "width": 1, "dash": "dot"}}  # fmt: skip
    right = {
        "overlaying": "y",
        "side": "right",
        "showgrid": False,
        "zeroline": False,
        "automargin": True,
        "tickmode": "auto",
    }
    return figure_of(data, ("epoch", {"zeroline": False}), ("", {"zeroline": False}), yaxis2=right, shapes=[best],
                     showlegend=True)  # fmt: skip


def _calibration(heads: Mapping[str, Any]) -> Html:
    """Places of the charts, in a section that is not there where no head says how sure it is."""
    places = []
    for at, (name, each) in enumerate(heads.items()):
        found = each.get("calibration")
        if found:
            classes = found["kind"] == "reliability"
            figure = f"ECE {number(found['ece'], 3)}" if classes else f"coverage off by {number(found['error'], 3)}"
            labels = number(sum(found["count"]), 0)
            places.append(_place(f"sure-{at}", at, name, f"{figure}, {labels} labels"))
    if not places:
        return Html()
    says = "On the diagonal a head is right as often as it says. Of classes: accuracy against the probability of what "
    says += "is predicted, points larger where they stand for more predictions. Of numbers: what part of labels lies "
    says += "in the interval that should hold that part. Below the line a head is too sure of itself."
    return el("section", el("h2", "How sure, and how right", id_="sure-title"), el("p", says),
              el("div", *places, class_="grid"), aria_labelledby="sure-title")  # fmt: skip


def _sure(found: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Said against true, both from 0 to 1."""
    classes = found["kind"] == "reliability"
    x, y = (found[key] for key in (("confidence", "accuracy") if classes else ("level", "covered")))
    most = max(found["count"]) if classes else 1
    sizes = [7 + 15 * (count / most) ** 0.5 for count in found["count"]] if classes else 8
    texts = [f"{count} predictions" for count in found["count"]] if classes else ["of labels"] * len(x)
    grey = {"color": "var(--muted)", "width": 1, "dash": "dot"}
    even = trace_of("lines", [0, 1], [0, 1], line=grey, hoverinfo="skip")
    colour = look_of(index)["color"]
    line = {"color": colour, "width": 1.5}
    dots = trace_of("lines+markers", x, y, line=line, marker={"color": colour, "size": sizes}, text=texts,
                    hovertemplate="said %{x:.3f}, is %{y:.3f}<br>%{text}<extra></extra>", cliponaxis=False)  # fmt: skip
    ends = {"range": [0, 1], "zeroline": False}
    titles = ("said probability", "accuracy") if classes else ("part that should be inside", "part inside")
    return figure_of([even, dots], (titles[0], ends), (titles[1], ends), showlegend=False)


def _figures(heads: Mapping[str, Any], single: Mapping[str, Any] | None) -> Html:
    """Every metric of every head, a row each; beside it that of the model alone."""
    title = ["Head", "Metric", "All heads", *(["Alone"] if single else []), "Labels", "Held-out labels"]
    body = []
    for at, (name, each) in enumerate(heads.items()):
        alone = ((single["heads"].get(name) or {}) if single else {}).get("metrics", {})
        for place, (metric, value) in enumerate((each["metrics"] or {"–": None}).items()):
            head = join([named(at, name), el("small", " ", each["kind"])]) if not place else el("small", name)
            other = alone.get(metric)
            tone = None
            if not place and other is not None and value is not None and value != other:
                tone = "better" if (value > other) == (each["better"] == "higher") else "worse"
            shown = el("b", number(value, 4), class_=tone) if tone else number(value, 4)
            body.append([head, metric, shown, *([number(other, 4)] if single else []), number(each["labels"], 0),
                         number(each["held_out_labels"], 0)])  # fmt: skip
    return table_of("Metrics on held-out rows", title, body, "figures")


def _single(result: Mapping[str, Any]) -> Html:
    single = result.get("single")
    if not single:
        return Html()
    says = f"Each head alone has a trunk of its own, {single['width']} wide where the shared one is {result['width']}: "
    says += "the largest at which all these models together have no more parameters, and so no more multiplications a "
    says += "row, than the one of all heads. Same loop, rate and seed; each learns from the rows that have its label."
    return el("p", says)


def _notes(result: Mapping[str, Any]) -> list[str]:
    lost = [f"Head {name!r}: no held-out row has its label." for name in result.get("without_held_out_labels", ())]
    return [*lost, *result.get("notes", ())]


def _method(result: Mapping[str, Any]) -> Html:
    return facts({
        "Table": f"{result['table']}: {number(result['rows'], 0)} rows, {number(result['inputs'], 0)} features",
        "Model": f"{number(result['parameters'], 0)} parameters: a trunk of {result['layers']} layers, "
                 f"{result['width']} wide, and heads",
        "Training": f"AdamW, rate {result['lr']}, batches of {result['batch']} rows, {result['epochs']} epochs; losses "
                    f"balanced by {result['balance']}; seed {result['seed']}",
        "Machine": machine(), "Date": str(date.today()),
    })  # fmt: skip
