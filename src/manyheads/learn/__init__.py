"""Losses of many heads that need no labels: functions of tensors, for encoders and training loops of any kind.

>>> z = mh.learn.Projections(512)(encoder(views))   # [heads, B, width]
>>> mh.learn.adaptive_simclr(*z.chunk(2, 1), mh.learn.Temperature(128)).backward()
"""

from manyheads.learn.contrastive import (
    Projections,
    Temperature,
    adaptive_barlow,
    adaptive_contrast,
    adaptive_simclr,
    adaptive_simsiam,
    omega,
)
from manyheads.learn.dense import Calibration, Dense, paired_contrast
from manyheads.learn.peers import from_peers, most_confident, near_peers
from manyheads.learn.relations import Projected, relation_loss

__all__ = [
    "Calibration",
    "Dense",
    "Projected",
    "Projections",
    "Temperature",
    "adaptive_barlow",
    "adaptive_contrast",
    "adaptive_simclr",
    "adaptive_simsiam",
    "from_peers",
    "most_confident",
    "near_peers",
    "omega",
    "paired_contrast",
    "relation_loss",
]
