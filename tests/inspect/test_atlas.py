"""The atlas: every number is that of the measure run alone, the page is whole, escaped and alive in a browser."""

import base64
import gzip
import html
import json
import re
import subprocess
from functools import partial

import pytest
import torch
from tests.cli.line import refused, run, save_tiny
from tests.inspect import models
from transformers import WhisperConfig, WhisperForCausalLM

import manyheads as mh
from manyheads.inspect import measures
from manyheads.inspect.atlas import NEAREST, SHOWN, WRITTEN, atlas, write_atlas
from manyheads.inspect.measures import measure


def test_every_number_is_the_measure_run_alone(tmp_path):
    model, ids = mh.adopt(models.decoder()), models.ids(3, 40)
    found = atlas(model, ids, ordinals=[[3, 4, 5, 6], [9, 8, 7]])
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


def test_what_is_undefined_for_every_head_and_layers_that_do_not_run_are_left_out(tmp_path):
    pytest.importorskip("plotly", reason="needs manyheads[report]")
    found = atlas(models.decoder(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1), models.ids(2, 20))
    assert any("undefined for every head: Nearest map, Nearest output" in note for note in found.notes)
    assert "twin" not in found.tables and found.tables["sink"][0].shape == (1,)
    page = write_atlas(found, tmp_path).report.read_text()
    assert "1 layer, 1 head ·" in page
    axes = json.loads(re.search(r'id="roles-figure">(.*?)</script>', page)[1])["layout"]
    assert axes["xaxis"]["range"] == [-0.5, 0.5] and axes["yaxis"]["range"] == [0.5, -0.5]
    window = atlas(models.decoder("mistral"), models.ids(2, 20))
    assert any("undefined for every head: Duplicates, Induction" in note for note in window.notes)
    sizes = dict(
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_target_positions=40,
    )  # fmt: skip
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    speech = WhisperForCausalLM(WhisperConfig(vocab_size=99, **sizes, **special)).eval()
    found = atlas(speech, models.ids(2, 20))
    assert list(found.heads) == list(found.tables["sink"]) == [0, 2] and found.bottlenecks <= 8
    assert any("2 layers do not run on text alone" in note for note in found.notes)


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
    assert page.count('href="#map-') == 24 and len(page) < 3e6
    for shown in SHOWN:
        assert f'id="grid-{shown.name}"' in page and f'id="grid-{shown.name}-figure"' in page
    assert page.count('<th scope="row">') == 24  # every head is in the table too
    assert "http://" not in page.partition("<script>")[0] and "https://" not in page.partition("<script>")[0]


def test_the_command_says_no_in_a_line(tmp_path):
    assert "ValueError" not in refused("inspect", tmp_path / "nothing")
    tiny = save_tiny(tmp_path / "tiny")
    assert "x tokens" not in refused("inspect", tiny, "--text", tmp_path / "missing.txt")


def test_windows_are_no_longer_than_the_positions_of_either_model(tmp_path):
    long, short, text = save_tiny(tmp_path / "long"), tmp_path / "short", tmp_path / "notes.txt"
    text.write_text("Heads are small functions of the sequence. " * 40)
    save_tiny(short)
    models.gpt2(vocab_size=json.loads((long / "config.json").read_text())["vocab_size"]).save_pretrained(short)
    options = ["--text", text, "--windows", "1x90", "--out", tmp_path / "out", "--json"]
    for line in (["inspect", short], ["inspect", long, "--against", short]):
        ran = run(*line, *options)
        assert ran.code == 0, ran
        said = "windows of 90 tokens are longer than the model's 64 positions; cut to 64"
        assert said in ran.json["notes"] and ran.json["tokens"] == "1 × 64"


