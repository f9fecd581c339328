"""One latent for several layers, cached in four bits (arXiv 2410.15252)."""

import copy
import math

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, heads_of, join, make, rope, twin
from tests.oracles.reference import weights as softmax
from tests.oracles.stacks import hold_to_the_laws, make_stack
from tests.stack.tiny import batch as prompts
from tests.stack.tiny import greedy, model
from transformers import AutoModelForCausalLM, DynamicCache

from manyheads import Cache, Links, Spec
from manyheads.convert.export import ExportError, refuse
from manyheads.core.part import OptionError, Site
from manyheads.stack import ManyheadsConfig, Stack
from manyheads.stack.handover import Handover
from manyheads.testing import check
from manyheads.testing.conformance import LAWS, single_precision

SIZES = "rank=8, rope_dim=4"
OPTIONS = ["", ", block=4", ", bits=8, rope_bits=16", ", bits=2, rope_bits=4"]
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6.*:FutureWarning")


def rounded(c, bits):
    """The quantiser written out, a row a scale."""
    top = 2 ** (bits - 1) - 1
    s = (c.abs().amax(-1, keepdim=True) / top).bfloat16().double()
    return (c / s).round().clamp(-top, top) * s


def test_it_is_mla_with_packed_rows():
    assert Spec.parse("clla").parts == Spec.parse("mla(bits=4)").parts
    layer, x = make(f"clla({SIZES}, bits=0)"), batch()
    close(layer(x), twin(layer, f"mla({SIZES})")(x))
    differ(twin(layer, f"clla({SIZES})")(x), layer(x))
    fine = twin(layer, f"clla({SIZES}, bits=8)")(x)
    assert (fine - layer(x)).abs().max() < 0.1 * (twin(layer, f"clla({SIZES}, bits=4)")(x) - layer(x)).abs().max()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_written_out(bits):
    layer, x = make(f"clla({SIZES}, nope_dim=6, bits={bits}, rope_bits=8)"), batch()
    p = layer.project
    c, turned = p.kv_a_proj(x).split([8, 4], -1)
    c = c / (c.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * p.kv_a_norm.weight
    up = heads_of(p.kv_b_proj(rounded(c, bits)), HEADS)
    turned = rounded(rope(turned[:, None]), 8).expand(-1, HEADS, -1, -1)
    q = heads_of(p.q_proj(x), HEADS)
    q = torch.cat([q[..., :6], rope(q[..., 6:])], -1)
    o = softmax(q, torch.cat([up[..., :6], turned], -1), 10**-0.5) @ up[..., 6:]
    close(layer(x), join(o, p.o_proj))
    for block in (1, 4):
        close(decoded(layer, x, block), layer(x))


@pytest.mark.parametrize("options", OPTIONS)
def test_the_laws_of_a_layer(options):
    """In float32 a rounding may fall to the other side, so that law is not for codes."""
    check(f"clla({SIZES}{options})", laws=[law for law in LAWS if law is not single_precision])


@pytest.mark.parametrize("sources", ["cla(2)", "cla(3)", [None, None, 0, 1]])
def test_the_laws_of_a_stack(sources):
    hold_to_the_laws(f"clla({SIZES}, block=4)", 4, kv_source=sources)


def test_views_agree():
    expanded = make(f"mla({SIZES}, bits=4, view=expanded)")
    x = batch()
    close(twin(expanded, f"mla({SIZES}, bits=4, view=absorbed)")(x), expanded(x))


@pytest.mark.parametrize(("layers", "factor"), [(4, 2), (5, 2), (5, 3)])
@pytest.mark.parametrize(("bits", "rope_bits", "block"), [(4, 8, 8), (4, 4, 4), (8, 16, 2), (2, 8, 8)])
def test_bytes_are_those_of_the_formula(layers, factor, bits, rope_bits, block):
    line = f"clla({SIZES}, bits={bits}, rope_bits={rope_bits}, block={block})"
    stack, cache, tokens = make_stack(line, layers, kv_source=f"cla({factor})"), Cache(), 7
    with torch.no_grad():
        stack(batch(tokens), cache=cache)
    scales = 2 * 8 // block + (0 if rope_bits == 16 else 2)
    token = math.ceil(layers / factor) * (bits * 8 // 8 + rope_bits * 4 // 8 + scales)
    assert cache.bytes() == 2 * tokens * token == 2 * stack.cost.cache_bytes(tokens, 8)
    assert stack.cost.token_bytes() == token == stack.cost.token_bytes(2)
    assert sum(bool(store.growing) for store in cache.layers) == math.ceil(layers / factor)
    assert stack.cost.cache_floats == 12 * math.ceil(layers / factor)


def test_windows_count_too():
    layer, cache = make(f"clla({SIZES}) + window(3)"), Cache()
    with torch.no_grad():
        layer(batch(), cache=cache)
        layer(batch(1), cache=cache)
    cost = layer.spec.cost(DIM, HEADS, layer.site)
    assert cache.bytes() == 2 * cost.cache_bytes(10, 8) == 2 * cost.cache_bytes(10, 2) == 2 * 2 * (4 + 2 + 4 + 2)


def test_below_two_percent():
    """512 + 64 numbers for two layers of 2 · 2048 (16 bits)."""
    with torch.device("meta"):
        both = Stack("clla(rank=512, rope_dim=64)", 2048, 16, 2, kv_source="cla(2)").cost.token_bytes()
        fine = Stack("clla(rank=512, rope_dim=64, rope_bits=4, block=64)", 2048, 16, 2, kv_source="cla(2)")
    whole = 2 * 2 * 2048 * 2
    assert both / whole == pytest.approx(0.0197, abs=1e-4)
    assert fine.cost.token_bytes() / whole == pytest.approx(0.0186, abs=1e-4)


def test_latents_that_hold_keys_and_values_are_shared_heads():
    """W_UK and W_UV that pick channels, no norm and no rotation: the keys and values of layers in groups."""
    plain = make_stack("gqa + rope(none)", 4, kv_source="cla(2)")
    latent = make_stack("mla(rank=48, rope_dim=0, norm=false)", 4, kv_source="cla(2)")
    width, pick = DIM // HEADS, torch.eye(2 * DIM, dtype=torch.float64)
    up = torch.cat([pick[:DIM].unflatten(0, (HEADS, width)), pick[DIM:].unflatten(0, (HEADS, width))], 1).flatten(0, 1)
    state = {name: tensor for name, tensor in plain.state_dict().items() if name in latent.state_dict()}
    for number, layer in enumerate(plain.attentions):
        name = f"blocks.{number}.attention.project."
        state[f"{name}kv_b_proj.weight"] = up
        if layer.site.kv_source is None:
            rows = layer.project.k_proj.weight, layer.project.v_proj.weight
            state[f"{name}kv_a_proj.weight"] = torch.cat(rows)
    latent.load_state_dict(state)
    x = batch()
    close(latent(x), plain(x))


def test_the_gradient_of_a_latent_is_that_of_all_its_readers():
    owner, reader = (
        make(f"clla({SIZES})", site=Site(0, 2)),
        make(f"clla({SIZES})", seed=1, site=Site(1, 2, kv_source=0)),
    )
    other, x = copy.deepcopy(owner), batch()

    def run(links, written):
        y = owner(x, links=links)
        return (x + y + reader(x + y, links=written)).pow(2).sum()

    links = Links()
    (tied,) = torch.autograd.grad(run(links, links), owner.project.kv_a_proj.weight)
    written = Links()
    other(x, links=written)
    weights = owner.project.kv_a_proj.weight, other.project.kv_a_proj.weight
    own, read = torch.autograd.grad(run(Links(), written), weights)
    close(own + read, tied, 1e-9)
    assert read.abs().max() > 1e-3


def test_in_a_model(tmp_path):
    of, inputs = model({"specs": "clla(rank=12, rope_dim=4)", "kv_source": "cla(2)"}), prompts()
    of.save_pretrained(tmp_path)
    again, said = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    assert again.config.kv_source == [None, 0, None, 2] and again.config.specs[0].startswith("clla")
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, of(**inputs).logits)
    double = again.double()
    assert torch.equal(greedy(double, inputs), greedy(double, inputs, use_cache=False))
    assert torch.equal(greedy(double, inputs), greedy(double, inputs, num_beams=1))
    half, cache = copy.deepcopy(of).bfloat16(), Cache()
    half(**inputs, past_key_values=cache)
    assert cache.bytes() == 3 * 12 * 2 * (6 + 2 + 4 + 2)
    with pytest.raises(ValueError, match=r"'latent' .12 in 4 bits and 4 in 8 bits. does not fit a DynamicCache"):
        of(**inputs, past_key_values=DynamicCache())
    again.float().train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in again.parameters())


