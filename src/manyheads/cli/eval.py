"""`manyheads eval`: how well a model predicts a text, and what it caches."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.cli.models import find
from manyheads.cli.output import Bars, Debug, Json, command, finish, number, sizes, table, wrapped


@command
def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="DIR", help="A checkpoint, the output of shrink, or any MODEL that shrink takes.")
    ],
    text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Text instead of Python's help topics. Repeatable.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Compare with this source: KL divergence and top-1 agreement.")
    ] = None,
    evaluate: Annotated[str, typer.Option(metavar="NxT", help="Evaluate on N windows of T tokens.")] = "5x2048",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure perplexity and cache size, and the distance to a source.

    Only the last 20 % of a text are used: the part that shrink never calibrates on.
    """
    count, length = sizes(evaluate)
    name = find(model)
    from manyheads.bench.figures import examine
    from manyheads.convert.adopt import AdoptError, adopt
    from manyheads.convert.source import load_source
    from manyheads.convert.text import default_text, read_text, split, windows
    from manyheads.convert.verify import Reference

    own = read_text(text) if text else None
    loaded = load_source(name)
    source = None if against is None else load_source(find(against))
    tokenizer = loaded.tokenizer or (source.tokenizer if source else None) or loaded.reader(name)
    tokens = windows(tokenizer, split(own or default_text())[1], count=count, length=length)
    with Bars() as bars:
        reference = None
        if source is not None:
            reference = Reference(source.model, tokens, progress=lambda *step: bars("read the source", *step))
        measured = loaded.model
        with suppress(AdoptError):  # a stock model is measured as it is
            measured = adopt(measured)
        found = examine(measured, tokens, reference, lambda *step: bars("evaluate", *step))
    result: dict[str, Any] = {"model": name, "against": against, "tokens": tokens.numel(), **found}
    head = ["KV B/token", "KV floats/token, layer", "perplexity", *(["KL", "top-1 %"] if source else [])]
    row = [number(found["kv_bytes_per_token"], 0), number(found["kv_floats_per_token_layer"], 1)]
    row += [number(found["perplexity"], 3)]
    row += [number(found["kl"], 4), number(100 * found["top1"], 1)] if source else []
    table(head, [row], left=0)
    wrapped(f"{Path(name).name}: {found['spec']}")
    finish(result, as_json)
