"""Multi-token prediction: a chain of modules, each of which knows one token more than the one before it."""

import pytest
import torch
import torch.nn.functional as F
from tests.decode.laws import prompts, trained
from tests.stack.tiny import VOCAB, model
from torch import nn

from manyheads.core.mask import Axis
from manyheads.decode import MTP, Distillation, Seen, Tree, generate, load

DIM = 32


def mtp(std=0.3, **options):
    torch.manual_seed(1)
    made = model("gqa").double()
    drafter = MTP(made, **{"heads": 3, "width": 4, "window": 3, **options})
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=std)
    return made, drafter.eval()


def texts(batch=2, t=9):
    torch.manual_seed(2)
    return torch.randint(VOCAB, (batch, t)), torch.randn(batch, t, DIM, dtype=torch.float64)


def test_modules_by_their_equations():
    """In the paper's indices: h^k_i of h^{k-1}_i and token i + k. Here token 0 is the first that was chosen."""
    made, drafter = mtp(window=99)
    tokens, hidden = texts()
    along = drafter._along(hidden, tokens)
    for k, each in enumerate(drafter.chain):
        t = tokens.shape[1] - k
        embedded = made.get_input_embeddings()(tokens[:, k:])
        normed = [F.rms_norm(of, (DIM,), norm.weight, 1e-6)
                  for of, norm in ((hidden[:, :t], each.hidden_norm), (embedded, each.token_norm))]  # fmt: skip
        u = torch.cat(normed, -1) @ each.merge.weight.T
        block = each.block
        a = u + block.attention(F.rms_norm(u, (DIM,), block.attention_norm.weight, 1e-6))
        y = F.rms_norm(a, (DIM,), block.ffn_norm.weight, 1e-6)
        ffn = block.ffn
        hidden = a + (F.silu(y @ ffn.gate_proj.weight.T) * (y @ ffn.up_proj.weight.T)) @ ffn.down_proj.weight.T
        of, wanted = next(along)
        torch.testing.assert_close(of.view(2, -1, DIM), hidden[:, :-1])
        assert torch.equal(wanted, tokens[:, k + 1 :].flatten())


@pytest.mark.parametrize("window", [1, 3, 20])
@pytest.mark.parametrize("known", [1, 2, 7])
def test_every_node_is_drafted_as_if_its_path_alone_had_been(window, known):
    """By the passes of training over the text and the path, of which `known` hidden states are there."""
    _, drafter = mtp(window=window)
    (ids, hidden), reads = texts(1, 7), drafter.reads
    trail = F.pad(hidden, (0, 0, max(0, reads - 7), 0))[:, -reads:]
    there = (torch.arange(reads) >= reads - known)[None]
    known = min(known, reads)
    for tree in (Tree.of([(0, 1, 0), (1, 0, 2), (1, 2), (0, 1, 1)]), Tree.of([(2, 1), (0,)]), Tree.of([(3,)])):
        found = drafter.draft(Seen(ids.tolist(), hidden[:, -1], trail, there), tree)[0].tolist()
        tokens = dict(zip(tree.paths[1:], found, strict=True))
        for path in tree.paths[1:]:
            row = torch.tensor([ids[0, -known:].tolist() + [tokens[path[:depth]] for depth in range(1, len(path))]])
            h = hidden[:, -known:]
            for module in range(len(path)):
                own = row[:, module : h.shape[1] + module]
                age = torch.arange(own.shape[1])[:, None] - torch.arange(own.shape[1])
                mask = ((age >= 0) & (age < window))[None, None]
                h = drafter(own, h, module, Axis(own.shape[1], 0), mask)
            best = drafter.words(h[0, -1]).topk(4).indices
            assert tokens[path] == best[path[-1]], path


