"""What to train on: text as bytes or tokens, images; and how a trainer takes it."""

from .corpus import Batch as Batch
from .corpus import Corpus as Corpus
from .corpus import Source as Source
from .corpus import Text as Text
from .corpus import batches as batches
from .corpus import byte_corpus as byte_corpus
from .corpus import pad_rows as pad_rows
from .corpus import text as text
from .corpus import windows as windows
