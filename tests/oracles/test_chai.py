"""Oracles of `chai`."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tests.oracles.reference import (
    DIM,
    HEADS,
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
)
from tests.oracles.reference import weights as softmax

from manyheads import Attention, Cache, OptionError, Site, Spec, SpecError
from manyheads.attention.linkage import average_linkage
from manyheads.attention.project import chai as module
from manyheads.core.kernel import using
from manyheads.core.mask import Axis
from manyheads.core.part import Part
from manyheads.testing import check

pytestmark = pytest.mark.filterwarnings("ignore:.*(flex_attention|return_lse)")

WIDTH, TOKENS, FIRST = 6, 9, 5


@pytest.fixture(params=["few queries", "many queries"])
def path(request, monkeypatch):
    """A map for each cluster, or fused attention head by head."""
    if request.param == "many queries":
        monkeypatch.setattr(module, "FEW_ROWS", 0)
    return request.param


def representatives(layer, x, mask=None):
    cache = Cache()
    layer(x, cache=cache, mask=mask)
    return cache.state(0)["representative"]


def parts(layer, x):
    p = layer.project
    q, k, v = (heads_of(f(x), layer.heads) for f in (p.q_proj, p.k_proj, p.v_proj))
    return rope(q), rope(k), v


def features(layer, x, first=FIRST):
    q, k, _ = parts(layer, x[:, :first])
    return softmax(q, k, q.shape[-1] ** -0.5)[:, :, 1:].flatten(-2)


def nearest_first(features, clusters):
    """Average linkage as a list of sets, one sequence at a time."""
    unit = torch.nn.functional.normalize(features, dim=-1)
    distance = 1 - unit @ unit.T
    groups = [[head] for head in range(len(features))]
    while len(groups) > clusters:
        pairs = [(i, j) for i in range(len(groups)) for j in range(i + 1, len(groups))]
        i, j = min(pairs, key=lambda pair: distance[groups[pair[0]]][:, groups[pair[1]]].mean())
        groups[i] += groups.pop(j)
    rep = torch.zeros(len(features), dtype=torch.long)
    for group in groups:
        rep[group] = min(group)
    return rep


def written_out(layer, x, rep, first=FIRST, mask=None):
    """Attention with every head, and with q and k of representatives; the first tokens take the former."""
    q, k, v = parts(layer, x)
    exact = softmax(q, k, WIDTH**-0.5, mask) @ v
    index = rep[:, :, None, None].expand_as(q)
    shared = softmax(q.gather(1, index), k.gather(1, index), WIDTH**-0.5, mask) @ v
    return join(torch.cat([exact[:, :, :first], shared[:, :, first:]], 2), layer.project.o_proj)


@pytest.mark.parametrize("clusters", [1, 2, 3])
def test_equals_attention_with_the_representatives_queries_and_keys(clusters, path):
    layer, x = make(f"chai(clusters={clusters})"), batch(size=3)
    rep = representatives(layer, x)
    assert all(len(row.unique()) == clusters for row in rep)
    for row, heads in zip(rep, features(layer, x), strict=True):
        assert torch.equal(row, nearest_first(heads, clusters))
    close(layer(x), written_out(layer, x, rep))


def test_as_many_clusters_as_heads_is_mha_bit_for_bit():
    layer, x = make(f"chai(clusters={HEADS})"), batch()
    assert torch.equal(layer(x), twin(layer, "gqa")(x)) and not layer.project.states


def test_one_cluster_shares_the_map_of_head_0(path):
    layer, x = make("chai(clusters=1)"), batch()
    assert not representatives(layer, x).any()
    close(layer(x), written_out(layer, x, torch.zeros(2, HEADS, dtype=torch.long)))


def test_the_first_tokens_are_exact():
    layer, x = make("chai(clusters=2, first=4)"), batch()
    plain = twin(layer, "gqa")(x)
    close(layer(x)[:, :4], plain[:, :4])
    differ(layer(x)[:, 4:], plain[:, 4:])
    close(layer(x[:, :3]), plain[:, :3])


def test_heads_of_equal_queries_and_keys_are_found_and_joined_exactly(path):
    """Heads 0, 2 and 5 are alike, and 1 and 4: three clusters of six heads lose nothing."""
    layer, x = make("chai(clusters=3)", heads=6, dim=36), batch(dim=36)
    alike = torch.tensor([0, 1, 0, 3, 1, 0])
    changes = {}
    for name in ("q_proj", "k_proj"):
        weight = getattr(layer.project, name).weight.detach().unflatten(0, (6, WIDTH))
        changes[f"project__{name}__weight"] = weight[alike].flatten(0, 1)
    layer = twin(layer, str(layer.spec), **changes)
    assert torch.equal(representatives(layer, x), alike.expand(2, -1))
    close(layer(x), twin(layer, "gqa")(x))


def test_a_heads_values_reach_its_own_output_only(path):
    layer, x = make("chai(clusters=1)"), batch()
    eye = torch.eye(DIM).double()
    layer = twin(layer, str(layer.spec), project__o_proj__weight=eye)
    v = layer.project.v_proj.weight.detach().clone()
    v[2 * WIDTH : 3 * WIDTH] += 1.0
    changed = (twin(layer, str(layer.spec), project__v_proj__weight=v)(x) - layer(x)).unflatten(-1, (HEADS, WIDTH))
    assert (changed[..., 2, :].abs() > 1e-3).all() and changed[..., [0, 1, 3], :].abs().max() < 1e-12


def test_clustering_follows_a_relabelling_of_heads():
    x = torch.rand(20, 7, 12, dtype=torch.float64)
    order = torch.randperm(7)
    rep, moved = average_linkage(x, 3), average_linkage(x[:, order], 3)
    same = rep[:, :, None] == rep[:, None, :]
    assert torch.equal(moved[:, :, None] == moved[:, None, :], same[:, order][:, :, order])
    lowest = torch.where(same, torch.arange(7), 7).amin(-1)
    assert torch.equal(rep, lowest)
    for row, heads in zip(rep, x, strict=True):
        assert torch.equal(row, nearest_first(heads, 3))


def test_features_are_rows_of_distributions():
    """So that cosine distances are between zero and one; row 0, which is constant, is not there."""
    layer, x = make("chai(clusters=2)"), batch()
    q, k, v = parts(layer, x)
    early = torch.cat([q, k, v], -1)[:, :, :FIRST]
    found = layer.project._features(early, torch.arange(FIRST).expand(2, -1))
    close(found[:, 0], features(layer, x))
    close(found.sum(-1), torch.full((2, 1, HEADS), FIRST - 1.0).double())
    unit = torch.nn.functional.normalize(found, dim=-1)
    distance = 1 - unit @ unit.transpose(-1, -2)
    assert distance.min() > -1e-12 and distance.max() < 1


@pytest.mark.parametrize("block", [1, 2, 4, 6])
def test_decode(block, path):
    layer, x = make("chai(clusters=2)"), batch()
    close(decoded(layer, x, block), layer(x))


def test_clusters_stay_as_they_were_chosen():
    layer, x, cache = make("chai(clusters=2)"), batch(), Cache()
    layer(x[:, :FIRST], cache=cache)
    rep = cache.state(0)["representative"]
    layer(10 * x[:, FIRST:], cache=cache)
    assert torch.equal(cache.state(0)["representative"], rep)
    cache = Cache()
    layer(torch.cat([x[:, :FIRST], 10 * x[:, FIRST:]], 1), cache=cache)
    assert torch.equal(cache.state(0)["representative"], rep)


def test_sequences_have_clusters_of_their_own_and_keep_them_when_reordered():
    layer, x, cache = make("chai(clusters=2)"), batch(size=6), Cache()
    assert len(representatives(layer, x).unique(dim=0)) > 1
    layer(x[:, :7], cache=cache)
    order = torch.tensor([3, 1, 1, 5, 0, 2])
    forked = cache.fork(order)
    close(layer(x[order, 7:], cache=forked), layer(x)[order, 7:])


def test_padding_between_and_around_tokens(path):
    """The first tokens are the first that are no padding, wherever it is; a row alone gives the same."""
    layer, x = make("chai(clusters=2)"), batch(tokens=12, size=4)
    valid = torch.ones(4, 12, dtype=torch.bool)
    valid[1, :4] = valid[2, 9:] = valid[3, [0, 3, 4]] = False
    cache, outs = Cache(), []
    for cut in (slice(0, 2), slice(2, 7), slice(7, 12)):
        outs.append(layer(x[:, cut], mask=valid[:, cut], cache=cache))
    for y in (layer(x, mask=valid), torch.cat(outs, 1)):
        for row in range(4):
            close(y[row, valid[row]], layer(x[row : row + 1, valid[row]])[0])


def test_positions_and_times_may_begin_anywhere():
    layer, x = make("chai(clusters=2)"), batch()
    close(layer(x, positions=torch.arange(50, 50 + TOKENS)[None]), layer(x), 1e-9)
    mask = (torch.rand(2, 1, TOKENS, TOKENS) < 0.6) & triangle()
    close(layer(x, positions=Axis(TOKENS, 50), mask=mask), layer(x, mask=mask), 1e-9)


def test_given_masks_hide_first_keys_too(path):
    """From every head of a first query, and from every cluster's."""
    layer, x = make("chai(clusters=2)"), batch()
    mask = (torch.rand(2, 1, TOKENS, TOKENS) < 0.6) & triangle() | torch.eye(TOKENS, dtype=torch.bool)
    rep = representatives(layer, x)
    close(layer(x, mask=mask), written_out(layer, x, rep, mask=mask))


