"""What a pass is given: whether it fits the layer, before anything is computed, and the axis of its tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor
from transformers import EncoderDecoderCache

from manyheads.core.cache import Cache
from manyheads.core.mask import Axis, Mask, causal
from manyheads.core.prefix import PrefixCache

if TYPE_CHECKING:
    from manyheads.attention.layer import Attention


def check(
    layer: Attention, x: Tensor, positions: Tensor | Axis | None, mask: Tensor | Mask | None, context: Tensor | None
) -> None:
    """Raise ValueError for tensors that are not of the layer's shapes, and masks that it cannot keep to."""
    if not x.shape[1]:
        raise ValueError("x has no tokens; a pass has one or more")
    if layer.site.cross != (context is not None):
        raise ValueError(f"this layer {'needs a context' if layer.site.cross else 'takes no context'}")
    if isinstance(mask, Tensor) and (mask.dtype != torch.bool or mask.ndim not in (2, 4)):
        raise ValueError(
            f"a mask is bool, True = may attend, [B, T] or [B, H, T, S]; this one is {mask.dtype}, {[*mask.shape]}"
        )
    if isinstance(mask, Tensor):
        _check_mask(layer, mask, x)
    order = (causal,) if layer.site.causal else ()
    if layer.in_order and (mask.rules != order if isinstance(mask, Mask) else mask is not None and mask.ndim == 4):
        raise ValueError(
            "a scan takes no mask over pairs of tokens; mark padding by a [B, T] mask, packed documents by the "
            "segments of an Axis"
        )
    if isinstance(positions, Tensor) and positions.ndim == 2 and len(positions) not in (1, len(x)):
        raise ValueError(f"positions of {len(positions)} sequences do not fit a batch of {len(x)}")


def _check_mask(layer: Attention, mask: Tensor, x: Tensor) -> None:
    batch, t = x.shape[:2]
    fits = {0: batch} if mask.ndim == 2 else {0: batch, 1: layer.layout.q, 2: t}
    for dim, wanted in fits.items():
        if mask.shape[dim] not in (1, wanted):
            what = ("batch", "heads", "queries")[dim]
            raise ValueError(f"a mask {[*mask.shape]} has {mask.shape[dim]} {what}, not {wanted} (or 1)")


def check_cache(layer: Attention, cache: transformers.Cache, q: Axis, mask: Tensor | Mask | None, batch: int) -> None:
    """Raise ValueError for a cache that does not know what the layer keeps, or holds what is not its own."""
    told = isinstance(mask, Tensor) and mask.ndim == 4
    if isinstance(cache, Cache):
        cache.site(layer.site.layer).check_states(layer.states, batch)
    elif layer.site.cross and not isinstance(cache, EncoderDecoderCache):
        raise ValueError(
            f"a {type(cache).__name__} would take the context anew each pass; use manyheads.Cache, or an "
            "EncoderDecoderCache"
        )
    elif q.valid is not None and not told and not layer.site.cross:
        raise ValueError(f"a {type(cache).__name__} forgets padding; give a 4-D mask, or use manyheads.Cache")
    if isinstance(cache, PrefixCache):
        if layer.whole is not None:
            raise ValueError(f"{layer.spec}: sequences cannot share rows, for {layer.whole}; use manyheads.Cache")
        if told or isinstance(mask, Mask):
            raise ValueError("a PrefixCache knows which rows a query may see; mark padding by a [B, T] mask")


def axis_of(
    layer: Attention, x: Tensor, positions: Tensor | None, mask: Tensor | Mask | None, cache: transformers.Cache | None
) -> Axis:
    """The tokens of x: they count on from what the cache has seen, padding (a `[B, T]` mask) apart."""
    if isinstance(mask, Mask):
        return mask.q
    past, log = 0, cache.axis if isinstance(cache, Cache) else None
    if layer.site.cross:
        log = cache.site(layer.site.layer).asked if isinstance(cache, Cache) else None
        past = 0 if log is None else log.length
    elif cache is not None:
        source = layer.site.kv_source
        at = layer.site.layer if source is None else source
        past = cache.length(at) if isinstance(cache, Cache) else cache.get_seq_length(at)
        past = past if source is None else past - x.shape[1]  # which the source has written in this pass
    valid = mask if mask is not None and mask.ndim == 2 else None
    for what, given in (("a padding mask", valid), ("positions", positions)):
        if given is not None and (given.ndim != 2 or given.shape[1] != x.shape[1]):
            raise ValueError(f"{what} must be about the tokens of x, {[*x.shape[:2]]}, not {[*given.shape]}")
    if isinstance(cache, Cache) and not layer.site.cross:
        assert isinstance(past, int)
        axis = cache.coming(x.shape[1], past, valid, x.device)
        if axis is not None:
            return axis if positions is None else replace(axis, given_position=positions)
    if positions is None:
        positions = _count_on(None if not past or log is None else log[:past], valid, x.shape[1])
    if isinstance(past, Tensor):
        time = past.clone() + torch.arange(x.shape[1], device=x.device)[None]
        return Axis(x.shape[1], None, positions, time, valid=valid, device=x.device)
    return Axis(x.shape[1], past, positions, valid=valid, device=x.device)


def _count_on(log: Axis | None, valid: Tensor | None, new: int) -> Tensor | None:
    """Positions of new tokens after those of the log, padding left out; None where they equal time."""
    if valid is None and (log is None or log.given_position is None):
        return None
    newest = -1 if log is None else torch.where(log.validity, log.position, -1).amax(-1, keepdim=True)
    if valid is not None:
        return (newest + valid.long().cumsum(-1)).clamp_min(0)
    assert isinstance(newest, Tensor)
    return newest + torch.arange(1, new + 1, device=newest.device)


def stock_axis(q: Axis, first: int | Tensor, keys: int) -> Axis:
    """The keys of a stock cache, from time `first` on; static ones reach beyond the newest query, unseen."""
    if isinstance(first, int) and q.given_position is None:
        return Axis(keys, first, device=q.device)
    time = first + torch.arange(keys, device=q.device)[None]
    position = None if q.given_position is None else q.position[:, -1:] - (q.time[:, -1:] - time)
    return Axis(keys, first if isinstance(first, int) else None, position, time, device=q.device)
