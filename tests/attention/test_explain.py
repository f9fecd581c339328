"""What `explain` says is what the layer does."""

import pytest

import manyheads as mh
from manyheads.testing import singles


def said(explanation):
    return {part: what for _, part, what in explanation.stages}


def test_a_decoding_step_of_a_latent_layer():
    step = mh.explain("mla(rank=128, rope_dim=32) + kha", 1, 2048)
    assert "caches latent 1 x 160; absorbed keys" in said(step)["mla"]
    assert said(step)["kha"] == "moved onto queries and head outputs"
    assert step.plan.kernel == "sdpa" and step.cache_bytes == 2048 * 160 * 4
    whole = mh.explain("mla(rank=128, rope_dim=32) + kha", 2048)
    assert "expanded keys" in said(whole)["mla"] and "as they are read" in said(whole)["kha"]
    assert whole.plan.kernel == "sdpa" and whole.flops > 100 * step.flops


def test_explicit_scores_say_why_no_faster_kernel_applies():
    slow = mh.explain("gqa + talking_heads + alibi", 512)
    assert slow.plan.kernel == "tiled" and "works on the scores" in dict(slow.plan.refused)["sdpa"]
    assert said(slow)["talking_heads"].startswith("works on explicit scores")
    assert said(slow)["alibi"] == "adds a bias to the scores"
    text = str(slow)
    assert "not sdpa: " in text and "512 queries" in text


def test_states_and_splits_are_named():
    assert "keeps the state cca.qk" in said(mh.explain("cca", 1, 10))["cca"]
    assert "attention problems" in said(mh.explain("gda", 64))["differential"]


@pytest.mark.parametrize("spec", singles())
def test_every_part_is_explained(spec):
    for queries, keys in ((1, 9), (40, 40)):
        explanation = mh.explain(spec, queries, keys, dim=24, heads=4)
        assert all(what for _, _, what in explanation.stages) and explanation.plan.kernel in str(explanation)


def test_what_disagrees_is_said():
    with pytest.raises(ValueError, match="5 queries over 4 keys; 1 ≤ queries ≤ keys"):
        mh.explain("gqa", 5, 4)
    with pytest.raises(mh.SpecError, match="nearest legal"):
        mh.explain("mla + qk-norm", 5)