def test_packed_documents_have_clusters_of_their_own(path):
    layer, x = make("chai(clusters=2)"), batch(tokens=20)
    lengths = (8, 3, 9)
    segment = torch.arange(3).repeat_interleave(torch.tensor(lengths))[None]
    alone = torch.cat([layer(document) for document in x.split(lengths, 1)], 1)
    position = torch.cat([torch.arange(length) for length in lengths])[None]
    axis = Axis(20, 0, given_position=position, segment=segment)
    close(layer(x, positions=axis), alone)
    cache = Cache()  # the newest document goes on
    first = layer(x[:, :18], positions=axis[:18], cache=cache)
    last = layer(x[:, 18:], positions=axis[18:], cache=cache)
    close(torch.cat([first, last], 1), alone)


@pytest.mark.parametrize(
    "spec", ["chai(clusters=2)", "chai(clusters=2) + window(4) + softmax(cap=3.0)", "chai(clusters=1, first=2) + kha"]
)
def test_laws_where_heads_go_one_by_one(monkeypatch, spec):
    monkeypatch.setattr(module, "FEW_ROWS", 0)
    check(spec)


def test_kernels(monkeypatch):
    layer, x = make("chai(clusters=2)"), batch()
    want = layer(x)
    with using("flash_cpu"), pytest.raises(ValueError, match="Spread works on the scores"):
        layer(x)
    monkeypatch.setattr(module, "FEW_ROWS", 0)
    with using("flash_cpu"):
        close(layer(x), want)


