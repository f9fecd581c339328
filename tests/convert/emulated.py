"""Two accelerators emulated in host memory (`emulated.cpp`), and conversions on them, in a process of their own.

    python -m tests.convert.emulated BUILD cases FOLDER CASES   prints what each of a JSON list found, a line each
    python -m tests.convert.emulated BUILD mixed                says whether devices can be mixed
    python -m tests.convert.emulated BUILD shrink …             is the command line

A process that has these devices has them to its end, so tests start another one.
"""

import gc
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_suffix(".cpp")
NAME = "emulated"


def build(folder):
    """The extension, compiled where it is not yet."""
    return cpp_extension.load(NAME, [str(SOURCE)], build_directory=str(folder), extra_cflags=["-O0", "-g0"])


def start(folder):
    """Give this process the devices `emulated:0` and `emulated:1`."""
    torch.utils.rename_privateuse1_backend(NAME)
    extension = build(folder)
    torch._register_device_module(
        NAME,
        SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 2,
            current_device=lambda: 0,
            get_amp_supported_dtype=lambda: [torch.bfloat16],
            max_memory_allocated=lambda device: extension.peak(torch.device(device).index),
            _is_in_bad_fork=lambda: False,
            manual_seed_all=lambda seed: None,
        ),
    )
    return extension


@contextmanager
def watched():
    """Devices of the weights and inputs of every layer that runs or heals, by layer, and where products were halved."""
    from manyheads.convert.heal import LayerwiseHeal
    from manyheads.stack.seam import SeamAttention

    seen: dict[int, set[str]] = {}
    half: set[str] = set()
    forward, apply, autocast = SeamAttention.forward, LayerwiseHeal._apply, torch.autocast.__init__

    def note(attention, x):
        found = {str(t.device) for t in (*attention.parameters(), *attention.buffers(), x)}
        seen.setdefault(attention.site.layer, set()).update(found)

    def watch_forward(self, hidden_states, *args, **kwargs):
        note(self, hidden_states)
        return forward(self, hidden_states, *args, **kwargs)

    def watch_apply(self, attention, weights, x, where):
        note(attention, x)
        return apply(self, attention, weights, x, where)

    def watch_autocast(self, kind, *args, enabled=True, **kwargs):
        half.update([kind] if enabled else [])
        autocast(self, kind, *args, enabled=enabled, **kwargs)

    watching = mock.patch.object(SeamAttention, "forward", watch_forward)
    healing = mock.patch.object(LayerwiseHeal, "_apply", watch_apply)
    with watching, healing, mock.patch.object(torch.autocast, "__init__", watch_autocast):
        yield seen, half


def convert(folder, to, devices, *, streamed, heal, budget="50%", bfloat16=False):
    """One conversion of a tiny random Llama, which lies on the second device itself where there is no map."""
    from tests.convert.tiny import model, saved, tokens

    from manyheads.convert.devices import DeviceMap
    from manyheads.convert.heal import LayerwiseHeal
    from manyheads.convert.plan import make_goal, shape_of
    from manyheads.convert.shrink import shrink
    from manyheads.convert.source import load_source
    from manyheads.convert.stream import InMemory, OnDisk

    source = model(layers=4, num_key_value_heads=4)
    where = None if devices is None else DeviceMap.read(devices)
    if where is None:
        source.to(f"{NAME}:1")
    layers = OnDisk(saved(source, folder / "source"), devices=where) if streamed else InMemory(source, where)
    goal = make_goal(budget, to, shape_of(layers))
    with watched() as (seen, half), sdpa_kernel(SDPBackend.MATH):  # the one kernel that both have
        healing = LayerwiseHeal(steps=heal) if heal else None
        shrink(layers, tokens(), [goal], folder / "job", heal=healing, bfloat16=bfloat16)
    assert where is None or {parameter.device.type for parameter in source.parameters()} == {"cpu"}
    made = load_source(folder / "job" / goal.name).model
    where_each = {layer: sorted(found) for layer, found in sorted(seen.items())}
    return made, {"where": where_each, "half": sorted(half), "kv_source": made.config.kv_source}


def compare(extension, folder, to, devices, **options):
    """How far logits of what these devices made are from what the CPU made, of their size, and the bytes that devices
    hold at the end."""
    from tests.convert.tiny import tokens

    own, _ = convert(folder / "cpu", to, "cpu", **options)
    made, found = convert(folder / "devices", to, devices, **options)
    gc.collect()
    with torch.no_grad():
        want, got = (each(tokens()).logits for each in (own, made))
    apart = ((got - want).norm() / want.norm()).item()
    return {"apart": apart, "held": [extension.held(index) for index in range(2)], **found}


def mixed():
    """Operations on tensors of two devices, and how many of them were refused."""
    one, other, cpu = (torch.ones(3, 3, device=device) for device in (f"{NAME}:0", f"{NAME}:1", "cpu"))
    tries = [
        operation
        for second in (other, cpu)
        for operation in (
            lambda second=second: one + second,
            lambda second=second: one @ second,
            lambda second=second: torch.cat([one, second]),
            lambda second=second: torch.linalg.solve(one, second),
            lambda second=second: one.masked_fill(second.bool(), 0),
            lambda second=second: one.gather(0, second.long()),
            lambda second=second: torch.nn.functional.linear(one, second),
            lambda second=second: torch.nn.functional.embedding(second.long(), one),
        )
    ]
    raised = 0
    for operation in tries:
        try:
            operation()
        except RuntimeError as error:
            raised += "device" in str(error)
    return {"tried": len(tries), "raised": raised}


if __name__ == "__main__":
    _, folder, what, *args = sys.argv
    extension = start(folder)
    torch.cpu._is_avx512_bf16_supported = lambda: False  # as the emulated devices, whatever this machine has
    if what == "cases":
        for n, case in enumerate(json.loads(args[1])):
            print(json.dumps(compare(extension, Path(args[0]) / str(n), **case)), flush=True)
    elif what == "mixed":
        print(json.dumps(mixed()))
    else:
        from manyheads.cli import app

        app([what, *args])
