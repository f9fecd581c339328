"""Agglomerative clustering of tokens down to a share of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyheads.aggregate.aggregator import Pooled, counted, register_aggregator
from manyheads.aggregate.merger import Merger, MergerOptions, alike, in_order, keys_of, means, share_of
from manyheads.core.kernel import Call
from manyheads.core.linkage import Linkage, agglomerate


@register_aggregator("atc")
@dataclass(frozen=True)
class ATC(MergerOptions):
    """Tokens are clustered bottom up by 1 - cos of their keys until n clusters are left, each the mean of its tokens.

    X_c = Σ_{t ∈ c} s_t x_t / Σ s_t, S_c = Σ s_t, with sizes s. n = floor(N0 · keep^stage), N0 = Σ s, without protected
    tokens, which are clusters of their own. Clusters are in the order of their first tokens, and the features that are
    clustered pass no gradient.

    Options:
        keep: share of tokens that is left; stage: how many merges in a row this is (a model with several keeps
            floor(N0 · keep), floor(N0 · keep²), …). remove: in place of that, so many tokens go.
        linkage: how far clusters are apart: `average`, `single` or `complete`.
        protect: tokens by number that nothing joins (default: the class token).
        proportional: attention behind it adds ln S to the scores of a key.
    cond: `[B, N, d]`, what is compared, the mean over heads of the keys (default: the tokens themselves).

    The source's code leaves out one row where there are a class and a distillation token; here each is protected. It
    merges between attention and MLP, `merging` behind a block.

    Source: Haurum et al. 2024, arXiv 2409.11923.
    """

    keep: float = 0.5
    linkage: Linkage = "average"
    stage: int = 1
    remove: int = 0
    protect: tuple[int, ...] = (0,)
    proportional: bool = True

    def __post_init__(self) -> None:
        self.ask_share(keep=self.keep)
        self.ask(self.stage >= 1 and self.remove >= 0, f"stage={self.stage}, remove={self.remove}; from 1 and 0 on")
        self.ask_protect(self.protect)

    def build(self, width: int) -> ClusterMerger:
        return ClusterMerger(self, width)

    def reads(self, call: Call) -> Tensor:
        return keys_of(call)

    def again(self, times: int) -> ATC:
        return replace(self, stage=times)

    def clusters(self, tokens: Tensor, originals: Tensor) -> Tensor:
        """How many clusters are left of so many tokens, which stand for so many."""
        left = tokens - self.remove if self.remove else share_of(originals, self.keep**self.stage)
        return torch.minimum(left.clamp_min(1), tokens)

    @classmethod
    def examples(cls) -> tuple[ATC, ...]:
        return cls(keep=0.7, linkage="single", protect=()), cls(linkage="complete", remove=2)


class ClusterMerger(Merger):
    def pool(
        self, x: Tensor, mask: Tensor, size: Tensor | None, *, query: Tensor | None, cond: Tensor | None
    ) -> Pooled:
        options: ATC = self.options
        compared = x if cond is None else cond
        if compared.shape[:2] != x.shape[:2]:
            raise ValueError(f"atc: cond is {list(compared.shape)}; [{', '.join(map(str, x.shape[:2]))}, any]")
        own = self.kept(x.shape[1]).to(x.device)
        free = mask & ~own
        sizes = counted(free, size, torch.float64)
        clusters = options.clusters(free.sum(1), sizes.sum(1).round().long())
        with torch.no_grad():
            compared = torch.where(mask[..., None], compared, 0.0)
            group = agglomerate(1 - alike(compared, compared), clusters, options.linkage, free)
        leader = torch.where(mask & own, torch.arange(x.shape[1], device=x.device), group)
        most = int((clusters + (mask & own).sum(1)).max())
        return means(x, in_order(leader), self.places(x.shape[1], size, most), mask, size)

    def places(self, n: int, size: Tensor | None, most: int) -> int:
        """How many results: what n tokens would leave, so that padding does not change it; with sizes, the most."""
        if size is not None:
            return most
        free = torch.tensor(n - len(self.options.protect))
        return int(self.options.clusters(free, free)) + len(self.options.protect)
