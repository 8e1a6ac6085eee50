"""Mixtral and Qwen3's mixtures: the model, and conversion of its weights and configuration from and to Hugging Face."""

from .model import RULES as RULES
from .model import SIZES as SIZES
from .model import Config as Config
from .model import Experts as Experts
from .model import Layer as Layer
from .model import Mixtral as Mixtral
from .model import Mixture as Mixture
from .model import loss as loss
from .model import routed_loss as routed_loss
from .weights import from_hf as from_hf
from .weights import save_hf as save_hf
from .weights import to_hf as to_hf
