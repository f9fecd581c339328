"""Merge models of one architecture: a common trunk, and from a chosen layer on each model's own layers, as heads.

Features z = [z_A ; z_B] of both models are matched by their correlation on any text, across models and within them
(`zip_features`), until as many are left as one model has. A cluster is one feature from then on: what makes it is
averaged, by M, and what reads it reads it for every member, by U. Between two such places a weight is Σ_m M_m W_m U_m.

Where, in a layer of RMS norms, gated feed-forward and rotary attention:

- Feed-forward: its hidden channels, matched anew in each layer.
- Attention: key heads of the others are paired with those of the first model by how alike their values and keys are,
  query heads within them by their queries; then the channels of paired values are zipped, and each frequency's pair of
  keys and queries is turned by the one phase that makes it most alike.
- The residual stream: an RMS norm lets only permutations pass, so it is never zipped: it stays (stream=same, for models
  that came from one parent), or the others' channels are permuted to the first model's (stream=matched), which changes
  no model.
- Norm gains, biases of the output and embeddings: the mean.

Because the stream is one, each member is whole again: the trunk, then its own layers, in its family's stock class.

Choices: the paper has no transformers. The rules above are the library's; matching follows the authors' code (ties and
all), but a budget is asked before a merge and not after it.

Source: Stoica et al. 2023, arXiv 2305.03053.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manyheads.attention.project.gqa import GQAProject
from manyheads.convert.adopt import adopt
from manyheads.convert.moves.common import linear_rows, set_rows
from manyheads.convert.stats import Pairs
from manyheads.convert.stream import InMemory, attention_of, layer_name, run
from manyheads.core.part import OptionError
from manyheads.stack.pretrained import ManyheadsConfig, ManyheadsForCausalLM
from manyheads.stack.seam import SeamAttention

Progress = Callable[[str, int, int], object]
KNOWN = ("gqa", "rope", "window", "softmax", "qk-norm")


class MergeError(ValueError):
    """Models that do not merge, and which tensor or layer says so."""


class Zip(NamedTuple):
    """merge M `[C, n·C]`: the mean of each cluster. unmerge U `[n·C, C]`: each cluster to all its members."""

    merge: Tensor
    unmerge: Tensor


@dataclass(frozen=True)
class Matching:
    """alpha: what the likeness to a merged feature counts, against chains; 0 or less: no feature is merged twice.
    beta: of a model's merges, the share that may lie within it; 0: across models only, a permutation."""

    alpha: float = 0.3
    beta: float = 0.125

    def __post_init__(self) -> None:
        if not (self.alpha <= 1 and 0 <= self.beta <= 1):
            raise OptionError(f"alpha={self.alpha:g}, beta={self.beta:g}; alpha is at most 1, beta from 0 to 1")


DEFAULT = Matching()


@dataclass
class Zipped:
    """Merged models. members: each whole, the trunk's modules the very same in all. until: layers of the trunk, None
    where the members are one model."""

    members: list[ManyheadsForCausalLM]
    until: int | None

    @property
    def parameters(self) -> int:
        """Numbers of the trunk and of all heads, each once."""
        return sum(tensor.numel() for tensor in {*(t for member in self.members for t in member.parameters())})

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> list[Tensor]:
        """`[N, T, V]` of every member, the trunk passed once."""
        first = self.members[0]
        if self.until is None:
            return [first(tokens, use_cache=False).logits]
        hidden = first.get_input_embeddings()(tokens)
        for index in range(self.until):
            hidden = run(_layer(first, index), _config(first), hidden, record=False).after
        found = []
        for member in self.members:
            own = hidden
            for index in range(self.until, len(member.config.specs)):
                own = run(_layer(member, index), _config(member), own, record=False).after
            found.append(member.get_output_embeddings()(_inner(member).norm(own)))
        return found


