"""Measures of attention sinks: how many heads rest on the first token, what they add there, and what that is good for.

The measures of maps take a `Look`, the tests a model. Source: Gu et al. 2024, arXiv 2410.10781 (columns and rates);
Barbero et al. 2025, arXiv 2504.02732 (mixing).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from manyheads.core.mask import Axis, cols_of
from manyheads.inspect.ablate import Inputs, apart, batches_of, run
from manyheads.inspect.capture import watching
from manyheads.inspect.layers import chosen
from manyheads.inspect.look import CaptureError, Look
from manyheads.inspect.measures.table import HeadTable
from manyheads.inspect.stream import embedding_of, passages


class Nth:
    """The rule of one token of each sequence, counted from 0, padding left out."""

    def __init__(self, axis: Axis, number: int) -> None:
        valid = axis.validity
        chosen = valid & (valid.long().cumsum(-1) == number + 1)
        self.time = torch.where(chosen, axis.time, torch.iinfo(torch.long).min).amax(-1)

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        return cols_of(k.time == self.time[:, None])


def column(look: Look, key: int = 0) -> Tensor:
    """A_t,key of the queries that see the key; with `fewest=1` its mean is α(key), which counts A_key,key too.

    One fused pass: exp(lse of that key - lse).
    """
    return look.mass(Nth(look.mask.k, key))


def columns(look: Look) -> Tensor:
    """α `[B, H, S]` of every key at once: the mean of a column over the queries that see it; not a number where none
    does. Rows are streamed, so that no map is in memory."""
    total: Tensor | float = 0.0
    count: Tensor | float = 0.0
    real = look.axis.validity[:, None, :, None]
    for tile in look.weights():
        seen = tile.visible & real[:, :, tile.rows]
        total = total + (tile.weights.double() * seen).sum(2)
        count = count + seen.sum(2)
    return torch.as_tensor(total) / torch.as_tensor(count)


def sink_rate(
    model: nn.Module, inputs: Inputs | Sequence[Inputs], threshold: float = 0.3, key: int = 0,
    layers: int | Iterable[int] | None = None,
) -> HeadTable:  # fmt: skip
    """The share of texts in which a head's α(key) is above a threshold; the model's rate is the mean of the grid.

    The paper's figures are of texts of 64 tokens, threshold 0.3; those on mixing take 0.8.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold={threshold}; a mean weight is 0 to 1")
    hits: dict[int, list[Tensor]] = {}

    def see(look: Look) -> None:
        real = look.axis.validity[:, None]
        found = column(look, key).masked_fill(~real, torch.nan).double()
        hits.setdefault(look.layer, []).append((found.nanmean(-1) > threshold).cpu())

    some = [layer for layer in chosen(model, layers) if not layer.none]
    with torch.no_grad(), watching(some, see):
        for batch in batches_of(inputs):
            run(model, batch)
    return HeadTable("sink_rate", {layer: torch.cat(each).double().mean(0) for layer, each in sorted(hits.items())})


def _first(look: Look) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of each head, and which key is a sequence's first token, bool `[B, 1, S]`."""
    call = apart(look.call)
    k = look.mask.k
    first = (k.time == Nth(k, 0).time[:, None]) & k.validity
    return call.k, call.v, first[:, None].expand(len(call.k), -1, -1)


def _share_of_first(x: Tensor, first: Tensor, real: Tensor) -> Tensor:
    size = x.norm(dim=-1).double()
    usual = size.masked_fill(~real[:, None], torch.nan).nanmedian(-1).values
    return (size * first).sum(-1) / usual


def first_value(look: Look) -> Tensor:
    """‖v_1‖ over the median ‖v_s‖ of a sequence: small where a head rests on a token that says nothing."""
    _, v, first = _first(look)
    return _share_of_first(v, first, look.mask.k.validity)[..., None].expand(-1, -1, look.axis.length)


def first_key(look: Look) -> Tensor:
    """‖k_1‖ over the median ‖k_s‖ of a sequence."""
    k, _, first = _first(look)
    return _share_of_first(k, first, look.mask.k.validity)[..., None].expand(-1, -1, look.axis.length)


