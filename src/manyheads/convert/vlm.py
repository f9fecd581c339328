"""Vision-language models: their language model adopted inside, and shrunk with a low rank for images and one for text.

>>> adopt_language(model)
>>> found = shrink_vlm(model, batches, rank=64, rotary=32)
>>> save_vlm(model, "small")
>>> again = load_vlm("small")

The model stays the family's own class, with its processor, its vision tower and `generate`; only attention modules of
the language model are ours. They are told which tokens are of an image (`Links.types`): the image token's ids, where
the model puts image features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

from manyheads.convert.adopt import AdoptError, adopt_attention, adopted_config
from manyheads.convert.export.atomic import new_folder
from manyheads.convert.moves.typed_mla import ToTypedMLA, kind_moments, most_turning, rotation_kl
from manyheads.convert.stats import measure
from manyheads.core.flow import Links
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.seam import SeamAttention, attention_layers, put_attention

PATH = "layers.{}.self_attn"
TEXT, IMAGE = 0, 1
"""Kinds of tokens."""
Batch = Mapping[str, Any]
"""Arguments of a model: input_ids `[B, T]`, pixel_values, attention_mask `[B, T]` if there is padding."""


def adopt_language(model: PreTrainedModel) -> list[Spec]:
    """Take over the attention of a vision-language model's language model, in place; logits stay. The layers' specs.

    Raises:
        AdoptError: there is no vision tower and language model inside, the language model's family is not known, or its
            positions are not a line (M-RoPE). Nothing is touched.
    """
    inner, language = _language(model)
    if getattr(inner, "_tells_kinds", False):
        return [layer.spec for layer in language_attentions(model)]
    config = _checked(language)
    olds = [old for _, _, old in attention_layers(language, PATH)]
    put_attention(language, PATH, [adopt_attention(old, config, index) for index, old in enumerate(olds)])
    model.set_attn_implementation("sdpa")
    _tell_kinds(inner, language)
    return [layer.spec for layer in language_attentions(model)]


def _checked(language: PreTrainedModel) -> Any:
    rope: Any = language.config.rope_parameters or {}
    if "mrope_section" in rope:
        raise AdoptError(
            f"the positions of {language.config.model_type!r} have three axes (M-RoPE); a language model with one is "
            "adopted, such as LLaVA's"
        )
    return adopted_config(language.config)


def _language(model: PreTrainedModel) -> tuple[nn.Module, PreTrainedModel]:
    """What takes token ids and images, and the language model inside it."""
    inner = getattr(model, "model", None)
    language = getattr(inner, "language_model", None)
    if not isinstance(language, PreTrainedModel) or getattr(model.config, "image_token_id", None) is None:
        raise AdoptError(
            f"a {type(model).__name__} has no language model that reads image tokens; adopt() is for others"
        )
    return cast(nn.Module, inner), language


def language_attentions(model: PreTrainedModel) -> list[SeamAttention]:
    """The attention layers of an adopted model, first to last."""
    return [layer for _, _, layer in attention_layers(_language(model)[1], PATH)]  # type: ignore[misc]


def _tell_kinds(inner: nn.Module, language: PreTrainedModel) -> None:
    """Give each pass one `Links`, with the kinds of its tokens."""
    coming: list[Tensor] = []

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            table = cast(nn.Embedding, language.get_input_embeddings()).weight
            kinds = (kwargs["inputs_embeds"] == table[module.config.image_token_id]).all(-1)
        else:
            kinds = ids == module.config.image_token_id
        coming[:] = [kinds.long()]

    def inject(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        links = kwargs["links"] = kwargs.get("links") or Links()
        links.memo.pop("axis", None)  # of an earlier pass
        links.types = coming.pop() if coming else None
        return args, kwargs

    inner.register_forward_pre_hook(look, with_kwargs=True)
    language.register_forward_pre_hook(inject, with_kwargs=True)
    inner._tells_kinds = True  # type: ignore[assignment]


@dataclass(frozen=True)
class Converted:
    """A layer's new spec, and the relative squared error of its output on the tokens of each kind (text, image)."""

    spec: str
    text: float
    image: float


