"""Medusa heads: residual blocks on what the language model head reads, head k for the token k places after the next.

    z_k(h) = W (h + SiLU(W_k h + b_k)),  h `[D]`, W_k `[D, D]`, W the model's own head, frozen and shared

W_k and b_k start at zero, so at the start every head says what the model says of the next token. `layers` residual
blocks stand one after another, each with weights of its own. Training minimises Σ_k 0.8^k CE(z_k(h_t), y_{t+1+k}).

Choices: W is shared (a head of its own has |V|·D weights, many times the block's); a tree takes the best `width` of
each head whatever came before, so that its tokens are one table.

Source: Cai et al. 2024, arXiv 2401.10774.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from manyheads.core.check import check_whole
from manyheads.core.linear import Linear
from manyheads.decode.drafter import Seen, fill
from manyheads.decode.learned import LearnedDrafter
from manyheads.decode.tree import Tree

DECAY = 0.8


class MedusaHeads(LearnedDrafter):
    """Heads on a model's hidden state that draft the tokens after the next.

    >>> heads = MedusaHeads(model, heads=3)
    >>> generate(model, ids, heads, max_new_tokens=100)

    Args:
        model: whose head is shared.
        heads: K, tokens drafted at most. layers: residual blocks a head. width: choices of a head in a tree, at most.
        tokens: see `LearnedDrafter`.
    """

    kind: ClassVar[str] = "medusa"

    def __init__(
        self, model: PreTrainedModel, heads: int = 4, layers: int = 1, width: int = 10,
        tokens: Tensor | None = None,
    ) -> None:  # fmt: skip
        check_whole(heads=heads, layers=layers)
        super().__init__(model, width, tokens)
        self.layers, dim = layers, self.dim
        self.heads = nn.ModuleList(nn.ModuleList(Linear(dim, dim) for _ in range(layers)) for _ in range(heads))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.to(model.device, model.dtype)
        self.guess(heads)

    @property
    def depth(self) -> int:
        return len(self.heads)

    @property
    def options(self) -> dict[str, Any]:
        return {"heads": self.depth, "layers": self.layers, "width": self.width}

    def features(self, hidden: Tensor, head: int) -> Tensor:
        """What W reads for one head, of `hidden` `[…, D]`."""
        for block in cast(nn.ModuleList, self.heads[head]):
            hidden = hidden + F.silu(block(hidden))
        return hidden

    def forward(self, hidden: Tensor, head: int) -> Tensor:
        """Logits `[…, W]` of head 0 to K - 1 for the token that far after the next."""
        return self.words(self.features(hidden, head))

    @torch.no_grad()
    def draft(self, seen: Seen, tree: Tree) -> Tensor:
        """The best tokens of each head.

        The hidden state that the root was chosen from is one place before it: head 0 speaks of the token after it.
        """
        hidden = torch.stack([self.features(seen.hidden, head) for head in range(tree.depth)], 1)
        return fill(tree, self.words.said(self.words(hidden).topk(tree.width, -1).indices))

    def losses(self, hidden: Tensor, tokens: Tensor) -> Iterator[Tensor]:
        for head in range(self.depth):
            of, wanted = self._asked(hidden, tokens, head)
            yield DECAY ** (head + 1) * self.cross_entropy(self(of, head), wanted)

    @torch.no_grad()
    def measure(self, hidden: Tensor, tokens: Tensor) -> None:
        for head in range(self.depth):
            of, wanted = self._asked(hidden, tokens, head)
            self.odds[head] = self.hits(self(of, head), wanted)

    def _asked(self, hidden: Tensor, tokens: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """What a head reads, `[N, D]`, and the token that it is asked for: the one `head + 1` after the chosen."""
        wanted = tokens[:, head + 1 :]
        return hidden[:, : wanted.shape[1]].flatten(0, 1), wanted.flatten()
