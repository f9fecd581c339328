"""The main job: a source model and cache budgets in, converted and healed checkpoints out.

Layer by layer, twice over the source. The survey measures every layer on the source's own hidden states. The
conversion then goes through the layers again with two streams, the source's and the converted model's: each layer is
fitted, healed on the inputs it will really get, and written. Nothing else is ever in memory, and a job that was
interrupted goes on after the last layer written, with the same result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from manyheads.convert.adopt import family_of
from manyheads.convert.heal import LayerwiseHeal
from manyheads.convert.methods import Decoupled, Latent, Merge, Shared, Tensorised, Tied, Wide
from manyheads.convert.moves.common import Move
from manyheads.convert.moves.dha import ToDHA, allot, trees_of
from manyheads.convert.moves.gauge import gauge
from manyheads.convert.moves.gqa import ToGQA
from manyheads.convert.moves.low_rank import allocate
from manyheads.convert.moves.mfa import ToMFA
from manyheads.convert.moves.mla import ToMLA, choose, chosen
from manyheads.convert.moves.qkv_sharing import ToTied
from manyheads.convert.moves.tensorllm import ToTensor
from manyheads.convert.plan import Goal, Shape, check_uniform
from manyheads.convert.resume import check_resume, whole_file, write_text
from manyheads.convert.share import check_shared, shrink_shared
from manyheads.convert.stats import AttentionStats, Pairs, measure, power, sensitivity
from manyheads.convert.stream import InMemory, Layers, attention_of, layer_name, put_attention, run
from manyheads.core.part import OptionError, Site
from manyheads.core.spec import Spec
from manyheads.stack.pretrained import ManyheadsConfig
from manyheads.stack.seam import SeamAttention

Progress = Callable[[str, int, int], object]
SURVEYED = 4096
"""Calibration tokens that the survey looks at (each window costs a full attention map a head and layer)."""
FELT = 6144
"""Calibration tokens whose gradients say how the loss feels each layer's output."""


@dataclass(frozen=True)
class Damage:
    """Relative squared error of a converted layer's output, on the inputs it really gets, before and after healing."""

    spec: str
    fitted: float
    healed: float


