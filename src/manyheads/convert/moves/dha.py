"""From grouped-query attention to decoupled heads: keys and values are shared in groups of their own.

1. Groups. Heads of one kind are joined two at a time, the pair first whose joining spreads the least: scatter
   Σ w_i E|k_i - k̄|² within groups, on calibration inputs, w_i how much scores (or the output) feel head i. This gives
   groups for every number of heads, and what the next head would be worth.
2. How many. A budget of heads, over all layers and both kinds, goes one by one to where scatter falls most (`allot`).
3. Fusion. A group becomes one head, a combination Σ_j ω_j W_j of its own. Scalars commute with rotation. In training,
   W̃_i = Σ_j ω_ij W_j starts at the source, and a loss on the spread within groups grows until they agree (`Fusion`,
   `Lagrangian`, `settle`). Without training, ω is where that ends when the loss is the squared error that scores and
   outputs feel: the minimum of a quadratic in ω.

Choices: the paper says neither how alikeness is measured nor how groups are found; groups here need not be equal.

Source: Chen et al. 2024, arXiv 2406.06567.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manyheads.attention.grouped import Biases
from manyheads.attention.project.dha import DHA, DHAProject
from manyheads.attention.project.gqa import GQA, GQAProject
from manyheads.convert.moves.common import between, like, linear_rows, set_rows
from manyheads.convert.stats import AttentionStats, Pairs
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.seam import SeamAttention

Groups = tuple[int, ...]
"""The group of each key head, numbered in the order of their first heads."""


@dataclass(frozen=True)
class ToDHA:
    """The move: `gqa` with G key heads to `dha` with `keys` key heads and `values` value heads, of G at most.

    fusion: see above. Exact where the heads of every group are equal, and the source where keys = values = G.
    """

    keys: int
    values: int
    fusion: Literal["linear", "mean"] = "linear"

    def refusal(self, spec: Spec) -> str | None:
        """Why a layer with this spec cannot be converted, or None."""
        gqa = next((part for part in spec.parts if isinstance(part, GQA)), None)
        if gqa is None:
            return f"heads are decoupled in gqa, not in {spec}"
        if gqa.v_dim not in (None, gqa.head_dim):
            return f"decoupled keys and values have one width, not those of {spec}"
        if gqa.bias == "qvo":
            return f"decoupled keys have biases where values have, those of {spec} have none"
        if self.fusion == "linear" and (name := between(spec)):
            return f"fusion=linear weighs errors of scores, which {name} hides; use fusion=mean"
        return None

    def __call__(self, attention: SeamAttention, stats: AttentionStats) -> SeamAttention:
        """The converted layer."""
        if why := self.refusal(attention.spec):
            raise OptionError(why)
        trees, wanted = trees_of(attention, stats), (self.keys, self.values)
        if any(not 1 <= count <= attention.layout.kv for count in wanted):
            raise OptionError(
                f"{attention.layout.kv} key heads become 1 to {attention.layout.kv} of either kind, not {wanted}"
            )
        keys, values = (tree.groups[count - 1] for tree, count in zip(trees, wanted, strict=True))
        return self.fuse(attention, stats, keys, values)

    def fuse(self, attention: SeamAttention, stats: AttentionStats, keys: Groups, values: Groups) -> SeamAttention:
        """The converted layer with groups of one's own, whatever numbers the move has."""
        sides, groups = _sides(attention, stats), (keys, values)
        fused = [
            torch.stack([self._fused(side, [i for i, own in enumerate(of) if own == g]) for g in range(max(of) + 1)])
            for side, of in zip(sides, groups, strict=True)
        ]
        return decoupled(attention, groups[0], groups[1], fused[0], fused[1])

    def _fused(self, side: Side, group: list[int]) -> Tensor:
        """One head of a group's, `[d, D + 1]`."""
        rows = side.rows[group]
        if self.fusion == "mean" or len(group) == 1:
            return rows.mean(0)
        felt = torch.einsum("icd,jde->ijce", side.felt[group], rows @ side.root)  # F_i^½ W_j M^½
        gram = torch.einsum("ijce,ikce->jk", felt, felt)
        want = torch.einsum("ijce,iice->j", felt, felt)
        gram += 1e-9 * gram.diagonal().mean().clamp_min(1e-100) * torch.eye(len(group)).to(gram)
        return torch.einsum("j,jcd->cd", torch.linalg.solve(gram, want), rows)


