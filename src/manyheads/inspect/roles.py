"""What heads are for: a role is a measure, the input on which it tells, and the level from which a head has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from manyheads.convert.text import max_positions
from manyheads.inspect.ablate import Inputs
from manyheads.inspect.look import Look
from manyheads.inspect.measures import maps, tokens
from manyheads.inspect.measures.behaviour import successor
from manyheads.inspect.measures.table import HeadTable, Measure, measure

Lists = Sequence[Sequence[int]]
OfLists = Callable[[nn.Module, Lists, int | Iterable[int] | None], HeadTable]


@dataclass(frozen=True)
class Role:
    """A role of heads.

    measure: the mass on a pattern. on: `text`, any; `repeated`, tokens drawn at random, twice; `ordinals`, no text: the
    measure is of a model, ordered lists of tokens and layers, and chance is a token of the list. level: the measure
    from which a head is labelled, if it is also three times what chance (evenly spread weights) would give.
    """

    name: str
    says: str
    measure: Measure | OfLists
    on: Literal["text", "repeated", "ordinals"] = "text"
    level: float = 0.4


ROLES: tuple[Role, ...] = (
    Role("sink", "looks at the first token", maps.sink_mass, level=0.8),
    Role("self", "looks at its own token", maps.self_mass),
    Role("previous", "looks at the token before", maps.previous_token),
    Role("duplicate", "looks at earlier copies of its token", tokens.duplicate_token, "repeated"),
    Role("induction", "looks at what came after an earlier copy of its token", tokens.induction, "repeated"),
    Role("successor", "turns a number, day, month or letter into the next", successor, "ordinals", 0.5),
)
"""Roles that masses and weights tell; add rows of your own. Source: Zheng et al. 2024, arXiv 2409.03752."""


@dataclass(frozen=True, eq=False)
class Found:
    """scores, chance: by role's name, what each head has and what evenly spread weights would. labels: a head's roles,
    by (layer, head), the strongest first."""

    scores: dict[str, HeadTable]
    chance: dict[str, HeadTable]
    labels: dict[tuple[int, int], tuple[str, ...]]


def roles(
    model: nn.Module, text: Inputs | Sequence[Inputs], repeated: Tensor | None = None, of: Iterable[Role] = ROLES,
    layers: int | Iterable[int] | None = None, *, ordinals: Lists | None = None,
) -> Found:  # fmt: skip
    """Label heads by role.

    Args:
        text: what the model is run on, as in `measure`.
        repeated: ids of tokens in random order, twice (see `measures.repeated`); by default `drawn_twice`.
        ordinals: token ids in their order (see `measures.ordinals`); without them roles of ordinals are left out.
    """
    given = list(of)
    if repeated is None and any(role.on == "repeated" for role in given):
        repeated = drawn_twice(model)
    scores: dict[str, HeadTable] = {}
    chance: dict[str, HeadTable] = {}
    for on, inputs in (("text", text), ("repeated", repeated)):
        some = {role.name: cast(Measure, role.measure) for role in given if role.on == on}
        if not some or inputs is None:
            continue
        both = some | {f"chance {name}": _even(function) for name, function in some.items()}
        device = next(model.parameters()).device
        inputs = inputs.to(device) if isinstance(inputs, Tensor) else inputs
        for name, table in measure(model, inputs, both, layers).items():
            (chance if name.startswith("chance ") else scores)[name.removeprefix("chance ")] = table
    for role in given:
        if role.on == "ordinals" and ordinals:
            table = cast(OfLists, role.measure)(model, ordinals, layers)
            by_chance = sum(len(one) - 1 for one in ordinals)  # each token of a list is as likely
            even = sum((len(one) - 1) / len(one) for one in ordinals) / by_chance
            scores[role.name] = table
            chance[role.name] = HeadTable(role.name, {n: torch.full_like(row, even) for n, row in table.items()})
    labels: dict[tuple[int, int], list[tuple[float, str]]] = {}
    for role in given:
        for layer, row in scores.get(role.name, {}).items():
            for head, value in enumerate(row.tolist()):
                least = max(role.level, 3 * float(chance[role.name][layer][head].nan_to_num(0.0)))
                if value >= min(least, 0.99):
                    labels.setdefault((layer, head), []).append((-value, role.name))
    return Found(scores, chance, {at: tuple(name for _, name in sorted(each)) for at, each in labels.items()})


def _even(function: Measure) -> Measure:
    def even(look: Look) -> Tensor:
        uniform = look.uniform()
        uniform.tokens = look.tokens
        found = function(uniform)
        return found[:, : look.heads] if found.shape[1] >= look.heads else found

    return even


def drawn_twice(model: nn.Module) -> Tensor:
    """64 tokens of the model's vocabulary in random order, twice; fewer where it has fewer, or fewer positions."""
    config, vocab = getattr(model, "config", None), vocabulary(model)
    places = None if config is None else max_positions(config)
    return tokens.repeated(vocab, max(1, min(64, vocab, 64 if places is None else places // 2)))


def vocabulary(model: Any) -> int:
    """How many tokens a model knows.

    Raises:
        ValueError: it has no table of them.
    """
    config = getattr(model, "config", None)
    size = getattr(config.get_text_config() if config is not None else None, "vocab_size", None)
    if size is None:
        size = next((m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)), None)
    if size is None:
        raise ValueError(f"a {type(model).__name__} has no tokens, so none can be drawn; give roles of text alone")
    return int(size)
