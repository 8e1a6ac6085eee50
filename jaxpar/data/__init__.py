"""What to train on: text as bytes or tokens, images, rows of any data set; and how a trainer takes it."""

from ..model.contents import check_ids as check_ids
from .corpus import Batch as Batch
from .corpus import Corpus as Corpus
from .corpus import Source as Source
from .corpus import Text as Text
from .corpus import batches as batches
from .corpus import byte_corpus as byte_corpus
from .corpus import pad_rows as pad_rows
from .corpus import text as text
from .corpus import windows as windows
from .prefetch import Ahead as Ahead
from .rows import RowBatches as RowBatches
from .rows import Rows as Rows
from .sampler import Position as Position
from .sampler import Sampler as Sampler
from .tokens import Windows as Windows
from .tokens import token_ids as token_ids
