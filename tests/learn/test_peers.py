"""Heads taught by the most confident peer."""

import pytest
import torch
import torch.nn.functional as F

from manyheads.learn import from_peers, most_confident, near_peers

D = torch.float64


def logits(*shape, seed=0):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def test_the_surest_teaches_and_of_equals_the_first():
    p = torch.tensor([[[0.5, 0.5], [0.1, 0.9]], [[0.2, 0.8], [0.9, 0.1]], [[1 / 2, 1 / 2], [0.3, 0.7]]])
    found, which = most_confident(p)
    assert which.tolist() == [1, 0] and torch.equal(found, p[which, [0, 1]])
    assert torch.equal(most_confident(p[[2, 1, 0]])[0][0], p[1, 0])  # peers in another order


def test_the_loss_by_hand():
    own, peers = logits(3, 4, 5), logits(2, 3, 4, 5, seed=1).requires_grad_()
    own.requires_grad_()
    found, want = from_peers(own, peers), 0
    for k in (1, 2):
        for x in range(4):
            q = max((peer[k - 1, x].softmax(-1) for peer in peers), key=lambda p: p.max().item())
            want = want - (q.detach() * own[k, x].log_softmax(-1)).sum() / 4
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(from_peers(own, peers[[1, 0]]), found)
    found.backward()
    assert peers.grad is None and (own.grad[0] == 0).all() and (own.grad[1:] != 0).all()


def test_one_peer_is_plain_distillation_and_no_auxiliary_head_is_nothing():
    own, peer = logits(3, 4, 5), logits(1, 3, 4, 5, seed=1)
    plain = sum(F.cross_entropy(own[k], peer[0, k - 1].softmax(-1)) for k in (1, 2))
    torch.testing.assert_close(from_peers(own, peer), plain)
    same = sum(F.cross_entropy(own[k], peer[0, k].softmax(-1)) for k in (1, 2))
    torch.testing.assert_close(from_peers(own, peer, shift=0), same)
    assert from_peers(own[:1], peer[:, :1]) == 0


def test_a_client_that_is_surest_teaches_itself():
    own, peer = 9 * logits(2, 4, 5), 0.1 * logits(1, 2, 4, 5, seed=1)
    torch.testing.assert_close(from_peers(own, peer, own=True), F.cross_entropy(own[1], own[0].softmax(-1)))


def test_what_clients_know_goes_one_head_further_with_each_peer():
    """Client c of a ring knows class c alone; head k of a client knows what is k clients away."""
    clients, levels, classes = 4, 4, 4
    x = torch.arange(classes)  # a public row of each class
    heads = torch.zeros(clients, levels, classes, classes, dtype=D)
    for c in range(clients):
        heads[c, 0, c, c] = 20.0  # sure of its own class, undecided of others
    for _ in range(levels - 1):  # one round: what the loss is least at
        old = heads.clone()
        for c in range(clients):
            peer = old[[(c - 1) % clients]]
            own = heads[c].requires_grad_()
            for level in range(1, levels):
                target, _ = most_confident(torch.cat([old[c][None], peer]).softmax(-1)[:, level - 1])
                with torch.no_grad():
                    own[level] = target.clamp_min(1e-9).log()
            heads = heads.detach()
    for c in range(clients):
        for level in range(levels):
            known = (heads[c, level].softmax(-1)[x, x] > 0.9).nonzero().flatten().tolist()
            assert known == sorted((c - away) % clients for away in range(level + 1))


def test_embeddings_are_met_by_direction_alone():
    own, peers = logits(4, 6).requires_grad_(), logits(2, 4, 6, seed=1).requires_grad_()
    found = near_peers(own, peers)
    torch.testing.assert_close(found, (2 - 2 * F.cosine_similarity(own[None], peers, dim=-1)).mean())
    torch.testing.assert_close(near_peers(3 * own, 0.5 * peers), found)
    found.backward()
    assert peers.grad is None


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"not \[3, 4, 5\] and \[2, 2, 4, 5\]"):
        from_peers(logits(3, 4, 5), logits(2, 2, 4, 5))
    with pytest.raises(ValueError, match="none of them 0"):
        from_peers(torch.zeros(3, 0, 5), torch.zeros(2, 3, 0, 5))
    with pytest.raises(ValueError, match="candidates are"):
        most_confident(torch.zeros(0, 4, 5))
    with pytest.raises(ValueError, match="shift=2"):
        from_peers(logits(3, 4, 5), logits(2, 3, 4, 5), shift=2)
    with pytest.raises(ValueError, match="map them to one width"):
        near_peers(logits(4, 6), logits(2, 4, 5))
