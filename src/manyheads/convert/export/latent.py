"""Any layer that an export can carry, written as attention over one latent and one rotary key.

A latent layer has that form. A grouped-query layer takes it with the values of its G heads as the latent and its G
rotary keys stacked into one of width G·d: head h reads its own group's part because its query is zero elsewhere.
That costs no cache (2·G·d numbers either way) and G times the arithmetic of the scores.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.attention.latent import LatentProject
from manyheads.attention.position.rope import Rope
from manyheads.attention.project.gqa import GQAProject


class Widths(NamedTuple):
    """Widths of a layer in this form. q_rank: 0 where queries come from x directly. bias: any projection has one.

    theta: radians per position of each pair of the rotary key, fastest first.
    """

    rank: int
    nope: int
    rope: int
    v: int
    q_rank: int
    bias: bool
    theta: Tensor


class Narrow(NamedTuple):
    """up · norm(down · x + bias).

    down `[r, D]` (None: the identity, with neither bias nor norm), up `[H, rows, r]`, bias `[r]`. gain `[r]` and eps
    belong to the RMSNorm; without a gain there is none.
    """

    down: Tensor | None
    up: Tensor
    bias: Tensor | None = None
    gain: Tensor | None = None
    eps: float = 1e-6


class Latent(NamedTuple):
    """A layer's weights, float32 on the CPU, with the scale of its scores in the queries.

    q.up `[H, nope + rope, r_q]`, kv.up `[H, nope + v, r]`, key `[rope, D]`, out `[D, H, v]`. Rotary rows lie pair
    beside pair, in the order of `Widths.theta`.
    """

    q: Narrow
    kv: Narrow
    key: Tensor
    key_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    nope: int


def rope_of(attention: Attention) -> Rope:
    return next(part for part in attention.spec.parts if isinstance(part, Rope))


def widths(attention: Attention) -> Widths:
    """The widths alone: no weight is read."""
    project = attention.project
    bias = any(name.endswith("bias") for name, _ in project.named_parameters())
    turning = len(_rotary(attention))
    theta = rope_of(attention).frequencies(turning)
    if isinstance(project, LatentProject):
        rank, nope, v, q_rank = project.rank, project.nope, project.v, project.q_rank
    else:
        project = cast(GQAProject, project)
        nope, v, q_rank = project.width - turning, attention.layout.v_width, 0
        theta = theta.repeat(project.kv_heads)
        rank = project.kv_heads * (nope + v)
    if not q_rank and project.q_proj.bias is not None:
        q_rank = attention.dim + 1
    return Widths(rank, nope, 2 * len(theta), v, q_rank, bias, theta.sort(descending=True).values)


@torch.no_grad()
def read(attention: Attention) -> Latent:
    """The layer's weights in this form; the layer is left as it is."""
    latent = isinstance(attention.project, LatentProject)
    form = _from_latent(attention) if latent else _from_grouped(attention)
    return _arranged(form, attention)


def _from_latent(attention: Attention) -> Latent:
    project = cast(LatentProject, attention.project)
    if project.q_rank:
        down, bias = _weights(project.q_a_proj)
        up = _weights(project.q_b_proj)[0].unflatten(0, (project.heads, -1))
        q = Narrow(down, up, bias, *_norm(project.q_a_norm))
    else:
        q = _full_queries(project.q_proj, project.heads)
    rows, bias = _weights(project.kv_a_proj)
    up = _weights(project.kv_b_proj)[0].unflatten(0, (project.heads, -1))
    kv = Narrow(rows[: project.rank], up, None if bias is None else bias[: project.rank], *_norm(project.kv_a_norm))
    out, out_bias = _weights(project.o_proj)
    key_bias = None if bias is None else bias[project.rank :]
    out = out.unflatten(1, (project.heads, -1))
    return Latent(q, kv, rows[project.rank :], key_bias, out, out_bias, project.nope)


