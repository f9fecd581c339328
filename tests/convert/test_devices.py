"""Maps of devices; what is converted on two accelerators, emulated where a compiler is, is what the CPU makes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.convert.tiny import model, saved, tokens

from manyheads.convert import devices
from manyheads.convert.devices import DeviceMap
from manyheads.convert.heal import LayerwiseHeal
from manyheads.convert.plan import make_goal, shape_of
from manyheads.convert.ranks import ALONE, Ranks
from manyheads.convert.shrink import shrink
from manyheads.convert.stream import InMemory, OnDisk
from manyheads.core.flow import Links, Rows
from manyheads.core.mask import Axis
from manyheads.core.part import OptionError

PREFIX = "model.layers."
ROOT = Path(__file__).parents[2]


@pytest.fixture
def two(monkeypatch):
    monkeypatch.setattr(devices, "accelerators", lambda: [torch.device("cuda", n) for n in range(2)])


def over(given, count=4, ranks=ALONE):
    return [str(device) for device in DeviceMap.read(given, ranks).over(PREFIX, count)]


# --- maps


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("auto", "0 0 1 1"),
        ("cuda", "0 0 0 0"),
        ("cuda:1", "1 1 1 1"),
        ("cuda:1, cuda:0", "1 1 0 0"),
        (["cuda:0", torch.device("cuda", 1)], "0 0 1 1"),
        (1, "1 1 1 1"),
        ("cpu", "c c c c"),
        ("cpu,0,1", "c c 0 1"),
        ({0: 1, 1: "cuda:0", 2: "cpu", "3": 0}, "1 0 c 0"),
        ({"model.layers.0": 0, "model.layers.1": 1, "model.model.layers.2": 1, "3": "cpu", "lm_head": 0}, "0 1 1 c"),
        ({"": 1}, "1 1 1 1"),
        ({"model": 0, "model.layers": 1, "model.layers.2": "cpu"}, "1 1 c 1"),
    ],
)
def test_a_map_says_where_each_layer_lives(given, found, tmp_path):
    want = [{"c": "cpu"}.get(where, f"cuda:{where}") for where in found.split()]
    assert over(given) == want
    if isinstance(given, dict):
        file = tmp_path / "map.json"
        file.write_text(json.dumps(given))
        assert over(file) == over(str(file)) == want


@pytest.mark.usefixtures("two")
def test_layers_are_in_blocks_of_like_size():
    assert over("auto", 5) == ["cuda:0"] * 3 + ["cuda:1"] * 2
    assert over("auto", 1) == ["cuda:0"]


def test_without_accelerators_all_is_on_the_cpu(monkeypatch):
    monkeypatch.setattr(devices, "accelerators", list)
    assert over("auto") == ["cpu"] * 4 == over("auto", ranks=Ranks(1, 2, 2, 1))


def test_processes_of_a_machine_divide_its_accelerators(monkeypatch):
    def here(count):
        monkeypatch.setattr(devices, "accelerators", lambda: [torch.device("cuda", n) for n in range(count)])

    here(4)
    assert [over("auto", 2, Ranks(r, 4, 2, r % 2)) for r in range(2)] == [["cuda:0", "cuda:2"], ["cuda:1", "cuda:3"]]
    here(2)
    assert [over("auto", 2, Ranks(r, 4, 4, r))[0] for r in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert over("cuda:0", 2, Ranks(1, 2, 2, 1)) == ["cuda:0", "cuda:0"]


def test_a_process_knows_its_place_on_its_machine(monkeypatch):
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert Ranks.here().local == 1
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert Ranks.here() == Ranks(5, 8, 4, 3)


BAD = [
    ("cuda:2", "names 'cuda:2', which is not here; auto and cpu, cuda:0, cuda:1 fit"),
    ("gpu", "names 'gpu', which is not here; auto and"),
    ("cuda:0,,cuda:1", "names '', which is not here"),
    ("", "names '', which is not here"),
    ("meta", "names 'meta', which is not here"),
    (2, "names 2, which is not here"),
    ({0: "disk"}, "names 'disk', which is not here"),
    ({0: None}, "names None, which is not here"),
    ("mps", "float64, which mps has not; auto and cpu"),
    ([], "is empty; auto and cpu"),
    ({}, "is empty; auto and cpu"),
    ({0: 0, 1: 0, 3: 0}, "lacks layer 2; it takes model.layers.0 to model.layers.3"),
    ({"model.layer.0": 0}, "lacks layer 0; it takes"),
    ({"": 0, "model.layers.4": 0}, "names layer 4; the model has layers 0 to 3"),
    ({"": 0, "model.layers.1.mlp": 1}, "divides layer 1 .model.layers.1.mlp.; model.layers.1 is on one device"),
]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(("given", "said"), BAD)
def test_a_bad_map_is_refused_by_what_disagrees(given, said):
    with pytest.raises(OptionError, match=said) as refused:
        over(given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [("[0, 1]", "no object of devices by layer"), ("{", "no device map that can be read"), (None, "No such file")],
)
def test_a_file_that_holds_no_map_is_named(text, said, tmp_path):
    file = tmp_path / "map.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(OptionError, match=f"map.json.*{said}"):
        over(str(file))


# --- what takes a map


def test_a_map_to_the_cpu_is_no_map(tmp_path):
    source = saved(model(layers=3), tmp_path / "source")
    made = []
    for name, where in (("without", None), ("with", DeviceMap.read("cpu"))):
        layers = OnDisk(source, devices=where)
        goal = make_goal("50%", "mla", shape_of(layers))
        shrink(layers, tokens(), [goal], tmp_path / name, heal=LayerwiseHeal(steps=2))
        folder = tmp_path / name / goal.name
        made.append({file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))})
    assert made[0] == made[1]


def test_layers_are_opened_where_the_map_says(tmp_path):
    """The one device besides the CPU that is always there holds no numbers, and can still be asked for."""
    where = DeviceMap(named={"0": torch.device("meta"), "1": torch.device("cpu")})
    source = model()
    for layers in (OnDisk(saved(source, tmp_path / "source"), devices=where), InMemory(source, where)):
        for index, kind in enumerate(("meta", "cpu")):
            with layers.open(index) as layer:
                assert {t.device.type for t in (*layer.parameters(), *layer.buffers())} == {kind}
    assert {p.device.type for p in source.parameters()} == {"cpu"}


def test_layers_in_memory_stay_where_they_are_without_a_map():
    assert InMemory(model()).devices == (torch.device("cpu"),) * 2


def test_a_search_over_the_whole_model_refuses_a_map(tmp_path):
    layers = InMemory(model(layers=3), DeviceMap(named={"": torch.device("meta")}))
    with pytest.raises(OptionError, match="tries the whole model, on cpu; it has no use for meta"):
        shrink(layers, tokens(), [make_goal("67%", "share", shape_of(layers))], tmp_path / "job")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kinds", "half"), [(("cpu", "cpu"), True), (("cpu", "meta"), False)])
def test_half_precision_is_the_default_where_every_device_is_fast_at_it(kinds, half, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    layers = InMemory(model(), DeviceMap(named={str(n): torch.device(kind) for n, kind in enumerate(kinds)}))

    def survey(layers, text, *rest):
        raise InterruptedError(text.bfloat16)

    monkeypatch.setattr("manyheads.convert.shrink.survey", survey)
    with pytest.raises(InterruptedError, match=str(half)):
        shrink(layers, tokens(), [make_goal("50%", "mla", shape_of(layers))], tmp_path / "job")


def test_rows_that_layers_hand_on_move_with_all_that_describes_them():
    axis = Axis(3, None, *(torch.arange(3)[None] for _ in range(2)), valid=torch.ones(1, 3, dtype=torch.bool))
    links = Links(rows={0: Rows({"k": torch.ones(1, 2, 3, 4)}, axis, log=axis, axes={"k": axis})})
    links.memo["axis"] = axis
    links.move(torch.device("meta"))
    rows = links.rows[0]
    assert rows["k"].is_meta and "axis" not in links.memo
    for moved in (rows.axis, rows.log, rows.axes["k"]):
        assert moved.position.is_meta and moved.time.is_meta and moved.valid.is_meta and moved.device.type == "meta"


# --- two accelerators


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The extension with two devices, compiled."""
    if not (shutil.which(os.environ.get("CXX", "c++")) and shutil.which("ninja")):
        pytest.skip("devices are emulated by an extension, which takes a C++ compiler and ninja")
    folder = tmp_path_factory.mktemp("emulated")
    emulated(folder, "cases", folder, "[]")
    return folder


