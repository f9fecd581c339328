"""What is lost with a query's lowest keys, and whether far keys matter: identities, bounds, moments."""

from functools import partial

import pytest
import torch

from manyheads import Attention, capture
from manyheads.inspect import measures
from manyheads.inspect.measures import far, measure
from manyheads.inspect.measures import truncation as cut


def case(n=40, rows=30, seed=0):
    g = torch.Generator().manual_seed(seed)
    s = 2 * torch.randn(rows, n, generator=g, dtype=torch.float64)
    return s, torch.randn(n, 6, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 5, 39])
def test_identities_and_bounds(k):
    s, v = case()
    p = s.softmax(-1)
    kept = torch.zeros_like(p, dtype=torch.bool).scatter(-1, p.topk(k).indices, True)
    short = (p * kept) / (p * kept).sum(-1, keepdim=True)
    tau = cut.tail(s, k)
    close = partial(torch.testing.assert_close, atol=1e-13, rtol=1e-12)
    close(tau, (p - short).abs().sum(-1) / 2)
    kl = torch.where(kept, short * (short / p).log(), 0.0).sum(-1)
    close(tau, -torch.expm1(-kl))
    means = [(p * m) @ v / (p * m).sum(-1, keepdim=True) for m in (~kept, kept)]
    close(p @ v - short @ v, tau[:, None] * (means[0] - means[1]))
    for bound in (cut.gap_bound(s, k), cut.head_bound(s, k)):
        assert (bound >= tau - 1e-12).all()
    assert (cut.head_bound(s, k) <= cut.gap_bound(s, k) + 1e-12).all()
    error, far_apart, spread = cut.value_bounds(p, v, k)
    close(error, (p @ v - short @ v).norm(dim=-1))
    assert (error <= far_apart + 1e-12).all() and (error <= spread + 1e-12).all()


def test_edges_of_the_identities():
    s, _ = case()
    assert cut.tail(s, 40).max() == cut.gap_bound(s, 40).max() == cut.head_bound(s, 41).max() == 0
    torch.testing.assert_close(cut.tail(s + 5, 3), cut.tail(s, 3))
    flat = torch.tensor([[2.0] * 3 + [0.5] * 7], dtype=torch.float64)
    torch.testing.assert_close(cut.gap_bound(flat, 3), cut.tail(flat, 3))  # tight where both are constant
    torch.testing.assert_close(cut.head_bound(flat, 3), cut.tail(flat, 3))
    hidden = torch.cat([s, s.new_full((30, 4), -torch.inf)], 1)
    torch.testing.assert_close(cut.tail(hidden, 5), cut.tail(s, 5))
    torch.testing.assert_close(cut.gap_bound(hidden, 5), cut.gap_bound(s, 5))
    assert torch.equal(cut.tails(s, [1, 4]), torch.stack([cut.tail(s, 1), cut.tail(s, 4)], -1))
    values = torch.cat([torch.ones(3, 2), torch.zeros(7, 2)]).double()
    error, _, spread = cut.value_bounds(flat.softmax(-1), values, 3)
    torch.testing.assert_close(error, spread)  # values constant in head and tail
    with pytest.raises(ValueError, match="k=0"):
        cut.tail(s, 0)


def test_gaussian_scores():
    g = torch.Generator().manual_seed(0)
    z = torch.randn(200_000, generator=g, dtype=torch.float64)
    for sigma, epsilon, want in ((1.0, 0.1, 0.6104), (2.0, 0.01, 0.6279)):
        predicted = cut.gaussian_keys(epsilon, sigma)
        assert predicted == pytest.approx(want, abs=2e-3)
        assert cut.gaussian_tail(predicted, sigma) == pytest.approx(epsilon)
        k = round(predicted * len(z))
        assert cut.tail(sigma * z, k).item() == pytest.approx(epsilon, rel=0.05)
    with pytest.raises(ValueError, match="epsilon=1"):
        cut.gaussian_keys(1, 2.0)


def test_certified_keys_are_enough():
    g = torch.Generator().manual_seed(0)
    stopped = 0
    for seed in range(12):
        k = torch.randn(160, 4, generator=g, dtype=torch.float64).cumsum(0) * 0.3  # neighbours are alike
        q = torch.randn(4, generator=g, dtype=torch.float64) * (1 + seed % 4)
        for epsilon in (0.01, 0.2):
            found = cut.certified(q, k, 0.7, epsilon, block=16)
            p = (0.7 * k @ q).softmax(0)
            true = 1 - p[found.keys].sum()
            assert true <= found.bound + 1e-12 and found.bound <= epsilon
            stopped += found.scored[0] < found.scored[1]
    assert stopped > 4
    whole = cut.certified(q, k, 0.7, 0.0, block=16)
    assert whole.scored == (10, 10) and len(whole.keys) == 160


