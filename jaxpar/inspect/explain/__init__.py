"""What a step holds, sends, and moves without need."""

from .explanation import Check as Check
from .explanation import Explanation as Explanation
from .findings import explain as explain
