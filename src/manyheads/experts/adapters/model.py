"""Adapters of a whole model: put on, told their task, trained, saved, merged, taken off."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from manyheads.core.part import OptionError
from manyheads.core.spec import printed, read_one
from manyheads.experts.adapters.adapter import Adapter, Options, Pass, Tasks, apply, find_adapter
from manyheads.experts.adapters.mhr import MHRAdapter

SPECS = "manyheads.adapters"
"""The entry of a file's metadata that holds the spec of each adapted layer."""


class Adapters(Mapping[str, Adapter]):
    """The adapters of a model, by the name of the linear layer that each is beside."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: dict[str, Adapter] = {
            name: cast(Adapter, module.adapter)
            for name, module in model.named_modules()
            if isinstance(getattr(module, "adapter", None), Adapter)
        }

    def __getitem__(self, name: str) -> Adapter:
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __repr__(self) -> str:
        lines = [f"  {name}: {printed(adapter.options)}" for name, adapter in self.items()]
        return "\n".join([f"{len(self)} adapters, {sum(map(torch.numel, self.parameters())):,} parameters", *lines])

    @property
    def shared(self) -> Pass:
        if not self.found:
            raise ValueError("this model has no adapters; put them on with adapt, or load")
        return next(iter(self.values())).shared

    def parameters(self) -> Iterator[nn.Parameter]:
        for adapter in self.values():
            yield from adapter.parameters()

    def groups(self, lr: float = 1e-3, routing_lr: float = 0.1) -> list[dict[str, Any]]:
        """Two parameter groups for an optimizer: what skills do, and who serves whom, which wants a larger rate."""
        groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for adapter in self.values():
            for name, parameter in adapter.named_parameters():
                if parameter.requires_grad:
                    groups[name.split(".")[0] in adapter.routing].append(parameter)
        return [{"params": groups[False], "lr": lr}, {"params": groups[True], "lr": routing_lr}]

    def tasks(self, tasks: Tasks | None) -> Standing:
        """From here on, or within a `with`, the model is at these tasks: one, or one for each sequence `[B]`.

        A pass's own argument `task_ids` goes before. When a pass has several rows for a sequence, as beam search has,
        they are neighbours; a layer that sees tokens out of order, as an expert does, is none for tasks. Gradient
        checkpointing computes layers again in the backward pass, which belongs inside the `with` then, and before a
        pass of other tasks; outside it raises.
        """
        shared = self.shared
        before = shared.standing
        shared.set(None if tasks is None else shared.ids_of(tasks), shared.given)
        return Standing(shared, before)

    def loss(self) -> Tensor:
        """The adapters' own losses of the newest training pass, weighed; an output that has a loss has them in it."""
        return self.shared.loss()

    @contextmanager
    def routes(self) -> Iterator[dict[str, list[Tensor]]]:
        """Collects the experts `[…, heads, top]` that each routed adapter chooses, a tensor a pass."""
        shared = self.shared
        before, shared.routes = shared.routes, {}
        try:
            yield shared.routes
        finally:
            shared.routes = before

    def few_shot(self, how: Literal["all", "routing", "mean"] = "all") -> int | None:
        """Ready `mhr` for one more task, whose number is returned; the other parameters freeze.

        all (MHR): a new row of Z, trained with A and B. routing (MHR-z): the new row alone, h·S numbers a layer.
        mean (MHR-μ): no routing any more, the mean of all skills is trained as one adapter; there are no tasks then.
        An optimizer is made afterwards: parameters are new.
        """
        if how not in ("all", "routing", "mean"):
            raise ValueError(f"no way {how!r} to learn from few examples; there are all, routing and mean")
        shared, found = self.shared, [each for each in self.values() if isinstance(each, MHRAdapter)]
        counts = {adapter.tasks for adapter in found}
        if len(found) != len(self) or len(counts) != 1:
            raise ValueError("only adapters of mhr that know the same tasks learn a new one")
        for adapter in found:
            if how == "mean":
                adapter.average()
                continue
            for name, parameter in adapter.named_parameters():
                parameter.requires_grad_(how == "all" and name.split(".")[0] not in adapter.routing)
            adapter.add_task()
        shared.set(None, None)
        _count_tasks(self)
        return None if how == "mean" else counts.pop()

    @torch.no_grad()
    def merge(self, task: int = 0) -> None:
        """Write a task's adapters into the weights, and take them off: the same outputs at no cost."""
        owners = [id(p) for _, p in self.model.named_parameters(remove_duplicate=False)]
        results = []
        for name, adapter in self.items():
            linear = self.model.get_submodule(name)
            weight, bias = linear.weight, linear.bias
            assert isinstance(weight, Tensor)
            if owners.count(id(weight)) > 1:
                raise ValueError(f"{name} shares its weight with another module, which merging would change too")
            if not weight.is_floating_point():
                raise ValueError(f"{name} holds its weight as {weight.dtype}; merge into an unquantised model")
            wide = torch.promote_types(weight.dtype, torch.float32)
            wide_bias = bias.to(wide) if isinstance(bias, Tensor) else None
            results.append((linear, *adapter.merged(weight.to(wide), wide_bias, task)))
        for linear, weight, bias in results:
            linear.weight.copy_(weight)
            if bias is not None:
                linear.bias.copy_(bias)
        self.unload()

    def unload(self) -> None:
        """Take the adapters off; what trained before they came trains again."""
        shared = self.shared
        for module in self.model.modules():
            _unhook(module, apply, shared.enter, shared.leave)
        for name in self:
            del self.model.get_submodule(name).adapter
        for parameter in shared.thawed:
            parameter.requires_grad_(True)
        self.found = {}

    def save(self, path: str | Path) -> None:
        """Write the adapters alone, a safetensors file; `load` puts them on a fresh model."""
        _ = self.shared
        specs, tensors = {}, {}
        for name, adapter in self.items():
            options, values = adapter.packed()
            specs[name] = printed(options)
            tensors |= {f"{name}.{key}": value.contiguous() for key, value in values.items()}
        save_file(tensors, path, {SPECS: json.dumps(specs), "format": "pt"})


