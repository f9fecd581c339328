"""From attention heads to a few attention heads and recurrent ones: those that stay are copied, the others replaced.

y = Σ_{h kept} W_O^h softmax-attention_h(x) + Σ_{h replaced} W_O^h recurrent_h(x). A recurrent head starts from the
replaced one: C from its query, B and v from its key and value (each its own copy where key heads were shared), W_O^h as
it is. Of a state N below d, C·B is the best approximation of q·k of rank N in the activations. The convolution starts
as the identity, δ at zero, the gate at one (silu(b) = 1 at b = 1.2785) and α at 1/2 (or where a bias puts it), so that
the layer is linear attention that fades; positions are gone. That much is a start for training and no model: MOHAWK's
stages (`manyheads.convert.mohawk`) come next.

Rows are cached for the key heads that kept heads read: `gqa` where these have equal groups, else `dha`.

Source: Retrieval-aware distillation 2026, arXiv 2602.11374, of which no equations were public: that the hybrid has the
heads of MOHAWK (arXiv 2408.10189), and that they start from the teacher's projections, is taken from that recipe.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from manyheads.attention.discrete import DiscreteHeads
from manyheads.attention.gate.discrete_heads import DiscreteHeadsPart
from manyheads.attention.grouped import same_biases
from manyheads.attention.project.dha import DHA
from manyheads.attention.project.discrete_ssm import DiscreteSSM
from manyheads.attention.project.gqa import GQA, GQAProject
from manyheads.convert.moves.common import between, linear_rows, set_rows
from manyheads.convert.stats import AttentionStats, power
from manyheads.core.part import OptionError, Part
from manyheads.core.spec import Spec
from manyheads.stack.seam import SeamAttention

ONE = 1.2784645
"""silu(1.2784645) = 1."""


@dataclass(frozen=True)
class ToRetrieval:
    """The move: `gqa` with H heads to the heads `kept` and H - len(kept) `discrete_heads`, or `discrete_ssm` where none
    is kept. With all kept it is the layer itself.

    state: of recurrent heads, N ≤ d (default d).
    """

    kept: tuple[int, ...]
    state: int | None = None

    def refusal(self, spec: Spec) -> str | None:
        """Why a layer with this spec cannot be converted, or None."""
        gqa = next((part for part in spec.parts if isinstance(part, GQA)), None)
        if gqa is None:
            return f"attention heads are replaced in gqa, not in {spec}"
        if gqa.v_dim not in (None, gqa.head_dim):
            return f"recurrent heads beside attention heads are as wide in keys and values, unlike those of {spec}"
        if name := between(spec):
            return f"{name} sits between the projections and the scores, which a recurrent head does not start from"
        if other := next((part.name for part in spec.parts if part.name not in ("gqa", "rope", "window")), None):
            return f"a few heads are taken out of gqa with rope and windows; {other} may tell heads apart"
        return None

    def target(self, attention: SeamAttention) -> Spec:
        """The spec of the converted layer, whose `heads` are those kept (all recurrent ones, where none is)."""
        layout, gqa = attention.layout, cast(GQA, attention.spec.by_stage["project"][0])
        width, heads, groups = layout.qk_width, layout.q, layout.kv
        if {*self.kept} - {*range(heads)} or len({*self.kept}) < len(self.kept):
            raise OptionError(f"kept={[*self.kept]} are not different heads of a layer of {heads}, 0 to {heads - 1}")
        if self.state is not None and not 1 <= self.state <= width:
            raise OptionError(f"state={self.state}: a score of heads {width} wide has that rank; 1 to {width}")
        bias = "qkv" in gqa.bias
        if not self.kept:
            none = DiscreteSSM(state=self.state, head_dim=width, bias=bias, out_bias=gqa.bias in ("o", "qkvo"))
            return Spec((none,))
        if len(self.kept) == heads:
            return attention.spec
        project = self._attending(gqa, width, heads, groups)
        others = [part for part in attention.spec.parts if part.stage != "project"]
        recurrent = DiscreteHeadsPart(heads=heads - len(self.kept), state=self.state, bias=bias)
        return Spec((project, *others, recurrent))

    def _attending(self, gqa: GQA, width: int, heads: int, groups: int) -> Part:
        """The projection of the kept heads."""
        reads = [head * groups // heads for head in sorted(self.kept)]
        used = sorted({*reads})
        read = tuple(used.index(group) for group in reads)
        each, left = divmod(len(read), len(used))
        if not left and read == tuple(index // each for index in range(len(read))):
            return dataclasses.replace(gqa, kv_heads=len(used), head_dim=width, v_dim=None, group=None)
        count = len(used)
        return DHA(count, count, read, read, head_dim=width, bias=same_biases(gqa.bias, "dha"), scale=gqa.scale)

    def __call__(self, attention: SeamAttention, stats: AttentionStats) -> SeamAttention:
        """The converted layer."""
        if why := self.refusal(attention.spec):
            raise OptionError(why)
        project, layout, spec = cast(GQAProject, attention.project), attention.layout, self.target(attention)
        kept = sorted(self.kept)
        heads = len(kept) or layout.q
        new = SeamAttention(spec, layout.dim, heads, site=attention.site, dropout=attention.dropout if kept else 0.0)
        new = new.to(project.o_proj.weight).eval()
        if len(kept) == layout.q:
            new.load_state_dict(attention.state_dict())
            return new
        replaced = [head for head in range(layout.q) if head not in kept]
        group = torch.arange(layout.q) * layout.kv // layout.q
        q, k, v = (
            linear_rows(linear).view(count, layout.qk_width, -1)
            for linear, count in (
                (project.q_proj, layout.q), (project.k_proj, layout.kv), (project.v_proj, layout.kv),
            )
        )  # fmt: skip
        if kept:
            used = sorted({*group[kept].tolist()})
            made = cast(GQAProject, new.project)
            for linear, rows in ((made.q_proj, q[kept]), (made.k_proj, k[used]), (made.v_proj, v[used])):
                set_rows(linear, rows.flatten(0, 1))
        o = project.o_proj.weight.detach().view(layout.dim, layout.q, -1)
        with torch.no_grad():
            new.project.o_proj.weight.copy_(o[:, [*kept, *replaced]].flatten(1))
            if new.project.o_proj.bias is not None:
                new.project.o_proj.bias.copy_(project.o_proj.bias)
        c, b = self._scores(q[replaced] * layout.scale, k[group[replaced]], stats)
        start(recurrent(new), c, b, v[group[replaced]])
        return new

    def _scores(self, q: Tensor, k: Tensor, stats: AttentionStats) -> tuple[Tensor, Tensor]:
        """C and B as rows `[n, N, D + 1]`, with C·B ≈ q·k."""
        if self.state is None or self.state == q.shape[1]:
            return q, k
        root = power(stats.plain, 0.5, 1e-9)
        (left, r), (right, s) = (torch.linalg.qr(root @ rows.mT) for rows in (q, k))
        u, size, v = torch.linalg.svd(r @ s.mT)
        half, inverse = size[:, : self.state, None].sqrt(), torch.linalg.inv(root)
        return half * (left @ u).mT[:, : self.state] @ inverse, half * (v @ right.mT)[:, : self.state] @ inverse


@torch.no_grad()
def start(heads: DiscreteHeads, c: Tensor, b: Tensor, v: Tensor) -> None:
    """Give recurrent heads the maps of C, B `[n, N, D + 1]` and v `[n, d, D + 1]`, and nothing else to do."""
    rest = c.new_zeros(len(c), heads.width + 1, c.shape[-1])
    set_rows(heads.in_proj, torch.cat([c, b, v, rest], 1).flatten(0, 1))
    heads.conv.weight.zero_()
    heads.conv.weight[0] = 1
    assert heads.conv.bias is not None
    heads.conv.bias.zero_()
    heads.skip.zero_()
    heads.z_bias.fill_(ONE)


def recurrent(attention: SeamAttention) -> DiscreteHeads:
    """The recurrent heads of a converted layer.

    Raises:
        OptionError: it has none.
    """
    for piece in (attention.project, *attention.gates):
        heads = getattr(piece, "heads", None)
        if isinstance(heads, DiscreteHeads):
            return heads
    raise OptionError(f"there are no recurrent heads in {attention.spec}")
