"""Changes of a checkpoint's weights that leave its function alone: to draw them at random, and to undo them.

Between the two factors of a product stands a map that nobody sees. In each group of a key head and its query heads:

- queries A q, keys A⁻ᵀ k: any A where keys do not rotate; a scaled rotation of each pair of channels where they do;
- values B v, columns of the output projection W_O B⁻¹: any B, as long as nothing acts on head outputs between them;
- of a latent without a norm, and of content keys that never rotate: any map.

`lock` draws them (MergeLock: two siblings of which one is locked no longer average to a model that works), `canonical`
chooses the same ones for all models with one function, and `unlock` finds them from a parent that both came from. It is
a symmetry and not a protection: whoever has the parent undoes it. What it is good for is to test conversions with, and
to take out before weights are averaged, pooled over heads, stacked or matched; `canonical` keeps the order of heads.

Choices: maps by head (one over the whole width would mix heads, which the softmax tells apart), well conditioned; keys
that are normalised stay, because what a norm lets through depends on its gains.

Source: MergeLock 2025, arXiv 2509.01548; undoing it by a parent: arXiv 2606.30360.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manyheads.attention import Attention
from manyheads.attention.latent import LatentProject
from manyheads.attention.position.rope import Rope
from manyheads.attention.project.gqa import GQAProject
from manyheads.convert.adopt import adopt
from manyheads.convert.moves.common import linear_rows, set_rows
from manyheads.convert.stats import Pairs
from manyheads.core.part import OptionError
from manyheads.stack.pretrained import ManyheadsForCausalLM

FREE = {"gqa", "mla", "rope", "alibi", "window", "softmax", "qk-norm"}
"""Parts that let values and head outputs pass as they are."""


class Maps(NamedTuple):
    """Of each key head: A on its queries, `[G, d, d]` (None: keys stay as they are), and B on its values."""

    keys: Tensor | None
    values: Tensor


@torch.no_grad()
def lock(model: PreTrainedModel, seed: int = 0, *, condition: float = 3.0) -> ManyheadsForCausalLM:
    """Draw new weights with the same function, in place. condition: each map's largest stretch and least, 1/condition.

    Raises:
        OptionError: a layer whose parts are not known to let the maps pass; nothing is changed.
    """
    if condition < 1:
        raise OptionError(f"condition={condition:g} is below 1, the stretch of a rotation")
    ours = checked(model)
    generator = torch.Generator().manual_seed(seed)
    for layer in ours.attentions:
        if isinstance(layer.project, LatentProject):
            _lock_latent(layer, layer.project, condition, generator)
            continue
        groups, v = layer.layout.kv, layer.layout.v_width
        values = torch.stack([bounded(v, condition, generator) for _ in range(groups)])
        apply(layer, Maps(_key_maps(layer, condition, generator), values))
    return ours


@torch.no_grad()
def canonical(model: PreTrainedModel) -> ManyheadsForCausalLM:
    """Weights that all models with this function, and this order of heads, have in common; in place.

    Values and outputs: the singular vectors of W_O W_V, sizes shared evenly. Keys: each pair as large as its queries,
    and the sum of a pair's complex weights is real and positive; where nothing rotates, as values.
    """
    ours = checked(model)
    for layer in ours.attentions:
        if isinstance(layer.project, LatentProject):
            raise OptionError(f"layer {layer.site.layer} is {layer.spec}; a canonical form is known of gqa")
        apply(layer, canonical_maps(layer))
    return ours


@torch.no_grad()
def unlock(model: PreTrainedModel, parent: PreTrainedModel) -> ManyheadsForCausalLM:
    """Undo the maps between a model and a parent that it was trained from, in place, as least squares find them.

    W̃ = A (W + ε) gives A up to an error of the order of |ε| / σ_min(W).
    """
    ours, theirs = checked(model), checked(parent)
    if [str(layer.spec) for layer in ours.attentions] != [str(layer.spec) for layer in theirs.attentions]:
        raise OptionError("the parent is another model: its layers have other specs")
    for layer, anchor in zip(ours.attentions, theirs.attentions, strict=True):
        if isinstance(layer.project, LatentProject):
            raise OptionError(f"layer {layer.site.layer} is {layer.spec}; maps are found of gqa")
        (_, key, value, _), (_, old_key, old_value, _) = heads_of(layer), heads_of(anchor)
        keys = None
        if not _normed(layer):
            if layer.layout.rotary is None:
                keys = mapping(old_key, key).transpose(1, 2)  # keys carry A⁻ᵀ, so this on queries undoes A
            else:
                pairs = Pairs.of(layer)
                z, w = pairs.join(key), pairs.join(old_key)
                keys = _pair_maps(
                    layer, (z * w.conj()).sum(-1) / (w * w.conj()).sum(-1).real.clamp_min(1e-100), conj=True
                )
        apply(layer, Maps(keys, torch.linalg.inv(mapping(old_value, value))))
    return ours


def mapping(old: Tensor, new: Tensor) -> Tensor:
    """A `[G, d, d]` with new ≈ A old, rows `[G, d, D]`, by least squares."""
    return torch.linalg.lstsq(old.transpose(1, 2), new.transpose(1, 2)).solution.transpose(1, 2)


def checked(model: PreTrainedModel) -> ManyheadsForCausalLM:
    """The model as ours, once it is known that each layer lets the maps pass."""
    ours = adopt(model)
    for index, layer in enumerate(ours.attentions):
        for part in layer.spec.parts:
            if part.name not in FREE:
                raise OptionError(f"layer {index}: {part.name} may see what the maps change; known: {sorted(FREE)}")
        if layer.site.kv_source is not None:
            raise OptionError(f"layer {index} reads the rows of another layer, whose maps are not its own")
    return ours


def heads_of(layer: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q `[G, H/G, d, D + 1]`, k `[G, d, D + 1]`, v `[G, v, D + 1]` and o `[G, H/G, D, v]` of a `gqa` layer, float64."""
    project, layout = cast(GQAProject, layer.project), layer.layout
    g, d, v = layout.kv, layout.qk_width, layout.v_width
    o = project.o_proj.weight.detach().double().view(layout.dim, g, -1, v).permute(1, 2, 0, 3)
    q = linear_rows(project.q_proj).view(g, -1, d, layout.dim + 1)
    return q, linear_rows(project.k_proj).view(g, d, -1), linear_rows(project.v_proj).view(g, v, -1), o


