"""`merging`: a model that runs on merged tokens, as it is and without a change of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from manyheads.aggregate.aggregator import Pooled, read_aggregator
from manyheads.aggregate.httm import HTTM, HeadMerge
from manyheads.aggregate.merger import Merger, MergerOptions
from manyheads.core import stock
from manyheads.core.flow import Flow
from manyheads.core.kernel import Bias, Call
from manyheads.core.mask import Axis
from manyheads.core.tap import Tap

UNLIKE = frozenset({"tokens", "select", "scan"})
"""Stages whose parts go by the places of tokens, which merging changes; by heads' own tokens `SCORED` do, too."""
SCORED = frozenset({"attend", "gate"})

_merges: WeakSet[nn.Module] = WeakSet()
"""Layers of models that merge at present."""


class Layer(NamedTuple):
    """One layer of a model, from tokens to tokens, and the attention in it."""

    block: nn.Module
    attention: nn.Module


@dataclass(eq=False)
class Merging:
    """What `merging` has done in the newest pass.

    tokens: for each layer, how many queries and how many keys a head attended with. flops: of all attention and linear
    layers in these layers, two for each multiplication with its sum. size `[B, M]`: how many of the model's tokens each
    one that is left stands for, 0: none. assign `[B, N]`: which one each of the model's tokens is in, -1: none. These
    two are None where heads merge on their own, or nothing was merged.
    """

    tokens: dict[int, tuple[int, int]] = field(default_factory=dict)
    flops: int = 0
    size: Tensor | None = None
    assign: Tensor | None = None

    def unmerge(self, x: Tensor) -> Tensor:
        """Features of all tokens `[B, N, D]` from those of what is left `[B, M, D]`; 0 for what was dropped."""
        if self.assign is None:
            return x
        back = x.gather(1, self.assign.clamp_min(0)[..., None].expand(-1, -1, x.shape[-1]))
        return back.masked_fill((self.assign < 0)[..., None], 0.0)


