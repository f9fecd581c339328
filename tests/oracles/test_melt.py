"""Loops that share one cached row a token (arXiv 2605.07721)."""

import copy

import pytest
import torch
from tests.decode.laws import gaps
from tests.decode.laws import prompts as rows_of_tokens
from tests.oracles.reference import DIM, HEADS, batch, close, differ, heads_of, rope
from tests.oracles.stacks import decoded, hold_to_the_laws, make_stack
from tests.stack.tiny import VOCAB, greedy, model
from tests.stack.tiny import batch as prompts
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from manyheads import Cache, Links, Mask, PrefixCache
from manyheads.convert.melt import aligned, alignment
from manyheads.core.mask import Axis, causal
from manyheads.core.part import OptionError
from manyheads.stack import MELT, Decoder, ManyheadsConfig, Stack
from manyheads.stack.melt import Gate

LINE = "gqa(kv_heads=2)"
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6.*:FutureWarning")


def melted(loops=3, layers=2, melt="melt(chunk=4)", line=LINE, **options):
    return make_stack(line, layers, loops=loops, melt=melt, **options)


def looped_like(stack, **options):
    """A looped stack that caches rows of every loop, with the same weights but for the gates."""
    other = make_stack(LINE, len(stack.blocks), loops=stack.loops, **options)
    said = other.load_state_dict(stack.state_dict(), strict=False)
    assert not said.missing_keys and all(".gate." in name for name in said.unexpected_keys)
    return other


