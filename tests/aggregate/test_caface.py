"""CAFace: cluster and aggregate (NeurIPS 2022)."""

import pytest
import torch

from manyheads.aggregate import build

D = 6


def pool(line="caface(centres=3, dim=8, blocks=0, heads=2)"):
    agg = build(line, D).double().eval()
    with torch.no_grad():
        for parameter in agg.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return agg


def faces(n=5, rows=2):
    return torch.randn(rows, n, D, dtype=torch.float64)


def unit(x):
    return x / (x.norm(dim=-1, keepdim=True) + 1e-5)


def test_each_token_is_shared_among_centres_and_means_are_fused():
    agg, x = pool(), faces()
    share = agg.assigned(x)
    torch.testing.assert_close(share.sum(1), torch.ones(2, 5).double())
    state = agg.observe(x, torch.ones(2, 5, dtype=torch.bool))
    torch.testing.assert_close(state.features, share @ unit(x) / share.sum(-1, keepdim=True))
    confidence = agg.confidences(state)
    torch.testing.assert_close(confidence.sum(1), torch.ones(2, 1).double())
    torch.testing.assert_close(agg(x).out[:, 0], (confidence * state.features).sum(1))
    torch.testing.assert_close(agg(x).weights[:, 0] @ unit(x), agg(x).out)
    torch.testing.assert_close(agg(x).weights.sum(-1), torch.ones(2, 1, 1).double())


def test_assignment_by_its_equation():
    agg, x = pool(), faces()
    norm = x.norm(dim=-1, keepdim=True)
    rates = torch.tensor([1.0, 10000**-0.25, 0.01, 10000**-0.75]).double()
    looks = agg.k_norm(torch.cat([(norm * rates).sin(), (norm * rates).cos()], -1))
    scores = agg.q_norm(agg.centres) @ agg.q_proj.weight.T @ (looks @ agg.k_proj.weight.T).mT / 8**0.5
    torch.testing.assert_close(agg.assigned(x), scores.softmax(1))


def test_one_centre_is_the_plain_mean():
    agg, x = pool("caface(centres=1, dim=8, blocks=1, heads=2)"), faces()
    torch.testing.assert_close(agg(x).out[:, 0], unit(x).mean(1))


def test_centres_begin_orthogonal():
    centres = build("caface(centres=4, dim=8)", D).centres
    torch.testing.assert_close(centres @ centres.T, torch.eye(4))


def test_lengths_change_styles_only():
    agg, x = pool("caface(centres=1, dim=8, blocks=0, heads=2)"), faces()
    torch.testing.assert_close(agg(7 * x).out, agg(x).out, atol=1e-4, rtol=0)
    agg = pool()
    state, scaled = (agg.observe(each, torch.ones(2, 5, dtype=torch.bool)) for each in (x, 7 * x))
    assert not torch.allclose(state.styles, scaled.styles)


def test_streaming_is_exact_without_looking_at_each_other():
    agg, x = pool(), faces(9)
    state = agg.init(2)
    for block in x.split([2, 4, 3], 1):
        state = agg.update(state, block)
    torch.testing.assert_close(agg.finalize(state).out, agg(x).out)
    none = agg.merge(state, agg.init(2))
    for one, two in zip(none, state, strict=True):
        torch.testing.assert_close(one, two)


def test_with_blocks_only_their_order_is_free():
    agg, x = pool("caface(centres=3, dim=8, blocks=2, heads=2)"), faces(6)
    assert not agg.exact
    blocks = x.split(3, 1)

    def streamed(parts):
        state = agg.init(2)
        for part in parts:
            state = agg.update(state, part)
        return agg.finalize(state).out

    torch.testing.assert_close(streamed(blocks), streamed(blocks[::-1]))
    torch.testing.assert_close(streamed([blocks[0][:, [2, 0, 1]], blocks[1]]), streamed(blocks))
    assert not torch.allclose(streamed(blocks), agg(x).out)


def test_the_first_token_does_not_fade():
    agg, x = pool(), faces(8)
    share = agg.assigned(x)
    state = agg.init(2)
    for token in x.split(1, 1):
        state = agg.update(state, token)
    weight = share[:, :, :1] / share.sum(-1, keepdim=True)
    others = share[:, :, 1:] @ unit(x)[:, 1:] / share.sum(-1, keepdim=True)
    torch.testing.assert_close(state.features - others, weight * unit(x)[:, :1])


def test_the_published_clip_shrinks_small_blocks():
    clip, x = pool("caface(centres=3, dim=8, blocks=0, heads=2, clip=true)"), faces(1)
    share = clip.assigned(x)
    state = clip.observe(x, torch.ones(2, 1, dtype=torch.bool))
    torch.testing.assert_close(state.features, share * unit(x))  # not unit: Σ A < 1
    assert not clip.exact
    many = faces(60)
    free = pool()
    free.load_state_dict(clip.state_dict())
    if bool((free.assigned(many).sum(-1) >= 1).all()):
        torch.testing.assert_close(clip(many).out, free(many).out)


def test_styles_that_come_with_tokens():
    agg, x = pool("caface(centres=3, dim=8, style=4, blocks=1, heads=2)"), faces()
    style, mask = torch.randn(2, 5, 4).double(), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    found = agg(x, mask, cond=style.masked_fill(~mask[..., None], torch.nan)).out
    torch.testing.assert_close(found[1:], agg(x[1:, :3], cond=style[1:, :3]).out)
    assert not torch.allclose(agg(x, cond=style).out, agg(x, cond=-style).out)
    state = agg.update(agg.init(2), x, mask, cond=style)
    torch.testing.assert_close(agg.finalize(state).out, found)
    for cond in (None, style[..., :2]):
        with pytest.raises(ValueError, match=r"style=4 takes \[2, 5, 4\]"):
            agg(x, cond=cond)
    with pytest.raises(ValueError, match="style=0 takes nothing"):
        pool()(x, cond=style)


def test_subsets_and_streams_can_be_learned_from():
    """A step of the published training: towards the class's centre, and the streamed result towards the whole one's."""
    agg, x = pool("caface(centres=2, dim=8, blocks=1, heads=2)"), faces(6)
    whole = agg(x).out
    state = agg.update(agg.update(agg.init(2), x[:, :3]), x[:, 3:])
    loss = 1 - torch.cosine_similarity(agg.finalize(state).out, whole, dim=-1).mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in agg.parameters())


@pytest.mark.parametrize("line", ["caface(style=200)", "caface(heads=3)", "caface(style=3)", "caface(centres=0)"])
def test_refusals(line):
    with pytest.raises(ValueError, match=r"even number|divide|at least 1"):
        build(line, D)
