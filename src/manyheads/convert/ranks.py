"""Several processes at one job: which of them this is, and files by which they wait for each other."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_PATIENCE = 0.2  # seconds between looks at what others do


@dataclass(frozen=True)
class Ranks:
    """The place of this process among those of a launcher (`accelerate launch`, `torchrun`), from its environment."""

    rank: int = 0
    world: int = 1
    near: int = 1
    """Processes on this machine."""
    local: int = 0
    """The place of this one among them."""

    @classmethod
    def here(cls) -> Ranks:
        rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
        if not 0 <= rank < world:
            raise ValueError(f"RANK={rank} and WORLD_SIZE={world} in the environment do not go together")
        near = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        return cls(rank, world, near, int(os.environ.get("LOCAL_RANK", rank % near)))

    def share(self, tasks: Sequence[T]) -> list[T]:
        """Every n-th task."""
        return list(tasks[self.rank :: self.world])


ALONE = Ranks()


def wait_for(files: Sequence[Path]) -> None:
    """Until other processes have written these. A launcher ends all of them where one fails."""
    while not all(file.exists() for file in files):
        time.sleep(_PATIENCE)
