"""The first state of a run, with every array created where the layout stores it.

    key  --Model.create-->  model's own parameters  --_to_masters-->  masters, logical  --_store-->  State
         or given params    (`_match_params`)                         unpadded, stacked              sharded, padded

All of it is one jitted function whose outputs have the state's shardings, so that a sharded array is never whole.
The same functions serve `with_params`, which replaces the parameters of a state.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..backend.cpu_compiler import cpu_options
from ..backend.machines import is_away
from ..backend.text import did_you_mean, few
from ..layout.layout import Layout
from ..layout.precision import LossScale, Policy
from ..layout.state import State
from ..model.draws import draws_together
from ..model.model import Model
from ..model.paths import as_flax_saves, name_of
from ..program.buffers import on_device
from .checks import check_state, is_traced
from .update import Update

BEGIN_ANEW = "name those that begin with the model's initial values, such as fresh=lambda path: 'lora' in path"


class FirstState:
    """The part of a step that makes its state."""

    model_def: Model
    layout: Layout
    policy: Policy
    update: Update

    def init(self, key: jax.Array, params: Any = None, fresh: Callable[[str], bool] | None = None) -> State:
        """Create a state, sharded from the start; see `TrainStep.init`."""
        _check_key(key)
        inside = is_traced(key)
        # Within a caller's program nothing runs yet, so that compile-only devices are no error.
        if not inside:
            check_here(self.layout)
        create = self._creating_within if inside else self._creating
        if params is None:
            return create(key)
        shardings = jax.tree.leaves(self.layout.handed_out)
        return create(key, {i: jax.device_put(x, shardings[i]) for i, x in self._match_params(params, fresh).items()})

    def with_params(self, state: State, params: Any) -> State:
        """Return the state with other parameters; see `TrainStep.with_params`."""
        check_state(state)
        by_index = self._match_params(params, None)
        values = [by_index[i] for i in sorted(by_index)]
        inside = is_traced(state.step, values)
        pairs = zip(values, jax.tree.leaves(self.layout.handed_out), strict=True)
        run = self._placing_within if inside else self._placing
        masters, low_copy = run([jax.device_put(x, sharding) for x, sharding in pairs])
        return replace(state, params=masters, copy=low_copy)

    def begin(self, key: jax.Array, params: Any, variables: Any) -> State:
        """Create a state with the masters `params`, as they are stored, and `variables`. Both are donated."""
        _check_key(key)
        return self._beginning(key, params, variables)

    # Each function below is jitted once for all states that a step makes. A twin `_within` is for a caller's program,
    # which has its own compiler options.

    @functools.cached_property
    def _creating(self) -> Callable[..., State]:
        return jax.jit(self._create, out_shardings=self._shardings, compiler_options=self._options)

    @functools.cached_property
    def _creating_within(self) -> Callable[..., State]:
        return jax.jit(self._create, out_shardings=self._shardings)

    @functools.cached_property
    def _beginning(self) -> Callable[..., State]:
        """A function of a key, masters as they are stored, and variables that returns the first state; jitted."""

        def begin_state(key: jax.Array, params: Any, variables: Any) -> State:
            # Masters may rest on the host; the conversion runs on the device.
            params = jax.tree.map(on_device, params)
            return self._first_state(key, self.layout.to_logical(params, "params", as_stacked=True), variables)

        return jax.jit(
            begin_state, out_shardings=self._shardings, donate_argnums=(1, 2), compiler_options=self._options
        )

    @functools.cached_property
    def _placing(self) -> Callable[..., Any]:
        shardings = self._shardings.params, self._shardings.copy
        return jax.jit(self._place_params, out_shardings=shardings, compiler_options=self._options)

    @functools.cached_property
    def _placing_within(self) -> Callable[..., Any]:
        return jax.jit(self._place_params, out_shardings=(self._shardings.params, self._shardings.copy))

    @property
    def _options(self) -> dict[str, bool | int | str] | None:
        """The compiler's options for these programs."""
        return cpu_options(self.layout.mesh.devices.flat[0].platform)

    def _create(self, key: jax.Array, initial: Mapping[int, Any] | None = None) -> State:
        """Return the first state.

        Args:
          key: the key of the run, from which the model's own initial values are drawn.
          initial: initial values by position among the model's leaves, which replace the model's own.
        """

        def masters_and_variables(key: jax.Array) -> tuple[Any, Any]:
            params, variables = self.model_def.create(key)
            # Given parameters replace those of the model. XLA drops the draws that nothing reads.
            values = [(initial or {}).get(i, x) for i, x in enumerate(jax.tree.leaves(params))]
            return self._to_masters(values), variables

        return self._first_state(key, *draws_together(masters_and_variables)(key))

    def _place_params(self, values: Sequence[Any]) -> tuple[Any, Any]:
        """Return the parameters as they are stored, and their copy, from the model's own leaves."""
        return self._store(self._to_masters(values))

    def _to_masters(self, values: Sequence[Any]) -> Any:
        """Return the model's own leaves as unpadded masters, in the tree of the stored leaves."""
        pairs = zip(self.layout.storage.models, values, strict=True)
        masters = [x.astype(self.policy.stored(leaf.dtype, leaf.trainable)) for leaf, x in pairs]
        # "copy" is a kind that is not padded; this only stacks and stages layers.
        return self.layout.to_stored(jax.tree.unflatten(self.layout.storage.model_tree, masters), "copy")

    def _store(self, masters: Any) -> tuple[Any, Any]:
        """Return the parameters as they are stored, and their copy in the compute dtype, from unpadded masters.

        The copy is None if the layout stores none.
        """
        layout, low_copy = self.layout, None
        if layout.copied:
            low_copy = jax.tree.map(lambda place, x: x.astype(place.dtype), layout.places("copy"), masters)
        return layout.at_rest(layout.to_stored(masters, "params", as_stacked=True)), low_copy

    def _first_state(self, key: jax.Array, masters: Any, variables: Any) -> State:
        """Return the state before the first step, from unpadded masters in the tree of the leaves."""
        params, low_copy = self._store(masters)
        scale = LossScale.create() if self.policy.scaled else None
        # Steps draw from another stream: dropout must not repeat the random numbers of the initial values.
        run_key = jax.random.fold_in(key, 1)
        return State(jnp.int32(0), params, low_copy, self.update.init(masters), variables, scale, run_key)

    def _match_params(self, params: Any, fresh: Callable[[str], bool] | None) -> dict[int, Any]:
        """Return given parameters by their position among the model's own leaves.

        Args:
          params: the given tree; its paths are matched with the model's.
          fresh: returns whether the leaf of a path may be missing.

        Raises ValueError for a path that is missing or unknown, or a shape that is not the model's.
        """
        models = self.layout.storage.models
        flat = jax.tree_util.tree_leaves_with_path(self.model_def.unwrap(params))
        names, paths = [name_of(path) for path, _ in flat], [leaf.path for leaf in models]
        # Flax's own tree of variables has other names, such as "params/..." or ".../value".
        if not {*names} & {*paths}:
            names = as_flax_saves(names)
        # Keys that contain a slash may make two paths equal; then only the order of the leaves is unique.
        if len({*paths}) < len(paths) and names == paths:
            by_index = dict(enumerate(x for _, x in flat))
        else:
            index_by_path = {path: i for i, path in enumerate(paths)}
            _check_names(names, paths, fresh, params)
            by_index = {index_by_path[name]: x for name, (_, x) in zip(names, flat, strict=True)}
        # A shape is checked here, since jit would not name the parameter.
        for i, x in by_index.items():
            if tuple(jnp.shape(x)) != models[i].shape:
                raise ValueError(
                    f"params= has {models[i].path} of shape {tuple(jnp.shape(x))}, the model needs {models[i].shape}; "
                    "pass parameters of this model"
                )
        return by_index

    def abstract_state(self) -> State:
        """Return the state as shapes, dtypes and shardings, without any array."""
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self._shapes, self._shardings
        )

    @functools.cached_property
    def _shapes(self) -> State:
        """The state as shapes and dtypes."""
        return jax.eval_shape(self._create, jax.random.key(0))

    @functools.cached_property
    def _shardings(self) -> Any:
        """The sharding of every array, in the tree of a state."""
        # Only the tree is needed of variables and loss scale, which are replicated.
        shapes, layout, replicated = self._shapes, self.layout, self.layout.sharding(PartitionSpec())
        return State(
            step=replicated,  # type: ignore[arg-type]
            params=layout.shardings("params"),
            copy=layout.shardings("copy") if layout.copied else None,
            optimizer=layout.shardings("optimizer"),
            variables=jax.tree.map(lambda _: replicated, shapes.variables),
            scale=jax.tree.map(lambda _: replicated, shapes.scale),
            key=replicated,  # type: ignore[arg-type]
        )


