"""Oracles of `qkv-sharing`: tied projections, their rotations, and the bias that makes them asymmetric."""

import pytest
import torch
from tests.oracles.reference import (
    DIM,
    HEADS,
    TOKENS,
    batch,
    close,
    decoded,
    differ,
    heads_of,
    join,
    make,
    rope,
    triangle,
    twin,
    weights,
)

from manyheads import Attention, Cache, OptionError, Site, Spec, SpecError
from manyheads.attention import layer as pipeline
from manyheads.core.part import Part, Position
from manyheads.core.position import angles, inverse_frequencies, rotate
from manyheads.testing import check, shared_rows

WIDTH = 6
TIES = ["kv", "qk", "qkv"]
BIDIRECTIONAL = Site(causal=False)
FORMS = ["tie=kv", "tie=qk", "tie=qkv", "kv_heads=2", "kv_heads=1", "rotation=back", "rope_dim=4"]
FORMS += ["tie=qkv, rotation=back", "tie=qkv, rope_dim=4"]


def call_of(layer, x, monkeypatch, **options):
    """What the layer asks of the kernel."""
    seen = []
    solve = pipeline.attend
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "attend", lambda call, *a, **k: seen.append(call) or solve(call, *a, **k))
        layer(x, **options)
    return seen[0].whole


def logits(layer, x, monkeypatch):
    call = call_of(layer, x, monkeypatch)
    scores = call.q @ call.k.transpose(-1, -2) * call.scale
    return scores if call.bias is None else scores + call.bias(slice(None), slice(None))


@pytest.mark.parametrize("position", ["", " + rope(none)"])
@pytest.mark.parametrize(("tie", "copies"), [("kv", "v"), ("qk", "q"), ("qkv", "qv")])
def test_equals_copied_projections_and_gradients_sum_over_the_copies(tie, copies, position):
    tied, x = make(f"qkv-sharing(tie={tie}){position}"), batch()
    k = tied.project.k_proj
    copied = {
        f"project__{name}_proj__{part}": getattr(k, part).detach() for name in copies for part in ("weight", "bias")
    }
    full = twin(tied, f"gqa(bias=qkvo){position}", **copied)
    close(full(x), tied(x))
    for each in (full, tied):
        each(x).pow(2).sum().backward()
    for part in ("weight", "bias"):
        parts = [getattr(getattr(full.project, f"{name}_proj"), part).grad for name in ["k", *copies]]
        close(getattr(k, part).grad, sum(parts), 1e-9)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_form_repeats_its_tied_heads(kv_heads):
    layer, x = make(f"qkv-sharing(kv_heads={kv_heads})"), batch()
    copied = {f"project__v_proj__{part}": getattr(layer.project.k_proj, part).detach() for part in ("weight", "bias")}
    close(twin(layer, f"gqa(kv_heads={kv_heads}, bias=qkvo)", **copied)(x), layer(x))
    if kv_heads == HEADS:
        assert torch.equal(twin(layer, "qkv-sharing")(x), layer(x))


@pytest.mark.parametrize("spec", ["tie=qk", "tie=qkv", "tie=qkv, rotation=back", "tie=qkv, rope_dim=4"])
@pytest.mark.parametrize("position", ["", " + rope(none)"])
def test_tied_queries_give_symmetric_scores(spec, position, monkeypatch):
    layer, x = make(f"qkv-sharing({spec}){position}"), batch()
    scores = logits(layer, x, monkeypatch)
    close(scores, scores.transpose(-1, -2))
    assert (scores.diagonal(dim1=-2, dim2=-1) >= 0).all()
    k = layer.project.queries(_flow(layer, x))
    close(scores.diagonal(dim1=-2, dim2=-1), k.pow(2).sum(-1) * layer.layout.scale)
    scores = logits(make("qkv-sharing"), x, monkeypatch)
    differ(scores, scores.transpose(-1, -2))


def _flow(layer, x):
    return layer._flow(x, None, None, None, None, None)


