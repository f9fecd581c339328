"""The text is the model's own, whatever is drafted."""

import math

import pytest
import torch
from tests.convert.tiny import model as family
from tests.decode.laws import padded, prompts
from tests.stack.tiny import VOCAB, model

from manyheads import adopt
from manyheads.decode import LearnedDrafter, PromptLookup, RandomDrafter, Seen, Tree, Typical, generate
from manyheads.decode.drafter import fill

SPECS = {
    "gqa": "gqa(kv_heads=2)",
    "mla": "mla(rank=12, rope_dim=4)",
    "window": "gqa(kv_heads=2) + window(size=5)",
    "alibi": "gqa(kv_heads=2) + alibi",
}
NEW = 14


def greedy(made, rows, count=NEW):
    """As transformers writes it, each sequence alone."""
    return [
        made.generate(torch.tensor([row]), max_new_tokens=count, do_sample=False, pad_token_id=0)[
            0, len(row) :
        ].tolist()
        for row in rows
    ]


class Half:
    """Says the right token at half of the places, somewhere among the choices, and noise elsewhere."""

    def __init__(self, rows, texts, depth=3, width=3, seed=0, share=0.5):
        self.texts, self.depth, self.width, self.share = (
            [a + b for a, b in zip(rows, texts, strict=True)],
            depth,
            width,
            share,
        )
        self.odds = torch.full((depth, width), 0.3, dtype=torch.float64)
        self.draws = torch.Generator().manual_seed(seed)

    def draft(self, seen, tree):
        table = torch.randint(VOCAB, (len(seen.ids), self.depth, self.width), generator=self.draws)
        for b, ids in enumerate(seen.ids):
            (text,) = [text for text in self.texts if text[: len(ids)] == ids]
            for depth, token in enumerate(text[len(ids) : len(ids) + self.depth]):
                if torch.rand(1, generator=self.draws) < self.share:
                    table[b, depth, torch.randint(self.width, (1,), generator=self.draws)] = token
        return fill(tree, table)


@pytest.mark.parametrize("case", SPECS)
def test_greedy_text_is_the_models_own_with_any_drafter(case):
    made = model({"specs": SPECS[case]}).double()
    rows = prompts(VOCAB)
    want = greedy(made, rows)
    for seed, tree in enumerate([Tree.full([3, 2, 1]), Tree.chain(3), Tree.of([(2,), (0, 1, 1)]), Tree.full([3])]):
        for drafter in (Half(rows, want, seed=seed), RandomDrafter(VOCAB, seed=seed), PromptLookup(depth=3, width=3)):
            found = generate(made, rows, drafter, NEW, tree=tree)
            assert found.tokens == want
            assert generate(made, rows[1:2], drafter, NEW, tree=tree).tokens == want[1:2]
    ids, mask = padded(rows)
    assert generate(made, ids, None, NEW, attention_mask=mask).tokens == want


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_of_adopted_models_too(kind):
    made = adopt(family(kind, dtype=torch.float64))
    rows = prompts(VOCAB)
    want = greedy(made, rows)
    assert generate(made, rows, Half(rows, want), NEW, tree=Tree.full([3, 2, 2])).tokens == want


@pytest.mark.parametrize("kind", sorted(LearnedDrafter.kinds))
def test_learned_drafters_of_any_weights_too(kind):
    made = model("gqa").double()
    rows = prompts(VOCAB)
    want = greedy(made, rows)
    drafter = LearnedDrafter.kinds[kind](made, heads=3, width=3).eval()
    for std in (0.0, 0.1, 3.0):
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=std)
        for tree in (Tree.chain(3), Tree.full([3, 2, 1]), Tree.full([2])):
            assert generate(made, rows, drafter, NEW, tree=tree).tokens == want


def test_a_drafter_that_knows_writes_a_whole_tree_a_step():
    made = model("gqa").double()
    rows = prompts(VOCAB)[:1]
    want = greedy(made, rows, 21)
    found = generate(made, rows, Half(rows, want, width=1, depth=4, share=1.0), 21, tree=Tree.chain(4))
    assert found.tokens == want and found.steps == 4 and found.tokens_per_step == 5.0
    assert found.acceptance.by_depth == [1.0] * 4
    assert generate(made, rows, None, 21).tokens_per_step == 1.0


def test_acceptance_is_counted_by_depth_and_choice():
    made = model("gqa").double()
    rows = prompts(VOCAB)[:1]
    (want,) = greedy(made, rows, 9)

    class Known(Half):
        def draft(self, seen, tree):
            done = len(seen.ids[0]) - len(rows[0])
            rest = [*want[done:], -1, -1][:2]
            # the next token as second choice; the one after it, first choice, only when an odd number is written
            table = torch.tensor([[[(rest[0] + 1) % VOCAB, rest[0]], [rest[1] if done % 2 else -1, -1]]])
            return fill(tree, table)

    found = generate(made, rows, Known(rows, [want], 2, 2), 9, tree=Tree.of([(0,), (1, 0)]))
    assert found.tokens == [want]
    assert found.acceptance.right[0, 0] == 0 and found.acceptance.rate[0, 1] == 1 and found.acceptance.rate[1, 0] == 1
    assert found.acceptance.asked[0, 0] == found.steps - 1  # the last step has one token left to write
    assert math.isnan(found.acceptance.rate[1, 1])


