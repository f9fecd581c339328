"""Lists of tokens that have an order: numbers, days, months, letters, as a tokenizer has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WORDS = {
    "number words": "one two three four five six seven eight nine ten eleven twelve",
    "ordinals": "first second third fourth fifth sixth seventh eighth ninth tenth",
    "days": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "short days": "Mon Tue Wed Thu Fri Sat Sun",
    "months": "January February March April May June July August September October November December",
    "short months": "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec",
}
ORDERED: dict[str, Sequence[str]] = {
    "numbers": [*map(str, range(201))],
    **{name: words.split() for name, words in WORDS.items()},
    "letters": [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"],
}
"""Things in their order, as they are written."""


def ordinals(
    tokenizer: Any, lists: dict[str, Sequence[str]] | None = None, *, fewest: int = 4
) -> dict[str, list[int]]:  # fmt: skip
    """Token ids of ordered lists, by name; with a leading space under the name with ` _` behind it.

    Of each list the longest run of neighbours that are one token each is taken; runs below `fewest` are left out.
    """
    found: dict[str, list[int]] = {}
    for name, words in (lists or ORDERED).items():
        for mark, lead in (("", ""), (" _", " ")):
            ids = [tokenizer(lead + word, add_special_tokens=False)["input_ids"] for word in words]
            run = _longest([one[0] if len(one) == 1 else None for one in ids])
            if len(run) >= fewest and run not in found.values():
                found[name + mark] = run
    return found


def _longest(ids: Sequence[int | None]) -> list[int]:
    """The longest run of different ids."""
    best: list[int] = []
    run: list[int] = []
    for one in ids:
        run = [] if one is None else [*run, one] if one not in run else [one]
        best = max(best, run, key=len)
    return best
