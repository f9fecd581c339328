"""Several light classifiers in one head, each on a Gram matrix of the features, pushed off each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.multi.head import register_head
from manyheads.multi.heads.classification import Classification


@register_head("gramian")
@dataclass(frozen=True)
class Gramian(Classification):
    """K sets of logits `[B, K, classes]` of tokens X `[B, P, C]`, of which one label a row is known, `[B]`; say, a map.

        Y = BN(X W)                                  [P, g], zero on padding
        G = upper triangle of YᵀY / P                [g (g + 1) / 2], divided by its length
        c = BN(grouped linear map of G)              [C]
        c <- c + γ₁ ∘ attention(LN c; LN [c; X])     one query, `attention` heads in `width` channels, keys c and X
        c <- c + γ₂ ∘ MLP(LN c)                      grouped linear maps, channels shuffled between them
        o_k = c W_k + b_k

    Said is argmax of Σ_k o_k. The loss is Σ_k CE(o_k, y) + decorrelation · Σ_k mean over classes of p̄ (ln p̄ - ln p_k),
    p̄ the softmax of Σ_k o_k / K without gradient: below zero it pushes the K apart. The order of tokens is nothing.

    With norm=batch, as published, rows of a batch see each other in training, unlabelled ones too; with norm=layer no.

    Options: classes; count K; gram g; width, attention: of class attention; groups of the map of G; ratio and
        mlp_groups of the MLP; decorrelation; scale: γ at first; base: `ce`, or `bce` over classes; smoothing.

    Choices: Y's block of the backbone behind the reduction is left to the trunk. Statistics of BN leave padding out.

    Source: Ryu, Han and Lim 2023, ICCV, "Gramian Attention Heads are Strong yet Efficient Vision Learners".
    """

    reads = "tokens"
    temper: ClassVar[float | None] = None  # decorrelation may take the loss below zero

    smoothing: float = 0.1
    count: int = 5
    gram: int = 192
    width: int = 128
    attention: int = 8
    groups: int = 8
    ratio: int = 4
    mlp_groups: int = 4
    decorrelation: float = -0.8
    scale: float = 1e-4
    base: Literal["ce", "bce"] = "ce"
    norm: Literal["batch", "layer"] = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        least = min(self.count, self.gram, self.width, self.attention, self.groups, self.ratio, self.mlp_groups)
        self.ask(least > 0, "count, gram, width, attention, groups, ratio and mlp_groups are at least 1")
        self.ask(self.width % self.attention == 0, f"width={self.width} is no multiple of attention={self.attention}")
        self.ask(self.numbers % self.groups == 0, f"gram={self.gram} gives {self.numbers} numbers, no multiple of "
                 f"groups={self.groups}")  # fmt: skip
        self.ask(not self.hidden and not self.dropout, "hidden and dropout are of heads with a plain module")

    @property
    def numbers(self) -> int:
        """In the triangle."""
        return self.gram * (self.gram + 1) // 2

    def build(self, width: int) -> nn.Module:
        for name, groups in (("groups", self.groups), ("mlp_groups", self.mlp_groups)):
            if width % groups:
                raise ValueError(f"features {width} wide are no multiple of {name}={groups}")
        return Gramians([ClassToken(self, width) for _ in range(self.count)])

    def output(self, net: nn.Module, features: Tensor, mask: Tensor | None) -> Tensor:
        return net(features, mask)

    def shape(self, features: Tensor) -> tuple[int, ...]:
        return tuple(features.shape[:1])

    def losses(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        logits, count = output[known], output.shape[1]
        labels = target[known][:, None].expand(-1, count)
        if self.base == "ce":
            each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", label_smoothing=self.smoothing)
        else:
            soft = F.one_hot(labels, self.classes).to(logits) * (1 - self.smoothing) + self.smoothing / self.classes
            each = F.binary_cross_entropy_with_logits(logits, soft, reduction="none").mean(-1)
        return each.sum(-1) + self.decorrelation * decorrelation(logits)

    def predict(self, output: Tensor) -> Tensor:
        return output.sum(1).argmax(-1)


def decorrelation(logits: Tensor) -> Tensor:
    """Σ_k mean over classes of p̄ (ln p̄ - ln p_k) `[n]`, of logits `[n, K, classes]`; from 0 on, 0 where all agree."""
    whole = logits.mean(1, keepdim=True).detach().log_softmax(-1)
    return (whole.exp() * (whole - logits.log_softmax(-1))).mean(-1).sum(-1)


def gram(y: Tensor) -> Tensor:
    """The upper triangle of YᵀY of `[B, P, g]`, of length 1, `[B, g (g + 1) / 2]`."""
    row, column = torch.triu_indices(y.shape[-1], y.shape[-1], device=y.device)
    return F.normalize((y.mT @ y / y.shape[1])[:, row, column], dim=-1)


class Gramians(nn.Module):
    def __init__(self, each: list[ClassToken]) -> None:
        super().__init__()
        self.each = nn.ModuleList(each)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return torch.stack([net(x, mask) for net in self.each], 1)


class ClassToken(nn.Module):
    """One of the K."""

    def __init__(self, options: Gramian, width: int) -> None:
        super().__init__()
        inner, wide = options.width, options.ratio * width
        self.heads = options.attention
        norm = nn.BatchNorm1d if options.norm == "batch" else nn.LayerNorm
        self.reduce, self.reduced = nn.Linear(width, options.gram, bias=False), norm(options.gram)
        self.token = nn.Conv1d(options.numbers, width, 1, groups=options.groups, bias=False)
        self.made = norm(width)
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv = nn.Linear(width, inner), nn.Linear(width, 2 * inner)
        self.out = nn.Linear(inner, width)
        self.up = nn.Conv1d(width, wide, 1, groups=options.mlp_groups)
        self.down = nn.Conv1d(wide, width, 1, groups=options.mlp_groups)
        self.gamma = nn.Parameter(torch.full((2, width), options.scale))
        self.classes = nn.Linear(width, options.classes)
        for each in self.modules():
            if isinstance(each, nn.Linear | nn.Conv1d):
                nn.init.trunc_normal_(each.weight, std=0.02)
                if each.bias is not None:
                    nn.init.zeros_(each.bias)

    def features(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Y `[B, P, g]`."""
        y = self.reduce(x)
        if mask is None:
            return self.reduced(y.flatten(0, 1)).view_as(y)
        normed = torch.zeros_like(y)
        normed[mask] = self.reduced(y[mask])
        return normed

    def attend(self, c: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        z = self.norm(torch.cat([c[:, None], x], 1))
        split = lambda each: each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(z).chunk(2, -1)
        seen = None if mask is None else F.pad(mask, (1, 0), value=True)[:, None, None]
        o = F.scaled_dot_product_attention(split(self.q(z[:, :1])), split(k), split(v), seen)
        return self.out(o.transpose(1, 2).flatten(2)).squeeze(1)

    def mlp(self, c: Tensor) -> Tensor:
        wide = F.gelu(self.up(c[..., None])).unflatten(1, (self.up.groups, -1))
        return self.down(wide.transpose(1, 2).flatten(1, 2)).squeeze(-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)
        c = self.made(self.token(gram(self.features(x, mask))[..., None]).squeeze(-1))
        c = c + self.gamma[0] * self.attend(c, x, mask)
        c = c + self.gamma[1] * self.mlp(self.last(c))
        return self.classes(c)
