"""Oracles of `mh_moe`."""

import pytest
import torch
from tests.oracles.reference import close

from manyheads import Links, OptionError, Site
from manyheads.core.feed import Feed, feed_flow
from manyheads.experts.mh_moe import MHMoE, MHMoEFeed
from manyheads.testing import FeedCase
from manyheads.testing.feeds import run

DIM, SITE = 24, Site()


def make(line):
    case = FeedCase(line)
    return case.module(), case.x


def load(module, **weights):
    with torch.no_grad():
        for name, weight in weights.items():
            module.get_parameter(name.replace("__", ".")).copy_(weight)


def test_one_head_and_no_maps_is_the_plain_mixture():
    module, x = make("mh_moe(heads=1, experts=5, hidden=8, top=2)")
    plain, _ = make("moe(experts=5, hidden=8, top=2)")
    eye = torch.eye(DIM).double()
    load(module, head_proj__weight=eye, merge_proj__weight=eye, **{
        name.replace(".", "__"): weight for name, weight in plain.named_parameters()
    })  # fmt: skip
    close(run(module, x), run(plain, x))


@pytest.mark.parametrize("renorm", ["full", "detach"])
def test_one_expert_is_a_block_diagonal_feed_forward(renorm):
    module, x = make(f"mh_moe(heads=3, experts=1, hidden=8, top=1, renorm={renorm})")
    cuts = module.head_proj(x).chunk(3, -1)
    close(run(module, x), module.merge_proj(torch.cat([module.experts.alone(cut) for cut in cuts], -1)))


def test_permuting_heads():
    """Rows of W_head and columns of W_merge, cut by cut: the router is the same for every cut."""
    module, x = make("mh_moe(heads=4, experts=5, hidden=8, top=2, bias=true)")
    want = run(module, x)
    order = torch.arange(DIM).view(4, -1)[torch.randperm(4)].flatten()
    load(module, head_proj__weight=module.head_proj.weight[order], head_proj__bias=module.head_proj.bias[order],
         merge_proj__weight=module.merge_proj.weight[:, order])  # fmt: skip
    close(run(module, x), want)


