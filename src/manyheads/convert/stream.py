"""A model as a sequence of decoder layers, one in memory at a time, and the hidden states that flow through them."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from manyheads.convert.adopt import adopt, adopt_attention, adopted_config
from manyheads.convert.devices import DeviceMap
from manyheads.convert.source import SourceError, read_config, weight_files
from manyheads.convert.stats import positions_of
from manyheads.core.flow import Links
from manyheads.stack.pretrained import ManyheadsConfig
from manyheads.stack.seam import SeamAttention
from manyheads.stack.sources import sites

BATCH = 2048
"""Tokens (in whole windows) that go through a layer together."""


class Layers(Protocol):
    """A source model whose decoder layers are visited first to last, with our attention in them.

    devices: where each layer lives while it is open. All else is where the source is.
    """

    config: ManyheadsConfig
    devices: tuple[torch.device, ...]

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids `[N, T]` to hidden states `[N, T, D]`."""
        ...

    @contextmanager
    def open(self, index: int) -> Iterator[nn.Module]:
        """The decoder layer; it may be gone from memory afterwards."""
        ...

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor outside the decoder layers, one at a time, by its name in the family's model."""
        ...


class InMemory:
    """The layers of a loaded model, which is adopted in place. What `open` gives is a copy: the model stays.

    A model in half precision is converted in float32, as `OnDisk` does it. devices: of the copies; None: where each
    layer is.
    """

    def __init__(self, model: PreTrainedModel, devices: DeviceMap | None = None) -> None:
        self.model = adopt(model).eval()
        self.config = cast(ManyheadsConfig, self.model.config)
        own = tuple(next(layer.parameters()).device for layer in self.model.attentions)
        self.devices = own if devices is None else devices.over(layers_prefix(self.config), len(own))
        self.dtype = torch.promote_types(self.model.dtype, torch.float32)

    def embed(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model.get_input_embeddings()(tokens.to(self.model.device)).to(self.dtype)

    @contextmanager
    def open(self, index: int) -> Iterator[nn.Module]:
        layer = copy.deepcopy(self.model.model.get_submodule(layer_name(self.config, index)))
        yield layer.eval().to(self.devices[index], self.dtype)

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        tied = set(self.model.model.all_tied_weights_keys)
        for name, tensor in self.model.model.state_dict().items():
            if not name.startswith(layers_prefix(self.config)) and name not in tied:
                yield name, tensor.to(self.dtype)


class OnDisk:
    """The layers of a safetensors folder, read one at a time: memory holds one layer, never the model.

    The folder is of a known family, or one that a conversion wrote. A handle on a file counts the whole file as
    resident while it is open, so each layer opens its own and closes it. devices: of the layers that are read.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, devices: DeviceMap | None = None) -> None:
        read_config(folder)
        self.folder, self.dtype = folder, dtype
        base = AutoConfig.from_pretrained(folder)
        self.ours = isinstance(base, ManyheadsConfig)
        self.config = base if isinstance(base, ManyheadsConfig) else adopted_config(base)
        if self.config.base is None:
            raise SourceError(f"{folder} is a decoder of our own; a family's model is read layer by layer")
        self.devices = (devices or DeviceMap()).over(layers_prefix(self.config), len(self.config.specs))
        with torch.device("meta"):
            self.skeleton = AutoModelForCausalLM.from_config(self.config.base, attn_implementation="eager")
        prefix = "model." if self.ours else ""
        self.where = {
            name.removeprefix(prefix): (file, name) for file, names in weight_files(folder).items() for name in names
        }
        wanted = self.skeleton.state_dict().keys() - set(self.skeleton.all_tied_weights_keys)
        if self.ours:  # whose attention has tensors of other names
            inside = re.compile(re.escape(self.config.attention_path).replace(r"\{\}", r"\d+") + r"\.")
            wanted = {name for name in wanted if not inside.match(name)}
            wanted |= {name for name in self.where if inside.match(name)}
        if missing := sorted(wanted - self.where.keys()):
            raise SourceError(f"{folder} lacks {len(missing)} tensors, the first is {missing[0]}")
        self.where = {name: self.where[name] for name in sorted(wanted)}

    def embed(self, tokens: Tensor) -> Tensor:
        embedding = self.skeleton.get_input_embeddings()
        name = next(name for name, module in self.skeleton.named_modules() if module is embedding)
        table = self._read([f"{name}.weight"])[f"{name}.weight"]
        scale = getattr(embedding, "scalar_embed_scale", 1.0)  # Gemma's embeddings are as large as its stream
        return nn.functional.embedding(tokens, table).to(self.dtype) * scale

    @contextmanager
    def open(self, index: int) -> Iterator[nn.Module]:
        prefix = f"{layer_name(self.config, index)}."
        layer = copy.deepcopy(self.skeleton.get_submodule(prefix[:-1])).eval()
        tensors = self._read([name for name in self.where if name.startswith(prefix)])
        state = {name.removeprefix(prefix): tensor.to(self.dtype) for name, tensor in tensors.items()}
        if self.ours:
            put_attention(layer, self.config, self._attention(index))
        layer.load_state_dict(state, assign=True)
        if not self.ours:
            put_attention(layer, self.config, adopt_attention(attention_of(layer, self.config), self.config, index))
        del tensors, state
        yield layer.to(self.devices[index])
        layer.to("meta")  # whoever still holds the layer no longer holds its weights

    def _attention(self, index: int) -> SeamAttention:
        config = self.config
        site = sites(config.kv_source, config.attn_source)[index]
        return SeamAttention(config.specs[index], config.hidden_size, config.heads[index], site=site).eval()

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.where:
            if not name.startswith(layers_prefix(self.config)):
                yield name, self._read([name])[name].to(self.dtype)

    def _read(self, names: list[str]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for file in sorted({self.where[name][0] for name in names}):
            with safe_open(file, "pt") as handle:
                for name in names:
                    if self.where[name][0] == file:
                        tensors[name] = handle.get_tensor(self.where[name][1]).clone()
        return tensors


def layers_prefix(config: ManyheadsConfig) -> str:
    """Where decoder layers sit in the family's model, such as `model.layers.`."""
    return config.attention_path.split("{}")[0]


def layer_name(config: ManyheadsConfig, index: int) -> str:
    return f"{layers_prefix(config)}{index}"


def attention_of(layer: nn.Module, config: ManyheadsConfig) -> SeamAttention:
    """Our attention inside a decoder layer."""
    return layer.get_submodule(config.attention_path.split("{}.")[1])  # type: ignore[return-value]


def put_attention(layer: nn.Module, config: ManyheadsConfig, attention: SeamAttention) -> None:
    *parents, name = config.attention_path.split("{}.")[1].split(".")
    setattr(layer.get_submodule(".".join(parents)), name, attention)


def batches(windows: Tensor) -> tuple[Tensor, ...]:
    """What goes through a layer together, of windows `[N, T, …]`."""
    return windows.split(max(1, BATCH // windows.shape[1]))


@dataclass
class Pass:
    """What went through a layer: the input and output of its attention, and the residual stream around both."""

    before: Tensor  # [N, T, D] hidden states entering the layer
    x: Tensor  # normalised input of attention
    y: Tensor  # output of attention
    after: Tensor  # hidden states leaving the layer


@torch.no_grad()
def run(
    layer: nn.Module,
    config: ManyheadsConfig,
    hidden: Tensor,
    positions: Tensor | None = None,
    *,
    record: bool = True,
    bfloat16: bool = False,
    links: Sequence[Links] | None = None,
) -> Pass:
    """Send hidden states `[N, T, D]` through a decoder layer, causally, at positions `[N, T]` (None: 0, 1, …).

    All of it, and what layers have handed on, moves to where the layer lives, and what is returned is there.

    bfloat16: matrix products in half precision, several times faster where the processor has them. links: of each batch
    (see `batches`), for layers that read the rows of others.
    """
    device = next(layer.parameters()).device
    hidden = hidden.to(device)
    for link in links or ():
        link.move(device)
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], out: tuple[Tensor, None]) -> None:
        seen.append((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], out[0]))

    handle = attention_of(layer, config).register_forward_hook(keep, with_kwargs=True) if record else None
    positions = positions_of(hidden, positions)
    try:
        outs = []
        for n, (batch, where) in enumerate(zip(batches(hidden), batches(positions), strict=True)):
            more = {} if links is None else {"links": links[n]}
            with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
                out = layer(batch, position_ids=where, **more)
            outs.append(out if isinstance(out, Tensor) else out[0])
    finally:
        if handle is not None:
            handle.remove()
    after = torch.cat(outs)
    if not record:
        return Pass(hidden, hidden, hidden, after)
    x, y = (torch.cat(parts).to(hidden.dtype) for parts in zip(*seen, strict=True))
    return Pass(hidden, x, y, after)
