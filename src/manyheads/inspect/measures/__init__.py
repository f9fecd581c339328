"""Measures of heads, one function each.

Those of maps and tokens take a `Look` (one pass of one layer); `measure` runs a model and averages them over queries.
Those of outputs, weights and importance take a model. All return one number a head, undefined kept apart from zero.
"""

from manyheads.inspect.measures import depth, far, sinks, truncation
from manyheads.inspect.measures.behaviour import Retrieval, retrieval, successor, unembedding
from manyheads.inspect.measures.frequency import (
    Spectra,
    amplitudes,
    curvature,
    direction,
    landscape,
    position_variance,
    spectra,
)
from manyheads.inspect.measures.gaze import Gaze, Trajectory, box, gaze, panels, trajectory
from manyheads.inspect.measures.grid import (
    Grid,
    Patterns,
    agreement,
    hop_profile,
    mean_hop,
    near_mass,
    patterns,
    ranks,
    removals,
    special_mass,
)
from manyheads.inspect.measures.importance import Moved, ablation, importance, least_important, next_token_loss
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
from manyheads.inspect.measures.needle import (
    Needles,
    discoveries,
    knock_out,
    layer_test,
    matched,
    needle_recall,
    needles,
    retrieval_heads,
)
from manyheads.inspect.measures.ordinals import ordinals
from manyheads.inspect.measures.pairs import (
    FewHeads,
    PairFeatures,
    Probe,
    few_heads,
    fit_probe,
    mas,
    pair_features,
)
from manyheads.inspect.measures.redundancy import cka, clusters, correlation, js_divergence
from manyheads.inspect.measures.relevance import (
    Pattern,
    offset,
    relevance,
    same_sentence,
    same_token,
    stands_out,
    weight_importance,
)
from manyheads.inspect.measures.saliency import (
    cell_masks,
    cross_layers,
    cross_maps,
    deletion,
    explained,
    gradient_saliency,
    mean_map,
    perturbation,
    to_frames,
)
from manyheads.inspect.measures.switched import sahara, ships, subspace_angle, switched_off
from manyheads.inspect.measures.table import HeadTable, Measure, measure
from manyheads.inspect.measures.tokens import Matching, duplicate_token, induction, on_tokens, repeated
from manyheads.inspect.measures.visual import VisualHeads, sink_channels, sink_values, visual_heads
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
    "Behind", "FewHeads", "First", "Gaze", "Grid", "HeadTable", "Matching", "Measure", "Moved", "Needles",
    "PairFeatures", "Pattern", "Patterns", "Probe", "Retrieval", "Spectra", "Spectrum", "Trajectory", "VisualHeads",
    "ablation", "agreement", "amplitudes", "box", "cell_masks", "cka", "clusters", "confidence", "correlation",
    "cross_layers", "cross_maps", "curvature", "deletion", "depth", "direction", "discoveries", "distance",
    "distance_profile", "distance_spread", "duplicate_token", "effective_rank", "entropy", "explained", "far",
    "few_heads", "fit_probe", "gaze", "gradient_saliency", "head_weights", "hop_profile", "importance", "induction",
    "js_divergence", "knock_out", "landscape", "layer_test", "least_important", "local_mass", "marchenko_pastur",
    "mas", "masses", "matched", "mean_hop", "mean_map", "measure", "near_mass", "needle_recall", "needles",
    "next_token_loss", "offset", "on_tokens", "ordinals", "output_size", "pair_features", "panels", "patterns",
    "perturbation", "position_bias", "position_variance", "previous_token", "qk_rank", "ranks", "relevance",
    "removals", "repeated", "retrieval", "retrieval_heads", "sahara", "same_sentence", "same_token", "self_mass",
    "ships", "singular_values", "sink_channels", "sink_mass", "sink_values", "sinks", "special_mass", "spectra",
    "stable_rank", "stands_out", "subspace_angle", "successor", "switched_off", "to_frames", "trajectory",
    "truncation", "unembedding", "visual_heads", "weight_importance",
]  # fmt: skip
