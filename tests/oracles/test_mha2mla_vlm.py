"""MHA2MLA-VLM (arXiv 2601.11464): a low rank for each kind of token, which pairs turn, vision-language models whole."""

import pytest
import torch
from tests.convert.tiny import DIM, HEADS, inputs, layer, measured, out
from tests.oracles.reference import batch, close, decoded, differ, make
from transformers import AutoModelForImageTextToText, CLIPVisionConfig, LlamaConfig, LlavaConfig, Qwen2Config

from manyheads import Cache, Links
from manyheads.convert.adopt import AdoptError
from manyheads.convert.moves.mla import ToMLA
from manyheads.convert.moves.typed_mla import HOW, ToTypedMLA, kind_moments, most_turning, rotation_kl
from manyheads.convert.stats import Pairs
from manyheads.convert.vlm import adopt_language, language_attentions, load_vlm, save_vlm, shrink_vlm
from manyheads.core.part import OptionError

RANK, ROPE = 7, 4
SPEC = f"typed_mla(rank={RANK}, rope_dim={ROPE}, bias=true)"
KINDS = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1, 0, 1, 1]])
BASE = "gqa(kv_heads=2, bias=qkvo)"


def single(made, kind, spec=f"mla(rank={RANK}, rope_dim={ROPE}, norm=false, bias=true, scale={10**-0.5!r})"):
    """The layer in which every token is of one kind."""
    one, state = make(spec), made.state_dict()
    for name in ("weight", "bias"):
        down = state[f"project.kv_a_proj.{name}"]
        state[f"project.kv_a_proj.{name}"] = torch.cat([down[kind * RANK : (kind + 1) * RANK], down[2 * RANK :]])
    state["project.kv_b_proj.weight"] = state["project.kv_b_proj.weight"][:, kind * RANK : (kind + 1) * RANK]
    one.load_state_dict(state)
    return one


def steps(made, x, kinds, block):
    """Decoding, told of what kind each new token is."""
    cache, outs = Cache(), []
    with torch.no_grad():
        for part, of in zip(x.split(block, 1), kinds.split(block, 1), strict=True):
            outs.append(made(part, cache=cache, links=Links(types=of)))
    return torch.cat(outs, 1), cache


# --- the part


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("view", ["expanded", "absorbed"])
def test_tokens_of_one_kind_make_the_layer_of_that_kind(kind, view):
    made, x = make(SPEC.replace(")", f", view={view})")), batch()
    close(made(x, links=Links(types=torch.full_like(KINDS, kind))), single(made, kind)(x), 1e-9)
    if not kind:
        close(made(x), single(made, 0)(x), 1e-9)


def test_equal_factors_do_not_tell_kinds_apart():
    made, x = make(SPEC), batch()
    with torch.no_grad():
        project = made.project
        project.kv_b_proj.weight[:, RANK:] = project.kv_b_proj.weight[:, :RANK]
        for tensor in (project.kv_a_proj.weight, project.kv_a_proj.bias):
            tensor[RANK : 2 * RANK] = tensor[:RANK]
    close(made(x, links=Links(types=KINDS)), made(x), 1e-9)


def test_each_token_goes_through_its_own_pair():
    """Written out: keys and values of the two kinds, picked token by token."""
    made, x = make(SPEC), batch()
    ones = [single(made, kind).project for kind in (0, 1)]
    project, layout = made.project, made.layout
    q = project.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    c, k_rope = zip(*(one.kv_a_proj(x).split([RANK, ROPE], -1) for one in ones), strict=True)
    kv = [one.kv_b_proj(each) for one, each in zip(ones, c, strict=True)]
    picked = torch.where(KINDS[..., None] == 1, kv[1], kv[0]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    content, v = picked.split([project.nope, project.v], -1)
    k = torch.cat([content, k_rope[0][:, None].expand(-1, HEADS, -1, -1)], -1)
    from manyheads.core.mask import Axis

    rope, axis, cut = made.positions[0], Axis(9, 0), slice(project.nope, None)
    q, k = (torch.cat([t[..., : project.nope], rope.turn(t[..., cut], axis)], -1) for t in (q, k))
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    a = (q @ k.mT * layout.scale).masked_fill(~seen, -torch.inf).softmax(-1)
    close(made(x, links=Links(types=KINDS)), project.o_proj((a @ v).transpose(1, 2).flatten(2)), 1e-9)


@pytest.mark.parametrize("block", [1, 4])
def test_decoding_remembers_kinds(block):
    made, x = make(SPEC), batch()
    full = made(x, links=Links(types=KINDS))
    got, cache = steps(made, x, KINDS, block)
    close(got, full, 1e-9)
    assert cache.bytes() == 2 * 9 * (RANK + ROPE + 1) * 8
    assert made.spec.cost(DIM, HEADS).cache_floats == RANK + ROPE + 1
    differ(decoded(made, x, block), full)  # all of kind 0
    cache = Cache()
    made(x[:, :8], cache=cache, links=Links(types=KINDS[:, :8]))
    rows = cache.site(0).growing["latent"].rows()
    rows[..., -1] = 0  # what they were is lost
    differ(made(x[:, 8:], cache=cache, links=Links(types=KINDS[:, 8:])), full[:, 8:])


def test_tokens_and_kinds_move_together():
    made, x = make(SPEC + " + rope(none)"), batch()
    order = torch.tensor([3, 0, 2, 1])
    last = made(x[:, :5], links=Links(types=KINDS[:, :5]))[:, 4]
    moved = torch.cat([x[:, order], x[:, 4:5]], 1), torch.cat([KINDS[:, order], KINDS[:, 4:5]], 1)
    close(made(moved[0], links=Links(types=moved[1]))[:, 4], last, 1e-9)
    differ(made(moved[0], links=Links(types=KINDS[:, :5]))[:, 4], last)


def test_kinds_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match="the kinds of 8 tokens; this pass has 9"):
        make(SPEC)(batch(), links=Links(types=KINDS[:, :8]))


