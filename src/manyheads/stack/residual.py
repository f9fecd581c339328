"""How a sublayer reads what came before it: the running sum, or a mixture of all earlier outputs for each subspace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from manyheads.core.part import OptionError
from manyheads.core.spec import printed, read_one

M = TypeVar("M", bound=nn.Module)


class Residual(nn.Module):
    """What lies between sublayers. A stack of n of them starts with the embeddings x, and for each site 0 … n-1 reads
    the sublayer's input (before its norm) and adds its output; what it reads at site n is its own output.

    The stream is whatever a residual keeps for the tokens of a pass: tensors, in tuples if there are several. line: the
    name by which a spec of a stack asks for it.
    """

    line: ClassVar[str]

    def reset_parameters(self) -> None:
        """First values of its own parameters."""

    def start(self, x: Tensor) -> Any:
        """The stream that holds x alone."""
        raise NotImplementedError

    def read(self, site: int, stream: Any) -> Tensor:
        """`[B, T, D]`, what the sublayer of that site sees."""
        raise NotImplementedError

    def add(self, site: int, stream: Any, y: Tensor) -> Any:
        """The stream with the output of that site's sublayer."""
        raise NotImplementedError

    def step(self, site: int, stream: Any, y: Tensor) -> tuple[Tensor, Any]:
        """Add y, and read for the next site."""
        stream = self.add(site, stream, y)
        return self.read(site + 1, stream), stream


class Sum(Residual):
    """The plain residual connection: every sublayer reads x plus all earlier outputs."""

    line = "sum"

    def start(self, x: Tensor) -> Tensor:
        return x

    def read(self, site: int, stream: Tensor) -> Tensor:
        return stream

    def add(self, site: int, stream: Tensor, y: Tensor) -> Tensor:
        return stream + y


class Source(NamedTuple):
    """Something to read: value `[B, T, D]`, and 1/rms of it `[B, T, 1]`, which all sites need."""

    value: Tensor
    scale: Tensor

    @classmethod
    def of(cls, value: Tensor, eps: float) -> Source:
        wide = torch.promote_types(value.dtype, torch.float32)
        norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True, dtype=wide)
        return cls(value, (norm.square() / value.shape[-1] + eps).rsqrt())


