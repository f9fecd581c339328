"""Measures of whole layers: how much of the network each one changes, and how sparse it is.

h_l `[B, T, D]` is the stream after l layers, L the number of layers. Source: arXiv 2603.15389.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.inspect.ablate import Inputs, run
from manyheads.inspect.layers import chosen
from manyheads.inspect.look import Look
from manyheads.inspect.measures.importance import Loss, next_token_loss
from manyheads.inspect.measures.sinks import states
from manyheads.inspect.stream import blocks_of, put_out, stream_in, stream_out, with_stream


def variance(model: nn.Module, inputs: Inputs) -> Tensor:
    """Var over the D features of h_l, the mean over tokens, `[L + 1]`; in pre-norm models it grows with depth."""
    return states(model, inputs).double().var(-1, correction=0).mean((1, 2))


def similarity(model: nn.Module, inputs: Inputs) -> Tensor:
    """The cosine of h_i and h_j, the mean over tokens, `[L + 1, L + 1]`."""
    unit = torch.nn.functional.normalize(states(model, inputs).double(), dim=-1).flatten(1)
    return unit @ unit.mT / (unit.norm(dim=-1)[0] ** 2)


@contextmanager
def replaced(block: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A block whose output is a function of its input (the block runs, and what it says is not heard)."""
    inputs: list[Tensor] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs.append(stream_in(args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return put_out(module, output, change(inputs.pop()))

    with ExitStack() as stack:
        stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.callback(block.register_forward_hook(leave).remove)
        yield


def causal_effect(model: nn.Module, inputs: Inputs) -> Tensor:
    """C[s, l] of l > s: how much less, or otherwise, layer l adds when layer s is skipped; else not a number, `[L, L]`.

    C = mean‖(h̄_{l+1} - h̄_l) - (h_{l+1} - h_l)‖ / mean‖h_{l+1} - h_l‖ over tokens, h̄ without layer s. A forward pass for
    each layer.
    """
    blocks = blocks_of(model, chosen(model, None))
    whole = states(model, inputs).double().diff(dim=0)
    found = torch.full((len(blocks), len(blocks)), torch.nan, dtype=torch.float64)
    for s, block in enumerate(blocks):
        with replaced(block, lambda x: x):
            less = states(model, inputs).double().diff(dim=0)
        change = (less - whole).norm(dim=-1).mean((1, 2)) / whole.norm(dim=-1).mean((1, 2))
        found[s, s + 1 :] = change[s + 1 :].cpu()
    return found


def _mean_loss(model: nn.Module, inputs: Inputs, loss: Loss) -> float:
    with torch.no_grad():
        return loss(run(model, inputs), inputs).double().mean().item()


def swap_effect(model: nn.Module, inputs: Inputs, loss: Loss = next_token_loss) -> Tensor:
    """P(a, b) = |𝓛 - 𝓛 with all parameters of layers a and b exchanged| / 𝓛, `[L, L]`; one number: its mean over pairs.

    The parameters are back afterwards, bit for bit. L (L - 1) / 2 passes.

    Raises:
        ValueError: layers whose parameters have other shapes.
    """
    blocks = blocks_of(model, chosen(model, None))
    base, found = _mean_loss(model, inputs, loss), torch.zeros(len(blocks), len(blocks), dtype=torch.float64)
    for a in range(len(blocks)):
        for b in range(a):
            with _swapped(blocks[a], blocks[b]):
                found[a, b] = found[b, a] = abs(base - _mean_loss(model, inputs, loss)) / abs(base)
    return found


@contextmanager
def _swapped(one: nn.Module, other: nn.Module) -> Iterator[None]:
    pairs = list(zip(one.parameters(), other.parameters(), strict=False))
    if len(list(one.parameters())) != len(list(other.parameters())) or any(a.shape != b.shape for a, b in pairs):
        raise ValueError("layers with parameters of other shapes cannot change places")

    def swap() -> None:
        for a, b in pairs:
            a.data, b.data = b.data, a.data

    swap()
    try:
        yield
    finally:
        swap()


def usefulness(
    model: nn.Module, inputs: Inputs, held_out: Inputs, loss: Loss = next_token_loss
) -> Tensor:  # fmt: skip
    """𝓛 with a layer replaced by the best linear map of its input, over 𝓛, `[L]`; a layer counts as useful above 1.1.

    h_{l+1} ≈ W h_l + b is fitted by least squares over the tokens of `inputs`; the losses are of `held_out`. (The
    authors' code measures on what it fitted.) With fewer tokens than the D + 1 unknowns of a row every layer looks
    linear on the text that was fitted, and none on another.
    """
    blocks = blocks_of(model, chosen(model, None))
    stream = states(model, inputs).double().flatten(1, 2)
    base, found = _mean_loss(model, held_out, loss), []
    for block, x, y in zip(blocks, stream[:-1], stream[1:], strict=True):
        one = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        fit = torch.linalg.lstsq(one, y, driver="gelsd").solution

        def linear(h: Tensor, fit: Tensor = fit) -> Tensor:
            return (h.double() @ fit[:-1] + fit[-1]).to(h.dtype)

        with replaced(block, linear):
            found.append(_mean_loss(model, held_out, loss) / base)
    return torch.tensor(found, dtype=torch.float64)


def _run_block(model: nn.Module, inputs: Inputs, number: int) -> tuple[Tensor, Tensor]:
    """A block's input, with a gradient of its own, and its output."""
    layers = chosen(model, None)
    if not 0 <= number < len(layers):
        raise ValueError(f"there is no layer {number}; this model has {len(layers)}")
    block = blocks_of(model, layers)[number]
    given: list[Tensor] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        x = stream_in(args, kwargs).detach().requires_grad_()
        given.append(x)
        args, kwargs = with_stream(args, kwargs, x)
        return args, {**kwargs, "stream": x} if "stream" in kwargs else kwargs

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        given.append(stream_out(output))

    with ExitStack() as stack, torch.enable_grad():
        stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.callback(block.register_forward_hook(leave).remove)
        run(model, inputs)
    return given[0], given[1]


def jacobian(model: nn.Module, inputs: Inputs, layer: int) -> Tensor:
    """J = mean_t Σ_t' ∂h_{l+1,t} / ∂h_{l,t'} of layer l `[D, D]`, row d of output channel d: the sum over what reaches
    t from all tokens, the mean over t. D backward passes."""
    x, y = _run_block(model, inputs, layer)
    rows = []
    for channel in range(y.shape[-1]):
        (grad,) = torch.autograd.grad(y[..., channel].sum(), x, retain_graph=True)
        rows.append(grad.double().sum((0, 1)) / (y.shape[0] * y.shape[1]))
    return torch.stack(rows)


def off_identity(matrix: Tensor) -> dict[str, float]:
    """Of J `[D, D]`: `distance` ‖J - I‖_F / D, `off` ‖off-diagonal‖_F / √(D² - D), `diagonal` its mean, `deviation` of
    it, `frobenius` ‖J‖_F, `spectral` ‖J‖₂."""
    n, diagonal = len(matrix), matrix.diagonal()
    unit = torch.eye(n, dtype=matrix.dtype, device=matrix.device)
    return {
        "distance": float((matrix - unit).norm() / n),
        "off": float((matrix - torch.diag(diagonal)).norm() / max(1, n * n - n) ** 0.5),
        "diagonal": float(diagonal.mean()), "deviation": float(diagonal.std(correction=0)),
        "frobenius": float(matrix.norm()), "spectral": float(torch.linalg.matrix_norm(matrix, 2)),
    }  # fmt: skip


def jacobian_distance(
    model: nn.Module, inputs: Inputs, layer: int, *, probes: int = 32, seed: int = 0
) -> tuple[float, float]:
    """An estimate of ‖J - I‖_F (see `jacobian`) by random probes, and its standard error: E‖rᵀ(J - I)‖² over r = ±1."""
    x, y = _run_block(model, inputs, layer)
    generator, squares = torch.Generator().manual_seed(seed), []
    for _ in range(probes):
        r = torch.randint(0, 2, (y.shape[-1],), generator=generator).to(y) * 2 - 1
        (grad,) = torch.autograd.grad((y * r).sum(), x, retain_graph=True)
        squares.append((grad.double().sum((0, 1)) / (y.shape[0] * y.shape[1]) - r).square().sum())
    each = torch.stack(squares)
    distance = each.mean().sqrt()
    return float(distance), float(each.std() / probes**0.5 / (2 * distance.clamp_min(1e-30)))


def small_weights(model: nn.Module, times: float = 0.1) -> Tensor:
    """The share of each block's weights with |w| < times · σ, σ of its own matrix, `[L]`."""
    found = []
    for block in blocks_of(model, chosen(model, None)):
        each = [(p.detach().double(), p.numel()) for p in block.parameters() if p.ndim >= 2]
        small = sum(float((p.abs() < times * p.std()).sum()) for p, _ in each)
        found.append(small / max(1, sum(n for _, n in each)))
    return torch.tensor(found, dtype=torch.float64)


def small_mass(look: Look, times: float = 1.0) -> Tensor:
    """The share of the n_t visible keys with a weight below times / n_t, `[B, H, T]`."""
    rows = []
    for tile in look.weights():
        n = tile.visible.sum(-1, keepdim=True).clamp_min(1)
        rows.append(((tile.weights < times / n) & tile.visible).double().sum(-1) / n[..., 0])
    return torch.cat(rows, 2)


def count_useful(ratios: Sequence[float] | Tensor, least: float = 1.1) -> float:
    """The share of layers above a ratio (see `usefulness`)."""
    return float((torch.as_tensor(ratios) > least).double().mean())
