"""How far heads look on a grid, what removing them does to a classifier, and the patterns of their maps."""

import math

import pytest
import torch
from tests.inspect import models
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from manyheads import Attention
from manyheads.inspect import measures
from manyheads.inspect.measures import Grid, measure

PLAIN = "gqa + rope(none)"


def classifier(**more):
    torch.manual_seed(0)
    sizes = {name: size for name, size in models.SIZES.items() if name != "vocab_size"}
    return models.sharpen(ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4, **more)).eval())


class Planted(nn.Module):
    """One layer whose head looks where it is told: `target[i]` for token i (-1: everywhere)."""

    def __init__(self, targets, heads=1):
        super().__init__()
        self.n = len(targets[0])
        self.layer = Attention(f"gqa(head_dim={self.n}, scale=1.0) + rope(none)", self.n, len(targets)).double().eval()
        with torch.no_grad():
            for head, target in enumerate(targets):
                rows = torch.stack([60 * torch.eye(self.n)[t] if t >= 0 else torch.zeros(self.n) for t in target])
                cut = slice(head * self.n, (head + 1) * self.n)
                self.layer.project.q_proj.weight[cut] = rows.T.double()
                self.layer.project.k_proj.weight[cut] = torch.eye(self.n, dtype=torch.float64)

    def forward(self, batch):
        x = torch.eye(self.n, dtype=torch.float64).expand(batch, -1, -1)
        return self.layer(x, mask=torch.ones(batch, 1, self.n, self.n, dtype=torch.bool))


def told(targets, *functions, batch=1):
    model = Planted(targets)
    return [measure(model, lambda: model(batch), {"it": f})["it"][0] for f in functions]


def test_rings_partition_the_grid_whatever_its_sides():
    for shape in ((5,), (3, 4), (2, 3, 3)):
        sizes = Grid(shape).ring_sizes()
        assert (sizes.sum(1) == math.prod(shape)).all() and (sizes[:, 0] == 1).all()
    assert Grid((3, 3)).ring_sizes()[4].tolist() == [1, 8, 0]
    with pytest.raises(ValueError, match="1 or more"):
        Grid((0, 3))


def test_profiles_of_maps_that_are_known():
    grid, n = Grid((3, 4)), 12
    right = [0] + [1 + (r * 4 + min(c + 1, 3)) for r in range(3) for c in range(4)]
    heads = [[-1] * 13, list(range(13)), right]
    whole, mean, near, special = told(
        heads,
        measures.hop_profile(grid),
        measures.mean_hop(grid),
        measures.near_mass(grid),
        measures.special_mass(grid),
    )
    sizes = grid.ring_sizes().double()
    torch.testing.assert_close(whole[0], sizes.mean(0) / 13)  # even, CLS among the 13
    torch.testing.assert_close(whole[1], torch.eye(4, dtype=torch.float64)[0])
    torch.testing.assert_close(whole[2], torch.tensor([3 / n, 9 / n, 0, 0], dtype=torch.float64))
    torch.testing.assert_close(whole.sum(-1) + special, torch.ones(3, dtype=torch.float64))
    assert mean[1].abs() < 1e-12 and mean[2].item() == pytest.approx(9 / n)
    assert near[2].item() == pytest.approx(1) and near[0].item() == pytest.approx((sizes[:, :2].sum(1) / 13).mean())
    (each,) = told(heads[:1], measures.hop_profile(grid, per_place=True))
    torch.testing.assert_close(each[0], torch.full((4,), 1 / 13, dtype=torch.float64))
    (cls,) = told(heads, measures.special_mass(grid, patches=False))
    torch.testing.assert_close(cls, torch.tensor([1 / 13, 1, 1], dtype=torch.float64))


def test_a_reflected_image_with_reflected_maps_has_the_same_profile():
    grid = Grid((3, 4), first=0)
    target = torch.randint(12, (12,), generator=torch.Generator().manual_seed(3))
    flip = torch.arange(12).view(3, 4).flip(1).flatten()
    mirrored = flip[target[flip]]
    one, other = told([target.tolist(), mirrored.tolist()], measures.hop_profile(grid))[0]
    torch.testing.assert_close(one, other)


