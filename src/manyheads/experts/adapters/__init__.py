"""Adapters on the linear layers of any torch model, its own weights frozen.

>>> found = adapt(model, "mhr(splits=4, skills=8, rank=4, tasks=10)", targets=["q_proj", "v_proj"])
>>> model(**batch, task_ids=ids)         # ids [B]; or, for generation, `with found.tasks(3): model.generate(…)`
>>> found.save("adapters.safetensors")   # in a fresh model: load(model, "adapters.safetensors")

A linear layer keeps its class, its name and its weight: the adapter is a module beside the weight, `<layer>.adapter`,
and a forward hook adds what it says. A kind of adapter is one file: a frozen dataclass of options, read from a line as
the parts of a spec are, and its module.
"""

from manyheads.experts.adapters.adapter import Adapter, Options, find_adapter, kinds, register_adapter
from manyheads.experts.adapters.continual import Compositions, backward_transfer, effective_compositions
from manyheads.experts.adapters.headwise import Headwise
from manyheads.experts.adapters.mhr import MHR
from manyheads.experts.adapters.model import Adapters, adapt, adapters, load

__all__ = [
    "MHR",
    "Adapter",
    "Adapters",
    "Compositions",
    "Headwise",
    "Options",
    "adapt",
    "adapters",
    "backward_transfer",
    "effective_compositions",
    "find_adapter",
    "kinds",
    "load",
    "register_adapter",
]
