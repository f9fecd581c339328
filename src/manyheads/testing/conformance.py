"""The conformance suite: laws that any layer holds to, whatever its spec.

A law takes a `Case` (a spec and the numbers of a tiny layer) and raises where the layer breaks it. `check` runs them
all. Combinations come from the registry: what resolves and lays out is legal, so a new part is covered at once.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import transformers
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.attention.layer import ALONE
from manyheads.core.cache import Cache
from manyheads.core.flow import Links
from manyheads.core.kernel import using
from manyheads.core.kernels import KERNELS
from manyheads.core.mask import Axis
from manyheads.core.part import STAGES, OptionError, Part, Piece, Site
from manyheads.core.prefix import PrefixCache
from manyheads.core.registry import all_parts
from manyheads.core.spec import Spec, SpecError

EXACT = 1e-9
"""Equal in float64, up to the order of sums."""


class Batch:
    """The inputs that a case draws. Its fields are the case's own."""

    dim: int
    tokens: int
    padding: tuple[int, ...]
    seed: int

    @property
    def x(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(len(self.padding), self.tokens, self.dim, generator=generator, dtype=torch.float64)

    @property
    def valid(self) -> Tensor:
        """bool `[B, T]`, False on padding."""
        return torch.arange(self.tokens)[None] >= torch.tensor(self.padding)[:, None]


@dataclass(frozen=True)
class Case(Batch):
    """A spec and a tiny batch, left-padded. Weights are drawn anew: at their first values many parts do nothing."""

    spec: str
    dim: int = 24
    heads: int = 4
    tokens: int = 11
    padding: tuple[int, ...] = (0, 4, 2)
    site: Site = ALONE
    seed: int = 0

    def layer(self) -> Attention:
        torch.manual_seed(self.seed)
        layer = Attention(self.spec, self.dim, self.heads, site=self.site).double().eval()
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3)
        return layer

    @property
    def positions(self) -> Tensor:
        return (self.valid.long().cumsum(-1) - 1).clamp_min(0)


def close(got: Tensor, want: Tensor, what: str, tolerance: float = EXACT) -> None:
    """Equal up to `tolerance`, absolute and relative."""
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance, msg=lambda text: f"{what}: {text}")


def hold(fact: object, what: str) -> None:
    if not fact:
        raise AssertionError(what)


def decode(case: Case) -> None:
    """Decoding in blocks of 1, 3 and 5 tokens, with left padding, gives what the full pass gives."""
    layer, x, valid = case.layer(), case.x, case.valid
    full = layer(x, mask=valid)
    for block in (1, 3, 5):
        close(_decoded(layer, case, x, block)[valid], full[valid], f"blocks of {block}")


def single_precision(case: Case) -> None:
    """In float32, decoding stays within 1e-5 of the full pass."""
    layer, x, valid = case.layer().float(), case.x.float(), case.valid
    want = layer(x, mask=valid)
    close(_decoded(layer, case, x, 3)[valid], want[valid], "float32", 1e-5 * max(1.0, want.abs().max().item()))


def _decoded(layer: Attention, case: Case, x: Tensor, block: int) -> Tensor:
    cache, outs = Cache(), []
    with torch.no_grad():
        for first in range(0, case.tokens, block):
            cut = slice(first, first + block)
            outs.append(layer(x[:, cut], mask=case.valid[:, cut], positions=case.positions[:, cut], cache=cache))
    return torch.cat(outs, 1)


def rollback(case: Case) -> None:
    """A cache that agrees to go back continues as if the tokens had never been; one that cannot says why."""
    layer, x, cache = case.layer(), case.x, Cache()
    with torch.no_grad():
        full = layer(x)
        layer(x[:, :6], cache=cache)
        layer(x[:, :2].flip(0), cache=cache)
        try:
            cache.rollback(2)
        except ValueError as refusal:
            hold("go back" in str(refusal), f"the refusal does not say so: {refusal}")
            return
        close(layer(x[:, 6:], cache=cache), full[:, 6:], "after going back")


