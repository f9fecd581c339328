"""Attention by content: tokens sorted by the learned centre they are nearest to, in groups, and to the centres."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.check import OptionError, check_share, check_whole


class Centres(nn.Module):
    """M directions in a space of tokens, kept in a buffer that only training changes.

    Training: `rounds` times every token of the batch goes to the centre of most cosine, and a centre becomes the
    direction of the sum of its tokens; one without tokens stays. The last round alone has a gradient. The first batch
    starts from means of M interleaved parts of it, later ones from the buffer, which follows by
    μ ← decay μ + (1 - decay) centres. In evaluation the buffer is what it is.

    Args:
        unit: in evaluation, centres have norm 1 as they have in training; the source's have a little less.

    In training rows of a batch share their centres, so that they are not independent of each other.

    Source: CATANet, Liu et al. 2025 (CVPR). Its code pads for the first means what is even already; here nothing is.
    """

    mean: Tensor
    started: Tensor

    def __init__(self, width: int, centres: int, *, rounds: int = 5, decay: float = 0.999, unit: bool = False) -> None:
        super().__init__()
        check_whole(width=width, centres=centres, rounds=rounds)
        check_share(decay=decay)
        self.rounds, self.decay, self.unit = rounds, decay, unit
        self.register_buffer("mean", F.normalize(torch.randn(centres, width), dim=-1))
        self.register_buffer("started", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        """Centres `[M, D]` for tokens `[B, N, D]`; in training the buffer moves."""
        if not self.training:
            return F.normalize(self.mean, dim=-1) if self.unit else self.mean
        tokens = F.normalize(x.flatten(0, 1), dim=-1)
        with torch.no_grad():
            centres = self.mean if bool(self.started) else self._first(tokens)
            for _ in range(self.rounds - 1):
                centres = _moved(tokens, centres)
        centres = _moved(tokens, centres)
        with torch.no_grad():
            decay = self.decay if bool(self.started) else 0.0
            self.mean.copy_(decay * self.mean + (1 - decay) * centres)
            self.started.fill_(True)
        return centres

    def _first(self, tokens: Tensor) -> Tensor:
        m = len(self.mean)
        if len(tokens) < m:
            raise ValueError(f"{len(tokens)} tokens are too few for a first mean of each of {m} centres")
        parts = torch.arange(len(tokens), device=tokens.device) % m
        return F.normalize(tokens.new_zeros(m, tokens.shape[-1]).index_add(0, parts, tokens), dim=-1)


def _moved(tokens: Tensor, centres: Tensor) -> Tensor:
    with torch.no_grad():
        to = nearest(tokens, centres)
        empty = torch.bincount(to, minlength=len(centres)) == 0
    total = torch.zeros_like(centres).index_add(0, to, tokens)
    return torch.where(empty[:, None], centres, F.normalize(total, dim=-1))


def nearest(x: Tensor, centres: Tensor) -> Tensor:
    """The centre of most cosine, int64 `[…]` of tokens `[…, D]`."""
    return (x @ F.normalize(centres, dim=-1).mT).argmax(-1)


class ContentAttention(nn.Module):
    """y = W_o(softmax(q_i k_{i,i+1}ᵀ) v_{i,i+1} + softmax(q_i k_Gᵀ) v_G), put back where tokens stood.

    Tokens `[B, N, D]` are sorted by `nearest` centre (ties keep their order) and cut into groups i of `group`; queries
    of a group attend to the keys of theirs and the next (the last one: of its own), and, apart, to the centres,
    k_G = c W_k', v_G = c W_v'. Where N is no multiple of `group` the last group is short.

    The source fills the last groups up with mirrored tokens: where N is a multiple of `group`, that is every key twice,
    the same softmax; elsewhere it counts some keys twice, which `tail="mirror"` does too.

    Args:
        qk_width: of queries and keys of all heads together (the source: 36 of 40, 4 heads).
    """

    def __init__(
        self, width: int, centres: int, group: int, *, heads: int = 4, qk_width: int | None = None,
        tail: Literal["short", "mirror"] = "short", rounds: int = 5, decay: float = 0.999, unit: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        qk_width = width if qk_width is None else qk_width
        check_whole(width=width, group=group, heads=heads, qk_width=qk_width)
        if width % heads or qk_width % heads:
            raise OptionError(f"width={width} and qk_width={qk_width} are not multiples of heads={heads}")
        if tail not in ("short", "mirror"):
            raise OptionError(f"tail={tail!r} is neither short nor mirror")
        self.centres = Centres(width, centres, rounds=rounds, decay=decay, unit=unit)
        self.group, self.heads, self.tail = group, heads, tail
        self.q, self.k, self.k_global = (nn.Linear(width, qk_width, bias=False) for _ in range(3))
        self.v, self.v_global, self.out = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, N, D]` to `[B, N, D]`."""
        centres = self.centres(x)
        order = nearest(x, centres).argsort(dim=-1, stable=True)
        x = x.gather(1, order[..., None].expand_as(x))
        q, k, v = (self._split(f(x)) for f in (self.q, self.k, self.v))
        k_all, v_all = (self._split(f(centres[None].to(x.dtype))) for f in (self.k_global, self.v_global))
        near = self._near(q, k, v)
        far = F.scaled_dot_product_attention(q, k_all.expand(len(x), -1, -1, -1), v_all.expand(len(x), -1, -1, -1))
        y = (near + far).transpose(1, 2).flatten(2)
        return self.out(torch.zeros_like(y).scatter(1, order[..., None].expand_as(y), y))

    def _near(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Each group with itself and the next, `[B, H, N, V]`; keys beyond the end are hidden, or mirrored."""
        n, size = q.shape[2], min(self.group, q.shape[2])
        groups = -(-n // size)
        place = torch.arange((groups + 1) * size, device=q.device)
        mirror = place < n if self.tail == "short" else torch.ones_like(place, dtype=torch.bool)
        folded = place % (2 * n)  # … n-1, n-1, … 0: the tail mirrored at the end
        index = torch.where(place < n, place, torch.where(folded < n, folded, 2 * n - 1 - folded))
        windows = index.unfold(0, 2 * size, size)
        seen = mirror.unfold(0, 2 * size, size)[None, :, None, None]
        queries = q[:, :, index[: groups * size]].unflatten(2, (groups, size))
        keys, values = (t[:, :, windows] for t in (k, v))
        b = len(q)
        flat = (t.transpose(1, 2).flatten(0, 1) for t in (queries, keys, values))
        mask = None if bool(seen.all()) else seen.expand(b, -1, -1, -1, -1).flatten(0, 1)
        y = F.scaled_dot_product_attention(*flat, attn_mask=mask).unflatten(0, (b, groups)).transpose(1, 2)
        return y.flatten(2, 3)[:, :, :n]

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class PatchAttention(nn.Module):
    """Attention inside overlapping patches of a map `[B, h, w, D]`; where they overlap, results are averaged.

    size: of a patch; they lie `step` apart (default: size - 2), the last ones at the edge. A patch larger than the map
    is the map.
    """

    def __init__(self, width: int, size: int, *, step: int | None = None, heads: int = 4, qk_width: int | None = None):
        super().__init__()
        step = max(1, size - 2) if step is None else step
        qk_width = width if qk_width is None else qk_width
        check_whole(width=width, size=size, step=step, heads=heads, qk_width=qk_width)
        if step > size or width % heads or qk_width % heads:
            raise OptionError(
                f"step={step} is at most size={size}, width={width} and qk_width={qk_width} in {heads} heads"
            )
        self.size, self.step, self.heads = size, step, heads
        self.q, self.k = (nn.Linear(width, qk_width, bias=False) for _ in range(2))
        self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, _ = x.shape
        rows, cols = (_starts(n, min(self.size, n), self.step) for n in (h, w))
        y, times = torch.zeros_like(x), x.new_zeros(h, w, 1)
        for top in rows:
            for left in cols:
                cut = (slice(None), slice(top, top + self.size), slice(left, left + self.size))
                patch = x[cut]
                q, k, v = (f(patch.flatten(1, 2)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                           for f in (self.q, self.k, self.v))  # fmt: skip
                o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
                y[cut] = y[cut] + o.view(b, *patch.shape[1:3], -1)
                times[cut[1:]] += 1
        return self.out(y / times)


def _starts(n: int, size: int, step: int) -> list[int]:
    return sorted({*range(0, n - size, step), n - size})


class Feed(nn.Module):
    """x + W_2 (g + dw(g)), g = gelu(W_1 norm x), dw a depthwise 5x5 convolution, on maps `[B, h, w, D]`."""

    def __init__(self, width: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = 2 * width if hidden is None else hidden
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.near = nn.Conv2d(hidden, hidden, 5, padding=2, groups=hidden)

    def forward(self, x: Tensor) -> Tensor:
        g = F.gelu(self.up(self.norm(x)))
        return x + self.down(g + F.gelu(self.near(g.movedim(-1, 1))).movedim(1, -1))


class ContentBlock(nn.Module):
    """Attention by content, then inside patches, each with a residual and a feed-forward: maps `[B, h, w, D]`.

    The source stacks eight, of centres 16, 32, 64, 128 and groups 256, 128, 64, 32 twice over and patches of 16 to 28,
    between convolutions that read and write pictures. ASSUMED: how its feed-forward adds the convolution.
    """

    def __init__(
        self, width: int = 40, centres: int = 16, group: int = 256, patch: int = 16, *, heads: int = 4,
        qk_width: int | None = 36, decay: float = 0.999,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.content = ContentAttention(width, centres, group, heads=heads, qk_width=qk_width, decay=decay)
        self.mix = nn.Linear(width, width)
        self.patches = PatchAttention(width, patch, heads=heads, qk_width=qk_width)
        self.feeds = nn.ModuleList([Feed(width) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        y = self.content(self.norms[0](x).flatten(1, 2)).unflatten(1, (h, w))
        x = self.feeds[0](x + self.mix(y))
        return self.feeds[1](x + self.patches(self.norms[1](x)))


__all__ = ["Centres", "ContentAttention", "ContentBlock", "PatchAttention"]