def test_measures_are_those_of_the_map():
    layer, x = Attention("gqa(kv_heads=2)", 32, 4).double().eval(), 3 * torch.randn(2, 20, 32).double()
    valid = torch.arange(20) >= torch.tensor([[0], [6]])
    run = lambda: layer(x, mask=valid)
    with torch.no_grad(), capture(layer, what={"weights", "scores", "v"}) as tape:
        run()
    w, z, v = tape[0].weights, tape[0].scores, tape[0].v
    real = (valid & (valid.cumsum(1) >= 2))[:, None].expand(2, 4, 20)

    def mean(each):
        return torch.stack([each[:, h][real[:, h]].mean() for h in range(4)])

    def one(function):
        return measure(layer, run, {"it": function})["it"][0]

    torch.testing.assert_close(one(partial(cut.tail_mass, k=3)), mean(cut.tail(z.masked_fill(~real[..., None], 0), 3)))
    ordered = w.sort(-1, descending=True).values.cumsum(-1)
    want = (ordered < 0.8 - 1e-6).sum(-1) + 1.0
    torch.testing.assert_close(one(partial(cut.keys_needed, epsilon=0.2)), mean(want.double()))
    error, *_ = cut.value_bounds(w[:, 1], v[:, 1, None].expand(2, 20, 20, 8), 3)
    got = one(partial(cut.truncation_error, k=3))[1]
    torch.testing.assert_close(got, mean((error / (w @ v)[:, 1].norm(dim=-1))[:, None].expand(2, 4, 20))[1])
    seen = z > -torch.inf
    spread = torch.stack([z[0, h, 9][seen[0, h, 9]].std(correction=0) for h in range(4)])
    rows = lambda look: cut.score_spread(look)[:1].masked_fill(torch.arange(20) != 9, torch.nan)
    torch.testing.assert_close(one(rows), spread)
    # near and far
    t, s = torch.arange(20)[:, None], torch.arange(20)
    first = torch.where(valid, s, 99).amin(1)[:, None, None, None]
    near = ((s > t - 4) | (s < first + 2)) & seen
    share = (w * near).sum(-1)
    torch.testing.assert_close(one(partial(far.near_share, first=2, window=4)), mean(share))
    some = (seen & ~near).any(-1) & real
    local = torch.stack([(share >= 0.6)[:, h][some[:, h]].double().mean() for h in range(4)])
    torch.testing.assert_close(one(partial(far.local, first=2, window=4)), local)
    assert one(partial(far.local, least=0.0, first=2, window=4)).tolist() == [1.0] * 4
    assert one(partial(far.predicted_local, least=1.0, first=2, window=4)).tolist() == [0.0] * 4
    agree = one(far.agreement(0.6, 2, 4))
    assert ((agree > 0.3) & (agree <= 1)).all()
    predicted = one(partial(far.predicted_share, first=0, window=30))
    torch.testing.assert_close(predicted, torch.ones(4).double())  # nothing is far
    assert measures.far is far


def test_moments_predict_what_gaussian_keys_weigh():
    g = torch.Generator().manual_seed(3)
    d, n = 16, 4000
    keys, q = (
        torch.randn(2, n, d, generator=g, dtype=torch.float64),
        torch.randn(4, d, generator=g, dtype=torch.float64),
    )
    moments = far.KeyMoments.of(keys)
    z = torch.einsum("ghe,gse->ghs", q.unflatten(0, (2, 2)), keys).flatten(0, 1) * d**-0.5
    torch.testing.assert_close(moments.lse(q, d**-0.5), z.logsumexp(-1), atol=0.05, rtol=0)
    steps = far.KeyMoments.of(keys[:, :100])
    for at in range(100, n, 300):
        steps = steps.add(keys[:, at : at + 300])
    torch.testing.assert_close((steps.mean, steps.covariance), (moments.mean, moments.covariance))
    still = far.KeyMoments(n, moments.mean, torch.zeros_like(moments.covariance))
    assert (still.lse(q, d**-0.5) <= z.logsumexp(-1) + 1e-9).all()
    equal = keys[:, :1].expand(-1, n, -1)
    torch.testing.assert_close(far.KeyMoments.of(equal).lse(q, 1.0), (torch.einsum(
        "ghe,ge->gh", q.unflatten(0, (2, 2)), keys[:, 0]).flatten() + torch.tensor(n).double().log()))  # fmt: skip
    c = torch.randn(2, 1, d, generator=g, dtype=torch.float64)
    moved = far.KeyMoments.of(keys + c).lse(q, 0.25) - moments.lse(q, 0.25)
    torch.testing.assert_close(moved, 0.25 * torch.einsum("ghe,gse->gh", q.unflatten(0, (2, 2)), c).flatten())
    near = z.logsumexp(-1) + torch.tensor([5.0, -5.0, 5.0, -5.0])
    assert moments.local(near, q, d**-0.5, 0.6).tolist() == [True, False, True, False]
    assert moments.local(near, q, d**-0.5, 0.0).all() and not moments.local(near, q, d**-0.5, 1.0).any()


def test_the_measure_predicts_as_the_moments_do():
    layer, x = Attention("gqa(kv_heads=2)", 32, 4).double().eval(), torch.randn(1, 30, 32).double()
    with torch.no_grad(), capture(layer, what={"q", "k", "scores"}) as tape:
        layer(x)
    seen, scale = tape[0], layer.layout.scale
    moments = far.KeyMoments.of(seen.k[0, :, 2:26])  # of query 29, first 2 and the window of 4 left out
    there = torch.stack([far.KeyMoments(moments.n, moments.mean[h : h + 1], moments.covariance[h : h + 1]).lse(
        seen.q[0, h, 29][None], scale)[0] for h in range(4)])  # fmt: skip
    here = seen.scores[0, :, 29, [0, 1, 26, 27, 28, 29]].logsumexp(-1)
    rows = lambda look: far.predicted_share(look, 2, 4).masked_fill(torch.arange(30) != 29, torch.nan)
    torch.testing.assert_close(measure(layer, x, {"it": rows})["it"][0], (here - there).sigmoid())