def wide(name, x, block, count):
    return heads_of(getattr(block.attention.project, name)(x), count).repeat_interleave(HEADS // count, 1)


def written_out(stack, x, chunk, alpha=1.0):
    """The method token by token, from its equations; the outputs of attention of all layers and loops too."""
    scale, loops = (DIM // HEADS) ** -0.5, stack.loops
    melt = {}  # by layer, the rows that are left
    own = {}  # by layer and loop, those of the looped stack
    outs, every = [], [[] for _ in range(loops * len(stack.blocks))]

    def place(t, first):
        return rope(torch.cat([t.new_zeros(*t.shape[:2], first, t.shape[3]), t], 2))[:, :, first:]

    for first in range(0, x.shape[1], chunk):
        y, h = x[:, first : first + chunk], {}
        now = {}
        for loop in range(loops):
            for layer, block in enumerate(stack.blocks):
                z = block.attention_norm(y)
                if loop == 0:
                    h[layer] = z
                else:
                    gate = block.gate
                    keep = (z @ gate.x_proj.weight.T + h[layer] @ gate.h_proj.weight.T + gate.bias).sigmoid()
                    h[layer] = keep * h[layer] + (1 - keep) * z
                rows = []
                for kept, key, source in ((melt, layer, h[layer]), (own, (layer, loop), z)):
                    k = place(wide("k_proj", source, block, 2), first)
                    v = wide("v_proj", source, block, 2)
                    old = kept.get(key)
                    rows.append((k, v) if old is None else (torch.cat([old[0], k], 2), torch.cat([old[1], v], 2)))
                now[layer], now[layer, loop] = rows
                k, v = (alpha * a + (1 - alpha) * b for a, b in zip(*rows, strict=True))
                q = place(wide("q_proj", z, block, HEADS), first)
                scores = q @ k.mT * scale
                time = torch.arange(k.shape[2])
                scores = scores.masked_fill(time[None] > time[first:, None], float("-inf"))
                o = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
                o = block.attention.project.o_proj(o)
                every[loop * len(stack.blocks) + layer].append(o)
                y = y + o
        melt |= {key: rows for key, rows in now.items() if not isinstance(key, tuple)}
        own |= {key: rows for key, rows in now.items() if isinstance(key, tuple)}
        outs.append(y)
    return torch.cat(outs, 1), [torch.cat(each, 1) for each in every]


@pytest.mark.parametrize(
    ("line", "options"),
    [
        (LINE, {"loops": 3}),
        ("mla(rank=8, rope_dim=2)", {"loops": 2}),
        ("gqa + window(4) + moh(top=2)", {"loops": 2, "melt": "melt(chunk=4, gate=scalar)"}),
        (LINE, {"loops": 2, "kv_source": [None, 0], "melt": "melt(chunk=3)"}),
        ("gqa", {"loops": 2, "attn_source": [None, 0]}),
        ("gqa", {"loops": 2, "looped": 1}),
        ("gqa + qk-norm", {"loops": 2, "residual": "mhar(heads=4)", "idle": ["residual.routes.0."]}),
        ("gqa", {"loops": 2, "melt": "melt(chunk=4, gate=mean)"}),
    ],
)
def test_the_laws(line, options):
    hold_to_the_laws(line, 2, **{"melt": "melt(chunk=4)", **options})


@pytest.mark.parametrize("chunk", [1, 3, 4, 20])
def test_the_equations(chunk):
    stack, x = melted(melt=f"melt(chunk={chunk})").train(), batch(9)
    close(stack(x), written_out(stack, x, chunk)[0])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_transition(alpha):
    stack, x = melted(melt="melt(chunk=4, transition=0.5)").train(), batch(9)
    stack.on_step(alpha / 2)
    assert stack.melted == alpha
    close(stack(x), written_out(stack, x, 4, alpha)[0])
    if alpha == 0:
        close(stack(x), looped_like(stack)(x), 1e-12)
        stack(x).sum().backward()
        assert not stack.blocks[0].gate.x_proj.weight.grad.any()
    if alpha == 1:
        close(stack(x), make_stack(LINE, 2, loops=3, melt="melt(chunk=4)").train()(x), 0)
    stack.on_step(1.0)
    assert stack.melted == 1.0


def test_the_transition_of_layers_that_are_not_linear():
    """Rows of no loop but the first are alike, and norms of keys do not commute with mixing."""
    options = {"loops": 2, "kv_source": [None, 0, None], "residual": "mhar(heads=4)"}
    stack, other = (make_stack("gqa + qk-norm", 3, melt=melt, **options) for melt in ("melt(transition=0.9)", None))
    other.load_state_dict(stack.state_dict(), strict=False)
    stack.on_step(0.0)
    x = batch(7)
    close(stack(x), other(x), 1e-12)
    stack = make_stack("gqa", 2, attn_source=[None, 0], loops=2, melt="melt(transition=0.9)")
    other = make_stack("gqa", 2, attn_source=[None, 0], loops=2)
    other.load_state_dict(stack.state_dict(), strict=False)
    stack.on_step(0.0)
    close(stack(x), other(x), 1e-12)


def test_without_loops_there_is_nothing_to_melt():
    said = r"melt: loops=1; rows are shared by loops, of which there are 2 or more"
    with pytest.raises(OptionError, match=said):
        Stack(LINE, DIM, HEADS, 2, melt="melt(chunk=3)")
    with pytest.raises(OptionError, match=said):
        ManyheadsConfig(specs=LINE, hidden_size=DIM, num_attention_heads=HEADS, num_hidden_layers=2, melt="melt")


def test_prefill_in_blocks_depends_on_where_they_end():
    """One by one does not; more at a time are read as training read them."""
    x = batch(9)
    for prefill, same in ((1, True), (3, False)):
        stack = melted(melt=f"melt(chunk=3, prefill={prefill})").eval()
        cache = Cache()
        parts = torch.cat([stack(part, cache=cache) for part in (x[:, :5], x[:, 5:])], 1)
        assert torch.allclose(parts, stack(x), atol=1e-9) == same


def set_gates(stack, keep):
    for block in stack.blocks:
        for weight in (block.gate.x_proj.weight, block.gate.h_proj.weight):
            nn.init.zeros_(weight)
        nn.init.constant_(block.gate.bias, 100.0 if keep else -1000.0)
    return stack


def values(stack, x):
    """Inputs of the first layer in every loop, and the values that its cache is left with."""
    inputs, cache = [], Cache()
    layer = stack.blocks[0].attention
    hook = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        y = stack(x, cache=cache)
    hook.remove()
    read = [layer.project.v_proj(torch.cat(inputs[loop :: stack.loops], 1)) for loop in range(stack.loops)]
    return y, read, cache.site(0).growing["v"].rows().transpose(1, 2).flatten(2)


def test_a_shut_and_an_open_gate():
    x = batch(7)
    _, read, kept = values(set_gates(melted(), True), x)
    close(kept, read[0])
    block = melted().blocks[0]
    close(kept, block.attention.project.v_proj(block.attention_norm(x)))
    y, read, kept = values(set_gates(melted(), False), x)
    close(kept, read[2])
    differ(kept, read[0])
    last = melted(melt="melt(gate=last)")
    last.load_state_dict(melted().state_dict(), strict=False)
    close(last(x), y)
    differ(last(x), melted()(x))


@pytest.mark.parametrize("loops", [2, 4])
def test_ablations(loops):
    """The mean of all inputs, and an average that fades."""
    x = batch(7)
    for gate, weights in (("mean", [1 / loops] * loops), ("ema, decay=0.25", [0.25 ** (loops - 1)])):
        for late in range(1, loops) if len(weights) == 1 else ():
            weights.append(0.75 * 0.25 ** (loops - 1 - late))
        _, read, kept = values(melted(loops, melt=f"melt(gate={gate})"), x)
        close(kept, sum(weight * each for weight, each in zip(weights, read, strict=True)))
    assert Gate(DIM, MELT("ema")).keep(x, x, 1) == 0.5
    scalar = melted(melt="melt(gate=scalar)").blocks[0].gate
    assert scalar.keep(x, x, 1).shape == (2, 7, 1)


def test_a_state_lies_between_its_inputs():
    gate, inputs = Gate(DIM, MELT()).double(), [batch(5) for _ in range(4)]
    for weight in gate.parameters():
        nn.init.normal_(weight)
    h = inputs[0]
    for turn, x in enumerate(inputs[1:], 1):
        h = gate(x, h, turn)
        seen = torch.stack(inputs[: turn + 1])
        assert (h <= seen.amax(0) + 1e-12).all() and (h >= seen.amin(0) - 1e-12).all()


def test_training_in_chunks_of_one_is_decoding():
    stack, x = melted(melt="melt(chunk=1)"), batch(9)
    close(stack.train()(x), decoded(stack.eval(), x, 1), 1e-12)
    close(stack.eval()(x), decoded(stack, x, 1), 1e-12)
    differ(melted(melt="melt(chunk=4)").train()(x), stack(x))
    stack = melted(melt="melt(prefill=4)")
    close(stack(x), written_out(stack, x, 4)[0])
    cache = Cache()
    with torch.no_grad():
        parts = [stack(x[:, :8], cache=cache), stack(x[:, 8:], cache=cache)]
    close(torch.cat(parts, 1), stack(x))


def test_the_cache_does_not_grow_with_loops():
    found = []
    for loops in (1, 2, 4):
        stack, cache = melted(loops) if loops > 1 else make_stack(LINE, 2), Cache()
        with torch.no_grad():
            for part in batch(11).split((1, 3, 7), 1):
                stack(part, cache=cache)
        assert cache.bytes() == 2 * stack.cost.cache_bytes(11, 8)
        assert [cache.length(site) for site in range(len(cache.layers))] == [11, 11]
        found.append((cache.bytes(), cache.reserved_bytes(), stack.cost.token_bytes()))
    assert len({*found}) == 1
    assert make_stack(LINE, 2, loops=4).cost.cache_floats == 4 * stack.cost.cache_floats


@pytest.mark.parametrize(("gate", "width"), [("channel", DIM), ("scalar", 1), ("mean", 0)])
def test_cost(gate, width):
    stack, plain = melted(3, melt=f"melt(gate={gate})", looped=1), make_stack(LINE, 2)
    gates = sum(p.numel() for block in stack.blocks if block.gate is not None for p in block.gate.parameters())
    assert gates == width * (2 * DIM + 1)
    assert stack.cost.parameters == plain.cost.parameters + gates
    assert stack.cost.cache_floats == plain.cost.cache_floats
    layer = plain.cost.token_flops // 2
    assert stack.cost.token_flops == 4 * layer + 2 * 4 * DIM * width


def test_published_memory():
    """24 layers of width 2048 in bf16, 32,000 tokens: 25.17 GB for four loops, 6.29 GB melted; 0.2B parameters more."""
    with torch.device("meta"):
        stacks = [Stack("gqa", 2048, 16, 24, ffn="none", loops=4, melt=melt) for melt in (None, "melt")]
    assert [round(stack.cost.cache_bytes(32000, 2) / 1e9, 2) for stack in stacks] == [25.17, 6.29]
    assert stacks[1].cost.parameters - stacks[0].cost.parameters == 24 * (2 * 2048**2 + 2048)


def test_gradients_reach_every_turn():
    """Of all chunks, but for what the last layer gives in the last loop of an earlier one, which nobody reads."""
    stack, x, outs = melted(3).train(), batch(9), []

    def hear(module, args, out):
        out.retain_grad()
        outs.append(out)

    for block in stack.blocks:
        block.attention.register_forward_hook(hear)
    y = stack(x)
    y[:, -1].pow(2).sum().backward()
    unread = {5, 11}  # of 3 chunks, 3 loops and 2 layers
    assert [out.grad is not None and bool(out.grad.any()) for out in outs] == [at not in unread for at in range(18)]


def test_gradients_of_queries_alone():
    """Rows without a gradient are not written over while a graph holds them."""
    stack, x = melted(2, melt="melt(chunk=2)", looped=1).train(), batch(9)
    want = copy.deepcopy(stack)
    want(x).pow(2).sum().backward()
    for name, weight in stack.named_parameters():
        weight.requires_grad_(name == "blocks.1.attention.project.q_proj.weight")
    stack(x).pow(2).sum().backward()
    for mine, theirs in zip(stack.parameters(), want.parameters(), strict=True):
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_checkpointing_over_chunks(alpha):
    x, found = batch(9), []
    for checkpoint in (False, True):
        stack = melted(2, melt="melt(chunk=4, transition=1e-9)", checkpoint=checkpoint).train()
        stack.on_step(alpha * 1e-9)
        stack(x).pow(2).sum().backward()
        found.append([weight.grad for weight in stack.parameters()])
    for plain, again in zip(*found, strict=True):
        close(again, plain, 1e-12)


def test_fork_reorder_and_rollback():
    stack, x, cache = melted(), batch(9), Cache()
    full = stack(x)
    with torch.no_grad():
        stack(x[:, :5], cache=cache)
        fork = cache.fork(torch.tensor([1, 0, 1]))
        close(stack(x[:, 5:], cache=cache), full[:, 5:])
        close(stack(x[[1, 0, 1], 5:], cache=fork), full[[1, 0, 1], 5:])
        cache.rollback(4)
        close(stack(x[:, 5:], cache=cache), full[:, 5:])
        cache.rollback(2)
        cache.reorder(torch.tensor([1, 0]))
        close(stack(x[[1, 0], 7:], cache=cache), full[[1, 0], 7:])


def test_a_pass_that_fails_leaves_the_cache():
    stack, x, cache = melted(), batch(9), Cache()
    with torch.no_grad():
        stack(x[:, :5], cache=cache)
        hook = stack.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stack(x[:, 5:], cache=cache)
        hook.remove()
        close(stack(x[:, 5:], cache=cache), stack(x)[:, 5:])


def test_masks():
    stack, x, cache = melted(), batch(6), Cache()
    full = stack(x)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    close(stack(x, mask=mask), full)
    near = mask.triu(-2)
    close(stack(x, mask=near), make_stack(LINE + " + window(3)", 2, loops=3, melt="melt")(x))
    with torch.no_grad():
        parts = [
            stack(x[:, :2], mask=near[..., :2, :2], cache=cache),
            stack(x[:, 2:], mask=near[:, :, 2:], cache=cache),
        ]
    close(torch.cat(parts, 1), stack(x, mask=near))
    with pytest.raises(ValueError, match=r"is about 5 keys; there are 6"):
        stack(x, mask=mask[..., :5])
    axis = Axis(6, 0)
    with pytest.raises(ValueError, match="a melted stack reads tokens chunk by chunk, which a Mask"):
        stack(x, mask=Mask(axis, axis, (causal,)))


def test_newest_and_meta_tokens():
    x = batch(7)
    close(melted()(x, newest=2), melted()(x)[:, -2:])
    stack, valid = melted(meta=3), torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]).bool()
    full, cache = stack(x, mask=valid), stack.started()
    close(full[:1, 2:], stack(x[:1, 2:]))
    with torch.no_grad():
        close(stack(x[1:], cache=cache), full[1:])