def check_here(layout: Layout) -> None:
    """Raise ValueError if the devices of a layout are compile-only, so that programs for them cannot run."""
    device = layout.mesh.devices.flat[0]
    if is_away(device):
        raise ValueError(
            f"the step is for {layout.mesh.size} x {device.device_kind}, which are not here: it can be compiled, "
            "explained, checked and predicted; to run it, pass devices that are here to make_train_step, such as "
            "mesh=jax.devices(), or no mesh"
        )


def _check_names(names: Sequence[str], paths: Sequence[str], fresh: Callable[[str], bool] | None, params: Any) -> None:
    """Raise ValueError unless given parameters have the model's paths, except for paths that are `fresh`.

    Args:
      names: the paths of the given parameters.
      paths: the paths of the model's.
      fresh: returns whether the leaf of a path may be missing; None means that none may.
      params: the given tree.
    """
    given_names, model_paths = {*names}, {*paths}
    missing = [path for path in paths if path not in given_names and (fresh is None or not fresh(path))]
    unknown = [name for name in names if name not in model_paths]
    # A single leaf without a path is no tree: probably a whole module or an array.
    if unknown == [""]:
        raise ValueError(f"params= is a {type(params).__name__}; pass a tree like step.params(state)")
    # Linen's variables hold the parameters in a collection of this name.
    is_linen = any(name.removeprefix("params/") in model_paths for name in unknown)
    tree = "variables['params']" if is_linen else "a tree like step.params(state)"
    lacks = f"lacks {few(missing)}"
    if unknown:
        has = f"has {few(unknown)}, and the model has {few(paths)}{did_you_mean(unknown[0], paths)}"
        raise ValueError(f"params= {f'{lacks}; it ' if missing else ''}{has}; pass {tree}")
    if missing:
        raise ValueError(f"params= {lacks}; pass {tree}, or {BEGIN_ANEW}")


def _check_key(key: Any) -> None:
    """Raise ValueError unless this is one typed key; a key of the old form, uint32[2], gets a hint."""
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()):
        description = f"{key.dtype}{list(key.shape)}" if isinstance(key, jax.Array) else type(key).__name__
        is_raw_key = description == "uint32[2]"  # from `jax.random.PRNGKey`
        hint = "; make it one by jax.random.wrap_key_data(key)" * is_raw_key
        raise ValueError(f"init needs one key from jax.random.key(seed), got {description}{hint}")
