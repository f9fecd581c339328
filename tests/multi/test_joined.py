"""Several data sets in one stream: every batch once or in turn, labels under the heads' names."""

import pytest
import torch
from tests.multi.models import NAN, gradients, same, trunk
from torch.utils.data import DataLoader

from manyheads.multi import MultiHead, collate, joined, union


def rows(count, mark, **targets):
    return [{"input": torch.full((5,), mark), "targets": {k: v[i] for k, v in targets.items()}} for i in range(count)]


def loader(count, mark, batch=2, **targets):
    return DataLoader(rows(count, mark, **targets), batch_size=batch, collate_fn=collate)


def stream(**options):
    one = loader(4, 1.0, label=[0, 1, 1, 0])
    two = loader(10, 2.0, label=[2, 0, 1, 2, 0, 1, 2, 0, 1, 2])
    return joined({"one": one, "two": two}, {"one": {"label": "a"}, "two": {"label": "b"}}, **options)


def test_turns_go_on_until_the_longest_is_through_and_the_short_begin_anew():
    batches = list(stream())
    assert len(batches) == len(stream()) == 10
    assert [batch["input"][0, 0].item() for batch in batches] == [1, 2] * 5
    assert [batch["targets"]["a"].tolist() for batch in batches[::2]] == [[0, 1], [1, 0]] * 2 + [[0, 1]]
    assert all(set(batch["targets"]) == {"ab"[at % 2]} for at, batch in enumerate(batches))


def test_by_size_each_batch_comes_once_and_evenly():
    every = stream(by="size")
    for _ in range(2):  # and each epoch anew
        batches = list(every)
        assert len(batches) == len(every) == 7
        assert every.order() == ["two", "one", "two", "two", "two", "one", "two"]
        assert sum(batch["targets"]["b"].numel() for batch in batches if "b" in batch["targets"]) == 10


def test_unlike_label_sets_train_their_own_heads_and_the_trunk_together():
    torch.manual_seed(0)
    net = MultiHead(trunk(), {"a": "classification(classes=2)", "b": "classification(classes=3)"})
    heads = {"one": "a", "two": "b"}
    found = []
    for name, batch in zip(stream().order(), stream(), strict=True):
        net.zero_grad()
        out = net(batch["input"], targets=batch["targets"])
        out.loss.backward()
        other = "b" if heads[name] == "a" else "a"
        assert set(out.losses) == {heads[name]} and net.net(other).weight.grad is None
        assert net.trunk[0].weight.grad.abs().sum() > 0
        found.append(gradients(net))
    alone = next(iter(stream().loaders["two"]))
    net.zero_grad()
    net(alone["input"], targets={"b": alone["targets"]["label"]}).loss.backward()
    same(found[1], gradients(net))


def test_one_head_of_all_classes():
    classes, places = union({"one": ["cat", "dog"], "two": ["dog", "fox", "cat"]})
    assert classes == ["cat", "dog", "fox"] and places == {"one": [0, 1], "two": [1, 2, 0]}
    goals = {name: {"label": ("animal", each)} for name, each in places.items()}
    two = [{"input": torch.zeros(3, 5), "targets": {"label": torch.tensor([0.0, NAN, 2.0]), "else": torch.ones(3)}}]
    one = [{"input": torch.zeros(2, 5), "targets": {"label": None}}]
    first, second = joined({"one": one, "two": two}, goals)
    assert first["targets"] == {"animal": None}
    assert second["targets"]["animal"].tolist() == [1, -100, 0] and second["targets"]["else"].tolist() == [1, 1, 1]
    two[0]["targets"]["label"][0] = 3
    with pytest.raises(ValueError, match=r"data set 'two', 'label': label 3 is out of range: 0 to 2"):
        list(joined({"two": two}, {"two": goals["two"]}))


def test_pairs_of_inputs_and_labels():
    pairs = [(torch.zeros(2, 5), torch.tensor([1, 0]))]
    ((x, labels),) = joined({"cars": pairs}, {"cars": "make"})
    assert x is pairs[0][0] and labels["make"] is pairs[0][1]
    ((_, labels),) = joined({"cars": pairs}, {"cars": {"": ("make", [2, 0])}})
    assert labels["make"].tolist() == [0, 2]
    ((_, labels),) = joined({"cars": [(pairs[0][0], {"make": 1, "year": 2})]}, {"cars": {"year": None}})
    assert labels == {"make": 1}


@pytest.mark.parametrize(("loaders", "targets", "says"), [
    ({}, {}, "no loaders"),
    ({"a": []}, {}, "data set 'a': its loader has no batch"),
    ({"a": iter([1])}, {}, "data set 'a': its loader is a list_iterator, which has no length"),
    ({"a": [1]}, {"b": "x"}, "targets of 'b', but the data sets are 'a'"),
    ({"a": [1]}, {}, "data set 'a': a batch is a dict with targets, or inputs and labels"),
    ({"a": [{"x": 1}]}, {}, "data set 'a': its batches are dicts without targets"),
    ({"a": [(0, torch.zeros(1))]}, {}, r"data set 'a': its labels have no name; give targets=\{'a': 'the name'\}"),
    ({"a": [(0, {"u": 0, "v": 1})]}, {"a": {"u": "v"}}, "data set 'a': two of its labels are 'v'"),
])  # fmt: skip
def test_what_cannot_be_joined(loaders, targets, says):
    with pytest.raises(ValueError, match=says):
        list(joined(loaders, targets))


def test_options_that_cannot_be():
    with pytest.raises(ValueError, match="by='chance' is neither 'turns' nor 'size'"):
        joined({"a": [1]}, by="chance")
    with pytest.raises(ValueError, match="data set 'a': a class is named twice"):
        union({"a": ["x", "x"]})
