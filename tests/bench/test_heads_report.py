"""The page of a model of many heads: every figure, nothing unescaped, sections only where there is something."""

import copy
import math

import pytest
from tests.bench.test_report import Page

from manyheads.bench.heads_report import ahead, write_heads

NASTY = "<b>&\"'</script><script>alert(1)</script>"


def result():
    sure = {"kind": "reliability", "ece": 0.125, "count": [3, 5], "confidence": [0.6, 0.9], "accuracy": [0.5, 1.0]}
    curves = {"train": [1.0, None], "held_out": [0.9, 0.8], "metric": [0.5, 0.75]}
    head = {"kind": "classification", "better": "higher", "labels": 40, "held_out_labels": 8}
    number = {"kind": "regression", "better": "lower", "labels": 30, "held_out_labels": 0, "calibration": None}
    return {
        "table": "t.csv", "rows": 50, "held_out": 8, "epochs": 2, "best_epoch": 2, "parameters": 1234, "balance": "sum",
        "seed": 0, "batch": 64, "lr": 0.003, "width": 64, "layers": 2, "inputs": 7,
        "heads": {
            "kind": head | {"metrics": {"accuracy": 0.75}, "calibration": sure},
            "age": number | {"metrics": {"rmse": 2.5, "r2": math.nan}},
            "lost": number | {"metrics": {}},
        },
        "curves": {"kind": curves, "age": curves, "lost": {key: [None, None] for key in curves}},
        "without_held_out_labels": ["lost"], "notes": ["a note"],
    }  # fmt: skip


SINGLE = {
    "width": 30, "parameters": 1200,
    "heads": {"kind": {"metrics": {"accuracy": 0.5}}, "age": {"metrics": {"rmse": 2.0, "r2": 0.5}}, "lost": None},
}  # fmt: skip


def page(found, tmp_path):
    return write_heads(found, tmp_path).read_text(encoding="utf-8")


def test_every_figure_is_there(tmp_path):
    text = page(result() | {"single": SINGLE}, tmp_path)
    made = Page(text)
    assert [row[1:] for row in made.rows["figures"][1:]] == [
        ["accuracy", "0.7500", "0.5000", "40", "8"], ["rmse", "2.5000", "2.0000", "30", "0"],
        ["r2", "–", "0.5000", "30", "0"], ["–", "–", "–", "30", "0"],
    ]  # fmt: skip
    assert '<b class="better">0.7500' in text and '<b class="worse">2.5000' in text
    assert "One trunk is better than models of one head for 1 of 3 heads" in text
    assert (
        "1,200 parameters in all, the one of all heads 1,234" in text and "30 wide where the shared one is 64" in text
    )
    assert "Head 'lost': no held-out row" in text.replace("&#x27;", "'") and "a note" in text
    assert [len(figure["data"]) for figure in made.figures] == [3, 3, 2]
    assert made.figures[0]["data"][0]["y"] == [1.0, None] and made.figures[2]["data"][1]["y"] == [0.5, 1.0]
    assert "ECE 0.125, 8 labels" in text


def test_ahead_is_by_the_first_metric_and_its_better_side():
    found = result() | {"single": SINGLE}
    assert [ahead(name, found) for name in found["heads"]] == [True, False, None]
    assert ahead("kind", result()) is None


def test_sections_only_where_there_is_something(tmp_path):
    found = result()
    found["heads"]["kind"]["calibration"] = None
    text = page(found, tmp_path)
    assert "How sure" not in text and "Alone" not in text and "better than models" not in text
    assert "3 heads: kind accuracy 0.750, age rmse 2.500" in text


def test_names_are_escaped(tmp_path):
    found = result() | {"single": copy.deepcopy(SINGLE), "table": NASTY, "notes": [NASTY]}
    for part in (found["heads"], found["curves"], found["single"]["heads"]):
        part[NASTY] = part.pop("kind")
    text = page(found, tmp_path)
    assert "alert(1)</script>" not in text and Page(text)


@pytest.mark.parametrize(("change", "says"), [
    ({"rows": None}, r"result\['rows'\] should be a number"), ({"heads": []}, r"result\['heads'\] should be an object"),
])  # fmt: skip
def test_results_that_are_none(tmp_path, change, says):
    with pytest.raises(ValueError, match=says):
        write_heads(result() | change, tmp_path)
    assert not list(tmp_path.iterdir())
