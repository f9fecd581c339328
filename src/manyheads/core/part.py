"""The contract of a part: options (a frozen dataclass), the layout it makes, the module it builds, what it costs.

A layer is a pipeline of stages and a part acts at one of them. Its module, a `Piece`, overrides one or two hooks;
every hook is an identity by default, so the layer needs no special case for any part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from manyheads.core import fla
from manyheads.core.check import OptionError, check_whole
from manyheads.core.cost import Cost
from manyheads.core.entries import Entry, State
from manyheads.core.flow import Flow
from manyheads.core.kernel import Bias, Call, Out, Plan, Term, merge
from manyheads.core.mask import Axis, Mask, Rule
from manyheads.core.scan import CHUNK

Stage = Literal["tokens", "project", "transform", "position", "select", "scan", "attend", "gate"]
STAGES: tuple[Stage, ...] = ("tokens", "project", "transform", "position", "select", "scan", "attend", "gate")

SCORING: frozenset[Stage] = frozenset({"position", "select", "attend"})
"""Stages that say how attention weights come about."""

NONE: frozenset[str] = frozenset()

FACTS = {
    "causal": "a query sees no later token",
    "bidirectional": "what a token gets may depend on the whole sequence or context",
    "self": "keys come from the same sequence as queries",
    "several keys": "a projection makes as many keys for each value as a part asks for",
    "head keys": "each head's keys and values exist as rows, not only as a latent",
    "cached heads": "keys and values of heads, as they stand at this point, are what is cached",
    "token keys": "a key row is one token, written once",
    "one map": "a head has one attention map",
    "alike heads": "masks, biases and the mapping to weights are the same for every head",
    "softmax": "a query's weights are the softmax of its scores",
    "steady": "training computes what evaluation computes",
    "one rotation": "keys of every head turn alike",
    "paired heads": "a key head has one value head of its own",
    "token queries": "a query row is one token",
    "plain scores": "scores are products of queries and keys",
    "own tokens": "the layer sees the tokens of its sequence and none that were added",
    "still values": "values as read do not rotate with their keys",
    "scores": "there is a score for each query and key",
    "bare scores": "every earlier token counts, by the product of query and key with nothing added",
    "final rows": "a token's rows are written once, from the token and what states keep",
    "own rows": "the layer writes the rows that it reads",
    "adjacent keys": "key rows next to each other are of tokens next to each other",
    "formed keys": "each head's keys and values can be formed from what is cached",
    "query lengths": "how long a query is counts",
    "key lengths": "how long a key is counts",
    "head sizes": "how large a head's output is counts",
    "plain outputs": "head outputs meet one matrix, a slice for each",
    "positive": "no channel of a query or a key is negative",
    "own queries": "the layer makes queries",
    "values alone": "values are rows of their own, which a layer can cache without keys and weigh by any weights",
}
"""What a part may need, give, break or keep. Combinations are judged from these alone."""

PLACES: Mapping[str, str] = {
    "causal": "a causal layer",
    "bidirectional": "an encoder or cross-attention",
    "self": "self-attention",
    "own rows": "a layer that writes its own rows",
}
"""Where the facts hold that a site has or has not (see `Site.facts`)."""

STAGE_NEEDS: Mapping[Stage, frozenset[str]] = dict.fromkeys(
    ("transform", "position", "select", "attend"), frozenset({"scores"})
)
STAGE_BREAKS: Mapping[Stage, frozenset[str]] = {
    "select": frozenset({"bare scores"}),
    "transform": frozenset({"positive"}),
    "position": frozenset({"positive"}),
}
"""What every part of a stage needs, and what it breaks unless it spares it."""


class Heads(NamedTuple):
    """The layout of a layer's heads. Each part maps it; projections, gates and costs are built from the result.

    q, kv: score heads and key heads, query head h reads key head h // (q/kv). qk_width, v_width: channels of a key
    and a value. out, out_width: head outputs before the output projection. rotary: the channels of q and k that
    rotate. content: the channels that transforms may touch. keep: how many of the newest keys are ever seen (None:
    all; 0: a key is read in its own pass only); `first` of these are a sequence's first keys instead. keep_keys: the
    same number where it is less for keys than for values, older keys being another layer's. grouped: False
    where a part pairs query heads with key heads itself, so that kv need not divide q. read: a transform before this
    point acts when rows are read, so those from here on do too, whoever wrote the rows. keys: how many keys a key head
    has for each value; they lie in one entry of keys · kv heads, all the first ones first. values: how many value heads
    lie side by side in the values of a key head.
    """

    dim: int
    q: int
    kv: int
    qk_width: int
    v_width: int
    out: int
    out_width: int
    scale: float
    rotary: slice | None = None
    content: slice = slice(None)
    keep: int | None = None
    grouped: bool = True
    read: bool = False
    keys: int = 1
    values: int = 1
    first: int = 0
    keep_keys: int | None = None

    @classmethod
    def start(cls, dim: int, heads: int) -> Heads:
        check_whole(dim=dim, heads=heads)
        width = dim // heads
        return cls(dim, heads, heads, width, width, heads, width, 1.0)

    def head_width(self, part: str, given: int | None) -> int:
        """Channels of a head, an option `head_dim` or else D/H; refused where there is no such width."""
        if given is None and self.dim % self.q:
            raise OptionError(f"{part}: dim={self.dim} is no multiple of heads={self.q}; give head_dim")
        width = self.dim // self.q if given is None else given
        if width < 1:
            raise OptionError(f"{part}: head_dim={width}; at least 1")
        return width

    @property
    def content_width(self) -> int:
        return len(range(self.qk_width)[self.content])


class _Site(NamedTuple):
    layer: int = 0
    layers: int = 1
    causal: bool = True
    cross: bool = False
    context_dim: int | None = None
    max_len: int | None = None
    kv_source: int | None = None
    attn_source: int | None = None
    lends: bool = False
    shared: Callable[[str, Callable[[], nn.Module]], nn.Module] | None = None


class Site(_Site):
    """Where a layer sits.

    layer: its number, counted on where a stack runs its blocks several times; cross-attention is numbered after all
    other layers. kv_source: the earlier layer whose cached rows this one reads instead of its own. attn_source: the
    earlier layer by whose attention weights this one weighs its own values. lends: whether a later layer does so by the
    weights of this one. shared: gives modules that the stack owns, by name (see `borrow`).
    """

    __slots__ = ()

    def __init__(self, *args: Any, **fields: Any) -> None:  # the tuple is made by then
        check_whole(layers=self.layers)
        check_whole(0, layer=self.layer)
        last = (2 * self.layers if self.cross else self.layers) - 1
        if self.layer > last:
            raise OptionError(f"layer={self.layer} of layers={self.layers}; it may be 0 to {last}")
        given = {"context_dim": self.context_dim, "max_len": self.max_len}
        check_whole(**{name: value for name, value in given.items() if value is not None})
        sources = {"kv_source": self.kv_source, "attn_source": self.attn_source}
        check_whole(0, **{name: value for name, value in sources.items() if value is not None})

    def share(self, name: str, make: Callable[[], nn.Module]) -> nn.Module:
        """The stack's module of that name, which the first who asks makes; in a lone layer, one of its own.

        Layers share what has one name (without dots); a name that holds `layer` is shared inside that layer only.
        """
        return make() if self.shared is None else self.shared(name, make)

    @property
    def facts(self) -> frozenset[str]:
        return frozenset(
            {"cached heads", "token keys", "one map", "alike heads", "softmax", "steady"}
            | {"one rotation", "own tokens", "paired heads", "plain scores", "still values", "token queries"}
            | {"scores", "bare scores", "final rows", "adjacent keys", "formed keys"}
            | {"query lengths", "key lengths", "head sizes", "plain outputs"}
            | ({"own rows"} if self.kv_source is None and self.attn_source is None else set())
            | ({"own queries"} if self.attn_source is None else set())
            | ({"causal"} if self.causal else set())
            | ({"bidirectional"} if self.cross or not self.causal else set())
            | (set() if self.cross else {"self"})
        )

    @property
    def needs(self) -> frozenset[str]:
        """What the parts of a layer here must leave standing."""
        return NONE if self.attn_source is None else frozenset({"values alone"})


def borrow(holder: nn.Module, attribute: str, site: Site, name: str, make: Callable[[], nn.Module]) -> None:
    """Give a module the weights that its site shares under a name, as an attribute.

    What a stack owns is no submodule of the borrower, so that it is saved and counted once; a lone layer owns its own.
    The part's cost lists what it borrows in `Cost.shared`.
    """
    module = site.share(name, make)
    if site.shared is None:
        setattr(holder, attribute, module)
    else:
        object.__setattr__(holder, attribute, module)  # past `nn.Module.__setattr__`, which registers


@dataclass(frozen=True)
class Part:
    """Options of a mechanism. Subclass it as a frozen dataclass, register it, and give it a `build`.

    slot: two parts with one slot exclude each other. needs, gives, breaks: facts (see `FACTS`); keeps: those that no
    later part may break; spares: those that other parts of its stage break (`STAGE_BREAKS`). scores_only: a transform
    of queries and keys that leaves values alone. at: whether a transform acts on rows before they are cached ("write"),
    when they are read ("read"), or where the projection allows ("either"). hint: for a fact it needs or keeps, the
    nearest legal choice when something breaks it. chains: a layer that `follows` another can be followed itself.
    examples: options that fit a layer of dim 24 with 4 heads, for `manyheads.testing`; each should be another way
    through the code.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]
    paper: ClassVar[str] = ""
    slot: ClassVar[str | None] = None
    scores_only: ClassVar[bool] = False
    at: ClassVar[Literal["write", "read", "either"]] = "write"
    chains: ClassVar[bool] = False
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)

    @property
    def needs(self) -> frozenset[str]:
        return NONE

    @property
    def gives(self) -> frozenset[str]:
        return NONE

    @property
    def breaks(self) -> frozenset[str]:
        return NONE

    @property
    def spares(self) -> frozenset[str]:
        return NONE

    @property
    def keeps(self) -> frozenset[str]:
        return NONE

    @property
    def hint(self) -> Mapping[str, str]:
        return {}

    def lent(self, site: Site) -> bool:
        """Whether what it does is in the attention weights that a layer here takes from another: it is not built."""
        return site.attn_source is not None and (self.stage in SCORING or self.scores_only)

    def follows(self, site: Site) -> int | None:
        """The layer whose part of this name hands this one what it reads (`Links.handed`); None: it needs none."""
        return None

    def agrees(self, before: Heads) -> str:
        """What a layer has in common with one that it follows, in words."""
        return ""

    def layout(self, heads: Heads, site: Site) -> Heads:
        """The layout after this part; raises `OptionError` for numbers that do not fit."""
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> Piece:
        """The module, from the layouts before and after this part (a projection's `after` has the final outputs)."""
        raise NotImplementedError

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return Cost()


