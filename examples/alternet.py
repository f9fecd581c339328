"""What attention does to the frequencies of features, beside convolutions: a residual network with both.

A network of pre-activation blocks in two stages reads pictures of 16 × 16. In a stage of n blocks with a of attention,
the last 2a alternate a convolution and attention in windows (AlterNet); without attention it is a ResNet. Two tables:

- untrained, on noise: the Δ log amplitude of the highest frequency that a convolution and an attention layer give.
  Attention is nearly a mean, which lets low frequencies through; a random convolution is as likely to do the opposite.
- trained to tell coarse waves under noise: block by block, what is added to that Δ, and the variance over positions,
  after over before. Convolutions let the variance grow, attention hardly. That attention lowers Δ more than
  convolutions do, as in the paper, does not show: the class is in a low frequency, and both learn to keep that.

Source: How Do Vision Transformers Work? 2022, arXiv 2202.06709: on CIFAR and ImageNet, in stages of ResNet-50, with
windows of 7 × 7 whose bias by relative position is shared by heads, N(0, 0.02), and branches dropped at random (here
they are not). Blocks are basic ones, so that attention has the width of the block.

    python examples/alternet.py [--seeds 3] [--steps 100]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import mean
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyheads as mh
from manyheads.attention.project.gqa import GQA
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.kernel import Bias
from manyheads.core.mask import Mask
from manyheads.core.part import Heads, Part, Position
from manyheads.inspect.measures.frequency import amplitudes, position_variance

SIDE, CLASSES, WINDOW = 16, 4, 4
WIDTHS, BLOCKS, ATTENTION = (16, 32), (2, 4), (0, 2)


@dataclass(frozen=True)
class GridBias(Part):
    """A part of one's own: scores of places of a square get a bias by how far apart these are, one for all heads."""

    name: ClassVar[str] = "grid_bias"
    stage: ClassVar = "position"
    slot: ClassVar[str | None] = "position"
    side: int = WINDOW

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"bare scores"})

    def layout(self, heads: Heads, site: mh.Site) -> Heads:
        return heads._replace(rotary=None)

    def build(self, before: Heads, after: Heads, site: mh.Site) -> GridPosition:
        return GridPosition(self.side)

    def cost(self, before: Heads, after: Heads, site: mh.Site) -> Cost:
        return Cost((2 * self.side - 1) ** 2)


class GridPosition(Position):
    def __init__(self, side: int) -> None:
        super().__init__()
        self.side, self.table = side, nn.Parameter(0.02 * torch.randn(2 * side - 1, 2 * side - 1))

    def bias(self, mask: Mask, flow: Flow) -> Bias:
        def between(q: slice, k: slice) -> Tensor:
            down, across = (
                f(mask.q[q].position)[..., None] - f(mask.k[k].position)[..., None, :] + self.side - 1
                for f in (lambda at: at // self.side, lambda at: at % self.side)
            )
            return self.table[down, across][:, None]

        return between


class LocalAttention(nn.Module):
    """Attention inside windows of `[B, C, h, w]`."""

    def __init__(self, width: int, heads: int, window: int = WINDOW) -> None:
        super().__init__()
        self.window = window
        self.layer = mh.Attention(mh.Spec((GQA(), GridBias(window))), width, heads, site=mh.Site(causal=False))

    def forward(self, x: Tensor) -> Tensor:
        w, (_, width, high, _) = self.window, x.shape
        tokens = x.unflatten(3, (-1, w)).unflatten(2, (-1, w)).permute(0, 2, 4, 3, 5, 1).reshape(-1, w * w, width)
        y = self.layer(tokens)
        y = y.unflatten(0, (len(x), high // w, -1)).unflatten(3, (w, w)).permute(0, 5, 1, 3, 2, 4)
        return y.flatten(4).flatten(2, 3)


def mixer(width: int, attention: bool) -> nn.Module:
    """What mixes positions in a block."""
    return LocalAttention(width, 4) if attention else nn.Conv2d(width, width, 3, padding=1, bias=False)


class Block(nn.Module):
    """x + f(x), f of norm and GELU first; a 1 × 1 convolution where the width changes."""

    def __init__(self, inside: int, outside: int, attention: bool) -> None:
        super().__init__()
        self.norm, self.short = nn.BatchNorm2d(inside), nn.Identity()
        if inside != outside:
            self.short = nn.Conv2d(inside, outside, 1, bias=False)
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 1 if attention else 3, padding="same", bias=False), nn.BatchNorm2d(outside),
            nn.GELU(), mixer(outside, attention),
        )  # fmt: skip
        self.attends = attention

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm(x))
        return (x if isinstance(self.short, nn.Identity) else self.short(y)) + self.body(y)


