"""Options that are found by name: dataclasses of one kind of thing, and lines that read as one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from manyheads.core.part import OptionError
from manyheads.core.spec import read_one

T = TypeVar("T")
K = TypeVar("K", bound=type)


class Named:
    """Options of a kind that has a name."""

    name: ClassVar[str]

    def ask(self, right: bool, otherwise: str) -> None:
        """Raise `OptionError` unless `right`."""
        if not right:
            raise OptionError(f"{self.name}: {otherwise}")


class Kinds(Generic[T], dict[str, type[T]]):
    """Classes under `base`, by the `name` that `register` gives them. said: how an error speaks of one, `head {}`."""

    def __init__(self, base: type[T], said: str) -> None:
        super().__init__()
        self.base, self.said = base, said

    def register(self, name: str) -> Callable[[K], K]:
        """Give a kind its name."""

        def put(kind: Any) -> Any:
            old = self.get(name)
            if old is not None and (old.__module__, old.__qualname__) != (kind.__module__, kind.__qualname__):
                raise OptionError(f"two are called {self.said.format(repr(name))}: {old.__module__}, {kind.__module__}")
            kind.name = name
            self[name] = kind
            return kind

        return put

    def find(self, name: str) -> type[T]:
        if name not in self:
            raise OptionError(f"there is no {self.said.format(repr(name))}; there are {', '.join(sorted(self))}")
        return self[name]

    def read(self, line: str | T) -> T:
        """`name(option=3)` as options; options as they are."""
        what = self.said.format("").strip()
        return line if isinstance(line, self.base) else read_one(line, self.find, what)  # type: ignore[arg-type]
