"""Jakiro: a drafter of one layer on the model's own features, whose two experts are added for the next token and
subtracted for the one after it.

    u_t = W_fc [e(x_{t+1}); f_t] + b,  a = u + Attn(u),  y = RMSNorm(a)
    r = W_g y ∈ R^4,  w = softmax(r_0, r_1),  w' = softmax(r_2, r_3)
    L_t = a + w_0 E_0(y) + w_1 E_1(y)              read as f_{t+1}
    R_t = a + s (w'_0 E_0(y) - w'_1 E_1(y)),  s = +1 if r_2 > r_3 else -1     read as f_{t+2}

f `[D]` is what the model's head reads, e its embedding, both frozen; the head W gives the tokens of L and R. E_i are
gated MLPs of inner width D. R is the stronger expert less the weaker; the sign has no gradient. A tree is filled level
by level, each node fed with its token and its parent's L. The last level is read from the R of its grandparents (the
same for every child of a node), so that `depth` levels take `depth - 1` passes; without `contrast` it takes one more.

Training, f shifted by one for L and by two for R, noise of 0.2 · 512 / T · (U - 0.5) on what is read:

    Lv(L, f_{t+1}) + ½ Lv(R, f_{t+2}) + 0.1 (CE(W L, softmax W f_{t+1}) + ½ CE(W R, softmax W f_{t+2}))

with Lv the smooth L1 distance, a mean over channels.

Choices: attention reads the newest `window` tokens, whose rows are computed anew for each draft, in place of a cache
that would have to be taken back; a tree keeps its shape from step to step, as in EAGLE's first version, where released
code grows one anew; the last level takes R of each node's own grandparent, which released code mixes up.

Source: Huang et al. 2025, arXiv 2502.06282.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from manyheads.core.cache import Cache
from manyheads.core.check import check_whole
from manyheads.core.linear import Linear, quicken
from manyheads.decode.drafter import Seen
from manyheads.decode.learned import LearnedDrafter, attention_like
from manyheads.decode.tree import Tree

NOISE = 0.2 * 512
CONTRAST, WORDS = 0.5, 0.1
"""Weights of what concerns R, and of tokens beside features."""


class Expert(nn.Module):
    """down (SiLU(gate y) ∘ up y), all of width D."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (Linear(dim, dim, bias=False) for _ in range(3))

    def forward(self, y: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(y)) * self.up(y))


