"""DeepSeek-V3 as a model of one's own, and by its names: `named("deepseek-v3")`, as jaxpar has its models."""

import dataclasses
from typing import Any

import jaxpar as jp
from jaxpar import models
from jaxpar.models.parts import text

from .config import SIZES as SIZES
from .config import Config as Config
from .model import RULES as RULES
from .model import DeepSeek as DeepSeek
from .model import balanced as balanced
from .model import loss as loss


def named(name: str, **changes: Any) -> models.Named:
    """The model of that name, with other sizes where `changes` says so; of jaxpar's own names, jaxpar's."""
    if name not in SIZES:
        return models.named(name, **changes)
    config = dataclasses.replace(SIZES[name], **changes)
    model = jp.from_nnx(lambda rngs: DeepSeek(config, rngs=rngs), loss, RULES)
    return models.Named(name, "text", config, dataclasses.replace(model, optimizer=balanced), text.generate)
