"""What each head does in a running model: captured, measured, taken out, changed."""

from manyheads.inspect import measures
from manyheads.inspect.ablate import Move, ablate, steer
from manyheads.inspect.bottleneck import Bottleneck
from manyheads.inspect.calibrate import calibrate
from manyheads.inspect.capture import Captured, CaptureError, Tape, capture, watching
from manyheads.inspect.gaze import look_at
from manyheads.inspect.inject import PatternLayer, inject
from manyheads.inspect.layers import Layer, layers_of
from manyheads.inspect.look import Look
from manyheads.inspect.measures import HeadTable, measure
from manyheads.inspect.redistribute import redistribute
from manyheads.inspect.roles import ROLES, Role, roles

__all__ = [
    "ROLES", "Bottleneck", "CaptureError", "Captured", "HeadTable", "Layer", "Look", "Move", "PatternLayer", "Role",
    "Tape", "ablate", "calibrate", "capture", "inject", "layers_of", "look_at", "measure", "measures", "redistribute",
    "roles", "steer", "watching",
]  # fmt: skip
