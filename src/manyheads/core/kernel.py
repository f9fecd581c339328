"""One attention problem, the kernel that solves it, and the exact merge of partial solutions.

`attend` never chooses silently: `plan` says which kernel runs and why each faster one does not.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from manyheads.core.mask import Mask

Bias = Callable[[slice, slice], Tensor]
"""A tile (query rows, keys) of an additive score bias, `[B or 1, H or 1, t, s]`."""


@dataclass(frozen=True, eq=False)
class Call:
    """One attention problem: q `[B, H, T, E]`, k `[B, G, S, E]`, v `[B, G, S, V]`, query head h reads head h // (H/G).

    scale multiplies the scores and is always explicit. softcap: scores become `softcap · tanh(score / softcap)`.
    level: a part of the scores beside the product, which whatever works on scores finds in them (a bias comes after).
    program: score programs of this call alone, which run after those of the layer.

    Rows may stay as they are cached, for few queries to read: where q is m times as wide, m rows of k side by side are
    a key; `beside` rows of v are a value; with `spread`, tables `[B or 1, 1, S, E]`, a key is [k ∘ table, …] over the
    tables, each over its m rows. Parts and most kernels see such a call `whole`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scale: float
    bias: Bias | None = None
    softcap: float | None = None
    program: tuple[ScoreProgram, ...] = ()
    level: Bias | None = None
    beside: int = 1
    spread: tuple[Tensor, ...] = ()

    @property
    def key_rows(self) -> int:
        """How many rows of k side by side are a key."""
        return max(1, self.q.shape[-1] // (self.k.shape[-1] * max(1, len(self.spread))))

    @property
    def values_in_keys(self) -> bool:
        """Whether values are known to be the first channels of the keys, in one memory, so that both are read once.

        Never while compiling, where memory has no address, or where a gradient could tell them apart.
        """
        k, v = self.k, self.v
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and k.requires_grad):
            return False
        alike = k.shape[:-1] == v.shape[:-1] and k.stride() == v.stride() and k.shape[-1] > v.shape[-1]
        return alike and k.data_ptr() == v.data_ptr()

    @property
    def formed(self) -> bool:
        """Whether rows are keys and values as they are cached."""
        return self.key_rows == self.beside == 1 and not self.spread

    @property
    def whole(self) -> Call:
        """The same call, keys and values formed."""
        if self.formed:
            return self
        spread = [self.k * table for table in self.spread] or [self.k]
        k = torch.cat([_side_by_side(k, self.key_rows) for k in spread], -1)
        v = _side_by_side(self.v, self.beside)
        heads = max(k.shape[1], v.shape[1])
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        return replace(self, k=k, v=v, beside=1, spread=())


def _side_by_side(x: Tensor, rows: int) -> Tensor:
    """`[B, G·rows, S, w]` as `[B, G, S, rows·w]`."""
    return x if rows == 1 else x.unflatten(1, (-1, rows)).transpose(2, 3).flatten(3)


class Deferred(Sequence[Call]):
    """Calls that are made when asked for, one at a time: what they gather would not fit in memory together."""

    def __init__(self, makers: Sequence[Callable[[], Call]]) -> None:
        self.makers = makers

    def __len__(self) -> int:
        return len(self.makers)

    def __getitem__(self, index: int) -> Call:  # type: ignore[override]
        return self.makers[index]()


@dataclass(frozen=True, eq=False)
class Out:
    """o `[B, H, T, V]`; lse `[B, H, T]`, the log of the softmax denominator (-inf where a query saw nothing)."""

    o: Tensor
    lse: Tensor | None = None


@dataclass(frozen=True)
class Term:
    """One of the softmaxes that a score program is the sum of: of `change(score)` (-inf hides a key), times `sign`."""

    sign: int
    change: Callable[[Tensor], Tensor]


class ScoreProgram(Protocol):
    """What attend parts do on the explicit path, on tiles of query rows (shapes `[B, H, t, S]`).

    maps: score maps that it holds at once for each head, which a tile makes room for. terms: the same as softmaxes over
    keys of their own, which a kernel that can change single scores runs fused.
    """

    @property
    def halo(self) -> int: ...
    @property
    def maps(self) -> int: ...
    @property
    def terms(self) -> Sequence[Term]: ...
    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor | None: ...
    def before(self, scores: Tensor, visible: Tensor, rows: slice) -> Tensor: ...
    def normalise(self, scores: Tensor, visible: Tensor) -> Tensor | None: ...
    def after(self, weights: Tensor, visible: Tensor, rows: slice) -> Tensor: ...
    def read(self, weights: Tensor, call: Call, rows: slice) -> Tensor | None: ...


