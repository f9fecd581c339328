"""The attention layer: one pipeline that every combination of parts runs through.

    x ─► tokens ─► project ─► transform ─► position ─► (cache) ─► select ─► attend | scan ─► gate ─► output ─► y

Parts act through hooks (see `manyheads.core.part`); this file knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
import transformers
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from manyheads.attention import arguments
from manyheads.attention.arguments import stock_axis
from manyheads.attention.prefixes import why_whole, with_shared
from manyheads.core.cache import Cache, read_stock, write_stock
from manyheads.core.check import OptionError, check_share
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow, Links, Rows, View, check_pass
from manyheads.core.kernel import FEW_ROWS, Bias, Call, Out, Plan, attend, plan_call
from manyheads.core.mask import Axis, Given, Mask, Rule, causal
from manyheads.core.part import (
    BoundProgram,
    Gate,
    Piece,
    Position,
    Program,
    Project,
    Scan,
    Site,
    Tokens,
    Transform,
)
from manyheads.core.spec import Spec
from manyheads.core.tap import Tap

ALONE = Site()


class Attention(nn.Module):
    """Attention by spec.

    >>> layer = Attention("gqa(kv_heads=2) + kha + moh(top=6)", dim=64, heads=8)
    >>> y = layer(torch.randn(1, 5, 64))

    Args:
        spec: a spec line; see `manyheads list` for the parts.
        dim: width D of x and y.
        heads: query heads H.
        site: where the layer sits in a stack.
        dropout: probability of dropping an attention weight in training.
    """

    def __init__(self, spec: str | Spec, dim: int, heads: int, *, site: Site = ALONE, dropout: float = 0.0) -> None:
        super().__init__()
        check_share(dropout=dropout)
        if dropout and site.attn_source is not None:
            raise OptionError(f"dropout={dropout}: weights taken from layer {site.attn_source} would be dropped anew")
        self.spec = Spec.parse(spec).resolve(site)
        self.dim, self.heads, self.site, self.dropout = dim, heads, site, dropout
        pieces: dict[str, list[Piece]] = {stage: [] for stage in self.spec.by_stage}
        self.few_rows, self.read_heads = FEW_ROWS, heads
        self.taps: tuple[Tap, ...] = ()
        for part, before, after in self.spec.layouts(dim, heads, site):
            self.layout = after
            if part.stage == "project":
                self.read_heads = after.kv
            if part.lent(site):
                continue
            piece = part.build(before, after, site)
            piece.at = part.at
            pieces[part.stage].append(piece)
        self.project = cast(Project, pieces["project"][0])
        self.tokens, self.transforms, self.positions, self.selects, self.scans, self.attends, self.gates = (
            nn.ModuleList(pieces[stage])
            for stage in ("tokens", "transform", "position", "select", "scan", "attend", "gate")
        )
        self.entries = {name: self._kept(entry) for piece in self._pieces() for name, entry in piece.entries.items()}
        self.states = {name: state for piece in self._pieces() for name, state in piece.states.items()}
        if dropout and self.scan is not None:
            raise OptionError(f"dropout={dropout} drops attention weights, and {self.spec} has a scan in their place")
        self._place()

    @property
    def scan(self) -> Scan | None:
        """What reads a state in place of keys, if anything does: a part of that stage, or the projection itself."""
        return next((piece for piece in (self.project, *self.scans) if isinstance(piece, Scan)), None)

    def _kept(self, entry: Entry) -> Entry:
        """An entry with the number of rows that the layout keeps of it."""
        keep = self.layout.keep
        if entry.role == "k" and self.layout.keep_keys is not None:
            keep = self.layout.keep_keys
        if keep is None or self.project.remembers or entry.stride > 1:
            return entry._replace(keep=None)
        return entry._replace(keep=keep, first=self.layout.first)

    def _place(self) -> None:
        """Decide which transforms run before the cache, and on which side of it rotation happens."""
        roles = {entry.role for entry in self.entries.values()}
        can_write = self.site.kv_source is None and {"k", "v"} <= roles
        late: bool = not can_write and self.site.kv_source is None
        alike = all(piece.alike for piece in cast(Sequence[Position], self.positions))
        read, self.rotate_at = False, self.project.rotate
        self.early_transforms: list[Transform] = []
        self.late_transforms: list[Transform] = []
        for piece in cast(Sequence[Transform], self.transforms):
            read = read or piece.at == "read"
            (self.late_transforms if late or read else self.early_transforms).append(piece)
            if read and not (piece.commutes and alike):
                self.rotate_at = "read"
        if self.project.turns_values and len(self.transforms):  # keys and values are transformed apart, then rotated
            self.rotate_at = "read"
        if any(piece.places for piece in self._pieces()):
            self.rotate_at = "select"
        self.owners = {name: piece for piece in self._pieces() for name in piece.entries}
        self.writing = list(dict.fromkeys(self.owners.values()))
        self.asking = [piece for piece in self._pieces() if type(piece).ask is not Piece.ask]
        self.ruling = [piece for piece in self._pieces() if type(piece).rules is not Piece.rules]
        self.checking = [piece for piece in self._pieces() if type(piece).check is not Piece.check]
        self.splitting = [piece for piece in self._pieces() if type(piece).split is not Piece.split]
        self.in_order = any(piece.in_order for piece in self._pieces())
        self._place_moves()

    def _place_moves(self) -> None:
        """Decide whether few queries, which read many rows, take what acts on rows as they are read upon themselves."""
        late, positions = self.late_transforms, cast(Sequence[Position], self.positions)
        whole, rotary = range(self.layout.qk_width), self.layout.rotary
        turning = [] if rotary is None else [p for p in positions if type(p).turn is not Position.turn]
        self.spreads = (
            self.rotate_at == "read" and not late and not self.project.turns_values and len(turning) == 1
            and type(turning[0]).apart is not Position.apart and rotary is not None and whole[rotary] == whole
        )  # fmt: skip
        plain = all(piece in late for piece in self.splitting) and not (
            self.scan is not None
            or any(type(piece).bias is not Position.bias for piece in positions)
            or any(isinstance(piece, Program) for piece in self.attends)
        )
        linear = all(piece.linear for piece in late) and not any(piece.mixes for piece in late[1:])
        cut = whole[self.layout.content] != whole or type(self.project).undo is not Project.undo
        cut = cut and bool(late) and late[0].mixes
        placed = all(piece.places for piece in late) and all(piece.alike for piece in turning)
        turns = bool(turning) and self.rotate_at != "write" and not placed
        self.moves = plain and linear and not cut and not turns

    @property
    def whole(self) -> str | None:
        """Why its keys must be read as one sequence, and not in pieces that others share; None if they need not."""
        return why_whole(self)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | Axis | None = None,
        mask: Tensor | Mask | None = None,
        cache: transformers.Cache | None = None,
        context: Tensor | None = None,
        links: Links | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: `[B, T, D]`.
            positions: int `[B or 1, T]`, or an `Axis` that says more; by default tokens count on from the cache.
            mask: bool, True = may attend: `[B, T]` marks tokens against padding and is combined with the causal
                order; `[B or 1, H or 1, T, S]` is the whole truth. Or a `Mask`, used as it is.
            cache: a `manyheads.Cache`, or a stock transformers cache; rows of x are added to it. For cross-attention a
                stock one is an `EncoderDecoderCache`, whose second cache keeps the rows of the context.
            context: `[B, S, D']`, the key side of cross-attention.
            links: collects auxiliary losses (`links.aux`) and carries rows between layers.

        Returns:
            y `[B, T, D]`. Queries that see no key give zero (before the output projection's bias).
        """
        flow = self._flow(x, positions, mask, cache, context, links)
        asked, flow = flow.q, self._enter(flow)
        for piece in self.checking:
            piece.check(flow)
        solved: tuple[Call, Tensor] | None = None
        if self.site.attn_source is None:
            solved, o = self._own(flow, mask, cache)
        else:
            o = self._taken(flow, cache)
        for piece in cast(Sequence[Gate], self.gates):
            o = piece.gate(o, flow)
        for tap in self.taps:
            o = tap.out(o, flow)
        if solved is not None:
            for tap in self.taps:
                tap.see(*solved, o, flow)
        y = self.project.output(o, flow)
        for piece in reversed(cast(Sequence[Tokens], self.tokens)):
            y = piece.leave(y, flow)
        if isinstance(cache, Cache) and flow.new_state:
            cache.state(self.site.layer).update(flow.new_state)
        if isinstance(cache, Cache) and self.site.cross and not isinstance(positions, Axis):
            store = cache.site(self.site.layer)
            store.asked = asked if store.asked is None else store.asked.cat(asked)
        return y

    def _own(
        self, flow: Flow, mask: Tensor | Mask | None, cache: transformers.Cache | None
    ) -> tuple[tuple[Call, Tensor], Tensor]:
        """This layer's own attention: the problem and what was read, and head outputs `[B, out, T, out_width]`."""
        q = self.project.queries(flow)
        flow.memo.setdefault("queries", q)
        for piece in self.early_transforms:
            q = self._edit(q, piece.on_q, flow)
        if self.rotate_at == "write":
            q = self._turn(q, "q", flow.q)
        flow.rows = self._rows(q, flow, cache)
        flow.view = self.view(flow.q.length)
        asked, call = q, self._biased(self._read(q, flow, mask), flow)
        for tap in self.taps:
            call = tap.ask(call, flow)
        if self.site.lends:
            flow.links.weigh[self.site.layer] = lambda v: self._heads(replace(call, v=v, beside=1), flow)
        o = read = with_shared(self, asked, call, flow) if flow.rows.shared else self._heads(call, flow)
        if self.project.turns_values:
            o = self._turn(o, "v", flow.q, back=True)
        mapped: list[Callable[[Tensor, Flow], Tensor]] = [self.project.undo]
        if self._after(flow):
            after = [piece.v_after for piece in self.late_transforms]
            made = flow.view == "absorbed" or self.project.undoes  # values are only final once undone
            mapped = [*mapped, *after] if made else [*after, *mapped]
        for change in mapped:
            o = change(o, flow)
        return (call, read), o

    def _taken(self, flow: Flow, cache: transformers.Cache | None) -> Tensor:
        """Head outputs by the attention weights of another layer, over values of this one."""
        layer, source = self.site.layer, self.site.attn_source
        if source not in flow.links.weigh:
            raise ValueError(f"layer {layer} takes the attention weights of layer {source}, which links do not hold")
        flow.rows = self._sourced(lambda flow, cache: self._store(self.project.write(flow), flow, cache), flow, cache)
        return flow.links.weigh[source](flow.rows["v"])

    def _flow(
        self, x: Tensor, positions: Tensor | Axis | None, mask: Tensor | Mask | None, cache: transformers.Cache | None,
        context: Tensor | None, links: Links | None,
    ) -> Flow:  # fmt: skip
        check_pass(x, self.dim, positions=positions, mask=mask, cache=cache, context=context, links=links)
        arguments.check(self, x, positions, mask, context)
        layer, links = self.site.layer, Links() if links is None else links
        q = positions if isinstance(positions, Axis) else self.axis_of(x, positions, mask, cache)
        source, new = (x, q) if context is None else (context, Axis(context.shape[1], 0, device=x.device))
        if isinstance(mask, Mask) and (context is not None or cache is None):
            new = mask.k
        for what, axis, rows in (("queries", q, x), ("keys", new, source)):
            if axis.length != rows.shape[1]:
                raise ValueError(f"an axis of {axis.length} {what} describes {rows.shape[1]}")
        if cache is not None:
            arguments.check_cache(self, cache, q, mask, len(x))
        given = mask if isinstance(mask, Tensor) and mask.ndim == 4 else None
        flow = Flow(x, source, q, new, links, layer, given, training=self.training, turn=self._turn)
        if isinstance(cache, Cache):
            flow.state = dict(cache.state(layer))  # as before this pass, also to a layer that takes these weights
            flow.past = cache.past(layer) if self.project.remembers else cache.slots(layer)
        return flow

    def axis_of(
        self, x: Tensor, positions: Tensor | None, mask: Tensor | Mask | None, cache: transformers.Cache | None
    ) -> Axis:
        """The tokens of x: they count on from what the cache has seen, padding (a `[B, T]` mask) apart."""
        return arguments.axis_of(self, x, positions, mask, cache)

    def _enter(self, flow: Flow) -> Flow:
        """x and its axis as the token parts make them; in self-attention they are the key side too."""
        for piece in cast(Sequence[Tokens], self.tokens):
            x, axis = piece.enter(flow.x, flow.q, flow)
            if not self.site.cross:
                flow.source, flow.new = x, flow.new if axis is flow.q else axis
            flow.x, flow.q = x, axis
        if flow.links.source is not None:
            flow.source = flow.links.source.x
        return flow

    def _rows(self, q: Tensor, flow: Flow, cache: transformers.Cache | None) -> Rows:
        """This pass's rows, as they are cached; or another layer's; or the context's, kept from before."""
        layer, source = self.site.layer, self.site.kv_source
        if source is not None:
            if source not in flow.links.rows:
                raise ValueError(f"layer {layer} reads the rows of layer {source}, which links do not hold")
            return flow.links.rows[source]
        if self.site.cross and isinstance(cache, Cache) and cache.site(layer).length:
            if cache.site(layer).length != flow.new.length:
                raise ValueError(f"the cache holds a context of {cache.site(layer).length}, not {flow.new.length}")
            return cache.site(layer).read(flow.new)
        if self.site.cross and isinstance(cache, EncoderDecoderCache) and cache.is_updated.get(self.decoder_layer):
            return self._context(read_stock(cache.cross_attention_cache, self.decoder_layer, self.entries), flow)
        flow.links.rows[layer] = self._sourced(lambda flow, cache: self._written(q, flow, cache), flow, cache)
        return flow.links.rows[flow.links.route.get(layer, layer)]

    def _sourced(
        self, write: Callable[[Flow, transformers.Cache | None], Rows], flow: Flow, cache: transformers.Cache | None
    ) -> Rows:
        """What a way to write rows gives, or its mixture with rows of x where `links.source` says so."""
        given, memo = flow.links.source, {**flow.memo}
        rows = write(flow, cache)
        if given is None or given.share == 1:
            return rows
        return rows.mixed(write(replace(flow, source=flow.x, memo=memo), given.cache), given.share)

    def _written(self, q: Tensor, flow: Flow, cache: transformers.Cache | None) -> Rows:
        """This pass's rows, transformed, rotated and cached."""
        rows = {name: row for piece in self.writing for name, row in piece.write(flow).items()}
        for piece in self.early_transforms:
            for name, entry in self.entries.items():
                hook = {"k": piece.on_k, "v": piece.on_v}.get(entry.role or "")
                if hook is not None:
                    rows[name] = self._edit(rows[name], hook, flow) if entry.role == "k" else hook(rows[name], flow)
        if self.rotate_at == "write":
            rows = {name: self._turn(row, name, flow.new) for name, row in rows.items()}
        return self._store(self.project.settle(q, rows, flow), flow, cache)

    def _store(self, rows: dict[str, Tensor], flow: Flow, cache: transformers.Cache | None) -> Rows:
        if cache is None:
            return Rows({name: self.entries[name].read(row) for name, row in rows.items()}, flow.new)
        if isinstance(cache, Cache):
            if self.site.cross:
                store = cache.site(self.site.layer)
                store.fixed = True
                return store.write(rows, self.entries, flow.new, flow.new)
            return cache.write(self.site.layer, rows, self.entries, flow.new)
        if self.states:
            state = next(iter(self.states))
            raise ValueError(f"a {type(cache).__name__} has no room for the state {state!r}; use manyheads.Cache")
        if self.project.remembers:
            raise ValueError(f"a {type(cache).__name__} does not give earlier rows to new ones; use manyheads.Cache")
        if self.site.cross and isinstance(cache, EncoderDecoderCache):
            cache.is_updated[self.decoder_layer] = True
            kept = write_stock(cache.cross_attention_cache, self.decoder_layer, rows, self.entries)
            return self._context(kept, flow)
        first = cache.get_mask_sizes(flow.q.length, self.site.layer)[1]
        first = first.clone() if isinstance(first, Tensor) else first
        tensors = write_stock(cache, self.site.layer, rows, self.entries)
        return Rows(tensors, stock_axis(flow.q, first, next(iter(tensors.values())).shape[2]))

    @property
    def decoder_layer(self) -> int:
        """Of a layer of cross-attention, which layer of its decoder it is in: where stock caches keep its context."""
        return self.site.layer - self.site.layers

    def _context(self, kept: dict[str, Tensor], flow: Flow) -> Rows:
        """Rows of a context as a stock cache has them; a static one has room for more."""
        length, rows = flow.new.length, next(iter(kept.values())).shape[2]
        if rows < length:
            raise ValueError(f"the cache holds a context of {rows}, not {length}")
        return Rows({name: row[:, :, :length] for name, row in kept.items()}, flow.new)

    def _read(self, q: Tensor, flow: Flow, mask: Tensor | Mask | None) -> Call:
        """The attention problem, after transforms and rotation on the reading side, or with them on the queries."""
        for piece in self.late_transforms:
            q = self._edit(q, piece.on_q, flow)
        for piece in self.asking:
            q = piece.ask(q, flow)
        flow.few = q.shape[2] * self.layout.q <= self.few_rows * self.read_heads
        flow.moved = flow.view == "absorbed" or (self.moves and flow.few)
        spread: tuple[Tensor, ...] = ()
        if self.spreads and flow.moved:
            q, spread = self._apart(self._turn(q, "q", flow.q), flow)
        for piece in reversed(self.late_transforms) if flow.moved else ():
            q = self._edit(q, piece.k_adjoint, flow)
        q, k, v, axis = self.project.keys(q, flow)
        axes, beside = (flow.q, axis), 1
        for piece in self.late_transforms:
            axes = piece.axes(*axes)
            if not flow.moved:
                k = self._edit(k, piece.on_k, flow)
            if not self._after(flow):
                v = piece.on_v(v, flow)
            elif piece.mixes and piece not in self.splitting:
                beside = v.shape[1]
        axes = (axes[0], axis) if flow.moved else axes
        if self.rotate_at == "read" and not spread:
            q, k = self._turn(q, "q", axes[0]), self._turn(k, "k", axes[1])
            v = self._turn(v, "v", axes[1]) if self.project.turns_values else v
        return Call(q, k, v, self._mask(flow, *axes, mask), self.layout.scale, beside=beside, spread=spread)

    def _apart(self, q: Tensor, flow: Flow) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Turned queries as they meet keys that are not, each key times tables."""
        assert flow.rows is not None
        found = (piece.apart(q, flow.rows.axis) for piece in cast(Sequence[Position], self.positions))
        return next(each for each in found if each is not None)

    def _after(self, flow: Flow) -> bool:
        """Whether transforms of values come behind attention, on head outputs (they are linear: see `view`)."""
        return flow.moved or self.project.undoes

    def view(self, queries: int) -> View:
        """How a pass reads its rows: the absorbed view pays while few queries read many latents."""
        views = self.project.views
        turns = self.rotate_at == "read" and self.layout.rotary is not None and not self.spreads
        if len(views) == 1 or turns or self.scan is not None or not all(p.linear for p in self.late_transforms):
            return cast(View, views[0])
        return "absorbed" if queries <= self.project.absorb_below else "expanded"

    def _mask(self, flow: Flow, q: Axis, k: Axis, mask: Tensor | Mask | None) -> Mask:
        rules: list[Rule] = [rule for piece in self.ruling for rule in piece.rules(flow)]
        if isinstance(mask, Mask):
            rules = [*mask.rules, *rules]
        elif mask is not None and mask.ndim == 4:
            keys = k.length if flow.rows is None else (flow.rows.log or flow.rows.axis).length
            keys -= sum(piece.extra for piece in cast(Sequence[Tokens], self.tokens))
            if mask.shape[3] not in (1, keys):
                raise ValueError(f"a mask {[*mask.shape]} is about {mask.shape[3]} keys; there are {keys}")
            rules = [Given(mask), *rules]
        elif self.site.causal and not self.site.cross:
            rules = [causal, *rules]
        for piece in cast(Sequence[Tokens], self.tokens):
            rules = [piece.widen(rule, flow) for rule in rules]
        return Mask(q, k, tuple(rules))

    def _biased(self, call: Call, flow: Flow) -> Call:
        for piece in cast(Sequence[Position], self.positions):
            bias = piece.bias(call.mask, flow)
            if bias is not None:
                call = replace(call, bias=bias)
        return call

    def _heads(self, call: Call, flow: Flow) -> Tensor:
        """What heads read, `[B, H, T, V]`: of keys, or of the state that stands in their place."""
        scan = self.scan
        if scan is not None:
            return scan.scan(call.q * call.scale, call.k, call.v, flow)
        return self._attend(call, self.splitting, flow).o

    def _attend(self, call: Call, pieces: list[Piece], flow: Flow, need_lse: bool = False) -> Out:
        """Split, solve, join: parts may turn one attention problem into several."""
        if not pieces:
            return attend(call, self._program(flow), need_lse=need_lse, dropout=self.dropout if self.training else 0.0)
        piece, *rest = pieces
        calls = piece.split(call.whole, flow)
        lse = need_lse or (len(calls) > 1 and piece.joins_by_lse)
        return piece.join([self._attend(each, rest, flow, lse) for each in calls], flow)

    @property
    def by_stage(self) -> dict[str, Sequence[Piece]]:
        """The modules of the parts, as `spec.by_stage` has their options."""
        named = {
            "tokens": self.tokens, "project": [self.project], "transform": self.transforms, "position": self.positions,
            "select": self.selects, "scan": self.scans, "attend": self.attends, "gate": self.gates,
        }  # fmt: skip
        return {stage: cast(list[Piece], [*pieces]) for stage, pieces in named.items()}

    def _program(self, flow: Flow) -> list[BoundProgram]:
        return [piece.bind(flow) for piece in self.attends if isinstance(piece, Program)]

    def _pieces(self) -> list[Piece]:
        return [piece for pieces in self.by_stage.values() for piece in pieces]

    def _edit(self, x: Tensor, hook: Callable[[Tensor, Flow], Tensor], flow: Flow) -> Tensor:
        """A hook on the content channels of each head."""
        return _on_channels(x, self.layout.content, lambda part: hook(part, flow))

    def _turn(self, x: Tensor, name: str, axis: Axis, back: bool = False) -> Tensor:
        """Rotate what rotates of q, of an entry, or of the keys as read; or turn it back."""
        cut = self.owners.get(name, self.project).rotary(name)
        if cut is None or not len(self.positions):
            return x
        for piece in cast(Sequence[Position], self.positions):
            turn = piece.turn_back if back else piece.turn_q if name == "q" else piece.turn
            x = _on_channels(x, cut, lambda part, turn=turn: turn(part, axis))
        return x

    def explain(self, queries: int) -> Plan:
        """Which kernel a pass of `queries` new tokens runs on, and why."""
        if self.site.attn_source is not None:
            with torch.device("meta"):
                own = self.site._replace(attn_source=None, shared=None)
                return Attention(self.spec, self.dim, self.heads, site=own).explain(queries)
        scan = self.scan
        if scan is not None:
            return scan.plan(queries, next(self.parameters()))
        queries += sum(piece.extra for piece in cast(Sequence[Tokens], self.tokens))
        heads, view = self.layout, self.view(queries)
        groups = self.project.key_heads.get(view, 1 if view == "absorbed" else heads.kv)
        one = next(self.parameters()).detach().flatten()[:1]  # shapes without memory
        axis = Axis(queries, 0, device=one.device)
        axes = axis, axis
        for piece in self.late_transforms:
            axes = piece.axes(*axes)
        t, s = (each.length for each in axes)
        q, k, v, x = (
            one.expand(1, *shape)
            for shape in (
                (heads.q, t, heads.qk_width), (groups * heads.keys, s, heads.qk_width), (groups, s, heads.v_width),
                (queries, self.dim),
            )
        )  # fmt: skip
        entries = {name: one.expand(1, e.heads, queries, e.width) for name, e in self.entries.items()}
        rows, lse = Rows(entries, axis), False
        flow = Flow(x, x, axis, axis, Links(), self.site.layer, rows=rows, memo={"queries": q}, described=True)
        biased = any(type(piece).bias is not Position.bias for piece in cast(Sequence[Position], self.positions))
        call = Call(q, k, v, self._mask(flow, *axes, None), heads.scale, (lambda q, k: one) if biased else None)
        for piece in self.splitting:
            calls = piece.split(call, flow)
            call, lse = calls[0], lse or (len(calls) > 1 and piece.joins_by_lse)
        return plan_call(call, self._program(flow), need_lse=lse, dropout=self.dropout if self.training else 0.0)

    def on_step(self, progress: float) -> None:
        """Pass training progress in [0, 1] to every part with a schedule."""
        for piece in self._pieces():
            piece.on_step(progress)

    def extra_repr(self) -> str:
        return f"{str(self.spec)!r}, dim={self.dim}, heads={self.heads}"


def _on_channels(x: Tensor, cut: slice, change: Callable[[Tensor], Tensor]) -> Tensor:
    first, last, _ = cut.indices(x.shape[-1])
    if (first, last) == (0, x.shape[-1]):
        return change(x)
    return torch.cat([x[..., :first], change(x[..., first:last]), x[..., last:]], -1)


__all__ = ["ALONE", "Attention", "Bias", "Entry"]
