"""Columns of text and of pictures as features."""

import json
import math
import sys
from zlib import crc32

import pytest
import torch
from tests.cli.line import save_tiny

from manyheads.multi.readers import Encoded, Picture, Words
from manyheads.multi.table import Column, columns_from_json, columns_to_json


def test_words_are_hashed_with_a_sign_and_rows_have_length_one():
    found = Words("t", 256).features(["Red, red bird", "", None, "bird!"])
    codes = {word: crc32(word.encode()) for word in ("red", "bird")}
    wanted = torch.zeros(256)
    wanted[(codes["red"] >> 1) % 256] += (1 if codes["red"] & 1 else -1) * (1 + math.log(2))
    wanted[(codes["bird"] >> 1) % 256] += 1 if codes["bird"] & 1 else -1
    torch.testing.assert_close(found[0], wanted / wanted.norm())
    assert not found[1:3].any() and found[3].abs().sum() == 1
    assert found[0] @ found[3] == pytest.approx(1 / math.hypot(1, 1 + math.log(2)))


def test_an_encoder_reads_each_cell_as_alone_and_gaps_are_zeros(tmp_path):
    name = str(save_tiny(tmp_path / "encoder"))
    column = Encoded.of("t", name)
    cells = ["a bird", None, "a far longer text of many more letters", "a bird"]
    found = column.features(cells, batch=2)
    assert found.shape == (4, 48) and not found[1].any() and torch.allclose(found[0], found[3], atol=1e-5)
    torch.testing.assert_close(found[:1], column.features(cells[:1]))  # without padding beside
    torch.testing.assert_close(found[2].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(found[2].std(correction=0), torch.tensor(1.0), atol=1e-3, rtol=0)
    with pytest.raises(ValueError, match=r"column 't': .*48 wide, where it was 47"):
        Encoded("t", name, 47).features(cells)
    with pytest.raises(ValueError, match="encoder 'no/such' cannot be loaded"):
        Encoded.of("t", "no/such")


def test_pictures_are_pixels_from_minus_one_to_one(tmp_path):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (8, 6), (255, 0, 51)).save(tmp_path / "a.png")
    image.new("L", (3, 3), 255).save(tmp_path / "b.png")
    found = Picture("p", 2).features([str(tmp_path / "a.png"), None, str(tmp_path / "b.png")])
    torch.testing.assert_close(found[0].view(2, 2, 3), torch.tensor([1.0, -1.0, -0.6]).expand(2, 2, 3))
    assert not found[1].any() and (found[2] == 1).all()
    (tmp_path / "c.png").write_text("no picture")
    for name, says in (("c.png", "no picture that can be read"), ("d.png", "no such file")):
        with pytest.raises(ValueError, match=f"column 'p', row 2 below the names: .*{name}: {says}"):
            Picture("p").features([None, str(tmp_path / name)])


def test_without_pillow_pictures_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"pip install 'manyheads\[images\]'"):
        Picture("p").features([None])


def test_readers_are_json_and_columns_as_before():
    columns = [Column("n", mean=1.0), Column("c", texts=("a", "b")), Words("t"), Encoded("e", "x", 3), Picture("p", 4)]
    fields = columns_to_json(columns)
    assert columns_from_json(json.loads(json.dumps(fields))) == columns
    assert "kind" not in fields[0] and [each["kind"] for each in fields[2:]] == ["words", "encoded", "picture"]


@pytest.mark.parametrize("made", [lambda: Words("t", 0), lambda: Picture("p", 0)])
def test_sizes_that_cannot_be(made):
    with pytest.raises(ValueError, match=r"column .*at least 1"):
        made()
