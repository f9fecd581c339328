"""MaxPoolBERT (arXiv 2505.15696)."""

import pytest
import torch
from transformers import BertConfig, BertModel

from manyheads.aggregate import build

D = 8


def states(layers=4, rows=2, tokens=5):
    return [torch.randn(rows, tokens, D, dtype=torch.float64) for _ in range(layers)]


def pool(line="maxpoolbert"):
    return build(line, D).double()


def test_by_its_equations():
    layers, agg = states(), pool("maxpoolbert(heads=2, layers=3)")
    m = torch.stack(layers[1:]).amax(0)
    found = []
    for a in range(2):
        part = slice(4 * a, 4 * a + 4)
        q = m[:, :1] @ agg.q_proj.weight[part].T + agg.q_proj.bias[part]
        k, v = (m @ each.weight[part].T + each.bias[part] for each in (agg.k_proj, agg.v_proj))
        w = (q @ k.mT / 2).softmax(-1)
        found.append(w @ v)
        torch.testing.assert_close(agg.read(layers).weights[:, a], w)
    out = torch.cat(found, -1) @ agg.o_proj.weight.T + agg.o_proj.bias
    torch.testing.assert_close(agg.read(layers).out, out)
    assert sum(p.numel() for p in agg.parameters()) == 4 * D**2 + 4 * D


def test_one_layer_is_the_class_token_or_attention_over_the_last():
    layers = states()
    torch.testing.assert_close(pool("maxpoolbert(heads=0, layers=1)").read(layers).out, layers[-1][:, :1])
    agg = pool("maxpoolbert(layers=1)")
    torch.testing.assert_close(agg.read(layers).out, agg(layers[-1]).out)


def test_more_layers_give_no_less_and_a_gradient_goes_to_one():
    layers = [each.requires_grad_() for each in states()]
    less, more = (pool(f"maxpoolbert(heads=0, layers={k})").read(layers).out for k in (2, 3))
    assert (more >= less).all()
    more.sum().backward()
    grads = torch.stack([each.grad[:, 0] for each in layers[1:]])
    assert layers[0].grad is None and (grads.sum(0) == 1).all() and ((grads == 0) | (grads == 1)).all()
    tie = [torch.zeros(1, 1, D, requires_grad=True) for _ in range(3)]
    build("maxpoolbert(heads=0)", D).read(tie).out.sum().backward()
    assert [each.grad.sum().item() for each in tie] == [D, 0, 0]


def test_padding_and_the_order_of_the_others():
    layers, agg = states(), pool()
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    found = agg.read(layers, mask).out
    torch.testing.assert_close(agg.read([each[1:, :3] for each in layers]).out, found[1:])
    order = torch.tensor([0, 3, 1, 4, 2])
    torch.testing.assert_close(agg.read([each[:, order] for each in layers]).out, agg.read(layers).out)
    left = mask.flip(1)  # padding in front: the class token is the first that is none
    torch.testing.assert_close(
        agg.read([torch.cat([each[1:, 3:], each[1:, :3]], 1) for each in layers], left[1:]).out, found[1:]
    )


def test_no_query_weights_are_the_mean_of_values():
    x, agg = states()[0], pool()
    for each in (agg.q_proj.weight, agg.q_proj.bias):
        torch.nn.init.zeros_(each)
    torch.testing.assert_close(agg(x).out[:, 0], agg.o_proj(agg.v_proj(x).mean(1)))


def test_a_query_asks_in_place_of_the_class_token():
    x, agg = states()[0], pool()
    torch.testing.assert_close(agg(x, query=x[:, :1]).out, agg(x).out)
    assert agg(x, query=x[:, :3]).weights.shape == (2, 4, 3, 5)
    with pytest.raises(ValueError, match=r"query is \[2, 3, 7\]"):
        agg(x, query=x[:, :3, :7])


def test_on_bert():
    sizes = dict(vocab_size=30, hidden_size=D, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2)
    bert, agg = BertModel(BertConfig(**sizes)).eval(), build("maxpoolbert", D)
    ids, mask = torch.randint(30, (2, 6)), torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
    hidden = bert(ids, attention_mask=mask, output_hidden_states=True).hidden_states[1:]
    short = bert(ids[1:, :4], output_hidden_states=True).hidden_states[1:]
    torch.testing.assert_close(agg.read(hidden, mask.bool()).out[1:], agg.read(short).out, atol=1e-5, rtol=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match="layers=3, and 2 are given"):
        pool().read(states(2))
    for line in ("maxpoolbert(heads=3)", "maxpoolbert(layers=0)", "maxpoolbert(heads=-1)"):
        with pytest.raises(ValueError, match=r"divide|at least"):
            pool(line)