class Route(nn.Module):
    """out_h = Σ_i a_ih s_ih with a_h = softmax_i(q_h · (γ ∘ s_i / rms s_i)_h); slice h is the h-th of H parts of the D
    channels, the rms is over all of them. q = 0 and γ = 1 at the start, which is the plain mean.

    Sources are read where they lie: besides the weights `[N, B, T, H]` nothing is kept for backward.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.gain = (nn.Parameter(torch.empty(dim)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        nn.init.ones_(self.gain)

    def weights(self, sources: Sequence[Source]) -> Tensor:
        """`[N, B, T, H]`."""
        query = self.query * self.gain
        logits = [
            (value * query).unflatten(-1, (self.heads, -1)).sum(-1, dtype=scale.dtype) * scale
            for value, scale in sources
        ]
        return torch.stack(torch.broadcast_tensors(*logits)).softmax(0)

    def forward(self, sources: Sequence[Source]) -> Tensor:
        values = (source.value.unflatten(-1, (self.heads, -1)) for source in sources)
        parts = (weight[..., None] * value for weight, value in zip(self.weights(sources), values, strict=True))
        kind = reduce(torch.promote_types, (source.value.dtype for source in sources))
        return reduce(torch.add, parts).flatten(-2).to(kind)


class Routed(Residual):
    """Every sublayer reads a route over the embeddings and all earlier outputs, none of them summed."""

    line = "mhar"

    def __init__(self, dim: int, sites: int, heads: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.routes = nn.ModuleList(Route(dim, heads) for _ in range(sites))

    def start(self, x: Tensor) -> tuple[Source, ...]:
        return (Source.of(x, self.eps),)

    def read(self, site: int, stream: tuple[Source, ...]) -> Tensor:
        return self.routes[site](stream)

    def add(self, site: int, stream: tuple[Source, ...], y: Tensor) -> tuple[Source, ...]:
        return (*stream, Source.of(y, self.eps))


class Deltas(NamedTuple):
    """total: the plain sum. begun: what it was when the block that runs now began. sources: the null source, and the
    change over each finished block."""

    total: Tensor
    begun: Tensor
    sources: tuple[Source, ...]


class Delta(Residual):
    """The plain sum p, beside which every sublayer also reads a route: p + α Route(n, δ_1 … δ_m). α = 0 at the start.

    δ_j is the change of p over the j-th block of layers, once it is finished; n is learned, 0 at the start.
    """

    line = "mhar(form=delta)"

    def __init__(self, dim: int, sites: int, ends: Iterable[int], heads: int, eps: float) -> None:
        super().__init__()
        self.eps, self.ends = eps, frozenset(ends)
        self.routes = nn.ModuleList(Route(dim, heads) for _ in range(sites))
        self.alpha, self.null = nn.Parameter(torch.empty(sites)), nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.alpha)
        nn.init.zeros_(self.null)

    def start(self, x: Tensor) -> Deltas:
        return Deltas(x, x, (Source.of(self.null.to(x.dtype), self.eps),))

    def read(self, site: int, stream: Deltas) -> Tensor:
        return stream.total + self.alpha[site].to(stream.total.dtype) * self.routes[site](stream.sources)

    def add(self, site: int, stream: Deltas, y: Tensor) -> Deltas:
        total = stream.total + y
        if site not in self.ends:
            return stream._replace(total=total)
        return Deltas(total, total, (*stream.sources, Source.of(total - stream.begun, self.eps)))


@dataclass(frozen=True)
class Plain:
    """Every sublayer reads x plus the sum of all earlier outputs."""

    name: ClassVar[str] = "sum"

    def check(self, dim: int, layers: int) -> None:
        """Raise an `OptionError` for what does not fit."""

    def build(self, dim: int, sublayers: Sequence[int]) -> Residual:
        """The residual of a stack whose layers have so many sublayers each."""
        return Sum()


@dataclass(frozen=True)
class MHAR:
    """Multi-head attention residuals: every sublayer reads, for each of H subspaces, a softmax mixture over depth.

    Sources s_0 (the embeddings) and s_i (output of sublayer i) `[B, T, D]`; a sublayer f reads Route(s_0 … s_i), see
    `Route`, and appends f(norm(…)); a last route over all 2L+1 sources is the output. heads=1 is attention residuals.
    With form=delta the plain sum stays, and a route over the changes of finished blocks of layers is added to what
    sublayers read, and to the output, times α = 0 at the start: a trained model becomes it without any change
    (`to_delta`). 2 D parameters a site (2L+1 sites), and nothing in the cache: depth is read token by token.

    Options: heads H. form. blocks: of the delta form, of about equally many layers (default 8, or a layer each). eps.
    The source leaves open: queries at 0 (as in attention residuals), one α a site, one null source for all sites.

    Source: arXiv 2607.27230; attention residuals arXiv 2603.15031, delta form arXiv 2605.18855.
    """

    name: ClassVar[str] = "mhar"

    heads: int = 8
    form: Literal["replace", "delta"] = "replace"
    blocks: int | None = None
    eps: float = 1e-6

    def check(self, dim: int, layers: int) -> None:
        if self.heads < 1 or dim % self.heads:
            fits = [heads for heads in range(1, dim + 1) if dim % heads == 0]
            raise OptionError(f"mhar: dim={dim} in {self.heads} subspaces; heads may be {fits}")
        if self.blocks is not None and self.form != "delta":
            raise OptionError(f"mhar: blocks={self.blocks} without form=delta; the other form reads every sublayer")
        if self.blocks is not None and not 1 <= self.blocks <= layers:
            raise OptionError(f"mhar: {layers} layers in blocks={self.blocks}; there may be 1 to {layers}")

    def build(self, dim: int, sublayers: Sequence[int]) -> Residual:
        self.check(dim, len(sublayers))
        sites = sum(sublayers) + 1
        if self.form == "replace":
            return Routed(dim, sites, self.heads, self.eps)
        layers, blocks = len(sublayers), min(8, len(sublayers)) if self.blocks is None else self.blocks
        ends = (sum(sublayers[: (block + 1) * layers // blocks]) - 1 for block in range(blocks))
        return Delta(dim, sites, ends, self.heads, self.eps)


RESIDUALS: dict[str, type[Plain] | type[MHAR]] = {each.name: each for each in (Plain, MHAR)}


def read_residual(line: str | Plain | MHAR) -> Plain | MHAR:
    """The options that a text such as `mhar(heads=4)` names."""
    return line if isinstance(line, Plain | MHAR) else read_one(line, _find, "residual")


def _find(name: str) -> type[Plain] | type[MHAR]:
    if name not in RESIDUALS:
        raise OptionError(f"no residual {name!r}; there are {', '.join(RESIDUALS)}")
    return RESIDUALS[name]


def to_delta(model: M, heads: int = 8, blocks: int | None = None) -> M:
    """Turn the plain residual of a stack, or of the model around one, into the delta form of `MHAR`, in place.

    The model computes what it did, bit for bit, until it is trained. A family's own model (`mh.adopt`) adds up its
    stream inside its layers, where nothing can be put between; `manyheads.convert.own.to_own` makes it our decoder.
    """
    stacks: list[Any] = [each for each in model.modules() if isinstance(getattr(each, "residual", None), Residual)]
    if not stacks:
        raise ValueError(
            f"a {type(model).__name__} has no stack of ours: its layers add up the stream themselves; "
            f"manyheads.convert.own.to_own makes a decoder of ours of it"
        )
    made = MHAR(heads, "delta", blocks)
    for stack in stacks:
        if not isinstance(stack.residual, Sum):
            raise ValueError(f"the residual is {stack.residual.line} already; the delta form takes over a sum")
        made.check(stack.dim, len(stack.sublayers))
    for stack in stacks:
        like = next(stack.parameters())
        stack.residual = made.build(stack.dim, stack.sublayers).to(like.device, like.dtype).train(stack.training)
    config = getattr(model, "config", None)
    if config is not None:
        config.residual = printed(made)
    return model
