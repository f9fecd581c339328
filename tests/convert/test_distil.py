"""Healing end to end: what is trained and what is not, the same bits however often interrupted, one process or two."""

import copy
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.convert.tiny import VOCAB, model, tokens

import manyheads.convert.beside as beside
import manyheads.convert.distil as module
from manyheads.convert.adopt import adopt
from manyheads.convert.beside import Beside
from manyheads.convert.distil import Distil, check, distil
from manyheads.convert.lora import linear_layers
from manyheads.convert.relations import Relations
from manyheads.convert.resume import ResumeError
from manyheads.core.part import OptionError
from manyheads.stack import ManyheadsConfig
from manyheads.stack.pretrained import ManyheadsForCausalLM

QUICK = Distil(steps=12, batch=(4, 16), every=4, lr=1e-2, bfloat16=False, patience=0)
ROOT = Path(__file__).parents[2]


class Windows:
    """Token windows in memory."""

    digest = "windows"

    def __init__(self, count=24):
        self.rows = tokens(count)

    def held(self, length):
        return self.rows[:3, :length]

    def batch(self, seed, step, count, length, mine):
        generator = torch.Generator().manual_seed(100 * seed + step)
        return self.rows[3:][torch.randint(len(self.rows) - 3, (count,), generator=generator)][mine, :length]

    def state(self):
        return {}

    def restore(self, state):
        pass


def pair(kind="llama", dtype=torch.float32, **options):
    """A student that is its teacher but for noise in its attention."""
    teacher = adopt(model(kind, dtype=dtype, **options))
    student = copy.deepcopy(teacher)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in student.attentions:
            for weight in layer.parameters():
                weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return student, teacher


def state(of):
    return {name: tensor.clone() for name, tensor in of.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stop_at(step):
    """Ctrl-C after so many steps."""

    def progress(done, total):
        if done == step:
            raise KeyboardInterrupt

    return progress


# --- the loss


@pytest.mark.parametrize("kind", ["llama", "tied"])
@pytest.mark.parametrize("train", ["attention", "all"])
def test_the_loss_and_its_gradient_are_those_of_whole_logits(monkeypatch, kind, train):
    monkeypatch.setattr(beside, "BLOCK", 10)
    student, teacher = pair(kind, torch.float64)
    options = Distil(batch=(3, 16), ce=0.3, kl=0.7, temperature=2.0, bfloat16=False)
    ids = tokens(3)
    student.requires_grad_(train == "all")
    for layer in student.attentions:
        layer.requires_grad_()
    again = copy.deepcopy(student)
    found = Beside(student, teacher.requires_grad_(False), options)(ids)
    (2 * found.loss).backward()
    logits, p = again(ids).logits[:, :-1], teacher(ids).logits[:, :-1]
    ce = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    p, q = (each.div(2).log_softmax(-1).flatten(0, 1) for each in (p, logits))
    kl = 4 * torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    (2 * (0.3 * ce + 0.7 * kl)).backward()
    torch.testing.assert_close(tuple(found), (0.3 * ce + 0.7 * kl, ce, kl))
    for (name, one), (_, other) in zip(student.named_parameters(), again.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_a_student_that_is_its_teacher_has_neither_kl_nor_gradient():
    teacher = adopt(model(dtype=torch.float64))
    student = copy.deepcopy(teacher)
    found = Beside(student, teacher.requires_grad_(False), Distil(ce=0.0, relations=Relations(2)))(tokens(3))
    found.loss.backward()
    assert abs(found.kl) < 1e-14 and abs(found.loss) < 1e-14
    assert max(weight.grad.abs().max() for weight in student.parameters()) < 1e-14


def test_auxiliary_losses_of_the_student_count_in_training_only():
    config = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, aux_weight=0.5)
    torch.manual_seed(0)
    student = ManyheadsForCausalLM(ManyheadsConfig(specs="gqa + moh(top=2)", **config))
    teacher = adopt(model())
    both = Beside(student, teacher, Distil())
    found = both.train()(tokens(2))
    assert found.loss > 0.1 * found.ce + found.kl + 1e-3
    found = both.eval()(tokens(2))
    torch.testing.assert_close(found.loss, 0.1 * found.ce + found.kl)


# --- what is trained


@pytest.mark.parametrize("options", [{}, {"relations": Relations(2)}, {"ce": 1.0, "kl": 0.0}, {"accumulate": 2}])
def test_the_held_out_loss_falls_and_all_but_attention_keeps_its_bits(options):
    student, teacher = pair()
    before, taught, drawn = state(student), state(teacher), torch.get_rng_state()
    found = distil(student, teacher, Windows(), replace(QUICK, steps=40, every=20, **options))
    assert [held.step for held in found.curve] == [0, 20, 40] and found.steps == 40 and found.tokens == 40 * 64
    assert found.curve[-1].loss < found.curve[0].loss - 0.003 and found.file is None
    if options.get("kl", 1.0):
        assert found.curve[-1].kl < 0.95 * found.curve[0].kl
    after = state(student)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "self_attn" in name}
    assert same(taught, state(teacher)) and torch.equal(torch.get_rng_state(), drawn)
    assert not student.training and all(p.requires_grad and p.grad is None for p in student.parameters())