class Standing:
    """Tasks that hold from now on; as a context, until its end."""

    def __init__(self, shared: Pass, before: Tensor | None) -> None:
        self.shared, self.before = shared, before

    def __enter__(self) -> Standing:
        return self

    def __exit__(self, *error: object) -> None:
        self.shared.set(self.before, self.shared.given)


def adapt(model: nn.Module, spec: str | Options, targets: Iterable[str], *, freeze: bool = True) -> Adapters:
    """Put an adapter beside every linear layer whose name is, or ends in, one of `targets`; in place.

    Args:
        model: any module. Its classes, names and weights stay; `targets` may be attention and feed-forward alike.
        spec: a line such as "mhr(splits=4, skills=8, rank=4, tasks=10)", see `kinds`.
        freeze: every other parameter of the model stops training (adapters put on before go on).

    Returns:
        What `adapters(model)` finds from then on.

    Raises:
        OptionError: no such adapter, option or layer, or numbers that do not fit one.
    """
    options = read_one(spec, find_adapter) if isinstance(spec, str) else spec
    targets = [targets] if isinstance(targets, str) else [*targets]
    chosen = {}
    for target in targets:
        hits = [name for name, _ in model.named_modules() if f".{name}".endswith(f".{target}") and name]
        if not hits:
            ends = sorted({name.split(".")[-1] for name, each in model.named_modules() if isinstance(each, nn.Linear)})
            raise OptionError(f"no layer {target!r}; the linear layers are called {', '.join(ends)}")
        chosen |= dict.fromkeys(hits, options)
    return _attach(model, chosen, freeze)


def adapters(model: nn.Module) -> Adapters:
    """The adapters of a model, none or more."""
    return Adapters(model)


