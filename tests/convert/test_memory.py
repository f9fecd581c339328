"""Converting from disk holds about a layer: the model may be larger than memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WRITE = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file

folder, layers, dim, inner = Path(sys.argv[1]), *map(int, sys.argv[2:])
heads, kv, width, vocab = 16, 2, dim // 16, 256
folder.mkdir()
(folder / "config.json").write_text(json.dumps({
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32", "vocab_size": vocab,
    "hidden_size": dim, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": width,
    "num_attention_heads": heads, "num_key_value_heads": kv, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None}))
shapes = {
    "self_attn.q_proj": (heads * width, dim), "self_attn.k_proj": (kv * width, dim),
    "self_attn.v_proj": (kv * width, dim), "self_attn.o_proj": (dim, heads * width),
    "mlp.gate_proj": (inner, dim), "mlp.up_proj": (inner, dim), "mlp.down_proj": (dim, inner)}
where, size = {}, 0
def write(name, tensors):
    global size
    save_file(tensors, folder / name, metadata={"format": "pt"})
    where.update(dict.fromkeys(tensors, name))
    size += sum(t.nbytes for t in tensors.values())
for layer in range(layers):
    tensors = {f"{n}.weight": torch.randn(s).mul_(s[1] ** -0.5) for n, s in shapes.items()}
    tensors |= {f"{n}.weight": torch.ones(dim) for n in ("input_layernorm", "post_attention_layernorm")}
    write(f"layer-{layer}.safetensors", {f"model.layers.{layer}.{n}": t for n, t in tensors.items()})
write("rest.safetensors", {"model.embed_tokens.weight": torch.randn(vocab, dim), "model.norm.weight": torch.ones(dim)})
index = {"metadata": {"total_size": size}, "weight_map": where}
(folder / "model.safetensors.index.json").write_text(json.dumps(index))
print(json.dumps({"bytes": size}))
"""

CONVERT = """
import json, sys
from pathlib import Path
import torch
from manyheads.convert.heal import LayerwiseHeal
from manyheads.convert.plan import make_goal
from manyheads.convert.shrink import shrink
from manyheads.convert.plan import shape_of
from manyheads.convert.stream import OnDisk

def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

idle = peak()
torch.set_num_threads(2)
source, work = map(Path, sys.argv[1:3])
layers = OnDisk(source)
goal = make_goal("50%", "mla", shape_of(layers))
tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
shrink(layers, tokens, [goal], work, heal=LayerwiseHeal(steps=2),
       progress=lambda *step: print(*step, f"{peak() / 2**30:.2f} GiB", file=sys.stderr, flush=True))
print(json.dumps({"peak": peak(), "idle": idle, "folder": goal.name}))
"""


def python(script, *arguments):
    """The last line of a script that runs alone, so that its peak is its own."""
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("layers", "dim", "inner", "limit"),
    [
        pytest.param(12, 512, 4096, None, id="300MB"),
        pytest.param(24, 2048, 8640, 3_000_000_000, id="6GB", marks=pytest.mark.slow),
    ],
)
def test_peak_memory_is_about_a_layer(layers, dim, inner, limit, tmp_path):
    """Peak resident memory above that of the imports: a few layers, whatever their number."""
    size = python(WRITE, tmp_path / "source", layers, dim, inner)["bytes"]
    done = python(CONVERT, tmp_path / "source", tmp_path / "work")
    peak, idle = done["peak"], done["idle"]
    print(f"\n{size / 1e9:.2f} GB of weights: peak {peak / 1e9:.2f} GB, {idle / 1e9:.2f} GB of it imports")
    written = sum(file.stat().st_size for file in (tmp_path / "work" / done["folder"]).glob("*.safetensors"))
    assert written > 0.9 * size
    assert peak < limit if limit is not None else peak - idle < 0.75 * size


LIMITED = """
import json, resource, sys

import torch

from manyheads.bench.job import shrink_model

torch.set_num_threads(2)
limit = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # of memory that is no file's
result = shrink_model(
    sys.argv[1], "50%", to="auto" if sys.argv[4] == "auto" else "mla", texts=[sys.argv[5]], heal=None, stream=True,
    calibration=(4, 64), evaluation=(2, 64), contexts=(), out=sys.argv[2],
    progress=lambda *step: print(*step, file=sys.stderr, flush=True))
print(json.dumps({row["name"]: row["perplexity"] for row in [result["source"], *result["candidates"]]}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits data as Linux does")
@pytest.mark.parametrize("to", ["mla", "auto"])
def test_a_model_four_times_the_memory_it_may_use(to, tmp_path):
    """The whole job, measuring included, where an allocation above the limit fails."""
    size = python(WRITE, tmp_path / "source", 48, 1536, 6144)["bytes"]
    write_tokenizer(tmp_path / "source")
    text = tmp_path / "text.txt"
    text.write_text("Every layer is read, fitted, written, and forgotten. " * 400)
    done = python(LIMITED, tmp_path / "source", tmp_path / "out", size // 4, to, text)
    assert len(done) == 2 and all(value > 1 for value in done.values())


def write_tokenizer(folder):
    """A token for each of 256 bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
