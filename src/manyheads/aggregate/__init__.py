"""Many things made one, or fewer: tokens pooled and merged, features of layers, heads, neighbours and models fused.

>>> pool = mh.aggregate.build("abmil(heads=4, gated=true)", 64)
>>> pool(x, mask).out  # [B, 1, 4·64] of x [B, N, 64]
>>> mh.aggregate.build("t3time(count=3)", 64).mix([one, two, three])  # of tensors [B, …, 64]
>>> with mh.aggregate.merging(vit, "atc(keep=0.7)"): ...

`Options` and `Aggregator` are the contract (`aggregate/aggregator.py`); there is a file for each kind.
"""

from manyheads.aggregate.abmil import ABMIL
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
from manyheads.aggregate.caface import CAFace
from manyheads.aggregate.catanet import Centres, ContentAttention, ContentBlock, PatchAttention
from manyheads.aggregate.class_tokens import ClassTokens, Memory, distil_loss
from manyheads.aggregate.dca import DCA
from manyheads.aggregate.fuse import fuse
from manyheads.aggregate.ggem import GGeM
from manyheads.aggregate.groups import as_pyg, dense, pool_groups
from manyheads.aggregate.httm import HTTM, HeadMerge, keep_outliers
from manyheads.aggregate.lcm import LCM
from manyheads.aggregate.maxpoolbert import MaxPoolBERT
from manyheads.aggregate.merger import Merger, MergerOptions, means
from manyheads.aggregate.merging import Merging, merging
from manyheads.aggregate.pna import PNA
from manyheads.aggregate.prune_merge import PruneMerge, TwoScaleStem, received
from manyheads.aggregate.stamp import STAMP, CrissCross, STAMPAdapter
from manyheads.aggregate.t3time import ConditionGate, ScaledResidual, T3Time
from manyheads.aggregate.volume import Calibration, Volume, loudness, pressure, roughness, specialisation

__all__ = [
    "ABMIL",
    "ATC",
    "DCA",
    "HTTM",
    "LCM",
    "PNA",
    "STAMP",
    "Aggregator",
    "AnchorReader",
    "CAFace",
    "Calibration",
    "Centres",
    "ChannelAttention",
    "ClassTokens",
    "ConditionGate",
    "ContentAttention",
    "ContentBlock",
    "CrissCross",
    "GGeM",
    "Grounding",
    "HeadMerge",
    "LayerFusion",
    "MaxPoolBERT",
    "Memory",
    "Merger",
    "MergerOptions",
    "Merging",
    "ModelMix",
    "Options",
    "PairFusion",
    "PatchAttention",
    "Pooled",
    "PruneMerge",
    "STAMPAdapter",
    "ScaledResidual",
    "SharedStream",
    "SpatialAttention",
    "Streamed",
    "T3Time",
    "TwoScaleStem",
    "Volume",
    "as_pyg",
    "box_target",
    "build",
    "dense",
    "distil_loss",
    "find_aggregator",
    "fuse",
    "grounding_loss",
    "grounding_map",
    "keep_outliers",
    "loudness",
    "means",
    "merging",
    "ordered_weights",
    "point",
    "pool_groups",
    "pressure",
    "read_aggregator",
    "received",
    "register_aggregator",
    "render",
    "roughness",
    "specialisation",
]
