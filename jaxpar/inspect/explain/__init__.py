"""Explanations of a step: the memory that it uses, what it sends, and which of that is unnecessary."""

from .explanation import Check as Check
from .explanation import Explanation as Explanation
from .findings import explain as explain
