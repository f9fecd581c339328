"""The attention layer and its parts. Importing this registers every part in the stage folders."""

from importlib import import_module
from pkgutil import iter_modules

from manyheads.attention import attend, gate, position, presets, project, scan, select, tokens, transform
from manyheads.attention.layer import Attention

for _room in (tokens, project, transform, position, select, scan, attend, gate):
    for _module in iter_modules(_room.__path__):
        import_module(f"{_room.__name__}.{_module.name}")

__all__ = ["Attention", "presets"]
