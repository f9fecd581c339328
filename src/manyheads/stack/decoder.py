"""A language model of our own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from manyheads.core.check import check_whole
from manyheads.stack.stack import Stack


class Decoder(nn.Module):
    """Embedding, causal `Stack`, norm, head.

    >>> model = Decoder(1000, "mla(rank=64) + moh(top=6)", dim=64, heads=8, layers=4)
    >>> logits = model(torch.randint(1000, (1, 5)))

    Args:
        tied: the head is the embedding. std: of the first weights. Others as in `Stack`.
    """

    def __init__(
        self, vocab: int, specs: Any, dim: int, heads: Any, layers: int | None = None, *, tied: bool = True,
        eps: float = 1e-6, std: float = 0.02, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        check_whole(vocab=vocab, dim=dim)
        self.embedding = nn.Embedding(vocab, dim)
        self.stack = Stack(specs, dim, heads, layers, causal=True, eps=eps, std=std, **options)
        self.norm = nn.RMSNorm(dim, eps)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        for weight in {self.embedding.weight, self.head.weight}:
            nn.init.normal_(weight, std=std)

    def hidden(self, ids: Tensor | None = None, *, embeds: Tensor | None = None, **arguments: Any) -> Tensor:
        """What the head reads, `[B, T, D]`, from token ids `[B, T]` or their embeddings `[B, T, D]`."""
        if (ids is None) == (embeds is None):
            raise ValueError("give token ids or their embeddings, one of them")
        x = self.embedding(ids) if embeds is None else embeds
        return self.norm(self.stack(x, **arguments))

    def forward(self, ids: Tensor | None = None, **arguments: Any) -> Tensor:
        """Logits `[B, T, vocab]`; arguments as in `Stack.forward`, and `embeds`."""
        return self.head(self.hidden(ids, **arguments))
