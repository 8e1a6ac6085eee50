"""Training data: text as bytes or tokens, images, rows of any data set, and streams of batches for a trainer.

corpus, tokens, images    sources: batches by number, and held-out batches
chats, tokenizer          chats and texts in JSONL, by the tokenizer of a model's folder, packed into rows
rows, sampler             any data set with rows by index, in shuffled epochs
streams, positions        everything that a trainer accepts as data, and its position in a checkpoint
prefetch                  batches read ahead in a thread
"""

from ..model.contents import check_ids as check_ids
from .chats import Chat as Chat
from .chats import Packed as Packed
from .chats import chat as chat
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
from .tokenizer import Tokenizer as Tokenizer
from .tokens import Windows as Windows
from .tokens import token_ids as token_ids
