"""One pass over a tree, paths that are kept, rows that are taken back."""

import pytest
import torch
from tests.convert.tiny import model as family
from tests.decode.laws import TREE, gaps, padded, prompts
from tests.stack.tiny import VOCAB, model

from manyheads import adopt
from manyheads.core.cache import Cache
from manyheads.core.check import OptionError
from manyheads.core.mask import Axis
from manyheads.decode import Tree, Verifier
from manyheads.decode.verify import Kept, Typical, exact

SPECS = {
    "gqa": "gqa(kv_heads=2)",
    "mla": "mla(rank=12, rope_dim=4, view=absorbed)",
    "window": "gqa(kv_heads=2) + window(size=5)",
    "alibi": "gqa(kv_heads=2) + alibi",
    "transformed": "gqa(kv_heads=2) + kha + talking_heads",
}


def test_a_tree_is_laid_out_with_parents_before_children():
    tree = Tree.of([(1, 0), (0, 0)])
    assert tree.paths == ((), (0,), (1,), (0, 0), (1, 0))
    assert tree.parents == (0, 0, 0, 1, 2) and tree.depths == (0, 1, 1, 2, 2)
    assert tree.lineage.tolist() == [[0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 1, 3], [0, 2, 4]]
    assert tree.ancestors.sum(-1).tolist() == [1, 2, 2, 3, 3] and tree.ancestors[4].tolist() == [1, 0, 1, 0, 1]
    assert not tree.is_chain and Tree.chain(3).is_chain and Tree().is_chain
    assert len(Tree.full([3, 2])) == 1 + 3 + 6 and (Tree.full([3, 2]).width, Tree.full([3, 2]).depth) == (3, 2)
    smaller, index = tree.keep(torch.tensor([False, False, False, False, True]))
    assert smaller.paths == ((), (1,), (1, 0)) and index.tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda: Tree.chain(0), "depth is at least 1, not 0"),
        (lambda: Tree.chain(1.5), "depth is a whole number"),
        (lambda: Tree.full([2, 0]), "width is at least 1, not 0"),
        (lambda: Tree.of([(0, -1)]), "choice is at least 0, not -1"),
        (lambda: Tree.of(["ab"]), "choice is a whole number, not 'a'"),
    ],
)
def test_a_tree_of_nothing_is_refused(wrong, why):
    with pytest.raises(OptionError, match=why):
        wrong()
    assert Tree.of([]) == Tree.full([]) == Tree()  # the root alone, by its name


@pytest.mark.parametrize("tree", [TREE, Tree.chain(3)], ids=["tree", "chain"])
@pytest.mark.parametrize("case", SPECS)
def test_every_node_is_as_if_its_path_alone_had_been_read(case, tree):
    """And so is what sequences of unequal prompts go on from, each with a path of another length."""
    made = model({"specs": SPECS[case]}).double()
    assert gaps(made, prompts(VOCAB), tree) < 1e-10


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_adopted_models_too(kind):
    assert gaps(adopt(family(kind, dtype=torch.float64)), prompts(VOCAB)) < 1e-10


def test_layers_that_share_rows_or_weights():
    for case in ("shared", "weights", "mixed"):
        assert gaps(model(case).double(), prompts(VOCAB), rounds=2) < 1e-10


def test_windows_forget_rows_while_sequences_drift_apart():
    made = model({"specs": "gqa(kv_heads=2) + window(size=3)"}, num_hidden_layers=1).double()
    assert gaps(made, prompts(VOCAB, (40, 150, 90)), Tree.of([(0, 0, 0, 0), (1,)]), rounds=40) < 1e-10


def test_the_cache_after_a_step_is_that_of_a_prompt_with_the_path():
    made = model("gqa").double()
    verifier, fresh = Verifier(made), Verifier(made)
    row = prompts(VOCAB)[0]
    verifier.start(torch.tensor([row]))
    tokens = torch.randint(VOCAB, (1, len(TREE)))
    verifier.read(TREE, tokens)
    node = TREE.paths.index((0, 1))
    verifier.keep(TREE, Kept(torch.tensor([node]), torch.tensor([2])))
    fresh.start(torch.tensor([row + tokens[0, TREE.lineage[node, :3]].tolist()]))
    assert verifier.cache.length() == fresh.cache.length() == len(row) + 3
    assert verifier.cache.axis.start == 0 and verifier.cache.axis.given_time is None  # kernels know the triangle again
    for kept, new in zip(verifier.cache.layers, fresh.cache.layers, strict=True):
        for a, b in zip(kept.tensors(), new.tensors(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("specs", "why"),
    [("mtla(stride=3, rank=12, rope_dim=4)", "merges tokens into slots"), ("gated_delta_net", "keeps no history")],
)
def test_what_cannot_be_taken_back_is_refused_with_its_reason(specs, why):
    verifier = Verifier(model({"specs": specs}))
    verifier.start(*padded(prompts(VOCAB)))
    with pytest.raises(ValueError, match=f"drafts cannot be taken back: layer 0 .*{why}"):
        verifier.check()


def test_a_stock_model_is_told_to_be_adopted():
    with pytest.raises(TypeError, match="adopt it first"):
        Verifier(family())


def test_a_cache_that_cannot_choose_is_left_as_it_was():
    cache = Cache()
    cache.site(0).state["s"] = torch.zeros(2, 1)
    cache.axis = Axis(4, 0)
    with pytest.raises(ValueError, match="cannot go back 2 tokens: the state 's'"):
        cache.choose(3, torch.zeros(2, 1, dtype=torch.long), torch.ones(2, dtype=torch.long))
    assert cache.length() == 4


def test_exact_acceptance_takes_the_longest_run_and_no_missing_token():
    tree = Tree.of([(0, 0), (1, 0)])  # the root, two children, a child of each
    tokens = torch.tensor([[5, 7, 8, 1, 2], [5, 7, 8, 1, 2], [5, -1, 8, -1, 2]])
    chosen = torch.tensor([[8, 0, 2, 9, 9], [7, 3, 2, 9, 9], [-1, -1, 2, 9, 9]])
    assert exact(tree, tokens, chosen) == (
        pytest.approx(torch.tensor([4, 1, 0])),
        pytest.approx(torch.tensor([2, 1, 0])),
    )


def test_typical_acceptance():
    """No bound accepts whatever has a probability, the highest bound nothing; a likelier path wins among equals."""
    tree = Tree.of([(0, 0), (1,), (2, 0)])
    tokens, logits = torch.tensor([[0, 1, 2, 3, 1, 2]]), torch.zeros(1, 6, 5)
    assert Typical(0.0, 0.0)(tree, tokens, logits).depth.item() == 2
    assert Typical(1.0, 6.0)(tree, tokens, logits).depth.item() == 0  # delta · exp(-log 5) > 1: the bound is 1
    logits[0, 0, 3] = 0.5  # the third child is a little likelier than the first
    assert Typical(0.01, 0.3)(tree, tokens, logits).node.item() == 5
    logits[0, 0, 3] = -30.0
    assert Typical(0.01, 0.3)(tree, tokens, logits).node.item() == 4
    assert Typical(0.5, 0.3)(tree, tokens, logits).depth.item() == 2  # min(0.5, 0.3 / 5) = 0.06 < 0.2
    with pytest.raises(ValueError, match="temperature=0"):
        Typical(temperature=0)
