"""Kernels that stay local to a tensor rank: how a fused kernel says along which dims it may be cut.

Tensor parallelism rewrites the traced loss into the program of one rank, equation by equation. It cannot look into a
fused kernel (cuDNN, Pallas, a custom call). A kernel wrapped by `local_kernel` stands in the trace as one `jit`
equation of a name of its own, by which `of` finds the function and its dims: the rewriting calls that function on the
parts of a rank. Elsewhere it is an ordinary `jit`: it runs, is differentiated, batched and rematerialised as such.
"""

import contextvars
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

Dims = tuple[int | None, ...]
_kernels: "dict[str, LocalKernel]" = {}
_names: dict[Any, str] = {}
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)


@dataclass(frozen=True)
class LocalKernel:
    """A function of arrays that computes the parts of its result from the parts of its arguments.

    Attributes:
      fun: the function that the user wrapped; returns one array or a tuple of arrays, one for each of `out_dims`.
      in_dims: for each argument the dim that may be split over tensor ranks, or None: whole on every rank.
      out_dims: the same for each result; `(dim,)` also where `fun` returns one array.
      ranks: the number of dims of each argument.
      jitted: `fun` under the name by which `of` knows it.
    """

    fun: Callable[..., Any]
    in_dims: Dims
    out_dims: Dims
    ranks: tuple[int, ...]
    jitted: Callable[..., Any]


def local_kernel(
    fun: Callable[..., Any], in_dims: Sequence[int | None], out_dims: int | Sequence[int | None] | None
) -> Callable[..., Any]:
    """Marks a kernel as computable part by part, so that tensor parallelism runs it on the parts of each rank.

    The contract: where every argument with a dim is cut along it into n equal parts, `fun` of the i-th parts (and of
    the whole of the arguments without a dim) is the i-th part of every result with a dim, and the whole of every
    other. Nothing is communicated. Attention is such a kernel along its heads (Shoeybi et al. 2019, arXiv:1909.08053,
    section 3).

    Args:
      fun: a function of arrays, all positional, returning an array or a tuple of arrays. It may hold constants, but
        what the trace computes must come in as an argument. Bind options by `functools.partial` first. Wrapping an
        equal function or partial again gives the same kernel, so that layers of a Python loop are alike; a lambda
        made anew in every layer is another function in each.
      in_dims: for every argument a dim from 0, or None.
      out_dims: a dim or None where `fun` returns an array, a tuple of them where it returns a tuple.

    Returns:
      A function of the same arrays with the same result, differentiable as `jax.jit(fun)` is. Under `jax.vmap`, or
      inside a derivative that the loss itself takes, it is no kernel any more but the `jit` that JAX makes of it.

    Raises:
      ValueError: a dim is negative, or, when called: the number of arguments, an argument that is no array, a keyword,
        a dim that an array lacks, or another number of results.

    >>> import jax.numpy as jnp
    >>> double = local_kernel(lambda x, table: 2 * x + table, in_dims=(1, None), out_dims=1)
    >>> double(jnp.ones((2, 3)), jnp.ones(1))
    Array([[3., 3., 3.],
           [3., 3., 3.]], dtype=float32)
    """
    given = tuple(in_dims)
    results = tuple(out_dims) if isinstance(out_dims, Sequence) else (out_dims,)
    name = _name(fun)
    for which, dims in (("in_dims", given), ("out_dims", results)):
        if wrong := [d for d in dims if d is not None and (not isinstance(d, int) or d < 0)]:
            raise ValueError(f"kernel {name}: {which}={dims} holds {wrong[0]!r}; use dims from 0, or None")

    by_ranks: dict[tuple[int, ...], LocalKernel] = {}

    @functools.wraps(fun, updated=())
    def call(*arrays: Any, **keywords: Any) -> Any:
        if keywords:
            raise ValueError(
                f"kernel {name} got the keyword {next(iter(keywords))!r}; give arrays by position, and bind options "
                "before wrapping: local_kernel(functools.partial(fun, option=...), ...)"
            )
        if len(arrays) != len(given):
            raise ValueError(f"kernel {name} got {len(arrays)} arrays, and in_dims={given} is for {len(given)}")
        for i, (x, dim) in enumerate(zip(arrays, given, strict=True)):
            if not hasattr(x, "ndim"):
                raise ValueError(f"argument {i} of kernel {name} is {type(x).__name__}; give an array")
            _check(f"argument {i} of kernel {name}", x, dim)
        if _inside.get():  # a kernel of a kernel is a part of it
            return fun(*arrays)
        ranks = tuple(x.ndim for x in arrays)
        if ranks not in by_ranks:
            by_ranks[ranks] = _kernel(fun, given, results, ranks)
        outs = by_ranks[ranks].jitted(*arrays)
        got = outs if isinstance(outs, tuple) else (outs,)
        if len(got) != len(results) or isinstance(outs, tuple) != isinstance(out_dims, Sequence):
            kind = f"a tuple of {len(got)}" if isinstance(outs, tuple) else type(outs).__name__
            raise ValueError(f"kernel {name} returned {kind}, and out_dims={out_dims}; give one dim for each result")
        for i, (x, dim) in enumerate(zip(got, results, strict=True)):
            _check(f"result {i} of kernel {name}", x, dim)
        return outs

    return call


