"""Layers of a pretrained model that read from other layers: the conversion, and searches for which and from where."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from manyheads.attention import Attention
from manyheads.attention.project.gqa import GQAProject
from manyheads.convert.adopt import adopt
from manyheads.convert.export.native import save
from manyheads.convert.moves.common import linear_rows, set_rows
from manyheads.convert.stream import InMemory, Layers
from manyheads.core.cache import Cache
from manyheads.core.flow import Links
from manyheads.core.linear import quicken
from manyheads.core.part import OptionError, Site
from manyheads.stack.maps import Map, Sources, resolve, sources_of
from manyheads.stack.pretrained import ManyheadsConfig, ManyheadsForCausalLM
from manyheads.stack.seam import SeamAttention, put_attention
from manyheads.stack.sources import Kin, check_layers, sites

Progress = Callable[[int, int], object]
Fold = Literal["owner", "mean", "running"]
BATCH = 512
"""Tokens (in whole windows) that go through the model together: their logits exist at once."""


def share_layers(
    model: PreTrainedModel, kv_source: Map = None, attn_source: Map = None, *, fold: Fold = "owner"
) -> ManyheadsForCausalLM:
    """Let layers read from others, in place: what a reader no longer needs is gone, all else is the very parameters.

    Args:
        model: of a known family, or one of ours whose layers have rows and weights of their own.
        kv_source: whose cached rows a layer reads, a list or a map of `stack.maps` ("cla(2)").
        attn_source: by whose attention weights a layer weighs its own values.
        fold: what an owner's key and value weights become: its own, the mean over the layers that share it (MLKV's
            text), or the pairwise running mean W ← (W + W_i)/2 over them (its code: the last layer counts half).

    Raises:
        ValueError: the map does not fit the model, before anything is changed.
    """
    ours = adopt(model)
    rows, weights = check_map(ours, kv_source, attn_source)
    layers = ours.attentions
    if fold != "owner":
        _check_fold(layers, rows)
        for owner in sorted({source for source in rows if source is not None}):
            _fold(layers, [owner, *(reader for reader, source in enumerate(rows) if source == owner)], fold)
    made = _made(layers, rows, weights)
    put_attention(ours.model, ours.config.attention_path, made)
    ours.config.kv_source, ours.config.attn_source = rows, weights
    return ours


@contextmanager
def sharing(model: ManyheadsForCausalLM, kv_source: Map = None, attn_source: Map = None) -> Iterator[None]:
    """The same for a while: inside the block the model shares, afterwards it is what it was. No weight is copied."""
    rows, weights = check_map(model, kv_source, attn_source)
    layers, config = model.attentions, model.config
    before, own = [layer.site for layer in layers], (config.kv_source, config.attn_source)
    try:
        put_attention(model.model, config.attention_path, _made(layers, rows, weights))
        config.kv_source, config.attn_source = rows, weights
        yield
    finally:
        for layer, site, reader in zip(layers, before, model.attentions, strict=True):
            layer.site = site
            layer.train(reader.training)
        put_attention(model.model, config.attention_path, layers)
        config.kv_source, config.attn_source = own


def check_map(model: ManyheadsForCausalLM, kv_source: Map = None, attn_source: Map = None) -> tuple[Sources, Sources]:
    """The two maps as lists; a ValueError if they do not fit the model."""
    config, count = model.config, len(model.attentions)
    rows, weights = sources_of(kv_source, count), sources_of(attn_source, count)
    for layer in model.attentions:
        if (layer.site.kv_source, layer.site.attn_source) != (None, None):
            raise OptionError(f"layer {layer.site.layer} reads from another layer already; start from the whole model")
    if config.base is None and config.loops > 1:
        raise OptionError(f"{config.loops} loops run with the weights of the first; name the map when they are made")
    check_layers(config.specs, config.hidden_size, config.heads, rows, weights)
    return rows, weights


def _made(layers: Sequence[Attention], rows: Sources, weights: Sources) -> list[nn.Module]:
    made: list[nn.Module] = []
    for old, site in zip(layers, sites(rows, weights), strict=True):
        old.site = old.site._replace(lends=site.lends)
        site = site._replace(shared=old.site.shared)
        made.append(old if (site.kv_source, site.attn_source) == (None, None) else _reader(old, site))
    return made


def reader_of(layer: SeamAttention, owner: int) -> SeamAttention:
    """The layer reading the rows of layer `owner`, with the very parameters that it still needs."""
    return cast(SeamAttention, _reader(layer, layer.site._replace(kv_source=owner)))


def _reader(old: Attention, site: Site) -> Attention:
    """The layer at a site where it reads from another, with the very parameters that it still needs."""
    with torch.device("meta"):
        new = type(old)(old.spec, old.dim, old.heads, site=site, dropout=old.dropout)
    for get in (nn.Module.named_parameters, nn.Module.named_buffers):
        kept = dict(get(old))
        for name, _ in list(get(new)):
            *parents, last = name.split(".")
            owner = new.get_submodule(".".join(parents))
            (owner._parameters if last in owner._parameters else owner._buffers)[last] = kept[name]  # type: ignore[assignment]
    quicken(new)
    new._is_hf_initialized = True  # type: ignore[assignment]
    return new.train(old.training)


def _check_fold(layers: Sequence[Attention], rows: Sources) -> None:
    for reader, owner in enumerate(rows):
        for layer in () if owner is None else (reader, owner):
            if not isinstance(layers[layer].project, GQAProject):
                raise OptionError(f"layer {layer} is {layers[layer].spec}; keys and values are averaged in gqa")


@torch.no_grad()
def _fold(layers: Sequence[Attention], group: Sequence[int], fold: Fold) -> None:
    for name in ("k_proj", "v_proj"):
        linears = [cast(nn.Linear, layers[layer].project.get_submodule(name)) for layer in group]
        every = [linear_rows(linear) for linear in linears]
        rows = torch.stack(every).mean(0)
        if fold == "running":
            rows = every[0]
            for other in every[1:]:
                rows = (rows + other) / 2
        set_rows(linears[0], rows)


# --- searches


@dataclass(frozen=True)
class Found:
    """A map that a search found. shared: the pairs (reader, owner) in the order accepted, each with what the search
    measured once it was: similarity for `kvsharer`, loss in nats for `least_damage`. source: the model's own.
    """

    kv_source: Sources
    shared: tuple[tuple[int, int, float], ...]
    source: float


@torch.no_grad()
def distances(model: ManyheadsForCausalLM, windows: Tensor) -> Tensor:
    """How unlike two layers' caches are, `[L, L]`: mean Euclidean distance of keys and of values, averaged.

    Caches (keys after rotation) are first averaged over the windows `[N, T]`, position by position; then
    dist(i, j) = ½ Σ_{k, v} mean_{g, t} |C̄_i[g, t] - C̄_j[g, t]|.
    """
    count = len(model.attentions)
    sums: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for batch in _batches(windows):
        cache = Cache()
        model(batch.to(model.device), cache=cache, use_cache=True, logits_to_keep=1)
        for layer, sum_ in enumerate(sums):
            for name, growing in cache.site(layer).growing.items():
                rows = growing.rows().float().sum(0)
                sum_[name] = sum_[name] + rows if name in sum_ else rows
    table = torch.zeros(count, count)
    means = [{name: rows / len(windows) for name, rows in each.items()} for each in sums]
    for i in range(count):
        for j in range(i):
            table[i, j] = table[j, i] = apart(means[i], means[j])
    return table


def apart(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Mean Euclidean distance of two caches' rows `[G, T, d]`, averaged over their entries; NaN if these differ."""
    if {name: rows.shape for name, rows in a.items()} != {name: rows.shape for name, rows in b.items()}:
        return math.nan
    return sum((a[name] - b[name]).norm(dim=-1).mean().item() for name in a) / len(a)


