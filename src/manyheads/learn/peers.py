"""Learning from peers without their data: each client has a chain of heads, each taught by the most confident peer.

Head 0 learns the client's own labels. On a public batch x without labels, heads k = 1..m of client i learn

    j*(x) = argmax_j max_c p_j^(k-1)(x)[c],   L_k = mean_x CE(stop p_{j*}^(k-1)(x), p_i^(k)(x))

so what a client knows travels one head further with each peer that it passes. The embeddings of peers are met by
L_emb = mean_j mean_x ‖n(φ_i(x)) - stop n(φ_j(x))‖², n of unit length. The whole is L_ce + 1·L_emb + 3·Σ_k L_k.

Choices: confidence is the highest probability, targets are of the level below and have no temperature (ASSUMED, as are
the weights); `shift=0` takes them of the same level, `own=True` lets the client's head stand among the candidates.

Source: Zhmoginov et al. 2023, arXiv 2211.15774.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def most_confident(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """The surest of candidates `[J, B, classes]` by row: `[B, classes]`, and which, `[B]`; of equals the first."""
    if probabilities.dim() != 3 or 0 in probabilities.shape[::2]:
        raise ValueError(f"candidates are [J, B, classes], at least one of one class, not {list(probabilities.shape)}")
    which = probabilities.amax(-1).argmax(0)
    return probabilities[which, torch.arange(len(which), device=which.device)], which


def from_peers(logits: Tensor, peers: Tensor, *, shift: int = 1, own: bool = False) -> Tensor:
    """Σ_k L_k on a public batch.

    Args:
        logits: of the client's heads, the main one first, `[m + 1, B, classes]`.
        peers: of each peer's, `[J, m + 1, B, classes]`; no gradient enters them.
        shift: head k is taught by heads k - shift, 1 or 0; head 0 by none. own: the client is a candidate too.
    """
    if logits.dim() != 3 or peers.dim() != 4 or peers.shape[1:] != logits.shape or 0 in peers.shape:
        raise ValueError(
            f"a client's heads are [m + 1, B, classes] and its peers' [J, m + 1, B, classes], none of them 0, not "
            f"{list(logits.shape)} and {list(peers.shape)}"
        )
    if shift not in (0, 1):
        raise ValueError(f"shift={shift}; a head is taught by heads one level below (1) or of its own (0)")
    candidates = (torch.cat([logits[None], peers]) if own else peers).detach().softmax(-1)
    total = logits.new_zeros(())
    for level in range(1, len(logits)):
        target, _ = most_confident(candidates[:, level - shift])
        total = total + F.cross_entropy(logits[level], target)
    return total


def near_peers(features: Tensor, peers: Tensor | Sequence[Tensor]) -> Tensor:
    """L_emb of features `[B, D]`, mapped to the peers' width where widths differ, and of each peer's `[B, D]`."""
    said, total = F.normalize(features, dim=-1), features.new_zeros(())
    for theirs in peers:
        if theirs.shape != features.shape:
            raise ValueError(
                f"features are {list(features.shape)}, a peer's {list(theirs.shape)}: map them to one width"
            )
        total = total + (said - F.normalize(theirs.detach(), dim=-1)).square().sum(-1).mean()
    return total / max(len(peers), 1)
