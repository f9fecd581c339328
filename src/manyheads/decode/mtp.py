"""Multi-token prediction: a chain of modules, the k-th of which says the token k places after the next one.

    u^k_j = M_k [RMSNorm(h^{k-1}_{j-1}); RMSNorm(e(x_j))],  h^k = Block_k(u^k),  logits of x_{j+1}: W h^k_j,  k = 1 … K

h^0_{j-1} `[D]` is what the model's head read when it chose x_j, e the model's embedding and W its head, both frozen and
shared; M_k is `[D, 2D]`, a block attention and a gated MLP, each behind its norm. (h^k_j is h^k of token j - k in the
paper: here a row goes by the newest token that it knows.) A node at depth k - 1 of a tree is a row of module k and of
those after it, its parent's row of module k - 1 goes into it, and it attends to its own path. So a tree is filled level
by level, a pass of one module each, and every token is drafted from all that lead to it.

Training minimises 1/K Σ_k CE(W h^k_j, x_{j+1}), each a mean over a text, with gradients through the whole chain.

Choices: the trunk stays as it is, so there is no loss of its own for the paper's λ to weigh; no norm stands between a
block and W, as the paper writes it (released code has one); the block is of our parts, whatever the model's are. A
block attends to the newest `window` tokens, and the rows that the last one needs, `K (window - 1) + 1`, are computed
anew for each draft in place of K caches that would have to be taken back. Left out: heads beside each other that do
not know what was drafted (Gloeckle et al. 2024, arXiv 2404.19737), which are `MedusaHeads` with a block each.

Source: DeepSeek-AI 2024, arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from manyheads.attention import Attention
from manyheads.core.check import check_whole
from manyheads.core.linear import quicken
from manyheads.core.mask import Axis
from manyheads.decode.drafter import Seen
from manyheads.decode.learned import LearnedDrafter, attention_like
from manyheads.decode.tree import Tree
from manyheads.experts.swiglu import SwiGLU
from manyheads.stack.block import Block


class Next(nn.Module):
    """One module of the chain, without the embedding and the head that all share."""

    def __init__(self, attention: Attention, dim: int) -> None:
        super().__init__()
        self.hidden_norm, self.token_norm = (nn.RMSNorm(dim, eps=1e-6) for _ in range(2))
        self.merge = nn.Linear(2 * dim, dim, bias=False)
        self.block = Block(attention, SwiGLU(dim))

    def forward(self, hidden: Tensor, embedded: Tensor, axis: Axis, mask: Tensor) -> Tensor:
        """h^k of h^{k-1} and embeddings, all `[B, T, D]`. mask: bool `[B or 1, 1, T, T]`."""
        u = self.merge(torch.cat([self.hidden_norm(hidden), self.token_norm(embedded)], -1))
        return self.block(u, positions=axis, mask=mask)[0]


class MTP(LearnedDrafter):
    """See above.

    >>> drafter = MTP(model, heads=3)
    >>> generate(model, ids, drafter, max_new_tokens=100)

    Args:
        model: whose embedding and head are shared.
        heads: K, modules, and levels of a tree at most. width: choices of a node, at most.
        attention: the spec of the blocks' attention, with as many heads as the model has. window: tokens that a block
            attends to.
        tokens: see `LearnedDrafter`.
    """

    kind: ClassVar[str] = "mtp"

    def __init__(
        self, model: PreTrainedModel, heads: int = 3, width: int = 10, attention: str = "gqa", window: int = 8,
        tokens: Tensor | None = None,
    ) -> None:  # fmt: skip
        check_whole(heads=heads, window=window)
        super().__init__(model, width, tokens)
        self.attention_spec, self.window, self.reads = attention, window, heads * (window - 1) + 1
        self._embed = (cast(Callable[[Tensor], Tensor], model.get_input_embeddings()),)  # in a tuple: no submodule
        self.chain = nn.ModuleList(Next(attention_like(model, attention), self.dim) for _ in range(heads))
        quicken(self)
        self.to(model.device, model.dtype)
        self.guess(heads)

    @property
    def depth(self) -> int:
        return len(self.chain)

    @property
    def options(self) -> dict[str, Any]:
        return {"heads": self.depth, "width": self.width, "attention": self.attention_spec, "window": self.window}

    def forward(self, tokens: Tensor, hidden: Tensor, module: int, axis: Axis, mask: Tensor) -> Tensor:
        """h `[B, T, D]` of module 0 to K - 1, from tokens `[B, T]` and what the one before it made of those before."""
        return self.chain[module](hidden, self._embed[0](tokens).to(hidden.dtype), axis, mask)

    @torch.no_grad()
    def draft(self, seen: Seen, tree: Tree) -> Tensor:
        """The likeliest tokens of each node, given those that lead to it.

        Rows are the newest tokens, the root last, and then the nodes.
        """
        device, log, new = seen.trail.device, self.reads, len(tree) - 1
        ids = torch.tensor([([0] * log + row)[-log:] for row in seen.ids], device=device)
        tokens, made, known = F.pad(ids, (0, new)), F.pad(seen.trail, (0, 0, 0, new)), F.pad(seen.known, (0, new))
        above = torch.tensor([0, *range(log - 1), *(log - 1 + parent for parent in tree.parents[1:])], device=device)
        times = [*range(log), *(log - 1 + depth for depth in tree.depths[1:])]
        time = torch.tensor(times, device=device)
        sees = torch.ones(log + new, log + new, dtype=torch.bool, device=device).tril()
        sees[log:, log:] = tree.ancestors[1:, 1:].to(device)
        sees &= time[:, None] - time < self.window
        choices = torch.tensor([path[-1] if path else 0 for path in tree.paths], device=device)
        for module in range(tree.depth):
            if module:
                made, known = made[:, above], known[:, above]
            first = log + tree.depth - 1 - (tree.depth - module) * self.window  # what later modules' rows come from
            rows = slice(bisect_left(times, first), bisect_right(times, log - 1 + module))
            axis = Axis(rows.stop - rows.start, given_time=time[None, rows], device=device)
            mask = (sees[rows, rows] & known[:, None, rows])[:, None]
            made, before = torch.zeros_like(made), made
            made[:, rows] = self(tokens[:, rows], before[:, rows], module, axis, mask)
            level = slice(bisect_left(times, log + module), bisect_right(times, log + module))
            parents, place = above[level].unique(return_inverse=True)
            said = self.words.said(self.words(made[:, parents]).topk(tree.width, -1).indices)
            tokens[:, level] = said[:, place, choices[level.start - log + 1 : level.stop - log + 1]]
        return tokens[:, log:]

    def losses(self, hidden: Tensor, tokens: Tensor) -> Iterator[Tensor]:
        each = [self.cross_entropy(self.words(of), wanted) for of, wanted in self._along(hidden, tokens)]
        yield torch.stack(each).mean()

    @torch.no_grad()
    def measure(self, hidden: Tensor, tokens: Tensor) -> None:
        """Along the texts themselves: a module is fed with the tokens that really came."""
        self.odds = torch.stack([self.hits(self.words(of), wanted) for of, wanted in self._along(hidden, tokens)])

    def _along(self, hidden: Tensor, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What each module makes of texts, `[N, D]`, and the tokens that came, `[N]`."""
        for module in range(self.depth):
            own = tokens[:, module:]
            age = torch.arange(own.shape[1], device=hidden.device)
            age = age[:, None] - age
            axis = Axis(own.shape[1], 0, device=hidden.device)
            hidden = self(own, hidden, module, axis, ((age >= 0) & (age < self.window))[None, None])[:, :-1]
            yield hidden.flatten(0, 1), own[:, 1:].flatten()
