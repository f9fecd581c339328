"""Layers made into models."""

from manyheads.stack.block import Block
from manyheads.stack.callback import ScheduleCallback
from manyheads.stack.config import ManyheadsConfig
from manyheads.stack.decoder import Decoder
from manyheads.stack.encoder import Encoder
from manyheads.stack.ffn import make_ffn
from manyheads.stack.melt import MELT
from manyheads.stack.pretrained import ManyheadsForCausalLM
from manyheads.stack.residual import MHAR, to_delta
from manyheads.stack.stack import Stack

__all__ = [
    "MELT",
    "MHAR",
    "Block",
    "Decoder",
    "Encoder",
    "ManyheadsConfig",
    "ManyheadsForCausalLM",
    "ScheduleCallback",
    "Stack",
    "make_ffn",
    "to_delta",
]
