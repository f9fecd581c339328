"""Trunks that branch: outputs stay, what is shared runs once, gradients go where they belong."""

import copy

import pytest
import torch
from torch import nn

import manyheads as mh
from manyheads.multi import MultiHead, exits, leave_early
from manyheads.multi.folder import load, save

D = torch.float64
NAMES = ["a", "b", "c", "d"]


class Deep(nn.Module):
    """Modules within modules, a list that is walked, and one layer that runs twice."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(5, width)
        self.body = nn.Module()
        self.body.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.stem(x)
        for block in self.body.blocks:
            x = x + block(x)
        return self.norm(self.body.blocks[0](x))


def flat() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(5 if i == 0 else 6, 6), nn.Tanh()) for i in range(5)])


def model(trunk=flat, **options) -> MultiHead:
    torch.manual_seed(0)
    return MultiHead(trunk(), {name: "regression" for name in NAMES}, width=6, **options).to(D)


def stir(net: nn.Module) -> None:
    """Copies that are no longer equal."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)


def counted(net: MultiHead) -> dict[str, int]:
    runs: dict[str, int] = {}
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear | nn.LayerNorm) and "nets" not in name:
            module.register_forward_hook(lambda *_, name=name: runs.__setitem__(name, runs.get(name, 0) + 1))
    return runs


SPLITS = {
    "once": [("2", [["a", "b"], ["c", "d"]])],
    "nested, deeper": [("1", [["a"], ["b", "c", "d"]]), ("3", [["b", "d"], ["c"]])],
    "nested, shallower": [("3", [["a", "b"], ["c", "d"]]), ("0", [["c"], ["d"]])],
    "one node, twice": [("3", [["a", "c", "d"], ["b"]]), ("1", [["a"], ["c", "d"]])],
    "three ways": [("0.0", [["a"], ["b"], ["c", "d"]])],
    "nothing shared": [("", [["a", "c"], ["b", "d"]]), ("2", [["b"], ["d"]])],
}
DEEP = [("body.blocks.1", [["a", "b"], ["c", "d"]]), ("stem", [["c"], ["d"]])]


def grown(splits, trunk=flat, **options) -> MultiHead:
    net = model(trunk, **options)
    for at, groups in splits:
        net.split(at, groups)
    return net


@pytest.mark.parametrize(("splits", "trunk"), [*((each, flat) for each in SPLITS.values()), (DEEP, Deep)])
def test_a_split_changes_no_output_and_then_each_head_is_its_own_way(splits, trunk):
    plain, net, x = model(trunk), grown(splits, trunk), torch.randn(4, 5, dtype=D)
    before, after = plain(x).outputs, net(x).outputs
    assert all(torch.equal(before[name], after[name]) for name in NAMES)
    assert set(plain.state_dict()) <= set(net.state_dict())
    stir(net)
    every = net(x).outputs
    assert not torch.equal(every["a"], before["a"])
    for name in NAMES:
        assert torch.equal(net(x, heads=[name]).outputs[name], every[name])
        one = net.extract([name])  # a plain model, whose modules are those on the way
        assert set(one.state_dict()) == {k for k in plain.state_dict() if not k.startswith("nets") or f"of {name}" in k}
        assert torch.equal(one(x).outputs[name], every[name])
    for some in (["a", "d"], ["c", "b"], ["b", "c", "d"]):
        few = net.extract(some)
        assert [*few.heads] == [name for name in NAMES if name in some] and len(few.nodes) <= len(some)
        assert all(torch.equal(few(x).outputs[name], every[name]) for name in some)
        assert sum(p.numel() for p in few.parameters()) <= sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(("splits", "trunk"), [*((each, flat) for each in SPLITS.values()), (DEEP, Deep)])
def test_gradients_are_those_of_models_apart_and_reach_what_a_head_reads_and_no_more(splits, trunk):
    net, x, y = grown(splits, trunk), torch.randn(4, 5, dtype=D), torch.randn(4, dtype=D)
    stir(net)
    net(x, targets=dict.fromkeys(NAMES, y)).loss.backward()
    whole = {key: p.grad for key, p in net.named_parameters()}
    total = {key: torch.zeros_like(p) for key, p in net.named_parameters()}
    for name in NAMES:
        net.zero_grad()
        net(x, targets={name: y}).loss.backward()
        reached = {key for key, p in net.named_parameters() if p.grad is not None and not key.startswith("nets")}
        assert reached == set(net.serving(name))
        for key, p in net.named_parameters():
            total[key] += 0 if p.grad is None else p.grad
    for key in whole:
        torch.testing.assert_close(whole[key], total[key])


