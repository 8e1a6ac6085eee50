"""Models to train and to read, by name; no step, strategy or trainer depends on them."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
from flax import nnx

from ..backend.removed import removed
from ..backend.text import did_you_mean
from ..model.model import Model
from ..model.nnx import from_nnx
from . import gpt as gpt
from . import llama as llama
from . import mixtral as mixtral
from . import mlp as mlp
from . import resnet as resnet
from .gpt import GPT as GPT
from .llama import Llama as Llama
from .mixtral import Mixtral as Mixtral
from .mlp import MLP as MLP
from .parts import text as text
from .resnet import ResNet as ResNet

Kind = Literal["text", "images"]


@dataclass(frozen=True)
class Named:
    """A model with a name: its sizes and what can be known before any array exists.

    Attributes:
      name: one of `NAMES`.
      kind: "text" (batches {"tokens"}) or "images" (batches {"image", "label"}).
      config: the sizes, a dataclass of the model's own file, with the sources.
      model: the `jp.Model`, with its loss.
      generate: `generate(module, prompt, count, key)` continues text; None where there is none to continue.
    """

    name: str
    kind: Kind
    config: Any
    model: Model
    generate: Callable[..., jax.Array] | None

    @property
    def trainable(self) -> Callable[[str], bool] | None:
        """Which paths learn, for `make_train_step`: of a model with adapters these alone. None for all."""
        return llama.is_adapter if getattr(self.config, "lora", 0) else None

    @property
    def parameters(self) -> int:
        """The exact number of parameters."""
        return self.config.parameters

    def example(self, rows: int, length: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a training batch of `rows`; `length` is the number of positions of text."""
        return self.config.example(rows, length)

    def flops(self, rows: int, length: int = 0) -> float:
        """Floating-point operations of one step on such a batch, forward and backward, a multiply-add being two."""
        return self.config.flops(rows, length)


_FAMILIES: list[tuple[Any, Callable[..., nnx.Module], Kind]] = [
    (llama, Llama, "text"),
    (mixtral, Mixtral, "text"),
    (gpt, GPT, "text"),
    (resnet, ResNet, "images"),
    (mlp, MLP, "images"),
]
_FAMILY = {name: family for family in _FAMILIES for name in family[0].SIZES}
NAMES = tuple(_FAMILY)


def named(name: str, **changes: Any) -> Named:
    """The model of that name, with other sizes where `changes` says so, such as `dropout=0.1` or `classes=10`.

    It allocates nothing, however large the model. Raises ValueError for a name that is not one of `NAMES`, and for a
    size that the model does not have or cannot have.
    """
    if says := removed(f"model {name}"):
        raise ValueError(says)
    if name not in _FAMILY:
        raise ValueError(f"there is no model {name!r}{_nearest(name, NAMES)}")
    family, module, kind = _FAMILY[name]
    sizes = [field.name for field in dataclasses.fields(family.Config)]
    for change in changes:
        if change not in sizes:
            raise ValueError(f"{name} has no size {change!r}{_nearest(change, sizes)}")
    config = dataclasses.replace(family.SIZES[name], **changes)
    model = from_nnx(lambda rngs: module(config, rngs=rngs), family.loss, family.RULES)
    return Named(name, kind, config, model, text.generate if kind == "text" else None)


def _nearest(given: str, known: Any) -> str:
    return did_you_mean(given, known, "; {}") or f"; use one of {', '.join(known)}"


if not TYPE_CHECKING:  # to which any name would then be one of ours

    def __getattr__(name: str) -> Any:
        """Say what to use instead of a name that was removed."""
        if says := removed(f"jaxpar.models.{name}"):
            raise ImportError(says)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
