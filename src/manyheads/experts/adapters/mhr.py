"""Multi-head adapter routing: a task mixes low-rank adapters, with other weights for each block of features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.part import OptionError
from manyheads.experts.adapters.adapter import Adapter, Options, register_adapter


@register_adapter
@dataclass(frozen=True)
class MHR(Options):
    """y = x W + (alpha/r) (x A_τ) B_τ for a sequence of task τ: S skills, in h blocks of features, mixed by weights w.

    A `[h, S, D/h, r]`, B `[h, S, r, F/h]`, Z `[tasks, h, S]`; a = σ(Z_τ), w_qs = a_qs / Σ_s a_qs;
    A_τ `[D, r]` = the blocks Σ_s w_qs A_qs below each other, B_τ `[r, F]` = the blocks Σ_s w_qs B_qs side by side.
    Parameters are mixed before the product, so the rank of an update is r at most. One split is Poly (Ponti et al.,
    arXiv 2202.13914); one skill is an ordinary adapter whatever Z. Each adapted layer has a Z of its own.

    Options: splits h, skills S, rank r, tasks (0: no Z, w = 1/S), alpha.
        form: `lora` as above; `ia3`, y = (x W + b) ∘ l, l = the blocks Σ_s w_qs l_qs, l `[h, S, F/h]` from ones.
        gate, how a comes from z = Z_τ: `soft`; `sample`, in training a relaxed Bernoulli sample at temperature 1, a =
            σ(z + log u - log(1 - u)), u uniform, one for each task id of the pass; `straight`, a = round σ(z) with the
            gradient of σ; `l2`, w = z / ‖z‖ over skills at once.
        correction: w = a √h / √S in place of the division by the sum. dropout: of a, in training.

    First values: B = 0, so nothing changes at the start; A uniform ±1/√(3 D), Z uniform ±0.001.

    Choices: the authors' configuration samples by default, their later code does not; here `soft`. Their learning rate
    for Z is 0.1 beside 0.001 for the rest.

    Source: Caccia et al. 2022, arXiv 2211.03831.
    """

    name: ClassVar[str] = "mhr"
    paper: ClassVar[str] = "arXiv 2211.03831"

    splits: int = 8
    skills: int = 8
    rank: int = 4
    tasks: int = 1
    alpha: float = 1.0
    form: Literal["lora", "ia3"] = "lora"
    gate: Literal["soft", "sample", "straight", "l2"] = "soft"
    correction: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if min(self.splits, self.skills, self.rank) < 1 or self.tasks < 0:
            raise OptionError(
                f"splits={self.splits}, skills={self.skills} and rank={self.rank} must be positive, tasks={self.tasks} "
                "not negative"
            )
        if not 0 <= self.dropout < 1:
            raise OptionError(f"dropout={self.dropout} is no chance below 1")
        if self.gate == "l2" and (self.correction or self.dropout):
            raise OptionError("gate=l2 takes the logits themselves; it has no correction and no dropout")

    def check(self, inputs: int, outputs: int) -> None:
        split = (outputs,) if self.form == "ia3" else (inputs, outputs)
        if any(width % self.splits for width in split):
            fits = [n for n in range(1, min(split) + 1) if not any(width % n for width in split)]
            raise OptionError(f"mhr: {inputs} to {outputs} features have no {self.splits} splits; splits may be {fits}")

    def build(self, inputs: int, outputs: int) -> MHRAdapter:
        return MHRAdapter(self, inputs, outputs)

    def cost(self, inputs: int, outputs: int) -> Cost:
        routing = self.tasks * self.splits * self.skills
        if self.form == "ia3":
            return Cost(self.skills * outputs + routing, token_flops=outputs)
        one = self.rank * (inputs + outputs)
        return Cost(self.skills * one + routing, token_flops=2 * one)


class MHRAdapter(Adapter):
    """Beside the parameters of `MHR`, `added`: rows of Z for tasks that came later, `[h, S]` each."""

    routing = ("logits", "added")

    def __init__(self, options: MHR, inputs: int, outputs: int) -> None:
        super().__init__(options)
        self.options: MHR = options
        h, skills, rank = options.splits, options.skills, options.rank
        if options.form == "ia3":
            self.scale = nn.Parameter(torch.ones(h, skills, outputs // h))
        else:
            bound = (3 * inputs) ** -0.5
            self.lora_a = nn.Parameter(torch.empty(h, skills, inputs // h, rank).uniform_(-bound, bound))
            self.lora_b = nn.Parameter(torch.zeros(h, skills, rank, outputs // h))
        self.logits = nn.Parameter(_first(options.tasks, h, skills)) if options.tasks else None
        self.added = nn.ParameterList()

    @property
    def tasks(self) -> int:
        return self.options.tasks + len(self.added)

    def table(self) -> Tensor:
        """Z of all tasks, `[tasks, h, S]`."""
        rows = [] if self.logits is None else [self.logits]
        return torch.cat([*rows, *(row[None] for row in self.added)])

    def weights(self, ids: Tensor) -> Tensor:
        """w of tasks `[n]`, as `[n, h, S]`."""
        options = self.options
        if not self.tasks:
            first = next(self.parameters())
            return first.new_full((len(ids), *first.shape[:2]), 1 / options.skills)
        z = self.table()[ids]
        if options.gate == "l2":
            return F.normalize(z, dim=-1)
        if options.gate == "sample" and self.training:
            z = z + torch.rand_like(z).logit(torch.finfo(z.dtype).eps)
        a = z.sigmoid()
        if options.gate == "straight":
            a = a.detach().round() + (a - a.detach())
        a = F.dropout(a, options.dropout, self.training)
        if options.correction:
            return a * (options.splits / options.skills) ** 0.5
        return a / a.sum(-1, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)

    def mixed(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """A_τ `[n, D, r]` and B_τ `[n, r, F]` of weights `[n, h, S]`."""
        a = torch.einsum("nqs,qsir->nqir", w, self.lora_a).flatten(1, 2)
        b = torch.einsum("nqs,qsro->nrqo", w, self.lora_b).flatten(2)
        return a, b

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        ids = self.shared.ids(x, self.tasks)
        w = self.weights(ids)
        if self.options.form == "ia3":
            scale = torch.einsum("nqs,qso->nqo", w, self.scale).flatten(1)
            return (y.reshape(len(ids), -1, y.shape[-1]) * scale[:, None].to(y.dtype)).view_as(y)
        a, b = self.mixed(w)
        z = x.reshape(len(ids), -1, x.shape[-1]).to(a.dtype) @ a
        # Checkpointing compares shapes: an empty tensor made of the tasks lets it refuse to compute this for others.
        z = z + (z.new_zeros(self.shared.stamp, 0) * z[:1, :1, 0]).sum()
        return y + (self.options.alpha / self.options.rank * (z @ b)).to(y.dtype).reshape(y.shape)

    @torch.no_grad()
    def merged(self, weight: Tensor, bias: Tensor | None, task: int) -> tuple[Tensor, Tensor | None]:
        if not 0 <= task < max(self.tasks, 1):
            raise ValueError(f"no task {task}; this adapter knows 0 to {max(self.tasks, 1) - 1}")
        training = self.training
        w = self.eval().weights(torch.tensor([task], device=weight.device))
        self.train(training)
        if self.options.form == "ia3":
            scale = torch.einsum("nqs,qso->nqo", w, self.scale).flatten()
            return weight * scale[:, None], None if bias is None else bias * scale
        a, b = self.mixed(w)
        return weight + self.options.alpha / self.options.rank * (a @ b)[0].T, bias

    def add_task(self) -> nn.Parameter:
        """A row of Z for one more task, as new as the others once were."""
        first = next(self.parameters())
        self.added.append(nn.Parameter(_first(self.options.splits, self.options.skills).to(first)))
        return self.added[-1]  # type: ignore[return-value]

    @torch.no_grad()
    def average(self) -> None:
        """One adapter, the mean of all skills, and no routing."""
        for name in ("scale",) if self.options.form == "ia3" else ("lora_a", "lora_b"):
            setattr(self, name, nn.Parameter(getattr(self, name).mean(1, keepdim=True)))
        self.options = replace(self.options, skills=1, tasks=0, gate="soft", correction=False, dropout=0.0)
        self.logits, self.added = None, nn.ParameterList()

    def packed(self) -> tuple[Options, dict[str, Tensor]]:
        """Rows that were added are rows like the others."""
        values = {name: value.detach() for name, value in self.named_parameters() if not name.startswith("added")}
        if self.tasks:
            values["logits"] = self.table().detach()
        return replace(self.options, tasks=self.tasks), values

    @torch.no_grad()
    def unpack(self, values: dict[str, Tensor]) -> None:
        table, first = values.get("logits"), self.options.tasks
        if table is not None:
            rows = {f"added.{row}": value for row, value in enumerate(table[first:])}
            values = values | {"logits": table[:first]} | rows
        super().unpack(values)


def _first(*shape: int) -> Tensor:
    return torch.empty(shape).uniform_(-1e-3, 1e-3)
