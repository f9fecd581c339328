"""Training in which ever more of the last layers share, so that one run gives models that share any number of them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal

from manyheads.convert.share import check_map, sharing
from manyheads.core.part import OptionError
from manyheads.stack.maps import Sources
from manyheads.stack.pretrained import ManyheadsForCausalLM


class EPAS:
    """Progressive activation sharing: the last n layers take the attention weights, or read the rows, of the layer
    before them; n grows from 0 in equal steps.

    >>> epas = EPAS(model, layers=4)
    >>> Trainer(model, arguments, train_dataset=data, callbacks=[ScheduleCallback(epas)])
    >>> epas.share(2)  # serve with two layers that share, or 0 to 4 of them

    A layer that shares keeps its weights for queries and keys outside of the model, where no gradient and no decay
    changes them. `share(0)` puts all of them back; what is saved before that has only the weights that are then in use.

    Args:
        model: one of ours whose layers have rows and weights of their own, before there is an optimiser.
        layers: how many share in the end (default half; the authors' pretraining).
        growth: how many more at a time.
        mode: `weights` (the same as sharing queries and keys: values are each layer's own), or `rows`.
        until: the progress of training at which the last ones begin to share. The paper does not say how fast its
            regions grow.

    Source: EPAS 2026, arXiv 2601.19089.
    """

    def __init__(
        self, model: ManyheadsForCausalLM, layers: int | None = None, *, growth: int = 1,
        mode: Literal["weights", "rows"] = "weights", until: float = 0.5,
    ) -> None:  # fmt: skip
        count = len(model.attentions)
        self.layers = count // 2 if layers is None else layers
        if not 1 <= self.layers < count:
            raise OptionError(f"epas: {self.layers} of {count} layers are to share; 1 to {count - 1} can")
        if growth < 1 or self.layers % growth:
            fits = [n for n in range(1, self.layers + 1) if self.layers % n == 0]
            raise OptionError(f"epas: {self.layers} layers do not grow by {growth}; growth may be {fits}")
        if not 0 < until <= 1:
            raise OptionError(f"epas: until={until:g}; the progress of training is above 0 and at most 1")
        self.model, self.growth, self.mode, self.until = model, growth, mode, until
        for shared in range(growth, self.layers + 1, growth):
            check_map(model, **self._map(shared))
        self.shared = 0
        self._within = ExitStack()

    def at(self, progress: float) -> int:
        """How many layers share at that point of training."""
        steps = self.layers // self.growth
        return self.growth * min(steps, int(progress * steps / self.until + 1e-9))

    def on_step(self, progress: float) -> None:
        """The schedule: progress of training in [0, 1]."""
        self.share(self.at(progress))

    def share(self, layers: int) -> None:
        """Let the last so many layers share from now on."""
        if not 0 <= layers <= self.layers:
            raise OptionError(f"epas: {layers} layers are to share; the model is trained for 0 to {self.layers}")
        if layers == self.shared:
            return
        self._within.close()
        self.shared = 0
        if layers:
            self._within.enter_context(sharing(self.model, **self._map(layers)))
            self.shared = layers

    def _map(self, layers: int) -> dict[str, Any]:
        first = len(self.model.attentions) - layers
        sources: Sources = [None] * first + [first - 1] * layers
        return {"kv_source" if self.mode == "rows" else "attn_source": sources}
