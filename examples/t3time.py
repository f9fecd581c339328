"""A forecaster of three views (time, spectrum, a text about each variable) put together from parts of this library.

Variables are tokens of an encoder; magnitudes of a spectrum are tokens of another, pooled by attention; a gate that
knows the horizon mixes both. Several heads, in which channels are tokens, look into embeddings of the text, and are
mixed by weights that depend on what they say. Because each series is normalised and the forecast put back, a series
that is shifted and scaled has its forecast shifted and scaled.

Source: T3Time. The paper trains on public data with embeddings of GPT-2; here series are sums of two sines and noise,
and the text's embeddings random numbers, the same ones for a variable. Its decoder is one more encoder layer here.

    python examples/t3time.py [--steps 100] [--seeds 1]
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

import manyheads as mh
from manyheads.aggregate import ConditionGate, ScaledResidual, build

LENGTH, HORIZON, VARIABLES, WIDTH, PROMPT = 32, 8, 4, 16, 24


class Alignment(nn.Module):
    """One cross-attention of channels (features: the variables) over the channels of the text, and a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        site = mh.Site(causal=False, cross=True, context_dim=VARIABLES)
        self.norm, self.after = nn.LayerNorm(VARIABLES), nn.LayerNorm(VARIABLES)
        self.attention = mh.Attention("mha", VARIABLES, 1, site=site)
        self.feed = nn.Sequential(nn.Linear(VARIABLES, 32), nn.GELU(), nn.Linear(32, VARIABLES))

    def forward(self, z: Tensor, text: Tensor) -> Tensor:
        """z `[B, C, N]`, text `[B, P, N]`; both residuals begin behind a norm, as in the paper's program."""
        z = self.norm(z)
        z = self.after(z + self.attention(z, context=self.norm(text)))
        return z + self.feed(z)


class Forecaster(nn.Module):
    """x `[B, L, N]` and text `[B, N, P]` to `[B, H, N]`. mix: `t3time` weighs heads; `mean` takes their mean."""

    def __init__(self, heads: int = 4, mix: str = "t3time") -> None:
        super().__init__()
        self.embed, self.lift = nn.Linear(LENGTH, WIDTH), nn.Linear(1, WIDTH)
        self.time, self.bins, self.decoder = (mh.Encoder("gqa", WIDTH, 4, 1) for _ in range(3))
        self.text = mh.Encoder("gqa", PROMPT, 4, 1)
        self.spectrum = build("abmil(activation=relu, hidden=16)", WIDTH)
        self.gate, self.residual = ConditionGate(WIDTH), ScaledResidual(WIDTH)
        self.heads = nn.ModuleList([Alignment() for _ in range(heads)])
        self.mix = build(f"t3time(count={heads})", WIDTH) if mix == "t3time" else None
        self.out = nn.Linear(WIDTH, HORIZON)

    def align(self, z: Tensor, text: Tensor) -> list[Tensor]:
        """What each head says, `[B, N, C]`."""
        return [head(z.mT, self.text(text).mT).mT for head in self.heads]

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        std, mean = torch.std_mean(x, 1, correction=0, keepdim=True)
        std = (std.square() + 1e-5).sqrt()
        series = ((x - mean) / std).mT  # [B, N, L]
        time = self.time(self.embed(series))
        bins = torch.fft.rfft(series).abs()[..., None].flatten(0, 1)
        frequency = self.spectrum(self.bins(self.lift(bins))).out.view_as(time)
        z = self.gate(time, frequency, HORIZON)
        said = self.align(z, text)
        mixed = sum(said) / len(said) if self.mix is None else self.mix.mix(said)
        return self.out(self.decoder(self.residual(mixed, z))).mT * std + mean


def draw(rows: int, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Series `[B, L, N]` of two sines each, and what follows them `[B, H, N]`; the level is any."""
    t = torch.arange(LENGTH + HORIZON)[:, None]
    period, phase = 6 + 10 * torch.rand(2, rows, 1, VARIABLES), 2 * math.pi * torch.rand(2, rows, 1, VARIABLES)
    level = 5 * torch.randn(rows, 1, VARIABLES)
    made = (2 * math.pi * t / period + phase).sin().sum(0) + level
    made = made + noise * torch.randn_like(made)
    return made[:, :LENGTH], made[:, LENGTH:]


def prompts(rows: int) -> Tensor:
    """Embeddings of a text for each variable, the same in every row."""
    return torch.randn(VARIABLES, PROMPT, generator=torch.Generator().manual_seed(1)).expand(rows, -1, -1)


def train(mix: str, seed: int, steps: int) -> Forecaster:
    torch.manual_seed(seed)
    model = Forecaster(mix=mix)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(steps):
        x, y = draw(32)
        loss = (model(x, prompts(32)) - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


@torch.no_grad()
def errors(model: Forecaster) -> tuple[float, float]:
    """Mean squared error on new series, and that of their mean as the forecast."""
    torch.manual_seed(1000)
    x, y = draw(512)
    found = (model(x, prompts(512)) - y).square().mean()
    return found.item(), (x.mean(1, keepdim=True) - y).square().mean().item()


@torch.no_grad()
def unlike(model: Forecaster) -> float:
    """How far the forecast of 3 x - 7 is from 3 times that of x, less 7."""
    torch.manual_seed(1000)
    x, _ = draw(8)
    return (model(3 * x - 7, prompts(8)) - (3 * model(x, prompts(8)) - 7)).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    print(f"{'heads':>10} {'MSE':>8} {'of the mean':>12} {'3x - 7 off by':>14}")
    for mix in ("t3time", "mean"):
        for seed in range(given.seeds):
            model = train(mix, seed, given.steps)
            found, naive = errors(model)
            print(f"{mix:>10} {found:8.3f} {naive:12.3f} {unlike(model):14.1e}", flush=True)
    print("predicted: below that of the mean; off by rounding and 1e-5 in the variance")


if __name__ == "__main__":
    main()