@torch.no_grad()
def kvsharer(
    model: ManyheadsForCausalLM,
    windows: Tensor,
    count: int,
    *,
    threshold: float = 0.5,
    order: Literal["dissimilar", "similar"] = "dissimilar",
    progress: Progress = lambda done, total: None,
) -> Found:
    """Which `count` layers may read the cache of an earlier, dissimilar one, without training.

    Pairs (reader above owner) are tried from the most to the least distant (see `distances`); one is accepted if the
    last hidden states on the windows, flattened, keep a mean cosine to the model's own above `threshold`. A pair whose
    owner has become a reader means that one's owner.

    Args:
        windows: calibration text, `[N, T]`; the authors take 30 sentences of 64 tokens, cut to one length.
        order: `similar` tries the nearest first (the authors' comparison, which is worse).

    The search may find fewer than `count`.

    Source: Yang et al. 2024, arXiv 2410.18517.
    """
    kin = _searched(model, count)
    layers = len(model.attentions)
    table = distances(model, windows)
    pairs = [(i, j) for i in range(layers) for j in range(i) if kin.why_no_rows(i, j) is None]
    pairs.sort(key=lambda pair: table[pair].item(), reverse=order == "dissimilar")
    own = _hidden(model, windows)
    found: Sources = [None] * layers
    shared: list[tuple[int, int, float]] = []
    for done, (reader, owner) in enumerate(pairs):
        if len(shared) == count:
            break
        progress(done, len(pairs))
        if found[reader] is not None:
            continue
        trial = resolve([*found[:reader], owner, *found[reader + 1 :]])
        if any(at is not None and kin.why_no_rows(layer, at) is not None for layer, at in enumerate(trial)):
            continue
        with sharing(model, trial):
            alike = F.cosine_similarity(_hidden(model, windows), own, dim=-1).mean().item()
        if alike > threshold:
            found = trial
            shared.append((reader, cast(int, trial[reader]), alike))
    return Found(found, tuple(shared), 1.0)


