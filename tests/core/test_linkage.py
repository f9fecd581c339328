"""Clusters by single, complete and average linkage are those of scipy, for many problems at once."""

import pytest
import torch

from manyheads.core.linkage import agglomerate


def distances(rows, n):
    x = torch.randn(rows, n, 3, dtype=torch.float64)
    return torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")


def sets(labels):
    return {frozenset(i for i, x in enumerate(labels) if x == label) for label in set(labels) if label != -1}


@pytest.mark.parametrize("kind", ["average", "single", "complete"])
def test_clusters_are_those_of_scipy(kind):
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    squareform = pytest.importorskip("scipy.spatial.distance").squareform
    apart = distances(3, 12)
    for count in (1, 4, 11):
        found = agglomerate(apart, count, kind)
        for row, labels in zip(apart, found.tolist(), strict=True):
            tree = hierarchy.linkage(squareform(row.numpy(), checks=False), kind)
            assert sets(labels) == sets(hierarchy.fcluster(tree, count, "maxclust").tolist())
            assert all(min(i for i, x in enumerate(labels) if x == label) == label for label in labels)


def test_no_problems_and_nothing_to_join():
    for shape in ((0, 4), (2, 0), (0, 0)):
        valid = torch.ones(shape, dtype=torch.bool)
        assert agglomerate(torch.zeros(*shape, shape[1]), 2, valid=valid).shape == shape
        assert agglomerate(torch.zeros(*shape, shape[1]), torch.ones(shape[0])).shape == shape


def test_single_linkage_cuts_the_minimum_spanning_tree():
    apart = distances(1, 9)[0]
    within, edges = {0}, []
    while len(within) < 9:
        edge = min((float(apart[i, j]), i, j) for i in within for j in range(9) if j not in within)
        edges.append(edge)
        within.add(edge[2])
    parent = list(range(9))
    for _, i, j in sorted(edges)[:6]:
        old, new = parent[j], parent[i]
        parent = [new if p == old else p for p in parent]
    assert sets(agglomerate(apart, 3, "single").tolist()) == sets(parent)


def test_clusters_are_nested():
    apart = distances(1, 10)
    fine, coarse = (sets(agglomerate(apart, n)[0].tolist()) for n in (6, 3))
    assert all(any(small <= large for large in coarse) for small in fine)


def test_each_problem_has_its_own_number_and_its_own_padding():
    apart = distances(2, 8)
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[1, 5:] = False
    apart[1, 5:], apart[1, :, 5:] = torch.nan, torch.nan
    both = agglomerate(apart, torch.tensor([3, 2]), valid=valid)
    torch.testing.assert_close(both[:1], agglomerate(apart[:1], 3))
    torch.testing.assert_close(both[1, :5], agglomerate(apart[1, :5, :5], 2))
    assert (both[1, 5:] == -1).all()


def test_what_is_no_linkage_is_refused():
    with pytest.raises(ValueError, match=r"linkage='ward' is none of average, single, complete"):
        agglomerate(distances(1, 3), 2, "ward")
