"""Many things made one, or fewer: tokens pooled and merged, features of heads, layers and models fused."""

from manyheads.aggregate.afa import (
    ChannelAttention,
    LayerFusion,
    ModelMix,
    PairFusion,
    SharedStream,
    SpatialAttention,
    ordered_weights,
    render,
)
from manyheads.aggregate.aggregator import (
    Aggregator,
    Options,
    Pooled,
    Streamed,
    build,
    find_aggregator,
    read_aggregator,
    register_aggregator,
)
from manyheads.aggregate.anchor import AnchorReader, Grounding, box_target, grounding_loss, grounding_map, point
from manyheads.aggregate.atc import ATC
from manyheads.aggregate.catanet import Centres, ContentAttention, ContentBlock, PatchAttention
from manyheads.aggregate.httm import HTTM, HeadMerge, keep_outliers
from manyheads.aggregate.merger import Merger, MergerOptions, means
from manyheads.aggregate.merging import Merging, merging
from manyheads.aggregate.prune_merge import PruneMerge, TwoScaleStem, received
from manyheads.aggregate.volume import Calibration, Volume, loudness, pressure, roughness, specialisation

__all__ = [
    "ATC",
    "HTTM",
    "Aggregator",
    "AnchorReader",
    "Calibration",
    "Centres",
    "ChannelAttention",
    "ContentAttention",
    "ContentBlock",
    "Grounding",
    "HeadMerge",
    "LayerFusion",
    "Merger",
    "MergerOptions",
    "Merging",
    "ModelMix",
    "Options",
    "PairFusion",
    "PatchAttention",
    "Pooled",
    "PruneMerge",
    "SharedStream",
    "SpatialAttention",
    "Streamed",
    "TwoScaleStem",
    "Volume",
    "box_target",
    "build",
    "find_aggregator",
    "grounding_loss",
    "grounding_map",
    "keep_outliers",
    "loudness",
    "means",
    "merging",
    "ordered_weights",
    "point",
    "pressure",
    "read_aggregator",
    "received",
    "register_aggregator",
    "render",
    "roughness",
    "specialisation",
]
