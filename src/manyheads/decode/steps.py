"""Several tokens a step, exactly: draft a tree, read it in one pass, keep what the model would have written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, TemperatureLogitsWarper, TopPLogitsWarper

from manyheads.core.check import check_whole, is_number
from manyheads.decode.drafter import Drafter, Trail
from manyheads.decode.encoded import Encoded
from manyheads.decode.guard import SLACK, Clocks, Guard
from manyheads.decode.identity import check_model
from manyheads.decode.learned import LearnedDrafter
from manyheads.decode.speed import Acceptance, Plan, now
from manyheads.decode.tree import Tree
from manyheads.decode.verify import Choose, Typical, Verifier, exact
from manyheads.stack.pretrained import ManyheadsForCausalLM


class SlowDraft(UserWarning):
    """Drafts that would cost more time than they save."""


@dataclass
class Decoded:
    """What `generate` wrote.

    tokens: the new ones of each sequence, one that ends it included. steps: passes after the prompt, counted for each
    sequence that was in them. plans: the trees that were used, with the step from which on. gain: tokens a second
    against plain decoding, by typical seconds of its steps, where trees were chosen by what they cost. note: why
    nothing was drafted, or no longer.
    """

    tokens: list[list[int]]
    steps: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance.none)
    plans: list[tuple[int, Plan]] = field(default_factory=list)
    gain: float | None = None
    note: str | None = None

    @property
    def tokens_per_step(self) -> float:
        """The first token of a sequence is the prompt's pass and counts for no step."""
        written = sum(len(each) - 1 for each in self.tokens if each)
        return written / self.steps if self.steps else 1.0


def generate(
    model: PreTrainedModel, ids: Tensor | Sequence[Sequence[int]], drafter: Drafter | None = None,
    max_new_tokens: int = 64, *, attention_mask: Tensor | None = None, encoder: Mapping[str, Tensor] | None = None,
    rounding: bool = False, tree: Tree | Literal["auto"] = "auto",
    typical: Typical | None = None, sample: bool = False, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0,
    stop: Iterable[int] | None = None, most: int = 64, on_tokens: Callable[[int, list[int]], object] | None = None,
) -> Decoded:  # fmt: skip
    """Continue prompts as the model would, in fewer steps.

    Greedy text is that of `model.generate` token for token, whatever the drafter says, up to the rounding of floating
    point: a pass of several rows sums in another order than one of a single row, which shows only where two logits
    are as near as that. Sampled text follows the model's distribution; for one seed it is the same text with any
    drafter and with none.

    >>> found = generate(model, [[5, 6, 7]], PromptLookup(), max_new_tokens=100)
    >>> found.tokens[0], found.tokens_per_step

    Args:
        model: a `ManyheadsForCausalLM`, such as `mh.adopt` returns; with `encoder` an adopted encoder-decoder model.
        ids: `[B, T]`, with attention_mask padded on the left; or lists of unequal length.
        drafter: None decodes a token at a time.
        encoder: what an encoder-decoder model's encoder takes (`input_features`), an input for each prompt.
        rounding: let a model in half precision draft. Its passes of several rows round otherwise than those of one,
            and logits that are equal or nearly so are common; from such a place on its text may be another one.
        tree: `auto` learns from the steps what their rows cost and which drafts are right, and takes the tree that is
            predicted to gain most; where none gains anything, it decodes plainly and says so. It risks no more than a
            twentieth of the time that plain decoding takes (see `manyheads.decode.guard`).
        typical: accept by this rule instead; the text is then no longer the model's own.
        sample: draw tokens, by temperature and top_p.
        stop: tokens that end a text; by default those of the model's generation config.
        most: nodes of a tree at most.
        on_tokens: called with a sequence's number and its new tokens as they are written.

    Raises:
        ValueError: the model's cache cannot take drafts back (the reason names the layer), prompts do not fit, the
            drafter is for a model of other sizes or another dtype, or a model in half precision is to draft without
            `rounding`.
        TypeError: not such a model, or not a drafter.
    """
    check_model(model)
    rows = _rows(ids, attention_mask, model)
    if drafter is not None and not isinstance(drafter, Drafter):
        raise TypeError(f"{drafter!r:.60} is no drafter; manyheads.decode.load makes one of a folder")
    if isinstance(drafter, LearnedDrafter):
        drafter.check(model)
    if not isinstance(tree, Tree) and tree != "auto":
        raise ValueError(f"tree={tree!r}; a Tree or 'auto'")
    if drafter is not None and model.dtype in (torch.bfloat16, torch.float16) and not (rounding or typical):
        raise ValueError(
            f"in {model.dtype} a pass of several rows rounds otherwise than one of a single row, which decides between "
            "logits that are nearly equal, and those are common: the text would not be the model's own token for "
            "token. rounding=True allows that; model.float() avoids it"
        )
    check_whole(max_new_tokens=max_new_tokens, most=most)
    if typical is not None and not isinstance(typical, Typical):
        raise TypeError(f"typical={typical!r}; manyheads.decode.Typical() is the rule of typical acceptance")
    if typical is not None and sample:
        raise ValueError("typical acceptance is a rule of its own: sample=True does not go with it")
    choose = _draws(len(rows), max_new_tokens, temperature, top_p, seed) if sample else None
    run = _Run(
        model, encoder, drafter, rows, max_new_tokens, choose, typical, _stop(model, stop), on_tokens, tree, most
    )
    was = model.training
    try:
        model.eval()
        return run.go()
    finally:
        model.train(was)


