"""Weights of all layers as combinations of a few matrices that they have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.attention.grouped import Biases, GQAProject, grouped_cost, grouped_layout
from manyheads.core.cost import Cost
from manyheads.core.linear import linear
from manyheads.core.part import Heads, OptionError, Part, Site, borrow
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class MASA(Part):
    """`gqa` with a dictionary for each type of weight: W_l = Σ_s c_ls D_s, of S atoms D_s that all layers share.

    Types are q, k, v and o, each with atoms of its own; c_l `[S]` is a layer's own. Biases are each layer's own too.
    In training c_l is a function of an embedding e_l of the layer, one for all types: u = W_3 g(W_2 g(W_1 e_l)), with
    one such network a type for all layers, and c_l = a_l u / |u|. `manyheads.convert.masa.freeze` writes c_l down and
    drops the networks. A stack keeps and saves atoms once; W_l is formed once a pass. Caches 2·G·d numbers a token, as
    `gqa`. Parameters of a type: S·d_in·d_out + S·L, and for the networks E·(2E + S) + L, once E·L.

    Options: kv_heads G, head_dim, bias, scale as in `gqa`. atoms S: default a third of the layers. types: `qkv`, or
    `qkvo`: of the four W_O loses most. coeff: `mlp`, or `free`, c_l as parameters. embed E. group: layers with one
    number share (a model may have several dictionaries). ranks: for each of the types the rank of a rest W_l - Σ c D of
    the layer's own.

    Choices: the source gives no initialisation. Atoms start as a layer's weights would and c_l of unit length, so that
    W_l starts as large; E is the width of the network too, which has no biases, and g is GELU after a division by the
    rms. With one atom there is nothing to mix, and c_l is free.

    Source: MASA 2025, arXiv 2508.04581.
    """

    name: ClassVar[str] = "masa"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2508.04581"
    examples: ClassVar = (
        {"atoms": 2, "kv_heads": 2},
        {"atoms": 3, "types": "qkvo", "coeff": "free", "bias": "qkvo", "ranks": (2, 0, 1, 3)},
        {"head_dim": 8},
    )

    kv_heads: int | None = None
    head_dim: int | None = None
    bias: Biases = "none"
    scale: float | None = None
    atoms: int | None = None
    types: Literal["qkv", "qkvo"] = "qkv"
    coeff: Literal["mlp", "free"] = "mlp"
    embed: int = 64
    group: int = 0
    ranks: tuple[int, ...] = ()

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys", "several keys", "values alone"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.size(site) < 1 or self.embed < 1 or self.group < 0:
            raise OptionError(
                f"masa: atoms={self.atoms}, embed={self.embed}, group={self.group}; atoms and embed are 1 or more, "
                "group 0 or more"
            )
        if self.ranks and (len(self.ranks) != len(self.types) or min(self.ranks) < 0):
            raise OptionError(f"masa: ranks={[*self.ranks]}; one, 0 or more, for each type of {self.types}")
        return grouped_layout(self.name, heads, self.kv_heads, self.head_dim, self.scale)

    def size(self, site: Site) -> int:
        """S, with the default filled in."""
        return max(1, site.layers // 3) if self.atoms is None else self.atoms

    def mixes(self, site: Site) -> bool:
        """Whether coefficients come from the layer's embedding."""
        return self.coeff == "mlp" and self.size(site) > 1

    def rank(self, kind: str) -> int:
        return self.ranks[self.types.index(kind)] if self.ranks else 0

    def kinds(self, after: Heads, site: Site) -> dict[str, tuple[int, int]]:
        """The weights that a layer here combines, with their shapes `[out, in]`."""
        source, made = site.context_dim or after.dim, {}
        if site.attn_source is None:
            made["q"] = after.q * after.qk_width, after.dim
            if site.kv_source is None:
                made["k"] = after.kv * after.keys * after.qk_width, source
        if site.kv_source is None:
            made["v"] = after.kv * after.v_width, source
        made["o"] = after.dim, after.out * after.out_width
        return {kind: shape for kind, shape in made.items() if kind in self.types}

    def named(self, site: Site, what: str) -> str:
        return f"masa {'cross ' if site.cross else ''}{self.group} {what}"

    def build(self, before: Heads, after: Heads, site: Site) -> MASAProject:
        return MASAProject(self, after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        base, size, mixes = grouped_cost(after, site, self.bias), self.size(site), self.mixes(site)
        shared: list[tuple[str, int]] = []
        kinds = self.kinds(after, site)
        own = self.embed * (mixes and bool(kinds))
        for kind, (rows, columns) in kinds.items():
            own += (1 if mixes else size) + self.rank(kind) * (rows + columns) - rows * columns
            shared.append((self.named(site, kind), size * rows * columns))
            if mixes:
                shared.append((self.named(site, f"{kind} mixer"), self.embed * (2 * self.embed + size)))
        total = base.parameters + own + sum(numbers for _, numbers in shared)
        return base._replace(parameters=total, shared=() if site.shared is None else tuple(shared))


class Mixer(nn.Module):
    """Directions of coefficients from layers' embeddings: W_3 g(W_2 g(W_1 e)), g being GELU of e / rms(e)."""

    def __init__(self, embed: int, atoms: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(embed, embed, bias=False) for _ in range(2))
        self.last = nn.Linear(embed, atoms, bias=False)

    def forward(self, e: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            e = F.gelu(F.rms_norm(layer(e), e.shape[-1:], eps=1e-12))
        return F.normalize(self.last(e), dim=-1)


class Embedded(nn.Module):
    """What a layer is to the networks that make its coefficients."""

    def __init__(self, embed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(embed))


class Combined(nn.Module):
    """A linear map whose weight is Σ_s c_s D_s, and A B if it has a rest."""

    atoms: nn.ModuleDict  # one linear map, from d_in to all atoms' d_out side by side
    mixer: Mixer
    embedded: Embedded

    def __init__(
        self, options: MASA, site: Site, kind: str, shape: tuple[int, int], bias: bool, embedded: Embedded | None
    ) -> None:
        super().__init__()
        (self.rows, columns), self.kind = shape, f"{kind}_proj"
        size, rank = options.size(site), options.rank(kind)

        def make() -> nn.ModuleDict:
            return nn.ModuleDict({self.kind: nn.Linear(columns, size * self.rows, bias=False)})

        try:
            borrow(self, "atoms", site, options.named(site, kind), make)
        except OptionError as error:
            raise OptionError(
                f"masa: layer {site.layer} combines {size} atoms of {[*shape]} for its {self.kind}; give it another "
                f"group, or what earlier layers of group={options.group} have: {error}"
            ) from None
        if embedded is None:
            self.coefficients = nn.Parameter(F.normalize(torch.randn(size), dim=0))
        else:
            borrow(self, "mixer", site, options.named(site, f"{kind} mixer"), lambda: Mixer(options.embed, size))
            object.__setattr__(self, "embedded", embedded)  # the projection owns it, once for all types
            self.length = nn.Parameter(torch.ones(1))
        self.rest = nn.ParameterList()
        if rank:
            self.rest = nn.ParameterList([torch.zeros(self.rows, rank), torch.randn(rank, columns) * columns**-0.5])
        self.bias = nn.Parameter(torch.zeros(self.rows)) if bias else None

    @property
    def dictionary(self) -> Tensor:
        """D `[S, d_out, d_in]`."""
        return cast(nn.Linear, self.atoms[self.kind]).weight.unflatten(0, (-1, self.rows))

    @property
    def mixed(self) -> Tensor:
        """c `[S]`."""
        if "coefficients" in self._parameters:
            return self.coefficients
        return self.length * self.mixer(self.embedded.weight)

    @property
    def weight(self) -> Tensor:
        """W `[d_out, d_in]`."""
        atoms = self.dictionary
        weight = (self.mixed.to(atoms.dtype) @ atoms.flatten(1)).unflatten(0, (self.rows, -1))
        return weight + self.rest[0] @ self.rest[1] if len(self.rest) else weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class MASAProject(GQAProject):
    def __init__(self, options: MASA, heads: Heads, site: Site) -> None:
        with torch.device("meta"):  # those that are combined take their places
            super().__init__(heads, site, options.bias)
        device = torch.empty(0).device
        kinds, mixes = options.kinds(heads, site), options.mixes(site)
        self.embedded = Embedded(options.embed) if kinds and mixes else None
        for kind in "qkvo":
            plain: nn.Linear | None = getattr(self, f"{kind}_proj", None)
            if kind in kinds:
                biased = plain is not None and plain.bias is not None
                made: nn.Module = Combined(options, site, kind, kinds[kind], biased, self.embedded)
            elif plain is not None:
                made = nn.Linear(plain.in_features, plain.out_features, plain.bias is not None, device=device)
            else:
                continue
            setattr(self, f"{kind}_proj", made)

    @property
    def combined(self) -> dict[str, Combined]:
        """The maps of a dictionary, by type."""
        found = {kind: getattr(self, f"{kind}_proj", None) for kind in "qkvo"}
        return {kind: each for kind, each in found.items() if isinstance(each, Combined)}
