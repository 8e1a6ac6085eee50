"""Whether a strategy took effect."""

from .findings import check as check
from .proof import Finding as Finding
from .proof import Proof as Proof
from .resharding import Move as Move
