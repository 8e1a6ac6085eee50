"""Kernels that stay local to a tensor rank: how a fused kernel says along which dims it may be cut.

Tensor parallelism rewrites the traced loss into the program of one rank, equation by equation. It cannot look into a
fused kernel (cuDNN, Pallas, a custom call). A kernel wrapped by `local_kernel` stands in the trace as one `jit`
equation with a unique name, by which `of` finds the function and its dims:

    jit[name=jaxpar_kernel_0_attention] q k v   -->   attention(q_part, k_part, v_part) on each rank

The rewritten program calls that function on the parts of a rank. Elsewhere the equation is an ordinary `jit`: it runs,
is differentiated, batched and rematerialised like any other.
"""

import contextvars
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .walk import opened

Dims = tuple[int | None, ...]
_kernels: "dict[str, LocalKernel]" = {}  # by the name of the `jit` equation
_names: dict[Any, str] = {}  # (identity of the function, in_dims, out_dims, ndims) -> that name
# Whether a kernel is being traced.
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)


@dataclass(frozen=True)
class LocalKernel:
    """A function of arrays that computes the parts of its result from the parts of its arguments.

    Attributes:
      fun: the function that the user wrapped; it returns one array or a tuple of arrays, one for each of `out_dims`.
      in_dims: for each argument the dim that may be split over tensor ranks; None if every rank needs the full array.
      out_dims: the same for each result; `(dim,)` if `fun` returns one array.
      ndims: the number of dims of each argument.
      jitted: `fun` under the name by which `of` finds it.
    """

    fun: Callable[..., Any]
    in_dims: Dims
    out_dims: Dims
    ndims: tuple[int, ...]
    jitted: Callable[..., Any]


def local_kernel(
    fun: Callable[..., Any], in_dims: Sequence[int | None], out_dims: int | Sequence[int | None] | None
) -> Callable[..., Any]:
    """Mark a kernel as computable part by part, so that tensor parallelism runs it on the parts of each rank.

    The contract: cut every argument with a dim along it into n equal parts. Then `fun` of the i-th parts, and of the
    full arguments without a dim, returns the i-th part of every result with a dim, and the full result without one.
    Nothing is communicated. Attention is such a kernel along its heads (Shoeybi et al. 2019, arXiv:1909.08053,
    section 3).

    Args:
      fun: a function of arrays, all positional, returning an array or a tuple of arrays. It may hold constants, but
        traced arrays must be arguments. Bind options by `functools.partial` first. Wrapping an equal function or
        partial again gives the same kernel, so that layers of a Python loop are alike. A lambda in the loop's body is
        another function, hence another kernel, in every layer.
      in_dims: for every argument a dim from 0, or None.
      out_dims: a dim or None if `fun` returns an array, a tuple of them if it returns a tuple.

    Returns:
      A function of the same arrays with the same result, differentiable as `jax.jit(fun)` is. Under `jax.vmap`, or
      inside a derivative that the loss itself takes, it is no kernel, but the `jit` into which JAX transforms it.

    Raises:
      ValueError: a dim is negative or no whole number. When the result is called: a keyword is given, the numbers of
        arguments or of results do not fit the dims, an argument is no array, or an array lacks a dim.

    >>> import jax.numpy as jnp
    >>> double = local_kernel(lambda x, table: 2 * x + table, in_dims=(1, None), out_dims=1)
    >>> double(jnp.ones((2, 3)), jnp.ones(1))
    Array([[3., 3., 3.],
           [3., 3., 3.]], dtype=float32)
    """
    arg_dims = tuple(in_dims)
    result_dims = tuple(out_dims) if isinstance(out_dims, Sequence) else (out_dims,)
    name = _name(fun)
    for option, dims in (("in_dims", arg_dims), ("out_dims", result_dims)):
        if invalid := [d for d in dims if d is not None and (not isinstance(d, int) or d < 0)]:
            raise ValueError(f"kernel {name}: {option}={dims} holds {invalid[0]!r}; use dims from 0, or None")

    # The name of a kernel stands for one number of dims of each argument, which `of` compares.
    by_ndims: dict[tuple[int, ...], LocalKernel] = {}

    @functools.wraps(fun, updated=())
    def call(*arrays: Any, **keywords: Any) -> Any:
        _check_arguments(name, arrays, keywords, arg_dims)
        if _inside.get():
            # A kernel that another kernel calls is part of it, and needs no equation.
            return fun(*arrays)
        ndims = tuple(x.ndim for x in arrays)
        if ndims not in by_ndims:
            by_ndims[ndims] = _kernel(fun, arg_dims, result_dims, ndims)
        outs = by_ndims[ndims].jitted(*arrays)
        _check_results(name, outs, out_dims)
        return outs

    return call


def _check_arguments(name: str, arrays: Sequence[Any], keywords: Mapping[str, Any], in_dims: Dims) -> None:
    """Raise ValueError if the arguments of a kernel do not fit `in_dims`."""
    if keywords:
        raise ValueError(
            f"kernel {name} got the keyword {next(iter(keywords))!r}; give arrays by position, and bind options "
            "before wrapping: local_kernel(functools.partial(fun, option=...), ...)"
        )
    if len(arrays) != len(in_dims):
        raise ValueError(
            f"kernel {name} got {len(arrays)} arrays, and in_dims={in_dims} is for {len(in_dims)}; give each its dim"
        )
    for i, (x, dim) in enumerate(zip(arrays, in_dims, strict=True)):
        if not hasattr(x, "ndim"):
            raise ValueError(f"argument {i} of kernel {name} is a {type(x).__name__}; give an array")
        _check_dim(f"argument {i} of kernel {name}", x, dim)