def stock_cache(case: Case) -> None:
    """A stock transformers cache serves the layer too, or the layer says why not."""
    layer, x, cache = case.layer(), case.x, transformers.DynamicCache()
    outs = []
    with torch.no_grad():
        full = layer(x)
        for first in range(0, case.tokens, 3):
            try:
                outs.append(layer(x[:, first : first + 3], cache=cache))
            except ValueError as refusal:
                hold("manyheads.Cache" in str(refusal), f"the refusal does not say what fits: {refusal}")
                return
    close(torch.cat(outs, 1), full, "stock cache")


def batch(case: Case) -> None:
    """A sequence alone gives what its row in a padded batch gives, and what stands on padding changes nothing."""
    layer, x, valid = case.layer(), case.x, case.valid
    full = layer(x, mask=valid)
    for row, first in enumerate(case.padding):
        close(full[row, first:], layer(x[row : row + 1, first:])[0], f"row {row}")
    noisy = torch.where(valid[..., None], x, 100 * torch.ones_like(x))
    close(layer(noisy, mask=valid)[valid], full[valid], "other padding")


def causality(case: Case) -> None:
    """No gradient and no change reaches a query from a later token, nor from padding."""
    layer, x, valid, at = case.layer(), case.x.requires_grad_(), case.valid, case.tokens // 2
    y = layer(x, mask=valid)
    (gradient,) = torch.autograd.grad(y[:, at].sum(), x)
    hold(torch.isfinite(gradient).all(), "a gradient is not finite")
    hold((gradient[:, at + 1 :] == 0).all(), "a later token has a gradient")
    hold((gradient[~valid] == 0).all(), "padding has a gradient")
    own, soft = (gradient[:, at] != 0).any(-1), all("softmax" not in part.breaks for part in layer.spec.parts)
    hold(own.all() if soft else own.any(), "a token has no gradient from itself")  # a sparse map may leave it out
    other = torch.cat([x[:, : at + 1], x[:, at + 1 :].roll(1, 0)], 1)
    seen = valid[:, : at + 1]
    close(layer(other, mask=valid)[:, : at + 1][seen], y[:, : at + 1][seen], "other later tokens")


def gradients(case: Case) -> None:
    """Every parameter gets a finite gradient that is not zero."""
    layer, links = case.layer().train(), Links()
    loss = layer(case.x, mask=case.valid, links=links).pow(2).sum() + sum(links.aux.values())
    loss.backward()
    for name, parameter in layer.named_parameters():
        hold(parameter.grad is not None and parameter.grad.abs().sum() > 0, f"{name} has no gradient")
        assert parameter.grad is not None
        hold(torch.isfinite(parameter.grad).all(), f"the gradient of {name} is not finite")


