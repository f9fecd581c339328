"""Oracles of multi-head attention residuals: reading over depth, by subspace, and its form for trained models."""

import copy

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, close, differ
from tests.oracles.stacks import decoded, hold_to_the_laws, make_stack
from tests.stack.tiny import batch as prompts
from tests.stack.tiny import greedy, model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from manyheads import OptionError, SpecError
from manyheads.stack import Decoder, Encoder, ManyheadsConfig, Stack, to_delta
from manyheads.stack.residual import MHAR, Delta, Plain, Route, Routed, Source, read_residual

EPS = 1e-6
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6.*:FutureWarning")


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def route(heads=4, dim=DIM, dtype=torch.float64):
    made = Route(dim, heads).to(dtype)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def sources(values):
    return [Source.of(value, EPS) for value in values]


def rms_norm(x):
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()


def written_out(by, values):
    """Stacked, normalised, softmaxed: `[N, B, T, D]` to `[B, T, D]`."""
    s = torch.stack(torch.broadcast_tensors(*values))
    keys = (rms_norm(s) * by.gain).unflatten(-1, (by.heads, -1))
    logits = torch.einsum("nbthe,he->nbth", keys, by.query.unflatten(0, (by.heads, -1)))
    return torch.einsum("nbth,nbthe->bthe", logits.softmax(0), s.unflatten(-1, (by.heads, -1))).flatten(2)


# one route


@pytest.mark.parametrize("heads", [1, 2, 8, DIM])
def test_a_route_written_out(heads):
    by, values = route(heads), draw(5, 2, 3, DIM)
    close(by(sources(values)), written_out(by, values))


def test_one_subspace_is_attention_residuals():
    by, values = route(1), draw(4, 2, 3, DIM)
    logits = (rms_norm(values) * by.gain) @ by.query
    close(by(sources(values)), (logits.softmax(0)[..., None] * values).sum(0))


def test_subspaces_are_a_reshape():
    one, many, values = route(1), Route(DIM, 6).double(), draw(4, 2, 3, DIM)
    many.load_state_dict(one.state_dict())
    differ(many(sources(values)), one(sources(values)))
    with torch.no_grad():
        many.query.zero_(), one.query.zero_()
    close(many(sources(values)), one(sources(values)))


def test_means_copies_and_one_source():
    by, values = route(), draw(5, 2, 3, DIM)
    assert torch.equal(by(sources(values[:1])), values[0])
    close(by(sources([values[0]] * 3)), values[0])
    fresh = Route(DIM, 4).double()
    close(fresh(sources(values)), values.mean(0))
    close(5 * fresh(sources(values)), values.sum(0))  # the plain residual, but for the norm


def test_a_slice_reads_its_own_slice_and_the_rms():
    by, values = route(4), draw(5, 2, 3, DIM)
    before, width = by(sources(values)), DIM // 4
    values[2, ..., :width] = values[2, ..., :width].flip(-1)  # another slice, the same rms
    after = by(sources(values))
    close(after[..., width:], before[..., width:])
    differ(after[..., :width], before[..., :width])
    values[2, ..., :width] *= 2
    differ(by(sources(values))[..., width:], before[..., width:])


def test_a_slice_is_a_convex_combination():
    by, values = route(), draw(5, 2, 3, DIM)
    out = by(sources(values))
    assert (out <= values.amax(0) + 1e-12).all() and (out >= values.amin(0) - 1e-12).all()
    weights = by.weights(sources(values))
    assert weights.shape == (5, 2, 3, 4) and (weights >= 0).all()
    close(weights.sum(0), torch.ones(2, 3, 4, dtype=torch.float64))


def test_scaling_a_source_scales_what_it_gives():
    by, values = route(), draw(5, 2, 3, DIM)
    scaled = values.clone()
    scaled[1] *= 7
    weights = by.weights(sources(values))
    close(by.weights(sources(scaled)), weights, 1e-5)  # but for eps
    gave = (weights[1, ..., None] * values[1].unflatten(-1, (4, -1))).flatten(-2)
    close(by(sources(scaled)) - by(sources(values)), 6 * gave, 1e-4)


