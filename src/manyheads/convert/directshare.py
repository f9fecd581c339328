"""Heads of a pretrained model that use the weights of similar heads in earlier layers.

1. Match. The signature of a head is its weights in one row, [W_q ; W_k] by default. Its match is the head of an earlier
   layer with the largest cosine; the n = ⌊share · L · G⌋ heads with the largest are replaced (`match_heads`). No data.
2. Share. A replaced head takes W_q, W_k, W_v and its columns of W_O from the root of its match (`direct_share`), which
   are then stored once. Before that, training may draw pairs together: ½ loss + ½ `regulariser` (PostShare).

With fewer key heads than query heads, what is shared is a group: a key head, its value head and their query heads.

Choices: a match that is itself replaced stands for the head it is replaced by, on to the root (chain=root); chain=own
lets such a match keep its own weights, as the authors' code ends up doing. Their code stores a copy for every replaced
head; here heads with one root have one tensor.

Source: Cao et al. 2024, arXiv 2402.11819.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from manyheads.attention import Attention
from manyheads.attention.grouped import Biases
from manyheads.attention.project.directshare import DirectShare, DirectShareProject
from manyheads.attention.project.gqa import GQA, GQAProject
from manyheads.attention.project.masa import MASA
from manyheads.convert.adopt import adopt
from manyheads.core.linear import quicken
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.bank import Bank
from manyheads.stack.pretrained import ManyheadsForCausalLM
from manyheads.stack.seam import SeamAttention, put_attention
from manyheads.stack.sources import sites

Of = Literal["q", "k", "v", "qk", "qkv"]


@dataclass(frozen=True)
class Sharing:
    """Which head group takes whose weights; groups are numbered through the model, l·G + g.

    heads: G. matches: of each replaced group, its match. scores: its cosine, best first.
    """

    layers: int
    heads: int
    matches: Mapping[int, int]
    scores: Mapping[int, float]

    def root(self, group: int) -> int:
        """The group whose weights a group has in the end; matches lie in earlier layers, so this ends."""
        while group in self.matches:
            group = self.matches[group]
        return group

    def roots(self, layer: int) -> tuple[int, ...]:
        return tuple(self.root(layer * self.heads + group) for group in range(self.heads))


def match_heads(
    model: PreTrainedModel, share: float = 0.3, *, of: Of = "qk", chain: Literal["root", "own"] = "root"
) -> Sharing:
    """Find what to replace: the share of all head groups that are most like one of an earlier layer.

    Raises:
        OptionError: a share that is none, or layers that are not `gqa` of one shape.
    """
    if not 0 <= share <= 1:
        raise OptionError(f"share={share:g} of the heads; from 0 to 1")
    layers = checked(adopt(model))
    signatures = torch.stack([signature(layer, of) for layer in layers])  # [L, G, n]
    count, heads = signatures.shape[:2]
    best = {}
    for layer in range(1, count):
        cosines = signatures[layer] @ signatures[:layer].flatten(0, 1).T
        score = cosines.amax(1)
        first = torch.where(cosines == score[:, None], torch.arange(layer * heads), layer * heads).amin(1)
        for group in range(heads):
            best[layer * heads + group] = score[group].clamp(-1, 1).item(), int(first[group])
    order = sorted(best, key=lambda group: (-best[group][0], group))[: int(share * count * heads)]
    if chain == "own":
        sources = {best[group][1] for group in order}
        order = [group for group in order if group not in sources]
    return Sharing(count, heads, {group: best[group][1] for group in order}, {group: best[group][0] for group in order})


def signature(layer: Attention, of: Of = "qk") -> Tensor:
    """Unit rows `[G, n]`, one for each head group: its query and key weights (or others), side by side."""
    rows = weights_of(layer)
    return F.normalize(torch.cat([rows[kind].double().flatten(1) for kind in of], 1), dim=1)


def weights_of(layer: Attention) -> dict[str, Tensor]:
    """q, k, v and o of each head group, `[G, rows, D]` (o transposed), of a `gqa` layer."""
    project, groups = cast(GQAProject, layer.project), layer.layout.kv
    found = {kind: getattr(project, f"{kind}_proj").weight.unflatten(0, (groups, -1)) for kind in "qkv"}
    return found | {"o": project.o_proj.weight.T.unflatten(0, (groups, -1))}


def regulariser(model: ManyheadsForCausalLM, sharing: Sharing, eps: float = 1e-12) -> Tensor:
    """The mean over pairs of |ΔW_q| + |ΔW_k| + |ΔW_v|, norms that are not squared; eps keeps their gradient finite.

    PostShare trains on half of it and half of the loss, with pairs as `match_heads` found them before.
    """
    rows = [weights_of(layer) for layer in checked(model)]

    def weight(kind: str, group: int) -> Tensor:
        return rows[group // sharing.heads][kind][group % sharing.heads]

    total = next(model.parameters()).new_zeros(())
    for group, match in sharing.matches.items():
        for kind in "qkv":
            total = total + ((weight(kind, group) - weight(kind, match)).pow(2).sum() + eps**2).sqrt() - eps
    return total / max(1, len(sharing.matches))


@torch.no_grad()
def direct_share(model: PreTrainedModel, sharing: Sharing, *, output: bool = True) -> ManyheadsForCausalLM:
    """Replace heads, in place: every layer becomes `directshare`, its weights in a bank that the model keeps.

    Args:
        output: share the columns of W_O too, as the authors' code does; their text names queries, keys and values.
    """
    ours = adopt(model)
    layers = checked(ours)
    if (len(layers), layers[0].layout.kv) != (sharing.layers, sharing.heads):
        raise OptionError(
            f"{sharing.layers} layers of {sharing.heads} head groups were matched, the model has {len(layers)} of "
            f"{layers[0].layout.kv}"
        )
    bank, made = Bank(), []
    rows = [weights_of(layer) for layer in layers]
    for old, site in zip(layers, sites(ours.config.kv_source, bank=bank), strict=True):
        roots = sharing.roots(site.layer)
        gqa = next(part for part in old.spec.parts if isinstance(part, GQA))
        own = tuple(range(site.layer * sharing.heads, (site.layer + 1) * sharing.heads))
        part = DirectShare(
            kv_heads=None if sharing.heads == old.layout.q else sharing.heads, head_dim=gqa.head_dim,
            bias=cast(Biases, gqa.bias), scale=gqa.scale, roots=None if roots == own else roots, output=output,
        )  # fmt: skip
        spec = Spec(tuple(part if isinstance(other, GQA) else other for other in old.spec.parts))
        with torch.device("meta"):
            new = SeamAttention(spec, old.dim, old.heads, site=site, dropout=old.dropout)
        project = cast(DirectShareProject, new.project)
        for group, root in zip(project.groups, roots, strict=True):
            if group.q_proj.weight.is_meta:
                _fill(group, layers[root // sharing.heads], rows[root // sharing.heads], root % sharing.heads)
        state = {name: tensor for name, tensor in old.state_dict(keep_vars=True).items() if "project." not in name}
        if not output:
            state |= {f"project.o_proj.{name}": t for name, t in old.project.o_proj.named_parameters()}
        elif old.project.o_proj.bias is not None:
            state["project.o_bias"] = old.project.o_proj.bias
        new.load_state_dict(state, assign=True)
        made.append(new.train(old.training))
    put_attention(ours.model, ours.config.attention_path, made)
    ours.model.bank = bank  # type: ignore[assignment]
    ours.config.specs = [str(layer.spec) for layer in made]
    quicken(ours)
    return ours


def _fill(group: nn.Module, layer: Attention, rows: Mapping[str, Tensor], at: int) -> None:
    """Give a group of the bank copies of a layer's weights."""
    for name, linear in group.named_children():
        kind = name[0]
        weight = rows[kind][at]
        linear.weight = nn.Parameter((weight.T if kind == "o" else weight).clone(), requires_grad=weight.requires_grad)
        bias = None if linear.bias is None else getattr(layer.project, name).bias
        if bias is not None:
            linear.bias = nn.Parameter(bias.unflatten(0, (layer.layout.kv, -1))[at].clone())


