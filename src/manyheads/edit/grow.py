"""More heads and wider heads, the same function: new parameters are silent at first, and can learn.

- `widen`: queries, keys and values get more channels. Those of keys and the rows of W_O start at zero, those of
  queries and values are drawn: scores and outputs stay, zeros receive gradients at once, the others after a step.
  Under RoPE the new channels do not turn (`rope(fraction=…)`), because the frequencies belong to the old width.
- `grow`: more query heads, W_O of which starts at zero; with key heads of their own where every head has one. Under
  differential attention a signal head becomes c copies in its group, each with a share of its W_O.
- `split_heads`: a query head as c copies with a share of its W_O each, a key head as copies for a part of its query
  heads each (grouped heads become multi-head attention).

Copies receive one and the same gradient. Matrices that sum to zero over the copies of a head (`noise`) keep the
function and let them part.

Other heads from the same matrices, as `prism` and other schedules have them, are another function: the softmax is taken
a head.

Sources: heads of zeros, Bhojanapalli et al. 2020, arXiv 2002.07028; copies of signal heads, Grouped Differential
Attention 2025, arXiv 2510.06949. Choices: how W_O is shared, and noise that leaves no trace, are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from manyheads.attention import Attention
from manyheads.attention.attend.differential import Differential
from manyheads.attention.position.rope import Rope
from manyheads.convert.moves.common import between
from manyheads.core.check import check_whole, is_number
from manyheads.core.part import OptionError, Part
from manyheads.core.spec import Spec
from manyheads.edit.layers import ALIKE, Rows, gqa_layers, gqa_of, put, spec_of, with_rows
from manyheads.stack.heads import Schedule
from manyheads.stack.pretrained import ManyheadsForCausalLM
from manyheads.stack.sources import per_layer

COPIES = ALIKE | {"head_norm"}
"""Parts under which a copy of a head does what the head does."""


@torch.no_grad()
def widen(
    model: PreTrainedModel,
    head_dim: int | None = None,
    *,
    v_dim: int | None = None,
    scale: Literal["kept", "folded"] = "kept",
    layers: Iterable[int] | None = None,
    seed: int = 0,
) -> ManyheadsForCausalLM:
    """Give heads more channels, in place, without changing what the model computes.

    Args:
        head_dim: new width of queries and keys. v_dim: of values (default: as wide, where they were as wide before).
        scale: `kept`, a score is the product times the old factor; `folded`, times head_dim^-1/2 as usual, and queries
            grow by what that takes away.
        seed: of the weights that are drawn.

    Raises:
        OptionError: a width below the present one, or a layer whose scores feel more channels (qk-norm).
    """
    if head_dim is None and v_dim is None:
        raise OptionError("give head_dim, v_dim or both")
    if scale not in ("kept", "folded"):
        raise OptionError(f"scale={scale!r}; the factor of scores is kept or folded")
    check_whole(**{n: w for n, w in (("head_dim", head_dim), ("v_dim", v_dim)) if w is not None})
    ours, chosen = gqa_layers(model, layers)
    plans = {number: _widths(number, layer, head_dim, v_dim) for number, layer in chosen.items()}
    made: dict[int, Attention] = {}
    for number, layer in chosen.items():
        rows, (qk, wide) = Rows.of(layer), plans[number]
        draw, old = _drawing(seed, number), layer.layout.scale
        more_qk, more_v = qk - rows.q.shape[1], wide - rows.v.shape[1]
        usual = scale == "folded" or math.isclose(old, qk**-0.5)
        q, v = (
            torch.cat([side, _fresh(side, (len(side), more, side.shape[-1]), draw)], 1)
            for side, more in ((rows.q, more_qk), (rows.v, more_v))
        )
        q = q * (old * qk**0.5 if usual else 1)
        new = Rows(q, F.pad(rows.k, (0, 0, 0, more_qk)), v, F.pad(rows.o, (0, more_v)))
        spec = spec_of(layer, new, None if usual else old)
        made[number] = with_rows(layer, new, Spec(tuple(_still(part, layer, qk) for part in spec.parts)))
    put(ours, made)
    return ours


def _widths(number: int, layer: Attention, head_dim: int | None, v_dim: int | None) -> tuple[int, int]:
    """Channels of keys and of values."""
    qk, v = layer.layout.qk_width, layer.layout.v_width
    new = qk if head_dim is None else head_dim
    wide = v_dim if v_dim is not None else new if v == qk else v
    for name, now, wanted in (("head_dim", qk, new), ("v_dim", v, wide)):
        if wanted < now:
            raise OptionError(f"layer {number}: {name}={wanted} is below the present {now}; heads only grow here")
    if new > qk and (name := between(layer.spec)):
        raise OptionError(
            f"layer {number}: {name} acts on all channels of a query and a key, so that more of them change its "
            f"scores; v_dim alone can grow"
        )
    return new, wide


def _still(part: Part, layer: Attention, width: int) -> Part:
    """RoPE that turns the channels which it turned before, and no others."""
    turns = layer.layout.rotary
    if not isinstance(part, Rope) or turns is None or width == layer.layout.qk_width:
        return part
    turning = turns.stop - turns.start
    fraction = turning / width
    while int(width * fraction) < turning:
        fraction = math.nextafter(fraction, 1)
    return replace(part, fraction=fraction)


@torch.no_grad()
def grow(
    model: PreTrainedModel,
    heads: int | Sequence[int],
    *,
    kv_heads: int | None = None,
    noise: float = 0.0,
    layers: Iterable[int] | None = None,
    seed: int = 0,
) -> ManyheadsForCausalLM:
    """Give layers more query heads, in place, without changing what the model computes.

    Args:
        heads: query heads of each layer, a number or one a layer.
        kv_heads: key heads; default: as many as now, or as query heads where each has its own.
        noise: of copies (differential attention), see `split_heads`.
        seed: of the weights that are drawn.

    Raises:
        OptionError: fewer heads than now, numbers that do not fit the key heads, or a schedule of heads on equal
            matrices (`prism`), which is not the same function.
    """
    if isinstance(heads, str | Schedule):
        raise OptionError(
            f"heads={heads}: a schedule cuts the same matrices into other heads, and each head has a softmax of its "
            "own, so that the function would not stay; give numbers, or train such a model: "
            "ManyheadsConfig(heads='prism')"
        )
    ours, chosen = gqa_layers(model, layers, COPIES | {"differential"})
    counts = cast("list[int]", per_layer(heads, len(ours.attentions), "head counts"))
    check_whole(**{f"heads[{n}]": counts[n] for n in chosen})
    made: dict[int, Attention] = {}
    for number, layer in chosen.items():
        noisy = _Noise(noise, _drawing(seed, number))
        if counts[number] < layer.heads:
            raise OptionError(
                f"layer {number}: {counts[number]} heads are below the present {layer.heads}; merge_heads makes fewer"
            )
        if any(isinstance(part, Differential) for part in layer.spec.parts):
            made[number] = _more_signal(number, layer, counts[number], kv_heads, noisy)
        else:
            made[number] = _more_silent(number, layer, counts[number], kv_heads, noisy.draw)
    put(ours, made)
    return ours


def _more_silent(number: int, layer: Attention, heads: int, kv_heads: int | None, draw: torch.Generator) -> Attention:
    """New query heads in each group, or groups with a key head of their own, and no output."""
    rows, before, groups = Rows.of(layer), layer.layout.q, layer.layout.kv
    each = before // groups
    wanted = kv_heads if kv_heads is not None else heads if each == 1 else groups
    check_whole(kv_heads=wanted)
    if wanted == groups and heads % groups == 0:
        more, new = heads // groups - each, 0
    elif wanted > groups and heads == wanted * each:
        more, new = 0, wanted - groups
    else:
        fits = f"heads that are a multiple of {groups} keep {groups} key heads"
        fits += f", heads = {each} times kv_heads have more" if each > 1 else ", kv_heads = heads have more"
        raise OptionError(
            f"layer {number}: {heads} heads on {wanted} key heads do not follow from {before} on {groups}; {fits}"
        )
    q, o = (side.unflatten(0, (groups, each)) for side in (rows.q, rows.o))
    if more:
        q = torch.cat([q, _fresh(q, (groups, more, *q.shape[2:]), draw)], 1)
        o = F.pad(o, (0, 0, 0, 0, 0, more))
    if new:
        q = torch.cat([q, _fresh(q, (new, *q.shape[1:]), draw)])
        o = F.pad(o, (0, 0, 0, 0, 0, 0, 0, new))
    k, v = (torch.cat([side, _fresh(side, (new, *side.shape[1:]), draw)]) for side in (rows.k, rows.v))
    return with_rows(layer, Rows(q.flatten(0, 1), k, v, o.flatten(0, 1)))


def _more_signal(number: int, layer: Attention, heads: int, kv_heads: int | None, noise: _Noise) -> Attention:
    """Copies of each signal head beside it; noise heads and key heads stay."""
    part = next(part for part in layer.spec.parts if isinstance(part, Differential))
    pairs, ratio = layer.layout.q // (part.ratio + 1), part.ratio
    copies = (heads / pairs - 1) / ratio
    if copies != int(copies) or kv_heads not in (None, layer.layout.kv):
        fits = [pairs * (n * ratio + 1) for n in range(1, 5)]
        raise OptionError(
            f"layer {number}: {heads} heads on {kv_heads or layer.layout.kv} key heads; of {pairs} noise heads and "
            f"their {ratio} signal heads each the signal heads are copied, on {layer.layout.kv} key heads: {fits}, …"
        )
    rows = Rows.of(layer)
    q = rows.q.unflatten(0, (pairs, ratio + 1))
    q = torch.cat([q[:, :-1].repeat_interleave(int(copies), 1), q[:, -1:]], 1).flatten(0, 1)
    new = rows._replace(q=q, o=noise.shared(rows.o, int(copies)))
    spec = spec_of(layer, new, gqa_of(layer.spec).scale)
    more = replace(part, ratio=ratio * int(copies))
    return with_rows(layer, new, Spec(tuple(more if isinstance(p, Differential) else p for p in spec.parts)))


@torch.no_grad()
def split_heads(
    model: PreTrainedModel,
    copies: int = 1,
    *,
    kv_heads: int | None = None,
    noise: float = 0.0,
    layers: Iterable[int] | None = None,
    seed: int = 0,
) -> ManyheadsForCausalLM:
    """Make several heads of each, in place, without changing what the model computes.

    Args:
        copies: of each query head, side by side; their blocks of W_O add up to its own.
        kv_heads: key heads afterwards, copies of those that there are, each for fewer query heads; as many as query
            heads is multi-head attention.
        noise: what the copies' blocks of W_O differ by, in units of their standard deviation.

    Raises:
        OptionError: key heads that are no multiple of the present ones or do not divide the query heads.
    """
    check_whole(copies=copies)
    ours, chosen = gqa_layers(model, layers, COPIES)
    made: dict[int, Attention] = {}
    for number, layer in chosen.items():
        rows, heads, groups = Rows.of(layer), layer.heads * copies, layer.layout.kv
        wanted = groups if kv_heads is None else kv_heads
        check_whole(kv_heads=wanted)
        if wanted % groups or heads % wanted:
            fits = [n for n in range(groups, heads + 1, groups) if heads % n == 0]
            raise OptionError(
                f"layer {number}: {groups} key heads of {heads} query heads do not become {wanted}; kv_heads may be "
                f"{fits}"
            )
        k, v = (side.repeat_interleave(wanted // groups, 0) for side in (rows.k, rows.v))
        o = _Noise(noise, _drawing(seed, number)).shared(rows.o, copies)
        made[number] = with_rows(layer, Rows(rows.q.repeat_interleave(copies, 0), k, v, o))
    put(ours, made)
    return ours


class _Noise:
    """Draws of a layer, and how far copies are drawn apart."""

    def __init__(self, size: Any, draw: torch.Generator) -> None:
        if not is_number(size) or size < 0:
            raise OptionError(f"noise is a number of at least 0, not {size!r}")
        self.size, self.draw = size, draw

    def shared(self, o: Tensor, copies: int) -> Tensor:
        """W_O `[H, D, v]` of copies that lie side by side, `[copies · H, D, v]`; they add up to what it was."""
        parts = o.unsqueeze(1).repeat(1, copies, 1, 1) / copies
        if self.size and copies > 1:
            apart = torch.randn(parts.shape, generator=self.draw, dtype=o.dtype).to(o.device)
            parts = parts + self.size * o.std() * (apart - apart.mean(1, keepdim=True))
        return parts.flatten(0, 1)


def _drawing(seed: int, layer: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 10007 + layer)


def _fresh(like: Tensor, shape: Sequence[int], draw: torch.Generator) -> Tensor:
    """New rows as large as others, with an empty last channel, the bias."""
    made = torch.randn(*shape, generator=draw, dtype=like.dtype).to(like.device)
    made[..., -1] = 0
    return made * (like[..., :-1].std() if like.any() else 0.02)


__all__ = ["grow", "split_heads", "widen"]
