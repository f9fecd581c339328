"""Retrieval-aware distillation (arXiv 2602.11374): the probe, heads of two kinds, the stages of MOHAWK, whole jobs."""

import pytest
import torch
import torch.nn.functional as F
from tests.convert.tiny import decode, inputs, layer, measured, model, out, tokens
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, make, twin
from transformers import AutoModelForCausalLM

from manyheads import Attention
from manyheads.convert.adopt import adopt
from manyheads.convert.heal import LayerwiseHeal
from manyheads.convert.mergelock import lock
from manyheads.convert.mohawk import Mohawk, attention_maps, fit_size, map_loss, output_loss
from manyheads.convert.moves.retrieval import ToRetrieval, recurrent
from manyheads.convert.plan import BudgetError, make_goal, shape_of
from manyheads.convert.probe import Lookups, answered, keep_heads, retrieval_importance
from manyheads.convert.shrink import refuse, shrink
from manyheads.convert.stream import InMemory, OnDisk
from manyheads.convert.verify import decode_equals_forward
from manyheads.core.part import OptionError
from manyheads.stack import ManyheadsConfig
from manyheads.stack.pretrained import ManyheadsForCausalLM

WIDTH, STATE = 6, 5
MIXED = f"gqa(kv_heads=2) + discrete_heads(heads=3, state={STATE})"


# --- the recurrent head


def parts(heads, x):
    """C, B, v after the convolution, z and a, written out tap by tap."""
    n, d = heads.state, heads.width
    mixed, z, a = heads.rows(x).split([2 * n + d, d, 1], -1)
    past = F.pad(mixed, (0, 0, heads.lags, 0))
    seen = sum(heads.conv.weight[s] * past[:, :, heads.lags - s : past.shape[2] - s] for s in range(heads.lags + 1))
    return *(seen + heads.conv.bias).split([n, n, d], -1), z, a[..., 0]


def written_out(heads, x):
    """Head outputs token by token."""
    c, b, v, z, a = parts(heads, x)
    s, ys = x.new_zeros(len(x), heads.heads, heads.state, heads.width), []
    for t in range(x.shape[1]):
        s = torch.sigmoid(-a[:, :, t, None, None]) * s + b[:, :, t, :, None] * v[:, :, t, None]
        ys.append((s * c[:, :, t, :, None]).sum(2) + heads.skip[:, 0] * v[:, :, t])
    return torch.stack(ys, 2) * F.silu(z + heads.z_bias)


@pytest.mark.parametrize("tokens", [9, 70])
def test_a_layer_of_recurrent_heads_written_out(tokens):
    made, x = make(f"discrete_ssm(state={STATE}, bias=true)"), batch(tokens)
    close(made(x), made.project.o_proj(written_out(made.project.heads, x).transpose(1, 2).flatten(2)))
    close(decoded(made, x[:, :11], 3), made(x)[:, :11])
    cost = made.spec.cost(DIM, HEADS)
    mixed = 2 * STATE + WIDTH
    assert cost.cache_floats * 1 - sum(f for kept, f in cost.windows) == 0
    assert cost.state_floats == HEADS * (STATE * WIDTH + 3 * mixed)
    assert cost.parameters == sum(p.numel() for p in made.parameters())


@pytest.mark.parametrize("tokens", [9, 70])
def test_the_scan_is_its_matrix(tokens):
    heads, x = make(f"discrete_ssm(state={STATE})").project.heads, batch(tokens)
    _, _, v, z, a = parts(heads, x)
    close(heads.matrix(x) @ v * F.silu(z + heads.z_bias), written_out(heads, x))
    close(torch.sigmoid(-a), torch.exp(-F.softplus(a)))