@torch.no_grad()
def apply(layer: Attention, maps: Maps) -> None:
    """Queries A q, keys A⁻ᵀ k, values B v, outputs W_O B⁻¹, in place."""
    project = cast(GQAProject, layer.project)
    q, k, v, o = heads_of(layer)
    if maps.keys is not None:
        set_rows(project.q_proj, (maps.keys[:, None] @ q).flatten(0, 2))
        set_rows(project.k_proj, torch.linalg.solve(maps.keys.transpose(1, 2), k).flatten(0, 1))
    set_rows(project.v_proj, (maps.values @ v).flatten(0, 1))
    o = torch.linalg.solve(maps.values[:, None].transpose(-1, -2), o.transpose(-1, -2)).transpose(-1, -2)
    project.o_proj.weight.copy_(o.permute(2, 0, 1, 3).flatten(1))


def bounded(width: int, condition: float, generator: torch.Generator) -> Tensor:
    """A random map Q₁ diag(s) Q₂ with s in [1/κ, κ]."""
    first, second = (
        torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0] for _ in range(2)
    )
    return first * condition ** (2 * torch.rand(width, generator=generator, dtype=torch.float64) - 1) @ second


def _normed(layer: Attention) -> bool:
    return any(part.name == "qk-norm" for part in layer.spec.parts)


def _key_maps(layer: Attention, condition: float, generator: torch.Generator) -> Tensor | None:
    groups, width = layer.layout.kv, layer.layout.qk_width
    if _normed(layer):
        return None
    if layer.layout.rotary is None:
        return torch.stack([bounded(width, condition, generator) for _ in range(groups)])
    shape = groups, len(Pairs.of(layer).re)
    return _pair_maps(layer, _numbers(shape, condition, generator))


