"""Choosing heads: groups, costs, targets, limits, rounds."""

import math

import pytest
import torch
from tests.convert.tiny import tokens
from tests.edit.models import grouped, multi_head

from manyheads.edit import Step, mask, prune, select
from manyheads.edit.prune import parameters
from manyheads.inspect.measures import HeadTable, Moved, ablation, next_token_loss
from manyheads.stack import ManyheadsConfig, ManyheadsForCausalLM

MEASURES = ("gradient", "gradient-by-layer", "ablation", "output", "random", "greedy")


def loss(made, ids, heads):
    if not heads:
        return next_token_loss(made(ids), ids).mean().item()
    with torch.no_grad(), mask(made, heads):
        return next_token_loss(made(ids), ids).mean().item()


@pytest.mark.parametrize("by", MEASURES)
@pytest.mark.parametrize("of", ["heads", "cache"])
def test_every_measure_reaches_the_share_under_the_group_rule(by, of):
    made, ids = grouped(layers=3), tokens(2, 12)
    choice = select(made, ids, keep=0.7, of=of, by=by)
    small = prune(made, choice)
    counts, keys = small.config.heads, [layer.layout.kv for layer in small.attentions]
    assert choice.kept == pytest.approx(sum(counts) / 18 if of == "heads" else sum(keys) / 6)
    assert 0.5 <= choice.kept <= 0.7 and all(heads % kv == 0 for heads, kv in zip(counts, keys, strict=True))


def test_a_share_of_parameters_is_counted_over_the_model():
    made, ids = grouped(), tokens(2, 12)
    choice = select(made, ids, keep=0.9, of="params")
    assert choice.kept == pytest.approx(parameters(prune(made, choice)) / parameters(made)) and choice.kept <= 0.9
    assert choice.kept == choice.steps[-1].kept and choice == select(made, ids, keep=0.9, of="params")


def test_scores_are_weighed_against_what_goes():
    """A group of three saves three heads and a key head; one of each group saves two heads."""
    made = grouped(layers=1)
    table = HeadTable("mine", {0: torch.tensor([1.0, 1.0, 1.0, 0.4, 2.0, 2.0], dtype=torch.float64)})
    (first,) = select(made, tokens(2), keep=0.7, by=table).steps
    assert first == Step(0, (0, 3), pytest.approx(0.7), pytest.approx(4 / 6))
    (first,) = select(made, tokens(2), keep=0.7, of="cache", by=table).steps
    assert first.heads == (0, 1, 2) and first.kept == 0.5
    single = select(made, tokens(2), keep=0.7, by=table, regroup="map")
    assert single.heads == {0: [0, 3]} and [step.heads for step in single.steps] == [(3,), (0,)]