class _Run:
    """One call of `generate`: a batch that shrinks as its texts end."""

    def __init__(
        self, model: PreTrainedModel, encoder: Mapping[str, Tensor] | None, drafter: Drafter | None,
        rows: list[list[int]], budget: int,
        draw: Callable[[Tensor, Tensor, Sequence[int]], Tensor] | None, typical: Typical | None, stop: set[int],
        on_tokens: Callable[[int, list[int]], object] | None, tree: Tree | Literal["auto"], most: int,
    ) -> None:  # fmt: skip
        self.model, self.drafter, self.prompts, self.budget = model, drafter, rows, budget
        self.draw, self.typical, self.stop, self.on_tokens = draw, typical, stop, on_tokens
        self.wanted, self.most = tree, most
        self.verifier = Verifier(cast(ManyheadsForCausalLM, model) if encoder is None else Encoded(model, encoder))
        self.going = [*range(len(rows))]
        self.found = Decoded([[] for _ in rows])
        if drafter is not None:
            shape = (drafter.depth, drafter.width)
            if isinstance(tree, Tree) and (tree.depth > shape[0] or tree.width > shape[1]):
                raise ValueError(
                    f"a tree of depth {tree.depth} and {tree.width} choices, where the drafter has {shape[0]} and "
                    f"{shape[1]}"
                )
            self.found.acceptance = Acceptance.none(shape)
            if isinstance(tree, Tree) and not tree.is_chain and self.verifier.order is not None:
                raise ValueError(f"candidates cannot branch: {self.verifier.order}; a chain fits (Tree.chain)")
        self.guard: Guard | None = None
        if drafter is not None and not isinstance(tree, Tree):
            self.clocks = Clocks(model, max(map(len, rows)) + budget // 2)
            odds = drafter.odds
            if self.verifier.order is not None:  # no tree that branches
                odds = torch.cat([odds[:, :1], torch.zeros_like(odds[:, 1:])], 1)
            self.guard = Guard(odds, most, self.clocks.of(len(rows)), self.found.acceptance)
        self.trail = Trail(getattr(drafter, "reads", 1))
        self.drafting: float | None = None  # seconds that the draft of this step took
        self.step = 0

    def go(self) -> Decoded:
        longest = max(map(len, self.prompts))
        device = self.model.device
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in self.prompts], device=device)
        mask = torch.arange(longest, device=device)[None] >= torch.tensor(
            [[longest - len(row)] for row in self.prompts], device=device
        )
        began = now(self.model)
        logits, hidden = self.verifier.start(ids, mask)
        if self.guard is not None:
            self.guard.begin(now(self.model) - began)
        if self.drafter is not None:
            self.verifier.check()
        self.trail.start(hidden)
        chosen = self._choose(logits[:, None], torch.zeros(1, 1, dtype=torch.long, device=device))
        staying = self._write([[token] for token in chosen[:, 0].tolist()])
        while staying:
            began = now(self.model)
            if len(staying) < len(self.going):
                index = torch.tensor(staying, device=device)
                self.verifier.select(index)
                self.trail.select(index)
                self.going = [self.going[place] for place in staying]
                if self.guard is not None:
                    self.guard.clock = self.clocks.of(len(staying), self.guard.clock)
            behind = self._behind()
            new, tree = self._advance(self._plan(behind))
            took = now(self.model) - began
            staying = self._write(new)
            if self.guard is not None:
                self.guard.note(tree, took, self._behind() - behind, self.drafting)
        self._tell()
        return self.found

    def _behind(self) -> int:
        """Tokens of the shortest text in the batch."""
        return min(len(self.found.tokens[index]) for index in self.going)

    def _advance(self, tree: Tree) -> tuple[list[list[int]], Tree]:
        """One step: the tokens that each sequence goes on by, and the tree that was read."""
        device = self.model.device
        roots = torch.tensor([[self.found.tokens[index][-1]] for index in self.going], device=device)
        tree, tokens = self._draft(tree, roots)
        logits, read = self.verifier.read(tree, tokens)
        chosen = self._choose(logits, torch.tensor(tree.depths, device=device)[None])
        kept = exact(tree, tokens, chosen) if self.typical is None else self.typical(tree, tokens, logits)
        self._count(tree, tokens, kept.node)
        node, depth = self.verifier.keep(tree, kept)
        lines = tree.lineage.to(device)[node]
        path = tokens.gather(1, lines).tolist()
        last = chosen.gather(1, node[:, None])[:, 0].tolist()
        new = [[*row[1 : count + 1], end] for row, count, end in zip(path, depth.tolist(), last, strict=True)]
        self.step += 1
        self.found.steps += len(new)
        self.trail.add(read, lines, depth)
        return new, tree

    def _draft(self, tree: Tree, roots: Tensor) -> tuple[Tree, Tensor]:
        """The tree as far as there is anything to say, and its tokens `[B, N]`."""
        self.drafting = None
        if self.drafter is None or len(tree) == 1:
            return Tree(), roots
        began = now(self.model)
        seen = self.trail.seen([self.prompts[index] + self.found.tokens[index] for index in self.going])
        tokens = torch.cat([roots, self.drafter.draft(seen, tree).to(roots.device)], 1)
        if (tokens >= self.model.config.get_text_config().vocab_size).any():
            raise ValueError(f"{type(self.drafter).__name__} drafts tokens that the model does not know")
        told = (tokens >= 0).any(0)
        if not bool(told.all()):
            tree, index = tree.keep(told.cpu())
            tokens = tokens[:, index.to(tokens.device)]
        self.drafting = now(self.model) - began
        return tree, tokens

    def _count(self, tree: Tree, tokens: Tensor, ends: Tensor) -> None:
        """Note which nodes stood after right ones, and which of them were right."""
        if len(tree) == 1:
            return
        lines = tree.lineage.to(ends.device)[ends]
        right = torch.zeros(tokens.shape, dtype=torch.bool, device=ends.device).scatter_(1, lines, True)
        asked = right[:, torch.tensor(tree.parents, device=ends.device)] & (tokens >= 0)
        counts = asked.sum(0)[1:], (asked & right).sum(0)[1:]
        (self.guard.count if self.guard is not None else self.found.acceptance.add)(tree, *counts)

    def _plan(self, behind: int) -> Tree:
        """The tree of the next step."""
        if self.drafter is None:
            return Tree()
        depth = self.budget - behind - 1
        if isinstance(self.wanted, Tree):
            return self.wanted if self.wanted.depth <= depth else self.wanted.cut(depth)
        assert self.guard is not None
        best = self.guard.next(depth)
        if best.tree != (self.found.plans[-1][1].tree if self.found.plans else Tree()):
            self.found.plans.append((self.step, best))
        return best.tree

    def _tell(self) -> None:
        """What became of drafting."""
        guard = self.guard
        if guard is None:
            return
        self.found.gain = guard.gain
        if guard.gave_up:
            self.found.note = (
                f"drafts are not worth their time, and {guard.drafted} of {self.step} steps had any: no tree is "
                "predicted to gain over one token a step, which is how it went on"
            )
            warnings.warn(self.found.note, SlowDraft, stacklevel=4)
        elif not guard.drafted:
            self.found.note = (
                f"nothing was drafted: in a text of {self.step + 1} tokens a try could cost more than "
                f"{SLACK:.0%} of its time"
            )

    def _choose(self, logits: Tensor, ahead: Tensor) -> Tensor:
        """The model's own tokens `[B, N]`; ahead `[1, N]`: how many tokens after the next one."""
        if self.draw is None:
            return logits.argmax(-1)
        written = torch.tensor([[len(self.found.tokens[index])] for index in self.going], device=logits.device)
        return self.draw(logits, written + ahead, self.going)

    def _write(self, new: list[list[int]]) -> list[int]:
        """Add tokens to the texts; the places in the batch of those that go on."""
        staying = []
        for place, (index, tokens) in enumerate(zip(self.going, new, strict=True)):
            text = self.found.tokens[index]
            tokens = tokens[: self.budget - len(text)]
            ends = [at for at, token in enumerate(tokens) if token in self.stop]
            tokens = tokens[: ends[0] + 1] if ends else tokens
            text += tokens
            if self.on_tokens is not None:
                self.on_tokens(index, tokens)
            if not ends and len(text) < self.budget:
                staying.append(place)
        return staying


