"""Environments from heads that compete to explain each sample, and a learner that is to be right in all of them.

E heads predict the same labels; ℓ `[B, E]` are their losses by sample, p = softmax(-ℓ / T) `[B, E]` says which explains
it.

    diversity     Σ_b -w_e(b) log p[b, e(b)] / Σ_b w_e(b),   e(b) = argmax_e p,   w_e = min(max count / count_e, most)
    independence  mean_e KL(P(y | e) ‖ uniform),   P(y | e) ∝ Σ_{b: y_b = y} p[b, e]
    invariance    mean_e (R_e - mean R)²,   R_e = Σ_b p[b, e] ℓ_inv[b] / Σ_b p[b, e]

The heads learn diversity + 3 · independence + γ · invariance, γ growing to 5 by rounds, ℓ_inv being the other model's
losses; that model learns `risk` over the environments that the heads have found, and the two take turns. An environment
without samples counts for nothing. Heads start from a trunk that has learned the labels through head 0 alone.

Source: EDNIL (Huang et al. 2022, NeurIPS); the penalty of `risk` is IRMv1's (arXiv 1907.02893).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.core.check import OptionError

SMALL = 1e-10


def explained(losses: Tensor, temperature: float = 0.2) -> Tensor:
    """p `[B, E]` of losses `[B, E]`."""
    if losses.dim() != 2 or not temperature > 0:
        raise OptionError(f"losses are [samples, heads], not {list(losses.shape)}; temperature={temperature}, above 0")
    return (-losses / temperature).softmax(-1)


def diversity(p: Tensor, most: float = 2.0) -> Tensor:
    """Each sample trusts its best head; `most`: how much more at most a sample of a head with few of them weighs."""
    if not most >= 1:
        raise OptionError(f"most={most}; a weight is 1 at least")
    best = p.detach().argmax(-1)
    counts = best.bincount(minlength=p.shape[1])
    weights = (counts.max() / counts.clamp_min(1)).clamp(max=most)[best].to(p.dtype)
    said = -p.gather(1, best[:, None]).squeeze(1).clamp_min(SMALL).log()
    return (weights * said).sum() / weights.sum()


def independence(p: Tensor, labels: Tensor, classes: int) -> Tensor:
    """0 just where every head explains as much of each class. Not for numbers as labels."""
    mass = F.one_hot(labels, classes).to(p.dtype).T @ p  # [classes, E]
    share = mass / mass.sum(0).clamp_min(SMALL)
    apart = (share * (share.clamp_min(SMALL).log() - torch.tensor(1 / classes, dtype=p.dtype).log())).sum(0)
    return apart.mean()


def invariance(p: Tensor, losses: Tensor) -> Tensor:
    """The variance over heads of the mean loss `[B]` of what they explain; no gradient enters the losses."""
    risks = (p * losses.detach()[:, None]).sum(0) / p.sum(0).clamp_min(SMALL)
    return (risks - risks.mean()).square().mean()


def irm_penalty(logits: Tensor, labels: Tensor) -> Tensor:
    """(d loss(s · logits) / ds at s = 1)² of classes (logits `[n, classes]`) or of yes and no (`[n]`)."""
    scale = torch.ones((), dtype=logits.dtype, device=logits.device, requires_grad=True)
    (slope,) = torch.autograd.grad(_loss(scale * logits, labels).mean(), scale, create_graph=True)
    return slope.square()


def risk(logits: Tensor, labels: Tensor, p: Tensor, penalty: float = 100.0) -> Tensor:
    """[Σ_e c_e (L_e + penalty · irm_penalty_e) / Σ_e c_e] / max(penalty, 1), of environments e(b) = argmax_e p `[B,
    E]`.

    c_e is the mean of p over the members of e; nothing flows into p. penalty: 1 in the authors' first round, 100 after.
    """
    if len(logits) != len(p) or len(labels) != len(p):
        raise ValueError(f"{len(logits)} logits and {len(labels)} labels for {len(p)} samples in environments")
    sure, which = p.detach().max(-1)
    terms, weights = [], []
    for each in which.unique():
        mine = which == each
        loss = _loss(logits[mine], labels[mine]).mean() + penalty * irm_penalty(logits[mine], labels[mine])
        terms.append(loss)
        weights.append(sure[mine].mean())
    weight = torch.stack(weights)
    return (weight * torch.stack(terms)).sum() / weight.sum() / max(penalty, 1.0)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.dim() == 1:
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
    return F.cross_entropy(logits, labels, reduction="none")
