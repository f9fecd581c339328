"""What each head does in a running model: captured, measured, taken out, changed."""

from manyheads.inspect import measures
from manyheads.inspect.ablate import Move, ablate, steer
from manyheads.inspect.capture import Captured, CaptureError, Tape, capture, watching
from manyheads.inspect.layers import Layer, layers_of
from manyheads.inspect.look import Look
from manyheads.inspect.measures import HeadTable, measure
from manyheads.inspect.roles import ROLES, Role, roles

__all__ = [
    "ROLES", "CaptureError", "Captured", "HeadTable", "Layer", "Look", "Move", "Role", "Tape", "ablate", "capture",
    "layers_of", "measure", "measures", "roles", "steer", "watching",
]  # fmt: skip
