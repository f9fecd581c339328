"""A model's weights as a folder, and what differs between its heads and those of the code that loads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyheads.convert.resume import write_text
from manyheads.core.key import name_of
from manyheads.multi.head import to_fields
from manyheads.multi.model import MultiHead

WEIGHTS, HEADS = "model.safetensors", "heads.json"


def save(model: MultiHead, folder: str | Path, **more: Any) -> None:
    """`model.safetensors`, and `heads.json` with each head's options and width; `more` goes into the latter."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, folder / WEIGHTS)
    heads = {name: to_fields(head) | {"width": model.widths[name]} for name, head in model.heads.items()}
    if len(model.nodes) > 1:
        more["nodes"] = [asdict(node) for node in model.nodes.values()]
    write_text(json.dumps({"heads": heads, **more}, indent=1, ensure_ascii=False), folder / HEADS)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What a damaged file leads to in here is one error that names the file."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path} is damaged: it lacks {error}") from None
    except (ValueError, TypeError, AttributeError, IndexError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def saved(folder: str | Path) -> dict[str, Any]:
    """What `heads.json` says.

    Raises:
        FileNotFoundError: there is none. ValueError: it is damaged, or says no heads.
    """
    path = Path(folder) / HEADS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no folder of a model with many heads: it has no {HEADS}")
    with reading(path):
        told = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(each, dict) for each in (told, told["heads"], *told["heads"].values())):
            raise ValueError("it does not say what each head is")
    return told


def load(model: MultiHead, folder: str | Path, *, strict: bool = True) -> list[str]:
    """Load weights. Returns what differs: heads that only the folder has, or only the model, or that are others there.

    A trunk that does not branch yet branches as the folder's does.
    strict: differences are an error; else the trunk and what is the same are loaded, other heads stay as they are.

    Raises:
        ValueError: heads differ, or a file is damaged, or weights are not those of these heads and this trunk.
    """
    told, weights = saved(folder), Path(folder) / WEIGHTS
    there = told["heads"]
    here = {name: to_fields(head) | {"width": model.widths[name]} for name, head in model.heads.items()}
    here = json.loads(json.dumps(here))  # tuples are lists there
    differ = [f"head {name!r} is in the folder, and not in this model" for name in there if name not in here]
    differ += [f"head {name!r} is in this model, and not in the folder" for name in here if name not in there]
    for name in here.keys() & there.keys():
        if here[name] != there[name]:
            differ.append(f"head {name!r} is {there[name]} in the folder, and {here[name]} in this model")
    if differ and strict:
        raise ValueError(f"{folder}: {'; '.join(differ)} (strict=False loads the rest)")
    with reading(weights):
        state = load_file(weights)
    if told.get("nodes") and not differ and len(model.nodes) == 1:
        with reading(Path(folder) / HEADS):
            model.regrow(told["nodes"])
    own = model.state_dict()
    state = {key: value for key, value in state.items() if key in own or not key.startswith("balance.")}
    if not differ:
        wrong = _unlike(state, own)
        if wrong:
            raise ValueError(f"{weights}: {wrong}")
        model.load_state_dict(state)
    else:
        fits = {key: value for key, value in state.items() if key in own and own[key].shape == value.shape}
        lost = [key for key in own if key.startswith("trunk.") and key not in fits]
        if lost:
            raise ValueError(f"{folder}: the trunk there is another one; it has no {lost[0]} of this shape")
        kept = {name for name in here if here[name] == there.get(name)}
        nets = tuple(f"{room}.{model.key(name)}." for name in kept for room in ("nets", "pools"))
        lost = [key for key in own if key.startswith(nets) and key not in fits]
        if lost:
            raise ValueError(f"{weights}: {_unlike(state, {key: own[key] for key in lost}, more=False)}")
        model.load_state_dict({k: v for k, v in fits.items() if k.startswith(("trunk.", *nets))}, strict=False)
    return differ


def _unlike(state: Mapping[str, Tensor], own: Mapping[str, Tensor], more: bool = True) -> str | None:
    """The first of a model's own tensors that is not there or of another shape, or of those that are `more`."""

    def whose(key: str) -> str:
        room, _, rest = key.partition(".")
        return f"head {name_of(rest.split('.')[0])!r}" if room in ("nets", "pools") else repr(key)

    for key, value in own.items():
        if key not in state:
            return f"it has no weights of {whose(key)}"
        if state[key].shape != value.shape:
            return f"{key!r} is {list(state[key].shape)} there, and {list(value.shape)} in this model"
    extra = [key for key in state if key not in own]
    return f"it has weights of {whose(extra[0])}, and this model has not" if extra and more else None
