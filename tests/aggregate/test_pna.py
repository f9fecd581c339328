"""Principal neighbourhood aggregation (arXiv 2004.05718), on sets and on graphs."""

import math
import sys

import pytest
import torch

from manyheads.aggregate import as_pyg, build, dense, pool_groups

D = 4
BARE = "pna(statistics=[{}], scalers=[{}], learned=false)"


def sets(rows=3, tokens=5):
    return torch.randn(rows, tokens, D, dtype=torch.float64)


def bare(statistics, scalers="identity"):
    return build(BARE.format(statistics, scalers), D).double()


def test_statistics_and_their_order():
    x = sets()
    names = "mean, max, min, std, sum, var, softmax, softmin, moment3"
    found = bare(names)(x).out[:, 0].split(D, -1)
    mean = x.mean(1)
    var = ((x - mean[:, None]) ** 2).mean(1)
    third = ((x - mean[:, None]) ** 3).mean(1)
    wanted = [
        mean, x.amax(1), x.amin(1), (var + 1e-5).sqrt(), x.sum(1), var, (x.softmax(1) * x).sum(1),
        ((-x).softmax(1) * x).sum(1), third.sign() * (third.abs() + 1e-5) ** (1 / 3),
    ]  # fmt: skip
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two)


def test_scalers_are_outside_statistics():
    agg, x = bare("mean, max", "identity, amplification, attenuation, linear, inverse"), sets()
    agg.fit([2, 3, 7])
    delta, degree = (math.log(3) + math.log(4) + math.log(8)) / 3, 4.0
    scales = [1, math.log(6) / delta, delta / math.log(6), 5 / degree, degree / 5]
    wanted = torch.cat([scale * each for scale in scales for each in (x.mean(1), x.amax(1))], -1)
    torch.testing.assert_close(agg(x).out[:, 0], wanted)
    torch.testing.assert_close(agg(x).out[:, 0, 6 * D : 7 * D], x.sum(1) / degree)  # linear · mean
    agg.fit([5, 5])  # where the size is the usual one, all scales are 1
    torch.testing.assert_close(agg(x).out[:, 0], torch.cat([x.mean(1), x.amax(1)] * 5, -1))
    again = bare("mean, max", "identity, amplification, attenuation, linear, inverse")
    again.load_state_dict(agg.state_dict())
    torch.testing.assert_close(again(x).out, agg(x).out)


def test_the_whole_by_its_equations():
    x, q, agg = sets(), sets(3, 2), build("pna(towers=2, centre=true)", D).double()
    found = agg(x, query=q).out
    out = []
    for t in range(2):
        part = slice(2 * t, 2 * t + 2)
        pairs = torch.cat([q[:, :, None, part].expand(-1, -1, 5, -1), x[:, None, :, part].expand(-1, 2, -1, -1)], -1)
        m = pairs @ agg.message.weight[t] + agg.message.bias[t]
        std = (m.var(2, correction=0) + 1e-5).sqrt()
        stats = torch.cat([m.mean(2), m.amax(2), m.amin(2), std], -1)
        scaled = torch.cat([q[..., part], stats, stats * math.log(6), stats / math.log(6)], -1)
        out.append(scaled @ agg.update_map.weight[t] + agg.update_map.bias[t])
    linear = agg.mixer[0]
    wanted = torch.nn.functional.leaky_relu(torch.cat(out, -1) @ linear.weight.T + linear.bias)
    torch.testing.assert_close(found, wanted)


def test_count():
    agg = build("pna", D)
    assert sum(p.numel() for p in agg.parameters()) == D * D + D + 12 * D * D + D


def test_a_set_twice_and_one_token():
    x = sets()
    for name in ("mean", "max", "min", "std"):
        torch.testing.assert_close(bare(name)(torch.cat([x, x], 1)).out, bare(name)(x).out)
    torch.testing.assert_close(bare("mean", "linear")(torch.cat([x, x], 1)).out, 2 * bare("mean", "linear")(x).out)
    for name in ("mean", "max", "min"):
        torch.testing.assert_close(bare(name)(x[:, :1]).out, x[:, :1])


def test_constant_messages_have_a_gradient():
    x = sets()[:, :1].expand(-1, 5, -1).clone().requires_grad_()
    found = bare("std, moment3")(x).out
    torch.testing.assert_close(found[..., :D], torch.full_like(found[..., :D], 1e-5**0.5))
    assert torch.autograd.grad(found.sum(), x)[0].isfinite().all()


def test_what_one_statistic_cannot_tell_another_can():
    x = torch.tensor([[1.0, 1, 4], [2, 2, 2], [0, 3, 3]]).double()[..., None].expand(-1, -1, D)
    mean, std, largest = (bare(name)(x).out[:, 0, 0] for name in ("mean", "std", "max"))
    assert mean.unique().numel() == 1
    assert len({(round(s, 6), m) for s, m in zip(std.tolist(), largest.tolist(), strict=True)}) == 3


