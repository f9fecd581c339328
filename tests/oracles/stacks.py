"""Stacks whose layers hand things to each other, and the laws that they hold to as single layers do."""

import torch
from tests.oracles.reference import DIM, HEADS, close
from torch import nn

from manyheads import Cache
from manyheads.core.mask import Axis
from manyheads.stack import Stack

PADDING = torch.tensor([[0], [4], [2]])


def make_stack(specs, layers, seed=0, **options):
    """A float64 stack without feed-forwards whose every weight is drawn anew."""
    torch.manual_seed(seed)
    stack = Stack(specs, DIM, HEADS, layers, ffn="none", **options).double().eval()
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.4)
    return stack


def decoded(stack, x, block, valid=None):
    cache, outs = Cache(), []
    position = None if valid is None else (valid.long().cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        for first in range(0, x.shape[1], block):
            cut = slice(first, first + block)
            given = {} if valid is None else {"mask": valid[:, cut], "positions": position[:, cut]}
            outs.append(stack(x[:, cut], cache=cache, **given))
    return torch.cat(outs, 1)


def hold_to_the_laws(specs, layers, tokens=11, idle=(), **options):
    """Decoding, batch mates, causality, packed documents, gradients of every parameter, checkpointing.

    idle: beginnings of the names of parameters that decide nothing (the weights of a choice among one).
    """
    stack = make_stack(specs, layers, **options)
    x = torch.randn(3, tokens, DIM, dtype=torch.float64)
    valid = torch.arange(tokens) >= PADDING
    full = stack(x, mask=valid)
    for block in (1, 3, 5):
        close(decoded(stack, x, block, valid)[valid], full[valid], 1e-9)
        close(decoded(stack, x, block), stack(x), 1e-9)
    for row, first in enumerate(PADDING[:, 0].tolist()):
        close(full[row, first:], stack(x[row : row + 1, first:])[0], 1e-9)

    at = tokens // 2
    y = stack(x.requires_grad_(), mask=valid)
    (gradient,) = torch.autograd.grad(y[:, at].sum(), x)
    assert torch.isfinite(gradient).all()
    assert (gradient[:, at + 1 :] == 0).all() and (gradient[~valid] == 0).all()

    cuts = (4, tokens - 4)
    place = torch.cat([torch.arange(length) for length in cuts])[None]
    segment = torch.arange(2).repeat_interleave(torch.tensor(cuts))[None]
    packed = stack(x[:1], positions=Axis(tokens, 0, given_position=place, segment=segment))
    close(packed, torch.cat([stack(part) for part in x[:1].split(cuts, 1)], 1), 1e-9)

    gradients = []
    for checkpoint in (False, True):
        stack.train().checkpoint(checkpoint)
        stack.zero_grad()
        stack(x, mask=valid).pow(2).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in stack.parameters()])
        for name, parameter in stack.named_parameters():
            assert parameter.grad.abs().sum() > 0 or name.startswith(tuple(idle)), name
    for plain, again in zip(*gradients, strict=True):
        close(again, plain, 1e-9)
