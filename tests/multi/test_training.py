"""A plain loop, transformers' `Trainer`, Lightning, scaled losses, recomputed trunks, and two processes: one step."""

import gc
import os
import socket
from datetime import timedelta

import pytest
import torch
from tests.multi.models import batch, gradients, model, same
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

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


def task(rows=24):
    """Rows with gaps as a data set, and a model that learns them."""
    torch.manual_seed(0)
    x, targets = batch(rows, dtype=torch.float32)
    made = [
        {"input": x[at], "targets": {name: each[at] for name, each in targets.items() if not _gone(each[at])}}
        for at in range(rows)
    ]
    return made, model(torch.float32)


def _gone(label):
    return bool((label.isnan() | (label == -100)).all())


def plainly(rows, net):
    """A loop as one writes it, SGD at 0.1."""
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for each in DataLoader(rows, batch_size=6, collate_fn=collate):
        optimiser.zero_grad()
        net(each["input"], targets=each["targets"]).loss.backward()
        optimiser.step()
    return net


def weights(net):
    return {name: each.detach().clone() for name, each in net.named_parameters()}


def by_trainer(rows, net, folder, **options):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", optim="sgd",
        learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0, num_train_epochs=1,
        train_sampling_strategy="sequential", per_device_train_batch_size=6, label_names=["targets"],
        remove_unused_columns=False, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    Trainer(net, arguments, train_dataset=rows, data_collator=collate).train()
    return net


@pytest.mark.parametrize("balance", ["sum", "uncertainty"])
def test_trainer_takes_the_steps_of_a_plain_loop(tmp_path, balance):
    rows, _ = task()
    first, other = (model(torch.float32, balance=balance) for _ in range(2))
    same(weights(plainly(rows, first)), weights(by_trainer(rows, other, tmp_path)), 1e-5, 1e-7)


def test_trainer_recomputes_the_trunk_when_told_so(tmp_path):
    rows, first = task()
    other, runs = model(torch.float32), []
    other.trunk[0].register_forward_hook(lambda *_: runs.append(1))
    by_trainer(rows, other, tmp_path, activation_checkpointing=True)
    assert other.checkpoint and len(runs) == 2 * 4
    same(weights(plainly(rows, first)), weights(other), 1e-5, 1e-7)
    with pytest.raises(ValueError, match="offload=False"):
        other.activation_checkpointing_enable(offload=True)


def test_trainer_in_bfloat16_stays_near_the_exact_steps(tmp_path):
    rows, first = task()
    other = by_trainer(rows, model(torch.float32), tmp_path, bf16=True)
    assert all(each.dtype == torch.float32 for each in other.parameters())
    same(weights(plainly(rows, first)), weights(other), 0.05, 0.02)


def test_trainer_accumulates_the_mean_of_its_batches(tmp_path):
    rows, first = task()
    other = by_trainer(rows, model(torch.float32), tmp_path, gradient_accumulation_steps=2)
    optimiser = torch.optim.SGD(first.parameters(), 0.1)
    for at, each in enumerate(DataLoader(rows, batch_size=6, collate_fn=collate)):
        (first(each["input"], targets=each["targets"]).loss / 2).backward()
        if at % 2:
            optimiser.step()
            optimiser.zero_grad()
    same(weights(first), weights(other), 1e-5, 1e-7)


def test_lightning_takes_the_steps_of_a_plain_loop(tmp_path):
    lightning = pytest.importorskip("lightning")
    rows, first = task()

    class Module(lightning.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            return self.net(batch["input"], targets=batch["targets"]).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), 0.1)

    other = model(torch.float32)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet)
    trainer.fit(Module(other), DataLoader(rows, batch_size=6, collate_fn=collate))
    same(weights(plainly(rows, first)), weights(other), 1e-5, 1e-7)


def test_a_scaled_loss_gives_the_gradients_of_the_plain_one():
    (x, targets), plain, scaled = batch(), model(), model()
    plain(x, targets=targets).loss.backward()
    optimiser, scaler = torch.optim.SGD(scaled.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(scaled(x, targets=targets).loss).backward()
    scaler.unscale_(optimiser)
    same(gradients(plain), gradients(scaled))
    before = weights(scaled)
    scaler.step(optimiser)
    assert any(not torch.equal(before[name], each) for name, each in weights(scaled).items())
    scaler.update()
    optimiser.zero_grad()
    before = weights(scaled)
    scaler.scale(scaled(x * float("inf"), targets=targets).loss).backward()
    scaler.step(optimiser)  # what is not finite is no step
    assert all(torch.equal(before[name], each) for name, each in weights(scaled).items())


def test_a_trunk_that_recomputes_inside_trains_the_same():
    from transformers import BertConfig, BertModel

    sizes = dict(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
                 hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    found = []
    for inside in (False, True):
        torch.manual_seed(0)
        net = MultiHead(
            BertModel(BertConfig(**sizes)), {"y": "classification(classes=3, pool=mean)", "z": "tokens(classes=2)"}
        )
        if inside:
            net.trunk.activation_checkpointing_enable({"use_reentrant": False})
        ids = torch.randint(30, (2, 5))
        net(ids, targets={"y": torch.tensor([0, 2]), "z": torch.randint(2, (2, 5))}).loss.backward()
        found.append(gradients(net))
    same(*found, 1e-5, 1e-7)


def _port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


OPTIONS = {"sum": {}, "uncertainty": {"balance": "uncertainty"}, "recomputed": {"checkpoint": True}}


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
    found = _found(rank)
    if rank == 0:
        torch.save(found, out)
    gc.collect()  # a reducer that outlives its group can wait for it for ever
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _found(rank: int) -> dict[str, dict[str, torch.Tensor | None]]:
    x, targets, rows = _shard(rank)
    mine = {name: each[rows] for name, each in targets.items()}
    found = {}
    for name, options in OPTIONS.items():
        net = model(**options)
        whole = DistributedDataParallel(net, find_unused_parameters=True)
        for _ in range(2):  # the second pass is where a reducer that still waits would complain
            net.zero_grad()
            whole(x[rows], targets=mine).loss.backward()
        found[name] = gradients(net)
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
    return found


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_two_processes_with_unlike_heads_make_the_step_of_one(tmp_path):
    out = str(tmp_path / "found.pt")
    mp.spawn(_process, (_port(), out), nprocs=2)  # not forked: autograd has threads by now
    found = torch.load(out)
    x, targets, rows = _shard(0)
    for name, options in {**OPTIONS, "parts": {}}.items():
        net = model(**options)
        net(x, targets=targets).loss.backward()
        assert net.net("tags").weight.grad is None
        same(gradients(net), found[name], 1e-6, 1e-8)
    net = model()
    net(x[rows], targets={name: each[rows] for name, each in targets.items()}).loss.backward()
    same(gradients(net), found["alone"], 1e-6, 1e-8)
