"""Measures of heads: what they say of maps that are known, fused passes against the explicit map, planted heads."""

import math
from functools import partial

import pytest
import torch
from tests.inspect import models
from tests.inspect.planted import Copier, counting
from torch import nn

import manyheads as mh
from manyheads import Attention, Decoder, ablate, capture
from manyheads.inspect import HeadTable, layers_of, measures, roles
from manyheads.inspect.measures import measure


def padded(layer, x, valid):
    return lambda: layer(x, mask=valid)


def one(layer, run, function, fewest=2):
    return measure(layer, run, {"it": function}, fewest=fewest)["it"][0]


# --- maps that are known


def even(spec="gqa + rope(none)", tokens=64):
    """Every query looks at all it sees alike."""
    layer = Attention(spec, 16, 2).double().eval()
    nn.init.zeros_(layer.project.q_proj.weight)
    return layer, torch.randn(1, tokens, 16, dtype=torch.float64)


def test_even_maps():
    layer, x = even()
    n = torch.arange(2, 65, dtype=torch.float64)
    wanted = {
        "entropy": n.log().mean(), "distance": ((n - 1) / 2).mean(), "sink": (1 / n).mean(),
        "spread": ((n * n - 1) / 12).sqrt().mean(), "self": (1 / n).mean(), "previous": (1 / n).mean(),
        "confidence": (1 / n).mean(), "normalised": torch.tensor(1.0),
        "local": torch.where(n < 8, 1.0, 8 / n).mean(),
    }  # fmt: skip
    found = measure(layer, x, {
        "entropy": measures.entropy, "distance": measures.distance, "sink": measures.sink_mass,
        "spread": measures.distance_spread, "self": measures.self_mass, "previous": measures.previous_token,
        "confidence": measures.confidence, "normalised": partial(measures.entropy, normalised=True),
        "local": partial(measures.local_mass, window=8),
    })  # fmt: skip
    for name, want in wanted.items():
        torch.testing.assert_close(found[name][0], want.double().expand(2), msg=name)
    # α of the first token, over all queries that see it: 1/T Σ 1/t = 0.0741 at T = 64
    assert one(layer, x, measures.sink_mass, fewest=1)[0].item() == pytest.approx(0.0741, abs=5e-5)


def test_how_much_of_a_map_its_distances_explain():
    """Of a head that always looks one token back, of one that content decides, and by the formula."""
    model = Copier().eval()
    twice = measures.repeated(29, 16, 2, start=29)
    found = measure(model, twice, {"r2": measures.position_bias})["r2"]
    layer, x = even("gqa + rope(none)", 40)
    nn.init.normal_(layer.project.q_proj.weight, std=2.0)
    assert found[0][0] > 0.95 and (one(layer, x, measures.position_bias) < 0.5).all()
    layer, x = Attention("gqa(kv_heads=2)", 32, 4).double().eval(), torch.randn(1, 12, 32, dtype=torch.float64)
    with torch.no_grad(), capture(layer) as tape:
        layer(x)
    for head, w in enumerate(tape[0].weights[0]):
        pairs = [(t - s, w[t, s]) for t in range(12) for s in range(t + 1)]
        values = torch.stack([value for _, value in pairs])
        means = torch.stack([w.diagonal(-offset).mean() for offset, _ in pairs])
        want = 1 - (values - means).square().sum() / (values - values.mean()).square().sum()
        torch.testing.assert_close(one(layer, x, measures.position_bias)[head], want)


