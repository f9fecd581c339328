"""The attention weights of a pretrained model as combinations of a few matrices (MASA), without training.

1. Groups. Layers that follow each other share a dictionary; where the model's state turns most from block to block, a
   group ends (`drift`, `cut`).
2. Matrix PCA. Of each type, a group's matrices become the sums of S that lose least in squares (`matrix_pca`).
3. The rest, W_l less that sum, keeps a few ranks in the metric of the layer's inputs (`rest`), most of them for queries
   and outputs where key heads are few.

Choices: the paper's appendix, which has the details of grouping and of ranks, was not seen. A group ends after the
blocks with the largest drifts; its share of atoms is that of the model; ranks of keys and values are those of queries
over the query heads of a key head.

Source: MASA 2025, arXiv 2508.04581.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from manyheads.attention import Attention
from manyheads.attention.grouped import same_biases
from manyheads.attention.project.gqa import GQA, GQAProject
from manyheads.attention.project.masa import MASA, Combined, MASAProject
from manyheads.convert.adopt import adopt
from manyheads.convert.directshare import checked, plain_gqa
from manyheads.convert.stats import power
from manyheads.core.linear import quicken
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.bank import Bank
from manyheads.stack.pretrained import ManyheadsForCausalLM
from manyheads.stack.seam import SeamAttention, put_attention
from manyheads.stack.sources import sites
from manyheads.stack.stack import Stack

Moments = Sequence[tuple[Tensor, Tensor]]
"""Of each layer, second moments `[d, d]` of what its q, k and v read and of what its o reads."""


def matrix_pca(weights: Tensor, atoms: int) -> tuple[Tensor, Tensor]:
    """Atoms `[S, …]` and coefficients `[L, S]` whose sums lose least of matrices `[L, …]`, in squares.

    Atoms are orthonormal as long vectors, D_s = the leading singular vectors, c_ls = ⟨D_s, W_l⟩; the squared error is
    the sum of the σ² left out. Those beyond the rank of the matrices are zero. In float64.
    """
    rows = weights.detach().double().flatten(1)
    if not 1 <= atoms <= len(rows):
        raise OptionError(f"atoms={atoms} for {len(rows)} matrices; 1 to {len(rows)}, which keep all of them")
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    values, vectors = values.flip(0)[:atoms], vectors.flip(1)[:, :atoms]
    there = values > 1e-14 * values[0]
    sigma = values.clamp_min(0).sqrt()
    found = (vectors / torch.where(there, sigma, torch.inf)).T @ rows
    return found.unflatten(1, weights.shape[1:]), vectors * torch.where(there, sigma, 0)


def rest(left: Tensor, moment: Tensor, rank: int, damping: float = 1e-6) -> tuple[Tensor, Tensor]:
    """A `[out, r]` and B `[r, in]` for what is left of a weight `[out, in]`: the least loss E|(left - A B) x|².

    moment: E x xᵀ `[in, in]` of the inputs. With the identity it is the truncated singular value decomposition.
    """
    whitened = left.double() @ power(moment, 0.5, damping)
    u, s, v = torch.linalg.svd(whitened, full_matrices=False)
    return u[:, :rank] * s[:rank], v[:rank] @ power(moment, -0.5, damping)


@torch.no_grad()
def drift(model: PreTrainedModel, ids: Tensor) -> list[float]:
    """KL of the distribution after each block from that after the next, L - 1 numbers.

    A block's state, averaged over tokens, goes through the model's head to a distribution over its vocabulary.

    Args:
        ids: calibration windows, `[N, T]`.
    """
    totals: list[Tensor] = []
    head = cast(nn.Module, model.get_output_embeddings())
    for row in ids.split(4):
        states = model(input_ids=row, output_hidden_states=True, use_cache=False).hidden_states[1:]
        logs = [F.log_softmax(head(state.mean(1)).double(), -1) for state in states]
        found = [F.kl_div(after, before, reduction="sum", log_target=True) for before, after in pairwise(logs)]
        totals = [a + b for a, b in zip(totals, found, strict=True)] if totals else found
    return [total.item() / len(ids) for total in totals]


def cut(drifts: Sequence[float], groups: int) -> list[int]:
    """The first layer of each group, cut where drifts are largest."""
    if not 1 <= groups <= len(drifts) + 1:
        raise OptionError(f"groups={groups} of {len(drifts) + 1} layers; 1 to {len(drifts) + 1}")
    order = sorted(range(len(drifts)), key=lambda at: -drifts[at])
    return [0, *sorted(at + 1 for at in order[: groups - 1])]


@torch.no_grad()
def moments(model: PreTrainedModel, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The second moments that `masa` fits rests in, from calibration windows `[N, T]`."""
    ours, sums, handles = adopt(model), [], []

    def adding(total: Tensor) -> nn.Module | None:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach().flatten(0, -2).double()
            total.add_(x.T @ x / ids.numel())

        return hook  # type: ignore[return-value]

    for layer in checked(ours):
        project = cast(GQAProject, layer.project)
        pair = tuple(torch.zeros(m.in_features, m.in_features).double() for m in (project.q_proj, project.o_proj))
        sums.append(pair)
        for module, total in zip((project.q_proj, project.o_proj), pair, strict=True):
            handles.append(module.register_forward_pre_hook(adding(total)))  # type: ignore[arg-type]
    try:
        for row in ids.split(4):
            ours(input_ids=row, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return sums


@torch.no_grad()
def masa(
    model: PreTrainedModel, share: float = 2 / 3, *, output: bool = False, groups: Sequence[int] = (0,),
    rank: int = 0, inputs: Moments | None = None,
) -> ManyheadsForCausalLM:  # fmt: skip
    """Give the layers of a model, in place, weights from dictionaries that the model keeps once.

    Args:
        share: of a group's matrices, how many are saved: its L_g layers get max(1, round((1 - share) L_g)) atoms of
            each type (the paper's 2/3). 0 changes no output.
        output: combine W_O too, the type that loses most.
        groups: the first layer of each group of layers with one dictionary (see `drift` and `cut`).
        rank: of what queries and outputs keep besides, in each layer; keys and values keep rank · G/H.
        inputs: the metric in which they keep it (`moments`); without it, that of the weights.

    Raises:
        OptionError: a share that is none, groups that are not cuts of the layers, layers that are not `gqa` of one
            shape. Nothing has changed then.
    """
    if not 0 <= share < 1:
        raise OptionError(f"share={share:g} of the matrices; from 0 to less than 1")
    ours = adopt(model)
    layers, starts = checked(ours), [*groups]
    if starts != sorted({*starts, 0}) or starts[-1] >= len(layers):
        raise OptionError(f"groups={starts}: first layers in order, the first being 0, of {len(layers)} layers")
    first, types = layers[0], "qkvo" if output else "qkv"
    ranks = {kind: rank if kind in "qo" else max(1, rank * first.layout.kv // first.layout.q) for kind in types}
    _check_rest(layers, rank, types, inputs)
    bank, made = Bank(), []
    where = sites(ours.config.kv_source, bank=bank)
    for number, (begin, end) in enumerate(zip(starts, [*starts[1:], len(layers)], strict=True)):
        size = max(1, round((1 - share) * (end - begin)))
        found = {kind: matrix_pca(torch.stack([_weight(each, kind) for each in layers[begin:end]]), size)
                 for kind in types}  # fmt: skip
        for at in range(begin, end):
            old = layers[at]
            gqa = next(part for part in old.spec.parts if isinstance(part, GQA))
            part = MASA(
                kv_heads=_key_heads(old), head_dim=gqa.head_dim, bias=same_biases(gqa.bias, "masa"), scale=gqa.scale,
                atoms=size, types=types, coeff="free", group=number, ranks=tuple(ranks.values()) if rank else (),
            )  # fmt: skip
            spec = Spec(tuple(part if isinstance(other, GQA) else other for other in old.spec.parts))
            with torch.device("meta"):
                new = SeamAttention(spec, old.dim, old.heads, site=where[at], dropout=old.dropout)
            names = {f"{kind}_proj" for kind in types}
            state = old.state_dict(keep_vars=True)
            kept = {n: t for n, t in state.items() if n.split(".")[1] not in names or n.endswith("bias")}
            new.load_state_dict(kept, strict=False, assign=True)
            for kind, combined in cast(MASAProject, new.project).combined.items():
                metric = None if inputs is None else inputs[at][kind == "o"]
                _fill(combined, _weight(old, kind), found[kind], at - begin, ranks[kind] if rank else 0, metric)
            made.append(new.train(old.training))
    put_attention(ours.model, ours.config.attention_path, made)
    ours.model.bank = bank  # type: ignore[assignment]
    ours.config.specs = [str(layer.spec) for layer in made]
    quicken(ours)
    return ours


def _check_rest(layers: Sequence[Attention], rank: int, types: str, inputs: Moments | None) -> None:
    first = layers[0]
    each = first.layout.q // first.layout.kv
    most = min(min(_weight(first, kind).shape) * (1 if kind in "qo" else each) for kind in types)
    if not 0 <= rank <= most:
        raise OptionError(f"rank={rank} of what is left of a weight; 0 to {most} here")
    if inputs is not None and len(inputs) != len(layers):
        raise OptionError(f"inputs of {len(inputs)} layers; the model has {len(layers)}")


def _weight(layer: Attention, kind: str) -> Tensor:
    return getattr(layer.project, f"{kind}_proj").weight


def _key_heads(layer: Attention) -> int | None:
    return None if layer.layout.kv == layer.layout.q else layer.layout.kv


def _fill(
    to: Combined, source: Tensor, found: tuple[Tensor, Tensor], at: int, rank: int, metric: Tensor | None
) -> None:
    """Atoms, once, and the layer's coefficients and rest."""
    linear, (atoms, coefficients) = cast(nn.Linear, to.atoms[to.kind]), found

    def parameter(tensor: Tensor) -> nn.Parameter:
        return nn.Parameter(tensor.to(source).contiguous(), requires_grad=source.requires_grad)

    if linear.weight.is_meta:
        linear.weight = parameter(atoms.flatten(0, 1))
    to.coefficients = parameter(coefficients[at])
    if rank:
        left = source.double() - torch.tensordot(coefficients[at], atoms, 1)
        metric = torch.eye(source.shape[1]) if metric is None else metric
        to.rest = nn.ParameterList([parameter(each) for each in rest(left, metric, rank)])


@torch.no_grad()
def freeze(model: nn.Module) -> None:
    """After training: write down the coefficients of all `masa` layers and drop the networks that made them, in place.

    The function stays what it is.

    Args:
        model: a `Stack`, a `Decoder` or a `ManyheadsForCausalLM`.

    Raises:
        OptionError: no layer has such networks.
    """
    stack = next((each for each in model.modules() if isinstance(each, Stack)), None)
    found = [each for each in model.modules() if isinstance(each, Attention)] if stack is None else stack.attentions
    layers = [each for each in found if isinstance(each.project, MASAProject) and each.project.embedded is not None]
    if not layers:
        raise OptionError("no layer makes its coefficients by a network (masa(coeff=mlp) of 2 atoms or more)")
    maps = [each for layer in layers for each in cast(MASAProject, layer.project).combined.values()]
    known = {id(each._parameters): each.mixed.clone() for each in maps}  # turns of a layer have one dictionary
    for each in maps:
        each.coefficients = nn.Parameter(known[id(each._parameters)])
        each._parameters.pop("length", None)
        for name in ("mixer", "embedded"):
            vars(each).pop(name, None)
            each._modules.pop(name, None)
    for layer in layers:
        cast(MASAProject, layer.project).embedded = None
        parts = layer.spec.parts
        free = (_free(part) if isinstance(part, MASA) else part for part in parts)
        layer.spec = Spec(tuple(free))
    for bank in (each for each in model.modules() if isinstance(each, Bank)):
        for name in [name for name in bank if name.startswith("masa ") and name.endswith(" mixer")]:
            del bank[name]
    if isinstance(model, ManyheadsForCausalLM):
        specs = [str(layer.spec) for layer in found]
        layers_once = model.config.num_hidden_layers
        model.config.specs = specs[:layers_once] if len(model.config.specs) == layers_once else specs


def _free(part: MASA) -> MASA:
    return MASA(**{**vars(part), "coeff": "free"})


@torch.no_grad()
def as_gqa(layer: SeamAttention) -> SeamAttention:
    """A `masa` layer as the `gqa` that computes the same, its weights formed; others as they are."""
    part = next((part for part in layer.spec.parts if isinstance(part, MASA)), None)
    if part is None:
        return layer
    new = plain_gqa(layer, part)
    combined = cast(MASAProject, layer.project).combined
    new.to(next(iter(combined.values())).dictionary)
    wanted = new.state_dict()
    state = {name: tensor for name, tensor in layer.state_dict().items() if name in wanted}
    formed = {f"project.{kind}_proj.weight": each.weight for kind, each in combined.items()}
    new.load_state_dict(state | formed)
    return new