class AlterNet(nn.Module):
    def __init__(self, attention: tuple[int, ...] = ATTENTION) -> None:
        super().__init__()
        self.stem, inside, blocks = nn.Conv2d(1, WIDTHS[0], 3, padding=1), WIDTHS[0], list[Block]()
        for width, count, attends in zip(WIDTHS, BLOCKS, attention, strict=True):
            for n in range(count):
                blocks.append(Block(inside, width, (count - n) % 2 == 1 and n >= count - 2 * attends))
                inside = width
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(inside, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pictures `[count, 1, SIDE, SIDE]` and their classes: waves in four directions, of random phase, under noise."""
    label = torch.randint(CLASSES, (count,), generator=generator)
    grid = torch.arange(SIDE) * 2 * torch.pi / SIDE
    turn = label * torch.pi / CLASSES
    phase = 2 * torch.pi * torch.rand(count, 1, 1, generator=generator)
    along = turn.cos()[:, None, None] * grid[:, None] + turn.sin()[:, None, None] * grid
    noise = torch.randn(count, SIDE, SIDE, generator=generator)
    return (torch.sin(2 * along + phase) + noise)[:, None], label


def trained(attention: tuple[int, ...], seed: int, steps: int) -> AlterNet:
    torch.manual_seed(seed)
    model, generator = AlterNet(attention), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.05)
    for _ in range(steps):
        x, label = draw(64, generator)
        optimiser.zero_grad()
        F.cross_entropy(model(x), label).backward()
        optimiser.step()
    return model.eval()


@torch.no_grad()
def changes(model: AlterNet, x: Tensor) -> list[tuple[bool, float, float]]:
    """Of each block but those that change the width: whether it attends, what it adds to the highest frequency's Δ log
    amplitude, and the factor on the variance over positions."""
    found, x = [], model.stem(x)
    for block in cast("list[Block]", list(model.blocks)):
        y = block(x)
        if y.shape == x.shape:
            high = float(amplitudes(y)[-1] - amplitudes(x)[-1])
            found.append((block.attends, high, position_variance(y) / position_variance(x)))
        x = y
    return found


@torch.no_grad()
def highest(attention: bool, seed: int) -> float:
    """Δ log amplitude of the highest frequency that a new layer gives for noise, which itself has about 0."""
    torch.manual_seed(seed)
    return float(amplitudes(mixer(WIDTHS[1], attention)(torch.randn(64, WIDTHS[1], SIDE, SIDE)))[-1])


def averages(found: list[tuple[bool, float, float]], attends: bool) -> tuple[float, float]:
    rows = [row[1:] for row in found if row[0] == attends]
    return mean(row[0] for row in rows), mean(row[1] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("seed  highest frequency of noise after a convolution, after attention")
    for seed in range(options.seeds):
        print(f"{seed:4}{highest(False, seed):+15.2f}{highest(True, seed):+20.2f}")
    x, label = draw(256, torch.Generator().manual_seed(99))
    print("\nseed  network   right    blocks     highest frequency   variance over positions")
    for seed in range(options.seeds):
        for name, attention in (("ResNet", (0, 0)), ("AlterNet", ATTENTION)):
            model = trained(attention, seed, options.steps)
            with torch.no_grad():
                right = float((model(x).argmax(-1) == label).double().mean())
            found = changes(model, x)
            for attends in sorted({row[0] for row in found}):
                high, variance = averages(found, attends)
                kind = "attention" if attends else "convolution"
                print(f"{seed:4}  {name:9}{right:6.0%}    {kind:12}{high:+12.2f}{variance:22.2f}")


if __name__ == "__main__":
    main()
