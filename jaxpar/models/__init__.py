"""Models by name, to train and to read as examples: `named("llama-tiny")`.

Each model is a file or folder with its sizes, its module in plain Flax NNX, its loss and its rules for `tensor`. No
step, strategy or trainer depends on them.
"""

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
    """A model of `NAMES`: its sizes, its module and loss, and its costs, all known before any array exists.

    Attributes:
      name: one of `NAMES`.
      kind: "text" (batches {"tokens"}) or "images" (batches {"image", "label"}).
      config: the sizes, the dataclass `Config` of the model's file, which names their sources.
      model: the `jp.Model`: how parameters are initialized, the loss, and the rules for `tensor`.
      generate: `generate(module, prompt, count, key)` continues text; None for models of images.
    """

    name: str
    kind: Kind
    config: Any
    model: Model
    generate: Callable[..., jax.Array] | None

    @property
    def trainable(self) -> Callable[[str], bool] | None:
        """The predicate for `make_train_step(trainable=)`: true of adapters only, or None if all parameters train."""
        return llama.is_adapter if getattr(self.config, "lora", 0) else None

    @property
    def parameters(self) -> int:
        """The exact number of parameters."""
        return self.config.parameters

    def example(self, rows: int, length: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a training batch of `rows` rows; `length` is the number of positions of a text."""
        return self.config.example(rows, length)

    def flops(self, rows: int, length: int = 0) -> float:
        """Return the floating-point operations of one step, forward and backward; a multiply-add counts as two."""
        return self.config.flops(rows, length)


# Every family of models: (Python module with `Config`, `SIZES`, `RULES` and `loss`; NNX module; kind).
_FAMILIES: list[tuple[Any, Callable[..., nnx.Module], Kind]] = [
    (llama, Llama, "text"),
    (mixtral, Mixtral, "text"),
    (gpt, GPT, "text"),
    (resnet, ResNet, "images"),
    (mlp, MLP, "images"),
]
# The family of each name.
_FAMILY = {name: family for family in _FAMILIES for name in family[0].SIZES}
NAMES = tuple(_FAMILY)


def named(name: str, **changes: Any) -> Named:
    """Return the model of this name, with changed sizes.

    Args:
      name: one of `NAMES`.
      changes: sizes that differ from the named model's, such as `dropout=0.1` or `classes=10`.

    Returns:
      The model. Nothing is allocated, however large it is.

    Raises:
      ValueError: the name is not one of `NAMES`, or the model does not have or cannot have such a size.
    """
    if advice := removed(f"model {name}"):
        raise ValueError(advice)
    if name not in _FAMILY:
        base, comma, changes_in_name = name.partition(",")
        if comma and base in _FAMILY:  # the command line has sizes behind the name
            raise ValueError(f'{name!r} is a name with sizes; pass these apart: named("{base}", {changes_in_name})')
        raise ValueError(f"there is no model {name!r}{_suggest(name, NAMES)}")
    family, module, kind = _FAMILY[name]
    sizes = [field.name for field in dataclasses.fields(family.Config)]
    for change in changes:
        if change not in sizes:
            raise ValueError(f"{name} has no size {change!r}{_suggest(change, sizes)}")
    # `replace` runs the checks of `Config.__post_init__` again.
    config = dataclasses.replace(family.SIZES[name], **changes)
    model = from_nnx(lambda rngs: module(config, rngs=rngs), family.loss, family.RULES)
    return Named(name, kind, config, model, text.generate if kind == "text" else None)


def _suggest(name: str, valid_names: Any) -> str:
    """Return the end of an error about an unknown name: the closest valid name, or all of them."""
    return did_you_mean(name, valid_names, "; {}") or f"; use one of {', '.join(valid_names)}"


if not TYPE_CHECKING:  # a type checker would take a module `__getattr__` to mean that every name exists

    def __getattr__(name: str) -> Any:
        """Raise an ImportError that says what to use instead, if the name was removed in an earlier version."""
        if advice := removed(f"jaxpar.models.{name}"):
            raise ImportError(advice)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
