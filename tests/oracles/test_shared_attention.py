"""Oracles of layers that take their attention weights from another: `shared-attention` and `echoatt`."""

import copy

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, heads_of, join, rope, weights
from tests.oracles.stacks import decoded, hold_to_the_laws, make_stack
from torch import nn

from manyheads import Cache, Links
from manyheads.core.kernel import using

WIDTH = DIM // HEADS
SPAN = "shared-attention([2, 3])"


def written_out(stack, x, sources, groups=2):
    """With the carried weights in memory."""
    maps = {}
    for layer, block in enumerate(stack.blocks):
        n, p = block.attention_norm(x), block.attention.project
        if sources[layer] is None:
            k = rope(heads_of(p.k_proj(n), groups)).repeat_interleave(HEADS // groups, 1)
            maps[layer] = weights(rope(heads_of(p.q_proj(n), HEADS)), k, WIDTH**-0.5)
        a = maps[layer if sources[layer] is None else sources[layer]]
        close(a.sum(-1), torch.ones_like(a[..., 0]))
        assert not a.triu(1).any()
        x = x + join(a @ heads_of(p.v_proj(n), groups).repeat_interleave(HEADS // groups, 1), p.o_proj)
    return x


def same_gradients(a, b):
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert p.grad.abs().sum() > 0, name
        close(p.grad, q.grad, 1e-9)


def test_written_out_and_gradients():
    stack, x = make_stack("gqa(kv_heads=2)", 5, attn_source=SPAN), batch()
    again = copy.deepcopy(stack)
    y, want = stack(x), written_out(again, x, [None, None, 1, 1, None])
    close(y, want)
    for each in (y, want):
        each.pow(2).sum().backward()
    same_gradients(stack, again)


@pytest.mark.parametrize("kernel", ["sdpa", "tiled", "flash_cpu"])
def test_kernels(kernel):
    stack, x = make_stack("gqa(kv_heads=2)", 4, attn_source=SPAN), batch()
    want = stack(x)
    with using(kernel):
        close(stack(x), want, 1e-9)


@pytest.mark.parametrize(
    "spec",
    [
        "gqa(kv_heads=2) + qk-norm",
        "gqa(kv_heads=1) + window(3) + moh(top=2)",
        "gqa + alibi + talking_heads",
        "gqa(kv_heads=2, v_dim=5, bias=qkvo) + differential + head_norm",
    ],
)
def test_laws(spec):
    stack = make_stack(spec, 4, attn_source=SPAN)
    assert len(stack.attentions[2].attends) == len(stack.attentions[2].selects) == 0
    if "moh" not in spec:  # whose routing is not differentiable at every weight
        hold_to_the_laws(spec, 4, attn_source=SPAN)
    x = batch()
    for block in (1, 4):
        close(decoded(stack, x, block), stack(x), 1e-9)


def test_nothing_taken_is_the_plain_stack():
    x = batch()
    for line in ("echoatt(0)", "shared-attention([])"):
        assert torch.equal(make_stack("gqa", 4, attn_source=line)(x), make_stack("gqa", 4)(x))


def test_equal_queries_keys_and_inputs_make_it_a_no_op():
    plain, shared, x = (
        make_stack("gqa(kv_heads=2)", 2),
        make_stack("gqa(kv_heads=2)", 2, attn_source=[None, 0]),
        batch(),
    )
    with torch.no_grad():
        first, second = plain.attentions
        first.project.o_proj.weight.zero_()  # so that the second layer sees what the first saw
        plain.blocks[1].attention_norm.load_state_dict(plain.blocks[0].attention_norm.state_dict())
        for name in ("q_proj", "k_proj"):
            getattr(second.project, name).load_state_dict(getattr(first.project, name).state_dict())
    shared.load_state_dict({name: value for name, value in plain.state_dict().items() if name in shared.state_dict()})
    close(shared(x), plain(x))


def test_a_taker_is_linear_in_its_values():
    stack, x, links = make_stack("gqa(kv_heads=2)", 2, attn_source=[None, 0]), batch(), Links()
    stack(x, links=links)
    a, b = torch.randn(2, 2, 2, x.shape[1], WIDTH, dtype=torch.float64)
    close(links.weigh[0](a - 3 * b), links.weigh[0](a) - 3 * links.weigh[0](b))
    assert set(links.weigh) == {0}


def test_layers_up_to_the_leader_are_untouched():
    plain, shared, x = make_stack("gqa", 4), make_stack("gqa", 4, attn_source=SPAN), batch()
    state = {name: value for name, value in plain.state_dict().items() if name in shared.state_dict()}
    shared.load_state_dict(state)
    seen = {}
    for name, stack in (("plain", plain), ("shared", shared)):
        stack.blocks[2].register_forward_pre_hook(lambda module, args, name=name: seen.update({name: args[0]}))
        stack(x)
    assert torch.equal(seen["plain"], seen["shared"])


def test_parameters_and_cache():
    plain, shared = make_stack("gqa(kv_heads=2)", 5), make_stack("gqa(kv_heads=2)", 5, attn_source=SPAN)
    count = [sum(p.numel() for p in stack.parameters()) for stack in (plain, shared)]
    assert count[0] - count[1] == 2 * (DIM * HEADS * WIDTH + DIM * 2 * WIDTH)
    assert count[1] == shared.cost.parameters + sum(p.numel() for n, p in shared.named_parameters() if "norm" in n)
    assert not [n for n in shared.state_dict() if n.startswith("blocks.2") and ("q_proj" in n or "k_proj" in n)]
    cache = Cache()
    with torch.no_grad():
        shared(batch(7, size=1), cache=cache)
    assert cache.bytes() == 7 * 8 * 2 * WIDTH * (2 * 5 - 2) == shared.cost.cache_bytes(7, 8)
    assert set(cache.site(2).growing) == {"v"} and cache.length(2) == 7


def test_beams_reorder_values():
    stack, x, cache = make_stack("gqa(kv_heads=2)", 4, attn_source=SPAN), batch(6, size=3), Cache()
    order = torch.tensor([2, 0, 0])
    with torch.no_grad():
        stack(x[:, :5], cache=cache)
        cache.reorder(order)
        late = stack(x[:, 5:], cache=cache)
    mixed = torch.cat([x[order, :5], x[:, 5:]], 1)
    close(late, stack(mixed)[:, 5:], 1e-9)


def test_published_size_of_a_follower():
    """TinyLlama: 4.72 million fewer parameters for each layer that takes its weights."""
    from manyheads.core.part import Site
    from manyheads.core.spec import Spec

    spec = Spec.parse("gqa(kv_heads=4)")
    own, taken = (spec.cost(2048, 32, site) for site in (Site(1, 2), Site(1, 2, attn_source=0)))
    assert own.parameters - taken.parameters == 2048 * 2048 + 2048 * 4 * 64 == 4_718_592
    assert taken.cache_floats * 2 == own.cache_floats


@pytest.mark.slow
def test_compiled():
    stack, x = make_stack("gqa(kv_heads=2)", 4, attn_source=SPAN).float(), batch().float()
    again = torch.compile(copy.deepcopy(stack), fullgraph=True)
    y, want = again(x), stack(x)
    close(y, want, 1e-5)
    y.pow(2).sum().backward(), want.pow(2).sum().backward()
    for p, q in zip(again.parameters(), stack.parameters(), strict=True):
        close(p.grad, q.grad, 1e-3)


def test_training_moves_the_leader():
    stack, x = make_stack("gqa", 3, attn_source="echoatt(1)", seed=1), batch()
    stack.attentions[0].project.o_proj.weight.data.zero_()
    optimiser = torch.optim.Adam(stack.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(stack(x), x.flip(-1))
        optimiser.zero_grad(), loss.backward(), optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
