"""Exact Tucker forms of other projections, truncated ones of any, and the weights of the part `tucker` from them.

score, output = from_heads(q, k, v, o, heads)
layer.project.load_state_dict(state_of(score, output))
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """W_h = Σ heads[h, a] core[a, b, c] left[:, b] ⊗ right[:, c]: a tensor `[H, D, D']` in Tucker form.

    core `[r1, r2, r3]`, heads `[H, r1]`, left `[D, r2]`, right `[D', r3]`.
    """

    core: Tensor
    heads: Tensor
    left: Tensor
    right: Tensor

    @property
    def ranks(self) -> tuple[int, int, int]:
        r1, r2, r3 = self.core.shape
        return r1, r2, r3

    def full(self) -> Tensor:
        """W `[H, D, D']`."""
        return torch.einsum("abc,ha,ib,jc->hij", self.core, self.heads, self.left, self.right)


def from_heads(q: Tensor, k: Tensor, v: Tensor, o: Tensor, heads: int) -> tuple[Factors, Factors]:
    """Score and output factors of grouped-query attention: ranks (H, H·d, G·d) for both (theorems B.2 and B.3).

    Weights as `nn.Linear` holds them: q `[H·d, D]`, k and v `[G·d, D]`, o `[D, H·d]`. G = H is multi-head attention.
    """

    def form(left: Tensor, right: Tensor) -> Factors:
        own, width = torch.eye(len(left)).to(left), len(left) // heads
        groups = torch.eye(len(right)).to(right).unflatten(0, (-1, width))
        return _through_latents(
            left, own, right, groups.repeat_interleave(heads // len(groups), 0).flatten(0, 1), heads
        )

    return form(q, k), form(o.T, v)


def from_latent(
    q: Tensor, down: Tensor, k_up: Tensor, v_up: Tensor, o: Tensor, heads: int, q_up: Tensor | None = None
) -> tuple[Factors, Factors]:
    """Score and output factors of latent attention without rotary channels or norms (theorem B.4).

    Weights as `nn.Linear` holds them: down `[r, D]`, k_up `[H·n, r]`, v_up `[H·v, r]`, o `[D, H·v]`; q `[H·n, D]`, or
    `[r_q, D]` with q_up `[H·n, r_q]`. Ranks (H, r_q, r) and (H, D, r); keys and values share their latent.
    """
    score = _through_latents(q, torch.eye(len(q)).to(q) if q_up is None else q_up, down, k_up, heads)
    return score, _through_latents(torch.eye(len(o)).to(o), o.T, down, v_up, heads)


def _through_latents(left: Tensor, left_up: Tensor, right: Tensor, right_up: Tensor, heads: int) -> Factors:
    """W_h = leftᵀ left_up_hᵀ right_up_h right, from left `[r2, D]`, left_up `[H·n, r2]` and the same on the right."""
    up, right_up = (each.unflatten(0, (heads, -1)) for each in (left_up, right_up))
    return Factors(up.transpose(1, 2) @ right_up, torch.eye(heads).to(left), left.T, right.T)


def state_of(score: Factors, output: Factors, shared: bool = False) -> dict[str, Tensor]:
    """The weights of the part `tucker` with ranks `score.ranks` and value_ranks `output.ranks`, by parameter name."""
    state = {"q_core": score.core, "q_heads": score.heads, "q_proj.weight": score.left.T}
    state |= {"o_core": output.core, "o_heads": output.heads, "o_proj.weight": output.left}
    state |= {"k_proj.weight": score.right.T, "v_proj.weight": output.right.T}
    if shared:
        if not torch.equal(score.right, output.right):
            raise ValueError("tucker(shared=true): these factors read keys and values from different latents")
        del state["v_proj.weight"]
    return state


def hosvd(full: Tensor, ranks: tuple[int, int, int]) -> Factors:
    """The truncated higher-order singular value decomposition of W `[H, D, D']`.

    Lossless at full ranks; else the squared error is at most the sum over modes of the discarded squared singular
    values of that mode's matricisation.
    """
    factors = []
    for mode, rank in enumerate(ranks):
        u = torch.linalg.svd(full.movedim(mode, 0).flatten(1), full_matrices=False).U
        factors.append(u[:, :rank])
    heads, left, right = factors
    return Factors(torch.einsum("hij,ha,ib,jc->abc", full, heads, left, right), heads, left, right)
