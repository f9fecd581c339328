"""`prune` and `mask`."""

import json

import pytest
from tests.cli.line import refused, run
from transformers import AutoModelForCausalLM

from manyheads.edit import job

SMALL = ["--calibrate", "4x24", "--evaluate", "2x48", "--context", "4"]


@pytest.mark.parametrize(
    "how",
    [
        "--heads|0:0,1 2:0,2,4,6", "--to|75%", "--to|0.6|--of|cache|--by|greedy|--tries|3",
        "--ppl-limit|1.5|--by|output|--regroup|map", "--to|97%|--of|params|--by|random",
    ],
)  # fmt: skip
def test_prune_writes_a_model_and_says_what_it_cost(tiny, how, tmp_path):
    ran = run("prune", tiny, *how.split("|"), *SMALL, "--out", tmp_path / "out", "--json")
    assert ran.code == 0, ran
    found = ran.json
    before, after = found["rows"]
    assert after["heads"] == sum(found["heads"]) < before["heads"] == 24 and after["parameters"] < before["parameters"]
    assert after["kv_bytes_per_token"] <= before["kv_bytes_per_token"] == 3 * 48 * 4
    assert after["kl"] > 0 and all(row["decode_ms"] > 0 for row in found["rows"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.heads == found["heads"] and loaded.config.notes["pruned"]["heads_out"]
    assert all(len(line) <= 80 for line in ran.out.splitlines()[:-1] if str(tmp_path) not in line), ran.out
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    assert run("generate", tmp_path / "out", "Once", "--tokens", "4").code == 0
    again = run("eval", tmp_path / "out", "--evaluate", "2x48", "--json").json
    assert again["perplexity"] == pytest.approx(after["perplexity"], rel=1e-5)


def test_equal_layers_are_exported_as_stock(tiny, tmp_path):
    ran = run("prune", tiny, "--heads", "0:0,1 1:2,3 2:6,7", *SMALL, "--out", tmp_path / "out")
    assert ran.code == 0 and "--format family" in ran.err
    ran = run("export", tmp_path / "out", "--format", "family", "--out", tmp_path / "stock")
    assert ran.code == 0 and "LlamaForCausalLM" in ran.out


def test_an_interrupted_choice_goes_on(tiny, tmp_path, monkeypatch):
    line = ["prune", tiny, "--to", "70%", "--by", "greedy", "--tries", "2", *SMALL]
    whole = run(*line, "--out", tmp_path / "whole", "--json").json
    keep, calls = job._keep, []

    def stop(*args):
        keep(*args)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(job, "_keep", stop)
    ran = run(*line, "--out", tmp_path / "out")
    assert ran.code == 130 and "--resume goes on from there" in ran.err
    monkeypatch.undo()
    assert "holds an unfinished job" in refused(*line, "--out", tmp_path / "out")
    assert "of was 'heads', is 'params'" in refused(*line, "--of", "params", "--resume", "--out", tmp_path / "out")
    found = run(*line, "--resume", "--out", tmp_path / "out", "--json").json
    assert found["heads_out"] == whole["heads_out"] and not (tmp_path / "out.partial").exists()


def test_mask_measures_and_changes_nothing(tiny, tmp_path):
    file = tmp_path / "heads.json"
    ran = run("mask", tiny, "--heads", "0:0,1 2:7", "--evaluate", "2x48", "--save", file, "--json")
    assert ran.code == 0, ran
    assert json.loads(file.read_text()) == {"heads_out": {"0": [0, 1], "2": [7]}, "heads": [8, 8, 8]}
    assert ran.json["masked"]["kl"] > 0 and ran.json["heads_out"] == {"0": [0, 1], "2": [7]}
    again = run("mask", tiny, "--heads", file, "--evaluate", "2x48", "--json")
    assert again.json == ran.json
    pruned = run("prune", tiny, "--heads", "0:0,1 1:0,1", *SMALL, "--out", tmp_path / "out", "--json").json
    masked = run("mask", tiny, "--heads", "0:0,1 1:0,1", "--evaluate", "2x48", "--json").json
    assert pruned["rows"][1]["perplexity"] == pytest.approx(masked["masked"]["perplexity"], rel=1e-5)
    assert pruned["rows"][0]["perplexity"] == pytest.approx(masked["perplexity"], rel=1e-5)


def test_what_does_not_fit_is_one_line_and_leaves_nothing(tiny, tmp_path):
    out, short = tmp_path / "out", tmp_path / "short.txt"
    said = lambda *args: refused("prune", tiny, *args, "--out", out)
    assert "there is no layer 9" in said("--heads", "9:0", *SMALL)
    assert "there is no head 8 in layer 0" in said("--heads", "0:8", *SMALL)
    assert "would lose all its 8 heads" in said("--heads", "0:0,1,2,3,4,5,6,7", *SMALL)
    assert "regroup: 'map'" in said("--heads", "0:0", *SMALL)
    assert "'0-1' is not of the form 3:0,1" in said("--heads", "0-1", *SMALL)
    assert "out of reach" in said("--to", "5%", *SMALL)
    assert "a share of 1 of heads leaves every head" in said("--to", "100%", *SMALL)
    assert "no head may go: every layer keeps at least 9 heads, and none has more than 8" in said(
        "--to", "50%", "--at-least", "9", *SMALL
    )
    short.write_text("too short")
    assert "tokens, and 4 windows of 24 need 96" in said("--to", "75%", "--text", short, *SMALL)
    assert "no such file" in refused("prune", tmp_path / "none", "--to", "75%", "--out", out)
    assert run("prune", tiny, "--out", out).code == 2 and run("prune", tiny, "--to", "0", "--out", out).code == 2
    assert run("prune", tiny, "--to", "75%", "--heads", "0:0", "--out", out).code == 2
    assert [each.name for each in tmp_path.iterdir()] == ["short.txt"]
    windows = ["--calibrate", "2x600", "--evaluate", "2x48", "--context", "0"]
    long = run("prune", tiny, "--to", "75%", *windows, "--out", out)
    assert long.code == 0 and "longer than the model's 512 positions; cut to 512" in long.err
