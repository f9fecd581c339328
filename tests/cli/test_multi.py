"""`manyheads multi`: a table with gaps, from training to predictions."""

import csv
import json
import math
import re

import pytest
import torch
from tests.cli.line import refused, run

from manyheads.multi import MultiHead
from manyheads.multi.fit import TableModel
from manyheads.multi.folder import load, save
from manyheads.multi.table import Column, parse_targets, read_table


def write(path, columns):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


@pytest.fixture(scope="module")
def columns():
    torch.manual_seed(0)
    a, b = torch.randn(200).tolist(), torch.rand(200).tolist()
    city = ["Bonn", "Ulm", "Köln"] * 66 + ["Bonn", "Ulm"]
    gap = torch.rand(3, 200) < 0.3
    return {
        "id": list(range(200)),
        "a": ["" if i % 11 == 0 else f"{v:.4f}" for i, v in enumerate(a)],
        "city": ["NA" if i % 13 == 0 else v for i, v in enumerate(city)],
        "wage": ["" if gap[0, i] else f"{1000 + 200 * v + 50 * (city[i] == 'Ulm'):.3f}" for i, v in enumerate(a)],
        "kind": ["?" if gap[1, i] else ("x" if v > 0 else "y") for i, v in enumerate(a)],
        "stars": ["" if gap[2, i] else 1 + int(4 * (1 / (1 + math.exp(-2 * v)))) for i, v in enumerate(a)],
        "noise": [f"{v:.3f}" for v in b],
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory, columns):
    folder = tmp_path_factory.mktemp("multi")
    path = write(folder / "table.csv", columns)
    line = "wage:regression(uncertainty=true),kind,stars:ordinal"
    ran = run(
        "multi", "train", path, "--targets", line, "--drop", "id", "--out", folder / "out", "--epochs", "25", "--json"
    )
    assert ran.code == 0, ran
    return folder, ran


def test_training_learns_says_so_and_writes_it(trained):
    folder, ran = trained
    result = json.loads((folder / "out" / "result.json").read_text(encoding="utf-8"))
    assert ran.json == result and set(result["heads"]) == {"wage", "kind", "stars"}
    assert result["heads"]["wage"]["metrics"]["r2"] > 0.5 and result["heads"]["kind"]["metrics"]["accuracy"] > 0.8
    assert result["heads"]["stars"]["metrics"]["mae"] < 0.8 and result["heads"]["stars"]["kind"] == "ordinal"
    assert 60 < result["heads"]["wage"]["labels"] < 160 and result["held_out"] == 40
    assert all(name in ran.out for name in ("wage", "r2", "accuracy", "ordinal"))
    assert not [line for line in ran.out.splitlines()[:-1] if len(line) > 80 and str(folder) not in line]


def test_predictions_are_in_the_labels_own_terms_and_gaps_are_no_hindrance(trained, columns):
    folder, _ = trained
    new = {"a": ["1.5", "", "-1.5"], "city": ["Ulm", "Mars", ""], "noise": ["0.1", "0.2", ""]}
    ran = run(
        "multi", "predict", folder / "out", write(folder / "new.csv", new), "--out", folder / "said.csv", "--json"
    )
    assert ran.code == 0 and ran.json == {"rows": 3, "metrics": {}}
    said = read_table(folder / "said.csv")
    assert list(said) == ["wage", "wage (deviation)", "kind", "kind (probability)", "stars", "stars (probability)"]
    assert said["kind"][0] == "x" and said["kind"][2] == "y" and set(said["stars"]) <= {"1", "2", "3", "4"}
    assert 1000 < float(said["wage"][0]) < 1600 and float(said["wage (deviation)"][0]) > 0
    again = run("multi", "predict", folder / "out", folder / "table.csv")
    assert again.code == 0 and len(again.out.splitlines()) == 201 and "note: wage: rmse" in again.err


def test_a_row_is_what_it_is_in_any_table(trained):
    folder, _ = trained
    model, cells = TableModel.load(folder / "out"), read_table(folder / "table.csv")
    one = model.predict({name: each[5:6] for name, each in cells.items()})
    for name, values in model.predict(cells).items():
        alone = one[name][0]
        assert values[5] == (pytest.approx(alone, rel=1e-5) if isinstance(alone, float) else alone)