SCORELESS: frozenset[str] = frozenset({"scores", "bare scores", "plain scores", "softmax", "token keys"})
"""What a state in place of keys breaks."""
IN_ORDER: Mapping[str, str] = {
    "causal": "a scan reads tokens in order: a causal layer, or softmax attention in an encoder"
}
"""The hint of what reads tokens in order."""


@dataclass(frozen=True)
class Recurrence(Part):
    """Options of a scan. Its keys and values are read in the pass that makes them and never cached."""

    stage: ClassVar[Stage] = "scan"
    slot: ClassVar[str | None] = "scan"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(
            {"causal", "self", "bare scores", "final rows", "formed keys", "one map", "own rows", "own tokens"}
            | {"token queries"}
        )

    @property
    def breaks(self) -> frozenset[str]:
        return SCORELESS

    @property
    def hint(self) -> Mapping[str, str]:
        return IN_ORDER

    def layout(self, heads: Heads, site: Site) -> Heads:
        return heads._replace(keep=0)

    def state_cost(self, heads: Heads) -> Cost:
        """Of a state `[G, K, V]` that each token is added to and each query head reads."""
        size = heads.qk_width * heads.v_width
        return Cost(state_floats=heads.kv * size, token_flops=2 * (heads.kv + heads.q) * size)