class Calibration(NamedTuple):
    """Calibration windows: tokens and positions `[N, T]`, and whether matrix products may be in half precision."""

    tokens: Tensor
    positions: Tensor
    bfloat16: bool = False

    def some(self, tokens: int) -> Tensor:
        """Indices of windows with about so many tokens in all, evenly spread."""
        count = min(max(1, tokens // self.tokens.shape[1]), len(self.tokens))
        return torch.linspace(0, len(self.tokens) - 1, count).round().long()


def stretched(count: int, length: int, limit: int, seed: int = 0) -> Tensor:
    """Positions `[count, length]`; half of the windows get two jumps each, uniform in size, and end below `limit`."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(length).repeat(count, 1)
    if limit <= length + 2:
        return positions
    for row, jumps in zip(positions, torch.rand(count, generator=generator) < 0.5, strict=True):
        if not jumps:
            continue
        for cut in torch.randint(length // 16, length, (2,), generator=generator).tolist():
            row[cut:] += int(torch.randint((limit - length) // 2, (), generator=generator))
    return positions


def shape_of(source: Layers | ManyheadsConfig) -> Shape:
    """The shape that budgets are judged by, from the config alone; layers that cannot be converted are refused here."""
    config = source if isinstance(source, ManyheadsConfig) else source.config
    if config.base is None:
        raise OptionError("conversions start from an adopted model; this one is our own decoder")
    for index, shared in enumerate(zip(config.kv_source, config.attn_source, strict=True)):
        if shared != (None, None):
            raise OptionError(f"layer {index} reads from another layer; conversions start from layers of their own")
    shapes, specs = [], []
    for index, (line, heads) in enumerate(zip(config.specs, config.heads, strict=True)):
        spec, site = Spec.parse(line), Site(index, len(config.specs))
        project = spec.by_stage["project"]
        if [part.name for part in project] != ["gqa"]:
            raise OptionError(f"layer {index} is {spec}; conversions start from gqa")
        _, _, layout = spec.resolve(site).layouts(config.hidden_size, heads, site)[0]
        specs.append(spec)
        width = config.hidden_size + ("qkv" in project[0].bias)  # type: ignore[attr-defined]
        shapes.append(Shape(layout.kv, layout.qk_width, layout.v_width, width, len(config.specs)))
    return check_uniform(specs, shapes)


def shrink(
    layers: Layers,
    tokens: Tensor,
    goals: Sequence[Goal],
    work: Path,
    *,
    heal: LayerwiseHeal | None = None,
    stretch: int = 4096,
    bfloat16: bool | None = None,
    options: dict[str, Any] | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> list[list[Damage]]:
    """Convert a source for each goal; checkpoints land in `work/<goal name>`.

    Args:
        layers: the source.
        tokens: calibration windows `[N, T]`.
        work: folder of the job; what it holds from an interrupted run with the same options is used.
        heal: layer-wise healing, or None for the bare fit.
        stretch: half of the windows get jumps in their positions, up to this one (or as far as the source goes), so
            that short windows also teach what far keys look like; 0 for none.
        bfloat16: matrix products in half precision; by default where the processor is fast at them.
        options: anything else that the result depends on; recorded to check a resume.

    Returns:
        For each goal, the damage of each layer.
    """
    heal = LayerwiseHeal(steps=0) if heal is None else heal
    if bfloat16 is None:
        bfloat16 = torch.cpu._is_avx512_bf16_supported()
    heal = replace(heal, bfloat16=bfloat16)
    limit = min(stretch, getattr(layers.config.base, "max_position_embeddings", stretch))
    text = Calibration(tokens, stretched(len(tokens), tokens.shape[1], limit, heal.seed), bfloat16)
    refuse(layers.config, goals)
    source = {"source": _digest(layers.embed(tokens)), "tokens": _digest(tokens)}
    check_resume(work, {**source, "heal": asdict(heal), "stretch": limit, **(options or {})})
    slots = torch.zeros(0)
    if any(goal.to != "share" for goal in goals):  # which fits nothing
        survey(layers, text, work / "survey", progress)
        slots = turning_damage(work / "survey", len(layers.config.specs))
    return [
        share(layers, tokens, goal, work, progress) if goal.to == "share"
        else convert(layers, text, goal, work, heal, slots, progress)
        for goal in goals
    ]  # fmt: skip


def share(layers: Layers, tokens: Tensor, goal: Goal, work: Path, progress: Progress) -> list[Damage]:
    """One goal by layers that read the rows of others."""
    assert isinstance(goal.method, Shared)
    found = shrink_shared(
        layers, tokens, goal.owners, work / goal.name, search=goal.method.search, threshold=goal.method.threshold,
        notes={"goal": asdict(goal)},
        progress=lambda done, total: progress(goal.name, done, total),
    )  # fmt: skip
    return [Damage(**each) for each in found]


def refuse(config: ManyheadsConfig, goals: Sequence[Goal]) -> None:
    """Raise before any work for layers that a goal's moves cannot convert."""
    for goal in goals:
        if goal.to == "share":
            check_shared(config, goal.owners)
            continue
        method, count = goal.method, len(config.specs)
        if isinstance(method, Tensorised) and method.layers and max(method.layers) >= count:
            raise OptionError(f"{method}: the model has {count} layers, 0 to {count - 1}")
        moves = [*_latents(goal, ()), *_merges(goal), *_others(goal)]
        for index, line in enumerate(config.specs):
            reasons = [why for move in moves if (why := move.refusal(Spec.parse(line))) is not None]
            if len(reasons) == len(moves):
                raise OptionError(f"layer {index} cannot become {goal.name}: {reasons[0]}")


def moves_of(
    goal: Goal, attention: SeamAttention, stats: AttentionStats, damage: Tensor, share: tuple[int, ...] = ()
) -> Sequence[Move]:
    """What a layer may become. damage: of stopping each component, over all layers. share: see `shares`."""
    if goal.to == "gqa":
        return _merges(goal)
    if others := _others(goal, attention, share):
        return others
    how = _latent(goal)
    if how.keep == "damage":
        latents = _latents(goal, choose(damage, goal.turning))
    else:
        folds = [how.fold]
        if how.fold == 0:  # from the stride on, twice as many each time
            pairs = Pairs.of(attention)
            frequencies = int((pairs.index >= 0).sum())
            stride = frequencies // len(chosen(attention, stats, how.keep, how.slots, goal.turning))
            folds = [f for n in range(12) if frequencies % (f := stride * 2**n) == 0 == len(pairs.re) % f]
        components = {f: chosen(attention, stats, how.keep, how.slots, goal.turning, f) for f in folds}
        latents = [move for f, kept in components.items() for move in _latents(goal, kept, f)]
    if share:
        keys = share[0] if how.latents == "split" else None
        latents = [replace(move, rank=sum(share), keys=keys) for move in latents]
    return [*latents, *_merges(goal)]


def _latent(goal: Goal) -> Latent:
    method = goal.method
    return method if isinstance(method, Latent) else Latent()


def _latents(goal: Goal, turning: tuple[tuple[int, int], ...], fold: int = 1) -> list[ToMLA]:
    how = _latent(goal)
    return [ToMLA(goal.floats - 2 * len(turning), turning, how, fold)] if goal.to in ("mla", "auto") else []


def _merges(goal: Goal) -> list[ToGQA]:
    if goal.to not in ("gqa", "auto") or not goal.kv_heads:
        return []
    method = goal.method
    if not isinstance(method, Merge) or method.how == "best":
        return [ToGQA(goal.kv_heads), ToGQA(goal.kv_heads, "mean")]
    return [ToGQA(goal.kv_heads, method.how, method.basis)]


def _others(goal: Goal, attention: SeamAttention | None = None, share: tuple[int, ...] = ()) -> list[Move]:
    """Moves that are neither latents nor merges; before there is a layer, to ask what they refuse."""
    method = goal.method
    if isinstance(method, Decoupled):
        heads = 2 if attention is None else goal.floats // attention.layout.qk_width
        keys, values = share or (heads // 2, heads - heads // 2)
        return [ToDHA(keys, values, method.fusion)]
    if isinstance(method, Tied):
        return [ToTied(goal.kv_heads, method.how)]
    if isinstance(method, Wide):
        return [ToMFA(goal.floats if method.key_reuse else goal.floats // 2, method.key_reuse, method.q_rank)]
    if isinstance(method, Tensorised):
        ranks = None if method.ranks is None else (method.ranks[0], method.ranks[1], method.ranks[2])
        return [ToTensor(ranks, method.layers, method.sweeps)]
    return []


def shares(layers: Layers, goal: Goal, survey: Path, damage: Tensor) -> list[tuple[int, ...]]:
    """Each layer's share of a budget that a method spends by layer (ranks, heads of either kind); else none."""
    method = goal.method
    if isinstance(method, Decoupled) and method.heads == "adjusted":
        return adjusted_heads(layers, goal, survey)
    return adjusted_ranks(layers, goal, survey, damage)


def adjusted_heads(layers: Layers, goal: Goal, survey: Path) -> list[tuple[int, ...]]:
    """How many key heads and value heads each layer gets, where a head more leaves the least of them apart."""
    scatters: list[list[float]] = []
    width = 1
    for index in range(len(layers.config.specs)):
        with layers.open(index) as layer:
            attention = attention_of(layer, layers.config)
            scatters += [tree.scatter for tree in trees_of(attention, surveyed(survey, index)[0])]
            width = attention.layout.qk_width
    counts = allot(scatters, goal.floats // width * len(layers.config.specs))
    return list(zip(counts[::2], counts[1::2], strict=True))


def adjusted_ranks(layers: Layers, goal: Goal, survey: Path, damage: Tensor) -> list[tuple[int, ...]]:
    """Each layer's ranks where the method adjusts them, of keys and values apart if their latents are; else none.

    Between half of the uniform rank and twice as much, and uniform in their sum.
    """
    count, how = len(layers.config.specs), _latent(goal)
    if how.ranks == "uniform":
        return [()] * count
    found: list[list[Tensor]] = []
    limits: list[tuple[int, ...]] = []
    for index in range(count):
        with layers.open(index) as layer:
            attention, (stats, _) = attention_of(layer, layers.config), surveyed(survey, index)
            move = next(m for m in moves_of(goal, attention, stats, damage) if isinstance(m, ToMLA))
            found.append(move.spectra(attention, stats))
            limits.append(move.ranks(attention))
            exact = replace(move, rank=10**9, keys=10**9 if how.latents == "split" else None)
            limits[-1] = (*limits[-1], *exact.ranks(attention))
    parts = len(found[0])
    ranks = []
    for part in range(parts):
        uniform, exact_ranks = [limit[part] for limit in limits], [limit[parts + part] for limit in limits]
        most = [min(2 * rank, exact) for rank, exact in zip(uniform, exact_ranks, strict=True)]
        least = [max(1, rank // 2) for rank in uniform]
        ranks.append(allocate([spectrum[part] for spectrum in found], sum(uniform), least, most))
    return list(zip(*ranks, strict=True))


def survey(layers: Layers, text: Calibration, folder: Path, progress: Progress) -> None:
    """Measure every layer on the source's hidden states; one file a layer, kept for the conversions."""
    count = len(layers.config.specs)
    if all((folder / f"{index}.safetensors").exists() for index in range(count)):
        return
    folder.mkdir(parents=True, exist_ok=True)
    metrics = _felt(layers, text)
    hidden = layers.embed(text.tokens)
    some = text.some(SURVEYED)
    for index in range(count):
        with layers.open(index) as layer:
            seen = run(layer, layers.config, hidden, text.positions, bfloat16=text.bfloat16)
            attention = attention_of(layer, layers.config)
            root = torch.eye(hidden.shape[-1]) if metrics is None else power(metrics[index], 0.5).float()
            stats = measure(attention, seen.x[some], root, text.positions[some])
            tensors = dict(stats._asdict())
            if metrics is not None:
                tensors["felt"] = metrics[index]
            if "rope" in str(attention.spec):
                tensors["damage"] = gauge(attention, stats).damage
        _save({name: t.contiguous() for name, t in tensors.items()}, folder / f"{index}.safetensors")
        hidden = seen.after
        progress("calibrate", index + 1, count)


def _felt(layers: Layers, text: Calibration) -> list[Tensor] | None:
    """The loss's metric at each layer's output; needs the whole model, so a model read layer by layer goes without."""
    if not isinstance(layers, InMemory):
        return None
    assert layers.config.base is not None
    after = family_of(layers.config.base).after_attention
    places = [layers.model.model.get_submodule(after.format(i)) for i in range(len(layers.config.specs))]
    some = text.some(FELT)
    batch = max(1, 1024 // text.tokens.shape[1])
    return sensitivity(
        layers.model, text.tokens[some], places, text.positions[some], batch=batch, bfloat16=text.bfloat16
    )


def surveyed(folder: Path, index: int) -> tuple[AttentionStats, Tensor | None]:
    """What the survey knows of a layer: its statistics, and the loss's metric at its output."""
    file = load_file(folder / f"{index}.safetensors")
    return AttentionStats(*(file[name] for name in AttentionStats._fields)), file.get("felt")


def turning_damage(folder: Path, count: int) -> Tensor:
    """What stopping each rotary component would cost, summed over layers: all layers keep the same ones."""
    damages = [load_file(folder / f"{index}.safetensors").get("damage") for index in range(count)]
    known = [damage for damage in damages if damage is not None]
    return torch.stack(known).sum(0) if known else torch.zeros(0)


def convert(
    layers: Layers,
    text: Calibration,
    goal: Goal,
    work: Path,
    heal: LayerwiseHeal,
    damage: Tensor,
    progress: Progress = lambda stage, done, total: None,
) -> list[Damage]:
    """One goal: fit, heal and write layer after layer. Goes on after the last layer that an earlier run finished."""
    config, count = layers.config, len(layers.config.specs)
    folder = work / goal.name
    folder.mkdir(parents=True, exist_ok=True)
    done = _Done.read(folder)
    if done.finished:
        return done.damage
    given_shares = shares(layers, goal, work / "survey", damage)
    source, ours = done.streams or ((hidden := layers.embed(text.tokens)), hidden.clone())
    for index in range(done.layers, count):
        with layers.open(index) as layer:
            seen = run(layer, config, source, text.positions, bfloat16=text.bfloat16)
            stream = seen.before + seen.y
            given = run(layer, config, ours, text.positions, bfloat16=text.bfloat16)
            stats, felt = surveyed(work / "survey", index)
            problem = (given.x, stream - ours, stream, felt, text.positions)
            own = (given.x, given.y, stream, felt, text.positions)
            attention = attention_of(layer, config)
            fitted = _best(moves_of(goal, attention, stats, damage, given_shares[index]), attention, stats, heal, own)
            before = heal.error(fitted, *problem)
            after = heal(fitted, *problem)
            put_attention(layer, config, fitted)
            ours = run(layer, config, ours, text.positions, record=False, bfloat16=text.bfloat16).after
            source = seen.after
            _write_layer(layer, config, index, folder)
        done.add(Damage(str(fitted.spec), before, after), source, ours)
        progress(goal.name, index + 1, count)
    _finish(layers, goal, folder, done.damage)
    return done.damage


def _best(
    moves: Sequence[Move], attention: SeamAttention, stats: AttentionStats, heal: LayerwiseHeal, own: Any
) -> SeamAttention:
    """The move that does the least damage to this layer; `own` is the problem of doing what the layer itself does."""
    fits = [move(attention, stats) for move in moves if move.refusal(attention.spec) is None]
    return fits[0] if len(fits) == 1 else min(fits, key=lambda fit: heal.error(fit, *own))


class _Done:
    """What of a goal is finished: layer files, and the two streams after the last of them."""

    def __init__(self, folder: Path, damage: list[Damage], streams: tuple[Tensor, Tensor] | None) -> None:
        self.folder, self.damage, self.streams = folder, damage, streams

    @property
    def layers(self) -> int:
        return len(self.damage)

    @property
    def finished(self) -> bool:
        """The streams go last, after the config."""
        return self.streams is None and (self.folder / "config.json").exists()

    @classmethod
    def read(cls, folder: Path) -> _Done:
        log, streams, config = (folder / name for name in ("damage.json", "streams.safetensors", "config.json"))
        if not streams.exists() and not config.exists():
            return cls(folder, [], None)
        damage = [Damage(**entry) for entry in json.loads(log.read_text())]
        if not streams.exists():
            return cls(folder, damage, None)
        kept = load_file(streams)
        damage = damage[: int(kept["layers"])]  # the log may be one layer ahead
        return cls(folder, damage, (kept["source"], kept["ours"]))

    def add(self, damage: Damage, source: Tensor, ours: Tensor) -> None:
        self.damage.append(damage)
        write_text(json.dumps([asdict(entry) for entry in self.damage], indent=1), self.folder / "damage.json")
        kept = {"source": source.contiguous(), "ours": ours.contiguous(), "layers": torch.tensor(self.layers)}
        _save(kept, self.folder / "streams.safetensors")


def _write_layer(layer: nn.Module, config: ManyheadsConfig, index: int, folder: Path) -> None:
    name = layer_name(config, index)
    tensors = {f"model.{name}.{key}": t.contiguous() for key, t in layer.state_dict().items()}
    _save(tensors, folder / f"layer-{index:05d}.safetensors")


def _finish(layers: Layers, goal: Goal, folder: Path, damage: list[Damage]) -> None:
    """What surrounds the layers, the index and the config; afterwards the folder is a checkpoint."""
    for number, (name, tensor) in enumerate(layers.rest()):
        _save({f"model.{name}": tensor.contiguous()}, folder / f"rest-{number:05d}.safetensors")
    where, size = {}, 0
    for file in sorted(folder.glob("*-*.safetensors")):
        header = _header(file)
        where |= dict.fromkeys(header, file.name)
        size += sum(stop - start for start, stop in header.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    write_text(json.dumps(index, indent=1), folder / "model.safetensors.index.json")
    config = ManyheadsConfig(
        base=layers.config.base,
        specs=[entry.spec for entry in damage],
        attention_path=layers.config.attention_path,
        notes={"goal": asdict(goal), "damage": [asdict(entry) for entry in damage]},
        architectures=["ManyheadsForCausalLM"],
    )
    config.save_pretrained(folder)
    if isinstance(layers, InMemory):
        layers.model.generation_config.save_pretrained(folder)
    (folder / "streams.safetensors").unlink(missing_ok=True)


def _header(file: Path) -> dict[str, tuple[int, int]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return {name: tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__"}


def _digest(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Whole or not at all."""
    with whole_file(file) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