def test_auxiliary_losses_are_means_over_loops():
    options = {"ffn": "moe(experts=4, top=2)", "hidden": 8}
    torch.manual_seed(0)
    stack = Stack(LINE, DIM, HEADS, 2, loops=2, melt="melt(transition=0.5)", **options).double().train()
    other = Stack(LINE, DIM, HEADS, 2, loops=2, **options).double().train()
    other.load_state_dict(stack.state_dict(), strict=False)
    stack.on_step(0.0)
    ours, theirs, x = Links(), Links(), batch(9)
    stack(x, links=ours)
    other(x, links=theirs)
    assert ours.aux and {name.split(".")[0] for name in ours.aux} == {"0", "1"}
    for name, loss in ours.aux.items():
        layer, rest = name.split(".", 1)
        close(loss, (theirs.aux[name] + theirs.aux[f"{int(layer) + 2}.{rest}"]) / 2, 1e-9)


def test_alignment():
    """1/(N T) Σ mean ||o - o'||², nothing for a student that is its teacher."""
    student, x = melted(melt="melt(chunk=4, transition=0.5)").train(), batch(9)
    teacher = looped_like(student)
    out, far = aligned(student, teacher, x)
    y, ours = written_out(student, x, 4)
    _, theirs = written_out(student, x, 20, 0.0)
    close(out, y)
    close(far, sum((a - b).square().sum(-1).mean() for a, b in zip(ours, theirs, strict=True)) / 6)
    far.backward()
    assert student.blocks[0].gate.x_proj.weight.grad.any() and all(p.grad is None for p in teacher.parameters())
    assert aligned(student, student, x)[1] == 0 and far > 0
    student.on_step(0.0)
    assert aligned(student, teacher, x)[1] < 1e-20
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[0, :3] = False
    pairs = [batch(9)], [batch(9)]
    close(alignment(*pairs, valid), (pairs[0][0] - pairs[1][0]).square().sum(-1)[valid].mean())


