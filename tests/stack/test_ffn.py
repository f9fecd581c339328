import pytest
import torch
from tests.stack.tiny import model
from torch import nn

from manyheads import Cache, Links
from manyheads.core.experts import Experts
from manyheads.core.part import OptionError
from manyheads.experts.swiglu import SwiGLU
from manyheads.stack import Decoder, ManyheadsConfig, Stack, make_ffn

DIM, HEADS, VOCAB = 32, 4, 61
MIXED = ["swiglu", "moe(experts=4, hidden=12)", "none", "mh_moe(heads=2, experts=4, hidden=6, top=2)"]


@pytest.mark.parametrize("name", ["gelu", "none", "swiglu"])
@pytest.mark.parametrize("hidden", [None, 10])
def test_shapes(name, hidden):
    ffn = make_ffn(name, 24, hidden)
    if name == "none":
        assert ffn is None
    else:
        assert ffn(torch.randn(2, 3, 24)).shape == (2, 3, 24)
        assert ffn.down_proj.in_features == (hidden or {"swiglu": 64, "gelu": 96}[name])


def test_swiglu_is_its_formula():
    ffn, x = SwiGLU(8, 12), torch.randn(3, 8)
    gate = x @ ffn.gate_proj.weight.T
    want = (gate * gate.sigmoid() * (x @ ffn.up_proj.weight.T)) @ ffn.down_proj.weight.T
    torch.testing.assert_close(ffn(x), want)


def test_refusals():
    with pytest.raises(OptionError, match=r"no feed-forward 'relu'; there are gelu, .*\n  relu\n  \^"):
        make_ffn("relu", 8)
    with pytest.raises(OptionError, match="hidden is at least 1, not 0"):
        make_ffn("gelu", 8, 0)
    with pytest.raises(OptionError, match="layer 1: uome: 10 channels do not cut into experts=8; hidden=8 does"):
        Stack("gqa", DIM, HEADS, 2, ffn=["swiglu", "uome(hidden=10)"])
    with pytest.raises(ValueError, match="3 feed-forwards for 2 layers"):
        Stack("gqa", DIM, HEADS, 2, ffn=["swiglu"] * 3)
    with pytest.raises(OptionError, match="layer 0: mh_moe: dim=32 is no multiple of heads=3"):
        ManyheadsConfig(ffn="mh_moe", hidden_size=DIM, num_attention_heads=4)


def test_a_line_for_each_layer():
    stack = Stack("gqa(kv_heads=2)", DIM, HEADS, 4, ffn=MIXED)
    counted = sum(p.numel() for name, p in stack.named_parameters() if ".ffn." in name)
    assert counted == stack.ffn_cost.parameters > stack.ffn_cost.active
    assert [type(block.ffn).__name__ for block in stack.blocks] == ["SwiGLU", "MoEFeed", "NoneType", "MHMoEFeed"]


def test_what_attention_and_feed_forward_share_counts_once_in_the_sum_of_their_costs():
    stack = Stack("umoe", DIM, HEADS, 2, ffn="umoe")
    norms = sum(module.weight.numel() for module in stack.modules() if isinstance(module, nn.RMSNorm))
    counted = sum(parameter.numel() for parameter in stack.parameters()) - norms
    assert (stack.cost + stack.ffn_cost).parameters == counted < stack.cost.parameters + stack.ffn_cost.parameters


def test_width_of_the_stack_is_that_of_experts_that_name_none():
    stack = Stack("gqa", DIM, HEADS, 3, ffn=["moe", "moe(hidden=8)", "swiglu"], hidden=16)
    assert [stack.blocks[i].ffn.experts.hidden for i in (0, 1)] == [16, 8]
    assert stack.blocks[2].ffn.up_proj.out_features == 16