SPECS = ["gqa(kv_heads=2)", "gqa + alibi", "mla(rank=16, rope_dim=4)", "gqa + window(size=[2, 5, 9, 4])",
         "gqa + softmax(cap=2.0)", "gqa + talking_heads", "gqa + mgk", "gqa + differential"]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_fused_measures_are_those_of_the_explicit_map(spec, side):
    torch.manual_seed(1)
    layer = Attention(spec, 32, 4).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    x, place = torch.randn(3, 11, 32, dtype=torch.float64), torch.arange(11)
    pads = torch.tensor([[0], [4], [2]])
    valid = place >= pads if side == "left" else place < 11 - pads
    ids = torch.randint(4, (3, 11))
    run = padded(layer, x, valid)
    with torch.no_grad(), capture(layer) as tape:
        run()
    # keys of a query that became several have the place of their token
    w = tape[0].weights
    key = tape[0].keys.time.expand(3, -1)[:, None, None, :]
    t = place[:, None]
    first = torch.where(valid, place, 99).amin(1)[:, None, None, None]
    counts = ((w != 0).sum(-1) >= 2) & valid[:, None]
    p = w.abs() / w.abs().sum(-1, keepdim=True).clamp_min(1e-300)

    def mean(values, known=None):
        known = counts & (True if known is None else known)
        values = torch.where(known, values, 0.0).sum((0, 2)) / known.expand_as(values).sum((0, 2))
        return values

    def sum_of(where):
        exists = ((w != 0) & where).any(-1)
        return mean((w * where).sum(-1), exists)

    wanted = {
        measures.entropy: mean(torch.special.entr(p).sum(-1)),
        measures.distance: mean((w * (t - key)).sum(-1)),
        measures.self_mass: sum_of(key == t),
        measures.previous_token: sum_of(key == t - 1),
        measures.sink_mass: sum_of(key == first),
        partial(measures.local_mass, window=3): sum_of((key <= t) & (key > t - 3)),
        measures.confidence: mean(w.amax(-1)),
    }
    for function, want in wanted.items():
        got = one(layer, run, function)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6, msg=f"{function}: {got} {want}")
    if tape[0].keys.length == 11:
        torch.testing.assert_close(token_mass(layer, x, valid, ids, measures.duplicate_token),
                                   sum_of((ids[:, None, None, :] == ids[:, None, :, None]) & (key < t)))  # fmt: skip


class WithTokens(nn.Module):
    def __init__(self, layer, x, valid):
        super().__init__()
        self.layer, self.x, self.valid = layer, x, valid

    def forward(self, ids):
        return self.layer(self.x, mask=self.valid)


def token_mass(layer, x, valid, ids, function):
    return measure(WithTokens(layer, x, valid), ids, {"it": function})["it"][0]


def test_masses_of_a_partition_are_one():
    layer, x = Attention("gqa(kv_heads=2)", 32, 4).double().eval(), torch.randn(2, 40, 32, dtype=torch.float64)
    profile = one(layer, x, measures.distance_profile)
    assert profile.shape == (4, 12)
    torch.testing.assert_close(profile.sum(-1), torch.ones(4, dtype=torch.float64))


def test_what_is_undefined_is_not_zero_and_texts_add_up():
    model = mh.adopt(models.decoder())
    new = torch.arange(9)[None]  # no token twice
    assert measure(model, new, measures.duplicate_token)["duplicate_token"].grid.isnan().all()
    a, b = models.ids(1, 12), models.ids(1, 12, seed=7)
    both = measure(model, [a, b], [measures.entropy, measures.duplicate_token])
    once = measure(model, torch.cat([a, b]), [measures.entropy, measures.duplicate_token])
    for name, table in both.items():
        torch.testing.assert_close(table.grid, once[name].grid, equal_nan=True, atol=1e-6, rtol=1e-6)
    assert isinstance(both["entropy"], HeadTable) and both["entropy"].grid.shape == (2, 4)
    assert len(both["entropy"].top(3)) == 3 and both["entropy"].top(1)[0][2] == both["entropy"].grid.max()


def test_stock_and_adopted_models_measure_the_same():
    stock, ids = models.decoder(), models.ids(2, 20)
    some = [measures.entropy, measures.sink_mass, measures.previous_token, measures.induction, measures.output_size]
    first = measure(stock, ids, some)
    for name, table in measure(mh.adopt(stock), ids, some).items():
        torch.testing.assert_close(table.grid, first[name].grid, atol=1e-4, rtol=1e-3, equal_nan=True)
    assert measure(models.bert(), ids, measures.entropy)["entropy"].grid.isfinite().all()


def test_measures_of_tokens_need_tokens():
    layer = Attention("gqa", 32, 4).eval()
    with pytest.raises(ValueError, match="needs token ids"):
        measure(layer, torch.randn(1, 5, 32), measures.induction)


# --- planted heads


