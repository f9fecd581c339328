"""Several agents, low-rank adapters on the queries and values of one model, whose caches share what the model makes.

For agent a, with A_a `[r, D]` and B_a of queries and of values, s = alpha / r, and x the input of a layer:

    q^a = W_Q x + s B_a^q A_a^q x      k = W_K x      v^a = W_V x + s B_a c,   c = A_a x `[r]`

k, W_V x and c are what is cached, so that values never exist at full width: with weights P, and B_{a,g} the rows of B_a
for key head g,

    o_h = P V_g + s (P c) B_{a,g}ᵀ

is one attention over values [W_V x ; c] of width d + r, whose last r channels B maps behind it. With `shared_a` all
agents have one A for values, c is the same for all, and whatever one has read any other goes on from: in a `Cache`, or
as branches of a `PrefixCache`, a batch of several agents reading the rows they share at once. Else each agent has a c
of its own: an `AgentCache` holds its rows and shares the rest with the others'.

Keys take no adapter: rotation would stand between B and the score. Above the first layer x depends on whose adapters
were on as a token was read, so that rows another agent made are near the agent's own, not equal.

Choices: where agents disagree about a shared row, the one that read the token first has made it.

Source: Jeon et al. 2026, LRAgent, arXiv 2602.01053.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.core.cache import Cache
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow, Rows
from manyheads.core.mask import Axis
from manyheads.core.part import OptionError, Project, Transform

LOW = "low"
"""The entry of c."""


@dataclass(eq=False)
class Duty:
    """Whose turn it is: agents `[1 or B]`, one for every sequence, or None where the model is left as it is."""

    agents: Tensor | None = None


class AgentProject(Project):
    """A layer's projection with the adapters of all agents beside it; first values B = 0, so that nothing changes.

    q_a `[agents, r, D]`, q_b `[agents, H·d, r]`, v_a `[agents or 1, r, D]`, v_b `[agents, G·d, r]`.
    """

    undoes = True

    def __init__(self, base: Project, layer: Attention, agents: int, rank: int, alpha: float, shared_a: bool) -> None:
        super().__init__()
        self.base, self.rank, self.scale, self.duty = base, rank, alpha / rank, Duty()
        self.rotate, self.turns = base.rotate, base.turns
        object.__setattr__(self, "o_proj", base.o_proj)  # past `nn.Module.__setattr__`: it is saved once
        self.kv, self.width = layer.layout.kv, layer.layout.v_width
        weight = base.o_proj.weight

        def pair(count: int, outputs: int) -> tuple[nn.Parameter, nn.Parameter]:
            bound = layer.dim**-0.5
            a = weight.new_empty(count, rank, layer.dim).uniform_(-bound, bound)
            return nn.Parameter(a), nn.Parameter(weight.new_zeros(agents, outputs, rank))

        self.q_a, self.q_b = pair(agents, layer.layout.q * layer.layout.qk_width)
        self.v_a, self.v_b = pair(1 if shared_a else agents, self.kv * self.width)
        self.entries: Mapping[str, Entry] = {
            **base.entries,
            LOW: base.entries["v"]._replace(heads=1, width=rank, role=None),
        }

    def _of(self, stacked: Tensor, batch: int) -> Tensor:
        """The agents' own, `[1 or B, …]`."""
        agents = self.duty.agents
        assert agents is not None
        if len(agents) not in (1, batch):
            raise ValueError(f"{len(agents)} agents for a batch of {batch}")
        return stacked[agents.to(stacked.device) if len(stacked) > 1 else slice(None)]

    def queries(self, flow: Flow) -> Tensor:
        q = self.base.queries(flow)
        if self.duty.agents is None:
            return q
        a, b = (self._of(each, len(q)) for each in (self.q_a, self.q_b))
        low = flow.x @ a.mT @ b.mT * self.scale
        return q + low.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)

    def write(self, flow: Flow) -> dict[str, Tensor]:
        x = flow.source
        off = self.duty.agents is None
        low = x.new_zeros(*x.shape[:2], self.rank) if off else x @ self._of(self.v_a, len(x)).mT
        return {**self.base.write(flow), LOW: low[:, None]}

    def settle(self, q: Tensor, rows: dict[str, Tensor], flow: Flow) -> dict[str, Tensor]:
        return self.base.settle(q, rows, flow)

    def rotary(self, name: str) -> slice | None:
        return None if name == LOW else self.base.rotary(name)

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        q, k, v, axis = self.base.keys(q, flow)
        assert flow.rows is not None
        return q, k, torch.cat([v, flow.rows[LOW].expand(-1, v.shape[1], -1, -1)], -1), axis

    def undo(self, o: Tensor, flow: Flow) -> Tensor:
        o, low = o.split([self.width, self.rank], -1)
        if self.duty.agents is None:
            return o
        b = self._of(self.v_b, len(o)).unflatten(1, (self.kv, -1))  # [1 or B, G, d, r]
        return o + self.scale * (low.unflatten(1, (self.kv, -1)) @ b.mT[:, :, None]).flatten(1, 2)

    def output(self, o: Tensor, flow: Flow) -> Tensor:
        return self.base.output(o, flow)


