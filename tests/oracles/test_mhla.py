"""Oracles of token-level multi-head linear attention: sums of blocks of tokens, mixed by learned weights."""

import pytest
import torch
import torch.nn.functional as F
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, heads_of, join, make, triangle, twin

from manyheads import Attention, Cache, OptionError, Site, Spec, SpecError
from manyheads.core.mask import Axis

TOKENS, WIDTH = 11, DIM // HEADS
ALONE, BOTH = Site(), Site(causal=False)
VISION = "features + mhla(block=3, blocks=4, normaliser=true)"


def drawn(spec, site=ALONE, **sizes):
    """A layer whose weights of blocks are inside their bounds."""
    layer = make(spec, site=site, **sizes)
    torch.manual_seed(1)
    layer.scan.mix.data.uniform_(0.05, 1)
    return layer


def x_of(tokens=TOKENS):
    return batch(tokens)


def dense(layer, x, block, causal, phi=lambda x: x, normaliser=False, blocks=None):
    """Weights m_{b(t) b(s)} φ(q_t)·φ(k_s) over all pairs of tokens."""
    q, k, v = (heads_of(f(x), HEADS) for f in (layer.project.q_proj, layer.project.k_proj, layer.project.v_proj))
    at = torch.arange(x.shape[1]) // block if blocks is None else blocks
    weights = phi(q) @ phi(k).mT * WIDTH**-0.5 * layer.scan.mix[at][:, at]
    weights = weights * triangle(x.shape[1]) if causal else weights
    weights = weights / weights.sum(-1, keepdim=True) if normaliser else weights
    return weights @ v


@pytest.mark.parametrize("block", [1, 2, 4, 16])
def test_causal_written_out(block):
    layer, x = drawn(f"mhla(block={block}, blocks=12)"), x_of()
    close(layer(x), join(dense(layer, x, block, True), layer.project.o_proj))


@pytest.mark.parametrize("site", [Site(), BOTH])
def test_normalised_written_out(site):
    layer, x = drawn(VISION, site), x_of()
    o = dense(layer, x, 3, site.causal, lambda x: F.elu(x) + 1, True)
    close(layer(x), join(o, layer.project.o_proj))


@pytest.mark.parametrize(("block", "blocks"), [((2, 3), (2, 2)), ((1, 2, 2), (3, 1, 1)), ((4,), (3,))])
def test_blocks_of_a_grid(block, blocks):
    """Tokens of a grid line by line; every token's block by its coordinates."""
    sides = [n * c for n, c in zip(blocks, block, strict=True)]
    place = torch.stack(torch.meshgrid(*map(torch.arange, sides), indexing="ij"), -1) // torch.tensor(block)
    number = torch.zeros(sides, dtype=torch.long)
    for along, count in enumerate(blocks):
        number = number * count + place[..., along]
    layer = drawn(f"mhla(block={[*block]}, blocks={[*blocks]})", BOTH)
    x = x_of(number.numel())
    close(layer(x), join(dense(layer, x, 0, False, blocks=number.flatten()), layer.project.o_proj))


@pytest.mark.parametrize("c", [0.2, 1.0])
@pytest.mark.parametrize("site", [Site(), BOTH])
def test_equal_weights_are_linear_attention(c, site):
    """With the normaliser c cancels; one block is the same."""
    layer, x = make(VISION, site=site), x_of()
    layer.scan.mix.data.fill_(c)
    one = make("features + mhla(block=11, blocks=1, normaliser=true)", site=site)
    one.scan.mix.data.fill_(0.7)
    close(layer(x), one(x))
    if site.causal:
        close(layer(x), make("features + linear")(x))


def test_ones_are_plain_linear_attention():
    layer, x = make("mhla(block=4, blocks=3)"), x_of()
    layer.scan.mix.data.fill_(1)
    close(layer(x), make("linear(normaliser=false)")(x))


def test_the_identity_is_attention_within_blocks():
    """The least weight of another block is 1e-5; without it, what each block's own tokens say."""
    layer, x = make(VISION, site=BOTH), x_of(12)
    layer.scan.mix.data = torch.eye(4).double()
    layer.scan.weights = lambda: layer.scan.mix
    close(layer(x), torch.cat([layer(part) for part in x.split(3, 1)], 1))


