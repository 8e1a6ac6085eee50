"""Llama: the model, its adapters, and conversion of its weights and configuration from and to Hugging Face."""

from .lora import LoRALinear as LoRALinear
from .lora import PeftConfig as PeftConfig
from .lora import is_adapter as is_adapter
from .model import RULES as RULES
from .model import SIZES as SIZES
from .model import Attention as Attention
from .model import Config as Config
from .model import Layer as Layer
from .model import Llama as Llama
from .model import RMSNorm as RMSNorm
from .model import SwiGLU as SwiGLU
from .model import chunked_loss as chunked_loss
from .model import linear as linear
from .model import loss as loss
from .model import rope as rope
from .model import rope_table as rope_table
from .weights import from_hf as from_hf
from .weights import save_adapters as save_adapters
from .weights import save_hf as save_hf
from .weights import to_hf as to_hf
from .weights import with_adapters as with_adapters
