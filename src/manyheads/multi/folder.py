"""A model's weights as a folder, and what differs between its heads and those of the code that loads it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

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
    (folder / HEADS).write_text(json.dumps({"heads": heads, **more}, indent=1, ensure_ascii=False), encoding="utf-8")


def saved(folder: str | Path) -> dict[str, Any]:
    """What `heads.json` says."""
    path = Path(folder) / HEADS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no folder of a model with many heads: it has no {HEADS}")
    return json.loads(path.read_text(encoding="utf-8"))


def load(model: MultiHead, folder: str | Path, *, strict: bool = True) -> list[str]:
    """Load weights. Returns what differs: heads that only the folder has, or only the model, or that are others there.

    A trunk that does not branch yet branches as the folder's does.
    strict: differences are an error; else the trunk and what is the same are loaded, other heads stay as they are.
    """
    there = saved(folder)["heads"]
    here = {name: to_fields(head) | {"width": model.widths[name]} for name, head in model.heads.items()}
    here = json.loads(json.dumps(here))  # tuples are lists there
    differ = [f"head {name!r} is in the folder, and not in this model" for name in there if name not in here]
    differ += [f"head {name!r} is in this model, and not in the folder" for name in here if name not in there]
    for name in here.keys() & there.keys():
        if here[name] != there[name]:
            differ.append(f"head {name!r} is {there[name]} in the folder, and {here[name]} in this model")
    if differ and strict:
        raise ValueError(f"{folder}: {'; '.join(differ)} (strict=False loads the rest)")
    nodes = saved(folder).get("nodes")
    if nodes and not differ and len(model.nodes) == 1:
        model.regrow(nodes)
    state, own = load_file(Path(folder) / WEIGHTS), model.state_dict()
    state = {key: value for key, value in state.items() if key in own or not key.startswith("balance.")}
    if strict:
        model.load_state_dict(state)
    else:
        fits = {key: value for key, value in state.items() if key in own and own[key].shape == value.shape}
        lost = [key for key in own if key.startswith("trunk.") and key not in fits]
        if lost:
            raise ValueError(f"{folder}: the trunk there is another one; it has no {lost[0]} of this shape")
        kept = {name for name in here if here[name] == there.get(name)}
        nets = tuple(f"nets.{model.key(name)}." for name in kept)
        model.load_state_dict({k: v for k, v in fits.items() if k.startswith(("trunk.", *nets))}, strict=False)
    return differ
