import pytest
import torch

from manyheads.convert.text import Texts, default_text, read_text, second_text, split, windows


class Bytes:
    """A tokenizer of one token a character, which adds a special token unless told not to."""

    def __call__(self, text, add_special_tokens=True, verbose=True):
        self.input_ids = [0] * add_special_tokens + [ord(character) % 251 for character in text]
        return self


def test_default_text_is_the_topics_in_sorted_order():
    from pydoc_data.topics import topics

    text = default_text()
    assert len(text) > 400_000
    assert text.startswith(topics[min(topics)] + "\n\n") and text.endswith(topics[max(topics)])


def test_second_text_is_long_prose_and_not_the_default_text():
    text, default = second_text(), default_text()
    paragraphs = text.split("\n\n")
    assert len(text) > 60_000 and text == second_text()
    assert len(set(paragraphs)) == len(paragraphs)
    assert ">>>" not in text
    flat = " ".join(default.split())
    assert sum(paragraph in flat for paragraph in paragraphs) == 0


def test_split_never_overlaps():
    first, second = split("abcdefghij")
    assert (first, second) == ("abcdefgh", "ij")
    assert split("abcdefghij", 0.3) == ("abc", "defghij")
    with pytest.raises(ValueError, match="between 0 and 1"):
        split("abc", 1.0)


def test_read_text(tmp_path):
    (a := tmp_path / "a.txt").write_text("\ufeffGrüße", encoding="utf-8")
    (b := tmp_path / "b.txt").write_text("second")
    assert read_text([a, b]) == "Grüße\n\nsecond"
    with pytest.raises(ValueError, match="no text files"):
        read_text([])
    with pytest.raises(FileNotFoundError):
        read_text([tmp_path / "missing"])


@pytest.mark.parametrize(
    "data, words",
    [
        (b"abc\xffdef", "bad.txt is not UTF-8 text: byte 0xff at offset 3"),
        (b"abcd\x00", "bad.txt is not text: a zero byte at offset 4"),
        (b" \n", "bad.txt holds no text"),
    ],
)
def test_read_text_refuses(tmp_path, data, words):
    (bad := tmp_path / "bad.txt").write_bytes(data)
    with pytest.raises(ValueError, match=words):
        read_text([bad])


def test_windows_are_the_first_tokens_in_order():
    text = "".join(map(chr, range(33, 93)))
    cut = windows(Bytes(), text, count=3, length=20)
    assert cut.dtype == torch.int64 and cut.tolist() == torch.arange(33, 93).view(3, 20).tolist()
    assert torch.equal(windows(Bytes(), text * 50, count=3, length=20), cut)


def test_windows_from_few_tokens_a_character():
    class Sparse(Bytes):
        def __call__(self, text, **options):
            super().__call__(text, **options)
            self.input_ids = self.input_ids[::20]
            return self

    assert windows(Sparse(), "x" * 2000, count=5, length=20).shape == (5, 20)


@pytest.mark.parametrize(
    "length, words",
    [
        (50, "has 50 tokens, and 3 windows of 20 need 60; 2 windows of 20 or 3 windows of 16 would fit"),
        (12, "has 12 tokens, and 3 windows of 20 need 60; 3 windows of 4 would fit"),
        (2, "has 2 tokens, and 3 windows of 20 need 60; a longer text is needed"),
    ],
)
def test_windows_too_short(length, words):
    with pytest.raises(ValueError, match=words):
        windows(Bytes(), "x" * length, count=3, length=20)


def test_windows_options():
    with pytest.raises(ValueError, match="count >= 1"):
        windows(Bytes(), "text", count=0, length=20)


def test_texts():
    text = default_text()
    texts = Texts.from_text(Bytes(), text)
    assert texts.calibration.shape == (16, 1024) and texts.evaluation.shape == (5, 2048)
    assert texts.calibration[0, 0] == ord(text[0]) % 251
    assert texts.evaluation[0, 0] == ord(text[int(len(text) * 0.8)]) % 251


def test_texts_say_which_side_is_short():
    with pytest.raises(ValueError, match="calibration: the text has 8000 tokens, and 16 windows of 1024 need 16384"):
        Texts.from_text(Bytes(), "x" * 10_000)
    with pytest.raises(ValueError, match="evaluation: the text has 5000 tokens, and 5 windows of 2048 need 10240"):
        Texts.from_text(Bytes(), "x" * 25_000)
    small = Texts.from_text(Bytes(), "x" * 1000, calibration_windows=2, calibration_length=256, evaluation_length=40)
    assert small.calibration.shape == (2, 256) and small.evaluation.shape == (5, 40)
