"""`manyheads multi`: a table with gaps, from training to predictions."""

import csv
import json
import math
import re
import shutil
import sys

import pytest
import torch
from tests.bench.browser import drawn
from tests.bench.test_report import Page
from tests.cli.line import refused, run, save_tiny

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
    told = ("--drop", "id", "--out", folder / "out", "--epochs", "25", "--compare", "single", "--json")
    ran = run("multi", "train", path, "--targets", line, *told)
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


def test_models_of_one_head_are_together_no_larger_and_stand_beside(trained):
    _, ran = trained
    single, result = ran.json["single"], ran.json
    assert 0.9 * result["parameters"] < single["parameters"] <= result["parameters"] and single["width"] < 64
    assert single["heads"]["kind"]["metrics"]["accuracy"] > 0.8 and set(single["heads"]) == set(result["heads"])
    assert "alone" in ran.out and f"trunks {single['width']} wide" in ran.out


def test_the_page_holds_every_figure(trained):
    folder, ran = trained
    text = (folder / "out" / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    rows = iter(page.rows["figures"][1:])
    for name, each in ran.json["heads"].items():
        for metric, value in each["metrics"].items():
            head, *cells = next(rows)
            other = ran.json["single"]["heads"][name]["metrics"][metric]
            assert name in head and cells[:3] == [metric, *(f"{v:,.4f}".replace("-", "−") for v in (value, other))]
            assert cells[3:] == [str(each["labels"]), str(each["held_out_labels"])]
    charts = [attributes["id"] for _, attributes in page.tags if attributes.get("class") == "chart"]
    assert charts == [f"{kind}-{at}" for kind in ("curve", "sure") for at in range(3)]
    curves = [figure for figure in page.figures if len(figure["data"]) == 3]
    assert len(page.figures) == 6 and curves[1]["data"][1]["y"] == ran.json["curves"]["kind"]["held_out"]
    assert curves[1]["layout"]["shapes"][0]["x0"] == ran.json["best_epoch"]
    kinds = [each["calibration"]["kind"] for each in ran.json["heads"].values()]
    assert kinds == ["coverage", "reliability", "reliability"]


@pytest.mark.browser
def test_browser_draws_the_page_without_an_error(trained, tmp_path, chromium):
    folder, _ = trained
    page = drawn(chromium, folder / "out" / "report.html", tmp_path)
    assert len(re.findall(r'class="trace scatter', page)) == 3 * 3 + 2 * 3


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


@pytest.mark.parametrize(("damage", "says"), [
    (lambda told: told.pop("heads"), "heads.json is damaged: it lacks 'heads'"),
    (lambda told: told.pop("trunk"), "heads.json is damaged: it lacks 'trunk'"),
    (lambda told: told.pop("classes"), "heads.json is damaged: it lacks 'classes'"),
    (lambda told: told["heads"]["kind"].pop("kind"), "heads.json is damaged: it lacks 'kind'"),
    (lambda told: told["heads"]["kind"].update(what=1), "heads.json is damaged: .*'what'"),
    (lambda told: told.update(heads=["kind"]), "heads.json is damaged: "),
    (lambda told: told["columns"].pop(), "heads.json is damaged: its columns are . features, and its trunk reads"),
    (lambda told: told["columns"][0].pop("name"), "heads.json is damaged: .*'name'"),
    (lambda told: told["trunk"].update(width=32), "head 'wage' is .*'width': 64.* in the folder, and "),
    (lambda told: told["trunk"].update(layers=3), "model.safetensors: it has no weights of 'trunk.6.weight'"),
    (lambda told: told["columns"].pop() and told["trunk"].update(inputs=5),
     r"model.safetensors: 'trunk.0.weight' is \[64, 7\] there, and \[64, 5\] in this model"),
    (lambda told: told["heads"].pop("kind"), "model.safetensors: it has weights of head 'kind'"),
    (lambda told: told["heads"].update(new=told["heads"]["kind"]) or told["classes"].update(new=["x", "y"]),
     "model.safetensors: it has no weights of head 'new'"),
])  # fmt: skip
def test_a_folder_whose_description_is_damaged_says_where(trained, tmp_path, damage, says):
    folder, out = trained[0] / "out", tmp_path / "out"
    shutil.copytree(folder, out)
    told = json.loads((out / "heads.json").read_text(encoding="utf-8"))
    damage(told)
    (out / "heads.json").write_text(json.dumps(told), encoding="utf-8")
    error = refused("multi", "predict", out, trained[0] / "table.csv", "--out", tmp_path / "said.csv")
    assert re.search(says, error) and str(out) in error and not (tmp_path / "said.csv").exists()


@pytest.mark.parametrize("name", ["heads.json", "model.safetensors"])
@pytest.mark.parametrize("keep", [5, -5])
def test_a_file_that_is_cut_is_named(trained, tmp_path, name, keep):
    out = tmp_path / "out"
    shutil.copytree(trained[0] / "out", out)
    (out / name).write_bytes((out / name).read_bytes()[:keep])
    assert f"{out / name} is damaged: " in refused("multi", "predict", out, trained[0] / "table.csv")


def test_a_label_that_is_not_known_leaves_no_file(trained):
    folder, _ = trained
    new = write(folder / "wrong.csv", {"a": ["1"], "city": ["Ulm"], "noise": ["0"], "kind": ["bird"]})
    assert "'bird' is none of" in refused("multi", "predict", folder / "out", new, "--out", folder / "none.csv")
    assert not (folder / "none.csv").exists()


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
    ("kind:regression", r"head 'kind': row \d+ below the names: '[xy]' is no finite number"),
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
        ("a,b\n1\n", "row 1 below the names has 1 of 2 cells"),
        ("a,a\n1,2\n", "two columns are named 'a'"),
        ("a\n", "at least one row"),
        (f'a,b\n\n1,2\n1,"{"x" * 200_000}"\n', f"{path}, line 4: field larger"),
        ("a,city\n1,Ulm\n2,Köln\n", f"{path}, line 3: this is not UTF-8"),
    ):
        path.write_text(text, encoding="latin-1")
        assert says in refused("multi", "train", path, "--targets", "a", "--out", tmp_path / "o")
    folder, _ = trained
    path.write_text("a,city\n1,Ulm\n", encoding="utf-8")
    assert "no column 'noise', which the model reads" in refused("multi", "predict", folder / "out", path)
    path.write_text("a,city,noise\n1,Ulm,loud\n", encoding="utf-8")
    assert "column 'noise' holds numbers; row 1 below the names: 'loud' is no" in refused(
        "multi", "predict", folder / "out", path
    )
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


