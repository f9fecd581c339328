"""The page that `manyheads inspect` leaves behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyheads.bench.page import Html, el, facts, figure_of, join, label_of, number, swatch, table_of, write_page
from manyheads.inspect.atlas import SHOWN, Atlas, Shown
from manyheads.inspect.measures.table import HeadTable
from manyheads.inspect.roles import ROLES

COLOURS = "Cividis"
"""Told apart by colour-blind readers, and in print."""
ARCS = 0.1
"""The least weight that is drawn as an arc."""


def write_report(found: Atlas, path: Path) -> Path:
    """Write the atlas as one file that opens without a network."""
    shown = [each for each in SHOWN if each.name in found.tables]
    labelled = len(found.labels)
    heads = sum(found.heads.values())
    size = f"{_count(len(found.heads), 'layer')}, {_count(heads, 'head')}"
    title = f"{found.model}: {labelled} of {heads} heads have a role"
    texts = {
        "kicker": el("p", f"{size} · {found.date}", class_="kicker"),
        "finding": el("h1", title),
        "detail": el("p", _detail(found), class_="lead"),
        "tiles": _tiles(found),
        "legend": el("p", *(join([swatch(i), r.name, ": ", r.says, "\u2003"]) for i, r in enumerate(ROLES, 1))),
        "roles": _chart(found, "roles", "The role of each head, by layer and head. The table of heads names them."),
        "grids": join(_place(found, each) for each in shown),
        "against": _against(found, shown),
        "map": _map_place(found),
        "table": _table(found, shown),
        "notes": el("ul", *(el("li", note) for note in found.notes)) if found.notes else Html(),
        "method": _method(found),
        "glossary": el("dl", *(el("div", el("dt", s.title), el("dd", f"{s.says} In {s.unit}.")) for s in shown),
                       class_="glossary"),
    }  # fmt: skip
    charts = {"roles": _roles(found), **{f"grid-{each.name}": _grid(found, each) for each in shown}}
    if found.against is not None:
        both = [each for each in shown if each.name in found.against.tables]
        charts |= {f"change-{each.name}": _change(found, found.against, each) for each in both}
    return write_page(path, "atlas.html", title, texts, charts, _packed_maps(found), room="manyheads.inspect")


def _against(found: Atlas, shown: list[Shown]) -> Html:
    """What differs from another model, measure by measure."""
    other = found.against
    if other is None:
        return Html()
    both = [each for each in shown if each.name in other.tables]
    says = f"{found.model} less {other.model}, on the same text; blank where either has no such head or no such number."
    places = [
        el("figure", el("h3", el("b", each.title), " ", el("small", each.unit)),
           _chart(found, f"change-{each.name}", f"Change of {each.title} of each head, by layer, in {each.unit}."))
        for each in both
    ]  # fmt: skip
    return el(
        "section", el("h2", f"Beside {other.model}", id_="against-title"), el("p", says),
        el("div", *places, class_="grid"), aria_labelledby="against-title",
    )  # fmt: skip


def _change(found: Atlas, other: Atlas, shown: Shown) -> dict[str, Any]:
    """A grid of differences, zero in the middle of the colours."""
    most = max(found.heads.values())
    values = [
        [None if a is None or b is None else float(f"{a - b:.6g}") for a, b in zip(*rows, strict=True)]
        for layer in found.heads
        for rows in [[_row(each.tables[shown.name], layer, most)[:most] for each in (found, other)]]
        for rows in [[row + [None] * (most - len(row)) for row in rows]]
    ]
    top = max((abs(x) for row in values for x in row if x is not None), default=0.0) or 1.0
    title = label_of(f"change of {shown.title}")
    trace = {
        "z": values, "colorscale": "RdBu", "zmin": -top, "zmax": top,
        "colorbar": {"thickness": 8, "outlinewidth": 0, "tickfont": {"size": 11}},
        "hovertemplate": f"%{{customdata}}<br>{title}: %{{z:+.{max(2, shown.digits)}f}}<extra></extra>",
    }  # fmt: skip
    return _heatmap(found, trace)


def _map_place(found: Atlas) -> Html:
    if found.maps is None:
        return Html()
    says = f"Choose a head by a click on a cell, or in the table: its weights over the first {len(found.maps.words)} "
    says += "tokens of the text, queries down and keys across, in 256 steps from its lowest to its highest."
    label = "Weights of the chosen head"
    chart = el("div", class_="chart", id_="map", role="group", aria_label=label, style="height: 34rem", hidden="")
    arcs = el("div", class_="arcs", id_="arcs", role="img", data_from=str(ARCS), tabindex="0", hidden="")
    below = (
        f"As arcs, from each token to others with {ARCS} of its weight or more, but the first; dashed to later ones."
    )
    return el("section", el("h2", "The map of a head", id_="map-title"), el("p", says, id_="map-says"),
              el("div", id_="map-facts", hidden=""), chart,
              el("p", below, hidden=""), arcs, aria_labelledby="map-title")  # fmt: skip


def _packed_maps(found: Atlas) -> dict[str, bytes]:
    """All codes one after the other, and before them, in a line of JSON, whose they are."""
    if found.maps is None:
        return {}
    maps = found.maps
    head = {"words": maps.words, "layers": [
        {"layer": n, "ends": [[round(x, 6) for x in pair] for pair in ends], "near": maps.near.get(n, []),
         "writes": maps.writes.get(n, [])}
        for n, ends in maps.ends.items()
    ]}  # fmt: skip
    line = json.dumps(head, ensure_ascii=True).encode() + b"\n"
    return {"maps": line + b"".join(codes.numpy().tobytes() for codes in maps.codes.values())}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _names(found: Atlas) -> list[str]:
    return [f"L{layer}" for layer in found.heads]


def _grid(found: Atlas, shown: Shown) -> dict[str, Any]:
    """Layers down, heads across."""
    table, most = found.tables[shown.name], max(found.heads.values())
    values = [_row(table, layer, most) for layer in found.heads]
    known = [x for row in values for x in row if x is not None]
    low, high = (end if end is not None else pick(known, default=0.0)
                 for end, pick in zip(shown.ends, (min, max), strict=True))  # fmt: skip
    trace = {
        "z": values, "colorscale": COLOURS, "zmin": low, "zmax": high if high > low else low + 1,
        "colorbar": {"thickness": 8, "outlinewidth": 0, "tickfont": {"size": 11}},
        "hovertemplate": f"%{{customdata}}<br>{label_of(shown.title)}: %{{z:.{max(2, shown.digits)}f}}<extra></extra>",
    }  # fmt: skip
    return _heatmap(found, trace)


def _row(table: HeadTable, layer: int, most: int) -> list[float | None]:
    row = table[layer].tolist() if layer in table else []
    return [float(f"{x:.6g}") if x == x else None for x in row] + [None] * (most - len(row))


def _heatmap(found: Atlas, trace: Mapping[str, Any]) -> dict[str, Any]:
    most = max(found.heads.values())
    says = [[_says(found, layer, head) for head in range(most)] for layer in found.heads]
    data = {"type": "heatmap", "x": list(range(most)), "y": _names(found), "customdata": says, "xgap": 1, "ygap": 1,
            **trace}  # fmt: skip
    # ranges of all heads, since a grid without any number has none of its own
    x = {"showgrid": False, "zeroline": False, "range": [-0.5, most - 0.5], **({"dtick": 1} if most <= 16 else {})}
    y = {
        "type": "category", "categoryorder": "array", "categoryarray": _names(found),
        "range": [len(found.heads) - 0.5, -0.5], "showgrid": False,
    }  # fmt: skip
    return figure_of([data], ("head", x), ("", y), showlegend=False)


def _says(found: Atlas, layer: int, head: int) -> str:
    labels = found.labels.get((layer, head), ())
    return f"<b>layer {layer}, head {head}</b>" + (f" ({label_of(', '.join(labels))})" if labels else "")


def _roles(found: Atlas) -> dict[str, Any]:
    """Each head in the colour of its strongest role, with its first letters."""
    index, most = {role.name: i for i, role in enumerate(ROLES)}, max(found.heads.values())
    first = [[found.labels.get((layer, head), (None,))[0] for head in range(most)] for layer in found.heads]
    steps: list[tuple[float, str]] = []
    for i in range(len(ROLES)):
        colour = f"var(--c{i})"
        steps += [(i / len(ROLES), colour), ((i + 1) / len(ROLES), colour)]
    trace = {
        "z": [[None if name is None else index[name] for name in row] for row in first],
        "text": [["" if name is None or most > 16 else name[:4] for name in row] for row in first],
        "texttemplate": "%{text}", "textfont": {"size": 11, "color": "var(--card)"},
        "colorscale": steps, "zmin": -0.5, "zmax": len(ROLES) - 0.5, "showscale": False,
        "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip
    return _heatmap(found, trace)


def _place(found: Atlas, shown: Shown) -> Html:
    label = f"{shown.title} of each head by layer, in {shown.unit}. The table of heads holds every number."
    title = el("h3", el("b", shown.title), " ", el("small", shown.unit))
    return el("figure", title, el("p", shown.says), _chart(found, f"grid-{shown.name}", label))


def _chart(found: Atlas, name: str, label: str) -> Html:
    """As high as there are layers."""
    height = f"height: {max(16, 6 + 0.75 * len(found.heads)):.0f}rem"
    return el("div", class_="chart", id_=name, role="group", aria_label=label, style=height)


def _table(found: Atlas, shown: list[Shown]) -> Html:
    head = ["Head", "Roles", *(join([each.title, el("small", each.unit)]) for each in shown)]
    body = []
    for layer, count in found.heads.items():
        for one in range(count):
            values = [found.tables[each.name] for each in shown]
            cells = [
                number(float(table[layer][one]) if layer in table else None, each.digits)
                for each, table in zip(shown, values, strict=True)
            ]
            name = f"{layer}.{one}"
            linked = found.maps is not None and layer in found.maps.codes
            body.append(
                [
                    el("a", name, href=f"#map-{layer}-{one}") if linked else name,
                    ", ".join(found.labels.get((layer, one), ())),
                    *cells,
                ]
            )
    return table_of("Layer and head, its roles, and every measure", head, body, "heads")


def _tiles(found: Atlas) -> Html:
    counts = {role.name: sum(role.name in of for of in found.labels.values()) for role in ROLES}
    tiles = [(f"{name} heads", str(count)) for name, count in counts.items()]
    if found.bottlenecks is not None:
        tiles.append(("heads with no direction to spare", str(found.bottlenecks)))
    return el("dl", *(el("div", el("dt", name), el("dd", value)) for name, value in tiles), class_="tiles")


def _detail(found: Atlas) -> str:
    said = []
    for name, verb in (("importance", "matters most to the loss"), ("induction", "is the strongest induction head")):
        if name in found.tables and (top := found.tables[name].top(1)):
            layer, head, value = top[0]
            if name == "induction" and name not in found.labels.get((layer, head), ()):
                continue
            said.append(f"head {layer}.{head} {verb} ({number(value, 3)})")
    if "twin" in found.tables and (top := found.tables["twin"].top(1)):
        layer, head, value = top[0]
        said.append(f"head {layer}.{head} adds most nearly what another of its layer does (CKA {number(value, 2)})")
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]}." if said else ""


def _method(found: Atlas) -> Html:
    return facts({
        "Model": found.model, "Text": f"{found.text}: {found.tokens} tokens",
        "Queries": "those that see two keys or more, padding left out; means over all of them",
        "Tokens at random": "64 different ones (or as many as the model takes), twice in a row, four sequences",
        "Weights": "recomputed from queries and keys beside the model's own kernels, whose outputs do not change",
        "Layers": join(el("code", label_of(name) + " ") for name in dict.fromkeys(_kinds(found))),
        "Time": f"{number(found.seconds, 0)} s", "Machine": found.machine, "Date": found.date,
    })  # fmt: skip


def _kinds(found: Atlas) -> list[str]:
    """What layers are, without their numbers."""
    return [name.partition("(")[2].removesuffix(")") for name in found.names.values()][:1]
