"""Read checkpoints with Orbax alone: run by tests in an environment that has jax, orbax-checkpoint and NumPy.

python plain_orbax.py FOLDER    a folder of checkpoints, each beside a file with its arrays by key path
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1

Arrays = dict[str, np.ndarray]


def flat(tree: Any, keys: tuple[str, ...] = ()) -> Arrays:
    """Return the arrays of nested dicts and lists by their keys, joined by dots."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else None
    if children is None:
        return {} if tree is None else {".".join(keys): np.asarray(tree)}
    return {name: x for key, child in children for name, x in flat(child, (*keys, str(key))).items()}


def same(tree: Any, expected: Arrays, reader: str) -> None:
    """Exit with an error unless each array is equal to the bit."""
    arrays = flat(tree)
    assert arrays.keys() == expected.keys(), (reader, arrays.keys() ^ expected.keys())
    for name, x in arrays.items():
        assert x.dtype == expected[name].dtype, (reader, name, x.dtype)
        assert x.tobytes() == expected[name].tobytes(), (reader, name)


def check(folder: Path) -> int:
    """Read one checkpoint in every way; return the number of its arrays."""
    expected = dict(np.load(folder.with_suffix(".npz")))
    number = max(int(path.name) for path in folder.iterdir())
    state = folder / str(number) / "state"
    tree = ocp.PyTreeCheckpointer().restore(state)
    same(tree, expected, "PyTreeCheckpointer")
    mesh = jax.make_mesh((5,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:5])

    def split(x: np.ndarray) -> jax.ShapeDtypeStruct:
        spec = jax.P("rows") if x.ndim and x.shape[0] % 5 == 0 else jax.P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))

    same(ocp.StandardCheckpointer().restore(state, jax.tree.map(split, tree)), expected, "StandardCheckpointer")
    same(v1.load(state) if hasattr(v1, "load") else v1.load_pytree(state), expected, "v1")
    with ocp.CheckpointManager(folder) as manager:
        assert manager.latest_step() == number
        items = ocp.args.Composite(state=ocp.args.PyTreeRestore(), about=ocp.args.JsonRestore())
        restored = manager.restore(number, args=items)
        same(restored.state, expected, "CheckpointManager")
        assert restored.about["step"] == number
    return len(expected)


if __name__ == "__main__":
    if "--hide" in sys.argv:  # for an environment that has jaxpar
        sys.modules["jaxpar"] = None  # type: ignore[assignment]
    else:
        assert importlib.util.find_spec("jaxpar") is None
    jax.config.update("jax_num_cpu_devices", 8)
    for path in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
        print(path.name, check(path))
