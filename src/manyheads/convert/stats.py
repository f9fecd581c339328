"""What calibration text says about an attention layer: how much each error in keys, values and scores would matter.

All of it is second moments, streamed over windows. With `metric` R (D × D), the size of an error e in the layer's
output is |R e|²; the identity weighs all channels alike, `sensitivity` weighs them by the loss's own gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manyheads.attention import Attention
from manyheads.attention.attend.softmax import Softmax
from manyheads.attention.position.rope import Rope
from manyheads.attention.project.gqa import GQAProject
from manyheads.core.mask import Axis


@dataclass(frozen=True)
class Pairs:
    """How the channels of a head pair up and turn: pair p is (re[p], im[p]) at frequency theta[p] of table index[p].

    Channels that do not rotate are paired too, at frequency zero and table index -1. gain: what the position multiplies
    a score of each pair by (YaRN grows what turns).
    """

    re: Tensor
    im: Tensor
    theta: Tensor
    index: Tensor
    gain: Tensor

    @classmethod
    def of(cls, attention: Attention) -> Pairs:
        rope = next(part for part in attention.spec.parts if isinstance(part, Rope))
        width = attention.layout.qk_width
        turns = attention.layout.rotary
        turning = 0 if turns is None else turns.stop - turns.start
        weight = next(attention.parameters())
        device = torch.device("cpu") if weight.is_meta else weight.device  # of a layer that is only described
        still = torch.arange(turning, width).view(2, -1)
        channels = torch.arange(turning)
        half = channels.view(-1, 2).T if rope.pairing == "interleaved" else channels.view(2, turning // 2)
        re, im = torch.cat([half, still], 1)
        theta = torch.zeros(len(re), dtype=torch.float64)
        index = torch.full((len(re),), -1)
        gain = torch.ones(len(re), dtype=torch.float64)
        if turning:
            theta[: turning // 2] = rope.frequencies(turning).double()
            index[: turning // 2] = torch.arange(turning // 2) if rope.pairs is None else torch.tensor(rope.pairs)
            gain[: turning // 2] = rope.growth() ** 2
        return cls(*(each.to(device) for each in (re, im, theta, index, gain)))

    def join(self, rows: Tensor) -> Tensor:
        """Real rows `[..., width, D]` to complex rows `[..., pairs, D]`."""
        return torch.complex(rows[..., self.re, :], rows[..., self.im, :])

    def norms(self, x: Tensor) -> Tensor:
        """Size of each pair: `[..., width]` to `[..., pairs]`."""
        return torch.hypot(x[..., self.re], x[..., self.im])

    def split(self, rows: Tensor) -> Tensor:
        """Complex rows back to real ones in the channels' order."""
        real = rows.real.new_empty(*rows.shape[:-2], 2 * rows.shape[-2], rows.shape[-1])
        real[..., self.re, :], real[..., self.im, :] = rows.real, rows.imag
        return real


class AttentionStats(NamedTuple):
    """Sensitivities of one layer's attention over calibration windows of T tokens. Inputs end in a constant channel.

    keys: `[D + 1, D + 1]` float64, second moment of the inputs, each token weighted by how much its key matters.
    rows: the same with the mean of its key's and its value's weight. distance: `[H, L]`, how the weight of score errors
    spreads over distances 0 … L - 1; each row sums to one. query: `[H, d, d]`, second moment of queries, weighted by
    what a score error at them costs. value: `[H]`, mean squared attention weight. metric: R, `[D, D]`. plain:
    `[D + 1, D + 1]`, the second moment in which all tokens weigh alike. sizes: `[H, P]`, mean norm of a query's pair
    times the mean norm of its key's (no columns without RoPE).
    """

    keys: Tensor
    rows: Tensor
    distance: Tensor
    query: Tensor
    value: Tensor
    metric: Tensor
    plain: Tensor
    sizes: Tensor


