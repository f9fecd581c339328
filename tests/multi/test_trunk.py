"""Trunks by the names of pretrained models."""

import sys
import types

import pytest
import torch
from torch import nn

from manyheads.multi import MultiHead, load_trunk


def test_a_folder_of_transformers_is_a_trunk_whatever_head_was_saved_with_it(tmp_path):
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    ids = torch.randint(30, (2, 5))
    for kind, config in ((BertForMaskedLM, BertConfig), (LlamaForCausalLM, LlamaConfig)):
        saved = kind(config(**sizes)).eval()
        saved.save_pretrained(tmp_path / kind.__name__)
        net = MultiHead(str(tmp_path / kind.__name__), {"y": "tokens(classes=3)"}).eval()
        assert net.widths == {"y": 16}
        hidden = saved.base_model(ids).last_hidden_state
        torch.testing.assert_close(net(input_ids=ids).outputs["y"], net.net("y")(hidden))
        net.train()(input_ids=ids, targets={"y": torch.ones(2, 5)}).loss.backward()


def test_names_that_lead_nowhere(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        MultiHead(str(tmp_path / "nothing"), {"y": "regression"})
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_trunk(str(tmp_path))


def test_timm_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"timm:resnet18 needs timm: pip install 'manyheads\[timm\]'"):
        load_trunk("timm:resnet18")
    library, asked = types.ModuleType("timm"), []

    class Net(nn.Module):
        num_features = 6

        def forward(self, x):
            return x.flatten(1)[:, :6]

    library.create_model = lambda name, **options: asked.append((name, options)) or Net()
    monkeypatch.setitem(sys.modules, "timm", library)
    net = MultiHead("timm:resnet18", {"y": "classification(classes=2)"})
    assert asked == [("resnet18", {"pretrained": True, "num_classes": 0})]
    assert net(torch.randn(2, 3, 4, 4)).outputs["y"].shape == (2, 2)


@pytest.mark.slow
def test_the_embedded_model(smollm2_gguf):
    net = MultiHead("smollm2", {"y": "regression(pool=last)"}).eval()
    assert net.widths == {"y": 576} and net(input_ids=torch.tensor([[1, 2, 3]])).outputs["y"].shape == (1, 1)
