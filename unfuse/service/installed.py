"""Whether what only a server needs is installed: `pip install unfuse` is the command and the client."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from unfuse.core.errors import UsageError

INSTALL = "pip install 'unfuse[serve]'"

SERVER = (
    "apsw", "diffusers", "fastapi", "huggingface_hub", "numpy", "torch", "transformers", "uvicorn", "uvloop", "zmq",
)  # fmt: skip
"""Packages without which there is no server, as they are imported."""


def missing_here() -> list[str]:
    """Those of these packages that are not installed."""
    return [name for name in SERVER if find_spec(name) is None]


def require_server(what: str) -> None:
    """Raise UsageError if `what` cannot be done here, with what to install, or where."""
    if sys.platform != "linux":
        raise UsageError(f"{what} needs Linux; command and client work here: `unfuse generate … --server URL`")
    if missing := missing_here():
        said = ", ".join(missing[:3]) + ", …" * (len(missing) > 3)
        raise UsageError(f"{what} needs packages of a server, which are not installed here ({said}): {INSTALL}")