def test_the_released_clusters():
    """376 of 1024 over 32 layers of 32 heads: 31.6 % of a cache of keys and values."""
    cost, plain = 0, 0
    for layer in range(32):
        site = Site(layer, 32)
        with torch.device("meta"):
            made = Attention("chai", 64, 32, site=site)
        cost += made.spec.cost(64, 32, site).cache_floats
        plain += Attention("gqa", 64, 32, site=site).spec.cost(64, 32, site).cache_floats
        assert made.entries["k"].heads == (28 if layer < 3 else 18 if layer < 15 else 8 if layer < 17 else 4)
    assert cost == (376 + 1024) * 2
    assert round(float(1 - cost / plain), 3) == 0.316


@pytest.mark.parametrize(("options", "bias"), [("", 0), (", bias=qkvo", 4 * DIM)])
def test_cost(options, bias):
    layer, cache = make(f"chai(clusters=3{options})"), Cache()
    cost = layer.spec.cost(DIM, HEADS)
    assert cost.parameters == 4 * DIM**2 + bias
    assert cost.cache_floats == (3 + HEADS) * WIDTH
    assert cost.pair_flops == 2 * (3 + HEADS) * WIDTH
    decoded(layer, batch(size=1), 4, cache)
    state = FIRST * (3 * HEADS * WIDTH + 1) + HEADS
    assert cache.bytes() == (TOKENS * (3 + HEADS) * WIDTH + state) * 8 == cost.cache_bytes(TOKENS, 8)


@pytest.mark.parametrize(
    ("options", "site", "words"),
    [
        ("clusters=5", Site(), ["clusters=5 of 4 heads", "1 to 4"]),
        ("clusters=0", Site(), ["clusters=0"]),
        ("clusters=2, first=1", Site(), ["first=1", "at least 2"]),
        ("clusters=2", Site(1, 2, kv_source=0), ["cannot read the rows of another"]),
    ],
)
def test_refusals(options, site, words):
    with pytest.raises(OptionError) as error:
        Attention(f"chai({options})", DIM, HEADS, site=site)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("line", "site", "words"),
    [
        ("chai(2) + talking_heads", Site(), ["'talking_heads' breaks 'one map'", "which 'chai' relies on"]),
        ("chai(2) + alibi", Site(), ["'alibi' breaks 'alike heads'", "which 'chai' relies on"]),
        ("chai(2)", Site(causal=False), ["'chai' needs 'causal'"]),
        ("chai(2)", Site(causal=True, cross=True), ["'chai' needs 'self'"]),
    ],
)
def test_what_does_not_go_together(line, site, words):
    """Clusters share a map, so no head may have a mask or a normaliser of its own."""
    with pytest.raises(SpecError) as error:
        Attention(line, DIM, HEADS, site=site)
    assert all(word in str(error.value) for word in words), str(error.value)


@dataclass(frozen=True)
class Late(Part):
    """A transform of rows as they are read."""

    name: ClassVar[str] = "late"
    stage: ClassVar = "transform"
    at: ClassVar = "read"


def test_rows_must_be_final_when_clusters_are_chosen():
    with pytest.raises(SpecError, match=r"'late' breaks 'cached heads'.*which 'chai' relies on"):
        Spec((*Spec.parse("chai(2)").parts, Late())).resolve(Site())
    Spec((*Spec.parse("gqa").parts, Late())).resolve(Site())