def test_alignment_of_models():
    teacher = Decoder(50, LINE, 24, 4, 2, loops=2)
    student = Decoder(50, LINE, 24, 4, 2, loops=2, melt="melt(chunk=3)")
    assert all(".gate." in name for name in student.load_state_dict(teacher.state_dict(), strict=False).missing_keys)
    logits, far = aligned(student, teacher, torch.randint(50, (2, 7)))
    assert logits.shape == (2, 7, 50) and far > 0
    with pytest.raises(
        OptionError, match=r"student runs 4 times .* width 24, the teacher 6 times .* width 24; they agree"
    ):
        aligned(student, Decoder(50, LINE, 24, 4, 2, loops=3), torch.randint(50, (2, 7)))
    with pytest.raises(OptionError, match="the teacher is a Linear with 0 stacks of ours, not one"):
        aligned(student, nn.Linear(2, 2), torch.randint(50, (2, 7)))


@pytest.mark.parametrize("more", [{}, {"kv_source": [None, 0, None, None], "looped": 2, "residual": "mhar(heads=4)"}])
def test_in_a_model(tmp_path, more):
    case = {"specs": LINE, "loops": 2, "melt": "melt(chunk=5)", **more}
    of, inputs = model(case), prompts()
    of.save_pretrained(tmp_path)
    again, said = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    assert (again.config.melt, again.config.loops, len(again.config.specs)) == ("melt(chunk=5)", 2, 4)
    assert len(again.attentions) == len(again.config.turns.specs) == 4
    with torch.no_grad():
        full = of(**inputs).logits
        assert torch.equal(again(**inputs).logits, full)
        close(of(**inputs, logits_to_keep=1).logits, full[:, -1:], 1e-5)
    for how in ({"max_new_tokens": 3}, {"max_new_tokens": 3, "num_beams": 2}):
        assert torch.equal(greedy(again, inputs, **how), greedy(of, inputs, use_cache=False, **how))
    with pytest.raises(ValueError, match=r"do not go back in a DynamicCache; use manyheads\.Cache"):
        of(**inputs, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="its layers have no one output of a pass"):
        of(**inputs, output_hidden_states=True)
    again.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for each in (of.train(), again):
        each(**inputs, labels=inputs["input_ids"]).loss.backward()
    for (name, one), other in zip(of.named_parameters(), again.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other[1].grad, atol=1e-5, rtol=1e-4, msg=name)


