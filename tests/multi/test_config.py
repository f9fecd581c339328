"""Options of a training from a file: whose word counts, and what cannot be."""

from pathlib import Path

import pytest

from manyheads.multi.config import settings

OPTIONS = {"targets": None, "out": None, "drop": "", "text": "", "image": "", "folder": None, "width": 64, "lr": 3e-3}
OPTIONS["balance"] = "sum"


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_the_command_line_overrides_a_file_and_paths_are_from_its_folder(tmp_path):
    path = write(tmp_path / "c.yaml", "table: t.csv\ntargets: {age: regression, kind: }\nout: o\nfolder: pictures\n"
                                      "width: 32\nlr: 1e-2\ndrop: [id, 7]\ntext: 'a, b'\n")  # fmt: skip
    told = settings(path, OPTIONS, [])
    assert told == {
        "table": tmp_path / "t.csv", "targets": {"age": "regression", "kind": None}, "out": tmp_path / "o",
        "folder": tmp_path / "pictures", "width": 32, "lr": 0.01, "drop": ("id", "7"), "text": ("a", "b"), "image": (),
        "balance": "sum",
    }  # fmt: skip
    told = settings(path, OPTIONS | {"width": 16, "out": Path("here")}, ["width", "out"])
    assert told["width"] == 16 and told["out"] == Path("here")
    listed = write(tmp_path / "d.yml", "table: t.csv\ntargets: [age, 'kind:ordinal']\nout: o\n")
    assert settings(listed, OPTIONS, [])["targets"] == "age,kind:ordinal"


def test_a_table_is_itself():
    told = settings(Path("t.csv"), OPTIONS | {"targets": "a", "out": Path("o"), "drop": "x,y"}, [])
    assert told["table"] == Path("t.csv") and told["drop"] == ("x", "y") and told["targets"] == "a"


@pytest.mark.parametrize(("text", "says"), [
    ("targets: a\nout: o\n", "names no table"),
    ("table: t.csv\nout: o\n", "--targets is missing"),
    ("table: t.csv\ntargets: a\n", "--out is missing"),
    ("table: t.csv\nwidht: 3\n", "there is no option 'widht'; there are table, targets, out"),
    ("table: t.csv\nwidth: 2.5\n", "width is a whole number, not 2.5"),
    ("table: t.csv\nwidth: wide\n", "width is a whole number, not 'wide'"),
    ("table: t.csv\nlr: [1]\n", r"lr is a number, not \[1\]"),
    ("table: t.csv\nout: o\ntargets: 5\n", "c.yaml: targets are columns, `age,kind`, not 5"),
    ("table: t.csv\nout: o\nbalance: 5\n", "c.yaml: balance is text, not 5"),
    ("- a\n", "options by name are expected, not list"),
    ("a: [\n", "line 2: no YAML"),
])  # fmt: skip
def test_files_that_cannot_be(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        settings(write(tmp_path / "c.yaml", text), OPTIONS, [])