def of(eqn: Any) -> LocalKernel | None:
    """The kernel that an equation of a traced program calls, or None.

    None also where JAX has made something else of it: a batched kernel has other dims, a differentiated one is
    another function.

    Raises:
      ValueError: the kernel closes over traced arrays, of which a tensor rank would not know its part.
    """
    kernel = _kernels.get(eqn.params.get("name", "")) if eqn.primitive.name in ("jit", "pjit") else None
    if kernel is None or derived(eqn):
        return None
    if len(eqn.invars) > len(kernel.in_dims):
        raise ValueError(
            f"kernel {_name(kernel.fun)} uses {len(eqn.invars) - len(kernel.in_dims)} traced arrays that are not its "
            "arguments; pass them, each with its dim in in_dims"
        )
    if tuple(v.aval.ndim for v in eqn.invars) != kernel.ranks:
        return None
    return kernel if len(eqn.outvars) == len(kernel.out_dims) else _of_some_results(kernel, eqn)


def derived(eqn: Any) -> bool:
    """Whether a derivative made an equation. What such an equation holds does not say so of itself."""
    return bool(re.search(r"(jvp|transpose)\(", str(eqn.source_info.name_stack)))


def _of_some_results(kernel: LocalKernel, eqn: Any) -> LocalKernel | None:
    """The kernel of an equation from which JAX has dropped the results that nobody uses."""
    jaxpr = eqn.params["jaxpr"]
    paths = getattr(jaxpr, "jaxpr", jaxpr).debug_info.result_paths or ()
    kept = [int(found[1]) for path in paths if (found := re.fullmatch(r"result\[(\d+)\]", path))]
    if len(kept) != len(eqn.outvars):
        return None
    some = lambda *arrays: tuple(kernel.fun(*arrays)[i] for i in kept)
    return dataclasses.replace(kernel, fun=some, out_dims=tuple(kernel.out_dims[i] for i in kept))


def _kernel(fun: Callable[..., Any], in_dims: Dims, out_dims: Dims, ranks: tuple[int, ...]) -> LocalKernel:
    """The kernel of these parts, registered under its name; another one each time where `fun` cannot be hashed."""
    parts = (_identity(fun), in_dims, out_dims, ranks)
    try:
        known = _names.get(parts)
    except TypeError:  # an option such as a list
        parts, known = object(), None
    if known is None:
        known = _names[parts] = f"jaxpar_kernel_{len(_kernels)}_{_name(fun)}"

        def named(*arrays: Any) -> Any:
            token = _inside.set(True)
            try:
                return fun(*arrays)
            finally:
                _inside.reset(token)

        named.__name__ = named.__qualname__ = known
        _kernels[known] = LocalKernel(fun, in_dims, out_dims, ranks, jax.jit(named))
    return _kernels[known]


def _identity(fun: Callable[..., Any]) -> Any:
    """What makes two functions the same kernel: of partials the function and its options, of which 1 is not 1.0."""
    if not isinstance(fun, functools.partial):
        return fun
    options = (*enumerate(fun.args), *sorted(fun.keywords.items()))
    return (_identity(fun.func), *((name, type(value), value) for name, value in options))


def _name(fun: Callable[..., Any]) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return re.sub(r"\W", "_", getattr(fun, "__name__", type(fun).__name__)).strip("_")


def _check(what: str, x: Any, dim: int | None) -> None:
    if dim is not None and dim >= x.ndim:
        hint = f"use 0 to {x.ndim - 1}, or None" if x.ndim else "use None"
        raise ValueError(f"{what} has shape {list(x.shape)} and no dim {dim}; {hint}")
