"""Cross-attention against what the output really depends on."""

import pytest
import torch
from tests.inspect import models
from transformers import WhisperConfig, WhisperForConditionalGeneration

from manyheads import Attention
from manyheads.core.part import Site
from manyheads.inspect import measures


def whisper():
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=10,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    model = models.sharpen(WhisperForConditionalGeneration(WhisperConfig(**sizes)).eval())
    with torch.no_grad():
        for conv in (model.model.encoder.conv1, model.model.encoder.conv2):
            conv.weight.mul_(8)
    return model


def test_maps_of_cross_attention_and_their_means():
    model, ids = whisper(), models.ids(2, 5)
    layers = measures.cross_layers(model)
    assert ["encoder_attn" in layer.name for layer in layers] == [True, True]
    maps = measures.cross_maps(model, {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": ids})
    assert all(x.shape == (2, 4, 5, 10) for x in maps.values()) and len(maps) == 2
    whole = measures.mean_map(maps)
    torch.testing.assert_close(whole.sum(-1), torch.ones(2, 5))
    first = next(iter(maps))
    torch.testing.assert_close(measures.mean_map(maps, {first: [1]}), maps[first][:, 1])
    torch.testing.assert_close(measures.mean_map(maps, {first: None}), maps[first].mean(1))
    with pytest.raises(ValueError, match="no layer of cross-attention"):
        measures.cross_layers(models.bert())
    with pytest.raises(ValueError, match="there are maps of layers"):
        measures.mean_map(maps, {77: None})
    own = Attention("gqa", 32, 4, site=Site(cross=True))
    assert [layer.module for layer in measures.cross_layers(own)] == [own]


def test_a_real_model_by_masked_input_and_by_gradient():
    model, ids = whisper().double(), models.ids(1, 4)
    x = torch.randn(8, 20, dtype=torch.float64)

    def score(batch, whole=False):
        n = len(batch)
        p = model(input_features=batch, decoder_input_ids=ids.expand(n, -1)).logits.softmax(-1)
        return p if whole else p[:, range(4), [5, 6, 7, 8]]

    masks = measures.cell_masks((8, 20), 24)
    found = measures.perturbation(score, x, masks)
    assert found.shape == (4, 8, 20) and found.isfinite().all()
    spread = measures.perturbation(lambda b: score(b, True), x, masks, batch=7)
    assert (spread > -1e-12).all() and spread.max() > 1e-6  # divergences
    torch.testing.assert_close(measures.perturbation(lambda b: score(b, True), x, masks), spread, atol=1e-6, rtol=1e-4)
    gradient = measures.gradient_saliency(score, x)
    step = 1e-4
    with torch.no_grad():
        change = (score((x * (1 + step))[None]) - score((x * (1 - step))[None]))[0] / (2 * step)
    torch.testing.assert_close(gradient.sum((1, 2)), change, atol=1e-8, rtol=1e-3)
    frames = measures.to_frames(spread.transpose(1, 2), 10)
    maps = measures.cross_maps(model, {"input_features": x[None], "decoder_input_ids": ids})
    assert -1 <= measures.explained(measures.mean_map(maps)[0], frames) <= 1


class Copies:
    """Token i of the output is frame π(i), with a map that says so."""

    def __init__(self, frames=6):
        self.order = torch.tensor([3, 0, 5, 1])
        self.map = torch.eye(frames, dtype=torch.float64)[self.order]
        self.x = torch.rand(frames, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1

    def __call__(self, batch):
        return batch[:, self.order].mean(-1) / 4


def test_of_a_model_that_copies_frames_the_map_is_the_whole_explanation():
    model = Copies()
    cells = torch.eye(6, dtype=torch.bool)[:, :, None].expand(6, 6, 2)  # each frame alone
    found = measures.to_frames(measures.perturbation(model, model.x, cells), 6)
    assert torch.equal(found > 1e-12, model.map > 0)
    assert measures.explained(model.map, found) > 0.99
    assert measures.explained(model.map, found * 7 + 3) == pytest.approx(measures.explained(model.map, found))
    torch.testing.assert_close(measures.gradient_saliency(model, model.x).sum(-1), found)
    generator = torch.Generator().manual_seed(0)
    shuffled = [measures.explained(model.map, found[:, torch.randperm(6, generator=generator)]) for _ in range(50)]
    assert abs(sum(shuffled) / 50) < 0.15
    same = measures.perturbation(model, model.x, cells, baseline=model.x)
    assert same.abs().max() == 0
    # removed by relevance the quality of one token is gone at once; in the opposite order only at the end
    best = measures.deletion(lambda b: model(b)[:, 0], model.x, model.map[0], steps=6)
    worst = measures.deletion(lambda b: model(b)[:, 0], model.x, -model.map[0], steps=6)
    full = float(model(model.x[None])[0, 0])
    assert best == pytest.approx(full * 11 / 12) and worst == pytest.approx(full / 12)


def test_correlation_of_maps():
    torch.manual_seed(0)
    a = torch.rand(5, 9)
    assert measures.explained(a, a) == pytest.approx(1) and measures.explained(a, -a) == pytest.approx(-1)
    for rows in ("z", "none"):
        assert measures.explained(a, 2 * a + 1, rows) == pytest.approx(1)
    assert measures.explained(a, a * torch.rand(5, 1), "sum") == pytest.approx(1, abs=1e-6)
    even = torch.full((5, 9), 1 / 9)
    for rows in ("z", "sum", "none"):
        assert measures.explained(even, a, rows) == 0.0
    with pytest.raises(ValueError, match="of one shape"):
        measures.explained(a, a[:, :3])


def test_frames_of_inputs():
    x = torch.arange(24.0).view(1, 12, 2)
    assert measures.to_frames(x, 4).tolist() == [[5, 11, 17, 23]]
    assert measures.to_frames(x, 4, "mean").tolist() == [[2.5, 8.5, 14.5, 20.5]]
    assert torch.equal(measures.to_frames(x[..., 0], 12), x[..., 0])
    with pytest.raises(ValueError, match="do not make"):
        measures.to_frames(x, 13)


def test_masks_hide_about_the_share_asked_for_in_blocks():
    masks = measures.cell_masks((16, 30), 300, sizes=(1, 3), share=0.25)
    assert masks.shape == (300, 16, 30) and masks.float().mean().item() == pytest.approx(0.25, abs=0.02)
    alike = [(m[:, 1:] == m[:, :-1]).float().mean().item() for m in (masks[::2], masks[1::2])]
    assert alike[1] > alike[0] + 0.1
    with pytest.raises(ValueError, match="never hidden"):
        measures.perturbation(
            lambda b: b.sum((1, 2))[:, None], torch.ones(2, 2), torch.zeros(3, 2, 2, dtype=torch.bool)
        )
    with pytest.raises(ValueError, match="masks are bool"):
        measures.perturbation(lambda b: b, torch.ones(2, 2), torch.zeros(3, 2, 2))
