"""Partial RoPE and an SVD of what is left (arXiv 2502.14837): what must hold of the move."""

import copy

import pytest
import torch
from tests.convert.test_gauge_invariance import gauged
from tests.convert.tiny import BASE, DIM, HEADS, WIDTH, decode, everything, inputs, layer, measured, out
from tests.oracles.reference import close, differ

from manyheads.convert.methods import MHA2MLA, read_method
from manyheads.convert.moves.common import linear_rows
from manyheads.convert.moves.mla import ToMLA, chosen
from manyheads.convert.stats import Pairs

PAIRS = WIDTH // 2
KEEPS = ["high", "low", "uniform", "norm"]
WHOLE = 10**6


def convert(source, x, keep="high", count=2, rank=WHOLE, **how):
    """`count` pairs in all heads together."""
    stats = measured(source, x)
    return ToMLA(rank, chosen(source, stats, keep, "heads", count), MHA2MLA(keep=keep, **how))(source, stats)


@pytest.mark.parametrize("spec", ["gqa(kv_heads=1)", "gqa", BASE, f"{BASE} + rope(pairing=interleaved)"])
def test_all_pairs_kept_and_the_rank_of_values_is_exact(spec):
    source, x = layer(spec), inputs()
    groups = source.layout.kv
    made = convert(source, x, "high", groups * PAIRS, rank=groups * WIDTH)
    close(out(made, x), out(source, x), 1e-9)
    close(decode(made, x), out(source, x), 1e-9)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("spec", [BASE, "gqa", f"{BASE} + rope(fraction=0.7)"])
def test_at_full_rank_the_other_pairs_are_the_source_without_their_rotation(spec, keep):
    source, x = layer(spec), inputs()
    groups, pairs = source.layout.kv, Pairs.of(source)
    kept = chosen(source, measured(source, x), keep, "heads", groups)  # one pair a head
    made, y = convert(source, x, keep, groups), []
    group = torch.arange(HEADS) // (HEADS // groups)
    turns = torch.zeros(groups, len(pairs.re))
    for pair, head in kept:
        turns[head, pair] = 1
    for window in x:
        q, k, v = (
            proj(window).view(-1, heads, WIDTH).transpose(0, 1)
            for proj, heads in (
                (source.project.q_proj, HEADS), (source.project.k_proj, groups), (source.project.v_proj, groups)
            )
        )  # fmt: skip
        rotated = []
        for rows, mask in ((q, turns[group]), (k, turns)):
            number = pairs.join(rows.transpose(1, 2))
            angle = mask[..., None] * (pairs.theta[:, None] * torch.arange(x.shape[1]))
            rotated.append(number * torch.polar(torch.ones_like(angle), angle))
        scores = torch.einsum("hpi,hpj->hij", rotated[0], rotated[1][group].conj()).real * source.layout.scale
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
        y.append(source.project.o_proj((scores.softmax(-1) @ v[group]).transpose(0, 1).flatten(1)))
    close(out(made, x), torch.stack(y), 1e-7)  # frequencies are float32
    differ(out(made, x), out(source, x), 1e-3)


def test_what_each_rule_keeps():
    source = layer("gqa(kv_heads=2, head_dim=16)")
    stats = measured(source, inputs())

    def kept(keep, count):
        return chosen(source, stats, keep, "heads", count)

    assert kept("high", 4) == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert kept("low", 4) == ((6, 0), (6, 1), (7, 0), (7, 1))
    assert kept("uniform", 4) == ((0, 0), (0, 1), (4, 0), (4, 1))
    assert kept("uniform", 16) == kept("high", 16) == kept("norm", 16)
    assert kept("uniform", 6) == kept("uniform", 4)  # no three of eight are evenly spread
    for g in range(2):
        size = stats.sizes[2 * g : 2 * g + 2].sum(0)
        assert sorted(p for p, head in kept("norm", 6) if head == g) == sorted(size.topk(3).indices.tolist())


