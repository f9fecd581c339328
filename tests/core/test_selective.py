"""The selective scan: a loop over tokens, in chunks."""

import pytest
import torch

from manyheads.core import selective
from manyheads.core.scan import Stream
from manyheads.core.selective import selective_scan

START = Stream(None, None, None)


def numbers(tokens=11, batch=2, n=3, channels=5):
    torch.manual_seed(0)
    q, k = (torch.randn(batch, tokens, n, dtype=torch.float64) for _ in range(2))
    x, step = torch.randn(batch, tokens, channels).double(), torch.rand(batch, tokens, channels).double()
    return q, k, x, step, -torch.rand(n, channels).double()


def loop(q, k, x, step, rate, state=None, same=None):
    state = x.new_zeros(len(x), k.shape[-1], x.shape[-1]) if state is None else state
    ys = []
    for t in range(x.shape[1]):
        left = (step[:, t, None] * rate).exp()
        left = left if same is None else left * same[:, t, None, None]
        state = left * state + k[:, t, :, None] * x[:, t, None]
        ys.append((q[:, t, :, None] * state).sum(1))
    return torch.stack(ys, 1), state


@pytest.mark.parametrize("chunk", [1, 4, 11, 32])
@pytest.mark.parametrize("document", [None, torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2])[None].expand(2, -1)])
def test_chunks_are_the_loop(chunk, document, monkeypatch):
    monkeypatch.setattr(selective, "CHUNK", chunk)
    rows = [t.requires_grad_() for t in numbers()]
    state = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    same = None if document is None else (document[:, 1:] == document[:, :-1]).double()
    got, want = selective_scan(*rows, Stream(state, None, document)), loop(*rows, state, same)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    weights = [torch.randn_like(t) for t in want]
    grads = (
        torch.autograd.grad(sum((t * w).sum() for t, w in zip(out, weights, strict=True)), [*rows, state])
        for out in (got, want)
    )
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_a_state_that_is_handed_on():
    rows, cut = numbers(), 7
    whole, last = selective_scan(*rows, START)
    parts, state = [], None
    for first, end in ((0, cut), (cut, cut + 1), (cut + 1, 11)):
        y, state = selective_scan(*(t[:, first:end] for t in rows[:4]), rows[4], Stream(state, None, None))
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, last, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0, 1e4])
def test_steps_of_any_size_in_single_precision(size):
    q, k, x, step, rate = numbers(100)
    step = size * step
    want = loop(q, k, x, step, rate)[0]
    rows = [t.float().requires_grad_() for t in (q, k, x, step, rate)]
    got = selective_scan(*rows, START)[0]
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
    got.sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in rows)


@pytest.mark.parametrize("tokens", [1, 6])
def test_padding_leaves_the_state_as_it_is(tokens):
    q, k, x, step, rate = numbers(tokens)
    state = torch.randn(2, 3, 5, dtype=torch.float64)
    valid = torch.zeros(2, tokens, dtype=torch.bool)
    assert torch.equal(selective_scan(q, k, 1e9 * x, step, rate, Stream(state, valid, None))[1], state)


def test_memory_is_linear_in_length():
    """What backward keeps are the inputs and a state for each chunk, not one for each token."""
    q, k, x, step, rate = (t.float().requires_grad_() for t in numbers(256, 1, 16, 64))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        selective_scan(q, k, x, step, rate, START)
    assert sum(kept) < 0.2 * 256 * 16 * 64


def test_compiles_without_unrolling():
    rows = numbers(64)
    compiled = torch.compile(lambda *rows: selective_scan(*rows, START)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*rows), selective_scan(*rows, START)[0])
