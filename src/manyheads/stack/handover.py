"""What one model has read, another goes on from: the keys and values of some layers, put in front of its cache.

    A reads a context of n tokens; layer l of B gets rows of A's layer round((l + 1/2) L_A / L_B - 1/2): all n where l
    is chosen or 0, else the first alone (the sink). B's own tokens stand at positions n, n + 1, … in every layer.

Which layers matter is measured once, with all of them handed over: I_l is the attention that B's queries pay to the
context but its first token, P_l = exp(-(l - mu)² / 2 sigma²), and the `ratio · L_B` layers with the largest
alpha · I'_l + (1 - alpha) · P'_l are chosen, I' and P' scaled to [0, 1] over the layers.

Nothing is trained and nothing projected: both models must make rows of one form and rotate them alike.

Choices: the source maps A's layers to B's; here each layer of B asks which of A's it maps to, so that it has one. The
source's code leaves the prior out (alpha = 1); so does this by default.

Source: Shi et al. 2025, KVComm, arXiv 2510.03346.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from manyheads.attention import Attention
from manyheads.core.flow import Links
from manyheads.core.mask import Axis
from manyheads.core.prefix import Held, PrefixCache
from manyheads.core.store import SiteStore
from manyheads.stack.pretrained import ManyheadsForCausalLM
from manyheads.stack.requests import check


def source_layers(sender: int, receiver: int) -> list[int]:
    """The layer of `sender` layers that each of `receiver` layers gets rows of."""
    return [round((layer + 0.5) * sender / receiver - 0.5) for layer in range(receiver)]


def choose(
    importance: Tensor, ratio: float, *, alpha: float = 1.0, mu: float | None = None, sigma: float = 10.0
) -> list[int]:
    """The int(ratio · L) layers to hand over whole, from I `[L]`. mu: the prior's, by default the middle."""
    if not 0 <= ratio <= 1 or not 0 <= alpha <= 1 or sigma <= 0:
        raise ValueError(f"ratio={ratio} and alpha={alpha} lie between 0 and 1, sigma={sigma} above 0")
    layers = torch.arange(len(importance), dtype=importance.dtype, device=importance.device)
    prior = (-((layers - (layers.mean() if mu is None else mu)) ** 2) / (2 * sigma**2)).exp()
    scores = alpha * _scaled(importance) + (1 - alpha) * _scaled(prior)
    best = scores.argsort(descending=True, stable=True)
    return sorted(best[: int(ratio * len(scores) + 1e-9)].tolist())


def _scaled(x: Tensor) -> Tensor:
    """To [0, 1]; zeros where all are equal."""
    least, most = x.aminmax()
    return (x - least) / (most - least) if most > least else torch.zeros_like(x)


