"""Prefix sharing for preference pairs, arXiv 2410.20305: one row, the prompt once, nothing else changed."""

import itertools
import math
import random

import pytest
import torch
from tests.stack import tiny
from transformers import LlamaConfig, LlamaForCausalLM

from manyheads.stack import Decoder
from manyheads.stack.pairs import IGNORED, PairCollator, check, dpo_loss, dpo_step, pack

VOCAB = 61
SHAPES = [(1, 3, 2), (5, 0, 1), (4, 2, 1), (2, 3, 3), (6, 1, 5)]
"""P, C, R."""


def ids(count):
    return torch.randint(1, VOCAB, (count,)).tolist()


def groups(shapes=SHAPES):
    return [(ids(p), (ids(c), ids(r))) for p, c, r in shapes]


def llama(dtype=torch.float64):
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def models():
    yield "llama", llama()
    yield "own decoder", tiny.model("gqa", "own").double()
    yield "mla in a llama", tiny.model("mla-expanded", "llama").double()
    yield "alibi", tiny.model({"specs": "gqa + alibi"}, "own").double()


def apart(model, pairs):
    """Log-probabilities of each answer from a pass of its own."""

    def one(prompt, answer):
        if not answer:
            return next(model.parameters()).new_zeros(())
        lp = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0].log_softmax(-1)
        return lp[len(prompt) - 1 : -1].gather(-1, torch.tensor(answer)[:, None]).sum()

    return torch.stack([torch.stack([one(prompt, answer) for answer in answers]) for prompt, answers in pairs])


@pytest.mark.parametrize("name, model", [pytest.param(*each, id=each[0]) for each in models()])
def test_packed_pairs_have_the_loss_and_the_gradients_of_separate_passes(name, model):
    pairs, near = groups(), 1e-5 if "llama" in name else 1e-9  # a Llama's norms are computed in single precision
    reference = torch.randn(len(pairs), 2, dtype=torch.float64)
    want = apart(model, pairs)
    dpo_loss(want, reference, beta=0.5).backward()
    grads = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    for options in ({}, {"length": 24}, {"length": 40, "multiple": 16}):
        packed = pack(pairs, **options)
        model.zero_grad()
        got = packed.log_probs(model(**packed.inputs(), use_cache=False).logits)
        torch.testing.assert_close(got, want, atol=near, rtol=near)
        dpo_step(model, packed, reference, beta=0.5).backward()
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad, grads[key], atol=near, rtol=near, msg=lambda text, key=key: f"{key}: {text}"
            )


def test_single_precision_agrees_within_1e_5():
    for model in (llama(torch.float32), tiny.model("gqa", "own")):
        pairs = groups()
        packed = pack(pairs)
        got = packed.log_probs(model(**packed.inputs(), use_cache=False).logits)
        torch.testing.assert_close(got, apart(model, pairs), atol=1e-5, rtol=1e-5)


def test_windows_reach_back_by_position():
    decoder = Decoder(VOCAB, "gqa + window(size=3)", 24, 4, layers=2, std=0.3).double()
    pairs = groups()
    packed = pack(pairs)
    got = packed.log_probs(decoder(packed.input_ids, mask=packed.mask))
    want = [[_alone(decoder, prompt, answer) for answer in answers] for prompt, answers in pairs]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-9, rtol=1e-9)


@torch.no_grad()
def _alone(decoder, prompt, answer):
    lp = decoder(torch.tensor([[*prompt, *answer]]))[0].log_softmax(-1)[len(prompt) - 1 : -1]
    return lp.gather(-1, torch.tensor(answer)[:, None].long().view(-1, 1)).sum().item() if answer else 0.0


def test_the_mask_by_brute_force_and_by_count():
    for p, c, r in SHAPES:
        packed = pack(groups([(p, c, r)]))
        mask = packed.mask.tile()[0, 0]
        n, last, start = p + c + 1 + r, p - 1, p + c
        brute = [[j <= i and not (i >= start and last <= j < start) for j in range(n)] for i in range(n)]
        assert mask.tolist() == brute
        counted = p * (p + 1) // 2 + c * p + c * (c + 1) // 2 + (r + 1) * (p - 1) + (r + 1) * (r + 2) // 2
        assert int(mask.sum()) == counted and packed.input_ids.shape == (1, n)
        assert packed.position_ids[0].tolist() == [*range(p + c), *range(p - 1, p + r)]