def test_scaling_a_row():
    """Nothing changes with the normaliser; without it, the outputs of that block."""
    for spec, site in ((VISION, BOTH), ("mhla(block=3, blocks=4)", Site())):
        layer, x = drawn(spec, site), x_of()
        y, scaled = layer(x), torch.ones(TOKENS, 1).double()
        layer.scan.mix.data[1] *= 0.5
        scaled[3:6] = 1 if "normaliser" in spec else 0.5
        close(layer(x), y * scaled)


def test_rank():
    """At most Σ_b min(C, d) (here all tokens), where linear attention has rank d at most."""
    tokens, layer = 24, drawn("mhla(block=4, blocks=6)", BOTH)
    q, k = torch.randn(2, tokens, 3).double()
    at = torch.arange(tokens) // 4
    assert torch.linalg.matrix_rank(q @ k.T) == 3
    assert torch.linalg.matrix_rank(q @ k.T * layer.scan.weights()[at][:, at]) == 6 * 3


@pytest.mark.parametrize("block", [1, 2, 5])
@pytest.mark.parametrize("spec", ["mhla(block=3, blocks=4)", VISION, "gqa(kv_heads=2) + mhla_layer(block=4, blocks=3)"])
def test_decode(spec, block):
    """The sums of all blocks are kept, and a block that has begun goes on."""
    layer, x = drawn(spec), x_of()
    close(decoded(layer, x, block), layer(x))


@pytest.mark.parametrize("spec", ["mhla(block=3, blocks=4)", VISION])
def test_documents_and_padding(spec):
    layer, x, cache = drawn(spec), x_of(), Cache()
    place = torch.tensor([[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4]])
    segment = torch.tensor([[0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2]])
    axis = Axis(TOKENS, 0, given_position=place, segment=segment)
    want = torch.cat([layer(part) for part in x.split([5, 1, 5], 1)], 1)
    close(layer(x, positions=axis), want)
    cuts = (slice(0, 2), slice(2, 8), slice(8, 9), slice(9, 11))
    with torch.no_grad():
        outs = [layer(x[:, cut], positions=axis[cut], cache=cache) for cut in cuts]
    close(torch.cat(outs, 1), want)
    assert cache.site(0).state["scan"].shape[2] == 2  # of the newest document
    real = torch.tensor([True, True, False, True, False, False, True, True, True, True, True])
    close(layer(x, mask=real.expand(2, -1))[:, real], layer(x[:, real]))
    both = drawn(spec, BOTH)
    close(both(x, positions=axis), torch.cat([both(part) for part in x.split([5, 1, 5], 1)], 1))
    close(both(x, mask=real.expand(2, -1))[:, real], both(x[:, real]))