class Agents:
    """The agents of a model.

    >>> agents = Agents(model, 3, rank=8, shared_a=True)
    >>> with agents.on(0):
    ...     model(ids, cache=cache)                         # the first agent reads
    >>> with agents.on([1, 2]):                             # two others go on from there, side by side
    ...     model(two, cache=cache.branch(2))

    Args:
        model: whose attention layers are ours. Their projections stay as they are and are frozen by nobody.
        shared_a: one A of values for all agents.

    Raises:
        OptionError: numbers that do not fit, or a layer whose values are not the sum of such terms.
    """

    def __init__(
        self, model: nn.Module, agents: int, *, rank: int = 8, alpha: float = 16.0, shared_a: bool = False
    ) -> None:
        if agents < 1 or rank < 1:
            raise OptionError(f"agents={agents} and rank={rank}; at least 1 of each")
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        if not layers:
            raise OptionError(f"a {type(model).__name__} has no attention layer of ours; adopt it first")
        for layer in layers:
            if (why := _why_not(layer)) is not None:
                raise OptionError(f"no agents at layer {layer.site.layer} ({layer.spec}), for {why}")
        self.count, self.duty, self.layers = agents, Duty(), layers
        self.projects = [AgentProject(layer.project, layer, agents, rank, alpha, shared_a) for layer in layers]
        for layer, project in zip(layers, self.projects, strict=True):
            project.duty = self.duty
            layer.project = project
            layer.entries[LOW] = layer.entries["v"]._replace(heads=1, width=rank, role=None)
            layer._place()

    @contextmanager
    def on(self, agents: int | Sequence[int]) -> Iterator[None]:
        """Inside, this agent is at work in every sequence, or one in each."""
        each = [agents] if isinstance(agents, int) else [*agents]
        if not each or (wrong := [agent for agent in each if not 0 <= agent < self.count]):
            raise ValueError(f"there is no agent {wrong[0] if each else 'in an empty list'}; there are {self.count}")
        before, self.duty.agents = self.duty.agents, torch.tensor(each)
        try:
            yield
        finally:
            self.duty.agents = before

    def remove(self) -> None:
        """Leave the model as it was, under the names that its checkpoint has."""
        for layer, project in zip(self.layers, self.projects, strict=True):
            layer.project = project.base
            del layer.entries[LOW]
            layer._place()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the adapters."""
        for project in self.projects:
            yield from (project.q_a, project.q_b, project.v_a, project.v_b)


def _why_not(layer: Attention) -> str | None:
    if layer.whole is not None:
        return layer.whole
    if isinstance(layer.project, AgentProject):
        return "it has agents already"
    if layer.entries.keys() != {"k", "v"} or layer.project.undoes or layer.project.views != ("expanded",):
        return "keys and values of heads are not what it caches"
    transforms = cast(Sequence[Transform], layer.transforms)
    changed = [type(each).__name__ for each in transforms if type(each).on_v is not Transform.on_v]
    if changed or layer.project.turns_values:
        return f"{(*changed, type(layer.project).__name__)[0]} changes values"
    return None


class AgentCache(Cache):
    """The rows of one agent, c, beside a cache of keys and values that all agents share.

    >>> base = Cache()
    >>> plan, act = AgentCache(base), AgentCache(base)
    >>> with agents.on(0): model(ids, cache=plan)
    >>> with agents.on(1): model(ids[:, act.length():], cache=act)     # reads anew for its c; keys and values are there

    An agent reads each token once, in the order of the others; keys and values of tokens that another has read are
    those that it made. `bytes` are the agent's own.
    """

    def __init__(self, base: Cache | None = None) -> None:
        super().__init__()
        self.base = Cache() if base is None else base

    def write(self, site: int, rows: Mapping[str, Tensor], entries: Mapping[str, Entry], axis: Axis) -> Rows:
        if LOW not in rows:
            raise ValueError(f"an AgentCache holds the rows of an agent; layer {site} writes {', '.join(rows)}")
        if any(entry.keep is not None for entry in entries.values()):
            raise ValueError(f"layer {site} forgets rows that another agent may not have read; use manyheads.Cache")
        if self.length(site) > self.base.length(site):
            raise ValueError(
                f"this agent has read {self.length(site)} tokens, the cache that it shares {self.base.length(site)}"
            )
        mine = super().write(site, {LOW: rows[LOW]}, entries, axis)
        new = self.length(site) - self.base.length(site)
        if new > 0:
            tail = {name: row[:, :, -new:] for name, row in rows.items() if name != LOW}
            theirs = self.base.write(site, tail, entries, axis[axis.length - new :]).tensors
        else:
            theirs = self.base.site(site).read(axis).tensors
        shared = {name: row[:, :, : self.length(site)] for name, row in theirs.items()}
        return replace(mine, tensors={**shared, **mine.tensors})

    def fork(self, batch: Tensor) -> AgentCache:
        raise ValueError("an AgentCache shares its keys and values, so that no copy of it is independent")


__all__ = ["AgentCache", "AgentProject", "Agents", "Duty"]
