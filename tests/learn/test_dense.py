"""The loss on similarity volumes, and each regulariser by itself."""

import math

import pytest
import torch
import torch.nn.functional as F

from manyheads.core.check import OptionError
from manyheads.learn import Calibration, Dense, paired_contrast
from manyheads.learn.dense import below_zero, in_foreign, in_silence, jumps, overlap

D = torch.float64
OFF = dict.fromkeys(("below_zero", "in_silence", "jumps", "overlap", "balance", "in_foreign"), 0.0)


def aggregate(volume, valid):
    best = volume.amax((2, 3, 4)).mean(-2)
    valid = torch.ones(len(volume), volume.shape[-1], dtype=torch.bool) if valid is None else valid
    return (best * valid[:, None]).sum(-1) / valid[:, None].sum(-1).clamp_min(0.001)


def volume(seed=0, heads=2, batch=3):
    a = torch.randn(batch, heads, 4, 2, 5, dtype=D, generator=torch.Generator().manual_seed(seed))
    v = torch.randn(batch, heads, 4, 3, 2, dtype=D, generator=torch.Generator().manual_seed(seed + 1))
    return torch.einsum("bkcft,vkcyx->bvkyxft", a, v)


def test_scores_are_scaled_and_centred_and_a_constant_changes_nothing():
    scores, calibration = torch.randn(4, 4, dtype=D), Calibration().to(D)
    with torch.no_grad():
        calibration.log_scale.fill_(0.5)
    made = calibration(scores)
    torch.testing.assert_close(made, math.exp(0.5) * (scores - scores.mean()))
    assert abs(made.mean()) < 1e-12
    torch.testing.assert_close(paired_contrast(scores + 3), paired_contrast(scores))
    rows, columns = scores.log_softmax(1).diag().mean(), scores.log_softmax(0).diag().mean()
    torch.testing.assert_close(paired_contrast(scores), -(rows + columns) / 2)
    torch.testing.assert_close(calibration.balance(math.e), torch.tensor(0.25, dtype=D))
    assert calibration.balance() == 0
    with torch.no_grad():
        calibration.log_scale.fill_(9.0)
    assert calibration.scale() == 100


def test_without_regularisers_it_is_the_contrast_of_the_aggregated_scores():
    s, valid = volume(), torch.ones(3, 5, dtype=torch.bool)
    valid[1, 3:] = False
    found = Dense(**OFF)(s, aggregate, Calibration().to(D), valid=valid)
    torch.testing.assert_close(found, paired_contrast(aggregate(s, valid)))
    with_all = Dense()(s, aggregate, Calibration().to(D), valid=valid, foreign=~valid,
                       generator=torch.Generator().manual_seed(3))  # fmt: skip
    own = s[range(3), range(3)]
    extra = (
        0.01 * below_zero(s, generator=torch.Generator().manual_seed(3)) + 0.01 * in_silence(own, valid)
        + 0.01 * jumps(own, valid) + 0.05 * overlap(own) + 0.01 * in_foreign(own, ~valid)
    )  # fmt: skip
    torch.testing.assert_close(with_all, found + extra)


def test_each_regulariser():
    own = volume()[range(3), range(3)]
    valid = torch.tensor([[True] * 5, [True, True, False, False, True], [True] * 5])
    torch.testing.assert_close(in_silence(own, valid), own[1, ..., 2:4].abs().mean())
    assert in_silence(own, torch.ones(3, 5).bool()) == 0
    torch.testing.assert_close(jumps(own), (own[..., 1:] - own[..., :-1]).square().mean())
    steps = (own[..., 1:] - own[..., :-1]).square()
    torch.testing.assert_close(jumps(own[1:2], valid[1:2]), steps[1, ..., 0].mean())  # the one step between valid ones
    torch.testing.assert_close(in_foreign(own, ~valid), own[1, ..., 2:4].square().mean())
    assert below_zero(own.abs()) == 0
    torch.testing.assert_close(below_zero(torch.full((9,), -2.0)), torch.tensor(4.0))


def test_overlap_is_zero_just_where_no_cell_has_two_heads():
    own = volume(heads=3)[range(3), range(3)]
    pairs = [own[:, i].abs() * own[:, j].abs() for i, j in ((0, 1), (0, 2), (1, 2))]
    torch.testing.assert_close(overlap(own), torch.stack(pairs).mean())
    which = torch.randint(3, own[:, 0].shape)
    alone = own * F.one_hot(which, 3).movedim(-1, 1)
    assert overlap(alone) == 0 and overlap(own[:, :1]) == 0
    alone[0, :, 0, 0, 0, 0] = 1
    assert overlap(alone) > 0


def _train(heads, seed=0):
    """Two sources that never sound together, linked by channels of their own: c of them say which of several words."""
    torch.manual_seed(seed)
    words, batch = 6, 24
    net = torch.nn.ModuleList([torch.nn.Linear(2 * words, 8, bias=False) for _ in "av"]).to(D)
    calibration = Calibration().to(D)
    optimiser = torch.optim.Adam([*net.parameters(), *calibration.parameters()], 0.02)
    for _ in range(150):
        source, word = torch.randint(2, (batch,)), torch.randperm(batch) % words
        seen = F.one_hot(source * words + word, 2 * words).to(D)
        a = net[0](seen).unflatten(-1, (heads, -1))
        v = net[1](seen).unflatten(-1, (heads, -1))
        s = torch.einsum("bkc,vkc->bvk", a, v)[..., None, None, None, None]
        weights = Dense(**(OFF | {"overlap": 0.3, "below_zero": 0.01}))
        optimiser.zero_grad()
        weights(s, aggregate, calibration).backward()
        optimiser.step()
    return net, words


def test_heads_share_cells_less_when_overlap_costs():
    net, words = _train(2)
    seen = torch.eye(2 * words, dtype=D)
    s = torch.einsum("bkc,bkc->bk", *(f(seen).unflatten(-1, (2, -1)) for f in net)).abs()
    assert (s.amin(-1) < 0.25 * s.amax(-1)).double().mean() > 0.8  # one head has each word, nearly alone


def test_what_is_refused():
    with pytest.raises(OptionError, match="overlap=-1"):
        Dense(overlap=-1.0)
    with pytest.raises(ValueError, match=r"scores are \[B, B\]"):
        paired_contrast(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"scores are \[B, B\]"):
        paired_contrast(torch.zeros(0, 0))
    with pytest.raises(ValueError, match="a volume is"):
        Dense()(volume()[:, :2], aggregate, Calibration())
    with pytest.raises(ValueError, match=r"valid is \[3, 4\], but the volume needs \[3, 5\]"):
        Dense()(volume(), aggregate, Calibration(), valid=torch.ones(3, 4).bool())
