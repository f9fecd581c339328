"""What an export did, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class ExportError(ValueError):
    """A model that a format cannot hold, or a file that does not compute what the model does. Nothing is left of it."""


@dataclass(frozen=True)
class ExportReport:
    """Facts of a checkpoint that was written, reloaded by its own class, and compared with the model.

    Attributes:
        folder: where it is.
        format: the name in `FORMATS`.
        loads_as: the class that reads it.
        dtype: of its weights.
        bytes: size of the weights.
        cache_floats: numbers that the class caches for each token and layer (the mean over layers where they differ).
        rank, rope_dim, nope_dim, v_dim: latent widths of the stock class, 0 where it has none.
        rope_type: of the stock config, empty for other formats.
        bound: certified relative error of the latents that stand for un-normed ones, over all inputs (0: none does).
        difference: largest |Δ logit| to the model on random tokens, after reloading.
        kl: mean KL(model || file) there, nats.
        lossless: what is carried over exactly (up to rounding).
        transformers_only: what other servers of the same class (vLLM, SGLang) do not honour.
        notes: what else changed.
    """

    folder: Path
    format: str
    loads_as: str
    dtype: str
    bytes: int
    cache_floats: float
    difference: float
    kl: float
    rank: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    v_dim: int = 0
    rope_type: str = ""
    bound: float = 0.0
    lossless: tuple[str, ...] = ()
    transformers_only: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.folder}: {self.loads_as}, {self.dtype}, {self.bytes:,} bytes",
            f"cache: {self.cache_floats:g} floats per token and layer",
            f"reloaded: largest |Δ logit| {self.difference:.1e}, KL {self.kl:.1e}",
        ]
        if self.bound:
            lines.append(f"latent norms neutralised: relative error at most {self.bound:.1e} on any input")
        for title, entries in (
            ("lossless", self.lossless),
            ("transformers only", self.transformers_only),
            ("note", self.notes),
        ):
            lines += [f"{title}: {entry}" for entry in entries]
        return "\n".join(lines)