@torch.no_grad()
def measure(attention: Attention, x: Tensor, metric: Tensor, positions: Tensor | None = None) -> AttentionStats:
    """Statistics of a `gqa` layer without transforms on its inputs x `[N, T, D]` at positions `[N, T]` (None: 0, 1, …).

    A score error δ at (i, j) moves the output by a_ij (v_j - o_i) δ, so its weight is a_ij² |R W_O (v_j - o_i)|²; a
    value error at j moves it by a_ij.
    """
    project = cast(GQAProject, attention.project)
    layout = attention.layout
    (n, t, _), each, scale = x.shape, layout.q // layout.kv, layout.scale
    o_proj = project.o_proj.weight.double().view(layout.dim, layout.q, layout.v_width)
    gram = torch.einsum("fe,ehd->hfd", metric.double(), o_proj)
    gram = (gram.transpose(1, 2) @ gram).to(x.dtype)  # [H, v, v]: |R W_O u|² = uᵀ gram u
    positions = positions_of(x, positions)
    whole = Axis(t, 0, device=x.device)
    hidden = ~attention._mask(attention._flow(x[:1], whole, None, None, None, None), whole, whole, None).tile()[0, 0]
    cap = next((part.cap for part in attention.spec.parts if isinstance(part, Softmax)), None)
    distance, value = x.new_zeros(layout.q, int(positions.max()) + 1), x.new_zeros(layout.q)
    query = x.new_zeros(layout.q, layout.qk_width, layout.qk_width)
    key_tokens, value_tokens = x.new_zeros(n, t), x.new_zeros(n, t)
    pairs = Pairs.of(attention) if any(isinstance(part, Rope) for part in attention.spec.parts) else None
    q_size, k_size = (x.new_zeros(heads, 0 if pairs is None else len(pairs.re)) for heads in (layout.q, layout.kv))
    for row, window in enumerate(x):
        axis = Axis(t, 0, positions[row : row + 1], device=x.device)
        lag = (positions[row][:, None] - positions[row]).clamp_min(0).flatten()
        q, k, v = (
            project_rows.unflatten(-1, (heads, -1)).transpose(0, 1)
            for project_rows, heads in (
                (project.q_proj(window), layout.q),
                (project.k_proj(window), layout.kv),
                (project.v_proj(window), layout.kv),
            )
        )
        if pairs is not None:
            q_size += pairs.norms(q).mean(1) / n
            k_size += pairs.norms(k).mean(1) / n
        turned_q, turned_k = attention._turn(q[None], "q", axis)[0], attention._turn(k[None], "k", axis)[0]
        for head in range(layout.q):  # one map at a time is in memory
            group = head // each
            scores = (turned_q[head] * scale) @ turned_k[group].T
            slope = None
            if cap is not None:
                slope = scores.div_(cap).tanh_()
                scores, slope = slope * cap, 1 - slope * slope
            a = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            o = a @ v[group]
            v_size, o_size = ((u @ gram[head] * u).sum(-1) for u in (v[group], o))
            size = (o_size[:, None] + v_size).addmm_(o @ gram[head], v[group].T, alpha=-2)
            a.square_()
            value[head] += a.sum() / (n * t)
            value_tokens[row] += a.sum(0) / layout.q
            weight = a.mul_(size.clamp_min_(0))
            if slope is not None:  # how much of a score's error a cap lets through
                weight.mul_(slope.square_())
            felt = weight.sum(-1)
            query[head] += (q[head] * felt[:, None]).T @ q[head] / (n * t)
            key_tokens[row] += weight.sum(0) / layout.q
            weight[:, 0] = 0  # the first token is a sink: its distance says nothing
            distance[head].index_add_(0, lag, weight.flatten())
    key_tokens, value_tokens = _mean_one(key_tokens), _mean_one(value_tokens)
    inputs = torch.cat([x, x.new_ones(n, t, 1)], -1).flatten(0, 1).double()
    return AttentionStats(
        _moment(inputs, key_tokens),
        _moment(inputs, (key_tokens + value_tokens) / 2),
        distance / distance.sum(1, keepdim=True).clamp_min(1e-30),
        query,
        value,
        metric,
        inputs.T @ inputs / len(inputs),
        q_size * k_size.repeat_interleave(each, 0),
    )


def positions_of(x: Tensor, positions: Tensor | None) -> Tensor:
    """Positions `[N, T]` of x `[N, T, …]`, on its device; None: 0, 1, …."""
    return (torch.arange(x.shape[1]).expand(len(x), -1) if positions is None else positions).to(x.device)


def _mean_one(weights: Tensor) -> Tensor:
    """Weights with a mean of one; where nothing matters, all alike."""
    mean = weights.mean()
    return weights / mean if mean > 0 else torch.ones_like(weights)


def _moment(x: Tensor, weights: Tensor) -> Tensor:
    """Second moment with weights up to 20 (a sink's key would drown all others)."""
    return (x * weights.flatten().clamp_max(20).double()[:, None]).T @ x / len(x)


def sensitivity(
    model: PreTrainedModel,
    windows: Tensor,
    places: list[torch.nn.Module],
    positions: Tensor | None = None,
    *,
    batch: int = 4,
    bfloat16: bool = False,
) -> list[Tensor]:
    """What the loss feels at each attention output: E[g gᵀ] `[D, D]`, g the gradient times the stream's size there.

    The labels are drawn from the model itself, which makes this the Fisher information of its predictions. `places` are
    modules whose input is the residual stream after attention; `windows` `[N, T]`. Each window's first token, a sink
    whose stream is far larger than any other, is left out.
    """
    windows = windows.to(model.device)
    positions = positions_of(windows, positions)
    moments = [torch.zeros(0)] * len(places)
    streams: list[Tensor] = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    table = model.get_input_embeddings()
    handles = [
        place.register_forward_pre_hook(lambda module, args: args[0].retain_grad() or streams.append(args[0]))
        for place in places
    ]
    generator = torch.Generator().manual_seed(0)
    try:
        for tokens, where in zip(windows.split(batch), positions.split(batch), strict=True):
            streams.clear()
            with torch.autocast(windows.device.type, torch.bfloat16, enabled=bfloat16):
                # The mask says that each window is one document, wherever its positions jump.
                out = model(
                    inputs_embeds=table(tokens).requires_grad_(), attention_mask=torch.ones_like(tokens),
                    position_ids=where, use_cache=False,
                )  # fmt: skip
            logits = out.logits.flatten(0, 1).float()
            with torch.no_grad():
                labels = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)[:, 0].to(logits.device)
            torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
            del out, logits
            for index, stream in enumerate(streams):
                assert stream.grad is not None
                size = stream.detach().pow(2).mean(-1, keepdim=True).sqrt()
                g = (stream.grad * size)[:, 1:].flatten(0, 1).float()
                moment = g.T @ g / windows.numel()
                moments[index] = moment if not len(moments[index]) else moments[index] + moment
    finally:
        for handle in handles:
            handle.remove()
        for parameter in trained:
            parameter.requires_grad_()
    return moments


def power(matrix: Tensor, exponent: float, damping: float = 1e-3) -> Tensor:
    """A symmetric positive matrix to a power, float64, after adding `damping` times its mean diagonal.

    Zeros count as the identity: where nothing is felt, all weighs alike.
    """
    one = torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)
    matrix = matrix.double() if matrix.any() else one
    mean = matrix.diagonal().mean().clamp_min(1e-100)
    values, vectors = torch.linalg.eigh(matrix + damping * mean * one)
    return (vectors * values.clamp_min(1e-12 * mean) ** exponent) @ vectors.T
