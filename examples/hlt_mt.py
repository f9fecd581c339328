"""A small pool of adapters at the top of a decoder, shared by languages through a gate that hardens.

Every "language" is a table from source words to target words; two families have one table each but for a few words, and
only the adapters are told the language. x' = x + W₂ relu(W₁ LN(x)) is an adapter A_a, s_l = softmax(W_g e_l) the gate
of language l:

    first stage    soft Σ_a s_l[a] A_a(x) or, every other time, hard A_{argmax s_l}(x); then hard alone, by a fixed map
                   loss: cross-entropy (smoothed 0.1) + Σ_{l,l'} s_l·s_l' / H² while soft, which is least where adapters
                   are used evenly
    second stage   languages with little text join, through one universal adapter

Of n adapters for H > n languages those of one family should meet in one; a token uses a single adapter.

Source: HLT-MT (IJCAI 2022).

    python examples/hlt_mt.py [--steps 150]
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SOFT, GATE = 0.7, 2e-2
WORDS, DIM, POOL, HIGH, LOW = 24, 32, 2, 4, 2  # languages 0, 1 and 2, 3 are families; 4, 5 have little text


class Adapter(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.norm, self.down, self.up = nn.LayerNorm(dim), nn.Linear(dim, width), nn.Linear(width, dim)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(self.norm(x)).relu())


class Pool(nn.Module):
    """x `[B, D]` of languages `[B]` through one adapter each, or softly through all."""

    def __init__(self, dim: int, languages: int, adapters: int, width: int = 64) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(Adapter(dim, width) for _ in range(adapters))
        self.universal = Adapter(dim, width)
        self.languages, self.gate = nn.Embedding(languages, dim), nn.Linear(dim, adapters)

    def shares(self, languages: Tensor) -> Tensor:
        """s `[…, adapters]`."""
        return self.gate(self.languages(languages)).softmax(-1)

    def mapped(self, languages: Tensor) -> Tensor:
        """Which adapter each language has."""
        return self.shares(languages).argmax(-1)

    def forward(self, x: Tensor, languages: Tensor, *, soft: bool = False, universal: Tensor | None = None) -> Tensor:
        if soft:
            every = torch.stack([adapter(x) for adapter in self.adapters], -1)
            return (every * self.shares(languages)[:, None]).sum(-1)
        out, which = torch.zeros_like(x), self.mapped(languages)
        if universal is not None:
            which = which.masked_fill(universal, len(self.adapters))
        for number, adapter in enumerate([*self.adapters, self.universal]):
            mine = which == number
            if bool(mine.any()):
                out[mine] = adapter(x[mine])
        return out


def disparity(shares: Tensor) -> Tensor:
    """Σ_{l,l'} s_l·s_l' = ‖Σ_l s_l‖² of shares `[H, n]`; H²/n at least."""
    return shares.sum(0).square().sum()


class Translator(nn.Module):
    def __init__(self, adapters: int = POOL) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Embedding(WORDS, DIM), nn.Linear(DIM, DIM), nn.GELU())
        self.pool, self.head = Pool(DIM, HIGH + LOW, adapters), nn.Linear(DIM, WORDS)

    def forward(self, words: Tensor, languages: Tensor, *, soft: bool = False) -> Tensor:
        return self.head(self.pool(self.trunk(words), languages, soft=soft, universal=languages >= HIGH))


def world(seed: int) -> Tensor:
    """Tables `[languages, WORDS]`: two families with one word in twelve apart; the last two are of the first family."""
    generator = torch.Generator().manual_seed(seed)
    families = [torch.randperm(WORDS, generator=generator) for _ in range(2)]
    tables = torch.stack([families[f].clone() for f in (0, 0, 1, 1, 0, 0)])
    for table in tables:
        apart = torch.randperm(WORDS, generator=generator)[:2]
        table[apart] = table[apart.flip(0)]
    return tables


def train(tables: Tensor, steps: int, adapters: int = POOL, weight: float = 1.0, seed: int = 0) -> Translator:
    torch.manual_seed(seed)
    model, high = Translator(adapters), torch.arange(HIGH)
    gate = [*model.pool.gate.parameters(), *model.pool.languages.parameters()]
    own = {id(p) for p in gate}
    rest = [p for p in model.parameters() if id(p) not in own]
    optimiser = torch.optim.Adam([{"params": rest}, {"params": gate, "lr": GATE}], 5e-3)
    for step in range(2 * steps):
        second = step >= steps
        language = int(torch.randint(HIGH + LOW if second else HIGH, ()))
        words = torch.randint(WORDS, (64,))
        soft = not second and step < SOFT * steps and float(torch.rand(())) < 0.5
        logits = model(words, torch.full((64,), language), soft=soft)
        loss = F.cross_entropy(logits, tables[language, words], label_smoothing=0.1)
        if soft:
            loss = loss + weight * disparity(model.pool.shares(high)) / HIGH**2
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


@torch.no_grad()
def accuracies(model: Translator, tables: Tensor) -> list[float]:
    words = torch.arange(WORDS)
    return [
        float((model(words, torch.full_like(words, language)).argmax(-1) == table).double().mean())
        for language, table in enumerate(tables)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="of each stage")
    given = parser.parse_args()
    for seed in range(3):
        tables = world(seed)
        for adapters in (1, POOL):
            model = train(tables, given.steps, adapters, seed=seed)
            shown = " ".join(f"{100 * each:3.0f}" for each in accuracies(model, tables))
            mapped = model.pool.mapped(torch.arange(HIGH)).tolist()
            print(f"seed {seed}, {adapters} adapters and a universal one: languages {mapped}, accuracies {shown}")


if __name__ == "__main__":
    main()
