"""Check whether a loss couples the rows of its batch, so that spreading them over replicas would change its result."""

from . import calls as calls
from . import lookups as lookups
from . import loops as loops
from . import sorts as sorts
from .check import check_coupling as check_coupling
