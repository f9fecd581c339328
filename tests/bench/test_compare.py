"""A comparison: the same numbers each time, interrupted or not; refused in one sentence; nothing half-written."""

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from tests.bench.browser import drawn
from tests.bench.test_report import Page

from manyheads.bench import compare as module
from manyheads.bench import plan as plan_module
from manyheads.bench import train as train_module
from manyheads.bench.compare import compare
from manyheads.bench.compare_report import _against, _finding
from manyheads.bench.comparison import Comparison, Entry
from manyheads.bench.page import named
from manyheads.bench.train import Trainer, Training
from manyheads.convert.resume import ResumeError
from manyheads.convert.text import default_text
from manyheads.core.part import OptionError
from manyheads.core.spec import SpecError

SPECS = ["gqa", "gqa(kv_heads=1) + moh(top=1)", "mla(rank=8, rope_dim=4) + headmask"]
"""The second has an auxiliary loss, the third draws random numbers in training."""
SMALL = dict(dim=16, heads=2, layers=1, context=24, batch=3, steps=10, seeds=2, save_every=4, threads=1)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def short_text():
    text = default_text()[:4_000]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "default_text", lambda: text)
        yield


@pytest.fixture(scope="module")
def found(short_text, tmp_path_factory) -> Comparison:
    """A comparison that was never interrupted, not to be changed."""
    return compare(SPECS, **SMALL, out=tmp_path_factory.mktemp("jobs") / "whole")