def test_answers_do_not_hear_of_each_other():
    model, (prompt, (chosen, rejected)) = llama(), groups([(4, 3, 5)])[0]
    other = [1 + token % (VOCAB - 1) for token in chosen]

    def run(*answers):
        packed = pack([(prompt, answers)])
        embedded = model.get_input_embeddings()(packed.input_ids).detach().requires_grad_()
        out = model(**packed.inputs() | {"input_ids": None}, inputs_embeds=embedded, output_hidden_states=True)
        return packed.log_probs(out.logits)[0], embedded, out.hidden_states

    lp, embedded, states = run(chosen, rejected)
    assert torch.equal(run(other, rejected)[0][1], lp[1])
    torch.testing.assert_close(run(rejected, chosen)[0].flip(0), lp)
    (gradient,) = torch.autograd.grad(lp[1], embedded, retain_graph=True)
    assert (gradient[0, 3:7] == 0).all() and (gradient[0, 7:-1] != 0).any()
    (gradient,) = torch.autograd.grad(lp[0], embedded)
    assert (gradient[0, 7:] == 0).all()
    for state in states:  # the copy is what the original is
        torch.testing.assert_close(state[0, 7], state[0, 3])


def test_without_the_copy_the_first_rejected_token_would_be_wrong():
    model, (prompt, (chosen, rejected)) = llama(), groups([(4, 3, 2)])[0]
    naive = model(torch.tensor([[*prompt, *chosen, *rejected]])).logits[0, 6].log_softmax(-1)[rejected[0]]
    right = apart(model, [(prompt, (rejected[:1],))])[0, 0]
    assert abs((naive - right).item()) > 1e-3


def test_order_and_padding_change_no_loss():
    model, pairs = llama(), groups()
    plain = pack(pairs)
    want = plain.log_probs(model(**plain.inputs()).logits)
    for order in itertools.islice(itertools.permutations(range(5)), 1, 120, 40):
        packed = pack([pairs[index] for index in order], length=60, multiple=64, pad=3)
        assert packed.input_ids.shape[1] == 64 and packed.pairs == 5
        torch.testing.assert_close(packed.log_probs(model(**packed.inputs()).logits), want[list(order)])
        assert (packed.labels[packed.pair < 0] == IGNORED).all()


def test_more_than_two_answers():
    model = llama()
    sets = [(ids(3), (ids(2), ids(4), ids(1), ids(3))), (ids(5), (ids(1), ids(1), ids(2), ids(2)))]
    packed = pack(sets)
    torch.testing.assert_close(packed.log_probs(model(**packed.inputs()).logits), apart(model, sets))


def test_equal_answers_and_an_unchanged_policy_lose_log_2():
    model, (prompt, (answer, _)) = llama(), groups([(4, 3, 2)])[0]
    packed = PairCollator()([{"prompt": prompt, "chosen": answer, "rejected": answer}])
    lp = packed.log_probs(model(**packed.inputs()).logits)
    torch.testing.assert_close(lp[0, 0], lp[0, 1])
    assert math.isclose(dpo_step(model, packed, lp.detach()).item(), math.log(2), abs_tol=1e-9)


def test_rows_are_filled_first_fit_decreasing():
    sizes = random.Random(0).sample(range(8, 30), 12)
    pairs = groups([(size // 2, 3, size - size // 2 - 4) for size in sizes])
    packed = pack(pairs, length=40)
    counts = [torch.unique(row[row >= 0], return_counts=True) for row in packed.pair]
    assert sorted(torch.cat([index for index, _ in counts]).tolist()) == [*range(12)]
    assert all(int(count.sum()) <= 40 for _, count in counts) and len(packed.input_ids) < 12


def test_what_cannot_be_packed_is_refused():
    for sets, options, says in (
        ([], {}, "no pairs to pack"), ([([], ([1], [2]))], {}, "pair 1 has an empty prompt"),
        ([([1], ([1], [2])), ([1], ([1],))], {}, "pair 2 has 1 answers; the first has 2"),
        ([([1, 2], ([1], [2]))], {"length": 4}, "pair 1 has 5 tokens; a row has 4"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            pack(sets, **options)
    for spec, says in (
        ("mtla", "mtla reads neighbouring"), ("gqa + conv", "keeps a state"),
        ("gqa + window(size=3)", "places in the row"), ("gqa + retention", "keeps a state"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            check(tiny.model({"specs": spec}))
    with pytest.raises(ValueError, match="policy has shape"):
        dpo_loss(torch.zeros(3), torch.zeros(3, 2))
