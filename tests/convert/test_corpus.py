"""Text that is never whole in memory: the same characters as if it were, and the same windows each time."""

import json
import sys
import types

import pytest
import torch

from manyheads.convert import corpus
from manyheads.convert.corpus import FileWindows, StreamWindows, Text, documents, find_files, is_dataset
from manyheads.convert.text import checked_blocks, split

PROSE = "".join(f"Grüße Nº {n}, ein Satz über {n * n} Köpfe 🙂.\n" for n in range(400))


class Bytes:
    """A tokenizer of one token a character."""

    def __call__(self, text, add_special_tokens=True, verbose=True):
        self.input_ids = [0] * add_special_tokens + [ord(character) % 251 for character in text]
        return self


def at(text, window):
    """Where a window lies in a text; -1: nowhere."""
    codes = [ord(character) % 251 for character in text]
    window = window.tolist()
    return next((i for i in range(len(codes) - len(window) + 1) if codes[i : i + len(window)] == window), -1)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_BLOCK", 1000)  # places with a known count inside characters and files
    cut = len(PROSE) // 3
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("\ufeff" + PROSE[:cut], encoding="utf-8")
    (tmp_path / "sub/b.txt").write_text(PROSE[cut : cut + 5], encoding="utf-8")
    (tmp_path / "sub/c.md").write_text(PROSE[cut + 5 :], encoding="utf-8")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    return tmp_path, "\n\n".join((PROSE[:cut], PROSE[cut : cut + 5], PROSE[cut + 5 :]))


