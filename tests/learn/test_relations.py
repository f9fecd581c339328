"""Relations among queries, keys and values of models of unlike heads."""

import math

import pytest
import torch

from manyheads.learn import Projected, relation_loss

D = torch.float64


def rows(width, seed=0, tokens=4):
    g = torch.Generator().manual_seed(seed)
    return Projected(*(torch.randn(2, tokens, width, dtype=D, generator=g) for _ in "qkv"))


@pytest.mark.parametrize("causal", [False, True])
def test_the_loss_by_hand(causal):
    student, teacher, heads, total = rows(6), rows(9, 1), 3, 0.0
    for name in "qkv":
        for b in range(2):
            for a in range(heads):
                for t in range(4):
                    p, q = [], []
                    for each, into in ((teacher, p), (student, q)):
                        d = getattr(each, name).shape[-1] // heads
                        x = getattr(each, name)[b, :, a * d : (a + 1) * d]
                        scores = [float(x[t] @ x[s]) / math.sqrt(d) for s in range(t + 1 if causal else 4)]
                        whole = sum(math.exp(s) for s in scores)
                        into.extend(math.exp(s) / whole for s in scores)
                    total += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)) / (heads * 4 * 2)
    assert relation_loss(student, teacher, heads, causal=causal).item() == pytest.approx(total)


def test_rotations_of_a_relation_head_are_nothing_and_scales_are_something():
    student, teacher = rows(6), rows(9, 1)
    turn = torch.linalg.qr(torch.randn(2, 2, dtype=D)).Q
    turned = student._replace(k=torch.cat([student.k[..., :2] @ turn, student.k[..., 2:]], -1))
    found = relation_loss(student, teacher, 3)
    torch.testing.assert_close(relation_loss(turned, teacher, 3), found)
    assert relation_loss(student._replace(k=2 * student.k), teacher, 3) != found
    assert relation_loss(teacher, teacher, 3) == 0 < found


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"the teacher's k is \[2, 4, 9\]; \[2, 4, a multiple of 2\]"):
        relation_loss(rows(6), rows(9), 2)
    with pytest.raises(ValueError, match="the teacher's k is"):
        relation_loss(rows(6), rows(6, tokens=5), 2)
    with pytest.raises(ValueError, match="heads is at least 1"):
        relation_loss(rows(6), rows(6), 0)
    with pytest.raises(ValueError, match="a pair is two of q, k and v"):
        relation_loss(rows(6), rows(6), 2, pairs=["qx"])
    with pytest.raises(ValueError, match="pairs are none"):
        relation_loss(rows(6), rows(6), 2, pairs=[])
    with pytest.raises(ValueError, match="the student's q is"):
        relation_loss(rows(6, tokens=0), rows(6, tokens=0), 2)
    with pytest.raises(ValueError, match=r"valid is \[4\], not \[2, 4\]"):
        relation_loss(rows(6), rows(6), 2, valid=torch.ones(4))
