"""What serves a token, or a task, out of many: feed-forwards, a file each, and adapters; all register on import."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
