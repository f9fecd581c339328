"""eval, generate, explain, export, list, and what every command shares."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.cli.line import refused, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from manyheads import Spec, __version__
from manyheads.cli import main, output
from manyheads.cli.output import paragraphs
from manyheads.core.registry import all_feeds, all_parts, all_presets

FIGURES = {"spec", "specs", "kv_floats_per_token_layer", "kv_bytes_per_token", "perplexity", "kl", "top1"}


@pytest.fixture(scope="module")
def single(shrunk, tmp_path_factory) -> Path:
    """A shrink output folder with one candidate."""
    folder = tmp_path_factory.mktemp("single") / "one"
    folder.mkdir()
    (folder / "mla-50").symlink_to(shrunk / "mla-50")
    result = json.loads((shrunk / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"candidates": result["candidates"][:1]}))
    return folder


# --- every command


def test_help_needs_neither_torch_nor_transformers():
    code = """if True:
        import sys
        from typer.testing import CliRunner
        from manyheads.cli import app
        assert CliRunner().invoke(app, ["shrink", "--help"]).exit_code == 0
        print(sorted({"torch", "transformers", "rich.progress"} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_command_has_help_in_80_columns_and_options_that_are_explained():
    for name in ("shrink", "heal", "eval", "generate", "explain", "export", "list"):
        ran = run(name, "--help")
        assert ran.code == 0 and "--json" in ran.out and max(map(len, ran.out.splitlines())) <= 80
    assert run().out.count("\n") > 10 and run("--version").out == f"{__version__}\n"
    assert run("no-such-command").code == 2


def test_the_entry_points_run_the_same_application():
    done = subprocess.run([sys.executable, "-m", "manyheads", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{__version__}\n"
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'manyheads = "manyheads.cli:main"' in project and callable(main)


@pytest.mark.parametrize("command", [["eval"], ["generate", "x"], ["explain"], ["export", "--out", "new"]])
def test_an_output_folder_with_several_candidates_lists_them(shrunk, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    line = refused(command[0], shrunk, *command[1:])
    assert f"holds 2 candidates; give one of them: {shrunk}/mla-50, {shrunk}/mla-25" in line


@pytest.mark.parametrize("command", [["eval"], ["generate", "x"], ["explain"], ["export", "--out", "new"]])
def test_a_model_that_is_not_there(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    assert "no such file or folder" in refused(command[0], "./nowhere", *command[1:])
    (tmp_path / "hollow").mkdir()
    assert "has no config.json; it holds nothing" in refused(command[0], "hollow", *command[1:])
    (tmp_path / "hollow" / "result.json").write_text("{}")
    assert "result.json was not written by manyheads shrink" in refused(command[0], "hollow", *command[1:])


def test_json_never_holds_what_json_does_not_know(capsys):
    output.finish({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x"), 3: (True, None)}, True)
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": "x", "3": [True, None]}


def test_errors_of_the_system_are_told_without_numbers():
    assert output.message(FileNotFoundError(2, "No such file", "a.txt")) == "a.txt: No such file"
    assert output.message(OSError(28, "the disk is full: x")) == "the disk is full: x"
    assert output.message(ValueError("")) == "ValueError"


def test_a_reader_that_has_gone_is_no_error_to_tell():
    command = f"'{sys.executable}' -m manyheads list | true"
    assert not subprocess.run(["bash", "-c", command], capture_output=True, text=True).stderr


def test_in_a_terminal_there_are_bars(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with output.Bars() as bars:
        bars("calibrate", 1, 2)
        bars("calibrate", 2, 2)
        assert [task.completed for task in bars._bars.tasks] == [2]


# --- eval


def test_eval_alone_and_against_a_source(single, shrunk, tiny):
    whole = json.loads((shrunk / "result.json").read_text())["candidates"][0]
    ran = run("eval", single, "--against", tiny, "--evaluate", "2x64", "--json")
    assert set(ran.json) == FIGURES | {"model", "against", "tokens"}
    for key in FIGURES:  # of the same text and windows as in shrink
        assert ran.json[key] == whole[key]
    ran = run("eval", single / "mla-50", "--evaluate", "2x64")
    assert ran.code == 0 and "KL" not in ran.out and "288" in ran.out and "mla(rank=22" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    alone = run("eval", single / "mla-50", "--evaluate", "2x64", "--json").json
    assert alone["kl"] is None and alone["top1"] is None and alone["perplexity"] == whole["perplexity"]


def test_eval_of_a_source_and_of_own_text(tiny, tmp_path):
    (tmp_path / "own.txt").write_text("All work and no play. " * 40)
    found = run("eval", tiny, "--text", tmp_path / "own.txt", "--evaluate", "1x32", "--json").json
    assert found["spec"] == "gqa(kv_heads=4) + rope" and found["kv_bytes_per_token"] == 576 and found["tokens"] == 32
    line = refused("eval", tiny, "--text", tmp_path / "own.txt")
    assert "the text has 176 tokens, and 5 windows of 2048 need 10240" in line
    assert "missing.txt: No such file" in refused("eval", tiny, "--text", tmp_path / "missing.txt")


# --- generate


def test_generate_streams_what_the_model_writes(single):
    model, tokenizer = (kind.from_pretrained(single / "mla-50") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = model.generate(**tokenizer("Heads", return_tensors="pt"), max_new_tokens=9, do_sample=False)
    ran = run("generate", single, "Heads", "--tokens", "9", "--json")
    assert set(ran.json) == {"model", "prompt", "text", "tokens", "seconds"} and ran.json["tokens"] == 9
    assert ran.json["text"] == tokenizer.decode(ids[0, 5:], skip_special_tokens=True)
    plain = run("generate", single, "Heads", "--tokens", "9")
    assert plain.code == 0 and plain.out.startswith("Heads")


def test_the_same_seed_samples_the_same_text(tiny):
    command = ["generate", tiny, "x", "--tokens", "12", "--sample", "--top-p", "0.9", "--json", "--seed"]
    texts = [run(*command, seed).json["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_generate_refuses_an_empty_prompt_and_wrong_numbers(tiny):
    assert "the prompt is empty" in refused("generate", tiny, " ")
    assert run("generate", tiny, "x", "--tokens", "0").code == 2
    assert run("generate", tiny, "x", "--top-p", "2").code == 2
    for option in ("--top-p", "--temperature"):
        assert "--temperature and --top-p go with --sample" in refused("generate", tiny, "x", option, "0.9")
    assert "--chunk goes with --prompts" in refused("generate", tiny, "x", "--chunk", "8")


def test_prompts_of_a_file_are_answered_together_as_each_alone(single, tmp_path):
    system, prompts = tmp_path / "system.txt", tmp_path / "prompts.txt"
    system.write_text("All answers are short and to the point.\n")
    prompts.write_text("Heads\n\nTails of dogs\nHeads\n")
    ran = run("generate", single, "--system", system, "--prompts", prompts, "--chunk", "8", "--tokens", "5", "--json")
    found = ran.json
    assert set(found) == {
        "model", "answers", "prompt_tokens", "stored_tokens", "cache_bytes", "apart_bytes", "seconds", "system",
    }  # fmt: skip
    assert [each["prompt"] for each in found["answers"]] == ["Heads", "Tails of dogs", "Heads"]
    assert found["stored_tokens"] == found["prompt_tokens"] - 2 * 40 and found["cache_bytes"] < found["apart_bytes"]
    for each in found["answers"]:
        alone = run("generate", single, system.read_text() + each["prompt"], "--tokens", "5", "--json").json
        assert each["text"] == alone["text"] and each["tokens"] == 5 and each["prompt"] + each["text"] in ran.out
    sampled = ["generate", single, "--prompts", prompts, "--sample", "--json", "--tokens", "5", "--seed"]
    a, b, c = (run(*sampled, seed).json["answers"] for seed in ("1", "1", "2"))
    assert a == b != c


def test_generate_refuses_what_is_no_file_of_prompts(tiny, tmp_path):
    def file(name, data):
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    one = file("one.txt", b"x\n")
    for says, *args in (
        ("give a PROMPT, or a file of them",), ("give a PROMPT, or a file of them", "x", "--prompts", one),
        ("--system goes with --prompts", "x", "--system", one),
        ("empty.txt holds no text", "--prompts", file("empty.txt", b" \n\n")),
        ("is not UTF-8 text: byte 0xff at offset 1", "--prompts", file("image.png", b"a\xff\xd8")),
        ("is not text: a zero byte", "--prompts", file("zero", b"a\0b")),
        ("missing.txt: No such file", "--prompts", tmp_path / "missing.txt"),
        ("holds no text", "--prompts", one, "--system", tmp_path / "empty.txt"),
        ("prompt 2 has 600 tokens; the model was made for 512", "--prompts", file("long", b"x\n" + b"y" * 600)),
    ):  # fmt: skip
        assert says in refused("generate", tiny, *args)
    assert run("generate", tiny, "--prompts", one, "--chunk", "0").code == 2


# --- explain


def test_explain_a_checkpoint(single):
    ran = run("explain", single, "--json", "--queries", "1,300")
    (kind,) = ran.json["kinds"]
    assert set(kind) == {
        "layers", "spec", "dim", "heads", "parameters", "cache_floats", "state_floats", "cache_bytes", "windows",
        "passes",
    }  # fmt: skip
    assert kind["layers"] == [0, 1, 2] and (kind["dim"], kind["heads"]) == (48, 8)
    assert kind["cache_floats"] == 24 and ran.json["cache_bytes"] == 288
    assert [each["queries"] for each in kind["passes"]] == [1, 300]
    assert kind["passes"][0]["kernel"] == "sdpa" and kind["passes"][1]["kernel"] == "sdpa"
    assert "300 query rows" in kind["passes"][1]["refused"]["grouped"]
    assert max(map(len, ran.out.splitlines()[:-1])) <= 80


def test_explain_a_source_reads_no_weights(tiny, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    ran = run("explain", tmp_path)
    assert "layers 0-2: gqa(kv_heads=4) + rope" in ran.out and "in all: 144 numbers" in ran.out


def test_explain_a_spec_says_why_a_kernel_is_slow():
    ran = run("explain", "gqa(kv_heads=2) + talking_heads", "--dim", "64", "--heads", "4", "--json")
    (kind,) = ran.json["kinds"]
    assert kind["parameters"] == Spec.parse("gqa(kv_heads=2) + talking_heads").cost(64, 4).parameters
    assert {each["kernel"] for each in kind["passes"]} == {"tiled"} and "not sdpa: TalkingHeads" in ran.out


def test_explain_says_what_is_kept_for_the_newest_tokens_only():
    ran = run("explain", "window(size=4)", "--json")
    assert "keeps 1024 of them for the newest 3 tokens only" in ran.out
    assert ran.json["kinds"][0]["windows"] == [{"tokens": 3, "floats": 1024.0}]


def test_explain_says_what_a_decoding_step_waits_for():
    ran = run("explain", "gqa(kv_heads=2)", "--dim", "64", "--heads", "8", "--intensity", "--json")
    step = ran.json["kinds"][0]["decoding"]
    assert step["cache"]["intensity"] == 4 and step["weights"]["intensity"] == 1 and step["cache"]["bound"] == "memory"
    assert (
        "FLOPs per byte: weights 1, cache 4" in " ".join(ran.out.split())
        and max(map(len, ran.out.splitlines()[:-1])) <= 80
    )


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("mla(rnak=3)", "has no option 'rnak'"),
        ("nothing", "nothing is neither a folder nor a spec: no part 'nothing'"),
        ("gqa(kv_heads=3)", "8 query heads cannot share kv_heads=3"),
        ("gqa + mla", "'gqa' and 'mla'|one projection"),
        ("mla(rank=4", "expected"),
    ],
)
def test_explain_says_what_is_wrong_with_a_spec(spec, said):
    ran = run("explain", spec)
    assert ran.code == 1 and "Traceback" not in ran.err and any(each in ran.err for each in said.split("|"))


# --- export


def test_export_to_the_stock_class(single, tmp_path):
    ran = run("export", single, "--format", "deepseek", "--out", tmp_path / "stock", "--json")
    assert ran.json["loads_as"] == "DeepseekV3ForCausalLM" and ran.json["difference"] < 1e-3
    assert ran.json["folder"] == str(tmp_path / "stock") and "reloaded: largest" in ran.out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    assert AutoTokenizer.from_pretrained(tmp_path / "stock")("ab").input_ids
    found = run("eval", tmp_path / "stock", "--against", single, "--evaluate", "2x64", "--json").json
    assert found["kl"] < 1e-4 and found["spec"] == "DeepseekV3ForCausalLM" and found["kv_bytes_per_token"] > 0


def test_export_a_source_to_our_own_format_in_another_dtype(tiny, tmp_path):
    ran = run("export", tiny, "--format", "manyheads", "--dtype", "bfloat16", "--out", tmp_path / "own")
    assert ran.code == 0 and "bfloat16" in ran.out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "own").dtype == torch.bfloat16


def test_export_refuses_a_folder_that_exists_before_it_loads(tmp_path):
    assert f"{tmp_path} exists already" in refused("export", "no-such-model", "--out", tmp_path)
    assert run("export", "no-such-model").code == 2


# --- list


def test_list_holds_every_part_preset_and_feed_forward():
    ran = run("list", "--json")
    names = [each["name"] for each in ran.json]
    assert names == [*all_parts(), *all_presets(), *all_feeds()] and {"gqa", "moh", "gda", "moe"} <= set(names)
    for each in ran.json:
        assert {"name", "stage", "paper", "options"} <= set(each)
    mla = ran.json[names.index("mla")]
    assert mla["options"]["rank"] == {"type": "int | none", "default": None}
    assert ran.json[names.index("gda")]["parts"] == ["differential", "head_norm"]
    assert max(map(len, ran.out.splitlines()[:-1])) <= 80
    assert run("list").out == "".join(f"{line}\n" for line in ran.out.splitlines()[:-1])


def test_list_explains_one_part():
    ran = run("list", "rope", "--json")
    assert ran.json["name"] == "rope" and "turns by position" in ran.json["doc"]
    assert ran.json["options"]["pairing"]["type"] == "half | interleaved | none"
    assert "rope (position, arXiv 2104.09864)" in ran.out and "interleaved" in ran.out
    assert run("list", "gda").code == 0
    assert "moe (feed-forward, arXiv 2101.03961)" in run("list", "moe").out
    assert "no part 'ropee'; did you mean rope" in refused("list", "ropee")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("melt", "melt (feature of looped stacks, melt= of a stack)"),
        ("mhar", "mhar (residual, residual= of a stack)"),
        ("cla", "cla (map of layers, kv_source= or attn_source= of a stack)"),
        ("geometric", "geometric (schedule of head counts, heads= of a stack)"),
        ("care", "care (method, --to of `manyheads shrink`, arXiv"),
        ("mhr", "mhr (adapter, of `manyheads.adapt`, arXiv"),
        ("abmil", "abmil (aggregator, of `manyheads.aggregate`)"),
        ("ordinal", "ordinal (output head, of `manyheads.multi`)"),
        ("mmoe", "mmoe (module between trunk and heads, of `manyheads.multi`)"),
    ],
)
def test_list_explains_what_has_a_line_but_is_no_part(name, said):
    ran = run("list", name, "--json")
    assert ran.out.startswith(said) and ran.json["name"] == name and ran.json["doc"]
    assert max(map(len, ran.out.splitlines()[:-1])) <= 80
    assert f"{name} is no part of a spec, but a" in refused("list", name, "--pairs")


@pytest.mark.parametrize("part", ["moh", "moe", "window", "hymba", "mh_moe", "rope", "mla", "gated_delta_net"])
def test_list_explains_in_80_columns_and_in_the_grammar_of_specs(part):
    ran = run("list", part)
    assert max(map(len, ran.out.splitlines())) <= 80
    assert not any(word in ran.out for word in ("Literal", "tuple", "NoneType"))


def test_options_hang_below_their_names(capsys):
    paragraphs("""One line\nthat goes on.

Options:
    top: how many,
        at most all.
    rest: 1.

Source: x.""")
    assert capsys.readouterr().out.splitlines() == [
        "One line that goes on.", "", "Options:", "    top: how many, at most all.", "    rest: 1.", "", "Source: x.",
    ]  # fmt: skip


def test_list_shows_families_that_are_adopted():
    ran = run("list", "--families", "--json")
    said = {(kind, each["attention"]): each["class"] for each in ran.json for kind in each["models"]}
    assert said["gemma3_text", "model.layers.{}.self_attn"] == "ManyheadsForCausalLM"
    assert said["whisper", "decoder.layers.{}.encoder_attn"] == "its own"
    assert max(map(len, ran.out.splitlines()[:-1])) <= 80 and "transformer.h.{}.attn" in ran.out


def test_list_shows_which_parts_go_together():
    ran = run("list", "--pairs", "--json")
    legal = {(each["first"], each["second"]): each["legal"] for each in ran.json}
    assert legal["gqa", "kha"] and not legal["gqa", "mla"] and legal["kha", "qk-norm"] and legal["qk-norm", "kha"]
    assert all(each["legal"] or each["why"] for each in ran.json)
    assert max(map(len, ran.out.splitlines()[:-1])) <= 80
    rows, names = dict.fromkeys(all_parts(), ""), [*all_parts()]
    for number, *row in (line.split() for line in ran.out.splitlines() if line):
        if len(row) == 2 and row[0] in rows:  # in bands, where it is wider than a terminal
            assert names[int(number) - 1] == row[0]
            rows[row[0]] += row[1]
    assert all(len(row) == len(names) for row in rows.values())
    assert rows["mla"][names.index("kha")] == rows["kha"][names.index("mla")] == "+"
    assert rows["rope"][names.index("alibi")] == "."


def test_list_says_why_two_parts_exclude_each_other():
    said = " ".join(run("list", "qk-norm", "--pairs").out.split())
    assert said.startswith("qk-norm goes with gaam, ") and ", gqa, " in said.split(" dhvt + ")[0]
    assert "dhvt + qk-norm: 'dhvt' needs 'bidirectional'" in said and "nearest legal" in said
    assert "cca + qk-norm: " in said
    assert "no part 'kah'; did you mean kha" in refused("list", "kah", "--pairs")
