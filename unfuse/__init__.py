"""unfuse serves a generative model as stages, each from its own pool of workers.

The public names below are looked up at first use, so that `import unfuse` stays light and brings no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unfuse import queues as queues
    from unfuse.client import aconnect, connect
    from unfuse.core.errors import InvalidParameter, ObjectLost, Overloaded, PermanentError, TransientError, UnfuseError
    from unfuse.service.service import local
    from unfuse.stores.tensor_store import TensorStore

__version__: str

_NAMES = {
    "local": "unfuse.service.service",
    "aconnect": "unfuse.client",
    "connect": "unfuse.client",
    "TensorStore": "unfuse.stores.tensor_store",
    "InvalidParameter": "unfuse.core.errors",
    "ObjectLost": "unfuse.core.errors",
    "Overloaded": "unfuse.core.errors",
    "PermanentError": "unfuse.core.errors",
    "TransientError": "unfuse.core.errors",
    "UnfuseError": "unfuse.core.errors",
}
_MODULES = {"queues"}

__all__ = [
    "InvalidParameter",
    "ObjectLost",
    "Overloaded",
    "PermanentError",
    "TensorStore",
    "TransientError",
    "UnfuseError",
    "__version__",
    "aconnect",
    "connect",
    "local",
    "queues",
]


def _installed_version() -> str:
    """Return the version of the installed package, or "0+unknown" for sources that were never installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("unfuse")
    except PackageNotFoundError:
        return "0+unknown"


def __getattr__(name: str) -> Any:
    """Return the version, or the public object of this name, imported at first use.

    Raises AttributeError for any other name, and ImportError for one that needs a package that is not installed.
    """
    if name == "__version__":
        return _installed_version()
    if name not in _NAMES and name not in _MODULES:
        raise AttributeError(f"module 'unfuse' has no attribute {name!r}")
    try:
        return import_module(f"unfuse.{name}") if name in _MODULES else getattr(import_module(_NAMES[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"unfuse.{name} needs the package {error.name}: pip install 'unfuse[serve]'") from error


def __dir__() -> list[str]:
    """What is public."""
    return __all__