def plain_gqa(layer: SeamAttention, part: DirectShare | MASA) -> SeamAttention:
    """A `gqa` layer at the place of one that shares weights, with as many heads of the same size; weights are new."""
    gqa = GQA(kv_heads=part.kv_heads, head_dim=part.head_dim, bias=part.bias, scale=part.scale)
    spec = Spec(tuple(gqa if other is part else other for other in layer.spec.parts))
    return SeamAttention(spec, layer.dim, layer.heads, site=layer.site, dropout=layer.dropout).eval()


@torch.no_grad()
def as_gqa(layer: SeamAttention) -> SeamAttention:
    """A `directshare` layer as the `gqa` that computes the same, its weights written out; others as they are."""
    part = next((part for part in layer.spec.parts if isinstance(part, DirectShare)), None)
    if part is None:
        return layer
    new = plain_gqa(layer, part)
    new.to(next(cast(DirectShareProject, layer.project).groups[0].parameters()))  # it may have no weights of its own
    shared, made = cast(DirectShareProject, layer.project), cast(GQAProject, new.project)
    state = {name: tensor for name, tensor in layer.state_dict().items() if not name.startswith("project.group")}
    bias = state.pop("project.o_bias", None)
    new.load_state_dict(state, strict=False)
    for kind in "qkv":
        for name, tensor in getattr(made, f"{kind}_proj").named_parameters():
            tensor.copy_(torch.cat([getattr(getattr(group, f"{kind}_proj"), name) for group in shared.groups]))
    if shared.shares_output:
        made.o_proj.weight.copy_(torch.cat([cast(nn.Linear, group.o_proj).weight for group in shared.groups], 1))
        if bias is not None:
            made.o_proj.bias.copy_(bias)
    return new


def checked(model: ManyheadsForCausalLM) -> list[Attention]:
    """The layers, which must be `gqa` of one shape: heads of one size on inputs of one size."""
    layers, first = model.attentions, None
    for index, layer in enumerate(layers):
        gqa = next((part for part in layer.spec.parts if isinstance(part, GQA)), None)
        if gqa is None or layer.site.kv_source is not None or layer.layout.v_width != layer.layout.qk_width:
            raise OptionError(f"layer {index} is {layer.spec}; heads share weights in gqa, with keys of their own")
        if gqa.bias == "qvo":
            raise OptionError(f"layer {index} is {layer.spec}; heads that share have biases on q, k and v alike")
        shape = layer.dim, layer.layout.q, layer.layout.kv, layer.layout.qk_width, gqa.bias
        if shape != (first := first or shape):
            raise OptionError(f"layer {index} is {layer.spec}, layer 0 is {layers[0].spec}; heads of one size share")
    return layers