def test_all_weights_are_trained_where_that_is_asked_for():
    student, teacher = pair("tied")
    before = state(student)
    distil(student, teacher, Windows(), replace(QUICK, train="all"))
    assert not any(torch.equal(before[name], tensor) for name, tensor in state(student).items())


def test_accumulated_passes_are_one_step():
    made = []
    for accumulate in (1, 2, 4):
        student, teacher = pair(dtype=torch.float64)
        options = replace(QUICK, steps=3, accumulate=accumulate, relations=Relations(2))
        distil(student, teacher, Windows(), options)
        made.append(state(student))
    for other in made[1:]:
        torch.testing.assert_close(other, made[0], atol=1e-9, rtol=1e-7)


def test_half_precision_products_train_as_well():
    student, teacher = pair()
    found = distil(student, teacher, Windows(), replace(QUICK, steps=40, every=40, bfloat16=True))
    assert found.curve[-1].loss < found.curve[0].loss - 0.003
    assert {weight.dtype for weight in student.parameters()} == {torch.float32}


def test_it_stops_when_nothing_gets_better_and_keeps_the_best():
    student, teacher = pair()
    found = distil(student, teacher, Windows(), replace(QUICK, steps=60, lr=1.0, warmup=0, every=2, patience=2))
    assert found.steps == found.best + 4 < 60
    assert min(found.curve, key=lambda held: held.loss).step == found.best
    again = distil(student, teacher, Windows(), replace(QUICK, steps=1, lr=1e-12))
    assert again.curve[0].loss == pytest.approx(found.curve[found.best // 2].loss, rel=1e-6)


def test_a_loss_that_is_no_number_is_an_error_and_leaves_the_last_checkpoint(tmp_path):
    student, teacher = pair()
    with pytest.raises(FloatingPointError, match=r"is no number any more .*step \d+"):
        distil(student, teacher, Windows(), replace(QUICK, lr=1e30, warmup=0, steps=30), work=tmp_path / "w")
    assert [file.name for file in tmp_path.glob("w/step-*")] == ["step-000000"]


# --- interrupts


DROPPING = replace(QUICK, seed=5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training that was never interrupted, of a model that draws in training."""
    student, teacher = pair(attention_dropout=0.2)
    work = tmp_path_factory.mktemp("whole")
    return distil(student, teacher, Windows(), DROPPING, work=work), state(student), work


@pytest.mark.parametrize("step", [0, 3, 4, 9])
def test_resume_gives_the_bits_of_an_uninterrupted_training(whole, tmp_path, step):
    work = tmp_path / "w"
    student, teacher = pair(attention_dropout=0.2)
    with pytest.raises(KeyboardInterrupt):
        distil(student, teacher, Windows(), DROPPING, work=work, progress=stop_at(step))
    assert not list(work.glob("*.tmp"))
    kept = sorted(file.name for file in work.glob("step-*"))
    best = min((held for held in whole[0].curve if held.step < step), key=lambda held: held.loss, default=None)
    assert kept == ([] if best is None else [f"step-{best.step:06d}", f"step-{step:06d}"])
    seen = []
    student, teacher = pair(attention_dropout=0.2)
    found = distil(student, teacher, Windows(), DROPPING, work=work, progress=lambda done, total: seen.append(done))
    assert seen[0] == step and found.curve == whole[0].curve and found.best == whole[0].best
    assert same(state(student), whole[1])
    best = load_file(found.file)
    assert same(best, load_file(whole[0].file)) and all("self_attn" in name for name in best)


def test_a_finished_training_is_read_not_made_again(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(module.Trainer, "_step", lambda self: pytest.fail("a step was made"))
    student, teacher = pair(attention_dropout=0.2)
    found = distil(student, teacher, Windows(), DROPPING, work=whole[2])
    assert found.curve == whole[0].curve and same(state(student), whole[1])


def test_another_seed_is_another_training(whole):
    student, teacher = pair(attention_dropout=0.2)
    assert distil(student, teacher, Windows(), replace(DROPPING, seed=6)).curve != whole[0].curve


def test_resume_with_other_options_or_models_names_them(tmp_path):
    student, teacher = pair()
    with pytest.raises(KeyboardInterrupt):
        distil(student, teacher, Windows(), QUICK, work=tmp_path, record={"model": "a"}, progress=stop_at(2))
    for change, said in (({"lr": 0.5}, r"heal.lr was 0.01, is 0.5"), ({"steps": 9}, "heal.steps was 12, is 9")):
        student, teacher = pair()
        with pytest.raises(ResumeError, match=said):
            distil(student, teacher, Windows(), replace(QUICK, **change), work=tmp_path, record={"model": "a"})
    with pytest.raises(ResumeError, match="model was 'a', is 'b'"):
        distil(*pair(), Windows(), QUICK, work=tmp_path, record={"model": "b"})
    student, teacher = pair()
    with torch.no_grad():
        next(student.attentions[0].parameters())[0, 0] += 1
    with pytest.raises(ResumeError, match=r"\(student was '\w+', is '\w+'\)"):
        distil(student, teacher, Windows(), QUICK, work=tmp_path, record={"model": "a"})


def test_an_interrupt_waits_for_the_end_of_an_update(tmp_path, monkeypatch):
    """Ctrl-C in the middle of the optimiser's work: the checkpoint is that of a whole step."""
    import signal

    plain, calls = torch.optim.AdamW.step, []

    def step(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return plain(self, *args, **kwargs)

    student, teacher = pair()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", step)
            with pytest.raises(KeyboardInterrupt):
                distil(student, teacher, Windows(), QUICK, work=tmp_path / "w")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "w/step-000003").exists()
    one, two = pair()[0], pair()[0]
    distil(one, teacher, Windows(), QUICK, work=tmp_path / "w")
    distil(two, teacher, Windows(), QUICK)
    assert same(state(one), state(two))


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path):
    student, teacher = pair()
    with pytest.raises(KeyboardInterrupt):
        distil(student, teacher, Windows(), QUICK, work=tmp_path, progress=stop_at(4))
    (tmp_path / "step-000004/state.pt").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"step-000004/state\.pt cannot be read as a checkpoint"):
        distil(*pair(), Windows(), QUICK, work=tmp_path)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    written = []

    def fill_up(tensors, file):
        written.append(file)
        if len(written) == 2:
            Path(file).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(tensors, file)

    save = module.save_file
    monkeypatch.setattr(module, "save_file", fill_up)
    with pytest.raises(OSError, match="No space left"):
        distil(*pair(), Windows(), QUICK, work=tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"job.json", "step-000000"}


# --- what is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps=0; at least 1"),
        ({"every": 0}, "every=0; at least 1"),
        ({"batch": (0, 16)}, "a batch is windows x tokens, at least 1x2, not 0x16"),
        ({"batch": (3, 16), "accumulate": 2}, "3 windows do not make accumulate=2 equal passes"),
        ({"lr": 0.0}, "lr=0.0; it must be positive"),
        ({"kl": -1.0}, "kl=-1.0; it must be zero or more"),
        ({"ce": 0.0, "kl": 0.0}, "ce and kl are both 0"),
        ({"train": "heads"}, "train='heads'; it may be attention or all"),
        ({"temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_options_that_do_not_fit(options, said):
    with pytest.raises(OptionError, match=said):
        replace(QUICK, **options)


def test_models_that_do_not_fit():
    student, teacher = pair()
    with pytest.raises(ValueError, match="the student predicts 61 tokens, the teacher 64; they need one vocabulary"):
        check(student, adopt(model(vocab_size=64)), QUICK)
    with pytest.raises(ValueError, match="windows of 16 tokens are longer than the teacher's 8 positions"):
        check(student, adopt(model(max_position_embeddings=8)), QUICK)
    with pytest.raises(ValueError, match=r"trained in float32, not torch.bfloat16"):
        check(copy.deepcopy(student).bfloat16(), teacher, QUICK)
    with pytest.raises(ValueError, match="the attention of a LlamaForCausalLM is not known"):
        check(model(), teacher, QUICK)
    with pytest.raises(ValueError, match="relations are between layers of ours; the teacher is a LlamaForCausalLM"):
        check(student, model(), replace(QUICK, relations=Relations(2)))
    with pytest.raises(OptionError, match="heads=3 do not divide all widths"):
        check(student, teacher, replace(QUICK, relations=Relations(3)))
    with pytest.raises(OptionError, match="the student has 2 layers, none of number 2"):
        check(student, teacher, replace(QUICK, relations=Relations(2, layer=2)))


def test_windows_that_do_not_make_equal_shares_of_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        OptionError, match="4 windows a step do not make equal shares for 3 processes with accumulate=1"
    ):
        distil(*pair(), Windows(), QUICK)


def test_a_stock_student_trains_whole():
    student, teacher = model(), adopt(model("llama", initializer_range=0.1))
    found = distil(student, teacher, Windows(), replace(QUICK, train="all", steps=30, every=30))
    assert found.curve[-1].loss < found.curve[0].loss


# --- adapters


def test_lora_goes_beside_linear_layers_whose_output_is_used():
    student, _ = pair()
    names = linear_layers(student, student.attentions)
    assert len(names) == 2 * 4 and all(name.endswith("_proj") and "self_attn" in name for name in names)
    latent = ManyheadsForCausalLM(
        ManyheadsConfig(specs="mla(rank=8, rope_dim=4)", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1,
                        num_attention_heads=4)
    )  # fmt: skip
    names = linear_layers(latent, latent.attentions)  # the absorbed view reads the weight of kv_b_proj
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "kv_a_proj", "o_proj"}


def test_lora_is_asked_for_by_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"manyheads\[peft\]"):
        distil(*pair(), Windows(), replace(QUICK, lora=2))


