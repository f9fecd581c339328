"""Heads of categories and of stretches of the future."""

import math

import pytest
import torch
import torch.nn.functional as F

from manyheads.multi import PriorHeads

D = torch.float64
COMPOSE = [("additive", False), ("multiplicative", False), ("hierarchical", False), ("hierarchical", True)]


def heads(categories=2, window=4, segments=2, stir=True, **options):
    torch.manual_seed(0)
    made = PriorHeads(5, categories, window, segments, **options).to(D)
    if stir:
        for net in [*made.nets, *made.seconds]:
            for parameter in net.parameters():
                torch.nn.init.normal_(parameter)
    return made


def world(seed=0, batch=3, length=9, items=12):
    g = torch.Generator().manual_seed(seed)
    belongs = torch.zeros(items, 2, dtype=torch.bool)
    belongs[: items // 2, 0], belongs[items // 2 - 1 :, 1] = True, True  # one item is of both
    return (
        torch.randn(batch, length, 5, dtype=D, generator=g), torch.randint(items, (batch, length), generator=g),
        torch.randn(items, 5, dtype=D, generator=g), belongs,
    )  # fmt: skip


@pytest.mark.parametrize(("compose", "shared"), COMPOSE)
def test_every_head_starts_as_the_trunk(compose, shared):
    net, (h, *_) = heads(stir=False, compose=compose, shared=shared), world()
    out = net(h)
    assert out.shape == (3, 9, 4, 5) and torch.equal(out, h[:, :, None].expand_as(out))
    assert len(net.heads) == 4
    assert len(net.seconds) == {"hierarchical": 2 if shared else 4}.get(compose, 0)


def test_plain_next_item_contrast():
    net, (h, items, e, _) = heads(1, 1, 1), world()
    belongs = torch.ones(12, 1, dtype=torch.bool)
    found = net.loss(h, items, e, belongs, negatives=7, generator=torch.Generator().manual_seed(3))
    z, unit, true = F.normalize(net(h)[:, :-1, 0], dim=-1).flatten(0, 1), F.normalize(e, dim=-1), items[:, 1:].flatten()
    drawn = torch.randint(12, (len(true), 7), generator=torch.Generator().manual_seed(3))
    logits = 20 * torch.cat([(z * unit[true]).sum(-1, keepdim=True), (z[:, None] * unit[drawn]).sum(-1)], 1)
    logits[:, 1:][drawn == true[:, None]] = -math.inf
    torch.testing.assert_close(found, F.cross_entropy(logits, torch.zeros(len(true), dtype=torch.long)))


def test_a_head_learns_of_its_own_category_and_segment_alone():
    net, (h, items, e, belongs) = heads(), world()
    only = items % 5  # items of the first category alone
    net.loss(h, only, e, belongs).backward()
    for (category, _), block in zip(net.heads, net.nets, strict=True):
        assert all((p.grad is not None and bool((p.grad != 0).any())) == (category == 0) for p in block.parameters())
    net.zero_grad()
    net.loss(h[:, :3], items[:, :3], e, belongs).backward()  # no place has an item three or four later
    assert all(
        (p.grad is None or bool((p.grad == 0).all())) == (segment == 1)
        for (_, segment), block in zip(net.heads, net.nets, strict=True) for p in block.parameters()
    )  # fmt: skip
    assert net.loss(h, torch.full_like(items, -1), e, belongs) == 0


def test_places_weigh_by_distance_and_categories_by_how_often():
    net, (h, items, e, belongs) = heads(stir=False, compose="multiplicative"), world()
    kept = {"alike": 2.0, "negatives": 1}
    net.loss(h, items, e, belongs, **kept)
    with torch.no_grad():
        net.log_scale.fill_(-80.0)  # all cross-entropies are log 2, but for draws of the positive itself
    e = torch.randn(400, 5, dtype=D)
    belongs = torch.zeros(400, 2, dtype=torch.bool)
    belongs[:300, 0], belongs[300:, 1] = True, True
    items = torch.randint(400, (40, 30))
    for balanced in (False, True):
        found = net.loss(h.new_zeros(40, 30, 5) + 1, items, e, belongs, balanced=balanced, **kept)
        assert found.item() == pytest.approx(math.log(2), rel=0.03)
    half = PriorHeads(5, 2, 4, 2, compose="additive").to(D)
    with torch.no_grad():
        half.log_scale.fill_(-80.0)
    assert half.loss(h.new_zeros(40, 30, 5) + 1, items, e, belongs, **kept).item() == pytest.approx(
        math.log(2), rel=0.03
    )


def test_hierarchical_heads_are_segments_of_categories():
    net, (h, *_) = heads(compose="hierarchical", shared=True), world()
    for place, (c, s) in enumerate(net.heads):
        torch.testing.assert_close(net(h)[:, :, place], net.seconds[s](net.nets[c](h)))
    own = heads(compose="hierarchical")
    torch.testing.assert_close(own(h)[:, :, 3], own.seconds[3](own.nets[1](h)))
    for net in own.seconds:
        for p in net.parameters():
            torch.nn.init.zeros_(p)
    assert torch.equal(own(h)[:, :, 0], own(h)[:, :, 2])  # the same category


def test_what_is_recommended_is_of_the_heads_category():
    net, (h, _, e, belongs) = heads(), world()
    on = torch.tensor([[True, False, True, True]] * 3)
    found = net.scores(h[:, -1], e, belongs, on)
    assert (found[:, 1] == -math.inf).all()
    for place in (0, 2, 3):
        best = found[:, place].argmax(-1)
        assert belongs[best, net.heads[place][0]].all()
    plain = heads(stir=False).scores(h[:, -1], e, belongs)
    base = F.cosine_similarity(h[:, -1][:, None], e[None], dim=-1)
    torch.testing.assert_close(plain[:, 1], base.masked_fill(~belongs[:, 1], -math.inf))


def test_what_is_refused():
    with pytest.raises(ValueError, match="compose='sum'"):
        PriorHeads(4, 2, compose="sum")
    with pytest.raises(ValueError, match="segments=2 must divide window=3"):
        PriorHeads(4, 2, 3, 2)
    with pytest.raises(ValueError, match="shared goes with"):
        PriorHeads(4, 2, shared=True)
    h, items, e, belongs = world()
    with pytest.raises(ValueError, match="belongs"):
        heads().loss(h, items, e, belongs[:, :1])