class Side(NamedTuple):
    """Heads of one kind: rows `[G, d, D + 1]`, the root of what is felt of each `[G, d, d]`, that of the inputs."""

    rows: Tensor
    felt: Tensor
    root: Tensor


class Tree(NamedTuple):
    """Groups for 1 to G heads, and the scatter within them, none at G."""

    groups: list[Groups]
    scatter: list[float]


def trees_of(attention: SeamAttention, stats: AttentionStats) -> tuple[Tree, Tree]:
    """Of the key heads and of the value heads."""
    keys, values = (_tree(side) for side in _sides(attention, stats))
    return keys, values


def _sides(attention: SeamAttention, stats: AttentionStats) -> tuple[Side, Side]:
    layout, project = attention.layout, cast(GQAProject, attention.project)
    each, g, d, v = layout.q // layout.kv, layout.kv, layout.qk_width, layout.v_width
    query = stats.query.double() * layout.scale**2
    if layout.rotary is not None:  # over all distances, a pair's two channels are felt alike, and no two pairs together
        pairs, diagonal = Pairs.of(attention), query.diagonal(dim1=1, dim2=2).clone()
        diagonal[:, pairs.re] = diagonal[:, pairs.im] = (diagonal[:, pairs.re] + diagonal[:, pairs.im]) / 2
        query = diagonal.diag_embed()
    output = project.o_proj.weight.detach().double().view(layout.dim, layout.q, v)
    seen = torch.einsum("fe,ehd->fhd", stats.metric.double(), output)
    value = torch.einsum("fhd,fhe,h->hde", seen, seen, stats.value.double())
    found = []
    for linear, width, felt, moment in (
        (project.k_proj, d, query, stats.keys), (project.v_proj, v, value, stats.rows),
    ):  # fmt: skip
        felt = felt.unflatten(0, (g, each)).sum(1)
        found.append(Side(linear_rows(linear).view(g, width, -1), _root(felt), _root(moment)))
    return found[0], found[1]


def _root(matrix: Tensor) -> Tensor:
    """Any R with R Rᵀ = the matrix, symmetric and not negative."""
    values, vectors = torch.linalg.eigh(matrix.double())
    return vectors * values.clamp_min(0).sqrt()[..., None, :] @ vectors.transpose(-1, -2)


def _tree(side: Side) -> Tree:
    """Ward's clustering of heads, each as heavy as it is felt."""
    weight = side.felt.pow(2).sum((1, 2)) / side.rows.shape[1]
    features = (side.rows @ side.root).flatten(1)
    heads = len(features)
    members = {head: [head] for head in range(heads)}
    mass, centre = dict(enumerate(weight.tolist())), dict(enumerate(features))

    def costs(a: int, b: int) -> tuple[float, int, int]:
        both = mass[a] + mass[b]
        share = mass[a] * mass[b] / both if both > 0 else 0.0
        return share * (centre[a] - centre[b]).pow(2).sum().item(), a, b

    queue = [costs(a, b) for a in range(heads) for b in range(a + 1, heads)]
    heapq.heapify(queue)
    groups, scatter = [_numbered(members, heads)], [0.0]
    while len(members) > 1:
        cost, a, b = heapq.heappop(queue)
        if a not in members or b not in members:
            continue
        new = heads + len(groups)
        both = mass[a] + mass[b]
        share = mass[a] / both if both > 0 else 0.5
        centre[new], mass[new] = share * centre[a] + (1 - share) * centre[b], both
        members[new] = members.pop(a) + members.pop(b)
        for other in members:
            if other != new:
                heapq.heappush(queue, costs(other, new))
        groups.append(_numbered(members, heads))
        scatter.append(scatter[-1] + cost)
    return Tree(groups[::-1], scatter[::-1])


