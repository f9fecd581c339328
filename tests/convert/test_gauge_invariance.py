"""What changes nothing in a layer must change nothing, or little, in its conversion; and what it may change."""

import copy

import pytest
import torch
from tests.convert.tiny import BASE, HEADS, WIDTH, decode, error, inputs, layer, measured, out, whole
from tests.oracles.gauge import bounded, pair_turn
from tests.oracles.reference import close

from manyheads.convert.moves.gauge import Gauge, gauge
from manyheads.convert.moves.gqa import ToGQA
from manyheads.convert.moves.mla import ToMLA, choose
from manyheads.convert.stats import Pairs

MHA = "gqa(kv_heads=4, bias=qkvo)"


def gauged(source, keys=True, values=True):
    """RoPE-safe turns and sizes of each group's query-key pairs, and any map between its V and O."""
    other = copy.deepcopy(source)
    project, groups = other.project, source.layout.kv
    a = torch.stack([pair_turn(WIDTH) for _ in range(groups)])
    b = torch.stack([bounded(WIDTH) for _ in range(groups)])
    each = HEADS // groups

    def on_rows(linear, maps):
        for tensor in (linear.weight, linear.bias):
            tensor.copy_((maps @ tensor.view(len(maps), WIDTH, -1)).view_as(tensor))

    if keys:
        on_rows(project.q_proj, a.repeat_interleave(each, 0))
        on_rows(project.k_proj, torch.linalg.inv(a).transpose(1, 2))
    if values:
        on_rows(project.v_proj, b)
        o = project.o_proj.weight.view(-1, HEADS, WIDTH)
        project.o_proj.weight.copy_(
            torch.einsum("ehv,hvw->ehw", o, torch.linalg.inv(b).repeat_interleave(each, 0)).flatten(1)
        )
    return other


@pytest.mark.parametrize("move", [whole, lambda source: ToGQA(source.layout.kv)])
def test_where_nothing_is_lost_a_gauge_does_not_matter(move):
    source, x = layer(), inputs()
    for each in (source, gauged(source)):
        made = move(each)(each, measured(each, x))
        close(out(made, x), out(source, x), 1e-9)
        close(decode(made, x), out(source, x), 1e-9)


def moved_by(move, keys, values, seed, spec):
    """How far a gauge moves a lossy conversion, in units of its loss."""
    source, x = layer(spec, seed), inputs()
    torch.manual_seed(seed)
    other = gauged(source, keys, values)
    a, b = (move(each)(each, measured(each, x)) for each in (source, other))
    return (out(a, x) - out(b, x)).norm().item() / (out(a, x) - out(source, x)).norm().item()


def latent(source):
    return ToMLA(10, choose(gauge(source, measured(source, inputs())).damage, 2))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("keys", "values"), [(True, False), (False, True), (True, True)])
def test_losses_fitted_to_scores_and_outputs_are_the_same_in_every_gauge(keys, values, seed):
    """Up to the damping of their metrics."""
    assert moved_by(latent, keys, values, seed, BASE) < 0.1
    assert moved_by(lambda source: ToGQA(2), keys, values, seed, MHA) < 0.1


@pytest.mark.parametrize("how", ["mean", "first"])
@pytest.mark.parametrize(("keys", "values"), [(True, False), (False, True)])
def test_pooled_weights_depend_on_the_gauge(how, keys, values):
    assert moved_by(lambda source: ToGQA(2, how), keys, values, 0, MHA) > 0.3


def mixed(source, mix):
    """A gauge by hand: any complex mixing of each frequency's key heads `[P, G, G]`."""
    still = torch.zeros(mix.shape[:2])
    return Gauge(mix, torch.linalg.inv(mix), still, torch.zeros(mix.shape[1], len(mix), dtype=mix.dtype))


def test_any_complex_mixing_of_one_frequency_over_heads_is_exact():
    source, x = layer(), inputs()
    mix = torch.randn(WIDTH // 2, 2, 2, dtype=torch.complex128)
    made = whole(source)(source, measured(source, x), mixed(source, mix))
    close(out(made, x), out(source, x), 1e-9)


def lifted_scores(source, x, change_q, change_k):
    """Scores in which every query reads all key heads (zero outside its own), after changes of both sides."""
    pairs, project, groups = Pairs.of(source), source.project, source.layout.kv
    q, k = (
        pairs.join(proj(x[0]).view(-1, count, WIDTH).permute(1, 2, 0))
        for proj, count in ((project.q_proj, HEADS), (project.k_proj, groups))
    )
    own = torch.eye(groups, dtype=torch.float64).repeat_interleave(HEADS // groups, 0)
    q = change_q(q[:, None] * own[..., None, None])  # [H, G, P, T]
    turn = torch.polar(torch.ones(len(pairs.re), x.shape[1]), pairs.theta.float()[:, None] * torch.arange(x.shape[1]))
    return torch.einsum("hgpi,gpj->hij", q * turn, (change_k(k) * turn).conj()).real


def test_the_two_halves_of_a_pair_must_be_mixed_alike():
    source, x, same = layer(), inputs(), lambda rows: rows
    a, b = (torch.randn(3, 2, 2, dtype=torch.float64) for _ in range(2))

    def by(matrix, rows):
        return torch.einsum("pgs,...spt->...gpt", matrix, rows)

    def apart(first, second):
        return lambda rows: torch.complex(by(first, rows.real), by(second, rows.imag))

    def dual(matrix):
        return torch.linalg.inv(matrix).transpose(1, 2)

    plain = lifted_scores(source, x, same, same)
    close(lifted_scores(source, x, apart(dual(a), dual(a)), apart(a, a)), plain, 1e-6)
    broken = lifted_scores(source, x, apart(dual(a), dual(b)), apart(a, b))
    close(broken.diagonal(dim1=1, dim2=2), plain.diagonal(dim1=1, dim2=2), 1e-6)  # nothing turns at distance zero
    assert (broken - plain).norm() > 0.1 * plain.norm()


@pytest.mark.parametrize("move", [latent, lambda source: ToGQA(2)])
def test_scores_that_are_all_alike_make_no_difference_to_the_fit(move):
    """The size of inputs, as conversions see it, is a unit and no more."""
    source, x = layer(BASE if move is latent else MHA), inputs()
    stats = measured(source, x)
    made = move(source)(source, stats)
    scaled = move(source)(source, stats._replace(keys=stats.keys * 49, rows=stats.rows * 49))
    close(out(scaled, x), out(made, x), 1e-8)
    assert error(made, source, x) > 1e-4
