"""The same choice of heads kept as a mask: the model stays whole, and a small JSON file says which heads are out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from manyheads.edit.groups import Heads, named
from manyheads.edit.slices import EditError
from manyheads.inspect.ablate import ablate
from manyheads.inspect.layers import layers_of


@contextmanager
def mask(model: nn.Module, heads: Heads | str | Path) -> Iterator[None]:
    """While the block runs, the outputs of some heads are zero; afterwards the model gives the same bits as before.

    >>> with mask(model, {3: [0, 2]}):
    ...     model(ids)

    Works for any model that `manyheads.inspect` sees, stock ones too, and for any heads, whatever they share.

    Args:
        heads: by layer, or the path of a file that `save_heads` wrote.

    Raises:
        ValueError: a layer or head that does not exist. EditError: a file about another model.
    """
    wanted = load_heads(heads, model) if isinstance(heads, str | Path) else named(model, heads)
    with ablate(model, wanted):
        yield


def save_heads(path: str | Path, model: nn.Module, heads: Heads) -> None:
    """Write which heads are out, and how many there are in each layer, as JSON."""
    counts = [layer.heads for layer in layers_of(model)]
    out = {str(layer): of for layer, of in named(model, heads).items()}
    Path(path).write_text(json.dumps({"heads_out": out, "heads": counts}) + "\n", encoding="utf-8")


def load_heads(path: str | Path, model: nn.Module) -> dict[int, list[int]]:
    """What `save_heads` wrote.

    Raises:
        EditError: the file is not of that kind, or about a model with other numbers of heads. OSError: no such file.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        out, counts = {int(layer): [*map(int, of)] for layer, of in found["heads_out"].items()}, found["heads"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EditError(f"{path} is no file of masked heads: {error!r}") from None
    have = [layer.heads for layer in layers_of(model)]
    if counts != have:
        raise EditError(f"{path} is about layers of {counts} heads; this model has {have}")
    return named(model, out)


def read_heads(text: str) -> dict[int, list[int]]:
    """`3:0,1 5:2` as heads by layer.

    Raises:
        ValueError: text of another form.
    """
    found: dict[int, list[int]] = {}
    for word in text.split():
        layer, colon, heads = word.partition(":")
        numbers = heads.split(",")
        if not (colon and all(each.isdecimal() for each in (layer, *numbers))):
            raise ValueError(f"{word!r} is not of the form 3:0,1 (layer:head,head); several are separated by spaces")
        found.setdefault(int(layer), []).extend(map(int, numbers))
    if not found:
        raise ValueError("no heads given; such as --heads '3:0,1 5:2'")
    return found


def write_heads(heads: Heads) -> str:
    """The inverse of `read_heads`."""
    listed = {layer: [of] if isinstance(of, int) else of for layer, of in heads.items()}
    return " ".join(f"{layer}:{','.join(map(str, of))}" for layer, of in listed.items())


__all__ = ["load_heads", "mask", "read_heads", "save_heads", "write_heads"]
