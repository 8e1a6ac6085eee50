"""Models to train and to read; nothing in jaxpar depends on them."""

from . import llama as llama
from .llama import Llama as Llama