def test_texts_end_at_their_own_stops_and_are_told_as_they_are_written():
    made = model("gqa").double()
    rows = prompts(VOCAB)
    want = greedy(made, rows)
    stop = {want[0][3], want[1][6]}
    cut = [text[: next((i + 1 for i, token in enumerate(text) if token in stop), NEW)] for text in want]
    told = [[] for _ in rows]
    drafter = Half(rows, want)
    found = generate(
        made, rows, drafter, NEW, tree=Tree.full([3, 2]), stop=stop, on_tokens=lambda i, new: told[i].extend(new)
    )
    assert found.tokens == cut == told and len({*map(len, cut)}) > 1


def test_sampled_text_is_the_same_whatever_is_drafted():
    made = model("gqa").double()
    rows = prompts(VOCAB)
    options = {"sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 3}
    plain = generate(made, rows, None, NEW, **options).tokens
    assert generate(made, rows[1:2], None, NEW, **options | {"seed": 4}).tokens == plain[1:2]
    found = generate(made, rows, Half(rows, plain), NEW, tree=Tree.full([3, 2]), **options)
    assert found.tokens == plain and found.tokens_per_step > 1.2
    assert generate(made, rows, None, NEW, **options | {"seed": 9}).tokens != plain


def test_sampled_tokens_follow_the_models_distribution():
    """Three tokens of a vocabulary of five, 6,000 sequences, against the products of the model's own probabilities."""
    made = model({"specs": "gqa(kv_heads=2)"}, vocab_size=5, num_hidden_layers=1, pad_token_id=0).double()
    count = 6000
    found = generate(
        made,
        [[1, 2, 3]] * count,
        RandomDrafter(5, 2, 2),
        3,
        tree=Tree.full([2, 2]),
        sample=True,
        temperature=1.5,
        stop=(),
    )
    assert found.tokens_per_step > 1.1
    seen = torch.bincount((torch.tensor(found.tokens) * torch.tensor([25, 5, 1])).sum(-1), minlength=125).double()
    texts = torch.cartesian_prod(*[torch.arange(5)] * 3)
    ids = torch.cat([torch.tensor([[1, 2, 3]]).expand(125, 3), texts], 1)
    with torch.no_grad():
        logs = (made(ids, use_cache=False).logits[:, 2:5] / 1.5).log_softmax(-1)
    want = logs.gather(-1, texts[..., None]).sum((1, 2)).exp() * count
    big = want > 5
    chi = ((seen - want)[big] ** 2 / want[big]).sum()
    freedom = int(big.sum()) - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom)


def test_typical_acceptance_without_a_bound_takes_every_draft():
    made = model("gqa").double()
    rows = prompts(VOCAB)
    drafter = RandomDrafter(VOCAB, depth=3, width=1)
    found = generate(made, rows, drafter, 13, tree=Tree.chain(3), typical=Typical(0.0, 0.0), stop=())
    assert found.tokens_per_step == 4.0 and all(len(text) == 13 for text in found.tokens)
    strict = Typical(1.0, float(VOCAB))
    assert generate(made, rows, drafter, 13, tree=Tree.chain(3), typical=strict).tokens == greedy(made, rows, 13)


def test_pinned_rows_keep_sequences_in_step():
    made = model({"specs": "gqa(kv_heads=2) + window(size=4, first=2)"}).double()
    rows = prompts(VOCAB)
    want = greedy(made, rows)
    assert generate(made, rows, Half(rows, want), NEW, tree=Tree.full([3, 2])).tokens == want


def test_lookup_copies_what_followed_the_same_words():
    seen = Seen([[1, 2, 3, 9, 8, 2, 3, 7, 6, 5, 2, 3], [4, 5, 6]], torch.zeros(2, 1))
    tree = Tree.of([(0, 0, 0), (1, 0), (0, 1)])
    assert tree.paths[1:] == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    assert PromptLookup(width=2).draft(seen, tree).tolist() == [[7, 9, 6, -1, 8, 5], [-1] * 6]
    longer = Seen([[1, 2, 7, 0, 2, 5, 1, 2]], torch.zeros(1, 1))  # the pair stood earlier than the single word
    assert PromptLookup().draft(longer, Tree.of([(0,), (1,)])).tolist() == [[7, 5]]
    with pytest.raises(ValueError, match="ngram=1"):
        PromptLookup(ngram=1, least=2)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"typical": True}, "typical=True; manyheads.decode.Typical"),
        ({"stop": 5}, "stop=5; tokens that end a text are a list"),
        ({"stop": "</s>"}, "stop='</s>'; tokens"),
        ({"stop": torch.tensor([5])}, "stop=.*tensor.*; tokens"),
        ({"sample": True, "seed": 1.5}, "seed is a whole number, not 1.5"),
        ({"sample": True, "temperature": math.nan}, "temperature=nan must be positive"),
        ({"sample": True, "top_p": "most"}, "top_p='most' in"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, why):
    with pytest.raises((TypeError, ValueError), match=why):
        generate(model("gqa"), [[1, 2]], None, 3, **options)


