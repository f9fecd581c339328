"""Maps of an anchor's attention, heads weighted by the question."""

import pytest
import torch

import manyheads as mh
from manyheads.aggregate import AnchorReader, box_target, grounding_loss, grounding_map, point
from manyheads.core.part import OptionError

PATCHES, QUESTIONS, ANCHOR = [0, 1, 2, 3, 4, 5], [6, 7, 8], 10


def drawn():
    alpha = torch.rand(2, 4, 4, 11, dtype=torch.float64).softmax(-1)
    states = [torch.randn(2, 11, 8, dtype=torch.float64) for _ in range(2)]
    return [alpha[:, :2], alpha[:, 2:]], states


def read(reader, maps, states):
    return reader(maps, states, patches=PATCHES, questions=QUESTIONS)


def test_hard_weights_against_loops():
    maps, states = drawn()
    found = read(AnchorReader(), maps, states)
    alpha = torch.cat(maps, 1)
    for b in range(2):
        g = [sum(float(torch.cosine_similarity(h[b, q], h[b, v], dim=0)) for h in states for v in PATCHES)
             for q in QUESTIONS]  # fmt: skip
        torch.testing.assert_close(found.affinity[b], torch.tensor(g, dtype=torch.float64))
        best = g.index(max(g))
        w = torch.tensor([float(alpha[b, f, best, :6].sum()) for f in range(4)], dtype=torch.float64).softmax(0)
        torch.testing.assert_close(found.weights[b], w)
        m = sum(w[f] * alpha[b, f, 3, :6] for f in range(4))
        torch.testing.assert_close(found.map[b], m / m.sum(), atol=1e-7, rtol=0)


def test_soft_weights_are_those_of_the_divergence():
    maps, states = drawn()
    found = read(AnchorReader("soft", temperature=0.5), maps, states)
    seen = torch.cat(maps, 1)[:, :, :3, :6].sum(-1)
    p, g = seen.softmax(-1), found.affinity.softmax(-1)[:, None]
    torch.testing.assert_close(found.weights, (-2 * (g * (g / p).log()).sum(-1)).softmax(-1))


@pytest.mark.parametrize("reader", [AnchorReader(), AnchorReader("soft"), AnchorReader(top=2, temperature=0.1)])
def test_weights_and_maps_sum_to_one_and_heads_have_no_order(reader):
    maps, states = drawn()
    found = read(reader, maps, states)
    torch.testing.assert_close(found.weights.sum(1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(found.map.sum(1), torch.ones(2, dtype=torch.float64), atol=1e-6, rtol=0)
    other = read(reader, [maps[1].flip(1), maps[0].flip(1)], states)
    torch.testing.assert_close(other.map, found.map)
    torch.testing.assert_close(other.weights.flip(1), found.weights)


def test_equal_heads_give_the_map_of_one():
    maps, states = drawn()
    one = maps[0][:, :1]
    found = read(AnchorReader(), [one.expand(-1, 3, -1, -1)], states)
    alone = one[:, 0, 3, :6]
    torch.testing.assert_close(found.map, alone / (alone.sum(-1, keepdim=True) + 1e-8))
    torch.testing.assert_close(read(AnchorReader(), [one], states).map, found.map)


def test_a_head_that_ignores_the_picture_has_a_weight_too():
    maps, states = drawn()
    maps[0][:, 0, :3, :6] = 0
    found = read(AnchorReader(), maps, states)
    assert (found.weights[:, 0] > 0).all()
    ratio = found.weights.amax(1) / found.weights[:, 0]
    assert (ratio <= torch.e).all() and (ratio > 1).all()


def test_rows_of_a_running_model_are_enough_and_train_it():
    model = mh.Decoder(20, "gqa(kv_heads=2)", 16, 4, 2).double()
    ids, states = torch.randint(20, (2, 11)), []
    hooks = [block.register_forward_hook(lambda m, a, y: states.append(y[0])) for block in model.stack.blocks]
    with mh.capture(model, queries=[*QUESTIONS, ANCHOR], grad=True) as tape:
        model(ids)
    some = [tape[layer].weights for layer in tape]
    with mh.capture(model) as tape:
        model(ids)
    torch.testing.assert_close(some[1], tape[1].weights[:, :, [*QUESTIONS, ANCHOR]])
    found = read(AnchorReader(), some, states[:2])
    loss = grounding_loss(found.map, box_target(torch.tensor([[0, 0, 28, 28], [30, 2, 84, 50]]), (2, 3)))
    loss.backward()
    assert model.stack.blocks[0].attention.project.q_proj.weight.grad.abs().sum() > 0
    for hook in hooks:
        hook.remove()


def test_targets_of_boxes():
    boxes = torch.tensor([[28.0, 28, 56, 56], [14, 0, 70, 28]], dtype=torch.float64)
    y = box_target(boxes, (3, 4))
    torch.testing.assert_close(y.sum(1), torch.ones(2, dtype=torch.float64))
    assert y[0].count_nonzero() == 1 and y[0, 5] == 1
    flat = box_target(boxes, (3, 4), spread=None)
    torch.testing.assert_close(flat[1, :4], torch.tensor([0.25, 0.5, 0.25, 0.0], dtype=torch.float64))
    off = torch.tensor(-0.5 * (28 / (0.8 * 56)) ** 2, dtype=torch.float64).exp()
    torch.testing.assert_close(y[1, 0] / y[1, 1], 0.5 * off)
    for box in ([[5.0, 5, 5, 9]], [[9.0, 5, 5, 9]], [[500.0, 0, 600, 10]]):
        with pytest.raises(ValueError, match="a box covers no patch of a picture of 112 by 84"):
            box_target(torch.tensor(box), (3, 4))


def test_the_loss_is_zero_at_the_target_alone():
    y = box_target(torch.tensor([[0.0, 0, 40, 40]], dtype=torch.float64), (3, 4))
    assert abs(grounding_loss(y, y).item()) < 1e-6
    other = grounding_map(torch.rand(1, 2, 12, dtype=torch.float64), torch.tensor([[0.5, 0.5]], dtype=torch.float64))
    assert grounding_loss(other, y).item() > 0.1


def test_points():
    found = torch.zeros(1, 12)
    found[0, 6], found[0, 7], found[0, 0] = 0.5, 0.4, 0.1
    assert point(found, (3, 4), 10).tolist() == [[25.0, 15.0]]
    assert point(found, (3, 4), 10, share=0.5)[0].tolist() == pytest.approx([(0.5 * 25 + 0.4 * 35) / 0.9, 15.0])


def test_what_does_not_fit_is_refused():
    maps, states = drawn()
    with pytest.raises(ValueError, match="maps have 4 rows; 2 of the question and the anchor's"):
        AnchorReader()(maps, states, patches=PATCHES, questions=[6, 7])
    with pytest.raises(ValueError, match="needs patches and tokens"):
        AnchorReader()(maps, states, patches=[], questions=[6, 7])
    with pytest.raises(ValueError, match="top=5, but the question has 3 tokens"):
        read(AnchorReader(top=5), maps, states)
    with pytest.raises(ValueError, match="no states"):
        read(AnchorReader(), maps, [])
    for options, said in (({"how": "mean"}, "neither hard nor soft"), ({"temperature": 0}, "no number above 0")):
        with pytest.raises(OptionError, match=said):
            AnchorReader(**options)