@torch.no_grad()
def pair_damage(
    model: ManyheadsForCausalLM, windows: Tensor, progress: Progress = lambda done, total: None
) -> tuple[Tensor, float]:
    """The loss in nats that one reader alone adds, `[L, L]` by (reader, owner), NaN where it cannot; and its own."""
    kin, layers = _searched(model, 0), len(model.attentions)
    table, own = torch.full((layers, layers), torch.nan), loss(model, windows)
    pairs = [(i, j) for i in range(layers) for j in range(i) if kin.why_no_rows(i, j) is None]
    for done, (reader, owner) in enumerate(pairs):
        sources: Sources = [owner if layer == reader else None for layer in range(layers)]
        with sharing(model, sources):
            table[reader, owner] = loss(model, windows) - own
        progress(done + 1, len(pairs))
    return table, own


@torch.no_grad()
def least_damage(
    model: ManyheadsForCausalLM,
    windows: Tensor,
    count: int,
    *,
    tries: int = 4,
    table: Tensor | None = None,
    progress: Progress = lambda done, total: None,
) -> Found:
    """Which `count` layers may read an earlier one's cache at the least loss, measured.

    Pairs are ranked by the loss that each alone adds (`pair_damage`; or a table of one's own). Damages do not add up,
    so of the `tries` best pairs that fit what is shared so far, the one with the least loss together with it is
    accepted. Readers read layers that keep their own; a layer that is read keeps its own.
    """
    kin, layers = _searched(model, count), len(model.attentions)
    if table is None:
        table, own = pair_damage(model, windows, progress)
    else:
        own = loss(model, windows)
    pairs = [(i, j) for i in range(layers) for j in range(i) if kin.why_no_rows(i, j) is None]
    pairs.sort(key=lambda pair: table[pair].item())
    found: Sources = [None] * layers
    shared: list[tuple[int, int, float]] = []
    while len(shared) < count:
        read = {source for source in found if source is not None}
        fits = [(i, j) for i, j in pairs if found[i] is None and i not in read and found[j] is None][:tries]
        if not fits:
            break
        tried = []
        for reader, owner in fits:
            with sharing(model, [*found[:reader], owner, *found[reader + 1 :]]):
                tried.append((loss(model, windows), reader, owner))
        damage, reader, owner = min(tried)
        found[reader] = owner
        shared.append((reader, owner, damage))
        progress(len(shared), count)
    return Found(found, tuple(shared), own)


# --- within a budget


def check_shared(config: ManyheadsConfig, owners: int) -> None:
    """Raise an `OptionError` unless all layers but `owners` may read an earlier one."""
    kin, count = Kin(config.specs, config.hidden_size, config.heads), len(config.specs)
    may = sum(any(kin.why_no_rows(layer, at) is None for at in range(layer)) for layer in range(count))
    if not count - may <= owners <= count:
        raise OptionError(f"{owners} of {count} layers with rows of their own; there may be {count - may} to {count}")


def check_in_place(layers: InMemory) -> None:
    """Raise an `OptionError` where layers were to be worked on elsewhere than in the whole model."""
    away = {device for device in layers.devices if device != layers.model.device}
    if away:
        raise OptionError(
            f"a search for layers that share tries the whole model, on {layers.model.device}; "
            f"it has no use for {', '.join(sorted(map(str, away)))}"
        )