def zip_features(correlation: Tensor, models: int, how: Matching = DEFAULT) -> Zip:
    """Clusters of `n·C` features, C in the end: the most alike two first.

    The likeness of a merged feature to any other is alpha times the lesser of its members'. Each model has its fill at
    ⌊(n - 1)·C/n·beta⌋ merges within it; a merged feature counts for the model of its first member. Where that leaves
    too many features (of three models and more), the rest is merged by the least likeness of members, in any model.
    """
    total = len(correlation)
    count = total // models
    left = correlation.double().clone()
    left.fill_diagonal_(-torch.inf)
    origin = torch.arange(total) // count
    within = [int((total - count) / models * how.beta)] * models

    def close(model: int) -> None:
        own = origin == model
        left[own[:, None] & own] = -torch.inf

    for model in range(models):
        if not within[model]:
            close(model)
    cluster = torch.arange(total)
    best, where = left.max(1)
    for _ in range(total - count):
        i = int(best.argmax())
        j = int(where[i])
        i, j = min(i, j), max(i, j)
        if left[i, j] == -torch.inf:  # nothing may be merged any more
            left = _reopened(correlation.double(), cluster)
            best, where = left.max(1)
            within = [total] * models
            i, j = sorted(divmod(int(left.argmax()), total))
        cluster[cluster == j] = i
        inside = origin[i] == origin[j]
        least = torch.minimum(left[i], left[j])
        likeness = torch.where((least > -torch.inf) & (how.alpha > 0), least * how.alpha, -torch.inf)
        left[i] = left[:, i] = likeness
        left[j] = left[:, j] = -torch.inf
        left[i, i] = -torch.inf
        stale = (where == i) | (where == j) | (likeness > best)
        stale[i] = stale[j] = True
        if inside:
            model = int(origin[i])
            within[model] -= 1
            if not within[model]:
                close(model)
                stale |= origin == model
        best[stale], where[stale] = left[stale].max(1)
    kept = torch.unique(cluster)
    unmerge = (cluster[:, None] == kept).to(correlation.dtype)
    return Zip((unmerge / unmerge.sum(0)).T, unmerge)


def _reopened(correlation: Tensor, cluster: Tensor) -> Tensor:
    """The least correlation between members of two clusters, whatever their models."""
    index = cluster.expand(len(cluster), -1)
    rows = torch.full_like(correlation, torch.inf).scatter_reduce(1, index, correlation, "amin")
    least = torch.full_like(correlation, torch.inf).scatter_reduce(0, index.T, rows, "amin")
    return torch.where(least == torch.inf, -torch.inf, least).fill_diagonal_(-torch.inf)


def correlations(moment: Tensor, mean: Tensor) -> Tensor:
    """Of features with second moment E z zᵀ and mean E z."""
    covariance = moment - mean[:, None] * mean
    size = covariance.diagonal().clamp_min(0).sqrt()
    return covariance / (size[:, None] * size).clamp_min(1e-7)


def zip_models(
    models: Sequence[PreTrainedModel], tokens: Tensor, until: int | None = None, *, how: Matching = DEFAULT,
    stream: Literal["same", "matched"] = "same", progress: Progress = lambda stage, done, total: None,
) -> Zipped:  # fmt: skip
    """Merge models on calibration windows `[N, T]`; the models given are left alone.

    Args:
        until: layers of the trunk; from there on each member keeps its own. 0: nothing is merged. None: everything is,
            the last norm and the output head too, and there is one member.

    Raises:
        MergeError: models that are not of one shape, with the first tensor that differs.
    """
    members = [copy.deepcopy(adopt(model)) for model in models]
    check(members, until)
    count = len(members[0].config.specs)
    trunk = count if until is None else until
    if not trunk:
        return Zipped(members, 0)
    for member in members:
        _untie(member, until)
    if stream == "matched":
        for member in members[1:]:
            permute_stream(member, _stream_order(members[0], member, tokens))
    layers = [InMemory(member) for member in members]
    hidden = [each.embed(tokens) for each in layers]
    merged = []
    for index in range(trunk):
        seen = []
        for n, (each, member) in enumerate(zip(layers, members, strict=True)):
            with _recorded(_layer(member, index)) as record:
                hidden[n] = run(_layer(member, index), each.config, hidden[n], record=False).after
            seen.append({name: torch.cat(parts).double() for name, parts in record.items()})
        merged.append(_merged([_layer(member, index) for member in members], seen, members[0], how))
        progress("merge", index + 1, trunk)
    _share(members, merged, until)
    return Zipped(members[:1] if until is None else members, until)