@pytest.mark.slow
def test_it_compiles():
    stack = make_stack(f"clla({SIZES})", 2, kv_source="cla(2)")
    x = batch()
    close(torch.compile(stack)(x), stack(x), 1e-9)


def test_refusals():
    for line, said in (
        ("clla(bits=3)", "mla: rows of 3 bits a number; they may have 2, 4, 8 or 16"),
        ("clla(rank=8, block=3)", "mla: blocks of 3 do not divide 8 channels"),
    ):
        with pytest.raises(OptionError, match=said):
            make(line)
    specs = [f"clla({SIZES})", f"clla({SIZES}, bits=8)"]
    with pytest.raises(ValueError, match=r"layer 1 cannot read .* it reads 'latent' .1 x 12, 8 in 8 bits and 4 in 8"):
        Stack(specs, DIM, HEADS, kv_source=[None, 0])
    of = model({"specs": "clla(rank=12, rope_dim=4)"}, "llama")
    with pytest.raises(ValueError, match=r"no rows go from layer 0 .* packs its rows"):
        Handover(of, of)
    with pytest.raises(ExportError, match="layer 0: caches 'latent' as 12 in 4 bits and 4 in 8 bits; the stock class"):
        refuse.check(of, torch.float32)
    with pytest.raises(ValueError, match="layer 2 cannot read the rows of layer 1: layer 1 has none"):
        ManyheadsConfig(specs="clla", num_hidden_layers=3, kv_source=[None, 0, 1])