@torch.no_grad()
def shrink_shared(
    layers: Layers,
    tokens: Tensor,
    owners: int,
    folder: Path,
    *,
    search: Literal["kvsharer", "damage"] = "kvsharer",
    threshold: float = 0.5,
    notes: Mapping[str, Any] | None = None,
    progress: Progress = lambda done, total: None,
) -> list[dict[str, Any]]:
    """A checkpoint of a source in which `owners` layers keep rows of their own, the others read what a search finds.

    No weight changes. The folder is written whole or not at all; one that is there from an earlier run is taken as it
    is. The config's notes have the pairs, and what is returned.

    Args:
        layers: the source, in memory: each trial needs all of it.
        tokens: calibration windows `[N, T]`, of which `CALIBRATED` pieces are searched with.
        search: `kvsharer`, or `damage` (see `least_damage`). threshold: of `kvsharer`.

    Returns:
        Of each layer its spec and, as `fitted` and `healed` (nothing is healed), the relative squared error of its
        output in the model that shares.

    Raises:
        OptionError: the search finds fewer pairs than it takes. Nothing is written.
    """
    if (folder / "config.json").exists():
        return ManyheadsConfig.from_pretrained(folder).notes["damage"]
    if not isinstance(layers, InMemory):
        raise OptionError("a search for layers that share tries the whole model; this one is read layer by layer")
    model, count = layers.model, len(layers.config.specs)
    check_shared(layers.config, owners)
    windows = _pieces(tokens)
    if search == "kvsharer":
        found = kvsharer(model, windows, count - owners, threshold=threshold, progress=progress)
    else:
        found = least_damage(model, windows, count - owners, progress=progress)
    if len(found.shared) < count - owners:
        raise OptionError(
            f"{count - owners} of {count} layers were to read others; "
            + (
                f"with {len(found.shared)} the last hidden states are as far from the source's as "
                f"threshold={threshold:g} allows; a larger budget, or a smaller threshold"
                if search == "kvsharer"
                else f"{len(found.shared)} is the most whose owners keep rows of their own"
            )
        )
    some = _batches(windows)[0]
    own = _outputs(model, some)
    with sharing(model, found.kv_source):
        errors = [
            ((y - of).float().pow(2).sum() / of.float().pow(2).sum()).item()
            for y, of in zip(_outputs(model, some), own, strict=True)
        ]
        lines = zip(map(str, model.specs), errors, strict=True)
        damage = [{"spec": line, "fitted": error, "healed": error} for line, error in lines]
        save(model, folder, notes={**(notes or {}), "shared": [*map(list, found.shared)], "damage": damage})
    return damage


CALIBRATED = (30, 64)
"""Pieces of calibration text that a search looks at, and tokens in each (the authors')."""


