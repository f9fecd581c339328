"""Deep combinatorial aggregation: copies of each component, a random combination for each pass."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from manyheads.core.check import check_whole
from manyheads.core.key import key_of

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)

Draw = Mapping[str, "int | Tensor"]
"""Which copy each component takes; of channels, a copy for each output channel."""


class DCA(nn.Module):
    """A network whose L components exist n times; a pass draws z ∈ {1..n}^L and runs f(x; θ_1^{z_1}, …, θ_L^{z_L}).

    >>> model = DCA(network, copies=5, by="layer")
    >>> model.backward(x, y)  # draws that agree with one another; then step the optimiser
    >>> model.predict(x, draws=64)  # DCA: mean probabilities [B, C]
    >>> model.average()(x)  # DCWA: one network, each component the mean of its copies

    In evaluation a call draws as well; all rows of a call have one draw. Copies begin as copies of the given network,
    as in the source's program; for an ensemble whose members begin apart (`by="model"`) give `fresh`. Parameters that
    no component has, and statistics such as BatchNorm's, are common to all combinations. A copy that is not drawn gets
    no gradient (None).

    Args:
        copies: n. by: what a component is: `model`; `layer`, each module with parameters of its own; `channel`, each
            output channel of such a layer, weight and bias together; or names of submodules (blocks; trunk and head).
        shared: types of modules that are in no component (`layer` and `channel` only).
        fresh: makes a network like the given one, for each further copy.

    Source: Shen and Cremers, Deep Combinatorial Aggregation (arXiv 2210.06436).
    """

    def __init__(
        self, network: nn.Module, copies: int = 5, by: Literal["model", "layer", "channel"] | Sequence[str] = "layer",
        *, shared: tuple[type[nn.Module], ...] = NORMS,
        fresh: Callable[[], nn.Module] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_whole(copies=copies)
        self.network, self.copies, self.by_channel = network, copies, by == "channel"
        self.components = _components(network, by, shared)
        own = dict(network.named_parameters())
        others = [dict((fresh() if fresh else network).named_parameters()) for _ in range(copies - 1)]
        for other in others:
            if {name: p.shape for name, p in other.items()} != {name: p.shape for name, p in own.items()}:
                raise ValueError("fresh makes another network than the given one: their parameters differ")
        self.others = nn.ModuleDict()
        for component, names in self.components.items():
            self.others[key_of(component)] = nn.ModuleList(
                nn.ParameterList(nn.Parameter(other[name].detach().clone()) for name in names) for other in others
            )

    def copies_of(self, component: str) -> list[list[Tensor]]:
        """Its parameters, once for each copy."""
        own = dict(self.network.named_parameters())
        first = [own[name] for name in self.components[component]]
        return [first, *(list(each) for each in self.others[key_of(component)])]  # type: ignore[arg-type]

    def draw(self, generator: torch.Generator | None = None) -> Draw:
        """A random combination."""

        def one(component: str) -> int | Tensor:
            if not self.by_channel:
                return int(torch.randint(self.copies, (), generator=generator))
            return torch.randint(self.copies, (len(self.copies_of(component)[0][0]),), generator=generator)

        return {component: one(component) for component in self.components}

    def combinations(self) -> Iterator[Draw]:
        """All n^L of them."""
        if self.by_channel:
            raise ValueError("combinations of channels are too many to go through; draw some")
        for chosen in itertools.product(range(self.copies), repeat=len(self.components)):
            yield dict(zip(self.components, chosen, strict=True))

    def parameters_of(self, draw: Draw) -> dict[str, Tensor]:
        """The network's parameters in a combination, by name."""
        found: dict[str, Tensor] = {}
        for component, names in self.components.items():
            copies, chosen = self.copies_of(component), draw[component]
            for i, name in enumerate(names):
                if isinstance(chosen, Tensor):
                    each = torch.stack([parameters[i] for parameters in copies])
                    found[name] = each[chosen.to(each.device), torch.arange(each.shape[1], device=each.device)]
                else:
                    found[name] = copies[chosen][i]
        return found

    def forward(self, *inputs: Any, draw: Draw | None = None, **more: Any) -> Any:
        """The network in one combination, a random one unless `draw` says which."""
        return functional_call(self.network, self.parameters_of(draw or self.draw()), inputs, more)

    def backward(
        self, x: Any, y: Tensor, repeats: int = 5, *, consistency: float = 1.0,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    ) -> Tensor:  # fmt: skip
        """Add up gradients of mean_r [loss(o_r, y) + consistency · KL(softmax(o_{r-1}) ‖ softmax(o_r))]; its value.

        o_r `[B, C]` of R = repeats fresh draws; o_0 is of one more draw. No gradient reaches o_{r-1}.
        """
        check_whole(repeats=repeats)
        with torch.no_grad():
            before = self(x)
        total = before.new_zeros(())
        for _ in range(repeats):
            logits = self(x)
            apart = F.kl_div(logits.log_softmax(-1), before.log_softmax(-1), reduction="batchmean", log_target=True)
            each = (loss(logits, y) + consistency * apart) / repeats
            each.backward()
            before, total = logits.detach(), total + each.detach()
        return total

    @torch.no_grad()
    def predict(self, x: Any, draws: int | Sequence[Draw] = 64) -> Tensor:
        """Mean probabilities over draws, a number of random ones or those given."""
        if isinstance(draws, int):
            check_whole(draws=draws)
            draws = [self.draw() for _ in range(draws)]
        return torch.stack([self(x, draw=draw).softmax(-1) for draw in draws]).mean(0)

    @torch.no_grad()
    def average(self) -> nn.Module:
        """A network of its own, in which each component is the mean of its copies."""
        network = copy.deepcopy(self.network)
        parameters = dict(network.named_parameters())
        for component, names in self.components.items():
            for name, copies in zip(names, zip(*self.copies_of(component), strict=True), strict=True):
                parameters[name].copy_(torch.stack(list(copies)).mean(0))
        return network


def _components(
    network: nn.Module, by: str | Sequence[str], shared: tuple[type[nn.Module], ...]
) -> dict[str, list[str]]:
    """Names of parameters, by component."""
    every = [name for name, _ in network.named_parameters()]
    if by == "model":
        return {"": every}
    if by in ("layer", "channel"):
        found = {
            name: [f"{name}.{own}".lstrip(".") for own, _ in module.named_parameters(recurse=False)]
            for name, module in network.named_modules()
            if not isinstance(module, shared)
        }
        found = {name: kept for name, names in found.items() if (kept := [each for each in names if each in every])}
        if by == "channel":
            sizes = {name: p.shape[:1] for name, p in network.named_parameters()}
            for name, names in found.items():
                if len({sizes[each] for each in names}) > 1 or not all(sizes[each] for each in names):
                    raise ValueError(f"by='channel': parameters of {name!r} have no output channels in common")
        return found
    if isinstance(by, str):
        raise ValueError(f"by={by!r} is none of model, layer, channel, nor a list of submodules' names")
    found = {name: [each for each in every if each.startswith(f"{name}.")] for name in by}
    for name, names in found.items():
        if not names:
            raise ValueError(f"the network has no parameters under {name!r}")
    if len(set(itertools.chain.from_iterable(found.values()))) < sum(map(len, found.values())):
        raise ValueError(f"a parameter belongs to one component, and {', '.join(map(repr, by))} have some in common")
    return found
