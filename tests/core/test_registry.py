"""Names to implementations, and what a name that is none is told."""

import sys

import pytest

from unfuse.core.errors import ConfigError
from unfuse.core.registry import resolve

TABLE = {
    "join": "posixpath:join",
    "nested": "decimal:Decimal.from_float",
    "gone": "unfuse.no_such_module:x",
    "empty": "posixpath:no_such_name",
}


def test_registered_name_resolves_to_its_attribute() -> None:
    import decimal
    import posixpath

    assert resolve(TABLE, "join", "path") is posixpath.join
    assert resolve(TABLE, "nested", "number")(0.5) == decimal.Decimal("0.5")


def test_other_registered_names_are_not_imported() -> None:
    sys.modules.pop("this_is_lazy", None)
    assert resolve({"lazy": "no_such_module:x", "join": "posixpath:join"}, "join", "path")


def test_unregistered_implementation_resolves_by_module_and_attribute() -> None:
    import posixpath

    assert resolve({}, "posixpath:split", "path") is posixpath.split


@pytest.mark.parametrize("name", ["jion", "joi", "Join"])
def test_misspelled_name_error_suggests_the_nearest(name: str) -> None:
    reason = f"unknown path '{name}': did you mean join\\? known are empty, gone, join, nested"
    with pytest.raises(ConfigError, match=reason):
        resolve(TABLE, name, "path")


@pytest.mark.parametrize("name", ["", "zzz", ":", "a:", ":b", "posixpath"])
def test_unknown_name_error_lists_the_known_names(name: str) -> None:
    with pytest.raises(ConfigError, match="known are empty, gone, join, nested, or give module:attr"):
        resolve(TABLE, name, "path")


@pytest.mark.parametrize(
    "name, missing", [("gone", "no_such_module"), ("empty", "no_such_name"), ("nosuch:x", "nosuch")]
)
def test_failed_import_error_names_the_missing_module_or_attribute(name: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"path '{name}' cannot be loaded from .*{missing}"):
        resolve(TABLE, name, "path")
