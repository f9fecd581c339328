"""Where a conversion's loss comes from: the calibration loss after each of its stages."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from manyheads.convert.moves.common import Move
from manyheads.convert.moves.mla import ToMLA
from manyheads.convert.moves.of_goal import moves_of
from manyheads.convert.plan import Goal
from manyheads.convert.stats import AttentionStats
from manyheads.convert.stream import BATCH, Layers, attention_of, put_attention, run
from manyheads.convert.survey import Calibration, Progress, survey, surveyed, turning_damage
from manyheads.core.part import OptionError
from manyheads.stack.seam import SeamAttention


def stages(goal: Goal, attention: SeamAttention, stats: AttentionStats, damage: Tensor) -> dict[str, Move]:
    """The moves of a goal, each with one more loss than the one before; of a latent, rotation goes first."""
    move = moves_of(goal, attention, stats, damage)[0]
    if not isinstance(move, ToMLA):
        return {_single(goal): move}
    whole = 10**9  # clipped to the rank at which nothing is lost
    return {"rope": dataclasses.replace(move, rank=whole), "rank": move}


def _single(goal: Goal) -> str:
    return "merge" if goal.to == "gqa" else "fit"


def account(
    layers: Layers,
    tokens: Tensor,
    goal: Goal,
    work: Path,
    healed: PreTrainedModel | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, float]:
    """Loss in nats on calibration windows `[N, T]`: of the `source`, and of all layers after each stage.

    Args:
        work: folder of a `shrink` job; its survey is used, or made.
        healed: the converted model, for a last entry.

    Returns:
        `source`, then `rope` (rotation left only where the goal keeps it, at full rank) and `rank` for `mla`, or
        `merge` for `gqa`, `fit` for other moves, then `healed`.
    """
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    survey(layers, Calibration(tokens, positions), work / "survey", progress)
    count = len(layers.config.specs)
    if goal.by_layer:
        raise OptionError(f"{goal.name} chooses by layer; account for a method that does the same in each")
    damage = turning_damage(work / "survey", count)
    names = ["rope", "rank"] if goal.to == "mla" else [_single(goal)]
    hidden = {name: layers.embed(tokens) for name in ("source", *names)}
    for index in range(count):
        stats, _ = surveyed(work / "survey", index)
        with layers.open(index) as layer:
            own = attention_of(layer, layers.config)
            moves = stages(goal, own, stats, damage)
            for name, before in hidden.items():
                put_attention(layer, layers.config, moves[name](own, stats) if name in moves else own)
                hidden[name] = run(layer, layers.config, before, record=False).after
        progress("account", index + 1, count)
    shell = shell_of(layers)
    losses = {name: loss_of(shell, tokens, last) for name, last in hidden.items()}
    if healed is not None:
        losses["healed"] = loss_of(healed, tokens)
    return losses


def shell_of(layers: Layers) -> PreTrainedModel:
    """The family's model without layers: what turns the last hidden states into logits."""
    base: Any = copy.deepcopy(layers.config.base)
    base.num_hidden_layers = 0
    if getattr(base, "layer_types", None) is not None:
        base.layer_types = []
    shell = AutoModelForCausalLM.from_config(base, attn_implementation="eager")
    shell.load_state_dict(dict(layers.rest()), strict=False, assign=True)
    shell.tie_weights()
    return shell.eval()


@torch.no_grad()
def loss_of(model: nn.Module, tokens: Tensor, hidden: Tensor | None = None) -> float:
    """Nats a token on windows `[N, T]`; with their last hidden states, of what turns these into logits."""
    inputs: Sequence[tuple[str, Tensor]] = [("input_ids", t) for t in tokens.split(8)]
    if hidden is not None:
        inputs = [("inputs_embeds", h) for h in hidden.split(BATCH)]
    total = 0.0
    for (name, part), labels in zip(inputs, tokens.split(8), strict=True):
        logits: Any = model(**{name: part}, use_cache=False).logits
        total += F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum").item()
    return total / tokens[:, 1:].numel()
