"""Tasks that belong together: by gradients, by errors of each other's models, by how they were learned."""

import pytest
import torch
import torch.nn.functional as F
from tests.multi.models import batch, gradients, model
from torch import nn

from manyheads.multi import (
    DataMap,
    MultiHead,
    Regression,
    affinity,
    cross_errors,
    error_affinity,
    grouping,
    memberships,
)
from manyheads.multi.grouping import silhouette

D = torch.float64


def test_affinity_is_the_cosine_of_gradients_at_the_features():
    net = model()
    x, targets = batch()
    net.train()
    found = affinity(net, [(x, targets), {"input": batch(seed=2)[0], "targets": batch(seed=2)[1]}])
    assert net.training and found.shape == (4, 4) and all(g is None for g in gradients(net).values())
    torch.testing.assert_close(found, found.T)
    torch.testing.assert_close(found.diag(), torch.ones(4, dtype=D))
    values = []
    for seed in (1, 2):
        x, targets = batch(seed=seed)
        features = net.trunk(x).detach().requires_grad_()
        rows = []
        for name in ("age", "grade"):
            head = net.heads[name]
            target = head.tidy(targets[name], features)
            loss = head.losses(net.net(name)(features), target, head.known(target)).mean()
            rows.append(torch.autograd.grad(loss, features)[0].flatten())
        values.append(F.cosine_similarity(*rows, dim=0))
    torch.testing.assert_close(found[0, 3], sum(values) / 2)


def test_equal_tasks_agree_opposite_ones_do_not_and_strangers_are_unknown():
    torch.manual_seed(0)
    heads = {name: Regression() for name in "abc"} | {"d": Regression(features="0")}
    net = MultiHead(nn.Sequential(nn.Linear(5, 4), nn.Tanh()), heads, width=4).to(D)
    for name in "bc":
        net.net(name).load_state_dict(net.net("a").state_dict())
    x, y = torch.randn(8, 5, dtype=D), torch.randn(8, dtype=D)
    said = net(x).outputs["a"].detach().squeeze(-1)
    found = affinity(net, [(x, {"a": y, "b": y, "d": y}), (x, {"a": y, "c": 2 * said - y})])
    torch.testing.assert_close(found[0, 1], torch.tensor(1.0, dtype=D))
    torch.testing.assert_close(found[0, 2], torch.tensor(-1.0, dtype=D))
    assert found[0, 3].isnan() and found[1, 2].isnan()
    with pytest.raises(ValueError, match="tasks 0 and 3"):
        grouping(found)


def least_squares(x, y):
    found = torch.linalg.lstsq(torch.cat([x, x.new_ones(len(x), 1)], 1), y[:, None]).solution
    return lambda other: (torch.cat([other, other.new_ones(len(other), 1)], 1) @ found).squeeze(1)


def tasks(kinds, noise=0.3, seed=0, rows=200):
    g = torch.Generator().manual_seed(seed)
    weights = torch.randn(max(kinds) + 1, 4, dtype=D, generator=g)
    made = []
    for kind in kinds:
        x = torch.randn(rows, 4, dtype=D, generator=g)
        made.append((x, x @ weights[kind] + noise * torch.randn(rows, dtype=D, generator=g)))
    return made


def test_tasks_of_a_few_functions_are_found_again():
    kinds = [0, 1, 0, 2, 2, 1, 0, 2]
    errors = cross_errors(least_squares, tasks(kinds))
    want = torch.tensor([0, 1, 0, 2, 2, 1, 0, 2])
    assert torch.equal(grouping(error_affinity(errors)), want)
    assert torch.equal(grouping(error_affinity(errors), 3), want)
    order = torch.tensor([3, 0, 7, 1, 2, 4, 6, 5])
    again = grouping(error_affinity(errors[order][:, order]))
    assert torch.equal(again[:, None] == again, (want[order][:, None] == want[order]))
    assert grouping(error_affinity(errors), 8).tolist() == list(range(8))
    assert grouping(error_affinity(errors), 1).tolist() == [0] * 8


def test_errors_are_mismatch_and_noise():
    quiet = tasks([0, 1, 0], noise=0.0)
    models, noise = [least_squares(x, y) for x, y in quiet], 0.5 * torch.randn(200, dtype=D)
    made = iter(models * 2)

    def errors(noise):
        x, y = quiet[0]
        noisy = (torch.cat([x, x]), torch.cat([y + noise, y - noise]))
        return cross_errors(lambda x, y: next(made), [noisy, *quiet[1:]], held_out=False)

    clean, loud = errors(0 * noise), errors(noise)
    torch.testing.assert_close(loud[0], clean[0] + noise.square().mean())  # the whole row rises by the noise
    assert torch.equal(loud[1:], clean[1:])
    torch.testing.assert_close(error_affinity(3 * loud), error_affinity(loud))  # a factor is nothing, a summand is
    assert not torch.allclose(error_affinity(loud + 1), error_affinity(loud))


