"""Each kind of head: its loss against the formula, and what it says."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from tests.multi.models import NAN

from manyheads.multi import Density, Matryoshka, MultiHead, MultiLabel, Ordinal, Ranking, Regression, Span, read_head
from manyheads.multi.head import KINDS, from_fields, to_fields

D = torch.float64
LINES = {
    "classification(classes=3)": ((4, 8), torch.tensor([0, 2, -100, 1])),
    "classification(classes=3, smoothing=0.1, hidden=6, dropout=0.1)": ((4, 8), torch.tensor([0, 2, -100, 1])),
    "tokens(classes=2)": ((2, 3, 8), torch.tensor([[0, 1, -100], [1, -100, -100]])),
    "multi-label(labels=2, positive=2.0)": ((3, 8), torch.tensor([[0, 1], [-100, 1], [-100, -100]])),
    "regression": ((4, 8), torch.tensor([1.0, 2.0, NAN, -1.0])),
    "regression(size=2, uncertainty=true)": ((2, 8), torch.tensor([[1.0, NAN], [0.5, 2.0]])),
    "regression(loss=huber, shift=3.0, scale=2.0)": ((2, 8), torch.tensor([1.0, 9.0])),
    "ordinal(levels=4)": ((4, 8), torch.tensor([0, 3, 1, -100])),
    "ordinal(levels=2)": ((2, 8), torch.tensor([0, 1])),
    "span": ((2, 5, 8), torch.tensor([[1, 3], [-100, -100]])),
    "ranking": ((2, 4, 8), torch.tensor([[1.0, 0.0, NAN, 2.0], [1.0, 1.0, 1.0, NAN]])),
    "ranking(loss=pairwise)": ((2, 4, 8), torch.tensor([[1.0, 0.0, NAN, 2.0], [3.0, 1.0, 1.0, NAN]])),
    "explanation(classes=3, inner=4)": ((4, 5, 8), torch.tensor([0, 2, -100, 1])),
    "explanation(classes=3, reduction=0)": ((3, 5, 8), torch.tensor([0, -100, 1])),
    "matryoshka(classes=3, slices=[2, 4, 8])": ((3, 8), torch.tensor([0, 2, -100])),
    "matryoshka(classes=2, slices=[2, 8], sigmoid=true)": ((3, 8), torch.tensor([[0, 1], [-100, 1], [-100, -100]])),
    "density(components=3, size=2)": ((3, 8), torch.tensor([[1.0, NAN], [0.5, 2.0], [NAN, NAN]])),
    "density": ((2, 8), torch.tensor([1.0, NAN])),
    "hypotheses(count=3, size=2)": ((3, 8), torch.tensor([[1.0, NAN], [0.5, 2.0], [NAN, NAN]])),
    "gramian(classes=3, count=2, gram=3, width=4, attention=2, groups=2, norm=layer, decorrelation=-0.1, scale=0.1)": (
        (3, 5, 8),
        torch.tensor([0, 2, -100]),
    ),
    "energy": ((3, 4, 8), torch.tensor([3.0, NAN, -2.0])),
    "energy(hidden=6, shift=1.0, scale=2.0)": ((2, 3, 8), torch.tensor([3.0, -2.0])),
    "hypotheses(relaxed=0.1)": ((2, 8), torch.tensor([1.0, NAN])),
}


@pytest.mark.parametrize("line", LINES)
def test_every_head_trains_measures_and_leaves_unlabelled_rows_alone(line):
    torch.manual_seed(0)
    shape, target = LINES[line]
    net = MultiHead(torch.nn.Identity(), {"y": line}, width=8).to(D)
    x = torch.randn(shape, dtype=D, requires_grad=True)
    optimiser = torch.optim.Adam(net.parameters(), 0.05)
    first = net(x, targets={"y": target}).loss.item()
    for step in range(30):
        loss = net(x, targets={"y": target}).loss
        optimiser.zero_grad()
        loss.backward()
        if not step:
            assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
            head = net.heads["y"]
            tidy = head.tidy(target, x)
            known = head.known(tidy)
            rows = known if known.dim() == 1 else known.flatten(1).any(1)
            assert (x.grad[~rows] == 0).all() and (x.grad[rows] != 0).any()
        optimiser.step()
    assert loss.item() < first
    net.eval()
    said = net.predict(x)["y"]
    assert len(said) == len(target)
    figures = net.metrics(net.measure(net(x).outputs, {"y": target}))["y"]
    assert all(isinstance(value, float) for value in figures.values())
    assert read_head(line) == from_fields(to_fields(read_head(line)))
    nothing = torch.zeros_like(head.sums(net(x).outputs["y"], tidy, known))
    assert all(math.isnan(value) for value in head.metrics(nothing).values())


def test_every_kind_is_tried():
    assert {read_head(line).name for line in LINES} == set(KINDS)


def test_ordinal_probabilities_sum_to_one_and_are_differences_of_sigmoids():
    head = Ordinal(5)
    net = head.build(3).to(D)
    out = net(torch.randn(7, 3, dtype=D) * 3)
    found = head.log_probabilities(out).exp()
    torch.testing.assert_close(found.sum(-1), torch.ones(7, dtype=D))
    above = torch.cat([torch.ones(7, 1, dtype=D), out.sigmoid(), torch.zeros(7, 1, dtype=D)], 1)
    torch.testing.assert_close(found, above[:, :-1] - above[:, 1:])
    assert (out.diff() < 0).all()  # thresholds in order
    far = head.log_probabilities(torch.tensor([[200.0, 199.0, 198.0, 197.0]], dtype=D))
    assert far.isfinite().all()


def test_uncertainty_is_the_gaussian_likelihood_up_to_a_constant():
    head, out, y = Regression(uncertainty=True), torch.randn(4, 1, 2, dtype=D), torch.randn(4, dtype=D)
    known = torch.ones(4, dtype=torch.bool)
    normal = torch.distributions.Normal(out[:, 0, 0], (0.5 * out[:, 0, 1]).exp())
    torch.testing.assert_close(head.losses(out, y, known) + 0.5 * math.log(2 * math.pi), -normal.log_prob(y))
    torch.testing.assert_close(head.deviation(out), normal.stddev)
    with pytest.raises(ValueError, match="no deviation"):
        Regression().deviation(out)


def test_shift_and_scale_are_of_labels_and_metrics_are_in_their_unit():
    plain, moved = Regression(), Regression(shift=100.0, scale=5.0)
    out, y = torch.tensor([[0.0], [1.0]], dtype=D), torch.tensor([0.5, 3.0], dtype=D)
    known = torch.ones(2, dtype=torch.bool)
    torch.testing.assert_close(plain.losses(out, y, known), moved.losses(out, y * 5 + 100, known))
    one, two = (h.metrics(h.sums(out, t, known)) for h, t in ((plain, y), (moved, y * 5 + 100)))
    assert two["rmse"] == pytest.approx(5 * one["rmse"]) and two["r2"] == pytest.approx(one["r2"])


def test_a_density_is_a_mixture_and_missing_numbers_are_integrated_out():
    head = Density(components=3, size=2)
    out, y = torch.randn(4, 3, 5, dtype=D), torch.randn(4, 2, dtype=D)
    weights, means, spreads = head._parts(out)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=weights),
        torch.distributions.Independent(torch.distributions.Normal(means, spreads.exp()), 1),
    )
    known = torch.ones(4, dtype=torch.bool)
    torch.testing.assert_close(head.losses(out, y, known), -mixture.log_prob(y))
    torch.testing.assert_close(head.predict(out), mixture.mean)
    half = y.clone()
    half[:, 1] = NAN
    first = Density(components=3)
    torch.testing.assert_close(head.losses(out, half, known), first.losses(out[..., [0, 1, 3]], y[:, 0], known))
    draws = torch.stack([head.sample(out[:1].expand(500, -1, -1), torch.Generator().manual_seed(i)) for i in range(4)])
    torch.testing.assert_close(draws.flatten(0, 1).mean(0), mixture.mean[0], rtol=0.3, atol=0.3)


def test_a_span_is_the_best_legal_pair_and_never_ends_on_padding():
    head = Span(longest=2)
    out = torch.full((1, 4, 2), -5.0)
    out[0, 3, 0], out[0, 0, 1], out[0, 1, 0], out[0, 2, 1] = 4.0, 4.0, 3.0, 3.0  # the two best are in the wrong order
    assert head.predict(out).tolist() == [[1, 2]]
    mask = torch.tensor([[True, True, False, False]])
    made = head.output(torch.nn.Identity(), out, mask)
    assert head.predict(made).max() <= 1 and made.log_softmax(1).exp()[0, 2:].sum() == 0
    with pytest.raises(ValueError, match="from 3 to 1 ends before it begins"):
        head.check(torch.tensor([[3, 1]]), torch.tensor([True]), out)


def test_rankings_by_hand():
    y, s = torch.tensor([[1.0, 0.0, NAN, 2.0]], dtype=D), torch.tensor([[0.3, 0.1, 9.0, 0.2]], dtype=D)
    known = torch.tensor([True])
    kept = [0, 1, 3]
    torch.testing.assert_close(Ranking().losses(s, y, known), F.cross_entropy(s[:, kept], y[:, kept].softmax(-1))[None])
    pairs = [s[0, i] - s[0, j] for i, j in ((0, 1), (3, 0), (3, 1))]
    torch.testing.assert_close(Ranking("pairwise").losses(s, y, known), -F.logsigmoid(torch.stack(pairs)).mean()[None])
    head = Ranking()
    got = (1 / math.log2(2) + 3 / math.log2(3)) / (3 / math.log2(2) + 1 / math.log2(3))
    assert head.metrics(head.sums(s, y, known))["ndcg"] == pytest.approx(got)
    assert head.known(torch.tensor([[1.0, 1.0], [NAN, 2.0], [NAN, NAN], [1.0, 2.0]])).tolist() == [False] * 3 + [True]


def test_a_slice_reads_its_beginning_alone_and_each_is_a_head_of_its_own():
    net = MultiHead(torch.nn.Identity(), {"y": Matryoshka(3, (2, 8))}, width=8)
    x = torch.randn(5, 8)
    cut = torch.cat([x[:, :2], torch.randn(5, 6)], 1)
    out, other = net(x).outputs["y"], net(cut).outputs["y"]
    assert torch.equal(out[:, 0], other[:, 0]) and not torch.equal(out[:, 1], other[:, 1])
    y = torch.randint(3, (5,))
    each = [F.cross_entropy(out[:, i], y) for i in range(2)]
    torch.testing.assert_close(net(x, targets={"y": y}).loss, sum(each) / 2)


def test_cells_of_a_row_may_be_missing_apart():
    head, out = MultiLabel(2), torch.randn(2, 2)
    y = torch.tensor([[1, -100], [0, 1]])
    found = head.losses(out, y, head.known(y))
    wanted = F.binary_cross_entropy_with_logits(out, y.clamp(min=0).float(), reduction="none").flatten()[[0, 2, 3]]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("line", [
    "regression(loss=cubic)", "regression(uncertainty=true, loss=huber)", "regression(scale=0.0)",
    "regression(weight=-1.0)",
    "classification(classes=3, smoothing=1.0)", "matryoshka(classes=3, slices=[4, 2])", "tokens(classes=2, pool=mean)",
    "hypotheses(relaxed=1.0)", "hypotheses(relaxed=0.1, temperature=1.0)", "density(components=0)", "ordinal(levels=1)",
    "regression(pool=median)", "ranking(loss=none)", "span(longest=-1)", "multi-label(labels=0)",
    "regression(dropout=1.0)",
])  # fmt: skip
def test_options_that_cannot_be(line):
    with pytest.raises(ValueError):
        read_head(line)


def test_heads_are_plain_values():
    head = Regression(weight=2.0)
    assert dataclasses.replace(head, weight=1.0) == Regression() and hash(head) != hash(Regression())


def test_slices_see_the_beginning_alone_and_yes_or_no_labels_are_told_cell_by_cell():
    torch.manual_seed(0)
    head = Matryoshka(2, (2, 4, 8), sigmoid=True)
    net = head.build(8).to(D)
    x, y = torch.randn(5, 8, dtype=D), torch.tensor([[0, 1], [-100, 1], [-100, -100], [1, 0], [1, 1]])
    out, known = net(x), head.known(y)
    for place, width in enumerate(head.slices):
        cut = x.clone()
        cut[:, width:] = 7.0  # what lies behind a slice is nothing to it
        assert torch.equal(net(cut)[:, : place + 1], out[:, : place + 1])
    assert torch.equal(out[:, -1], net.each[-1](x))  # the last one reads all
    cells = F.binary_cross_entropy_with_logits(
        out, y[:, None].expand(-1, 3, -1).to(D).clamp(min=0), reduction="none"
    ).mean(1)
    torch.testing.assert_close(head.losses(out, y, known), cells[known])
    hits = ((out[:, 0] > 0) == y.bool())[known].double().mean().item()
    assert head.metrics(head.sums(out, y, known))["accuracy@2"] == pytest.approx(hits)
    assert torch.equal(head.predict(out), (out[:, -1] > 0).long())
    assert sum(p.numel() for p in net.parameters()) == 2 * (2 + 4 + 8) + 2 * 3


def test_lines_name_submodules():
    assert read_head("regression(features=layers.1.mlp)").features == "layers.1.mlp"
    assert read_head("regression(features=3)").features == "3"
    with pytest.raises(ValueError, match=r"features=….: 0\.1 is not a str"):  # 0.10 would be another one
        read_head("regression(features=0.1)")
