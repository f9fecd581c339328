"""The command line run in this process, and a tiny random Llama with a byte-level tokenizer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from manyheads.cli import app

SMALL = ["--calibrate", "8x32", "--evaluate", "2x64", "--contexts", "8,24", "--heal", "4"]
"""Of `shrink`: small enough for a test, and still through every step."""
TORCHRUN = {n: ["torch.distributed.run", "--nproc_per_node", f"{n}", "--master_port"] for n in (1, 2)}
"""A launcher that starts so many processes, up to the port."""


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


def run(*args: str | Path) -> Ran:
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ran(done.exit_code, done.stdout, done.stderr)


def launched(launcher: Sequence[str], *args: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line in processes that a launcher starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", *launcher, str(port), "-m", "manyheads", *map(str, args)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def refused(*args: str | Path) -> str:
    """The one line in which a command says no."""
    ran = run(*args)
    assert ran.code == 1, ran
    assert "Traceback" not in ran.err + ran.out
    *_, line = ran.err.splitlines()
    assert line.startswith("error: ") and not ran.out, ran
    return line


def save_tiny(folder: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={sign: index for index, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fields: dict[str, Any] = dict(
        vocab_size=len(alphabet), hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, initializer_range=0.2, tie_word_embeddings=True, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**fields | options)).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=alphabet[0]).save_pretrained(folder)
    return folder
