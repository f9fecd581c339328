"""A latent for what stands still: content keys and values as up · down, of the rank that loses least.

Which loss that is, is a choice of the metric on both sides of [K ; V] = rows · x:

- `fitted`: tokens weigh by what reads them, channels by the score and value errors that the output feels;
- `activations`: all alike, so that Σ |rows x - up down x|² over tokens is smallest. The latent spans the principal
  components of the layer's keys and values, which is the same as the SVD of rows · C^{1/2} with C = E x xᵀ;
- `weights`: the SVD of the weights, their biases as one more column.

Joint latents hold both; split ones are two low ranks side by side, whose up matrix is block-diagonal.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from manyheads.attention.project.gqa import GQAProject
from manyheads.convert.methods import Latent
from manyheads.convert.moves.common import linear_rows
from manyheads.convert.stats import AttentionStats, power
from manyheads.core.part import OptionError
from manyheads.stack.seam import SeamAttention


def low_rank(
    attention: SeamAttention, stats: AttentionStats, content: Tensor, ranks: tuple[int, ...], how: Latent
) -> tuple[Tensor, Tensor]:
    """down `[rank, D + 1]` with latents of unit size, and up `[G·(d + v), rank]`, from content keys `[G, d, D + 1]`.

    ranks: of the joint latent, or of the key's and the value's.
    """
    rows, outer, moment = _problem(attention, stats, content, how)
    parts = [slice(None)] if how.latents == "joint" else _halves(attention)
    if len(ranks) != len(parts):
        raise OptionError(f"latents={how.latents} take {len(parts)} ranks, not {len(ranks)}")
    downs, ups = [], []
    for part, rank in zip(parts, ranks, strict=True):
        seen = outer[part, part] @ rows[part]
        basis = torch.linalg.eigh(seen @ moment @ seen.T)[1].flip(-1)[:, :rank]
        downs.append(basis.T @ seen)
        ups.append(torch.linalg.solve(outer[part, part], basis))
    down, up = torch.cat(downs), ups[0] if len(ups) == 1 else torch.block_diag(*ups)
    size = torch.einsum("rd,de,re->r", down, stats.rows, down).clamp_min(1e-12).sqrt()
    return down / size[:, None], up * size


def spectra(attention: SeamAttention, stats: AttentionStats, content: Tensor, how: Latent) -> list[Tensor]:
    """What each direction of the joint latent, or of the key's and the value's, is worth; largest first."""
    rows, outer, moment = _problem(attention, stats, content, how)
    found = []
    for part in [slice(None)] if how.latents == "joint" else _halves(attention):
        seen = outer[part, part] @ rows[part]
        found.append(torch.linalg.eigvalsh(seen @ moment @ seen.T).flip(-1).clamp_min(0))
    return found


def _halves(attention: SeamAttention) -> list[slice]:
    keys = attention.layout.kv * attention.layout.qk_width
    return [slice(0, keys), slice(keys, None)]


def _problem(
    attention: SeamAttention, stats: AttentionStats, content: Tensor, how: Latent
) -> tuple[Tensor, Tensor, Tensor]:
    """[K ; V] as rows, and the metrics on its channels and on its inputs."""
    rows = torch.cat([content.flatten(0, 1), linear_rows(cast(GQAProject, attention.project).v_proj)])
    if how.factor == "fitted":
        return rows, _felt(attention, stats), stats.rows
    moment = stats.plain if how.factor == "activations" else torch.eye(rows.shape[1]).to(rows)
    outer = rows.new_ones(len(rows))
    if how.balance:
        size = torch.einsum("rd,de,re->r", rows, moment, rows).clamp_min(0).sqrt()
        keys, values = (size[half].mean() for half in _halves(attention))
        outer[_halves(attention)[0]] = how.balance * values / keys if keys * values > 0 else 1.0
    return rows, outer.diag(), moment


def _felt(attention: SeamAttention, stats: AttentionStats) -> Tensor:
    """The root of the metric of score and value errors, block by block of a key head's and a value head's channels."""
    layout, project = attention.layout, cast(GQAProject, attention.project)
    each, g, d, v = layout.q // layout.kv, layout.kv, layout.qk_width, layout.v_width
    query = (stats.query.double() * layout.scale**2).view(g, each, d, d).sum(1)
    o_proj = torch.einsum(
        "fe,ehd->fhd", stats.metric.double(), project.o_proj.weight.double().view(layout.dim, layout.q, v)
    )
    value = torch.einsum("fhd,fhe,h->hde", o_proj, o_proj, stats.value.double()).view(g, each, v, v).sum(1)
    return torch.block_diag(*(power(block, 0.5) for block in (*query, *value)))


def allocate(spectra: list[Tensor], total: int, least: list[int], most: list[int]) -> list[int]:
    """Ranks that sum to `total`: from `least` on, one after the other to where it removes the largest share.

    The share of layer l's next direction is σ²_{ρ+1} / Σ_{i>ρ} σ²_i of what its rank ρ leaves; it does not depend on
    the layer's size. Of equal shares the smaller rank goes first, and a layer with nothing left comes last.
    """
    if not sum(least) <= total <= sum(most):
        raise OptionError(f"{total} ranks do not fit {len(most)} layers of {sum(least)} to {sum(most)} in all")
    shares = []
    for values, bound in zip(spectra, most, strict=True):
        values = values.double()
        left = values.flip(0).cumsum(0).flip(0)
        share = torch.where(left > 1e-12 * left[:1].clamp_min(1e-300), values / left.clamp_min(1e-300), 0.0)
        shares.append(share.tolist()[:bound] + [0.0] * (bound - len(values)))
    ranks = list(least)
    for _ in range(total - sum(least)):
        free = [layer for layer, rank in enumerate(ranks) if rank < most[layer]]
        ranks[max(free, key=lambda layer: (round(shares[layer][ranks[layer]], 12), -ranks[layer]))] += 1
    return ranks
