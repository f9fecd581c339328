"""Measures of heads, one function each.

Those of maps and tokens take a `Look` (one pass of one layer); `measure` runs a model and averages them over queries.
Those of outputs, weights and importance take a model. All return one number a head, undefined kept apart from zero.
"""

from manyheads.inspect.measures.behaviour import Retrieval, retrieval, successor, unembedding
from manyheads.inspect.measures.importance import ablation, importance, next_token_loss
from manyheads.inspect.measures.maps import (
    Behind,
    First,
    confidence,
    distance,
    distance_profile,
    distance_spread,
    entropy,
    local_mass,
    masses,
    output_size,
    position_bias,
    previous_token,
    self_mass,
    sink_mass,
)
from manyheads.inspect.measures.redundancy import cka, clusters, correlation, js_divergence
from manyheads.inspect.measures.table import HeadTable, Measure, measure
from manyheads.inspect.measures.tokens import Matching, duplicate_token, induction, on_tokens, repeated
from manyheads.inspect.measures.weights import (
    Spectrum,
    effective_rank,
    head_weights,
    marchenko_pastur,
    qk_rank,
    singular_values,
    stable_rank,
)

__all__ = [
    "Behind", "First", "HeadTable", "Matching", "Measure", "Retrieval", "Spectrum", "ablation", "cka", "clusters",
    "confidence", "correlation", "distance", "distance_profile", "distance_spread", "duplicate_token",
    "effective_rank", "entropy", "head_weights", "importance", "induction", "js_divergence", "local_mass",
    "marchenko_pastur", "masses", "measure", "next_token_loss", "on_tokens", "output_size", "position_bias",
    "previous_token", "qk_rank", "repeated", "retrieval", "self_mass", "singular_values", "sink_mass", "stable_rank",
    "successor", "unembedding",
]  # fmt: skip