def test_trees_of_candidates():
    """Decoding several tokens a step: each is as if its path alone had been read, also behind a path that was kept."""
    of = model({"specs": LINE, "loops": 2, "melt": "melt"}, num_hidden_layers=2).double()
    assert gaps(of, rows_of_tokens(VOCAB), rounds=2) < 1e-10


def test_a_looped_checkpoint_loads_melted(tmp_path):
    of, inputs = model({"specs": LINE, "loops": 2}), prompts()
    of.save_pretrained(tmp_path)
    line = "melt(transition=0.5, bias=-2.0)"
    again, said = AutoModelForCausalLM.from_pretrained(tmp_path, melt=line, output_loading_info=True)
    assert len(said["missing_keys"]) == 3 * 4 and all(".gate." in name for name in said["missing_keys"])
    gate = again.model.decoder.stack.blocks[3].gate
    assert (gate.bias == -2).all() and 0.1 < gate.x_proj.weight.std() < 0.3
    again.on_step(0.0)
    with torch.no_grad():
        close(again(**inputs, use_cache=False).logits, of(**inputs).logits, 1e-5)
    with pytest.raises(ValueError, match=r"still mixed with those of each loop \(α = 0\), .* or end the transition"):
        again(**inputs)


def test_it_is_copied_and_moved_as_one():
    stack, x = melted(), batch(5)
    again = copy.deepcopy(stack)
    assert torch.equal(again(x), stack(x))
    assert again.attentions[2] is again.blocks[0].attention and len({*map(id, again.attentions)}) == 2
    close(stack.float()(x.float()).double(), again(x), 1e-3)