def test_each_node_runs_once_and_only_where_it_is_wanted():
    net = grown(SPLITS["nested, deeper"])
    runs, x = counted(net), torch.randn(2, 5, dtype=D)
    net(x)
    assert set(runs.values()) == {1} and len(runs) == 5 + 3 + 1
    runs.clear()
    net(x, heads=["c"])
    assert len(runs) == 5 and not any(key.startswith("trunk.2") for key in runs)
    deep = grown(DEEP, Deep)
    runs = counted(deep)
    deep(x)
    assert runs["trunk.stem"] == 1 and runs["trunk.norm"] == 1  # of a, b
    assert runs["trunk.body.blocks.0.0"] == 3  # once for all, and once more in each node that it is part of behind


def test_branches_with_taps_recomputation_and_early_exits():
    torch.manual_seed(0)
    heads = exits("y", "classification(classes=3)", ["0", "2"]) | {"z": "regression"}
    net = MultiHead(flat(), heads).split("2", [["y@0", "y@2", "y"], ["z"]]).to(D)
    stir(net)
    x, y = torch.randn(6, 5, dtype=D), {"y": torch.arange(6) % 3, "z": torch.randn(6, dtype=D)}
    net(x, targets=y).loss.backward()
    plain = {key: p.grad.clone() for key, p in net.named_parameters()}
    net.zero_grad()
    net.checkpoint = True
    net(x, targets=y).loss.backward()
    for key, p in net.named_parameters():
        torch.testing.assert_close(p.grad, plain[key])
    assert leave_early(net, x, exits=["y@0", "y"], confidence=0.0)[1].tolist() == [0] * 6
    apart = MultiHead(flat(), heads).split("2", [["y@0", "y@2", "z"], ["y"]])
    with pytest.raises(ValueError, match="different branches"):
        leave_early(apart, x.float(), exits=["y@0", "y"], confidence=0.5)


def test_untie_gives_a_trunk_of_its_own_even_to_a_single_module():
    net, x = MultiHead(nn.Linear(5, 6), {"a": "regression", "b": "regression"}), torch.randn(3, 5)
    before = net(x).outputs
    net.untie("b")
    after = net(x).outputs
    assert all(torch.equal(before[name], after[name]) for name in before)
    net(x, targets={"b": torch.zeros(3)}).loss.backward()
    assert net.trunk.weight.grad is None and len(net.serving("b")) == 2
    net.untie("a")  # has one already
    assert len(net.nodes) == 2
    with pytest.raises(ValueError, match="there is no head 'z'; there are 'a', 'b'"):
        net.untie("z")
    with pytest.raises(ValueError, match="untie needs the name"):
        net.untie([])


def test_frozen_modules_neither_learn_nor_change_their_statistics_and_copies_stay_frozen():
    trunk = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))
    net = MultiHead(trunk, {"a": "regression", "b": "regression"}, width=6).eval()
    x = torch.randn(8, 5)
    before = net(x).outputs
    net.freeze("1").split("0", [["a"], ["b"]]).train()
    assert all(torch.equal(net.eval()(x).outputs[name], before[name]) for name in before)
    state = copy.deepcopy(net.state_dict())
    net.train()
    net(x, targets={"a": torch.ones(8), "b": torch.ones(8)}).loss.backward()
    torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1).step()
    moved = {key for key, value in net.state_dict().items() if not torch.equal(value, state[key])}
    assert not any(key.startswith(("trunk.0", "trunk.1", "branches.1.trunk%2E1")) for key in moved)
    assert {"trunk.2.weight", "branches.1.trunk%2E2.weight", "trunk.3.running_mean"} <= moved
    net.thaw()
    assert all(p.requires_grad for p in net.parameters()) and net.trunk[1].training
    net.freeze()
    assert not any(p.requires_grad for key, p in net.named_parameters() if not key.startswith("nets"))


