"""What all mergers hold to: sizes add up, padding and batch mates change nothing, `unmerge` gives means."""

import pytest
import torch

from manyheads.aggregate import ATC, HTTM, PruneMerge, build, read_aggregator
from manyheads.aggregate.merger import means, share_of
from manyheads.core.part import OptionError

KINDS = [each for kind in (ATC, PruneMerge, HTTM) for each in (kind(), *kind.examples())]


@pytest.fixture(params=KINDS, ids=str)
def options(request):
    return request.param


@pytest.fixture
def x():
    return torch.randn(3, 14, 8, dtype=torch.float64)


def test_a_line_is_read_and_printed(options):
    assert read_aggregator(str(options)) == options


def test_sizes_add_up_and_each_token_goes_to_one_place(options, x):
    size = torch.randint(1, 5, (3, 14)).double()
    found = build(options, 8)(x, size=size)
    dropped = found.assign < 0
    assert dropped.any() == (not getattr(options, "merge", True))
    torch.testing.assert_close(found.size.sum(1), (size * ~dropped).sum(1))
    counted = torch.zeros_like(found.size).scatter_add(1, found.assign.clamp_min(0), size * ~dropped)
    torch.testing.assert_close(found.size, counted)
    assert found.out.shape[:2] == found.size.shape and ((found.size == 0) == (found.out == 0).all(-1)).all()


def test_results_are_in_the_hull_of_their_tokens(options, x):
    found = build(options, 8)(x)
    for row in range(3):
        for m in range(found.out.shape[1]):
            members = x[row, found.assign[row] == m]
            if len(members):
                assert (found.out[row, m] <= members.amax(0) + 1e-12).all()
                assert (found.out[row, m] >= members.amin(0) - 1e-12).all()


def test_padding_and_batch_mates_change_nothing(options, x):
    merger, lengths = build(options, 8), (14, 9, 5)
    mask = torch.arange(14) < torch.tensor(lengths)[:, None]
    found = merger(torch.where(mask[..., None], x, torch.nan), mask)
    for row, n in enumerate(lengths):
        alone = merger(x[row : row + 1, :n])
        m = alone.out.shape[1]
        torch.testing.assert_close(found.out[row, :m], alone.out[0])
        torch.testing.assert_close(found.size[row, :m], alone.size[0])
        assert (found.size[row, m:] == 0).all() and (found.out[row, m:] == 0).all()
        torch.testing.assert_close(found.assign[row, :n], alone.assign[0])
        assert (found.assign[row, n:] == -1).all()


def test_a_row_without_tokens_is_zero(options):
    found = build(options, 8)(torch.full((1, 6, 8), torch.nan), torch.zeros(1, 6, dtype=torch.bool))
    assert not found.out.any() and not found.size.any() and (found.assign == -1).all()


def test_protected_tokens_are_untouched(options, x):
    found = build(options, 8)(x)
    for i in options.protect:
        at = found.assign[:, i]
        assert torch.equal(found.out[torch.arange(3), at], x[:, i])
        assert (found.size[torch.arange(3), at] == 1).all()


def test_unmerge_gives_each_token_its_mean(options, x):
    merger = build(options, 8)
    found = merger(x)
    back = merger.unmerge(found, x)
    for row in range(3):
        for n in range(14):
            m = found.assign[row, n]
            torch.testing.assert_close(back[row, n], x[row, n] if m < 0 else found.out[row, m])


def test_the_gradient_is_that_of_the_means(options, x):
    x.requires_grad_()
    cond = torch.rand(3, 14).double() if isinstance(options, PruneMerge) else None
    found = build(options, 8)(x, cond=cond)
    found.out.sum().backward()
    assert x.grad.isfinite().all()
    if getattr(options, "weights", "") == "similarity":
        return  # weights have a gradient too
    torch.testing.assert_close(x.grad.sum((1, 2)), 8.0 * (found.size > 0).sum(1).double())


def test_counts_are_those_of_exact_arithmetic():
    assert share_of(100, 0.29).item() == 29 and share_of(10, 0.7, up=True).item() == 7
    assert share_of(torch.tensor([196, 196]), 0.25).tolist() == [49, 49] and share_of(7, 0.5, up=True).item() == 4


def test_a_group_of_weight_zero_is_its_plain_mean(x):
    assign, mask = torch.zeros(3, 14, dtype=torch.long), torch.ones(3, 14, dtype=torch.bool)
    found = means(x, assign, 1, mask, weight=torch.zeros(3, 14))
    torch.testing.assert_close(found.out[:, 0], x.mean(1))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("atc(keep=0)", r"atc: keep=0.0 is not in \(0, 1\]"),
        ("atc(stage=0)", "stage=0"),
        ("atc(linkage=ward)", "ward is none of average, single, complete"),
        ("atc(protect=[0, 0])", r"protect=\[0, 0\]"),
        ("token_prune_merge(keep=1.5)", "keep=1.5"),
        ("token_prune_merge(of=-1)", "of=-1"),
        ("httm(ratio=1)", r"ratio=1.0 is one or two shares in \[0, 1\)"),
        ("httm(ratio=[0.1, 0.2, 0.3])", "one or two shares"),
        ("httm(outliers=2)", "outliers=2.0"),
        ("httm(spatial=0)", "spatial=0 is below 1"),
    ],
)
def test_options_that_cannot_be_are_refused(line, said):
    with pytest.raises(OptionError, match=said):
        read_aggregator(line)


def test_tensors_that_do_not_fit_are_refused(x):
    with pytest.raises(ValueError, match=r"atc: cond is \[3, 5, 8\]"):
        build("atc", 8)(x, cond=x[:, :5])
    with pytest.raises(ValueError, match=r"httm: cond is \[3, 5, 8\]"):
        build("httm", 8)(x, cond=x[:, :5])
    with pytest.raises(ValueError, match=r"token_prune_merge: cond is \[3, 14, 8\], an importance"):
        build("token_prune_merge", 8)(x, cond=x)
    with pytest.raises(ValueError, match="an importance is a number from 0 on"):
        build("token_prune_merge", 8)(x, cond=x[..., 0])
    with pytest.raises(ValueError, match="token 20 is protected, but there are 14"):
        build("atc(protect=[20])", 8)(x)
    with pytest.raises(ValueError, match="atc: x is"):
        build("atc", 4)(x)