class Handover:
    """From one model to another.

    >>> handover = Handover(sender, receiver)
    >>> context = handover.read(ids)                        # [1, n], through the sender
    >>> layers = choose(handover.importance(context, sample), ratio=0.3)   # once for the two models
    >>> cache = handover.give(context, layers).branch(2)    # for two questions `[2, T]` about it
    >>> receiver(questions, cache=cache, position_ids=n + torch.arange(T)[None])

    Raises:
        ValueError: rows of the two models differ in form or in how they rotate, or cannot be shared, at some layer.
    """

    def __init__(self, sender: ManyheadsForCausalLM, receiver: ManyheadsForCausalLM) -> None:
        self.sender, self.receiver = sender, receiver
        of = sender.attentions
        self.sources = source_layers(len(of), len(receiver.attentions))
        for layer, source in zip(receiver.attentions, self.sources, strict=True):
            _compare(of[source], layer)

    @torch.no_grad()
    def read(self, ids: Tensor) -> PrefixCache:
        """The sender's rows of a context `[1, n]`, a layer of the receiver each."""
        if ids.ndim != 2 or len(ids) != 1 or not ids.shape[1]:
            raise ValueError(f"a context is one sequence of tokens, [1, n]; this is {[*ids.shape]}")
        check(self.sender, ids.tolist())
        cache = PrefixCache()
        self.sender(ids, cache=cache, logits_to_keep=1)
        return _cache(Axis(ids.shape[1], 0, device=ids.device), [_rows(cache, source) for source in self.sources])

    @torch.no_grad()
    def importance(self, context: PrefixCache, ids: Tensor) -> Tensor:
        """I `[L]` of the receiver's layers, from its own tokens `[B, T]` after the whole context."""
        self._check(context)
        layers, n = self.receiver.attentions, context.length()
        if n == 1:
            return torch.zeros(len(layers))
        whole = Axis(n, 0, device=ids.device)
        sink, rest = (
            _cache(whole[cut], [_rows(context, index, cut) for index in range(len(layers))])
            for cut in (slice(0, 1), slice(1, None))
        )
        cache = PrefixCache([Held(sink, 0, len(ids)), Held(rest, 0, len(ids))], len(ids))
        links = Links(lse={})
        positions = n + torch.arange(ids.shape[1], device=ids.device)[None]
        self.receiver(ids, cache=cache, position_ids=positions, logits_to_keep=1, links=links)
        assert links.lse is not None
        return torch.stack([torch.stack(links.lse[layer.site.layer]).softmax(0)[2].mean() for layer in layers])

    @torch.no_grad()
    def give(self, context: PrefixCache, layers: Collection[int], *, shift_back: bool = False) -> PrefixCache:
        """What the receiver goes on from: all rows of the chosen layers and of layer 0, of others the first.

        shift_back: where the first row is alone, it stands right before the receiver's tokens, not n positions away.
        """
        self._check(context)
        count, n = len(self.sources), context.length()
        if wrong := [layer for layer in layers if not 0 <= layer < count]:
            raise ValueError(f"there is no layer {wrong[0]}; the receiver has {count}")
        whole = {0, *layers}
        assert context.axis is not None
        given = _cache(
            context.axis, [_rows(context, layer, slice(None if layer in whole else 1)) for layer in range(count)]
        )
        for index, layer in enumerate(self.receiver.attentions if shift_back else ()):
            if layer.rotate_at != "write":
                raise ValueError(f"shift_back moves rows that are cached rotated; those of {layer.spec} are not")
            for name, growing in given.site(index).growing.items() if index not in whole else ():
                assert growing.buffer is not None
                first, last = (Axis(1, at, device=growing.buffer.device) for at in (0, n - 1))
                growing.buffer = layer._turn(layer._turn(growing.buffer, name, first, back=True), name, last)
        return given

    def _check(self, context: PrefixCache) -> None:
        if context.held or context.batch != 1 or context.axis is None:
            raise ValueError("this cache is no context that `read` returned")
        for index, layer in enumerate(self.receiver.attentions):
            dtype = self.receiver.dtype
            context.kept(
                index, {name: torch.empty(1, e.heads, 0, e.width, dtype=dtype) for name, e in layer.entries.items()}
            )


def _rows(cache: PrefixCache, layer: int, cut: slice = slice(None)) -> dict[str, Tensor]:
    """Some rows of a layer, as tensors of their own."""
    return {name: growing.rows()[:, :, cut].clone() for name, growing in cache.site(layer).growing.items()}


def _cache(axis: Axis, rows: Sequence[dict[str, Tensor]]) -> PrefixCache:
    """A cache of these tokens with the rows of each layer; where there are fewer, they are of the first tokens."""
    cache = PrefixCache()
    cache.axis = axis
    cache.layers = [SiteStore.of(each, axis.length) for each in rows]
    return cache


def _compare(sender: Attention, receiver: Attention) -> None:
    """Raise where the receiver cannot read the sender's rows."""
    where = f"from layer {sender.site.layer} ({sender.spec}) to layer {receiver.site.layer} ({receiver.spec})"
    for layer in (sender, receiver):
        if layer.whole is not None:
            raise ValueError(f"no rows go {where}, for {layer.whole}")
        if not layer.entries:
            raise ValueError(f"no rows go {where}, for layer {layer.site.layer} reads those of another layer")
        if any(entry.keep is not None for entry in layer.entries.values()):
            raise ValueError(f"no rows go {where}, for {layer.spec} forgets old rows")
        if any(entry.packing is not None for entry in layer.entries.values()):
            raise ValueError(f"no rows go {where}, for {layer.spec} packs its rows, which turn no more")
    forms = [{name: (e.heads, e.width) for name, e in layer.entries.items()} for layer in (sender, receiver)]
    if forms[0] != forms[1]:
        one, other = (", ".join(f"{h} x {w} {name}" for name, (h, w) in form.items()) for form in forms)
        raise ValueError(f"no rows go {where}: {one} are not {other}")
    turns = [[part for part in layer.spec.parts if part.stage == "position"] for layer in (sender, receiver)]
    if turns[0] != turns[1] or sender.rotate_at != receiver.rotate_at:
        raise ValueError(f"no rows go {where}: positions enter them in another way")
