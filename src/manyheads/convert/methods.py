"""Ways to shrink a cache, by name and options: what `--to` reads, such as `gqa(mean)` or `mha2mla(keep=uniform)`.

`mla` and `gqa` are the library's own, fitted to what each layer's output feels. Many published methods are the same two
moves with other choices, each under its own name; every choice can be changed for any of them. The others are moves of
their own: `dha`, `qkv-sharing`, `mfa`, `tensorllm`, `retrieval_distill`; `share` goes over layers.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import ClassVar, Literal

from manyheads.core.part import OptionError
from manyheads.core.spec import SpecError, printed, read_one

Slots = Literal["fitted", "complex", "rorope", "heads"]
Keep = Literal["damage", "high", "low", "uniform", "norm"]
Factor = Literal["fitted", "activations", "weights"]
Merging = Literal["best", "fitted", "lowrank", "mean", "first", "random"]
Target = Literal["cache", "params", "speed"]
Move = Literal["mla", "gqa", "auto", "dha", "qkv-sharing", "mfa", "tensorllm", "retrieval", "share"]


@dataclass(frozen=True)
class Method:
    """What all have: a name, the move behind it, the paper."""

    name: ClassVar[str]
    move: ClassVar[Move]
    paper: ClassVar[str] = ""

    def __str__(self) -> str:
        return printed(self)


@dataclass(frozen=True)
class Auto(Method):
    """Each layer becomes what harms least within the budget: a latent, fewer key heads, a reader (see `planner`).

    target: what the budget is a share of, the `cache`, the attention's `params`, or the numbers that a decode step
        reads (`speed`). context: tokens that are cached when it does.
    """

    name: ClassVar[str] = "auto"
    move: ClassVar = "auto"

    target: Target = "cache"
    context: int = 2048

    def __post_init__(self) -> None:
        if self.context < 1:
            raise OptionError(f"context={self.context} tokens; it is at least one")
        if self.context != 2048 and self.target != "speed":
            raise OptionError(f"context={self.context} is of target=speed, not of target={self.target}")


@dataclass(frozen=True)
class Merge(Method):
    """Fewer key/value heads.

    how: `fitted` (see `moves.gqa`), `lowrank` (principal directions of a group's keys and values), `mean` or `first`
    of each group, `random` new heads; `best` is fitted or mean, whichever harms a layer less. basis: what the principal
    directions of `lowrank` are those of.
    """

    name: ClassVar[str] = "gqa"
    move: ClassVar = "gqa"

    how: Merging = "best"
    basis: Literal["activations", "weights"] = "activations"

    def __post_init__(self) -> None:
        if self.basis == "weights" and self.how != "lowrank":
            raise OptionError(f"basis=weights is an option of how=lowrank, not of how={self.how}")


@dataclass(frozen=True)
class GqaUptrain(Merge):
    """The mean of each group of key and value heads, then training (Ainslie et al. 2023)."""

    name: ClassVar[str] = "gqa_uptrain"
    paper: ClassVar[str] = "arXiv 2305.13245"

    how: Merging = "mean"


@dataclass(frozen=True)
class KVHeadLowRank(Merge):
    """The principal directions of each group's keys and values (Yu et al. 2024)."""

    name: ClassVar[str] = "kv_head_lowrank"
    paper: ClassVar[str] = "arXiv 2406.07056"

    how: Merging = "lowrank"


@dataclass(frozen=True)
class Latent(Method):
    """One latent and one rotary key in place of every head's keys and values (see `moves.mla`).

    keep: which components go on turning. `damage`: those whose rotation matters most, the same in all layers; `high`,
        `low`, `uniform`: the fastest or slowest frequencies, or every n-th; `norm`: those of each key head whose
        queries and keys are largest.
    slots: what a component is made of. `fitted`: key heads mixed per frequency, by how queries feel them; `complex`:
        the same, all heads weighing alike; `rorope`: with real numbers only; `heads`: each key head's own numbers.
    rotary: channels that turn, of the shared key, or of each key head with slots=heads; none: by the budget.
    stopped: what a component that no longer turns takes in its place, the `mean` of its rotation, or `zero` angle.
    fold: neighbouring frequencies that are mixed as if they were one; 0 lets each layer take the number that harms it
        least, from the stride of keep=uniform on.
    factor: the low rank is that of the output's error (`fitted`), of the `activations`, or of the `weights`.
    latents: one for keys and values (`joint`) or one each (`split`).
    balance: size of keys against values before a joint rank; 0 leaves them as they are.
    ranks: `uniform`, or `adjusted` to what each layer loses, at the same sum.
    """

    name: ClassVar[str] = "mla"
    move: ClassVar = "mla"

    keep: Keep = "damage"
    slots: Slots = "fitted"
    rotary: int | None = None
    stopped: Literal["mean", "zero"] = "mean"
    fold: int = 1
    factor: Factor = "fitted"
    latents: Literal["joint", "split"] = "joint"
    balance: float = 0.0
    ranks: Literal["uniform", "adjusted"] = "uniform"

    def __post_init__(self) -> None:
        if self.keep == "damage" and self.slots != "fitted":
            raise OptionError(
                f"keep=damage chooses among slots=fitted; with slots={self.slots} keep is high, low or uniform"
                + (", or norm" if self.slots == "heads" else "")
            )
        if self.keep == "norm" and self.slots != "heads":
            raise OptionError(f"keep=norm compares the pairs of each head: slots=heads, not slots={self.slots}")
        if self.rotary is not None and (self.rotary < 2 or self.rotary % 2):
            raise OptionError(f"rotary={self.rotary} channels do not pair up; an even number from 2 on does")
        if self.fold < 0 or (self.fold != 1 and self.slots != "rorope"):
            raise OptionError(f"fold={self.fold} with slots={self.slots}; frequencies are folded with slots=rorope")
        if self.fold == 0 and self.keep != "uniform":
            raise OptionError(f"fold=0 starts at the stride of keep=uniform, which keep={self.keep} has not; give one")
        if self.balance < 0:
            raise OptionError(f"balance={self.balance:g} is no ratio of sizes; 1 makes keys as large as values")
        if self.balance and (self.factor == "fitted" or self.latents == "split"):
            why = (
                "factor=fitted weighs both by what the output feels" if self.factor == "fitted" else "of latents=split"
            )
            raise OptionError(f"balance has no use: {why}; it is for a joint rank of activations or weights")


@dataclass(frozen=True)
class MHA2MLA(Latent):
    """Each key head keeps some pairs; a joint SVD of the weights of the rest (Ji et al. 2025).

    A start for training and not a model to use as it is, by design: most pairs stop at angle zero, and the SVD knows
    neither inputs nor what outputs feel (its authors fine-tune everything; reports of their code start at a loss of 12
    to 16). SmolLM2 at half of its cache has a perplexity of about 2,500 before healing and 22.2 after 16 steps a layer
    on 4,096 tokens.
    """

    name: ClassVar[str] = "mha2mla"
    paper: ClassVar[str] = "arXiv 2502.14837"

    keep: Keep = "norm"
    slots: Slots = "heads"
    stopped: Literal["mean", "zero"] = "zero"
    factor: Factor = "weights"


@dataclass(frozen=True)
class TransMLA(Latent):
    """RoRoPE, FreqFold, balanced keys and values, joint principal components (Meng et al. 2025)."""

    name: ClassVar[str] = "transmla"
    paper: ClassVar[str] = "arXiv 2502.07864"

    keep: Keep = "uniform"
    slots: Slots = "rorope"
    stopped: Literal["mean", "zero"] = "zero"
    fold: int = 0
    factor: Factor = "activations"
    balance: float = 1.0


@dataclass(frozen=True)
class CARE(Latent):
    """TransMLA's slots; keys and values apart in the metric of the activations (CARE 2026)."""

    name: ClassVar[str] = "care"
    paper: ClassVar[str] = "arXiv 2603.17946"

    keep: Keep = "uniform"
    slots: Slots = "rorope"
    stopped: Literal["mean", "zero"] = "zero"
    fold: int = 0
    factor: Factor = "activations"
    latents: Literal["joint", "split"] = "split"


@dataclass(frozen=True)
class Decoupled(Method):
    """Key heads and value heads in different numbers, each shared by heads that are alike (Chen et al. 2024).

    fusion: what heads of a group become: `linear`, the combination of their weights that scores and outputs feel least,
        or their `mean`.
    heads: how many each layer has of either kind: `adjusted` to where heads differ most, at the same sum over all
        layers, or `uniform`.
    """

    name: ClassVar[str] = "dha"
    move: ClassVar = "dha"
    paper: ClassVar[str] = "arXiv 2406.06567"

    fusion: Literal["linear", "mean"] = "linear"
    heads: Literal["adjusted", "uniform"] = "adjusted"


@dataclass(frozen=True)
class Tied(Method):
    """Keys are the values, so that one of them is cached (arXiv 2606.04032); fewer key heads below half of the cache.

    how: `fitted`, each head's output reads the values as the best linear map of its keys; `copy`, as they are, which is
        the paper's layer and a start for training.
    """

    name: ClassVar[str] = "qkv-sharing"
    move: ClassVar = "qkv-sharing"
    paper: ClassVar[str] = "arXiv 2606.04032"

    how: Literal["fitted", "copy"] = "fitted"


@dataclass(frozen=True)
class Wide(Method):
    """One wide key and value head that all query heads read (MFA, Hu et al. 2024).

    key_reuse: values are read off the keys, which alone are cached.
    q_rank: of the queries' shared low rank; none: nothing of them is lost.
    """

    name: ClassVar[str] = "mfa"
    move: ClassVar = "mfa"
    paper: ClassVar[str] = "arXiv 2412.19255"

    key_reuse: bool = False
    q_rank: int | None = None

    def __post_init__(self) -> None:
        if self.q_rank is not None and self.q_rank < 1:
            raise OptionError(f"q_rank={self.q_rank} must be positive")


@dataclass(frozen=True)
class Tensorised(Method):
    """The weights of all heads as one tensor of low Tucker rank (TensorLLM 2025): fewer numbers, the same cache.

    ranks: R₁ of x's channels (default half of them), R₂ of a head's (default all), R₃ of the four kinds of weights
        (default all; at most 2 where key heads are shared and make a tensor of their own with the values).
    layers: which layers (default all; the paper changes one, found by trying).
    sweeps: alternating ones, at most; fewer where the error no longer falls.
    """

    name: ClassVar[str] = "tensorllm"
    move: ClassVar = "tensorllm"
    paper: ClassVar[str] = "arXiv 2501.15674"

    ranks: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    sweeps: int = 100

    def __post_init__(self) -> None:
        if self.ranks is not None and (len(self.ranks) != 3 or min(self.ranks) < 1):
            raise OptionError(f"ranks={[*self.ranks]} are not three positive numbers [R1, R2, R3]")
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            raise OptionError(f"layers={[*self.layers]} are not numbers of layers, counted from 0")
        if self.sweeps < 0:
            raise OptionError(f"sweeps={self.sweeps}; 0 is the first guess, by singular vectors")


@dataclass(frozen=True)
class Retrieval(Method):
    """The heads that retrieve from the context stay, all others become recurrent (arXiv 2602.11374).

    A start for training: `--distil`, or `manyheads heal --train all`. The budget is of rows; each recurrent head keeps
    a state besides, the same for any length.

    heads: how many stay in all layers, the most important first; none: as many as the budget has key heads for.
    threshold: how much accuracy of look-ups must be lost without a head for it to stay; none: any. state: N of a
        recurrent head (default its width). pairs: of a look-up; fewer where the text has few tokens.
    """

    name: ClassVar[str] = "retrieval_distill"
    move: ClassVar = "retrieval"
    paper: ClassVar[str] = "arXiv 2602.11374"

    heads: int | None = None
    threshold: float | None = None
    state: int | None = None
    pairs: int = 32

    def __post_init__(self) -> None:
        if self.heads is not None and self.heads < 0:
            raise OptionError(f"heads={self.heads}; 0 keeps none")
        if self.threshold is not None and not -1 <= self.threshold <= 1:
            raise OptionError(f"threshold={self.threshold:g} is no difference of accuracies, -1 to 1")
        if self.pairs < 1 or (self.state is not None and self.state < 1):
            raise OptionError(f"pairs={self.pairs}, state={self.state}; at least 1")


@dataclass(frozen=True)
class Shared(Method):
    """Layers read the cached rows of an earlier layer (KVSharer, Yang et al. 2024).

    search: `kvsharer`, the layers whose rows are least alike, as long as the last hidden states stay near the source's;
        or `damage`, where the calibration loss rises least, measured for every pair of layers: many passes more.
    threshold: of `kvsharer`, the cosine of these hidden states below which a pair is not taken.
    """

    name: ClassVar[str] = "share"
    move: ClassVar = "share"
    paper: ClassVar[str] = "arXiv 2410.18517"

    search: Literal["kvsharer", "damage"] = "kvsharer"
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not -1 <= self.threshold <= 1:
            raise OptionError(f"threshold={self.threshold} is no cosine, -1 to 1")


METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Latent, Merge, Auto, TransMLA, MHA2MLA, CARE, GqaUptrain, KVHeadLowRank, Decoupled, Tied, Wide, Tensorised,
        Retrieval, Shared,
    )
}  # fmt: skip


def read_method(line: str | Method) -> Method:
    """A method from a line; an error points at the token and says what fits."""
    return line if isinstance(line, Method) else read_one(line, find_method)


def find_method(name: str) -> type[Method]:
    """The options of a method by its name."""
    if name not in METHODS:
        near = difflib.get_close_matches(name.lower(), METHODS, n=2)
        said = f"; did you mean {' or '.join(near)}?" if near else ""
        raise SpecError(f"no method {name!r} (there are {', '.join(METHODS)}){said}")
    return METHODS[name]
