"""Four tests that a map should stand before it is called an explanation of what a model said.

They are of one row: a head's weights `[S]` of one query, as they act on the prediction there. What fails them is not
shown to be wrong; it is not shown to be needed either. Source: Jain and Wallace 2019, arXiv 1902.10186, whose models
have one attention layer; the form for one head of many is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.core.flow import Flow
from manyheads.core.kernel import Call
from manyheads.core.tap import Tap
from manyheads.inspect.ablate import apart, channels_of
from manyheads.inspect.capture import capture
from manyheads.inspect.edit import standing_by
from manyheads.inspect.layers import Layer, check_heads, chosen
from manyheads.inspect.look import CaptureError
from manyheads.inspect.stream import embedding_of

Predict = Callable[[Any], Tensor]
"""From what a model returned, `[B, T, O]`: what is predicted at each token."""


def probabilities(output: Any) -> Tensor:
    """Of a language model, of the next token."""
    return getattr(output, "logits", output).softmax(-1)


class _Row(Tap):
    """One query of a head reads values by weights that are given, `[B, S]`."""

    def __init__(self, layer: Layer, head: int, query: int, weights: Tensor) -> None:
        self.layer, self.head, self.query, self.weights = layer, head, query, weights
        self.values: Tensor | None = None

    def ask(self, call: Call, flow: Flow | None) -> Call:
        whole = apart(channels_of(self.layer, call, flow, "v"))
        self.values = whole.v[:, self.head]
        return call

    def out(self, o: Tensor, flow: Flow | None) -> Tensor:
        assert self.values is not None
        mark = torch.zeros(o.shape[1], o.shape[2], 1, dtype=torch.bool, device=o.device)
        mark[self.head, self.query] = True
        row = (self.weights.to(o)[:, None] @ self.values)[:, None]
        return torch.where(mark, row, o)


class Row:
    """One query of one head on a text `[1, T]`: its weights, and what the model predicts with others in their place.

    Args:
        query: a row of the text; the prediction looked at is the one there.
        predict: from what the model returned to `[B, T, O]`.

    Raises:
        CaptureError: the head does more than to weigh values, so that a map in its place would not be the same.
    """

    def __init__(
        self, model: nn.Module, ids: Tensor, layer: int, head: int, query: int = -1, predict: Predict = probabilities
    ) -> None:
        if ids.ndim != 2 or len(ids) != 1 or ids.shape[1] < 2:
            raise ValueError(f"a row is of one text of two tokens or more, ids [1, T], not {[*ids.shape]}")
        (self.layer,) = chosen(model, layer)
        (self.head,) = check_heads(self.layer, [head])
        self.model, self.ids, self.predict_from = model, ids, predict
        self.query = range(ids.shape[1])[query]
        with torch.no_grad(), capture(model, layer, self.head, self.query, ("weights", "scores")) as tape:
            self.prediction = predict(model(ids))[0, self.query]
        seen = tape[self.layer.number]
        assert seen.weights is not None and seen.scores is not None
        self.weights = seen.weights[0, 0, 0]
        self.visible = seen.scores[0, 0, 0] > -torch.inf
        again = self.predict(self.weights[None])[0]
        slack = 1e-4 * float(self.prediction.abs().amax()) + 16 * torch.finfo(again.dtype).eps
        if not torch.allclose(again, self.prediction, atol=slack, rtol=1e-3):
            raise CaptureError(f"{self.layer.name}: what head {self.head} returns is not its values, weighed")

    def predict(self, weights: Tensor) -> Tensor:
        """The prediction `[K, O]` with each of K rows of weights `[K, S]` in place of the head's own."""
        with self._given(weights):
            output = self.model(self.ids.expand(len(weights), -1))
        return self.predict_from(output)[:, self.query]

    @contextmanager
    def _given(self, weights: Tensor) -> Iterator[None]:
        with standing_by([self.layer], lambda layer: _Row(layer, self.head, self.query, weights)):
            yield


def gradients(row: Row, output: int | None = None) -> Tensor:
    """|∂ŷ/∂e_s · e_s| of each token's embedding e_s `[S]`, adding up to 1, the row's weights held still.

    ŷ is one output, by default the likeliest. (The paper sums over outputs, which for probabilities is 1 whatever comes
    in.) One backward pass.
    """
    given: list[Tensor] = []

    def keep(module: nn.Module, args: object, out: Tensor) -> Tensor:
        given.append(out.detach().requires_grad_())
        return given[0]

    at = int(row.prediction.argmax()) if output is None else output
    hook = embedding_of(row.model).register_forward_hook(keep)
    try:
        with torch.enable_grad():
            y = row.predict(row.weights[None])[0, at]
            (grad,) = torch.autograd.grad(y, given[0])
    finally:
        hook.remove()
    size = (grad[0] * given[0][0].detach()).sum(-1).abs()
    return size / size.sum().clamp_min(1e-30)


def left_out(row: Row) -> Tensor:
    """mean_o |ŷ_o without token s - ŷ_o| `[S]`; the query itself is not left out, and later tokens do not count.

    All texts that lack one token are one batch.
    """
    ids, at = row.ids[0], row.query
    shorter = torch.stack([torch.cat([ids[:s], ids[s + 1 :]]) for s in range(at)]) if at else ids[None, :0]
    found = torch.full((len(ids),), torch.nan, dtype=torch.float64)
    if at:
        with torch.no_grad():
            y = row.predict_from(row.model(shorter))[:, at - 1]
        found[:at] = (y - row.prediction).abs().double().mean(-1).cpu()
    return found


