"""Jakiro: two experts added and subtracted, and trees filled level by level."""

import pytest
import torch
import torch.nn.functional as F
from tests.decode.laws import prompts, trained
from tests.decode.test_generate import NEW, greedy
from tests.stack.tiny import VOCAB, model
from torch import nn

from manyheads.decode import Distillation, Jakiro, Seen, Tree, generate, load
from manyheads.decode.drafter import Trail

DIM = 32


def jakiro(std=0.3, **options):
    torch.manual_seed(1)
    made = model("gqa").double()
    drafter = Jakiro(made, **{"heads": 3, "width": 4, "window": 6, **options})
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=std)
    return made, drafter.eval()


def whole(t, window=99):
    age = torch.arange(t)[:, None] - torch.arange(t)
    return torch.arange(t)[None], ((age >= 0) & (age < window))[None, None]


def both(drafter, batch=2, t=5):
    torch.manual_seed(2)
    tokens, features = torch.randint(VOCAB, (batch, t)), torch.randn(batch, t, DIM, dtype=torch.float64)
    return tokens, features, drafter(tokens, features, *whole(t))


def test_branches_by_their_equations():
    """And the sign form is the sorted one: the stronger expert less the weaker."""
    made, drafter = jakiro()
    tokens, features, (left, right) = both(drafter)
    u = drafter.fc(torch.cat([made.get_input_embeddings()(tokens), features], -1))
    a = u + drafter.attention(u)
    y = F.rms_norm(a, (DIM,), drafter.norm.weight, 1e-6)
    experts = torch.stack([e.down(F.silu(e.gate(y)) * e.up(y)) for e in drafter.experts], -2)
    r = y @ drafter.router.weight.T
    torch.testing.assert_close(left, a + (r[..., :2].softmax(-1)[..., None] * experts).sum(-2))
    weight, order = r[..., 2:].softmax(-1).sort(descending=True)
    first, second = experts.gather(-2, order[..., None].expand(experts.shape)).unbind(-2)
    torch.testing.assert_close(right, a + weight[..., :1] * first - weight[..., 1:] * second)


def test_equal_experts_cancel_and_one_expert_is_a_plain_layer():
    _, drafter = jakiro()
    with torch.no_grad():
        for one, other in zip(*(expert.parameters() for expert in drafter.experts), strict=True):
            other.copy_(one)
        drafter.router.weight.zero_()
    tokens, features, (left, right) = both(drafter)
    u = drafter.fc(torch.cat([drafter._embed[0](tokens), features], -1))
    a = u + drafter.attention(u)
    expert = drafter.experts[0](drafter.norm(a))
    torch.testing.assert_close(right, a)  # w' = (1/2, 1/2) of equal ones
    torch.testing.assert_close(left, a + expert)  # w adds up to one: the layer of EAGLE

    def lopsided(module, args):
        y = args[0]
        return y.new_tensor([0.0, 0.0, 40.0, -40.0]).expand(*y.shape[:-1], 4)

    drafter.router.register_forward_hook(lambda module, args, out: lopsided(module, args))
    torch.testing.assert_close(drafter(tokens, features, *whole(5))[1], a + expert)  # w' = (1, 0)


@pytest.mark.parametrize("contrast", [True, False])
def test_every_node_is_drafted_as_if_its_path_alone_had_been(contrast):
    """The last level of three comes from R of its grandparents, or from one more pass."""
    _, drafter = jakiro(contrast=contrast)
    ids, features = prompts(VOCAB)[0], torch.randn(1, 6, DIM, dtype=torch.float64)
    seen = Seen([ids], features[:, -1], features, torch.ones(1, 6, dtype=torch.bool))
    tree = Tree.of([(0, 1, 0), (1, 0, 2), (1, 2), (0, 1, 1)])
    tokens = dict(zip(tree.paths[1:], drafter.draft(seen, tree)[0].tolist(), strict=True))
    for path in tree.paths[1:]:
        row, given = ids[-6:], features
        for depth in range(len(path) - 1):
            if contrast and depth == drafter.depth - 2:
                break
            left, _ = drafter(torch.tensor([row]), given, *whole(len(row)))
            row, given = [*row, tokens[path[: depth + 1]]], torch.cat([given, left[:, -1:]], 1)
        left, right = drafter(torch.tensor([row]), given, *whole(len(row)))
        made_by = right if contrast and len(path) == drafter.depth else left
        best = drafter.words(made_by[0, -1]).topk(4).indices
        assert tokens[path] == best[path[-1]], path


