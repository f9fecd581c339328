"""The report page: complete, escaped, refused by name, whole or absent, and alive in a browser."""

import copy
import json
import math
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="needs manyheads[report]")

from tests.bench.browser import drawn

from manyheads.bench.report import write_report

LAYERS = 4
VOID = {"meta", "link", "br", "img", "input", "hr"}


def row(name: str, floats: int, perplexity: float, **more) -> dict:
    converted = name != "source"
    return {
        "name": name, "spec": f"mla(rank={floats}, rope_dim=32)", "kv_floats_per_token_layer": floats,
        "kv_bytes_per_token": floats * 4 * LAYERS, "perplexity": perplexity, "perplexity_second": 1.4 * perplexity,
        "kl": 0.1, "top1": 0.8, "decode_ms": {"128": 40.1, "2048": 61.9}, "peak_mb": 1200, "sample": f"by {name}",
        "damage": [0.2] * LAYERS if converted else [], "damage_healed": [0.1] * LAYERS if converted else None,
        "stages": {"rope": 2.3, "rank": 2.6, "heal": 2.45} if converted else None, "plan": False, "folder": None,
        "specs": None, **more,
    }  # fmt: skip


@pytest.fixture
def result() -> dict:
    return {
        "model": "tiny", "date": "2026-01-31", "prompt": "Heads are", "machine": "2 cores",
        "text": {"calibration": "topics, first part", "evaluation": "topics, last part", "second": "a licence",
                 "tokens_calibration": 16384, "tokens_evaluation": 10240},
        "seconds": {"calibrate": 41.0, "convert": 62.5, "heal": 120.0, "verify": 88.0},
        "source": row("source", 384, 10.04),
        "candidates": [row("half", 192, 11.9), row("quarter", 96, 16.6, plan=True, specs=["gqa(kv_heads=1)"] * LAYERS)],
    }  # fmt: skip


