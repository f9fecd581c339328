"""Adapters of ours as adapters of the peft package (the extra `peft`).

Its Poly is `mhr` with `gate=sample`, one set of numbers for all layers, and alpha = 1: `to_peft` writes such a folder,
with alpha in B. It has no IA3 form, no other gate, no correction and no dropout, so `mhr` with these does not go over.
No tuner of peft routes tokens by slices of their features, and its custom tuners are classes that replace the layer
rather than files that a stock install could load: `headwise-moe` stays with `save`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from manyheads.core.spec import printed
from manyheads.experts.adapters.mhr import MHR
from manyheads.experts.adapters.model import Adapters


def to_peft(found: Adapters, folder: str | Path, task_type: str | None = "CAUSAL_LM") -> None:
    """Write adapters as a folder for `peft.PeftModel.from_pretrained(base, folder)`; that samples in training.

    task_type: peft's name for what the model does, on which it depends whether a pass takes `task_ids` there.

    Raises:
        ImportError: peft is not installed. ValueError: adapters that its Poly cannot hold.
    """
    try:
        from peft import PolyConfig  # type: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("to_peft writes peft's own configuration; pip install 'manyheads[peft]'") from error
    packed = {name: adapter.packed() for name, adapter in found.items()}
    plain = set()
    for name, (options, _) in packed.items():
        if not isinstance(options, MHR):
            raise ValueError(f"{name}: peft has no adapter like {options.name}")
        kept = MHR(options.splits, options.skills, options.rank, options.tasks, options.alpha, gate=options.gate)
        if options != kept or options.gate not in ("soft", "sample") or not options.tasks:
            raise ValueError(f"{name}: peft's Poly has no {printed(options)}")
        plain.add(replace(options, alpha=1.0, gate="sample"))
    if len(plain) != 1:
        raise ValueError(f"peft's Poly has one set of numbers for all layers, not {sorted(map(printed, plain))}")
    (like,) = plain
    tensors: dict[str, Tensor] = {}
    for name, (options, values) in packed.items():
        assert isinstance(options, MHR)
        at = f"base_model.model.{name}.poly_"
        tensors[f"{at}lora_A"] = values["lora_a"].contiguous()
        tensors[f"{at}lora_B"] = torch.mul(values["lora_b"], options.alpha)
        tensors[f"{at}router.module_logits"] = values["logits"].flatten(1).contiguous()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    PolyConfig(
        r=like.rank, target_modules=sorted(packed), n_tasks=like.tasks, n_skills=like.skills, n_splits=like.splits,
        task_type=task_type, inference_mode=True,
    ).save_pretrained(str(folder))  # fmt: skip
