"""`capture`: what a model does is seen, recomputed from queries and keys alone, and the model does not change."""

import weakref
from dataclasses import replace

import pytest
import torch
from tests.inspect import models
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import AttentionInterface

import manyheads as mh
from manyheads import Attention, Cache, Decoder, Encoder, capture
from manyheads.core.mask import Mask
from manyheads.inspect import CaptureError, layers_of
from manyheads.stack import Stack
from manyheads.testing import singles
from manyheads.testing.conformance import Case

ALL = ("weights", "scores", "q", "k", "v", "out", "lse")


def explicit(call_q, k, scale, visible):
    scores = (call_q.double() @ k.double().mT * scale).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1)


def untouched(model):
    """No tap, and no hook but the one that gives the layers of an adopted model their links."""
    for module in model.modules():
        assert getattr(module, "taps", ()) == ()
        assert not module._forward_hooks and len(module._forward_pre_hooks) == getattr(module, "_shares_links", False)


# --- the acceptance: one head, four queries, 4,096 keys


@pytest.fixture(scope="module")
def long():
    torch.manual_seed(0)
    layer = Attention("gqa(kv_heads=2)", 64, 8).eval()
    return layer, torch.randn(1, 4096, 64)


def test_four_rows_of_one_head_equal_the_explicit_softmax(long):
    layer, x = long
    with torch.no_grad():
        want = layer(x)
        with capture(layer, heads=[2], queries=slice(-4, None), what={"weights", "q", "k"}) as tape:
            got = layer(x)
    seen = tape[0]
    assert torch.equal(got, want)
    assert seen.weights.shape == (1, 1, 4, 4096) and seen.queries == (4092, 4093, 4094, 4095)
    visible = torch.arange(4096) <= torch.arange(4092, 4096)[:, None]
    close = explicit(seen.q, seen.k, layer.layout.scale, visible)
    torch.testing.assert_close(seen.weights.double(), close, atol=1e-6, rtol=0)