class Page(HTMLParser):
    """Checks that tags nest, and keeps tags with their attributes, tables' rows and the text of each script."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.rows, self.scripts = [], [], {}, []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag == "table":
            self.table = self.rows.setdefault(attributes["id"], [])
        if tag == "tr":
            self.table.append([])
        if tag in ("td", "th"):
            self.table[-1].append("")
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif {"td", "th"} & set(self.open):
            self.table[-1][-1] += data

    @property
    def figures(self) -> list[dict]:
        return [json.loads(text) for text in self.drawn]

    @property
    def drawn(self) -> list[str]:
        """The scripts that are figures; another one is the packed code that draws them."""
        scripts = zip([a for tag, a in self.tags if tag == "script"], self.scripts, strict=True)
        return [text for attributes, text in scripts if attributes.get("type") == "application/json"]


def written(result: dict, folder: Path) -> str:
    return write_report(result, folder / "report.html").read_text(encoding="utf-8")


def test_page_is_whole_offline_and_small(result, tmp_path):
    before = copy.deepcopy(result)
    path = write_report(result, tmp_path / "report.html")
    page = Page(path.read_text(encoding="utf-8"))
    assert result == before
    assert path.stat().st_size < 6e6
    assert os.listdir(tmp_path) == ["report.html"]
    assert not [a for _, a in page.tags if {"src"} & set(a) or a.get("href", "#")[0] not in "#d"]
    assert [s["name"] for s in page.figures[1]["data"]] == ["half", "half", "quarter", "quarter"]


def test_the_same_result_gives_the_same_bytes(result, tmp_path):
    assert written(result, tmp_path) == written(result, tmp_path)


def test_table_has_captions_scopes_and_differences(result, tmp_path):
    page = Page(written(result, tmp_path))
    head, source, half, quarter = page.rows["figures"]
    assert len(head) == len(source) == len(half) == len(quarter) == 10
    assert half[1:5] == ["192−50.0 %", "3,072−50.0 %", "11.90+18.5 %", "16.66+18.5 %"]
    assert source[1:4] == ["384", "6,144", "10.04"]
    assert len(page.rows["layers"]) == 1 + LAYERS
    assert sum(tag == "caption" for tag, _ in page.tags) == len(page.rows) == 3
    assert all(a.get("scope") in ("row", "col") for tag, a in page.tags if tag == "th")


@pytest.mark.parametrize(
    ("perplexities", "finding"),
    [
        ((11.9, 16.6), "Half the cache, perplexity 10.04 → 11.90 on unseen text"),
        ((11.9, 12.0), "A quarter of the cache, perplexity 10.04 → 12.00 on unseen text"),
        ((20.0, 30.0), "Half the cache, perplexity 10.04 → 20.00 on unseen text"),
        ((math.inf, math.nan), "Half the cache, perplexity 10.04 → ∞ on unseen text"),
        ((), "No candidate: only the source was measured"),
    ],
)
def test_finding(result, tmp_path, perplexities, finding):
    result["candidates"] = result["candidates"][: len(perplexities)]
    for candidate, perplexity in zip(result["candidates"], perplexities, strict=True):
        candidate["perplexity"] = perplexity
    assert f"<h1>{finding}</h1>" in written(result, tmp_path)


def test_best_line_leaves_out_what_another_beats(result, tmp_path):
    result["candidates"].append(row("worse", 192, 14.0))
    line = Page(written(result, tmp_path)).figures[0]["data"][0]
    assert (line["x"], line["y"]) == ([1536, 3072, 6144], [16.6, 11.9, 10.04])


NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&$title"


def test_every_text_is_escaped(result, tmp_path):
    plain = Page(written(result, tmp_path))
    texts = ("name", "spec", "sample", "folder")
    for candidate in [result["source"], *result["candidates"]]:
        candidate.update({key: NASTY for key in texts}, specs=[NASTY], decode_ms={"128": 1}, stages={NASTY: 1.0})
    result.update(model=NASTY, date=NASTY, prompt=NASTY, machine=NASTY, seconds={NASTY: 1.0})
    result["text"].update(calibration=NASTY, evaluation=NASTY, second=NASTY)
    text = written(result, tmp_path)
    page = Page(text)
    assert len(page.scripts) == len(plain.scripts) == 4
    assert not [a for tag, a in page.tags if tag == "img" or any(name.startswith("on") for name in a)]
    assert "<script>alert" not in text
    assert all("<" not in figure for figure in page.drawn)
    assert "&lt;/script&gt;" in page.figures[0]["data"][1]["hovertemplate"]


def test_odd_text_does_not_break_the_page(result, tmp_path):
    result["source"]["sample"] = result["source"]["name"] = "lone \ud83d surrogate, 𝕌, \x00"
    Page(written(result, tmp_path))


def test_optional_keys_may_be_missing_or_null(result, tmp_path):
    optional = ("perplexity_second", "damage", "damage_healed", "stages", "plan", "folder", "specs")
    for key in optional:
        del result["candidates"][0][key]
        result["candidates"][1][key] = None
    del result["text"]["second"]
    page = Page(written(result, tmp_path))
    assert list(page.rows) == ["figures"]
    assert len(page.rows["figures"][0]) == 9
    assert page.figures[1]["data"] == []


def test_a_plan_says_what_it_was_chosen_from(result, tmp_path):
    tried = [
        {"name": name, "cost": cost, "loss": 2.3, "kl": kl}
        for name, cost, kl in (("source", 1.0, 0.0), ("mixed", 0.25, 0.1), ("mla", 0.25, 0.2))
    ]
    result["candidates"][1]["planned"] = {"method": "mixed", "tried": tried, "reasons": ["mixed is nearest", "<b>"]}
    text = written(result, tmp_path)
    page = Page(text)
    assert [" ".join(row[0].split()) for row in page.rows["tried"][1:]] == ["quarter mixed", "quarter mla"]
    assert "&lt;b&gt;" in text and {trace.get("name") for trace in page.figures[2]["data"]} == {None, "mixed", "mla"}


REQUIRED = [
    ("model",), ("text",), ("text", "evaluation"), ("source",), ("source", "kl"), ("candidates",),
    ("candidates", 1, "decode_ms"), ("candidates", 0, "sample"), ("seconds",), ("machine",),
]  # fmt: skip


@pytest.mark.parametrize("keys", REQUIRED)
def test_missing_key_is_named(result, tmp_path, keys):
    *way, last = keys
    holder = result
    for key in way:
        holder = holder[key]
    del holder[last]
    name = "result" + "".join(f"[{key!r}]" for key in keys)
    with pytest.raises(ValueError, match=f"^{re.escape(name)} is missing$"):
        write_report(result, tmp_path / "report.html")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("keys", "value", "wanted"),
    [
        (("source", "kl"), "low", "a number"),
        (("source", "kl"), True, "a number"),
        (("source", "perplexity"), None, "a number"),
        (("source", "spec"), 3, "text"),
        (("source", "plan"), "yes", "true or false"),
        (("source", "damage"), 0.5, "a list"),
        (("source", "specs"), "gqa", "a list"),
        (("candidates",), {}, "a list"),
        (("text",), [], "an object"),
    ],
)
def test_wrong_type_is_named(result, tmp_path, keys, value, wanted):
    *way, last = keys
    holder = result
    for key in way:
        holder = holder[key]
    holder[last] = value
    name = "result" + "".join(f"[{key!r}]" for key in keys)
    with pytest.raises(ValueError, match=f"^{re.escape(name)} should be {wanted}, but it is "):
        write_report(result, tmp_path / "report.html")


def test_context_that_is_no_length_is_named(result, tmp_path):
    result["source"]["decode_ms"] = {"short": 1.0}
    with pytest.raises(ValueError, match=r"'decode_ms'.*'short'"):
        write_report(result, tmp_path / "report.html")


def test_failure_leaves_the_old_page_and_nothing_else(result, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_report(result, path)
    assert os.listdir(tmp_path) == ["report.html"]
    assert path.read_text() == "old"


def test_without_plotly_the_extra_is_named(result, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    with pytest.raises(ImportError, match=r"pip install 'manyheads\[report\]'"):
        write_report(result, tmp_path / "report.html")
    assert os.listdir(tmp_path) == []


@pytest.mark.browser
@pytest.mark.parametrize("nasty", [False, True])
def test_browser_draws_it_without_an_error(result, tmp_path, chromium, nasty):
    if nasty:
        result["candidates"][0].update(name=NASTY, sample=NASTY, spec=NASTY)
    path = write_report(result, tmp_path / "report.html")
    page = drawn(chromium, path, tmp_path)
    body = re.search(r'<table id="figures">.*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    assert body is not None
    assert body[1].count("<tr>") == 3
    assert page.count('class="main-svg"') >= 2
    assert len(re.findall(r'class="trace scatter', page)) == 7 + 4
    assert "<img" not in page
