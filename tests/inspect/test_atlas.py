"""The atlas: every number is that of the measure run alone, the page is whole, escaped and alive in a browser."""

import json
import subprocess
from functools import partial

import pytest
import torch
from tests.cli.line import refused, run, save_tiny
from tests.inspect import models

import manyheads as mh
from manyheads.inspect import measures
from manyheads.inspect.atlas import SHOWN, atlas, write_atlas
from manyheads.inspect.measures import measure


def test_every_number_is_the_measure_run_alone(tmp_path):
    model, ids = mh.adopt(models.decoder()), models.ids(3, 40)
    found = atlas(model, ids)
    assert set(found.tables) == {each.name for each in SHOWN}
    alone = measure(model, ids, [measures.sink_mass, measures.distance, measures.js_divergence])
    torch.testing.assert_close(found.tables["sink"].grid, alone["sink_mass"].grid)
    torch.testing.assert_close(found.tables["distance"].grid, alone["distance"].grid)
    entropy = measure(model, ids, {"entropy": partial(measures.entropy, normalised=True)})
    torch.testing.assert_close(found.tables["entropy"].grid, entropy["entropy"].grid)
    others = alone["js_divergence"][1] + torch.diag(torch.full((4,), torch.inf))
    torch.testing.assert_close(found.tables["nearest"][1], others.amin(-1))
    torch.testing.assert_close(
        found.tables["importance"].grid, measures.importance(model, ids).grid, atol=1e-6, rtol=1e-4
    )
    result = json.loads(json.dumps(write_atlas(found, tmp_path).to_json(), allow_nan=False))
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["measures"]["sink"]["values"]["1"] == alone["sink_mass"][1].tolist()


def test_layers_without_weights_have_what_there_is():
    model = mh.Decoder(99, ["gqa", "retnet", "iha(pseudo=2)"], 32, 4).eval()
    for parameter in model.stack.blocks[2].attention.transforms.parameters():
        torch.nn.init.normal_(parameter)  # heads read values of each other
    found = atlas(model, models.ids(2, 20))
    assert list(found.tables["entropy"]) == [0] and list(found.tables["importance"]) == [0, 1, 2]
    assert any("state in place of keys" in note for note in found.notes)
    assert any("weights cannot be told" in note for note in found.notes)
    rows = found.to_json()["measures"]
    assert "1" not in rows["sink"]["values"] and len(rows["twin"]["values"]["1"]) == 4


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    pytest.importorskip("plotly", reason="needs manyheads[report]")
    folder = tmp_path_factory.mktemp("atlas")
    tiny, text = save_tiny(folder / "tiny <b>"), folder / "notes.txt"
    text.write_text("Heads are small functions of the sequence. " * 40)
    ran = run("inspect", tiny, "--text", text, "--out", folder / "out", "--windows", "2x48", "--json")
    return ran, folder / "out"


def test_the_command_writes_a_result_and_a_page(written):
    ran, out = written
    assert ran.code == 0, ran
    assert ran.json == json.loads((out / "result.json").read_text())
    assert len(ran.json["layers"]) == 3 and ran.json["text"] == "notes.txt"
    assert "report.html" in ran.out and "of 24 heads" in ran.out
    page = (out / "report.html").read_text()
    assert "tiny &lt;b&gt;" in page and "tiny <b>" not in page
    for shown in SHOWN:
        assert f'id="grid-{shown.name}"' in page and f'id="grid-{shown.name}-figure"' in page
    assert page.count('<th scope="row">') == 24  # every head is in the table too
    assert "http://" not in page.partition("<script>")[0] and "https://" not in page.partition("<script>")[0]


def test_the_command_says_no_in_a_line(tmp_path):
    assert "ValueError" not in refused("inspect", tmp_path / "nothing")
    tiny = save_tiny(tmp_path / "tiny")
    assert "x tokens" not in refused("inspect", tiny, "--text", tmp_path / "missing.txt")


@pytest.mark.browser
def test_the_page_is_alive_in_a_browser(written, chromium):
    _, out = written
    done = subprocess.run(
        [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=15000", "--dump-dom",
         (out / "report.html").as_uri()], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.count('class="plot-container') == len(SHOWN) + 1, done.stderr[-2000:]
