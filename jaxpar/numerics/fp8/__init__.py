"""Products of layers in FP8: the choice of the products, and the product with its derivatives."""

from .products import in_fp8 as in_fp8
from .products import of_blocks as of_blocks
