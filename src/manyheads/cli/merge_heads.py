"""`manyheads merge-heads`: fewer heads, of those that are alike."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.cli.models import find
from manyheads.cli.output import Bars, Debug, Json, command, finish, number, sizes, table


class How(Enum):
    """How heads become one."""

    fitted = "fitted"
    mean = "mean"
    dha = "dha"


class By(Enum):
    """What is alike in heads that are."""

    maps = "maps"
    outputs = "outputs"


def read_count(text: str) -> float | int:
    """`75%`, a share, or `6`, a number of heads."""
    share = text.strip().removesuffix("%")
    try:
        return float(share) / 100 if text.strip().endswith("%") else int(share)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a share such as 75% nor a number of heads such as 6") from None


@command
def merge_heads(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint, or any MODEL that shrink takes.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder.")],
    to: Annotated[str, typer.Option(metavar="HEADS", help="To leave in each layer: a share, or a number (6).")] = "75%",
    how: Annotated[
        How,
        typer.Option(
            help="fitted: to the layer's output. mean: of weights. dha: query heads stay, key heads and value heads "
            "are fused apart."
        ),
    ] = How.fitted,
    by: Annotated[By, typer.Option(help="Heads are alike by attention maps, or by what they add.")] = By.maps,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Text to calibrate on (first 80 %) and to evaluate on (the rest). Repeatable."
        ),
    ] = None,
    calibrate: Annotated[str, typer.Option(metavar="NxT", help="Calibrate on N windows of T tokens.")] = "8x512",
    evaluate: Annotated[str, typer.Option(metavar="NxT", help="Evaluate on N windows of T tokens.")] = "2x1024",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Merge heads of a layer that are alike, until there are fewer.

    Query heads merge among those of one key head, and with their keys and values where each has its own. For each layer
    it says the relative squared error of its output, with plain means and as merged. `manyheads heal` trains on.
    """
    name, count = find(model), read_count(to)
    if out.exists():
        raise FileExistsError(f"{out} exists already; remove it or choose another folder")
    (c, c_length), (e, e_length) = sizes(calibrate), sizes(evaluate)
    from transformers.utils import logging

    from manyheads.convert.adopt import adopt
    from manyheads.convert.export import save_plainly
    from manyheads.convert.source import load_source
    from manyheads.convert.text import Texts, default_text, read_text
    from manyheads.convert.verify import quality
    from manyheads.edit import alike_heads
    from manyheads.edit import merge_heads as merge

    logging.disable_progress_bar()
    source = load_source(name)
    tokenizer = source.reader(name)
    ours = adopt(source.model)
    cut = Texts.from_text(
        tokenizer, read_text(text) if text else default_text(), calibration_windows=c,
        calibration_length=c_length, evaluation_windows=e, evaluation_length=e_length,
    )  # fmt: skip
    with Bars() as bars:
        bars("compare heads", 0, 1)
        clusters = alike_heads(ours, cut.calibration, count, by=by.value, keys=how is How.dha)
        bars("compare heads", 1, 1)
        heads = {layer: sum(map(len, each)) for layer, each in clusters.items()}
        before = figures(ours) | {"perplexity": quality(ours, cut.evaluation).perplexity}
        bars("merge", 0, 1)
        merged = merge(ours, clusters, cut.calibration, how=how.value)
        bars("merge", 1, 1)
        after = figures(ours) | {"perplexity": quality(ours, cut.evaluation).perplexity}
    report = save_plainly(ours, out, tokenizer=tokenizer)
    table(
        ["layer", "key heads" if how is How.dha else "heads", "left", "error of\nmeans", "error"],
        [
            [str(layer), str(heads[layer]), str(len(each)), *(number(x, 4) for x in dataclasses.astuple(error))]
            for (layer, each), error in zip(merged.clusters.items(), merged.errors.values(), strict=True)
        ],
    )
    table(
        ["", "perplexity", "parameters", "KV B/token"],
        [
            [what, number(row["perplexity"], 2), number(row["parameters"], 0), number(row["kv_bytes_per_token"], 0)]
            for what, row in (("before", before), ("after", after))
        ],
    )
    typer.echo(str(report))
    errors = {layer: dataclasses.asdict(error) for layer, error in merged.errors.items()}
    result: dict[str, Any] = {"before": before, "after": after, "clusters": merged.clusters, "errors": errors}
    finish(result | {"report": dataclasses.asdict(report)}, as_json)


def figures(model: Any) -> dict[str, Any]:
    """Parameters of a model, and what it caches for a token in all layers."""
    costs = [layer.spec.cost(layer.dim, layer.heads, layer.site) for layer in model.attentions]
    cached = float(sum(cost.cache_floats for cost in costs)) * model.dtype.itemsize
    return {"parameters": sum(p.numel() for p in model.parameters()), "kv_bytes_per_token": cached}
