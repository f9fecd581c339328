import errno
import json
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests.cli.line import SMALL, TORCHRUN, launched, refused, run, save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from manyheads.bench import figures, job
from manyheads.cli import output
from manyheads.convert import survey as conversion

ROW = {
    "name", "spec", "specs", "kv_floats_per_token_layer", "kv_bytes_per_token", "perplexity", "perplexity_second", "kl",
    "top1", "decode_ms", "peak_mb", "sample",
}  # fmt: skip
CANDIDATE = ROW | {"plan", "planned", "damage", "damage_healed", "distil", "folder"}


def weights(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


def interrupt(monkeypatch, stage: str, done: int):
    """Ctrl-C when `stage` has come as far as `done`."""

    def press(self, now: str, steps: int, total: int) -> None:
        if (now, steps) == (stage, done):
            raise KeyboardInterrupt

    monkeypatch.setattr(output.Bars, "__call__", press)


# --- what it leaves


def test_layers_that_share(tiny, tmp_path):
    ran = run("shrink", tiny, "--kv", "67%", "--to", "share", "--out", tmp_path / "out", "--json", *SMALL)
    assert ran.code == 0, ran
    result = json.loads(ran.out.splitlines()[-1])
    row = result["candidates"][0]
    assert (row["name"], row["kv_floats_per_token_layer"], row["kv_bytes_per_token"]) == ("share-67", 32, 384)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "share-67")
    assert again.config.kv_source.count(None) == 2 and "reads" in row["spec"]


def test_json_is_the_last_line_and_has_the_documented_keys(shrunk):
    result = json.loads((shrunk / "stdout.txt").read_text().splitlines()[-1])
    assert set(result) == {
        "model", "date", "text", "source", "candidates", "prompt", "seconds", "machine", "notes", "out", "report",
    }  # fmt: skip
    assert set(result["source"]) == ROW
    assert [set(row) for row in result["candidates"]] == [CANDIDATE, CANDIDATE]
    assert [row["name"] for row in result["candidates"]] == ["mla-50", "mla-25"]
    assert [row["kv_floats_per_token_layer"] for row in (result["source"], *result["candidates"])] == [48, 24, 12]
    assert [row["kv_bytes_per_token"] for row in (result["source"], *result["candidates"])] == [576, 288, 144]
    assert result["source"]["kl"] == 0 and result["source"]["top1"] == 1
    for row in result["candidates"]:
        assert row["kl"] > 0 and 0 <= row["top1"] <= 1 and row["peak_mb"] > 0
        assert set(row["decode_ms"]) == {"8", "24"} and all(ms > 0 for ms in row["decode_ms"].values())
        assert len(row["damage"]) == len(row["damage_healed"]) == len(row["specs"]) == 3 and row["plan"] is False
        assert sum(row["damage_healed"]) < sum(row["damage"])
    assert result["text"]["tokens_calibration"] == 256 and result["text"]["tokens_evaluation"] == 128
    assert {"load", "calibrate", "convert", "measure"} == set(result["seconds"])


def test_the_folder_holds_checkpoints_figures_and_a_report_and_nothing_of_the_job(shrunk):
    assert {entry.name for entry in shrunk.iterdir()} == {
        "mla-50", "mla-25", "result.json", "report.html", "stdout.txt",
    }  # fmt: skip
    assert not shrunk.with_name("shrunk.partial").exists()
    assert json.loads((shrunk / "result.json").read_text())["candidates"][0]["name"] == "mla-50"
    assert (shrunk / "report.html").read_text().startswith("<!")
    assert not list(shrunk.rglob("damage.json")) and not list(shrunk.rglob("*.tmp"))
    for name in ("mla-50", "mla-25"):
        model = AutoModelForCausalLM.from_pretrained(shrunk / name)
        assert model.config.notes["goal"]["name"] == name
        assert AutoTokenizer.from_pretrained(shrunk / name)("ab").input_ids


def test_the_table_fits_80_columns(shrunk):
    lines = (shrunk / "stdout.txt").read_text().splitlines()[:-1]
    assert max(map(len, [line for line in lines if str(shrunk) not in line])) <= 80
    assert [line.split()[:2] for line in lines[4:7]] == [["source", "576"], ["mla-50", "288"], ["mla-25", "144"]]
    assert f"checkpoint  {shrunk / 'mla-50'}" in lines and f"report      {shrunk / 'report.html'}" in lines


