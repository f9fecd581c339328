"""What a checkpoint says of its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from manyheads.core.check import check_share, check_whole
from manyheads.core.spec import printed
from manyheads.stack.heads import HeadCounts, head_counts
from manyheads.stack.loops import Turns
from manyheads.stack.maps import Map
from manyheads.stack.melt import read_melt
from manyheads.stack.residual import read_residual
from manyheads.stack.sources import check_ffns, per_layer

OWN: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": None,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "ffn": "swiglu",
    "residual": "sum",
    "loops": 1,
    "looped": None,
    "melt": None,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "max_position_embeddings": 2048,
    "use_cache": True,
}
"""Fields of our own decoder, with their defaults. With a base they read what the base says."""


class ManyheadsConfig(PreTrainedConfig):
    """The spec of every layer's attention, and the model around it: a family's (`base`), or our own decoder.

    >>> ManyheadsConfig(specs="mla(rank=64) + moh(top=6)", hidden_size=256, num_hidden_layers=4, vocab_size=1000)

    Args:
        base: config of the family whose model surrounds the attention layers; None for our own decoder.
        specs: a spec line for all layers, or one a layer (or, with `loops`, one for each turn of each layer).
        heads: query heads, one count or one a layer (default: the model's), or a schedule such as `step(3, 6)`, which
            is kept as a list.
        kv_source: for each layer, None, or the earlier layer whose cached rows it reads; or a map (`stack.maps`), which
            is kept as a list. attn_source: likewise the earlier layer by whose attention weights it weighs its values.
        attention_path: where the model keeps its attention modules.
        weight_dropout: probability of dropping an attention weight in training (default: what the model's config calls
            `attention_dropout`). output_dropout: of a channel of an attention layer's output, where the family's own
            attention module drops it and not the block around it.
        aux_weight: factor of the auxiliary losses' mean in the loss.
        notes: how the checkpoint came to be (source, budget, text, figures); not read by the model.
        kwargs: without a base, fields of our own decoder (see `OWN`: vocab_size, hidden_size, …), and what every
            transformers config has (tie_word_embeddings, token ids, …).

    What does not fit (a spec, the number of layers, a source) is a ValueError here, before a model exists.
    """

    model_type = "manyheads"
    has_no_defaults_at_init = True

    def __init__(
        self,
        base: dict[str, Any] | PreTrainedConfig | None = None,
        specs: str | Sequence[str] = "gqa",
        heads: HeadCounts | None = None,
        kv_source: Map = None,
        attn_source: Map = None,
        attention_path: str | None = None,
        weight_dropout: float | None = None,
        output_dropout: float = 0.0,
        notes: dict[str, Any] | None = None,
        aux_weight: float = 0.01,
        **kwargs: Any,
    ) -> None:
        self.base = base = AutoConfig.for_model(**base) if isinstance(base, dict) else base
        if "meta" in kwargs:
            raise ValueError(
                "meta tokens are not rows of a transformers cache; `Decoder` and `Stack` have them (meta=)"
            )
        if base is None:
            for name, default in OWN.items():
                setattr(self, name, kwargs.pop(name, default))
            names = ("vocab_size", "hidden_size", "num_hidden_layers", "loops")
            check_whole(**{name: getattr(self, name) for name in names})
            ffns = per_layer(self.ffn, self.num_hidden_layers, "feed-forwards")
            lines = [str(feed) for feed in check_ffns(ffns, self.hidden_size, self.intermediate_size)]
            self.ffn = lines if isinstance(self.ffn, list | tuple) else lines[0]
        else:
            self._agree(base, kwargs)
            kwargs.setdefault("tie_word_embeddings", base.tie_word_embeddings)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                kwargs.setdefault(name, getattr(base, name, None))
        layers = self.num_hidden_layers
        what, counts = ("num_attention_heads", self.num_attention_heads) if heads is None else ("heads", heads)
        self.heads = head_counts(counts, self.hidden_size, layers, what)
        turns = Turns.of(specs, self.heads, kv_source, attn_source, *self._loops)
        turns.check(self.hidden_size, max_len=self.max_position_embeddings if base is None else None)
        self.kv_source, self.attn_source = (
            turns.given(turns.once(sources)) for sources in (turns.kv_source, turns.attn_source)
        )
        lines = [str(spec) for spec in turns.specs]
        once = turns.once(lines)
        self.specs = once if lines == [once[block] for block in turns.blocks] else lines
        if base is None:
            residual = read_residual(self.residual)
            last = layers - (looped := layers if self.looped is None else self.looped)
            residual.check(self.hidden_size, self.loops * looped + last)
            self.residual = printed(residual)
            melt = read_melt(self.melt)
            if melt is not None:
                melt.check(turns.layers(self.hidden_size, max_len=self.max_position_embeddings), self.loops)
                self.melt = printed(melt)
        self.attention_path = attention_path or (
            "decoder.stack.blocks.{}.attention" if base is None else "model.layers.{}.self_attn"
        )
        check_share(output_dropout=output_dropout, weight_dropout=0.0 if weight_dropout is None else weight_dropout)
        self.weight_dropout, self.output_dropout = weight_dropout, output_dropout
        self.notes = dict(notes or {})
        self.aux_weight = aux_weight
        kwargs.setdefault("tie_word_embeddings", True)
        super().__init__(**kwargs)

    @property
    def dropouts(self) -> tuple[float, float]:
        """Of attention weights, and of attention outputs."""
        weights = self.weight_dropout
        return getattr(self, "attention_dropout", 0.0) if weights is None else weights, self.output_dropout

    @property
    def turns(self) -> Turns:
        """Spec, heads and source of every layer with a place in the cache, in the order they run."""
        return Turns.of(self.specs, self.heads, self.kv_source, self.attn_source, *self._loops)

    @property
    def _loops(self) -> tuple[int, int | None]:
        """How often layers have a place in the cache, and how many of the first: those of a melted stack have one."""
        if self.base is not None:
            return 1, None
        return (1 if self.melt is not None else self.loops), self.looped

    @staticmethod
    def _agree(base: PreTrainedConfig, given: dict[str, Any]) -> None:
        """A field that the base decides cannot be given another value."""
        for name in given.keys() & (OWN.keys() - {"use_cache"}):
            if given[name] != getattr(base, name, None):
                raise ValueError(f"{name}={given[name]!r}: the base config says {getattr(base, name, None)!r}")

    def __getattr__(self, name: str) -> Any:
        base = self.__dict__.get("base")
        if name in OWN and base is not None:
            return getattr(base, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        return self if self.base is None else self.base

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"base": None if self.base is None else self.base.to_dict()}