def test_passes_are_one_fewer_with_contrast():
    for contrast, passes in ((True, 2), (False, 3)):
        _, drafter = jakiro(contrast=contrast)
        count = []
        drafter.register_forward_hook(lambda *_, count=count: count.append(1))
        seen = Seen([[1, 2]], torch.randn(1, DIM).double(), torch.randn(1, 6, DIM).double(), torch.ones(1, 6).bool())
        drafter.draft(seen, Tree.full([2, 2, 2]))
        assert len(count) == passes


def test_greedy_text_is_the_models_own_with_any_weights():
    rows = prompts(VOCAB)
    for std, contrast in ((0.02, True), (0.5, False)):
        made, drafter = jakiro(std, contrast=contrast)
        want = greedy(made, rows)
        for tree in (Tree.chain(3), Tree.full([3, 2, 2]), Tree.full([2])):
            assert generate(made, rows, drafter, NEW, tree=tree).tokens == want


def test_a_trail_is_of_the_newest_tokens():
    trail = Trail(3)
    trail.start(torch.tensor([[1.0], [10.0]]))
    assert trail.seen([[], []]).known.tolist() == [[False, False, True]] * 2
    read = torch.tensor([[[2.0], [3.0], [4.0], [5.0]], [[20.0], [30.0], [40.0], [50.0]]])
    trail.add(read, torch.tensor([[0, 1, 3], [0, 2, 2]]), torch.tensor([2, 0]))
    assert trail.rows[..., 0].tolist() == [[2.0, 3.0, 5.0], [0.0, 10.0, 20.0]]
    assert trail.known.tolist() == [[True] * 3, [False, True, True]]
    trail.add(read, torch.tensor([[0, 1], [0, 3]]), torch.tensor([0, 1]))
    assert trail.rows[..., 0].tolist() == [[3.0, 5.0, 2.0], [20.0, 20.0, 50.0]]
    trail.select(torch.tensor([1]))
    assert trail.seen([[]]).hidden.tolist() == [[50.0]]


def test_losses_shift_features_by_one_and_by_two():
    """R has no word on the last two places; without contrast its weights that L lacks get no gradient."""
    for contrast in (True, False):
        _, drafter = jakiro(contrast=contrast)
        tokens, features, _ = both(drafter, t=7)
        torch.manual_seed(0)
        (loss,) = drafter.losses(features, tokens)
        torch.manual_seed(0)
        noisy = features + (torch.rand_like(features) - 0.5) * 0.2 * 512 / 7
        left, right = drafter(tokens, noisy, *whole(7, 6))
        want = 0.0
        for made, ahead, weight in ((left, 1, 1.0), (right, 2, 0.5))[: 1 + contrast]:
            wanted = features[:, ahead:]
            soft, logs = drafter.words(wanted).softmax(-1), drafter.words(made[:, :-ahead]).log_softmax(-1)
            want += weight * (F.smooth_l1_loss(made[:, :-ahead], wanted) - 0.1 * (soft * logs).sum(-1).mean())
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
        loss.backward()
        assert drafter.router.weight.grad[2:].any() == contrast and drafter.router.weight.grad[:2].any()


def test_it_is_trained_by_the_same_command_and_comes_back(tmp_path):
    made = model("gqa")
    how = Distillation("jakiro", heads=3, width=4, texts=16, prompt=4, length=14, steps=60, batch=8, lr=3e-3)
    drafter = trained(made, how, tmp_path)
    assert drafter.odds.shape == (3, 4) and drafter.odds[0].sum() > 0.3  # 4 of 61 tokens by chance: 0.07
    again = load(tmp_path / "whole", made)
    seen = Seen([[1, 2]], torch.randn(1, DIM), torch.randn(1, 32, DIM), torch.ones(1, 32).bool())
    tree = Tree.full([2, 2, 2])
    assert torch.equal(again.draft(seen, tree), drafter.draft(seen, tree)) and again.options == drafter.options


def test_costs_and_refusals():
    made = model("gqa")
    drafter = Jakiro(made, heads=2)
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    assert parameters == 2 * DIM**2 + DIM + 4 * DIM**2 + 2 * 3 * DIM**2 + 4 * DIM + DIM  # the last: the norm
    with pytest.raises(ValueError, match="window is at least 1, not 0"):
        Jakiro(made, window=0)