def idle(look: Look) -> Tensor:
    """How near a head is to what it would add if it looked at the first token alone, `[B, H, T, 2]`.

    cos(c_t, c), and ‖c_t‖ over the largest ‖c_s‖ that one key alone would give: a head that does nothing there has a
    length near 0, whatever its direction. c_t = W_O o_t.
    """
    _, v, first = _first(look)
    if look.project is None or look.read.shape != look.out.shape or not torch.equal(look.read, look.out):
        raise CaptureError(f"{look.name}: what its heads add for one key alone is not known")
    nothing = torch.zeros_like(look.out)
    bias = look.project(nothing[:, :, :1])
    found = []
    for (head, c), values in zip(look.contributions(), v.unbind(1), strict=True):
        alone = values.new_zeros(len(values), v.shape[1], values.shape[1], values.shape[2])
        alone[:, head] = values
        each = look.project(alone) - bias  # [B, S, D]
        at_first = (each * first[:, 0, :, None]).sum(1, keepdim=True)
        largest = each.norm(dim=-1).amax(-1)[:, None]
        cosine = torch.cosine_similarity(c, at_first.expand_as(c), dim=-1)
        found.append(torch.stack([cosine, c.norm(dim=-1) / largest], -1))
    return torch.stack(found, 1)


# --- mixing


def states(model: nn.Module, inputs: Inputs) -> Tensor:
    """The stream before the first block and after each, `[L + 1, B, T, D]`."""
    layers = chosen(model, None)
    with torch.no_grad(), passages(model, layers) as seen:
        run(model, inputs)
    each = list(seen.values())
    return torch.stack([each[0].x, *(one.y for one in each)])


def spread(model: nn.Module, ids: Tensor, changed: Tensor) -> Tensor:
    """‖Δx_t‖ / ‖x_t‖ after each block, `[L + 1, B, T]`, between two texts, of which one token differs.

    Compare it with and without the first token: sinks are said to keep a change from spreading. The share of places
    moved by more than δ is `(spread(…) > δ).double().mean(-1)`.
    """
    if ids.shape != changed.shape or not (ids != changed).any():
        raise ValueError(f"two texts of one shape that differ, not {[*ids.shape]} and {[*changed.shape]}")
    before, after = states(model, ids), states(model, changed)
    return (after - before).norm(dim=-1) / before.norm(dim=-1)


def collapse(stream: Tensor) -> Tensor:
    """‖X - the mean of its rows‖ / ‖X‖ of `[…, T, D]`: 0 where all tokens have become one."""
    return (stream - stream.mean(-2, keepdim=True)).flatten(-2).norm(dim=-1) / stream.flatten(-2).norm(dim=-1)


def massive(stream: Tensor) -> Tensor:
    """max_d |x_d| over the root mean square of x, `[…, T]`: √D at most, for one channel that is all there is."""
    return stream.abs().amax(-1) / stream.square().mean(-1).sqrt()


def influence(model: nn.Module, ids: Tensor, query: int = -1, *, probes: int = 8, seed: int = 0) -> Tensor:
    """‖∂x^L_query / ∂x^0_s‖_F of every token s, `[B, T]`: the last block's output by the token embeddings.

    Estimated by `probes` random directions r, E‖rᵀJ‖² = ‖J‖_F²; a backward pass each.
    """
    given: list[Tensor] = []

    def keep(module: nn.Module, args: object, output: Tensor) -> Tensor:
        given.append(output.detach().requires_grad_())
        return given[0]

    layers = chosen(model, None)
    hook = embedding_of(model).register_forward_hook(keep)
    try:
        with torch.enable_grad(), passages(model, layers) as seen:
            run(model, ids)
            last = list(seen.values())[-1].y[:, query]
    finally:
        hook.remove()
    generator, total = torch.Generator().manual_seed(seed), torch.zeros(())
    for _ in range(probes):
        r = torch.randn(last.shape, generator=generator, dtype=torch.float64).to(last)
        (grad,) = torch.autograd.grad((last * r).sum(), given[0], retain_graph=True)
        total = total + grad.double().square().sum(-1)
    return (total / probes).sqrt()