def _draws(
    count: int, budget: int, temperature: float, top_p: float, seed: int
) -> Callable[[Tensor, Tensor, Sequence[int]], Tensor]:
    """Draws that belong to a sequence and a place in its text: whatever is drafted, they are the same.

    A token is where the sum of probabilities passes a uniform number. Sequence i draws as if alone with seed + i.
    """
    if not (is_number(temperature) and temperature > 0 and is_number(top_p) and 0 < top_p <= 1):
        raise ValueError(f"temperature={temperature!r} must be positive, and top_p={top_p!r} in (0, 1]")
    check_whole(0, seed=seed)
    each = [
        torch.rand(budget, generator=torch.Generator().manual_seed(seed + i), dtype=torch.float64) for i in range(count)
    ]
    uniform = torch.stack(each)
    warp = [TemperatureLogitsWarper(temperature), *([TopPLogitsWarper(top_p)] if top_p < 1 else [])]

    def draw(logits: Tensor, place: Tensor, going: Sequence[int]) -> Tensor:
        flat = logits.flatten(0, 1).double()
        for change in warp:
            flat = change(cast(Any, None), cast(Any, flat))
        sums = flat.softmax(-1).cumsum(-1).view(logits.shape)
        place = place.clamp_max(budget - 1)  # beyond the end nothing is written
        u = uniform[torch.tensor(going)].to(logits.device).gather(1, place)[..., None] * sums[..., -1:]
        return torch.searchsorted(sums, u, right=True)[..., 0].clamp_max(logits.shape[-1] - 1)

    return draw


