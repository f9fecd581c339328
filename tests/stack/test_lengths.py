"""A stack that is told its longest sequence holds parts of a fixed length to it, and sizes those that name none."""

import pytest
import torch

import manyheads as mh
from manyheads.stack import ManyheadsConfig, ManyheadsForCausalLM

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
SHORT = ("super-attention(length=4)", "mhla(block=2, blocks=2)", "aft(form=full, context=4)")


@pytest.mark.parametrize("spec", SHORT)
def test_a_part_shorter_than_its_stack_is_refused(spec: str):
    with pytest.raises(ValueError, match=r"layer 0: .*16 tokens"):
        mh.Decoder(50, spec, 32, 4, 2, max_len=16)
    with pytest.raises(ValueError, match=r"layer 0: .*16 tokens"):
        ManyheadsConfig(specs=spec, max_position_embeddings=16, **SIZES)


def test_a_part_without_a_length_has_that_of_its_stack():
    model = ManyheadsForCausalLM(ManyheadsConfig(specs="super-attention", max_position_embeddings=16, **SIZES))
    assert model(torch.randint(50, (1, 16))).logits.shape == (1, 16, 50)
    with pytest.raises(ValueError, match="position 16 is beyond"):
        model(torch.randint(50, (1, 17)))


def test_meta_tokens_count():
    with pytest.raises(ValueError, match="18 tokens"):
        mh.Decoder(50, "super-attention(length=16)", 32, 4, 1, max_len=16, meta=2)
    model = mh.Decoder(50, "super-attention", 32, 4, 1, max_len=16, meta=2)
    assert model(torch.randint(50, (1, 16))).shape == (1, 16, 50)
    with pytest.raises(ValueError, match="Decoder"):
        ManyheadsConfig(meta=2, **SIZES)


def test_a_length_is_a_number_of_tokens():
    with pytest.raises(ValueError, match="max_len"):
        mh.Stack("gqa", 32, 4, 1, max_len=0)
