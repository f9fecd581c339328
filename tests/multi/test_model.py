"""One trunk pass, heads by their labels, and one step however a batch is cut."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.multi.models import HEADS, NAN, batch, gradients, model, same, trunk
from torch import nn

import manyheads as mh
from manyheads.multi import Classification, MultiHead, Regression, collate, pooled, read_head


@settings(max_examples=8, deadline=None)
@given(st.sets(st.sampled_from(sorted(HEADS))), st.sampled_from(["gone", "None", "missing"]), st.integers(0, 99))
def test_a_head_without_labels_does_not_run_and_gets_no_gradient(labelled, how, seed):
    net, (x, targets) = model(), batch(seed=seed)
    targets["kind"][0], targets["age"][0], targets["tags"][0, 0], targets["grade"][0] = 0, 0.5, 1, 2
    for name in set(HEADS) - labelled:
        if how == "gone":
            del targets[name]
        else:
            targets[name] = (
                None if how == "None" else torch.full_like(targets[name], -100 if name in ("kind", "grade") else NAN)
            )
    ran = []
    for name in HEADS:
        net.net(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    passes = []
    net.trunk.register_forward_hook(lambda *_: passes.append(1))
    out = net(x, targets=targets)
    out.loss.backward()
    assert set(ran) == set(out.outputs) == set(out.losses) == labelled and len(passes) == 1
    for name in HEADS:
        assert all((p.grad is not None) == (name in labelled) for p in net.net(name).parameters())
    assert all((p.grad is not None) == bool(labelled) for p in net.trunk.parameters())
    if not labelled:
        assert out.loss.item() == 0
    before = copy.deepcopy(net.state_dict())
    torch.optim.AdamW(net.parameters(), weight_decay=0.1).step()
    for name in set(HEADS) - labelled:  # not even weight decay
        assert all(torch.equal(before[key], value) for key, value in net.state_dict().items() if f"of {name}" in key)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 999), st.randoms())
def test_the_loss_is_the_sum_over_labelled_rows_and_the_order_of_rows_is_nothing(seed, random):
    net, (x, targets) = model(), batch(seed=seed)
    net.heads["age"] = Regression(weight=3.0)
    out = net(x, targets=targets)
    total = 0
    for name, target in targets.items():
        rows = [i for i, each in enumerate(target) if not bool((each.isnan() | (each == -100)).all())]
        if rows:  # a model of this head alone, on its rows alone
            alone = net(x[rows], targets={name: target[rows]})
            total = total + alone.losses[name] * net.heads[name].weight
            torch.testing.assert_close(alone.losses[name], out.losses[name])
    torch.testing.assert_close(out.loss, total if isinstance(total, torch.Tensor) else torch.zeros_like(out.loss))
    if not out.losses:
        return
    out.loss.backward()
    first = gradients(net)
    net.zero_grad()
    order = list(range(len(x)))
    random.shuffle(order)
    net(x[order], targets={name: target[order] for name, target in targets.items()}).loss.backward()
    same(first, gradients(net))


def test_labels_may_come_as_lists_and_as_columns_of_floats():
    net, x = model(), torch.randn(4, 5, dtype=torch.float64)
    one = net(
        x,
        targets={
            "age": [1.0, None, 2.0, NAN],
            "kind": [0, None, 2, -100],
            "tags": [[1, None], [0, 1], [None, None], [1, 1]],
        },
    )
    two = net(x, targets={
        "age": torch.tensor([[1.0], [NAN], [2.0], [NAN]]), "kind": torch.tensor([0.0, NAN, 2.0, NAN]),
        "tags": torch.tensor([[1, -100], [0, 1], [-100, -100], [1, 1]]), "grade": None,
    })  # fmt: skip
    torch.testing.assert_close(one.loss, two.loss, rtol=0, atol=0)
    row = {"x": torch.zeros(5), "targets": {"age": 1.0}}
    made = collate([row, {"x": torch.ones(5), "targets": {"kind": 2, "tags": [1, 0]}}])
    assert made["x"].shape == (2, 5) and made["targets"]["tags"].shape == (2, 2)
    assert made["targets"]["age"].isnan().tolist() == [False, True]
    assert set(model(torch.float32)(made["x"], targets=made["targets"]).losses) == {"age", "kind", "tags"}


@pytest.mark.parametrize("balance", ["sum", "uncertainty"])
def test_micro_batches_are_one_large_batch(balance):
    whole, parts, (x, targets) = model(balance=balance), model(balance=balance), batch()
    targets["kind"][:8] = -100  # whole micro-batches without this head
    whole(x, targets=targets).loss.backward()
    counts = parts.label_counts(targets)
    for at in range(0, 12, 3):
        rows = slice(at, at + 3)
        parts(x[rows], targets={name: each[rows] for name, each in targets.items()}, counts=counts).loss.backward()
    same(gradients(whole), gradients(parts))


@pytest.mark.parametrize("features", ["", "1"])
def test_recomputing_the_trunk_changes_no_gradient(features):
    plain, thrifty, (x, targets) = (
        model(features=features, width=8),
        model(checkpoint=True, features=features, width=8),
        batch(),
    )
    runs = []
    thrifty.trunk[0].register_forward_hook(lambda *_: runs.append(1))
    for net in (plain, thrifty):
        net(x, targets=targets).loss.backward()
    assert len(runs) == 2
    same(gradients(plain), gradients(thrifty))


def test_autocast_gives_finite_losses_of_float32_near_the_exact_ones():
    net, (x, targets) = model(torch.float32), batch(dtype=torch.float32)
    exact = net(x, targets=targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = net(x, targets=targets)
    assert rough.loss.dtype == torch.float32 and rough.outputs["kind"].dtype == torch.bfloat16
    torch.testing.assert_close(rough.loss, exact.loss, rtol=0.02, atol=0.02)
    rough.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


def test_all_heads_at_once_are_each_head_alone_and_evaluation_needs_no_labels():
    net, (x, targets) = model().eval(), batch()
    every = net(x).outputs
    assert set(every) == set(HEADS)
    for name in HEADS:
        assert torch.equal(net(x, heads=[name]).outputs[name], every[name])
    assert set(net(x, targets={"age": targets["age"]}).outputs) == set(HEADS)  # evaluated: all heads speak
    assert {name: tuple(each.shape) for name, each in net.predict(x).items()} == {
        "age": (12,), "kind": (12,), "tags": (12, 2), "grade": (12,),
    }  # fmt: skip
    halves = [
        net.measure(net(x[rows]).outputs, {k: v[rows] for k, v in targets.items()}) for rows in (slice(5), slice(5, 12))
    ]
    both = {name: sum(half[name] for half in halves if name in half) for name in HEADS}
    for name, figures in net.metrics(net.measure(every, targets)).items():
        assert net.metrics(both)[name] == pytest.approx(figures)


def test_trunks_of_every_kind():
    from transformers import BertConfig, BertModel

    sizes = dict(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    bert = MultiHead(BertModel(BertConfig(**sizes)), {"tag": "tokens(classes=2)", "y": Classification(3, pool="first")})
    ids, seen = torch.randint(30, (2, 6)), torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    labels = {"tag": torch.tensor([[0, 1, 0, 1, 0, 1], [1, 1, 1, -100, -100, -100]]), "y": torch.tensor([2, 0])}
    bert(input_ids=ids, attention_mask=seen, targets=labels).loss.backward()

    ours = mh.Encoder("gqa(kv_heads=2) + rope", dim=16, heads=4, layers=2, vocab=30)
    spread = MultiHead(ours, {"last": "regression(pool=mean)", "early": Regression(pool="mean", features="stack")})
    spread.eval()
    padded = torch.cat([ids[1:, :3], torch.randint(30, (1, 3))], 1)
    mask = torch.tensor([[True] * 3 + [False] * 3])
    one, two = spread(padded, mask=mask).outputs, spread(ids[1:, :3]).outputs
    for name in one:
        torch.testing.assert_close(one[name], two[name])
    stack = MultiHead(mh.Stack("gqa(kv_heads=2)", 16, 4, 2), {"y": "tokens(classes=2)"})
    assert stack(torch.randn(1, 3, 16)).outputs["y"].shape == (1, 3, 2)


def test_pools_leave_padding_out_and_a_row_of_padding_is_zero():
    x = torch.tensor([[[1.0], [5.0], [NAN]], [[2.0], [3.0], [4.0]]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    for pool, value in (("mean", 3.0), ("max", 5.0), ("first", 1.0), ("last", 5.0)):
        assert pooled(x, pool, mask).flatten().tolist() == [value, 0.0]
        assert pooled(x[:, :0], pool).flatten().tolist() == [0.0, 0.0] and pooled(x[:0], pool).shape == (0, 1)


def test_names_that_modules_have_themselves():
    net = MultiHead(nn.Linear(2, 4), {"type": "regression", "a.b": "regression", "keys": "regression"})
    net(torch.randn(3, 2), targets={"type": [1, 2, 3], "a.b": [1, 2, 3]}).loss.backward()
    MultiHead(nn.Linear(2, 4), {"keys": "regression", "a.b": "regression", "type": "regression"}).load_state_dict(
        net.state_dict()
    )


def test_a_bare_name_is_one_head():
    net, x = MultiHead(nn.Linear(2, 4), dict.fromkeys(["kind", "k", "i", "n", "d"], "regression")), torch.randn(3, 2)
    assert list(net.extract("kind").heads) == list(net(x, heads="kind").outputs) == [*net.predict(x, heads="kind")]
    assert list(net.predict(x, heads="kind")) == ["kind"]


@pytest.mark.parametrize("between", [None, "mmoe(experts=2)"])
def test_heads_of_names_alike_have_weights_apart(between):
    names = ["a.b", "a%2Eb", "a%252Eb", "a%b", "%", ".", "%25", ""]
    net = MultiHead(nn.Linear(2, 4), dict.fromkeys(names, "regression(pool=mean)"), between=between)
    assert len({id(net.net(name)) for name in names}) == len(names) == len(net.nets)
    one = net.extract(["a%2Eb"])
    assert len(one.nets) == 1 and one.net("a%2Eb").weight.equal(net.net("a%2Eb").weight)


@pytest.mark.parametrize(("made", "says"), [
    (lambda: MultiHead(trunk(), [("a", "regression"), ("a", "span")]), "head 'a': two heads have this name"),
    (lambda: MultiHead(trunk(), {"a": "regresion"}), "head 'a': there is no head 'regresion'"),
    (lambda: MultiHead(trunk(), {"a": "classification(classes=1)"}), "head 'a'.*at least 2"),
    (lambda: MultiHead(trunk(), {"a": Regression(features="9")}), "head 'a': the trunk has no submodule '9'"),
    (lambda: MultiHead(nn.Tanh(), {"a": "regression"}), "head 'a': how wide .* give width="),
    (lambda: MultiHead(trunk(), {"a": "matryoshka(classes=2, slices=[4, 16])"}), "head 'a': slices=.*only 8 wide"),
    (lambda: MultiHead(trunk(), {1: "regression"}), "head 1: names are text"),
    (lambda: MultiHead(trunk(), ["regression"]), "heads are a dict by name, or pairs"),
    (lambda: MultiHead(trunk(), {}), "at least one head"),
    (lambda: MultiHead(trunk(), {"a": "density"}, balance="uncertainty"), "head 'a': .*may go below"),
])  # fmt: skip
def test_models_that_cannot_be_built(made, says):
    with pytest.raises(ValueError, match=f"(?s){says}"):
        made()


@pytest.mark.parametrize(("targets", "says"), [
    ({"kind": [0, 3] + [0] * 10}, "head 'kind': label 3 is out of range: 0 to 2"),
    ({"kind": [0, -1] + [0] * 10}, "head 'kind': label -1 is out of range"),
    ({"kind": [0.5] * 12}, "head 'kind': labels are whole numbers, not 0.5"),
    ({"tags": torch.full((12, 2), 2)}, "head 'tags': label 2 is out of range: 0 to 1"),
    ({"age": [float("inf")] * 12}, "head 'age': a label is infinite"),
    ({"age": torch.zeros(11)}, r"head 'age': labels are \[11\], but these features need \[12\]"),
    ({"wage": torch.zeros(12)}, "no head reads the target 'wage'; heads read 'age'"),
    (torch.zeros(12), "targets are a dict by name, not Tensor"),
])  # fmt: skip
def test_labels_that_cannot_be(targets, says):
    with pytest.raises(ValueError, match=says):
        model()(batch()[0], targets=targets)


def test_features_that_do_not_fit_name_the_head():
    net = MultiHead(nn.Identity(), {"a": "regression"}, width=4)
    with pytest.raises(ValueError, match=r"head 'a': it was built for features 4 wide, but the trunk gives \[2, 5\]"):
        net(torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"head 'a': it reads \[rows, width\], but .* \[2, 3, 4\]; pool='mean'"):
        net(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="the trunk gives str: no tensor"):
        MultiHead(nn.Identity(), {"a": "regression"}, width=4)("text")
    with pytest.raises(ValueError, match="there is no head 'b'; there are 'a'"):
        net(torch.zeros(2, 4), heads=["b"])


def test_thirty_tasks_of_which_some_are_labelled_for_a_few_rows():
    net = MultiHead(trunk(), {f"t{i}": "classification(classes=2)" for i in range(3)})
    x, targets = (
        torch.randn(8, 5),
        {"t0": torch.ones(8), "t1": torch.tensor([1.0, 0, 1] + [NAN] * 5), "t2": torch.full((8,), NAN)},
    )
    out = net(x, targets=targets)
    subset = nn.functional.cross_entropy(net.net("t1")(net.trunk(x[:3])), torch.tensor([1, 0, 1]))
    torch.testing.assert_close(out.losses["t1"], subset)
    assert "t2" not in out.losses and out.loss.isfinite()


def test_a_head_pools_by_an_aggregator_that_it_learns():
    trunk = nn.Linear(5, 8)
    heads = {"y": Classification(3, pool="abmil(heads=2)"), "m": "regression(pool=mean)"}
    model = MultiHead(trunk, heads, width=8)
    x, mask = torch.randn(4, 6, 5), torch.ones(4, 6, dtype=torch.bool)
    mask[1, 4:] = False
    out = model(x, mask=mask, targets={"y": [0, 1, 2, 0], "m": [1.0, 2.0, 3.0, 4.0]})
    out.loss.backward()
    assert out.outputs["y"].shape == (4, 3)
    pool = model.pools[model.key("y")]
    assert all(p.grad is not None for p in pool.parameters()) and list(model.pools) == [model.key("y")]
    expected = model.net("y")(pool(trunk(x), mask).out.flatten(1))
    torch.testing.assert_close(out.outputs["y"], expected)
    assert read_head("regression(pool=ggem)").pool == "ggem"
    with pytest.raises(ValueError, match=r"pool='median' is none of mean, max, first, last, and there is no agg"):
        Classification(3, pool="median")
    for line in ("t3time", "pna(statistics=[mean"):
        with pytest.raises(ValueError, match=r"pool=.*(any number of tokens|expected)"):
            Classification(3, pool=line)
    with pytest.raises(ValueError, match="head 'y': ggem: groups=8 do not divide 12"):
        MultiHead(nn.Linear(5, 12), {"y": Classification(3, pool="ggem")})