def test_a_config_text_and_an_encoder(tmp_path, columns):
    words = ["good red bird", "bad blue bird"]
    more = {"note": [words[value == "x"] + f" number {at}" for at, value in enumerate(columns["kind"])]}
    write(tmp_path / "table.csv", {name: columns[name] for name in ("kind", "stars")} | more)
    save_tiny(tmp_path / "encoder")
    config = "table: table.csv\ntargets: {kind: }\ndrop: [stars]\ntext: note\nepochs: 2\nout: plain\n"
    (tmp_path / "c.yaml").write_text(config, encoding="utf-8")
    ran = run("multi", "train", tmp_path / "c.yaml", "--epochs", "40", "--json")
    assert ran.code == 0, ran
    assert ran.json["heads"]["kind"]["metrics"]["accuracy"] > 0.9 and ran.json["inputs"] == 256
    assert ran.json["epochs"] > 2 and (tmp_path / "plain" / "report.html").exists()
    encoded = ("--out", tmp_path / "encoded", "--encoder", tmp_path / "encoder", "--epochs", "1", "--json")
    ran = run("multi", "train", tmp_path / "c.yaml", *encoded)
    assert ran.code == 0 and ran.json["inputs"] == 48, ran
    said, table = tmp_path / "said.csv", tmp_path / "table.csv"
    ran = run("multi", "predict", tmp_path / "encoded", table, "--out", said, "--json")
    assert ran.code == 0 and ran.json["rows"] == 200 and ran.json["metrics"]["kind"], ran
    unread = run("multi", "train", table, "--targets", "kind", "--out", tmp_path / "o", "--epochs", "1")
    assert "column 'note' has 200 texts, of which 50 are told apart" in unread.err


