"""Which device works on which layer of a conversion: a map that is read, and checked, before any work."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from manyheads.convert.ranks import ALONE, Ranks
from manyheads.core.part import OptionError

Device = str | int | torch.device
Devices = Device | Path | Sequence[Device] | Mapping[str, Device] | Mapping[int, Device]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class DeviceMap:
    """Contiguous blocks of layers on `blocks`, in this order, or each layer where `named` says."""

    blocks: tuple[torch.device, ...] = (CPU,)
    named: Mapping[str, torch.device] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Devices, ranks: Ranks = ALONE) -> DeviceMap:
        """A map from what a user gives.

        Args:
            given: `auto` (the accelerators of this process, or the CPU where there are none), a device, several (a
                sequence, or a line with commas), or devices by layer (a mapping, or the name of a JSON file), where a
                layer is its number or its name, and a name that is above layers stands for all of them. A device that
                is a number is that accelerator.
            ranks: this process among several, which divide a machine's accelerators among them for `auto`.

        Raises:
            OptionError: a device is not here, or the map is empty, or the file holds none.
        """
        if isinstance(given, str | Path):
            text = str(given).strip()
            if text == "auto":
                return cls(_own(ranks))
            given = _parsed(Path(text).expanduser()) if text.endswith(".json") else re.split(r"\s*,\s*", text)
        if isinstance(given, int | torch.device):
            given = [given]
        if not given:
            raise OptionError(f"the device map is empty; {_fitting()}")
        if isinstance(given, Mapping):
            return cls(named={str(name): _device(where) for name, where in given.items()})
        return cls(tuple(_device(where) for where in given))

    def over(self, prefix: str, count: int) -> tuple[torch.device, ...]:
        """The device of each of `count` layers, whose names are `prefix` and their number.

        Raises:
            OptionError: a layer is missing, divided, or not there.
        """
        if not self.named:
            return tuple(self.blocks[layer * len(self.blocks) // count] for layer in range(count))
        layers = re.compile(rf"(?:(?:model\.)?{re.escape(prefix)})?(\d+)(\..+)?")
        found: dict[int, torch.device] = {}
        above: dict[str, torch.device] = {}
        for name, device in self.named.items():
            if match := layers.fullmatch(name):
                layer = int(match[1])
                if match[2]:
                    raise OptionError(
                        f"the device map divides layer {layer} ({name}); {prefix}{layer} is on one device"
                    )
                if layer >= count:
                    raise OptionError(f"the device map names layer {layer}; the model has layers 0 to {count - 1}")
                found[layer] = device
            elif not name or prefix.startswith(f"{name}."):
                above[name] = device
        if above:
            found = dict.fromkeys(range(count), above[max(above, key=len)]) | found
        if missing := [layer for layer in range(count) if layer not in found]:
            raise OptionError(f"the device map lacks layer {missing[0]}; it takes {prefix}0 to {prefix}{count - 1}")
        return tuple(found[layer] for layer in range(count))


def fast_in_half(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are the faster ones there."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


def peak_memory(devices: Sequence[torch.device]) -> dict[str, float]:
    """The most that tensors of this process have taken on each accelerator that counts it, MB (2**20 bytes)."""
    modules = {device: torch.get_device_module(device) for device in dict.fromkeys(devices) if device.type != "cpu"}
    return {
        str(device): module.max_memory_allocated(device) / 2**20
        for device, module in modules.items()
        if hasattr(module, "max_memory_allocated")
    }


def accelerators() -> list[torch.device]:
    """Those that a conversion can use; it solves in float64, which Apple's have not."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or kind.type == "mps":
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def _own(ranks: Ranks) -> tuple[torch.device, ...]:
    """This process's share; where accelerators are fewer than processes, some have one in common."""
    here = accelerators()
    own = here[ranks.local :: ranks.near] or here[ranks.local % max(1, len(here)) :][:1]
    return tuple(own) or (CPU,)


def _device(where: Device) -> torch.device:
    here = accelerators()
    try:
        found = here[int(where)] if str(where).isdecimal() else torch.device(where)  # type: ignore[arg-type]
    except (IndexError, RuntimeError, TypeError):
        found = None
    if found is not None and found.type == "mps":
        raise OptionError(f"fits are solved in float64, which {where} has not; {_fitting()}")
    if found is not None and found.index is None:
        found = torch.device(found.type, 0)
    if found == torch.device("cpu", 0):
        return CPU
    if found not in here:
        raise OptionError(f"the device map names {where!r}, which is not here; {_fitting()}")
    return found


def _fitting() -> str:
    return "auto and " + ", ".join(map(str, (CPU, *accelerators()))) + " fit"


def _parsed(file: Path) -> dict[str, Device]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{file} is no device map that can be read: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict):
        raise OptionError(f'{file} holds no object of devices by layer, such as {{"0": "cpu"}}')
    return found
