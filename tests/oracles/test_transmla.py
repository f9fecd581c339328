"""RoRoPE, FreqFold, balance and the joint principal components (arXiv 2502.07864): what must hold of the move."""

import pytest
import torch
from tests.convert.test_moves_mla import keys_of, with_equal_keys
from tests.convert.tiny import DIM, HEADS, WIDTH, decode, everything, inputs, layer, measured, out
from tests.oracles.reference import close, differ
from tests.oracles.test_mha2mla import still_rows

from manyheads.convert.methods import Latent, TransMLA
from manyheads.convert.moves.gauge import gauge
from manyheads.convert.moves.mla import ToMLA, chosen
from manyheads.core.part import OptionError

WIDE = "gqa(kv_heads=2, head_dim=16, bias=qkvo)"
STILL = "rope(scaling=linear, factor=1e30)"
WHOLE = 10**6


def convert(source, x, count, fold, rank=WHOLE, **how):
    stats = measured(source, x)
    how = {"fold": fold, **how}
    return ToMLA(rank, chosen(source, stats, "uniform", "rorope", count, fold), TransMLA(**how))(source, stats)


@pytest.mark.parametrize("fold", [1, 2, 4, 8])
@pytest.mark.parametrize("spec", [WIDE, "gqa(head_dim=16)", f"{WIDE} + rope(pairing=interleaved)"])
def test_slots_are_real_rotations_of_the_heads_and_hold_their_energy(spec, fold):
    source, x = layer(spec), inputs()
    slots = gauge(source, measured(source, x), slots="rorope", fold=fold)
    assert slots.fold == fold and slots.mix.imag.abs().max() == 0
    close(slots.mix.mT @ slots.mix, torch.eye(slots.mix.shape[1]).to(slots.mix).expand_as(slots.mix), 1e-9)
    k = keys_of(source, x).unflatten(0, (-1, fold)).flatten(1, 2)
    parts = slots.inverse @ k
    close(slots.mix @ parts, k, 1e-9)
    energy = parts.abs().pow(2).sum(-1)
    close(energy.sum(), k.abs().pow(2).sum(), 1e-9)
    assert (energy.diff(dim=1) <= 1e-9 * energy.max()).all()
    real = torch.linalg.eigvalsh((k.real @ k.real.mT) + (k.imag @ k.imag.mT)).flip(-1)
    close(energy, real, 1e-7)


def test_all_slots_turning_is_exact():
    source, x = layer(WIDE), inputs()
    how = Latent("high", slots="rorope", factor="activations", stopped="zero")
    made = ToMLA(WHOLE, everything(source), how)(source, measured(source, x))
    close(out(made, x), out(source, x), 1e-9)


def test_one_key_head_is_exact():
    """Whose slots are its own numbers up to a sign."""
    source, x = layer("gqa(kv_heads=1, bias=qkvo)"), inputs()
    made = convert(source, x, 3, 1, rank=WIDTH)
    close(out(made, x), out(source, x), 1e-9)
    mix = gauge(source, measured(source, x), slots="rorope").mix
    close(mix.abs(), torch.ones_like(mix.real), 1e-9)


def test_equal_key_heads_are_exact_with_one_turning_slot():
    source, x = with_equal_keys(layer("gqa(bias=qkvo)")), inputs()
    close(out(convert(source, x, 3, 1), x), out(source, x), 1e-7)


@pytest.mark.parametrize("fold", [1, 2, 4, 8])
def test_what_does_not_turn_is_folded_exactly(fold):
    source, x = layer(f"{WIDE} + {STILL}"), inputs()
    made = convert(source, x, 2, fold)
    close(out(made, x), out(source, x), 1e-9)
    close(decode(made, x), out(source, x), 1e-9)