def test_a_chain_that_knows_writes_all_its_tokens_a_step():
    """A model whose next token follows from the newest alone, and modules that hand the newest to its head."""
    made = model("gqa", tie_word_embeddings=False).double()
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        made.get_output_embeddings().weight[order] = F.normalize(made.get_input_embeddings().weight, dim=-1)
    drafter = MTP(made, heads=4, width=1).eval()
    with torch.no_grad():
        for each in drafter.chain:
            each.merge.weight.copy_(torch.cat([torch.zeros(DIM, DIM), torch.eye(DIM)], 1))
            each.block.attention.project.o_proj.weight.zero_()
            each.block.ffn.down_proj.weight.zero_()
    plain = generate(made, [[1, 2, 3]], None, 21)
    assert plain.tokens[0][:2] == [order[3], order[order[3]]]
    found = generate(made, [[1, 2, 3]], drafter, 21, tree=Tree.chain(4))
    assert found.tokens == plain.tokens and found.steps == 4 and found.tokens_per_step == 5.0


def test_the_loss_is_the_mean_of_all_modules_and_goes_through_the_chain():
    _, drafter = mtp()
    tokens, hidden = texts()
    (loss,) = drafter.losses(hidden, tokens)
    logits = [(drafter.words(of), wanted) for of, wanted in drafter._along(hidden, tokens)]
    torch.testing.assert_close(loss, sum(F.cross_entropy(*each) for each in logits) / 3, check_dtype=False)
    drafter.zero_grad()
    F.cross_entropy(*logits[2]).backward()
    assert all(parameter.grad.any() for parameter in drafter.chain[0].parameters())
    drafter.measure(hidden, tokens)
    best = logits[1][0].topk(4).indices
    assert torch.equal(drafter.odds[1], (best == logits[1][1][:, None]).double().mean(0))


def test_it_learns_what_only_the_drafted_token_tells():
    """Each token follows from the one before it, and hidden states say nothing."""
    torch.manual_seed(0)
    table = torch.randperm(16)
    tokens = torch.randint(16, (64, 1))
    for _ in range(11):
        tokens = torch.cat([tokens, table[tokens[:, -1:]]], 1)
    made = model("gqa")
    drafter = MTP(made, heads=2, width=2, window=2)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    hidden = torch.zeros(64, 12, DIM)
    for _ in range(60):
        optimiser.zero_grad()
        for loss in drafter.losses(hidden[:48], tokens[:48]):
            loss.backward()
        optimiser.step()
    drafter.eval().measure(hidden[48:], tokens[48:])
    assert (drafter.odds[:, 0] > 0.95).all()


def test_it_is_trained_by_the_same_command_and_comes_back(tmp_path):
    made = model("gqa")
    how = Distillation("mtp", heads=3, width=4, texts=16, prompt=4, length=14, steps=40, batch=8, lr=3e-3)
    drafter = trained(made, how, tmp_path)
    assert drafter.odds.shape == (3, 4) and drafter.odds[0].sum() > 0.3  # 4 of 61 tokens by chance: 0.07
    again, rows = load(tmp_path / "whole", made), prompts(VOCAB)
    seen = Seen([[1, 2]], torch.randn(1, DIM), torch.randn(1, 22, DIM), torch.ones(1, 22).bool())
    tree = Tree.full([2, 2, 2])
    assert torch.equal(again.draft(seen, tree), drafter.draft(seen, tree)) and again.options == drafter.options
    assert generate(made, rows, again, 12, tree=tree).tokens == generate(made, rows, None, 12).tokens
    with pytest.raises(ValueError, match=r"width 32, 61 tokens\), not for .*width 32, 62 tokens"):
        load(tmp_path / "whole", model("gqa", vocab_size=VOCAB + 1))


def test_costs_and_refusals():
    made = model("gqa")
    drafter = MTP(made, heads=2)
    each = 2 * DIM**2 + 4 * DIM**2 + 3 * DIM * drafter.chain[0].block.ffn.gate_proj.out_features + 4 * DIM
    assert sum(parameter.numel() for parameter in drafter.parameters()) == 2 * each
    with pytest.raises(ValueError, match="window is at least 1, not 0"):
        MTP(made, window=0)
