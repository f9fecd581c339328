"""`merge-heads`: fewer heads of those that are alike, a checkpoint that loads, nothing where it is refused."""

import json

import pytest
import torch
from tests.cli.line import refused, run, save_tiny
from transformers import AutoModelForCausalLM

from manyheads.convert.export.report import ExportError

TEXT = ["--calibrate", "4x32", "--evaluate", "2x64"]


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    """Eight heads with keys of their own, of which the last four are copies of the first."""
    folder = save_tiny(tmp_path_factory.mktemp("models") / "alike", num_key_value_heads=8)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        for name in "qkv":
            weight = getattr(layer.self_attn, f"{name}_proj").weight.data
            weight[24:] = weight[:24]
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("how", ["fitted", "mean"])
def test_copies_are_merged_into_a_stock_checkpoint(alike, how, tmp_path):
    ran = run("merge-heads", alike, "--to", "50%", "--how", how, *TEXT, "--out", tmp_path / "out", "--json")
    assert ran.code == 0, ran
    tables, _, _ = ran.out.partition(str(tmp_path))
    assert max(map(len, tables.splitlines())) <= 80
    result = ran.json
    assert result["clusters"]["0"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert result["after"]["perplexity"] == pytest.approx(result["before"]["perplexity"], rel=1e-4)
    assert all(each["merged"] < 1e-6 for each in result["errors"].values())
    assert (result["before"]["kv_bytes_per_token"], result["after"]["kv_bytes_per_token"]) == (3 * 96 * 4, 3 * 48 * 4)
    assert result["before"]["parameters"] - result["after"]["parameters"] == 3 * 4 * 48 * 24
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        got, want = (AutoModelForCausalLM.from_pretrained(each)(tokens).logits for each in (tmp_path / "out", alike))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


def test_key_and_value_heads_apart(alike, tmp_path):
    ran = run(
        "merge-heads", alike, "--to", "6", "--how", "dha", "--by", "outputs", *TEXT, "--out", tmp_path / "out", "--json"
    )
    assert ran.code == 0 and ran.json["report"]["loads_as"] == "ManyheadsForCausalLM", ran
    assert ran.json["after"]["kv_bytes_per_token"] == 3 * 72 * 4 and "key heads" in ran.out


def test_what_is_refused_leaves_nothing(alike, tmp_path, monkeypatch):
    line = ["merge-heads", alike, *TEXT, "--out", tmp_path / "no"]
    assert "a share of 0.05 leaves none; it may be 0.125 to 1" in refused(*line, "--to", "5%")
    assert "to=9 does not fit" in refused(*line, "--to", "9")
    assert run(*line, "--to", "half").code == 2 and run(*line, "--how", "median").code == 2
    (tmp_path / "there").mkdir()
    assert "exists already" in refused("merge-heads", alike, "--out", tmp_path / "there")

    def fails(*args):
        raise ExportError("reads back as another model")

    monkeypatch.setattr("manyheads.convert.export.family.compare_reloaded", fails)
    monkeypatch.setattr("manyheads.convert.export.native.compare_reloaded", fails)
    assert "reads back as another model" in refused(*line)

    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("manyheads.convert.export.family.compare_reloaded", stopped)
    assert run(*line).code == 130
    assert [each.name for each in tmp_path.iterdir()] == ["there"]