class Piece(nn.Module):
    """The module of a part. Hooks that any stage may override; each is an identity here.

    at: see `Part.at`. states, entries: the tensors that it keeps in the cache for a sequence and for a token. places:
    it gives keys positions of its own; rows are then cached, and reach `split`, before rotation, and it rotates them by
    `flow.turn`. in_order: it reads the tokens one after the other, which no mask over pairs of them describes.
    """

    at: Literal["write", "read", "either"] = "write"
    states: Mapping[str, State] = {}
    entries: Mapping[str, Entry] = {}
    places = False
    in_order = False
    joins_by_lse = True

    def check(self, flow: Flow) -> None:
        """Raise ValueError for tokens that it has no place for: nothing of the pass has been cached yet."""

    def write(self, flow: Flow) -> dict[str, Tensor]:
        """The rows of its entries to cache, `[B, heads, T, width]` by entry, from `flow.source`."""
        return {}

    def rotary(self, name: str) -> slice | None:
        """The channels of an entry that rotate."""
        return None

    def ask(self, q: Tensor, flow: Flow) -> Tensor:
        """Queries as they meet the keys of their heads, all channels `[B, H, T, E]` (before an absorbed view)."""
        return q

    def rules(self, flow: Flow) -> tuple[Rule, ...]:
        """More rules for the mask."""
        return ()

    def split(self, call: Call, flow: Flow) -> Sequence[Call]:
        """Several attention problems in place of one (`Deferred` where they are large)."""
        return [call]

    def join(self, outs: list[Out], flow: Flow) -> Out:
        """Their answers as one; merging by log-sum-exp is exact for disjoint keys (else set joins_by_lse False)."""
        return merge(outs)

    def on_step(self, progress: float) -> None:
        """A schedule: progress of training in [0, 1], called by a trainer callback."""


