"""Many heads on the bytes of a text, each of which may be read from the beginning of one pooled vector.

A small trunk of convolutions and attention reads bytes, padding masked before each convolution; mean, maximum and
deviation over the real ones are the features. Heads say what kind of text it is (coarse), which one of the kind (fine;
no label where the kind has none), and which risks it shows (yes or no). Each head has a linear layer for every slice of
the features, so the first slice alone is a smaller model. Nothing is said below a confidence, and the fine head is
heard only where the coarse one says a kind that has it.

The texts are made up, so figures say nothing of real ones. Printed: accuracy of each head by slice, and what padding
changes.

    python examples/content_types.py [--steps 150]

The form is that of pico-type (2026), whose own convolutions do read padding.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyheads as mh

SLICES, LENGTH, WIDTH = (8, 24, 72), 40, 24
KINDS = ("prose", "code", "numbers")
WORDS = {"code": ("def ", "fn ", "int "), "prose": ("the ", "der ", "le ")}
HEADS = {
    "coarse": mh.multi.Matryoshka(3, SLICES, weight=3.0),
    "fine": mh.multi.Matryoshka(6, SLICES, weight=1.5),
    "risk": mh.multi.Matryoshka(2, SLICES, sigmoid=True),
}


class Bytes(nn.Module):
    """`[B, L]` bytes and their mask `[B, L]` to `[B, 3 · WIDTH]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.convs = nn.ModuleList([nn.Conv1d(WIDTH, WIDTH, k, padding=k // 2, bias=False) for k in (3, 5)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in self.convs])
        self.attention = mh.Encoder("gqa + rope", dim=WIDTH, heads=4, layers=1)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(ids)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.gelu(norm(conv(x.masked_fill(~mask[..., None], 0).mT).mT))
        return statistics(self.attention(x, mask=mask), mask)


def statistics(x: Tensor, mask: Tensor) -> Tensor:
    """Mean, maximum and deviation over what is no padding, `[B, 3 D]`."""
    kept = mask[..., None]
    mean, most = mh.multi.pooled(x, "mean", mask), mh.multi.pooled(x, "max", mask)
    off = (x - mean[:, None]).masked_fill(~kept, 0).square().sum(1) / kept.sum(1).clamp(min=1)
    return torch.cat([mean, most, (off + 1e-8).sqrt() - 1e-4], -1)  # the root has no slope at 0


def texts(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Bytes, mask and labels."""
    draw = lambda top, *shape: torch.randint(top, shape, generator=generator)
    ids, mask = torch.zeros(count, LENGTH, dtype=torch.long), torch.zeros(count, LENGTH, dtype=torch.bool)
    targets = {"coarse": draw(3, count), "fine": torch.full((count,), -100), "risk": draw(2, count, 2)}
    for row in range(count):
        kind = KINDS[int(targets["coarse"][row])]
        if kind == "numbers":
            text = "".join(str(int(each)) for each in draw(10, 16))
        else:
            which = int(draw(3, 1))
            targets["fine"][row] = which + 3 * (kind == "code")
            text = "".join(WORDS[kind][which] + chr(97 + int(each)) + " " for each in draw(26, 4))
        risks = "".join(sign for sign, on in zip("$@", targets["risk"][row].tolist(), strict=True) if on)
        said = list((risks + text).encode()[: 12 + int(draw(LENGTH - 12, 1))])
        ids[row, : len(said)], mask[row, : len(said)] = torch.tensor(said), True
    return ids, mask, targets


def verdict(outputs: dict[str, Tensor], least: float = 0.4) -> list[tuple[str, int | None, list[int]]]:
    """Of each row the kind (`undetected` where no kind is sure enough), which of it, and its risks."""
    sure, kind = outputs["coarse"][:, -1].softmax(-1).max(-1)
    found = []
    for row in range(len(kind)):
        name = KINDS[int(kind[row])] if sure[row] >= least else "undetected"
        fine = None
        if name in WORDS:
            start = 3 * (name == "code")
            fine = int(outputs["fine"][row, -1, start : start + 3].argmax())
        found.append((name, fine, (outputs["risk"][row, -1] > 0).nonzero().flatten().tolist()))
    return found


def train(steps: int, seed: int = 0) -> mh.multi.MultiHead:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = mh.multi.MultiHead(Bytes(), HEADS, width=3 * WIDTH)
    ids, mask, targets = texts(512, generator)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(steps):
        rows = torch.randint(len(ids), (64,), generator=generator)
        optimiser.zero_grad()
        model(ids[rows], mask=mask[rows], targets={k: v[rows] for k, v in targets.items()}).loss.backward()
        optimiser.step()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    model = train(parser.parse_args().steps)
    ids, mask, targets = texts(256, torch.Generator().manual_seed(99))
    with torch.no_grad():
        outputs = model(ids, mask=mask).outputs
        longer = model(F.pad(ids, (0, 9), value=7), mask=F.pad(mask, (0, 9))).outputs
    for name, figures in model.metrics(model.measure(outputs, targets)).items():
        print(f"{name:>7}: " + ", ".join(f"{key} {value:.2f}" for key, value in figures.items()))
    off = max(float((outputs[name] - longer[name]).abs().max()) for name in outputs)
    print(f"nine more bytes of padding change an output by {off:.0e} at most; first: {verdict(outputs)[0]}")


if __name__ == "__main__":
    main()