@pytest.mark.slow
def test_it_compiles():
    stack, x = melted(2), batch(9)
    close(torch.compile(stack, backend="aot_eager")(x), stack(x), 1e-9)
    stack.train()
    close(torch.compile(stack, backend="aot_eager")(x), stack(x), 1e-9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"melt": "molt"}, "melt='molt'; it is a line such as"),
        ({"melt": "melt(chunk=0)"}, "melt: chunk is at least 1, not 0"),
        ({"melt": "melt(prefill=0)"}, "melt: prefill is at least 1, not 0"),
        ({"melt": "melt(transition=1.0)"}, "melt: transition is a number of at least 0 and below 1, not 1.0"),
        ({"melt": "melt(gate=vector)"}, "gate"),
        ({"melt": "melt(gate=mean, bias=-1.0)"}, "bias=-1.0 without weights; gate may be channel or scalar, not mean"),
        ({"melt": "melt(decay=0.5)"}, "decay=0.5 is of gate=ema, not of gate=channel"),
        ({"melt": "melt(gate=ema, decay=1.0)"}, "decay=1.0; it is between 0 and 1"),
        (
            {"specs": "retention"},
            r"layer 0 \(gqa \+ retention\) cannot share rows over loops: retention breaks 'token keys'",
        ),
        ({"specs": "mtla(stride=3)"}, "mtla breaks 'token keys'"),
        ({"specs": ["gqa", "smha"]}, r"layer 1 \(smha.* smha makes queries and rows of one input"),
        ({"specs": "gqa + gaam"}, "gaam makes queries and rows of one input"),
        ({"specs": ["gqa"] * 4}, "4 specs for 2 layers"),
        ({"looped": 3}, "looped=3 of 2 layers"),
    ],
)
def test_refusals(options, said):
    with pytest.raises(ValueError, match=said):
        Stack(**{"specs": "gqa", "dim": DIM, "heads": HEADS, "layers": 2, "loops": 2, "melt": "melt", **options})
    fields = {"specs": "gqa", "hidden_size": DIM, "num_attention_heads": HEADS, "num_hidden_layers": 2, "loops": 2}
    with pytest.raises(ValueError, match=said):
        ManyheadsConfig(**{**fields, "melt": "melt", **options})


def test_refusals_of_places():
    for options, said in (
        ({"causal": False}, "an encoder does not do"),
        ({"cross": True}, "cross-attention does not do"),
    ):
        with pytest.raises(OptionError, match=f"melt: tokens are read in order, chunk by chunk, which {said}"):
            Stack("gqa", DIM, HEADS, 2, loops=2, melt="melt", **options)
    with pytest.raises(ValueError, match="do not go back in a PrefixCache"):
        melted()(batch(3), cache=PrefixCache())
    with pytest.raises(ValueError, match="x has no tokens"):
        melted()(batch(0))
