"""Contributions of heads, tokens and sublayers; singular signals between heads."""

import pytest
import torch
from tests.inspect import models
from torch import nn

import manyheads as mh
from manyheads import Attention, Decoder
from manyheads.inspect import CaptureError, flow_share, layers_of, routes, signals
from manyheads.inspect.flow_routes import proximity, renormalised
from manyheads.inspect.stream import passages


def test_contributions_of_a_known_case():
    parts = torch.tensor([[1.0, 1.0], [-1.0, 0.0], [2.0, 1.0]], dtype=torch.float64)
    for norm, want in (("l2", [0.43613, 0.0, 0.56387]), ("l1", [0.4, 0.0, 0.6])):
        near = proximity(parts, parts.sum(0), norm)
        torch.testing.assert_close(near / near.sum(), torch.tensor(want, dtype=torch.float64), atol=1e-4, rtol=0)
    got, skip = renormalised(torch.tensor([0.05, 0.15]), torch.tensor(0.8), 0.1)
    torch.testing.assert_close(got, torch.tensor([0.0, 0.15789]), atol=1e-5, rtol=0)
    assert skip.item() == pytest.approx(0.84210, abs=1e-5)


def biased():
    model = Decoder(50, "gqa(kv_heads=2, bias=qkvo)", 32, 4, layers=2).eval()
    with torch.no_grad():
        for p in model.stack.parameters():
            nn.init.normal_(p, std=0.3)
    return model, models.ids(2, 6, 50)


def gated():
    return Decoder(50, "gqa + moh(top=3)", 32, 4, layers=2).eval(), models.ids(2, 6, 50)


def stock():
    return models.decoder(), models.ids(2, 6)


def adopted():
    return mh.adopt(models.decoder("qwen2")), models.ids(2, 6)


MAKE = pytest.mark.parametrize("make", [stock, adopted, biased, gated])


@MAKE
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_parts_add_up_and_are_those_of_every_vector_formed(make, norm):
    model, ids = make()
    model = model.double()
    found = routes(model, ids, norm=norm)
    looks = []
    with (
        torch.no_grad(),
        mh.inspect.watching(layers_of(model), looks.append),
        passages(model, layers_of(model)) as seen,
    ):
        model(ids)
    for number, shares in found.layers.items():
        torch.testing.assert_close(shares.heads.sum((1, 3)) + shares.bias + shares.skip, torch.ones(2, 6).double())
        torch.testing.assert_close(shares.fed + shares.past, torch.ones(2, 6).double())
        assert all((x >= 0).all() for x in (shares.heads, shares.bias, shares.skip))
        assert shares.heads.triu(1).abs().max() == 0
        look, passage = looks[number], seen[number]
        weights = next(iter(look.weights())).weights
        factor = (look.out * look.read).sum(-1) / look.read.square().sum(-1).clamp_min(1e-30)
        v = look.call.v.repeat_interleave(4 // look.call.v.shape[1], 1)
        u = torch.einsum("bhts,bht,bhsd,hdm->bhtsm", weights, factor, v, layers_of(model)[number].output_weight())
        bias = look.project(torch.zeros_like(look.out))
        torch.testing.assert_close(u.sum((1, 3)) + bias, passage.attended, atol=1e-9, rtol=1e-7)
        p = proximity(u, passage.middle[:, None, :, None], norm) * torch.ones(6, 6).tril()
        others = proximity(passage.x, passage.middle, norm)
        others = others + (proximity(bias, passage.middle, norm) if bias.any() else 0)
        torch.testing.assert_close(shares.heads, p / (p.sum((1, 3)) + others)[:, None, :, None])
    share = flow_share(model, ids, norm=norm)
    torch.testing.assert_close(share.grid, found.importance().grid)


def test_routes_are_nested_and_end_where_they_start():
    model, ids = models.decoder(), models.ids(1, 6)
    found = routes(model, ids)
    loose, tight = (
        {(edge.source, edge.target) for edge in found.edges(threshold=threshold)} for threshold in (0.0, 0.1)
    )
    assert tight < loose and len(found.edges(threshold=1.0)) == 0
    assert all(edge.source.token <= edge.target.token and edge.share <= 1 + 1e-6 for edge in found.edges(3))
    assert {edge.target for edge in found.edges(3)} >= {("x", 2, 3), ("i", 1, 3)}
    assert found.importance(3, 0.05).grid.shape == (2, 4)
    into = {}
    for edge in found.edges(threshold=0.05):
        if edge.target.kind == "i":
            into[edge.target] = into.get(edge.target, 0) + edge.share
    assert all(total == pytest.approx(1, abs=1e-5) for total in into.values())


def test_a_silent_head_has_the_floor_alone_and_norms_behind_sublayers_are_refused():
    model, ids = models.decoder(), models.ids(1, 6)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, 8:16] = 0
    assert routes(model, ids).layers[1].heads[:, 1].max() < 1e-4
    layer = Decoder(50, "gqa", 32, 4, layers=1).eval()
    layer.stack.blocks[0].register_forward_hook(lambda m, a, out: (2 * out[0], out[1]))
    with pytest.raises(ValueError, match="is not its input plus"):
        routes(layer, models.ids(1, 6, 50))
    with pytest.raises(ValueError, match=r"layer 0 \(encoder.layer.0.*norms behind them \(as BERT"):
        routes(models.bert(), ids)
    with pytest.raises(ValueError, match="norm="):
        routes(model, ids, norm="l3")
    with pytest.raises(ValueError, match="has no weights to follow: it reads a state"):
        routes(Decoder(50, "retnet", 32, 4, layers=1), models.ids(1, 6, 50))
    with pytest.raises(ValueError, match="there is no token 6; there are 6, from 0 on"):
        routes(model, ids).edges(6)