def _rows(ids: Tensor | Sequence[Sequence[int]], mask: Tensor | None, model: PreTrainedModel) -> list[list[int]]:
    """The prompts without padding."""
    try:
        given = [*map(torch.as_tensor, ids[None] if isinstance(ids, Tensor) and ids.ndim == 1 else ids)]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"prompts are lists of tokens, or a tensor [B, T] of them: {error}") from error
    if not given:
        raise ValueError("there are no prompts")
    for number, row in enumerate(given, 1):
        whole = not (row.is_floating_point() or row.is_complex() or row.dtype == torch.bool)
        if row.ndim != 1 or (len(row) and not whole):
            raise ValueError(
                f"prompts are lists of whole numbers, or a tensor [B, T] of them; prompt {number} is {row.dtype} "
                f"{[*row.shape]}"
            )
    if mask is not None:
        if not isinstance(ids, Tensor):
            raise ValueError("lists of tokens have no padding; an attention_mask goes with a tensor")
        if mask.shape != (len(given), len(given[0])) or bool((mask.long().diff(dim=-1) < 0).any()):
            raise ValueError(f"the mask must be {[len(given), len(given[0])]}, padding (0) on the left")
        given = [row[own] for row, own in zip(given, mask.bool(), strict=True)]
    rows = [row.tolist() for row in given]
    vocab = model.config.get_text_config().vocab_size
    for number, row in enumerate(rows, 1):
        if not row:
            raise ValueError(f"prompt {number} is empty")
        if (wrong := next((token for token in row if not 0 <= token < vocab), None)) is not None:
            raise ValueError(f"token {wrong} of prompt {number} is outside the model's vocabulary of {vocab}")
    return rows


def _stop(model: PreTrainedModel, given: Iterable[int] | None) -> set[int]:
    if given is not None:
        ends = {*given} if isinstance(given, Iterable) else {None}
        if not all(isinstance(token, int) for token in ends):
            raise TypeError(f"stop={given!r}; tokens that end a text are a list of whole numbers, as in stop=[2]")
        return cast(set[int], ends)
    config = model.generation_config
    ends = None if config is None else config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else {*ends}


__all__ = ["Acceptance", "Choose", "Decoded", "SlowDraft", "generate"]
