"""A bidirectional model of our own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from manyheads.core.check import check_whole
from manyheads.stack.stack import Stack


class Encoder(nn.Module):
    """Embedding (if there is a vocabulary), bidirectional `Stack`, norm.

    >>> model = Encoder("gqa(kv_heads=2) + rope", dim=64, heads=8, layers=4, vocab=1000)
    >>> features = model(torch.randint(1000, (1, 5)))

    Positions enter only where a spec says how, such as `rope`.

    Args:
        vocab: None for a model of feature vectors (so it comes by name; a `Decoder`'s comes first). std: of the first
            weights. Others as in `Stack`.
    """

    def __init__(
        self, specs: Any, dim: int, heads: Any, layers: int | None = None, *, vocab: int | None = None,
        eps: float = 1e-6, std: float = 0.02, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if vocab is not None:
            check_whole(vocab=vocab, dim=dim)
        self.embedding = None if vocab is None else nn.Embedding(vocab, dim)
        self.stack = Stack(specs, dim, heads, layers, causal=False, eps=eps, std=std, **options)
        self.norm = nn.RMSNorm(dim, eps)
        if self.embedding is not None:
            nn.init.normal_(self.embedding.weight, std=std)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, **arguments: Any) -> Tensor:
        """Features `[B, T, D]`.

        Args:
            x: token ids `[B, T]`, or features `[B, T, D]`.
            mask: bool `[B, T]`, False on padding (features there mean nothing).
        """
        if not x.is_floating_point():
            if self.embedding is None:
                raise ValueError("this encoder has no vocabulary: it takes features, not token ids")
            x = self.embedding(x)
        return self.norm(self.stack(x, mask=mask, **arguments))