def test_a_folder_says_which_head_is_more_or_less_than_the_code(tmp_path):
    def model(**heads):
        torch.manual_seed(len(heads))
        return MultiHead(torch.nn.Linear(3, 4), heads)

    there = model(a="regression", b="regression", c="classification(classes=2)", d="span")
    save(there, tmp_path)
    same = model(a="regression", b="regression", c="classification(classes=2)", d="span")
    assert load(same, tmp_path) == [] and torch.equal(same.net("a").weight, there.net("a").weight)
    here = model(a="regression", c="classification(classes=3)", e="regression")
    with pytest.raises(ValueError, match=r"head 'b' is in the folder, and not in this.*'e' is in this model"):
        load(here, tmp_path)
    kept = here.net("e").weight.clone()
    differ = load(here, tmp_path, strict=False)
    assert len(differ) == 4 and any("head 'c' is {" in each for each in differ)
    assert torch.equal(here.net("a").weight, there.net("a").weight) and torch.equal(here.net("e").weight, kept)
    assert torch.equal(here.trunk.weight, there.trunk.weight)
    with pytest.raises(ValueError, match="the trunk there is another one"):
        load(MultiHead(torch.nn.Linear(2, 4), {"a": "regression"}), tmp_path, strict=False)


@pytest.mark.parametrize(("targets", "says"), [
    ("gone", "head 'gone': .*has no column 'gone'; it has 'id', 'a'"),
    ("kind,kind:ordinal", "head 'kind': two heads have this name"),
    ("empty", "head 'empty': its label is missing everywhere"),
    ("kind:classification(classes=1)", "head 'kind': .*at least 2"),
    ("stars:classification(classes=3)", "head 'stars': label '4' is one of 4, but"),
    ("kind:regression", "head 'kind': could not convert|head 'kind'.*'x'"),
    ("a:span", "head 'a': a column of a table is no label of span"),
    ("kind:tree", "head 'kind': there is no head 'tree'|no head 'tree'"),
    ("same", "head 'same': every label is 's'"),
])  # fmt: skip
def test_targets_that_cannot_be(tmp_path, columns, targets, says):
    path = write(tmp_path / "table.csv", columns | {"empty": [""] * 200, "same": ["s"] * 200})
    ran = run("multi", "train", path, "--targets", targets, "--out", tmp_path / "out")
    assert ran.code == 1 and re.search(says, ran.err, re.S), ran.err
    assert not (tmp_path / "out").exists()


def test_tables_that_cannot_be_read(tmp_path, trained):
    path = tmp_path / "t.csv"
    for text, says in (
        ("a,b\n1\n", "row 2 has 1 cells"),
        ("a,a\n1,2\n", "two columns are named 'a'"),
        ("a\n", "at least one row"),
    ):
        path.write_text(text, encoding="utf-8")
        assert says in refused("multi", "train", path, "--targets", "a", "--out", tmp_path / "o")
    folder, _ = trained
    path.write_text("a,city\n1,Ulm\n", encoding="utf-8")
    assert "no column 'noise', which the model reads" in refused("multi", "predict", folder / "out", path)
    path.write_text("a,city,noise\n1,Ulm,loud\n", encoding="utf-8")
    assert "column 'noise' holds numbers" in refused("multi", "predict", folder / "out", path)
    assert "exists already" in refused("multi", "train", path, "--targets", "a", "--out", folder / "out")
    assert "no folder of a model" in refused("multi", "predict", tmp_path, path)


def test_lines_of_targets_and_columns():
    assert parse_targets("a:matryoshka(classes=2, slices=[1,2]), b ,c:density(components=3)") == {
        "a": "matryoshka(classes=2, slices=[1,2])", "b": None, "c": "density(components=3)",
    }  # fmt: skip
    column = Column.of("n", ["1", None, "3"])
    assert column.features(["2", None, "4"]).tolist() == [[0, 0], [0, 1], [2, 0]]
    words = Column.of("w", ["b", "a", "b"])
    assert words.texts == ("b", "a") and words.features(["a", "c", None]).tolist() == [[0, 1], [0, 0], [0, 0]]
