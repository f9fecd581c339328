"""Exports: every oracle of the stock DeepSeek form that tiny random models can show, refusals, and whole folders."""

import errno
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from manyheads.convert.adopt import adopt
from manyheads.convert.export import FORMATS, ExportError, deepseek, new_folder, save, stock, to_deepseek
from manyheads.convert.export.frequencies import rope_config
from manyheads.convert.export.shards import write_shards
from manyheads.core.position import inverse_frequencies
from manyheads.stack.pretrained import ManyheadsConfig, ManyheadsForCausalLM

BASE = dict(
    vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-6, eos_token_id=None, bos_token_id=None,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)


@torch.no_grad()
def lively(model):
    """Weights large enough for attention to matter, gains and biases away from their starting values."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.14)
        else:
            parameter.normal_(std=0.3).add_(0.0 if name.endswith("bias") else 1.0)
    return model.eval()


def adopted(kind=LlamaConfig, **options):
    return adopt(lively(AutoModelForCausalLM.from_config(kind(**BASE | options))))


def latent(*specs, kind=LlamaConfig, **options):
    """A model with these specs, one a layer."""
    config = ManyheadsConfig(base=kind(**BASE | options), specs=list(specs * (2 // len(specs))))
    return lively(ManyheadsForCausalLM(config))


def mla(rank=24, rope=8, pairs="[0, 1, 3, 6]", of=16, **options):
    options = dict(nope_dim=12, v_dim=20, norm="false", scale=0.3) | options
    given = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    turns = "" if pairs is None else f"pairs={pairs}, of={of}"
    return f"mla(rank={rank}, rope_dim={rope}, {given}) + rope({turns})"


NORMED = dict(norm="true", scale=None)
SERVED = {
    # name: model, cache (r, ρ), whether other servers compute the same from the file
    "mqa": (partial(adopted, num_key_value_heads=1), (16, 16), True),
    "gqa 2": (partial(adopted), (32, 32), False),
    "gqa 4 of 4": (partial(adopted, num_key_value_heads=4), (64, 64), False),
    "eps 1e-5, tied": (
        partial(adopted, num_key_value_heads=1, rms_norm_eps=1e-5, tie_word_embeddings=True), (16, 16), True,
    ),
    "llama3": (partial(adopted, rope_parameters=LLAMA3, num_key_value_heads=1), (16, 16), False),
    "llama3, gqa 2": (partial(adopted, rope_parameters=LLAMA3), (32, 32), False),
    "linear": (
        partial(adopted, rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0)), (32, 32), False,
    ),
    "yarn": (partial(adopted, rope_parameters=YARN), (32, 32), False),
    "qwen2 mqa": (partial(adopted, Qwen2Config, num_key_value_heads=1), (16, 16), False),
    "qwen2 gqa, eps 1e-5": (partial(adopted, Qwen2Config, rms_norm_eps=1e-5), (32, 32), False),
    "all biases": (partial(adopted, attention_bias=True, rms_norm_eps=1e-5), (32, 32), False),
    "half the channels turn": (partial(latent, "gqa(kv_heads=2) + rope(fraction=0.5)"), (48, 16), False),
    "interleaved": (partial(latent, "gqa(kv_heads=1) + rope(interleaved)"), (16, 16), True),
    "values of another width": (partial(latent, "gqa(kv_heads=2, v_dim=10)"), (20, 32), False),
    "un-normed": (partial(latent, mla()), (24, 8), False),
    "un-normed, every second pair": (partial(latent, mla(pairs="[0, 2, 4, 6]")), (24, 8), True),
    "un-normed, first pairs, eps 1e-5": (
        partial(latent, mla(pairs="[2, 1, 0, 3]"), rms_norm_eps=1e-5), (24, 8), True,
    ),
    "un-normed, repeated pairs": (partial(latent, mla(pairs="[0, 0, 5, 5]")), (24, 8), False),
    "un-normed, biases": (partial(latent, mla(bias="true", out_bias="true")), (24, 8), False),
    "un-normed, query latent": (partial(latent, mla(q_rank=40, bias="true")), (24, 8), False),
    "un-normed, widths by layer": (
        partial(latent, mla(14), mla(30, nope_dim=6, v_dim=9, q_rank=20), rms_norm_eps=1e-5), (30, 8), False,
    ),
    "normed": (partial(latent, mla(**NORMED, pairs=None, q_rank=24)), (24, 8), True),
    "normed, ranks by layer": (
        partial(latent, mla(14, **NORMED, pairs=None), mla(30, **NORMED, pairs=None, latent_scale="sqrt")),
        (30, 8), True,
    ),
    "normed and un-normed": (
        partial(latent, mla(14, **NORMED, pairs=None, q_rank=24), mla(30, pairs=None)), (30, 8), True,
    ),
}  # fmt: skip

STRANGER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "manyheads":
            raise ImportError("manyheads is not to be had here")
sys.meta_path.insert(0, Block())
import torch
from transformers import AutoModelForCausalLM, DynamicCache
torch.set_num_threads(2)
tokens, folders, out = torch.load(sys.argv[1])["tokens"], torch.load(sys.argv[1])["folders"], {}
with torch.no_grad():
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder)
        cache = DynamicCache(config=model.config)
        model(tokens[:1, :5], past_key_values=cache)
        shapes = [(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in cache.layers]
        found = {"class": type(model).__name__, "logits": model(tokens).logits, "shapes": shapes}
        found["text"] = model.generate(tokens[:1, :5], max_new_tokens=64, do_sample=False, pad_token_id=0)
        for key, module in model.named_modules():  # as other servers read the file
            if key.endswith("_a_layernorm"):
                module.variance_epsilon = model.config.rms_norm_eps
            if getattr(module, "bias", None) is not None:
                module.bias = None
        found["elsewhere"] = model(tokens).logits
        out[name] = found
assert not any(name.startswith("manyheads") for name in sys.modules)
torch.save(out, sys.argv[2])
"""


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Every model of SERVED with its report, and what a process without manyheads found in its file."""
    root = tmp_path_factory.mktemp("exports")
    made = {name: build() for name, (build, _, _) in SERVED.items()}
    reports = {name: to_deepseek(model, root / f"{i}") for i, (name, model) in enumerate(made.items())}
    tokens = torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(3))
    folders = {name: str(report.folder) for name, report in reports.items()}
    torch.save({"tokens": tokens, "folders": folders}, root / "in.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-c", STRANGER, root / "in.pt", root / "out.pt"], check=True, cwd=root, env=environment
    )
    return tokens, made, reports, torch.load(root / "out.pt")


@pytest.mark.parametrize("name", SERVED)
@torch.no_grad()
def test_a_process_without_manyheads_computes_the_same(exports, name):
    tokens, made, reports, found = exports
    (rank, rope), elsewhere = SERVED[name][1:]
    model, report, found = made[name], reports[name], found[name]
    assert found["class"] == report.loads_as == "DeepseekV3ForCausalLM"
    logits = model(tokens).logits
    assert (logits - found["logits"]).abs().max() < 1e-4
    assert report.difference < 1e-4 and 0 <= report.bound <= 2**-20
    text = model.generate(tokens[:1, :5], max_new_tokens=64, do_sample=False, pad_token_id=0)
    assert torch.equal(text, found["text"]) and text.shape[1] == 69
    assert found["shapes"] == [((1, 1, 5, rank), (1, 1, 5, rope))] * 2
    assert report.cache_floats == report.rank + report.rope_dim == rank + rope

    # Servers with the config's eps in latent norms and no biases: the same, where the report does not warn.
    warned = [line for line in report.transformers_only if "wrong" in line]
    assert elsewhere == (not warned)
    if elsewhere:
        assert (logits - found["elsewhere"]).abs().max() < 1e-4
    if any("biases" in line for line in warned):
        assert (logits - found["elsewhere"]).abs().max() > 0.5
    assert report.rope_type == ("longrope" if any("rope type" in line for line in warned) else "default")


def test_config_is_stock(exports):
    _, _, reports, _ = exports
    for name, report in reports.items():
        config = json.loads((report.folder / "config.json").read_text())
        assert config["model_type"] == "deepseek_v3" and "auto_map" not in config, name
        assert config["rms_norm_eps"] == 1e-6 and config["num_key_value_heads"] == config["num_attention_heads"] == 4
        assert DeepseekV3Config.from_pretrained(report.folder).num_mtp_layers == 0


def test_adopted_models_keep_their_cache(exports):
    _, made, reports, _ = exports
    for name in ("mqa", "gqa 2", "gqa 4 of 4", "qwen2 mqa", "half the channels turn"):
        layer = made[name].attentions[0]
        assert reports[name].cache_floats == layer.spec.cost(layer.dim, layer.heads, layer.site).cache_floats


def test_scaling_by_powers_of_two_is_exact_in_bfloat16(tmp_path):
    model = latent(mla()).to(torch.bfloat16)
    to_deepseek(model, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for index, layer in enumerate(model.attentions):
        rows = tensors[f"model.layers.{index}.self_attn.kv_a_proj_with_mqa.weight"][:24]
        ratio = (rows.double() / layer.project.kv_a_proj.weight[:24].double()).unique()
        assert len(ratio) == 1 and torch.frexp(ratio).mantissa == 0.5
        gain = tensors[f"model.layers.{index}.self_attn.kv_a_layernorm.weight"].double().unique()
        assert len(gain) == 1 and torch.frexp(gain).mantissa == 0.5 and gain >= 2**8


@pytest.mark.parametrize("build", [partial(adopted, num_key_value_heads=1), partial(latent, mla())])
@torch.no_grad()
def test_bfloat16_costs_what_it_costs_the_source(tmp_path, build):
    model, tokens = build(), torch.randint(96, (4, 60))
    report = to_deepseek(model, tmp_path / "out", dtype=torch.bfloat16)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.dtype == torch.bfloat16 and report.dtype == "bfloat16"
    p = model(tokens).logits.double().log_softmax(-1)
    rounded = build().to(torch.bfloat16)

    def kl(other):
        q = other(tokens).logits.double().log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1).mean().item()

    assert kl(exported) < 1.5 * kl(rounded) + 1e-4


@torch.no_grad()
def test_zero_padded_latent(tmp_path):
    model, tokens = latent(mla(pairs="[0, 2, 4, 6]")), torch.randint(96, (2, 30))
    report = to_deepseek(model, tmp_path / "out", pad_rank=512)
    assert (report.rank, report.nope_dim, report.cache_floats) == (512, 32, 520)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model(tokens).logits - exported(tokens).logits).abs().max() < 1e-4
    with pytest.raises(ExportError, match="pad_rank=8 is below the largest rank, 24"):
        to_deepseek(model, tmp_path / "small", pad_rank=8)


@torch.no_grad()
def test_the_certified_bound_holds_for_the_worst_input():
    down, gain, bias = torch.randn(12, 40), torch.rand(40) + 0.5, torch.randn(12)
    bound = stock._mean_square(down, bias, gain)
    worst = torch.linalg.svd(down * gain).Vh  # directions of the normalised input, the strongest first
    inputs = torch.cat([worst, -worst, torch.nn.functional.normalize(torch.randn(2000, 40), dim=-1)]) * 40**0.5
    c = (inputs * gain) @ down.T + bias
    assert bound / 12 < c.square().mean(-1).max() <= bound
    narrow, error = stock._normed(stock.Narrow(down, torch.eye(12)[None], bias), 16, gain)
    inner = (inputs * gain) @ narrow.down.T + narrow.bias
    normed = narrow.gain * inner * (inner.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert (normed @ narrow.up[0].T - c).abs().max() <= (error + 1e-6) * c.abs().max()
    assert error <= 2**-20


@pytest.mark.parametrize("build", [partial(adopted, num_key_value_heads=1), partial(latent, mla())])
def test_a_file_that_reads_back_otherwise_is_not_kept(tmp_path, build, monkeypatch):
    """With the norms not neutralised the logits are far off, which the reload must see."""
    monkeypatch.setattr(stock, "LARGEST_ERROR", 2.0**8)
    with pytest.raises(ExportError, match="reads back as another model"):
        to_deepseek(build(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def softcap():
    return latent("gqa(kv_heads=2) + softmax(cap=20.0)")


def shared_rows():
    config = ManyheadsConfig(base=LlamaConfig(**BASE), specs=["gqa(kv_heads=2)"] * 2, kv_source=[None, 0])
    return ManyheadsForCausalLM(config)


def uneven_heads():
    config = ManyheadsConfig(base=LlamaConfig(**BASE), specs=["gqa(kv_heads=1, head_dim=16)"] * 2, heads=[4, 2])
    return ManyheadsForCausalLM(config)


REFUSED = {
    "qk-norm": (partial(adopted, Qwen3Config, head_dim=16), "layer 0: its part 'qk-norm' normalises"),
    "window": (partial(adopted, MistralConfig, sliding_window=8), "layer 0: its part 'window' hides distant keys"),
    "cap": (softcap, "layer 0: its part 'softmax' caps its scores"),
    "moh": (partial(latent, mla(), mla() + " + moh(top=3)"), "layer 1: its part 'moh'"),
    "other part": (partial(latent, "gqa(kv_heads=2) + kha"), "layer 0: its part 'kha' has no place"),
    "other projection": (partial(latent, "mtla"), "layer 0: its part 'mtla' has no place"),
    "no rope": (partial(latent, "gqa(kv_heads=2) + rope(none)"), "layer 0: no channel of its keys rotates"),
    "half a rope": (
        partial(latent, "mla(rank=24, rope_dim=8, norm=false) + rope(fraction=0.5)"), "layer 0: rope.fraction=0.5",
    ),
    "pairs by layer": (
        partial(latent, mla(), mla(pairs="[0, 1, 2, 6]")), r"layer 1: .*one table for all layers.*one list rope.pairs",
    ),
    "tables by layer": (partial(latent, mla(), mla(rope=4, pairs="[0, 1]")), "layer 1: .*4 pairs|2 pairs"),
    "shared rows": (shared_rows, "layer 1: reads the cached rows of layer 0"),
    "head counts": (uneven_heads, "2 and 4 query heads"),
    "activation": (partial(adopted, hidden_act="gelu"), "uses 'gelu'.*SiLU"),
    "mlp bias": (partial(adopted, mlp_bias=True), "layer 0: the llama model has layers.0.mlp.down_proj.bias"),
    "experts": (
        partial(latent, "gqa(kv_heads=2)", kind=MixtralConfig, num_local_experts=2), "layer 0: the mixtral .*experts",
    ),
    "a fused feed-forward": (partial(adopted, Phi3Config, pad_token_id=0), "phi3 model lacks layers.0.mlp.gate_proj"),
    "four norms": (
        partial(adopted, Gemma2Config, head_dim=16, attn_logit_softcapping=None, layer_types=["full_attention"] * 2),
        "the gemma2 model has layers.0.post_feedforward_layernorm.weight",
    ),
    "LayerNorm": (partial(latent, "gqa(kv_heads=2)", kind=NemotronConfig), "the nemotron model .*LayerNorm"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(tmp_path, name):
    build, why = REFUSED[name]
    model = build()
    with pytest.raises(ExportError, match=why):
        to_deepseek(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", ["model", "asked"])
def test_half_precision_is_refused(tmp_path, given):
    model = latent(mla())
    with pytest.raises(ExportError, match=r"float16 cannot hold .*torch.bfloat16"):
        if given == "model":
            to_deepseek(model.half(), tmp_path / "out")
        else:
            to_deepseek(model, tmp_path / "out", dtype=torch.float16)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("choice", ["default", "other base", "list"])
def test_frequencies_in_the_stock_class(choice):
    table = inverse_frequencies(64, 5e5)
    theta = {"default": table, "other base": table[:8], "list": table[[0, 1, 1, 5, 20, 31]]}[choice]
    found = rope_config(theta, 5e5, 256)
    assert (found["rope_scaling"] is None) == (choice != "list")
    small = dict(BASE, qk_nope_head_dim=4, v_head_dim=4, kv_lora_rank=4, first_k_dense_replace=2)
    config = DeepseekV3Config.from_dict(small | found | dict(qk_rope_head_dim=2 * len(theta)))
    with torch.device("meta"):
        stock_model = DeepseekV3ForCausalLM(config)
    rotary = type(stock_model.model.rotary_emb)(config)
    torch.testing.assert_close(rotary.inv_freq, theta, rtol=5e-7, atol=0)
    assert rotary.attention_scaling == 1.0
    beyond = torch.arange(400)[None]  # longer than the config's positions
    cos, _ = rotary(torch.zeros(1), beyond)
    torch.testing.assert_close(cos[0, :, : len(theta)], (beyond[0, :, None] * theta).cos(), rtol=0, atol=5e-4)


@torch.no_grad()
def test_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(deepseek, "write_shards", partial(write_shards, limit=40_000))
    model, tokens = adopted(), torch.randint(96, (1, 20))
    report = to_deepseek(model, tmp_path / "out")
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model(tokens).logits - exported(tokens).logits).abs().max() < 1e-4
    assert report.bytes == sum(each.numel() * 4 for each in exported.parameters())


@pytest.mark.parametrize(
    ("kind", "options"), [(Phi3Config, {"pad_token_id": 0}), (Gemma2Config, {"head_dim": 10}), (GPT2Config, {})]
)
def test_the_stock_class_reads_what_was_cut_and_turned(tmp_path, kind, options):
    """Tensors that a family fuses or transposes go back as they came."""
    original = lively(AutoModelForCausalLM.from_config(kind(**BASE | options)))
    before = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    report = FORMATS["family"](adopt(original), tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(report.folder)
    assert report.loads_as == type(exported).__name__ == type(original).__name__
    assert all(torch.equal(before[name], tensor) for name, tensor in exported.state_dict().items())


def tokenizer():
    words = models.WordLevel({f"w{index}": index for index in range(96)}, unk_token="w0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


@pytest.mark.parametrize("format", FORMATS)
def test_a_format_writes_a_whole_folder_and_leaves_the_model_alone(tmp_path, format):
    model = adopted(tie_word_embeddings=True)
    model.generation_config.max_new_tokens = 7
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = FORMATS[format](model.train(), tmp_path / "new" / "out", tokenizer=tokenizer())
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["out"]
    assert report.format == format and report.folder == tmp_path / "new" / "out"
    assert str(report.folder) in str(report) and f"{report.cache_floats:g} floats" in str(report)
    exported = AutoModelForCausalLM.from_pretrained(report.folder)
    assert exported.generation_config.max_new_tokens == 7
    assert PreTrainedTokenizerFast.from_pretrained(report.folder)("w5").input_ids == [5]
    assert model.training and all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    written_twice = [note for note in report.notes if "twice" in note]
    assert bool(written_twice) == (format == "deepseek")
    assert not (report.folder.stat().st_mode ^ (tmp_path / "new").stat().st_mode)
    with pytest.raises(FileExistsError, match="exists already; remove it or choose another"):
        FORMATS[format](model, tmp_path / "new" / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_native_is_exact_and_carries_notes(tmp_path, dtype):
    model, tokens = latent(mla(bias="true") + " + moh(top=3)").to(dtype), torch.randint(96, (1, 20))
    model.config.notes = {"source": "tiny"}
    report = save(model, tmp_path / "out", notes={"budget": "50%"})
    assert report.difference == report.kl == 0.0 and report.cache_floats == 32.0
    assert model.config.notes == {"source": "tiny"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.notes == {"source": "tiny", "budget": "50%"} and loaded.dtype == dtype
    assert torch.equal(model(tokens).logits, loaded(tokens).logits)


def test_native_notes_that_are_not_json_leave_nothing(tmp_path):
    model = adopted()
    with pytest.raises(TypeError):
        save(model, tmp_path / "out", notes={"when": object()})
    assert not list(tmp_path.iterdir()) and model.config.notes == {}


FULL = {
    "system": OSError(errno.ENOSPC, "No space left on device"),
    "safetensors": SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
}


@pytest.mark.parametrize("error", FULL)
def test_disk_full(tmp_path, error):
    said = r"the disk is full: writing .*out needs 5,000 bytes, [\d,]+ bytes are free there; nothing of it is left"
    with pytest.raises(OSError, match=said) as caught, new_folder(tmp_path / "a" / "b" / "out", needed=5000) as work:
        (work / "half").write_text("half")
        raise FULL[error]
    assert caught.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", FORMATS)
def test_disk_full_during_an_export(tmp_path, format, monkeypatch):
    def full(*args, **kwargs):
        raise FULL["safetensors"]

    monkeypatch.setattr("manyheads.convert.export.shards.save_file", full)
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    model = adopted()
    with pytest.raises(OSError, match=r"needs [\d,]{6,} bytes"):
        FORMATS[format](model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "unreadable"), RuntimeError("other")])
def test_other_ends_leave_nothing_and_pass_unchanged(tmp_path, error):
    with pytest.raises(type(error)) as caught, new_folder(tmp_path / "out") as work:
        (work / "half").write_text("half")
        raise error
    assert caught.value is error and not list(tmp_path.iterdir())


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path):
    path = tmp_path / "out"
    with pytest.raises(FileExistsError), new_folder(path) as work:
        (work / "ours").write_text("ours")
        path.mkdir()
        (path / "theirs").write_text("theirs")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"] and (path / "theirs").exists()


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "out").symlink_to(Path("nowhere"))
    with pytest.raises(FileExistsError), new_folder(tmp_path / "out"):
        pass