def _pieces(tokens: Tensor) -> Tensor:
    """As many windows as `CALIBRATED` says, evenly spread over the text."""
    count, length = CALIBRATED[0], min(CALIBRATED[1], tokens.shape[1])
    cut = tokens[:, : tokens.shape[1] // length * length].reshape(-1, length)
    return cut[torch.linspace(0, len(cut) - 1, min(count, len(cut))).round().long()]


def _outputs(model: ManyheadsForCausalLM, windows: Tensor) -> list[Tensor]:
    """What each attention layer adds to the stream."""
    outs: list[Tensor] = []
    keep = [layer.register_forward_hook(lambda module, args, out: outs.append(out[0])) for layer in model.attentions]
    try:
        model(windows.to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        for handle in keep:
            handle.remove()
    return outs


@torch.no_grad()
def loss(model: PreTrainedModel, windows: Tensor) -> float:
    """Mean negative log-likelihood of the windows' tokens, nats."""
    total = 0.0
    for batch in _batches(windows):
        tokens = batch.to(model.device)
        logits = model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
        total += F.cross_entropy(logits.float(), tokens[:, 1:].flatten(), reduction="sum").item()
    return total / windows[:, 1:].numel()


def _batches(windows: Tensor) -> Sequence[Tensor]:
    return windows.split(max(1, BATCH // windows.shape[1]))


@torch.no_grad()
def similarity(model: ManyheadsForCausalLM, windows: Tensor) -> Tensor:
    """How alike the attention weights of two layers are, `[L, L]`: mean cosine over windows, heads and query rows.

    In [0, 1], 1 on the diagonal. Of EchoAtt (arXiv 2409.14595), which copies weights inside blocks of alike layers.
    """
    _one_count(model)
    layers = model.attentions
    total = torch.zeros(len(layers), len(layers))
    for window in windows:
        maps = torch.stack(_maps(model, window))
        for i in range(len(layers)):
            total[i] += F.cosine_similarity(maps[i], maps, dim=-1).mean((1, 2))
    return total / len(windows)


def blocks(similarity: Tensor, followers: int, count: int) -> Sources:
    """`count` blocks of a leader and `followers` alike inner layers, the block of largest mean similarity first.

    The first and the last layer stay as they are; blocks do not overlap. An `attn_source`.
    """
    layers, size = len(similarity), followers + 1
    if followers < 1 or count < 0 or count * size > layers - 2:
        raise OptionError(f"{count} blocks of {size} layers; there are {max(0, layers - 2)} inner layers")
    inside = [similarity[at : at + size, at : at + size].sum().item() for at in range(layers - size)]
    starts = sorted(range(1, layers - size), key=lambda at: -inside[at])
    found: Sources = [None] * layers
    taken: list[int] = []
    for at in starts:
        if len(taken) < count and all(abs(at - other) >= size for other in taken):
            taken.append(at)
            found[at + 1 : at + size] = [at] * followers
    return found


@torch.no_grad()
def distant(model: ManyheadsForCausalLM, windows: Tensor, near: int, first: int) -> Tensor:
    """How alike two layers attend to distant tokens, `[L, L, H]`: by head, as `pod(window=near, first=first)` has them.

    1 - JS / log 2, the Jensen-Shannon divergence of the weights of tokens first ≤ j ≤ i - near, summing to 1, averaged
    over windows and the rows i that have such tokens. In [0, 1]. The measure is not stated in PoD (arXiv 2412.02252).
    """
    _one_count(model)
    length = windows.shape[1]
    if length <= near + first:
        raise OptionError(f"windows of {length} tokens have none that is distant; at least {near + first + 1}")
    i, j = torch.arange(length)[:, None], torch.arange(length)
    far = ((first <= j) & (j <= i - near))[near + first :]
    total = torch.zeros(len(model.attentions), len(model.attentions), model.attentions[0].heads)
    for window in windows:
        weights = torch.stack(_maps(model, window)).cpu()[:, :, near + first :] * far
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        for layer, own in enumerate(weights):
            apart = _entropy((weights + own) / 2) - (_entropy(weights) + _entropy(own)) / 2
            total[layer] += 1 - apart.mean(-1) / math.log(2)
    return total / len(windows)


def groups(alike: Tensor, threshold: float) -> list[int]:
    """The leader of each layer, from how alike two layers are, `[L, L]`.

    That of the layer below, where the layer is at least so alike to that leader; else the layer itself.

    >>> leaders = groups(distant(model, windows, near=64, first=4).mean(-1), 0.8)
    >>> lines = [f"{spec} + pod(leader={leader}, window=64, first=4)" for leader in leaders]
    """
    leaders: list[int] = []
    for layer in range(len(alike)):
        below = leaders[-1] if leaders else layer
        leaders.append(below if alike[below, layer] >= threshold else layer)
    return leaders


def _entropy(weights: Tensor) -> Tensor:
    return torch.special.entr(weights).sum(-1)


def _one_count(model: ManyheadsForCausalLM) -> None:
    head_counts = {layer.heads for layer in model.attentions}
    if len(head_counts) > 1:
        raise OptionError(f"layers with {sorted(head_counts)} heads have no maps to compare")


def _maps(model: ManyheadsForCausalLM, window: Tensor) -> list[Tensor]:
    """Attention weights of each layer, `[H, T, T]`: what identity values weigh to."""
    layers, links, length = model.attentions, Links(), len(window)
    before = [layer.site for layer in layers]
    for layer in layers:
        layer.site = layer.site._replace(lends=True)
    try:
        model(window[None].to(model.device), use_cache=False, links=links, logits_to_keep=1)
    finally:
        for layer, site in zip(layers, before, strict=True):
            layer.site = site
    weight = next(model.parameters())
    one = torch.eye(length, dtype=weight.dtype, device=weight.device)
    return [links.weigh[i](one.expand(1, layer.layout.kv, -1, -1))[0].float() for i, layer in enumerate(layers)]


@torch.no_grad()
def _hidden(model: ManyheadsForCausalLM, windows: Tensor) -> Tensor:
    """What the head reads, flattened, a row a window."""
    kept: list[Tensor] = []
    head = cast(nn.Module, model.get_output_embeddings())
    handle = head.register_forward_pre_hook(lambda module, args: kept.append(args[0].flatten(1)) or (args[0][:, -1:],))
    try:
        for batch in _batches(windows):
            model(batch.to(model.device), use_cache=False)
    finally:
        handle.remove()
    return torch.cat(kept).float()


def _searched(model: ManyheadsForCausalLM, count: int) -> Kin:
    """What may share in a model; a number of readers that it cannot have is refused."""
    config, layers = model.config, len(model.attentions)
    if not 0 <= count < layers:
        raise OptionError(f"{count} layers cannot read others of {layers}; 0 to {layers - 1} can")
    return Kin(config.specs, config.hidden_size, config.heads)