def test_a_trained_models_own_error_hides_all_likeness():
    exact = torch.rand(4, 4, dtype=D).fill_diagonal_(0)
    assert (error_affinity(exact) - torch.eye(4, dtype=D)).abs().max() < 1e-5


def test_average_linkage_and_silhouette_by_hand():
    at = torch.tensor([0.0, 1.0, 5.0, 6.5, 20.0], dtype=D)
    near = 1 - (at[:, None] - at).abs() / 20
    assert grouping(near, 4).tolist() == [0, 0, 1, 2, 3]
    assert grouping(near, 3).tolist() == [0, 0, 1, 1, 2]
    assert grouping(near, 2).tolist() == [0, 0, 0, 0, 1]
    apart = (at[:2, None] - at[:4]).abs()
    scores = [(apart[i, 2:].mean() - 1.0) / apart[i, 2:].mean() for i in (0, 1)]
    scores += [((at[i] - at[:2]).mean() - 1.5) / (at[i] - at[:2]).mean() for i in (2, 3)]
    found = silhouette((at[:4, None] - at[:4]).abs(), torch.tensor([0, 0, 1, 1]))
    assert found == pytest.approx(float(sum(scores) / 4))
    assert grouping(torch.eye(2)).tolist() == [0, 1] and grouping(torch.eye(1)).tolist() == [0]


def test_maps_are_means_and_deviations_whatever_the_order():
    history = torch.rand(5, 2, 6, dtype=D)
    history[1, 0, 2] = float("nan")
    kept = DataMap(2, 6)
    assert (kept.now() == 0).all()
    for epoch in history:
        for at in torch.randperm(6).split(4):
            kept.update(at, epoch[:, at])
    torch.testing.assert_close(kept.now()[1, :, 0], history[:, 1].mean(0))
    torch.testing.assert_close(kept.now()[1, :, 1], history[:, 1].std(0))
    own = history[[0, 2, 3, 4], 0, 2]
    torch.testing.assert_close(kept.now()[0, 2], torch.stack([own.mean(), own.std()]))
    once = DataMap(1, 6)
    once.update(torch.arange(6), history[:1, 0])
    assert (once.now()[..., 1] == 0).all()
    once.snapshot()
    assert torch.equal(once.rows(), once.now().flatten(1))


def test_memberships_are_soft_hard_or_all():
    torch.manual_seed(0)
    rows = torch.cat([torch.randn(3, 4) * 0.1, torch.randn(2, 4) * 0.1 + 5])
    u = memberships(rows, 2)
    torch.testing.assert_close(u.sum(-1), torch.ones(5))
    assert len(set(u[:3].argmax(-1).tolist())) == 1 and len(set(u.argmax(-1).tolist())) == 2
    assert memberships(rows, 2, fuzziness=2.0).amax(-1).max() < 1 and (u.amax(-1) > 1 - 1e-6).all()
    assert (memberships(rows, 1) == 1).all()
    assert torch.equal(memberships(rows, 5).sort(-1).values[:, -1], torch.ones(5))
    assert sorted(memberships(rows, 5).argmax(-1).tolist()) == list(range(5))
    same = memberships(rows[[0, 0, 3]], 2)
    assert torch.equal(same[0], same[1])
    d = torch.cdist(rows, torch.stack([rows[:3].mean(0), rows[3:].mean(0)]))
    plain = (1 / d**2) / (1 / d**2).sum(-1, keepdim=True)
    found = memberships(rows, 2, fuzziness=2.0)
    torch.testing.assert_close(found.sort(-1).values, plain.sort(-1).values, rtol=1e-3, atol=1e-5)


def test_what_is_refused():
    with pytest.raises(ValueError, match="groups=4 of 3 tasks"):
        grouping(torch.eye(3), 4)
    with pytest.raises(ValueError, match=r"\[T, T\]"):
        grouping(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="as many, at least 2"):
        cross_errors(least_squares, [(torch.zeros(4, 2), torch.zeros(3))])
    with pytest.raises(ValueError, match="a batch has no targets"):
        affinity(model(), [{"input": batch()[0]}])
    with pytest.raises(ValueError, match="no batches"):
        affinity(model(), [])
    with pytest.raises(ValueError, match="sure is"):
        DataMap(2, 3).update(torch.arange(3), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="twice"):
        DataMap(1, 3).update(torch.tensor([1, 1]), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="clusters=4 of 3 tasks"):
        memberships(torch.zeros(3, 2), 4)