def test_permuting_sources_permutes_weights():
    by, values, order = route(), draw(5, 2, 3, DIM), torch.tensor([3, 0, 4, 1, 2])
    close(by.weights(sources(values[order])), by.weights(sources(values))[order])
    close(by(sources(values[order])), by(sources(values)))


def test_gradients_are_those_of_the_formula():
    by, values = route(dtype=torch.float32), draw(6, 2, 3, DIM, dtype=torch.float32).requires_grad_()
    inputs, grad = [values, *by.parameters()], draw(2, 3, DIM, dtype=torch.float32)
    mine = torch.autograd.grad(by(sources(values)), inputs, grad)
    theirs = torch.autograd.grad(written_out(by, values), inputs, grad)
    for one, other in zip(mine, theirs, strict=True):
        assert (one - other).abs().max() <= 2.5e-6 * other.abs().max()
    null = torch.zeros(DIM, dtype=torch.float64, requires_grad=True)
    by = by.double()
    (gradient,) = torch.autograd.grad(by(sources([null, draw(2, 3, DIM)])).sum(), null)
    assert torch.isfinite(gradient).all()


def test_sources_are_kept_once():
    """Over all sites, no tensor as large as a source is kept for backward, but the sources."""
    tokens, dim, stream = 50, 96, MHAR(4).build(96, [2, 2, 2])
    values = [draw(1, tokens, dim).requires_grad_() for _ in range(7)]
    kept = {}

    def keep(tensor):
        if tensor.numel() >= tokens * dim:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        depth, out = stream.double().start(values[0]), []
        for site, value in enumerate(values[1:]):
            out.append(stream.read(site, depth))
            depth = stream.add(site, depth, value)
        out.append(stream.read(6, depth))
    assert kept.keys() == {value.untyped_storage().data_ptr() for value in values}