def test_what_does_not_fit_is_refused():
    made = model("gqa")
    for rows, why in (([], "no prompts"), ([[]], "prompt 1 is empty"), ([[1], [VOCAB]], f"token {VOCAB} of prompt 2")):
        with pytest.raises(ValueError, match=why):
            generate(made, rows)
    with pytest.raises(ValueError, match="padding \\(0\\) on the left"):
        generate(made, torch.ones(1, 3, dtype=torch.long), attention_mask=torch.tensor([[1, 1, 0]]))
    with pytest.raises(ValueError, match="depth 4 and 1 choices, where the drafter has 3 and 3"):
        generate(made, [[1]], RandomDrafter(VOCAB), tree=Tree.chain(4))
    with pytest.raises(ValueError, match="tokens that the model does not know"):
        generate(made, [[1]], RandomDrafter(10**6), tree=Tree.chain(2))
    with pytest.raises(ValueError, match="drafts cannot be taken back"):
        generate(model("mtla"), [[1, 2]], RandomDrafter(VOCAB))
    assert len(generate(model("mtla"), [[1, 2]], None, 3).tokens[0]) == 3


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (torch.ones(1, 3), r"prompt 1 is torch.float32 \[3\]"),
        (torch.ones(1, 3, dtype=torch.bool), "prompt 1 is torch.bool"),
        (torch.ones(1, 2, 3, dtype=torch.long), r"prompt 1 is torch.int64 \[2, 3\]"),
        (torch.tensor(3), r"a tensor \[B, T\]"),
        ([[1], [1.5]], "prompt 2 is torch.float32"),
        ([1, 2], r"prompt 1 is torch.int64 \[\]"),
        ([[[1]]], r"prompt 1 is torch.int64 \[1, 1\]"),
        ("text", "prompts are lists of tokens"),
        (None, "prompts are lists of tokens"),
        (torch.ones(0, 3, dtype=torch.long), "no prompts"),
    ],
)
def test_prompts_that_are_no_tokens_are_refused(ids, why):
    with pytest.raises(ValueError, match=why):
        generate(model("gqa"), ids, None, 3)


def test_what_is_no_model_and_no_drafter_is_refused():
    for wrong, why in ((torch.nn.Linear(2, 2), "Linear"), (None, "NoneType"), ("gpt2", "str")):
        with pytest.raises(TypeError, match=f"decoding takes a model of transformers .* not a {why}"):
            generate(wrong, [[1]])
    made = model("gqa")
    for wrong in ("lookup", PromptLookup):
        with pytest.raises(TypeError, match="is no drafter; manyheads"):
            generate(made, [[1]], wrong)
    for wrong in ("chain", None, [(0,)]):
        with pytest.raises(ValueError, match="a Tree or 'auto'"):
            generate(made, [[1]], PromptLookup(), tree=wrong)
    with pytest.raises(TypeError, match="has no encoder"):
        generate(made, [[1]], encoder={})


@pytest.mark.parametrize("kind", sorted(LearnedDrafter.kinds))
def test_a_drafter_for_a_model_of_other_sizes_is_refused(kind):
    drafter = LearnedDrafter.kinds[kind](model("gqa"), heads=2, tokens=torch.arange(9))
    for other, why in (
        (model("gqa", hidden_size=64), "width 32; that of this one is 64"),
        (model("gqa", vocab_size=99), f"vocabulary {VOCAB}; that of this one is 99"),
        (model("gqa").double(), "dtype torch.float32; that of this one is torch.float64"),
    ):
        with pytest.raises(ValueError, match=why):
            generate(other, [[1, 2]], drafter)
    found = generate(model("gqa").double(), [[1, 2]], drafter.double(), 9, tree=Tree.chain(2))  # its words follow
    assert len(found.tokens[0]) == 9


@pytest.mark.parametrize(("row", "token"), [([5, -1], -1), ([5, 10**6], 10**6)])
def test_a_token_outside_the_vocabulary_is_named(row, token):
    with pytest.raises(ValueError, match=f"token {token} of prompt 1 is outside"):
        generate(model("gqa"), [row], None, 3)