def _check_results(name: str, outs: Any, out_dims: int | Sequence[int | None] | None) -> None:
    """Raise ValueError if the results of a kernel do not fit `out_dims`."""
    arrays = outs if isinstance(outs, tuple) else (outs,)
    dims = out_dims if isinstance(out_dims, Sequence) else (out_dims,)
    if len(arrays) != len(dims) or isinstance(outs, tuple) != isinstance(out_dims, Sequence):
        kind = f"a tuple of {len(arrays)}" if isinstance(outs, tuple) else type(outs).__name__
        raise ValueError(f"kernel {name} returned {kind}, and out_dims={out_dims}; give one dim for each result")
    for i, (x, dim) in enumerate(zip(arrays, dims, strict=True)):
        _check_dim(f"result {i} of kernel {name}", x, dim)


def of(eqn: Any) -> LocalKernel | None:
    """Return the kernel that an equation of a traced program calls; None for other equations.

    It is also None if JAX has transformed the kernel: batched, it has other dims, and a derivative is another function.

    Raises:
      ValueError: the kernel closes over traced arrays, whose part a tensor rank would not know.
    """
    kernel = _kernels.get(eqn.params.get("name", "")) if eqn.primitive.name in ("jit", "pjit") else None
    if kernel is None or derived(eqn):
        return None
    # JAX makes operands of the traced arrays that a kernel closes over.
    if len(eqn.invars) > len(kernel.in_dims):
        raise ValueError(
            f"kernel {_name(kernel.fun)} uses {len(eqn.invars) - len(kernel.in_dims)} traced arrays that are not its "
            "arguments; pass them, each with its dim in in_dims"
        )
    # `vmap` adds a dim to the arguments.
    if tuple(v.aval.ndim for v in eqn.invars) != kernel.ndims:
        return None
    return kernel if len(eqn.outvars) == len(kernel.out_dims) else _of_some_results(kernel, eqn)


def derived(eqn: Any) -> bool:
    """Return whether an equation comes from a derivative, by its name stack.

    The equations of programs inside it do not say so themselves.
    """
    return bool(re.search(r"(jvp|transpose)\(", str(eqn.source_info.name_stack)))


def _of_some_results(kernel: LocalKernel, eqn: Any) -> LocalKernel | None:
    """Return the kernel of an equation from which JAX has dropped unused results; None if it is unknown which ones."""
    paths = opened(eqn.params["jaxpr"])[0].debug_info.result_paths or ()
    # The jaxpr's debug info names the results that are left: "result[0]", "result[2]".
    positions = [int(match[1]) for path in paths if (match := re.fullmatch(r"result\[(\d+)\]", path))]
    if len(positions) != len(eqn.outvars):
        return None
    used_results = lambda *arrays: tuple(kernel.fun(*arrays)[i] for i in positions)
    return dataclasses.replace(kernel, fun=used_results, out_dims=tuple(kernel.out_dims[i] for i in positions))


def _kernel(fun: Callable[..., Any], in_dims: Dims, out_dims: Dims, ndims: tuple[int, ...]) -> LocalKernel:
    """Return the registered kernel of these parts; a new kernel in every call if `fun` cannot be hashed."""
    key = (_identity(fun), in_dims, out_dims, ndims)
    try:
        name = _names.get(key)
    except TypeError:  # an option such as a list cannot be hashed
        key, name = object(), None
    # A partial that a layer makes anew in every call keeps its name, so that layers remain alike.
    if name is None:
        name = _names[key] = f"jaxpar_kernel_{len(_kernels)}_{_name(fun)}"

        def named(*arrays: Any) -> Any:
            token = _inside.set(True)
            try:
                return fun(*arrays)
            finally:
                _inside.reset(token)

        # `jit` takes the name of its equation from the function.
        named.__name__ = named.__qualname__ = name
        _kernels[name] = LocalKernel(fun, in_dims, out_dims, ndims, jax.jit(named))
    return _kernels[name]


def _identity(fun: Callable[..., Any]) -> Any:
    """Return a key that is equal for two functions that are the same kernel.

    Partials are equal by their function and options. The types of options count, since 1 == 1.0.
    """
    if not isinstance(fun, functools.partial):
        return fun
    options = (*enumerate(fun.args), *sorted(fun.keywords.items()))
    return (_identity(fun.func), *((name, type(value), value) for name, value in options))


def _name(fun: Callable[..., Any]) -> str:
    """Return the name of a kernel's function for names of equations and errors."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return re.sub(r"\W", "_", getattr(fun, "__name__", type(fun).__name__)).strip("_")


def _check_dim(subject: str, x: Any, dim: int | None) -> None:
    """Raise ValueError if an array lacks a dim."""
    if dim is not None and dim >= x.ndim:
        hint = f"use 0 to {x.ndim - 1}, or None" if x.ndim else "use None"
        raise ValueError(f"{subject} has shape {list(x.shape)} and no dim {dim}; {hint}")
