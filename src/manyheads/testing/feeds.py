"""The laws of feed-forwards: what each gives a token depends on that token alone, and costs what it says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from manyheads.core.dispatch import Blocks, Everyone, Sorted, using
from manyheads.core.feed import Feed, FeedPiece, feed_flow
from manyheads.core.flow import Links
from manyheads.core.mask import Axis
from manyheads.core.part import Site
from manyheads.core.registry import all_feeds
from manyheads.testing.conformance import Batch, close, hold


@dataclass(frozen=True)
class FeedCase(Batch):
    """A feed-forward's line and a tiny batch, left-padded. Weights are drawn anew."""

    line: str
    dim: int = 24
    hidden: int | None = None
    tokens: int = 11
    padding: tuple[int, ...] = (0, 4, 2)
    seed: int = 0

    @property
    def options(self) -> Feed:
        return Feed.parse(self.line)

    def module(self) -> nn.Module:
        torch.manual_seed(self.seed)
        module = self.options.build(self.dim, self.hidden, Site())
        module = (nn.Identity() if module is None else module).double().eval()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
        return module


def run(module: nn.Module, x: Tensor, valid: Tensor | None = None, links: Links | None = None) -> Tensor:
    """As a block calls it."""
    if not isinstance(module, FeedPiece):
        return module(x)
    return module(x, feed_flow(x, Axis(x.shape[1], 0, valid=valid), links, training=module.training))


def feed_line(case: FeedCase) -> None:
    """The options print, and parse back to themselves."""
    again = Feed.parse(str(case.options))
    hold(again == case.options, f"{case.options} parses back as {again}")


def padding(case: FeedCase) -> None:
    """A sequence alone gives what its row in a padded batch gives; what stands on padding changes nothing.

    Neither outputs nor losses, in training either.
    """
    x, valid = case.x, case.valid
    noisy = torch.where(valid[..., None], x, 100 * torch.ones_like(x))
    for train in (False, True) if case.options.steady else (False,):
        module, losses, other = case.module().train(train), Links(), Links()
        full = run(module, x, valid, losses)
        for row, first in enumerate(case.padding):
            close(full[row, first:], run(module, x[row : row + 1, first:])[0], f"row {row}")
        close(run(module, noisy, valid, other)[valid], full[valid], "other padding")
        for name, loss in losses.aux.items():
            close(other.aux[name], loss, f"the loss {name} with other padding")


def pointwise(case: FeedCase) -> None:
    """A token's output depends on that token alone, so it decodes as it passes and permutes with its tokens."""
    module, x = case.module(), case.x.requires_grad_()
    y, at = run(module, x), case.tokens // 2
    for block in (1, 3):
        close(torch.cat([run(module, part) for part in x.split(block, 1)], 1), y, f"blocks of {block}")
    order = torch.randperm(case.tokens)
    close(run(module, x[:, order]), y[:, order], "permuted tokens")
    (gradient,) = torch.autograd.grad(y[:, at].sum(), x)
    hold(torch.isfinite(gradient).all() and (gradient[:, at] != 0).any(), "no gradient from the token itself")
    gradient[:, at] = 0
    hold((gradient == 0).all(), "another token has a gradient")


def feed_gradients(case: FeedCase) -> None:
    """Every parameter gets a finite gradient that is not zero."""
    module, links = case.module().train(), Links()
    loss = run(module, case.x.requires_grad_(), case.valid, links).pow(2).sum() + sum(links.aux.values())
    loss.backward()
    for name, parameter in module.named_parameters():
        hold(parameter.grad is not None and parameter.grad.abs().sum() > 0, f"{name} has no gradient")
        assert parameter.grad is not None
        hold(torch.isfinite(parameter.grad).all(), f"the gradient of {name} is not finite")


def feed_cost(case: FeedCase) -> None:
    """Parameters, those that a token uses, and FLOPs are what the options say."""
    module, priced = case.module(), case.options.cost(case.dim, case.hidden, Site())
    counted = sum(parameter.numel() for parameter in module.parameters())
    hold(counted == priced.parameters, f"{counted} parameters, priced at {priced.parameters}")
    x = case.x[:1, :1]
    with FlopCounterMode(display=False) as counter, using(Sorted), torch.no_grad():
        run(module, x)
    flops = counter.get_total_flops()
    hold(flops == priced.token_flops, f"{flops} FLOPs a token, priced at {priced.token_flops}")
    run(module, x.requires_grad_()).sum().backward()
    used = sum(int((p.grad != 0).sum()) for p in module.parameters() if p.grad is not None)
    hold(used <= priced.active, f"a token trains {used} parameters, of {priced.active} active ones")


def feed_save_load(case: FeedCase) -> None:
    """A module built anew from the printed line and the state dict gives the very same numbers."""
    module, x = case.module(), case.x
    other = FeedCase(str(case.options), case.dim, case.hidden, seed=case.seed + 1).module()
    other.load_state_dict(module.state_dict())
    hold(torch.equal(run(other, x), run(module, x)), "the loaded module differs")
    hold(torch.equal(run(copy.deepcopy(module), x), run(module, x)), "a copy differs")


def steady(case: FeedCase) -> None:
    """Training computes what evaluation computes, unless the options say that it does not."""
    module = case.module()
    want = run(module, case.x, case.valid)
    if case.options.steady:
        close(run(module.train(), case.x, case.valid), want, "training")


def dispatches(case: FeedCase) -> None:
    """Every way of sending rows to experts gives the same outputs and gradients, with padding and without."""
    module, results = case.module(), []
    for kind in (Sorted, Blocks, Everyone):
        x = case.x.requires_grad_()
        with using(kind):
            y, whole = run(module, x, case.valid)[case.valid], run(module, x)
        wanted = [x, *module.parameters()]
        gradients = torch.autograd.grad(y.pow(2).sum() + whole.sum(), wanted, allow_unused=True)
        results.append([y, whole, *(gradient for gradient in gradients if gradient is not None)])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            close(got, want, "another dispatch")


def feed_precision(case: FeedCase) -> None:
    """Float32 stays within 1e-5 of float64; bfloat16 stays finite; either keeps its dtype."""
    want = run(case.module(), case.x)
    for dtype in (torch.float32, torch.bfloat16):
        y = run(case.module().to(dtype), case.x.to(dtype))
        hold(y.dtype == dtype and torch.isfinite(y).all(), f"{dtype} in, {y.dtype} out")
        if dtype == torch.float32:
            close(y.double(), want, "float32", 1e-5 * max(1.0, want.abs().max().item()))


FEED_LAWS: tuple[Callable[[FeedCase], None], ...] = (
    feed_line, pointwise, padding, feed_gradients, feed_cost, feed_save_load, steady, dispatches, feed_precision,
)  # fmt: skip
"""Every law of feed-forwards."""


def check_feed(
    line: str, *, dim: int = 24, hidden: int | None = None, seed: int = 0,
    laws: Sequence[Callable[[FeedCase], None]] = FEED_LAWS,
) -> None:  # fmt: skip
    """Hold a feed-forward to the laws.

    Raises:
        AssertionError: naming the line, the law and how it was broken.
    """
    case = FeedCase(line, dim, hidden, seed=seed)
    for law in laws:
        try:
            law(case)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            meaning = (law.__doc__ or "").splitlines()[0]
            raise AssertionError(f"{line!r} breaks the law {law.__name__!r} ({meaning}): {said}") from error


def feed_samples() -> list[str]:
    """Every registered feed-forward with each of its `examples`."""
    return [str(feed(**options)) for feed in all_feeds().values() for options in feed.examples]
