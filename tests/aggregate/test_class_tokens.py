"""Class and distillation tokens (arXiv 2111.03842)."""

import math

import pytest
import torch
from torch import nn

import manyheads as mh
from manyheads.aggregate import ClassTokens, Memory, distil_loss

D = 8


def encoder(layers=2, spec="gqa", causal=False):
    made = mh.Encoder(spec, D, 2, layers) if not causal else Causal()
    return made.double().eval()


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = mh.Stack("gqa", D, 2, 1, causal=True)

    def forward(self, x, mask=None):
        return self.stack(x, mask=mask)


def tokens(n=5, rows=2):
    return torch.randn(rows, n, D, dtype=torch.float64)


def test_it_is_the_encoder_with_tokens_behind():
    net, x = encoder(), tokens()
    model = ClassTokens(net, D, distil=True).double().eval()
    learned = torch.cat([model.vectors, model.distil])[None].expand(2, -1, -1)
    torch.testing.assert_close(model(x).out, net(torch.cat([x, learned], 1))[:, -2:])
    front = ClassTokens(net, D, first=True).double().eval()
    torch.testing.assert_close(front(x).out, net(torch.cat([front.vectors[None].expand(2, -1, -1), x], 1))[:, :1])
    extra = sum(p.numel() for p in ClassTokens(net, D, vectors=4, distil=True).parameters())
    assert extra - sum(p.numel() for p in net.parameters()) == 4 * D + D


@pytest.mark.parametrize("apart", [False, True])
def test_padding_and_order(apart):
    model, x = ClassTokens(encoder(), D, distil=True, apart=apart).double().eval(), tokens()
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    found = model(x.masked_fill(~mask[..., None], math.nan), mask).out
    torch.testing.assert_close(found[1:], model(x[1:, :3]).out)
    torch.testing.assert_close(model(x[:, torch.randperm(5)]).out, model(x).out)
    assert model(x, torch.zeros(2, 5, dtype=torch.bool)).out.isfinite().all()


def test_the_second_token_is_felt_unless_it_is_kept_apart():
    for apart in (False, True):
        model, x = ClassTokens(encoder(), D, distil=True, apart=apart).double().eval(), tokens()
        before = model(x).out
        model.distil.data += torch.randn(D)
        after = model(x).out
        assert torch.allclose(before[:, 0], after[:, 0]) == apart
        assert not torch.allclose(before[:, 1], after[:, 1])


def test_vectors_are_drawn_in_training_and_averaged_after():
    model, x = ClassTokens(encoder(), D, vectors=3).double(), tokens(rows=8)
    assert len({round(v, 8) for v in model(x[:1].expand(64, -1, -1)).out[:, 0, 0].tolist()}) == 3
    model.eval()
    one = ClassTokens(model.encoder, D).double().eval()
    one.vectors.data = model.vectors.data.mean(0, keepdim=True)
    torch.testing.assert_close(model(x).out, one(x).out)
    model.vectors.data = one.vectors.data.expand(3, -1).clone()
    model.train()
    torch.testing.assert_close(model(x).out, one(x).out)  # equal ones: drawing has no effect


def test_each_vector_gets_its_share_of_the_gradient():
    model, x = ClassTokens(encoder(1), D, vectors=4).double(), tokens(1, 1).expand(800, -1, -1)
    model.vectors.data = model.vectors.data[:1].expand(4, -1).clone()
    model(x).out[:, 0, 0].mean().backward()
    single = ClassTokens(model.encoder, D).double()
    single.vectors.data = model.vectors.data[:1].clone()
    single(x[:2]).out[:, 0, 0].mean().backward()
    ratio = (model.vectors.grad / single.vectors.grad).mean(1)
    torch.testing.assert_close(ratio, torch.full((4,), 0.25).double(), atol=0.06, rtol=0)


def test_without_queries_it_is_the_mean_of_values():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = mh.Attention("gqa", D, 1, site=mh.Site(causal=False))

        def forward(self, x, mask=None):
            return self.attention(x, mask=mask)

    net, x = Layer().double(), tokens()
    nn.init.zeros_(net.attention.project.q_proj.weight)
    model = ClassTokens(net, D).double().eval()
    model.vectors.data.zero_()
    project = net.attention.project
    mean = project.o_proj(project.v_proj(x).sum(1) / 6)
    torch.testing.assert_close(model(x).out[:, 0], mean)


def test_a_causal_encoder_needs_the_token_behind():
    net = encoder(causal=True)
    with pytest.raises(ValueError, match=r"nothing of the others.*first=False"):
        ClassTokens(net, D, first=True)
    assert ClassTokens(net, D).double()(tokens()).out.shape == (2, 1, D)


def test_the_loss():
    logits, student = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    teacher, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 2, 1, 1])
    loss = distil_loss(logits, labels, student, teacher, 0.5, 2.0)
    p, q = (teacher / 2).softmax(-1), (student / 2).softmax(-1)
    cross = -logits.log_softmax(-1)[torch.arange(4), labels].mean()
    torch.testing.assert_close(loss, cross + 0.5 * (p * (p / q).log()).sum(-1).mean())
    loss.backward()
    assert teacher.grad is None and student.grad is not None
    none = distil_loss(logits, labels, student, teacher, 0.0)
    torch.testing.assert_close(none, cross)
    same = distil_loss(logits, labels, teacher.detach(), teacher)
    torch.testing.assert_close(same, cross)
    with pytest.raises(ValueError, match="alike"):
        distil_loss(logits, labels, student[:, :2], teacher)
    with pytest.raises(ValueError, match="temperature"):
        distil_loss(logits, labels, student, teacher, temperature=0.0)


def test_memory():
    memory, x = Memory(D, 5), torch.randn(2, 3, D)
    torch.testing.assert_close(memory(x), (x @ memory.keys.T).softmax(-1) @ memory.values)
    assert (Memory(D, 5, relu=True)(torch.zeros(1, 1, D)) == 0).all()


def test_refusals():
    with pytest.raises(ValueError, match="distil=True"):
        ClassTokens(encoder(), D, apart=True)
    with pytest.raises(ValueError, match="at least 1"):
        ClassTokens(encoder(), D, vectors=0)
    model = ClassTokens(encoder(), D).double()
    with pytest.raises(ValueError, match=r"\[rows, tokens, 8\]"):
        model(tokens()[..., :3])
    with pytest.raises(ValueError, match="mask is bool"):
        model(tokens(), torch.ones(2, 5))