def cost(case: Case) -> None:
    """Parameters and cache bytes are what the spec says they cost."""
    layer, cache = case.layer(), Cache()
    priced = layer.spec.cost(case.dim, case.heads, case.site)
    counted = sum(parameter.numel() for parameter in layer.parameters())
    hold(counted == priced.parameters, f"{counted} parameters, priced at {priced.parameters}")
    grows = [
        state.every or 1 for piece in layer.modules() if isinstance(piece, Piece) for state in piece.states.values()
    ]
    stride = math.lcm(*(entry.stride for entry in layer.entries.values()), *grows)
    tokens = -(-case.tokens // stride) * stride
    with torch.no_grad():
        for block in torch.randn(1, tokens, case.dim, dtype=torch.float64).split(5, 1):
            layer(block, cache=cache)
    says = priced.cache_bytes(tokens, 8)
    hold(cache.bytes() == says, f"{cache.bytes()} bytes cached after {tokens} tokens, priced at {says}")


def save_load(case: Case) -> None:
    """A layer built anew from the printed spec and the state dict gives the very same numbers."""
    layer, x = case.layer(), case.x
    other = Attention(str(layer.spec), case.dim, case.heads, site=case.site).double().eval()
    other.load_state_dict(layer.state_dict())
    hold(torch.equal(other(x, mask=case.valid), layer(x, mask=case.valid)), "the loaded layer differs")
    hold(torch.equal(copy.deepcopy(layer)(x), layer(x)), "a copy differs")


def spec_line(case: Case) -> None:
    """The resolved spec prints, parses back to itself, and resolves to itself."""
    spec = case.layer().spec
    again = Spec.parse(str(spec))
    hold(again == spec, f"{spec} parses back as {again}")
    hold(again.resolve(case.site) == spec, f"{spec} resolves again to {again.resolve(case.site)}")


def train_equals_eval(case: Case) -> None:
    """Without dropout a layer in training gives what it gives in evaluation, unless it says that it does not."""
    layer, x, valid = case.layer(), case.x, case.valid
    if any("steady" in part.breaks for part in layer.spec.parts):
        return
    want = layer(x, mask=valid)
    close(layer.train()(x, mask=valid), want, "training")


def kernels(case: Case) -> None:
    """Every kernel that can serve the layer gives the same outputs and gradients; `tiled` always can."""
    layer, valid = case.layer(), case.valid

    def run(kernel: str | None) -> tuple[Tensor, Tensor]:
        x = case.x.requires_grad_(kernel != "flex")
        with torch.set_grad_enabled(kernel != "flex"), using(kernel or "auto"):
            y = layer(x, mask=valid)[valid]
        return y.detach(), torch.autograd.grad(y.pow(2).sum(), x)[0] if kernel != "flex" else torch.empty(0)

    y, gradient = run(None)
    served = []
    for kernel in KERNELS:
        try:
            other, other_gradient = run(kernel)
        except ValueError as refusal:
            hold(str(refusal).startswith("kernel"), f"kernel {kernel!r}: {refusal}")
            continue
        served.append(kernel)
        close(other, y, f"kernel {kernel!r}")
        if kernel != "flex":
            close(other_gradient, gradient, f"gradient of kernel {kernel!r}", 10 * EXACT)
    hold("tiled" in served, "the explicit path does not serve this layer")


def views(case: Case) -> None:
    """A projection's views (expanded, absorbed) are one function, with one gradient."""
    layer, valid = case.layer(), case.valid
    if len(layer.project.views) == 1:
        return
    results = []
    for below in (0, case.tokens):
        layer.project.absorb_below, x = below, case.x.requires_grad_()
        y = layer(x, mask=valid)[valid]
        results.append((y.detach(), torch.autograd.grad(y.pow(2).sum(), x)[0]))
    for each, what in zip(zip(*results, strict=True), ("outputs", "gradients"), strict=True):
        close(*each, what=f"absorbed and expanded {what}")


def sides(case: Case) -> None:
    """Work that few queries take from the rows upon themselves gives the same outputs and gradients as on the rows."""
    layer, valid, results = case.layer(), case.valid, []
    for rows in (0, case.tokens * case.heads):
        layer.few_rows, x = rows, case.x.requires_grad_()
        y = layer(x, mask=valid)[valid]
        results.append((y.detach(), torch.autograd.grad(y.pow(2).sum(), x)[0]))
    for each, what in zip(zip(*results, strict=True), ("outputs", "gradients"), strict=True):
        close(*each, what=f"{what} of few queries and of many")


def masks(case: Case) -> None:
    """An explicit mask is the whole truth: a triangle is the causal order, a query that sees nothing gives nothing."""
    layer, x = case.layer(), case.x.requires_grad_()
    triangle = torch.ones(case.tokens, case.tokens, dtype=torch.bool).tril()[None, None]
    if layer.in_order:  # it has no pairs to mask
        with contextlib.suppress(ValueError):
            layer(x, mask=triangle)
            raise AssertionError("a scan takes a mask over pairs of tokens")
        return
    close(layer(x, mask=triangle), layer(x), "the triangle as a mask")
    seen = triangle.clone()
    seen[..., 0] = False
    y = layer(x, mask=seen)
    (gradient,) = torch.autograd.grad(y.pow(2).sum(), x)
    output = layer.project.output
    layer.project.output = lambda o, flow: output(torch.zeros_like(o), flow)
    close(y[:, :1], layer(x)[:, :1], "a query that sees nothing")
    hold(torch.isfinite(gradient).all(), "a gradient is not finite")
    if all("token keys" not in part.breaks for part in layer.spec.parts):
        hold((gradient[:, 0] == 0).all(), "a token that nobody sees, itself included, has a gradient")


def packed(case: Case) -> None:
    """Documents packed into one row, told apart by segment, give what they give alone."""
    layer, x, cuts = case.layer(), case.x[:1], (4, case.tokens - 4)
    place = torch.cat([torch.arange(length) for length in cuts])[None]
    segment = torch.arange(2).repeat_interleave(torch.tensor(cuts))[None]
    axis = Axis(case.tokens, 0, given_position=place, segment=segment)
    alone = torch.cat([layer(part) for part in x.split(cuts, 1)], 1)
    close(layer(x, positions=axis), alone, "packed")


def cross(case: Case) -> None:
    """Cross-attention: queries one by one, reading a context cached once, give what they give together.

    Not of `LAWS`: it builds the layer for another site, which some specs exclude.
    """
    case = replace(case, site=Site(causal=False, cross=True, context_dim=case.dim - 4))
    layer, x, context, cache = case.layer(), case.x, case.x[:, :5, 4:], Cache()
    full = layer(x, context=context)
    with torch.no_grad():
        steps = [
            layer(step, context=context, cache=cache, positions=Axis(1, at)) for at, step in enumerate(x.split(1, 1))
        ]
    close(torch.cat(steps, 1), full, "one by one")
    full.pow(2).sum().backward()
    for name, parameter in layer.named_parameters():
        hold(parameter.grad is not None and parameter.grad.abs().sum() > 0, f"{name} has no gradient")
    counted = sum(parameter.numel() for parameter in layer.parameters())
    says = layer.spec.cost(case.dim, case.heads, case.site)
    hold(counted == says.parameters, f"{counted} parameters, priced at {says.parameters}")
    held = len(x) * says.cache_bytes(5, 8)
    hold(cache.bytes() == held, f"{cache.bytes()} bytes cached of a context of 5, priced at {held}")


def shared_prefix(case: Case) -> None:
    """Sequences that share the cached rows they begin with give what each gives alone, or the layer says why not."""
    layer, shared, own = case.layer(), 4, case.tokens - 4
    x = case.x.clone()
    x[:, :shared] = x[:1, :shared]
    lengths = [max(own - 2 - index, 1) for index in range(len(x))]
    root = PrefixCache()
    with torch.no_grad():
        try:
            layer(x[:1, :shared], cache=root)
        except ValueError as refusal:
            hold(layer.whole is not None and "manyheads.Cache" in str(refusal), f"the refusal says nothing: {refusal}")
            return
        cache = root.branch(len(x))
        cache.expect(lengths)
        padded = torch.stack(
            [row[shared : shared + own - 2].roll(own - 2 - n, 0) for row, n in zip(x, lengths, strict=True)]
        )
        got = [layer(padded, cache=cache), layer(x[:, -2:-1], cache=cache), layer(x[:, -1:], cache=cache)]
        for index, length in enumerate(lengths):
            alone = torch.cat([x[index, : shared + length], x[index, -2:]])[None]
            want = layer(alone)[0, shared:]
            read = torch.cat([got[0][index, own - 2 - length :], got[1][index], got[2][index]])
            close(read, want, f"sequence {index}")


LAWS: tuple[Callable[[Case], None], ...] = (
    spec_line, decode, single_precision, batch, causality, gradients, cost, save_load, train_equals_eval, kernels,
    views, sides, masks, packed, rollback, stock_cache, shared_prefix,
)  # fmt: skip
"""Every law, cheap ones first."""


def precision(case: Case, dtype: torch.dtype, mask: str, train: bool) -> None:
    """In `dtype` a layer stays finite, keeps its dtype, and gives what the same weights give in float64.

    mask: "causal", "padding", "given" (a random 4-D mask) or "packed".
    """
    layer = case.layer().to(dtype).train(train)
    if mask == "given" and layer.in_order:
        return
    exact = case.layer()
    exact.load_state_dict(layer.state_dict())
    exact.double().train(train)
    arguments = _mask(case, mask)
    x = case.x.to(dtype).requires_grad_()
    y, want = layer(x, **arguments), exact(x.detach().double(), **arguments)
    hold(y.dtype == dtype, f"{dtype} in, {y.dtype} out")
    y.pow(2).sum().backward()
    assert x.grad is not None
    hold(torch.isfinite(y).all() and torch.isfinite(x.grad).all(), "not finite")
    error = ((y.double() - want).norm() / want.norm()).item()
    limit = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.05)
    hold(error < limit, f"{dtype}, {mask} mask: off by {error:.1e} of the norm, more than {limit}")


