"""Similarity volumes of several heads pooled to scores."""

import pytest
import torch
import torch.nn.functional as F

from manyheads.aggregate import Calibration, Volume, loudness, pressure, roughness, specialisation
from manyheads.core.part import OptionError


def maps(heads=2, f=2, t=5):
    audio = torch.randn(3, heads * 4, f, t, dtype=torch.float64)
    image = torch.randn(4, heads * 4, 3, 2, dtype=torch.float64)
    mask = torch.arange(t) < torch.tensor([[5], [3], [0]])
    return audio, image, mask


def test_against_loops():
    audio, image, mask = maps()
    found = Volume(2).score(audio, image, mask)
    for b in range(3):
        for v in range(4):
            total = 0.0
            for t in range(5):
                for f in range(2):
                    best = max(
                        float(audio[b, k * 4 : k * 4 + 4, f, t] @ image[v, k * 4 : k * 4 + 4, y, x])
                        for k in range(2) for y in range(3) for x in range(2)
                    )  # fmt: skip
                    total += best / 2 * bool(mask[b, t])
            assert float(found[b, v]) == pytest.approx(total / max(1, int(mask[b].sum())))
    assert not found[2].any()


def test_one_cell_is_the_greatest_product_of_a_head():
    audio, image = (torch.randn(2, 6, 1, 1) for _ in range(2))
    a, v = (x.view(2, 3, 2) for x in (audio, image))
    torch.testing.assert_close(Volume(3).score(audio, image), torch.einsum("bkc,vkc->bvk", a, v).amax(-1))


def test_heads_summed_before_pooling_are_one_head():
    audio, image, mask = maps()
    torch.testing.assert_close(Volume(2, "sum").score(audio, image, mask), Volume(1).score(audio, image, mask))
    assert (Volume(2, "last").score(audio, image) <= Volume(2).score(audio, image) + 1e-12).all()


def test_the_greatest_of_heads_is_no_less_than_any_and_copies_change_nothing():
    audio, image, mask = maps()
    both = Volume(2).score(audio, image, mask)
    for k in range(2):
        cut = slice(4 * k, 4 * k + 4)
        assert (both >= Volume(1).score(audio[:, cut], image[:, cut], mask) - 1e-12).all()
    a, v = torch.cat([audio, audio], 1), torch.cat([image, image], 1)
    torch.testing.assert_close(Volume(4).score(a, v, mask), both)
    torch.testing.assert_close(Volume(4, "sum").score(a, v), 2 * Volume(2, "sum").score(audio, image))


def test_a_score_grows_with_every_similarity():
    audio, image, mask = maps()
    for volume in (Volume(2), Volume(2, "last", "mean", "max"), Volume(2, paired=True)):
        s = volume.of(audio, image).requires_grad_()
        volume.pool(s, mask).sum().backward()
        assert (s.grad >= 0).all() and not s.grad[2].any() and not s.grad[1, ..., 3:].any()


def test_one_cell_of_a_step_gets_the_gradient():
    s = torch.randn(2, 3, 2, 4, 3, 2, 5, requires_grad=True)
    Volume(2).pool(s).sum().backward()
    assert (s.grad.ne(0).sum((2, 3, 4)) == 1).all()


def test_order_and_what_is_masked_do_not_count():
    audio, image, mask = maps()
    wanted = Volume(2).score(audio, image, mask)
    torch.testing.assert_close(Volume(2).score(audio, image.flip(2).transpose(2, 3), mask), wanted)
    order = torch.randperm(5)
    torch.testing.assert_close(Volume(2).score(audio[..., order], image, mask[:, order]), wanted)
    noise = torch.where(mask[:, None, None], audio, torch.nan)
    torch.testing.assert_close(Volume(2).score(noise, image, mask), wanted)


def test_images_may_come_in_chunks():
    audio, image, mask = maps()
    wanted = Volume(2).score(audio, image, mask)
    for chunk in (1, 3, 9):
        torch.testing.assert_close(Volume(2).score(audio, image, mask, chunk=chunk), wanted)


