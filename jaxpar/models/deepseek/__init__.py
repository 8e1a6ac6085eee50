"""DeepSeek-V3: the model, and its weights and configuration as Hugging Face keeps them."""

from .config import SIZES as SIZES
from .config import Config as Config
from .model import RULES as RULES
from .model import DeepSeek as DeepSeek
from .model import balanced as balanced
from .model import loss as loss
from .weights import from_hf as from_hf
from .weights import save_hf as save_hf
from .weights import to_hf as to_hf
