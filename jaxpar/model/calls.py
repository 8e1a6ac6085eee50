"""Functions that users hand over: whether they take what jaxpar calls them with, and what of a batch they miss."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..backend.text import did_you_mean
from ..program.libraries import of_library
from .paths import name_of

_BY_NAME = "an item by its name"
_LISTED = 8  # leaves of a batch that an error names


def check_call(fun: Callable[..., Any], what: str, *names: str, note: str = "") -> None:
    """Raise ValueError unless `fun` can be called with so many arguments by position.

    Args:
      fun: the user's function.
      what: whose it is, such as "from_nnx(make=)".
      names: what the arguments are, in order, for the error.
      note: what else to say of them.
    """
    try:
        # Not that of what it wraps, whose arguments a decorator may fill in; nor that of a metaclass, such as NNX's.
        signature = inspect.signature(fun.__init__ if isinstance(fun, type) else fun, follow_wrapped=False)
        if isinstance(fun, type):
            signature = signature.replace(parameters=[*signature.parameters.values()][1:])
    except (TypeError, ValueError):  # of functions in C, which have none
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        name = getattr(fun, "__name__", type(fun).__name__)
        name = what.split("(")[-1].strip("=)") if name == "<lambda>" else name
        call = f"{name}({', '.join(names)})"
        parameters = [p for p in signature.parameters.values() if p.default is p.empty]
        by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        hint = f"write it as def {call}"
        if names and by_name == list(names):
            given = ", ".join(f"{n}={n}" for n in names)
            hint = f"wrap it: lambda {', '.join(names)}: {name}({given})"
        elif isinstance(fun, type):
            hint = f"wrap it: lambda {', '.join(names)}: {name}(...)"
        hint += f" ({note})" * bool(note)
        raise ValueError(f"{what} is {name}{_short(signature)}, and is called as {call}: {error}; {hint}") from None


def described(batch: Any) -> str:
    """A batch by its leaves: "a dict of image float32[8, 28, 28], label int32[8]"."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        return f"an empty {type(batch).__name__}"
    named = [f"{name_of(path)} {kind_of(x)}".strip() for path, x in leaves[:_LISTED]]
    more = f" and {len(leaves) - _LISTED} more" if len(leaves) > _LISTED else ""
    kind = f"a {type(batch).__name__} of " if len(leaves[0][0]) else "one array " * hasattr(batch, "dtype")
    return f"{kind}{', '.join(named)}{more}"


_NUMBERS = (
    jax.errors.ConcretizationTypeError,  # float(x), and bool(x) of an `if`
    jax.errors.TracerArrayConversionError,  # np.asarray(x)
    jax.errors.TracerIntegerConversionError,  # range(x), a list's x-th
)
# How jax, optax and Flax refuse indices and labels that are floating-point numbers. A shape of floats is another fault.
_INTEGERS = re.compile(r"(?<!Shapes )must (?:be|have)[\w ]*\binteger|numpy\.integer.*float|subtypes of integer")


class Advice(NamedTuple):
    """Why an array has no numbers in a trace, and what to write: where its number is asked for, and where it is handed
    to a function of NumPy.
    """

    number: str
    numpy: str


_SHARDED = "it is traced by jax.jit, so that parameters are created sharded, and arrays have no numbers there"
IN_INIT = Advice(
    f"{_SHARDED}; compute this one with NumPy or Python (np.linspace for jnp.linspace; np.random.default_rng(0) for a "
    "random one)",
    f"{_SHARDED}, so that NumPy cannot compute with them; use the function of jax.numpy (jnp.log for np.log), or, if "
    "the array is not drawn from a key, make it with NumPy too",
)
_TRACED_ONCE = (
    "it is traced once for all batches, and arrays have no numbers there; stay with jnp (jnp.where in place of if), "
    "and return as a metric, (value, {'name': x}), what you want to see"
)
IN_LOSS = Advice(_TRACED_ONCE, _TRACED_ONCE)


@contextlib.contextmanager
def traced(what: str, why: Advice) -> Iterator[None]:
    """Around a call of the user's function `what` under a trace: where it asks for the number of an array, ValueError
    says at which line of which layer, and `why` there is none (`IN_INIT`, `IN_LOSS`); so it does where it asks for a
    mesh. Any other error gets line and layer as a note.
    """
    try:
        yield
    except _NUMBERS as error:
        advice = why.numpy if isinstance(error, jax.errors.TracerArrayConversionError) else why.number
        raise ValueError(f"{what} asks for the number of an array{_place(error)}: {advice}") from error
    except (ValueError, RuntimeError) as error:
        # jax's own advice, to enter a mesh, would not help.
        if "PartitionSpec" not in str(error) or " mesh" not in str(error):
            _note_place(error, what)
            raise
        raise ValueError(
            f"{what} places a value on a mesh by a PartitionSpec{_place(error)}: a model sees no mesh, as the strategy "
            "says where values live; leave it out, or build the model with None for each PartitionSpec, for P(None) too"
        ) from error
    except Exception as error:
        _note_place(error, what)
        raise


def _note_place(error: BaseException, what: str) -> None:
    if (place := _place(error)) and not any(place in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"in {what}{place}")


def _place(error: BaseException) -> str:
    """Where it comes from: " at model.py:12, `x @ w`, in layers/1/mlp (MLP)"."""
    file, line = asked_at(error) or ("", 0)
    code, layer = linecache.getline(file, line).strip(), _layer(error)
    return f" at {file}:{line}" + f", `{code}`" * bool(code) + f", in {layer}" * bool(layer) if file else ""


