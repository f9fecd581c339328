"""What each head does in a running model: captured, measured, taken out, changed."""

from manyheads.inspect import measures, signals
from manyheads.inspect.ablate import Move, ablate, steer
from manyheads.inspect.bottleneck import Bottleneck
from manyheads.inspect.calibrate import calibrate
from manyheads.inspect.capture import Captured, CaptureError, Tape, capture, watching
from manyheads.inspect.contextual import (
    Directions,
    Example,
    bake_focus,
    contextual_scores,
    focus,
    train_focus,
)
from manyheads.inspect.explanation import Row, validate
from manyheads.inspect.flow_routes import Routes, flow_share, routes
from manyheads.inspect.gaze import look_at
from manyheads.inspect.hidden import Hidden, attributions, hidden_attention, rollout
from manyheads.inspect.inject import PatternLayer, inject
from manyheads.inspect.layers import Layer, layers_of
from manyheads.inspect.look import Look
from manyheads.inspect.measures import HeadTable, measure
from manyheads.inspect.redistribute import redistribute
from manyheads.inspect.reweight import Between, hide, split_softmax
from manyheads.inspect.roles import ROLES, Role, roles
from manyheads.inspect.rotary import rotary_pairs, without_pairs

__all__ = [
    "ROLES", "Between", "Bottleneck", "CaptureError", "Captured", "Directions", "Example", "HeadTable", "Hidden",
    "Layer", "Look", "Move", "PatternLayer", "Role", "Routes", "Row", "Tape", "ablate", "attributions", "bake_focus",
    "calibrate", "capture", "contextual_scores", "flow_share", "focus", "hidden_attention", "hide", "inject",
    "layers_of", "look_at", "measure", "measures", "redistribute", "roles", "rollout", "rotary_pairs", "routes",
    "signals", "split_softmax", "steer", "train_focus", "validate", "watching", "without_pairs",
]  # fmt: skip