def test_what_never_fades_is_linear_attention_and_what_fades_at_once_has_no_memory():
    made, x = make(f"discrete_ssm(state={STATE}, bias=true)"), batch()
    heads = made.project.heads
    for a, alpha in ((-800.0, 1.0), (800.0, 0.0)):
        with torch.no_grad():
            rows = heads.in_proj.weight.view(HEADS, -1, DIM), heads.in_proj.bias.view(HEADS, -1)
            rows[0][:, -1], rows[1][:, -1] = 0, a
        c, b, v, z, _ = parts(heads, x)
        scores = (c @ b.mT).tril() if alpha else (c * b).sum(-1).diag_embed()
        want = (scores @ v + heads.skip * v) * F.silu(z + heads.z_bias)
        close(made(x), made.project.o_proj(want.transpose(1, 2).flatten(2)))


def test_a_mixed_layer_is_the_sum_of_its_heads():
    made, x = make(MIXED), batch()
    own, rest = made.project.o_proj.weight.split([DIM, 3 * WIDTH], 1)
    plain = twin(make("gqa(kv_heads=2)"), "gqa(kv_heads=2)", **{
        f"project__{name}_proj.weight": made.state_dict()[f"project.{name}_proj.weight"] for name in "qkv"
    }, **{"project__o_proj.weight": own})  # fmt: skip
    close(made(x), plain(x) + written_out(made.gates[0].heads, x).transpose(1, 2).flatten(2) @ rest.T)


def test_the_order_of_heads_does_not_matter():
    made, x, order = make(MIXED), batch(), [2, 0, 1]
    state = made.state_dict()
    moved = dict(state)
    prefix = "gates.0.heads."
    for name in ("conv.weight", "conv.bias", "skip", "z_bias", "in_proj.weight"):
        tensor, at = state[prefix + name], int(name == "conv.weight")
        rows = tensor.view(3, -1, DIM) if name == "in_proj.weight" else tensor
        moved[prefix + name] = rows.index_select(at, torch.tensor(order)).reshape(tensor.shape)
    o = state["project.o_proj.weight"].view(DIM, -1, WIDTH)
    moved["project.o_proj.weight"] = o[:, [0, 1, 2, 3, *(4 + h for h in order)]].flatten(1)
    other = make(MIXED)
    other.load_state_dict(moved)
    close(other(x), made(x))


def test_numbers_that_make_no_heads_are_refused():
    for line in ("discrete_ssm(state=0)", "gqa + discrete_heads(heads=0)", "discrete_ssm(taps=0)"):
        with pytest.raises(OptionError, match="at least 1"):
            Attention(line, DIM, HEADS)


# --- the move


BASES = ["gqa(kv_heads=2, bias=qkvo)", "gqa(kv_heads=2)", "gqa", "gqa(kv_heads=2, head_dim=8) + window(size=5)"]
KEPT = [(0, 1), (1, 2), (0, 2, 3), (3,)]


@pytest.mark.parametrize("spec", BASES)
def test_all_heads_kept_are_the_layer_bit_for_bit(spec):
    source, x = layer(spec), inputs()
    made = ToRetrieval((0, 1, 2, 3))(source, measured(source, x))
    assert made.spec == source.spec and torch.equal(out(made, x), out(source, x))