def test_first_weights_in_a_stack():
    """Of experts as of dense maps: N(0, std²), what goes to the residual stream smaller by √2L."""
    experts = Stack("gqa", 64, HEADS, 2, ffn="moe(hidden=64)", std=0.05).blocks[0].ffn.experts
    assert experts.up_proj.std().item() == pytest.approx(0.05, rel=0.05)
    assert experts.down_proj.std().item() == pytest.approx(0.05 / 2, rel=0.05)
    stack = Stack("gqa", 64, HEADS, 2, ffn="mh_moe(heads=2, hidden=64, experts=8)", std=0.05)
    inner, merge = stack.blocks[0].ffn.experts, stack.blocks[0].ffn.merge_proj
    assert inner.down_proj.std().item() == pytest.approx(0.05, rel=0.05)
    assert merge.weight.std().item() == pytest.approx(0.05 / 2, rel=0.05)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_decoder_trains(checkpoint):
    """The loss of fixed random text falls under that of the uniform guess, and every parameter moves."""
    torch.manual_seed(0)
    net = Decoder(VOCAB, "gqa(kv_heads=2)", DIM, HEADS, 4, ffn=MIXED, checkpoint=checkpoint)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer, ids = torch.optim.AdamW(net.parameters(), lr=1e-2), torch.randint(VOCAB, (4, 17))
    losses = []
    for _ in range(40):
        links = Links()
        logits = net(ids[:, :-1], links=links)
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
        assert sorted(links.aux) == ["1.moe", "3.mh_moe"]
        optimizer.zero_grad()
        (losses[-1] + 0.01 * sum(links.aux.values())).backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]
    for name, parameter in net.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_decoding_and_padding_in_a_stack():
    torch.manual_seed(0)
    stack = Stack("gqa(kv_heads=2)", DIM, HEADS, 4, ffn=MIXED, std=0.2).double().eval()
    x, valid = torch.randn(3, 9, DIM).double(), torch.arange(9)[None] >= torch.tensor([[0], [4], [2]])
    full, cache = stack(x, mask=valid), Cache()
    place = (valid.long().cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        cuts = [slice(at, at + 2) for at in range(0, 9, 2)]
        steps = [stack(x[:, cut], mask=valid[:, cut], positions=place[:, cut], cache=cache) for cut in cuts]
    torch.testing.assert_close(torch.cat(steps, 1)[valid], full[valid], atol=1e-9, rtol=1e-9)
    for row, first in enumerate((0, 4, 2)):
        torch.testing.assert_close(stack(x[row : row + 1, first:])[0], full[row, first:], atol=1e-9, rtol=1e-9)
    links, other = Links(), Links()
    stack.train()(x, mask=valid, links=links)
    stack(torch.where(valid[..., None], x, 9.0), mask=valid, links=other)
    for name, loss in links.aux.items():
        torch.testing.assert_close(other.aux[name], loss)


def test_loops():
    """Each turn of a block has a loss of its own; parameters count once, work as often as they run."""
    stack = Stack("gqa", DIM, HEADS, 2, ffn=["moe(experts=4, hidden=8)", "swiglu"], loops=2).train()
    once, links = Stack("gqa", DIM, HEADS, 2, ffn=["moe(experts=4, hidden=8)", "swiglu"]).ffn_cost, Links()
    stack(torch.randn(1, 5, DIM), links=links)
    assert sorted(links.aux) == ["0.moe", "2.moe"]
    assert stack.ffn_cost.token_flops == 2 * once.token_flops
    assert (stack.ffn_cost.parameters, stack.ffn_cost.active) == (once.parameters, once.active)


def test_a_model_saves_loads_and_generates(tmp_path):
    net = model({"specs": "gqa(kv_heads=2)", "ffn": MIXED})
    assert any(isinstance(module, Experts) for module in net.modules())
    net.save_pretrained(tmp_path)
    other = type(net).from_pretrained(tmp_path).eval()
    ids = torch.randint(3, VOCAB, (2, 7))
    assert other.config.ffn == net.config.ffn == [str(line) for line in net.model.decoder.stack.ffns]
    assert torch.equal(other(ids).logits, net(ids).logits)
    assert other.generate(ids, max_new_tokens=4, do_sample=False).shape == (2, 11)
    loss = net.train()(ids, labels=ids).loss
    plain = net.eval()(ids, labels=ids).loss
    assert loss > plain  # the auxiliary losses are in it
    assert model({"specs": "gqa"}, ffn="moe(2)").config.ffn == "moe(experts=2)"