@pytest.mark.browser
def test_the_page_is_alive_in_a_browser(written, chromium):
    _, out = written
    for head, more in (("", 0), ("#map-1-2", 1)):
        done = subprocess.run(
            [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=15000", "--dump-dom",
             (out / "report.html").as_uri() + head], capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.stdout.count('class="plot-container') == len(SHOWN) + 1 + more, done.stderr[-2000:]
        assert ("layer 1, head 2</h2>" in done.stdout) == bool(more)
        if more:
            arcs = re.search(r'id="arcs"[^>]*aria-label="Arcs from queries to keys: (\d+) weights', done.stdout)
            drawn = re.findall(r"<path d=[^>]*><title>(\d+) .*? → (\d+) .*?: ([\d.]+)</title>", done.stdout)
            assert len(drawn) == int(arcs[1]) > 0
            assert all(int(q) > int(k) > 0 and float(weight) >= 0.1 for q, k, weight in drawn)
            facts = re.search(r'<div id="map-facts"[^>]*>(.*?)</dl></div>', done.stdout, re.DOTALL)[1]
            told = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", facts))
            assert len(re.findall(r'href="#map-1-\d"', told["Adds most nearly what these add (CKA)"])) == 3
            assert told["Writes"].count('"') == 2 * WRITTEN and len(told) == len(SHOWN) + 3


DRIVEN = """<script>
addEventListener("load", () => {
  const click = (n) => document.querySelectorAll("#heads thead button")[n].click();
  const rows = () => [...document.querySelectorAll("#heads tbody tr")].filter((row) => !row.hidden);
  const column = (n) => rows().map((row) => row.cells[n].textContent);
  const said = {};
  click(2); said.down = column(2);
  click(2); said.up = column(2);
  click(0); said.order = column(0);
  const filter = document.getElementById("filter");
  filter.value = "1.";
  filter.dispatchEvent(new Event("input"));
  said.layer = column(0);
  URL.createObjectURL = (blob) => {
    blob.text().then((text) => {
      const out = document.createElement("pre");
      said.csv = text;
      out.id = "said";
      out.textContent = JSON.stringify(said);
      document.body.append(out);
    });
    return "#";
  };
  document.getElementById("csv").click();
});
</script>"""


@pytest.mark.browser
def test_the_table_sorts_filters_and_downloads(written, chromium, tmp_path):
    _, out = written
    page = tmp_path / "driven.html"
    page.write_text((out / "report.html").read_text() + DRIVEN)
    done = subprocess.run(
        [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=15000", "--dump-dom",
         page.as_uri()], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    said = json.loads(html.unescape(found[1]))
    down = [float(x) for x in said["down"]]
    assert down == sorted(down, reverse=True) and [float(x) for x in said["up"]] == down[::-1]
    heads = said["order"]
    assert heads == sorted(heads, key=float) and said["layer"] == [name for name in heads if name.startswith("1.")]
    lines = said["csv"].splitlines()
    assert len(lines) == 1 + len(heads) and lines[1].startswith('"0.0",')


def test_two_models_side_by_side(tmp_path):
    pytest.importorskip("plotly", reason="needs manyheads[report]")
    tiny, other = save_tiny(tmp_path / "one"), save_tiny(tmp_path / "other", initializer_range=0.3)
    text = tmp_path / "notes.txt"
    text.write_text("Heads are small functions of the sequence. " * 40)
    line = ["inspect", tiny, "--against", other, "--text", text, "--windows", "2x48", "--out", tmp_path / "o", "--json"]
    ran = run(*line)
    assert ran.code == 0, ran.err
    found = json.loads((tmp_path / "o" / "result.json").read_text())
    page = (tmp_path / "o" / "report.html").read_text()
    drawn = json.loads(re.search(r'id="change-entropy-figure">(.*?)</script>', page)[1])["data"][0]["z"]
    one, two = (each["measures"]["entropy"]["values"]["1"] for each in (found, found["against"]))
    assert drawn[1] == pytest.approx([a - b for a, b in zip(one, two, strict=True)], abs=1e-5)
    assert "Beside other" in page


def test_a_click_shows_what_capture_shows(tmp_path):
    """To half of 255 steps between the head's lowest and highest weight, read back from the page itself."""
    pytest.importorskip("plotly", reason="needs manyheads[report]")
    model, ids = mh.adopt(models.decoder()), models.ids(1, 90)
    page = write_atlas(atlas(model, ids, words=["<b>&"] * 90), tmp_path).report.read_text()
    assert "<b>&" not in page
    packed = re.search(r'id="maps">([^<]*)<', page)[1]
    line, _, codes = gzip.decompress(base64.b64decode(packed)).partition(b"\n")
    head = json.loads(line)
    assert head["words"] == ["<b>&"] * 64 and [each["layer"] for each in head["layers"]] == [0, 1]
    codes = torch.frombuffer(bytearray(codes), dtype=torch.uint8).view(2, 4, 64, 64)
    with torch.no_grad(), mh.capture(model) as tape:
        model(ids)
    for layer in (0, 1):
        low, high = torch.tensor(head["layers"][layer]["ends"]).T[..., None, None]
        want = tape[layer].weights[0, :, :64, :64]
        off = (low + codes[layer] * (high - low) / 255 - want).abs()
        assert (off <= (high - low) / 510 + 2e-6).all()
    assert "six digits" in page and "256 steps" in page


def test_what_is_said_of_a_head_is_true():
    """The heads beside it are those of the highest CKA, and it writes what its mean output says alone."""
    model, ids = mh.adopt(models.decoder()), models.ids(2, 40)
    maps = atlas(model, ids).maps
    alike = mh.inspect.measures.cka(model, ids)
    for layer in (0, 1):
        for head, near in enumerate(maps.near[layer]):
            others = alike[layer][head].clone()
            others[head] = -1
            assert [one for one, _ in near] == others.argsort(descending=True)[:NEAREST].tolist()
    with torch.no_grad(), mh.capture(model, layers=1, what="out") as tape:
        model(ids[:1])
    attention = model.attentions[1]
    with torch.no_grad():
        alone = torch.zeros(attention.heads, tape[1].out.shape[-1])
        alone[2] = tape[1].out[0, 2].mean(0)
        added = attention.project.o_proj.weight @ alone.flatten()
        logits = model.model.lm_head(model.model.model.norm(added))
    assert maps.writes[1][2] == [str(token) for token in logits.topk(WRITTEN).indices.tolist()]
