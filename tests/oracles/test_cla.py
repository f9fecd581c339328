"""Oracles of sharing keys and values across layers: `cla`, `mlkv`, and the latent form `clla` without quantisation."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, differ, heads_of, join, rope, weights
from tests.oracles.stacks import decoded, hold_to_the_laws, make_stack

from manyheads import Cache
from manyheads.stack import Stack
from manyheads.stack.maps import sources_of

WIDTH = DIM // HEADS


def written_out(stack, x, owners):
    """Each layer over the keys and values that its owner makes of the owner's own input."""
    groups, inputs, rows = stack.attentions[0].layout.kv, [], []
    for layer, block in enumerate(stack.blocks):
        n, p = block.attention_norm(x), block.attention.project
        inputs.append(n)
        if owners[layer] == layer:
            rows.append((rope(heads_of(p.k_proj(n), groups)), heads_of(p.v_proj(n), groups)))
        else:
            rows.append(None)
        k, v = (t.repeat_interleave(HEADS // groups, 1) for t in rows[owners[layer]])
        x = x + join(weights(rope(heads_of(p.q_proj(n), HEADS)), k, WIDTH**-0.5) @ v, p.o_proj)
    return x


def owners_of(line, layers):
    return [layer if source is None else source for layer, source in enumerate(sources_of(line, layers))]


@pytest.mark.parametrize("line", ["cla(2)", "cla(3)", "mlkv(2)", "mlkv(1)", "yoco(2)", "owners([0, 3])"])
def test_written_out(line):
    stack, x = make_stack("gqa(kv_heads=2)", 5, kv_source=line), batch()
    close(stack(x), written_out(stack, x, owners_of(line, 5)))


@pytest.mark.parametrize("line", ["cla(1)", "mlkv(4)"])
def test_nothing_shared_is_the_plain_stack_bit_for_bit(line):
    plain, shared, x = make_stack("gqa(kv_heads=2)", 4), make_stack("gqa(kv_heads=2)", 4, kv_source=line), batch()
    assert torch.equal(plain(x), shared(x))


@pytest.mark.parametrize("line", ["cla(2)", "cla(3)", "mlkv(2)"])
def test_laws(line):
    hold_to_the_laws("gqa(kv_heads=2)", 5, kv_source=line)


def test_gradient_of_an_owner_sums_over_the_copies_of_an_unrolled_stack():
    """A reader as a layer of its own, with the owner's weights, on the owner's input."""
    stack, x = make_stack("gqa(kv_heads=2)", 2, kv_source="cla(2)"), batch()
    stack(x).pow(2).sum().backward()
    p = stack.attentions[0].project
    copies = [[w.detach().clone().requires_grad_() for w in (p.k_proj.weight, p.v_proj.weight)] for _ in range(2)]
    n = stack.blocks[0].attention_norm(x).detach()
    y = x
    for block, (w_k, w_v) in zip(stack.blocks, copies, strict=True):
        own = block.attention.project
        k, v = rope(heads_of(n @ w_k.T, 2)).repeat_interleave(2, 1), heads_of(n @ w_v.T, 2).repeat_interleave(2, 1)
        q = rope(heads_of(own.q_proj(block.attention_norm(y)), HEADS))
        y = y + join(weights(q, k, WIDTH**-0.5) @ v, own.o_proj)
    y.pow(2).sum().backward()
    for name, index in (("k_proj", 0), ("v_proj", 1)):
        close(getattr(p, name).weight.grad, copies[0][index].grad + copies[1][index].grad, 1e-9)


@pytest.mark.parametrize("factor, size", [(1, 10240), (2, 5120), (3, 3584), (4, 2560)])
def test_published_bytes_a_token(factor, size):
    """20 layers of one key head of width 128, 16 bit."""
    stack = Stack("gqa(kv_heads=1, head_dim=128)", 128, 1, 20, ffn="none", kv_source=f"cla({factor})")
    assert stack.cost.cache_floats * 2 == size
    cache = Cache()
    with torch.no_grad():
        stack.bfloat16()(torch.randn(1, 3, 128, dtype=torch.bfloat16), cache=cache)
    assert cache.bytes() == 3 * size
    assert sum(bool(cache.site(layer).growing) for layer in range(20)) == -(-20 // factor)


@pytest.mark.parametrize("line, gone", [("cla(2)", 2), ("cla(3)", 3), ("mlkv(1)", 4)])
def test_parameters(line, gone):
    plain, shared = (Stack("gqa(kv_heads=2)", DIM, HEADS, 5, ffn="none", kv_source=m) for m in (None, line))
    count = [sum(p.numel() for p in stack.parameters()) for stack in (plain, shared)]
    assert count[0] - count[1] == gone * 2 * DIM * 2 * WIDTH
    assert not [n for n in shared.state_dict() if "k_proj" in n and shared.kv_source[int(n.split(".")[1])] is not None]


def test_mlkv_scales_the_cache_by_its_heads():
    """Pythia-160M's shape: 12 layers, 12 heads of 64; 144, 48, … 1 heads in all."""
    with torch.device("meta"):
        for kv_layers, kv_heads in ((12, 12), (4, 12), (12, 1), (6, 1), (2, 1), (1, 1)):
            stack = Stack(f"gqa(kv_heads={kv_heads})", 768, 12, 12, ffn="none", kv_source=f"mlkv({kv_layers})")
            assert stack.cost.cache_floats == 2 * 64 * kv_layers * kv_heads


# --- clla: one latent serves several layers


def test_latent_sharing_is_key_sharing_when_the_latent_holds_all_heads():
    """Rank 2·H·d, no norm, no rotation, selecting up-projections: the same as sharing keys and values."""
    latent = make_stack(f"mla(rank={2 * DIM}, rope_dim=0, norm=false)", 4, kv_source="cla(2)")
    plain = make_stack("gqa + rope(none)", 4, kv_source="cla(2)")
    state = {}
    for name, value in plain.state_dict().items():
        if "k_proj" in name:
            values = plain.state_dict()[name.replace("k_proj", "v_proj")]
            state[name.replace("k_proj", "kv_a_proj")] = torch.cat([value, values])
        elif "v_proj" not in name:
            state[name] = value
    for layer in range(4):
        up = torch.zeros(HEADS, 2, WIDTH, 2, HEADS, WIDTH, dtype=torch.float64)
        for head in range(HEADS):
            for which in range(2):
                up[head, which, :, which, head] = torch.eye(WIDTH)
        state[f"blocks.{layer}.attention.project.kv_b_proj.weight"] = up.reshape(2 * DIM, 2 * DIM)
    latent.load_state_dict(state)
    x = batch()
    close(latent(x), plain(x))
    close(decoded(latent, x, 1), plain(x), 1e-9)  # absorbed


@pytest.mark.parametrize("line", ["cla(2)", "owners([0])"])
def test_shared_latents(line):
    hold_to_the_laws("mla(rank=9, rope_dim=4)", 4, kv_source=line)
    stack, cache = make_stack("mla(rank=9, rope_dim=4)", 4, kv_source=line), Cache()
    with torch.no_grad():
        stack(batch(5, size=1), cache=cache)
    assert cache.bytes() == 5 * 8 * (9 + 4) * stack.kv_source.count(None)
    names = [name for name, _ in stack.named_parameters()]
    assert sum("kv_a_proj" in name for name in names) == stack.kv_source.count(None)
    assert sum("kv_b_proj" in name for name in names) == 4, "every layer has up-projections of its own"


def test_published_share_of_the_cache():
    """Latents of 512 and rotary keys of 64 beside 2048 numbers for keys and values each."""
    with torch.device("meta"):
        base = Stack("gqa", 2048, 16, 2, ffn="none").cost.cache_floats
        for factor, share in ((1, 0.1406), (2, 0.0703)):
            stack = Stack("mla(rank=512, rope_dim=64)", 2048, 16, 2, ffn="none", kv_source=f"cla({factor})")
            assert float(stack.cost.cache_floats / base) == pytest.approx(share, abs=1e-4)


def test_reading_another_layer_is_another_function():
    plain, shared, x = make_stack("gqa", 2), make_stack("gqa", 2, kv_source="cla(2)"), batch()
    shared.load_state_dict({name: value for name, value in plain.state_dict().items() if name in shared.state_dict()})
    differ(plain(x), shared(x))