# --- signals


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("ours", [False, True])
def test_singular_parts_are_the_score(kind, ours):
    model = models.decoder(kind).double()
    model = mh.adopt(model) if ours else model
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "bias" in name:
                p.add_(0.3 * torch.randn_like(p))
    reading = signals.Reading(model, models.ids(1, 7))
    found = next(
        found for head in range(4) for query in range(6) for found in [attempt(reading, 1, head, query)] if found
    )
    assert found.parts.sum().item() == pytest.approx(found.z, rel=1e-5)
    assert found.parts[found.chosen].sum() >= found.z * (1 - 1e-6)
    assert len(found.chosen) < len(found.parts) or (found.parts > 0).all()
    # what all that was written upstream contributes, the embedding too, is the stream's own part
    for side, vectors, at in (("query", found.u, found.query), ("key", found.v, found.key)):
        whole = found.contribution(side, reading.passages[1].x[0, at])
        first = reading.passages[0]
        each = [first.x[0, at], first.fed[0, at], *reading.written(0)[:, at]]
        written = sum(found.contribution(side, x) for x in each)
        if kind == "llama":  # its projections have no bias
            torch.testing.assert_close(written, whole)
        p = found.projection(side)
        torch.testing.assert_close(p @ p, p)
        assert len(vectors) == 33


def attempt(reading, layer, head, query):
    try:
        return reading.signal(layer, head, query, max(0, query - 2))
    except ValueError:
        return None


def test_svd_of_two_factors_and_the_fewest_parts():
    q, k = torch.randn(2, 20, 6, dtype=torch.float64)
    u, sigma, v = signals.qk_svd(q, k)
    torch.testing.assert_close(u * sigma @ v.mT, q @ k.mT)
    torch.testing.assert_close(sigma, torch.linalg.svdvals(q @ k.mT)[:6])
    g = torch.randn(6, 6, dtype=torch.float64)
    torch.testing.assert_close(signals.qk_svd(q @ g, k @ torch.linalg.inv(g).mT)[1], sigma)
    parts = torch.tensor([3.0, -2.0, 1.0, 0.5])
    assert signals.sparse_set(parts).tolist() == [0] and signals.sparse_set(-parts + 4).tolist() == [1, 3, 2, 0]
    sizes = [len(signals.sparse_set(-parts + 4, share)) for share in (0.2, 0.5, 0.8, 1.0)]
    assert sizes == sorted(sizes)
    with pytest.raises(ValueError, match="above zero"):
        signals.sparse_set(-parts)


def circuit(vocab=8):
    """Head 0.0 writes, at each token, its own token into other channels; head 1.0 looks at that of the query."""
    dim = 4 * vocab
    model = Decoder(vocab, f"gqa(head_dim={vocab}, scale=1.0) + rope(none)", dim, 2, layers=2, ffn="none").eval()
    model = model.double()
    token, written, other, _ = torch.eye(dim).double().split(vocab)
    with torch.no_grad():
        for p in model.stack.parameters():
            if p.ndim > 1:
                p.zero_()
        model.embedding.weight.copy_(token)
        one, two = (block.attention.project for block in model.stack.blocks)
        one.q_proj.weight[:vocab], one.k_proj.weight[:vocab] = 8 * token, token  # on itself, or the first such
        one.v_proj.weight[:vocab] = token
        one.o_proj.weight[:, :vocab] = written.T
        one.v_proj.weight[vocab:] = token  # the second head writes where nobody reads
        one.o_proj.weight[:, vocab:] = other.T
        two.q_proj.weight[:vocab], two.k_proj.weight[:vocab] = 8 * token, written
    return model


def test_the_trace_finds_the_planted_writer_and_taking_its_signal_out_ends_the_firing():
    model, ids = circuit(), torch.tensor([[0, 3, 5, 4, 3]])
    reading = signals.Reading(model, ids)
    assert reading.firing(1, 0, 2) == 2 and reading.firing(1, 1, 2) is None
    steps = signals.trace(reading, 1, 0, 2)
    assert [(s.writer, s.reader, s.side) for s in steps if s.reader == (1, 0)] == [((0, 0), (1, 0), "key")]
    found = reading.signal(1, 0, 2, 2)
    assert found.z == pytest.approx(float(found.parts.sum()))
    others = [k for k in range(8) if k not in found.chosen.tolist()][: len(found.chosen)]

    def weight(**options):
        with torch.no_grad(), mh.capture(model, 1, 0) as tape:
            if not options:
                model(ids)
            else:
                with signals.without_signal(reading, found, (0, 0), "key", **options):
                    model(ids)
        return tape[1].weights[0, 0, 2, 2].item()

    whole = weight()
    assert whole > 0.9
    for everywhere in (True, False):
        assert weight(everywhere=everywhere) < 0.5
        assert weight(everywhere=everywhere, vectors=others) == pytest.approx(whole, abs=0.02)


def test_what_else_acts_on_scores_is_noticed():
    model = Decoder(50, "gqa + alibi", 32, 4, layers=2).double().eval()
    reading = signals.Reading(model, models.ids(1, 7, 50))
    with pytest.raises(CaptureError, match="beside queries and keys"):
        reading.signal(1, 0, 6, 1)
    with pytest.raises(ValueError, match="of one text"):
        signals.Reading(model, models.ids(2, 7, 50))
    assert isinstance(layers_of(model)[0].module, Attention)
