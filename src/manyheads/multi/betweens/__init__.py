"""What may stand between trunk and heads, a file each."""

from manyheads.multi.betweens.ati_net import ATINet
from manyheads.multi.betweens.lasso import Lasso
from manyheads.multi.betweens.medusa_ufl import MedusaUFL
from manyheads.multi.betweens.mmoe import MMoE

__all__ = ["ATINet", "Lasso", "MMoE", "MedusaUFL"]
