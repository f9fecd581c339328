import copy
import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.convert.tiny import VOCAB, model, saved, tokens
from tests.oracles.reference import close

from manyheads.convert.source import SourceError
from manyheads.convert.stream import BATCH, InMemory, OnDisk, attention_of, put_attention, run
from manyheads.stack.seam import SeamAttention

FAMILIES = ["llama", "tied", "biased", "qwen2", "qwen3", "mistral"]


def flow(layers, windows):
    """Hidden states after the embedding and after every layer, and what attention saw."""
    hidden, passes = layers.embed(windows), []
    for index in range(len(layers.config.specs)):
        with layers.open(index) as block:
            passes.append(run(block, layers.config, hidden))
        hidden = passes[-1].after
    return passes


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("kind", [*FAMILIES, "phi3", "gemma2", "gemma3"])
def test_disk_and_memory_are_the_same_source(kind, shard, tmp_path):
    made = model(kind)
    folder = saved(made, tmp_path, shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "20KB")
    disk, memory, windows = OnDisk(folder), InMemory(made), tokens()
    assert disk.config.specs == memory.config.specs
    for a, b in zip(flow(disk, windows), flow(memory, windows), strict=True):
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("before", "x", "y", "after"))
    ours, theirs = dict(disk.rest()), dict(memory.rest())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert ("lm_head.weight" in ours) == (kind != "tied")
    assert not any("layers" in name for name in ours)


@pytest.mark.parametrize("kind", FAMILIES)
def test_layers_in_a_row_are_the_model(kind):
    made, windows = model(kind), tokens(windows=BATCH + 3)
    reference = copy.deepcopy(made)
    with torch.no_grad():
        want = reference(windows, output_hidden_states=True)
    layers = InMemory(made)
    passes = flow(layers, windows)
    for index, each in enumerate(passes):
        close(each.before, want.hidden_states[index], 1e-5)
    rest = dict(layers.rest())
    norm = reference.model.norm
    norm.weight.data.copy_(rest["model.norm.weight"])
    with torch.no_grad():
        close(reference.lm_head(norm(passes[-1].after)), want.logits, 1e-4)


def test_a_pass_records_the_streams_around_attention():
    layers, windows = InMemory(model()), tokens()
    hidden = layers.embed(windows)
    with layers.open(0) as block:
        seen = run(block, layers.config, hidden)
        normed = block.input_layernorm(hidden)
        assert torch.equal(seen.before, hidden) and torch.equal(seen.x, normed)
        after = hidden + seen.y
        close(seen.after, after + block.mlp(block.post_attention_layernorm(after)), 1e-5)
        quick = run(block, layers.config, hidden, record=False)
        assert torch.equal(quick.after, seen.after)
        assert not attention_of(block, layers.config)._forward_hooks


@pytest.mark.parametrize("source", ["disk", "memory"])
def test_an_opened_layer_is_a_copy(source, tmp_path):
    made = model()
    layers = OnDisk(saved(made, tmp_path)) if source == "disk" else InMemory(made)
    windows = tokens()
    before = flow(layers, windows)[-1].after
    with layers.open(0) as block:
        attention = attention_of(block, layers.config)
        assert isinstance(attention, SeamAttention)
        other = copy.deepcopy(attention)
        put_attention(block, layers.config, other)
        assert attention_of(block, layers.config) is other
        for parameter in block.parameters():
            parameter.data.zero_()
    assert torch.equal(flow(layers, windows)[-1].after, before)


def test_a_layer_from_disk_gives_its_memory_back(tmp_path):
    """At once, even while the caller's name for it lives on: two layers are never in memory together."""
    layers = OnDisk(saved(model(), tmp_path))
    gc.disable()
    try:
        with layers.open(0) as block:
            held = [weakref.ref(parameter) for parameter in block.parameters()]
        assert not any(each() is not None for each in held)
    finally:
        gc.enable()
    assert all(parameter.is_meta for parameter in block.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_converted_in_float32(dtype, tmp_path):
    made = model(dtype=dtype)
    disk, memory, windows = OnDisk(saved(made, tmp_path)), InMemory(made), tokens()
    for a, b in zip(flow(disk, windows), flow(memory, windows), strict=True):
        assert a.after.dtype == b.after.dtype == torch.float32
        assert torch.equal(a.after, b.after)
    assert {tensor.dtype for _, tensor in [*disk.rest(), *memory.rest()]} == {torch.float32}
    assert made.dtype == dtype  # the model itself is not widened


def test_float64_stays_float64():
    layers = InMemory(model(dtype=torch.float64))
    assert flow(layers, tokens())[-1].after.dtype == torch.float64


def test_old_checkpoints_carry_tensors_that_no_model_reads(tmp_path):
    made = model()
    folder = saved(made, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    windows = tokens()
    assert torch.equal(flow(OnDisk(folder), windows)[-1].after, flow(InMemory(made), windows)[-1].after)


def test_a_tied_head_that_was_saved_twice_is_left_out(tmp_path):
    made = model("tied")
    folder = saved(made, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert dict(OnDisk(folder).rest()).keys() == dict(InMemory(made).rest()).keys()


def test_a_folder_that_lacks_a_tensor_says_which(tmp_path):
    folder = saved(model(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        OnDisk(folder)


def test_what_is_no_model_folder_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"config\.json"):
        OnDisk(tmp_path)
    folder = saved(model(), tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SourceError, match="truncated"):
        OnDisk(folder)


def test_tokens_outside_the_vocabulary_are_an_error(tmp_path):
    for layers in (OnDisk(saved(model(), tmp_path)), InMemory(model())):
        with pytest.raises(IndexError):
            layers.embed(torch.tensor([[VOCAB]]))
