"""Agglomerative clustering of tokens: what is kept, how many are left, and that sizes make attention exact."""

import pytest
import torch

from manyheads.aggregate import ATC, build
from manyheads.aggregate.aggregator import attend


def test_sums_are_kept():
    x, size = torch.randn(2, 15, 6, dtype=torch.float64), torch.randint(1, 4, (2, 15)).double()
    found = build("atc(keep=0.4)", 6)(x, size=size)
    torch.testing.assert_close((found.size[..., None] * found.out).sum(1), (size[..., None] * x).sum(1))


def test_clusters_are_those_of_the_keys_by_cosine():
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    pdist = pytest.importorskip("scipy.spatial.distance").pdist
    x, keys = torch.randn(1, 15, 6, dtype=torch.float64), torch.randn(1, 15, 4, dtype=torch.float64)
    for kind in ("average", "single", "complete"):
        found = build(f"atc(keep=0.5, linkage={kind}, protect=[])", 6)(x, cond=keys)
        labels = hierarchy.fcluster(hierarchy.linkage(pdist(keys[0].numpy(), "cosine"), kind), 7, "maxclust").tolist()
        pairs = {(a, b) for a, b in zip(labels, found.assign[0].tolist(), strict=True)}
        assert len(pairs) == len(set(labels)) == 7


def test_one_left_out_is_the_identity_up_to_order_and_all_of_them_is_it():
    x = torch.randn(2, 9, 6)
    assert torch.equal(build("atc(keep=1)", 6)(x).out, x)
    found = build("atc(remove=1)", 6)(x)
    assert found.out.shape[1] == 8 and sorted(found.size[0].tolist()) == [1.0] * 7 + [2.0]


def test_equal_tokens_stay_what_they_are():
    x = torch.randn(1, 1, 6, dtype=torch.float64).expand(2, 10, 6)
    found = build("atc(keep=0.3, protect=[])", 6)(x)
    torch.testing.assert_close(found.out, x[:, :3])
    assert found.size.sum(1).tolist() == [10.0, 10.0]


def test_a_schedule_keeps_the_powers_of_what_there_was_first():
    x, options = torch.randn(1, 51, 6), ATC(keep=0.7)
    size, counts = None, []
    for stage in (1, 2, 3):
        found = options.again(stage).build(6)(x, size=size)
        x, size = found.out, found.size
        counts.append(x.shape[1] - 1)
    assert counts == [35, 24, 17]  # floor(50 · 0.7^k), where floor(floor(35 · 0.7) · 0.7) is 16


def test_both_of_two_special_tokens_are_protected():
    x = torch.ones(1, 8, 4) + 1e-3 * torch.randn(1, 8, 4)
    found = build("atc(keep=0.2, protect=[0, 1])", 4)(x)
    assert torch.equal(found.out[:, :2], x[:, :2]) and found.assign[0].tolist() == [0, 1] + [2] * 6


def test_with_its_size_a_merged_pair_attends_as_two_tokens():
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    twice = torch.cat([x, x[:, 1:2]], 1)
    found = build("atc(remove=1, protect=[])", 8)(twice)
    assert found.size[0].tolist() == [1.0, 2.0, 1.0, 1.0]

    def read(rows, size=None):
        heads = rows.unflatten(-1, (2, 4)).transpose(1, 2)
        return attend(x.unflatten(-1, (2, 4)).transpose(1, 2), heads, heads, torch.ones(rows.shape[:2]).bool(), size)[0]

    torch.testing.assert_close(read(found.out, found.size), read(twice))
    assert (read(found.out) - read(twice)).abs().max() > 1e-3
