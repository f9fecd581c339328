"""Where a conversion's loss comes from: the calibration loss after each of its stages."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from manyheads.convert.moves.common import Move
from manyheads.convert.moves.mla import ToMLA
from manyheads.convert.moves.of_goal import moves_of
from manyheads.convert.plan import Goal
from manyheads.convert.stats import AttentionStats
from manyheads.convert.stream import Layers, attention_of, put_attention, run
from manyheads.convert.survey import Calibration, Progress, survey, surveyed, turning_damage
from manyheads.convert.verify import quality
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
        stats, _ = surveyed(work / "survey", index, layers.devices[index])
        with layers.open(index) as layer:
            own = attention_of(layer, layers.config)
            moves = stages(goal, own, stats, damage)
            for name, before in hidden.items():
                put_attention(layer, layers.config, moves[name](own, stats) if name in moves else own)
                hidden[name] = run(layer, layers.config, before, record=False).after
        progress("account", index + 1, count)
    shell = shell_of(layers)
    losses = {name: quality(has_run(shell, tokens, last), tokens).nll for name, last in hidden.items()}
    if healed is not None:
        losses["healed"] = quality(healed, tokens).nll
    return losses


def shell_of(layers: Layers) -> PreTrainedModel:
    """The family's model without layers, where the last of these lives: what turns hidden states into logits."""
    base: Any = copy.deepcopy(layers.config.base)
    base.num_hidden_layers = 0
    if getattr(base, "layer_types", None) is not None:
        base.layer_types = []
    shell = AutoModelForCausalLM.from_config(base, attn_implementation="eager")
    shell.load_state_dict(dict(layers.rest()), strict=False, assign=True)
    shell.tie_weights()
    return cast(PreTrainedModel, shell.eval().to(layers.devices[-1]))


class HasRun(nn.Module):
    """A model whose layers have run already on some windows: it answers for these alone.

    shell: what turns last hidden states into logits (see `shell_of`). hidden: of each window `[N, T]`, `[N, T, D]`.
    """

    def __init__(self, shell: PreTrainedModel, windows: Tensor, hidden: Tensor) -> None:
        super().__init__()
        self.shell, self.windows, self.hidden = shell, windows.to(shell.device), hidden
        self.config, self.device = shell.config, shell.device

    def get_output_embeddings(self) -> nn.Module:
        return cast(nn.Module, self.shell.get_output_embeddings())

    def forward(self, tokens: Tensor, use_cache: bool = False) -> CausalLMOutputWithPast:
        row = int((self.windows == tokens).all(-1).nonzero()[0])
        return self.shell(inputs_embeds=self.hidden[row : row + 1], use_cache=use_cache)


def has_run(shell: PreTrainedModel, windows: Tensor, hidden: Tensor) -> PreTrainedModel:
    """The same, for those who ask for a model."""
    return cast(PreTrainedModel, HasRun(shell, windows, hidden))
