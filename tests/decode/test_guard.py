"""Whatever drafts cost and bring, a text takes no more than a twentieth longer than a token at a time.

Time is a stand-in throughout: what a step costs is a function of its rows.
"""

import math

import pytest
import torch
from tests.decode.laws import prompts
from tests.decode.test_generate import Half
from tests.stack.tiny import VOCAB, model

from manyheads.decode import Guard, PromptLookup, RandomDrafter, SlowDraft, Tree, Verifier, generate
from manyheads.decode.guard import SLACK, WARM, Clock, _clocks

COSTS = {
    "free rows": lambda n: 1.0,
    "full price": lambda n: float(n),
    "a little more": lambda n: 1 + 0.1 * (n - 1),
    "steep at first": lambda n: math.sqrt(n),
    "a wall at three": lambda n: 1.0 if n < 3 else 1.9,
    "in blocks of four": lambda n: float(math.ceil(n / 4)),
}


def simulate(cost, right, *, prior=0.6, tokens=300, prompt=2.0, draft=0.05, seed=0):
    """Seconds that a text takes, those of plain decoding, and the guard; the law is held to after every step.

    right: how likely the first choice is right at each place of the text; the others never are.
    """
    odds = torch.full((4, 3), prior / 4, dtype=torch.float64)
    odds[:, 0] = prior
    guard = Guard(odds, 64, Clock())
    guard.begin(prompt)
    draws = torch.Generator().manual_seed(seed)
    spent = plain = prompt
    written = 1
    while written < tokens:
        tree = guard.next(tokens - written - 1).tree
        paths, node = {path: place for place, path in enumerate(tree.paths)}, ()
        came = [0]
        while (*node, 0) in paths and torch.rand(1, generator=draws) < right(written):
            node = (*node, 0)
            came.append(paths[node])
        if len(tree) > 1:
            asked = torch.tensor([parent in came for parent in tree.parents])[1:]
            was = torch.tensor([place in came for place in range(1, len(tree))])
            guard.count(tree, asked.long(), was.long())
        assert len(came) <= tokens - written
        took = cost(len(tree)) + (draft if len(tree) > 1 else 0.0)
        guard.note(tree, took, len(came), draft if len(tree) > 1 else None)
        spent, plain, written = spent + took, plain + len(came) * cost(1), written + len(came)
        assert spent <= (1 + SLACK) * plain + 1e-9
    assert guard.spent == pytest.approx(spent) and guard.plain == pytest.approx(plain)
    return spent, plain, guard


@pytest.mark.parametrize("case", COSTS)
@pytest.mark.parametrize("prior", [0.05, 0.6, 0.99])
def test_no_text_is_more_than_a_twentieth_slower_at_any_of_its_tokens(case, prior):
    for right in (0.0, 0.3, 0.9):
        simulate(COSTS[case], lambda place, right=right: right, prior=prior)
    simulate(COSTS[case], lambda place: 0.0, prior=prior, draft=0.25, tokens=60)


def test_what_pays_is_found_and_used():
    for case in ("free rows", "a little more", "in blocks of four"):
        spent, plain, _ = simulate(COSTS[case], lambda place: 0.8, prior=0.5)
        assert plain / spent > 1.6, case
    spent, plain, guard = simulate(COSTS["full price"], lambda place: 0.8)
    assert plain / spent > 0.95 and guard.gave_up


def test_acceptance_is_that_of_the_newest_text():
    """Right in the last two thirds alone, drafts are tried again there; right in the first alone, they are dropped."""
    spent, plain, guard = simulate(COSTS["a little more"], lambda place: 0.9 if place > 200 else 0.0, tokens=600)
    assert plain / spent > 1.4 and not guard.gave_up
    spent, plain, guard = simulate(COSTS["a little more"], lambda place: 0.9 if place < 200 else 0.0, tokens=600)
    assert plain / spent > 1.12  # most of what the first third saved is kept