class Tokens(Piece):
    """Changes x and its tokens on the way into the layer, and y on the way out.

    extra: how many tokens `enter` adds at the end.
    """

    extra: int = 0

    def enter(self, x: Tensor, axis: Axis, flow: Flow) -> tuple[Tensor, Axis]:
        """x `[B, T, D]` and its axis, with the extra tokens."""
        return x, axis

    def widen(self, rule: Rule, flow: Flow) -> Rule:
        """A rule of the mask that knows the tokens before `enter`, made one that knows those after it."""
        return rule

    def leave(self, y: Tensor, flow: Flow) -> Tensor:
        """y `[B, T, D]`, of as many tokens as came."""
        return y


class Project(Piece):
    """From x to queries and cached rows, from cached rows to keys and values, from head outputs back to x's width."""

    views: tuple[str, ...] = ("expanded",)
    absorb_below: int = 0  # queries a pass up to which the absorbed view costs less
    undoes: bool = False  # values as read are not final in any view: `undo` maps their weighted sum
    remembers: bool = False  # `write` reads all earlier rows (`flow.past`), so that a window drops none
    turns_values: bool = False  # values rotate with the keys, and head outputs turn back by the query's position
    rotate: Literal["write", "read"] = "write"
    turns: slice | None = None  # the rotary channels of queries and keys, as the layout has them
    unhooked: tuple[str, ...] = ()  # linear layers whose weight it reads itself, so that no hook on them acts
    o_proj: nn.Linear  # from all head outputs side by side to x's width
    key_heads: Mapping[str, int] = {}  # of k as `keys` returns it, by view; else one where absorbed, the layout's kv

    def queries(self, flow: Flow) -> Tensor:
        """q `[B, H, T, E]` from `flow.x`."""
        raise NotImplementedError

    def rotary(self, name: str) -> slice | None:
        """The channels that rotate: of "q", of an entry, or of "k" (and "v": `turns_values`) as `keys` returns it."""
        return None if name == "v" else self.turns

    def settle(self, q: Tensor, rows: dict[str, Tensor], flow: Flow) -> dict[str, Tensor]:
        """What is cached of the rows, once they and the queries are transformed and rotated."""
        return rows

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        """q, k, v in `flow.view` and the axis of the keys, from `flow.rows`."""
        assert flow.rows is not None
        return q, flow.rows["k"], flow.rows["v"], flow.rows.axis

    def undo(self, o: Tensor, flow: Flow) -> Tensor:
        """Head outputs from what attention returned in `flow.view`."""
        return o

    def output(self, o: Tensor, flow: Flow) -> Tensor:
        """`[B, out, T, out_width]` to y `[B, T, D]`."""
        return self.o_proj(o.transpose(1, 2).flatten(2))