def emulated(*args):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.convert.emulated", *map(str, args)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


BOTH = "emulated:0,emulated:1"
APART = {"model.layers.0": 1, "1": 0, "2": "cpu", "3": 1}
CASES = [
    {"to": "mla", "devices": BOTH, "streamed": True, "heal": 3},
    {"to": "mla", "devices": BOTH, "streamed": False, "heal": 3},
    {"to": "mla", "devices": "auto", "streamed": True, "heal": 0},
    {"to": "auto", "devices": BOTH, "streamed": True, "heal": 3},
    {"to": "auto", "devices": BOTH, "streamed": False, "heal": 0},
    {"to": "auto(target=params)", "devices": BOTH, "streamed": True, "heal": 3, "budget": "70%"},
    {"to": "qkv-sharing", "devices": APART, "streamed": True, "heal": 3},
    {"to": "dha", "devices": "auto", "streamed": False, "heal": 0},
    {"to": "mfa", "devices": "auto", "streamed": True, "heal": 0},
    {"to": "gqa(random)", "devices": "emulated:1", "streamed": True, "heal": 3},
    {"to": "mha2mla(ranks=adjusted)", "devices": "auto", "streamed": True, "heal": 0},
    {"to": "tensorllm", "devices": "auto", "streamed": True, "heal": 0, "budget": "100%"},
    {"to": "retrieval_distill(pairs=4)", "devices": "auto", "streamed": False, "heal": 2},
]
"""With `auto(target=params)` a layer on one device reads the rows of a layer on the other."""


