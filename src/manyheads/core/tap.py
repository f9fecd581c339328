"""What stands by while a layer runs: sees its attention problem and its heads' outputs, or changes them."""

from __future__ import annotations

from torch import Tensor

from manyheads.core.flow import Flow
from manyheads.core.kernel import Call


class Tap:
    """Hooks on one layer, in the order they are called in a pass; each is an identity here.

    A layer calls them for every tap in `Attention.taps`: all taps at one hook before any at the next, so that `see` is
    shown what the layer really computed. With layers that are not ours, flow is None.
    """

    def ask(self, call: Call, flow: Flow | None) -> Call:
        """The attention problem, after transforms, rotation and cache, before it is split and solved."""
        return call

    def out(self, o: Tensor, flow: Flow | None) -> Tensor:
        """Head outputs `[B, out, T, out_width]` as the output projection takes them."""
        return o

    def see(self, call: Call, read: Tensor, out: Tensor, flow: Flow | None, unlike: str | None = None) -> None:
        """The problem as it was solved, what attention returned `[B, H, T, V]`, and head outputs at last.

        unlike: what else acts on the scores of a layer that is not ours, if anything.
        """