def test_a_new_task_on_a_frozen_trunk_changes_no_other():
    net, x = model(), torch.randn(4, 5, dtype=D)
    before = net(x).outputs
    net.freeze().add("new", "classification(classes=2)").train()
    net(x, targets={"new": torch.tensor([0, 1, 0, 1])}).loss.backward()
    assert {key.split(".")[0] for key, p in net.named_parameters() if p.grad is not None} == {"nets"}
    torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 1.0).step()
    assert all(torch.equal(net(x).outputs[name], before[name]) for name in NAMES)
    with pytest.raises(ValueError, match="'new': two heads"):
        net.add("new", "regression")
    with pytest.raises(ValueError, match="head 'x': there is no head 'regresion'"):
        net.add("x", "regresion")
    assert "x" not in net.heads
    with pytest.raises(ValueError, match=r"'x'.*uncertainty"):
        model(balance="uncertainty").add("x", "regression")


def test_copies_may_draw_new_weights_and_permuted_heads_give_permuted_outputs():
    net = model().split("1", [["a", "b"], ["c", "d"]], fresh=True)
    x = torch.randn(4, 5, dtype=D)
    assert not torch.equal(net.trunk[2][0].weight, net.branches["1"]["trunk%2E2"][0].weight)
    torch.manual_seed(0)
    turned = MultiHead(flat(), {name: "regression" for name in reversed(NAMES)}, width=6).to(D)
    turned.split("1", [["a", "b"], ["c", "d"]]).load_state_dict(net.state_dict())
    assert all(torch.equal(net(x).outputs[name], turned(x).outputs[name]) for name in NAMES)


def test_trunks_of_transformers_and_of_ours_branch_at_a_layer():
    from transformers import LlamaConfig, LlamaModel

    sizes = dict(vocab_size=30, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16)
    heads = {"a": "regression(pool=mean)", "b": "tokens(classes=2)"}
    ids, seen = torch.randint(30, (2, 6)), torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
    llama = MultiHead(LlamaModel(LlamaConfig(**sizes)), heads).eval()
    ours = MultiHead(mh.Encoder("gqa(kv_heads=2) + rope", dim=16, heads=4, layers=3, vocab=30), heads).eval()
    for net, at, given in ((llama, "layers.1", {"input_ids": ids, "attention_mask": seen}), (ours, None, None)):
        if at is None:
            at = next(name for name, _ in net.trunk.named_modules() if name.endswith(".1"))
            given = {"mask": seen.bool()}
        more = () if "input_ids" in given else (ids,)
        before = net(*more, **given).outputs
        net.split(at, [["a"], ["b"]])
        runs = []
        net.trunk.get_submodule(at).register_forward_hook(lambda *_, runs=runs: runs.append(1))
        after = net(*more, **given).outputs
        assert all(torch.equal(before[name], after[name]) for name in heads) and len(runs) == 1
        stir(net)
        every = net(*more, **given).outputs
        for name in heads:
            assert torch.equal(net.extract([name])(*more, **given).outputs[name], every[name])


def test_a_folder_knows_how_the_trunk_branches(tmp_path):
    net, x = grown(SPLITS["nested, shallower"]), torch.randn(2, 5, dtype=D)
    stir(net)
    for number, each in enumerate((net, net.extract(["d", "b"]), net.extract(["c", "d", "a"]))):
        save(each, tmp_path / str(number))
        again = MultiHead(flat(), dict.fromkeys(each.heads, "regression"), width=6).to(D)
        assert load(again, tmp_path / str(number)) == []
        assert all(torch.equal(again(x).outputs[name], net(x).outputs[name]) for name in each.heads)
        assert again.nodes == each.nodes
    with pytest.raises(ValueError, match="branches already"):
        again.regrow([])
    with pytest.raises(ValueError, match="and not each of"):
        MultiHead(flat(), {"a": "regression", "b": "regression"}, width=6).regrow([{"heads": ["a", "c"]}])