class Transform(Piece):
    """Changes head features. `x` of the hooks holds the content channels of each head, `[B, heads, N, width]`.

    linear: k_adjoint and v_after exist, so that the transform also acts where keys are never formed: in an absorbed
    view, and where few queries read many rows, which are then left as they are cached.
    commutes: with a rotation that is the same for every head, so that rows may be rotated before it (`Position.alike`).
    mixes: heads, so that k_adjoint returns, and v_after takes, all the heads that it mixes side by side.
    """

    linear = False
    commutes = False
    mixes = False

    def on_q(self, q: Tensor, flow: Flow) -> Tensor:
        return q

    def on_k(self, k: Tensor, flow: Flow) -> Tensor:
        return k

    def on_v(self, v: Tensor, flow: Flow) -> Tensor:
        return v

    def axes(self, q: Axis, k: Axis) -> tuple[Axis, Axis]:
        """The axes of queries and keys as it leaves them, where it makes several rows of one when these are read."""
        return q, k

    def k_adjoint(self, q: Tensor, flow: Flow) -> Tensor:
        """q' with q'·k = q·on_k(k) for every key."""
        return q

    def v_after(self, o: Tensor, flow: Flow) -> Tensor:
        """on_v moved behind the weighted sum: the same as mapping every value first."""
        return o


class Position(Piece):
    """How positions enter: by turning channels of q and k, or as a bias on the scores.

    alike: turning is linear and the same for every head, so that it commutes with what mixes heads.
    """

    alike = True

    def turn(self, x: Tensor, axis: Axis) -> Tensor:
        """Rotate the rotary channels of queries or keys, `[B, heads, N, rotary width]`."""
        return x

    def turn_q(self, q: Tensor, axis: Axis) -> Tensor:
        """The same for queries, where they turn otherwise than keys."""
        return self.turn(q, axis)

    def apart(self, q: Tensor, axis: Axis) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """q' `[B, H, T, tables · width]` and tables over the keys' axis with q'·[k ∘ table, …] = q·turn(k), if any."""
        return None

    def turn_back(self, x: Tensor, axis: Axis) -> Tensor:
        """The inverse of `turn`."""
        if type(self).turn is not Position.turn:
            raise NotImplementedError(f"{type(self).__name__} turns but does not turn back")
        return x

    def bias(self, mask: Mask, flow: Flow) -> Bias | None:
        return None


