"""Rotary tables and turns against transformers and against the algebra they promise; ALiBi's slopes."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import manyheads as mh
from manyheads.core.mask import Axis
from manyheads.core.position import alibi_slopes, angles, inverse_frequencies, rotate


def rope(line):
    (part,) = mh.Spec.parse(line).parts
    return part


def turned(x, position, theta, layout="half"):
    return rotate(x, *angles(position, theta, x.dtype), layout)


def test_half_and_interleaved_are_one_rotation_up_to_a_permutation():
    theta, position = inverse_frequencies(8, 100.0), torch.arange(5)[None]
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    order = torch.arange(8).view(2, 4).T.flatten()  # half's channels p, p + 4 side by side
    half, other = turned(x, position, theta), turned(x[..., order], position, theta, "interleaved")
    torch.testing.assert_close(half[..., order], other)
    assert not torch.allclose(half, other)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_scores_see_distances_only(layout):
    """q at i and k at j give one product for every pair with the same i - j; lengths do not change."""
    theta = inverse_frequencies(6, 10000.0)
    q, k = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64)

    def score(i, j):
        return (turned(q, torch.tensor([[i]]), theta, layout) * turned(k, torch.tensor([[j]]), theta, layout)).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100))
    assert not torch.isclose(score(9, 4), score(9, 5))
    torch.testing.assert_close(turned(q, torch.tensor([[33]]), theta, layout).norm(), q.norm())
    torch.testing.assert_close(score(0, 0), (q * k).sum())


def test_position_zero_turns_nothing_and_each_sequence_turns_by_its_own():
    theta, x = inverse_frequencies(4, 10.0), torch.randn(2, 1, 1, 4)
    both = turned(x, torch.tensor([[0], [7]]), theta)
    torch.testing.assert_close(both[0], x[0])
    torch.testing.assert_close(both[1:], turned(x[1:], torch.tensor([[7]]), theta))


SCALINGS = {
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
    "rope(base=500000.0, scaling=linear, factor=4.0)": {
        "rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0,
    },
    "rope(base=500000.0, scaling=llama3, factor=8.0, original=64, low=1.0, high=4.0)": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "rope(scaling=yarn, factor=4.0, original=64)": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    },
    "rope(scaling=yarn, factor=16.0, original=128, fast=16.0, slow=2.0, truncate=false)": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 128,
        "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
    },
    "rope(scaling=yarn, factor=40.0, original=64, magnitude=1.0)": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64,
        "attention_factor": 1.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("line", SCALINGS)
def test_tables_are_those_of_transformers(line):
    """Frequencies and the attention factor."""
    parameters = SCALINGS[line]
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, num_hidden_layers=1, max_position_embeddings=512,
        rope_parameters=dict(parameters),
    )  # fmt: skip
    part = rope(line)
    if parameters["rope_type"] == "default":
        want, growth = 1.0 / 10000.0 ** (torch.arange(0, 32, 2) / 32), 1.0
    else:
        want, growth = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(part.frequencies(32), want.float(), rtol=1e-6, atol=0)
    assert part.growth() == pytest.approx(growth)


def test_half_precision_turns_are_computed_in_float32():
    """Positions beyond 256 are not representable in bfloat16; the angle must not be rounded to it."""
    cos, _ = angles(torch.tensor([[1001]]), torch.tensor([1.0]), torch.bfloat16)
    assert cos.dtype == torch.bfloat16
    assert cos.item() == pytest.approx(torch.tensor(1001.0).cos().item(), abs=1e-2)


def queries(layer, x, positions):
    """q as attention sees it, straight from the layer's hooks."""
    flow = layer._flow(x, positions, None, None, None, None)
    return layer._turn(layer.project.queries(flow), "q", flow.q), layer.project.queries(flow)


def test_partial_rotation_leaves_the_other_channels():
    layer = mh.Attention("gqa + rope(fraction=0.5)", 32, 4)
    turned_q, plain = queries(layer, torch.randn(1, 6, 32), None)
    assert torch.equal(turned_q[..., 4:], plain[..., 4:])
    assert not torch.allclose(turned_q[:, :, 1:, :4], plain[:, :, 1:, :4])
    want = rotate(plain[..., :4], *angles(torch.arange(6)[None], inverse_frequencies(4, 10000.0), plain.dtype), "half")
    torch.testing.assert_close(turned_q[..., :4], want)


def test_chosen_pairs_of_a_wider_table():
    """A latent layer that keeps 2 of 8 pairs turns its 4 channels by those pairs' frequencies."""
    part = rope("rope(pairs=[1, 6], of=16)")
    table = inverse_frequencies(16, 10000.0)
    torch.testing.assert_close(part.frequencies(4), table[[1, 6]])
    layer = mh.Attention("mla(rank=8, rope_dim=4) + rope(pairs=[1, 6], of=16)", 32, 4)
    turned_q, plain = queries(layer, torch.randn(1, 3, 32), torch.tensor([[4, 5, 9]]))
    cos, sin = angles(torch.tensor([[4, 5, 9]]), table[[1, 6]], plain.dtype)
    torch.testing.assert_close(turned_q[..., 8:], rotate(plain[..., 8:], cos, sin, "half"))
    torch.testing.assert_close(turned_q[..., :8], plain[..., :8])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mla(rank=8, rope_dim=4) + rope(pairs=[0, 1, 2])", "3 pairs turn 6 channels, the projection has 4"),
        ("mla(rank=8, rope_dim=4) + rope(pairs=[0, 9], of=16)", "pair 9 is beyond a table of 8"),
        ("gqa(head_dim=7)", "7 channels of a head cannot turn in pairs .* may give 6 or 8"),
    ],
)
def test_numbers_that_do_not_fit_say_which_would(line, words):
    with pytest.raises(mh.OptionError, match=words):
        mh.Attention(line, 32, 4)


def test_the_turns_of_an_axis_are_computed_once():
    layer, axis = mh.Attention("gqa", 16, 2), Axis(4, 0)
    x = torch.randn(1, 4, 16)
    layer(x, positions=axis)
    (cos, _) = next(value for value in axis.memo.values() if isinstance(value, tuple))
    layer(x, positions=axis)
    assert any(value[0] is cos for value in axis.memo.values() if isinstance(value, tuple))


def test_alibi_slopes():
    """8 heads: powers of one half. 12 heads: those, then every second slope of 16 heads."""
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    want = [2.0**-h for h in range(1, 9)] + [2.0 ** -(h / 2) for h in (1, 3, 5, 7)]
    assert alibi_slopes(12).tolist() == pytest.approx(want)
    assert alibi_slopes(1).tolist() == [2.0**-8]
