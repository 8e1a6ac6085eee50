"""Errors about the functions that users pass to jaxpar, in terms of the user's code.

    check_call   before any call: does the function accept the arguments that jaxpar passes?
    traced       around a call under a trace: which line of which layer asked for a value or a mesh, and what to write
    reading      around a call with a batch: which leaf did the function ask for that the batch does not have?

An error from deep inside Flax or JAX says none of this. Here it is read from the frames of the traceback.
"""

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
_LISTED = 8  # the number of leaves of a batch that an error lists


def check_call(fun: Callable[..., Any], source: str, *names: str, note: str = "") -> None:
    """Raise ValueError unless `fun` can be called with these arguments by position.

    Args:
      source: the name of the argument that passes it, such as "from_nnx(make=)".
      names: the names of the arguments, in order, for the error.
      note: an addition to the hint.
    """
    try:
        # A decorator may fill in arguments: read the wrapper's signature and not the wrapped function's. For a class,
        # read the signature of its __init__, because a metaclass such as NNX's shows another one.
        signature = inspect.signature(fun.__init__ if isinstance(fun, type) else fun, follow_wrapped=False)
        if isinstance(fun, type):
            # An instance is made without `self`.
            signature = signature.replace(parameters=[*signature.parameters.values()][1:])
    except (TypeError, ValueError):  # functions in C have no signature
        return
    try:
        # The names stand for the arguments: `bind` does not look at values.
        signature.bind(*names)
    except TypeError as error:
        # A lambda is named by the argument that passes it: "from_nnx(make=)" gives "make".
        name = getattr(fun, "__name__", type(fun).__name__)
        name = source.split("(")[-1].strip("=)") if name == "<lambda>" else name
        call = f"{name}({', '.join(names)})"
        parameters = [p for p in signature.parameters.values() if p.default is p.empty]
        by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        hint = f"write it as def {call}"
        # The function takes these arguments by keyword alone.
        if names and by_name == list(names):
            keywords = ", ".join(f"{n}={n}" for n in names)
            hint = f"wrap it: lambda {', '.join(names)}: {name}({keywords})"
        elif isinstance(fun, type):
            hint = f"wrap it: lambda {', '.join(names)}: {name}(...)"
        hint += f" ({note})" * bool(note)
        raise ValueError(
            f"{source} is {name}{_without_annotations(signature)}, and is called as {call}: {error}; {hint}"
        ) from None


def describe(batch: Any) -> str:
    """Describe a batch by its leaves: "a dict of image float32[8, 28, 28], label int32[8]"."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        return f"an empty {type(batch).__name__}"
    named = [f"{name_of(path)} {kind_of(x)}".strip() for path, x in leaves[:_LISTED]]
    more = f" and {len(leaves) - _LISTED} more" if len(leaves) > _LISTED else ""
    # A leaf with an empty path is the whole batch.
    kind = f"a {type(batch).__name__} of " if len(leaves[0][0]) else "one array " * hasattr(batch, "dtype")
    return f"{kind}{', '.join(named)}{more}"


# The errors of traced arrays whose value Python or NumPy needs.
_VALUE_ERRORS = (
    jax.errors.ConcretizationTypeError,  # float(x), or bool(x) in an `if`
    jax.errors.TracerArrayConversionError,  # np.asarray(x)
    jax.errors.TracerIntegerConversionError,  # range(x), a_list[x]
)
# How jax, optax and Flax refuse indices and labels that are floating-point numbers. A shape of floats is another fault.
_INTEGERS = re.compile(r"(?<!Shapes )must (?:be|have)[\w ]*\binteger|numpy\.integer.*float|subtypes of integer")


class Advice(NamedTuple):
    """Why an array has no value in a trace, and what to write instead.

    Attributes:
      value: the advice where a program asks for the value itself, `float(x)`.
      numpy: the advice where it passes the array to a function of NumPy.
    """

    value: str
    numpy: str


_SHARDED = "it is traced by jax.jit, so that parameters are created sharded, and arrays have no values there"
IN_INIT = Advice(
    f"{_SHARDED}; compute this one with NumPy or Python (np.linspace for jnp.linspace; np.random.default_rng(0) for a "
    "random one)",
    f"{_SHARDED}, so that NumPy cannot compute with them; use the function of jax.numpy (jnp.log for np.log), or, if "
    "the array is not drawn from a key, make it with NumPy too",
)
_TRACED_ONCE = (
    "it is traced once for all batches, and arrays have no values there; stay with jnp (jnp.where in place of if), "
    "and return as a metric, (value, {'name': x}), what you want to see"
)
IN_LOSS = Advice(_TRACED_ONCE, _TRACED_ONCE)


@contextlib.contextmanager
def traced(function: str, advice: Advice) -> Iterator[None]:
    """Explain the errors of a user's function that is called within this context, under a trace.

    Where the function asks for the value of an array, or for a mesh, the error becomes a ValueError that names the
    line and the layer. Any other error gets line and layer as a note.

    Args:
      advice: why arrays have no values there, and what to write (`IN_INIT`, `IN_LOSS`).
    """
    try:
        yield
    except _VALUE_ERRORS as error:
        instead = advice.numpy if isinstance(error, jax.errors.TracerArrayConversionError) else advice.value
        raise ValueError(f"{function} asks for the value of an array{_place(error)}: {instead}") from error
    except (ValueError, RuntimeError) as error:
        # JAX advises to enter a mesh. That would not help here, because a model must not see any mesh.
        if "PartitionSpec" not in str(error) or " mesh" not in str(error):
            _note_place(error, function)
            raise
        raise ValueError(
            f"{function} places a value on a mesh by a PartitionSpec{_place(error)}: a model sees no mesh, as the "
            "strategy says where values live; leave it out, or build the model with None for each PartitionSpec, for "
            "P(None) too"
        ) from error
    except Exception as error:  # e.g. shapes that do not fit: the library's message is right, and lacks only the place
        _note_place(error, function)
        raise


def _note_place(error: BaseException, function: str) -> None:
    """Add the place of an error as a note, once: contexts nest."""
    if (place := _place(error)) and not any(place in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"in {function}{place}")


def _place(error: BaseException) -> str:
    """Return the place of an error in the user's code: " at model.py:12, `x @ w`, in layers/1/mlp (MLP)"."""
    file, line = asked_at(error) or ("", 0)
    code, layer = linecache.getline(file, line).strip(), _layer(error)
    return f" at {file}:{line}" + f", `{code}`" * bool(code) + f", in {layer}" * bool(layer) if file else ""


