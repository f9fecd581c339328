"""Everything made of many heads: attention heads and how they are computed, mixed, shared, chosen and converted."""

from manyheads.attention import Attention
from manyheads.core.cache import Cache
from manyheads.core.cost import Cost
from manyheads.core.flow import Links
from manyheads.core.mask import Axis, Mask
from manyheads.core.part import OptionError, Site
from manyheads.core.spec import Spec, SpecError

__version__ = "0.1.0"

__all__ = ["Attention", "Axis", "Cache", "Cost", "Links", "Mask", "OptionError", "Site", "Spec", "SpecError"]