def test_wide_figures_still_fit_80_columns(capsys):
    row = {
        "name": "auto-12.5", "spec": "x" * 300, "kv_bytes_per_token": 1234567.0, "perplexity": 123456.78,
        "perplexity_second": 123456.78, "kl": 12.345, "top1": 1.0, "decode_ms": {"2048": 12345.6, "131072": 12345.6},
        "peak_mb": 123456.0, "folder": "f",
    }  # fmt: skip
    from manyheads.cli.shrink import show

    show({"source": row, "candidates": [row], "out": "o", "report": None})
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_without_json_no_line_is_json_and_own_text_has_no_second(tiny, tmp_path):
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    (tmp_path / "b.txt").write_text("Pack my box with five dozen liquor jugs. " * 20)
    ran = run(
        "shrink", tiny, "--to", "gqa", "--text", tmp_path / "a.txt", "--text", tmp_path / "b.txt", "--heal", "none",
        "--prompt", "Once", "--out", tmp_path / "deep" / "out", *SMALL[:-2],
    )  # fmt: skip
    assert ran.code == 0 and "{" not in ran.out
    result = json.loads((tmp_path / "deep/out/result.json").read_text())
    assert result["text"]["calibration"].startswith("a.txt, b.txt, first 80 %") and result["text"]["second"] is None
    assert result["prompt"] == "Once"
    (row,) = result["candidates"]
    assert row["spec"].startswith("gqa(kv_heads=2)") and row["damage_healed"] is None
    assert "second" not in ran.out


def test_auto_says_whether_it_mixes_and_stages_say_where_loss_comes_from(tiny, tmp_path):
    ran = run("shrink", tiny, "--to", "auto", "--contexts", "none", "--json", "--out", tmp_path / "o", *SMALL[:4])
    (row,) = ran.json["candidates"]
    assert row["plan"] is (len(set(row["specs"])) > 1) and row["decode_ms"] == {}
    ran = run("shrink", tiny, "--kv", "20", "--stages", "--json", "--out", tmp_path / "p", *SMALL)
    (row,) = ran.json["candidates"]
    assert row["name"] == "mla-20f" and list(row["stages"]) == ["rope", "rank", "heal"]


def test_the_default_folder_is_named_after_the_model(tiny):
    assert job.out_folder("owner/some-model") == Path("some-model-shrunk")
    assert job.out_folder("x/y.gguf") == Path("y-shrunk")
    assert job.out_folder(tiny) == Path("tiny-shrunk") and job.out_folder(tiny, "~/x") == Path.home() / "x"


def test_without_plotly_there_is_a_note_in_place_of_the_report(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "plotly.io", None)
    ran = run("shrink", tiny, "--json", "--out", tmp_path / "o", *SMALL)
    assert ran.code == 0 and ran.json["report"] is None
    assert "note: no report.html: " in ran.err and "manyheads[report]" in ran.err
    assert not (tmp_path / "o/report.html").exists()


def test_python_users_call_the_same_function(tiny, tmp_path):
    import manyheads

    steps = []
    result = manyheads.shrink(
        tiny, "50%", heal=0, out=tmp_path / "o", contexts=(), calibration=(4, 16), evaluation=(1, 32),
        progress=lambda *step: steps.append(step),
    )  # fmt: skip
    assert result["out"] == str(tmp_path / "o") and result["candidates"][0]["damage_healed"] is None
    assert {stage for stage, _, _ in steps} >= {"load", "calibrate", "mla-50", "measure source", "measure mla-50"}


def test_windows_longer_than_the_models_positions_are_cut_with_a_note(tmp_path):
    short = save_tiny(tmp_path / "short", max_position_embeddings=40)
    ran = run("shrink", short, "--json", "--out", tmp_path / "o", *SMALL)
    assert ran.json["text"]["tokens_evaluation"] == 80
    assert "note: windows of 64 tokens are longer than the model's 40 positions; cut to 40" in ran.err


# --- what it refuses, before any work


@pytest.fixture
def nothing_loaded(monkeypatch):
    """Loading weights would fail the test."""

    def load(name, **options):
        raise AssertionError(f"{name} was loaded")

    monkeypatch.setattr(job, "load_source", load)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kv", "1%"], "no mla fits 1% (0 numbers a token and layer); the smallest is 8 (16.67%)"),
        (["--kv", "10%", "--to", "gqa"], "no gqa fits 10% (4 numbers a token and layer); the smallest is 12 (25%)"),
        (["--kv", "5", "--to", "auto"], "no plan fits 10.4167% of the source's cache; the smallest is 12.5%"),
        (["--kv", "100%", "--to", "gqa"], "a budget of 100% leaves nothing to shrink: the source caches 48 numbers"),
        (["--kv", "half"], "a budget reads 50% (of the source's cache) or 192"),
        (["--kv", "50%", "--kv", " 50 %"], "two budgets are the same: mla-50"),
        (["--heal", "often"], "heal is layerwise, none, or a number of steps a layer, not 'often'"),
        (["--prompt", " "], "the prompt is empty"),
        (["--text", "missing.txt"], "missing.txt: No such file or directory"),
    ],
)
def test_options_are_judged_before_a_weight_is_read(tiny, tmp_path, monkeypatch, nothing_loaded, options, said):
    monkeypatch.chdir(tmp_path)
    assert said in refused("shrink", tiny, *options)
    assert not list(tmp_path.iterdir())


