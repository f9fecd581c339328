"""Important tokens stay, others join the kept one that they are most like."""

import pytest
import torch

from manyheads.aggregate import TwoScaleStem, build, received
from manyheads.aggregate.merger import rows_of
from manyheads.core.kernel import Call
from manyheads.core.mask import Axis, Mask
from manyheads.core.part import OptionError


def drawn(n=11):
    return torch.randn(2, n, 6, dtype=torch.float64), torch.rand(2, n, dtype=torch.float64)


def test_against_a_loop():
    x, a = drawn()
    found = build("token_prune_merge(keep=0.4)", 6)(x, cond=a)
    assert found.out.shape[1] == 1 + 4  # ceil(0.4 · 10)
    for row in range(2):
        best = sorted(sorted(range(1, 11), key=lambda t: -float(a[row, t]))[:4])
        groups = {c: [c] for c in best}
        for t in set(range(1, 11)) - set(best):
            near = torch.cosine_similarity(x[row, t], x[row, best], dim=-1)
            groups[best[int(near.argmax())]].append(t)
        torch.testing.assert_close(found.out[row, 0], x[row, 0])
        for place, c in enumerate(best, 1):
            w = a[row, groups[c]]
            torch.testing.assert_close(found.out[row, place], (w[:, None] * x[row, groups[c]]).sum(0) / w.sum())
            assert all(found.assign[row, t] == place for t in groups[c])


def test_all_kept_is_the_identity():
    x, a = drawn()
    assert torch.equal(build("token_prune_merge(keep=1)", 6)(x, cond=a).out, x)


def test_unimportant_copies_of_a_token_leave_it_as_it_is():
    x = torch.randn(1, 3, 6, dtype=torch.float64)
    x = torch.cat([x, x[:, 2:].expand(1, 3, 6)], 1)
    found = build("token_prune_merge(keep=0.4)", 6)(x, cond=torch.tensor([[1, 1, 1, 0.5, 0.5, 0.5]], dtype=x.dtype))
    torch.testing.assert_close(found.out, x[:, :3])
    assert found.size.tolist() == [[1.0, 1.0, 4.0]]


def test_without_importance_merging_is_pruning():
    x, a = drawn()
    a = torch.where(a > a[:, 1:].median(1, keepdim=True).values, a, 0.0)
    kept = int((a[0, 1:] > 0).sum())
    merged, pruned = (
        build(f"token_prune_merge(keep={kept / 10}, merge={how})", 6)(x, cond=a) for how in ("true", "false")
    )
    torch.testing.assert_close(merged.out, pruned.out)
    assert (pruned.assign < 0).any() and not (merged.assign < 0).any()


def test_patches_may_stand_in_any_order():
    x, a = drawn()
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(10)])
    merger = build("token_prune_merge(keep=0.5)", 6)
    one, two = merger(x, cond=a), merger(x[:, order], cond=a[:, order])
    torch.testing.assert_close(merger.unmerge(one)[:, order], merger.unmerge(two))


def test_other_weights():
    x, a = drawn()
    sized = build("token_prune_merge(keep=0.3, weights=size)", 6)(x, cond=a)
    member = sized.assign[0] == 1
    torch.testing.assert_close(sized.out[0, 1], x[0, member].mean(0))
    near = build("token_prune_merge(keep=0.3, weights=similarity)", 6)(x, cond=a)
    torch.testing.assert_close(near.assign, sized.assign)
    leader = next(t for t in range(1, 11) if sized.assign[0, t] == 1 and a[0, t] >= a[0, member].max())
    w = torch.where(torch.arange(11) == leader, 1, torch.cosine_similarity(x[0], x[0, leader], dim=-1).clamp_min(0))
    w = w * member
    torch.testing.assert_close(near.out[0, 1], (w[:, None] * x[0]).sum(0) / w.sum())


def test_one_row_is_that_of_the_full_map():
    q, k = (torch.randn(2, heads, 7, 4, dtype=torch.float64) for heads in (4, 2))
    valid = torch.arange(7) < torch.tensor([[7], [5]])
    axis = Axis(7, 0, valid=valid)
    call = Call(q, k, k, Mask(axis, axis, ()), 0.5)
    whole = (q @ k.repeat_interleave(2, 1).mT * 0.5).masked_fill(~valid[:, None, None], -torch.inf).softmax(-1)
    whole = whole * valid[:, None, :, None]
    torch.testing.assert_close(rows_of(call, slice(2, 3)), whole[:, :, 2:3])
    torch.testing.assert_close(rows_of(call, slice(None)), whole)
    mean = torch.stack([whole[i, :, : int(valid[i].sum())].mean((0, 1)) for i in range(2)])
    torch.testing.assert_close(received(whole, valid), mean)


def test_two_scales_of_patches():
    for how, width in (("concat", 6), ("add", 6)):
        stem = TwoScaleStem(6, channels=2, patch=2, fuse=how).double()
        image = torch.randn(1, 2, 8, 12, dtype=torch.float64)
        tokens = stem(image)
        assert tokens.shape == (1, 24, width)
        fine, coarse = stem.fine(image), stem.coarse(image)
        y, x = 3, 4
        both = fine[0, :, y, x], coarse[0, :, y // 2, x // 2]
        wanted = sum(both) if how == "add" else stem.fuse(torch.cat(both))
        torch.testing.assert_close(tokens[0, y * 6 + x], wanted)
    with pytest.raises(ValueError, match=r"\[8, 10\] pixels is not in patches of 4"):
        stem(image[..., :10])
    with pytest.raises(OptionError, match="neither concat nor add"):
        TwoScaleStem(6, fuse="mean")
