"""An adopted model as our own decoder."""

import pytest
import torch
from tests.convert.test_adopt import COMMON
from tests.stack.tiny import greedy
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from manyheads.convert.adopt import AdoptError, adopt
from manyheads.convert.own import to_own
from manyheads.stack import to_delta

CASES = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True}),
    "llama, untied": (LlamaConfig, {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
    "mistral": (MistralConfig, {"sliding_window": 5}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
}


def adopted(kind, **options):
    torch.manual_seed(0)
    return adopt(AutoModelForCausalLM.from_config(kind(**COMMON, **options)).eval())


@pytest.mark.parametrize("case", CASES)
def test_logits_stay(tmp_path, case):
    kind, options = CASES[case]
    theirs = adopted(kind, **options)
    ours = to_own(theirs)
    inputs = {"input_ids": torch.randint(3, 61, (2, 12))}
    with torch.no_grad():
        logits = ours(**inputs).logits
        torch.testing.assert_close(logits, theirs(**inputs).logits, atol=1e-5, rtol=1e-5)
        assert torch.equal(greedy(ours, inputs), greedy(theirs, inputs))
        assert (
            ours.model.decoder.head.weight is ours.model.decoder.embedding.weight
        ) == ours.config.tie_word_embeddings
        assert ours.model.decoder.embedding.weight.data_ptr() == theirs.get_input_embeddings().weight.data_ptr()
        assert torch.equal(to_delta(ours, heads=4)(**inputs).logits, logits)
        ours.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(again(**inputs).logits, logits) and again.config.residual == "mhar(heads=4, form=delta)"
    assert to_own(ours) is ours


def test_what_has_no_place():
    with pytest.raises(AdoptError, match=r"no place for all of a LlamaForCausalLM: .*ffn.down_proj.bias"):
        to_own(adopted(LlamaConfig, mlp_bias=True))
    with pytest.raises(AdoptError, match="its feed-forward is a 'gelu'"):
        to_own(adopted(LlamaConfig, hidden_act="gelu"))