def test_lora_trains_and_is_merged(tmp_path):
    pytest.importorskip("peft", reason="peft is not installed")
    student, teacher = pair()
    before = state(student)
    options = replace(QUICK, lora=4, lr=1e-2, steps=20, every=10)
    found = distil(student, teacher, Windows(), options)
    after = state(student)
    assert after.keys() == before.keys() and found.curve[-1].loss < found.curve[0].loss
    for name, tensor in after.items():
        rank = torch.linalg.matrix_rank(tensor - before[name], atol=1e-5).item() if tensor.ndim == 2 else 0
        assert rank == (4 if "self_attn" in name and name.endswith("_proj.weight") else 0), name
    again = pair()[0]
    with pytest.raises(KeyboardInterrupt):
        distil(pair()[0], teacher, Windows(), options, work=tmp_path, progress=stop_at(13))
    distil(again, teacher, Windows(), options, work=tmp_path)
    assert same(state(again), after)


# --- several processes


RANKED = """
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.convert.test_distil import QUICK, Windows, pair
from manyheads.convert.distil import distil

def progress(done, total):
    if done == int(os.environ.get("STOP", -1)):
        os._exit(0)

out = Path(sys.argv[1])
student, teacher = pair("tied")
options = replace(QUICK, steps=6, every=3, accumulate=2, train={train!r})
found = distil(student, teacher, Windows(), options, work=out, progress=progress)
if torch.distributed.get_rank() == 0:
    (out / "curve.json").write_text(json.dumps(found.curve))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""
SHARDED = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip


def launch(work, train, **environment):
    """Two processes, as `accelerate launch` starts them."""
    pytest.importorskip("accelerate", reason="needs manyheads[train]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    shared = os.environ | {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path,
    } | environment  # fmt: skip
    both = [
        subprocess.Popen([sys.executable, "-c", RANKED.format(train=train), str(work)], stderr=subprocess.PIPE,
                         text=True, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        said = [each.communicate(timeout=180)[1] for each in both]
    finally:
        for each in both:
            each.kill()
    assert [each.returncode for each in both] == [0, 0], "\n".join(said)


def equals_one_process(work, train, tmp_path):
    """Losses, and the weights after the last step."""
    found = distil(*pair("tied"), Windows(), replace(QUICK, steps=6, every=3, train=train), work=tmp_path / "alone")
    curve = json.loads((work / "curve.json").read_text())
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(found.curve), atol=1e-4, rtol=1e-4)
    one, two = (load_file(folder / "step-000006/weights.safetensors") for folder in (tmp_path / "alone", work))
    assert {f"student.{name}" for name, _ in pair("tied")[0].named_parameters()} >= one.keys() == two.keys()
    for name, weight in two.items():
        torch.testing.assert_close(weight, one[name], atol=1e-4, rtol=1e-4, msg=name)


def test_two_processes_train_as_one(tmp_path):
    launch(tmp_path / "w", "attention")
    equals_one_process(tmp_path / "w", "attention", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_that_are_stopped_go_on(tmp_path, sharded):
    """All weights, with whole ones in each process and with shards."""
    environment = SHARDED if sharded else {}
    launch(tmp_path / "w", "all", STOP="4", **environment)
    assert not (tmp_path / "w/curve.json").exists() and (tmp_path / "w/step-000003").exists()
    launch(tmp_path / "w", "all", **environment)
    equals_one_process(tmp_path / "w", "all", tmp_path)