def test_padding_leaves_the_state_bit_equal():
    layer, cache = drawn("mhla(block=3, blocks=4)"), Cache()
    decoded(layer, x_of(7), 7, cache)
    before = cache.site(0).state["scan"].clone()
    layer(x_of(3), cache=cache, mask=torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(cache.site(0).state["scan"], before)


def test_starts():
    """Causal: row i is 1/(i+1) up to i. Else 1 - distance/largest distance of the row, summing to one."""
    mix = Attention("mhla(block=4, blocks=5)", DIM, HEADS).scan.mix
    torch.testing.assert_close(mix, torch.ones(5, 5).tril() / torch.arange(1, 6)[:, None])
    mix = Attention("mhla(block=4, blocks=3)", DIM, HEADS, site=BOTH).scan.mix
    near = torch.tensor([[1, 0.5, 0], [0, 1, 0], [0, 0.5, 1]])
    torch.testing.assert_close(mix, near / near.sum(-1, keepdim=True))
    mix = Attention("mhla(block=[2, 2], blocks=[2, 2])", DIM, HEADS, site=BOTH).scan.mix
    near = 1 - 1 / 2**0.5
    torch.testing.assert_close(mix[0], torch.tensor([1, near, near, 0]) / (1 + 2 * near))


def test_bounds():
    """A weight outside [1e-5, 1] counts as the nearest of these, and has its gradient."""
    layer, x = make("mhla(block=3, blocks=4)"), x_of()
    mix = layer.scan.mix
    mix.data[1, 0], mix.data[2, 0] = -3, 7
    close(layer.scan.weights()[1:3, 0], torch.tensor([1e-5, 1]).double())
    assert not layer.scan.weights().triu(1).any()
    layer(x).pow(2).sum().backward()
    assert mix.grad[1, 0] != 0 and mix.grad[2, 0] != 0 and not mix.grad.triu(1).any()


def test_cost():
    """M² parameters; G·K·V numbers kept for C tokens, and as many for a block that has begun."""
    base = make("gqa(kv_heads=2)").spec.cost(DIM, HEADS).parameters
    for spec, values in (("mhla(block=3, blocks=4)", WIDTH), (VISION, WIDTH + 1)):
        layer, cache = make(f"gqa(kv_heads=2) + {spec}"), Cache()
        assert sum(p.numel() for p in layer.parameters()) - base == 16
        decoded(layer, batch(6, size=1), 5, cache)
        assert cache.bytes() == 8 * 2 * 2 * WIDTH * values == layer.spec.cost(DIM, HEADS).cache_bytes(6, 8)
        decoded(layer, batch(1, size=1), 1, cache)
        assert cache.bytes() == 8 * 3 * 2 * WIDTH * values
    assert make(VISION, site=BOTH).spec.cost(DIM, HEADS, BOTH).cache_bytes(6) == 0


def test_beyond_its_length():
    layer, cache = make("mhla(block=3, blocks=2)"), Cache()
    layer(x_of(6), cache=cache)
    for call in (lambda: layer(x_of(7)), lambda: layer(x_of(1), cache=cache)):
        with pytest.raises(ValueError, match="mhla: position 6 is beyond 2 blocks of 3 tokens"):
            call()
    with pytest.raises(ValueError, match="mhla: position 9"):
        layer(x_of(2), positions=torch.tensor([[1, 9]]))


def test_a_bidirectional_layer_reads_in_one_pass():
    layer, cache = make("mhla(block=3, blocks=4)", site=BOTH), Cache()
    layer(x_of(4), cache=cache)
    with pytest.raises(ValueError, match="in one pass"):
        layer(x_of(4), cache=cache)
    with pytest.raises(ValueError, match="no mask over pairs"):
        layer(x_of(4), mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))


def test_the_language_layer():
    assert str(Spec.parse("mhla_layer(block=4)")) == (
        "features(map=relu) + rope + mhla(block=4) + head_norm + output_gate(activation=silu)"
    )
    layer = drawn("mhla_layer(block=4, blocks=3)")
    base = twin(
        layer, "features(map=relu) + rope + linear(normaliser=false) + head_norm + output_gate(activation=silu)"
    )
    differ(layer(x := x_of()), base(x))
    layer.scan.mix.data.fill_(1)
    close(layer(x), base(x))


@pytest.mark.parametrize(
    ("line", "site", "said"),
    [
        ("mhla(block=0)", Site(), r"mhla: block=0.*at least 1"),
        ("mhla(block=[2, 2], blocks=4)", BOTH, r"as many numbers of each"),
        ("mhla(block=[2, 2], blocks=[2, 2])", Site(), r"a causal layer reads a line"),
        ("mhla(block=4, blocks=2)", Site(max_len=9), r"2 blocks of 4 tokens are fewer than the 9"),
    ],
)
def test_refusals(line, site, said):
    with pytest.raises(OptionError, match=said):
        Attention(line, DIM, HEADS, site=site)


@pytest.mark.parametrize(
    ("line", "site", "said"),
    [
        ("mhla(normaliser=true)", Site(), r"'mhla' needs 'positive'.*features as the last"),
        ("features + rope + mhla(normaliser=true)", Site(), r"which 'rope' breaks"),
        ("mhla", Site(cross=True, causal=False), r"'mhla' needs 'self'"),
        ("mhla + retention", Site(), r"both take the slot 'scan'"),
    ],
)
def test_what_it_excludes(line, site, said):
    with pytest.raises(SpecError, match=said):
        Spec.parse(line).resolve(site)
