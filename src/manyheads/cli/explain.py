"""`manyheads explain`: what the layers of a model are, what they cache, and which kernel computes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.cli.models import config_of, find
from manyheads.cli.output import Debug, Json, command, finish, numbers, wrapped

if TYPE_CHECKING:
    from manyheads.core.part import Site


@command
def explain(
    model: Annotated[
        str, typer.Argument(metavar="DIR|SPEC", help="A checkpoint, any MODEL that shrink takes, or a spec line.")
    ],
    dim: Annotated[int, typer.Option(min=1, help="Width of x, for a spec line.")] = 512,
    heads: Annotated[int, typer.Option(min=1, help="Query heads, for a spec line.")] = 8,
    queries: Annotated[str, typer.Option(help="New tokens of the passes to explain.")] = "1,512",
    intensity: Annotated[bool, typer.Option("--intensity", help="Add what a decoding step waits for.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what each kind of layer is: parameters, cached numbers, the kernel of a pass, and why not a faster one."""
    passes = numbers(queries)
    name = find(model)
    kinds = _of_spec(name, dim, heads) if _is_spec(name) else _of_model(name)
    described = [_describe(*kind, passes) | (_intensity(*kind) if intensity else {}) for kind in kinds]
    floats = sum(kind["cache_floats"] * len(kind["layers"]) for kind in described)
    for kind in described:
        _show(kind)
    size = sum(kind["cache_bytes"] * len(kind["layers"]) for kind in described)
    if sum(len(kind["layers"]) for kind in described) > 1:
        typer.echo(f"in all: {floats:g} numbers cached a token ({size:g} bytes in float32)")
    finish({"model": name, "cache_floats": floats, "cache_bytes": size, "kinds": described}, as_json)


def _is_spec(name: str) -> bool:
    """Whether a text is a spec line; one that is neither that nor a model's name says what is wrong with it."""
    from manyheads.convert.source import EMBEDDED
    from manyheads.core.spec import Spec, SpecError

    path = Path(name).expanduser()
    if name == EMBEDDED or path.exists() or path.suffix == ".gguf" or "/" in name:
        return False
    try:
        Spec.parse(name)
    except SpecError as error:
        if any(sign in name for sign in "+(= ") or not name.strip():
            raise
        raise SpecError(f"{name} is neither a folder nor a spec: {error}") from None
    return True


def _of_spec(line: str, dim: int, heads: int) -> list[tuple[list[int], str, int, int, Site]]:
    from manyheads.core.part import Site

    return [([0], line, dim, heads, Site())]


def _of_model(name: str) -> list[tuple[list[int], str, int, int, Site]]:
    """Layers that are alike together."""
    from manyheads.core.part import Site

    config = config_of(name)
    kinds: dict[tuple[str, int, int | None, int | None], list[int]] = {}
    turns = config.turns
    lines = map(str, turns.specs)
    for index, kind in enumerate(zip(lines, turns.heads, turns.kv_source, turns.attn_source, strict=True)):
        kinds.setdefault(kind, []).append(index)
    count = len(turns.specs)
    return [
        (layers, spec, config.hidden_size, heads, Site(layers[0], count, kv_source=rows, attn_source=weights))
        for (spec, heads, rows, weights), layers in kinds.items()
    ]


def _describe(
    layers: list[int], line: str, dim: int, heads: int, site: Site, passes: tuple[int, ...]
) -> dict[str, Any]:
    from manyheads.attention import Attention

    layer = Attention(line, dim, heads, site=site)
    cost = layer.spec.cost(dim, heads, site)
    plans = [(count, layer.explain(count)) for count in passes]
    return {
        "layers": layers, "spec": str(layer.spec), "dim": dim, "heads": heads, "parameters": cost.parameters,
        "cache_floats": float(cost.cache_floats), "cache_bytes": cost.token_bytes(4),
        "state_floats": cost.state_floats,
        "windows": [{"tokens": kept, "floats": float(floats)} for kept, floats in cost.windows],
        "passes": [
            {"queries": count, "kernel": plan.kernel, "why": plan.why, "refused": dict(plan.refused)}
            for count, plan in plans
        ],
    }  # fmt: skip


def _intensity(layers: list[int], line: str, dim: int, heads: int, site: Site) -> dict[str, Any]:
    """What a step of one sequence after 4,096 tokens computes and moves, in bf16."""
    from manyheads.bench.intensity import H200, operators

    found = operators(line, dim, heads, context=4096, site=site)
    return {"decoding": {each.name: {"flops": each.flops, "bytes": each.bytes, "intensity": each.intensity,
                                     "bound": each.bound(H200)} for each in found}}  # fmt: skip


def _show(kind: dict[str, Any]) -> None:
    wrapped(f"{_ranges(kind['layers'])}: {kind['spec']}")
    typer.echo(f"  width {kind['dim']}, {kind['heads']} query heads, {kind['parameters']:,} parameters")
    typer.echo(f"  caches {kind['cache_floats']:g} numbers a token ({kind['cache_bytes']:g} bytes in float32)")
    for window in kind["windows"]:
        typer.echo(f"  keeps {window['floats']:g} of them for the newest {window['tokens']:,} tokens only")
    if kind["state_floats"]:
        typer.echo(f"  keeps {kind['state_floats']:,} numbers a sequence, whatever its length")
    for each in kind["passes"]:
        count = each["queries"]
        wrapped(f"{count} new token{'s' if count > 1 else ''}: {each['kernel']}, because {each['why']}", "  ")
        for kernel, reason in each["refused"].items():
            wrapped(f"not {kernel}: {reason}", "    ")
    if "decoding" in kind:
        said = [f"{name} {each['intensity']:.3g}" for name, each in kind["decoding"].items()]
        wrapped(f"a step at 4,096 tokens, one sequence in bf16, in FLOPs per byte: {', '.join(said)}", "  ")


def _ranges(layers: list[int]) -> str:
    """[0, 1, 2, 5]: layers 0-2, 5."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {text}"
