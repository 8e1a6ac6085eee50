"""Make large logits of a loss for a chunk of its tokens at a time."""

from .logits import Logits as Logits
from .logits import chunked as chunked