def _from_grouped(attention: Attention) -> Latent:
    """Latent = [un-rotated key channels of all groups ; their values], rotary key = the rotated channels stacked."""
    project = cast(GQAProject, attention.project)
    groups, heads, v_width = project.kv_heads, project.heads, attention.layout.v_width
    turning = _rotary(attention)
    still = [channel for channel in range(project.width) if channel not in turning]
    nope, head = len(still), torch.arange(heads)
    group = head // (heads // groups)

    queries = _full_queries(project.q_proj, heads)
    turned = queries.up.new_zeros(heads, groups, len(turning), queries.up.shape[-1])
    turned[head, group] = queries.up[:, turning]
    q = queries._replace(up=torch.cat([queries.up[:, still], turned.flatten(1, 2)], 1))

    k, k_bias = (_by_group(each, groups) for each in _weights(project.k_proj))
    v, v_bias = _weights(project.v_proj)
    assert k is not None
    up = torch.zeros(heads, nope + v_width, groups * (nope + v_width))
    content, value = up[:, :nope, : groups * nope], up[:, nope:, groups * nope :]
    content.unflatten(-1, (groups, nope))[head, :, group] = torch.eye(nope)
    value.unflatten(-1, (groups, v_width))[head, :, group] = torch.eye(v_width)
    bias = None if k_bias is None or v_bias is None else torch.cat([k_bias[:, still].flatten(), v_bias])
    kv = Narrow(torch.cat([k[:, still].flatten(0, 1), v]), up, bias)
    out, out_bias = _weights(project.o_proj)
    key_bias = None if k_bias is None else k_bias[:, turning].flatten()
    return Latent(q, kv, k[:, turning].flatten(0, 1), key_bias, out.unflatten(1, (heads, -1)), out_bias, nope)


def _arranged(form: Latent, attention: Attention) -> Latent:
    """Rotary rows pair beside pair, fastest first; the scale of the scores, and RoPE's growth, in the queries."""
    rope, turning = rope_of(attention), len(_rotary(attention))
    theta = rope.frequencies(turning).repeat(len(form.key) // turning)
    channels = torch.arange(len(form.key)).unflatten(0, (-1, turning))
    pairs = channels.unflatten(1, (2, -1)).mT if rope.pairing == "half" else channels.unflatten(1, (-1, 2))
    order = pairs.flatten(0, 1)[theta.argsort(descending=True, stable=True)].flatten()
    content, turned = form.q.up.split([form.nope, len(form.key)], 1)
    up = torch.cat([content, turned[:, order] * rope.growth() ** 2], 1) * attention.layout.scale
    key_bias = None if form.key_bias is None else form.key_bias[order]
    return form._replace(q=form.q._replace(up=up), key=form.key[order], key_bias=key_bias)


def _full_queries(linear: nn.Linear, heads: int) -> Narrow:
    """Queries straight from x; a bias makes x one channel longer, a constant 1 that `up` weighs."""
    weight, bias = _weights(linear)
    up = weight.unflatten(0, (heads, -1))
    if bias is None:
        return Narrow(None, up)
    wide = linear.in_features + 1
    one = torch.zeros(wide).index_fill(0, torch.tensor([wide - 1]), 1.0)
    return Narrow(torch.eye(wide, wide - 1), torch.cat([up, bias.unflatten(0, (heads, -1))[..., None]], -1), one)


def _weights(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    bias: Tensor | None = linear.bias
    return linear.weight.to("cpu", torch.float32), None if bias is None else bias.to("cpu", torch.float32)


def _norm(norm: nn.Module | None) -> tuple[Tensor | None, float]:
    """Gain (a fixed factor included) and eps of a latent norm; an identity has none."""
    if norm is None or isinstance(norm, nn.Identity):
        return None, 1e-6
    return cast(Tensor, norm.weight).to("cpu", torch.float32) * cast(float, norm.scale), cast(float, norm.eps)


def _by_group(tensor: Tensor | None, groups: int) -> Tensor | None:
    return None if tensor is None else tensor.unflatten(0, (groups, -1))


def _rotary(attention: Attention) -> range:
    """The channels of a query that turn."""
    cut = attention.project.rotary("q")
    return range(0) if cut is None else range(cut.start, cut.stop)