@pytest.mark.parametrize("residual", ["mhar(heads=4)", "mhar(heads=4, form=delta, blocks=2)"])
def test_low_precision(residual):
    """Half weights, and autocast, whose sublayers put out halves beside a stream of floats."""
    torch.manual_seed(0)
    stack, x = Stack("gqa", DIM, HEADS, 4, residual=residual, std=0.2), draw(2, 5, DIM, dtype=torch.float32)
    for parameter in stack.residual.parameters():
        nn.init.normal_(parameter, std=0.3)
    want = stack(x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = stack(x)
    half = copy.deepcopy(stack).bfloat16()(x.bfloat16())
    assert mixed.dtype == torch.float32 and half.dtype == torch.bfloat16
    for each in (mixed, half):
        assert (each - want).norm() < 0.02 * want.norm()


# stacks


def reference(stack, x, f):
    """Both forms, from the sublayers as functions; f(layer index) gives those of a layer."""
    residual, sublayers = stack.residual, [each for layer in range(len(stack.blocks)) for each in f(layer)]
    if isinstance(residual, Routed):
        past = [x]
        for by, sublayer in zip(residual.routes, sublayers, strict=False):
            past.append(sublayer(written_out(by, past)))
        return written_out(residual.routes[-1], past)
    p, begun, deltas, reads = x, x, [], []
    for site, sublayer in enumerate([*sublayers, None]):
        null = residual.null.expand_as(x)
        reads.append(p + residual.alpha[site] * written_out(residual.routes[site], [null, *deltas]))
        if sublayer is None:
            return reads[-1]
        p = p + sublayer(reads[-1])
        if (site + 1) % (2 * len(stack.blocks) // 2) == 0:  # two blocks
            deltas.append(p - begun)
            begun = p


@pytest.mark.parametrize("residual", ["mhar(heads=4)", "mhar(1)", "mhar(heads=4, form=delta, blocks=2)"])
def test_a_stack_written_out(residual):
    torch.manual_seed(0)
    stack = Stack("gqa", DIM, HEADS, 4, residual=residual).double()
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.3)

    def sublayers(layer):
        block = stack.blocks[layer]
        return lambda x: block.attention(block.attention_norm(x)), lambda x: block.ffn(block.ffn_norm(x))

    x = draw(2, 5, DIM)
    close(stack(x), reference(stack, x, sublayers), 1e-9)
    assert isinstance(stack.residual, Routed if "delta" not in residual else Delta)


@pytest.mark.parametrize(
    ("residual", "idle"),
    [
        ("mhar(heads=4)", ["residual.routes.0."]),
        ("mhar(heads=4, form=delta, blocks=2)", [f"residual.routes.{site}." for site in range(2)]),
        ("sum", []),
    ],
)
def test_the_laws(residual, idle):
    hold_to_the_laws("gqa(kv_heads=2)", 4, residual=residual, idle=idle)


@pytest.mark.parametrize("specs", ["dat", "mtla(stride=2, rank=8, rope_dim=2) + mae(width=4)", "gqa + window(3)"])
def test_decoding_with_states_and_slots(specs):
    stack, x = make_stack(specs, 3, residual="mhar(heads=4)"), draw(2, 9, DIM)
    for block in (1, 4):
        close(decoded(stack, x, block), stack(x), 1e-9)


def test_layers_know_what_the_norm_saw():
    """`Links.residual`, for parts that read the stream before the norm."""
    stack, seen = make_stack("gqa", 3, residual="mhar(heads=4)"), []
    for block in stack.blocks:
        block.attention_norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        block.attention.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["links"].residual), with_kwargs=True
        )
    stack(draw(1, 4, DIM))
    assert len(seen) == 6 and all(one is other for one, other in zip(seen[::2], seen[1::2], strict=True))


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("ffn", ["swiglu", "none"])
def test_parameters(heads, ffn):
    def count(**options):
        return sum(p.numel() for p in Stack("gqa", DIM, HEADS, 3, ffn=ffn, **options).parameters())

    sites = (3 if ffn == "none" else 6) + 1
    plain, routes = count(), 2 * DIM * sites
    assert count(residual=f"mhar({heads})") - plain == routes
    assert count(residual=f"mhar({heads}, form=delta)") - plain == routes + sites + DIM


def test_cross_attention_is_a_sublayer():
    stack = Stack("gqa", DIM, HEADS, 2, cross=True, residual="mhar(heads=4)").double().eval()
    assert len(stack.residual.routes) == 3 * 2 + 1
    x, context = draw(2, 6, DIM), draw(2, 4, DIM)
    assert torch.isfinite(stack(x, context=context)).all()


def test_where_blocks_end():
    for layers, blocks, ends in ((32, None, [7, 15, 23, 31, 39, 47, 55, 63]), (5, 2, [3, 9]), (3, None, [1, 3, 5])):
        made = MHAR(4, "delta", blocks).build(8, [2] * layers)
        assert sorted(made.ends) == ends
    stream = made.start(draw(1, 2, 8, dtype=torch.float32))
    for site in range(6):
        stream = made.add(site, stream, draw(1, 2, 8, dtype=torch.float32))
    assert len(stream.sources) == 4  # the null one, and three deltas that sum up to the whole change


# the delta form of a trained model


def test_a_trained_stack_becomes_the_delta_form_unchanged():
    torch.manual_seed(0)
    plain = Stack("gqa", DIM, HEADS, 4, std=0.3)
    x = draw(2, 7, DIM, dtype=torch.float32)
    delta = to_delta(copy.deepcopy(plain), heads=4, blocks=2)
    assert torch.equal(delta(x), plain(x))
    assert torch.equal(delta.bfloat16()(x.bfloat16()), plain.bfloat16()(x.bfloat16()))

    delta = to_delta(Stack("gqa", DIM, HEADS, 4, std=0.3).double(), heads=4, blocks=2)
    assert delta.residual.alpha.dtype == torch.float64
    delta(x.double()).pow(2).sum().backward()
    moves = delta.residual.alpha.grad != 0
    assert moves.tolist() == [False] * 4 + [True] * 5  # the first block reads the null source alone, which is zero
    for by in delta.residual.routes:
        assert not by.query.grad.any() and not by.gain.grad.any()


