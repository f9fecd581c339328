"""Every feed-forward holds to the laws, and the laws find what is broken."""

import warnings

import pytest
import torch

from manyheads import OptionError
from manyheads.core.cost import Cost
from manyheads.core.dispatch import Blocks, using
from manyheads.core.feed import Feed
from manyheads.core.registry import all_feeds, register_feed
from manyheads.core.router import Routing
from manyheads.experts import moe
from manyheads.testing import FEED_LAWS, FeedCase, check_feed, feed_samples
from manyheads.testing.feeds import run


@pytest.mark.parametrize("law", FEED_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("line", feed_samples())
def test_feed(line, law):
    check_feed(line, laws=[law])


def test_other_sizes():
    check_feed("moe(experts=3, top=2)", dim=12, hidden=10, seed=1)
    check_feed("swiglu", dim=12, hidden=10)


def test_a_broken_feed_is_caught(monkeypatch):
    feed = moe.MoEFeed.feed
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="breaks the law 'pointwise'"):
        patch.setattr(moe.MoEFeed, "feed", lambda self, x, flow: feed(self, x, flow) + x.mean(1, keepdim=True))
        check_feed("moe")
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match=r"'padding'.*the loss 0\.moe"):
        choose = moe.Chooser.choose
        patch.setattr(moe.Chooser, "choose", lambda self, x, valid, flow, name: choose(self, x, None, flow, name))
        check_feed("moe")
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="priced at"):
        patch.setattr(moe.MoE, "cost", lambda self, dim, hidden, site: Cost())
        check_feed("moe")
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match=r"router\.score\.weight has no gradient"):
        patch.setattr(moe.Chooser, "gates", lambda self, routing: routing.gates().detach())
        patch.setattr(Routing, "balance", lambda self, valid, per_sequence=False: self.chance.detach().sum())
        check_feed("moe")


def test_the_registry():
    assert {"swiglu", "gelu", "none", "moe", "mh_moe", "uome"} <= all_feeds().keys()
    with pytest.raises(OptionError, match="two feed-forwards are called 'moe'"):
        register_feed(type("Other", (Feed,), {"name": "moe"}))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("moe(experts=4, topp=2)", "'moe' has no option 'topp'; it has experts, top"),
        ("moe(experts=4, top=5)", r"moe: top=5 of experts=4; top may be 1 to 4\n  moe\(experts=4, top=5\)\n  \^"),
        ("moe + swiglu", r"expected the end, found '\+'\n  moe \+ swiglu\n      \^"),
        ("mo", "no feed-forward 'mo'; there are"),
        ("moe(top=0)", "top=0"),
        ("moe(sample=3)", "sample=3 of top=2"),
        ("moe(capacity=0)", "capacity=0.0 leaves no room"),
        ("moe(shared=-1)", "shared=-1"),
        ("moe(hidden=0)", "hidden=0"),
        ("mh_moe(top=97)", "top=97 of experts=96"),
        ("mh_moe(heads=0)", "heads=0"),
        ("uome(top=9)", "top=9 of experts=8"),
    ],
)
def test_an_error_points_at_the_token(line, said):
    with pytest.raises(OptionError, match=said):
        Feed.parse(line)


@pytest.mark.slow
@pytest.mark.parametrize("line", feed_samples())
def test_compile(line):
    """One graph without breaks, equal to the plain module, with gradients."""
    case = FeedCase(line)
    module, x = case.module().float(), case.x.float().requires_grad_()
    for kind in (None, Blocks):
        torch._dynamo.reset()
        with warnings.catch_warnings(), using(kind):
            warnings.simplefilter("ignore")
            y = torch.compile(module, fullgraph=True)(x)
        want = run(module, x)
        torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)
        got, wanted = (torch.autograd.grad(out.pow(2).sum(), x)[0] for out in (y, want))
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