def tree(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# --- what it finds


def test_every_spec_has_every_figure(found):
    assert found.grid == tuple(range(11))
    assert [entry.spec for entry in found.entries] == SPECS
    for entry in found.entries:
        assert [len(curve) for curve in entry.curves] == [11, 11] and all(map(math.isfinite, sum(entry.curves, ())))
        assert entry.step_ms > 0 and entry.tokens_per_second > 0 and entry.seconds > 0 and entry.off is None
        assert entry.cache_measured == entry.cache and entry.dim == 16
        assert entry.loss < entry.curves[0][0] - 0.1
    assert [entry.cache for entry in found.entries] == [128, 64, 48]
    assert found.notes == () and found.base.resolved == "gqa + rope"


def test_differences_are_paired_by_seed():
    def entry(*losses):
        return Entry("gqa", "gqa", 8, 1, 1, 1, 1, None, tuple((9.0, loss) for loss in losses), 1, 1, 1)

    base, other = entry(2.0, 3.0, 4.0), entry(2.1, 3.3, 4.2)
    found = Comparison((base, other), (0, 1), {}, "", "", "", 0, (), "", None)
    difference, error = found.difference(other)
    assert difference == pytest.approx(0.2) and error == pytest.approx(0.1 / math.sqrt(3))
    assert (other.loss, other.spread) == (mean(other.losses), stdev(other.losses))
    single = Comparison((entry(2.0), entry(1.5)), (0, 1), {}, "", "", "", 0, (), "", None)
    assert single.difference(single.entries[1]) == (-0.5, None) and single.base.spread is None


def test_a_spec_s_curve_does_not_depend_on_its_company_nor_on_what_was_drawn_before(found, tmp_path):
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    again = compare(SPECS[2], **SMALL, out=tmp_path / "o")
    assert again.base.curves == found.entries[2].curves
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_the_result_reads_back_as_it_was(found):
    assert Comparison.read(Path(found.out) / "result.json") == found
    made = json.loads((Path(found.out) / "result.json").read_text())["entries"]
    assert made[0]["difference"] is None and made[1]["difference"] == found.difference(found.entries[1])[0]
    assert {file.name for file in Path(found.out).iterdir()} == {"job.json", "result.json", "report.html", "runs"}
    assert all(file.suffix == ".json" for file in (Path(found.out) / "runs").iterdir())


def test_equal_parameters(tmp_path):
    small = SMALL | {"steps": 1, "seeds": 1, "dim": 32}
    found = compare(["gqa", "gqa(kv_heads=1)", "mla(rank=8, rope_dim=4)"], **small, equal="cache", out=tmp_path / "o")
    assert [entry.dim for entry in found.entries] == [32, 64, 32]
    assert [entry.off for entry in found.entries] == [0, 0, 12 / 64 - 1]
    assert [entry.hidden for entry in found.entries] == [88, 176, 88]
    assert found.notes == (
        "gqa(kv_heads=1): width 64, 256 cache bytes a token (+0.0 %)",
        "mla(rank=8, rope_dim=4): no width is within 5 % of 256 cache bytes a token; the nearest, 32, has 48 (−81.2 %)",
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes(tmp_path, dtype):
    found = compare(SPECS[:2], **SMALL | {"steps": 4, "seeds": 1, "dtype": dtype}, out=tmp_path / "o")
    assert [entry.cache_measured for entry in found.entries] == ([64, 32] if dtype == "bfloat16" else [256, 128])
    assert all(entry.loss < entry.curves[0][0] for entry in found.entries)


# --- how it trains


def trainer(spec: str = "gqa", **options) -> Trainer:
    small = {"steps": 5, "batch": 2, "context": 8, "warmup": 2, **options}
    corpus = train_module.Corpus(bytes(range(200)), bytes(range(100)))
    return Trainer(train_module.Design(spec, 16, 2, 1), Training(**small), corpus, 0)


def test_parts_hear_of_progress_from_0_to_1(monkeypatch):
    one, heard = trainer(), []
    monkeypatch.setattr(one.model.stack.blocks[0].attention, "on_step", heard.append)
    for _ in range(5):
        assert one.step()
    assert heard == [0, 0.25, 0.5, 0.75, 1]


def test_auxiliary_losses_are_added(monkeypatch):
    gradients = []
    for weight in (0.0, 10.0):
        one = trainer("gqa + moh(top=1)", aux_weight=weight)
        one.step()
        gradients.append({name: p.grad for name, p in one.model.named_parameters()})
    routers = [name for name in gradients[0] if "gates" in name]
    assert routers and any(not torch.allclose(gradients[0][n], gradients[1][n]) for n in routers)


def test_the_rate_warms_up_and_falls_to_a_tenth():
    training = Training(steps=100, warmup=10, lr=1.0)
    assert [training.rate(step) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert training.rate(10) == 1 and training.rate(100) == pytest.approx(0.1)
    assert trainer(warmup=0).training.rate(0) == 3e-3


def test_held_out_windows_do_not_overlap_in_what_is_predicted():
    rows = train_module.Corpus(b"", bytes(range(100))).windows(8)
    targets = rows[:, 1:].flatten().tolist()
    assert rows.shape == (12, 9) and len(set(targets)) == len(targets) == 96


def test_a_run_that_diverges_ends_and_says_so(tmp_path, monkeypatch):
    loss = Trainer._loss

    def burst(self, tokens, links=None):
        return loss(self, tokens, links) * (math.nan if self.done == 6 and self.seed == 1 and links is not None else 1)

    monkeypatch.setattr(Trainer, "_loss", burst)
    found = compare(SPECS[:1], **SMALL, out=tmp_path / "o")
    assert math.isnan(found.base.loss) and math.isfinite(found.base.losses[0])
    assert math.isfinite(found.base.curves[1][6]) and math.isnan(found.base.curves[1][7])
    assert found.notes == ("gqa: 1 of 2 runs diverged; a smaller --lr may help",)
    assert "NaN" not in (tmp_path / "o/result.json").read_text()
    assert math.isnan(Comparison.read(tmp_path / "o/result.json").base.loss)


# --- interrupts


class Stop(Exception):
    pass


@pytest.mark.parametrize(("index", "step"), [(0, 0), (1, 9), (2, 5), (4, 3)])
def test_an_interrupted_comparison_ends_with_the_same_numbers(found, tmp_path, index, step):
    name, seen = f"{SPECS[index % 3]}, seed {index // 3}", []

    def press(stage, done, total):
        if (stage, done) == (name, step):
            raise Stop

    with pytest.raises(Stop):
        compare(SPECS, **SMALL, out=tmp_path / "o", progress=press)
    assert not (tmp_path / "o/result.json").exists()
    again = compare(SPECS, **SMALL, out=tmp_path / "o", progress=lambda *stage: seen.append(stage))
    assert seen[0] == (name, step // 4 * 4 if step else 0, 10)  # from the last checkpoint of the run that was stopped
    assert [entry.curves for entry in again.entries] == [entry.curves for entry in found.entries]
    assert not list((tmp_path / "o").rglob("*.pt")) and not list((tmp_path / "o").rglob("*.tmp"))


def test_a_finished_comparison_is_read_and_not_made_again(found, monkeypatch):
    def never(*args, **options):
        raise AssertionError("made again")

    before = tree(Path(found.out))
    monkeypatch.setattr(module, "run_all", never)
    monkeypatch.setattr(module, "make_plan", never)
    small = {name: value for name, value in SMALL.items() if name != "threads"}  # those recorded hold
    assert compare([" gqa", "gqa(kv_heads=1)  +  moh(top=1)", "mla(rank=8,rope_dim=4)+headmask".replace("+", " + ")],
                   **small, jobs=2, out=found.out) == found  # fmt: skip
    assert tree(Path(found.out)) == before


def test_other_options_are_refused_by_name(found):
    before = tree(Path(found.out))
    with pytest.raises(ResumeError) as refusal:
        compare(SPECS[:2], **SMALL | {"steps": 15, "lr": 0.1, "threads": 2}, out=found.out)
    said = str(refusal.value)
    assert "steps was 10, is 15" in said and "lr was 0.003, is 0.1" in said and "threads was 1, is 2" in said
    assert "specs was ['gqa', " in said and "is ['gqa', 'gqa(kv_heads=1) + moh(top=1)']" in said
    assert "heads" not in said.replace("kv_heads", "") and "repeat them, or choose another folder" in said
    assert tree(Path(found.out)) == before


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o/thesis.tex").write_text("all of it")
    for out in (tmp_path / "o", tmp_path / "o/thesis.tex"):
        with pytest.raises(FileExistsError, match="holds no comparison; choose another folder"):
            compare("gqa", **SMALL, out=out)
    assert os.listdir(tmp_path / "o") == ["thesis.tex"]


def test_a_broken_checkpoint_or_result_is_named(tmp_path):
    def press(stage, done, total):
        if done == 5:
            raise Stop

    with pytest.raises(Stop):
        compare("gqa", **SMALL, out=tmp_path / "o", progress=press)
    (checkpoint,) = (tmp_path / "o").rglob("*.pt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:999])
    with pytest.raises(ValueError, match=r"0-0.pt cannot be read as a checkpoint; remove it"):
        compare("gqa", **SMALL, out=tmp_path / "o")
    (tmp_path / "o/result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"result.json was not written by manyheads compare"):
        compare("gqa", **SMALL, out=tmp_path / "o")


def test_a_full_disk_is_one_sentence_and_keeps_the_rest(tmp_path, monkeypatch):
    write = Path.write_bytes

    def full(self, data):
        if "1-0" in self.name:
            write(self, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"the disk is full: writing .*; what is finished stays there"):
        compare(SPECS[:2], **SMALL, out=tmp_path / "o")
    assert [file.name for file in (tmp_path / "o/runs").iterdir()] == ["0-0.json"]


def test_a_damaged_run_is_named_before_the_others_are_made(found, tmp_path, monkeypatch):
    shutil.copytree(found.out, tmp_path / "o")
    file = tmp_path / "o/runs/0-0.json"
    (tmp_path / "o/result.json").unlink()
    (tmp_path / "o/runs/1-0.json").unlink()
    monkeypatch.setattr(module, "run_all", lambda *args: pytest.fail("something was trained"))
    for damaged in (file.read_bytes()[:9], b"{}", b'{"curve": 3, "seconds": 1}', b""):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"0-0\.json cannot be read as a finished run; remove it"):
            compare(SPECS, **SMALL, out=tmp_path / "o")


def test_equal_parameters_are_reached_by_the_feed_forward_and_that_is_told(tmp_path):
    small = SMALL | {"steps": 1, "seeds": 1, "dim": 32}
    found = compare(["gqa", "gqa(kv_heads=1)"], **small, equal="params", out=tmp_path / "o")
    base, other = found.entries
    assert other.dim == base.dim and other.hidden > base.hidden
    assert f"width 32 with a feed-forward of {other.hidden} (the base's is {base.hidden}), " in found.notes[0]
    assert Comparison.read(tmp_path / "o/result.json").entries[1].hidden == other.hidden


# --- refusals, before anything is written


@pytest.mark.parametrize(
    ("specs", "options", "kind", "said"),
    [
        ([], {}, ValueError, "no spec given"),
        (["gqa", "gqa + kah"], {}, SpecError, "spec 2 of 2, 'gqa + kah': no part 'kah'; did you mean kha"),
        (["gqa", "gqa + kah"], {}, SpecError, "\n  gqa + kah\n        ^"),
        (["gqa", "gqa(kv_heads=3)"], {}, OptionError, "spec 2 of 2, 'gqa(kv_heads=3)': layer 0: gqa"),
        (["gqa", "budgetformer"], {}, SpecError, "spec 2 of 2, 'budgetformer': 'budgetformer' needs 'bidirectional'"),
        (["gqa", "mla", "gqa + rope"], {}, ValueError, "specs 1 and 3 are the same: gqa + rope"),
        (["gqa"], {"seeds": 0}, ValueError, "seeds is at least 1, not 0"),
        (["gqa"], {"steps": 0}, ValueError, "steps is at least 1, not 0"),
        (["gqa"], {"jobs": 0}, ValueError, "jobs is at least 1, not 0"),
        (["gqa"], {"threads": -1}, ValueError, "threads is at least 1, not -1"),
        (["gqa"], {"lr": 0.0}, ValueError, "lr is a positive number"),
        (["gqa"], {"warmup": -1}, ValueError, "warmup is at least 0, not -1"),
        (["gqa"], {"warmup": 11}, ValueError, "warmup=11 of steps=10; it may be 0 to 10"),
        (["gqa"], {"warmup": 0.5}, ValueError, "warmup is a whole number, not 0.5"),
        (["gqa"], {"steps": 2.5}, ValueError, "steps is a whole number, not 2.5"),
        (["gqa"], {"aux_weight": -1.0}, ValueError, "aux_weight is a number of at least 0, not -1.0"),
        (["gqa"], {"dtype": "int8"}, ValueError, "dtype is one of float32, bfloat16, float64, not 'int8'"),
        (["gqa"], {"equal": "size"}, ValueError, "equal is one of none, params, flops, cache, not 'size'"),
        (["gqa"], {"ffn": "relu"}, OptionError, "no feed-forward 'relu'"),
        (["gqa"], {"dim": 17}, OptionError, "dim=17: layer 0: gqa: dim=17 is no multiple of heads=2"),
        (["gqa"], {"heads": 3}, OptionError, "heads=3: layer 0: gqa: dim=16 is no multiple of heads=3"),
        (["gqa", "moh(top=3)"], {}, OptionError, "heads=2 and 'moh(top=3)': layer 0: moh: top=3 of 2 heads"),
        (["mla", "gqa"], {"ffn": "moe(experts=2, top=3)"}, OptionError, "ffn='moe(experts=2, top=3)': layer 0: moe"),
        (["gqa"], {"residual": "mhar(heads=5)"}, OptionError, "residual='mhar(heads=5)': mhar: dim=16 in 5"),
        (["gqa"], {"context": 900}, ValueError, "context=900 needs 901 bytes of text on either side, and the held-"),
        (["gqa"], {"text": "missing.txt"}, OSError, "missing.txt"),
        (
            ["gqa", "super-attention(length=23)"],
            {},
            OptionError,
            "spec 2 of 2, 'super-attention(length=23)': with context=24: sup",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, monkeypatch, specs, options, kind, said):
    monkeypatch.setattr(module, "run_all", lambda *args: pytest.fail("something was trained"))
    with pytest.raises(kind) as refusal:
        compare(specs, **{**SMALL, **options}, out=tmp_path / "o")
    assert said in str(refusal.value)
    assert not list(tmp_path.iterdir())


# --- several processes


@pytest.mark.slow
def test_runs_side_by_side_find_the_same(found, tmp_path):
    seen = []
    other = compare(SPECS, **SMALL, jobs=2, out=tmp_path / "o", progress=lambda *stage: seen.append(stage))
    assert [entry.curves for entry in other.entries] == [entry.curves for entry in found.entries]
    assert {name for name, done, total in seen if done == total == 10} == {
        f"{spec}, seed {seed}" for spec in SPECS for seed in (0, 1)
    }


@pytest.mark.slow
def test_an_error_in_a_process_of_its_own_is_that_error(tmp_path):
    def press(stage, done, total):
        if done == 5:
            raise Stop

    with pytest.raises(Stop):
        compare(SPECS[:2], **SMALL, jobs=2, out=tmp_path / "o", progress=press)
    for checkpoint in (tmp_path / "o/runs").glob("*.pt"):
        checkpoint.write_bytes(b"")
        with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
            compare(SPECS[:2], **SMALL, jobs=2, out=tmp_path / "o")
        break
    else:
        pytest.fail("no checkpoint to break")


RANKED = """
import sys
from manyheads.bench import plan
from manyheads.bench.compare import compare
from manyheads.convert.text import default_text
text = default_text()[:4_000]
plan.default_text = lambda: text
seen = set()
found = compare({specs}, **{small}, out={out!r}, progress=lambda stage, *steps: seen.add(stage))
print(sorted(seen), [entry.curves for entry in found.entries])
"""


@pytest.mark.slow
def test_processes_of_a_launcher_share_the_runs(found, tmp_path):
    code = RANKED.format(specs=SPECS, small=SMALL, out=str(tmp_path / "o"))
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    shared = os.environ | {"WORLD_SIZE": "2", "PYTHONPATH": path}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=shared | {"RANK": str(rank)}, stdout=-1, text=True)
        for rank in (0, 1)
    ]
    outs = [each.communicate(timeout=120)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0]
    for rank, out in enumerate(outs):
        names, _, curves = out.partition("] ")
        assert ("time decoding" in names) == (rank == 0)
        assert sum(f"{spec}, seed {seed}" in names for spec in SPECS for seed in (0, 1)) == 3
        assert curves.strip() == str([entry.curves for entry in found.entries])


@pytest.mark.slow
def test_a_killed_comparison_goes_on_with_the_same_numbers(found, tmp_path):
    """A process that is killed at any moment: no cleaning up, no handlers."""
    code = RANKED.format(specs=SPECS, small=SMALL, out=str(tmp_path / "o"))
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    for _ in range(2):
        one = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, stdout=-1)
        runs, begun = tmp_path / "o/runs", len(list(tmp_path.rglob("*.json")))
        deadline = time.monotonic() + 60
        while len(list(tmp_path.rglob("*.json"))) < begun + 2 and not list(runs.glob("*.pt")):
            assert time.monotonic() < deadline and one.poll() is None
            time.sleep(0.01)
        one.kill()
        one.wait()
    again = compare(SPECS, **SMALL, out=tmp_path / "o")
    assert [entry.curves for entry in again.entries] == [entry.curves for entry in found.entries]


# --- the page

pytest.importorskip("plotly", reason="needs manyheads[report]")


def test_the_page_is_whole_and_holds_every_figure(found):
    text = (Path(found.out) / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    head, *rows = page.rows["figures"]
    assert len(rows) == 3 and all(len(row) == len(head) for row in rows)
    assert [row[0].replace("\u00a0", " ") for row in rows] == SPECS
    assert rows[1][4] == "64−50.0 %" and rows[0][-1] == "–" and " ± " in rows[1][-1]
    assert [len(figure["data"]) for figure in page.figures] == [6, 4, 4, 4, 4]
    assert not [a for _, a in page.tags if {"src"} & set(a) or a.get("href", "#")[0] not in "#d"]


def test_the_best_loss_is_told_with_its_price_and_every_panel_has_its_frontier():
    def entry(spec, loss, parameters, speed):
        return Entry(spec, spec, 8, parameters, 1, 1, 1, None, ((9.0, loss),), 1, speed, 1)

    entries = (entry("gqa", 3.6, 100, 710.0), entry("mamba", 2.9, 1200, 678.0), entry("mla", 3.7, 100, 600.0))
    found = Comparison(entries, (0, 1), {}, "", "", "", 0, (), "", None)
    assert "It takes 12.0 times the parameters of gqa." in _finding(found)[1]
    line = _against(found.to_json()["entries"], "decode", "speed")["data"][0]
    assert (line["x"], line["y"]) == ([710.0, 678.0], [3.6, 2.9]), "from the fastest on, the lowest loss"


def test_lines_end_between_the_parts_of_a_spec():
    assert re.sub("<span class=.swatch.*?></span>", "*", named(1, "gqa(kv_heads=2) + kha")) == (
        '<span class="part dotted">*gqa(kv_heads=2)\u00a0+</span> <span class="part">kha</span>'
    )


def test_without_plotly_there_is_a_note_and_no_page(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    found = compare("gqa", **SMALL | {"steps": 1, "seeds": 1}, out=tmp_path / "o")
    assert found.report is None and "pip install 'manyheads[report]'" in found.notes[0]
    assert Comparison.read(tmp_path / "o/result.json") == found and not (tmp_path / "o/report.html").exists()


@pytest.mark.browser
def test_browser_draws_it_without_an_error(found, tmp_path, chromium):
    page = drawn(chromium, Path(found.out) / "report.html", tmp_path)
    assert page.count('class="main-svg"') >= 5
    assert len(re.findall(r'class="trace scatter', page)) == 6 + 4 + 4 + 4 + 4