def test_files_read_as_one_text_and_are_cut_at_the_same_character(files):
    folder, whole = files
    text = Text.of(*find_files([folder]))
    data = whole.encode()
    assert text.size == len(data) and text.read(0, text.size).decode() == whole
    for start, count in ((0, 10), (3000, 9000), (len(data) - 5, 100), (text.size // 3 - 40, 60)):
        assert text.read(start, count) == data[start : start + count]
    assert text.head(777) == whole[:777] and text.head(10**6) == whole
    for share in (0.8, 0.1, 0.5):
        parts = [part.read(0, part.size).decode() for part in text.split(share)]
        assert parts == list(split(whole, share))
        again = text.split(0.8)[0].split(share)
        assert [part.read(0, part.size).decode() for part in again] == list(split(split(whole)[0], share))
    assert Text.of(whole).digest == text.digest != Text.of(PROSE).digest


@pytest.mark.parametrize("size", [1, 3, 7, 1 << 20])
def test_blocks_say_what_is_no_text_and_where(tmp_path, size):
    (file := tmp_path / "x").write_bytes("\ufeffGrü".encode() + b"\xffe")
    with pytest.raises(ValueError, match="x is not UTF-8 text: byte 0xff at offset 7"):
        list(checked_blocks(file, size))
    file.write_bytes("Grü".encode()[:-1])
    with pytest.raises(ValueError, match="x is not UTF-8 text: byte 0xc3 at offset 2"):
        list(checked_blocks(file, size))
    file.write_bytes(b"abcd\x00e")
    with pytest.raises(ValueError, match="x is not text: a zero byte at offset 4"):
        list(checked_blocks(file, size))
    file.write_text("\ufeffGrüße", encoding="utf-8")
    assert "".join(checked_blocks(file, size)) == "Grüße"


def test_windows_follow_from_seed_and_step_and_come_from_the_training_side(files):
    folder, whole = files
    made = FileWindows(Bytes(), Text.of(*find_files([folder])))
    train, held = split(whole, 0.9)
    rows = made.batch(3, 5, 6, 40, slice(None))
    again = FileWindows(Bytes(), Text.of(whole))
    assert torch.equal(again.batch(3, 5, 6, 40, slice(2, 4)), rows[2:4]) and again.digest == made.digest
    assert not torch.equal(made.batch(3, 6, 6, 40, slice(None)), rows)
    ring = train + "\n\n" + train
    assert all(at(ring, row) >= 0 for step in range(20) for row in made.batch(0, step, 6, 40, slice(None)))
    apart = made.held(40)
    assert len(apart) == len(held) // 40 and all(at(held, row) >= 0 for row in apart)
    assert torch.equal(made.held(40), apart)


def test_a_large_held_out_side_is_read_in_places(monkeypatch):
    monkeypatch.setattr(corpus, "HELD", 40)
    made = FileWindows(Bytes(), Text.of(PROSE))
    apart = made.held(10)
    assert apart.shape == (4, 10) and all(at(split(PROSE, 0.9)[1], row) >= 0 for row in apart)


def test_what_is_too_short_or_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="held-out tenth of the text has 3 tokens, and a window has 8"):
        FileWindows(Bytes(), Text.of("x" * 30)).held(8)
    with pytest.raises(ValueError, match="no text given"):
        Text.of()
    with pytest.raises(ValueError, match="the text is empty"):
        Text.of("  ")
    with pytest.raises(ValueError, match="holds no files"):
        find_files([tmp_path])
    with pytest.raises(FileNotFoundError):
        Text.of(tmp_path / "missing")


def test_a_file_that_shrinks_meanwhile_is_told(tmp_path):
    (file := tmp_path / "a").write_text("abc" * 100)
    text = Text.of(file)
    file.write_text("abc")
    with pytest.raises(ValueError, match="has become shorter"):
        text.read(0, 200)


# --- documents


def stories(number):
    return (f"story {n} " * (n % 3 + 1) for n in range(number, 30))


def test_documents_stream_in_order_and_go_on_where_they_were():
    made = StreamWindows(Bytes(), stories, "stories")
    evaluation, held = made.reserve(2, 16), made.held(16)
    assert at("story 0 \n\nstory 1 story 1 \n\n", evaluation[0]) == 0 and torch.equal(made.held(16), held)


def test_documents_resume_and_start_again(monkeypatch):
    monkeypatch.setattr(corpus, "HELD", 16)

    def opened():
        made = StreamWindows(Bytes(), stories, "stories")
        made.held(16)
        return made

    one, other = opened(), opened()
    rows = [one.batch(0, step, 4, 16, slice(None)) for step in range(12)]
    for step in range(7):
        assert torch.equal(other.batch(0, step, 4, 16, slice(1, 3)), rows[step][1:3])
    third = opened()
    third.restore(other.state())
    assert all(torch.equal(third.batch(0, step, 4, 16, slice(None)), rows[step]) for step in range(7, 12))
    flat = torch.cat([row.flatten() for row in rows])
    text = "\n\n".join(stories(one.first)) + "\n\n"
    assert at(text + text + text, flat[: len(text) + 30]) == 0  # from the first that is not held out, again


def test_too_few_documents_are_told(monkeypatch):
    monkeypatch.setattr(corpus, "HELD", 16)
    made = StreamWindows(Bytes(), lambda number: iter(["a story of some length"][number:]), "few")
    made.held(8)
    with pytest.raises(ValueError, match="few: 1 documents, and 1 of them are held out already"):
        made.batch(0, 0, 1, 8, slice(None))


def test_a_data_set_is_read_through_datasets(tmp_path):
    pytest.importorskip("datasets")
    texts = [f"{number} Köpfe\n" for number in range(7)]
    for name, lines in (
        ("whole", [{"id": 1, "title": "t", "text": text} for text in texts]),
        ("titles", [{"id": 1, "title": text} for text in texts]),
        ("numbers", [{"id": 1}]),
    ):
        for at, part in enumerate((lines[:3], lines[3:])):  # of two files, read in the order of their names
            (tmp_path / name).mkdir(exist_ok=True)
            if part:
                (tmp_path / name / f"train-{at}.jsonl").write_text("\n".join(map(json.dumps, part)), encoding="utf-8")
    for name in ("whole", "titles"):
        read = documents(f"{tmp_path / name}")
        assert list(read(0)) == texts and list(read(5)) == texts[5:] and list(read(7)) == []
    name = f"{tmp_path / 'whole'}"
    found = StreamWindows(Bytes(), documents(name), name).batch(0, 0, 2, 8, slice(None))
    assert torch.equal(found, StreamWindows(Bytes(), lambda at: iter(texts[at:]), name).batch(0, 0, 2, 8, slice(None)))
    with pytest.raises(ValueError, match=r"datasets:.*numbers has no field of text; it has id"):
        documents(f"{tmp_path / 'numbers'}")
    with pytest.raises(ValueError, match="datasets:nobody/nothing cannot be opened: "):
        documents("nobody/nothing")


def test_a_data_set_of_the_hub_is_named_with_its_configuration(monkeypatch):
    library, asked = types.ModuleType("datasets"), []
    library.load_dataset = lambda *args, **options: asked.append((args, options)) or [{"text": "one"}]
    monkeypatch.setitem(sys.modules, "datasets", library)
    documents("owner/name:config")
    documents("owner/name")
    same = {"split": "train", "streaming": True}
    assert asked == [(("owner/name", "config"), same), (("owner/name", None), same)]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"manyheads\[datasets\]"):
        documents("a/b")
    assert is_dataset(["datasets:a/b"]) and not is_dataset(["a.txt", "b.txt"])
    with pytest.raises(ValueError, match="a data set stands alone"):
        is_dataset(["a.txt", "datasets:a/b"])
