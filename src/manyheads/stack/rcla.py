"""Random cross-layer attention: a model trained under many maps serves under any."""

from __future__ import annotations

import random
from typing import Any, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from manyheads.attention import Attention
from manyheads.core.flow import Links
from manyheads.core.part import OptionError
from manyheads.stack.maps import SourceMap, sources_of
from manyheads.stack.sources import Kin


class RCLA:
    """In each training pass, each layer reads the rows of an earlier layer with probability p, else its own.

    All layers keep weights for rows of their own, and what layer l' writes is its own whatever it reads; a draw serves
    the batch. Gradients flow to the layer that is read. In evaluation every layer reads its own, and any map can then
    be chosen for good: `manyheads.convert.share.share_layers(model, kv_source="owners([0, 4, 8])")`.

    >>> rcla = RCLA(model, p=0.5)      # training passes of the model are now routed
    >>> rcla.remove()

    Args:
        model: a `Stack`, `Decoder` or `ManyheadsForCausalLM` whose layers all have rows of their own.
        p: probability of reading an earlier layer. The paper's text has it the other way round once; in its
            experiments loss grows with it, as here. Its settings: 0.25 to 0.75 in pretraining, 0.6 in fine-tuning.
        source: which earlier layer: `uniform` over all that fit (of a windowed layer, those that see as far),
            `previous`, or that of a map, such as "cla(2)" (RD-CLA: the leader of the group, or itself).
        seed: of the draws, which are independent of all others; the same on every rank of a parallel run.

    Source: Stochastic KV Routing 2026, arXiv 2604.22782.
    """

    def __init__(
        self, model: nn.Module, p: float = 0.5, *, source: Literal["uniform", "previous"] | str | SourceMap = "uniform",
        seed: int = 0,
    ) -> None:  # fmt: skip
        if not 0 <= p <= 1:
            raise OptionError(f"rcla: p={p} is a probability, 0 to 1")
        self.p, self.random = p, random.Random(seed)
        self.choices = _choices(model, source)
        self._handle: RemovableHandle = model.register_forward_pre_hook(self._route, with_kwargs=True)

    def draw(self) -> dict[int, int]:
        """Of one pass, the layers that read another, and which."""
        return {
            layer: self.random.choice(among)
            for layer, among in enumerate(self.choices)
            if among and self.random.random() < self.p
        }

    def remove(self) -> None:
        """Passes read their own rows again."""
        self._handle.remove()

    def _route(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module.training:  # drawn outside of what checkpointing computes again
            links = kwargs["links"] = Links() if kwargs.get("links") is None else kwargs["links"]
            links.route = self.draw()
        return args, kwargs


def _choices(model: nn.Module, source: str | SourceMap) -> list[list[int]]:
    """For each layer the earlier layers that it may read."""
    layers = [m for m in model.modules() if isinstance(m, Attention) and not m.site.cross]
    shared = [layer.site.layer for layer in layers if (layer.site.kv_source, layer.site.attn_source) != (None, None)]
    looped = bool(layers) and layers[0].site.layers != len(layers)
    if shared or looped or not layers:
        what = "there are none" if not layers else "these run in loops"
        what = f"layer {shared[0]} reads from another" if shared else what
        raise OptionError(f"rcla routes layers with rows of their own; {what}")
    kin = Kin([layer.spec for layer in layers], layers[0].dim, [layer.heads for layer in layers], layers[0].site.causal)
    fits = [[at for at in range(layer) if kin.why_no_rows(layer, at) is None] for layer in range(len(layers))]
    if source == "uniform":
        return fits
    if source == "previous":
        return [among[-1:] if among and among[-1] == layer - 1 else [] for layer, among in enumerate(fits)]
    wanted = sources_of(source, len(layers))
    for layer, owner in enumerate(wanted):
        if owner is not None and owner not in fits[layer]:
            raise OptionError(f"layer {layer} cannot read the rows of layer {owner}: {kin.why_no_rows(layer, owner)}")
    return [[] if owner is None else [owner] for owner in wanted]
