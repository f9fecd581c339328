"""Layers made into models."""

from manyheads.stack.block import Block
from manyheads.stack.config import ManyheadsConfig
from manyheads.stack.decoder import Decoder
from manyheads.stack.encoder import Encoder
from manyheads.stack.ffn import FFNS, make_ffn
from manyheads.stack.pretrained import ManyheadsForCausalLM
from manyheads.stack.stack import Stack

__all__ = ["FFNS", "Block", "Decoder", "Encoder", "ManyheadsConfig", "ManyheadsForCausalLM", "Stack", "make_ffn"]