def test_equal_sub_tokens_route_equally():
    module, x = make("mh_moe(heads=3, experts=6, hidden=8, top=2)")
    load(module, head_proj__weight=module.head_proj.weight[: DIM // 3].repeat(3, 1))
    routing = module.router(module.head_proj(x).unflatten(-1, (3, -1)))
    for j in (1, 2):
        assert torch.equal(routing.chosen[..., j, :], routing.chosen[..., 0, :])


def test_experts_alike_make_the_router_irrelevant():
    module, x = make("mh_moe(heads=3, experts=5, hidden=8, top=2)")
    load(module, **{f"experts__{name}": module.experts.get_parameter(name)[:1].expand(5, -1, -1)
                    for name in module.experts.names})  # fmt: skip
    want = run(module, x)
    load(module, router__score__weight=torch.randn(5, DIM // 3))
    close(run(module, x), want)


def test_every_choice_is_served():
    """Σ over experts of the sub-tokens they get = N h k, padding apart."""
    module, x = make("mh_moe(heads=3, experts=6, hidden=8, top=2)")
    valid = torch.arange(11)[None] >= torch.tensor([[0], [4], [2]])
    seen, forward = [], module.experts.forward
    module.experts.forward = lambda rows, choice: seen.append(choice) or forward(rows, choice)
    run(module, x, valid)
    assert int(seen[0].kept.sum()) == int(valid.sum()) * 3 * 2
    run(module, x)
    assert seen[1].kept is None and seen[1].chosen.numel() == x[..., 0].numel() * 3 * 2


def test_loss_counts_sub_tokens():
    module, x = make("mh_moe(heads=3, experts=5, hidden=8, top=2)")
    parts = module.head_proj(x).unflatten(-1, (3, -1)).flatten(1, 2)
    links, valid = Links(), torch.ones(1, 33, dtype=torch.bool)
    module.train()(x, feed_flow(x, links=links, training=True))
    close(links.aux["0.mh_moe"], module.router(parts).balance(valid) / 2)


def test_a_shared_expert_reads_whole_tokens():
    module, x = make("mh_moe(heads=3, experts=4, hidden=8, top=1, shared_hidden=9)")
    shared = module.shared.alone(x)
    module.shared = None
    close(run(module, x) + shared, run(make("mh_moe(heads=3, experts=4, hidden=8, top=1, shared_hidden=9)")[0], x))


@pytest.mark.parametrize(("heads", "hidden", "experts"), [(2, 768, 40), (3, 512, 96)])
def test_published_sizes(heads, hidden, experts):
    """Beside 8 experts of 2048, one a token, at D = 768: FLOPs to the number, parameters to the rounding of E."""
    found = MHMoE.parity(768, 2048, 8, 1, heads)
    assert (found.hidden, found.experts, found.top) == (hidden, experts, heads)
    reference, mine = Feed.parse("moe(experts=8, top=1, hidden=2048)"), found
    routers = [2 * 768 * 8, 2 * 768 * experts]
    flops = [feed.cost(768, None, SITE).token_flops for feed in (reference, mine)]
    assert flops[0] - routers[0] == flops[1] - routers[1]
    parameters = [feed.cost(768, None, SITE).parameters for feed in (reference, mine)]
    assert abs(parameters[1] / parameters[0] - 1) < 0.04


def test_defaults_are_the_published_best():
    assert MHMoE() == MHMoE.parity(768, 2048, 8, 1, 3)


def test_parity_in_closed_form():
    """Two maps an expert, one choice: m = m' - D/k, so with m' = 4D and h = 3: m = 3D and E = 4E' - 1."""
    found = MHMoE.parity(96, 4 * 96, 8, 1, 3, top=1, act="relu", multiple=1)
    assert (found.hidden, found.experts) == (3 * 96, 4 * 8 - 1)
    router = found.experts * 96 // 3 - 8 * 96
    theirs = Feed.parse("moe(experts=8, top=1, hidden=384, act=relu)").cost(96, None, SITE)
    ours = found.cost(96, None, SITE)
    assert ours.parameters - theirs.parameters == router
    assert ours.token_flops - theirs.token_flops == 2 * 96 * (31 - 8)
    with pytest.raises(OptionError, match="no hidden gives the FLOPs of hidden=101, top=1 at dim=96"):
        MHMoE.parity(96, 101, 8, 1, 3)


def test_cost():
    """2 D² (+ 2 D) + E n d m + d E parameters, 4 D² + 2 n D m k + 2 D E FLOPs."""
    for bias in (False, True):
        cost = MHMoE(heads=3, experts=10, hidden=20, top=2, bias=bias).cost(48, None, SITE)
        assert cost.parameters == 2 * 48**2 + 2 * 48 * bias + 10 * 3 * 16 * 20 + 16 * 10
        assert cost.token_flops == 4 * 48**2 + 2 * 3 * 48 * 20 * 2 + 2 * 48 * 10
        assert cost.idle == (10 - 6) * 3 * 16 * 20


def test_first_weights():
    piece = MHMoE(heads=2, experts=4, hidden=8, bias=True).build(256, None, SITE)
    assert isinstance(piece, MHMoEFeed)
    bound = (6 / 512) ** 0.5
    assert 0.95 * bound < piece.head_proj.weight.abs().max() * 2**0.5 <= bound
    assert 0.95 * bound < piece.merge_proj.weight.abs().max() <= bound and not piece.merge_proj.bias.any()


def test_refusal():
    with pytest.raises(OptionError, match=r"dim=20 is no multiple of heads=3; heads may be \[1, 2, 4, 5, 10\]"):
        MHMoE().check(20, None, SITE)
