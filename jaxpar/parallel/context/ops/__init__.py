"""Attention of a sequence that is split over a mesh axis: from gathered keys, by heads, or on a ring."""

from .gather import by_blocks as by_blocks
from .gather import gather_attention as gather_attention
from .halo import from_chunks as from_chunks
from .halo import halo_bytes as halo_bytes
from .halo import with_neighbours as with_neighbours
from .order import Ring as Ring
from .order import from_zigzag as from_zigzag
from .order import order_of as order_of
from .order import positions as positions
from .order import to_zigzag as to_zigzag
from .rearrange import rearrange_positions as rearrange_positions
from .rearrange import rounds_of as rounds_of
from .ring import by_rounds as by_rounds
from .ring import ring_attention as ring_attention
from .rounds import Rounds as Rounds
from .rounds import ring_hops as ring_hops
from .score_function import ScoreFunction as ScoreFunction
from .score_function import scored_attention as scored_attention
from .traffic import gather_bytes as gather_bytes
from .traffic import ring_bytes as ring_bytes
from .traffic import ulysses_bytes as ulysses_bytes
from .traffic import usp_bytes as usp_bytes
from .ulysses import attend_by_heads as attend_by_heads
from .ulysses import ulysses_attention as ulysses_attention
from .ulysses import usp_attention as usp_attention
