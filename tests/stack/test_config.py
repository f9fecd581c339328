import json

import pytest
from tests.stack.tiny import BODIES, config
from transformers import AutoConfig, LlamaConfig

from manyheads.core.part import OptionError
from manyheads.stack import ManyheadsConfig


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("case", ["mla+moh", "shared", "mixed"])
def test_round_trip(tmp_path, case, body):
    one = config(case, body)
    one.notes = {"source": "here", "budget": 0.5}
    one.save_pretrained(tmp_path)
    json.loads((tmp_path / "config.json").read_text())
    two = AutoConfig.from_pretrained(tmp_path)
    assert type(two) is ManyheadsConfig and type(two.base) is type(one.base)
    mine, yours = one.to_dict(), two.to_dict()
    changed = {name for name in mine.keys() | yours.keys() if mine.get(name) != yours.get(name)}
    assert changed <= {"_name_or_path", "architectures", "transformers_version"}


def test_one_line_or_one_a_layer():
    one = ManyheadsConfig(specs="gqa(kv_heads=2)", num_hidden_layers=3, hidden_size=32, num_attention_heads=4)
    assert one.specs == ["gqa(kv_heads=2)"] * 3 and one.heads == [4, 4, 4] and one.kv_source == [None] * 3
    two = ManyheadsConfig(specs=["gqa", "mla"], num_hidden_layers=2, heads=[4, 8], hidden_size=32)
    assert two.specs == ["gqa", "mla"] and two.heads == [4, 8]


def test_a_wrapper_answers_for_its_base():
    one = config("gqa", "llama")
    assert one.hidden_size == 32 and one.vocab_size == one.base.vocab_size and one.num_hidden_layers == 4
    assert not hasattr(one, "rope_parameters") and "hidden_size" not in one.to_dict()
    one.use_cache = False  # what the user says on top of it holds
    assert one.use_cache is False
    assert one.get_text_config() is one.base


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    "case, said",
    [
        ({"specs": ["gqa"] * 3}, "3 specs for 4 layers"),
        ({"specs": "gqa(kv_heads=3)"}, "layer 0: gqa: 4 query heads cannot share kv_heads=3"),
        ({"specs": ["gqa", "gqa", "gqa", "gqq"]}, "layer 3: .*no part 'gqq'"),
        ({"specs": "gqa", "kv_source": [None, 0]}, "2 sources for 4 layers"),
        ({"specs": "gqa", "kv_source": [None, 0, 1, None]}, "layer 2 cannot read the rows of layer 1"),
        ({"specs": "gqa", "heads": [4, 4]}, "2 head counts for 4 layers"),
        ({"specs": "mla + qk-norm"}, "layer 0: 'qk-norm' needs 'head keys'"),
    ],
)
def test_refusals(case, said, body):
    with pytest.raises(ValueError, match=said):
        config(case, body)


def test_other_refusals():
    with pytest.raises(OptionError, match="no feed-forward 'relu'"):
        ManyheadsConfig(ffn="relu")
    base = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    with pytest.raises(ValueError, match="hidden_size=64: the base config says 32"):
        ManyheadsConfig(base, hidden_size=64)
    assert ManyheadsConfig(base, hidden_size=32).hidden_size == 32