def _numbered(members: dict[int, list[int]], heads: int) -> Groups:
    order = sorted(members.values(), key=min)
    return tuple(next(n for n, group in enumerate(order) if head in group) for head in range(heads))


def allot(scatters: Sequence[Sequence[float]], total: int) -> list[int]:
    """Heads for each layer and kind that sum to `total`: one each, then one by one to where scatter falls most.

    scatters: of 1, 2, … heads (`Tree.scatter`).
    """
    most = sum(map(len, scatters))
    if not len(scatters) <= total <= most:
        raise OptionError(f"{total} heads for {len(scatters)} groups of heads; {len(scatters)} to {most} fit")
    counts = [1] * len(scatters)
    for _ in range(total - len(scatters)):
        free = [n for n, count in enumerate(counts) if count < len(scatters[n])]
        gains = {n: scatters[n][counts[n] - 1] - scatters[n][counts[n]] for n in free}
        counts[max(free, key=lambda n: (gains[n], -counts[n], -n))] += 1
    return counts


def decoupled(
    attention: SeamAttention, key_groups: Groups, value_groups: Groups, keys: Tensor, values: Tensor
) -> SeamAttention:
    """A `gqa` layer with the fused heads `[G_K, d, D + 1]`, `[G_V, d, D + 1]` of its key and value heads' groups."""
    layout = attention.layout
    each = layout.q // layout.kv
    gqa = next(part for part in attention.spec.parts if isinstance(part, GQA))
    maps = [tuple(of[head // each] for head in range(layout.q)) for of in (key_groups, value_groups)]
    named = [None if _plain(each) else each for each in maps]
    counts = [max(of) + 1 for of in (key_groups, value_groups)]
    part = DHA(
        k_heads=counts[0], v_heads=counts[1], k_map=named[0], v_map=named[1], head_dim=gqa.head_dim,
        bias=cast(Biases, gqa.bias), scale=gqa.scale,
    )  # fmt: skip
    spec = Spec(tuple(part if isinstance(other, GQA) else other for other in attention.spec.parts))
    new = like(attention, spec)
    kept = {
        name: tensor
        for name, tensor in attention.state_dict().items()
        if not name.startswith(("project.k_proj", "project.v_proj"))
    }
    new.load_state_dict(kept, strict=False)
    made = cast(DHAProject, new.project)
    set_rows(made.k_proj, keys.flatten(0, 1))
    set_rows(made.v_proj, values.flatten(0, 1))
    return new


def _plain(heads: Sequence[int]) -> bool:
    """Whether a map is the one that goes without saying: equal groups of consecutive heads."""
    count = max(heads) + 1
    return len(heads) % count == 0 and [*heads] == [head * count // len(heads) for head in range(len(heads))]


# --- fusion by training


class Fusion(nn.Module):
    """A parametrisation of key or value weights: W̃_i = Σ_j ω_ij W_j over the group of head i; ω = I at the start."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.groups = groups
        own = torch.tensor(groups)
        self.register_buffer("within", (own[:, None] == own).float(), persistent=False)
        self.omega = nn.Parameter(torch.eye(len(groups)))

    def forward(self, rows: Tensor) -> Tensor:
        heads = rows.unflatten(0, (len(self.groups), -1))
        omega = (self.omega * cast(Tensor, self.within)).to(rows.dtype)
        return torch.einsum("ij,j...->i...", omega, heads).flatten(0, 1)


def start_fusion(attention: SeamAttention, key_groups: Groups, value_groups: Groups) -> None:
    """Give a `gqa` layer the scalars ω of both kinds, in place; what it computes does not change."""
    project = cast(GQAProject, attention.project)
    for linear, groups in ((project.k_proj, key_groups), (project.v_proj, value_groups)):
        if len(groups) != attention.layout.kv or {*groups} != {*range(max(groups) + 1)}:
            raise OptionError(f"groups {[*groups]} do not name one for each of {attention.layout.kv} key heads")
        fusion = Fusion(groups).to(linear.weight.device)
        for name in ("weight", "bias")[: 1 if linear.bias is None else 2]:
            parametrize.register_parametrization(linear, name, fusion)


def fusion_loss(attention: SeamAttention) -> Tensor:
    """Σ over groups of both kinds of the mean over pairs of |W̃_i - W̃_j|², biases with their weights."""
    return sum((spread(rows, groups) for rows, groups in _fusing(attention)), torch.zeros(()))


def spread(rows: Tensor, groups: Groups) -> Tensor:
    """Σ over groups of the mean over pairs of |W_i - W_j|², heads `[G, …]`: 2/(n - 1) times the scatter of n heads."""
    total = rows.new_zeros(())
    for group in range(max(groups) + 1):
        own = rows[[i for i, of in enumerate(groups) if of == group]].flatten(1)
        if len(own) > 1:
            total = total + 2 / (len(own) - 1) * (own - own.mean(0)).pow(2).sum()
    return total


def _fusing(attention: SeamAttention) -> list[tuple[Tensor, Groups]]:
    project, found = cast(GQAProject, attention.project), []
    for linear in (project.k_proj, project.v_proj):
        if not parametrize.is_parametrized(linear):
            raise OptionError("this layer has no scalars to fuse by; start_fusion gives it some")
        groups = cast(Fusion, linear.parametrizations["weight"][0]).groups  # type: ignore[index]
        bias = [] if linear.bias is None else [linear.bias[:, None]]
        found.append((torch.cat([linear.weight, *bias], 1).unflatten(0, (len(groups), -1)), groups))
    return found


@torch.no_grad()
def settle(attention: SeamAttention) -> SeamAttention:
    """The `dha` layer of a layer after fusion: each group is replaced by its mean, without a jump where they agree."""
    (keys, key_groups), (values, value_groups) = _fusing(attention)
    fused = [
        torch.stack([rows[[i for i, of in enumerate(groups) if of == g]].mean(0) for g in range(max(groups) + 1)])
        for rows, groups in ((keys, key_groups), (values, value_groups))
    ]
    plain = like(attention, attention.spec)
    own = {name: t for name, t in attention.state_dict().items() if "parametrizations" not in name}
    plain.load_state_dict(own, strict=False)
    padded = [
        torch.nn.functional.pad(rows, (0, 1)) if rows.shape[-1] == attention.dim else rows for rows in fused
    ]  # without a bias, the constant channel is empty
    return decoupled(plain, key_groups, value_groups, *(rows.double() for rows in padded))


@dataclass
class Lagrangian:
    """λ₁ (L - τ) + λ₂ (L - τ)²: a target τ that falls linearly from the first loss to zero, λ by ascent.

    steps: of training, over which τ falls. rate: of ascent.
    """

    steps: int
    rate: float = 0.01
    first: float | None = None
    linear: float = 0.0
    square: float = 0.0

    def target(self, step: int) -> float:
        return (self.first or 0.0) * max(0.0, 1 - step / self.steps)

    def __call__(self, loss: Tensor, step: int) -> Tensor:
        """The penalty; λ then takes a step up its own gradient."""
        if self.first is None:
            self.first = loss.item()
        over = loss - self.target(step)
        penalty = self.linear * over + self.square * over.pow(2)
        self.linear = max(0.0, self.linear + self.rate * over.item())
        self.square = max(0.0, self.square + self.rate * over.item() ** 2)
        return penalty


__all__ = [
    "Fusion", "Groups", "Lagrangian", "ToDHA", "allot", "decoupled", "fusion_loss", "settle", "spread", "start_fusion",
    "trees_of",
]  # fmt: skip
