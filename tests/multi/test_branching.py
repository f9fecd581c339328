"""Plans by which trunks branch."""

import pytest
import torch
from torch import nn

from manyheads.core.part import OptionError
from manyheads.multi import MultiHead, alike, grow, mean_gradients, realities, vote, where_to_branch

D = torch.float64


def trunk(blocks: int = 4) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(5 if i == 0 else 6, 6), nn.ReLU()) for i in range(blocks)]
    return nn.Sequential(*layers)


def worlds(**options) -> MultiHead:
    torch.manual_seed(0)
    return realities(trunk(), "y", "classification(classes=3)", ["0", "1", "2"], width=6, **options).to(D)


def test_realities_are_a_tree_of_which_each_path_is_the_plain_network():
    net, x = worlds(), torch.randn(4, 5, dtype=D)
    assert [*net.heads] == [f"y/{i}" for i in range(8)] and len(net.nodes) == 8
    runs = []
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear) and "nets" not in name:
            module.register_forward_hook(lambda *_, name=name: runs.append(name))
    every = net(x).outputs
    assert len(runs) == len(set(runs)) == 1 + 2 + 4 + 8
    for name in net.heads:
        one = net.extract([name])
        assert isinstance(one.trunk, nn.Sequential) and len(one.branches) == 0
        assert torch.equal(one(x).outputs[name], every[name])
    assert len({tuple(each.flatten().tolist()) for each in every.values()}) == 8
    per = 6 * 6 + 6
    assert sum(p.numel() for key, p in net.named_parameters() if "nets" not in key) == 36 + (2 + 4 + 8) * per
    assert len(realities(trunk(), "y", "regression", ["0"], ways=3, width=6).heads) == 3


def test_a_node_hears_its_own_leaves_alone_and_siblings_alike_are_one_network():
    net, x, y = worlds(), torch.randn(4, 5, dtype=D), torch.tensor([0, 1, 2, 0])
    net(x, targets={"y": y}, heads=["y/0", "y/1"]).loss.backward()
    first = {key for key, p in net.named_parameters() if p.grad is not None and not key.startswith("nets")}
    assert first == set(net.serving("y/0")) | set(net.serving("y/1"))
    torch.manual_seed(0)
    plain = MultiHead(trunk(), {"y": "classification(classes=3)"}, width=6).to(D)
    same = realities(trunk(), "y", "classification(classes=3)", ["0", "1", "2"], width=6).to(D)
    with torch.no_grad():
        for name in same.heads:
            with same.standing(same.node(name)):
                same.trunk.load_state_dict(plain.trunk.state_dict())
            same.net(name).load_state_dict(plain.net("y").state_dict())
    out, one = same(x, targets={"y": y}), plain(x, targets={"y": y})
    torch.testing.assert_close(out.loss, 8 * one.loss)
    said = same.predict(x)
    assert torch.equal(vote(said), said["y/3"])
    alone = realities(trunk(), "y", "classification(classes=3)", ["0"], ways=1, width=6).to(D)
    assert [*alone.heads] == ["y/0"] and not alone.branches
    assert vote([torch.tensor([2, 1]), torch.tensor([1, 1]), torch.tensor([0, 2])]).tolist() == [0, 1]
    with pytest.raises(OptionError, match="ways=0"):
        worlds(ways=0)


def test_features_of_turned_models_are_alike_and_tasks_part_in_front_of_where_they_differ():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)).to(D)
    turned, other = (nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)).to(D) for _ in range(2))
    q = torch.linalg.qr(torch.randn(6, 6, dtype=D))[0]
    with torch.no_grad():
        turned[0].weight.copy_(2 * q @ base[0].weight)
        turned[1].weight.copy_(base[1].weight @ q.T)
        turned[2].weight.copy_(base[2].weight)
        other[0].weight.copy_(base[0].weight)
        other[1].weight.copy_(base[1].weight)
        other[2].weight.copy_(torch.eye(6, dtype=D)[:1].expand(6, 6))
    batches = [torch.randn(8, 5, dtype=D) for _ in range(2)]
    found = alike({"a": base, "b": turned, "c": other}, batches, ["0", "1", "2"])
    torch.testing.assert_close(found.diagonal(dim1=1, dim2=2), torch.ones(3, 3, dtype=D))
    assert found[:, 0, 1].min() > 0.99 and found[1, 0, 2] > 0.99 and found[2, 0, 2] < 0.9
    x = torch.cat([base[:2](each) for each in batches])
    x = x - x.mean(0)
    y = torch.cat([other(each) for each in batches])
    y = y - y.mean(0)
    z = base[2](torch.cat([base[:2](each) for each in batches]))
    z = z - z.mean(0)
    expected = (z.T @ y).norm() ** 2 / ((z.T @ z).norm() * (y.T @ y).norm())
    torch.testing.assert_close(found[2, 0, 2], expected.detach())
    assert where_to_branch(found, ["a", "b", "c"], ["0", "1", "2"], least=0.95) == [("1", [["a", "b"], ["c"]])]
    assert where_to_branch(found, ["a", "b", "c"], ["0", "1", "2"], least=0.0) == []
    assert where_to_branch(torch.eye(3).expand(3, 3, 3), ["a", "b", "c"], ["0", "1", "2"]) == [
        ("", [["a"], ["b"], ["c"]])
    ]
    with pytest.raises(ValueError, match="3 submodules, 2 heads"):
        where_to_branch(found, ["a", "b"], ["0", "1", "2"])


def test_a_plan_splits_splits_and_shared_modules_get_the_mean_of_gradients():
    heads = dict.fromkeys(["15", "13", "14"], "regression")
    torch.manual_seed(0)
    net = MultiHead(trunk(), heads, width=6).to(D)
    x, y = torch.randn(4, 5, dtype=D), torch.randn(4, dtype=D)
    before = net(x).outputs
    grow(net, [("0", [["15"], ["13", "14"]]), ("2", [["13"], ["14"]])])
    assert all(torch.equal(net(x).outputs[name], before[name]) for name in heads)
    alone = {}
    for name in heads:
        net.zero_grad()
        net(x, targets={name: y}).loss.backward()
        alone[name] = {key: p.grad for key, p in net.named_parameters() if p.grad is not None}
    for some in (["15", "13", "14"], ["13", "14"]):
        net.zero_grad()
        for name in some:  # each from its own loader
            net(x, targets={name: y}).loss.backward()
        mean_gradients(net, some, clip=None)
        for key, p in net.named_parameters():
            each = [alone[name][key] for name in some if key in alone[name]]
            if each:
                torch.testing.assert_close(p.grad, sum(each) / len(each))
    norms = []
    for first in (False, True):
        net.zero_grad()
        net(x, targets=dict.fromkeys(heads, y * 100)).loss.backward()
        mean_gradients(net, [*heads], clip=1.0, clip_first=first)
        norms.append(torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm().item())
    assert norms[0] == pytest.approx(1, abs=1e-4) and norms[1] < 0.9999
    one = MultiHead(trunk(), {"y": "regression"}, width=6).to(D)
    one(x, targets={"y": y}).loss.backward()
    kept = [p.grad.clone() for p in one.parameters()]
    mean_gradients(one, ["y"], clip=None)
    assert all(torch.equal(p.grad, old) for p, old in zip(one.parameters(), kept, strict=True))