@pytest.mark.slow
def test_two_accelerators_make_what_the_cpu_makes(built, tmp_path):
    for case, found in zip(CASES, emulated(built, "cases", tmp_path, json.dumps(CASES)), strict=True):
        assert found["apart"] <= 1e-5 and found["held"] == [0, 0], (case, found)
        want = ["emulated:1", "emulated:0", "cpu", "emulated:1"] if case["devices"] is APART else (
            ["emulated:1"] * 4 if case["devices"] == "emulated:1" else ["emulated:0"] * 2 + ["emulated:1"] * 2
        )  # fmt: skip
        whole = [] if case["streamed"] else ["cpu"]  # where the loss's gradients are, which take the whole model
        assert list(found["where"].values()) == [sorted({*whole, device}) for device in want], (case, found)
        if case["to"] == "auto(target=params)":
            assert any(owner in (0, 1) for owner in found["kv_source"][2:]), found


@pytest.mark.slow
def test_half_precision_is_that_of_the_layers_own_device(built, tmp_path):
    case = {"to": "mla", "devices": BOTH, "streamed": True, "heal": 2, "bfloat16": True}
    (found,) = emulated(built, "cases", tmp_path, json.dumps([case]))
    assert found["half"] == ["emulated"] and found["apart"] < 0.03


@pytest.mark.slow
def test_a_model_that_lies_on_an_accelerator_is_converted_there(built, tmp_path):
    case = {"to": "auto", "devices": None, "streamed": False, "heal": 2}
    (found,) = emulated(built, "cases", tmp_path, json.dumps([case]))
    assert list(found["where"].values()) == [["emulated:1"]] * 4 and found["apart"] <= 1e-5


@pytest.mark.slow
def test_accelerators_refuse_to_mix(built):
    """Without which nothing above would say where anything was."""
    (found,) = emulated(built, "mixed")
    assert found["raised"] == found["tried"] and found["raised"] > 5


@pytest.mark.slow
def test_a_job_on_accelerators_has_the_figures_of_one_on_the_cpu(built, tmp_path):
    from tests.cli.line import save_tiny

    text = tmp_path / "text.txt"
    text.write_text("Water boils at a lower temperature in the mountains. " * 80)
    tiny, rows = save_tiny(tmp_path / "tiny"), {}
    for where in ("cpu", "auto"):
        args = ["--stream", "--to", "mla", "--heal", "2", "--calibrate", "8x32", "--evaluate", "2x64", "--json"]
        args += ["--text", text, "--device-map", where, "--out", tmp_path / where]
        (result,) = emulated(built, "shrink", tiny, *args)
        rows[where] = [result["source"], *result["candidates"]]
        said = [note for note in result["notes"] if "MB on emulated:0" in note and "MB on emulated:1" in note]
        assert len(said) == (where == "auto")
    for own, made in zip(rows["cpu"], rows["auto"], strict=True):
        for key in ("perplexity", "kl", "top1"):
            assert made[key] == pytest.approx(own[key], rel=1e-4, abs=1e-6), key
