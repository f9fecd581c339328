"""Masks against what the words say, written out as loops over queries and keys."""

import pytest
import torch

from manyheads.core.mask import Axis, Given, Mask, causal, cols_of, rows_of


def near(size):
    return lambda q, k: (rows_of(q.time) - cols_of(k.time)).abs() < size


def brute(mask, batch, heads):
    """The mask by its definition, one query and one key at a time."""
    q, k = mask.q, mask.k
    seen = torch.zeros(batch, heads, q.length, k.length, dtype=torch.bool)
    for b in range(batch):
        qb, kb = (axis.batch(lambda t, b=b: t[b : b + 1]) for axis in (q, k))
        for i in range(q.length):
            for j in range(k.length):
                may = bool(qb.validity[0, i] & kb.validity[0, j])
                if qb.segment is not None and kb.segment is not None:
                    may &= bool(qb.segment[0, i] == kb.segment[0, j])
                if causal in mask.rules:
                    may &= bool(kb.time[0, j] <= qb.time[0, i])
                seen[b, :, i, j] = may
    return seen


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (2, 5), (1, 5), (5, 2)])
def test_causal_lines_up_newest_with_newest(queries, keys):
    """With `n` more keys than queries, query i sees n + i + 1 keys; with fewer, the first queries see none."""
    end = max(queries, keys)
    mask = Mask(Axis(queries, end - queries), Axis(keys, end - keys))
    want = torch.tensor([max(0, keys - queries + i + 1) for i in range(queries)])
    assert torch.equal(mask.visible()[0, 0], want)
    square = torch.ones(end, end, dtype=torch.bool).tril()
    assert torch.equal(mask.tile()[0, 0], square[end - queries :, end - keys :])


def test_padding_and_packed_documents_never_leak():
    valid = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]], dtype=torch.bool)
    segment = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 1, 1, 2, 2, 2]])
    axis = Axis(6, 0, segment=segment, valid=valid)
    for rules in ((), (causal,)):
        mask = Mask(axis, axis, rules)
        assert torch.equal(mask.tile(), brute(mask, 2, 1))
        assert not mask.is_full and not mask.is_causal
    assert not Mask(axis, axis).tile()[0, 0, 4, :4].any(), "a document sees the one before it"


def test_a_query_without_segment_sees_every_document_and_one_rule_more_only_hides():
    axis, keys = Axis(4, 0), Axis(4, 0, segment=torch.tensor([[0, 0, 1, 1]]))
    mask = Mask(axis, keys)
    assert torch.equal(mask.tile(), Mask(axis, axis).tile())
    windowed = mask & near(2)
    assert windowed.rules[:1] == (causal,)
    assert torch.equal(windowed.tile()[0, 0], torch.ones(4, 4).tril().triu(-1).bool())


def test_tiles_are_the_mask_cut():
    valid = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 1]], dtype=torch.bool)
    axis = Axis(5, 3, valid=valid)
    given = Given(torch.rand(2, 3, 5, 5) < 0.6)
    mask = Mask(axis, axis, (causal, given, near(3)))
    whole = mask.tile()
    assert whole.shape == (2, 3, 5, 5)
    for first in range(5):
        cut = slice(first, first + 2)
        assert torch.equal(mask.tile(cut), whole[:, :, cut])
        assert torch.equal(mask.tile(cut, slice(1, 4)), whole[:, :, cut, 1:4])
    assert torch.equal(mask.visible(), whole.sum(-1))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_given_mask_follows_chosen_rows(batch, heads):
    """Slices and one choice of rows for each sequence pick the same entries as indexing by hand."""
    table = torch.rand(batch, heads, 4, 6) < 0.5
    queries, keys = torch.tensor([[2, 0], [1, 3]]), torch.tensor([[5, 0, 0], [1, 2, 4]])
    q, k = Axis(4, 2), Axis(6, 0)
    seen = Given(table)(q.take(queries), k.take(keys))
    for b in range(2):
        want = table[b % batch][:, queries[b]][:, :, keys[b]]
        assert torch.equal(seen[b], want)
    assert torch.equal(Given(table)(q.take(queries[:1]), k[1:4]), table[:, :, queries[0]][..., 1:4])
    assert torch.equal(Given(table)(q[1:3].take(torch.tensor([[1, 0]])), k), table[:, :, [2, 1]])


def test_a_given_mask_of_one_row_serves_every_query():
    """A key mask `[B, 1, 1, S]` broadcasts over queries, on tiles too."""
    table = torch.tensor([True, False, True])[None, None, None]
    mask = Mask(Axis(4, 0), Axis(3, 0), (Given(table),))
    assert torch.equal(mask.tile(slice(1, 3)).expand(1, 1, 2, 3), table.expand(1, 1, 2, 3))