def test_a_vision_model_says_its_grid_and_has_profiles_that_add_up():
    model, images = classifier(), torch.randn(2, 3, 16, 16)
    grid = Grid.of(model)
    assert grid == Grid((4, 4), 1) and Grid.of(models.vit()) == grid
    found = measure(model, images, {"p": measures.hop_profile(grid), "cls": measures.special_mass(grid)})
    torch.testing.assert_close(found["p"].grid.sum(-1) + found["cls"].grid, torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="fewer than"):
        measure(model, images, {"p": measures.hop_profile(Grid((5, 5)))})
    with pytest.raises(ValueError, match="does not say"):
        Grid.of(models.decoder())


def test_removing_a_silent_head_changes_nothing_and_ranks_agree_with_themselves():
    model, images, labels = classifier(num_labels=3), torch.randn(6, 3, 16, 16), torch.tensor([0, 1, 2, 0, 1, 0])
    with torch.no_grad():
        model.vit.layers[1].attention.o_proj.weight[:, 8:16] = 0
    found = measures.removals(model, images, labels)
    assert set(found) == {"probability", "loss", "divergence", "accuracy", "state"}
    for table in found.values():
        assert table.grid.shape == (2, 4) and table[1][1].abs() < 1e-6
    assert (found["divergence"].grid >= 0).all() and (found["divergence"].grid <= math.log(2)).all()
    assert found["state"].grid[0].abs().max() > 1e-4
    before = model(images).logits.double().softmax(-1)
    from manyheads import ablate

    with torch.no_grad(), ablate(model, {0: [2]}):
        after = model(images).logits.double().softmax(-1)
    want = (before - after)[range(6), labels].mean()
    torch.testing.assert_close(found["probability"][0][2], want.detach(), atol=1e-6, rtol=1e-5)
    each = measures.removals(model, images, labels, layers=[0], by_class=True)["loss"][0]
    weights = torch.tensor([3, 2, 1], dtype=torch.float64) / 6
    torch.testing.assert_close(each @ weights, found["loss"][0])
    order = measures.ranks(found["loss"])
    assert sorted(order.grid.flatten().tolist()) == list(range(1, 9))
    same = measures.agreement({"a": found["loss"], "b": order})
    assert same[0, 1].item() == pytest.approx(-1) and same[0, 0].item() == pytest.approx(1)  # rank 1 is the highest
    with pytest.raises(ValueError, match="5 labels for 6"):
        measures.removals(model, images, labels[:5])


def test_planted_patterns_are_told_apart_and_given_back_exactly():
    grid = Grid((3, 3), first=0)
    left = [r * 3 + max(c - 1, 0) for r in range(3) for c in range(3)]
    up = [max(r - 1, 0) * 3 + c for r in range(3) for c in range(3)]
    model = Planted([left, up, left, [-1] * 9, up])
    found = measures.patterns(model, lambda: model(2), grid, directions=2, groups=3)
    assert found.heads[:2] == [(0, 0, 0), (0, 1, 0)] and found.shape == (5, 5)
    kinds = [found.groups[[n for n, (_, head, _) in enumerate(found.heads) if head == h]].tolist() for h in range(5)]
    assert kinds[0] == kinds[2] and kinds[1] == kinds[4] and len({kinds[0][0], kinds[1][0], kinds[3][0]}) == 3
    maps = found.maps()  # three patterns are a plane
    want = torch.zeros(5, 5, dtype=torch.float64)
    want[2, 1], want[2, 2] = 6 / 9, 3 / 9
    torch.testing.assert_close(maps[0], want, atol=1e-9, rtol=0)
    assert found.typical().shape == (3, 5, 5) and found.typical().sum((1, 2)).tolist() == pytest.approx([1, 1, 1])
    whole = measures.patterns(model, lambda: model(1), grid, centred=False, directions=2, groups=3)
    assert whole.shape == (9, 9)
    torch.testing.assert_close(whole.maps()[0], torch.eye(9, dtype=torch.float64)[left], atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match="directions and"):
        measures.patterns(model, lambda: model(1), grid, directions=6)
