"""Laws of two layers of which the later one shares what the earlier one made, at sites that a law chooses itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from manyheads.attention import Attention
from manyheads.core.cache import Cache
from manyheads.core.flow import Links
from manyheads.core.part import Site
from manyheads.core.spec import Spec
from manyheads.testing.conformance import Case, close, hold


def shared_rows(case: Case) -> None:
    """A layer that reads the rows of an earlier one decodes as it passes, and neither makes nor caches rows."""

    def empty(cache: Cache) -> None:
        hold(not cache.site(1).growing and not cache.site(1).slots, "a reader caches rows")

    _, _, cache = _run(case, Site(0, 2), Site(1, 2, kv_source=0), empty, all_learn="moh" not in case.spec)
    _priced(case, Site(1, 2, kv_source=0), cache)


def shared_weights(case: Case) -> None:
    """A layer that takes the attention weights of an earlier one decodes as it passes, is linear in its values, and
    makes and caches nothing but these.
    """

    def values(cache: Cache) -> None:
        hold("k" not in cache.site(1).growing, "keys are cached")

    lender, taker = Site(0, 2, lends=True), Site(1, 2, attn_source=0)
    first, second, _ = _run(case, lender, taker, values)
    cache, links = Cache(), Links()
    with torch.no_grad():
        second(case.x + first(case.x, cache=cache, links=links), cache=cache, links=links)
    _priced(case, taker, cache)
    links = Links()
    first(case.x, mask=case.valid, positions=case.positions, links=links)
    a, b = torch.randn(2, len(case.x), second.layout.kv, case.tokens, second.layout.v_width, dtype=case.x.dtype)
    with torch.no_grad():
        weigh = links.weigh[0]
        close(weigh(a + 2 * b), weigh(a) + 2 * weigh(b), "weighing is not linear")


def _run(
    case: Case, one: Site, other: Site, kept: Callable[[Cache], None], all_learn: bool = True
) -> tuple[Attention, Attention, Cache]:
    """The two layers, held to decode as they pass, to learn, and to have the parameters of their cost. kept: holds the
    cache to what may be in it. The cache returned is that of all tokens."""
    first, second = (replace(case, site=site).layer() for site in (one, other))
    x, valid = case.x, case.valid

    def both(cut: slice, cache: Cache | None) -> Tensor:
        links, given = Links(), {"mask": valid[:, cut], "positions": case.positions[:, cut], "cache": cache}
        y = first(x[:, cut], links=links, **given)
        return second(x[:, cut] + y, links=links, **given)

    full, cache = both(slice(None), None), Cache()
    for block in (1, 3):
        cache = Cache()
        with torch.no_grad():
            outs = [both(slice(at, at + block), cache) for at in range(0, case.tokens, block)]
        close(torch.cat(outs, 1)[valid], full[valid], f"blocks of {block}")
        kept(cache)
    full[valid].pow(2).sum().backward()
    for name, parameter in second.named_parameters() if all_learn else ():
        hold(parameter.grad is not None and parameter.grad.abs().sum() > 0, f"{name} has no gradient")
    counted = sum(parameter.numel() for parameter in second.parameters())
    says = second.spec.cost(case.dim, case.heads, other).parameters
    hold(counted == says, f"{counted} parameters, priced at {says}")
    return first, second, cache


def _priced(case: Case, site: Site, cache: Cache) -> None:
    """What the second layer has in the cache takes the bytes of its cost."""
    says = Spec.parse(case.spec).resolve(site).cost(case.dim, case.heads, site)
    held, priced = sum(t.nbytes for t in cache.site(1).tensors()), len(case.x) * says.cache_bytes(case.tokens, 8)
    hold(held == priced, f"it holds {held} bytes of its own, priced at {priced}")