AXES = {
    "plain": Axis(3, 2),
    "later": Axis(3, 4),
    "one": Axis(1, 4),
    "all": Axis(5, 0),
    "static": Axis(7, 0),
    "tail": Axis(3, 2)[1:],
    "timed": Axis(3, None, None, torch.tensor([[0, 4, 2]])),
    "padded": Axis(5, 0, valid=torch.tensor([[0, 1, 1, 1, 1]]).bool()),
    "packed": Axis(5, 0, segment=torch.tensor([[0, 0, 1, 1, 1]])),
    "taken": Axis(5, 0).take(torch.tensor([[4, 4, 0]])),
    "repeated": Axis(2, 0).repeat(2),
}


@pytest.mark.parametrize("queries", AXES)
def test_shortcuts_are_never_wrong(queries):
    """is_full and is_causal may miss a case, and may never claim one."""
    for keys in AXES:
        for rules in [(), (causal,), (causal, near(2)), (near(9),)]:
            mask = Mask(AXES[queries], AXES[keys], rules)
            seen = mask.tile()
            assert seen.all() or not mask.is_full, keys
            triangle = torch.ones(seen.shape[2:]).tril().bool()
            assert torch.equal(seen[0, 0], triangle) or not mask.is_causal, keys


def test_shortcuts_are_taken_where_it_matters():
    """A decode step without padding needs no mask, a prefill needs only the flag."""
    assert Mask(Axis(1, 9), Axis(10, 0)).is_full
    assert Mask(Axis(4, 0), Axis(9, 0), ()).is_full
    assert Mask(Axis(4, 3), Axis(4, 3)).is_causal
    assert not Mask(Axis(1, 8), Axis(10, 0)).is_full, "a static cache reaches beyond the query"


def test_additive():
    mask = Mask(Axis(2, 1), Axis(3, 0))
    bias = mask.additive(torch.float64)
    assert bias.dtype == torch.float64
    assert torch.equal(bias.isfinite(), mask.tile())
    assert torch.equal(bias.softmax(-1) > 0, mask.tile())


def test_cat_keeps_the_start_of_contiguous_time_only():
    assert Axis(3, 2).cat(Axis(4, 5)).start == 2
    assert torch.equal(Axis(3, 2).cat(Axis(4, 5)).time, torch.arange(2, 9)[None])
    gap = Axis(3, 2).cat(Axis(2, 9))
    assert gap.start is None
    assert gap.time.tolist() == [[2, 3, 4, 9, 10]]
    assert gap.position.tolist() == gap.time.tolist()


def test_cat_fills_in_what_one_side_does_not_say():
    left = Axis(2, 0, torch.tensor([[0, 1], [0, 0]]), valid=torch.tensor([[1, 1], [0, 1]]).bool())
    right = Axis(2, 2, segment=torch.tensor([[7, 8]]))
    both = left.cat(right)
    assert both.start == 0 and both.length == 4
    assert both.position.tolist() == [[0, 1, 2, 3], [0, 0, 2, 3]]
    assert both.validity.tolist() == [[True] * 4, [False, True, True, True]]
    assert both.segment.tolist() == [[0, 0, 7, 8]]


def test_slices():
    axis = Axis(5, 3, position := torch.arange(5)[None] * 2, valid=torch.tensor([[0, 1, 1, 1, 0]]).bool())
    part = axis[1:4]
    assert (part.length, part.start) == (3, 4)
    assert part.time.tolist() == [[4, 5, 6]]
    assert torch.equal(part.position, position[:, 1:4])
    assert part.validity.all()
    assert part.rows.tolist() == [[1, 2, 3]]
    assert part[1:].rows.tolist() == [[2, 3]], "rows of a slice of a slice are rows of the whole"
    assert axis[:] is axis and axis[:9] is axis
    assert axis[3:1].length == 0 and axis[3:1].time.shape == (1, 0)


def test_repeat_take_and_batch():
    axis = Axis(3, 1, valid=torch.tensor([[1, 1, 1], [0, 1, 1]]).bool())
    twice = axis.repeat(2)
    assert twice.length == 6 and twice.start is None
    assert twice.time.tolist() == [[1, 1, 2, 2, 3, 3]]
    assert twice.validity.tolist() == [[True] * 6, [False, False, True, True, True, True]]
    taken = axis.take(torch.tensor([[2, 0]]))
    assert taken.time.tolist() == [[3, 1], [3, 1]] or taken.time.tolist() == [[3, 1]]
    assert taken.validity.tolist() == [[True, True], [True, False]]
    swapped = axis.batch(lambda t: t.flip(0))
    assert swapped.start == 1
    assert swapped.validity.tolist() == [[False, True, True], [True, True, True]]
    assert Axis(3, 1).batch(lambda t: t[[0, 0]]).whole, "what all sequences share needs no copies"


def test_once_is_once():
    axis, calls = Axis(2, 0), []
    for _ in range(3):
        axis.once("key", lambda: calls.append(1))
    assert calls == [1]
    assert not axis[:1].memo.get("key"), "a part of an axis has a memory of its own"