def test_the_smallest_budget_that_a_refusal_names_is_accepted(tiny, tmp_path):
    assert run("shrink", tiny, "--kv", "16.67%", "--out", tmp_path / "o", *SMALL).code == 0


@pytest.mark.parametrize(
    "options", [["--to", "best"], ["--contexts", "one"], ["--evaluate", "5"], ["--unknown"], ["--seed", "x"]]
)
def test_wrong_usage_is_exit_code_2(tiny, options):
    ran = run("shrink", tiny, *options)
    assert ran.code == 2 and not ran.out and "Traceback" not in ran.err


@pytest.fixture
def copy(tiny, tmp_path):
    return Path(shutil.copytree(tiny, tmp_path / "models" / "copy"))


def judged(model: Path, *options: str) -> str:
    """The refusal; nothing may be left beside the model."""
    before = sorted(model.parent.rglob("*"))
    line = refused("shrink", model, "--out", model.parent / "out", *options)
    assert sorted(model.parent.rglob("*")) == before
    return line


def test_a_folder_with_no_config(copy, nothing_loaded):
    (copy / "config.json").unlink()
    assert "has no config.json; it holds " in judged(copy)


def test_a_truncated_safetensors_file(copy, nothing_loaded):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file} is truncated: its header promises" in judged(copy)


@pytest.mark.parametrize("kind", ["opt", "no_such_family"])
def test_a_family_that_is_not_adopted(copy, nothing_loaded, kind):
    (copy / "config.json").write_text(json.dumps({"model_type": kind}))
    line = judged(copy)
    assert f"models of type '{kind}' are not adopted (families known: bert, camembert, deit, " in line


@pytest.mark.parametrize(
    ("kind", "said"),
    [("gpt2", "a gpt2 adds positions to its embeddings"), ("bert", "a bert is no causal language model")],
)
def test_a_family_that_is_adopted_and_not_converted(copy, nothing_loaded, kind, said):
    (copy / "config.json").write_text(json.dumps({"model_type": kind}))
    assert said in judged(copy)


def test_a_family_whose_layers_cannot_be_converted(copy, nothing_loaded):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "qwen3", "head_dim": 6}))
    assert "layer 0 cannot become mla-50: " in judged(copy)


def test_a_folder_that_is_not_there(tmp_path):
    assert f"{tmp_path / 'nowhere'}: no such file or folder" in refused("shrink", tmp_path / "nowhere")


def test_a_model_without_a_tokenizer(copy):
    for file in copy.glob("token*"):
        file.unlink()
    assert "copy has no tokenizer" in judged(copy)


def test_text_shorter_than_the_calibration_needs(copy):
    (copy.parent / "short.txt").write_text("too short " * 10)
    line = judged(copy, "--text", str(copy.parent / "short.txt"))
    assert "calibration: the text has 80 tokens, and 16 windows of 512 need 8192" in line


def test_an_out_folder_that_exists(tiny, tmp_path, nothing_loaded):
    for out in (tmp_path / "empty", tmp_path / "file"):
        out.mkdir() if out.name == "empty" else out.touch()
        assert f"{out} exists already; remove it or choose another folder" in refused("shrink", tiny, "--out", out)
        assert f"{out} exists already" in refused("shrink", tiny, "--out", out, "--resume")


def test_a_rank_above_the_exact_one_is_clipped_with_a_note_and_exact(tiny, tmp_path):
    ran = run("shrink", tiny, "--kv", "150%", "--heal", "none", "--json", "--out", tmp_path / "o", *SMALL[:-2])
    note = "mla-150: a rank of 48 is above the exact one; clipped to 24, which makes 48 numbers a token and layer"
    assert ran.code == 0 and f"note: {note}" in ran.err and ran.json["notes"] == [note]
    (row,) = ran.json["candidates"]
    assert row["kl"] < 1e-5 and row["top1"] == 1 and row["kv_floats_per_token_layer"] == 48


