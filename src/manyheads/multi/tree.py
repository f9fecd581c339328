"""A trunk that branches: a tree of nodes, each of which serves some heads."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from manyheads.core.key import escaped, unescaped


@dataclass
class Node:
    """A way through the trunk. It shares with its parent what runs up to `at`, and has its own copies of the rest.

    parent: the node's number, None for the root. at: a submodule, "" where nothing is shared. heads: those it serves.
    """

    parent: int | None = None
    at: str = ""
    heads: list[str] = field(default_factory=list)


class Pass:
    """What modules said in one pass, by the order in which they ran.

    Nodes run one after the other. As long as one goes the way of an earlier one, it is told what was said there; from
    the first module that is its own it runs. It is told copies, as a trunk may change in place what it was given, and
    a module that changes its input and returns it does so again. Behind one that changes more nothing is known.
    """

    def __init__(self) -> None:
        self.start: Known = {}
        self.here = self.start

    def begin(self) -> None:
        self.here = self.start

    def leave(self) -> None:
        """From here on nothing is known."""
        self.here = {}

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if module in self.here:
            said, same, self.here = self.here[module]
            return _copied(said) if same is None else given[same].copy_(said)
        before = [_version(each) for each in given]
        said = module(*args, **kwargs)
        changed = [place for place, each in enumerate(given) if _version(each) != before[place]]
        same = next((place for place in changed if given[place] is said), None)
        later: Known = {}
        if all(given[place] is said for place in changed):
            self.here[module] = (_copied(said), same, later)
        self.here = later
        return said


Known = dict[nn.Module, tuple[Any, int | None, "Known"]]
"""By the module that runs next: what it says, which of its inputs that is (None: none), and what is known then."""


class Stand(nn.Module):
    """Stands in a module's place while a pass runs.

    Who reads weights of a node's own module past its forward leaves the known way too.
    """

    def __init__(self, module: nn.Module, along: Pass, own: bool) -> None:
        super().__init__()
        self.__dict__ |= {"of": module, "along": along, "own": own, "training": module.training}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.along.run(self.of, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["of"], name)
        if self.own and isinstance(value, nn.Module | Tensor):
            self.along.leave()
        return value


class Tree(nn.Module):
    """A trunk and the heads' ways through it; at first one node, the trunk itself, serves them all.

    Nodes share whole submodules of the trunk. What is registered behind `at` is what a split copies, so a trunk has to
    register its modules in the order in which they run; parameters that the trunk holds itself, outside of submodules,
    stay shared.
    """

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.branches = trunk, nn.ModuleDict()
        self.nodes: dict[int, Node] = {0: Node()}
        self.frozen: list[nn.Module] = []

    def node(self, name: str) -> int:
        """The number of the node that serves a head."""
        for number, node in self.nodes.items():
            if name in node.heads:
                return number
        every = ", ".join(repr(head) for node in self.nodes.values() for head in node.heads)
        raise ValueError(f"there is no head {name!r}; there are {every}")

    def taps(self) -> Iterable[str]:
        """Submodules of the trunk that somebody reads."""
        raise NotImplementedError

    def split(self, at: str, groups: Sequence[Sequence[str]], *, fresh: bool = False) -> Self:
        """Behind `at` each group of heads gets modules of its own; outputs stay bit-equal until they learn.

        The first group keeps the modules that are there, others get copies (a split of a split works alike).

        Args:
            at: the last submodule of the trunk that the groups share; "" shares nothing.
            groups: heads by name, all of those of one node.
            fresh: the copies draw new weights, where their modules know how (`reset_parameters`).

        Raises:
            ValueError: the groups are no partition of a node's heads, or nothing runs behind `at`.
        """
        if isinstance(groups, str) or any(isinstance(group, str) for group in groups):
            raise ValueError(f"split at {at!r}: groups are lists of heads' names, [['a'], ['b', 'c']], not {groups!r}")
        listed = [name for group in groups for name in group]
        nodes = [self.node(name) for name in listed]
        parent = nodes[0] if nodes else 0
        whole = self.nodes[parent].heads
        if sorted(listed) != sorted(whole) or not all(groups):
            raise ValueError(
                f"split at {at!r}: groups {[list(group) for group in groups]} are no partition of the heads of one "
                f"node, {whole}"
            )
        for group in groups[1:]:
            self._branch(parent, at, [name for name in whole if name in group], fresh)
        self.nodes[parent].heads = [name for name in whole if name in groups[0]]
        return self

    def regrow(self, nodes: Sequence[Mapping[str, Any]]) -> Self:
        """Branch as another tree does whose nodes these are, as dicts; for loading its weights."""
        if len(self.nodes) > 1:
            raise ValueError("the trunk branches already")
        listed = [name for each in nodes for name in each["heads"]]
        if sorted(listed) != sorted(self.nodes[0].heads):
            raise ValueError(f"nodes serve heads {listed}, and not each of {self.nodes[0].heads} once")
        for each in nodes[1:]:
            self._branch(each["parent"], each["at"], list(each["heads"]))
        self.nodes[0].heads = list(nodes[0]["heads"])
        return self

    def _branch(self, parent: int, at: str, heads: list[str], fresh: bool = False) -> None:
        with self.standing(parent):
            paths = self._behind(at)
            there = [self.get_submodule(path) for path in paths]
            copies = copy.deepcopy(there)  # at once, so that ties stay ties
        for old, new in zip(_parts(there), _parts(copies), strict=True):
            if old in self.frozen:
                self.frozen.append(new)
            if fresh and hasattr(new, "reset_parameters"):
                cast(Any, new).reset_parameters()
        number = max(self.nodes) + 1
        self.branches[str(number)] = _listed(dict(zip(paths, copies, strict=True)))
        self.nodes[number] = Node(parent, at, heads)

    def untie(self, names: str | Sequence[str]) -> Self:
        """These heads get a trunk of their own, a copy of the one they read."""
        names = named(names)
        if not names:
            raise ValueError("untie needs the name of a head, at least")
        rest = [name for name in self.nodes[self.node(names[0])].heads if name not in names]
        return self.split("", [rest, names] if rest else [names])

    def freeze(self, at: str = "") -> Self:
        """What runs up to `at` (default: the whole trunk), in all nodes, no longer learns and is in evaluation mode."""
        for number in self.nodes:
            with self.standing(number):
                self.frozen += _parts(self.get_submodule(path) for path in (self._until(at) if at else ["trunk"]))
        for each in self.frozen:
            each.requires_grad_(False)
        return self.train(self.training)

    def thaw(self) -> Self:
        """What was frozen learns again."""
        for each in self.frozen:
            each.requires_grad_(True)
        self.frozen = []
        return self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for each in self.frozen:
            each.training = False
        return self

    def serving(self, name: str) -> dict[str, nn.Parameter]:
        """Parameters of the trunk, by name, on a head's way to the end of the trunk (that the trunk runs, at least)."""
        names = {id(each): key for key, each in self.named_parameters()}
        with self.standing(self.node(name)):
            return {names[id(each)]: each for each in self.trunk.parameters()}

    @contextmanager
    def standing(self, number: int, along: Pass | None = None) -> Iterator[None]:
        """While this lasts, the trunk's submodules are those of a node. along: shares the pass with other nodes."""
        with ExitStack() as stack:
            root = {path: self.get_submodule(path) for path in self._units()} if along else {}
            for each in self._line(number):
                stack.enter_context(_swapped(self, self._own(each)))
            if along:
                if torch.is_inference_mode_enabled():  # where tensors do not tell whether they were changed
                    stack.enter_context(torch.inference_mode(False))
                    stack.enter_context(torch.no_grad())
                along.begin()
                here = {path: self.get_submodule(path) for path in root}
                stands = {path: Stand(made, along, made is not root[path]) for path, made in here.items()}
                stack.enter_context(_swapped(self, stands))
            yield

    def prune(self, names: Sequence[str]) -> None:
        """Only these heads are served; of the nodes what they need is left.

        A node without heads becomes the one of its children that shares most with it, so that the others, which share
        less, still find what they share.
        """
        for node in self.nodes.values():
            node.heads = [name for name in node.heads if name in names]
        while (empty := next((n for n in reversed(self.nodes) if not self.nodes[n].heads), None)) is not None:
            children = [number for number, node in self.nodes.items() if node.parent == empty]
            if children:
                with self.standing(empty):
                    own = {each: [self.get_submodule(path) for path in self._own(each)] for each in children}
                least = min(children, key=lambda each: len(_parts(own[each])))
                self._become(empty, least)
            else:
                self.nodes.pop(empty)
                self.branches.pop(str(empty))
        keep = {number: place for place, number in enumerate(self.nodes)}
        branches = {str(keep[int(number)]): each for number, each in self.branches.items()}
        self.branches = nn.ModuleDict(branches)
        for node in self.nodes.values():
            node.parent = None if node.parent is None else keep[node.parent]
        self.nodes = {keep[number]: node for number, node in self.nodes.items()}

    def _become(self, number: int, child: int) -> None:
        """A node takes its child's modules, heads and children."""
        own = self._own(number)
        for path, module in self._own(child).items():
            own = {old: made for old, made in own.items() if not old.startswith(path + ".")}
            above = next((old for old in own if path.startswith(old + ".")), None)
            if number == 0:
                _put(self, path, module)
            elif above is not None:
                _put(own[above], path.removeprefix(above + "."), module)
            else:
                if path not in own:  # the child shares less with its grandparent
                    self.nodes[number].at = self.nodes[child].at
                own[path] = module
        if number:
            self.branches[str(number)] = _listed(own)
        self.nodes[number].heads = self.nodes.pop(child).heads
        self.branches.pop(str(child))
        for node in self.nodes.values():
            node.parent = number if node.parent == child else node.parent

    def _line(self, number: int | None) -> list[int]:
        """Nodes from the root's child down to this one."""
        return [*self._line(self.nodes[number].parent), number] if number else []

    def _own(self, number: int) -> dict[str, nn.Module]:
        """A node's own modules, by their places."""
        made: Any = self.branches[str(number)] if number else {}
        return {unescaped(path): module for path, module in made.items()}

    def _steps(self, at: str) -> Iterator[tuple[str, list[str], int]]:
        """On the way down to a submodule: a module, its children, and the place of the one that the way takes."""
        steps = f"trunk.{at}".split(".")
        for depth in range(1, len(steps)):
            above = ".".join(steps[:depth])
            names = [name for name, module in self.get_submodule(above)._modules.items() if module is not None]
            if steps[depth] not in names:
                raise ValueError(
                    f"the trunk has no submodule {at!r}; {above} has {', '.join(map(repr, names)) or 'none'}"
                )
            yield above, names, names.index(steps[depth])

    def _behind(self, at: str) -> list[str]:
        """Submodules with weights that come after one, as large as they can be."""
        if not at:
            return ["trunk"]
        found = [f"{above}.{name}" for above, names, place in self._steps(at) for name in names[place + 1 :]]
        found = [path for path in found if self.get_submodule(path).state_dict()]  # others may as well stay shared
        if not found:
            raise ValueError(f"nothing of the trunk that learns comes after {at!r}, so there is nothing to split")
        return found

    def _until(self, at: str) -> Iterator[str]:
        """Submodules up to one, it too, as large as they can be."""
        for above, names, place in self._steps(at):
            yield from (f"{above}.{name}" for name in names[:place])
        yield f"trunk.{at}"

    def _units(self) -> list[str]:
        """The largest submodules in which no node begins and that nobody reads a part of."""
        marks = [f"trunk.{tap}" for tap in self.taps() if tap]
        marks += [path for number in self.nodes if number for path in self._own(number)]

        def walk(path: str, module: nn.Module) -> Iterator[str]:
            if isinstance(module, nn.ModuleList | nn.ModuleDict) or any(m.startswith(path + ".") for m in marks):
                for name, child in module._modules.items():
                    if child is not None:
                        yield from walk(f"{path}.{name}", child)
            else:
                yield path

        return list(walk("trunk", self.trunk))


def named(names: str | Iterable[str]) -> list[str]:
    """Names as a list; a bare name is one."""
    return [names] if isinstance(names, str) else list(names)


@contextmanager
def _swapped(module: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for path, other in others.items():
            stack.callback(_put, module, path, _put(module, path, other))
        yield


def _put(module: nn.Module, path: str, other: nn.Module) -> nn.Module:
    """Put a submodule in a place; what was there."""
    above, _, name = path.rpartition(".")
    places = module.get_submodule(above)._modules
    old, places[name] = places[name], other
    assert old is not None
    return old


def _listed(modules: Mapping[str, nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({escaped(path): module for path, module in modules.items()})


def _parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [part for module in modules for part in module.modules()]


def _copied(said: Any) -> Any:
    return tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, said)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