def test_random_is_by_seed():
    made, ids = multi_head(layers=3), tokens(2)
    first, again, other = (select(made, ids, keep=0.5, by="random", seed=seed).heads for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("by", ["gradient", "greedy"])
@pytest.mark.parametrize("again", [None, 2])
def test_a_limit_of_perplexity_is_kept_and_used(by, again):
    made, ids = multi_head(layers=3), tokens(4)
    choice = select(made, ids, limit=1.05, by=by, again=again, tries=None)
    base = loss(made, ids, {})
    assert choice and choice.loss == pytest.approx(base)
    assert choice.loss_masked == pytest.approx(loss(made, ids, choice.heads))
    assert choice.loss_masked <= base + math.log(1.05)


def test_nothing_goes_where_the_first_head_is_too_much():
    made, ids = multi_head(), tokens(4)
    harm = ablation(made, ids)
    assert max(row.max() for row in harm.values()) > 0
    last_first = HeadTable("mine", {layer: -row for layer, row in harm.items()})
    assert not select(made, ids, limit=1.0, by=last_first, again=1)


def test_greedy_takes_the_step_with_which_the_loss_is_lowest():
    made, ids = multi_head(), tokens(4)
    each = {(layer, head): loss(made, ids, {layer: [head]}) for layer in range(2) for head in range(4)}
    best = min(each, key=each.__getitem__)
    first, second = select(made, ids, keep=0.75, by="greedy", tries=None, loss=next_token_loss).steps
    assert (first.layer, *first.heads) == best and first.score == pytest.approx(each[best] - loss(made, ids, {}))
    rest = [key for key in each if key != best]
    with_best = {key: loss(made, ids, both(best, key)) for key in rest}
    assert (second.layer, *second.heads) == min(with_best, key=with_best.__getitem__)


def test_greedy_takes_the_step_with_which_predictions_move_least():
    made, ids = multi_head(), tokens(4)

    def logs(heads):
        with torch.no_grad(), mask(made, heads):
            return made(ids).logits.double().log_softmax(-1)

    own = made(ids).logits.detach().double().log_softmax(-1)
    each = {
        (layer, head): (own.exp() * (own - logs({layer: [head]}))).sum(-1).mean().item()
        for layer in range(2) for head in range(4)
    }  # fmt: skip
    choice = select(made, ids, keep=0.875, by="greedy", tries=None)
    (first,) = choice.steps
    assert (first.layer, *first.heads) == min(each, key=each.__getitem__)
    assert first.score == pytest.approx(min(each.values()), rel=1e-2)
    assert choice.loss_masked == pytest.approx(loss(made, ids, {first.layer: [*first.heads]}))


def test_what_has_moved_leaves_out_padding():
    made, ids = multi_head(), tokens(2, 8)
    padded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    padded["attention_mask"][1, 5:] = 0
    moved = Moved(made, [padded])
    assert moved(made(**padded), padded).abs().max() < 1e-3
    with torch.no_grad(), mask(made, {0: [1]}):
        output = made(**padded)
    before = moved(output, padded)
    output.logits[1, 5:] += 7 * torch.randn_like(output.logits[1, 5:])
    torch.testing.assert_close(moved(output, padded), before)
    assert (before > 0).all()


def both(*pairs):
    found = {}
    for layer, head in pairs:
        found.setdefault(layer, []).append(head)
    return found


def test_an_interrupted_choice_goes_on_with_the_same_steps():
    made, ids, seen = multi_head(layers=3), tokens(2), []
    whole = select(made, ids, keep=0.5, by="greedy", after_round=lambda steps: seen.append(list(steps)))
    assert [len(steps) for steps in seen] == [1, 2, 3, 4, 5, 6]
    rest = select(made, ids, keep=0.5, by="greedy", begun=seen[2])
    assert rest.heads == whole.heads and len(rest.steps) == 6


def test_it_says_whether_the_share_or_the_limit_ended_it():
    made, ids = multi_head(layers=3), tokens(2)
    by = HeadTable("mine", {layer: torch.arange(4.0) for layer in range(3)})
    share, both = select(made, ids, keep=0.75, by=by), select(made, ids, keep=0.75, limit=1e6, by=by)
    assert share.stopped == both.stopped == "keep" and share.heads == both.heads and len(share.steps) == 3
    with torch.no_grad():
        whole = made(ids).logits
    off = lambda output, ids: (output.logits - whole).square().sum((1, 2))  # grows with the first head out
    assert select(made, ids, keep=0.75, limit=1.0, by=by, loss=off).stopped == "limit"
    every = select(made, ids, limit=1e6, by=by)
    assert every.stopped == "heads" and len(every.steps) == 9
    none = select(made, ids, keep=1.0, by=by)
    assert none.stopped == "keep" and not none.steps


def test_layers_that_cannot_be_edited_stay():
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    specs = ["gqa", "retnet", "gqa"]
    made = ManyheadsForCausalLM(ManyheadsConfig(specs=specs, **sizes)).eval()
    choice = select(made, tokens(2), keep=0.7, by="random")
    assert 1 not in choice and choice.kept == pytest.approx(8 / 12)
    with pytest.raises(ValueError, match=r"out of reach.*1 layers stay as they are"):
        select(made, tokens(2), keep=0.4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give keep"), ({"keep": 1.5}, "keep=1.5"), ({"keep": 0.5, "of": "flops"}, "of='flops'"),
        ({"limit": 0.9}, "limit=0.9"), ({"keep": 0.5, "by": "magic"}, "no measure 'magic'"),
        ({"keep": 0.1}, "10 % of heads is out of reach: at least 16.67 % stay"),
        ({"keep": 0.4, "of": "cache"}, "at least 50 % stay .*whole groups"),
        ({"keep": 0.5, "at_least": 0}, "at least 1"),
        ({"keep": 0.5, "at_least": 9}, "no head may go: every layer keeps at least 9 heads, and none has more than 6"),
        ({"limit": 2.0, "at_least": 5}, "no head may go: .* in equal groups unless regroup says otherwise"),
        ({"keep": 0.5, "again": 0}, "again=0"), ({"keep": 0.2, "of": "params"}, "all that is not attention"),
        ({"keep": 0.5, "by": HeadTable("mine", {0: torch.zeros(6)})}, "mine has no number for each .* of layer 1"),
    ],
)  # fmt: skip
def test_bad_options(options, said):
    with pytest.raises(ValueError, match=said):
        select(grouped(), tokens(2), **options)
