"""One trunk, many output heads."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute
from transformers.utils.generic import ModelOutput

from manyheads.aggregate import build
from manyheads.core.key import key_of
from manyheads.multi.balance import Uncertainty, make_balance, processes
from manyheads.multi.between import Between, read_between
from manyheads.multi.head import POOLS, Head, read_head
from manyheads.multi.pool import pooled
from manyheads.multi.tree import Pass, Tree, named
from manyheads.multi.trunk import load_trunk

Targets = Mapping[str, Any]


@dataclass
class Output(ModelOutput):
    """What a pass gives; also a dict, as `Trainer` expects.

    loss: of all heads, balanced. losses: each head's own, before weights. outputs: of the heads that ran.
    """

    loss: Tensor | None = None
    losses: dict[str, Tensor] | None = None
    outputs: dict[str, Tensor] | None = None


@contextmanager
def naming(name: str) -> Iterator[None]:
    """An error in here says whose head it is."""
    try:
        yield
    except ValueError as error:
        raise type(error)(f"head {name!r}: {error}") from None


class MultiHead(Tree):
    """A trunk that runs once, and heads that read what it gives.

    >>> model = MultiHead(trunk, {"age": "regression", "kind": "classification(classes=3)"}, width=32)
    >>> model(x, targets={"age": age, "kind": kind}).loss.backward()
    >>> model.eval().predict(x)["kind"]

    A batch has a dict of targets. What is missing is NaN, or -100 where labels are classes, or None in a list; a target
    that is not there, or is None, is missing in every row. In training a head without labels does not run, adds
    nothing, and its parameters' gradients stay None, so an optimiser passes them over.

    L_k is the mean of head k over its labelled places. With `counts`, labels of the whole step, the sum over
    micro-batches is the step of one large batch. In training over several processes labels are counted over all of
    them, so that the mean of gradients that DistributedDataParallel takes is the step of one process with the whole
    batch; wrap with find_unused_parameters=True, as `Trainer` does. Several passes before a step each have a backward
    of their own, all but the last under `no_sync`.

    The trunk may branch: `split` gives groups of heads modules of their own behind a submodule (`multi/tree.py`), and
    what is shared still runs once. `extract` takes some heads out, `add` puts one on.

    Args:
        trunk: any module, or the name of a pretrained one (`multi/trunk.py`). Features are its output (the tensor,
            `last_hidden_state`, or the first of a tuple), or the output of the submodule `features`, for all heads or
            in a head's options. A map `[B, C, h, w]` is read as tokens `[B, h·w, C]`.
        heads: a kind of head, or its line, by name; a list of pairs does too.
        width: of the features; a dict by submodule ("" is the trunk itself); asked of the modules where not given.
        balance: `sum`, `uncertainty`, `averaged` and `balanced` (by epochs, `multi/rates.py`), the name of an
            aggregator of torchjd, or one made by you (`multi/balance.py`).
        checkpoint: the trunk's activations are computed again in backward.
        between: what makes of the features one feature for each head, or its line, `mmoe(experts=4)`
            (`multi/between.py`); heads with features of their own in their options read past it.
    """

    accepts_loss_kwargs = False  # of Trainer: losses are means, so it divides by the steps that it accumulates

    def __init__(
        self, trunk: nn.Module | str, heads: Mapping[str, Head | str] | Iterable[tuple[str, Head | str]], *,
        features: str = "", width: int | Mapping[str, int] | None = None, balance: Any = "sum",
        checkpoint: bool = False, between: Between | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(load_trunk(trunk) if isinstance(trunk, str) else trunk)
        self.features, self.checkpoint = features, checkpoint
        self._takes_mask = "mask" in signature(self.trunk.forward).parameters
        self.heads: dict[str, Head] = {}
        pairs: list[Any] = list(heads.items() if isinstance(heads, Mapping) else heads)
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"heads are a dict by name, or pairs of a name and a head, not {pairs!r}")
        for name, head in pairs:
            self._new(name)
            with naming(name):
                self.heads[name] = read_head(head)
        if not self.heads:
            raise ValueError("a model needs at least one head")
        self.nodes[0].heads = [*self.heads]
        self.widths, self.nets, self.pools = {}, nn.ModuleDict(), nn.ModuleDict()
        self.between = None
        if between is not None:
            options = read_between(between)
            self.between_taps = options.taps or (features,)
            widths = [self._width(tap, width) for tap in self.between_taps]
            self.between = options.build(widths, [name for name in self.heads if self._joins(name)])
        for name in self.heads:
            with naming(name):
                self._build(name, width)
        self.balance = make_balance(balance, self.heads)

    def _build(self, name: str, width: int | Mapping[str, int] | None) -> None:
        if self.between is not None and self._joins(name):
            self.widths[name] = self.between.width
        else:
            self.widths[name] = self._width(self.tap(name), width)
        head, read = self.heads[name], self.widths[name]
        if head.pool and head.pool not in POOLS:
            self.pools[key_of(name)] = pool = build(head.pool, read)
            read = math.prod(pool.results())
        self.nets[key_of(name)] = head.build(read)

    def _width(self, tap: str, width: int | Mapping[str, int] | None) -> int:
        if tap and tap not in dict(self.trunk.named_modules()):
            raise ValueError(f"the trunk has no submodule {tap!r}")
        given = width.get(tap) if isinstance(width, Mapping) else width
        found = given or _width(self.trunk.get_submodule(tap) if tap else self.trunk)
        if found is None:
            raise ValueError(f"how wide are the features of {tap or 'the trunk'}? give width=")
        return found

    def _joins(self, name: str) -> bool:
        """Whether a head reads what is between, where something is."""
        return self.heads[name].features is None

    def add(self, name: str, head: Head | str, *, width: int | Mapping[str, int] | None = None) -> Self:
        """Put on another head, which reads the first node; the others' outputs stay as they are.

        For a new task on a trunk that is done: `model.freeze().add("new", "regression")`. With `between`, its piece for
        this head is new too. Make the optimiser afterwards.
        """
        self._new(name)
        if isinstance(self.balance, Uncertainty):
            raise ValueError(f"head {name!r}: balance='uncertainty' has learned a scale for each head; build it anew")
        with naming(name):
            self.heads[name] = read_head(head)
            try:
                self._build(name, width)
                if self.between is not None and self._joins(name):
                    self.between.add(name)
            except ValueError:
                for each in (self.heads, self.widths):
                    each.pop(name, None)
                self._keep([*self.heads])
                raise
        self.nodes[0].heads.append(name)
        for made in (self.nets, self.pools, self.between):
            old = None if made is None else next(made.parameters(), None)
            if made is not None and old is not None:
                made.to(old.device, old.dtype)
        return self

    def extract(self, names: str | Sequence[str]) -> Self:
        """A copy with these heads only, and of the trunk what they read; their outputs are bit-equal."""
        names = named(names)
        for name in names:
            self._known(name)
        if not names:
            raise ValueError("extract needs the name of a head, at least")
        made = copy.deepcopy(self)
        made.prune(names)
        made.heads = {name: head for name, head in made.heads.items() if name in names}
        made.widths = {name: made.widths[name] for name in made.heads}
        made._keep([*made.heads])
        if made.between is not None:
            made.between.keep([*made.heads])
        return made

    def _keep(self, names: Sequence[str]) -> None:
        """Modules of these heads alone, in their order."""
        keys = [key_of(name) for name in names]
        self.nets = nn.ModuleDict({key: self.nets[key] for key in keys})
        self.pools = nn.ModuleDict({key: self.pools[key] for key in keys if key in self.pools})

    def split(self, at: str, groups: Sequence[Sequence[str]], *, fresh: bool = False) -> Self:
        if self.between is not None and not self.between.apart:
            raise ValueError(f"split at {at!r}: {type(self.between).__name__} lets heads speak to each other")
        return super().split(at, groups, fresh=fresh)

    def taps(self) -> set[str]:
        """Submodules of the trunk that are read."""
        return {tap for name in self.heads for tap in self._taps(name)}

    def _taps(self, name: str) -> tuple[str, ...]:
        return self.between_taps if self.between is not None and self._joins(name) else (self.tap(name),)

    def _new(self, name: Any) -> None:
        if not isinstance(name, str):
            raise ValueError(f"head {name!r}: names are text")
        if name in self.heads:
            raise ValueError(f"head {name!r}: two heads have this name")

    def _known(self, name: str) -> None:
        if name not in self.heads:
            raise ValueError(f"there is no head {name!r}; there are {', '.join(map(repr, self.heads))}")

    def activation_checkpointing_enable(self, *, offload: bool = False, **options: Any) -> None:
        """As `checkpoint`, for `Trainer`; the trunk is computed again as a whole, so options of layers say nothing."""
        if offload:
            raise ValueError("activations of a trunk are computed again, not moved to another device: offload=False")
        self.checkpoint = True

    def tap(self, name: str) -> str:
        """The submodule of the trunk that a head reads; "" is the trunk itself."""
        own = self.heads[name].features
        return self.features if own is None else own

    def target(self, name: str) -> str:
        """The key of a head's labels."""
        own = self.heads[name].target
        return name if own is None else own

    def key(self, name: str) -> str:
        """What a head's module is called in `nets`, and so in a checkpoint."""
        return key_of(name)

    def net(self, name: str) -> nn.Module:
        """A head's module."""
        return self.nets[key_of(name)]

    def forward(
        self, *inputs: Any, targets: Targets | None = None, heads: str | Sequence[str] | None = None,
        counts: Mapping[str, float] | None = None, mask: Tensor | None = None, **more: Any,
    ) -> Output:  # fmt: skip
        """Outputs, and with targets losses.

        Args:
            inputs, more: the trunk's. targets: labels by target key.
            heads: the names of those to run (default: in training with targets those that have labels, else all).
            counts: labels of each head in the whole step, over micro-batches (`label_counts`); default: in this batch.
            mask: bool `[B, T]`, False on padding; for pooling and spans, and given to a trunk that takes one, as ours
                do. Default: an `attention_mask` among the inputs.
        """
        names = named(self.heads if heads is None else heads)
        for name in names:
            self._known(name)
        if targets is not None:
            self._keys(targets)
            if self.training:  # a target that is not there costs nothing, not even the features it would be read from
                names = [name for name in names if targets.get(self.target(name)) is not None]
        found = self._features(inputs, more, mask, names)
        mask = more.get("attention_mask") if mask is None else mask
        mask = None if mask is None else mask.bool()
        read = {name: self._read(name, self._like(name, found)) for name in names}
        labels = {} if targets is None else self._labels(read, targets)
        every = {} if targets is None else self._counts(labels)
        if targets is not None and self.training:
            names = [name for name in names if every[name][0]]
        views = self._views(found, names, mask)
        outputs = {name: self._run(name, views[name], mask) for name in names}
        if targets is None:
            return Output(outputs=outputs)
        losses, shares = {}, {}
        for name in names:
            here, mean, several = every[name]
            if here:
                total = mean if counts is None else counts.get(name, 0) / several
                if not total:
                    raise ValueError(f"head {name!r}: counts says no labels, but this batch has {here:g}")
                values = self.heads[name].losses(_precise(outputs[name]), *labels[name])
                losses[name], shares[name] = values.sum() / total, here / total
        loss = self.balance.combine(losses, self.heads, shares) if losses else self._nothing(found)
        if self.between is not None and self.training:
            loss = loss + self.between.penalty({name: each for name, each in shares.items() if self._joins(name)})
        return Output(loss=loss, losses=losses, outputs=outputs)

    def predict(self, *inputs: Any, heads: str | Sequence[str] | None = None, **more: Any) -> dict[str, Tensor]:
        """What each head says: classes, numbers, spans, scores."""
        with torch.no_grad():
            outputs = self(*inputs, heads=heads, **more).outputs
        return {name: self.heads[name].predict(_precise(output)) for name, output in outputs.items()}

    def measure(self, outputs: Mapping[str, Tensor], targets: Targets) -> dict[str, Tensor]:
        """Each head's metric as sums, which add up over batches; `metrics` makes figures of them."""
        self._keys(targets)
        sums = {}
        for name, output in outputs.items():
            given = targets.get(self.target(name))
            if given is not None:
                with naming(name), torch.no_grad():
                    head = self.heads[name]
                    target = cast(Tensor, head.tidy(given, _like(output, head)))
                    known = head.known(target)
                    head.check(target, known, _like(output, head))
                    if bool(known.any()):
                        sums[name] = head.sums(_precise(output), target, known)
        return sums

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
        return {name: self.heads[name].metrics(each) for name, each in sums.items()}

    def label_counts(self, targets: Targets) -> dict[str, float]:
        """How many labels each head has: of a whole batch, for the `counts` of its micro-batches. They add up."""
        self._keys(targets)
        counts = {}
        for name, head in self.heads.items():
            given = targets.get(self.target(name))
            if given is not None:
                with naming(name):
                    plain = given if isinstance(given, Tensor) else torch.tensor(_listed(given), dtype=torch.float64)
                    if head.dtype == "index" and plain.is_floating_point():
                        plain = plain.nan_to_num(nan=-100.0)
                    if head.dtype == "number":
                        plain = plain.double()
                    counts[name] = float(head.known(plain).sum())
        return counts

    # Steps of a pass.

    def _keys(self, targets: Targets) -> None:
        if not isinstance(targets, Mapping):
            raise ValueError(f"targets are a dict by name, not {type(targets).__name__}")
        known = {self.target(name) for name in self.heads}
        for key in targets:
            if key not in known:
                raise ValueError(f"no head reads the target {key!r}; heads read {', '.join(map(repr, sorted(known)))}")

    def _features(self, inputs: Any, more: Any, mask: Tensor | None, names: list[str]) -> dict[tuple[int, str], Tensor]:
        """What is read, by node and submodule. Nodes without one of these heads do not run."""
        wanted: dict[int, set[str]] = {} if names else {0: {""}}
        for name in names:
            wanted.setdefault(self.node(name), set()).update(self._taps(name))

        def run(*inputs: Any) -> dict[tuple[int, str], Tensor]:
            found: dict[tuple[int, str], Tensor] = {}
            along = Pass() if len(wanted) > 1 else None

            def keep(node: int, tap: str) -> Any:
                return lambda module, given, output: found.__setitem__((node, tap), _tensor(output, tap))

            for node, taps in sorted(wanted.items()):
                with self.standing(node, along), ExitStack() as hooks:
                    for tap in taps:
                        if tap:
                            module = self.trunk.get_submodule(tap)
                            hooks.callback(module.register_forward_hook(keep(node, tap)).remove)
                    output = self.run_trunk(*inputs, mask=mask, **more)
                if "" in taps:
                    found[node, ""] = _tensor(output, "")
            return found

        if self.checkpoint and self.training and torch.is_grad_enabled():
            found = cast("dict[tuple[int, str], Tensor]", recompute(run, *inputs, use_reentrant=False))
        else:
            found = run(*inputs)
        for name in names:
            for tap in self._taps(name):
                if (self.node(name), tap) not in found:
                    raise ValueError(f"head {name!r}: the trunk did not run its submodule {tap!r}")
        return found

    def run_trunk(self, *inputs: Any, mask: Tensor | None = None, **more: Any) -> Any:
        """The trunk alone."""
        return self.trunk(*inputs, **(more | {"mask": mask} if mask is not None and self._takes_mask else more))

    def run_alone(self, name: str, output: Any, mask: Tensor | None = None) -> Tensor:
        """One head, on what the submodule that it reads has just given."""
        mask = None if mask is None else mask.bool()
        if self.between is not None and self._joins(name):
            raise ValueError(f"head {name!r} reads what is between, which is not run for one head alone")
        return self._run(name, self._read(name, _tensor(output, self.tap(name))), mask)

    def _like(self, name: str, found: Mapping[tuple[int, str], Tensor]) -> Tensor:
        """Something shaped as what a head is about to read."""
        features = [found[self.node(name), tap] for tap in self._taps(name)]
        return self.between.like(features) if self.between is not None and self._joins(name) else features[0]

    def _read(self, name: str, features: Tensor) -> Tensor:
        """The features that a head's labels are one of each row of, checked."""
        head, width, tap = self.heads[name], self.widths[name], self.tap(name) or "the trunk"
        wanted = 3 if head.reads != "rows" or head.pool else 2
        features = _tokens(features)
        shape = list(features.shape)
        with naming(name):
            if features.dim() != wanted:
                form = "[rows, width]" if wanted == 2 else f"[rows, {'tokens' if head.pool else head.reads}, width]"
                hint = "; pool='mean' makes rows of tokens" if (features.dim(), wanted) == (3, 2) else ""
                raise ValueError(f"it reads {form}, but {tap} gives {shape}{hint}")
            if features.shape[-1] != width:
                raise ValueError(f"it was built for features {width} wide, but {tap} gives {shape}")
            if not features.is_floating_point():
                raise ValueError(f"{tap} gives {features.dtype}, which are no features")
        return features

    def _labels(self, read: Mapping[str, Tensor], targets: Targets) -> dict[str, tuple[Tensor, Tensor]]:
        labels = {}
        for name, features in read.items():
            head = self.heads[name]
            with naming(name):
                target = head.tidy(targets.get(self.target(name)), features)
                if target is not None:
                    known = head.known(target)
                    head.check(target, known, features)
                    labels[name] = (target, known)
        return labels

    def _counts(self, labels: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[float, float, int]]:
        """Of each head: labels here, the mean of labels over processes, and how many processes there are."""
        parts = [labels[name][1].sum() if name in labels else 0 for name in self.heads]
        device = next((known.device for _, known in labels.values()), next(self.parameters()).device)
        here = torch.stack([torch.as_tensor(part, device=device) for part in parts])
        several = processes() if self.training and torch.is_grad_enabled() else 1
        everywhere = here.clone()
        if several > 1:
            torch.distributed.all_reduce(everywhere)
        pairs = torch.stack([here, everywhere / several]).T.tolist()
        return {name: (one, all_of_them, several) for name, (one, all_of_them) in zip(self.heads, pairs, strict=True)}

    def _views(
        self, found: Mapping[tuple[int, str], Tensor], names: list[str], mask: Tensor | None
    ) -> dict[str, Tensor]:
        alike: dict[tuple[int, tuple[str, ...], bool], list[str]] = {}
        for name in names:
            alike.setdefault((self.node(name), self._taps(name), self._joins(name)), []).append(name)
        views: dict[str, Tensor] = {}
        for (node, taps, joins), some in alike.items():
            features = [found[node, tap] for tap in taps]
            if self.between is not None and joins:
                views |= self.between(features, some, self.balance.views, mask)
            else:
                views |= self.balance.views(features[0], some)
        return {name: _tokens(view) for name, view in views.items()}

    def _run(self, name: str, features: Tensor, mask: Tensor | None) -> Tensor:
        head = self.heads[name]
        if key_of(name) in self.pools:
            features, mask = self.pools[key_of(name)](features, mask).out.flatten(1), None
        elif head.pool:
            features, mask = pooled(features, head.pool, mask), None
        return head.output(self.net(name), features, mask)

    def _nothing(self, found: Mapping[tuple[int, str], Tensor]) -> Tensor:
        """Zero, for a batch without labels: backward runs, and no gradient comes of it.

        Of several processes each has to take part, so there the trunk gets zeros.
        """
        some = next(iter(found.values()))
        if processes() > 1 and some.requires_grad:
            return some.float().flatten()[:0].sum()
        return torch.zeros((), device=some.device, requires_grad=self.training)

    def extra_repr(self) -> str:
        return "\n".join(f"{name}: {head}" for name, head in self.heads.items())


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A batch of rows such as {"x": …, "targets": {"age": 31.0}}; a target that a row lacks is None there.

    What is not in `targets` is stacked. For `DataLoader` and `Trainer`.
    """
    batch: dict[str, Any] = {}
    for key in rows[0]:
        if key != "targets":
            batch[key] = torch.stack([torch.as_tensor(row[key]) for row in rows])
    names = dict.fromkeys(name for row in rows for name in row.get("targets") or ())
    batch["targets"] = {name: _gather([(row.get("targets") or {}).get(name) for row in rows]) for name in names}
    return batch


def _gather(values: list[Any]) -> Tensor:
    known = [torch.as_tensor(value, dtype=torch.float64) for value in values if value is not None]
    shape = known[0].shape if known else ()
    blank = torch.full(shape, math.nan, dtype=torch.float64)
    return torch.stack([blank if v is None else torch.as_tensor(v, dtype=torch.float64) for v in values])


def _listed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_listed(each) for each in value]
    return math.nan if value is None else value


def _precise(output: Tensor) -> Tensor:
    return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output


def _like(output: Tensor, head: Head) -> Tensor:
    """Something shaped as the features were, which is what labels are held against."""
    return output if head.reads != "lists" else output[..., None]


def _tokens(features: Tensor) -> Tensor:
    """A map `[B, C, h, w]` as tokens."""
    return features.flatten(2).mT if features.dim() == 4 else features


def _tensor(output: Any, tap: str) -> Tensor:
    if isinstance(output, Mapping) and isinstance(output.get("last_hidden_state"), Tensor):
        return output["last_hidden_state"]
    if isinstance(output, list | tuple) and output and isinstance(output[0], Tensor):
        return output[0]
    if not isinstance(output, Tensor):
        raise ValueError(
            f"{tap or 'the trunk'} gives {type(output).__name__}: no tensor, nor a tuple that begins with one, nor "
            "last_hidden_state; name a submodule with features="
        )
    return output


def _width(module: nn.Module) -> int | None:
    """How wide a module's output is, where the module says so."""
    config = getattr(module, "config", None)
    for owner, name in (
        (module, "out_features"),
        (module, "dim"),
        (module, "width"),
        (module, "num_features"),
        (config, "hidden_size"),
    ):
        value = getattr(owner, name, None)
        if isinstance(value, int):
            return value
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return module.normalized_shape[-1]
    children = list(module.children())
    if isinstance(module, nn.Sequential):
        return next((found for child in reversed(children) if (found := _width(child))), None)
    stack = getattr(module, "stack", None)  # an encoder of ours
    return _width(stack) if isinstance(stack, nn.Module) and getattr(module, "norm", None) is not None else None