def _layer(error: BaseException) -> str:
    """Return the innermost module whose method raised an error, as "path (Class)"; "" outside of modules.

    The path is relative to the outermost module, and is left out if it is unknown.
    """
    # The `self` of a frame is the module whose method runs there. The last one is the innermost.
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [x for variables in frames for name, x in variables.items() if name == "self" and _is_module(x)]
    # Modules of Linen have a path only while they are bound to a scope.
    modules = [x for x in modules if getattr(x, "scope", x) is not None]
    if not modules:
        return ""
    inner, kind = modules[-1], type(modules[-1]).__name__
    # A Linen module sets itself up when it is asked for an attribute that it lacks, and may raise.
    if _is_module(inner, "flax.linen"):
        path = "/".join(inner.path)
    elif _is_module(inner, "haiku"):
        path = inner.module_name
    else:  # search the modules of the outer frames for it
        outer_modules = (x for variables in frames for x in variables.values() if _is_module(x) and x is not inner)
        path = next((inner_path for x in outer_modules if (inner_path := _path(x, inner, set()))), "")
    return f"{path} ({kind})" if path else kind


def _is_module(x: Any, *names: str) -> bool:
    """Whether a value is a module of one of these libraries, or of any, if it is loaded."""
    names = names or ("flax.nnx", "flax.linen", "equinox", "haiku")
    libraries = [sys.modules[name] for name in names if name in sys.modules]
    return isinstance(x, tuple(library.Module for library in libraries))


def _path(x: Any, module: Any, visited_ids: set[int]) -> str:
    """Return the path of a module within another; "" if it is not in there."""
    # Modules may refer to each other in cycles.
    visited_ids.add(id(x))
    if isinstance(x, Mapping):
        items = x.items()
    elif isinstance(x, Sequence) and not isinstance(x, str | bytes):
        items = enumerate(x)
    else:
        # Only modules are opened: other objects may hold anything, such as a whole training loop.
        items = vars(x).items() if _is_module(x) else ()
    for name, value in items:
        if value is module:
            return str(name)
        if id(value) not in visited_ids and (path := _path(value, module, visited_ids)):
            return f"{name}/{path}"
    return ""