@pytest.mark.parametrize("tie", TIES)
def test_permuting_tokens_permutes_outputs_without_mask_and_position(tie):
    layer, x, order = make(f"qkv-sharing(tie={tie}) + rope(none)", site=BIDIRECTIONAL), batch(), torch.randperm(TOKENS)
    close(layer(x[:, order]), layer(x)[:, order])


def test_one_projection_for_all_is_a_hopfield_update():
    layer, x = make("qkv-sharing(tie=qkv, bias=false) + rope(none)", DIM, 1, site=BIDIRECTIONAL), batch()
    for weight in (layer.project.k_proj.weight, layer.project.o_proj.weight):
        weight.data.copy_(torch.eye(DIM))
    close(layer(x), (x @ x.transpose(1, 2) / DIM**0.5).softmax(-1) @ x)


@pytest.mark.parametrize("rotation", ["read", "back"])
def test_rotation_written_out(rotation):
    layer, x = make(f"qkv-sharing(kv_heads=2, rotation={rotation})"), batch()
    p = layer.project
    q, k = heads_of(p.q_proj(x), HEADS), heads_of(p.k_proj(x), 2).repeat_interleave(2, 1)
    a = weights(rope(q), rope(k), WIDTH**-0.5)
    o = a @ k
    if rotation == "back":
        theta = inverse_frequencies(WIDTH, 10000.0)
        at = torch.arange(TOKENS)
        turned = torch.stack([rotate(k, *angles((at - t)[None], theta, k.dtype), "half") for t in at], 2)
        o = torch.einsum("bhts,bhtsd->bhtd", a, turned)
    close(layer(x), join(o, p.o_proj), 1e-6 if rotation == "back" else 1e-11)


def test_channels_that_rotate_apart_written_out():
    layer, x = make("qkv-sharing(kv_heads=2, rope_dim=4)"), batch()
    p = layer.project
    q, k = heads_of(p.q_proj(x), HEADS), heads_of(p.k_proj(x), 2).repeat_interleave(2, 1)
    turning = rope(p.rope_proj(x)[:, None]).expand(-1, HEADS, -1, -1)
    q = torch.cat([q[..., :WIDTH], rope(q[..., WIDTH:])], -1)
    close(layer(x), join(weights(q, torch.cat([k, turning], -1), 10**-0.5) @ k, p.o_proj))


@pytest.mark.parametrize("scaling", ["", " + rope(interleaved, scaling=yarn, factor=4.0)"])
@pytest.mark.parametrize("spec", FORMS)
def test_only_distances_matter(spec, scaling):
    """A rotated key as the value without turning back would break this."""
    layer, x, positions = make(f"qkv-sharing({spec}){scaling}"), batch(), torch.arange(TOKENS)[None]
    close(layer(x, positions=positions + 1000), layer(x), 1e-9)
    differ(layer(x, positions=positions * 2), layer(x))
    if "back" in spec:
        layer.project.turns_values = False
        differ(layer(x, positions=positions + 1000), layer(x))


@pytest.mark.parametrize("scaling", ["", " + rope(scaling=yarn, factor=4.0)", " + rope(fraction=0.67)"])
def test_a_lone_token_gets_its_key_back(scaling):
    layer, x = make(f"qkv-sharing(rotation=back){scaling}"), batch(1)
    k = heads_of(layer.project.k_proj(x), HEADS)
    close(layer(x, positions=torch.tensor([[7]])), join(k, layer.project.o_proj))


def test_turning_back_keeps_transforms_before_rotation():
    """With a transform of keys and one of values, both act on the un-rotated key, which alone is then cached."""
    layer, x = make("qkv-sharing(rotation=back) + kha"), batch()
    close(layer(x, positions=torch.arange(TOKENS)[None] + 1000), layer(x), 1e-9)
    close(decoded(layer, x), layer(x))
    same = twin(layer, str(layer.spec), **{f"transforms__0__{n}": torch.eye(WIDTH).double() for n in "qkv"})
    close(same(x), twin(layer, "qkv-sharing(rotation=back)")(x))


