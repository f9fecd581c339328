"""Weights that several layers use, owned once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from manyheads.core.part import OptionError


class Bank(nn.ModuleDict):
    """The modules that parts of a stack share, by the name they gave (`Site.share`): saved and counted once."""

    def share(self, name: str, make: Callable[[], nn.Module]) -> nn.Module:
        """The module of that name, made by the first who asks; whoever asks later must want the same shapes."""
        if name not in self:
            self[name] = make()
            return self[name]
        with torch.device("meta"):
            wanted = shapes(make())
        if wanted != shapes(self[name]):
            raise OptionError(f"{name!r} is shared with shapes {shapes(self[name])}; a later layer wants {wanted}")
        return self[name]


def shapes(module: nn.Module) -> dict[str, list[int]]:
    """Of everything a module would save, by name."""
    return {name: [*tensor.shape] for name, tensor in module.state_dict().items()}