class Program(Piece):
    """An attend part on the explicit path. Shapes `[B, H, t, S]`; `rows` are the query rows of the tile.

    scores, normalise and read return None to leave the plain product, softmax and weighted sum of values in place; k
    and the values are of key heads, `[B, G, S, E]`.
    maps, terms: see `ScoreProgram`.
    """

    halo: int = 0
    maps: int = 1
    terms: Sequence[Term] = ()

    def scores(self, q: Tensor, k: Tensor, scale: float, flow: Flow) -> Tensor | None:
        return None

    def before(self, scores: Tensor, visible: Tensor, rows: slice, flow: Flow) -> Tensor:
        return scores

    def normalise(self, scores: Tensor, visible: Tensor, flow: Flow) -> Tensor | None:
        return None

    def after(self, weights: Tensor, visible: Tensor, rows: slice, flow: Flow) -> Tensor:
        return weights

    def read(self, weights: Tensor, call: Call, rows: slice, flow: Flow) -> Tensor | None:
        """What heads read, `[B, heads, t, width]`: for values that depend on the query, or have heads of their own."""
        return None

    def bind(self, flow: Flow) -> BoundProgram:
        return BoundProgram(self, flow)


class BoundProgram(NamedTuple):
    """A score program and the pass it runs in, as kernels take it."""

    piece: Program
    flow: Flow

    @property
    def halo(self) -> int:
        return self.piece.halo

    @property
    def maps(self) -> int:
        return self.piece.maps

    @property
    def terms(self) -> Sequence[Term]:
        return self.piece.terms

    def __str__(self) -> str:
        return type(self.piece).__name__

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor | None:
        return self.piece.scores(q, k, scale, self.flow)

    def before(self, scores: Tensor, visible: Tensor, rows: slice) -> Tensor:
        return self.piece.before(scores, visible, rows, self.flow)

    def normalise(self, scores: Tensor, visible: Tensor) -> Tensor | None:
        return self.piece.normalise(scores, visible, self.flow)

    def after(self, weights: Tensor, visible: Tensor, rows: slice) -> Tensor:
        return self.piece.after(weights, visible, rows, self.flow)

    def read(self, weights: Tensor, call: Call, rows: slice) -> Tensor | None:
        return self.piece.read(weights, call, rows, self.flow)


class Scan(Piece):
    """Heads with a state in place of keys: what a query reads is a function of the state that earlier tokens left.

    A projection may be one too, where a layer has no queries and keys that other parts could meet.

    work, chunk: how it goes through a long pass, for `plan`. fused: the dtypes for which flash-linear-attention has
    kernels of this scan (see `core.fla`).
    """

    in_order = True
    work: Literal["products", "steps"] = "products"
    chunk: int = CHUNK
    fused: tuple[torch.dtype, ...] = ()

    def scan(self, q: Tensor, k: Tensor, v: Tensor, flow: Flow) -> Tensor:
        """Head outputs `[B, H, T, V]` of q `[B, H, T, K]`, scaled, over k `[B, G, T, K]` and v `[B, G, T, V]`.

        All rows are of this pass (see `core.scan` for what carries them on); those of a part that leaves the layout's
        `keep` at None are of all tokens so far.
        """
        raise NotImplementedError

    def plan(self, queries: int, like: Tensor) -> Plan:
        """How a pass of so many tokens runs, in the dtype and on the device of a tensor."""
        why_not = fla.why_not(like, like.dtype, queries, self.fused)
        if why_not is None:
            return Plan("fla", "a kernel of flash-linear-attention", (("sdpa", "there are no scores"),))
        how = "one step" if queries == 1 else f"{self.work} inside chunks of {min(queries, self.chunk)} tokens"
        refused = (("fla", why_not), ("sdpa", "there are no scores"))
        return Plan("scan", f"a state in place of keys; {how}", refused)


class Gate(Piece):
    """Weighs or normalises head outputs before the output projection."""

    def gate(self, o: Tensor, flow: Flow) -> Tensor:
        """o `[B, out, T, out_width]`; losses go to `flow.add_loss`."""
        return o
