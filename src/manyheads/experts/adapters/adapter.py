"""The contract of an adapter: options, the module beside a linear layer, and the pass that all of a model's share."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.part import OptionError
from manyheads.core.spec import printed

K = TypeVar("K", bound="type[Options]")
Tasks = int | Sequence[int] | Tensor
"""The task of every sequence, or one for each sequence of a batch."""

_KINDS: dict[str, type[Options]] = {}


@dataclass(frozen=True)
class Options:
    """Options of a kind of adapter, with the paper's defaults. Subclass as a frozen dataclass and register it."""

    name: ClassVar[str]
    paper: ClassVar[str] = ""

    def check(self, inputs: int, outputs: int) -> None:
        """Raises `OptionError` for numbers that do not fit a layer of these widths."""

    def build(self, inputs: int, outputs: int) -> Adapter:
        raise NotImplementedError

    def cost(self, inputs: int, outputs: int) -> Cost:
        """Of one adapter."""
        raise NotImplementedError

    def active(self, inputs: int, outputs: int) -> int:
        """The parameters that one token uses."""
        return self.cost(inputs, outputs).parameters


def register_adapter(kind: K) -> K:
    """Class decorator: make a kind of adapter known under its `name`."""
    known = _KINDS.setdefault(kind.name, kind)
    if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise OptionError(f"two adapters are called {kind.name!r}: {known.__module__} and {kind.__module__}")
    _KINDS[kind.name] = kind
    return kind


def kinds() -> dict[str, type[Options]]:
    """All kinds of adapter by name."""
    return dict(sorted(_KINDS.items()))


def find_adapter(name: str) -> type[Options]:
    """The kind of that name; an unknown one raises with the names there are."""
    if name not in _KINDS:
        near = difflib.get_close_matches(name.lower(), _KINDS, n=1)
        said = f"did you mean {near[0]}?" if near else f"there are {', '.join(kinds())}"
        raise OptionError(f"no adapter {name!r}; {said}")
    return _KINDS[name]


@dataclass(eq=False)
class Pass:
    """What a pass of a model tells its adapters, and they tell it. Its `enter` and `leave` are hooks on the model.

    standing: the tasks that hold until others are set; given: those of one pass, from its argument `task_ids`. known:
    how many there are; moved: those in force, where they are read. stamp: a number made of them. losses: of the newest
    pass, by adapter. routes: where somebody watches, the experts that each adapter chose, a tensor a pass. thawed:
    parameters that trained before the model was frozen.
    """

    standing: Tensor | None = None
    given: Tensor | None = None
    moved: Tensor | None = None
    known: int | None = None
    stamp: int = 0
    losses: dict[str, Tensor] = field(default_factory=dict)
    routes: dict[str, list[Tensor]] | None = None
    thawed: list[nn.Parameter] = field(default_factory=list)

    def enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Takes `task_ids` from the arguments: the model itself knows none."""
        ids = kwargs.pop("task_ids", None)
        self.set(self.standing, None if ids is None else self.ids_of(ids))
        self.losses.clear()
        return args, kwargs

    def leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Adds the adapters' losses to the loss of an output that has one."""
        if self.losses and isinstance(getattr(output, "loss", None), Tensor):
            output.loss = output.loss + self.loss()
        if not torch.is_grad_enabled():
            self.set(self.standing, None)
        return output

    def loss(self) -> Tensor:
        return torch.stack([*self.losses.values()]).sum() if self.losses else torch.zeros(())

    def set(self, standing: Tensor | None, given: Tensor | None) -> None:
        self.standing, self.given, self.moved = standing, given, None
        now = standing if given is None else given
        self.stamp = 0 if now is None else hash(tuple(now.tolist())) % 65521

    def ids_of(self, tasks: Tasks) -> Tensor:
        """int64 `[1 or B]`, checked; on the CPU, where a look costs nothing."""
        ids = torch.as_tensor(tasks).detach().to("cpu", torch.long)
        ids = ids.reshape(1) if ids.ndim == 0 else ids
        if ids.ndim != 1 or not len(ids):
            raise ValueError(f"task ids are one number, or one for each sequence, not {[*ids.shape]}")
        known = self.known
        if known is not None and (int(ids.min()) < 0 or int(ids.max()) >= known):
            wrong = sorted({task for task in ids.tolist() if not 0 <= task < known})
            raise ValueError(f"no task {', '.join(map(str, wrong))}; these adapters know 0 to {known - 1}")
        return ids

    def ids(self, x: Tensor, tasks: int) -> Tensor:
        """The tasks in force, `[1 or n]`, n a divisor of the batch of x: rows of one sequence are neighbours."""
        ids = self.standing if self.given is None else self.given
        if tasks <= 1:
            return torch.zeros(1, dtype=torch.long, device=x.device)
        if ids is None:
            raise ValueError(
                f"these adapters know {tasks} tasks and were not told which: give the model task_ids=…, or use "
                "adapters(model).tasks(…), around the backward pass too where it computes layers again"
            )
        if x.shape[0] % len(ids):
            raise ValueError(f"{len(ids)} task ids do not fit a batch of {x.shape[0]}")
        if self.moved is None or self.moved.device != x.device:
            self.moved = ids.to(x.device)
        return self.moved


class Adapter(nn.Module):
    """The module beside a linear layer.

    at: the layer's name in the model. routing: which of its parameters say who serves, not what they do.
    """

    routing: tuple[str, ...] = ()

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options, self.at, self.shared = options, "", Pass()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The adapted output, from the layer's input x `[…, inputs]` and its own output y `[…, outputs]`."""
        raise NotImplementedError

    def merged(self, weight: Tensor, bias: Tensor | None, task: int) -> tuple[Tensor, Tensor | None]:
        """Weight `[outputs, inputs]` and bias of a linear layer that does the same; raises where there is none."""
        raise NotImplementedError

    def packed(self) -> tuple[Options, dict[str, Tensor]]:
        """What to save: options that build a module of these parameters."""
        return self.options, {name: value.detach() for name, value in self.named_parameters()}

    @torch.no_grad()
    def unpack(self, values: dict[str, Tensor]) -> None:
        """Take what `packed` gave, or would give."""
        for name, parameter in self.named_parameters():
            parameter.copy_(values[name])

    def extra_repr(self) -> str:
        return repr(printed(self.options))


def apply(linear: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
    """The forward hook of an adapted layer."""
    return linear.adapter(args[0], y)  # type: ignore[operator]