def test_modules_of_names_alike_branch_apart():
    trunk = nn.Sequential(nn.Linear(5, 6), nn.Sequential())
    for name in ("a%2Eb", "a%b", "%25"):
        trunk[1].add_module(name, nn.Linear(6, 6))
    net, x = MultiHead(trunk, {"a": "regression", "b": "regression"}, width=6), torch.randn(3, 5)
    before = net(x).outputs
    net.split("1.a%2Eb", [["a"], ["b"]])
    assert all(torch.equal(net(x).outputs[name], before[name]) for name in before)
    own = {key.removeprefix("trunk.1.") for key in net.serving("b") if "trunk.1.a%2Eb" in key}
    assert own == {"a%2Eb.weight", "a%2Eb.bias"}
    assert set(net.branches["1"]) == {"trunk%2E1%2Ea%25b", "trunk%2E1%2E%2525"}


class Peeking(nn.Module):
    """Reads a weight of a module instead of calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.three(self.one(x) @ self.two.weight)


def test_a_module_whose_weights_are_read_past_its_forward_is_still_the_nodes_own():
    net, x = MultiHead(Peeking(), {"a": "regression", "b": "regression"}, width=5), torch.randn(3, 5)
    net.split("one", [["a"], ["b"]])
    stir(net)
    every = net(x).outputs
    for name in every:
        assert torch.equal(net(x, heads=[name]).outputs[name], every[name])


@pytest.mark.parametrize(("at", "groups", "says"), [
    ("2", [["a", "b"], ["c"]], r"no partition of the heads of one node, \['a', 'b', 'c', 'd'\]"),
    ("2", [["a", "b"], ["b", "c", "d"]], "no partition"),
    ("2", [["a", "b", "c", "d"], []], "no partition"),
    ("2", [["a", "b"], ["c", "e"]], "there is no head 'e'; there are 'a', 'b', 'c', 'd'"),
    ("2", ["ab", "cd"], "groups are lists of heads' names"),
    ("2", "abcd", "groups are lists of heads' names"),
    ("9", [["a", "b"], ["c", "d"]], "no submodule '9'; trunk has '0', '1'"),
    ("4.1", [["a", "b"], ["c", "d"]], "nothing of the trunk that learns comes after '4.1'"),
])  # fmt: skip
def test_splits_that_cannot_be(at, groups, says):
    net = model()
    with pytest.raises(ValueError, match=says):
        net.split(at, groups)
    assert len(net.nodes) == 1 and net.nodes[0].heads == NAMES


class InPlace(nn.Module):
    """Changes what its modules gave, which earlier branches have kept."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one = nn.Linear(5, 6), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6))
        self.two, self.adds = nn.Linear(6, 6), Adds()
        self.three = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6))

    def forward(self, x):
        x = self.stem(x)
        x += 1
        x = x + self.one(x)
        x = self.two(x)
        return self.three(self.adds(x) + x)


class Adds(nn.Module):
    """Changes what it is given, and returns something else."""

    def forward(self, x):
        x += 1
        return 2 * x


@pytest.mark.parametrize("at", ["stem", "one.0", "one", "two", "adds"])
def test_changes_in_place_do_not_pass_from_branch_to_branch(at):
    net, x = model(InPlace), torch.randn(4, 5, dtype=D)
    net.split(at, [["a", "b"], ["c"], ["d"]])
    stir(net)
    runs = counted(net)
    every = net(x).outputs
    assert runs["trunk.stem"] == 1 and (at in ("stem", "adds") or runs.get("trunk.one.0", 1) == 1)
    with torch.inference_mode():
        fast = net(x).outputs
    for name in NAMES:
        assert torch.equal(net(x, heads=[name]).outputs[name], every[name]) and torch.equal(fast[name], every[name])
    net(x, targets=dict.fromkeys(NAMES, torch.ones(4, dtype=D))).loss.backward()
    whole = {key: p.grad.clone() for key, p in net.trunk.named_parameters()}
    net.zero_grad()
    for name in NAMES:
        net(x, targets={name: torch.ones(4, dtype=D)}).loss.backward()
    for key, p in net.trunk.named_parameters():
        torch.testing.assert_close(p.grad, whole[key])


def test_parts_that_are_not_there():
    net = model()
    with pytest.raises(ValueError, match="there is no head 'z'"):
        net.extract(["z"])
    with pytest.raises(ValueError, match="name of a head"):
        net.extract([])