def test_planted_heads_are_found_and_taking_either_out_ends_the_copying():
    model = Copier().eval()
    twice = measures.repeated(29, 16, 3, start=29)
    assert torch.equal(twice[:, 1:17], twice[:, 17:])
    found = roles(model, twice, twice)
    assert found.labels == {(0, 0): ("previous",), (1, 0): ("induction",)}
    assert found.scores["previous"][0][0] >= 0.99 and found.scores["previous"][0][1] < 0.2
    assert found.scores["induction"][1][0] >= 0.99
    assert found.scores["induction"][0][0] < 0.1 and found.scores["induction"][0][1] < 0.1
    # what evenly spread weights would give is 1 / n_t where there is one such key
    n = torch.arange(18, 34, dtype=torch.float64)
    assert found.chance["induction"][1][0].item() == pytest.approx((1 / n).mean().item(), rel=1e-5)

    def right():
        with torch.no_grad():
            return (model(twice)[:, 17:-1].argmax(-1) == twice[:, 18:]).double().mean().item()

    assert right() == 1.0
    for layer in (0, 1):
        with ablate(model, {layer: [0]}):
            assert right() < 0.3
        with ablate(model, {layer: [1]}):
            assert right() == 1.0


def test_a_planted_copying_head_retrieves_a_needle():
    model = Copier().eval()
    prompt = torch.tensor([[9, 8, 7, 1, 2, 3, 4, 5, 10, 11, 12, 1]])
    found = measures.retrieval(model, prompt, (4, 8), new_tokens=4)
    assert found.written == [2, 3, 4, 5] and found.recall == 1.0
    assert found.scores[1][0] == 1.0 and found.scores[1][1] == 0.0 and found.scores[0].max() == 0.0
    with pytest.raises(ValueError, match="first < last"):
        measures.retrieval(model, prompt, (8, 4))


def test_retrieval_in_generation_with_a_cache():
    model, ids = mh.adopt(models.decoder()), models.ids(1, 12)
    found = measures.retrieval(model, ids, (2, 6), new_tokens=5)
    again = measures.retrieval(Decoder(99, "gqa", 32, 4, layers=2).eval(), ids, (2, 6), new_tokens=5)
    assert len(found.written) == len(again.written) == 5
    assert found.scores.grid.shape == (2, 4) and (found.scores.grid <= 1).all()


def test_planted_successor_and_copying_heads():
    model = counting()
    lists = [[2, 3, 4, 5, 6], [7, 8, 9]]
    assert measures.successor(model, lists).grid.tolist() == [[1.0, 0.0]] * 2
    assert measures.successor(model, lists, step=0).grid.tolist() == [[0.0, 1.0]] * 2
    with torch.no_grad():
        model.stack.blocks[1].attention.project.o_proj.weight.zero_()
    assert measures.successor(model, lists)[1].tolist() == [0.0, 0.0]  # ties are no hits
    stock = models.decoder()
    ours = measures.successor(stock, lists)
    torch.testing.assert_close(measures.successor(mh.adopt(stock), lists).grid, ours.grid)
    with pytest.raises(ValueError, match="two or more different"):
        measures.successor(model, [[3]])


# --- redundancy


def test_divergence_and_correlation_of_maps():
    torch.manual_seed(0)
    layer, x = Attention("gqa + rope(none)", 32, 4).double().eval(), torch.randn(2, 7, 32, dtype=torch.float64)
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            weight = getattr(layer.project, name).weight
            weight.mul_(3)
            weight[8:16] = weight[:8]  # head 1 is a copy of head 0
        with capture(layer) as tape:
            layer(x)
    w = tape[0].weights
    middle = (w[:, :, None] + w[:, None]) / 2
    kl = lambda p, q: torch.where(p > 0, p * (p / q).log(), 0.0).sum(-1)
    want = (kl(w[:, :, None], middle) + kl(w[:, None], middle)) / 2
    found = measure(layer, x, [measures.js_divergence, measures.correlation])
    torch.testing.assert_close(found["js_divergence"][0], want[..., 1:].mean((0, 3)), atol=1e-9, rtol=1e-6)
    assert found["js_divergence"][0][0, 1] == 0 and (found["js_divergence"][0] <= math.log(2)).all()
    r = torch.stack([torch.corrcoef(w[1, :, t, : t + 1]) for t in range(1, 7)])
    rows = torch.stack([torch.corrcoef(w[0, :, t, : t + 1]) for t in range(1, 7)])
    torch.testing.assert_close(found["correlation"][0], torch.cat([r, rows]).mean(0), atol=1e-6, rtol=1e-6)
    groups = measures.clusters(found["correlation"][0], 0.95)
    assert [0, 1] in groups and sorted(head for group in groups for head in group) == [0, 1, 2, 3]