def asked_at(error: BaseException) -> tuple[str, int] | None:
    """Return file and line in the user's code from which an error comes: the innermost frame outside of libraries."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    user_frames = [(file, line) for file, line in frames if not of_library(file)]
    return user_frames[-1] if user_frames else None


@contextlib.contextmanager
def reading(batch: Any, name: str = "the batch") -> Iterator[None]:
    """Explain the errors of a user's function that is called with a batch within this context.

    The error becomes a ValueError that describes the batch in two cases: the function asks for a leaf or an item that
    the batch does not have, or it needs integers where the batch has floating-point numbers. Other errors of these
    types get the description as a note.

    Args:
      name: the name of the batch, for the error.
    """
    try:
        yield
    # A missing item raises one of the first four. Floats where integers must be raise one of the last two.
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        if (request := _missing_item(error, batch)) is not None:
            hint = "read a leaf that it has, or give the data these names"
            if request == _BY_NAME:
                hint = "make dicts of a loader's tuples, ({'x': x, 'y': y} for x, y in loader), or read them by number"
            at_line = f"{place}," if (place := _place(error)) else ""
            raise ValueError(
                f"the loss{at_line} asks {name} for {request}, and it is {describe(batch)}; {hint}"
            ) from error
        if request is None and _INTEGERS.search(str(error)) and (floats := _floats(batch)):
            raise ValueError(
                f"the loss{_place(error)} needs integers, as labels and indices are, and was given floating-point "
                f"numbers ({error}); {name} has {', '.join(floats)}: make labels and indices integers where the batch "
                "is made, such as labels.astype('int32')"
            ) from error
        error.add_note(f"{name}, a block of its rows: {describe(batch)}")
        raise


def _floats(batch: Any) -> list[str]:
    """Return the floating-point leaves of a batch as text, "y float32[8]"; at most `_LISTED`."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    floats = [(path, x) for path, x in leaves if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]
    return [f"{name_of(path)} {kind_of(x)}".strip() for path, x in floats[:_LISTED]]


def _missing_item(error: Exception, batch: Any) -> str | None:
    """Return what a function asked of the batch, or of a container in it, that is not there.

    Returns:
      The attribute, key or item as text; None if the error is about something else.
    """
    # An error is about the batch if its subject is one of the batch's containers, by identity.
    containers = list(_containers(batch))
    if isinstance(error, AttributeError):
        return f".{error.name}" if any(error.obj is x for x in containers) else None
    subscripted, variables = _failing_subscript(error.__traceback__)
    if isinstance(subscripted, Mapping) and not any(subscripted is x for x in containers):
        return None  # a dict outside of the batch, such as the parameters
    # The frame of the error tells which containers the function had in its hands.
    candidates = [x for x in containers if any(value is x for value in variables.values())]
    if isinstance(error, KeyError):
        key = error.args[0] if error.args else None
        mappings = [x for x in candidates if isinstance(x, Mapping)]
        # Only a key that no mapping in the frame has is surely the missing one.
        if mappings and all(key not in x for x in mappings):
            return f"{key!r}{did_you_mean(key, mappings[0])}"
        return None
    # Sequences name neither themselves nor the index in their errors: the text must match the type of one in the frame.
    for x in candidates:
        kind = type(x).__name__
        if isinstance(error, IndexError) and str(error) == f"{kind} index out of range":
            return f"an item beyond its {len(x)}"
        if isinstance(error, TypeError) and str(error).startswith(f"{kind} indices must be integers"):
            return _BY_NAME
    return None


def _containers(tree: Any) -> Iterator[Any]:
    """Yield the dicts, tuples and lists of a tree."""
    if isinstance(tree, Mapping):
        yield tree
        for x in tree.values():
            yield from _containers(x)
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        yield tree
        for x in tree:
            yield from _containers(x)


def _failing_subscript(traceback: TracebackType | None) -> tuple[Any, Mapping[str, Any]]:
    """Return the value that the failing expression subscripts, `x` in `x[...]`, and all variables of its frame.

    The value is None if it is no plain variable.
    """
    # The last frame is where the error was raised.
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return None, {}
    frame = traceback.tb_frame
    variables = frame.f_locals
    # Bytecode knows its columns in the source, in bytes of UTF-8; an instruction takes two bytes.
    line, end, start, stop = next(itertools.islice(frame.f_code.co_positions(), traceback.tb_lasti // 2, None))
    # An expression over several lines is not read, since `linecache` gives one line.
    if line is None or line != end:
        return None, variables
    text = linecache.getline(frame.f_code.co_filename, line).encode()[start:stop].decode(errors="replace")
    name = text.partition("[")[0].strip()
    # The text is a plain name, or no variable has it, as for `x.y` or `f(x)`.
    return variables.get(name, frame.f_globals.get(name)), variables


def kind_of(x: Any) -> str:
    """Describe a value for errors: "float32[8, 4]", "None", "a str"."""
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else "None" if x is None else f"a {type(x).__name__}"


def _without_annotations(signature: inspect.Signature) -> str:
    """Return a signature as text, without annotations."""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(parameters))
