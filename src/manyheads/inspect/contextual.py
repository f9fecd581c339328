"""Heads whose mass on the relevant span decides an answer, and directions in queries and keys that move it there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call
from manyheads.core.mask import Axis
from manyheads.core.tap import Tap
from manyheads.inspect.ablate import Heads, apart, channels_of, chosen_heads
from manyheads.inspect.capture import watching
from manyheads.inspect.edit import standing_by
from manyheads.inspect.layers import Layer, chosen
from manyheads.inspect.look import Look
from manyheads.inspect.measures.sinks import column
from manyheads.inspect.measures.table import HeadTable, Sums
from manyheads.inspect.reweight import Between
from manyheads.inspect.rotary import Turn, turn_of

Span = tuple[int, int]
"""The first token and the one after the last."""


@dataclass(frozen=True)
class Example:
    """A prompt with its answer, ids `[1, T]`. answer: where the answer's tokens are. relevant: the span that they rest
    on. others: spans that do not matter."""

    ids: Tensor
    answer: Span
    relevant: Span
    others: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        for first, last in (self.answer, self.relevant, *self.others):
            if self.ids.ndim != 2 or not 0 <= first < last <= self.ids.shape[1]:
                raise ValueError(f"a span {(first, last)} of ids {[*self.ids.shape]}; ids [1, T], 0 ≤ first < last ≤ T")


def contextual_scores(
    model: nn.Module, examples: Sequence[Example], layers: int | Iterable[int] | None = None
) -> dict[str, HeadTable]:
    """c_h: a head's mass on spans, in the mean over the queries that write the answer, and over examples.

    `relevant`, `others` (all of them), `worst` (the one with most) and `sink` (the first token). Queries are those
    whose next token is of the answer. Contextual heads are those highest in `relevant`, on examples answered right.

    Source: arXiv 2503.23306.
    """
    if not examples:
        raise ValueError("contextual heads are told from examples, and there are none")
    some = [layer for layer in chosen(model, layers) if not layer.none]
    sums = {name: Sums() for name in ("relevant", "others", "worst", "sink")}
    now: list[Example] = []

    def see(look: Look) -> None:
        example = now[-1]
        rows = torch.zeros(1, 1, look.axis.length, dtype=torch.bool, device=look.read.device)
        rows[..., _writing(example)] = True
        each = [look.mass(Between(*span)).nan_to_num(0.0) for span in example.others]
        found = {"relevant": look.mass(Between(*example.relevant)).nan_to_num(0.0), "sink": column(look)}
        if each:
            found |= {"others": sum(each[1:], each[0]), "worst": torch.stack(each).amax(0)}
        for name, mass in found.items():
            each_head = mass.masked_fill(~rows, 0.0).sum(-1, keepdim=True) / rows.sum()
            sums[name].add(look.layer, each_head, rows.any(-1)[..., None])

    with torch.no_grad(), watching(some, see):
        for example in examples:
            now.append(example)
            model(example.ids.to(next(model.parameters()).device))
    return {name: each.table(name) for name, each in sums.items() if each.total}


def _writing(example: Example) -> slice:
    """Queries whose next token is of the answer."""
    first, last = example.answer
    return slice(max(0, first - 1), last - 1)


@dataclass(frozen=True, eq=False)
class Directions:
    """What is added to queries and keys of heads, by layer: heads, and u_q, u_k `[n, E]` before rotation."""

    heads: Mapping[int, tuple[int, ...]]
    q: Mapping[int, Tensor]
    k: Mapping[int, Tensor]

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.q.values(), *self.k.values()]


class _Focused(Tap):
    def __init__(
        self, layer: Layer, heads: Sequence[int], q: Tensor, k: Tensor, turns: tuple[Turn | None, Turn | None],
        strength: float,
    ) -> None:  # fmt: skip
        self.layer, self.heads, self.q, self.k, self.turns, self.strength = layer, heads, q, k, turns, strength

    def ask(self, call: Call, flow: Flow | None) -> Call:
        call = apart(channels_of(self.layer, call, flow, "q"))
        turn_q, turn_k = self.turns
        return replace(
            call,
            q=self._added(call.q, self.q, turn_q, call.mask.q),
            k=self._added(call.k, self.k, turn_k, call.mask.k),
        )

    def _added(self, x: Tensor, u: Tensor, turn: Turn | None, axis: Axis) -> Tensor:
        if u.shape != (len(self.heads), x.shape[-1]):
            raise ValueError(
                f"directions of {self.layer.name} are [{len(self.heads)}, {x.shape[-1]}], not {[*u.shape]}"
            )
        rows = (self.strength * u.to(x))[None, :, None].expand(len(x), -1, x.shape[2], -1)
        rows = rows if turn is None else turn(rows, axis)
        return x.index_add(1, torch.tensor([*self.heads], device=x.device), rows)


@contextmanager
def focus(model: nn.Module, directions: Directions, strength: float = 1.0) -> Iterator[None]:
    """q_h + α u_q and k_h + α u_k at all positions, before rotation and behind any norm, while the model runs.

    α > 0 moves mass to the context, α < 0 back. Heads that share keys are told apart. One u_k for all keys adds
    q·R u_k, which without rotation is the same for every key and changes no weight: it acts through rotation.

    Raises:
        ValueError: a layer or head that does not exist, directions that do not fit, a rotation that is not known.

    Source: arXiv 2503.23306. (Where they are added is not public: taken to be before rotation.)
    """
    if strength == 0:
        yield
        return
    some = chosen_heads(model, {layer: list(of) for layer, of in directions.heads.items()})
    for layer, _ in some:
        if layer.none or layer.heads != layer.queries:
            raise ValueError(f"{layer.name} has no queries and keys for each head ({layer.none or 'unlike heads'})")
    turns = {layer.number: (turn_of(model, layer, "q"), turn_of(model, layer, "k")) for layer, _ in some}

    def make(layer: Layer) -> Tap:
        at = layer.number
        return _Focused(layer, directions.heads[at], directions.q[at], directions.k[at], turns[at], strength)

    with standing_by([layer for layer, _ in some], make):
        yield


def train_focus(
    model: nn.Module, examples: Sequence[Example], heads: Heads, *, steps: int = 50, lr: float = 0.01, seed: int = 0
) -> Directions:
    """Directions that raise what heads give to the relevant span, by Adam on -mean_t log Σ_{s in it} A_ts.

    The model is frozen; directions start near zero. Source: arXiv 2503.23306. (The loss is not public; this is the
    plainest one.)
    """
    some = chosen_heads(model, heads)
    widths = {layer.number: _width(layer) for layer, _ in some}
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)

    def start() -> dict[int, Tensor]:
        return {
            layer.number: (1e-3 * torch.randn(len(of), widths[layer.number], generator=generator, device=device))
            .requires_grad_() for layer, of in some
        }  # fmt: skip

    found = Directions({layer.number: (*of,) for layer, of in some}, start(), start())
    adam = torch.optim.Adam(found.parameters, lr)
    for step in range(steps):
        example, losses = examples[step % len(examples)], []

        def see(look: Look, example: Example = example, losses: list[Tensor] = losses) -> None:
            mass = look.mass(Between(*example.relevant))[:, list(found.heads[look.layer]), _writing(example)]
            losses.append(-mass.clamp_min(1e-12).log().mean())

        with torch.enable_grad(), focus(model, found), watching([layer for layer, _ in some], see, grad=True):
            model(example.ids.to(device))
        grads = torch.autograd.grad(torch.stack(losses).mean(), found.parameters)
        for parameter, grad in zip(found.parameters, grads, strict=True):
            parameter.grad = grad
        adam.step()
    return Directions(found.heads, *({at: u.detach() for at, u in each.items()} for each in (found.q, found.k)))


def _width(layer: Layer) -> int:
    if isinstance(layer.module, Attention):
        return layer.module.layout.qk_width
    width = getattr(layer.module, "head_dim", None)
    if not isinstance(width, int):
        raise ValueError(f"{layer.name}: how wide its queries are is not known")
    return width


def bake_focus(model: nn.Module, directions: Directions, strength: float = 1.0) -> None:
    """Put directions into the biases of the query and key projections for good; the model is changed.

    Raises:
        ValueError: a projection that is not one linear layer with a norm or nothing behind it, or query heads that
            share keys and are to have other directions in them.
    """
    baked = []
    for layer, of in chosen_heads(model, {layer: list(of) for layer, of in directions.heads.items()}):
        place = layer.module.project if isinstance(layer.module, Attention) else layer.module
        q, k = (getattr(place, name, None) for name in ("q_proj", "k_proj"))
        normed = isinstance(layer.module, Attention) and len(layer.module.transforms)
        if not (isinstance(q, nn.Linear) and isinstance(k, nn.Linear)) or normed or hasattr(place, "q_norm"):
            raise ValueError(f"{layer.name}: its projections do not end in queries and keys, so no bias is the same")
        width = _width(layer)
        groups = k.out_features // width
        for_q, for_k = q.weight.new_zeros(layer.heads, width), k.weight.new_zeros(layer.heads, width)
        for_q[of], for_k[of] = directions.q[layer.number].to(for_q), directions.k[layer.number].to(for_k)
        shared = for_k.unflatten(0, (groups, -1))
        if not torch.equal(shared, shared[:, :1].expand_as(shared)):
            raise ValueError(f"{layer.name}: heads that share keys differ in u_k; use focus instead")
        baked += [(q, for_q.flatten()), (k, shared[:, 0].flatten())]
    with torch.no_grad():
        for linear, u in baked:
            old = torch.zeros_like(u) if linear.bias is None else linear.bias
            linear.bias = nn.Parameter(old + strength * u)


__all__ = ["Directions", "Example", "bake_focus", "contextual_scores", "focus", "train_focus"]