def test_disjoint_maps_diverge_by_ln_2():
    from manyheads.inspect.measures.maps import Behind

    layer, x = even("gqa + rope(none) + window(size=[1, 9])", 9)
    profile = one(layer, x, measures.masses([Behind(0)]), fewest=1)
    assert profile[0, 0] == 1.0
    d = one(layer, x, measures.js_divergence, fewest=1)
    assert 0 < d[0, 1] < math.log(2) and d[0, 0] == 0


def test_cka_of_copies_of_rotated_and_of_silent_heads():
    torch.manual_seed(0)
    layer, x = Attention("gqa", 32, 4).double().eval(), torch.randn(2, 30, 32, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64)).Q
    with torch.no_grad():
        project = layer.project
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(project, name).weight[8:16] = getattr(project, name).weight[:8]
        project.o_proj.weight[:, 8:16] = 2 * turn @ project.o_proj.weight[:, :8]  # the same, turned and longer
        project.o_proj.weight[:, 24:] = 0
        with capture(layer, what="out") as tape:
            layer(x)
    found = measures.cka(layer, x)[0]
    c = [project.o_proj.weight.unflatten(1, (4, 8))[:, h] @ tape[0].out[:, h].flatten(0, 1).T for h in range(3)]
    c = [(each - each.mean(1, keepdim=True)).T for each in c]
    want = (c[0].T @ c[2]).square().sum() / ((c[0].T @ c[0]).norm() * (c[2].T @ c[2]).norm())
    torch.testing.assert_close(found[0, 2], want)
    torch.testing.assert_close(found[0, 1], torch.ones((), dtype=torch.float64))
    assert found[3].isnan().all() and found[0, 0] == pytest.approx(1.0)


# --- weights


def test_the_edges_of_noise_and_what_is_planted_in_it():
    torch.manual_seed(0)
    noise = torch.randn(1024, 64, dtype=torch.float64)
    found = measures.marchenko_pastur(noise)
    assert (found.lower, found.upper) == (pytest.approx(0.5625, rel=0.02), pytest.approx(1.5625, rel=0.02))
    values = torch.linalg.svdvals(noise).square() / 1024
    assert found.outliers == 0 and found.lead < 1 and found.share == 0 and values.min() > found.lower
    signal = noise + 3 * torch.outer(torch.randn(1024, dtype=torch.float64), torch.randn(64, dtype=torch.float64))
    found = measures.marchenko_pastur(signal)
    assert found.outliers == 1 and found.lead > 1 and measures.marchenko_pastur(signal.T) == found


def test_ranks():
    torch.manual_seed(0)
    q, k = torch.randn(2, 48, 8, dtype=torch.float64)
    sigma = measures.singular_values(q, k)
    torch.testing.assert_close(sigma, torch.linalg.svdvals(q @ k.T)[:8])
    change = torch.randn(8, 8, dtype=torch.float64)
    torch.testing.assert_close(measures.singular_values(q @ change, k @ torch.linalg.inv(change).T), sigma)
    flat = torch.ones(5)
    assert measures.effective_rank(flat) == pytest.approx(5) and measures.stable_rank(flat) == 5
    assert measures.effective_rank(torch.tensor([1.0, 0.0, 0.0])) == 1
    # two Gaussian factors of 1024 x 64 are no Marchenko-Pastur matter: 60 and 35 of 64
    sigma = measures.singular_values(*torch.randn(2, 1024, 64, dtype=torch.float64))
    assert measures.effective_rank(sigma, power=2).item() == pytest.approx(60, abs=1)
    assert measures.effective_rank(sigma).item() == pytest.approx(63, abs=1)
    assert measures.stable_rank(sigma).item() == pytest.approx(35, abs=2)


