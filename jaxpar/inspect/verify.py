"""verify: the same mathematics as one device, shown leaf by leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from .. import jaxpr as jx
from ..batches import check_rows
from ..gradients import block_key
from ..leaves import name_of
from ..model import Mean, Model, Replicated
from ..precision import Policy, all_finite
from ..step import make_train_step
from ..strategy import Strategy, as_strategy

# Relative to max(largest element of the leaf, 1e-2 of the tree's). A leaf whose true gradient is zero (a key's bias,
# a bias before BatchNorm) is rounding alone: measured at up to 9e-8 of the tree's largest element, about one float32
# epsilon.
TOLERANCE = {"f32": 1e-5, "bf16": 3e-2, "f16": 4e-3}


@dataclass(frozen=True)
class Difference:
    """How far one leaf is from one device's.

    Attributes: `kind` "gradient" or "parameter", `path` of the leaf, `error` max |a - b| over the allowed scale,
    `ratio` the best factor between the two (1 where they agree), `hint` what a whole ratio suggests.
    """

    kind: str
    path: str
    error: float
    ratio: float
    hint: str


@dataclass(frozen=True)
class Report:
    """The result of `verify`. `ok` is whether the loss and every leaf agree to `tolerance`; `worst` is the leaf
    furthest off.
    """

    ok: bool
    tolerance: float
    loss: float
    expected_loss: float
    differences: tuple[Difference, ...]

    @property
    def worst(self) -> Difference:
        """The leaf whose error is largest: among the gradients, if one is wrong, since parameters only follow them."""
        wrong = [d for d in self.differences if d.kind == "gradient" and d.error > self.tolerance]
        return max(wrong or self.differences, key=lambda d: d.error)

    def __str__(self) -> str:
        w = self.worst
        verdict = "same as one device" if self.ok else "DIFFERS from one device"
        head = f"{verdict}: loss {self.loss:.7g}, one device {self.expected_loss:.7g}"
        line = f"worst {w.kind} {w.path}: error {w.error:.2g} (allowed {self.tolerance:.0e}), ratio {w.ratio:.4g}"
        return "\n".join([head, line + (f": {w.hint}" if w.hint else "")])


def verify(
    model: Model,
    strategy: Strategy | str,
    batch: Any,
    steps: int = 3,
    key: jax.Array | None = None,
    mesh: Mesh | Sequence[jax.Device] | None = None,
) -> Report:
    """Compare a strategy with one device: loss, every gradient leaf, and parameters after steps of SGD with momentum.

    (Adam would hide a wrong scale of the gradients.) The one device sees the same global batch, plainly: no jaxpar
    machinery beyond the model; where the loss draws random numbers, block by block with the blocks' keys.

    Args:
      model, strategy, batch, mesh: as for `make_train_step`; the batch may be NumPy arrays.
      steps: number of SGD steps, from 1.
      key: the key of the initial values; `jax.random.key(0)` if None.
    """
    key = jax.random.key(0) if key is None else key
    strategy = as_strategy(strategy)
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = make_train_step(model, optimizer, strategy, mesh=mesh)
    state = step.init(key)
    loss, grads = step.value_and_grad(state, batch)
    while state.scale is not None and not all_finite(grads):  # float16 training would skip steps until the scale fits
        state = dataclasses.replace(state, scale=state.scale.next(jnp.bool_(False)))
        loss, grads = step.value_and_grad(state, batch)
    for _ in range(steps):
        state, _ = step(state, batch)
    reference = Reference(model, strategy, step.local.replicas)
    expected_loss, expected_grads = reference.value_and_grad(key, batch)
    expected = reference.train(optimizer, key, batch, steps)

    tolerance = max(TOLERANCE[strategy.precision], *(TOLERANCE[name] for name in reference.low(batch)))
    if strategy.reduce == "compute":
        tolerance *= step.local.replicas
    found = differences("gradient", model.unwrap(grads), expected_grads)
    found += differences("parameter", model.unwrap(step.params(state)), expected)
    close = bool(np.isfinite(loss) and np.isclose(loss, expected_loss, rtol=tolerance, atol=tolerance))
    ok = close and all(d.error <= tolerance for d in found)
    return Report(ok, tolerance, float(loss), float(expected_loss), tuple(found))


class Reference:
    """One device: the model's loss on the global batch, microbatch by microbatch, differentiated by `jax.grad`.

    `replicas` fixes which rows share a microbatch and, where the loss draws random numbers, a key.
    """

    def __init__(self, model: Model, strategy: Strategy, replicas: int):
        self.model, self.strategy, self.replicas = model, strategy, replicas
        self._grad = jax.jit(jax.value_and_grad(self._objective, has_aux=True, allow_int=True))
        self._create = jax.jit(model.create)

    def _objective(self, params: Any, variables: Any, batch: Any, key: jax.Array, step: jax.Array | int) -> Any:
        m, n = self.strategy.microbatches, self.replicas
        policy = Policy.of(self.strategy)
        declared = jax.eval_shape(self.model.create, jax.random.key(0))[0]
        params = jax.tree.map(lambda x, d: x.astype(policy.computed(d.dtype)), params, declared)
        sums: list[Mean] = []
        for i in range(m):

            def rows(
                x: Any, i: int = i
            ) -> Any:  # replica r has rows r R to (r + 1) R, and microbatch i of each is taken
                return x if _marked(x) else x.reshape(n, m, -1, *x.shape[1:])[:, i]

            blocks = jax.tree.map(rows, batch, is_leaf=_marked)
            keys = jax.vmap(lambda r, i=i: block_key(key, step, r * m + i))(jnp.arange(n))
            if self._draws(params, variables, blocks, keys):
                axes = jax.tree.map(lambda x: None if _marked(x) else 0, blocks, is_leaf=_marked)

                def block(rows: Any, key: jax.Array, variables: Any = variables) -> Any:
                    return self.model.call(params, variables, rows, key, ("rows",))

                out, new = jax.vmap(block, in_axes=(axes, 0), axis_name="rows")(blocks, keys)
                out, variables = jax.tree.map(lambda x: x.sum(0), out), jax.tree.map(lambda x: x[0], new)
            else:
                whole = jax.tree.map(
                    lambda x: x if _marked(x) else x.reshape(-1, *x.shape[2:]), blocks, is_leaf=_marked
                )
                out, variables = self.model.call(params, variables, whole, keys[0])
            sums.append(out["loss"])
        return sum(s.total for s in sums) / sum(s.count for s in sums), variables

    def _draws(self, params: Any, variables: Any, blocks: Any, keys: jax.Array) -> bool:
        """Whether the loss depends on its key."""
        rows = jax.tree.map(lambda x: x if _marked(x) else x[0], blocks, is_leaf=_marked)
        rest = (params, variables, rows)
        flat, _ = jx.trace(lambda rest, key: self.model.call(rest[0], rest[1], rest[2], key), rest, keys[0])
        marked = jx.depends(flat.eqns, flat.invars[-1:])
        return any(not jx.is_literal(v) and v in marked for v in flat.outvars)

    def low(self, batch: Any) -> list[str]:
        """The low precisions in which the model itself declares parameters or computes, as bfloat16 modules do."""
        found: set[Any] = set()

        def walk(jaxpr: Any) -> None:
            for eqn in jx.opened(jaxpr)[0].eqns:
                found.update(v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype"))
                for inner in jec.jaxprs_in_params(eqn.params):
                    walk(inner)

        fresh = jax.eval_shape(self.model.create, jax.random.key(0))
        walk(jax.make_jaxpr(self.model.call)(*fresh, batch, jax.random.key(0)))
        found.update(x.dtype for x in jax.tree.leaves(fresh[0]))
        return [
            "f32",
            *(name for name, dtype in {"bf16": jnp.bfloat16, "f16": jnp.float16}.items() if jnp.dtype(dtype) in found),
        ]

    def value_and_grad(self, key: jax.Array, batch: Any) -> tuple[jax.Array, Any]:
        """Loss and gradients at the initial values that `key` gives, for the keys of the first step."""
        check_rows(batch, self.replicas, self.strategy.microbatches, jax.process_count())
        params, variables = self._create(key)
        (loss, _), grads = self._grad(_masters(params), variables, batch, jax.random.fold_in(key, 1), 0)
        return loss, _trained(grads)

    def train(self, optimizer: Any, key: jax.Array, batch: Any, steps: int) -> Any:
        """Parameters after some steps on one batch."""
        params, variables = self._create(key)
        params = _masters(params)
        state = optimizer.init(_trained(params))

        @jax.jit
        def update(grads: Any, state: Any, params: Any) -> Any:
            changes, state = optimizer.update(_trained(grads), state, _trained(params))
            moved = optax.apply_updates(_trained(params), changes)
            return jax.tree.map(lambda new, old: old if new is None else new, moved, params, is_leaf=_is_none), state

        for step in range(steps):
            (_, variables), grads = self._grad(params, variables, batch, jax.random.fold_in(key, 1), step)
            params, state = update(grads, state, params)
        return params


def differences(kind: str, ours: Any, theirs: Any) -> list[Difference]:
    """Leaf by leaf, how far one tree is from the other."""
    pairs = [
        (name_of(path), np.asarray(a, np.float64), np.asarray(b, np.float64))
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    ]
    largest = max((np.abs(b).max(initial=0) for _, _, b in pairs), default=0.0)
    found = []
    for path, a, b in pairs:
        scale = max(np.abs(b).max(initial=0), 1e-2 * largest, 1e-30)
        error = float(np.abs(a - b).max(initial=0) / scale)
        ratio = float((a * b).sum() / (b * b).sum()) if (b * b).sum() > 0 else 1.0
        found.append(Difference(kind, path, error if np.isfinite(error) else float("inf"), ratio, _hint(a, b, ratio)))
    return found


def _hint(a: np.ndarray, b: np.ndarray, ratio: float) -> str:
    if not np.isfinite(a).all():
        return "not finite: see the loss, or the loss scale"
    if np.abs(b).max(initial=0) > 0 and not a.any():
        return "zero: the gradient is lost"
    near = Fraction(ratio).limit_denominator(64) if np.isfinite(ratio) else Fraction(1)
    if near == 1 or abs(ratio - near) > 1e-3 * abs(ratio) or np.abs(a - float(near) * b).max() > 1e-3 * np.abs(b).max():
        return ""
    if near.denominator == 1:
        return f"x{near}: a mean over replicas or microbatches is missing, or a sum is taken twice"
    if near.numerator == 1:
        return f"x1/{near.denominator}: a sum over replicas or microbatches is missing, or a mean is taken twice"
    return ""


def _trained(tree: Any) -> Any:
    """None in place of what no optimizer moves: integers, and the float0 that stands for their gradients."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, tree)


def _is_none(x: Any) -> bool:
    return x is None


def _masters(params: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(Policy.master(x.dtype)), params)


def _marked(x: Any) -> bool:
    return isinstance(x, Replicated)
