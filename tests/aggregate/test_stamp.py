"""STAMP: multi-head pooling with several queries, and its adapter (arXiv 2511.10848)."""

import pytest
import torch

from manyheads.aggregate import CrissCross, STAMPAdapter, build

D = 8


def tokens(n=6, rows=3):
    return torch.randn(rows, n, D, dtype=torch.float64)


def pool(line="stamp(heads=2, queries=3)"):
    return build(line, D).double()


def test_by_its_equations():
    x, agg = tokens(), pool()
    heads = []
    for a in range(2):
        p = x @ agg.key.weight[4 * a : 4 * a + 4].T
        w = (p @ agg.query[a].T / 2).softmax(1)  # [B, N, K]; sqrt d = 2
        heads.append((w.mT @ p).mean(1))
        torch.testing.assert_close(agg(x).weights[:, 3 * a : 3 * a + 3, 0], w.mT)
    z = torch.cat(heads, -1) @ agg.out.weight.T + agg.out.bias + 0.1 * x.mean(1)
    torch.testing.assert_close(agg(x).out[:, 0], z)
    assert sum(p.numel() for p in agg.parameters()) == D * D + 2 * 3 * 4 + D * D + D


def test_weights_sum_to_one_so_the_published_strength_tells_no_query_from_another():
    weights = pool()(tokens()).weights
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_with_one_query_all_ways_to_combine_are_one():
    x, found = tokens(), []
    first = pool("stamp(heads=2, queries=1)")
    for how in ("mean", "strength", "max", "learned", "concat"):
        agg = pool(f"stamp(heads=2, queries=1, combine={how})")
        agg.load_state_dict(first.state_dict(), strict=False)
        found.append(agg(x).out)
    for each in found:
        torch.testing.assert_close(each, found[0])


def test_equal_tokens_and_zero_queries():
    x, agg = tokens(), pool()
    same = x[:, :1].expand(-1, 4, -1)
    whole = x[:, 0] @ agg.key.weight.T @ agg.out.weight.T + agg.out.bias + 0.1 * x[:, 0]
    torch.testing.assert_close(agg(same).out[:, 0], whole)
    torch.nn.init.zeros_(agg.query)
    mean = x.mean(1)
    torch.testing.assert_close(agg(x).out[:, 0], mean @ agg.key.weight.T @ agg.out.weight.T + agg.out.bias + 0.1 * mean)


def test_a_head_depends_on_its_own_weights():
    x, agg = tokens(), pool()
    before = agg(x).weights
    agg.key.weight.data[4:] += 1
    agg.query.data[1] += 1
    after = agg(x).weights
    torch.testing.assert_close(after[:, :3], before[:, :3])
    assert not torch.allclose(after[:, 3:], before[:, 3:])


def test_max_is_the_query_of_greatest_strength():
    x, agg = tokens(1000, 1), pool("stamp(heads=2, queries=3, combine=max)")
    p = (x @ agg.key.weight.T).unflatten(-1, (2, 4)).transpose(1, 2)
    agg.query.data[:, 1] *= 50
    best = (agg.query @ p.mT / 2).logsumexp(-1)[0].argmax(-1)
    assert best.tolist() == [1, 1]
    o = torch.stack([((agg.query[a, 1] @ p[0, a].T / 2).softmax(-1) @ p[0, a]) for a in range(2)]).flatten()
    torch.testing.assert_close(agg(x).out[0, 0], o @ agg.out.weight.T + agg.out.bias + 0.1 * x[0].mean(0))


def test_strength_is_the_logsumexp_of_scores():
    x, agg = tokens(), pool("stamp(heads=2, queries=3, combine=strength)")
    agg.query.data *= 20
    p = (x @ agg.key.weight.T).unflatten(-1, (2, 4)).transpose(1, 2)
    scores = agg.query @ p.mT / 2  # [B, A, K, N]
    share = scores.exp().sum(-1) / scores.exp().sum((-1, -2), keepdim=True)[..., 0]
    o = (share[..., None] * (scores.softmax(-1) @ p)).sum(2).flatten(1)
    torch.testing.assert_close(agg(x).out[:, 0], o @ agg.out.weight.T + agg.out.bias + 0.1 * x.mean(1))


def test_at_its_start_a_block_mixes_nothing():
    block, x = CrissCross(D, 4, 3, 12).double(), torch.randn(2, 4, 3, D).double()
    for gate in block.gates:
        torch.nn.init.zeros_(gate.mix.weight)
    u = block.enter(x)
    a = u[..., :6]
    torch.testing.assert_close(block.gates[0](u), a)  # weight 0 and bias 1: the other half alone
    for axis, order in ((1, [2, 0, 3, 1]), (2, [2, 0, 1])):
        index = torch.tensor(order)
        torch.testing.assert_close(block(x.index_select(axis, index)), block(x).index_select(axis, index))
    other = x.clone()
    other[:, 1, 2] += 1
    same = (block(other) == block(x)).all(-1)
    assert same.sum() == same.numel() - 2 and not same[:, 1, 2].any()
    fresh = CrissCross(D, 4, 3, 12)
    assert (fresh.gates[1].mix.bias == 1).all() and fresh.gates[1].mix.weight.abs().max() < 1e-5


def test_a_gate_mixes_along_its_axis_only():
    block, x = CrissCross(D, 4, 3, 12).double(), torch.randn(1, 4, 3, D).double()
    for gate in block.gates:
        torch.nn.init.normal_(gate.mix.weight)
    other = x.clone()
    other[:, 1, 2] += torch.randn(D)
    felt = (block(other) - block(x)).abs().amax(-1)[0] > 1e-9
    assert felt.tolist() == [[t == 1 or s == 2 for s in range(3)] for t in range(4)]


def test_the_adapter():
    adapter = STAMPAdapter(5, 4, 3, dim=D, layers=2, hidden=12, pool="stamp(heads=2)").eval()
    x = torch.randn(2, 4, 3, 5)
    found = adapter(x)
    assert found.out.shape == (2, 1, D) and found.weights.shape == (2, 16, 1, 12)
    torch.testing.assert_close(adapter(3 * x + 1).out, found.out, atol=1e-3, rtol=1e-3)  # instance norm
    found.out.square().sum().backward()
    assert all(p.grad is not None for p in adapter.parameters())
    sizes = STAMPAdapter(1024, 10, 20)
    assert 0.6e6 < sum(p.numel() for p in sizes.parameters()) < 1.2e6
    for bad, match in ((x[:, :3], r"\[rows, 4, 3"), (x[0], r"\[rows, 4, 3")):
        with pytest.raises(ValueError, match=match):
            adapter(bad)
    with pytest.raises(ValueError, match="halved"):
        STAMPAdapter(5, 4, 3, hidden=13)


@pytest.mark.parametrize("line", ["stamp(heads=3)", "stamp(queries=0)", "stamp(combine=sum)", "stamp(residual=inf)"])
def test_refusals(line):
    with pytest.raises(ValueError, match=r"divide|at least 1|is none of|finite|inf"):
        build(line, D)
