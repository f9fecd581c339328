"""Low rank under the activations' covariance, and ranks by layer (arXiv 2603.17946): what must hold of the move."""

import pytest
import torch
from tests.convert.tiny import DIM, WIDTH, decode, inputs, layer, measured, out
from tests.oracles.reference import close, differ
from tests.oracles.test_mha2mla import still_rows
from tests.oracles.test_transmla import moment

from manyheads.convert.methods import CARE, Latent
from manyheads.convert.moves.low_rank import allocate
from manyheads.convert.moves.mla import ToMLA, chosen
from manyheads.convert.stats import power
from manyheads.core.part import OptionError

WHOLE = 10**6


def convert(source, stats, rank=WHOLE, keys=None, how=None):
    turning = chosen(source, stats, "uniform", "rorope", 1)
    return ToMLA(rank, turning, how or CARE(fold=1), keys=keys)(source, stats)


def halves(made):
    return still_rows(made).view(2, -1, DIM + 1)


def lost(a, b, x):
    return torch.einsum("ard,de,are->a", a - b, moment(x), a - b)


@pytest.mark.parametrize("rank", [4, 8, 13])
def test_the_error_is_that_of_the_dropped_singular_values_and_below_plain_svd(rank):
    source, x = layer(), inputs()
    stats = measured(source, x)
    whole, low = halves(convert(source, stats)), halves(convert(source, stats, rank))
    root, parts = power(moment(x), 0.5, 0), (rank // 2, rank - rank // 2)
    want = [torch.linalg.svdvals(rows @ root)[r:].pow(2).sum() for rows, r in zip(whole, parts, strict=True)]
    close(lost(whole, low, x), torch.stack(want), 1e-7)
    plain = halves(convert(source, stats, rank, how=CARE(fold=1, factor="weights")))
    assert (lost(whole, low, x) <= lost(whole, plain, x)).all()


def test_it_is_the_projection_on_the_principal_components_of_the_outputs():
    """W C^{1/2} cut and mapped back by C^{-1/2}, without any such root."""
    source, x = layer(), inputs()
    stats = measured(source, x)
    whole, low = halves(convert(source, stats)), halves(convert(source, stats, 8))
    root = power(moment(x), 0.5, 0)
    for rows, cut in zip(whole, low, strict=True):
        u, s, vh = torch.linalg.svd(rows @ root, full_matrices=False)
        close(cut, (u[:, :4] * s[:4]) @ vh[:4] @ torch.linalg.inv(root), 1e-7)
        p = torch.linalg.eigh(rows @ moment(x) @ rows.T)[1][:, -4:]
        close(cut, p @ p.T @ rows, 1e-9)


def test_white_inputs_give_the_plain_svd_and_sizes_of_inputs_do_not_matter():
    source, x = layer(), inputs()
    stats = measured(source, x)
    white = stats._replace(plain=torch.eye(DIM + 1, dtype=torch.float64))
    plain = convert(source, stats, 8, how=CARE(fold=1, factor="weights"))
    turning = chosen(source, stats, "uniform", "rorope", 1)
    same = ToMLA(8, turning, CARE(fold=1))(source, white)
    other = ToMLA(8, turning, CARE(fold=1, factor="weights"))(source, white)
    close(still_rows(same), still_rows(other), 1e-9)
    scaled = convert(source, stats._replace(plain=49 * stats.plain), 8)
    close(out(scaled, x), out(convert(source, stats, 8), x), 1e-9)
    differ(out(plain, x), out(scaled, x), 1e-4)


def test_whole_ranks_are_exact_and_decoding_is_the_full_pass():
    source, x = layer(), inputs()
    stats = measured(source, x)
    split = convert(source, stats)
    joint = convert(source, stats, how=CARE(fold=1, latents="joint"))
    close(out(split, x), out(joint, x), 1e-9)
    assert split.spec.cost(DIM, 4).cache_floats == 2 + min(2 * WIDTH - 2, DIM + 1) + 2 * WIDTH
    low = convert(source, stats, 9, keys=2)
    assert low.spec.cost(DIM, 4).cache_floats == 9 + 2
    close(decode(low, x), out(low, x), 1e-9)


def test_repeated_heads_have_the_same_subspace_with_larger_values():
    """Each σ grows by √(H/G), so that shares stay."""
    rows, c = torch.randn(6, 9, dtype=torch.float64), torch.randn(9, 30, dtype=torch.float64)
    many = rows.repeat_interleave(2, 0)
    one, two = (torch.linalg.svdvals(r @ c)[:6] for r in (rows, many))
    close(two, one * 2**0.5, 1e-9)
    other = geometric(0.6, 6)
    assert allocate([one**2, other], 6, [1, 1], [6, 6]) == allocate([two**2, other], 6, [1, 1], [6, 6])


def geometric(ratio, count=400, size=1.0):
    return size * ratio ** torch.arange(count, dtype=torch.float64)


def test_ranks_sum_to_the_budget_within_their_bounds():
    spectra = [geometric(0.5, 12), geometric(0.9, 12), geometric(0.7, 12)]
    for total in (6, 11, 17, 24):
        ranks = allocate(spectra, total, [2, 2, 2], [8, 8, 8])
        assert sum(ranks) == total and all(2 <= rank <= 8 for rank in ranks)
    for total in (5, 25):
        with pytest.raises(OptionError, match="6 to 24 in all"):
            allocate(spectra, total, [2, 2, 2], [8, 8, 8])


def test_equal_spectra_share_evenly_and_sizes_do_not_count():
    spectra = [geometric(0.8, size=size) for size in (1.0, 10.0, 1e-6)]
    assert sorted(allocate(spectra, 18, [1] * 3, [20] * 3)) == [6, 6, 6]
    curved = [torch.arange(1, 400, dtype=torch.float64) ** -2 * size for size in (1.0, 100.0)]
    assert allocate(curved, 14, [1, 1], [20, 20]) == [7, 7]


def test_a_layer_that_has_nothing_left_gets_no_more():
    short = torch.cat([torch.ones(3, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)])
    assert allocate([short, geometric(0.9, 12)], 12, [1, 1], [12, 12]) == [3, 9]


def test_geometric_spectra_have_a_constant_share_and_the_steepest_goes_first():
    """1 - q for energies of ratio q: whoever has the larger share keeps it to the bound."""
    assert allocate([geometric(0.8), geometric(0.5)], 30, [1, 1], [25, 25]) == [5, 25]


def test_brute_force_greedy():
    torch.manual_seed(0)
    spectra = [torch.rand(9, dtype=torch.float64).sort(descending=True).values for _ in range(4)]
    ranks = [1] * 4
    for _ in range(10):
        shares = [s[r] / s[r:].sum() if r < 9 else -1.0 for s, r in zip(spectra, ranks, strict=True)]
        best = max(range(4), key=lambda index: shares[index])
        ranks[best] += 1
    assert allocate(spectra, 14, [1] * 4, [9] * 4) == ranks


def test_spectra_of_a_layer_are_what_its_ranks_lose():
    source, x = layer(), inputs()
    stats = measured(source, x)
    move = ToMLA(8, chosen(source, stats, "uniform", "rorope", 1), CARE(fold=1))
    keys, values = move.spectra(source, stats)
    whole, low = halves(convert(source, stats)), halves(convert(source, stats, 8))
    close(lost(whole, low, x), torch.stack([keys[4:].sum(), values[4:].sum()]), 1e-7)
    (joint,) = ToMLA(8, ((0, 0),), Latent()).spectra(source, stats)
    assert (joint.diff() <= 1e-9 * joint.max()).all()