@pytest.mark.parametrize("spec", ["tie=kv", "tie=qkv", "kv_heads=2"])
def test_outputs_are_convex_combinations_of_visible_keys(spec, monkeypatch):
    layer, x = make(f"qkv-sharing({spec}) + rope(none)"), batch()
    seen = []
    output = layer.project.output
    monkeypatch.setattr(layer.project, "output", lambda o, flow: seen.append(o) or output(o, flow))
    call = call_of(layer, x, monkeypatch)
    assert call.k is call.v
    k = call.k.repeat_interleave(HEADS // call.k.shape[1], 1)
    a = weights(call.q, k, call.scale)
    assert (a >= 0).all() and (a.masked_select(~triangle()) == 0).all()
    close(a.sum(-1), torch.ones(2, HEADS, TOKENS).double())
    close(seen[0], a @ k)


def test_key_reuse_with_a_closed_gate_is_the_multi_query_form():
    """MFA-Key-Reuse adds a query rank and a map from key to value."""
    reuse, x = make(f"mfa(width=8, key_reuse=true, q_rank={DIM}, norm=false)"), batch()
    reuse.project.value_gate.data.zero_()
    reuse.project.q_a_proj.weight.data.copy_(torch.eye(DIM))
    q = reuse.project.q_b_proj.weight.detach()
    close(twin(reuse, "qkv-sharing(kv_heads=1, head_dim=8, bias=false)", project__q_proj__weight=q)(x), reuse(x))


@pytest.mark.parametrize("spec", FORMS)
def test_decode_and_cache_bytes(spec):
    layer, cache, x = make(f"qkv-sharing({spec})"), Cache(), batch()
    close(decoded(layer, x, 1, cache), layer(x))
    stored = 2 * HEADS * WIDTH if spec == "tie=qk" else WIDTH * {"kv_heads=2": 2, "kv_heads=1": 1}.get(spec, HEADS)
    stored += 4 * ("rope_dim" in spec)
    assert layer.spec.cost(DIM, HEADS).cache_floats == stored
    assert cache.bytes() == len(x) * TOKENS * stored * 8


def test_cost():
    """3 D² for one tie, 2 D² for both, D²(2 + G/H) grouped; caches -50 %, -87.5 % and -96.9 %."""
    dim, heads = 1024, 16
    full = Spec.parse("gqa").cost(dim, heads)
    for options, squares, saved in (
        ("tie=kv", 3, 0.5), ("tie=qk", 3, 0), ("tie=qkv", 2, 0.5), ("kv_heads=4", 2.25, 0.875),
        ("kv_heads=1", 2 + 1 / 16, 1 - 1 / 32),
    ):  # fmt: skip
        cost = Spec.parse(f"qkv-sharing({options}, bias=false)").cost(dim, heads)
        assert cost.parameters == squares * dim**2
        assert 1 - cost.cache_floats / full.cache_floats == saved
    assert Spec.parse("qkv-sharing").cost(dim, heads).parameters == 3 * dim**2 + 3 * dim


@pytest.mark.parametrize("of", ["pair", "distance"])
@pytest.mark.parametrize("tie", ["kv", "qk", "qkv"])
def test_plus_starts_as_the_form_without_it(of, tie):
    torch.manual_seed(0)
    plus = Attention(f"qkv-sharing-plus(tie={tie}, of={of})", DIM, HEADS).double()
    assert str(plus.spec).startswith("qkv-sharing") and not plus.positions[0].weight.any()
    close(plus(x := batch()), twin(plus, f"qkv-sharing(tie={tie}) + rope(none)")(x))


def bias_of(layer, x, monkeypatch):
    return call_of(layer, x, monkeypatch).bias(slice(None), slice(None))


def sinusoids(position, width):
    rate = 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    angle = position[..., None].double() * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width]


def test_bias_of_pairs_written_out(monkeypatch):
    layer, x, at = make("qkv-sharing(tie=qkv) + pair-bias"), batch(), torch.arange(TOKENS)
    phi = sinusoids(at, 5)
    both = torch.cat([phi[:, None].expand(-1, TOKENS, -1), phi[None].expand(TOKENS, -1, -1)], -1)
    want = torch.einsum("hm,tsm->hts", layer.positions[0].weight, both)
    close(bias_of(layer, x, monkeypatch)[0], want, 1e-6)
    inert = layer.positions[0].weight.detach().clone()
    inert[:, :5] = 0  # the same for every key
    close(twin(layer, str(layer.spec), positions__0__weight=inert)(x), layer(x))


