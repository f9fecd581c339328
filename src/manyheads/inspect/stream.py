"""The residual stream around a model's attention layers: what enters a block, what sublayers add, what leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.inspect.layers import Layer
from manyheads.stack.block import Block
from manyheads.stack.decoder import Decoder

FEEDS = ("mlp", "ffn", "feed_forward")
"""What the feed-forward of a block is called."""


def blocks_of(model: nn.Module, layers: Sequence[Layer]) -> list[nn.Module]:
    """The blocks that the layers are in, which take the stream first.

    Raises:
        ValueError: one is not known.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    for layer in layers:
        name = names.get(id(layer.module), "").rpartition(".")[0]
        block = model.get_submodule(name)
        if isinstance(block, nn.ModuleList) or block is model:
            raise ValueError(f"{layer.name}: the block around it is not known")
        found.append(block)
    return found


def inner_of(model: nn.Module) -> Any:
    """The innermost of a model's wrappers: what has the embeddings, the blocks and the final norm."""
    inner: Any = model
    while isinstance(getattr(inner, "model", None), nn.Module) or isinstance(getattr(inner, "decoder", None), Decoder):
        if isinstance(getattr(inner, "decoder", None), Decoder):
            return inner.decoder
        inner = inner.model
    return inner


def embedding_of(model: Any) -> nn.Module:
    """The module that turns token ids into what the first block reads.

    Raises:
        ValueError: there is none.
    """
    given = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    found = given or next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if found is None:
        raise ValueError(f"a {type(model).__name__} has no table of tokens")
    return found


def head_of(model: Any) -> nn.Module:
    """The output head, from the last state to logits.

    Raises:
        ValueError: it is not known.
    """
    inner = inner_of(model)
    found = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else getattr(inner, "head", None)
    if not isinstance(found, nn.Module):
        raise ValueError(f"the output head of a {type(model).__name__} is not known")
    return found


def stream_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The stream among a block's arguments."""
    return args[0] if args else kwargs["hidden_states"]


def with_stream(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> tuple[Any, Any]:
    """The same arguments with another stream."""
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def stream_out(output: Any) -> Tensor:
    """The stream in what a block or a sublayer returned."""
    return output if isinstance(output, Tensor) else output[0]


def put_out(block: nn.Module, output: Any, x: Tensor) -> Any:
    """What a block returned with another stream in it."""
    if isinstance(output, Tensor):
        return x
    return (x, x) if isinstance(block, Block) else (x, *output[1:])


@dataclass(eq=False)
class Passage:
    """One block in one pass, `[B, T, D]` each: x came in, read is what attention was given (x behind its norm),
    attended and fed are what the sublayers returned (fed None where no feed-forward is known), y went out. name: of
    the layer."""

    name: str
    x: Tensor
    read: Tensor
    attended: Tensor
    fed: Tensor | None
    y: Tensor

    @property
    def middle(self) -> Tensor:
        """The stream between the sublayers.

        Raises:
            ValueError: the block does more than to add what its sublayers return.
        """
        middle = self.x + self.attended
        whole = middle if self.fed is None else middle + self.fed
        if not torch.allclose(whole, self.y, atol=1e-3 * float(self.y.detach().abs().amax()) + 1e-6, rtol=0):
            raise ValueError(
                f"{self.name}: its block's output is not its input plus what attention and the feed-forward return; it "
                "has norms behind them (as BERT and Gemma 2), say, or cross-attention"
            )
        return middle


@contextmanager
def passages(model: nn.Module, layers: Sequence[Layer]) -> Iterator[dict[int, Passage]]:
    """What goes through the blocks of the layers, of the newest pass, by layer. Gradients stay connected."""
    found: dict[int, Passage] = {}
    parts: dict[int, dict[str, Tensor]] = {layer.number: {} for layer in layers}
    names = {layer.number: layer.name for layer in layers}
    with ExitStack() as stack:

        def hook(module: nn.Module, number: int, before: str | None, after: str | None) -> None:
            def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
                parts[number][str(before)] = stream_in(args, kwargs)

            def leave(module: nn.Module, args: Any, output: Any) -> None:
                parts[number][str(after)] = stream_out(output)
                if after == "y":
                    found[number] = Passage(names[number], **{"fed": None, **parts[number]})  # type: ignore[arg-type]

            if before is not None:
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            if after is not None:
                stack.callback(module.register_forward_hook(leave).remove)

        for layer, block in zip(layers, blocks_of(model, layers), strict=True):
            fed = next((child for name, child in block.named_children() if name in FEEDS), None)
            hook(block, layer.number, "x", "y")
            hook(layer.module, layer.number, "read", "attended")
            if fed is not None:
                hook(fed, layer.number, None, "fed")
        yield found


__all__ = [
    "Passage", "blocks_of", "embedding_of", "head_of", "inner_of", "passages", "put_out", "stream_in", "stream_out",
    "with_stream",
]  # fmt: skip