@pytest.mark.parametrize("fold", [2, 4, 8])
def test_kept_frequencies_are_every_nth_and_a_fold_takes_its_first_slots(fold):
    source, x = layer(WIDE), inputs()
    kept = chosen(source, measured(source, x), "uniform", "rorope", 4, fold)
    assert [pair for pair, _ in kept] == [0, 2, 4, 6]
    assert [slot for _, slot in kept] == [pair % fold // 2 for pair, _ in kept]
    made = convert(source, x, 4, fold)
    assert made.spec.by_stage["position"][0].pairs == (0, 2, 4, 6)
    theta = made.spec.by_stage["position"][0].frequencies(8)
    close(theta, 10000.0 ** (-2 * torch.arange(4) / 8), 1e-6)  # the table of a rotary key of eight channels
    differ(out(made, x), out(source, x), 1e-3)
    close(decode(made, x), out(made, x), 1e-9)


def test_a_fold_keeps_more_of_the_keys_turning():
    """In the share of their energy that the turning slots hold."""
    source, x = layer(WIDE), inputs()
    stats, shares = measured(source, x), []
    for fold in (2, 4, 8):
        k = keys_of(source, x).unflatten(0, (-1, fold)).flatten(1, 2)
        parts = gauge(source, stats, slots="rorope", fold=fold).inverse @ k
        shares.append((parts[:, : fold // 2].abs().pow(2).sum() / k.abs().pow(2).sum()).item())
    assert shares == sorted(shares) and shares[0] < shares[-1] - 0.01


@pytest.mark.parametrize("balance", [0.0, 0.01, 1.0, 30.0])
def test_balance_leaves_the_whole_layer_as_it_is(balance):
    source, x = layer(WIDE), inputs()
    close(out(convert(source, x, 4, 2, balance=balance), x), out(convert(source, x, 4, 2), x), 1e-9)


def moment(x):
    ones = torch.cat([x, torch.ones_like(x[..., :1])], -1).flatten(0, 1)
    return ones.T @ ones / len(ones)


def losses(source, x, rank, **how):
    """Of keys and of values, on the inputs."""
    stats = measured(source, x)
    turning = chosen(source, stats, "uniform", "rorope", 3)
    whole, low = (
        still_rows(ToMLA(r, turning, TransMLA(fold=1, **how))(source, stats)).view(2, -1, DIM + 1)
        for r in (WHOLE, rank)
    )
    return torch.einsum("ard,de,are->a", whole - low, moment(x), whole - low), whole


def test_without_balance_the_joint_rank_loses_the_dropped_eigenvalues():
    source, x = layer(), inputs()
    lost = []
    for rank in (2, 5, 9):
        both, whole = losses(source, x, rank, balance=0.0)
        rows = whole.flatten(0, 1)
        close(both.sum(), torch.linalg.eigvalsh(rows @ moment(x) @ rows.T)[:-rank].sum(), 1e-9)
        lost.append(both.sum().item())
    assert lost == sorted(lost, reverse=True)


def test_balance_moves_the_loss_between_keys_and_values_without_jumps():
    source, x = layer(), inputs()
    at = {balance: losses(source, x, 5, balance=balance)[0] for balance in (1e-4, 0.3, 1.0, 1.001, 3.0, 1e4)}
    keys, values = (torch.stack([at[b][side] for b in (1e-4, 0.3, 1.0, 3.0, 1e4)]) for side in (0, 1))
    assert (keys.diff() < 0).all() and (values.diff() > 0).all()
    close(at[1.001], at[1.0], 0.02)


def test_queries_are_scaled_as_the_source_scales_them():
    source, x = layer(WIDE), inputs()
    assert convert(source, x, 4, 2).layout.scale == source.layout.scale == 16**-0.5


def test_folds_that_do_not_divide_are_refused_with_those_that_do():
    source = layer(WIDE)
    with pytest.raises(OptionError, match=r"fold may be \[1, 2, 4, 8\]"):
        gauge(source, measured(source, inputs()), slots="rorope", fold=3)
    assert HEADS == 4