def test_a_clock_bounds_what_it_has_not_measured():
    clock = Clock()
    clock.note(1, 5.0)
    assert not clock.known
    for seconds in (2.0, 2.0, 9.0):
        clock.note(1, seconds)
    assert clock.known and WARM <= 4 and clock.table == {1: 2.0}  # of few, neither the first nor the slowest
    assert clock.at_most(3) == 6.0 and clock.likely()(30) == 2.0  # hopeful, which the bound is not
    clock.note(4, 3.0)
    assert [clock.at_most(rows) for rows in (2, 4, 5, 8)] == [3.0, 3.0, 6.0, 6.0]
    assert clock.likely()(4) == 3.0 and clock.likely()(10) == pytest.approx(3 + 0.5 * 6 / 3)
    smaller = Clock(clock)
    assert not smaller.known
    smaller.note(1, 1.0)
    assert smaller.known and smaller.table == {1: 1.0, 4: 1.5}


class Standin:
    """A clock that passes move on by a cost, and drafts by a tenth of a plain pass."""

    def __init__(self, monkeypatch, cost):
        self.time, read = 0.0, Verifier.read
        _clocks.clear()

        def reading(verifier, tree, tokens):
            self.time += cost(len(tree))
            return read(verifier, tree, tokens)

        monkeypatch.setattr(Verifier, "read", reading)
        monkeypatch.setattr("manyheads.decode.steps.now", lambda _: self.time)

    def took(self, *args, **options):
        began = self.time
        found = generate(*args, **options)
        return self.time - began, found


@pytest.mark.filterwarnings("ignore::manyheads.decode.SlowDraft")
@pytest.mark.parametrize("case", COSTS)
def test_decoding_is_held_to_it_in_a_batch_too(case, monkeypatch):
    made, rows = model("gqa"), prompts(VOCAB)
    clock = Standin(monkeypatch, COSTS[case])
    plain, want = clock.took(made, rows, None, 60, stop=())
    text = [want.tokens[0][20], want.tokens[1][40]]  # ends of two of the three
    ended, short = clock.took(made, rows, None, 60, stop=text)
    for drafter in (PromptLookup(), RandomDrafter(VOCAB), Half(rows, want.tokens, share=0.9)):
        for stop, seconds, plainly in (((), plain, want), (text, ended, short)):
            took, found = clock.took(made, rows, drafter, 60, stop=stop)
            assert found.tokens == plainly.tokens
            assert took <= (1 + SLACK) * seconds + 1e-9 and found.gain >= 1 / (1 + SLACK) - 1e-9


def test_a_text_that_repeats_is_drafted_deep_where_rows_are_free(monkeypatch):
    made, rows = model("gqa"), [prompts(VOCAB)[0] * 4]
    clock = Standin(monkeypatch, COSTS["free rows"])
    plain, _ = clock.took(made, rows, None, 120, stop=())
    took, found = clock.took(made, rows, PromptLookup(), 120, stop=())
    assert plain / took > 1.5 and found.gain == pytest.approx(plain / took, rel=0.1)
    assert max(each.tree.depth for _, each in found.plans) > 2 and found.note is None
    later, again = clock.took(made, rows, PromptLookup(), 120, stop=())
    assert later < took and again.plans[0][0] < found.plans[0][0]  # what a row costs is known already


def test_rows_at_full_price_are_given_up_with_a_note(monkeypatch):
    made, rows = model("gqa"), prompts(VOCAB)[:1]
    clock = Standin(monkeypatch, COSTS["full price"])
    with pytest.warns(SlowDraft, match="not worth their time"):
        _, found = clock.took(made, rows, RandomDrafter(VOCAB), 100, stop=())
    assert found.note and found.acceptance.asked.sum() < 8
    _clocks.clear()
    _, found = clock.took(made, rows, RandomDrafter(VOCAB), 6, stop=())
    assert found.note and "a text of 6 tokens" in found.note
    assert generate(made, rows, RandomDrafter(VOCAB), 6, tree=Tree.chain(2)).gain is None
