"""Collectives of NCCL by name, inside and outside `shard_map`, and what keeps them in one order on CPU devices."""

from types import ModuleType as _Module

from .nccl import all_gather as all_gather
from .nccl import all_reduce as all_reduce
from .nccl import all_to_all as all_to_all
from .nccl import barrier as barrier
from .nccl import broadcast as broadcast
from .nccl import gather as gather
from .nccl import reduce as reduce
from .nccl import reduce_scatter as reduce_scatter
from .nccl import reduce_scatter_as as reduce_scatter_as
from .nccl import scatter as scatter
from .nccl import scatter_pieces as scatter_pieces
from .nccl import send_recv as send_recv
from .nccl import shift as shift
from .ranks import Axes as Axes
from .ranks import Ranks as Ranks
from .ranks import index as index
from .ranks import on as on
from .reductions import OPS as OPS
from .ring import ring_all_reduce as ring_all_reduce


def __dir__() -> list[str]:
    """The collectives, without the files that they are in."""
    return [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _Module)]
