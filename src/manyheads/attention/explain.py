"""What a pass does, stage by stage, and which kernel it runs on: read off a built layer, not off a table of parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manyheads.attention.layer import ALONE, Attention
from manyheads.core.check import check_whole
from manyheads.core.cost import Cost
from manyheads.core.kernel import Plan
from manyheads.core.part import Piece, Position, Program, Site
from manyheads.core.spec import Spec


@dataclass(frozen=True)
class Explanation:
    """How a spec computes a pass of `queries` new tokens over `keys` tokens in all.

    Attributes:
        stages: (stage, part, what it does in this pass), in the order of the pipeline.
        plan: the kernel, why, and why each faster one does not apply.
        cost: of the layer; for this pass of one sequence, `flops` and `cache_bytes` (float32).
    """

    spec: str
    queries: int
    keys: int
    stages: tuple[tuple[str, str, str], ...]
    plan: Plan
    cost: Cost

    @property
    def flops(self) -> int:
        """Multiply-adds times two, as if every query saw every key."""
        return self.queries * (self.cost.token_flops + self.keys * self.cost.pair_flops)

    @property
    def cache_bytes(self) -> int:
        return self.cost.cache_bytes(self.keys)

    def __str__(self) -> str:
        wide = max(len(f"{stage} {part}") for stage, part, _ in self.stages)
        lines = [f"{self.spec}: {self.queries} queries, {self.keys} keys"]
        lines += [f"  {f'{stage} {part}':{wide}}  {says}" for stage, part, says in self.stages]
        lines += [f"  {line}" for line in str(self.plan).splitlines()]
        lines.append(f"  {self.flops:,} FLOPs, {self.cache_bytes:,} bytes cached a sequence (float32)")
        return "\n".join(lines)


def explain(
    spec: str | Spec, queries: int, keys: int | None = None, *, dim: int = 512, heads: int = 8, site: Site = ALONE
) -> Explanation:
    """Explain a pass: `explain("mla + kha", 1, 2048)` is a decoding step, `explain("mla + kha", 1024)` a prefill.

    Args:
        queries: new tokens T.
        keys: tokens in all S, default T.

    Raises:
        OptionError: parts that exclude each other, or numbers that do not fit; ValueError: S < T or T < 1.
    """
    keys = queries if keys is None else keys
    check_whole(queries=queries, keys=keys)
    if queries > keys:
        raise ValueError(f"{queries} queries over {keys} keys; 1 ≤ queries ≤ keys, which count the queries' own tokens")
    with torch.device("meta"):
        layer = Attention(spec, dim, heads, site=site).eval()
    says = []
    for stage, pieces in layer.by_stage.items():
        built = iter(pieces)
        for part in layer.spec.by_stage[stage]:
            what = f"as layer {site.attn_source} does it" if part.lent(site) else _says(layer, next(built), queries)
            says.append((stage, part.name, what))
    return Explanation(
        str(layer.spec), queries, keys, tuple(says), layer.explain(queries), layer.spec.cost(dim, heads, site)
    )


def _says(layer: Attention, piece: Piece, queries: int) -> str:
    said = []
    if piece is layer.project:
        kept = ", ".join(
            f"{name} {entry.heads} x {entry.width}" + (f" for {entry.stride} tokens" if entry.stride > 1 else "")
            for name, entry in layer.entries.items()
            if entry.keep != 0
        )
        view = layer.view(queries)
        why = ""
        if len(layer.project.views) > 1:
            why = f" ({queries} queries, absorbed up to {layer.project.absorb_below})"
            if any(not transform.linear for transform in layer.late_transforms):
                why = " (a transform that is not linear needs each head's keys)"
        said.append(f"caches {kept or 'nothing'}; {view} keys{why}")
    if piece in layer.early_transforms:
        said.append("on rows as they are cached")
    elif piece in layer.late_transforms:
        absorbed = layer.view(queries) == "absorbed"
        said.append("moved onto queries and head outputs" if absorbed else "on rows as they are read, at each pass")
    if isinstance(piece, Position):
        if type(piece).turn is not Position.turn and layer.layout.rotary is not None:
            said.append("turns queries and keys " + ("when cached" if layer.rotate_at == "write" else "when read"))
        if type(piece).bias is not Position.bias:
            said.append("adds a bias to the scores")
    if piece in layer.ruling:
        said.append("narrows the mask")
    if piece in layer.splitting:
        said.append("makes attention problems of its own")
    if piece is layer.scan:
        said.append("reads a state in place of keys")
    if isinstance(piece, Program):
        said.append("works on explicit scores, in tiles")
    if piece in list(layer.gates):
        said.append("on head outputs")
    said += [f"keeps the state {name} {[*state.shape]} a sequence" for name, state in piece.states.items()]
    return "; ".join(said) or "nothing in this pass"


__all__ = ["Explanation", "explain"]
