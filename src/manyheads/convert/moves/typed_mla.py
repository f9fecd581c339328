"""From grouped-query attention to latents whose low rank is each token kind's own (MHA2MLA-VLM).

Key heads keep some rotary pairs, as in `mha2mla` (slots=heads, the others stop at angle zero). Of what stands still,
[K ; V] = W x, each kind m gets the best up_m · down_m in the activations of its own tokens, S_m = E x xᵀ over tokens of
kind m: the least E_m |(W - up_m down_m) x|², Σ of the eigenvalues of W S_m Wᵀ beyond the rank. No inverse of S_m is
taken, so a singular one is exact on what its tokens span.

Choices: biases of keys and values are one more column of W. Which pairs are kept: the authors' files of ranks ("MKL")
come without the code that made them; `rotation_kl` is a reading of the name: how far the attention rows of a head move
(KL) when the pair does not turn.

Source: MHA2MLA-VLM 2026, arXiv 2601.11464.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from manyheads.attention.project.gqa import GQAProject
from manyheads.attention.project.mla import MLA
from manyheads.attention.project.typed_mla import TypedLatentProject, TypedMLA
from manyheads.convert.methods import Latent
from manyheads.convert.moves.common import like
from manyheads.convert.moves.mla import ToMLA
from manyheads.convert.stats import AttentionStats, Pairs, positions_of
from manyheads.core.mask import Axis
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.seam import SeamAttention

HOW = Latent(keep="high", slots="heads", stopped="zero", factor="activations")
"""The steps of `mha2mla`, in the metric of the activations; which pairs stay is given."""


@dataclass(frozen=True)
class ToTypedMLA:
    """The move: `gqa` with RoPE to `typed_mla(kinds, rank)`.

    rank: of each kind's latent, clipped where nothing more is lost. turning: (pair, key head) that go on turning, from
    `most_turning` or `moves.mla.chosen`.
    """

    rank: int
    turning: tuple[tuple[int, int], ...]

    @property
    def one(self) -> ToMLA:
        """The same for a single kind."""
        return ToMLA(self.rank, self.turning, HOW)

    def refusal(self, spec: Spec) -> str | None:
        """Why a layer with this spec cannot be converted, or None."""
        return self.one.refusal(spec)

    def target(self, attention: SeamAttention, kinds: int) -> Spec:
        """The spec of the converted layer."""
        spec = self.one.target(attention)
        mla = cast(MLA, spec.by_stage["project"][0])
        names = [field.name for field in dataclasses.fields(TypedMLA) if field.name != "kinds"]
        part = TypedMLA(kinds=kinds, **{name: getattr(mla, name) for name in names})
        return Spec(tuple(part if other is mla else other for other in spec.parts)).resolve(attention.site)

    def __call__(self, attention: SeamAttention, stats: AttentionStats, moments: Sequence[Tensor]) -> SeamAttention:
        """The converted layer. moments: S_m of each kind, `[D + 1, D + 1]`, the last channel the constant one."""
        if why := self.refusal(attention.spec):
            raise OptionError(why)
        each = [cast(TypedLatentProject, self.one(attention, stats._replace(plain=m, rows=m)).project) for m in moments]
        new = like(attention, self.target(attention, len(moments)))
        made, rank = cast(TypedLatentProject, new.project), self.one.clipped(attention)
        made.q_proj.load_state_dict(each[0].q_proj.state_dict())
        made.o_proj.load_state_dict(each[0].o_proj.state_dict())
        with torch.no_grad():
            made.kv_b_proj.weight.copy_(torch.cat([one.kv_b_proj.weight for one in each], 1))
            for name in [name for name, _ in made.kv_a_proj.named_parameters()]:
                downs = [getattr(one.kv_a_proj, name) for one in each]
                both = torch.cat([*(down[:rank] for down in downs), downs[0][rank:]])
                getattr(made.kv_a_proj, name).copy_(both)
        for stage in ("selects", "attends", "gates"):
            getattr(new, stage).load_state_dict(getattr(attention, stage).state_dict())
        return new


def kind_moments(x: Tensor, kinds: Tensor, count: int = 2) -> list[Tensor]:
    """S_m of inputs x `[N, T, D]` whose kinds are `[N, T]` (negative: of none), float64 `[D + 1, D + 1]` each.

    Raises:
        OptionError: there is no token of a kind.
    """
    inputs = torch.cat([x, x.new_ones(*x.shape[:2], 1)], -1).double()
    found = []
    for kind in range(count):
        rows = inputs[kinds == kind]
        if not len(rows):
            raise OptionError(f"no token of kind {kind} among {kinds.numel()}: nothing to fit its low rank to")
        found.append(rows.T @ rows / len(rows))
    return found


@torch.no_grad()
def rotation_kl(
    attention: SeamAttention, x: Tensor, positions: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """What stopping one rotary pair does to each key head's attention rows, `[G, P]`.

    For a query head h and a pair ℓ, KL(p ‖ p_ℓ) in the mean over rows of x `[N, T, D]`: p_ℓ are the weights with pair ℓ
    of q and k at angle zero; summed over the query heads of a key head. valid: bool `[N, T]`, False on left padding.
    """
    project, layout, pairs = cast(GQAProject, attention.project), attention.layout, Pairs.of(attention)
    (n, t, _), each = x.shape, layout.q // layout.kv
    turning = int((pairs.index >= 0).sum())
    positions = positions_of(x, positions)
    valid = torch.ones(n, t, dtype=torch.bool, device=x.device) if valid is None else valid
    whole = Axis(t, 0, device=x.device)
    seen = attention._mask(attention._flow(x[:1], whole, None, None, None, None), whole, whole, None).tile()[0, 0]
    total = torch.zeros(layout.kv, turning, dtype=torch.float64, device=x.device)
    for row, window in enumerate(x):
        axis = Axis(t, 0, positions[row : row + 1], device=x.device)
        q = project.q_proj(window).unflatten(-1, (layout.q, -1)).transpose(0, 1) * layout.scale
        k = project.k_proj(window).unflatten(-1, (layout.kv, -1)).transpose(0, 1)
        turned_q, turned_k = attention._turn(q[None], "q", axis)[0], attention._turn(k[None], "k", axis)[0]
        hidden = ~(seen & valid[row])
        for head in range(layout.q):
            group = head // each
            scores = turned_q[head] @ turned_k[group].T
            before = scores.masked_fill(hidden, -1e30).log_softmax(-1)
            for pair in range(turning):
                channels = [int(pairs.re[pair]), int(pairs.im[pair])]
                moved = turned_q[head][:, channels] @ turned_k[group][:, channels].T
                still = q[head][:, channels] @ k[group][:, channels].T * pairs.gain[pair]
                after = (scores - moved + still).masked_fill(hidden, -1e30).log_softmax(-1)
                apart = (before.exp() * (before - after)).sum(-1)[valid[row]]
                total[group, pair] += apart.double().sum()
    return total / valid.sum()


def most_turning(scores: Tensor, rotary: int) -> tuple[tuple[int, int], ...]:
    """The (pair, key head) that stay: of each key head the `rotary / 2` pairs with the largest scores `[G, P]`.

    Raises:
        OptionError: there are not so many pairs.
    """
    if rotary % 2 or not 2 <= rotary <= 2 * scores.shape[1]:
        raise OptionError(f"rotary={rotary}: an even number of a head's rotary channels, 2 to {2 * scores.shape[1]}")
    best = scores.argsort(dim=1, descending=True)[:, : rotary // 2]
    return tuple(sorted((int(pair), g) for g, row in enumerate(best) for pair in row))
