"""How much the loss feels of a head: by the gradient of a gate on it, and by taking it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.flow import Flow
from manyheads.core.tap import Tap
from manyheads.inspect.ablate import How, Inputs, ablate, batches_of, run
from manyheads.inspect.layers import attach_all, chosen
from manyheads.inspect.measures.table import HeadTable, tokens_of

Loss = Callable[[Any, Any], Tensor]
"""From what a model returned and its inputs, the loss of each sequence, `[B]`."""


def next_token_loss(output: Any, inputs: Any) -> Tensor:
    """The mean negative log-likelihood of each sequence's next tokens `[B]`, those of padding left out."""
    ids = tokens_of(inputs)
    if ids is None:
        raise ValueError("the loss of next tokens needs token ids; give a loss of your own")
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise ValueError(f"a {type(output).__name__} has no logits to have a loss of; give a loss")
    if logits.shape[:2] != ids.shape:
        raise ValueError(f"logits {[*logits.shape]} are not about the next of {[*ids.shape]} tokens; give a loss")
    wide = logits[:, :-1].transpose(1, 2).to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(wide, ids[:, 1:], reduction="none")
    mask = _mask(inputs)
    return _mean(loss, None if mask is None else mask[:, 1:] * mask[:, :-1])


class Moved:
    """A loss of batches: how far predictions have moved from what the model says of them now, KL(p ‖ p̂) a token.

    It tells smaller differences apart than the loss of next tokens does, which moves both ways. A batch is known by the
    object that it is. For each token of it, two bytes are kept for each word of the vocabulary.
    """

    def __init__(self, model: nn.Module, inputs: Inputs | Sequence[Inputs]) -> None:
        self.own: dict[int, Tensor] = {}
        with torch.no_grad():
            for batch in batches_of(inputs):
                self.own[id(batch)] = _logs(run(model, batch)).half()

    def __call__(self, output: Any, inputs: Any) -> Tensor:
        logs = _logs(output)
        own = self.own[id(inputs)].to(logs)
        return _mean((own.exp() * (own - logs)).sum(-1), _mask(inputs))


def _logs(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _mask(inputs: Any) -> Tensor | None:
    return inputs.get("attention_mask") if isinstance(inputs, dict) else None


def _mean(each: Tensor, mask: Tensor | None) -> Tensor:
    """Of each sequence, over its tokens `[B, T]` that are no padding."""
    real = torch.ones_like(each) if mask is None else mask.to(each)
    return (each * real).sum(1) / real.sum(1).clamp_min(1)


class _Gate(Tap):
    """A factor of 1 on each head and query, whose gradient is Σ over channels of o · ∂𝓛/∂o."""

    def __init__(self) -> None:
        self.gates: Tensor | None = None

    def out(self, o: Tensor, flow: Flow | None) -> Tensor:
        self.gates = torch.ones(*o.shape[:3], dtype=o.dtype, device=o.device, requires_grad=True)
        return o * self.gates[..., None]


def importance(
    model: nn.Module, inputs: Inputs | Sequence[Inputs], loss: Loss = next_token_loss,
    layers: int | Iterable[int] | None = None, *,
    reduction: Literal["sample", "token", "signed", "fisher"] = "sample", normalised: bool = False,
) -> HeadTable:  # fmt: skip
    """By one backward pass: G_h(x) = ∂𝓛(x)/∂ξ_h of a gate ξ_h = 1 on head h's output, = Σ_t o_t · ∂𝓛/∂o_t.

    reduction: `sample` ⟨|G|⟩ over sequences x, as the paper has it; `token` ⟨|o_t · ∂𝓛/∂o_t|⟩ over tokens, as its
    code does; `signed` ⟨G⟩, below 0 for heads that help (taking a head out changes the loss by -G, to first order);
    `fisher` ⟨G²⟩. normalised: each layer's scores over their Euclidean length.

    The model stays in the mode that it is in; call `model.eval()` first. Parameters get no gradients.

    Source: Michel et al. 2019, arXiv 1905.10650.
    """
    some = chosen(model, layers)
    total: dict[int, Tensor] = {}
    count = 0.0
    for batch in batches_of(inputs):
        gates: dict[int, _Gate] = {layer.number: _Gate() for layer in some}
        detach = attach_all(some, lambda layer, gates=gates: gates[layer.number])
        try:
            with torch.enable_grad():
                each = loss(run(model, batch), batch)
                if each.ndim != 1:
                    raise ValueError(f"a loss is one number a sequence, [B], not {[*each.shape]}")
                ran = {number: gate.gates for number, gate in gates.items() if gate.gates is not None}
                grads = torch.autograd.grad(each.sum(), list(ran.values()))
        finally:
            detach()
        first = next(iter(grads))
        count += len(first) * (first.shape[2] if reduction == "token" else 1)
        for number, grad in zip(ran, grads, strict=True):
            grad = grad.double()
            whole = grad.sum(2)
            value = {"token": grad.abs().sum(2), "sample": whole.abs(), "signed": whole, "fisher": whole.square()}
            total[number] = total.get(number, 0) + value[reduction].sum(0).cpu()
    rows = {number: value / count for number, value in total.items()}
    if normalised:
        rows = {number: value / (value.norm() + 1e-20) for number, value in rows.items()}
    return HeadTable("importance", rows)


def ablation(
    model: nn.Module, inputs: Inputs | Sequence[Inputs], loss: Loss = next_token_loss,
    layers: int | Iterable[int] | None = None, *, how: How = "zero", reference: Inputs | None = None,
) -> HeadTable:  # fmt: skip
    """𝓛 with head h taken out (see `ablate`) minus 𝓛, mean over sequences: above 0 for a head that helps.

    A forward pass for each head. Source: Michel et al. 2019, arXiv 1905.10650.
    """
    batches = batches_of(inputs)

    def whole() -> Tensor:
        with torch.no_grad():
            return torch.cat([loss(run(model, batch), batch).double() for batch in batches]).mean().cpu()

    base, rows = whole(), {}
    for layer in chosen(model, layers):
        found = []
        for head in range(layer.heads):
            with ablate(model, {layer.number: [head]}, how, reference=reference):
                found.append(whole() - base)
        rows[layer.number] = torch.stack(found)
    return HeadTable("ablation", rows)


def least_important(table: HeadTable, share: float, *, keep: int = 1) -> dict[int, list[int]]:
    """The heads to go first, by layer as `ablate` takes them: the lowest of all layers together, a share of all heads.

    keep: how many heads a layer keeps at least, its highest; others then go in their place. Of equal heads the first
    goes. One step is the same as several with the same scores. Source: Michel et al. 2019, arXiv 1905.10650.
    """
    if not 0 <= share <= 1 or keep < 0:
        raise ValueError(f"share={share}, keep={keep}; a share of 0 to 1, no head or more")
    heads = sorted((float(x), layer, head) for layer, row in table.items() for head, x in enumerate(row) if x == x)
    left = {layer: len(row) for layer, row in table.items()}
    found: dict[int, list[int]] = {}
    wanted = int(share * len(heads) + 1e-9)
    for _, layer, head in heads:
        if sum(map(len, found.values())) < wanted and left[layer] > keep:
            found.setdefault(layer, []).append(head)
            left[layer] -= 1
    return {layer: sorted(of) for layer, of in sorted(found.items())}