def test_debug_shows_where(tiny, tmp_path):
    with pytest.raises(FileExistsError):
        run("shrink", tiny, "--out", tmp_path, "--debug")


# --- what interrupts it


def test_disk_full_at_the_first_byte_leaves_nothing(tiny, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(conversion, "save_file", full)
    line = refused("shrink", tiny, "--out", tmp_path / "new" / "o", *SMALL)
    assert "the disk is full: writing " in line and "nothing of it is left" in line
    assert not list(tmp_path.iterdir())


def test_a_target_is_of_a_plan(tiny, tmp_path):
    ran = run("shrink", tiny, "--target", "speed", "--out", tmp_path / "o")
    assert ran.code == 2 and "a target is of --to auto, not of --to mla" in ran.err
    small = ["--contexts", "none", "--json", "--out", tmp_path / "p", *SMALL[:4]]
    ran = run("shrink", tiny, "--to", "auto", "--target", "speed", "--kv", "90%", *small)
    (row,) = json.loads(ran.out.splitlines()[-1])["candidates"]
    assert row["name"] == "auto-speed-90" and row["planned"]["reasons"]
    assert "why auto-speed-90:" in ran.out


def test_disk_full_later_keeps_what_is_finished_for_resume(tiny, shrunk, tmp_path, monkeypatch):
    saved, out = conversion.save_file, tmp_path / "o"

    def fill_up(tensors, file, **kwargs):
        if "layer-00001" in Path(file).name:
            Path(file).write_bytes(b"half")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        saved(tensors, file, **kwargs)

    command = ["shrink", tiny, "--kv", "50%", "--kv", "25%", "--json", "--out", out, *SMALL]
    monkeypatch.setattr(conversion, "save_file", fill_up)
    line = refused(*command)
    assert "what is finished stays there: make room and go on with --resume" in line
    assert not out.exists() and not list(tmp_path.rglob("*.tmp"))
    monkeypatch.setattr(conversion, "save_file", saved)
    assert run(*command, "--resume").code == 0
    assert weights(out / "mla-25") == weights(shrunk / "mla-25")
    assert [entry.name for entry in tmp_path.iterdir()] == ["o"]


def test_an_interrupt_before_anything_is_finished_leaves_nothing(tiny, tmp_path, monkeypatch):
    interrupt(monkeypatch, "calibrate", 0)
    ran = run("shrink", tiny, "--out", tmp_path / "o", *SMALL)
    assert ran.code == 130 and "interrupted" in ran.err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("stage", "done"), [("calibrate", 2), ("mla-50", 1), ("mla-50", 3), ("mla-25", 2), ("measure mla-50", 1)]
)
def test_resume_gives_what_an_uninterrupted_run_gives(tiny, shrunk, tmp_path, monkeypatch, stage, done):
    out = tmp_path / "o"
    command = ["shrink", tiny, "--kv", "50%", "--kv", "25%", "--json", "--out", out, *SMALL]
    with monkeypatch.context() as pressed:
        interrupt(pressed, stage, done)
        ran = run(*command)
    assert ran.code == 130 and not ran.out and not out.exists()
    assert f"{out}.partial keeps what is finished; the same command with --resume goes on from there" in ran.err
    line = refused(*command)
    assert f"{out}.partial holds an unfinished job; go on with it (--resume), or remove it" in line
    again = run(*command, "--resume")
    assert again.code == 0
    for name in ("mla-50", "mla-25"):
        assert weights(out / name) == weights(shrunk / name) != {}
        assert sorted(file.name for file in (out / name).iterdir()) == sorted(
            file.name for file in (shrunk / name).iterdir()
        )
    before = json.loads((shrunk / "result.json").read_text())
    for row, whole in zip(again.json["candidates"], before["candidates"], strict=True):
        assert {key: row[key] for key in ("spec", "perplexity", "kl", "top1", "damage", "sample")} == {
            key: whole[key] for key in ("spec", "perplexity", "kl", "top1", "damage", "sample")
        }


def test_resume_with_other_options_names_them(tiny, tmp_path, monkeypatch):
    out = tmp_path / "o"
    with monkeypatch.context() as pressed:
        interrupt(pressed, "mla-50", 1)
        assert run("shrink", tiny, "--out", out, *SMALL).code == 130
    before = sorted(tmp_path.rglob("*"))
    line = refused("shrink", tiny, "--out", out, "--resume", "--kv", "25%", "--seed", "3", *SMALL)
    assert "holds a job with other options" in line
    assert "kv was ['50%'], is ['25%']" in line and "seed was 0, is 3" in line and "text" not in line
    line = refused("shrink", tiny, "--out", out, "--resume", *SMALL[2:], "--calibrate", "4x32")
    assert "text was" in line and "4 windows of 32 tokens" in line
    assert sorted(tmp_path.rglob("*")) == before


