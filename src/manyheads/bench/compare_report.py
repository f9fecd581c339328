"""The page that `manyheads compare` leaves behind: curves of loss, loss against what it costs, and every figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from manyheads.bench.comparison import Comparison, Entry
from manyheads.bench.page import (
    Column,
    Html,
    Row,
    el,
    facts,
    figure_of,
    figures_table,
    label_of,
    look_of,
    named,
    number,
    pareto,
    trace_of,
    write_page,
)

COLUMNS = {
    "dim": Column("Width", "channels", lambda row: row["dim"], 0, compare=False),
    "hidden": Column("Feed-forward", "channels", lambda row: row["hidden"], 0, compare=False),
    "parameters": Column("Parameters", "", lambda row: row["parameters"], 0, better=0),
    "flops": Column("Training", "MFLOP / token", lambda row: row["flops"] / 1e6, 2),
    "cache": Column("Cache", "bytes / token", lambda row: row["cache_measured"], 0),
    "step": Column("Training step", "ms", lambda row: row["step_ms"], 1),
    "decode": Column("Decoding", "tokens / s", lambda row: row["tokens_per_second"], 0, better=1),
    "loss": Column("Loss", "nats, ± spread", lambda row: row["loss"], 3, give=lambda row: row["spread"]),
    "difference": Column(
        "To the base",
        "nats, ± error",
        lambda row: row["difference"],
        3,
        compare=False,
        give=lambda row: row["difference_error"],
    ),
}
_AGAINST = {"parameters": "parameters", "cache": "cache, bytes per token", "decode": "decoded tokens per second",
            "step": "training step, ms"}  # fmt: skip


def write_comparison(found: Comparison, folder: Path) -> Comparison:
    """Write `report.html`; what is returned says so, or that plotly is not installed."""
    rows = found.to_json()["entries"]
    finding, detail = _finding(found)
    filled = len({row["hidden"] for row in rows}) > 1
    columns = COLUMNS if filled else {key: column for key, column in COLUMNS.items() if key != "hidden"}
    texts = {
        "kicker": el("p", f"{len(rows)} specs, {found.options['seeds']} seeds · {found.date}", class_="kicker"),
        "finding": el("h1", finding),
        "detail": el("p", detail, class_="lead"),
        "tiles": _tiles(rows, _best(found)),
        "legend": el("p", *(el("code", named(i, row["spec"])) for i, row in enumerate(rows)), class_="legend"),
        "figures": figures_table(
            "The first spec is the base. In small print: the difference to it", "Spec",
            [el("b", named(i, row["spec"])) for i, row in enumerate(rows)], rows, columns.values(),
        ),
        "notes": el("ul", *(el("li", note) for note in found.notes)) if found.notes else Html(),
        "method": _method(found),
    }  # fmt: skip
    charts = {"curves": _curves(found), **{key: _against(rows, key, title) for key, title in _AGAINST.items()}}
    try:
        write_page(folder / "report.html", "comparison.html", finding, texts, charts)
    except ImportError as error:
        return replace(found, report=None, notes=(*found.notes, f"no report.html: {error}"))
    return found


def _best(found: Comparison) -> int:
    """The entry of the lowest loss; the base where none has one."""
    losses = [entry.loss for entry in found.entries]
    return min(range(len(losses)), key=lambda index: losses[index] if math.isfinite(losses[index]) else math.inf)


def _finding(found: Comparison) -> tuple[str, str]:
    best, base = found.entries[_best(found)], found.base
    loss, other = (number(entry.loss, 3) for entry in (best, base))
    if best is base:
        others = "no other spec is below it" if len(found.entries) > 1 else "the only spec"
        return f"{base.spec} has the lowest loss, {loss}", f"Of {len(found.entries)} specs: {others}."
    difference, error = found.difference(best)
    said = f"The lowest loss of all, {number(difference, 3)} to the base"
    if error is None:
        said += ". One seed does not say how sure that is."
    else:
        said += f", paired by seed, with a standard error of {number(error, 3)}."
        said += " That is less than twice the error and may be chance." if abs(difference) < 2 * error else ""
    said += _price(best, base)
    return f"{best.spec}: loss {loss}, against {other} of {base.spec}", said


def _price(best: Entry, base: Entry) -> str:
    """What the best has more of than the base, or is slower at, by a tenth or more."""
    pairs = {
        "the parameters": (best.parameters, base.parameters),
        "the training FLOPs": (best.flops, base.flops),
        "the cache": (best.cache_measured, base.cache_measured),
        "the time of a training step": (best.step_ms, base.step_ms),
        "the time of decoding": (base.tokens_per_second, best.tokens_per_second),
    }
    more = [f"{number(a / b, 1)} times {what}" for what, (a, b) in pairs.items() if b and a / b >= 1.1]
    last = more.pop() if more else ""
    return f" It takes {', '.join(more)}{' and ' if more else ''}{last} of {base.spec}." if last else ""


def _tiles(rows: Sequence[Row], best: int) -> Html:
    def tile(key: str) -> Html:
        column = COLUMNS[key]
        now, base = (number(column.get(rows[index]), column.digits) for index in (best, 0))
        value = el("dd", now, " ", el("small", column.unit.split(",")[0]))
        return el("div", el("dt", column.title), value, el("dd", f"base {base}") if best else None)

    return el("dl", *map(tile, ("loss", "parameters", "cache", "decode", "step")), class_="tiles")


def _curves(found: Comparison) -> dict[str, Any]:
    """The mean over seeds as a line, from the lowest to the highest seed as a band."""
    grid, data, seen = list(found.grid), [], []
    for index, entry in enumerate(found.entries):
        look, points = look_of(index), list(zip(*entry.curves, strict=True))
        group = {"name": label_of(entry.spec), "legendgroup": f"{index}"}
        fine = [(step, point) for step, point in zip(grid, points, strict=True) if all(map(math.isfinite, point))]
        if len(entry.curves) > 1:
            high, low = ([f(point) for _, point in fine] for f in (max, min))
            x = [step for step, _ in fine]
            band = {"fill": "toself", "fillcolor": look["color"], "opacity": 0.2, "line": {"width": 0}}
            more = {"hoverinfo": "skip", "showlegend": False}
            data.append(trace_of("lines", x + x[::-1], high + low[::-1], **band, **more, **group))
        hover = f"<b>{label_of(entry.spec)}</b><br>step %{{x}}: %{{y:.4f}}<extra></extra>"
        line = {"color": look["color"], "width": 2}
        marker = {**look, "size": 7}
        means = [mean(point) for _, point in fine]
        seen += [loss for (step, _), loss in zip(fine, means, strict=True) if step > grid[-1] / 8]
        data.append(
            trace_of("lines+markers", [step for step, _ in fine], means, line=line, marker=marker,
                     hovertemplate=hover, **group)
        )  # fmt: skip
    margin = 0.06 * (max(seen) - min(seen)) if seen else 0
    y = {"range": [min(seen) - margin, max(seen) + margin]} if margin else {}
    return figure_of(data, ("step", {"zeroline": False}), ("held-out loss, nats per token", y), showlegend=True)


def _against(rows: Sequence[Row], key: str, title: str) -> dict[str, Any]:
    """The loss of each spec against one figure, with the spread of its seeds."""
    column, data = COLUMNS[key], []
    known = [(index, row) for index, row in enumerate(rows) if row["loss"] is not None]
    sign = -1 if column.better > 0 else 1  # from the best figure on: the lowest loss at it or a better one
    best = pareto((sign * (column.get(row) or 0), row["loss"]) for _, row in known)
    line = {"shape": "hv", "color": "var(--muted)", "width": 1.5, "dash": "dot"}
    data.append(trace_of("lines", [sign * x for x, _ in best], [y for _, y in best], line=line, hoverinfo="skip"))
    for index, row in known:
        look, name = look_of(index), label_of(row["spec"])
        parts = [f"{c.title}: {c.text(row)} {c.unit}" for c in (column, COLUMNS["loss"])]
        bars = {"type": "data", "array": [row["spread"] or 0], "color": look["color"], "thickness": 1.2, "width": 4}
        data.append(
            trace_of("markers", [column.get(row) or 0], [row["loss"]], marker={**look, "size": 11}, error_y=bars,
                     hovertemplate="<br>".join([f"<b>{name}</b>", *parts]) + "<extra></extra>", cliponaxis=False)
        )  # fmt: skip
    return figure_of(data, (title, {"tickformat": "~s"}), ("loss", {}), showlegend=False)


def _method(found: Comparison) -> Html:
    options = found.options
    rising = options["steps"] // 10 if options["warmup"] is None else options["warmup"]
    tokens = options["steps"] * options["batch"] * options["context"]
    return facts({
        "Models": f"{options['layers']} layers, {options['heads']} query heads, feed-forward {options['ffn']}, width "
                  f"{options['dim']} of the base; bytes as tokens, the head tied to the embedding",
        "Equal": {"none": "the width", "params": "parameters", "flops": "training FLOPs a token",
                  "cache": "cache bytes a token"}[options["equal"]],
        "Text": f"{found.text}: the first 80 % trained on, the loss measured on the rest",
        "Training": f"{options['steps']} steps of {options['batch']} × {options['context']} tokens "
                    f"({number(tokens, 0)} in all), the same for every spec; rate {options['lr']}, "
                    f"{rising} steps of warm-up, then a cosine; {options['dtype']}",
        "Timing": f"side by side, {options['threads']} threads; decoding one sequence, the last token is number "
                  f"{options['context']}",
        "Machine": found.machine,
        "Time": f"{number(found.seconds, 0)} s of training in all",
        "Date": found.date,
    })  # fmt: skip