@contextmanager
def merging(
    model: nn.Module, line: str | MergerOptions, layers: Iterable[int] | None = None, *, restore: bool = False
) -> Iterator[Merging]:
    """Merge tokens while a bidirectional model runs.

    >>> with merging(vit, "atc(keep=0.7)") as merged:
    ...     logits = vit(images).logits
    >>> merged.tokens, merged.flops

    A merger of tokens acts behind each of the layers given, on what the layer returns, and later layers run on what is
    left; by its options later attention adds ln(size) to the scores of keys. `httm` acts inside the attention of the
    layers given, on the queries, keys and values of each head; every layer still returns all tokens. Where nothing
    is merged the model gives the same bits (a pass of few tokens through latents, whose keys are then formed, the
    same to rounding).

    Args:
        model: an `Encoder` (or `Stack`) of ours, or a transformers encoder, stock or adopted, such as a ViT.
        line: `atc(keep=0.7)`, `token_prune_merge`, `httm(ratio=0.3)`.
        layers: by number (default: after a quarter, a half and three quarters of them; of `httm` all).
        restore: the last layer gives all tokens again, each what the one that it went into is (dense tasks).

    Positions that turn or bias (`rope`, `alibi`) are the mean over what a token stands for; in ViTs they are in the
    features already. Where sources merge between attention and MLP, this is behind the MLP.

    Raises:
        ValueError: the model has no layers that can merge, or a layer does not exist, or it merges already; in a pass,
            a mask that is not padding.
    """
    options = read_aggregator(line)
    if not isinstance(options, MergerOptions):
        raise ValueError(f"{options} pools a set; what merges tokens is atc, httm or token_prune_merge")
    found = list(_layers(model))
    heads = isinstance(options, HTTM)
    _check(found, heads)
    first = options.protect  # type: ignore[attr-defined]
    if not heads and (sorted(first) != [*range(len(first))] or getattr(options, "of", 0) > max(0, len(first) - 1)):
        raise ValueError(f"{options}: other merges follow, what is protected (the class token too) comes first")
    n = len(found)
    wanted = ([*range(n)] if heads else sorted({n // 4, n // 2, 3 * n // 4})) if layers is None else [*layers]
    if not wanted or any(not 0 <= i < n for i in wanted) or len(set(wanted)) < len(wanted):
        raise ValueError(f"layers={wanted} are not layers of this model, each once; it has 0 to {n - 1}")
    if any(layer.block in _merges for layer in found):
        raise ValueError(f"{options}: this model merges already, and does so once at a time; leave that block first")
    merging = Merging()
    run = None if heads else _Run(options, sorted(wanted), found, restore, merging)
    with ExitStack() as stack:
        for layer in found:
            _merges.add(layer.block)
            stack.callback(_merges.discard, layer.block)
        stack.callback(found[0].block.register_forward_pre_hook(lambda *_: _start(merging)).remove)
        for number, layer in enumerate(found):
            if run is not None:
                stack.callback(layer.block.register_forward_pre_hook(run.before, with_kwargs=True).remove)
                _stand_by(stack, layer.attention, _Proportional(run, number))
            elif number in wanted:
                _stand_by(stack, layer.attention, HeadMerge(options))  # type: ignore[arg-type]
            if number in wanted:
                _form_keys(stack, layer.attention)
            _stand_by(stack, layer.attention, _Count(merging, number))
            for module in layer.block.modules():
                if isinstance(module, nn.Linear):
                    stack.callback(module.register_forward_hook(_counting(merging)).remove)
            if run is not None:
                stack.callback(layer.block.register_forward_hook(run.behind(number)).remove)
        yield merging


class _Run:
    """One pass of a model: tokens merged behind some layers, the same axis handed to all later ones."""

    def __init__(
        self, options: Any, wanted: list[int], layers: Sequence[Layer], restore: bool, merging: Merging
    ) -> None:
        self.options, self.wanted, self.last, self.restore = options, wanted, len(layers) - 1, restore
        self.merging = merging
        self.call: Call | None = None  # the attention of the layer that runs
        self.axis: Axis | None = None  # of the model's own tokens
        self.left: Axis | None = None  # of what is left

    def before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Later layers are told of what is left."""
        if self.merging.assign is None:
            return None
        kwargs = dict(kwargs)
        if isinstance(kwargs.get("positions"), Axis):
            kwargs.update(positions=self.left, mask=None)
        links = kwargs.get("links")
        if links is not None and "axis" in links.memo:
            links.memo["axis"] = self.left
        return args, kwargs

    def behind(self, number: int) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            merges, x = number in self.wanted, output[0] if isinstance(output, tuple) else output
            y = self.merge(x, number) if merges else x
            self.call = None
            if number == self.last and self.restore:
                y = self.merging.unmerge(y)
            if y is x:
                return output
            if not isinstance(output, tuple):
                return y
            if any(each is not None and each is not x for each in output[1:]):
                raise ValueError("a layer gives more than the sum of what came before it; its tokens cannot be merged")
            return tuple(y if each is x else each for each in output)

        return hook

    def merge(self, x: Tensor, number: int) -> Tensor:
        call, merging = self.call, self.merging
        assert call is not None, "a layer ran without its attention"
        if call.mask.rules or call.mask.k.segment is not None:
            raise ValueError("a mask over pairs of tokens is not that of merged ones; padding alone can be left out")
        if merging.assign is None:
            self.axis = call.mask.q
            assign = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        else:
            assign = merging.assign
        valid = call.mask.k.valid
        mask = None if valid is None else valid.expand(len(x), -1)
        options = self.options.again(self.wanted.index(number) + 1)
        merger: Merger = options.build(x.shape[-1])
        found: Pooled = merger(x, mask, size=merging.size, cond=options.reads(call))
        if found.out.shape[1] == x.shape[1]:
            return x
        assert found.assign is not None and self.axis is not None
        went = found.assign.gather(1, assign.clamp_min(0)).masked_fill(assign < 0, -1)
        whole = merging.size if merging.size is not None else torch.ones(x.shape[:2], device=x.device)
        kept = torch.where(found.assign >= 0, whole, 0.0)  # in float32, whatever the features are in
        merging.size = kept.new_zeros(found.out.shape[:2]).scatter_add(1, found.assign.clamp_min(0), kept)
        merging.assign = went
        self.left = _left(self.axis, went, merging.size)
        return found.out


class _Proportional(Tap):
    """Keeps the attention problem, and adds ln(size) to scores."""

    def __init__(self, run: _Run, number: int) -> None:
        self.run, self.number = run, number

    def ask(self, call: Call, flow: Flow | None) -> Call:
        run, size = self.run, self.run.merging.size
        if run.left is not None and size is not None:
            if call.k.shape[2] != size.shape[1]:
                raise ValueError(f"attention reads {call.k.shape[2]} tokens, of which {size.shape[1]} are left")
            if flow is None and call.mask.k.valid is None and not bool((size > 0).all()):
                raise ValueError("padding cannot be merged around in a stock model; adopt it, or leave padding out")
            if run.options.proportional:
                call = replace(call, bias=_with_size(call.bias, size.to(call.q.dtype)))
        run.call = call
        return call


class _Count(Tap):
    def __init__(self, merging: Merging, number: int) -> None:
        self.merging, self.number = merging, number

    def see(self, call: Call, read: Tensor, out: Tensor, flow: Flow | None, unlike: str | None = None) -> None:
        call = call.whole
        (b, h, t, e), (s, v) = call.q.shape, call.v.shape[-2:]
        self.merging.tokens[self.number] = t, s
        self.merging.flops += 2 * b * h * t * s * (e + v)


def _counting(merging: Merging) -> Any:
    def hook(module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        merging.flops += 2 * args[0].numel() * module.out_features

    return hook


def _with_size(bias: Bias | None, size: Tensor) -> Bias:
    each = size.log().clamp_min(torch.finfo(size.dtype).min)[:, None, None]  # a place without tokens is masked as well
    return lambda rows, keys: each[..., keys] if bias is None else bias(rows, keys) + each[..., keys]


def _left(axis: Axis, assign: Tensor, size: Tensor) -> Axis:
    """The axis of what is left: positions are means, times those of the first token of each."""
    b, m = size.shape
    at, gone = assign.clamp_min(0), assign < 0
    n, wide = axis.length, torch.promote_types(size.dtype, torch.float32)
    spread = torch.where(gone, 0.0, axis.position.expand(b, -1).to(wide))
    position = size.new_zeros(b, m, dtype=wide).scatter_add(1, at, spread) / size.clamp_min(1)
    first = torch.arange(n, device=size.device).expand(b, -1).masked_fill(gone, n)
    first = first.new_full((b, m), n).scatter_reduce(1, at, first, "amin").clamp_max(n - 1)
    time = axis.time.expand(b, -1).gather(1, first)
    valid = None if bool((size > 0).all()) else size > 0
    return Axis(m, None, position, time, valid=valid, device=size.device)


def _start(merging: Merging) -> None:
    merging.tokens.clear()
    merging.flops, merging.size, merging.assign = 0, None, None


def _layers(model: nn.Module) -> Iterator[Layer]:
    """A layer is the entry of a module list that an attention is in."""
    for name, module in model.named_modules():
        if not (_ours(module) or stock.calls_attention(module)):
            continue
        path = name.split(".")
        for end in range(1, len(path)):
            if isinstance(model.get_submodule(".".join(path[:end])), nn.ModuleList):
                yield Layer(model.get_submodule(".".join(path[: end + 1])), module)
                break
        else:
            raise ValueError(f"{name or type(module).__name__} is attention outside of a list of layers")


def _ours(module: nn.Module) -> bool:
    return isinstance(getattr(module, "taps", None), tuple) and hasattr(module, "spec")


def _check(layers: Sequence[Layer], heads: bool) -> None:
    if not layers:
        raise ValueError("this model has no attention layer that can be seen")
    if len({id(layer.block) for layer in layers}) < len(layers) or any(getattr(x.block, "later", ()) for x in layers):
        raise ValueError("a layer of this model has more than one attention (a context, or loops): none can merge")
    for number, (_, attention) in enumerate(layers):
        module: Any = attention
        if not _ours(attention):
            if getattr(module, "is_causal", False):
                raise ValueError(f"layer {number} is causal: merged tokens have no order")
            continue
        if module.site.causal or module.site.cross:
            raise ValueError(f"layer {number} is {'causal' if module.site.causal else 'cross-attention'}; tokens "
                             "merge in bidirectional self-attention")  # fmt: skip
        unlike = UNLIKE | SCORED if heads else UNLIKE
        parts = [part.name for part in module.spec.parts if part.stage in unlike]
        if parts:
            raise ValueError(f"layer {number} ({module.spec}): {parts[0]} goes by tokens that merging changes")


def _stand_by(stack: ExitStack, attention: Any, tap: Tap) -> None:
    if not _ours(attention):
        stock.watch(attention, tap)
        stack.callback(stock.unwatch, attention, tap)
        return
    attention.taps = (*attention.taps, tap)

    def leave() -> None:
        attention.taps = tuple(each for each in attention.taps if each is not tap)

    stack.callback(leave)


def _form_keys(stack: ExitStack, attention: Any) -> None:
    """Keys are formed for each head, however few the tokens: what is alike shall not depend on how keys are read."""
    if not _ours(attention):
        return
    project = attention.project

    def put(few_rows: int, absorb_below: int) -> None:
        attention.few_rows, project.absorb_below = few_rows, absorb_below

    stack.callback(put, attention.few_rows, project.absorb_below)
    put(0, 0)


__all__ = ["Merging", "merging"]
