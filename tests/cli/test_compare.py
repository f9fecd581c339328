"""`manyheads compare` as a user meets it."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.line import run

from manyheads.bench import plan
from manyheads.bench.compare import compare as function
from manyheads.cli import output
from manyheads.cli.compare import compare as command
from manyheads.convert.text import default_text

SPECS = ["gqa", "gqa(kv_heads=1) + kha + head_norm", "mla(rank=8,rope_dim=4)"]
SMALL = [
    "--dim", "16", "--heads", "2", "--layers", "1", "--context", "24", "--batch", "2", "--steps", "8", "--seeds", "2",
]  # fmt: skip
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def short_text():
    text = default_text()[:4_000]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "default_text", lambda: text)
        yield


@pytest.fixture(scope="module")
def made(short_text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("jobs") / "made"
    ran = run("compare", *SPECS, *SMALL, "--equal", "cache", "--out", out, "--json")
    assert ran.code == 0, ran
    (out / "stdout.txt").write_text(ran.out)
    (out / "stderr.txt").write_text(ran.err)
    return out


def refused(*args: str | Path) -> str:
    ran = run("compare", *args)
    assert ran.code == 1 and not ran.out and "Traceback" not in ran.err and ran.err.startswith("error: "), ran
    return ran.err


def test_the_table_fits_80_columns_and_json_is_the_last_line(made):
    *lines, last = (made / "stdout.txt").read_text().splitlines()
    assert json.loads(last)["entries"] == json.loads((made / "result.json").read_text())["entries"]
    assert max(map(len, [line for line in lines if str(made) not in line])) <= 80
    text = "\n".join(lines)
    assert "tok/s" in text and "width" in text and "± err." in text and f"report      {made / 'report.html'}" in text
    assert sum(line.strip().startswith(("gqa ", "gqa(kv", "mla(rank")) for line in lines) == 3


def test_standard_error_tells_of_runs_and_widths(made):
    lines = (made / "stderr.txt").read_text().splitlines()
    assert sum(line.startswith("gqa, seed ") and ": done in " in line for line in lines) == 2
    assert any(line.startswith("note: mla(rank=8, rope_dim=4): ") and "cache bytes" in line for line in lines)


def test_the_same_command_prints_the_same_at_once(made, monkeypatch):
    ran = run("compare", *SPECS, *SMALL, "--equal", "cache", "--out", made, "--json")
    assert ran.code == 0 and ran.out == (made / "stdout.txt").read_text() and "seed" not in ran.err


def test_other_options_are_refused_by_name(made):
    line = refused(*SPECS, *SMALL, "--equal", "flops", "--batch", "3", "--out", made)
    assert "batch was 2, is 3" in line and "equal was 'cache', is 'flops'" in line and "another folder" in line


def test_an_error_in_a_spec_points_at_the_token(tmp_path):
    said = refused("gqa", "gqa(kv_heds=2)", *SMALL, "--out", tmp_path / "o")
    first, line, pointer = said.rstrip("\n").split("\n")
    assert first.startswith("error: spec 2 of 2, 'gqa(kv_heds=2)': 'gqa' has no option 'kv_heds'")
    assert line[pointer.index("^") :].startswith("kv_heds") and not list(tmp_path.iterdir())


def test_what_does_not_fit_is_one_line(tmp_path):
    for args, said in (
        (["gqa", " gqa + rope"], "specs 1 and 2 are the same"),
        (["gqa", "--seeds", "0"], "seeds is at least 1"),
        (["gqa", "--dim", "18", "--heads", "4"], "dim=18 is no multiple of heads=4"),
        (["gqa", "--text", str(tmp_path / "none.txt")], "none.txt: No such file or directory"),
    ):
        assert said in refused(*args, "--out", tmp_path / "o")
    assert not list(tmp_path.iterdir())
    for args in ([], ["gqa", "--equal", "time"], ["gqa", "--dtype", "int8"], ["gqa", "--steps", "many"]):
        assert run("compare", *args).code == 2


def test_a_text_of_one_s_own(tmp_path):
    (tmp_path / "own.txt").write_text("A head is a small function of the sequence. " * 40)
    ran = run("compare", "gqa", *SMALL, "--text", tmp_path / "own.txt", "--out", tmp_path / "o")
    assert ran.code == 0 and "own.txt, 8 steps of 2 x 24 bytes" in ran.out


def test_ctrl_c_says_in_one_line_how_to_go_on(made, tmp_path, monkeypatch):
    def press(self, stage, done, total):
        if (stage, done) == ("gqa, seed 1", 5):
            raise KeyboardInterrupt

    whole = ["compare", *SPECS, *SMALL, "--equal", "cache", "--json", "--out", tmp_path / "o"]
    with monkeypatch.context() as pressed:
        pressed.setattr(output.Bars, "__call__", press)
        ran = run(*whole)
    assert ran.code == 130 and not ran.out
    assert ran.err.splitlines() == [
        f"note: {tmp_path / 'o'} keeps what is finished; the same command goes on from there", "note: interrupted",
    ]  # fmt: skip
    before, after = json.loads((made / "result.json").read_text()), run(*whole).json
    assert [entry["curves"] for entry in after["entries"]] == [entry["curves"] for entry in before["entries"]]


def test_only_rank_0_prints(made, monkeypatch):
    whole = ["compare", *SPECS, *SMALL, "--equal", "cache", "--out", made]
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        ran = run(*whole)
        assert ran.code == 0 and bool(ran.out) == (rank == "0")
    monkeypatch.setenv("RANK", "2")
    assert "RANK=2 and WORLD_SIZE=2" in refused(*whole[1:])


def test_command_and_function_have_the_same_defaults():
    ours, theirs = (inspect.signature(each).parameters for each in (command, function))
    for name in ours.keys() & theirs.keys() - {"specs"}:
        default = ours[name].default
        assert str(getattr(default, "value", default)) == str(theirs[name].default), name
    assert theirs.keys() - ours.keys() == {"aux_weight", "save_every", "progress"}


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_real_ctrl_c_leaves_a_state_to_go_on_from_and_no_process(tmp_path, jobs):
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    whole = [sys.executable, "-m", "manyheads", "compare", *SPECS, *SMALL[:-4], "--steps", "400", "--seeds", "1"]
    whole += ["--jobs", jobs, "--threads", "1", "--out", str(tmp_path / "o")]
    environment = os.environ | {"PYTHONPATH": path}
    one = subprocess.Popen(whole, env=environment, stdout=-1, stderr=-1, text=True, start_new_session=True)
    deadline = time.monotonic() + 90
    while not list((tmp_path / "o").rglob("*.pt")):
        assert time.monotonic() < deadline and one.poll() is None
        time.sleep(0.02)
    os.killpg(one.pid, signal.SIGINT)  # as a terminal does: to every process
    out, err = one.communicate(timeout=60)
    assert one.returncode == 130 and not out
    assert [line for line in err.splitlines() if ": done in" not in line] == [
        f"note: {tmp_path / 'o'} keeps what is finished; the same command goes on from there", "note: interrupted",
    ]  # fmt: skip
    with pytest.raises(ProcessLookupError):
        for _ in range(500):  # Python's own helper process sees the end of ours a moment later
            os.killpg(one.pid, 0)
            time.sleep(0.02)
    again = subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr
    assert not list((tmp_path / "o").rglob("*.pt"))
