"""The one verifier: a model reads a tree of candidates in one pass and keeps the path that it would have written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manyheads.core.cache import Cache
from manyheads.core.mask import Axis
from manyheads.core.prefix import PrefixCache
from manyheads.decode.encoded import Encoded
from manyheads.decode.tree import Tree
from manyheads.stack.pretrained import ManyheadsForCausalLM


class Choose(Protocol):
    """The model's own tokens `[B, N]`, from logits `[B, N, V]` and how many tokens after the newest each is."""

    def __call__(self, logits: Tensor, ahead: Tensor) -> Tensor: ...


class Kept(NamedTuple):
    """Of a tree, for each sequence: the node at the end of the path that is kept, `[B]`, and its depth, `[B]`."""

    node: Tensor
    depth: Tensor


@dataclass(frozen=True)
class Typical:
    """Accept a candidate whose probability is above min(epsilon, delta · exp(-entropy)), given what came before it.

    This is not the model's own text: it takes what the model finds likely enough, and prefers long paths, the likeliest
    of the longest. temperature: of the probabilities.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.epsilon < 0 or self.delta < 0 or self.temperature <= 0:
            raise ValueError(
                f"epsilon={self.epsilon} and delta={self.delta} must not be negative, "
                f"temperature={self.temperature} must be positive"
            )

    def __call__(self, tree: Tree, tokens: Tensor, logits: Tensor) -> Kept:
        logs = (logits.double() / self.temperature).log_softmax(-1)
        entropy = -(logs.exp() * logs).nan_to_num(0.0).sum(-1)
        bound = (self.delta * (-entropy).exp()).clamp_max(self.epsilon)
        parents = torch.tensor(tree.parents, device=tokens.device)
        each = logs[:, parents].gather(-1, tokens.clamp_min(0)[..., None])[..., 0]
        return _longest(tree, each.exp() > bound[:, parents], tokens, each)


def exact(tree: Tree, tokens: Tensor, chosen: Tensor) -> Kept:
    """Accept a candidate that is what the model chose after its parent. chosen `[B, N]`: its choice at each node."""
    parents = torch.tensor(tree.parents, device=tokens.device)
    return _longest(tree, tokens == chosen[:, parents], tokens)


def _longest(tree: Tree, fits: Tensor, tokens: Tensor, score: Tensor | None = None) -> Kept:
    """The end of the longest path of nodes that fit, of the greatest sum of scores, the first of equal ones."""
    fits = fits & (tokens >= 0)
    fits[:, 0] = True
    ancestors = tree.ancestors.to(fits.device)
    whole = (fits[:, None] | ~ancestors).all(-1)
    depths = torch.tensor(tree.depths, device=fits.device).expand(len(fits), -1)
    best = torch.where(whole, depths, -1).amax(-1)
    last = whole & (depths == best[:, None])
    if score is not None:
        score = torch.where(fits, score, 0.0).masked_fill(torch.arange(len(tree), device=fits.device) == 0, 0.0)
        total = torch.where(last, torch.where(ancestors, score[:, None], 0.0).sum(-1), -torch.inf)
        last = total == total.amax(-1, keepdim=True)
    return Kept(last.long().argmax(-1), best)  # of equal ones the first


@contextmanager
def head_inputs(model: PreTrainedModel | Encoded, skip: bool = False) -> Iterator[list[Tensor]]:
    """What the language model head reads in each pass inside, `[B, T, D]`. skip: it computes one row of logits only."""
    seen: list[Tensor] = []

    def look(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        seen.append(inputs[0])
        return (inputs[0][:, :1],) if skip else None

    handle = cast(Any, model.get_output_embeddings()).register_forward_pre_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


class Verifier:
    """A model, the cache of a batch of sequences, and the passes between them.

    Every sequence has a newest token, its root, that the model has not read. What the model says of it and of the
    nodes after it is computed in one pass.
    """

    def __init__(self, model: ManyheadsForCausalLM | Encoded) -> None:
        if not isinstance(model, ManyheadsForCausalLM | Encoded):
            config = getattr(model, "config", None)
            if getattr(config, "is_encoder_decoder", False):
                raise TypeError(f"a {type(model).__name__} needs what its encoder takes: encoder={{…}}")
            raise TypeError(
                f"a {type(model).__name__} keeps no manyheads.Cache; adopt it first: manyheads.adopt(model)"
            )
        self.model, self.cache = model, Cache()

    @torch.no_grad()
    def start(self, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Read prompts `[B, T]`, padded on the left; logits `[B, V]` and head inputs `[B, D]` after them."""
        options: dict[str, Any] = {}
        if mask is not None and not bool(mask.all()):
            options = {"attention_mask": mask.long(), "position_ids": (mask.long().cumsum(-1) - 1).clamp_min(0)}
        with head_inputs(self.model) as seen:
            logits = self._run(ids, cache=self.cache, logits_to_keep=1, **options)
        return logits[:, -1], seen[-1][:, -1]

    @property
    def order(self) -> str | None:
        """Why its candidates must follow each other, and no tree may branch; None if they need not."""
        for index, layer in enumerate(self.model.attentions):
            mixes = any(getattr(piece, "halo", 0) for piece in layer.attends)
            if layer.project.remembers or mixes or any(getattr(piece, "extra", 0) for piece in layer.tokens):
                return f"layer {index} ({layer.spec}) reads tokens by the order of their rows"
        return None

    def check(self) -> None:
        """Raise where tokens that the cache holds could not be taken back, with the reason."""
        if isinstance(self.cache, PrefixCache):
            raise ValueError("sequences that share rows are decoded a token at a time")
        for index, layer in enumerate(self.cache.layers):
            why = layer.why_not_croppable() if layer.length or layer.state else None
            if why is not None:
                raise ValueError(
                    f"drafts cannot be taken back: layer {index} ({self.model.attentions[index].spec}), for {why}"
                )

    @torch.no_grad()
    def read(self, tree: Tree, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[B, N, V]` and head inputs `[B, N, D]` of the nodes, whose rows are then in the cache."""
        log = self.cache.axis
        assert log is not None
        axis = tree.axis(log)
        self.cache.announce(axis)
        position = axis.position.expand(len(tokens), -1)
        with head_inputs(self.model) as seen:
            logits = self._run(
                tokens.clamp_min(0), attention_mask=tree.mask(log), position_ids=position, cache=self.cache
            )
        return logits, seen[-1]

    def keep(self, tree: Tree, kept: Kept) -> Kept:
        """Leave the rows of the kept paths alone, and say what was kept.

        Where rows of a sequence cannot move against those of others, all keep as many as the shortest path has.
        """
        if len(tree) == 1:
            return kept
        node, depth = kept
        lines = tree.lineage.to(node.device)[node]
        if not self.cache.movable:
            depth = depth.amin().expand_as(depth)
        lengths, longest = depth + 1, int(depth.max()) + 1
        index = lines[:, :longest]
        self.cache.choose(len(tree), index, lengths)
        return Kept(lines.gather(1, depth[:, None])[:, 0], depth)

    def select(self, sequences: Tensor) -> None:
        """Go on with these sequences."""
        self.cache.batch_select_indices(sequences)
        if isinstance(self.model, Encoded):
            self.model.select(sequences)

    def _run(self, ids: Tensor, **options: Any) -> Tensor:
        run = cast(Callable[..., Any], self.model)
        return run(input_ids=ids, use_cache=True, **options).logits

    @property
    def log(self) -> Axis | None:
        return self.cache.axis
