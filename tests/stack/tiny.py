"""Tiny random models: a zoo of specs in both bodies."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from manyheads.stack import ManyheadsConfig, ManyheadsForCausalLM

VOCAB, DIM, HEADS, LAYERS = 61, 32, 4, 4

ZOO: dict[str, dict[str, Any]] = {
    "gqa": {"specs": "gqa(kv_heads=2)"},
    "mla-expanded": {"specs": "mla(rank=12, rope_dim=4, view=expanded)"},
    "mla-absorbed": {"specs": "mla(rank=12, rope_dim=4, view=absorbed)"},
    "mla+moh": {"specs": "mla(rank=12, rope_dim=4) + moh(top=2)"},
    "mtla": {"specs": "mtla(stride=3, rank=12, rope_dim=4)"},
    "mfa-reuse": {"specs": "mfa(key_reuse=true)"},
    "gda": {"specs": "gqa(kv_heads=2) + gda"},
    "talking_heads": {"specs": "gqa(kv_heads=2) + talking_heads"},
    "window": {"specs": "gqa(kv_heads=2) + window(size=5)"},
    "shared": {"specs": "gqa(kv_heads=2)", "kv_source": [None, 0, None, 2]},
    "shared-mtla": {"specs": "mtla(stride=2, rank=12, rope_dim=4)", "kv_source": [None, 0, 0, None]},
    "weights": {"specs": "gqa(kv_heads=2) + qk-norm", "attn_source": [None, 0, 0, None]},
    "mixed": {
        "specs": ["gqa(kv_heads=2)", "mla(rank=12, rope_dim=4)", "gqa(kv_heads=2) + window(size=5)", "gqa"],
        "kv_source": [None, None, 0, None],
    },
}
MERGES = {"mtla", "shared-mtla"}
"""Those whose cache merges tokens: no drafts, no stock cache."""

BODIES = ("own", "llama")
COMMON = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def config(case: str | dict[str, Any], body: str = "own", **options: Any) -> ManyheadsConfig:
    fields = {
        "vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": 40, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "initializer_range": 0.2, "tie_word_embeddings": True, **COMMON, **options,
    }  # fmt: skip
    case = ZOO[case] if isinstance(case, str) else case
    if body == "own":
        return ManyheadsConfig(**case, **fields)
    return ManyheadsConfig(LlamaConfig(num_key_value_heads=2, **fields), **case)


def model(case: str | dict[str, Any], body: str = "own", **options: Any) -> ManyheadsForCausalLM:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(case, body, **options)).eval()


def batch(padding: tuple[int, ...] = (0, 5, 2), tokens: int = 12) -> dict[str, Tensor]:
    """Left-padded prompts."""
    ids = torch.randint(3, VOCAB, (len(padding), tokens), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(tokens)[None] >= torch.tensor(padding)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def greedy(of: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    return of.generate(**inputs, **{"max_new_tokens": 8, "do_sample": False, **options})
