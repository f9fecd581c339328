"""How many heads a mixer is worth: the dimension of what its tokens can do to each other.

Of attention, convolutions and state spaces alike, with weights as they are for one text, y_i = Σ_j W_ij x_j, W_ij
`[D,D]` (0 where j is not seen). The operator span r is the dimension of the span of all W_ij. A head in factorised form
is W_ij = a_ij M, a number for each pair and one map M = W_O W_V: its span is 1, and that of H heads at most H, with
equality for generic weights (while H ≤ D² and n (n + 1)/2, or 1 + n (n - 1)/2 where the weights of a query sum to one).
So a mixer of span r needs r heads, and a linear time-invariant state space, W_ij = C A^{i-j} B, gets by with r: the SVD
of its lags, `[n, D²]`, gives maps M_h and weights a^h_{i-j} (signed, of the distance alone, without a softmax). Its
span is at most N, the number of its states, as A^N is a sum of lower powers; with A a number it is 1.

The W_ij of our layers are derivatives of y_i by what the value projection reads at j, queries and keys held: softmax
attention, attention with a convolution of its values over c tokens (H heads are H c), and two scans, retention and
Mamba-2's, whose heads have a state each and yet are one factorised head. Then how far a gradient reaches, |W_ij| at the
largest distance over that at 1: a scan's falls as its decay, attention can look anywhere.

Source: How Many Heads Make an SSM? 2025, arXiv 2512.15115, of which abstract and introduction alone were read: the
class of factorised heads and the construction are a reconstruction, and the numbers say that it holds.

    python examples/interaction_operator.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import manyheads as mh

DIM, LENGTH = 12, 8
SPECS = {
    "softmax attention": ("gqa + rope", 1),
    "attention, shared keys": ("gqa(kv_heads=1) + rope", 1),
    "attention, values convolved over 3": ("gqa(head_dim=4) + conv(taps=3, per_head=true) + rope(none)", 3),
    "retention": ("gqa + rope(none) + retention(first=1)", 1),
    "Mamba-2's scan": ("gqa + rope(none) + ssd", 1),
}
"""A name, a spec, and how many maps one of its heads is."""


def operator(layer: mh.Attention, x: Tensor) -> Tensor:
    """W `[n, n, D, D]` of a layer at x `[n, D]`: by query, by source."""

    def read(values: Tensor) -> Tensor:
        handle = layer.project.get_submodule("v_proj").register_forward_pre_hook(lambda module, given: (values[None],))
        try:
            return layer(x[None])[0]
        finally:
            handle.remove()

    found = torch.autograd.functional.jacobian(read, x)
    assert isinstance(found, Tensor)
    return found.transpose(1, 2)


def span(operators: Tensor, rtol: float = 1e-9) -> int:
    """The dimension of the span of all W_ij."""
    return int(torch.linalg.matrix_rank(operators.flatten(0, -3).flatten(1), rtol=rtol))


def layer(spec: str, heads: int, seed: int) -> tuple[mh.Attention, Tensor]:
    """A layer and x `[n, D]`, scores large enough for weights that differ."""
    torch.manual_seed(seed)
    made = mh.Attention(spec, DIM, heads).double()
    for name in "qk":
        made.project.get_parameter(f"{name}_proj.weight").data *= 3
    return made, torch.randn(LENGTH, DIM, dtype=torch.float64)


def state_space(dim: int, state: int, length: int, seed: int, scalar: bool = False) -> Tensor:
    """L_t = C A^t B, t < n, `[n, d, d]`, A stable (scalar: a multiple of the identity)."""
    torch.manual_seed(seed)
    a, b, c = (torch.randn(shape, dtype=torch.float64) for shape in ((state, state), (state, dim), (dim, state)))
    a = 0.9 * (torch.eye(state, dtype=torch.float64) if scalar else a / torch.linalg.eigvals(a).abs().max())
    return torch.stack([c @ torch.linalg.matrix_power(a, t) @ b for t in range(length)])


def selective(dim: int, state: int, length: int, seed: int) -> Tensor:
    """W `[n, n, d, d]` of a selective one: C_i (Π a_u) B_jᵀ, C_i and B_j drawn for each token, a_u numbers."""
    torch.manual_seed(seed)
    b, c = torch.randn(2, length, dim, state, dtype=torch.float64)
    decay = torch.rand(length, dtype=torch.float64).log().cumsum(0)
    weight = (decay[:, None] - decay).exp().tril()
    return torch.einsum("ij,ian,jbn->ijab", weight, c, b)


def causal(lags: Tensor) -> Tensor:
    """W `[n, n, d, d]` of lag operators `[n, d, d]`."""
    distance = torch.arange(len(lags))[:, None] - torch.arange(len(lags))
    return lags[distance.clamp_min(0)] * (distance >= 0)[..., None, None]


def factorised(lags: Tensor, heads: int) -> Tensor:
    """The best lag operators of so many heads: weights by distance a^h_t and maps M_h, from the SVD."""
    u, s, v = torch.linalg.svd(lags.flatten(1), full_matrices=False)
    weights, maps = u[:, :heads] * s[:heads], v[:heads]
    return (weights @ maps).view_as(lags)


def missed(lags: Tensor, heads: int) -> float:
    """How far outputs by so many heads are from the state space's, relative."""
    x = torch.randn(len(lags), lags.shape[-1], dtype=lags.dtype)
    want, got = (torch.einsum("ijab,jb->ia", causal(each), x) for each in (lags, factorised(lags, heads)))
    return ((got - want).norm() / want.norm()).item()


def reach(operators: Tensor) -> float:
    """|W_ij| at the largest distance over that at distance 1, of the last query."""
    size = operators[-1].flatten(1).norm(dim=-1)
    return (size[0] / size[-2]).item()


def main() -> None:
    print(f"operator span of our layers, D = {DIM}, n = {LENGTH}")
    print(f"{'':36}{'H = 1':>13}{'H = 2':>13}{'H = 3':>13}    reach, H = 1")
    for name, (spec, maps) in SPECS.items():
        found = [operator(*layer(spec, heads, 0)) for heads in (1, 2, 3)]
        row = "".join(f"{f'{span(w)} of {maps * heads}':>13}" for heads, w in zip((1, 2, 3), found, strict=True))
        print(f"{name:36}{row}    {reach(found[0]):.1e}")
    print("\nstate spaces, d = 3, n = 6: span, and what factorised heads miss of the output")
    for name, state, scalar in (("A = 0.9 I, 4 states", 4, True), ("2 states", 2, False), ("4 states", 4, False)):
        lags = state_space(3, state, 6, 0, scalar)
        k, should = span(lags), 1 if scalar else state
        heads = ", ".join(f"{h} heads {missed(lags, h):.1e}" for h in (k - 1, k) if h)
        print(f"{name:20} span {k} of {should}: {heads}")
    grows = ", ".join(f"n = {n}: {span(selective(6, 2, n, 0))}" for n in (1, 2, 4, 8))
    print(f"selective, 2 states, d = 6: no fixed span, {grows} (at most d² = 36)")


if __name__ == "__main__":
    main()
