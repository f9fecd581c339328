"""What a tree must be, whatever it is read by: every node as if its path alone had been read."""

import pytest
import torch

from manyheads.decode import Tree, Verifier, train
from manyheads.decode.verify import Kept

TREE = Tree.of([(0, 0, 0), (0, 1), (1, 0), (2,)])


def prompts(vocab, lengths=(9, 4, 7), seed=1):
    draws = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=draws).tolist() for n in lengths]


def padded(rows):
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])


def alone(model, rows):
    """Logits after sequences of their own, without a cache; what stands behind a shorter one it does not see."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    return logits[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]


def gaps(model, rows, tree=TREE, rounds=3, seed=2):
    """The greatest difference of a node's logits from a pass of its path alone, and of sequences that went on.

    Each round keeps a path of another length in each sequence.
    """
    vocab = model.config.vocab_size
    draws = torch.Generator().manual_seed(seed)
    verifier, rows, gap = Verifier(model), [list(row) for row in rows], 0.0
    verifier.start(*padded(rows))
    verifier.check()
    for turn in range(rounds):
        tokens = torch.randint(vocab, (len(rows), len(tree)), generator=draws)
        logits, _ = verifier.read(tree, tokens)
        ends = []
        for b, row in enumerate(rows):
            lines = [line[: depth + 1] for line, depth in zip(tree.lineage.tolist(), tree.depths, strict=True)]
            want = alone(model, [row + tokens[b, line].tolist() for line in lines])
            gap = max(gap, (logits[b] - want).abs().max().item())
            ends.append((turn * 2 + b * 3) % len(tree))
        node = torch.tensor(ends)
        depth = torch.tensor(tree.depths)[node]
        node, depth = verifier.keep(tree, Kept(node, depth))
        for b, row in enumerate(rows):
            row += tokens[b, tree.lineage[node[b], : int(depth[b]) + 1]].tolist()
    return gap


def trained(model, how, folder):
    """A drafter made by the command's own function; a run that was interrupted and went on writes the same bytes."""
    begun = torch.randint(model.config.vocab_size, (16, 4), generator=torch.Generator().manual_seed(3))
    drafter = train(model, begun, folder / "whole", how)

    def interrupt(stage, done, total):
        if (stage, done) == ("heads", 30):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(model, begun, folder / "parts", how, progress=interrupt)
    train(model, begun, folder / "parts", how)
    for file in ("heads.safetensors", "drafter.json"):
        assert (folder / "whole" / file).read_bytes() == (folder / "parts" / file).read_bytes()
    return drafter