def test_other_ways():
    audio, image, mask = maps()
    s = Volume(2).of(audio, image).amax(2)[:2]
    mask = mask[:2]
    there = mask[:, None, None]
    one = (s.amax((2, 3)).mean(2) * mask[:, None]).sum(-1) / mask.sum(1)[:, None]
    two = s.mean((2, 3)).mean(2).masked_fill(~mask[:, None], -torch.inf).amax(-1)
    torch.testing.assert_close(Volume(2, paired=True).score(audio[:2], image, mask), (one + two) / 2)
    assert there.shape == (2, 1, 1, 5)
    assert (Volume(2, clamp=True).of(audio, image) >= 0).all()
    classes = torch.randn(3, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    more = Volume(2).of(audio, image, classes) - Volume(2).of(audio, image)
    wanted = torch.einsum("bkc,vkc->bvk", classes[0].view(3, 2, 4), classes[1].view(4, 2, 4))
    torch.testing.assert_close(more, wanted[..., None, None, None, None].expand_as(more))
    parts = [Volume(2).score(audio, image[:2], classes=(classes[0], classes[1][:2]))]
    torch.testing.assert_close(Volume(2).score(audio, image, classes=classes, chunk=2)[:, :2], parts[0])


def test_halves_are_computed_in_float32():
    audio, image = (torch.randn(1, 4, 1, 2, dtype=torch.bfloat16) for _ in range(2))
    assert Volume(2).of(audio, image).dtype == torch.float32


def test_calibrated_scores_have_mean_zero_and_a_shift_changes_nothing():
    scores = torch.randn(3, 3, dtype=torch.float64)
    calibration = Calibration().double()
    found = calibration(scores)
    assert abs(found.mean().item()) < 1e-12
    torch.testing.assert_close(calibration(scores + 7), found)
    loss = F.cross_entropy(found, torch.arange(3))
    torch.testing.assert_close(F.cross_entropy(found + 3, torch.arange(3)), loss)
    with torch.no_grad():
        calibration.log_a.fill_(9)
    torch.testing.assert_close(calibration(scores), 100 * (scores - scores.mean()))


def test_specialisation_is_zero_where_one_head_answers_in_each_place():
    s = torch.randn(2, 2, 3, 2, 2, 1, 4, dtype=torch.float64)
    brute = sum((s[:, :, i].abs() * s[:, :, j].abs()).mean() for i in range(3) for j in range(i)) / 3
    torch.testing.assert_close(specialisation(s), brute)
    alone = s * F.one_hot(torch.randint(3, s[:, :, 0].shape), 3).movedim(-1, 2)
    assert specialisation(alone).abs() < 1e-12 < specialisation(s)
    assert specialisation(s[:, :, :1]) == 0


def test_terms_of_a_volume():
    s = torch.tensor([[[1.0, 3.0, 0.0]], [[2.0, 2.0, -4.0]]])
    assert roughness(s).item() == pytest.approx((4 + 9 + 0 + 36) / 4)
    assert pressure(s).item() == pytest.approx(16 / 6)
    calibration = Calibration()
    assert calibration.penalty().item() == 0 and calibration.penalty(torch.e).item() == pytest.approx(1)
    silent = torch.tensor([[False, True, False], [False, False, True]])
    assert loudness(s, silent).item() == pytest.approx((3 + 4) / 2)
    assert loudness(s, torch.zeros_like(silent)).item() == 0


def test_two_sources_of_two_heads_are_found_where_they_are():
    """Sound k is linked with place k by the channels of head k: the heat map of each head shows its own place."""
    audio, image = torch.zeros(1, 4, 1, 2), torch.zeros(1, 4, 2, 2)
    for k, (y, x) in enumerate(((0, 1), (1, 0))):
        code = torch.tensor([1.0, -2.0])
        audio[0, 2 * k : 2 * k + 2, 0, k] = code
        image[0, 2 * k : 2 * k + 2, y, x] = code
    volume = Volume(2)
    s = volume.of(audio, image)[0, 0]
    for k, place in enumerate((1, 2)):
        heat = volume.heat(s, slice(k, k + 1))
        assert heat[k].argmax() == place and heat[k].count_nonzero() == 1 and not heat[1 - k].any()
    assert volume.score(audio, image) == 5 and Volume(2, space="mean").score(audio, image) == 1.25
    assert specialisation(s[None, None]) == 0


def test_what_does_not_fit_is_refused():
    audio, image, mask = maps()
    with pytest.raises(ValueError, match=r"a volume of 3 heads is of \[B, D, F, T\] and \[V, D, h, w\]"):
        Volume(3).of(audio, image)
    with pytest.raises(ValueError, match=r"mask is bool \[3, 5\], not torch.bool \[3, 4\]"):
        Volume(2).score(audio, image, mask[:, :4])
    with pytest.raises(OptionError, match="over_heads='mean' is none of max, sum, last"):
        Volume(2, "mean")
    with pytest.raises(OptionError, match="heads is at least 1, not 0"):
        Volume(0)
    with pytest.raises(OptionError, match="chunk is at least 1"):
        Volume(2).score(audio, image, chunk=0)
    for none in (audio[..., :0], audio[:, :, :0]):
        with pytest.raises(ValueError, match=r"a volume is .* one each at least"):
            Volume(2).score(none, image)
    assert Volume(2).score(audio, image[:0]).shape == (3, 0) and Volume(2).score(audio[:0], image).shape == (0, 4)