def test_pictures_lie_beside_the_table_or_where_it_is_said(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "p").mkdir()
    for at in range(20):
        image.new("RGB", (5, 5), (255 * (at % 2), 0, 128)).save(tmp_path / "p" / f"{at}.png")
    labels = ["red" if at % 2 else "blue" for at in range(20)]
    write(tmp_path / "t.csv", {"file": [f"p/{at}.png" for at in range(20)], "kind": labels})
    write(tmp_path / "u.csv", {"file": [f"{at}.png" for at in range(20)]})
    told = ("--targets", "kind", "--image", "file", "--image-size", "4", "--epochs", "30", "--out", tmp_path / "o")
    ran = run("multi", "train", tmp_path / "t.csv", *told, "--json")
    assert ran.code == 0 and ran.json["inputs"] == 48, ran
    assert ran.json["heads"]["kind"]["metrics"]["accuracy"] == 1
    said = tmp_path / "said.csv"
    ran = run("multi", "predict", tmp_path / "o", tmp_path / "u.csv", "--folder", tmp_path / "p", "--out", said)
    assert ran.code == 0 and read_table(said)["kind"] == labels, ran
    assert "column 'file', row 1 below the names: " in refused("multi", "predict", tmp_path / "o", tmp_path / "u.csv")


@pytest.mark.parametrize(("options", "says"), [
    (["--compare", "double"], "compare='double': models of one head, 'single'"),
    (["--encoder", "x"], "encoder='x' reads columns of text, and none is named"),
    (["--text", "gone"], "has no column 'gone'"),
    (["--text", "kind"], "column 'kind' is in targets and in text; it can be in one of them"),
    (["--text", "city", "--image", "city"], "column 'city' is in text and in image;"),
    (["--drop", "city", "--image", "city"], "column 'city' is in drop and in image;"),
    (["--width", "0"], "error: width is at least 1, not 0"),
    (["--patience", "-1"], "error: patience is at least 1, not -1"),
    (["--image-size", "0"], "error: image_size is at least 1, not 0"),
    (["--dropout", "1"], "error: dropout is a number of at least 0 and below 1, not 1.0"),
    (["--lr", "nan"], "error: lr is a number above 0, not nan"),
    (["--seed", "99999999999999999999"], "error: seed is a whole number from 0 to 2^63 - 1"),
])  # fmt: skip
def test_options_that_cannot_be(tmp_path, columns, options, says):
    path = write(tmp_path / "table.csv", columns)
    assert says in refused("multi", "train", path, "--targets", "kind", "--out", tmp_path / "out", *options)


def test_text_among_numbers_is_noted(tmp_path):
    path = write(tmp_path / "t.csv", {"a": [*range(24), *["l0"] * 6], "b": ["x", "y"] * 15, "c": ["1", "2", "O"] * 10})
    told = ("--targets", "b,c", "--out", tmp_path / "o", "--epochs", "1")
    ran = run("multi", "train", path, *told)
    assert (
        "column 'a' is read as texts: 6 of 30 cells are no numbers, the first in row 25 below the names, 'l0'"
        in ran.err
    )
    assert "column 'c' is read as texts: 10 of 30" in ran.err and "column 'b' is" not in ran.err


def test_without_plotly_there_is_a_note_and_no_page(tmp_path, columns, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    path = write(tmp_path / "table.csv", columns)
    ran = run("multi", "train", path, "--targets", "kind", "--out", tmp_path / "o", "--epochs", "1")
    assert ran.code == 0 and "pip install 'manyheads[report]'" in ran.err
    assert (tmp_path / "o" / "result.json").exists() and not (tmp_path / "o" / "report.html").exists()
