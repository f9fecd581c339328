"""Medusa heads: residual blocks on what the language model head reads, head k for the token k places after the next.

    z_k(h) = W (h + SiLU(W_k h + b_k)),  h `[D]`, W_k `[D, D]`, W the model's own head, frozen and shared

W_k and b_k start at zero, so at the start every head says what the model says of the next token. `layers` residual
blocks stand one after another, each with weights of its own.

Choices: W is shared (a head of its own has |V|·D weights, many times the block's); a tree takes the best `width` of
each head whatever came before, so that its tokens are one table.

Source: Cai et al. 2024, arXiv 2401.10774.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from manyheads.decode.drafter import Seen, fill
from manyheads.decode.identity import Identity
from manyheads.decode.tree import Tree
from manyheads.stack.pretrained import ManyheadsForCausalLM

WEIGHTS, DESCRIPTION = "heads.safetensors", "drafter.json"


class MedusaHeads(nn.Module):
    """Heads on a model's hidden state that draft the tokens after the next.

    >>> heads = MedusaHeads(model, heads=3)
    >>> generate(model, ids, heads, max_new_tokens=100)

    Args:
        model: whose head is shared; it is no submodule, and its weights are neither trained nor saved here.
        heads: K, tokens drafted at most. layers: residual blocks a head. width: choices of a head in a tree, at most.
    """

    def __init__(self, model: ManyheadsForCausalLM, heads: int = 4, layers: int = 1, width: int = 10) -> None:
        super().__init__()
        config = model.config.get_text_config()
        self.layers, self.width, self.vocab = layers, min(width, config.vocab_size), config.vocab_size
        if min(heads, layers, width) < 1:
            raise ValueError(f"heads={heads}, layers={layers} and width={width} must be positive")
        self._shared = (cast(Callable[[Tensor], Tensor], model.get_output_embeddings()),)  # in a tuple: no submodule
        dim = config.hidden_size
        self.heads = nn.ModuleList(nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers)) for _ in range(heads))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.to(model.device, model.dtype)
        odds = 0.4 ** torch.arange(1, heads + 1).double()[:, None] * 0.4 ** torch.arange(self.width).double()
        self.odds = odds  # a guess, until training measures it; no weight: it stays where it is, in float64

    @property
    def depth(self) -> int:
        return len(self.heads)

    def features(self, hidden: Tensor, head: int) -> Tensor:
        """What W reads for one head, of `hidden` `[…, D]`."""
        for block in cast(nn.ModuleList, self.heads[head]):
            hidden = hidden + F.silu(block(hidden))
        return hidden

    def forward(self, hidden: Tensor, head: int) -> Tensor:
        """Logits `[…, V]` of head 0 to K - 1 for the token that far after the next."""
        return self._shared[0](self.features(hidden, head))

    @torch.no_grad()
    def draft(self, seen: Seen, tree: Tree) -> Tensor:
        """The best tokens of each head.

        The hidden state that the root was chosen from is one place before it: head 0 speaks of the token after it.
        """
        hidden = torch.stack([self.features(seen.hidden, head) for head in range(tree.depth)], 1)
        return fill(tree, self._shared[0](hidden).topk(tree.width, -1).indices)

    @torch.no_grad()
    def measure(self, hidden: Tensor, targets: Tensor) -> None:
        """Set the odds from hidden states `[N, T, D]` and the tokens `[N, T]` after each, -1 where there is none."""
        hits = torch.zeros(self.depth, self.width, dtype=torch.float64)
        for head in range(self.depth):
            wanted = targets[:, head + 1 :]
            known = wanted >= 0
            if known.any():
                best = self(hidden[:, : wanted.shape[1]][known], head).topk(self.width, -1).indices
                hits[head] = (best == wanted[known][:, None]).double().mean(0).cpu()
        self.odds = hits

    def save(
        self,
        folder: Path,
        model: ManyheadsForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
        **notes: Any,
    ) -> None:
        """Write weights and description into an existing folder."""
        tensors = {key: value.detach().contiguous() for key, value in self.state_dict().items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        description = {
            "kind": "medusa", "heads": self.depth, "layers": self.layers, "width": self.width,
            "odds": self.odds.tolist(), "made_for": Identity.of(model, tokenizer, name).as_json(), **notes,
        }  # fmt: skip
        (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def load(
    folder: str | Path, model: ManyheadsForCausalLM, tokenizer: PreTrainedTokenizerBase | None = None, name: str = ""
) -> MedusaHeads:
    """The drafter in a folder, for the model (and tokenizer) that it was made for.

    Raises:
        ValueError: it was made for another model or tokenizer (both are named), or the files do not fit together.
    """
    folder = Path(folder)
    file = folder / DESCRIPTION
    if not file.is_file():
        raise ValueError(f"{folder} holds no drafter: there is no {DESCRIPTION}")
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        kind, shape = told["kind"], {key: told[key] for key in ("heads", "layers", "width")}
        made_for, odds = Identity(**told["made_for"]), torch.tensor(told["odds"], dtype=torch.float64)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file} does not describe a drafter: {error!r}") from error
    if kind != "medusa":
        raise ValueError(f"{file} describes a drafter of kind {kind!r}; known: medusa")
    made_for.check(Identity.of(model, tokenizer, name), folder)
    made = MedusaHeads(model, **shape)
    try:
        tensors = load_file(folder / WEIGHTS)
        made.load_state_dict(tensors)
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS} does not hold the weights that {DESCRIPTION} speaks of") from error
    if odds.shape != made.odds.shape:
        raise ValueError(f"{file} gives odds of {[*odds.shape]} for {[*made.odds.shape]} heads and choices")
    made.odds = odds
    return made.eval()