# --- the move


def everything(attention):
    pairs = Pairs.of(attention)
    return tuple((p, g) for p in range(len(pairs.re)) for g in range(attention.layout.kv))


def kinds_of(x, seed=0):
    return (torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.5).long()


def through(made, x, kinds):
    return made(x, position_ids=torch.arange(x.shape[1])[None], links=Links(types=kinds))[0]


def half(attention):
    return tuple(each for each in everything(attention) if each[0] < 2)


def test_at_full_rank_every_kind_is_the_layer_with_fewer_pairs():
    source, x = layer(BASE), inputs()
    kinds, stats = kinds_of(x), measured(source, x)
    stage = ToMLA(10**6, half(source), HOW)(source, stats)
    made = ToTypedMLA(10**6, half(source))(source, stats, kind_moments(x, kinds))
    close(through(made, x, kinds), out(stage, x), 1e-6)
    whole = ToTypedMLA(10**6, everything(source))(source, stats, kind_moments(x, kinds))
    close(through(whole, x, kinds), out(source, x), 1e-6)


def test_a_singular_moment_is_exact_on_what_its_tokens_span():
    source, x = layer("gqa(kv_heads=2)"), inputs()
    kinds = torch.zeros(x.shape[:2], dtype=torch.long)
    kinds[:, :2] = 1
    x[kinds == 1] = x[0, 0] * torch.randn(8, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made = ToTypedMLA(10**6, half(source))(source, measured(source, x), kind_moments(x, kinds))
    assert torch.isfinite(torch.cat([p.flatten() for p in made.parameters()])).all()
    few = ToTypedMLA(3, half(source))(source, measured(source, x), kind_moments(x, kinds))
    stage = ToMLA(10**6, half(source), HOW)(source, measured(source, x))
    close(through(few, x[:, :2], kinds[:, :2]), out(stage, x[:, :2]), 1e-5)


def problem(source, turning):
    """What is factored, [K ; V] as rows of what stands still."""
    move = ToMLA(10**6, turning, HOW)
    stats = measured(source, inputs())
    slots = move.gauge(source, stats)
    content = Pairs.of(source).split(move._content(source, slots, move._components(source, slots)))
    from manyheads.convert.moves.common import linear_rows

    return torch.cat([content.flatten(0, 1), linear_rows(source.project.v_proj)])


@pytest.mark.parametrize("rank", [3, 8])
def test_the_error_of_each_kind_is_the_tail_of_its_spectrum_and_no_more_than_pooled(rank):
    source, x = layer("gqa(kv_heads=2)"), inputs(windows=8)
    x[:, ::2, : DIM // 2] *= 5
    kinds = torch.zeros(x.shape[:2], dtype=torch.long)
    kinds[:, ::2] = 1
    stats, turning = measured(source, x), half(source)
    each, pooled = kind_moments(x, kinds), kind_moments(x, torch.zeros_like(kinds), 1)
    made = ToTypedMLA(rank, turning)(source, stats, each).project
    joint = ToTypedMLA(rank, turning)(source, stats, pooled).project
    w = problem(source, turning)
    group = torch.arange(HEADS) // 2

    def lost(project, block, moment):
        down = torch.cat([project.kv_a_proj.weight, torch.zeros(len(project.kv_a_proj.weight), 1)], 1)
        up = project.kv_b_proj.weight[:, block * rank : (block + 1) * rank].unflatten(0, (HEADS, -1))
        keys, values = w.split([2 * 6, 2 * 6])
        want = torch.cat([keys.view(2, 6, -1)[group], values.view(2, 6, -1)[group]], 1)
        apart = (want - up @ down[block * rank : (block + 1) * rank]).view(2, 2, 12, -1)[:, 0].flatten(0, 1)
        return torch.einsum("rd,de,re->", apart, moment, apart).item()

    total = 0.0
    for kind, moment in enumerate(each):
        tail = torch.linalg.eigvalsh(w @ moment @ w.T).flip(-1)[rank:].sum().item()
        own, shared = lost(made, kind, moment), lost(joint, 0, moment)
        assert own == pytest.approx(tail, rel=1e-6) and own <= shared * (1 + 1e-9)
        total += 0.5 * own
    assert total <= lost(joint, 0, pooled[0]) * (1 + 1e-9)


def test_a_moment_of_one_is_the_svd_of_the_weights():
    source, x = layer("gqa(kv_heads=2)"), inputs()
    stats = measured(source, x)
    eye = torch.eye(DIM + 1, dtype=torch.float64)
    made = ToTypedMLA(5, half(source))(source, stats, [eye, eye])
    import dataclasses

    plain = ToMLA(5, half(source), dataclasses.replace(HOW, factor="weights"))(source, stats)
    close(through(made, x, kinds_of(x)), out(plain, x), 1e-6)


def test_rotation_kl_by_brute_force():
    source, x = layer("gqa(kv_heads=2)"), inputs(windows=2)
    found, pairs = rotation_kl(source, x), Pairs.of(source)
    assert found.shape == (2, 3) and (found >= 0).all()
    q, k = (p(x).unflatten(-1, (-1, 6)).transpose(1, 2) for p in (source.project.q_proj, source.project.k_proj))
    lag = torch.arange(16)[:, None] - torch.arange(16)
    for g in range(2):
        for stopped in range(3):
            total = 0.0
            for h in (2 * g, 2 * g + 1):
                scores = []
                for still in (False, True):
                    s = 0
                    for p in range(3):
                        a, b = (torch.complex(t[..., pairs.re[p]], t[..., pairs.im[p]]) for t in (q[:, h], k[:, g]))
                        turn = 0 if still and p == stopped else pairs.theta[p]
                        s = s + (a[:, :, None] * b.conj()[:, None] * torch.exp(1j * turn * lag)).real
                    scores.append((s * 6**-0.5).masked_fill(lag < 0, -1e30).log_softmax(-1))
                total += (scores[0].exp() * (scores[0] - scores[1])).sum(-1).mean()
            assert found[g, stopped] == pytest.approx(float(total), rel=1e-6)
    padded = torch.cat([torch.randn(2, 3, DIM, dtype=torch.float64), x], 1)
    valid = torch.arange(19)[None].expand(2, -1) >= 3
    where = (torch.arange(19) - 3).clamp_min(0).expand(2, -1)
    close(rotation_kl(source, padded, where, valid), found, 1e-9)


def test_a_pair_that_never_turns_does_not_matter():
    source, x = layer("gqa(kv_heads=2) + rope(fraction=0.67)"), inputs(windows=1)
    assert rotation_kl(source, x).shape == (2, 2)
    with torch.no_grad():
        source.project.k_proj.weight.view(2, 6, -1)[0, Pairs.of(source).re[0]] = 0
        source.project.k_proj.weight.view(2, 6, -1)[0, Pairs.of(source).im[0]] = 0
    assert rotation_kl(source, x)[0, 0] < 1e-12 < rotation_kl(source, x)[1, 0]


def test_which_pairs_stay():
    scores = torch.tensor([[0.1, 0.3, 0.2], [5.0, 1.0, 2.0]])
    assert most_turning(scores, 2) == ((0, 1), (1, 0)) and most_turning(scores, 4) == ((0, 1), (1, 0), (2, 0), (2, 1))
    for rotary in (3, 0, 8):
        with pytest.raises(OptionError, match="an even number of a head's rotary channels, 2 to 6"):
            most_turning(scores, rotary)


# --- whole models


IMAGE, TOKENS = 60, 14


def vlm(text="llama", **options):
    """A tiny random LLaVA: four image tokens of a 16 x 16 picture."""
    torch.manual_seed(0)
    kinds = {"llama": LlamaConfig, "qwen2": Qwen2Config}
    words = kinds[text](
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, bos_token_id=1, eos_token_id=None, pad_token_id=0, **options,
    )  # fmt: skip
    eyes = CLIPVisionConfig(
        hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
        projection_dim=16,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=eyes, text_config=words, image_token_index=IMAGE, image_seq_length=4, vision_feature_layer=-1
    )
    return AutoModelForImageTextToText.from_config(config).eval()


def pictures(seed=0, padding=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, IMAGE, (2, TOKENS), generator=generator)
    ids[:, 3:7] = IMAGE
    mask = torch.ones_like(ids)
    if padding:
        ids[0], mask[0] = torch.cat([torch.zeros(padding, dtype=torch.long), ids[0, :-padding]]), 1
        mask[0, :padding] = 0
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": mask}


@pytest.mark.parametrize("text", ["llama", "qwen2"])
def test_adopting_leaves_logits(text):
    made, given = vlm(text), pictures(padding=2)
    with torch.no_grad():
        before = made(**given).logits
        specs = adopt_language(made)
        after = made(**given).logits
    real = given["attention_mask"].bool()
    close(after[real], before[real], 1e-5)
    assert len(specs) == 2 and str(specs[0]).startswith("gqa(kv_heads=2") and adopt_language(made) == specs


@pytest.mark.parametrize("text", ["llama", "qwen2"])
def test_a_whole_conversion(text, tmp_path):
    made, given = vlm(text), [pictures(seed, padding=seed) for seed in range(3)]
    with torch.no_grad():
        adopt_language(made)
        before = made(**given[0]).logits
        found = shrink_vlm(made, given, rank=10**4, rotary=8)
        assert all(each.text < 1e-9 and each.image < 1e-9 for each in found)  # all pairs turn, nothing is lost
        close(made(**given[0]).logits, before, 1e-3)

        made = vlm(text)
        found = shrink_vlm(made, given, rank=12, rotary=4)
        assert all(0 < each.text < 1 and 0 < each.image < 1 for each in found)
        layers = language_attentions(made)
        assert {float(each.spec.cost(32, 4).cache_floats) for each in layers} == {12 + 2 * 4 + 1}
        full = made(**given[0]).logits
        cache, outs = Cache(), []
        for start, stop in ((0, 9), (9, 10), (10, 14)):
            cut = {
                "input_ids": given[0]["input_ids"][:, start:stop],
                "attention_mask": given[0]["attention_mask"][:, :stop],
            }
            pixels = {} if start else {"pixel_values": given[0]["pixel_values"]}
            outs.append(made(**cut, **pixels, cache=cache, use_cache=True).logits)
        close(torch.cat(outs, 1), full, 1e-4)
        written = made.generate(**given[0], max_new_tokens=4, do_sample=False)
        save_vlm(made, tmp_path / "m")
        again = load_vlm(tmp_path / "m")
        assert torch.equal(again(**given[0]).logits, full)
        assert torch.equal(again.generate(**given[0], max_new_tokens=4, do_sample=False), written)
    with pytest.raises(FileExistsError):
        save_vlm(made, tmp_path / "m")


def test_kinds_come_from_image_tokens():
    made, given, heard = vlm(), pictures(), []
    adopt_language(made)
    layer_one = language_attentions(made)[0]
    layer_one.register_forward_pre_hook(lambda m, a, kwargs: heard.append(kwargs["links"].types), with_kwargs=True)
    with torch.no_grad():
        made(**given)
        embeds = made.get_input_embeddings()(given["input_ids"])
        made(inputs_embeds=embeds, pixel_values=given["pixel_values"])
    for kinds in heard:
        assert torch.equal(kinds, (given["input_ids"] == IMAGE).long())
    assert len(heard) == 2


def test_what_cannot_be_is_refused_and_nothing_is_touched(tmp_path):
    from tests.convert.tiny import model

    with pytest.raises(AdoptError, match="a LlamaForCausalLM has no language model that reads image tokens"):
        adopt_language(model())
    turned = vlm()
    turned.model.language_model.config.rope_parameters |= {"mrope_section": [1, 1, 2]}
    with pytest.raises(AdoptError, match="three axes"):
        adopt_language(turned)
    assert type(turned.model.language_model.layers[0].self_attn).__name__ == "LlamaAttention"
    made, given = vlm(), pictures()
    for rank, rotary in ((0, 4), (8, 3), (8, 10)):
        with pytest.raises(OptionError, match="an even number from 2 to 8"):
            shrink_vlm(made, [given], rank, rotary)
    with pytest.raises(OptionError, match="no batch"):
        shrink_vlm(made, [], 8, 4)
    words = {"input_ids": torch.randint(2, IMAGE, (2, 9))}
    with pytest.raises(OptionError, match="no image token"):
        shrink_vlm(made, [words], 8, 4)
    with pytest.raises(OptionError, match="no token of kind 1"):
        kind_moments(inputs(), torch.zeros(4, 16))
    with pytest.raises(ValueError, match=r"has no manyheads\.json"):
        load_vlm(tmp_path)