@pytest.mark.parametrize("spec", BASES)
@pytest.mark.parametrize("kept", KEPT)
def test_kept_heads_are_copied_and_only_their_rows_are_cached(spec, kept):
    """Without recurrent heads, the layer is its source without the other heads."""
    source, x = layer(spec), inputs()
    made = ToRetrieval(kept)(source, measured(source, x))
    assert made.heads == len(kept)
    width, groups = source.layout.qk_width, source.layout.kv
    used = {head * groups // HEADS for head in kept}
    cost = made.spec.cost(DIM, made.heads)
    assert cost.cache_floats == len(used) * 2 * width
    assert cost.state_floats == (HEADS - len(kept)) * (width * width + 3 * 3 * width)
    close(decode(made, x, 5), out(made, x), 1e-9)
    silent = out(made, x)
    o = source.project.o_proj.weight.view(DIM, HEADS, width)
    with torch.no_grad():
        own = made.project.o_proj.weight[:, len(kept) * width :]
        assert torch.equal(own.reshape(DIM, -1, width), o[:, [h for h in range(HEADS) if h not in kept]])
        own.zero_()
        o[:, [h for h in range(HEADS) if h not in kept]] = 0
    close(out(made, x), out(source, x), 1e-9)
    differ(silent, out(made, x))


@pytest.mark.parametrize("kept", [(), (1, 2)])
def test_replaced_heads_start_as_linear_attention_that_fades(kept):
    source, x = layer("gqa(kv_heads=2, bias=qkvo)"), inputs()
    made = ToRetrieval(kept)(source, measured(source, x))
    assert (made.spec.parts[0].name == "discrete_ssm") == (not kept)
    heads, replaced = recurrent(made), [h for h in range(HEADS) if h not in kept]
    project = source.project
    q, k, v = (
        p(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for p in (project.q_proj, project.k_proj, project.v_proj)
    )
    group = [h // 2 for h in replaced]
    lag = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    fades = 0.5 ** lag.clamp_min(0).double()
    scores = (q[:, replaced] @ k[:, group].mT * WIDTH**-0.5 * fades).tril()
    close(heads.matrix(x), scores, 1e-9)
    want = (scores @ v[:, group]).transpose(1, 2).flatten(2) @ made.project.o_proj.weight[:, len(kept) * WIDTH :].T
    if not kept:
        close(out(made, x), want + project.o_proj.bias, 1e-6)


def test_a_smaller_state_is_the_best_of_its_rank():
    source, x = layer("gqa(kv_heads=2)"), inputs()
    stats = measured(source, x)
    whole = recurrent(ToRetrieval(())(source, stats)).rows(x)
    flat = x.flatten(0, 1)
    found = []
    for state in range(1, WIDTH + 1):
        heads = recurrent(ToRetrieval((), state)(source, stats))
        c, b = heads.rows(x)[..., : 2 * state].split(state, -1)
        q, k = whole[..., : 2 * WIDTH].split(WIDTH, -1)
        (q, k), (c, b) = (tuple(t.transpose(0, 1).flatten(1, 2) for t in pair) for pair in ((q, k), (c, b)))
        left = (q @ k.mT - c @ b.mT).pow(2).sum((1, 2)).sqrt()
        best = torch.linalg.svdvals(q @ k.mT)[:, state:].pow(2).sum(-1).sqrt()
        assert ((left - best).abs() <= 1e-3 * torch.linalg.matrix_norm(q @ k.mT)).all()
        found.append(left.sum().item())
    assert found == sorted(found, reverse=True) and found[-1] < 1e-6 * len(flat)


def test_what_cannot_become_heads_of_two_kinds_is_refused():
    source, x = layer("gqa(kv_heads=2)"), inputs()
    stats = measured(source, x)
    for kept in ((4,), (1, 1)):
        with pytest.raises(OptionError, match="are not different heads of a layer of 4, 0 to 3"):
            ToRetrieval(kept)(source, stats)
    with pytest.raises(OptionError, match=r"state=7: .* 1 to 6"):
        ToRetrieval((1,), 7)(source, stats)
    for spec, why in (
        ("gqa + kha", "kha sits between"),
        ("mla", "not in mla"),
        ("gqa + alibi", "alibi may tell heads"),
        ("gqa(v_dim=5)", "as wide in keys"),
    ):
        assert why in ToRetrieval((1,)).refusal(layer(spec).spec)


# --- MOHAWK's stages


def test_maps_are_the_teachers():
    source, x = layer("gqa(kv_heads=2) + window(size=5)"), inputs()
    where = torch.arange(16).expand(4, -1)
    maps = attention_maps(source, x, where, range(HEADS))
    v = source.project.v_proj(x).unflatten(-1, (2, WIDTH)).transpose(1, 2).repeat_interleave(2, 1)
    close(source.project.o_proj((maps @ v).transpose(1, 2).flatten(2)), out(source, x), 1e-9)


def test_a_planted_map_has_no_loss_and_a_gradient():
    heads, x = recurrent(make(MIXED)), batch()
    maps = heads.matrix(x).detach()
    loss = map_loss(heads, maps, x)
    assert loss <= 1.001e-6
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in heads.parameters() if p.grad is not None)
    other = torch.randn_like(maps)
    close(map_loss(heads, other, x), torch.linalg.matrix_norm(other - heads.matrix(x)).mean())
    close(output_loss(x, 2 * x), x.norm(dim=-1).mean())


@pytest.mark.parametrize("kept", [(), (1,), (0, 3)])
def test_both_stages_lower_their_loss_and_kept_heads_do_not_learn(kept):
    source, x = layer("gqa(kv_heads=2)"), inputs(windows=8)
    made = ToRetrieval(kept)(source, measured(source, x))
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    y = out(source, x)
    found = Mohawk(steps=40, batch=8 * 16)(made, source, kept, x, y)
    assert found.maps[1] < 0.95 * found.maps[0] and found.outputs[1] < 0.9 * found.outputs[0]
    own = len(kept) * WIDTH
    for name, tensor in made.state_dict().items():
        if name == "project.o_proj.weight":
            assert torch.equal(tensor[:, :own], before[name][:, :own])
            assert not torch.equal(tensor[:, own:], before[name][:, own:])
        else:
            assert torch.equal(tensor, before[name]) == (".heads." not in name), name


def test_sizes_are_the_best_ones():
    source, x = layer("gqa(kv_heads=2, bias=qkvo)"), inputs()
    heads = recurrent(ToRetrieval((1,))(source, measured(source, x)))
    maps = attention_maps(source, x, torch.arange(16).expand(4, -1), (0, 2, 3))
    one = torch.eye(16, dtype=torch.float64)
    before = heads.matrix(x)
    fit_size(heads, maps, x)
    after = heads.matrix(x)
    for h in range(3):
        sides = torch.stack([before[:, h].flatten(), one.expand(4, -1, -1).flatten()], -1)
        want = sides @ torch.linalg.lstsq(sides, maps[:, h].flatten()[:, None]).solution
        close(after[:, h].flatten(), want[:, 0], 1e-8)


def test_stages_of_another_layer_are_refused():
    source, x = layer("gqa(kv_heads=2)"), inputs()
    made = ToRetrieval((1,))(source, measured(source, x))
    with pytest.raises(OptionError, match="3 recurrent heads, where 2 of 4 were replaced"):
        Mohawk(1)(made, source, (1, 2), x, x)
    with pytest.raises(OptionError, match="no recurrent heads in gqa"):
        Mohawk(1)(source, source, (1, 2), x, x)


# --- the probe


def test_lookups_ask_for_one_of_their_pairs():
    found = Lookups.draw(torch.arange(5, 60), pairs=7, prompts=20, colon=(1,), end=(2, 3))
    assert found.prompts.shape == (20, 7 * 5 + 2)
    for row, answer in zip(found.prompts.tolist(), found.answers.tolist(), strict=True):
        pairs = {row[i]: row[i + 2] for i in range(0, 35, 5)}
        assert len({*pairs, *pairs.values()}) == 14 and row[-1] == 1 and pairs[row[-2]] == answer
    assert torch.equal(found.prompts, Lookups.draw(torch.arange(5, 60), 7, 20, colon=(1,), end=(2, 3)).prompts)
    with pytest.raises(ValueError, match="8 pairs take 16 different tokens; there are 9, enough for 4"):
        Lookups.draw(torch.arange(9), pairs=8)


def test_a_head_whose_outputs_nobody_reads_is_worth_nothing_and_silence_is_a_slice_of_zeros():
    adopted, asked = adopt(model(dtype=torch.float64)), Lookups.draw(tokens(), 5, 6)
    whole = answered(adopted, asked)
    with torch.no_grad():
        adopted.attentions[1].project.o_proj.weight[:, 8:16] = 0
    without = answered(adopted, asked)
    again = retrieval_importance(adopted, asked)
    assert again.whole == without and again.accuracy[1][1] == 0 == again.log_probability[1][1]
    fresh = retrieval_importance(adopt(model(dtype=torch.float64)), asked)
    assert fresh.log_probability[1][1] == pytest.approx(whole.log_probability - without.log_probability, abs=1e-12)


def test_scores_do_not_depend_on_the_gauge():
    adopted, asked = adopt(model(dtype=torch.float64)), Lookups.draw(tokens(), 5, 6)
    before = retrieval_importance(adopted, asked)
    lock(adopted, seed=3)
    after = retrieval_importance(adopted, asked)
    flat = [torch.tensor(each.log_probability) for each in (before, after)]
    close(flat[1], flat[0], 1e-6)
    assert after.whole.accuracy == before.whole.accuracy


def circuit(words=14, heads=3):
    """Attention alone, two layers: head 1 of the first copies the token before, head 2 of the second looks for it.

    The stream has a slot for the token, for the one before, for what is said, and one that nobody reads.
    """
    torch.manual_seed(0)
    config = ManyheadsConfig(
        specs=[f"gqa(head_dim={words}) + window(size=2)", f"gqa(head_dim={words}) + rope(none)"], vocab_size=words,
        hidden_size=4 * words, num_hidden_layers=2, num_attention_heads=heads, ffn="none", tie_word_embeddings=False,
    )  # fmt: skip
    made = ManyheadsForCausalLM(config).double().eval()
    token, before, said = (slice(i * words, (i + 1) * words) for i in range(3))
    one = torch.eye(words).double()
    with torch.no_grad():
        for index, (attention, head) in enumerate(zip(made.attentions, (1, 2), strict=True)):
            own, project = slice(head * words, (head + 1) * words), attention.project
            for name in "qkv":
                weight = project.get_submodule(f"{name}_proj").weight
                weight[:, said] = 0
                weight[own] = 0
            if index == 0:  # one turn of the first frequency is a token
                half = words // 2
                project.q_proj.weight[own][0, token] = torch.tensor(1.0).cos() * 20
                project.q_proj.weight[own][half, token] = -torch.tensor(1.0).sin() * 20
                project.k_proj.weight[own][0, token] = 20
            else:
                project.q_proj.weight[own][:, token], project.k_proj.weight[own][:, before] = 20 * one, 20 * one
            project.v_proj.weight[own][:, token] = one
            o = project.o_proj.weight
            o[: said.stop] = 0
            o[:, own] = 0
            o[before if index == 0 else said, own] = one
        table, head = made.get_input_embeddings().weight, made.get_output_embeddings().weight
        table.zero_()
        table[:, token] = one
        head.zero_()
        head[:, said] = 30 * one
    return made


def test_the_probe_finds_a_planted_circuit():
    made, asked = circuit(), Lookups.draw(torch.arange(14), pairs=7, prompts=12)
    found = retrieval_importance(made, asked)
    assert found.whole.accuracy == 1
    assert {*found.ranking()[:2]} == {(0, 1), (1, 2)}
    for layer_index, row in enumerate(found.accuracy):
        for head, lost in enumerate(row):
            assert lost > 0.5 if (layer_index, head) in ((0, 1), (1, 2)) else lost == 0


def test_heads_stay_as_long_as_their_key_heads_fit():
    ranking = [(1, 0), (0, 3), (1, 1), (1, 2), (0, 0), (0, 2), (1, 3), (0, 1)]
    assert keep_heads(ranking, [4, 4], [2, 2], 2) == [(2, 3), (0, 1)]
    assert keep_heads(ranking, [4, 4], [2, 2], 2.9, most=2) == [(3,), (0,)]
    assert keep_heads(ranking, [4, 4], [2, 2], 0) == [(), ()]
    assert keep_heads(ranking, [4, 4], [2, 2], 4) == [(0, 1, 2, 3)] * 2
    assert keep_heads(ranking, [4, 4], [4, 4], 3) == [(3,), (0, 1)]


# --- jobs


@pytest.mark.parametrize("line", ["retrieval_distill(pairs=8)", "retrieval_distill(heads=3, state=4, pairs=8)",
                                  "retrieval_distill(heads=0)"])  # fmt: skip
def test_a_whole_conversion(line, tmp_path):
    layers = InMemory(model(layers=3, hidden_size=64, num_attention_heads=8, num_key_value_heads=4))
    goal = make_goal("25%", line, shape_of(layers))
    (lost,) = shrink(layers, tokens(), [goal], tmp_path, heal=LayerwiseHeal(steps=8), bfloat16=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / goal.name).eval()
    kept = loaded.config.notes["kept"]
    count = {"heads=0": 0, "heads=3": 3}.get(line[18:25])
    used = sum(len({head // 2 for head in each}) for each in kept)
    assert used <= 3 and sum(map(len, kept)) == (2 * used if count is None else count)
    assert loaded.config.heads == [len(each) or 8 for each in kept]
    _, cache = loaded(tokens(1), use_cache=True).to_tuple()[:2]
    state, width = 4 if "state" in line else 8, 8
    recurrent_heads = 24 - sum(map(len, kept))
    floats = used * 2 * width * 16 + recurrent_heads * (state * width + 3 * (2 * state + width))
    assert cache.bytes() == 4 * floats
    assert decode_equals_forward(loaded, tokens(1)) < 1e-4
    written = loaded.generate(tokens(1), max_new_tokens=5, do_sample=False)
    assert written.shape == (1, 21)
    assert all(each.healed <= each.fitted for each in lost)
    assert shrink(layers, tokens(), [goal], tmp_path, heal=LayerwiseHeal(steps=8), bfloat16=False) == [lost]


def test_a_conversion_that_was_stopped_ends_with_the_same_bits(tmp_path):
    layers = InMemory(model(layers=3, hidden_size=64, num_attention_heads=8, num_key_value_heads=4))
    goal = make_goal("25%", "retrieval_distill(heads=3, pairs=8)", shape_of(layers))
    options = {"heal": LayerwiseHeal(steps=4), "bfloat16": False}

    def stop(stage, done, total):
        if stage == goal.name and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shrink(layers, tokens(), [goal], tmp_path / "a", progress=stop, **options)
    shrink(layers, tokens(), [goal], tmp_path / "a", **options)
    shrink(layers, tokens(), [goal], tmp_path / "b", **options)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name / goal.name).state_dict() for name in "ab")
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items()) and one.keys() == two.keys()


def test_jobs_that_cannot_be_are_refused_before_any_work(tmp_path):
    layers = InMemory(model())
    shape = shape_of(layers)
    with pytest.raises(OptionError, match="the model has 8 heads; fewer stay"):
        refuse(layers.config, [make_goal("50%", "retrieval_distill(heads=8)", shape)])
    with pytest.raises(BudgetError, match="leaves nothing to shrink"):
        make_goal("100%", "retrieval_distill", shape)
    qwen3 = InMemory(model("qwen3"))
    with pytest.raises(OptionError, match="layer 0 cannot become retrieval_distill-50: qk-norm"):
        refuse(qwen3.config, [make_goal("50%", "retrieval_distill", shape_of(qwen3))])
    model().save_pretrained(tmp_path / "m")
    with pytest.raises(OptionError, match="tried on the whole model; this one is read layer by layer"):
        shrink(OnDisk(tmp_path / "m"), tokens(), [make_goal("50%", "retrieval_distill", shape)], tmp_path / "w")
    assert not (tmp_path / "w").exists()
