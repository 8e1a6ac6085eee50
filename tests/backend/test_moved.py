"""Users' programs can import modules by the names that the documentation once used."""

import importlib
import sys

import pytest

import jaxpar as jp
from jaxpar.backend.moved import MOVED


@pytest.mark.parametrize(("older", "newer"), [(a, b) for a, b in MOVED.items() if b is not None])
def test_an_older_name_imports_the_same_things_and_says_the_newer(older: str, newer: str) -> None:
    sys.modules.pop(older, None)
    with pytest.warns(DeprecationWarning, match=f"^{older} is now {newer}; import it from there$"):
        module = importlib.import_module(older)
    target = importlib.import_module(newer)
    public = [name for name in vars(target) if not name.startswith("__")]
    assert public
    assert all(getattr(module, name) is getattr(target, name) for name in public)


def test_the_warning_points_at_the_line_that_imports() -> None:
    sys.modules.pop("jaxpar.inspect.verify", None)
    with pytest.warns(DeprecationWarning, match="is now") as record:
        from jaxpar.inspect.verify import verify
    assert [warning.filename for warning in record] == [__file__]
    assert verify is jp.verify


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"jaxpar\.nothing"):
        importlib.import_module("jaxpar.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"jaxpar\.ops\.nothing"):
        importlib.import_module("jaxpar.ops.nothing")
