"""Whether a loss couples the rows of its batch: what spreading them over replicas and microbatches would change."""

from . import calls as calls
from . import lookups as lookups
from . import loops as loops
from . import sorts as sorts
from .check import check_coupling as check_coupling