def test_decoder_encoder_and_refusals():
    ids = torch.randint(50, (2, 7))
    for each in (Decoder(50, "gqa", DIM, HEADS, 3), Encoder("gqa + rope", DIM, HEADS, 3, vocab=50)):
        before = each.eval()(ids)
        assert torch.equal(to_delta(each)(ids), before)
        with pytest.raises(ValueError, match=r"the residual is mhar\(form=delta\) already; the delta form takes"):
            to_delta(each)
    with pytest.raises(OptionError, match=r"dim=24 in 5 subspaces; heads may be \[1, 2, 3, 4, 6, 8, 12, 24\]"):
        to_delta(Stack("gqa", DIM, HEADS, 3), heads=5)
    with pytest.raises(ValueError, match="a LlamaForCausalLM has no stack of ours"):
        to_delta(model("gqa", "llama").model)


# a model


@pytest.mark.parametrize("residual", ["mhar(heads=4)", "mhar(heads=4, form=delta, blocks=3)"])
def test_in_a_model(tmp_path, residual):
    of, inputs = model({"specs": "gqa(kv_heads=2)", "residual": residual}), prompts()
    with torch.no_grad():
        for parameter in of.model.decoder.stack.residual.parameters():
            parameter.normal_(std=0.5)
        logits = of(**inputs).logits
    assert of.config.residual == residual
    of.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(**inputs).logits, logits)
    assert torch.equal(greedy(again, inputs), greedy(of, inputs, use_cache=False))
    states = again(**inputs, output_hidden_states=True).hidden_states
    assert len(states) == 5 and all(each.shape == (3, 12, 32) for each in states)

    losses = []
    for each in (of, again):
        each.train()
        losses.append(each(**inputs, labels=inputs["input_ids"]).loss)
        losses[-1].backward()
        again.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for (name, one), other in zip(of.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_a_plain_checkpoint_loads_under_another_residual(tmp_path):
    of, inputs = model("gqa"), prompts()
    of.save_pretrained(tmp_path)
    with torch.no_grad():
        logits = of(**inputs).logits
        delta = AutoModelForCausalLM.from_pretrained(tmp_path, residual="mhar(heads=4, form=delta)")
        assert torch.equal(delta(**inputs).logits, logits)
        assert torch.equal(to_delta(of, heads=4)(**inputs).logits, logits)
        assert of.config.residual == "mhar(heads=4, form=delta)"
    routes = AutoModelForCausalLM.from_pretrained(tmp_path, residual="mhar(heads=4)").model.decoder.stack.residual
    assert not any(by.query.any() for by in routes.routes) and all((by.gain == 1).all() for by in routes.routes)


def test_text_and_refusals():
    assert read_residual("sum") == Plain() and read_residual("mhar(2)") == MHAR(2)
    for line, said in (
        ("mean", "no residual 'mean'; there are sum, mhar"),
        ("mhar(form=block)", "block is none of replace, delta"),
        ("sum(2)", "only the first option of 'sum' may go without its name"),
    ):
        with pytest.raises(SpecError, match=said):
            read_residual(line)
    for line, said in (
        ("mhar(heads=5)", r"dim=24 in 5 subspaces; heads may be \[1, 2, 3"),
        ("mhar(4, blocks=2)", "blocks=2 without form=delta"),
        ("mhar(4, form=delta, blocks=4)", "3 layers in blocks=4; there may be 1 to 3"),
    ):
        with pytest.raises(OptionError, match=said):
            Stack("gqa", DIM, HEADS, 3, residual=line)
        with pytest.raises(OptionError, match=said):
            ManyheadsConfig(hidden_size=DIM, num_attention_heads=HEADS, num_hidden_layers=3, residual=line)
    with pytest.raises(ValueError, match="residual='mhar': the base config says None"):
        ManyheadsConfig(LlamaConfig(), residual="mhar")
