"""Drafts that never make a text noticeably slower: costs are learnt from the steps, and risks are paid first.

Nothing is timed beside the text. Plain steps tell what a row costs, drafted ones what their trees cost. In typical
seconds of steps (the median of the newest few, so that what else runs on the machine does not count) two sums are kept:

    spent  what the steps so far took, drafting and checking included
    plain  what as many tokens take a token at a time

A tree of n nodes is drafted only where it is predicted to gain, and only while

    spent + most(n) + draft <= (1 + SLACK) (plain + one step)

so that even if none of its tokens is right, no more than SLACK is lost. Of what right drafts save, wrong ones later may
lose RESERVE steps at most: the rest is kept. `most(n)` is what n rows can cost by what has
been measured: more rows take no less time than fewer, and n rows no more than ⌈n / m⌉ passes of m rows. A prompt and
plain steps earn the first drafts; right ones earn all later ones. Estimates may be hopeful because this bound is not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from statistics import median_low
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel

from manyheads.decode.speed import Acceptance, Costs, Plan, plan
from manyheads.decode.tree import Tree

SLACK = 0.05
"""The share of plain decoding's time that drafts may lose at most."""
RESERVE = 8
"""Plain steps of earnings that may be risked at once."""
AGAIN = 8
"""Steps between looks at whether the tree still pays; twice as many after each that finds that it does not."""
LONGEST = 64
"""Of such pauses; the look after it believes the drafter again, so that drafts are tried for a few steps."""
FADE = 0.75
"""What a look leaves of the weight of what was seen before it, so that acceptance is that of the newest text."""
NEWEST = 5
"""Steps of which the median is what such a step takes."""
WARM = 2
"""Plain steps before the first draft: one alone may have waited for memory."""
DRAFT = 0.25
"""What a first draft may cost at most, in plain steps; later ones are known."""


class Clock:
    """Seconds of a step by rows a sequence, at one size of the batch.

    before: of another size; what is not measured here is as many plain steps as it is there.
    """

    def __init__(self, before: Clock | None = None) -> None:
        self.before = before
        self.taken: dict[int, deque[float]] = {}
        self._table: dict[int, float] | None = None

    def note(self, rows: int, seconds: float) -> None:
        self._table = None
        self.taken.setdefault(rows, deque(maxlen=NEWEST)).append(seconds)

    @property
    def known(self) -> bool:
        """Whether it is measured what a plain step takes."""
        return len(self.taken.get(1, ())) >= (WARM if self.before is None else 1)

    @property
    def table(self) -> dict[int, float]:
        """Typical seconds by rows, in the order of rows."""
        if self._table is not None:
            return self._table
        own = {rows: median_low(seconds) for rows, seconds in self.taken.items()}
        if self.before is not None and self.before.known:
            theirs = self.before.table
            own = {rows: seconds / theirs[1] * own[1] for rows, seconds in theirs.items()} | own
        self._table = dict(sorted(own.items()))
        return self._table

    def at_most(self, rows: int) -> float:
        """Seconds that so many rows can take, by what smaller and larger passes took."""
        return min(math.ceil(rows / known) * seconds for known, seconds in self.table.items())

    def likely(self) -> Costs:
        """What passes are expected to take; beyond those measured, hopefully, half as much a row as before."""
        table = dict(self.table)
        (a, before), (b, last) = [(0, table[1]), *table.items()][-2:]
        far = 2 * b + 64
        table[far] = last + 0.5 * max(0.0, last - before) * (far - b) / (b - a)
        return Costs(tuple(table), tuple(table.values()))


_clocks: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, int], Clock]] = WeakKeyDictionary()


class Clocks:
    """The clocks of a model by size of the batch, for texts of about one length; calls of one process share them."""

    def __init__(self, model: PreTrainedModel, past: int) -> None:
        self.all, self.past = _clocks.setdefault(model, {}), max(0, past - 1).bit_length()

    def of(self, batch: int, before: Clock | None = None) -> Clock:
        return self.all.setdefault((batch, self.past), Clock(before))


class Guard:
    """Chooses the tree of every step, and keeps the two sums.

    odds: of the drafter, `[depth, width]`. most: nodes of a tree at most. clock: of the batch as it is. whole: counts
    of the text, which stand in for what the drafter said of itself.
    """

    def __init__(self, odds: Tensor, most: int, clock: Clock, whole: Acceptance | None = None) -> None:
        self.prior, self.most, self.clock = odds, most, clock
        self.whole, self.recent = whole or Acceptance.none(odds.shape), Acceptance.none(odds.shape)
        self.spent = self.plain = self.credit = 0.0
        self.step = self.drafted = 0
        self.best = Plan.none()
        self._drafts: deque[float] = deque(maxlen=NEWEST)
        self._due, self._wait, self._limit = 0, AGAIN, 0

    @property
    def gain(self) -> float:
        """Tokens a second against plain decoding, of the text so far."""
        return self.plain / self.spent if self.spent else 1.0

    @property
    def gave_up(self) -> bool:
        """Whether drafts could have been tried, and no tree is predicted to gain."""
        return self._due > 0 and self.best.plain

    def begin(self, seconds: float) -> None:
        """What reading the prompts took: plain decoding reads them as well."""
        self._book(seconds, seconds)

    def next(self, depth: int) -> Plan:
        """The tree of the next step, of at most `depth` drafted tokens in a row."""
        limit = self._affordable() if depth > 0 and self.clock.known else 1
        if limit < 2:
            return Plan.none()
        late = self.step >= self._due
        if late or len(self.best.tree) > limit or limit >= 2 * self._limit:
            if late:
                self.recent.fade(FADE)
            fresh = late and self.best.plain and self._wait >= LONGEST
            odds = self.recent.odds(self.prior if fresh else self.whole.odds(self.prior))
            draft = median_low(self._drafts) if self._drafts else 0.0
            self.best, self._limit = plan(odds, self.clock.likely(), draft, limit), limit
            if late:
                self._wait = min(2 * self._wait, LONGEST) if self.best.plain else AGAIN
                self._due = self.step + self._wait
        best = self.best
        return Plan(best.tree.cut(depth), best.tokens, best.gain) if best.tree.depth > depth else best

    def _affordable(self) -> int:
        """Nodes whose loss, should none of them be right, is already earned."""
        step = self.clock.table[1]
        draft = max(self._drafts) if self._drafts else DRAFT * step
        room = self.credit + (1 + SLACK) * step - draft
        return bisect_right(range(1, self.most + 1), room, key=self.clock.at_most)

    def count(self, tree: Tree, asked: Tensor, right: Tensor) -> None:
        """See `Acceptance.add`."""
        for counts in (self.whole, self.recent):
            counts.add(tree, asked, right)

    def _book(self, spent: float, plain: float) -> None:
        self.spent += spent
        self.plain += plain
        self.credit += (1 + SLACK) * plain - spent

    def note(self, tree: Tree, seconds: float, tokens: int, draft: float | None = None) -> None:
        """A step that read this tree: all that it took, what of it was drafting (None: nothing was asked for), and by
        how many tokens the sequence went on that is the farthest behind."""
        self.step += 1
        self.clock.note(len(tree), seconds - (draft or 0.0))
        table = self.clock.table
        step = table.get(1, table[len(tree)])
        self._book(table[len(tree)] + (draft or 0.0), step * tokens)
        self.credit = min(self.credit, RESERVE * step)
        if draft is not None:
            self.drafted += 1
            self._drafts.append(draft)
