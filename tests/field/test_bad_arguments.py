"""Plain arguments that do not fit: one sentence names the argument, its value and what would fit, before any work."""

import numpy as np
import pytest
import torch
from torch import nn

import manyheads as mh
from manyheads.stack import ManyheadsConfig
from manyheads.stack.residual import to_delta

X = torch.randn(2, 6, 64)
GIVEN = dict(specs="gqa", dim=64, heads=8, layers=2)


def decoder(vocab=50, **more):
    return mh.Decoder(vocab, **{**GIVEN, **more})


def config(**more):
    return ManyheadsConfig(**{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, **more})


MODELS = [
    (lambda: decoder(0), "vocab is at least 1, not 0"),
    (lambda: decoder(-1), "vocab is at least 1, not -1"),
    (lambda: mh.Encoder(**GIVEN, vocab=0), "vocab is at least 1, not 0"),
    (lambda: decoder(dim=0), "dim is at least 1, not 0"),
    (lambda: decoder(dim="64"), "dim is a whole number, not '64'"),
    (lambda: decoder(heads=0), "heads is at least 1, not 0"),
    (lambda: decoder(heads=[8, 0]), "heads is at least 1, not 0"),
    (lambda: decoder(heads=None), "heads is a whole number, not None"),
    (lambda: decoder(heads="step()"), "'step' needs early and late"),
    (lambda: decoder(layers=0), "layers is at least 1, not 0"),
    (lambda: decoder(loops=1.5), "loops is a whole number, not 1.5"),
    (lambda: decoder(meta=-1), "meta is at least 0, not -1"),
    (lambda: decoder(hidden=0), "hidden is at least 1, not 0"),
    (lambda: decoder(dropout=1.0), "dropout is a number of at least 0 and below 1, not 1.0"),
    (lambda: decoder(residual=None), "residual is a line of text such as .*, not None"),
    (lambda: decoder(ffn=None), "ffn is a line of text such as .*, not None"),
    (lambda: decoder(kv_source=[None, "a"]), "kv_source is a whole number, not 'a'"),
    (lambda: mh.Attention("mla(q_rank=-1)", 64, 8), "mla: q_rank is at least 0, not -1"),
    (lambda: mh.explain("gqa", 1.5, 3), "queries is a whole number, not 1.5"),
    (lambda: decoder(specs=None), "a spec is a line of text .*, not NoneType"),
    (lambda: decoder(ffn="moe(experts=0)"), "experts is at least 1, not 0"),
    (lambda: decoder(ffn="moe(experts=2, top=3)"), "top=3 of experts=2; top may be 1 to 2"),
    (lambda: config(num_attention_heads=0), "num_attention_heads is at least 1, not 0"),
    (lambda: config(heads=0), "heads is at least 1, not 0"),
    (lambda: config(hidden_size=0), "hidden_size is at least 1, not 0"),
    (lambda: config(num_hidden_layers=0), "num_hidden_layers is at least 1, not 0"),
    (lambda: config(vocab_size=2.5), "vocab_size is a whole number, not 2.5"),
    (lambda: config(loops=0), "loops is at least 1, not 0"),
    (lambda: mh.Attention("gqa", "64", 8), "dim is a whole number, not '64'"),
    (lambda: mh.Attention("gqa", 64, 2.5), "heads is a whole number, not 2.5"),
    (lambda: mh.Attention("gqa", 64, True), "heads is a whole number, not True"),
    (lambda: mh.Attention("gqa", 64, 8, dropout=-0.1), "dropout is a number of at least 0"),
    (lambda: mh.Spec.parse("gqa").cost(0, 8), "dim is at least 1, not 0"),
    (lambda: mh.Site(layer=5, layers=2), "layer=5 of layers=2; it may be 0 to 1"),
    (lambda: mh.Site(layer=-1), "layer is at least 0, not -1"),
    (lambda: mh.Site(layers=0), "layers is at least 1, not 0"),
    (lambda: mh.Site(cross=True, context_dim=0), "context_dim is at least 1, not 0"),
    (lambda: mh.Cache().rollback(-2), "tokens is at least 0, not -2"),
    (lambda: mh.adopt(nn.Linear(3, 3)), "a Linear is not a transformers model"),
    (lambda: to_delta(decoder(residual="mhar")), "the residual is mhar already"),
    (lambda: to_delta(decoder(residual="mhar(form=delta)")), "the residual is .*delta.* already"),
]


@pytest.mark.parametrize(("make", "said"), MODELS, ids=[said for _, said in MODELS])
def test_a_number_that_does_not_fit_is_named_with_what_would(make, said):
    with pytest.raises(ValueError, match=said) as error:
        make()
    assert len(str(error.value).splitlines()) in (1, 3), "one sentence, and where there is a line what points into it"


@pytest.mark.parametrize("make", [lambda: mh.Attention("gqa", 64, 8), lambda: mh.Stack("gqa", 64, 8, 2)])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mask": [[True] * 6]}, "mask is a bool tensor .* not a list"),
        ({"cache": {}}, "cache is a manyheads.Cache, .* not a dict"),
        ({"positions": [0]}, "positions is a tensor .* not a list"),
        ({"links": {}}, "links is a manyheads.Links, not a dict"),
        ({"context": [1.0]}, "context is a tensor .* not a list"),
    ],
)
def test_an_argument_of_another_kind_is_named(make, given, said):
    with pytest.raises(ValueError, match=said):
        make()(X, **given)


@pytest.mark.parametrize("spec", ["gqa", "retnet", "mamba", "moa", "gda", "hymba", "sqa", "mla"])
def test_a_batch_of_nothing_is_refused_alike(spec):
    with pytest.raises(ValueError, match="x is a batch of 0; a pass has one sequence or more"):
        mh.Attention(spec, 64, 8)(X[:0])


def test_a_batch_of_nothing_is_refused_by_models():
    for model in (decoder(), decoder(meta=2, residual="mhar")):
        with pytest.raises(ValueError, match="x is a batch of 0"):
            model(torch.zeros(0, 3, dtype=torch.long))


def test_whole_numbers_of_other_libraries_are_whole_numbers():
    assert mh.Attention("gqa", np.int64(64), np.int64(8))(X).shape == X.shape


def test_cross_attention_is_numbered_after_the_other_layers():
    assert mh.Site(3, 2, cross=True).layer == 3
    with pytest.raises(ValueError, match="it may be 0 to 3"):
        mh.Site(4, 2, cross=True)