class Jakiro(LearnedDrafter):
    """See above.

    Args:
        model: whose embedding and head are shared.
        heads: levels of a tree at most. width: choices of a node, at most.
        attention: the spec of its attention. window: tokens that are read. contrast: the last level comes from R.
        tokens: see `LearnedDrafter`.
    """

    kind: ClassVar[str] = "jakiro"

    def __init__(
        self, model: PreTrainedModel, heads: int = 5, width: int = 10, attention: str = "gqa", window: int = 32,
        contrast: bool = True, tokens: Tensor | None = None,
    ) -> None:  # fmt: skip
        check_whole(heads=heads, window=window)
        super().__init__(model, width, tokens)
        dim = self.dim
        self.attention_spec, self.reads, self.contrast, self._depth = attention, window, contrast, heads
        self._embed = (cast(Callable[[Tensor], Tensor], model.get_input_embeddings()),)  # in a tuple: no submodule
        self.fc = Linear(2 * dim, dim)
        self.attention = attention_like(model, attention)
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.experts = nn.ModuleList(Expert(dim) for _ in range(2))
        self.router = Linear(dim, 4, bias=False)
        quicken(self)
        self.to(model.device, model.dtype)
        self.guess(heads)

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def options(self) -> dict[str, Any]:
        return {
            "heads": self.depth, "width": self.width, "attention": self.attention_spec, "window": self.reads,
            "contrast": self.contrast,
        }  # fmt: skip

    def forward(
        self, tokens: Tensor, features: Tensor, position: Tensor, mask: Tensor, cache: Cache | None = None,
        newest: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """L and R `[B, T, D]` of tokens x_{t+1} `[B, T]` and features f_t `[B, T, D]`, or of the `newest` of them.

        position: `[1, T]`. mask: bool `[B or 1, 1, T, S]`, what each sees of what the cache holds and of these.
        """
        u = self.fc(torch.cat([self._embed[0](tokens).to(features.dtype), features], -1))
        a = u + self.attention(u, positions=position, mask=mask, cache=cache)
        a = a if newest is None else a[:, -newest:]
        y = self.norm(a)
        first, second = (expert(y) for expert in self.experts)
        left, right = self.router(y).unflatten(-1, (2, 2)).softmax(-1).unbind(-2)
        sign = torch.where(right[..., :1] > right[..., 1:], 1.0, -1.0).to(a.dtype)
        mixed = a + left[..., :1] * first + left[..., 1:] * second
        return mixed, a + sign * (right[..., :1] * first - right[..., 1:] * second)

    @torch.no_grad()
    def draft(self, seen: Seen, tree: Tree) -> Tensor:
        """The likeliest tokens of each node, given those that lead to it."""
        return self._fill(seen, tree, lambda logits, choices: self.words.said(logits.topk(tree.width, -1).indices))

    def _fill(self, seen: Seen, tree: Tree, choose: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Tokens `[B, N - 1]`, level by level. choose: `[B, n, width]` of logits `[B, n, W]` at a depth (from 1)."""
        ids = torch.tensor([([0] * self.reads + row)[-self.reads :] for row in seen.ids], device=seen.trail.device)
        batch, t = ids.shape
        valid, position = seen.known[:, None, None], torch.arange(t, device=ids.device)[None]
        order = torch.ones(t, t, dtype=torch.bool, device=ids.device).tril()
        cache, size = Cache(), len(tree)
        left, right = self(ids, seen.trail, position, valid & order, cache, newest=1)
        tokens = ids.new_zeros(batch, size)
        features, later = (left.new_zeros(batch, size, left.shape[-1]) for _ in range(2))
        features[:, :1], later[:, :1] = left, right
        parents, ancestors = torch.tensor(tree.parents, device=ids.device), tree.ancestors.to(ids.device)
        depths = torch.tensor(tree.depths, device=ids.device)
        choices = torch.tensor([path[-1] if path else 0 for path in tree.paths], device=ids.device)
        for depth in range(1, tree.depth + 1):
            level = (depths == depth).nonzero()[:, 0]
            from_right = self.contrast and depth > 1 and depth == self.depth
            above = parents[level]
            source, nodes = (later, parents[above]) if from_right else (features, above)
            unlike, place = nodes.unique(return_inverse=True)
            said = choose(self.words(source[:, unlike]), depth)
            tokens[:, level] = said[:, place, choices[level]]
            if depth == tree.depth or (self.contrast and depth == self.depth - 1):
                continue  # nothing is asked of these nodes' features
            own = ancestors[level, 1 : int(level[-1]) + 1].expand(batch, 1, -1, -1)
            mask = torch.cat([valid.expand(-1, -1, len(level), -1), own], -1)
            where = torch.full((1, len(level)), t + depth - 1, device=ids.device)
            features[:, level], later[:, level] = self(tokens[:, level], features[:, above], where, mask, cache)
        return tokens[:, 1:]

    def losses(self, hidden: Tensor, tokens: Tensor) -> Iterator[Tensor]:
        t = tokens.shape[1]
        noise = (torch.rand_like(hidden) - 0.5) * (NOISE / t)
        age = torch.arange(t, device=hidden.device)
        age = age[:, None] - age[None]
        mask = ((age >= 0) & (age < self.reads))[None, None]
        left, right = self(tokens, hidden + noise, torch.arange(t, device=hidden.device)[None], mask)
        total = hidden.new_zeros(())
        for made, ahead, weight in ((left, 1, 1.0), (right, 2, CONTRAST if self.contrast else 0.0)):
            if weight and t > ahead:
                made, wanted = made[:, :-ahead], hidden[:, ahead:]
                soft = self.words(wanted).float().softmax(-1)
                words = F.cross_entropy(self.words(made).float().flatten(0, 1), soft.flatten(0, 1))
                total = total + weight * (F.smooth_l1_loss(made, wanted) + WORDS * words)
        yield total

    @torch.no_grad()
    def measure(self, hidden: Tensor, tokens: Tensor) -> None:
        """Along the texts themselves: at each depth, fed with its own features and the tokens that really came."""
        tree, logits = Tree.chain(self.depth), dict[int, Tensor]()
        ends = range(0, tokens.shape[1] - self.depth, max(1, self.depth))
        hits = []
        for end in ends:
            first = max(0, end + 1 - self.reads)
            trail = F.pad(hidden[:, first : end + 1], (0, 0, self.reads - (end + 1 - first), 0))
            known = (torch.arange(self.reads, device=hidden.device) >= self.reads - (end + 1 - first))[None]
            came = tokens[:, end + 1 : end + 1 + self.depth]

            def choose(of: Tensor, depth: int, came: Tensor = came) -> Tensor:
                logits[depth] = of[:, 0]
                return came[:, depth - 1, None, None]

            seen = Seen(tokens[:, : end + 1].tolist(), hidden[:, end], trail, known.expand(len(tokens), -1))
            self._fill(seen, tree, choose)
            hits.append(torch.stack([self.hits(logits[depth], came[:, depth - 1]) for depth in sorted(logits)]))
        self.odds = torch.stack(hits).mean(0)
