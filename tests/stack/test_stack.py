import copy

import pytest
import torch
from tests.stack.tiny import MERGES, ZOO

from manyheads import Cache, Links
from manyheads.core.mask import Axis
from manyheads.stack import Stack
from manyheads.stack.initialise import initialise

DIM, HEADS = 32, 4


def build(case, **options):
    torch.manual_seed(0)
    case = ZOO[case] if isinstance(case, str) else case
    stack = Stack(**case, dim=DIM, heads=HEADS, layers=4, std=0.2, **options).double().eval()
    assert all(p.requires_grad for p in stack.parameters())
    return stack


def inputs(padding=(0, 4, 2), tokens=11):
    x = torch.randn(len(padding), tokens, DIM, dtype=torch.float64)
    return x, torch.arange(tokens)[None] >= torch.tensor(padding)[:, None]


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("case", ZOO)
def test_cached_equals_full(case, block):
    stack, (x, valid) = build(case), inputs()
    full, cache, outs = stack(x, mask=valid), Cache(), []
    with torch.no_grad():
        for first in range(0, x.shape[1], block):
            cut = slice(first, first + block)
            outs.append(stack(x[:, cut], mask=valid[:, cut], cache=cache))
    torch.testing.assert_close(torch.cat(outs, 1)[valid], full[valid], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("case", ZOO)
def test_padding_changes_nothing(case):
    stack, (x, valid) = build(case), inputs()
    full = stack(x, mask=valid)
    for row, keep in enumerate(valid):
        torch.testing.assert_close(full[row, keep], stack(x[row : row + 1, keep])[0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("case", ZOO)
def test_cache_bytes_equal_the_arithmetic(case):
    stack, (x, _) = build(case).float(), inputs((0,), 12)
    cache = Cache()
    with torch.no_grad():
        stack(x.float(), cache=cache)
    assert cache.bytes() == stack.cost.cache_bytes(12)
    for layer, source in enumerate(stack.kv_source):
        assert source is None or not cache.site(layer).growing, f"layer {layer} writes rows of its own"


def test_sharing_halves_the_cache():
    alone, shared = build("gqa"), build("shared")
    assert 2 * shared.cost.cache_floats == alone.cost.cache_floats == 4 * 2 * 2 * 8


def test_readers_own_no_weights_for_rows():
    names = [name for name, _ in build("shared").named_parameters()]
    assert [n for n in names if "k_proj" in n or "v_proj" in n] == [
        f"blocks.{layer}.attention.project.{row}_proj.weight" for layer in (0, 2) for row in "kv"
    ]
    latent = build({"specs": "mla(rank=12, rope_dim=4)", "kv_source": [None, 0, 0, 0]})
    assert sum("kv_a_proj" in name for name, _ in latent.named_parameters()) == 1


def test_gradients_of_readers_reach_the_owner():
    stack, (x, _) = build("shared"), inputs()
    stack.blocks[0].attention.project.o_proj.weight.data.zero_()  # the owner's own reading says nothing
    stack(x).pow(2).sum().backward()
    for row in "kv":
        weight = getattr(stack.blocks[0].attention.project, f"{row}_proj").weight
        assert weight.grad.abs().max() > 1e-6


@pytest.mark.parametrize("case", ["gqa", "shared", "shared-mtla", "mla+moh", "mixed"])
def test_checkpointing_changes_nothing(case):
    stack, (x, valid) = build(case).train(), inputs()
    again = copy.deepcopy(stack)
    again.checkpoint()
    calls = []
    again.blocks[0].attention.register_forward_hook(lambda *_: calls.append(1))
    results = []
    for each in (stack, again):
        links = Links()
        y = each(x, mask=valid, links=links)
        loss = y[valid].pow(2).mean() + sum(links.aux.values())
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in each.named_parameters()}))
    assert len(calls) == 2
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-6)


def test_one_axis_a_pass(monkeypatch):
    made = []
    monkeypatch.setattr("manyheads.attention.position.rope.angles", _counting(made))
    stack, (x, _) = build("gqa"), inputs()
    stack(x)
    assert len(made) == 1
    stack(x, positions=Axis(11, 5))
    assert len(made) == 2