def check(members: Sequence[ManyheadsForCausalLM], until: int | None) -> None:
    """Raise `MergeError` for models that are not of one architecture, before any work."""
    if len(members) < 2:
        raise MergeError(f"{len(members)} model; a merge takes two or more")
    first = members[0]
    count = len(first.config.specs)
    if until is not None and not 0 <= until <= count:
        raise MergeError(f"until={until}; the model has {count} layers, so 0 to {count}")
    shapes = {name: [*tensor.shape] for name, tensor in first.state_dict().items()}
    for number, member in enumerate(members[1:], 2):
        theirs = {name: [*tensor.shape] for name, tensor in member.state_dict().items()}
        for name in [*shapes, *(theirs.keys() - shapes.keys())]:
            if shapes.get(name) != theirs.get(name):
                mine, other = (f"{each[name]}" if name in each else "nothing" for each in (shapes, theirs))
                raise MergeError(f"model {number} does not fit model 1: {name} is {other} there and {mine} here")
        for layer, (ours, their) in enumerate(zip(first.specs, member.specs, strict=True)):
            if str(ours) != str(their):
                raise MergeError(f"layer {layer} of model {number} is {their}, that of model 1 is {ours}")
    for layer, spec in enumerate(first.specs):
        if other := next((part.name for part in spec.parts if part.name not in KNOWN), None):
            raise MergeError(f"layer {layer}: how {other} is merged is not known; {', '.join(KNOWN)} are")
        children = {name for name, _ in _layer(first, layer).named_children()}
        if children != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
            raise MergeError(f"layer {layer} has {sorted(children)}; attention, a feed-forward and two norms merge")


# --- the stream


def _stream_order(first: ManyheadsForCausalLM, other: ManyheadsForCausalLM, tokens: Tensor) -> Tensor:
    """Which channel of the other's stream is each channel of the first's, by correlation behind every layer."""
    moments = []
    for member in (first, other):
        hidden, config = member.get_input_embeddings()(tokens).detach(), _config(member)
        found = [hidden]
        for index in range(len(config.specs)):
            hidden = run(_layer(member, index), config, hidden, record=False).after
            found.append(hidden)
        rows = torch.stack([each / each.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-12) for each in found])
        moments.append(rows.flatten(0, 2).double())
    return _order(*moments)


def _order(ours: Tensor, theirs: Tensor) -> Tensor:
    """Pairs of features `[N, C]` of two models, those most alike first: their feature for each of ours."""
    both = torch.cat([ours, theirs], 1)
    found = zip_features(correlations(both.T @ both / len(both), both.mean(0)), 2, Matching(0.0, 0.0))
    return found.unmerge[ours.shape[1] :].argmax(0)