def kendall(a: Tensor, b: Tensor) -> tuple[float, float]:
    """τ-b of two lists (ties count for neither) and the p of no relation, by the normal approximation without ties."""
    if a.shape != b.shape or a.ndim != 1 or len(a) < 2:
        raise ValueError(f"τ is of two lists of one length, two or more, not {[*a.shape]} and {[*b.shape]}")
    one, two = ((x.double().cpu()[:, None] - x.double().cpu()).sign() for x in (a, b))
    size = (one.square().sum() * two.square().sum()).sqrt()
    tau = float((one * two).sum() / size) if size > 0 else float("nan")
    n = len(a)
    z = torch.tensor(3 * tau * (n * (n - 1)) ** 0.5 / (2 * (2 * n + 5)) ** 0.5, dtype=torch.float64)
    return tau, float(torch.erfc(z.abs() / 2**0.5))


def permuted(row: Row, draws: int = 100, seed: int = 0) -> float:
    """The median over random permutations of the weights, over the visible keys, of mean_o |ŷ_perm - ŷ|."""
    places = row.visible.nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    orders = torch.rand(draws, len(places), generator=generator).argsort(-1)
    weights = row.weights.expand(draws, -1).clone()
    weights[:, places] = row.weights[places][orders.to(places.device)]
    with torch.no_grad():
        y = row.predict(weights)
    return float((y - row.prediction).abs().double().mean(-1).median())


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """JSD `[…]` of distributions `[…, S]` in nats, 0 to ln 2."""
    middle = (a + b) / 2
    return (torch.special.entr(middle) - (torch.special.entr(a) + torch.special.entr(b)) / 2).sum(-1).clamp_min(0)


@dataclass(frozen=True, eq=False)
class Adversary:
    """weights `[S]`: the map furthest from the head's with the same prediction; its divergence, and |Δŷ|₁."""

    weights: Tensor
    divergence: float
    change: float


def adversarial(
    row: Row, *, within: float = 0.05, target: float = 0.01, candidates: int = 5, steps: int = 500, lr: float = 0.01,
    seed: int = 0,
) -> Adversary | None:  # fmt: skip
    """The map that says the same and looks elsewhere; None where none was found.

    Adam on the logs of the weights of K candidates, which start even with noise 3·N(0, 1), against -JSD(α', α) + 500 ·
    relu(|ŷ' - ŷ|₁ - target) - the mean JSD between candidates. Of those with |Δŷ|₁ ≤ `within`, measured again, the one
    furthest away. (The L1 distance, twice the total variation, is the authors' constraint.)
    """
    places = row.visible.nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    logs = (3 * torch.randn(candidates, len(places), generator=generator)).to(row.weights).requires_grad_()
    adam = torch.optim.Adam([logs], lr)

    def whole() -> Tensor:
        return torch.zeros(candidates, len(row.weights), dtype=logs.dtype, device=logs.device).index_copy(
            1, places, logs.softmax(-1)
        )

    with torch.enable_grad():
        for _ in range(steps):
            weights = whole()
            off = (row.predict(weights) - row.prediction).abs().sum(-1)
            apart = divergence(weights[:, None], weights[None]).sum() / max(1, candidates * (candidates - 1))
            loss = (-divergence(weights, row.weights) + 500 * (off - target).relu()).sum() - apart
            (logs.grad,) = torch.autograd.grad(loss, logs)
            adam.step()
    with torch.no_grad():
        weights = whole()
        off = (row.predict(weights) - row.prediction).abs().sum(-1)
        far = divergence(weights, row.weights).masked_fill(off > within, -1.0)
    best = int(far.argmax())
    return Adversary(weights[best], float(far[best]), float(off[best])) if far[best] >= 0 else None


@dataclass(frozen=True)
class Validation:
    """τ of the weights with gradients and with leaving tokens out, and of these two (a reference), each with its p;
    the change under permutation beside the highest weight; the adversary."""

    gradient: tuple[float, float]
    left_out: tuple[float, float]
    reference: tuple[float, float]
    permuted: float
    highest: float
    adversary: Adversary | None


def validate(row: Row, *, draws: int = 100, steps: int = 500, seed: int = 0) -> Validation:
    """All four tests of a row, over the tokens before the query that it sees."""
    some = row.visible.clone()
    some[row.query :] = False
    if int(some.sum()) < 2:
        raise ValueError(f"query {row.query} sees {int(some.sum())} earlier tokens; two or more can be ranked")
    g, out, own = gradients(row)[some], left_out(row).to(some.device)[some], row.weights[some]
    return Validation(
        kendall(own, g), kendall(own, out), kendall(g, out), permuted(row, draws, seed), float(row.weights.max()),
        adversarial(row, steps=steps, seed=seed),
    )  # fmt: skip


__all__ = [
    "Adversary", "Row", "Validation", "adversarial", "divergence", "gradients", "kendall", "left_out", "permuted",
    "probabilities", "validate",
]  # fmt: skip