@dataclass(frozen=True)
class Plan:
    """The kernel that runs, why, and why each faster kernel does not."""

    kernel: str
    why: str
    refused: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.kernel}: {self.why}", *(f"  not {name}: {reason}" for name, reason in self.refused)]
        return "\n".join(lines)


FEW_ROWS = 32
"""Query rows of one key head that are few: a mask of their own, or a copy of one, is small beside the keys."""
SMALL = 2**19
"""Numbers in the keys of a call up to which few rows of 32 bits are read faster by a fused kernel (measured on CPU)."""
WORTH = 0.8
"""The share of all pairs of queries and keys up to which blocks beat one fused call with a mask (measured on CPU)."""
LARGE = 2**24
"""Pairs of queries and keys from which on no mask of them all is made."""


class SlowPath(UserWarning):
    """A call needs memory that grows with queries times keys."""


def plan(
    *, t: int, heads: int, groups: int, program: Sequence[str] = (), need_lse: bool = False, bias: bool = False,
    softcap: bool = False, dropout: bool = False, device: str = "cpu", share: float | None = None, pairs: int = 0,
    once: bool = False,
) -> Plan:  # fmt: skip
    """Choose a kernel from what the call is, never from its data.

    share: of all pairs of queries and keys, those that blocks of queries compute, None where no mask is needed (the
    triangle, or every key). pairs: how many there are. once: a fused kernel reads few rows faster than matmuls do
    (`_reads_once`).
    """
    refused: list[tuple[str, str]] = []
    fused = device == "cpu"  # with a log-sum-exp, and a gradient of a bias
    rows = t * (heads // groups)
    few = rows <= FEW_ROWS and not dropout
    explicit = [
        *(f"{name} works on the scores" for name in program),
        *(["the scores are soft-capped"] if softcap else []),
        *(["a bias is added to the scores"] if bias and need_lse and not (few or fused) else []),
        *(["dropout has no fused kernel on the CPU"] if dropout and device == "cpu" else []),
    ]
    if explicit:
        reason = " and ".join(explicit)
        return Plan("tiled", f"{reason}; tiles of query rows bound the memory", (("sdpa", reason), ("grouped", reason)))
    if few and fused and once and not bias:
        return Plan("flash_cpu" if need_lse else "sdpa", f"{rows} query rows a key head: fused, the cache read once")
    if few and (need_lse or not bias):
        return Plan("grouped", f"{rows} query rows a key head: two batched matmuls read the cache once")
    many = f"{rows} query rows a key head, more than {FEW_ROWS}"
    refused.append(("grouped", many if rows > FEW_ROWS else "a bias" if bias else "dropout"))
    lse = "it does not return the log-sum-exp"
    if need_lse and not fused:
        return Plan("tiled", f"the log-sum-exp is needed on {device}", (*refused, ("sdpa", lse)))
    biased = bias and fused and rows > FEW_ROWS
    if biased or (share is not None and rows > FEW_ROWS and (share <= WORTH or pairs >= LARGE)):
        part = "" if share is None else f", {share:.0%} of all pairs"
        why = f"fused, in blocks of query rows with the keys within their reach{part}"
        no = "its gradient of a bias expands all scores" if biased else "it would take a mask of every query and key"
        return Plan("banded", why, (*refused, ("sdpa", no)))
    if need_lse:
        return Plan("flash_cpu", "fused, with a log-sum-exp that has a gradient", (*refused, ("sdpa", lse)))
    return Plan("sdpa", "fused scaled_dot_product_attention", tuple(refused))


def plan_call(call: Call, program: Sequence[object] = (), *, need_lse: bool = False, dropout: float = 0.0) -> Plan:
    """`plan` for a call."""
    from manyheads.core.kernels.banded import share

    heads, t, groups, s = *call.q.shape[1:3], *call.k.shape[1:3]
    program = [str(p) for p in (*program, *call.program)]
    biased = call.bias is not None or call.level is not None
    free = not biased and (call.mask.is_causal or call.mask.is_full)
    few = t * (heads // groups) <= FEW_ROWS
    return plan(
        t=t,
        heads=heads,
        groups=groups,
        program=program,
        need_lse=need_lse,
        bias=biased,
        softcap=call.softcap is not None,
        dropout=dropout > 0,
        device="cpu" if call.q.device.type == "meta" else call.q.device.type,  # only described
        share=None if free or few or program else share(call.mask, heads, groups),
        pairs=t * s,
        once=_reads_once(call),
    )


def _reads_once(call: Call) -> bool:
    """Whether few queries are answered faster by a fused kernel than by two matmuls.

    It copies nothing, and what it saves is not lost in waiting for memory, where rows of 32 bits come a little slower.
    """
    inside = call.values_in_keys
    alike = inside or call.k.shape == call.v.shape
    return call.formed and alike and (inside or call.q.element_size() == 2 or call.k.numel() <= SMALL)


def attend(
    call: Call,
    program: Sequence[ScoreProgram] = (),
    *,
    need_lse: bool = False,
    dropout: float = 0.0,
    kernel: str = "auto",
) -> Out:
    """Solve one attention problem.

    Args:
        program: score programs in order; any makes the explicit (tiled) path necessary.
        need_lse: also return the log-sum-exp (to merge with other calls).
        dropout: probability of dropping an attention weight.
        kernel: "auto", or one of `kernels.KERNELS` by name; one that cannot serve the call raises.
    """
    from manyheads.core.kernels import KERNELS

    kernel = _forced or kernel
    if kernel == "auto":
        kernel = plan_call(call, program, need_lse=need_lse, dropout=dropout).kernel
    elif kernel not in KERNELS:
        raise ValueError(f"no kernel {kernel!r}; there are {', '.join(KERNELS)}")
    if kernel != "grouped":
        call = call.whole
    if call.scale <= 0:  # fused kernels hide a key before they scale, which such a scale would undo
        call = replace(call, q=call.q * call.scale, scale=1.0)
    if call.level is not None and kernel != "tiled":  # nothing else works on the scores
        call = replace(call, bias=_sum(call.level, call.bias), level=None)
    return KERNELS[kernel](call, (*program, *call.program), need_lse=need_lse, dropout=dropout)


def _sum(level: Bias, bias: Bias | None) -> Bias:
    return level if bias is None else lambda rows, keys: level(rows, keys) + bias(rows, keys)


def merge(outs: Sequence[Out]) -> Out:
    """Solutions over disjoint keys joined exactly: o = Σ exp(lse_i - lse) o_i, lse = log Σ exp(lse_i).

    Any order and nesting give the same; a query that saw nothing anywhere stays zero.
    """
    if len(outs) == 1:
        return outs[0]
    each = [out.lse for out in outs]
    if any(lse is None for lse in each):
        raise ValueError("merge needs the log-sum-exp of every part: ask attend for need_lse=True")
    if len(outs) == 2 and not any(t is not None and t.requires_grad for out in outs for t in (out.o, out.lse)):
        return _merge_two(*outs)
    lses = torch.stack([lse for lse in each if lse is not None])
    top = lses.amax(0).detach()
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    shares = (lses - top).exp()
    total = shares.sum(0)
    safe = total.clamp_min(torch.finfo(total.dtype).tiny)
    weights = shares / safe
    o = sum(w[..., None].to(out.o.dtype) * out.o for w, out in zip(weights, outs, strict=True))
    assert isinstance(o, Tensor)
    return Out(o, (safe.log() + top).masked_fill(total == 0, -torch.inf))


def _merge_two(a: Out, b: Out) -> Out:
    """`merge` in a third of the steps, which count where a token is decoded; without gradients."""
    assert a.lse is not None and b.lse is not None
    share = (b.lse - a.lse).nan_to_num_().sigmoid_()
    o, lse = torch.lerp(a.o, b.o, share[..., None].to(a.o.dtype)), torch.logaddexp(a.lse, b.lse)
    return Out(o.masked_fill_((lse == -torch.inf)[..., None], 0.0), lse)


@functools.cache
def warn_once(message: str) -> None:
    warnings.warn(message, SlowPath, stacklevel=3)


_forced: str | None = None


@contextmanager
def using(kernel: str) -> Iterator[None]:
    """Every `attend` inside runs on this kernel; one that cannot serve a call raises (for tests and benchmarks)."""
    global _forced
    before, _forced = _forced, kernel
    try:
        yield
    finally:
        _forced = before