def test_large_means_keep_their_spread_in_half_precision():
    x = (1000 + torch.arange(8.0)).view(1, 8, 1).expand(-1, -1, D).bfloat16().float()
    assert (bare("std").float()(x).out - x.std(1, correction=0)).abs().max() < 1e-3
    state = bare("std").float()
    parts = state.init(1)
    for token in x.split(1, 1):
        parts = state.update(parts, token)
    torch.testing.assert_close(state.finalize(parts).out, state(x).out)


def test_blocks_are_for_moments():
    agg = bare("softmax")
    assert not agg.exact
    with pytest.raises(ValueError, match="blocks are for mean, max"):
        agg.init(2)


def test_groups_of_a_long_list_are_each_pooled_alone():
    x, index = torch.randn(9, D).double(), torch.tensor([3, 0, 0, 5, 3, 3, 0, 1, 3])
    agg = build("pna(towers=2)", D).double()
    found = pool_groups(agg, x, index, 7)
    for group in range(7):
        mine = x[index == group]
        want = agg(mine[None]).out[0, 0] if len(mine) else torch.zeros(D).double()
        torch.testing.assert_close(found[group], want)
    rows, mask = dense(x, index, 7)
    assert mask.sum(1).tolist() == [3, 1, 0, 4, 0, 1, 0] and torch.equal(rows[3][mask[3]], x[index == 3])
    order = torch.randperm(9)
    torch.testing.assert_close(pool_groups(agg, x[order], index[order], 7), found)
    assert pool_groups(agg, x[:0], index[:0], 2).tolist() == [[0.0] * D] * 2
    for bad in ((x, index[:-1], 7), (x, index.double(), 7), (x, index, 3), (x, index - 1, 7)):
        with pytest.raises(ValueError, match="index"):
            dense(*bad)


def test_as_an_aggregation_of_graphs():
    aggr = pytest.importorskip("torch_geometric.nn.aggr")
    agg = build("lcm", D).double()
    of_graph = as_pyg(agg)
    assert isinstance(of_graph, aggr.Aggregation) and len(list(of_graph.parameters())) == len(list(agg.parameters()))
    x, index = torch.randn(6, D).double(), torch.tensor([0, 0, 1, 1, 1, 3])
    found = of_graph(x, index, dim_size=4)
    torch.testing.assert_close(found, pool_groups(agg, x, index, 4))
    torch.testing.assert_close(of_graph(x, index), found)
    torch.testing.assert_close(of_graph(x, ptr=torch.tensor([0, 2, 5, 5, 6])), found)
    torch.testing.assert_close(of_graph(x), agg(x[None]).out[0])
    with pytest.raises(ValueError, match="messages are"):
        of_graph(x[None], index)


def test_in_message_passing_it_is_pna_of_torch_geometric():
    library = pytest.importorskip("torch_geometric.nn")
    sizes = torch.tensor([0, 1, 3, 1])  # nodes of 0, 1, 2 and 3 neighbours
    others = ["mean", "max", "min"], ["identity", "amplification", "attenuation", "linear"]
    theirs = library.aggr.DegreeScalerAggregation(*others, sizes)
    agg = build(f"pna(statistics=[{', '.join(others[0])}], scalers=[{', '.join(others[1])}], learned=false)", D)
    agg.fit(torch.arange(4).repeat_interleave(sizes))
    edges = torch.tensor([[1, 2, 0, 3, 4, 0, 2, 3, 1, 4], [4, 0, 3, 1, 2, 2, 2, 1, 3, 0]])
    x = torch.randn(6, D)  # the last node has no neighbour
    wanted, found = (library.SimpleConv(aggr=each)(x, edges) for each in (theirs, as_pyg(agg)))
    assert (found[:5] != 0).all() and (found[5] == 0).all()
    torch.testing.assert_close(found, wanted)


def test_without_torch_geometric_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.nn.aggr", None)
    with pytest.raises(ImportError, match=r"pip install .manyheads\[graphs\]"):
        as_pyg(build("pna", D))


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("pna(statistics=[median])", "no statistic 'median'"),
        ("pna(scalers=[cubic])", "no scaler 'cubic'"),
        ("pna(statistics=[])", "it needs a statistic"),
        ("pna(towers=3)", "divide"),
        ("pna(delta=0.0)", "above 0"),
        ("pna(learned=false, towers=2)", "towers are of learned"),
        ("pna(learned=false, centre=true)", "a query enters by learned"),
    ],
)
def test_refusals(line, match):
    with pytest.raises(ValueError, match=match):
        build(line, D)


def test_a_query_where_it_belongs():
    x = sets()
    for line, query in (("pna", x[:, :1]), ("pna(centre=true)", None)):
        with pytest.raises(ValueError, match="centre="):
            build(line, D).double()(x, query=query)
    with pytest.raises(ValueError, match="training sets"):
        build("pna", D).fit([])