def test_sizes_are_products_of_mean_norms():
    source, x = layer(), inputs()
    pairs, stats = Pairs.of(source), measured(source, x)
    q = source.project.q_proj(x).view(-1, HEADS, WIDTH)
    k = source.project.k_proj(x).view(-1, 2, WIDTH)
    for h in range(HEADS):
        for p in range(PAIRS):
            channels = [pairs.re[p], pairs.im[p]]
            want = q[:, h, channels].norm(dim=-1).mean() * k[:, h // 2, channels].norm(dim=-1).mean()
            close(stats.sizes[h, p], want, 1e-9)


def test_sizes_do_not_depend_on_position_or_on_what_turns_and_scales_a_pair():
    source, x = layer(), inputs()
    sizes = measured(source, x).sizes
    torch.manual_seed(1)
    close(measured(gauged(source), x).sizes, sizes, 1e-9)
    other = copy.deepcopy(source)
    for linear, factor in ((other.project.q_proj, 3.0), (other.project.k_proj, 1 / 3)):
        for tensor in linear.parameters():
            tensor.mul_(factor)
    close(measured(other, x).sizes, sizes, 1e-9)


def still_rows(made, groups=2):
    """[K ; V] of what stands still, `[G·(d + v), D + 1]`."""
    project = made.project
    up = linear_rows(project.kv_b_proj)[:, :-1].view(HEADS, 2 * WIDTH, -1)[:: HEADS // groups]
    down = linear_rows(project.kv_a_proj)[: project.rank]
    return torch.cat([(up[:, :WIDTH] @ down).flatten(0, 1), (up[:, WIDTH:] @ down).flatten(0, 1)])


@pytest.mark.parametrize("rank", [3, 7, 12])
def test_the_joint_svd_loses_the_dropped_singular_values_and_less_than_two(rank):
    source, x = layer(), inputs()
    whole = still_rows(convert(source, x))
    assert torch.linalg.matrix_rank(whole) == 2 * 2 * WIDTH - 4
    lost = {}
    for latents in ("joint", "split"):
        lost[latents] = (whole - still_rows(convert(source, x, rank=rank, latents=latents))).pow(2).sum()
    close(lost["joint"], torch.linalg.svdvals(whole)[rank:].pow(2).sum(), 1e-9)
    halves = zip(whole.view(2, -1, DIM + 1), (rank // 2, rank - rank // 2), strict=True)
    close(lost["split"], sum(torch.linalg.svdvals(half)[r:].pow(2).sum() for half, r in halves), 1e-9)
    assert lost["joint"] <= lost["split"]


@pytest.mark.parametrize("latents", ["joint", "split"])
@pytest.mark.parametrize("keep", KEEPS)
def test_views_and_decoding_agree_where_something_is_lost(keep, latents):
    source, x = layer(), inputs()
    made = convert(source, x, keep, 2, rank=8, latents=latents)
    assert made.spec.cost(DIM, HEADS).cache_floats == 8 + 4
    differ(out(made, x), out(source, x), 1e-3)
    close(decode(made, x), out(made, x), 1e-9)
    close(decode(made, x, 5), out(made, x), 1e-9)


def test_split_latents_do_not_mix():
    source, x = layer(), inputs()
    made = convert(source, x, rank=9, latents="split")
    up = linear_rows(made.project.kv_b_proj)[:, :-1].view(HEADS, 2 * WIDTH, 9)
    assert up[:, :WIDTH, 4:].abs().max() == 0 == up[:, WIDTH:, :4].abs().max()


@pytest.mark.parametrize("keep", KEEPS)
def test_nothing_that_turns_alike_is_lost(keep):
    """With every frequency at zero, removal is exact."""
    source, x = layer(f"{BASE} + rope(scaling=linear, factor=1e30)"), inputs()
    close(out(convert(source, x, keep), x), out(source, x), 1e-9)


def test_one_spec_line_says_it():
    method = read_method("mha2mla(keep=uniform, latents=split)")
    assert (method.keep, method.slots, method.factor, method.latents) == ("uniform", "heads", "weights", "split")
    assert len(everything(layer())) == 2 * PAIRS