@pytest.mark.parametrize("spec", ["gqa(kv_heads=2, bias=qkv) + rope(none)", "mla(rank=16, rope_dim=4, view=expanded)"])
def test_head_weights_are_how_scores_depend_on_the_input(spec):
    layer = Attention(spec, 32, 4).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    try:
        q, k = measures.head_weights(layers_of(layer)[0])
    except ValueError as error:
        assert "no linear functions" in str(error) and "mla" in spec  # its latent has a norm
        return
    assert q.shape[:2] == k.shape[:2] == (4, 32)
    x = torch.randn(1, 1, 32, dtype=torch.float64)
    if "bias" in spec:
        for projection in (layer.project.q_proj, layer.project.k_proj):
            nn.init.zeros_(projection.bias)
    with torch.no_grad(), capture(layer, what="scores") as tape:
        layer(x)
    want = torch.einsum("hde,hfe,d,f->h", q, k, x[0, 0], x[0, 0]) * layer.layout.scale
    torch.testing.assert_close(tape[0].scores[0, :, 0, 0], want)


def test_a_bottleneck_is_a_head_with_no_direction_to_spare():
    model = models.decoder()
    with torch.no_grad():
        weight = model.model.layers[0].self_attn.q_proj.weight
        weight[2:8] = 0  # head 0 compares along two directions
    found = measures.qk_rank(model)
    assert found["effective_rank"][0][0] <= 2 + 1e-6 and found["bottleneck"][0].tolist()[0] == 0
    assert found["bottleneck"].grid.sum() >= 5
    ours = measures.qk_rank(mh.adopt(model))
    torch.testing.assert_close(found["stable_rank"].grid, ours["stable_rank"].grid, atol=1e-4, rtol=1e-4)
    assert measures.qk_rank(Attention("gqa + rope", 32, 4))["stable_rank"].grid.shape == (1, 4)


# --- importance


def linear_loss(output, inputs):
    """A loss that is linear in what the last layer adds."""
    return (output * torch.arange(output.shape[-1])).sum((1, 2))


def test_the_gate_is_the_gradient_and_of_a_linear_loss_the_whole_effect():
    layer, x = (
        Attention("gqa(kv_heads=2)", 32, 4).double().eval(),
        torch.randn(3, 6, 32, dtype=torch.float64),
    )
    with torch.no_grad():
        layer.project.o_proj.weight[:, 8:16] = 0  # head 1 says nothing
    kinds = {kind: measures.importance(layer, x, linear_loss, reduction=kind)[0]
             for kind in ("sample", "token", "signed", "fisher")}  # fmt: skip
    out = measures.ablation(layer, x, linear_loss)[0]
    torch.testing.assert_close(-kinds["signed"], out)
    assert all(kind[1] == 0 for kind in kinds.values()) and out[1].abs() < 1e-12
    assert (6 * kinds["token"] >= kinds["sample"] - 1e-12).all() and (
        kinds["sample"] >= kinds["signed"].abs() - 1e-12
    ).all()
    assert all(parameter.grad is None for parameter in layer.parameters())
    unit = measures.importance(layer, x, linear_loss, normalised=True)[0]
    assert unit.norm().item() == pytest.approx(1.0)
    # values and outputs in another basis say the same
    with torch.no_grad():
        layer.project.v_proj.weight.mul_(3)
        layer.project.o_proj.weight.div_(3)
    torch.testing.assert_close(measures.importance(layer, x, linear_loss)[0], kinds["sample"])


@pytest.mark.parametrize("make", [models.decoder, lambda: mh.adopt(models.decoder())])
def test_importance_of_a_language_model_by_finite_differences(make):
    model, ids = make().double(), models.ids(3, 8)
    found = measures.importance(model, ids, reduction="signed")
    for layer, head in ((0, 2), (1, 0)):
        losses = []
        for scale in (1 - 1e-3, 1 + 1e-3):
            with torch.no_grad(), mh.steer(model, {layer: [head]}, scale=scale):
                losses.append(measures.next_token_loss(model(ids), ids).mean())
        assert found[layer][head].item() == pytest.approx(((losses[1] - losses[0]) / 2e-3).item(), rel=2e-3)
    want = model(ids, labels=ids).loss.item()
    assert measures.next_token_loss(model(ids), ids).mean().item() == pytest.approx(want, rel=1e-5)
    removed = measures.ablation(model, ids, layers=[1])
    assert list(removed) == [1] and removed[1].shape == (4,)
