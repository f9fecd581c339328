"""Medusa heads: what they say at the start, what each of them learns, and that interrupts change no bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.stack.tiny import VOCAB, model
from torch import nn

from manyheads.convert.resume import ResumeError
from manyheads.decode import Distillation, MedusaHeads, Seen, Tree, load, train
from manyheads.decode.distil import frequent

HOW = Distillation(
    heads=2, width=4, words=50, together=6, texts=16, prompt=4, length=10, steps=6, batch=4, save_every=2
)


def beginnings(how=HOW):
    return torch.randint(VOCAB, (how.texts, how.prompt), generator=torch.Generator().manual_seed(3))


def test_at_the_start_every_head_says_what_the_model_says():
    made = model("gqa")
    heads = MedusaHeads(made, heads=3, layers=2, width=4)
    hidden = torch.randn(2, 32)
    want = made.get_output_embeddings()(hidden)
    for head in range(3):
        torch.testing.assert_close(heads(hidden, head), want, atol=0, rtol=0)
    best = want.topk(2).indices
    tokens = heads.draft(Seen([[1], [2]], hidden), Tree.of([(0, 1), (1,)]))
    assert tokens.tolist() == [[a, b, b] for a, b in best.tolist()]


def test_the_models_head_is_shared_and_not_saved():
    """Three blocks of D² + D numbers each; |V| · D more a head would be many times that."""
    heads = MedusaHeads(model("gqa", vocab_size=1000), heads=3, layers=2)
    assert sum(parameter.numel() for parameter in heads.parameters()) == 3 * 2 * (32 * 32 + 32)
    first, second = heads.heads[0]
    assert first.weight is not second.weight and len(heads.state_dict()) == 12


def test_each_head_learns_its_own_offset():
    """Text in which y[t + 2 + k] is a function of y[t] for k = 1 alone: head 1 learns it, head 0 stays at chance.

    Of a token that it may not say, no head is asked.
    """
    torch.manual_seed(0)
    count, vocab = 16, VOCAB
    table = torch.randperm(16)
    tokens = torch.randint(16, (64, 24))
    for t in range(3, 24):
        tokens[:, t] = table[tokens[:, t - 3]]
    made = model("gqa")
    nn.init.normal_(made.get_output_embeddings().weight)
    heads = MedusaHeads(made, heads=2, width=4, tokens=torch.arange(15))
    optimiser = torch.optim.AdamW(heads.parameters(), lr=3e-2)
    hidden, targets = torch.eye(vocab, 32)[tokens[:, :-1]], tokens[:, 1:]
    for step in range(150):
        rows = torch.arange(count) + count * (step % 3)
        optimiser.zero_grad()
        for loss in heads.losses(hidden[rows], targets[rows]):
            loss.backward()
        assert step or all(parameter.grad.any() for parameter in heads.parameters())
        optimiser.step()
    heads.measure(hidden[48:], targets[48:])
    missing = (targets[48:, 2:] == 15).double().mean()
    assert heads.odds[1, 0] == pytest.approx(1 - missing) and 0 < missing < 0.1 and heads.odds[0, 0] < 0.3


def test_a_short_list_of_words_is_drafted_from():
    made = model("gqa")
    assert frequent(torch.tensor([[5, 7, 7, 9, 9]]), 61, 4).tolist() == [0, 5, 7, 9] and frequent(None, 61, 61) is None
    words = torch.tensor([3, 9, 20])
    heads = MedusaHeads(made, heads=2, tokens=words)
    assert heads.width == 3
    hidden = torch.randn(2, 32)
    torch.testing.assert_close(heads(hidden, 1), made.get_output_embeddings()(hidden)[:, words])
    assert {*heads.draft(Seen([[1], [2]], hidden), Tree.full([3, 3])).flatten().tolist()} == {3, 9, 20}
    assert heads.words.places(torch.tensor([9, 4, 3])).tolist() == [1, -1, 0]
    for wrong in ([3, 3], [], [61], [-1], [1.0], [[1]]):
        with pytest.raises(ValueError, match="a list of unlike ones below 61"):
            MedusaHeads(made, tokens=torch.tensor(wrong))


def test_training_freezes_the_model_and_goes_on_with_equal_bits(tmp_path):
    made = model("gqa")
    before = {name: value.clone() for name, value in made.state_dict().items()}
    whole = train(made, beginnings(), tmp_path / "whole", HOW)
    assert len(whole.words) == 50 and (whole.odds > 0).any()

    for stop_at in (("text", 2), ("heads", 3), ("heads", 5)):

        def interrupt(stage, done, total, stop_at=stop_at):
            if (stage, done) == stop_at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(made, beginnings(), tmp_path / "parts", HOW, progress=interrupt)
    with pytest.raises(ResumeError, match="steps was 6, is 7"):
        train(made, beginnings(), tmp_path / "parts", Distillation(**{**HOW.__dict__, "steps": 7}))
    parts = train(made, beginnings(), tmp_path / "parts", HOW)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, parts.state_dict()[name]) and weight.any()
    for file in ("heads.safetensors", "drafter.json"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert all(parameter.requires_grad for parameter in made.parameters()) and not made.training
    with pytest.raises(FileExistsError):
        train(made, beginnings(), tmp_path / "whole", HOW)


def test_a_drafter_comes_back_for_its_own_model_alone(tmp_path):
    made = model("gqa")
    heads = MedusaHeads(made, heads=2, width=4, tokens=torch.tensor([3, 4, 5, 9]))
    for parameter in heads.parameters():
        nn.init.normal_(parameter)
    heads.odds = torch.rand(2, 4).double()
    heads.save(tmp_path, made, name="one")
    again = load(tmp_path, made)
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), again.parameters(), strict=True))
    assert torch.equal(heads.odds, again.odds) and torch.equal(heads.words.tokens, again.words.tokens)
    load(tmp_path, model("gqa").bfloat16())  # the same model in another dtype
    other = model("gqa")
    with torch.no_grad():
        list(other.attentions[1].parameters())[-1].mul_(1.5)
    with pytest.raises(ValueError, match=r"made for the model one \(.*not for two \("):
        load(tmp_path, other, name="two")
    with pytest.raises(ValueError, match=r"width 32, 61 tokens\), not for .*width 64, 61 tokens"):
        load(tmp_path, model("gqa", hidden_size=64))
    with pytest.raises(TypeError, match="not a Linear"):
        load(tmp_path, nn.Linear(2, 2))
    told = json.loads((tmp_path / "drafter.json").read_text())
    for change, why in (
        ({"kind": "other"}, "kind 'other'"), ({"kind": ["medusa"]}, "kind"), ({"odds": [[1.0]]}, "odds"),
        ({"heads": 3}, "speaks of"), ({"heads": 0}, "speaks of"), ({"heads": "two"}, "speaks of"),
    ):  # fmt: skip
        (tmp_path / "drafter.json").write_text(json.dumps(told | change))
        with pytest.raises(ValueError, match=why):
            load(tmp_path, made)


def test_a_damaged_folder_is_refused_by_the_file(tmp_path):
    made, folder = model("gqa"), tmp_path / "heads"
    for name, damage, why in (
        ("drafter.json", lambda data: data[:50], "drafter.json does not describe a drafter"),
        ("drafter.json", lambda _: b"null", "drafter.json does not describe a drafter"),
        ("drafter.json", lambda _: b"\xff\xfe", "drafter.json does not describe a drafter"),
        ("drafter.json", None, "heads holds no drafter: there is no drafter.json"),
        ("heads.safetensors", lambda data: data[:-9], "heads.safetensors cannot be read"),
        ("heads.safetensors", lambda _: b"", "heads.safetensors cannot be read"),
        ("heads.safetensors", None, "heads holds no drafter: there is no heads.safetensors"),
    ):
        folder.mkdir(exist_ok=True)
        MedusaHeads(made, heads=2).save(folder, made)
        file = folder / name
        file.write_bytes(damage(file.read_bytes())) if damage else file.unlink()
        with pytest.raises(ValueError, match=why) as raised:
            load(folder, made)
        assert "\n" not in str(raised.value)
    MedusaHeads(made, heads=2).save(folder, made)
    for tokens in (torch.tensor([1, VOCAB]), torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]])):
        tensors = load_file(folder / "heads.safetensors")
        save_file(tensors | {"tokens": tokens}, folder / "heads.safetensors")
        with pytest.raises(ValueError, match="does not hold the weights"):
            load(folder, made)


@pytest.mark.parametrize("name", ["job.json", "text-00000.safetensors", "training.pt"])
def test_a_damaged_file_of_an_interrupted_job_is_named(tmp_path, name):
    def interrupt(stage, done, total):
        if (stage, done) == ("heads", 3):
            raise KeyboardInterrupt

    made, out = model("gqa"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        train(made, beginnings(), out, HOW, progress=interrupt)
    file = out / "work" / name
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match=f"{name} cannot be read"):
        train(made, beginnings(), out, HOW)


def test_what_cannot_be_trained_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 16"):
        Distillation(texts=3)
    with pytest.raises(ValueError, match="drafter='eagle'; known: jakiro, medusa, mtp"):
        Distillation(drafter="eagle")
    with pytest.raises(ValueError, match="layers=2 is an option of medusa; drafter='mtp'"):
        Distillation("mtp", layers=2)
    with pytest.raises(ValueError, match="teaches 5 heads nothing"):
        Distillation(heads=5, length=5)
    with pytest.raises(ValueError, match=r"16 of 4 tokens are wanted"):
        train(model("gqa"), torch.zeros(2, 2, dtype=torch.long), tmp_path / "out", HOW)
    assert not (tmp_path / "out").exists()
