"""Names of modules made of any text."""

from itertools import product

from manyheads.core.key import escaped, key_of, unescaped


def test_no_two_texts_become_one_and_each_comes_back_without_dots():
    texts = ["".join(each) for count in range(6) for each in product(".%2E5", repeat=count)]
    keys = {escaped(text) for text in texts}
    assert len(keys) == len(texts) and not any("." in key for key in keys)
    assert all(unescaped(escaped(text)) == text for text in texts)


def test_names_without_a_percent_sign_are_what_they_were():
    assert key_of("a.b") == "of a%2Eb" and key_of("type") == "of type" and unescaped("trunk%2E1") == "trunk.1"