def _mask(case: Case, kind: str) -> dict[str, Tensor | Axis]:
    """Arguments of a layer's forward."""
    if kind == "padding":
        return {"mask": case.valid}
    if kind == "given":
        generator = torch.Generator().manual_seed(case.seed)
        return {"mask": torch.rand(len(case.padding), 1, case.tokens, case.tokens, generator=generator) < 0.5}
    if kind == "packed":
        return {"positions": Axis(case.tokens, 0, segment=(torch.arange(case.tokens) // 5)[None])}
    return {}


def check(
    spec: str,
    *,
    dim: int = 24,
    heads: int = 4,
    site: Site = ALONE,
    seed: int = 0,
    laws: Sequence[Callable[[Case], None]] = LAWS,
) -> None:
    """Hold a spec to the laws.

    Raises:
        AssertionError: naming the spec, the law and how it was broken.
    """
    case = Case(spec, dim, heads, site=site, seed=seed)
    for law in laws:
        try:
            law(case)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            meaning = (law.__doc__ or "").splitlines()[0]
            raise AssertionError(f"{spec!r} breaks the law {law.__name__!r} ({meaning}): {said}") from error


def samples() -> list[Part]:
    """Every registered part with each of its `examples`."""
    return [part(**options) for part in all_parts().values() for options in part.examples]


def refusal(parts: Sequence[Part], *, dim: int = 24, heads: int = 4, site: Site = ALONE) -> OptionError | None:
    """Why these parts do not make a layer: `SpecError` by their facts, another `OptionError` by their numbers."""
    try:
        Spec(tuple(parts)).resolve(site).layouts(dim, heads, site)
    except OptionError as error:
        return error
    return None


def singles(site: Site = ALONE) -> list[str]:
    """Every sample that makes a layer alone (with what a spec implies)."""
    return [str(Spec((part,))) for part in samples() if refusal([part], site=site) is None]


def _pairs() -> Iterator[list[tuple[Part, Part]]]:
    """For each two parts, all pairs of their samples; within a stage in both orders, since order is meaning there."""
    by_part = [list(group) for _, group in itertools.groupby(samples(), type)]
    for firsts, seconds in itertools.product(by_part, by_part):
        if STAGES.index(firsts[0].stage) <= STAGES.index(seconds[0].stage):
            yield list(itertools.product(firsts, seconds))


def legal_pairs(site: Site = ALONE) -> list[str]:
    """Every two parts that make a layer, each sample of either with the first sample of the other that it goes with."""
    found = {}
    for pairs in _pairs():
        legal = [pair for pair in pairs if refusal(pair, site=site) is None]
        for side in (0, 1):
            for sample in {pair[side]: None for pair in legal}:
                found[str(Spec(next(pair for pair in legal if pair[side] == sample)))] = None
    return list(found)


def matrix(site: Site = ALONE) -> dict[tuple[str, str], str | None]:
    """For each two parts in a spec's order (both orders within a stage): None where they make a layer, or why not."""
    table: dict[tuple[str, str], str | None] = {}
    for pairs in _pairs():
        errors = [refusal(pair, site=site) for pair in pairs]
        first, second = pairs[0]
        table[first.name, second.name] = None if None in errors else str(errors[0])
    return table


def illegal_pairs() -> list[tuple[Part, Part, SpecError]]:
    """Every pair of samples whose facts exclude each other, neither the site's, with what is said to the user."""
    fits = {part for part in samples() if not isinstance(refusal([part]), SpecError)}
    judged = ((*pair, refusal(pair)) for pairs in _pairs() for pair in pairs if fits.issuperset(pair))
    return [(first, second, error) for first, second, error in judged if isinstance(error, SpecError)]


def combinations(n: int, size: int, seed: int = 0) -> list[str]:
    """`n` different legal specs of `size` parts each, drawn at random."""
    draw, parts, found, misses = random.Random(seed), samples(), {}, 0
    while len(found) < n:
        chosen = draw.sample(parts, size)
        spec = str(Spec(tuple(chosen)))
        misses += 1
        if spec not in found and refusal(chosen) is None:
            found[spec], misses = None, 0
        if misses > 1000:
            raise ValueError(f"only {len(found)} legal combinations of {size} parts turned up; {n} were asked for")
    return list(found)
