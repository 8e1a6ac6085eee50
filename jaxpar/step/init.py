"""How the state of a run comes to be: every array of it created where the layout keeps it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
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
from .checks import check_state
from .update import Update

BEGIN_ANEW = "where some are to begin anew, say which: fresh=lambda path: 'lora' in path"


class FirstState:
    """The part of a step that makes its state, of a model, a layout, a policy and an update."""

    model_def: Model
    layout: Layout
    policy: Policy
    update: Update

    def init(self, key: jax.Array, params: Any = None, fresh: Callable[[str], bool] | None = None) -> State:
        """A new state, created sharded; see `TrainStep.init`."""
        _check_key(key)
        if not isinstance(key, Tracer):
            check_here(self.layout)
        if params is None:
            return self._creating(key) if not isinstance(key, Tracer) else self._creating_within(key)
        places = jax.tree.leaves(self.layout.handed_out)
        given = {at: jax.device_put(x, places[at]) for at, x in self._given(params, fresh).items()}
        return self._creating(key, given) if not isinstance(key, Tracer) else self._creating_within(key, given)

    def with_params(self, state: State, params: Any) -> State:
        """The state with other parameters; see `TrainStep.with_params`."""
        check_state(state)
        given = list(self._given(params, None).items())
        values = [x for _, x in sorted(given, key=lambda item: item[0])]
        inside = any(isinstance(x, Tracer) for x in (state.step, *values))
        places = zip(values, jax.tree.leaves(self.layout.handed_out), strict=True)
        run = self._placing_within if inside else self._placing
        masters, copy = run([jax.device_put(x, place) for x, place in places])
        return replace(state, params=masters, copy=copy)

    def begin(self, key: jax.Array, params: Any, variables: Any) -> State:
        """A new state with the masters `params`, as they are stored, and `variables`. Both are donated."""
        _check_key(key)
        return self._beginning(key, params, variables)

    @functools.cached_property
    def _creating(self) -> Callable[..., State]:
        """`_create`, compiled once however many states a step makes."""
        return jax.jit(self._create, out_shardings=self._shardings, compiler_options=self._options)

    @functools.cached_property
    def _creating_within(self) -> Callable[..., State]:
        """The same within a caller's program, which is compiled with options of its own."""
        return jax.jit(self._create, out_shardings=self._shardings)

    @functools.cached_property
    def _beginning(self) -> Callable[..., State]:
        def begun(key: jax.Array, params: Any, variables: Any) -> State:
            params = jax.tree.map(on_device, params)
            return self._first(key, self.layout.to_logical(params, "params", as_stacked=True), variables)

        return jax.jit(begun, out_shardings=self._shardings, donate_argnums=(1, 2), compiler_options=self._options)

    @functools.cached_property
    def _placing(self) -> Callable[..., Any]:
        places = self._shardings.params, self._shardings.copy
        return jax.jit(
            lambda values: self._masters(self._kept(values)), out_shardings=places, compiler_options=self._options
        )

    @functools.cached_property
    def _placing_within(self) -> Callable[..., Any]:
        """The same within a caller's program."""
        places = self._shardings.params, self._shardings.copy
        return jax.jit(lambda values: self._masters(self._kept(values)), out_shardings=places)

    @property
    def _options(self) -> dict[str, bool | int | str] | None:
        return cpu_options(self.layout.mesh.devices.flat[0].platform)

    def _create(self, key: jax.Array, given: Mapping[int, Any] | None = None) -> State:
        def stored(key: jax.Array) -> tuple[Any, Any]:
            params, variables = self.model_def.create(key)
            values = [(given or {}).get(at, x) for at, x in enumerate(jax.tree.leaves(params))]
            return self._kept(values), variables

        return self._first(key, *draws_together(stored)(key))

    def _kept(self, values: Sequence[Any]) -> Any:
        """The model's own leaves as masters without padding, in the tree of the leaves."""
        leaves = zip(self.layout.storage.models, values, strict=True)
        kept = [x.astype(self.policy.stored(leaf.dtype, leaf.trainable)) for leaf, x in leaves]
        return self.layout.to_stored(jax.tree.unflatten(self.layout.storage.model_tree, kept), "copy")

    def _masters(self, whole: Any) -> tuple[Any, Any]:
        """What is stored of such masters: themselves, and the copy in the compute dtype, or None."""
        layout, copy = self.layout, None
        if layout.copied:
            copy = jax.tree.map(lambda place, x: x.astype(place.dtype), layout.places("copy"), whole)
        return layout.at_rest(layout.to_stored(whole, "params", as_stacked=True)), copy

    def _first(self, key: jax.Array, whole: Any, variables: Any) -> State:
        """The state before the first step, of masters without padding, in the tree of the leaves."""
        params, copy = self._masters(whole)
        scale = LossScale.create() if self.policy.scaled else None
        # Another stream than that of the initial values.
        run = jax.random.fold_in(key, 1)
        return State(jnp.int32(0), params, copy, self.update.init(whole), variables, scale, run)

    def _given(self, params: Any, fresh: Callable[[str], bool] | None) -> dict[int, Any]:
        """Given parameters by their position among the model's."""
        models = self.layout.storage.models
        flat = jax.tree_util.tree_leaves_with_path(self.model_def.unwrap(params))
        names, paths = [name_of(path) for path, _ in flat], [leaf.path for leaf in models]
        if not {*names} & {*paths}:
            names = as_flax_saves(names)
        if len({*paths}) < len(paths) and names == paths:  # paths with a slash of their own
            given = dict(enumerate(x for _, x in flat))
        else:
            at = {path: number for number, path in enumerate(paths)}
            _check_names(names, paths, fresh, params)
            given = {at[name]: x for name, (_, x) in zip(names, flat, strict=True)}
        for number, x in given.items():
            if tuple(jnp.shape(x)) != models[number].shape:
                raise ValueError(
                    f"params= has {models[number].path} of shape {tuple(jnp.shape(x))}, "
                    f"the model needs {models[number].shape}"
                )
        return given

    def abstract_state(self) -> State:
        """The state as shapes, dtypes and shardings, without any array."""
        shapes = jax.eval_shape(self._create, jax.random.key(0))
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self._shardings)

    @functools.cached_property
    def _shardings(self) -> Any:
        """A state of shardings."""
        shapes = jax.eval_shape(self._create, jax.random.key(0))
        layout, here = self.layout, self.layout.sharding(PartitionSpec())
        return State(  # of shardings, where a state has arrays
            step=here,  # type: ignore[arg-type]
            params=layout.shardings("params"),
            copy=layout.shardings("copy") if layout.copied else None,
            optimizer=layout.shardings("optimizer"),
            variables=jax.tree.map(lambda _: here, shapes.variables),
            scale=jax.tree.map(lambda _: here, shapes.scale),
            key=here,  # type: ignore[arg-type]
        )


