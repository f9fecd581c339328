"""`decode train` and `generate --draft`."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.line import refused, run, save_tiny

SMALL = ["--texts", "16", "--prompt", "6", "--length", "10", "--steps", "6", "--heads", "2"]


@pytest.fixture(scope="module")
def drafter(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("drafters") / "heads"
    ran = run("decode", "train", tiny, "--out", out, *SMALL, "--json")
    assert ran.code == 0, ran
    assert ran.json["parameters"] == 2 * (48 * 48 + 48) and "3 ahead" in ran.out
    assert "text: done" in ran.err and "heads: done" in ran.err
    return out


def test_a_drafter_is_weights_and_a_description(drafter):
    assert sorted(file.name for file in drafter.iterdir()) == ["drafter.json", "heads.safetensors"]
    told = json.loads((drafter / "drafter.json").read_text())
    assert told["kind"] == "medusa" and told["training"]["steps"] == 6 and "tiny" in told["made_for"]["model"]
    assert all(weight.any() for weight in load_file(drafter / "heads.safetensors").values())


def test_generate_with_a_drafter_writes_the_same_text(tiny, drafter):
    plain = run("generate", tiny, "import this", "--tokens", "12", "--json")
    for draft in (drafter, "lookup"):
        ran = run("generate", tiny, "import this", "--tokens", "12", "--draft", draft, "--json")
        assert ran.code == 0 and ran.json["text"] == plain.json["text"] and ran.json["tokens"] == 12
        assert "tokens a step" in ran.err and ran.json["steps"] <= 11


def test_jakiro_is_trained_by_the_same_command(tiny, tmp_path):
    ran = run("decode", "train", tiny, "--out", tmp_path / "jakiro", "--drafter", "jakiro", *SMALL, "--json")
    assert ran.code == 0 and len(ran.json["odds"]) == 2, ran
    assert json.loads((tmp_path / "jakiro" / "drafter.json").read_text())["contrast"] is True
    plain = run("generate", tiny, "import this", "--tokens", "12", "--json")
    ran = run("generate", tiny, "import this", "--tokens", "12", "--draft", tmp_path / "jakiro", "--json")
    assert ran.code == 0 and ran.json["text"] == plain.json["text"] and ran.json["gain"] > 0.8
    line = refused("decode", "train", tiny, "--out", tmp_path / "x", "--drafter", "eagle")
    assert "known: jakiro, medusa, mtp" in line


def test_a_chain_is_trained_by_the_same_command(tiny, tmp_path):
    out = tmp_path / "chain"
    ran = run("decode", "train", tiny, "--out", out, "--drafter", "mtp", *SMALL, "--json")
    assert ran.code == 0 and len(ran.json["odds"]) == 2, ran
    plain = run("generate", tiny, "import this", "--tokens", "12", "--json")
    ran = run("generate", tiny, "import this", "--tokens", "12", "--draft", out, "--json")
    assert ran.code == 0 and ran.json["text"] == plain.json["text"]
    for name in ("heads.safetensors", "drafter.json"):
        (out / name).write_bytes((out / name).read_bytes()[:60])
        assert f"{out / name} " in refused("generate", tiny, "import this", "--draft", out)


def test_another_model_is_refused_by_name(drafter, tmp_path):
    other = save_tiny(tmp_path / "other", hidden_size=32)
    line = refused("generate", other, "hello", "--draft", drafter)
    assert "made for the model tiny (" in line and "not for other (" in line
    assert "holds no drafter" in refused("generate", other, "hello", "--draft", tmp_path)


def test_a_folder_with_something_else_is_left_alone(tiny, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "exists already" in refused("decode", "train", tiny, "--out", tmp_path, *SMALL)
    assert torch.is_grad_enabled()
