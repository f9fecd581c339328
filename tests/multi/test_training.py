"""Stock trainers: transformers' `Trainer`, and two processes with heads of their own."""

import os
import socket
from datetime import timedelta

import pytest
import torch
from tests.multi.models import batch, gradients, model, same
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from manyheads.multi import MultiHead, collate


def test_trainer_trains_evaluates_and_saves(tmp_path):
    from safetensors.torch import load_file
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    x = torch.randn(40, 5)
    rows = [
        {"input": row, "targets": {"age": float(row[0])} if i % 2 else {"kind": int(row[1] > 0), "age": float("nan")}}
        for i, row in enumerate(x)
    ]
    net = MultiHead(
        torch.nn.Linear(5, 16), {"age": "regression", "kind": "classification(classes=2)", "idle": "regression"}
    )
    idle = net.net("idle").weight.clone()
    fixed = dict(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, seed=0, disable_tqdm=True, save_strategy="no"
    )
    arguments = TrainingArguments(
        **fixed, per_device_train_batch_size=5, num_train_epochs=8, learning_rate=0.05, gradient_accumulation_steps=2,
        label_names=["targets"], remove_unused_columns=False, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(net, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 3
    assert torch.equal(net.net("idle").weight, idle)
    trainer.save_model(str(tmp_path))
    assert set(load_file(tmp_path / "model.safetensors")) == set(net.state_dict())


def _port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _shard(rank):
    """Rank 0 has labels for age and kind, rank 1 for age and grade; tags have none anywhere."""
    x, targets = batch()
    rows = slice(0, 5) if rank == 0 else slice(5, 12)
    del targets["tags"]
    targets["kind"][5:], targets["grade"][:5] = -100, -100
    return x, targets, rows


def _process(rank: int, port: int, out: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(minutes=5))
    x, targets, rows = _shard(rank)
    mine = {name: each[rows] for name, each in targets.items()}
    found = {}
    for balance in ("sum", "uncertainty"):
        net = model(balance=balance)
        whole = DistributedDataParallel(net, find_unused_parameters=True)
        for _ in range(2):  # the second pass is where a reducer that still waits would complain
            net.zero_grad()
            whole(x[rows], targets=mine).loss.backward()
        found[balance] = gradients(net)
    net = model()
    parts = DistributedDataParallel(net, find_unused_parameters=True)
    counts = net.label_counts(targets)
    first, last = slice(0, 2), slice(2, None)
    with parts.no_sync():
        parts(x[rows][first], targets={n: each[first] for n, each in mine.items()}, counts=counts).loss.backward()
    parts(x[rows][last], targets={n: each[last] for n, each in mine.items()}, counts=counts).loss.backward()
    found["parts"] = gradients(net)
    net.zero_grad()
    nothing = {"age": None} if rank else mine  # a process without any label
    parts(x[rows], targets=nothing).loss.backward()
    found["alone"] = gradients(net)
    if rank == 0:
        torch.save(found, out)
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_two_processes_with_unlike_heads_make_the_step_of_one(tmp_path):
    out = str(tmp_path / "found.pt")
    mp.spawn(_process, (_port(), out), nprocs=2)  # not forked: autograd has threads by now
    found = torch.load(out)
    x, targets, rows = _shard(0)
    for name, balance in (("sum", "sum"), ("uncertainty", "uncertainty"), ("parts", "sum")):
        net = model(balance=balance)
        net(x, targets=targets).loss.backward()
        assert net.net("tags").weight.grad is None
        same(gradients(net), found[name], 1e-6, 1e-8)
    net = model()
    net(x[rows], targets={name: each[rows] for name, each in targets.items()}).loss.backward()
    same(gradients(net), found["alone"], 1e-6, 1e-8)