def _layer(error: BaseException) -> str:
    """The innermost module whose method an error comes from: its path in the outermost, where that is known, and its
    class; "" outside of modules.
    """
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [x for found in frames for name, x in found.items() if name == "self" and _is_module(x)]
    modules = [x for x in modules if getattr(x, "scope", x) is not None]  # Linen's have a path when they are bound
    if not modules:
        return ""
    inner, kind = modules[-1], type(modules[-1]).__name__
    path = getattr(inner, "module_name", None) or "/".join(getattr(inner, "path", ()))  # Haiku's and Linen's know it
    if not path:
        holders = (x for found in frames for x in found.values() if _is_module(x) and x is not inner)
        path = next((found for x in holders if (found := _path(x, inner, set()))), "")
    return f"{path} ({kind})" if path else kind


def _is_module(x: Any) -> bool:
    libraries = [sys.modules[name] for name in ("flax.nnx", "flax.linen", "equinox", "haiku") if name in sys.modules]
    return isinstance(x, tuple(library.Module for library in libraries))


def _path(x: Any, wanted: Any, seen: set[int]) -> str:
    """That of a module within another, "" where it is not there."""
    seen.add(id(x))
    if isinstance(x, Mapping):
        items = x.items()
    elif isinstance(x, Sequence) and not isinstance(x, str | bytes):
        items = enumerate(x)
    else:
        items = vars(x).items() if _is_module(x) else ()
    for name, value in items:
        if value is wanted:
            return str(name)
        if id(value) not in seen and (rest := _path(value, wanted, seen)):
            return f"{name}/{rest}"
    return ""


def asked_at(error: BaseException) -> tuple[str, int] | None:
    """File and line of the user's own that an error comes from: the innermost that is of no library."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if not of_library(file)]
    return own[-1] if own else None


@contextlib.contextmanager
def reading(batch: Any, what: str = "the batch") -> Iterator[None]:
    """Around a call of the user's function with a batch: an error of what the batch lacks becomes ValueError with the
    batch's tree; other errors of this kind get the tree as a note.
    """
    try:
        yield
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        if (asked := _asked(error, batch)) is not None:
            hint = "read what is there, or give the data these names"
            if asked == _BY_NAME:
                hint = "make dicts of a loader's tuples, ({'x': x, 'y': y} for x, y in loader), or read them by number"
            at = f"{place}," if (place := _place(error)) else ""
            raise ValueError(f"the loss{at} asks {what} for {asked}, and it is {described(batch)}; {hint}") from error
        if asked is None and _INTEGERS.search(str(error)) and (floats := _floats(batch)):
            raise ValueError(
                f"the loss{_place(error)} needs integers, as labels and indices are, and was given floating-point "
                f"numbers ({error}); {what} has {', '.join(floats)}: make labels and indices integers where the batch "
                "is made, such as labels.astype('int32')"
            ) from error
        error.add_note(f"{what}, a block of its rows: {described(batch)}")
        raise


def _floats(batch: Any) -> list[str]:
    """The floating-point leaves of a batch, "y float32[8]"."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    floats = [(path, x) for path, x in leaves if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]
    return [f"{name_of(path)} {kind_of(x)}".strip() for path, x in floats[:_LISTED]]


def _asked(error: Exception, batch: Any) -> str | None:
    """What was asked of the batch, or of a container in it, where that is what the error is about."""
    inside = list(_containers(batch))
    if isinstance(error, AttributeError):
        return f".{error.name}" if any(error.obj is x for x in inside) else None
    read, frame = _read(error.__traceback__)
    if isinstance(read, Mapping) and not any(read is x for x in inside):
        return None  # of the parameters, say
    here = [x for x in inside if any(value is x for value in frame.values())]
    if isinstance(error, KeyError):
        key = error.args[0] if error.args else None
        mappings = [x for x in here if isinstance(x, Mapping)]
        if mappings and all(key not in x for x in mappings):
            return f"{key!r}{did_you_mean(key, mappings[0])}"
        return None
    for x in here:
        kind = type(x).__name__
        if isinstance(error, IndexError) and str(error) == f"{kind} index out of range":
            return f"an item beyond its {len(x)}"
        if isinstance(error, TypeError) and str(error).startswith(f"{kind} indices must be integers"):
            return _BY_NAME
    return None


def _containers(tree: Any) -> Iterator[Any]:
    """The dicts, tuples and lists of a tree."""
    if isinstance(tree, Mapping):
        yield tree
        for x in tree.values():
            yield from _containers(x)
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        yield tree
        for x in tree:
            yield from _containers(x)


def _read(traceback: TracebackType | None) -> tuple[Any, Mapping[str, Any]]:
    """What was read from where an error comes from, `x` of `x[...]`, None where that is no name; and all variables."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return None, {}
    frame = traceback.tb_frame
    found = frame.f_locals
    line, end, start, stop = next(itertools.islice(frame.f_code.co_positions(), traceback.tb_lasti // 2, None))
    if line is None or line != end:
        return None, found
    text = linecache.getline(frame.f_code.co_filename, line).encode()[start:stop].decode(errors="replace")
    name = text.partition("[")[0].strip()
    return found.get(name, frame.f_globals.get(name)), found


def kind_of(x: Any) -> str:
    """What a value is, for errors: "float32[8, 4]", "None", "a str"."""
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else "None" if x is None else f"a {type(x).__name__}"


def _short(signature: inspect.Signature) -> str:
    """Without annotations and what is returned."""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))
