"""Older names of modules, which users' programs may import: the import works and warns with the new name.

A finder at the end of `sys.meta_path` creates a module for each older name, filled with the names of the new module.
"""

import importlib
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

# Older name -> new name; None for a former package, whose modules have their own rows.
MOVED = {
    "jaxpar.inspect.compiled": None,
    "jaxpar.inspect.compiled.cost": "jaxpar.hardware.compiled.cost",
    "jaxpar.inspect.jitted": "jaxpar.forecast.own_step",
    "jaxpar.inspect.plan": None,
    "jaxpar.inspect.plan.line": "jaxpar.forecast.plan.line",
    "jaxpar.inspect.plan.planner": "jaxpar.forecast.plan.planner",
    "jaxpar.inspect.plan.ranking": "jaxpar.forecast.plan.ranking",
    "jaxpar.inspect.targets": "jaxpar.hardware",
    "jaxpar.inspect.verify": "jaxpar.parity",
    "jaxpar.layout.dims": None,
    "jaxpar.layout.dims.matrices": "jaxpar.numerics.matrices.numbers",
    "jaxpar.ops": None,
    "jaxpar.ops.experts": "jaxpar.parallel.expert.ops",
    "jaxpar.targets": "jaxpar.hardware",
    "jaxpar.train": None,
    "jaxpar.train.loop": "jaxpar.run.train.loop",
    "jaxpar.train.trainer": "jaxpar.run.train.trainer",
}


class MovedModules(MetaPathFinder, Loader):
    """The finder and loader of the modules in `MOVED`. Python asks it last, for names that no file has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an older name, and None for any other name."""
        # As a package, or Python would not ask for the older names of modules inside it.
        return spec_from_loader(fullname, self, is_package=True) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module with the names of the module that replaced it, and warn at the line that imports it."""
        if (new_name := MOVED[module.__name__]) is not None:
            warnings.warn(
                f"{module.__name__} is now {new_name}; import it from there", DeprecationWarning, stacklevel=2
            )
            contents = vars(importlib.import_module(new_name))
            # Names such as __name__ and __spec__ stay the older module's own.
            vars(module).update({name: value for name, value in contents.items() if not name.startswith("__")})
