"""Tokens sorted by learned centres: the centres, groups of attention, and patches."""

import pytest
import torch
import torch.nn.functional as F

from manyheads.aggregate import Centres, ContentAttention, ContentBlock, PatchAttention
from manyheads.aggregate.catanet import nearest
from manyheads.core.part import OptionError


def attention(**options):
    options = {"width": 8, "centres": 3, "group": 4, "heads": 2, "qk_width": 6} | options
    return ContentAttention(**options).double().eval()


def plain(layer, x, k, v):
    q = layer._split(layer.q(x))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@torch.no_grad()
def test_a_group_of_all_tokens_is_attention_to_all_and_to_the_centres():
    for tail in ("short", "mirror"):
        layer, x = attention(group=20, tail=tail), torch.randn(2, 9, 8, dtype=torch.float64)
        near = plain(layer, x, layer._split(layer.k(x)), layer._split(layer.v(x)))
        centres = layer.centres.mean[None].expand(2, -1, -1)
        far = plain(layer, x, layer._split(layer.k_global(centres)), layer._split(layer.v_global(centres)))
        torch.testing.assert_close(layer(x), layer.out(near + far))


@pytest.mark.parametrize("tail", ["short", "mirror"])
@pytest.mark.parametrize("n", [8, 10, 11])
@torch.no_grad()
def test_groups_against_a_loop(n, tail):
    layer, x = attention(tail=tail), torch.randn(1, n, 8, dtype=torch.float64)
    order = sorted(range(n), key=lambda t: int(nearest(x[0, t], layer.centres.mean)))
    y = torch.zeros_like(x)
    ends = [*range(n), *reversed(range(n))] * 2
    for first in range(0, n, 4):
        rows = order[first : first + 4]
        last = first + 8 if tail == "mirror" else min(n, first + 8)
        keys = x[:, [order[i] for i in ends[first:last]]]
        y[:, rows] = plain(layer, x[:, rows], layer._split(layer.k(keys)), layer._split(layer.v(keys)))
    centres = layer.centres.mean[None]
    y = y + plain(layer, x, layer._split(layer.k_global(centres)), layer._split(layer.v_global(centres)))
    torch.testing.assert_close(layer(x), layer.out(y))


@torch.no_grad()
def test_whole_groups_are_the_same_mirrored_or_short():
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    one, two = attention(tail="short"), attention(tail="mirror")
    two.load_state_dict(one.state_dict())
    torch.testing.assert_close(one(x), two(x))


@torch.no_grad()
def test_evaluation_is_free_of_batch_mates_and_leaves_the_centres():
    layer, x = attention(), torch.randn(3, 10, 8, dtype=torch.float64)
    before = layer.centres.mean.clone()
    both = layer(x)
    torch.testing.assert_close(both[1:2], layer(x[1:2]))
    assert torch.equal(layer.centres.mean, before) and torch.equal(both, layer(x))


@torch.no_grad()
def test_tokens_of_whole_cells_may_stand_in_any_order():
    """Four tokens at each centre and groups of four: no order inside a cell counts."""
    layer = attention()
    layer.centres.mean.copy_(torch.eye(3, 8))
    x = 5 * torch.eye(3, 8, dtype=torch.float64).repeat(4, 1)[None] + 0.1 * torch.randn(1, 12, 8, dtype=torch.float64)
    order = torch.randperm(12)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order])


def test_one_centre_is_the_mean_direction():
    centres, x = Centres(8, 1, decay=0.0).double().train(), torch.randn(2, 7, 8, dtype=torch.float64)
    found = centres(x)
    wanted = F.normalize(F.normalize(x, dim=-1).sum((0, 1)), dim=0)
    torch.testing.assert_close(found[0], wanted)


def test_rounds_are_those_of_a_loop_and_the_buffer_follows():
    x = torch.randn(3, 10, 8, dtype=torch.float64)
    centres = Centres(8, 4, rounds=3, decay=0.9).double().train()
    unit = F.normalize(x.flatten(0, 1), dim=-1)
    now = F.normalize(torch.stack([unit[i::4].sum(0) for i in range(4)]), dim=-1)

    def rounds(now):
        for _ in range(3):
            to = (unit @ now.T).argmax(-1)
            now = torch.stack([
                F.normalize(unit[to == m].sum(0), dim=0) if (to == m).any() else now[m] for m in range(4)])  # fmt: skip
        return now

    first = centres(x)
    torch.testing.assert_close(first, rounds(now))
    torch.testing.assert_close(centres.mean, first)  # the first is copied
    second = centres(x)
    torch.testing.assert_close(second, rounds(first))
    torch.testing.assert_close(centres.mean, 0.9 * first + 0.1 * second)
    torch.testing.assert_close(second.norm(dim=-1), torch.ones(4, dtype=torch.float64))


def test_an_empty_centre_keeps_its_value():
    centres = Centres(4, 2, rounds=1, decay=0.0).double().train()
    centres.mean.copy_(torch.tensor([[1.0, 0, 0, 0], [-1, 0, 0, 0]]))
    centres.started.fill_(True)
    found = centres(torch.tensor([[[1.0, 0.1, 0, 0], [1, 0, 0.2, 0]]], dtype=torch.float64))
    assert torch.equal(found[1], torch.tensor([-1.0, 0, 0, 0], dtype=torch.float64)) and found[0, 1] > 0
    assert torch.equal(centres.mean, found)


def test_unit_centres_in_evaluation_and_the_last_round_has_the_gradient():
    centres = Centres(8, 3, unit=True).double().eval()
    centres.mean.mul_(0.9)
    torch.testing.assert_close(centres(torch.zeros(1, 1, 8)).norm(dim=-1), torch.ones(3, dtype=torch.float64))
    layer, x = attention().train(), torch.randn(2, 10, 8, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.abs().sum() > 0 and all(p.grad.abs().sum() > 0 for p in layer.parameters())


@torch.no_grad()
def test_patches():
    layer, x = PatchAttention(8, 4, heads=2).double(), torch.randn(2, 7, 4, 8, dtype=torch.float64)
    y, times = torch.zeros_like(x), torch.zeros(7, 1, 1)
    for top in (0, 2, 3):  # of 4 rows each, 2 apart, the last at the edge
        flat = x[:, top : top + 4].flatten(1, 2)
        q, k, v = (f(flat).unflatten(-1, (2, 4)).transpose(1, 2) for f in (layer.q, layer.k, layer.v))
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y[:, top : top + 4] += o.view(2, 4, 4, 8)
        times[top : top + 4] += 1
    torch.testing.assert_close(layer(x), layer.out(y / times))


def test_a_block_runs_and_trains():
    block, x = ContentBlock(8, 3, 4, 3, heads=2, qk_width=6).train(), torch.randn(2, 5, 4, 8)
    y = block(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in block.parameters())
    assert block.content.centres.started


def test_what_does_not_fit_is_refused():
    with pytest.raises(OptionError, match="qk_width=7 are not multiples of heads=2"):
        attention(qk_width=7)
    with pytest.raises(OptionError, match="tail='zero' is neither"):
        attention(tail="zero")
    with pytest.raises(OptionError, match="decay is a number"):
        Centres(8, 3, decay=1.0)
    with pytest.raises(OptionError, match="step=5 is at most size=4"):
        PatchAttention(8, 4, step=5, heads=2)
    with pytest.raises(ValueError, match="2 tokens are too few for a first mean of each of 3 centres"):
        Centres(8, 3).train()(torch.randn(1, 2, 8))
