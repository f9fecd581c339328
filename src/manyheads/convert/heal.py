"""Layer-wise healing: each converted layer is fitted to what its source layer did, on the inputs it will really get.

Layers are healed first to last. The target of layer l is the source's residual stream after its attention minus the
converted model's stream before it, so a layer also makes good what earlier ones lost. The fit is Adam on all weights of
the attention, the output projection in coordinates of the loss's metric (see `manyheads.convert.stats.sensitivity`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyheads.convert.stats import positions_of, power
from manyheads.stack.seam import SeamAttention

JUDGED = 4096
"""Tokens, in evenly spread windows, that an error is measured on."""


@dataclass(frozen=True)
class LayerwiseHeal:
    """Options of the fit.

    steps of about `batch` tokens (whole windows); rate is relative to each weight's own size, warmed up over 4 steps,
    then a cosine to a twentieth. metric_floor: share of the plain squared error in the metric. ridge: of the
    closed-form fit of the output projection that comes first. sink: weight of each window's first token.
    bfloat16: matrix products of the fit in half precision, several times faster where the processor has them.
    """

    steps: int = 48
    batch: int = 2048
    rate: float = 0.003
    metric_floor: float = 0.1
    ridge: float = 0.1
    sink: float = 30.0
    seed: int = 0
    bfloat16: bool = False

    def __call__(
        self, attention: SeamAttention, x: Tensor, target: Tensor, stream: Tensor, metric: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> float:  # fmt: skip
        """Fit the layer in place, in the dtype of x; weights keep their own.

        Args:
            x: `[N, T, D]`, normalised inputs that the converted model gives this layer.
            target: `[N, T, D]`, what the layer should put out. stream: `[N, T, D]`, the source's residual stream after
                attention, whose size says how much an error matters at each token.
            metric: E[g gᵀ] `[D, D]` of the loss at the layer's output; None weighs all channels alike.
            positions: `[N, T]`; None: 0, 1, ….

        Returns:
            The relative squared error that is left, in the metric. It is never above the one before: a fit that helped
            nothing (of a layer that is exact already) is taken back.
        """
        weights, root, where = self._token_weights(stream), self._root(x, metric), positions_of(x, positions)
        before = self._error(attention, x, target, weights, root, where)
        if self.steps == 0 or before <= (1e-4 if self.bfloat16 else 0):  # below what half precision can tell
            return before
        start = {name: w.detach().clone() for name, w in attention.named_parameters()}
        inverse_root = torch.linalg.inv(root.double()).to(x.dtype)
        self._solve_output(attention, x, target, weights, where)
        last = "project.o_proj.weight"  # fitted in the metric's own coordinates

        def placed(free: dict[str, Tensor]) -> dict[str, Tensor]:
            return free | {last: inverse_root @ free[last]}

        free = {name: w.detach().to(x.dtype) for name, w in attention.named_parameters()}
        free[last] = root @ free[last]
        free = {name: w.clone().requires_grad_() for name, w in free.items()}
        rates = {name: self.rate * w.detach().pow(2).mean().sqrt().clamp_min(1e-6).item() for name, w in free.items()}
        groups = [{"params": [w], "lr": rates[name], "base": rates[name]} for name, w in free.items()]
        adam = torch.optim.Adam(groups, betas=(0.9, 0.95), eps=1e-12)
        size = (weights * (target @ root).pow(2).sum(-1)).mean()
        generator, rows_a_step = torch.Generator().manual_seed(self.seed), self._rows(x)
        order = torch.empty(0, dtype=torch.long)
        for step in range(self.steps):
            if len(order) < rows_a_step:
                order = torch.cat([order, torch.randperm(len(x), generator=generator)])
            rows, order = order[:rows_a_step].to(x.device), order[rows_a_step:]
            for group in adam.param_groups:
                group["lr"] = group["base"] * self._schedule(step)
            error = (self._apply(attention, placed(free), x[rows], where[rows]) - target[rows]) @ root
            loss = (weights[rows] * error.pow(2).sum(-1)).mean() / size
            adam.zero_grad()
            loss.backward()
            adam.step()
        with torch.no_grad():
            for name, w in attention.named_parameters():
                w.copy_(placed(free)[name])
            after = self._error(attention, x, target, weights, root, where)
            if after <= before:
                return after
            for name, w in attention.named_parameters():
                w.copy_(start[name])
            return before

    def error(
        self, attention: SeamAttention, x: Tensor, target: Tensor, stream: Tensor, metric: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> float:  # fmt: skip
        """Relative squared error of the layer's output, weighted as the fit weighs it."""
        weights, root = self._token_weights(stream), self._root(x, metric)
        return self._error(attention, x, target, weights, root, positions_of(x, positions))

    @torch.no_grad()
    def _error(
        self, attention: SeamAttention, x: Tensor, target: Tensor, weights: Tensor, root: Tensor, where: Tensor
    ) -> float:
        every = max(1, weights.numel() // JUDGED)
        x, target, weights, where = (t[::every] for t in (x, target, weights, where))
        left = sum(
            (w * ((self._apply(attention, None, part, at) - y) @ root).pow(2).sum(-1)).sum().item()
            for part, y, w, at in zip(*(t.split(self._rows(x)) for t in (x, target, weights, where)), strict=True)
        )
        size = (weights * (target @ root).pow(2).sum(-1)).sum().item()
        return left / max(size, 1e-30)  # of a layer that puts out nothing

    def _root(self, x: Tensor, metric: Tensor | None) -> Tensor:
        if metric is None:
            return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        return power(metric / metric.diagonal().mean().clamp_min(1e-30), 0.5, self.metric_floor).to(x.dtype)

    def _token_weights(self, stream: Tensor) -> Tensor:
        weights = 1 / stream.pow(2).mean(-1).clamp_min(1e-12)
        weights[:, 0] *= self.sink
        return weights

    def _rows(self, x: Tensor) -> int:
        """Windows a step."""
        return max(1, min(len(x), self.batch // x.shape[1]))

    def _schedule(self, step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return min(1.0, (step + 1) / 4) * (0.05 + 0.95 * cosine)

    def _apply(self, attention: SeamAttention, weights: dict[str, Tensor] | None, x: Tensor, where: Tensor) -> Tensor:
        if weights is None:
            weights = {name: w.to(x.dtype) for name, w in attention.named_parameters()}
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bfloat16):
            return functional_call(attention, weights, (x,), {"position_ids": where})[0].to(x.dtype)

    @torch.no_grad()
    def _solve_output(
        self, attention: SeamAttention, x: Tensor, target: Tensor, weights: Tensor, where: Tensor
    ) -> None:
        """The output projection's best change, by ridge regression on the heads' outputs."""
        linear: nn.Linear = attention.project.o_proj  # type: ignore[assignment]
        seen: list[Tensor] = []
        handle = linear.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
        parts = zip(x.split(self._rows(x)), where.split(self._rows(x)), strict=True)
        y = torch.cat([self._apply(attention, None, part, at) for part, at in parts])
        handle.remove()
        o, left = torch.cat(seen).to(x.dtype), (target - y).flatten(0, 1)
        weighted = o * weights.flatten()[:, None]
        gram, cross = (weighted.T @ o).double(), (weighted.T @ left).double()
        gram += self.ridge * gram.diagonal().mean() * torch.eye(len(gram), device=x.device)
        linear.weight += torch.linalg.solve(gram, cross).T