def _counting(made):
    from manyheads.core.position import angles

    def count(*args, **kwargs):
        made.append(args)
        return angles(*args, **kwargs)

    return count


def test_rows_are_kept_for_readers_only():
    links, (x, _) = Links(), inputs()
    build("shared")(x, links=links)
    assert set(links.rows) == {0, 2}
    links = Links()
    build("gqa")(x, links=links)
    assert not links.rows


def test_aux_losses_come_by_layer():
    links, (x, _) = Links(), inputs()
    build("mla+moh").train()(x, links=links)
    assert set(links.aux) == {f"{layer}.moh" for layer in range(4)}


@pytest.mark.parametrize("case", [case for case in ZOO if case not in MERGES])
def test_rollback(case):
    stack, (x, _) = build(case), inputs()
    cache = Cache()
    with torch.no_grad():
        stack(x[:, :6], cache=cache)
        stack(x[:, :3].flip(0), cache=cache)
        cache.rollback(3)
        late = stack(x[:, 6:], cache=cache)
    torch.testing.assert_close(late, stack(x)[:, 6:], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("ffn", ["swiglu", "gelu", "none"])
def test_feed_forwards(ffn):
    stack, (x, _) = build("gqa", ffn=ffn), inputs()
    assert stack(x).shape == x.shape
    assert any("ffn" in name for name, _ in stack.named_parameters()) == (ffn != "none")


@pytest.mark.parametrize("spec", [True, "gqa(kv_heads=1)", "mla(rank=12, rope_dim=0)"])
def test_cross_attention(spec):
    stack, (x, valid) = build("shared", cross=spec, context_dim=20), inputs()
    context = torch.randn(3, 7, 20, dtype=torch.float64)
    seen = torch.arange(7)[None] < torch.tensor([7, 3, 5])[:, None]
    full, cache = stack(x, mask=valid, context=context, context_mask=seen), Cache()
    with torch.no_grad():
        parts = [
            stack(x[:, cut], mask=valid[:, cut], context=context, context_mask=seen, cache=cache)
            for cut in (slice(0, 6), slice(6, 7), slice(7, None))
        ]
    torch.testing.assert_close(torch.cat(parts, 1)[valid], full[valid], atol=1e-9, rtol=1e-9)
    alone = stack(x[1:2, 4:], context=context[1:2, :3])
    torch.testing.assert_close(full[1:2, 4:], alone, atol=1e-9, rtol=1e-9)
    with pytest.raises(ValueError, match="needs a context"):
        stack(x)
    with pytest.raises(ValueError, match="takes no context"):
        build("gqa")(x, context=context)


def test_first_weights():
    stack = Stack("gqa(bias=qkvo) + kha + talking_heads", 128, 4, 8)
    weights = dict(stack.named_parameters())
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
        elif name.endswith("proj.weight"):
            assert weight.std().item() == pytest.approx(0.02, rel=0.1)
        elif name.endswith("bias"):
            assert not weight.any()
    for name in ("transforms.0.q", "transforms.0.v", "attends.0.logits"):
        each = weights[f"blocks.3.attention.{name}"]
        assert torch.equal(each, torch.eye(len(each)))


def test_what_a_part_starts_at_zero_or_identity_stays():
    root = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False))
    torch.nn.init.zeros_(root[0].weight)
    torch.nn.init.eye_(root[1].weight)
    before = root[2].weight.clone()
    initialise(root, 1)
    assert not root[0].weight.any() and torch.equal(root[1].weight, torch.eye(4))
    assert not torch.equal(root[2].weight, before)


def test_seeds():
    one, two = (build("mixed") for _ in range(2))
    torch.testing.assert_close(dict(one.named_parameters()), dict(two.named_parameters()), atol=0, rtol=0)


def test_schedules_reach_every_part(monkeypatch):
    heard = []
    stack = build("mixed")
    for layer in stack.attentions:
        monkeypatch.setattr(layer, "on_step", heard.append)
    stack.on_step(0.5)
    assert heard == [0.5] * 4