def test_resume_with_nothing_to_resume_starts(tiny, tmp_path):
    assert run("shrink", tiny, "--resume", "--out", tmp_path / "o", *SMALL).code == 0
    assert load_file(next((tmp_path / "o/mla-50").glob("layer-*.safetensors")))


# --- what it checks


def test_a_cache_of_another_size_than_the_specs_say_is_an_error(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "kv_bytes", lambda cache: 1)
    assert "the cache of 64 tokens holds 1 bytes, where its specs say" in refused(
        "shrink", tiny, "--out", tmp_path / "o", *SMALL
    )
    assert not (tmp_path / "o").exists()


def test_decoding_that_differs_from_the_full_pass_is_an_error(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "decode_equals_forward", lambda model, tokens: 0.5)
    line = refused("shrink", tiny, "--out", tmp_path / "o", *SMALL)
    assert "source: decoding with the cache differs from the full pass by 0.5" in line


def test_a_model_read_layer_by_layer_has_the_figures_of_one_in_memory(tiny, tmp_path):
    """Without healing, and in a plain metric on both sides, so that the candidates are nearly the same."""
    rows = {}
    for name, more in (("disk", ["--stream"]), ("memory", [])):
        out = tmp_path / name
        budgets = ["--kv", "50%", "--heal", "none", "--to", "mla(factor=activations, keep=high, slots=complex)"]
        ran = run("shrink", tiny, *budgets, *more, "--contexts", "none", "--json", "--out", out, *SMALL[:4])
        assert ran.code == 0, ran.err
        result = json.loads(ran.out.splitlines()[-1])
        rows[name] = [result["source"], *result["candidates"]]
        assert (out / "report.html").exists() == (result["report"] is not None)
    for disk, memory in zip(rows["disk"], rows["memory"], strict=True):
        for key in ("spec", "specs", "kv_floats_per_token_layer", "kv_bytes_per_token"):
            assert disk[key] == memory[key], key
        for key in ("perplexity", "kl"):
            assert disk[key] == pytest.approx(memory[key], rel=1e-3, abs=1e-6), key
    assert weights(tmp_path / "disk" / "mla-50").keys() == weights(tmp_path / "memory" / "mla-50").keys()


def test_a_stream_needs_a_folder_and_no_whole_model(tiny, tmp_path):
    assert "layers are read from a folder" in refused("shrink", "smollm2", "--stream", "--out", tmp_path / "o")
    assert "no stream" in refused("shrink", tiny, "--stream", "--distil", "2", "--out", tmp_path / "o")
    assert not list(tmp_path.iterdir())


def test_a_bad_map_of_devices_is_refused_before_anything_is_read(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "load_source", None)
    file = tmp_path / "map.json"
    file.write_text('{"model.layers.0": "cpu", "1": "cpu"}')
    for given, said in (("there:0", "'there:0', which is not here; auto and cpu"), (file, "lacks layer 2; it takes")):
        assert said in refused("shrink", tiny, "--device-map", given, "--out", tmp_path / "o")
    assert [*tmp_path.iterdir()] == [file]


# --- several processes


@pytest.mark.slow
def test_processes_of_a_launcher_make_what_one_makes(tiny, tmp_path):
    """They share the layers of the survey, then the candidates."""
    own = ["shrink", tiny, "--kv", "50%", "--kv", "25%", *SMALL[:4], "--contexts", "none", "--json"]
    for count in (1, 2):
        ran = launched(TORCHRUN[count], *own, "--out", tmp_path / f"{count}")
        assert ran.returncode == 0, ran.stderr
        assert sum(line.startswith("{") for line in ran.stdout.splitlines()) == 1  # rank 0 alone says what came out
    assert not (tmp_path / "2.partial").exists()
    one, two = (sorted(file.name for file in (tmp_path / count).iterdir()) for count in ("1", "2"))
    assert one == two
    for name in ("mla-50", "mla-25"):
        assert weights(tmp_path / "1" / name) == weights(tmp_path / "2" / name)


def test_several_processes_do_not_train(tiny, tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "several processes train by a command of its own, heal" in refused(
        "shrink", tiny, "--distil", "4", "--out", tmp_path / "o", *SMALL
    )
