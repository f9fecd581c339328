"""What MiniLMv2 says can be checked: its relations on tensors, and between layers of other heads and widths."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.convert.tiny import inputs, layer

from manyheads.convert.relations import Projected, Relations, listening, projected
from manyheads.core.part import OptionError


def rows(width, seed=0, batch=2, tokens=7, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return Projected(*scale * torch.randn(3, batch, tokens, width, generator=generator, dtype=torch.float64))


def turned(x, heads, seed=0):
    """Each relation head of x in coordinates of its own."""
    width = x.shape[-1] // heads
    turn = torch.linalg.qr(torch.randn(heads, width, width, generator=torch.Generator().manual_seed(seed)).double())[0]
    return torch.einsum("bthd,hde->bthe", x.unflatten(-1, (heads, -1)), turn).flatten(2)


def brute(student, teacher, heads, pairs, causal):
    """By loops over batch, heads and rows."""
    total = 0.0
    for one, other in pairs:
        batch, tokens, _ = student.q.shape
        for b in range(batch):
            for h in range(heads):
                for t in range(tokens):
                    seen = t + 1 if causal else tokens
                    logs = []
                    for each in (teacher, student):
                        a, c = (getattr(each, name)[b].unflatten(-1, (heads, -1))[:, h] for name in (one, other))
                        logs.append((a[t] @ c[:seen].T / math.sqrt(a.shape[-1])).log_softmax(-1))
                    total += F.kl_div(logs[1], logs[0], log_target=True, reduction="sum") / (heads * tokens * batch)
    return total


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pairs", [("qq", "kk", "vv"), ("qk",)])
@pytest.mark.parametrize("heads", [1, 4])
def test_equal_to_loops(heads, pairs, causal):
    student, teacher = rows(12), rows(20, 1)
    found = Relations(heads, pairs=pairs)(student, teacher, causal=causal)
    torch.testing.assert_close(found, brute(student, teacher, heads, pairs, causal))
    assert found > 0


def test_a_student_that_is_its_teacher_has_neither_loss_nor_gradient():
    teacher = rows(12)
    student = Projected(*(x.clone().requires_grad_() for x in teacher))
    loss = Relations(3)(student, teacher)
    loss.backward()
    assert loss == 0 and all(x.grad.abs().max() < 1e-15 for x in student)


def test_rotations_inside_relation_heads_and_their_order_do_not_matter_but_size_does():
    student, teacher, loss = rows(12), rows(12, 1), Relations(3)
    found = loss(student, teacher)
    torch.testing.assert_close(loss(Projected(*(turned(x, 3) for x in student)), teacher), found)
    mixed = [Projected(*(x.unflatten(-1, (3, -1))[:, :, [2, 0, 1]].flatten(2) for x in e)) for e in (student, teacher)]
    torch.testing.assert_close(loss(*mixed), found)
    grown = Projected(2 * student.q, student.k, student.v)
    assert abs(loss(grown, teacher) - found) > 1e-3


def test_heads_of_either_model_do_not_matter():
    """Widths 384 and 1024, of 12 and of 16 heads."""
    student, teacher = rows(384), rows(1024, 1)
    for heads in (16, 64):
        assert torch.isfinite(Relations(heads)(student, teacher))


def test_one_pair_with_the_models_heads_is_attention():
    source, x = layer("gqa + rope(none)"), inputs()
    found = projected(source, x)
    p, q = (
        (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in found[:2]) for found in (found, rows(24, 3, 4, 16))
    )
    logs = []
    for one, other in (p, q):
        hidden = ~torch.ones(16, 16, dtype=torch.bool).tril()
        logs.append((one @ other.mT / 6**0.5).masked_fill(hidden, -1e30).log_softmax(-1))
    want = F.kl_div(logs[1], logs[0], log_target=True, reduction="sum") / (4 * 4 * 16)
    torch.testing.assert_close(Relations(4, pairs=("qk",))(rows(24, 3, 4, 16), found), want)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_does_not_matter(causal):
    student, teacher, loss = rows(12), rows(12, 1), Relations(3)
    valid = torch.zeros(2, 12, dtype=torch.bool)
    valid[0, 2:9], valid[1, 5:12] = True, True
    padded = []
    for each, seed in ((student, 5), (teacher, 6)):
        wide = rows(12, seed, tokens=12)
        for x, y in zip(each, wide, strict=True):
            y[valid] = x.flatten(0, 1)
        padded.append(wide)
    torch.testing.assert_close(loss(*padded, valid, causal), loss(student, teacher, causal=causal))


def test_one_token_has_no_relations():
    assert Relations(3)(rows(12, tokens=1), rows(12, 1, tokens=1)) == 0


LAYERS = ["gqa(kv_heads=2, bias=qkvo)", "gqa(kv_heads=1)", "mla(rank=8, rope_dim=4, nope_dim=5)", "mla(view=absorbed)",
          "gqa(kv_heads=2) + kha + moh(top=2)"]  # fmt: skip


@pytest.mark.parametrize("spec", LAYERS)
def test_layers_of_any_kind_can_be_students(spec):
    source, student, x = layer(), layer(spec, seed=1).requires_grad_(), inputs()
    loss = Relations(1)
    loss.check(student, source)
    with listening(student) as heard:
        student(x, position_ids=torch.arange(16)[None])
        found = loss(heard[0], projected(source, x))
    assert found > 0 and len(heard) == 1
    found.backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in student.parameters())
    student(x, position_ids=torch.arange(16)[None])
    assert len(heard) == 1


def test_queries_and_keys_are_those_before_rotation():
    source, x = layer(), inputs()
    found = projected(source, x)
    torch.testing.assert_close(found.q, source.project.q_proj(x))
    torch.testing.assert_close(found.k, source.project.k_proj(x))
    torch.testing.assert_close(found.v, source.project.v_proj(x))


def test_what_does_not_fit_is_refused_with_numbers():
    with pytest.raises(
        OptionError, match=r"heads=5 do not divide .*student: k 12, q 24, v 12.*may be \[1, 2, 3, 4, 6, 12\]"
    ):
        Relations(5).check(layer(), layer())
    with pytest.raises(OptionError, match="qk needs equal widths; the student has q 24, k 12"):
        Relations(2, pairs=("qk",)).check(layer(), layer("gqa"))
    wrong = {"heads=0": {"heads": 0}, "'qx' is no pair": {"pairs": ("qx",)}, "weight=-1.0": {"weight": -1.0}}
    for said, options in (wrong | {"0 pairs": {"pairs": ()}}).items():
        with pytest.raises(OptionError, match=said):
            Relations(**{"heads": 1} | options)
