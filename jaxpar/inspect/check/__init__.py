"""Checks of a step: whether its strategy took effect, and whether its loss couples rows of different blocks."""

from .dealing import Dealing as Dealing
from .dealing import RowCheck as RowCheck
from .dealing import check_rows as check_rows
from .findings import check as check
from .proof import Finding as Finding
from .proof import Proof as Proof
from .resharding import Move as Move