def check_here(layout: Layout) -> None:
    """Raise ValueError where programs are compiled for the devices of a layout, and cannot run."""
    first = layout.mesh.devices.flat[0]
    if is_away(first):
        raise ValueError(
            f"the step is for {layout.mesh.size} x {first.device_kind}, which are not here: it can be compiled, "
            "explained, checked and predicted; to run it give make_train_step devices that are here, as "
            "mesh=jax.devices(), or no mesh"
        )


def _check_names(names: Sequence[str], paths: Sequence[str], fresh: Callable[[str], bool] | None, params: Any) -> None:
    """Raise ValueError unless the names of given parameters are the model's paths, but for those that are `fresh`."""
    given, known = {*names}, {*paths}
    missing = [path for path in paths if path not in given and (fresh is None or not fresh(path))]
    unknown = [name for name in names if name not in known]
    if unknown == [""]:
        raise ValueError(f"params= is a {type(params).__name__}; pass a tree like step.params(state)")
    linen = any(name.removeprefix("params/") in known for name in unknown)
    tree = "variables['params']" if linen else "a tree like step.params(state)"
    lacks = f"lacks {few(missing)}"
    if unknown:
        has = f"has {few(unknown)}, and the model has {few(paths)}{did_you_mean(unknown[0], paths)}"
        raise ValueError(f"params= {f'{lacks}; it ' if missing else ''}{has}; pass {tree}")
    if missing:
        raise ValueError(f"params= {lacks}; pass {tree}, or {BEGIN_ANEW}")


def _check_key(key: Any) -> None:
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()):
        given = f"{key.dtype}{list(key.shape)}" if isinstance(key, jax.Array) else type(key).__name__
        raw = given == "uint32[2]"  # of PRNGKey
        hint = "; make it one by jax.random.wrap_key_data(key)" * raw
        raise ValueError(f"init needs one key from jax.random.key(seed), got {given}{hint}")