def load(model: nn.Module, path: str | Path, *, freeze: bool = True) -> Adapters:
    """Put saved adapters on a model, or their values into the same adapters where it has them.

    Raises:
        OptionError: the file's layers are not the model's; names and shapes are all checked before anything changes.
    """
    with safe_open(path, "pt") as file:
        meta = file.metadata() or {}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if SPECS not in meta:
        raise OptionError(f"{path} is no file of adapters")
    wanted = {name: read_one(line, find_adapter) for name, line in json.loads(meta[SPECS]).items()}
    present = adapters(model)
    if present:
        here = {name: adapter.packed()[0] for name, adapter in present.items()}
        differ = sorted(name for name in here.keys() | wanted.keys() if here.get(name) != wanted.get(name))
        if differ:
            raise OptionError(f"the model's adapters differ from the file's at {', '.join(differ)}; unload them first")
    _fits(model, wanted, tensors)
    found = present or _attach(model, wanted, freeze)
    for name, adapter in found.items():
        start = f"{name}."
        adapter.unpack({key[len(start) :]: value for key, value in tensors.items() if key.startswith(start)})
    return found


def _fits(model: nn.Module, wanted: Mapping[str, Options], tensors: Mapping[str, Tensor]) -> None:
    linears = {name: _linear(model, name) for name in wanted}
    expected = {}
    with torch.random.fork_rng():
        for name, options in wanted.items():
            options.check(linears[name].in_features, linears[name].out_features)
            values = options.build(linears[name].in_features, linears[name].out_features).packed()[1]
            expected |= {f"{name}.{key}": [*value.shape] for key, value in values.items()}
    given = {key: [*value.shape] for key, value in tensors.items()}
    wrong = [
        f"{key} is {given.get(key, 'missing')}, wanted {expected.get(key, 'not')}"
        for key in sorted(given.keys() | expected.keys())
        if given.get(key) != expected.get(key)
    ]
    if wrong:
        raise OptionError("the file does not fit the model: " + "; ".join(wrong))


def _attach(model: nn.Module, chosen: Mapping[str, Options], freeze: bool) -> Adapters:
    """Check everything, then put the adapters on."""
    linears = {name: _linear(model, name) for name in chosen}
    for name, options in chosen.items():
        if hasattr(linears[name], "adapter"):
            raise OptionError(f"{name} has an adapter already")
        try:
            options.check(linears[name].in_features, linears[name].out_features)
        except OptionError as error:
            raise OptionError(f"{name}: {error}") from None
    present = adapters(model)
    shared = present.shared if present else Pass()
    if not present:
        model.register_forward_pre_hook(shared.enter, with_kwargs=True)
        model.register_forward_hook(shared.leave)
    if freeze:
        own = {id(parameter) for parameter in present.parameters()}
        shared.thawed += [p for p in model.parameters() if p.requires_grad and id(p) not in own]
        for parameter in shared.thawed:
            parameter.requires_grad_(False)
    for name, options in chosen.items():
        linear, weight = linears[name], linears[name].weight
        wide = torch.promote_types(weight.dtype, torch.float32) if weight.is_floating_point() else torch.float32
        adapter = options.build(linear.in_features, linear.out_features).to(weight.device, wide).train(linear.training)
        adapter.shared, adapter.at = shared, name
        linear.adapter = adapter
        linear.register_forward_hook(apply)
    found = adapters(model)
    _count_tasks(found)
    return found


def _linear(model: nn.Module, name: str) -> nn.Linear:
    """The linear layer of that name; refused where an adapter would not act."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise OptionError(f"the model has no layer {name!r}") from None
    if not isinstance(module, nn.Linear):
        raise OptionError(f"{name} is a {type(module).__name__}; adapters go beside linear layers")
    parent, _, own = name.rpartition(".")
    owner = model.get_submodule(parent)
    if isinstance(owner, nn.MultiheadAttention) or own in getattr(owner, "unhooked", ()):
        raise OptionError(
            f"{name}: {type(owner).__name__} reads the weight of {own!r} itself, where an adapter would not act"
        )
    return module


def _unhook(module: nn.Module, *wanted: Any) -> None:
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook in wanted]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _count_tasks(found: Adapters) -> None:
    """Task ids must be known to every adapter that tells tasks apart."""
    tasks = [adapter.tasks for adapter in found.values() if isinstance(adapter, MHRAdapter) and adapter.tasks]
    found.shared.known = min([count for count in tasks if count > 1] or tasks, default=None)
