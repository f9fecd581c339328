"""Measures of which heads do the same: their maps (`[B, H, T, H]` of a `Look`) and their outputs (of a model)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manyheads.inspect.ablate import Inputs, batches_of, run
from manyheads.inspect.capture import watching
from manyheads.inspect.layers import chosen
from manyheads.inspect.look import Look
from manyheads.inspect.measures.maps import shares
from manyheads.inspect.measures.table import HeadTable


def js_divergence(look: Look) -> Tensor:
    """`[B, H, T, H]`: JSD(A^a_t, A^b_t) = H((A^a + A^b) / 2) - (H(A^a) + H(A^b)) / 2 of each two heads of a layer.

    In nats: 0 for heads that look alike, ln 2 for heads that look at different keys. 1 - JSD / ln 2 is a similarity.
    Source: Clark et al. 2019, arXiv 1906.04341.
    """
    rows = []
    for tile in look.weights():
        p = shares(tile.weights)
        own = torch.special.entr(p).sum(-1)
        mixed = [torch.special.entr((p + p[:, head : head + 1]) / 2).sum(-1) for head in range(p.shape[1])]
        rows.append((torch.stack(mixed, -1) - (own[..., None] + own.transpose(1, 2)[:, None]) / 2).clamp_min(0))
    return torch.cat(rows, 2)


def correlation(look: Look) -> Tensor:
    """`[B, H, T, H]`: Pearson's r of two heads' weights over the n_t keys that a query sees; in [-1, 1].

    Undefined where a head's weights are all equal. Source: Agarwal et al. 2024 (CHAI), arXiv 2403.08058.
    """
    rows = []
    for tile in look.weights():
        seen = tile.visible.expand_as(tile.weights)
        w = tile.weights.masked_fill(~seen, 0.0)
        n = seen.sum(-1, keepdim=True).clamp_min(1)
        w = (w - w.sum(-1, keepdim=True) / n).masked_fill(~seen, 0.0).transpose(1, 2)  # [B, t, H, S]
        size = w.norm(dim=-1)
        size = torch.where(size > 1e-6, size, torch.nan)
        rows.append(((w @ w.mT) / size[..., None] / size[..., None, :]).transpose(1, 2))
    return torch.cat(rows, 2)


def cka(model: nn.Module, inputs: Inputs | Sequence[Inputs], layers: int | list[int] | None = None) -> HeadTable:
    """`[H, H]` by layer: linear CKA of what two heads add to the stream, X_a = the centred c_a `[N, D]`.

    ‖X_aᵀ X_b‖² / (‖X_aᵀ X_a‖ ‖X_bᵀ X_b‖), in [0, 1]: 1 for copies, rotated and scaled ones too. With c_a = o_a W_a it
    is computed in the d channels of a head: ‖X_aᵀ X_b‖² = tr(C_ab G_b C_abᵀ G_a), C_ab the centred O_aᵀ O_b,
    G = W Wᵀ. Where the output projection is not one matrix, of o_a itself. Source: Kornblith et al. 2019,
    arXiv 1905.00414.
    """
    some = chosen(model, layers)
    sums: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def see(look: Look) -> None:
        valid = look.axis.validity.expand(len(look.out), look.out.shape[2])
        o = look.out.double().transpose(1, 2)[valid].flatten(1)  # [N, H·d]
        new = (o.T @ o, o.sum(0), valid.sum().double())
        old = sums.get(look.layer)
        sums[look.layer] = new if old is None else tuple(a + b for a, b in zip(old, new, strict=True))  # type: ignore

    with torch.no_grad(), watching(some, see):
        for batch in batches_of(inputs):
            run(model, batch)
    rows = {}
    for layer in (layer for layer in some if layer.number in sums):
        products, total, count = sums[layer.number]
        centred = products - total[:, None] * total / count
        blocks = centred.unflatten(0, (layer.heads, -1)).unflatten(2, (layer.heads, -1)).transpose(1, 2)  # a, b, d, d
        try:
            weight = layer.output_weight().double()
            gram = weight @ weight.mT
        except ValueError:
            gram = torch.eye(blocks.shape[-1], dtype=torch.float64, device=blocks.device).expand(layer.heads, -1, -1)
        square = torch.einsum("abij,bjk,ablk,ali->ab", blocks, gram, blocks, gram).clamp_min(0)
        size = square.diagonal().sqrt()
        rows[layer.number] = (square / size[:, None] / size).cpu()  # not a number for a head that adds nothing
    return HeadTable("cka", rows)


def clusters(similarity: Tensor, threshold: float, count: int = 1) -> list[list[int]]:
    """Heads in groups, from their similarities `[H, H]`: two groups are one while they are this alike in the mean.

    Never fewer than `count` groups; a threshold of -inf makes just as many. Average linkage; ties go to the lowest
    heads. What is not a number is like nothing.
    """
    alike = similarity.double().nan_to_num(-torch.inf)
    groups = [[head] for head in range(len(alike))]
    while len(groups) > count:
        pairs = [(alike[a][:, b].mean().item(), -i, -j) for i, a in enumerate(groups) for j, b in enumerate(groups[:i])]
        best, i, j = max(pairs)
        if best < threshold:
            break
        one, other = groups[-i], groups[-j]
        groups = [each for each in groups if each is not one and each is not other]
        groups = sorted([*groups, sorted(one + other)])
    return groups