@torch.no_grad()
def permute_stream(model: ManyheadsForCausalLM, order: Tensor) -> None:
    """Renumber the channels of the residual stream, in place: channel i becomes what channel order[i] was."""
    inner, head = _inner(model), cast(Any, model.get_output_embeddings())
    columns, rows = [inner.embed_tokens.weight], []
    if head.weight is not inner.embed_tokens.weight:
        columns.append(head.weight)
    vectors = [inner.norm.weight]
    for index in range(len(model.config.specs)):
        layer: Any = _layer(model, index)
        project = cast(GQAProject, attention_of(layer, _config(model)).project)
        columns += [linear.weight for linear in (project.q_proj, project.k_proj, project.v_proj)]
        columns += [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]
        rows += [project.o_proj.weight, layer.mlp.down_proj.weight]
        vectors += [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
        vectors += [linear.bias for linear in (project.o_proj, layer.mlp.down_proj) if linear.bias is not None]
    for tensor in columns:
        tensor.copy_(tensor[:, order])
    for tensor in (*rows, *vectors):
        tensor.copy_(tensor[order])


# --- a layer


@contextmanager
def _recorded(layer: Any) -> Iterator[dict[str, list[Tensor]]]:
    """What the features of a layer are while it runs, `[tokens, C]` by name."""
    record: dict[str, list[Tensor]] = {name: [] for name in ("hidden", "q", "k", "v")}
    project = next(module.project for module in layer.modules() if isinstance(module, SeamAttention))

    def inputs(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        record["hidden"].append(args[0].detach().flatten(0, 1))

    def outputs(name: str) -> Callable[..., None]:
        return lambda module, args, out: record[name].append(out.detach().flatten(0, 1))

    handles = [layer.mlp.down_proj.register_forward_pre_hook(inputs)]
    handles += [getattr(project, f"{name}_proj").register_forward_hook(outputs(name)) for name in "qkv"]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _merged(
    layers: Sequence[Any], seen: Sequence[dict[str, Tensor]], model: ManyheadsForCausalLM, how: Matching
) -> nn.Module:
    """One layer of several, the first one's class."""
    made: Any = copy.deepcopy(layers[0])
    for name, tensor in made.named_parameters():
        if "mlp." not in name:
            tensor.copy_(torch.stack([each.get_parameter(name) for each in layers]).mean(0))
    _merge_ffn([each.mlp for each in layers], [each["hidden"] for each in seen], made.mlp, how)
    attentions = [attention_of(each, _config(model)) for each in layers]
    _merge_attention(attentions, seen, attention_of(made, _config(model)), how)
    return made


def _zip(features: Sequence[Tensor], how: Matching) -> list[tuple[Tensor, Tensor]]:
    """M_m `[C, C]` and U_m `[C, C]` of each model."""
    both = torch.cat([*features], 1)
    found = zip_features(correlations(both.T @ both / len(both), both.mean(0)), len(features), how)
    width = features[0].shape[1]
    return list(zip(found.merge.split(width, 1), found.unmerge.split(width), strict=True))


def _merge_ffn(ffns: Sequence[Any], hidden: Sequence[Tensor], made: Any, how: Matching) -> None:
    maps = _zip(hidden, how)
    for name in ("gate_proj", "up_proj"):
        rows = sum(m @ linear_rows(getattr(ffn, name)) for ffn, (m, _) in zip(ffns, maps, strict=True))
        set_rows(getattr(made, name), cast(Tensor, rows))
    down = [linear_rows(ffn.down_proj) for ffn in ffns]
    weight = sum(d[:, :-1] @ u for d, (_, u) in zip(down, maps, strict=True)) / len(ffns)
    bias = sum(d[:, -1:] for d in down) / len(ffns)
    set_rows(made.down_proj, torch.cat([cast(Tensor, weight), cast(Tensor, bias)], 1))


def _merge_attention(
    layers: Sequence[SeamAttention], seen: Sequence[dict[str, Tensor]], made: SeamAttention, how: Matching
) -> None:
    layout = made.layout
    g, each, d, v = layout.kv, layout.q // layout.kv, layout.qk_width, layout.v_width
    normed = any(part.name == "qk-norm" for part in made.spec.parts)
    rows = []
    for n, (layer, features) in enumerate(zip(layers, seen, strict=True)):
        project = cast(GQAProject, layer.project)
        q = linear_rows(project.q_proj).view(g, each, d, -1)
        k, w = linear_rows(project.k_proj).view(g, d, -1), linear_rows(project.v_proj).view(g, v, -1)
        o = project.o_proj.weight.detach().double().view(layout.dim, g, each, v).permute(1, 2, 0, 3)
        fq = features["q"].view(-1, g, each, d)
        fk, fv = features["k"].view(-1, g, d), features["v"].view(-1, g, v)
        if n:
            first = rows[0]
            order = _paired(_alike(first["fv"], fv) + _alike(first["fk"], fk))
            q, k, w, o, fq, fk, fv = q[order], k[order], w[order], o[order], fq[:, order], fk[:, order], fv[:, order]
            for group in range(g):
                inner = _paired(_alike(first["fq"][:, group], fq[:, group]))
                q[group], o[group], fq[:, group] = q[group, inner], o[group, inner], fq[:, group, inner]
            if not normed:
                pairs = Pairs.of(made)
                mine, theirs = (pairs.join(f.permute(1, 2, 0)) for f in (first["fk"], fk))
                turn = (mine * theirs.conj()).sum(-1)
                turn = torch.where(turn.abs() > 0, turn / turn.abs().clamp_min(1e-300), 1.0)  # [G, P]
                k = pairs.split(pairs.join(k) * turn[..., None])
                q = pairs.split(pairs.join(q) * turn[:, None, :, None])
        rows.append({"q": q, "k": k, "w": w, "o": o, "fq": fq, "fk": fk, "fv": fv})
    project = cast(GQAProject, made.project)
    for name in "qk":
        set_rows(getattr(project, f"{name}_proj"), torch.stack([each[name] for each in rows]).mean(0).flatten(0, -2))
    values, outputs = [], []
    for group in range(g):
        maps = _zip([each["fv"][:, group] for each in rows], how)
        values.append(sum(m @ each["w"][group] for each, (m, _) in zip(rows, maps, strict=True)))
        outputs.append(sum(each["o"][group] @ u for each, (_, u) in zip(rows, maps, strict=True)) / len(rows))
    set_rows(project.v_proj, torch.cat(cast(list[Tensor], values)))
    project.o_proj.weight.copy_(torch.stack(cast(list[Tensor], outputs)).permute(2, 0, 1, 3).flatten(1))


def _alike(ours: Tensor, theirs: Tensor) -> Tensor:
    """Linear CKA of every head `[N, heads, width]` of ours with every one of theirs: blind to rotations of channels."""
    ours, theirs = ours - ours.mean(0), theirs - theirs.mean(0)

    def cross(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("ngd,nhe->ghde", a, b).pow(2).sum((-1, -2))

    sizes = [
        torch.stack([cross(a[:, h : h + 1], a[:, h : h + 1])[0, 0] for h in range(a.shape[1])]) for a in (ours, theirs)
    ]
    return cross(ours, theirs) / (sizes[0][:, None] * sizes[1]).sqrt().clamp_min(1e-300)


def _paired(alike: Tensor) -> list[int]:
    """Their head for each of ours, the most alike first."""
    left, found = alike.clone(), [0] * len(alike)
    for _ in range(len(alike)):
        ours, theirs = divmod(int(left.argmax()), len(alike))
        found[ours] = theirs
        left[ours], left[:, theirs] = -torch.inf, -torch.inf
    return found


# --- the models


def _config(model: ManyheadsForCausalLM) -> ManyheadsConfig:
    return cast(ManyheadsConfig, model.config)


def _inner(model: ManyheadsForCausalLM) -> Any:
    return model.model.get_submodule(model.model.base_model_prefix)


def _layer(model: ManyheadsForCausalLM, index: int) -> nn.Module:
    return model.model.get_submodule(layer_name(_config(model), index))


def _untie(model: ManyheadsForCausalLM, until: int | None) -> None:
    """Where the embeddings are merged and the output head is not, they are two tensors."""
    head = model.get_output_embeddings()
    if until is None or head.weight is not model.get_input_embeddings().weight:
        return
    head.weight = nn.Parameter(cast(Tensor, head.weight).detach().clone())
    for config in (model.config, model.config.base, model.model.config):
        cast(Any, config).tie_word_embeddings = False
    model.all_tied_weights_keys = {}
    model.model.all_tied_weights_keys = {}


@torch.no_grad()
def _share(members: Sequence[ManyheadsForCausalLM], merged: Sequence[nn.Module], until: int | None) -> None:
    """Put the trunk into every member; with until=None, the last norm and the output head too."""
    tables: list[Any] = [member.get_input_embeddings() for member in members]
    tables[0].weight.copy_(torch.stack([table.weight for table in tables]).mean(0))
    if until is None:
        norms = [_inner(member).norm for member in members]
        heads: list[Any] = [member.get_output_embeddings() for member in members]
        norms[0].weight.copy_(torch.stack([norm.weight for norm in norms]).mean(0))
        if heads[0].weight is not tables[0].weight:
            heads[0].weight.copy_(torch.stack([head.weight for head in heads]).mean(0))
    for member in members:
        member.set_input_embeddings(tables[0])
        for index, layer in enumerate(merged):
            _inner(member).layers[index] = layer
