"""Heads that read what a frozen language model's states were while it answered, and decide who answers and how.

H `[B, N, D]` are states of one layer at the tokens of an answer, the prompt's left out. A trajectory head is

    LayerNorm, D -> w; the mean over P even stretches of time `[B, P, w]`
    Σ_i softmax(m)_i GELU(GroupNorm(conv_i)), dilations 1, 2, 4; x + gate(mix) ∘ mix, gate a sigmoid of w -> w/8 -> w
    + learned positions; set attention blocks; pooling by learned seeds; -> 2w -> 4w/3 = z; MLP of z -> outputs

The capability head (the last layer) says p, how likely the answer is right: below `capable` the task goes to a larger
model as it was. The resolution head (a middle layer, after block (L - 1) // 2) says how likely it is better to call a
tool, to ask for information or to say that it cannot be done; where none reaches `resolve`, the answer stands. Only the
heads learn, from the model's own answers.

Choices: order of outputs as in the authors' code (tool, information, cannot); the three convolutions are side by side;
the gate of each position is its own. Left out: chunk summaries and several layers in one head.

Source: Multi-Head Latent Control, arXiv 2607.14277.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.check import OptionError, check_share, check_whole

INTERVENTIONS = ("tool", "information", "cannot")
DIRECT, ESCALATE = "direct", "escalate"


class Trajectory(nn.Module):
    """`[B, N, dim]` to `[B, outputs]`; mask: bool `[B, N]`, True at the tokens of the answer.

    Args:
        width: w, a multiple of 24. places: P, even stretches of time whatever N is. layers: set attention blocks.
    """

    def __init__(
        self, dim: int, outputs: int = 1, *, width: int = 192, places: int = 192, layers: int = 3, seeds: int = 3,
        heads: int = 4, dropout: float = 0.1,
    ) -> None:  # fmt: skip
        check_whole(dim=dim, outputs=outputs, width=width, places=places, layers=layers, seeds=seeds, heads=heads)
        check_share(dropout=dropout)
        if width % 24 or width % heads:
            raise OptionError(f"trajectory: width={width} is no multiple of 24 (8 groups, thirds) and of heads={heads}")
        super().__init__()
        self.width, self.places = width, places
        self.read = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, width))
        self.convolutions = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, width, 5, padding=2 * step, dilation=step, groups=8), nn.GroupNorm(8, width), nn.GELU()
            )
            for step in (1, 2, 4)
        )
        self.mix = nn.Parameter(torch.tensor([0.5, 0.3, 0.2]))
        inner = width // 8
        self.gate = nn.Sequential(nn.Conv1d(width, inner, 1), nn.GELU(), nn.Conv1d(inner, width, 1), nn.Sigmoid())
        self.dropout = nn.Dropout(dropout)
        self.positions = nn.Parameter(torch.randn(places, width) * width**-0.5)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True)
            for _ in range(layers)
        )
        self.seeds = nn.Parameter(torch.randn(seeds, width) * width**-0.5)
        self.pool = nn.MultiheadAttention(width, heads, batch_first=True)
        code = width * 4 // 3
        self.summary = nn.Sequential(
            nn.Linear(seeds * width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, code)
        )
        self.decide = nn.Sequential(
            nn.LayerNorm(code), nn.Linear(code, 2 * width), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(2 * width, 2 * width // 3), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width // 3, outputs),
        )  # fmt: skip

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device) if mask is None else mask.bool()
        if states.dim() != 3 or mask.shape != states.shape[:2]:
            raise ValueError(
                f"states {list(states.shape)} and their mask {list(mask.shape)} are not [B, N, D] and [B, N]"
            )
        if not bool(mask.any(1).all()):
            raise ValueError("an answer without tokens says nothing")
        read = self.read(states.to(self.positions.dtype))
        # Each answer has its own length, so its own stretches.
        rows = [row[own].T[None] for row, own in zip(read, mask, strict=True)]
        x = torch.cat([F.adaptive_avg_pool1d(row, self.places) for row in rows])
        each = torch.stack([convolution(x) for convolution in self.convolutions])
        mixed = (each * self.mix.softmax(0).view(-1, 1, 1, 1)).sum(0)
        x = (x + self.dropout(self.gate(mixed) * mixed)).mT + self.positions
        for block in self.blocks:
            x = block(x)
        pooled, _ = self.pool(self.seeds.expand(len(x), -1, -1), x, x, need_weights=False)
        return self.decide(self.summary(pooled.flatten(1)))


class LatentControl(nn.Module):
    """The two heads beside a frozen model of transformers, which is no submodule and gets no gradient.

    >>> control = LatentControl(model)
    >>> answer = model.generate(**prompt, max_new_tokens=50)
    >>> capable, better = control(answer, prompt_length)
    >>> decisions = decide(capable, better)
    """

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__()
        config = model.config.get_text_config()
        self._model = (model,)  # in a tuple: no submodule
        self.middle = (config.num_hidden_layers - 1) // 2 + 1  # state 0 is before the first block
        self.capability = Trajectory(config.hidden_size, 1, **options)
        self.resolution = Trajectory(config.hidden_size, len(INTERVENTIONS), **options)

    @torch.no_grad()
    def states(self, ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of the last and of the middle layer, `[B, T, D]`."""
        model = cast(nn.Module, self._model[0])
        out = model(input_ids=ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False)
        return out.hidden_states[-1], out.hidden_states[self.middle]

    def forward(
        self, ids: Tensor, prompt: int | Tensor, attention_mask: Tensor | None = None, first: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """p `[B]` and s `[B, 3]` of prompts and answers `[B, T]` of which the first `prompt` tokens (of all rows, or
        `[B]`) are the prompt; attention_mask: `[B, T]`, 0 on padding. first: judge by so many tokens of the answer."""
        last, middle = self.states(ids, attention_mask)
        place = torch.arange(ids.shape[1], device=ids.device)
        answer = place >= torch.as_tensor(prompt, device=ids.device).view(-1, 1)
        answer = answer.expand(len(ids), -1) if attention_mask is None else answer & attention_mask.bool()
        if first is not None:
            answer = answer & (answer.cumsum(1) <= first)
        return self.capability(last, answer)[:, 0].sigmoid(), self.resolution(middle, answer).sigmoid()


def capability_loss(
    said: Tensor, right: Tensor, *, balance: tuple[float, float] | None = None, severe: bool = True
) -> Tensor:
    """Σ w (p - y)² / Σ w for p and y in [0, 1], `[B]`; w is the class's weight times 1 + (1 - y), the latter if
    `severe`.

    balance: numbers of failures (y < ½) and of others in all the data: the rarer weighs more by their ratio, 10 at
    most.
    """
    if said.shape != right.shape:
        raise ValueError(f"said {list(said.shape)} and right {list(right.shape)} are not alike")
    right = right.to(said.dtype)
    weight = 2 - right if severe else torch.ones_like(right)
    if balance is not None:
        failed, other = balance
        ratio = min(max(failed, other) / max(min(failed, other), 1e-9), 10.0)
        weight = weight * torch.where((right < 0.5) == (failed < other), ratio, 1.0)
    return (weight * (said - right).square()).sum() / weight.sum()


def resolution_loss(said: Tensor, label: Tensor) -> Tensor:
    """The mean over rows of three cross-entropies together, s `[B, 3]`; label `[B]`: 0 direct, then INTERVENTIONS."""
    wanted = F.one_hot(label, len(INTERVENTIONS) + 1)[:, 1:].to(said.dtype)
    return F.binary_cross_entropy(said, wanted, reduction="none").sum(-1).mean()


def decide(capable: Tensor, better: Tensor | None = None, *, least: float = 0.8, resolve: float = 0.5) -> list[str]:
    """What to do of each answer: `escalate`, `direct`, or one of INTERVENTIONS."""
    decisions = []
    for row, p in enumerate(capable.tolist()):
        if p < least:
            decisions.append(ESCALATE)
        elif better is None or float(better[row].max()) < resolve:
            decisions.append(DIRECT)
        else:
            decisions.append(INTERVENTIONS[int(better[row].argmax())])
    return decisions


def affordable(capable: Tensor | Sequence[float], small: float, large: float, budget: float) -> float:
    """The highest `least` at which tasks like these cost `budget` each at most; `large` is what escalating adds."""
    if not (0 <= small <= budget and large > 0):
        raise OptionError(f"small={small}, large={large}, budget={budget}: 0 <= small <= budget, large above 0")
    sure = torch.as_tensor(capable, dtype=torch.float64).sort().values
    may = min(int((budget - small) / large * len(sure) + 1e-9), len(sure))
    return float("inf") if may == len(sure) else float(sure[may])