def _numbers(shape: tuple[int, ...], condition: float, generator: torch.Generator) -> Tensor:
    """Complex numbers of any phase, their size in [1/κ, κ]."""
    size, phase = (torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return torch.polar(condition ** (2 * size - 1), 6.283185307179586 * phase)


def _pair_maps(layer: Attention, numbers: Tensor, conj: bool = False) -> Tensor:
    """Multiplication of each pair by a complex number `[G, P]`, as matrices `[G, d, d]`."""
    pairs, numbers = Pairs.of(layer), numbers.conj() if conj else numbers
    maps = torch.zeros(len(numbers), layer.layout.qk_width, layer.layout.qk_width, dtype=torch.float64)
    for row, column, entry in (
        (pairs.re, pairs.re, numbers.real), (pairs.re, pairs.im, -numbers.imag),
        (pairs.im, pairs.re, numbers.imag), (pairs.im, pairs.im, numbers.real),
    ):  # fmt: skip
        maps[:, row, column] = entry
    return maps


def canonical_maps(layer: Attention) -> Maps:
    """The maps that give a `gqa` layer the weights that all with its function have in common (`canonical`)."""
    q, k, v, o = heads_of(layer)
    values = _even(v, o.permute(0, 3, 1, 2).flatten(2))
    if _normed(layer):
        return Maps(None, values)
    if layer.layout.rotary is None:
        rows = q.transpose(1, 2).flatten(2)  # [G, d, H/G·(D + 1)]
        return Maps(torch.linalg.inv(_even(k, rows)).transpose(1, 2), values)
    pairs = Pairs.of(layer)
    z, w = pairs.join(k), pairs.join(q)
    size = (w.abs().pow(2).sum((1, 3)) / z.abs().pow(2).sum(-1).clamp_min(1e-100)).pow(0.25).clamp_min(1e-100)
    phase = z.sum(-1).angle()
    # Keys are to be multiplied by size · e^{-iφ}, which is A⁻ᵀ of A = e^{-iφ} / size.
    return Maps(_pair_maps(layer, torch.polar(1 / size, -phase)), values)


def _even(rows: Tensor, others: Tensor) -> Tensor:
    """B `[G, v, v]` that makes B rows and B⁻ᵀ others the singular vectors of othersᵀ rows, times the roots of sizes."""
    (_, r1), (_, r2) = (torch.linalg.qr(each.transpose(1, 2)) for each in (rows, others))
    _, s, vh = torch.linalg.svd(r2 @ r1.transpose(1, 2))
    # othersᵀ rows = Q₂ (U S Vᴴ) Q₁ᵀ; rows = R₁ᵀ Q₁ᵀ, so that B R₁ᵀ = S^½ Vᴴ.
    wanted = s.clamp_min(1e-100).sqrt()[..., None] * vh
    b = torch.linalg.solve(r1, wanted.transpose(1, 2)).transpose(1, 2)
    made = b @ rows
    largest = made.gather(2, made.abs().argmax(2, keepdim=True)).sign()
    return largest * b


def _lock_latent(layer: Attention, project: LatentProject, condition: float, generator: torch.Generator) -> None:
    """Maps on the latent (without a norm), on content keys, on the rotary key, on values."""
    heads, rank, nope, rope, v = project.heads, project.rank, project.nope, project.rope, project.v
    down, up = linear_rows(project.kv_a_proj), project.kv_b_proj.weight.detach().double().view(heads, nope + v, rank)
    queries = project.q_b_proj if project.q_rank else project.q_proj
    q = linear_rows(queries).view(heads, nope + rope, -1)
    latent = torch.eye(rank, dtype=torch.float64)
    if project.kv_a_norm is None:
        latent = bounded(rank, condition, generator)
    up = up @ torch.linalg.inv(latent)
    values = torch.stack([bounded(v, condition, generator) for _ in range(heads)])
    up_values = values @ up[:, nope:]
    o = project.o_proj.weight.detach().double().view(layer.dim, heads, v)
    o = torch.einsum("ehv,hvw->ehw", o, torch.linalg.inv(values))
    up_keys, content = up[:, :nope], q[:, :nope]
    if nope:
        keys = torch.stack([bounded(nope, condition, generator) for _ in range(heads)])
        content, up_keys = keys @ content, torch.linalg.solve(keys.transpose(1, 2), up_keys)
    turning, key = q[:, nope:], down[rank:]
    part = next((part for part in layer.spec.parts if isinstance(part, Rope)), None)
    if rope and part is not None and part.pairing == "half" and part.fraction == 1.0:
        a = _numbers((rope // 2,), condition, generator)
        maps = torch.cat([torch.cat([a.real.diag(), -a.imag.diag()], 1), torch.cat([a.imag.diag(), a.real.diag()], 1)])
        turning, key = maps @ turning, torch.linalg.solve(maps.T, key)
    set_rows(queries, torch.cat([content, turning], 1).flatten(0, 1))
    set_rows(project.kv_a_proj, torch.cat([latent @ down[:rank], key]))
    project.kv_b_proj.weight.copy_(torch.cat([up_keys, up_values], 1).flatten(0, 1))
    project.o_proj.weight.copy_(o.flatten(1))