def test_bias_of_distances_written_out(monkeypatch):
    layer, x, at = make("qkv-sharing(tie=qkv) + pair-bias(of=distance)"), batch(), torch.arange(TOKENS)
    phi = sinusoids(at[:, None] - at, 10)
    phi = torch.cat([phi[..., 0::2], phi[..., 1::2]], -1)
    want = torch.einsum("hm,tsm->hts", layer.positions[0].weight, phi)
    close(bias_of(layer, x, monkeypatch)[0], want, 1e-6)
    close(layer(x, positions=at[None] + 1000), layer(x), 1e-3)  # angles are float32


@pytest.mark.parametrize("of", ["pair", "distance"])
def test_a_symmetric_bias_keeps_scores_symmetric_and_another_does_not(of, monkeypatch):
    layer, x = make(f"qkv-sharing(tie=qkv) + pair-bias(of={of})"), batch()
    scores = logits(layer, x, monkeypatch)
    differ(scores, scores.transpose(-1, -2))
    weight = layer.positions[0].weight.data
    if of == "pair":
        weight[:, 5:] = weight[:, :5]
    else:
        weight[:, :5] = 0  # the sines
    scores = logits(layer, x, monkeypatch)
    close(scores, scores.transpose(-1, -2), 1e-9)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("spec", ["tie=qk", "tie=qkv, rotation=back", "kv_heads=2, rope_dim=2"])
def test_other_forms_hold_to_the_laws(spec):
    check(f"qkv-sharing({spec})")
    check(f"qkv-sharing({spec})", laws=[shared_rows])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("tie=qk, kv_heads=2", "each of 4 queries is a key itself"),
        ("tie=qkv, kv_heads=1", "each of 4 queries is a key itself"),
        ("kv_heads=3", "kv_heads may be"),
        ("kv_heads=0", "must be positive"),
        ("rope_dim=3", "does not pair up"),
        ("tie=qk, rotation=back", "exclude each other"),
        ("tie=qk, rope_dim=4", "exclude each other"),
        ("rotation=back, rope_dim=4", "exclude each other"),
    ],
)
def test_refusals(options, why):
    with pytest.raises(OptionError, match=why):
        Attention(f"qkv-sharing({options})", DIM, HEADS)


def test_other_refusals():
    with pytest.raises(OptionError, match="give head_dim"):
        Attention("qkv-sharing", 25, 4)
    with pytest.raises(SpecError, match=r"needs 'self'.*nearest legal: qkv-sharing\(tie=kv\)"):
        Attention("qkv-sharing(tie=qk)", DIM, HEADS, site=Site(cross=True, causal=False))
    with pytest.raises(SpecError, match=r"nearest legal: qkv-sharing\(rotation=read\)"):
        Attention("qkv-sharing(rotation=back) + qk-norm", DIM, HEADS)
    with pytest.raises(OptionError, match="channels=5"):
        Attention("pair-bias(channels=5)", DIM, HEADS)
    biased, plain = (Spec.parse(line).cost(DIM, HEADS) for line in ("pair-bias(channels=6)", "rope(none)"))
    assert biased.parameters == plain.parameters + 6 * HEADS


def test_a_part_that_cannot_turn_back_may_say_so():
    class Stiff(Part):
        name, stage, needs = "stiff", "position", frozenset({"still values"})

    back = Spec.parse("qkv-sharing(rotation=back)").parts
    with pytest.raises(SpecError, match=r"'stiff' needs 'still values'.*breaks; nearest legal: qkv-sharing\(rotation"):
        Spec((*back, Stiff())).resolve(Site())
    assert Spec((*Spec.parse("qkv-sharing").parts, Stiff())).resolve(Site())

    class Turning(Position):
        def turn(self, x, axis):
            return -x

    with pytest.raises(NotImplementedError, match="Turning turns but does not turn back"):
        Turning().turn_back(batch(), None)