class Live(TorchDispatchMode):
    """The most bytes that were alive at once of tensors made inside."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.sizes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self.free, key)
        return found

    def free(self, key):
        self.now -= self.sizes.pop(key, 0)


def test_memory_beside_the_model_is_below_a_hundredth_of_the_map(long):
    layer, x = long
    whole = 8 * 4096 * 4096 * 4

    def most(**what):
        with torch.no_grad(), Live() as live:
            if what:
                with capture(layer, **what):
                    layer(x)
            else:
                layer(x)
        return live.most

    alone = most()
    assert most(heads=[2], queries=slice(-4, None)) - alone < whole / 100
    assert most(heads=[2], queries=slice(-4, None), what=("weights", "scores", "lse")) - alone < whole / 100


def test_the_fused_kernel_computes_the_output_of_every_layer(monkeypatch):
    """Capturing one layer of several leaves the kernels of all of them as they were."""
    from manyheads.core import kernel

    model, used = Decoder(50, "gqa", 32, 4, layers=4).eval(), []
    plan = kernel.plan_call
    monkeypatch.setattr(kernel, "plan_call", lambda *a, **b: used.append(p := plan(*a, **b)) or p)
    with torch.no_grad(), capture(model, layers=[2], queries=slice(-1, None)):
        model(models.ids(1, 200, 50))
    assert [each.kernel for each in used] == ["sdpa"] * 4


# --- every part


def test_every_part_shows_its_weights_and_stays_the_same_bits():
    """W v is what the layer returned (capture checks it); of every third, decoded rows are those of the full pass."""
    refused, unknown = [], []
    for index, spec in enumerate(singles()):
        case = Case(spec, padding=(0, 4))
        layer, x, valid = case.layer(), case.x, case.valid
        with torch.no_grad():
            want = layer(x, mask=valid)
            try:
                with capture(layer, what={"weights", "out"}) as tape:
                    got = layer(x, mask=valid)
            except ValueError as error:
                assert "a state in place of keys" in str(error)
                refused.append(spec)
                with capture(layer, what={"q", "k", "v", "out"}) as tape:
                    got = layer(x, mask=valid)
                assert tape[0].q is not None and tape[0].out is not None
                assert torch.equal(got, want), spec
                continue
            except CaptureError as error:
                assert "weights cannot be told" in str(error), error
                unknown.append(spec.partition("(")[0])
                continue
            assert torch.equal(got, want), spec
            if index % 3 == 0:
                decoded_like_the_full_pass(case, layer, tape[0].weights)
    assert len(refused) > 10 and set(unknown) <= {"chai", "dat", "iha", "longheads"}


def decoded_like_the_full_pass(case, layer, full):
    cache = Cache()
    with capture(layer) as tape:
        for first in range(0, case.tokens, 3):
            cut = slice(first, first + 3)
            layer(case.x[:, cut], mask=case.valid[:, cut], positions=case.positions[:, cut], cache=cache)
    rows = [each.weights for each in tape.passes(0)]
    if rows[-1].shape[-1] != full.shape[-1]:  # keys were dropped, or merged into slots
        return
    rows = torch.cat([torch.nn.functional.pad(row, (0, full.shape[-1] - row.shape[-1])) for row in rows], 2)
    kept = case.valid[:, None, :, None]
    torch.testing.assert_close(rows * kept, full * kept, atol=1e-9, rtol=0, msg=case.spec)


def test_weights_are_those_after_the_score_program():
    layer = Attention("gqa + talking_heads", 32, 4).double().eval()
    program = layer.attends[0]
    torch.nn.init.normal_(program.logits)
    torch.nn.init.normal_(program.weights)
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    with torch.no_grad(), capture(layer, what=ALL) as tape:
        layer(x)
    seen, hidden = tape[0], ~torch.ones(6, 6, dtype=torch.bool).tril()
    scores = torch.einsum("bhts,hg->bgts", seen.q @ seen.k.mT * layer.layout.scale, program.logits)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    want = torch.einsum("bgts,gv->bvts", weights, program.weights)
    torch.testing.assert_close(seen.weights, want)
    torch.testing.assert_close(seen.scores, scores.masked_fill(hidden, -torch.inf))


def test_two_maps_are_shown_as_the_one_that_values_are_read_with():
    layer = Attention("gqa(kv_heads=4) + rope(none) + differential", 32, 8).double().eval()
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    with torch.no_grad(), capture(layer, what={"weights", "q", "k"}) as tape:
        layer(x)
    seen, visible = tape[0], torch.ones(5, 5, dtype=torch.bool).tril()
    q = seen.q.unflatten(1, (4, 2))  # signal and noise of each head
    k = seen.k[:, ::2].unflatten(1, (2, 2))
    k = k.repeat_interleave(2, 1)
    maps = [explicit(q[:, :, i], k[:, :, i], layer.layout.scale, visible) for i in (0, 1)]
    torch.testing.assert_close(seen.weights, maps[0] - layer.attends[0].subtracted() * maps[1])
    with pytest.raises(CaptureError, match="2 attention problems"), capture(layer, what="scores"):
        layer(x)


def test_both_views_of_a_latent_show_the_same_weights():
    layer = Attention("mla(rank=16, rope_dim=4)", 32, 4).double().eval()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    found = []
    for below in (0, 10**6):
        layer.project.absorb_below = below
        with torch.no_grad(), capture(layer, what={"weights", "lse", "k"}) as tape:
            layer(x)
        found.append(tape[0])
    assert [each.view for each in found] == ["expanded", "absorbed"] and found[0].k.shape != found[1].k.shape
    torch.testing.assert_close(found[0].weights, found[1].weights)
    torch.testing.assert_close(found[0].lse, found[1].lse)


# --- stacks


def test_a_stack_with_cross_attention_shared_rows_and_loops():
    stack = Stack("gqa(kv_heads=2)", 32, 4, 2, cross=True, loops=2, kv_source=[None, 0]).eval()
    x, context = torch.randn(2, 5, 32), torch.randn(2, 9, 32)
    keep = torch.arange(9) < torch.tensor([[9], [6]])
    with torch.no_grad():
        want = stack(x, context=context, context_mask=keep)
        with capture(stack) as tape:
            assert torch.equal(stack(x, context=context, context_mask=keep), want)
    shapes = {layer: tuple(tape[layer].weights.shape) for layer in tape}
    assert shapes == {**dict.fromkeys(range(4), (2, 4, 5, 5)), **dict.fromkeys(range(4, 8), (2, 4, 5, 9))}
    assert tape[5].weights[1, ..., 6:].abs().max() == 0
    assert all(torch.allclose(tape[layer].weights.sum(-1), torch.ones(())) for layer in tape)
    untouched(stack)


def test_an_encoder_and_its_padding():
    model = Encoder("gqa + rope", 32, 4, 3, vocab=50).eval()
    ids, mask = models.ids(2, 6, 50), torch.arange(6) < torch.tensor([[6], [4]])
    with torch.no_grad(), capture(model, layers=-1) as tape:
        model(ids, mask=mask)
    assert list(tape) == [2] and (tape[2].weights[1, :, :, 4:] == 0).all()


# --- transformers models


@pytest.mark.parametrize("kind", models.DECODERS)
def test_adopted_and_stock_models_show_the_same(kind):
    """Of left-padded generation, step by step; and both write what they write anyway."""
    stock, ids = models.decoder(kind), models.ids()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    plain = stock.generate(ids, **options, output_logits=True, return_dict_in_generate=True)
    found = []
    for model in (stock, None):
        model = mh.adopt(stock) if model is None else model
        with torch.no_grad(), capture(model, heads=[1, 3], queries=slice(-2, None), what=ALL) as tape:
            wrote = model.generate(ids, **options, output_logits=True, return_dict_in_generate=True)
        assert torch.equal(wrote.sequences, plain.sequences)
        if model is stock:
            assert all(torch.equal(a, b) for a, b in zip(wrote.logits, plain.logits, strict=True))
        found.append(tape)
        untouched(model)
    for layer in (0, 1):
        passes = [tape.passes(layer) for tape in found]
        assert [len(each) for each in passes] == [4, 4]
        for a, b in zip(*passes, strict=True):
            width = min(a.weights.shape[-1], b.weights.shape[-1])  # sliding caches drop at different times
            torch.testing.assert_close(a.weights[..., -width:], b.weights[..., -width:], atol=2e-5, rtol=0)
            torch.testing.assert_close(a.out, b.out, atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(a.lse, b.lse, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_stock_encoders_show_what_their_own_maps_say(attention):
    model = models.bert(attn_implementation=attention)
    ids, mask = models.ids(), torch.arange(9) < torch.tensor([[9], [6]])
    with torch.no_grad():
        want = model(ids, attention_mask=mask).last_hidden_state
        with capture(model, what=ALL) as tape:
            got = model(ids, attention_mask=mask).last_hidden_state
        model.set_attn_implementation("eager")
        maps = model(ids, attention_mask=mask, output_attentions=True).attentions
    assert torch.equal(got, want) and list(tape) == [0, 1]
    for layer, own in enumerate(maps):
        torch.testing.assert_close(tape[layer].weights, own, atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [models.gpt2, models.vit])
def test_other_stock_models(make):
    model = make()
    inputs = torch.randn(2, 3, 16, 16) if make is models.vit else models.ids()
    with torch.no_grad():
        want = model(inputs)[0]
        with capture(model, layers=[1], heads=[0], what=ALL) as tape:
            assert torch.equal(model(inputs)[0], want)
        model.set_attn_implementation("eager")
        own = model(inputs, output_attentions=True).attentions[1][:, :1]
    torch.testing.assert_close(tape[1].weights, own, atol=1e-5, rtol=0)


def test_an_encoder_decoder_shows_its_three_kinds_of_attention():
    model, ids = models.t5(), models.ids()
    with torch.no_grad():
        want = model(input_ids=ids, decoder_input_ids=ids[:, :5]).logits
        with capture(model) as tape:
            assert torch.equal(model(input_ids=ids, decoder_input_ids=ids[:, :5]).logits, want)
        model.set_attn_implementation("eager")
        out = model(input_ids=ids, decoder_input_ids=ids[:, :5], output_attentions=True)
    pairs = zip(out.decoder_attentions, out.cross_attentions, strict=True)
    own = [*out.encoder_attentions, *(maps for pair in pairs for maps in pair)]
    assert len(tape) == 6
    for layer, maps in zip(tape, own, strict=True):
        torch.testing.assert_close(tape[layer].weights, maps, atol=1e-5, rtol=0)


def test_a_sink_that_is_not_among_the_keys_is_refused_and_the_rest_is_given():
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**models.GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    model = GptOssForCausalLM(config).eval()
    with torch.no_grad(), capture(model, what={"q", "out"}) as tape:
        model(models.ids())
    assert tape[0].q.shape == (2, 4, 9, 8)
    with torch.no_grad(), pytest.raises(CaptureError, match="learned sink"), capture(model):
        model(models.ids())
    untouched(model)


# --- the model stays as it is


def test_nesting_exceptions_and_gradients():
    model, ids = models.decoder(), models.ids()
    registry = dict(AttentionInterface._global_mapping)
    with torch.no_grad():
        want = model(ids).logits
        with capture(model, layers=[0]) as outer:
            model(ids)
            with pytest.raises(RuntimeError, match="stop"), capture(model, what="out") as inner:
                model(ids)
                raise RuntimeError("stop")
            assert torch.equal(model(ids).logits, want)
        assert len(outer.passes(0)) == 3 and len(inner.passes(1)) == 1
        assert torch.equal(model(ids).logits, want)
    assert AttentionInterface._global_mapping == registry
    assert len(outer.passes(0)) == 3  # nothing is seen once it is over
    with capture(model, what="out", grad=True) as tape:
        loss = model(ids, labels=ids).loss
    (grad,) = torch.autograd.grad(loss, model.model.embed_tokens.weight, retain_graph=True)
    loss.backward()
    assert torch.equal(grad, model.model.embed_tokens.weight.grad) and tape[0].out.requires_grad
    with capture(model, what="out") as tape:
        model(ids)
    assert not tape[0].out.requires_grad


def test_a_model_that_is_trained_has_the_same_gradients():
    layer, x = Attention("gqa(kv_heads=2) + kha", 32, 4), torch.randn(1, 6, 32)
    layer(x).sum().backward()
    want = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    with capture(layer, what=ALL):
        layer(x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(want, layer.parameters(), strict=True))


@pytest.mark.parametrize("spec", ["gqa", "gqa + talking_heads", "gqa + mgk"])
def test_dropout_is_drawn_as_without_capture(spec):
    stack, x = Stack(spec, 32, 4, 2, dropout=0.3).train(), torch.randn(2, 6, 32)
    torch.manual_seed(3)
    want = stack(x)
    torch.manual_seed(3)
    with capture(stack, what={"q", "out"} if "mgk" in spec else {"weights", "out"}) as tape:
        assert torch.equal(stack(x), want)
    if "mgk" not in spec:
        stack.eval()
        with capture(stack, layers=[0]) as calm:
            stack(x)
        torch.testing.assert_close(tape[0].weights, calm[0].weights)  # weights before any is dropped


def test_every_heads_part_of_the_output_and_the_bias_are_the_output():
    from manyheads.inspect import watching

    latent = Attention("mla(rank=16, rope_dim=4) + head_gate", 32, 4).eval()
    adopted = mh.adopt(models.decoder("qwen2"))
    for model, inputs in (
        (models.bert(), models.ids()),
        (adopted, models.ids()),
        (latent, torch.randn(2, 5, 32)),
    ):
        looks = []
        with torch.no_grad(), watching(layers_of(model), looks.append):
            model(inputs)
        look = looks[0]
        with torch.no_grad():
            parts = [c for _, c in look.contributions()]
            whole = look.project(look.out)
            bias = look.project(torch.zeros_like(look.out))
        assert len(parts) == 4
        torch.testing.assert_close(sum(parts) + bias, whole, atol=1e-5, rtol=1e-5)


# --- what does not exist


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": 2}, "there is no layer 2; this model has layers 0 to 1"),
        ({"layers": [-3]}, "there is no layer -3"),
        ({"layers": []}, "no layers are chosen"),
        ({"layers": 1.0}, "there is no layer 1.0"),
        ({"layers": True}, "there is no layer True"),
        ({"heads": 1.5}, "there is no head 1.5"),
        ({"heads": 4}, "there is no head 4 in layer 0 .*; it has 4, from 0 on"),
        ({"heads": ["a"]}, "there is no head 'a'"),
        ({"heads": []}, "no heads are chosen"),
        ({"what": "maps"}, "'maps' cannot be captured; what is one or more of weights, scores"),
        ({"what": []}, "nothing is asked for"),
        ({"what": None}, "'None' cannot be captured"),
        ({"queries": "last"}, "queries are a slice or whole numbers"),
        ({"queries": []}, "no queries are chosen"),
    ],
)
def test_what_does_not_exist_is_refused_before_the_model_runs(options, says):
    model = models.decoder()
    with pytest.raises(ValueError, match=says), capture(model, **options):
        raise AssertionError("the block must not run")
    untouched(model)


def test_layers_without_weights_say_so_and_which_others_have_some():
    model = Decoder(50, ["gqa", "retnet"], 32, 4).eval()
    ids = models.ids(1, 5, 50)
    with (
        pytest.raises(ValueError, match=r"layer 1 .* has no weights: .*state.*; layers=\[0\] have them"),
        capture(model),
    ):
        pass
    with torch.no_grad(), capture(model, what={"q", "k", "v", "out"}) as tape:
        model(ids)
    assert tape[1].q.shape == (1, 4, 5, 8)
    with torch.no_grad(), capture(model, layers=[0]) as tape:
        model(ids)
    with pytest.raises(KeyError, match="layer 1 is not captured"):
        tape[1]


def test_a_model_without_attention_and_heads_that_are_not_outputs():
    with pytest.raises(ValueError, match="no attention layer that can be seen"), capture(torch.nn.Linear(2, 2)):
        pass
    with (
        pytest.raises(ValueError, match="4 score heads for 2 outputs"),
        capture(Attention("gqa + differential", 32, 4), heads=[1], what={"q"}),
    ):
        pass


def test_something_that_changes_scores_unknown_to_us_is_noticed():
    """Weights that do not give the output are never shown."""
    layer = Attention("gqa", 32, 4).eval()
    heads = layer._heads
    layer._heads = lambda call, flow: heads(replace(call, mask=Mask(call.mask.q, call.mask.k, ())), flow)
    with torch.no_grad(), pytest.raises(CaptureError, match="do not give what its heads returned"), capture(layer):
        layer(torch.randn(1, 6, 32))


def test_queries_by_number_and_a_row_that_a_pass_lacks():
    layer, x = Attention("gqa", 32, 4).eval(), torch.randn(1, 6, 32)
    with torch.no_grad(), capture(layer, queries=[0, 2, -1], what={"weights", "q"}) as tape, capture(layer) as all_rows:
        layer(x)
    torch.testing.assert_close(tape[0].weights, all_rows[0].weights[:, :, [0, 2, 5]])
    with torch.no_grad(), pytest.raises(CaptureError, match="no query 6 in a pass of 6"), capture(layer, queries=6):
        layer(x)


def test_a_layer_that_takes_attention_weights_has_none_to_show():
    """They are shown where they are computed."""
    stack = mh.Stack("gqa", 32, 4, 4, attn_source=[None, 0, None, 2]).eval()
    with mh.capture(stack) as tape:
        stack(torch.randn(1, 5, 32))
    assert tape[0].weights.shape == tape[2].weights.shape == (1, 4, 5, 5)
    with pytest.raises(ValueError, match="there is no layer 1"), mh.capture(stack, layers=[1]):
        pass


def test_rows_shared_by_sequences_are_not_shown():
    stack = mh.Stack("gqa", 32, 4, 2).eval()
    prefix = mh.PrefixCache()
    stack(torch.randn(1, 5, 32), cache=prefix)
    cache = prefix.branch(2)
    with pytest.raises(ValueError, match=r"use manyheads\.Cache"), mh.capture(stack):
        stack(torch.randn(2, 1, 32), cache=cache)


# --- how models are run in earnest


def generated(model, **options):
    ids = models.ids(2, 6)
    settings = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, **{**settings, **options})


@pytest.mark.parametrize("make", [models.decoder, lambda: mh.adopt(models.decoder())])
@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"num_beams": 3}], ids=["static", "beams"])
def test_static_caches_and_beams_show_what_a_pass_over_the_whole_text_does(make, options):
    """Every row of every step; a static cache has room behind the text, which has no weight."""
    model = make()
    plain = generated(model, **options)
    with capture(model, what=("weights", "out")) as tape:
        wrote = generated(model, **options)
    assert torch.equal(wrote, plain)
    untouched(model)
    beams = options.get("num_beams", 1)
    with torch.no_grad(), capture(model, what=("weights", "out")) as whole:
        model(wrote)
    for layer in (0, 1):
        prompt, *steps = tape.passes(layer)
        assert len(steps) == 3 and prompt.weights.shape[:3] == (2 * beams, 4, 6) and len(steps[0].weights) == 2 * beams
        want = whole[layer]
        kept = prompt.weights[::beams]
        torch.testing.assert_close(kept[..., :6], want.weights[:, :, :6, :6], atol=1e-5, rtol=0)
        assert kept[..., 6:].abs().sum() == 0
        for at, step in enumerate(steps, 6):
            torch.testing.assert_close(step.weights.sum(-1), torch.ones_like(step.weights[..., 0]))
            assert step.weights[..., at + 1 :].abs().sum() == 0
            assert (step.axis.time[..., -1] == at).all()  # where a query stands, whatever room there is
            if beams == 1:
                own = want.weights[:, :, at : at + 1, : at + 1]
                torch.testing.assert_close(step.weights[..., : at + 1], own, atol=1e-5, rtol=0)
                torch.testing.assert_close(step.out, want.out[:, :, at : at + 1], atol=1e-4, rtol=1e-4)


def test_each_beam_shows_the_text_that_it_goes_on_from():
    """Rows of beams are in the order of the pass."""
    model, fed = models.decoder(), []

    def keep(module, args, kwargs):
        fed.append(kwargs["input_ids"].clone())

    hook = model.model.register_forward_pre_hook(keep, with_kwargs=True)
    with capture(model, layers=1) as tape:
        generated(model, num_beams=2, max_new_tokens=2)
    hook.remove()
    text = torch.cat(fed, 1)  # beams of one prompt differ in their last token alone
    with torch.no_grad(), capture(model, layers=1) as whole:
        model(text)
    torch.testing.assert_close(tape[1].weights, whole[1].weights[:, :, 6:], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("make", [models.decoder, lambda: Decoder(99, "gqa + kha", 32, 4, layers=2).eval()])
def test_a_compiled_model_shows_what_the_plain_one_does(make):
    model, ids = make(), models.ids(2, 8)
    with torch.no_grad():
        plain = model(ids)
        with capture(model, what=ALL) as want:
            model(ids)
        torch._dynamo.reset()
        fast = torch.compile(model)
        before = fast(ids)  # compiled before anything is watched, and again while it is
        with capture(fast, what=ALL) as tape:
            seen = fast(ids)
        after = fast(ids)
    close = lambda a, b: torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    for one in (before, seen, after):
        close(getattr(one, "logits", one), getattr(plain, "logits", plain))
    assert list(tape) == list(want) == [0, 1] and [len(tape.passes(layer)) for layer in tape] == [1, 1]
    for layer in (0, 1):
        for word in ALL:
            close(getattr(tape[layer], word), getattr(want[layer], word))
    untouched(model)