@torch.no_grad()
def shrink_vlm(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    rank: int,
    rotary: int,
    *,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[Converted]:
    """MHA2MLA-VLM in place: typed latents of `rank` numbers a token, and `rotary` channels of each key head that turn.

    A layer is fitted to its own inputs in the source. What the paper trains afterwards, in two short stages (first
    attention with its partial rotation alone, then with the low rank), any trainer can; the low rank here comes at
    once.

    Args:
        model: adopted here, if it is not yet.
        batches: calibration, with images: see `Batch`; padding on the left.
        rank: for all key heads together; cached are rank + rotary · key heads + 1 numbers a token and layer.

    Raises:
        AdoptError, OptionError: before any work.
    """
    adopt_language(model)
    layers, (_, language) = language_attentions(model), _language(model)
    pairs = layers[0].layout.qk_width // 2
    if rank < 1 or rotary < 2 or rotary % 2 or rotary > 2 * pairs:
        raise OptionError(f"rank={rank}, rotary={rotary}; at least 1, and an even number from 2 to {2 * pairs}")
    move = ToTypedMLA(rank, ())
    for index, layer in enumerate(layers):
        if why := move.refusal(layer.spec):
            raise OptionError(f"layer {index} cannot become typed_mla: {why}")
    if not batches:
        raise OptionError("there is no batch to fit to")
    heard = [_heard(model, layers, batch) for batch in batches]
    made, found = [], []
    for index, layer in enumerate(layers):
        parts = [(of.x[index], of.kinds, of.positions) for of in heard]
        scores = torch.stack([rotation_kl(layer, x, at, kinds >= 0) * (kinds >= 0).sum() for x, kinds, at in parts])
        moments = [
            sum(weight * moment for weight, moment in each) / sum(weight for weight, _ in each)
            for each in _weighed(parts)
        ]
        x, _, positions = parts[0]  # whose statistics say no more here than how large a rotary key is
        stats = measure(layer, x, torch.eye(x.shape[-1], dtype=x.dtype), positions)
        new = ToTypedMLA(rank, most_turning(scores.sum(0), rotary))(layer, stats, cast(list[Tensor], moments))
        made.append(new)
        errors = _errors(new, layer, parts)
        found.append(Converted(str(new.spec), *errors))
        progress(index + 1, len(layers))
    put_attention(language, PATH, made)
    return found


@dataclass(frozen=True)
class _Heard:
    """Of a batch: each layer's inputs, kinds (-1 on padding) and positions `[B, T]`."""

    x: list[Tensor]
    kinds: Tensor
    positions: Tensor


def _heard(model: PreTrainedModel, layers: Sequence[SeamAttention], batch: Batch) -> _Heard:
    with _recording(layers) as seen:
        cast(Any, model)(**batch, use_cache=False)
    kinds = (batch["input_ids"] == model.config.image_token_id).long()
    if batch.get("attention_mask") is not None:
        kinds = kinds.masked_fill(batch["attention_mask"] == 0, -1)
    where = [kwargs["position_ids"].expand(kinds.shape) for _, kwargs in seen]
    return _Heard([x for x, _ in seen], kinds, where[0])


@contextmanager
def _recording(layers: Sequence[nn.Module]) -> Iterator[list[tuple[Tensor, dict[str, Any]]]]:
    """Inputs and keywords of each layer, in the order they run."""
    seen: list[tuple[Tensor, dict[str, Any]]] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], kwargs))

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _weighed(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[list[tuple[float, Tensor]]]:
    """Of each kind, (tokens, moment) of every batch that has some."""
    found: list[list[tuple[float, Tensor]]] = [[], []]
    for x, kinds, _ in parts:
        for kind in (TEXT, IMAGE):
            if count := int((kinds == kind).sum()):
                only = torch.where(kinds == kind, 0, -1)
                found[kind].append((count, kind_moments(x, only, 1)[0]))
    for kind, each in enumerate(found):
        if not each:
            raise OptionError(f"no {('text', 'image')[kind]} token in the batches: nothing to fit its low rank to")
    return found


def _errors(
    new: SeamAttention, old: SeamAttention, parts: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> tuple[float, float]:
    """Relative squared error on text and on image tokens."""
    lost = torch.zeros(2, 2, dtype=torch.float64)
    for x, kinds, positions in parts:
        seen = (kinds >= 0)[:, None, None] & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        links = Links(types=kinds.clamp_min(0))
        ours, theirs = (
            layer(x, attention_mask=seen, position_ids=positions, links=own)[0]
            for layer, own in ((new, links), (old, Links()))
        )
        for kind in (TEXT, IMAGE):
            of = kinds == kind
            lost[kind] += torch.stack([(ours - theirs)[of].pow(2).sum(), theirs[of].pow(2).sum()]).double()
    text, image = (lost[:, 0] / lost[:, 1].clamp_min(1e-30)).tolist()
    return text, image


SPECS = "manyheads.json"


def save_vlm(model: PreTrainedModel, folder: str | Path) -> None:
    """An adopted model as a new folder: its config, its weights, and the specs of its layers."""
    specs = [str(layer.spec) for layer in language_attentions(model)]
    with new_folder(Path(folder)) as made:
        model.config.save_pretrained(made)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(made)
        tied = set(getattr(model, "all_tied_weights_keys", {}))
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        (made / SPECS).write_text(json.dumps({"specs": specs}, indent=1))


def load_vlm(folder: str | Path) -> PreTrainedModel:
    """What `save_vlm` wrote, in evaluation mode.

    Raises:
        ValueError: the folder holds something else.
    """
    folder = Path(folder)
    if not (folder / SPECS).exists():
        raise ValueError(f"{folder} has no {SPECS}; save_vlm writes one")
    specs = json.loads((folder / SPECS).read_text())["specs"]
    weights = load_file(folder / "model.safetensors")
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()
    adopt_language(model)
    made = [
        SeamAttention(spec, old.dim, old.heads, site=old.site, dropout=old.dropout).eval()
        for spec, old in zip(specs, language_attentions(model), strict=True)
    ]
    put_attention(_language(model)[1], PATH, made)
    model.to(next(iter(weights.values())).dtype)
    left = model.load_state_dict(weights, strict=False)
    wanted = set(left.missing_keys) - set(getattr(model, "all_tied_weights_keys", {}))
    if wanted or left.unexpected_keys:
        raise ValueError(
            f"{folder} does not fit its specs: {len(wanted)} weights missing, {len(left.unexpected_keys)} over"
        )
    model.tie_weights()
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model
