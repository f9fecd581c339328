"""Languages that share a pool of adapters."""

import torch
from examples.hlt_mt import DIM, HIGH, LOW, POOL, WORDS, Pool, Translator, accuracies, disparity, train, world


def inputs(rows=12, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, DIM, generator=g), torch.randint(HIGH, (rows,), generator=g)


def stirred(adapters=POOL):
    torch.manual_seed(1)
    pool = Pool(DIM, HIGH + LOW, adapters)
    for adapter in [*pool.adapters, pool.universal]:
        torch.nn.init.normal_(adapter.up.weight)
    return pool


def test_fresh_adapters_change_nothing():
    x, languages = inputs()
    pool = Pool(DIM, HIGH + LOW, POOL)
    assert torch.equal(pool(x, languages), x)
    torch.testing.assert_close(pool(x, languages, soft=True), x)


def test_one_adapter_or_a_gate_that_is_sure_is_hard_and_soft_at_once():
    x, languages = inputs()
    one = stirred(1)
    torch.testing.assert_close(one(x, languages, soft=True), one(x, languages))
    sure = stirred()
    with torch.no_grad():
        sure.gate.weight.mul_(1e4)
    torch.testing.assert_close(sure(x, languages, soft=True), sure(x, languages))


def test_a_mixed_batch_is_its_languages_one_by_one():
    pool, (x, languages) = stirred(), inputs()
    universal = languages == 1
    out = pool(x, languages, universal=universal)
    for language in range(HIGH):
        mine = languages == language
        torch.testing.assert_close(out[mine], pool(x[mine], languages[mine], universal=universal[mine]))


def test_disparity_is_least_where_adapters_are_used_evenly():
    even = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert disparity(even) == 8 == disparity(torch.full((4, 2), 0.5))
    shares = torch.rand(4, 2).softmax(-1)
    torch.testing.assert_close(disparity(shares), (shares @ shares.T).sum())
    assert disparity(shares) > 8


def test_adapters_learn_from_their_languages_alone():
    torch.manual_seed(0)
    model = Translator()
    words = torch.randint(WORDS, (9,))
    for language in (0, HIGH):
        model.zero_grad()
        model(words, torch.full((9,), language)).sum().backward()
        used = [any(p.grad is not None for p in a.parameters()) for a in [*model.pool.adapters, model.pool.universal]]
        which = POOL if language >= HIGH else int(model.pool.mapped(torch.tensor(language)))
        assert used == [number == which for number in range(POOL + 1)]


def test_the_map_is_of_the_weights_alone():
    model, again = Translator(), Translator()
    again.load_state_dict(model.state_dict())
    every = torch.arange(HIGH)
    assert torch.equal(model.pool.mapped(every), again.pool.mapped(every))


def test_families_meet_in_an_adapter_and_a_pool_knows_more_than_one():
    tables = world(0)
    pool, one = train(tables, 120), train(tables, 120, adapters=1)
    mapped = pool.pool.mapped(torch.arange(HIGH)).tolist()
    assert mapped[0] == mapped[1] != mapped[2] == mapped[3]
    known, less = accuracies(pool, tables), accuracies(one, tables)
    assert min(known) > 0.8 and sum(known[:HIGH]) > sum(less[:HIGH]) + 1
