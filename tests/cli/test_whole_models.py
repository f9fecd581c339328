"""`share`, `merge`, `lock`, the moves of their own behind `shrink --to`, and `list --methods`."""

import json

import pytest
import torch
from tests.cli.line import SMALL, refused, run, save_tiny
from transformers import AutoModelForCausalLM

TEXT = ["--calibrate", "8x32", "--evaluate", "2x64"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def logits(folder):
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(tokens, use_cache=False).logits


def test_methods_have_a_line_each():
    ran = run("list", "--methods", "--json")
    assert ran.code == 0 and {"mla", "dha", "qkv-sharing", "mfa", "tensorllm"} <= {each["name"] for each in ran.json}
    assert all(each["what"] for each in ran.json)
    one = run("list", "mfa", "--methods")
    assert "key_reuse" in one.out and "2412.19255" in one.out
    assert "no method 'mla2' (there are" in refused("list", "mla2", "--methods")


@pytest.mark.parametrize(
    ("line", "kv", "floats"),
    [("dha", "50%", 24), ("qkv-sharing", "50%", 24), ("mfa(key_reuse=true)", "50%", 24), ("tensorllm", "100%", 48)],
)
def test_shrink_takes_moves_of_their_own(tiny, line, kv, floats, tmp_path):
    ran = run("shrink", tiny, "--to", line, "--kv", kv, *SMALL, "--contexts", "none", "--out", tmp_path / "out")
    assert ran.code == 0, ran
    (row,) = json.loads((tmp_path / "out" / "result.json").read_text())["candidates"]
    assert row["kv_floats_per_token_layer"] == floats and row["kl"] > 0


def test_budgets_and_options_that_do_not_fit_are_said(tiny, tmp_path):
    out = tmp_path / "out"
    said = refused("shrink", tiny, "--to", "tensorllm", *SMALL, "--out", out)
    assert "the one budget that it reaches is 100%, not 50%" in said
    assert "the smallest is 12 (25%)" in refused("shrink", tiny, "--to", "dha", "--kv", "10%", *SMALL, "--out", out)
    ran = run("shrink", tiny, "--to", "dha(how=mean)", "--out", out)
    assert ran.code == 2 and "has no option 'how'" in ran.err and "^" in ran.err
    assert not list(tmp_path.iterdir())


def test_lock_keeps_the_function_and_canonical_undoes_it(tiny, tmp_path):
    assert run("lock", tiny, "--seed", "3", "--out", tmp_path / "locked").code == 0
    torch.testing.assert_close(logits(tmp_path / "locked"), logits(tiny), atol=1e-3, rtol=1e-3)
    kind = json.loads((tmp_path / "locked" / "config.json").read_text())["architectures"]
    assert kind == ["LlamaForCausalLM"]
    for name, model in (("a", tiny), ("b", tmp_path / "locked")):
        assert run("lock", model, "--canonical", "--out", tmp_path / name).code == 0
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in "ab")
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], atol=1e-3, rtol=1e-3)
    assert run("lock", tmp_path / "locked", "--parent", tiny, "--out", tmp_path / "c").code == 0
    c, plain = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (tmp_path / "c", tiny))
    for name, tensor in plain.items():
        torch.testing.assert_close(c[name], tensor, atol=1e-4, rtol=1e-4)
    assert "is below 1" in refused("lock", tiny, "--condition", "0.5", "--out", tmp_path / "d")
    assert "exists already" in refused("lock", tiny, "--out", tmp_path / "a")
    assert not (tmp_path / "d").exists()


def test_share_stores_heads_once(tiny, tmp_path):
    ran = run("share", tiny, "--share", "0.5", "--out", tmp_path / "shared", "--json")
    assert ran.code == 0 and len(ran.json["matches"]) == 6 and ran.json["after"] < ran.json["before"]
    assert run("export", tmp_path / "shared", "--format", "family", "--out", tmp_path / "plain").code == 0
    torch.testing.assert_close(logits(tmp_path / "plain"), logits(tmp_path / "shared"), atol=1e-3, rtol=1e-3)
    assert "share=2 of the heads" in refused("share", tiny, "--share", "2", "--out", tmp_path / "no")


def test_share_combines_matrices(tiny, tmp_path):
    line = ["--method", "masa", "--share", "0.5", "--groups", "2", "--rank", "2"]
    ran = run("share", tiny, *line, "--out", tmp_path / "shared", "--json")
    assert ran.code == 0 and len(ran.json["groups"]) == 2 and ran.json["groups"][0] == 0, ran
    assert ran.json["after"] < ran.json["before"]
    assert max(map(len, ran.out.split("; ")[0].splitlines())) <= 80 and "layers of 2 matrices a type" in ran.out
    assert run("export", tmp_path / "shared", "--format", "family", "--out", tmp_path / "plain").code == 0
    torch.testing.assert_close(logits(tmp_path / "plain"), logits(tmp_path / "shared"), atol=1e-3, rtol=1e-3)
    said = refused("share", tiny, "--method", "masa", "--share", "1", "--out", tmp_path / "no")
    assert "share=1 of the matrices; from 0 to less than 1" in said
    assert "groups=9 of" in refused("share", tiny, "--method", "masa", "--groups", "9", "--out", tmp_path / "no")
    assert run("share", tiny, "--method", "masa", "--of", "q", "--out", tmp_path / "no").code == 2
    assert run("share", tiny, "--groups", "2", "--out", tmp_path / "no").code == 2
    assert not (tmp_path / "no").exists()


def test_merge_makes_a_trunk_and_says_which_tensor_does_not_fit(tiny, tmp_path):
    ran = run("merge", tiny, tiny, "--until", "2", *TEXT, "--out", tmp_path / "both", "--json")
    assert ran.code == 0, ran
    for number in "12":
        torch.testing.assert_close(logits(tmp_path / "both" / number), logits(tiny), atol=1e-3, rtol=1e-3)
    assert ran.json["after"] == pytest.approx(ran.json["before"], rel=1e-3)
    other = save_tiny(tmp_path / "other", intermediate_size=48)
    said = refused("merge", tiny, other, *TEXT, "--out", tmp_path / "no")
    assert "mlp.gate_proj.weight is [48, 48] there and [64, 48] here" in said
    assert "so 0 to 3" in refused("merge", tiny, tiny, "--until", "4", *TEXT, "--out", tmp_path / "no")
    assert "takes two or more" in refused("merge", tiny, *TEXT, "--out", tmp_path / "no")
    assert not (tmp_path / "no").exists()
