"""Blocks in a row, with one description of the tokens for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.utils.checkpoint
import transformers
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.core.cache import Cache
from manyheads.core.check import check_share, check_whole
from manyheads.core.cost import Cost
from manyheads.core.feed import Feed
from manyheads.core.flow import Links, check_pass
from manyheads.core.mask import Axis, Mask
from manyheads.core.part import Site
from manyheads.core.spec import Spec
from manyheads.stack.bank import Bank
from manyheads.stack.block import Block
from manyheads.stack.ffn import make_ffn
from manyheads.stack.heads import HeadCounts, head_counts
from manyheads.stack.initialise import initialise
from manyheads.stack.loops import Turns, turn
from manyheads.stack.maps import Map
from manyheads.stack.melt import MELT, Gate, Melting, check_melted, mask_of, read_melt
from manyheads.stack.meta import MetaTokens
from manyheads.stack.residual import MHAR, Plain, Sum, read_residual
from manyheads.stack.sources import check_ffns, per_layer, sites


class Stack(nn.Module):
    """Pre-norm blocks.

    >>> stack = Stack("gqa(kv_heads=2)", dim=64, heads=8, layers=4, kv_source="cla(2)")  # or [None, 0, None, 2]
    >>> y = stack(torch.randn(1, 5, 64))

    Args:
        specs: one line for all layers, or one a layer. heads: likewise, or a schedule such as `step(3, 6)`.
        layers: how many (default: as many as there are specs).
        ffn: a feed-forward's line, such as `swiglu` or `moe(experts=8, top=2)` (see `manyheads list`), for all layers
            or one a layer. hidden: the width of those (or of their experts) that name none.
        causal: False for an encoder.
        cross: whether each block also attends to a `context`, and how: True stands for `gqa`, or give a spec line.
            context_dim: the context's width (default dim).
        kv_source: for each layer None, or the earlier layer whose cached rows it reads; such a layer has no weights
            for rows and adds nothing to the cache. A list, or a map of `stack.maps` such as "cla(2)".
        attn_source: likewise the earlier layer by whose attention weights a layer weighs its own values; such a layer
            makes no queries and keys, and caches values only.
        residual: what sublayers read: `sum`, or a mixture of earlier outputs, such as `mhar(heads=8)` (see `MHAR`).
        loops: how many times the blocks run, one after the other, with the same weights; each time they cache rows of
            their own. specs may then also be one for each layer of each loop, if the weights agree. looped: only so
            many of the first layers are in the loops, those behind run once (default: all).
        melt: all loops of a layer cache one row a token, such as `melt` or `melt(chunk=128)` (see `MELT`).
        eps: of the norms. dropout: probability of dropping an attention weight in training. std: of the first weights
            (see `initialise`).
        checkpoint: compute the blocks again in backward instead of keeping their activations.
        meta: how many learned tokens stand before every sequence (see `MetaTokens`).
        max_len: the longest sequence that there will be: what parts of a fixed length are made for, and held to.
    """

    def __init__(
        self, specs: str | Spec | Sequence[str | Spec], dim: int, heads: HeadCounts,
        layers: int | None = None, *, ffn: str | Feed | Sequence[str | Feed] = "swiglu", hidden: int | None = None,
        causal: bool = True, cross: bool | str = False, context_dim: int | None = None,
        kv_source: Map = None, attn_source: Map = None,
        residual: str | Plain | MHAR = "sum", loops: int = 1, looped: int | None = None,
        melt: str | MELT | None = None, meta: int = 0, max_len: int | None = None, eps: float = 1e-6,
        dropout: float = 0.0, std: float = 0.02, checkpoint: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if layers is None:
            layers = len(specs) if isinstance(specs, Sequence) and not isinstance(specs, str) else 1
        check_whole(dim=dim, layers=layers, loops=loops, **({} if max_len is None else {"max_len": max_len}))
        check_whole(0, meta=meta)
        check_share(dropout=dropout)
        self.melt, self.melted = read_melt(melt), 1.0  # melted: the share of melted rows in what is read
        counts = head_counts(heads, dim, layers)
        turns = Turns.of(specs, counts, kv_source, attn_source, loops if self.melt is None else 1, looped)
        length = None if max_len is None else max_len + meta
        turns.check(dim, causal, length)
        if self.melt is not None:
            self.melt.check(turns.layers(dim, causal, length), loops, causal, bool(cross))
        self.ffns, self.hidden = check_ffns(per_layer(ffn, layers, "feed-forwards"), dim, hidden, causal), hidden
        self.dim, self.causal, self.loops = dim, causal, loops
        self.bank = Bank()
        self.blocks = nn.ModuleList()
        where = sites(turns.kv_source, turns.attn_source, causal, self.bank, length)
        self.turns = turns
        self.order = [*zip(turns.loops, turns.blocks, strict=True)]
        for line, count, site, number in zip(turns.specs, turns.heads, where, turns.blocks, strict=True):
            beside = Site(
                site.layers + site.layer, site.layers, causal=False, cross=True, context_dim=context_dim,
                shared=site.shared,
            )  # fmt: skip
            if number == len(self.blocks):
                attention, other = Attention(line, dim, count, site=site, dropout=dropout), None
                if cross:
                    other = Attention("gqa" if cross is True else cross, dim, count, site=beside, dropout=dropout)
                feed = make_ffn(self.ffns[number], dim, hidden, site)
                self.blocks.append(Block(attention, feed, cross=other, eps=eps))
            else:
                block = cast(Block, self.blocks[number])
                other = None if block.cross is None else turn(block.cross, block.cross.spec, beside)
                block.later.append((turn(block.attention, line, site), other))
        self.looped = layers if looped is None else looped
        if self.melt is not None:
            self._melt(self.melt)
        self.meta = MetaTokens(meta, dim) if meta else None
        self.cross = bool(cross)
        self.residual = read_residual(residual).build(dim, self.sublayers)
        self.checkpoint(checkpoint)
        initialise(self, len(self.order), std)

    def _melt(self, options: MELT) -> None:
        """Blocks of loops run again as they are, at their first place; those with rows have a gate."""
        for block in cast(Sequence[Block], self.blocks[: self.looped]):
            block.later = [(block.attention, None)] * (self.loops - 1)
            if block.attention.site.kv_source is None:
                block.gate = Gate(self.dim, options)
        again = [(loop, number) for loop in range(self.loops) for number in range(self.looped)]
        self.order = again + self.order[self.looped :]

    def checkpoint(self, wanted: bool = True) -> None:
        """Whether training passes compute the blocks again in backward."""
        for block in cast(Sequence[Block], self.blocks):
            block.gradient_checkpointing = wanted
            block._gradient_checkpointing_func = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)  # type: ignore[assignment]

    @property
    def running(self) -> Iterator[tuple[int, Block]]:
        """Loop and block, in the order they run."""
        for loop, block in self.order:
            yield loop, cast(Block, self.blocks[block])

    @property
    def attentions(self) -> list[Attention]:
        """The (self-)attention layers in the order they run; those of later loops have the weights of the first."""
        return [block.turns[loop][0] for loop, block in self.running]

    @property
    def sublayers(self) -> list[int]:
        """How many sublayers each layer has, in the order they run."""
        return [block.sublayers for _, block in self.running]

    @property
    def kv_source(self) -> list[int | None]:
        """For each layer None, or the layer whose cached rows it reads."""
        return self.turns.given([block.attention.site.kv_source for block in cast(Sequence[Block], self.blocks)])

    @property
    def attn_source(self) -> list[int | None]:
        """For each layer None, or the layer whose attention weights it takes."""
        return self.turns.given([block.attention.site.attn_source for block in cast(Sequence[Block], self.blocks)])

    @property
    def cost(self) -> Cost:
        """Parameters, cache and FLOPs of the layers' (self-)attention and gates, and the parameters of meta tokens."""
        total = Cost()
        for loop, block in self.running:
            layer = block.turns[loop][0]
            cost = layer.spec.cost(self.dim, layer.heads, layer.site)
            total = total + (cost if not loop else cost.again() if self.melt is None else cost.again().kept())
        if self.melt is not None:
            gates = sum(block.gate is not None for block in cast(Sequence[Block], self.blocks))
            total = sum([self.melt.cost(self.dim, self.loops)] * gates, total)
        return total if self.meta is None else total + Cost(self.meta.tokens.numel())

    @property
    def ffn_cost(self) -> Cost:
        """Parameters and FLOPs of the layers' feed-forwards; `active` of them serve a token.

        `cost + ffn_cost` is that of both: experts that they share are in each, and once in the sum.
        """
        total = Cost()
        for feed, block in zip(self.ffns, cast(Sequence[Block], self.blocks), strict=True):
            cost = feed.cost(self.dim, self.hidden, block.attention.site)
            total = sum([cost.again()] * len(block.later), total + cost)
        return total

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | Axis | None = None,
        mask: Tensor | Mask | None = None,
        cache: transformers.Cache | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        links: Links | None = None,
        newest: int | None = None,
    ) -> Tensor:
        """x `[B, T, D]` to `[B, T, D]`; arguments as in `Attention`, context_mask bool `[B, S]` marks the context's
        tokens against padding.

        newest: give `[B, newest, D]`, of the last tokens only. Layers that write nothing (the last ones, reading rows
        of others) then run on these alone, which is how a decoder-decoder reads a prompt at half the cost.

        The tokens are described once (one `Axis`), so that what depends on them alone (rotations) is computed once.
        """
        check_pass(
            x, self.dim, positions=positions, mask=mask, cache=cache, context=context, context_mask=context_mask,
            links=links,
        )  # fmt: skip
        if self.cross != (context is not None):
            raise ValueError(f"this stack {'needs a context' if self.cross else 'takes no context'}")
        links = Links() if links is None else links
        later = cache is not None and cache.get_seq_length() > 0
        if self.meta is not None and later and positions is not None and not isinstance(positions, Axis):
            positions = positions + self.meta.count
        axis = positions if isinstance(positions, Axis) else self.attentions[0].axis_of(x, positions, mask, cache)
        padding = None
        if self.meta is not None and not later:
            x, axis, padding = self.meta.before(x, axis, mask)
            mask = None
        if context_mask is not None:
            context_mask = context_mask[:, None, None].expand(-1, -1, x.shape[1], -1)
        if newest is not None:
            check_whole(newest=newest)
        given: dict[str, Any] = {"context": context, "context_mask": context_mask}
        if self.melt is not None:
            check_melted(x, mask, cache, self.melted)
            x = self._in_chunks(x, axis, cast(Any, mask), cast(Any, cache), links)
        else:
            few = None if newest is None or isinstance(mask, Mask) or self.training else self._lean(mask)
            running, stream = [*self.running], self.residual.start(x)
            x, stream = self._run(
                running[:few], self.residual.read(0, stream), stream, axis, mask, cache, links, **given
            )
            if few is not None:
                assert newest is not None
                if x.shape[1] > newest:
                    x, mask = x[:, -newest:], None
                    stream, axis = x, replace(axis[axis.length - newest :], rows=None)
                x, stream = self._run(running[few:], x, stream, axis, mask, cache, links, few, **given)
        x = x if self.meta is None or later else self.meta.without(x, padding)
        return x if newest is None else x[:, -newest:]

    def _run(
        self, running: Sequence[tuple[int, Block]], x: Tensor, stream: Any, axis: Axis, mask: Tensor | Mask | None,
        cache: transformers.Cache | None, links: Links, first: int = 0, **given: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """What the next layer would read, and the stream, behind some layers; first: how many have run before."""
        site, read = sum(self.sublayers[:first]), {layer.site.kv_source for layer in self.attentions}
        for loop, block in running:
            x, stream = block(
                x, positions=axis, mask=mask, cache=cache, links=links, residual=self.residual, stream=stream,
                site=site, loop=loop, **given,
            )  # fmt: skip
            site, layer = site + block.sublayers, block.turns[loop][0].site.layer
            if layer not in read and not links.route:
                links.rows.pop(layer, None)  # nobody reads them: free before the next layer
            links.rows.pop(len(self.turns.blocks) + layer, None)
        return x, stream

    def _in_chunks(self, x: Tensor, axis: Axis, mask: Tensor | None, cache: Cache | None, links: Links) -> Tensor:
        """A pass of a melted stack."""
        assert self.melt is not None
        size, past = self.melt.chunk if self.training else self.melt.prefill, 0 if cache is None else cache.length()
        melting, running, outs = Melting(self.loops, self.melted, cache, links), [*self.running], []
        for first in range(0, max(1, x.shape[1]), size):
            cut = slice(first, min(first + size, x.shape[1]))
            part, tokens, seen = x[:, cut], replace(axis[cut], rows=None), mask_of(mask, cut, past)
            stream = self.residual.start(part)
            part = self.residual.read(0, stream)
            for now in melting.turns(cut):
                at = now.number * self.looped
                blocks = running[at : at + self.looped] if now.number < self.loops - 1 else running[at:]
                part, stream = self._run(blocks, part, stream, tokens, seen, None, now.links, at, turn=now)
            outs.append(part)
        melting.end()
        return torch.cat(outs, 1)

    def _lean(self, mask: Tensor | None) -> int | None:
        """From which turn on no layer writes anything, so that each token's output is its own; None where one might."""
        whole = self.cross or self.meta is not None or not isinstance(self.residual, Sum)
        if whole or (mask is not None and mask.ndim == 4):
            return None
        layers = self.attentions
        at = len(layers)
        while at and layers[at - 1].site.kv_source is not None and not _minds(layers[at - 1]):
            at -= 1
        return at

    def started(self) -> Cache:
        """A cache of one sequence that holds the meta tokens: `fork` it for each batch of requests to go on from.

        They are the same whatever follows, so nobody has to compute them again.
        """
        if self.meta is None:
            raise ValueError("this stack has no meta tokens (meta=0): an empty cache needs no preparation")
        cache = Cache()
        self(self.meta.tokens[None, :0], cache=cache)
        return cache

    def on_step(self, progress: float) -> None:
        """Pass training progress in [0, 1] to every part with a schedule."""
        self.melted = 1.0 if self.melt is None else self.melt.share(progress)
        for block in cast(Sequence[Block], self.blocks):
            block.on_step(progress)


def _minds(layer: Attention) -> bool:
    """Whether a layer keeps states, or what it selects or adds depends on which tokens come together."""
    return bool(layer.states or len(layer.tokens) or len(layer.selects))
