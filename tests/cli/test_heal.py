"""`manyheads heal`, and `manyheads shrink --distil`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.line import SMALL, TORCHRUN, launched, refused, run, save_tiny
from tests.cli.test_shrink import interrupt, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from manyheads.bench import heal as job
from manyheads.convert.text import default_text

KEYS = {
    "model", "teacher", "date", "text", "rows", "curve", "steps", "best", "tokens", "seconds", "seconds_per_step",
    "options", "processes", "machine", "notes", "out",
}  # fmt: skip
QUICK = ["--steps", "8", "--batch", "2x32", "--every", "4", "--lr", "1e-2", "--evaluate", "2x64"]


@pytest.fixture(scope="module", autouse=True)
def short_text(short_jobs):
    with pytest.MonkeyPatch.context() as patch:
        text = default_text()[:40_000]
        patch.setattr(job, "default_text", lambda: text)
        yield


@pytest.fixture(scope="module")
def healed(shrunk, tiny, tmp_path_factory) -> Path:
    """The output of one `heal`, not to be changed."""
    out = tmp_path_factory.mktemp("healed") / "o"
    ran = run("heal", shrunk / "mla-25", "--teacher", tiny, "--out", out, "--json", *QUICK)
    assert ran.code == 0, ran
    (out / "stdout.txt").write_text(ran.out)
    return out


def tree(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_the_folder_is_a_checkpoint_with_figures(healed, shrunk):
    result = json.loads((healed / "stdout.txt").read_text().splitlines()[-1])
    assert set(result) == KEYS and result == json.loads((healed / "result.json").read_text())
    assert [row["name"] for row in result["rows"]] == ["teacher", "before", "after"]
    teacher, before, after = result["rows"]
    assert teacher["kl"] < 1e-9 and teacher["top1"] == 1 and after["kl"] < before["kl"]
    assert [held["step"] for held in result["curve"]] == [0, 4, 8] and result["steps"] == 8
    assert result["curve"][-1]["loss"] < result["curve"][0]["loss"]
    assert result["tokens"] == 8 * 64 and result["text"]["tokens_evaluation"] == 128 and result["processes"] == 1
    assert not list(healed.parent.glob("*.partial")) and not (healed / "training").exists()
    model, old = (AutoModelForCausalLM.from_pretrained(folder) for folder in (healed, shrunk / "mla-25"))
    assert model.config.notes["healed"]["steps"] == 8 and "goal" in model.config.notes
    assert [str(spec) for spec in model.specs] == [str(spec) for spec in old.specs]
    assert AutoTokenizer.from_pretrained(healed)("ab").input_ids


def test_the_figures_are_those_that_eval_finds(healed, tiny):
    after = json.loads((healed / "result.json").read_text())["rows"][-1]
    found = run("eval", healed, "--against", tiny, "--evaluate", "2x64", "--json").json
    for key in ("perplexity", "kl", "top1"):
        assert found[key] == pytest.approx(after[key], rel=1e-6)


def test_the_table_fits_80_columns(healed):
    lines = (healed / "stdout.txt").read_text().splitlines()[:-1]
    assert max(len(line) for line in lines if str(healed) not in line) <= 80
    assert [line.split()[0] for line in lines[4:7]] == ["teacher", "before", "after"]
    assert "8 steps of 2 x 32 tokens" in " ".join(lines) and f"checkpoint  {healed}" in lines


def test_own_text_and_other_options(shrunk, tiny, tmp_path):
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / f"{name}.txt").write_text(f"The quick brown fox {name} jumps over the lazy dog. " * 40)
    ran = run(
        "heal", shrunk / "mla-50", "--teacher", tiny, "--text", tmp_path / "texts", "--train", "all", "--relations",
        "4", "--accumulate", "2", "--ce", "1", "--seed", "3", "--out", tmp_path / "o", "--json", *QUICK,
    )  # fmt: skip
    assert ran.code == 0, ran
    options = ran.json["options"]
    assert options["train"] == "all" and options["relations"]["heads"] == 4 and options["seed"] == 3
    assert ran.json["text"]["training"] == "texts, first 80 %"
    assert ran.json["rows"][2]["loss"] < ran.json["rows"][1]["loss"]


@pytest.mark.parametrize("done", [0, 3, 4, 8])
def test_resume_gives_what_an_uninterrupted_run_gives(healed, shrunk, tiny, tmp_path, monkeypatch, done):
    out = tmp_path / "o"
    command = ["heal", shrunk / "mla-25", "--teacher", tiny, "--out", out, "--json", *QUICK]
    with monkeypatch.context() as pressed:
        interrupt(pressed, "heal", done)
        ran = run(*command)
    assert ran.code == 130 and not ran.out and not out.exists()
    if not done:
        assert not list(tmp_path.iterdir())
        return
    assert f"{out}.partial keeps what is finished; the same command with --resume goes on from there" in ran.err
    assert f"{out}.partial holds an unfinished job; go on with it (--resume)" in refused(*command)
    line = refused(*command, "--resume", "--seed", "5", "--lr", "1e-3")
    assert "heal.lr was 0.01, is 0.001" in line and "heal.seed was 0, is 5" in line and "text" not in line
    again = run(*command, "--resume")
    assert again.code == 0 and weights(out) == weights(healed) != {}
    result = json.loads((healed / "result.json").read_text())
    assert again.json["rows"] == result["rows"] and again.json["curve"] == result["curve"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "0"], "healing: steps=0; at least 1"),
        (["--batch", "3x32", "--accumulate", "2"], "3 windows do not make accumulate=2 equal passes"),
        (["--batch", "2x1024"], "windows of 1024 tokens are longer than the student's 512 positions"),
        (["--relations", "5"], "relations: heads=5 do not divide all widths"),
        (["--text", "missing.txt"], "missing.txt: No such file or directory"),
        (["--text", "binary"], "binary is not UTF-8 text: byte 0xff at offset 2"),
        (["--text", "empty"], "empty holds no files"),
        (["--text", "short.txt"], "evaluation: the text has 20 tokens, and 2 windows of 64 need 128"),
        (["--text", "datasets:a/b"], "pip install 'manyheads[datasets]'"),
        (["--lora", "2"], "pip install 'manyheads[peft]'"),
        (["--teacher", "./nowhere"], "./nowhere: no such file or folder"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(shrunk, tiny, tmp_path, monkeypatch, options, said):
    for package in ("peft", "datasets"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary").write_bytes(b"ab\xff")
    (tmp_path / "short.txt").write_text("x" * 100)
    (tmp_path / "empty").mkdir()
    before = tree(tmp_path)
    assert said in refused("heal", shrunk / "mla-25", "--teacher", tiny, "--out", "o", *QUICK, *options)
    assert tree(tmp_path) == before


def test_another_vocabulary_is_refused_with_the_numbers(shrunk, tmp_path):
    other = save_tiny(tmp_path / "other", vocab_size=300)
    line = refused("heal", shrunk / "mla-25", "--teacher", other, "--out", tmp_path / "o", *QUICK)
    assert "mla-25 predicts 256 tokens, other 300; they need one vocabulary" in line
    assert not (tmp_path / "o").exists()
    same = save_tiny(tmp_path / "same")
    file = same / "tokenizer.json"
    words = json.loads(file.read_text())
    a, b = list(words["model"]["vocab"])[40:42]
    words["model"]["vocab"][a], words["model"]["vocab"][b] = words["model"]["vocab"][b], words["model"]["vocab"][a]
    file.write_text(json.dumps(words))
    line = refused("heal", shrunk / "mla-25", "--teacher", same, "--out", tmp_path / "o", *QUICK)
    assert "vocabularies of 256 and 256 tokens that differ in 4" in line


def test_an_out_folder_that_exists(shrunk, tiny, tmp_path):
    assert f"{tmp_path} exists already" in refused("heal", shrunk / "mla-25", "--teacher", tiny, "--out", tmp_path)
    assert run("heal", shrunk / "mla-25", "--teacher", tiny).code == 2


# --- several processes


LAUNCHERS = {  # on CPUs, `accelerate launch --cpu` starts one process however many are asked for (more need MPI)
    "accelerate --cpu": (["accelerate.commands.launch", "--num_processes", "2", "--cpu", "--main_process_port"], 1),
    "accelerate": (["accelerate.commands.launch", "--num_processes", "2", "--multi_gpu", "--main_process_port"], 2),
    "torchrun": (TORCHRUN[2], 2),
}


@pytest.fixture(scope="module")
def alone(shrunk, tiny, tmp_path_factory):
    """A run of one process: its command, what it printed, its folder."""
    work = tmp_path_factory.mktemp("alone")
    (work / "text").write_text(default_text()[:40_000])
    own = ["heal", shrunk / "mla-25", "--teacher", tiny, "--text", work / "text", *QUICK, "--batch", "4x32"]
    ran = run(*own, "--out", work / "o", "--json")
    assert ran.code == 0, ran
    return own, ran.json, work / "o"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_under_a_launcher_it_is_the_run_of_one_process(launcher, alone, tmp_path):
    pytest.importorskip("accelerate", reason="needs manyheads[train]")
    command, processes = LAUNCHERS[launcher]
    own, result, folder = alone
    ran = launched(command, *own, "--out", tmp_path / "o")
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "o/result.json").read_text())
    assert found["processes"] == processes and found["best"] == result["best"]
    for one, other in zip(found["curve"] + found["rows"], result["curve"] + result["rows"], strict=True):
        assert one.pop("name", None) == other.get("name")
        assert one == pytest.approx({key: other[key] for key in one}, abs=1e-4, rel=1e-4)
    ours, theirs = (load_file(each / "model.safetensors") for each in (tmp_path / "o", folder))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-4, rtol=1e-4, msg=name)


# --- shrink --distil


def test_shrink_goes_on_to_heal_each_candidate(tiny, shrunk, tmp_path, monkeypatch):
    out = tmp_path / "o"
    command = [
        "shrink",
        tiny,
        "--kv",
        "50%",
        "--kv",
        "25%",
        "--distil",
        "4",
        "--stages",
        "--json",
        "--out",
        out,
        *SMALL,
    ]
    with monkeypatch.context() as pressed:
        interrupt(pressed, "distil mla-25", 2)
        assert run(*command).code == 130
    assert (out.with_name("o.partial") / "healed/mla-50").exists()
    assert "distil.steps was 4, is 5" in refused(*command, "--resume", "--distil", "5")
    ran = run(*command, "--resume")
    assert ran.code == 0, ran
    plain = json.loads((shrunk / "result.json").read_text())["candidates"]
    for row, before in zip(ran.json["candidates"], plain, strict=True):
        assert list(row["stages"]) == ["rope", "rank", "heal", "distil"] and row["kl"] < before["kl"]
        assert row["distil"]["steps"] == 4 and row["distil"]["options"]["batch"] == [2, 512]
        assert row["spec"] == before["spec"] and row["damage"] == before["damage"] and before["distil"] is None
    assert {entry.name for entry in out.iterdir()} == {"mla-50", "mla-25", "result.json", "report.html"}
    assert not list(out.rglob("damage.json")) and AutoTokenizer.from_pretrained(out / "mla-25")("ab").input_ids
    model = AutoModelForCausalLM.from_pretrained(out / "mla-25")
    assert model.config.notes["goal"]["name"] == "mla-25" and model.config.notes["healed"]["steps"] == 4


def test_shrink_judges_the_training_before_any_work(tiny, tmp_path):
    (tmp_path / "short.txt").write_text("too short for windows of 512 tokens " * 30)
    line = refused("shrink", tiny, "--distil", "4", "--text", tmp_path / "short.txt", "--out", tmp_path / "o",
                   "--calibrate", "4x32", "--evaluate", "1x32")  # fmt: skip
    assert "the held-out tenth of the text has 87 tokens, and a window has 512" in line
    assert "steps=0; at least 1" in refused("shrink", tiny, "--distil", "0", "--out", tmp_path / "o")
    assert [file.name for file in tmp_path.iterdir()] == ["short.txt"]
