"""Check that the packages of a server are installed.

`pip install unfuse` installs only the command and the client.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from unfuse.core.errors import UsageError

#: The command that installs a server.
INSTALL = "pip install 'unfuse[serve]'"

#: The packages that a server needs, by the names under which they are imported.
SERVER = (
    "apsw",
    "diffusers",
    "fastapi",
    "huggingface_hub",
    "numpy",
    "torch",
    "transformers",
    "uvicorn",
    "uvloop",
    "zmq",
)


def missing_here() -> list[str]:
    """Return the packages of a server that are not installed."""
    return [name for name in SERVER if find_spec(name) is None]


def require_server(what: str) -> None:
    """Raise UsageError, with what to install, if this machine cannot run a server.

    `what`: the action that needs a server, as the subject of the error's sentence.
    """
    if sys.platform != "linux":
        raise UsageError(f"{what} needs Linux; client commands also run here, as in `unfuse generate … --server URL`")
    if missing := missing_here():
        names = ", ".join(missing[:3]) + ", …" * (len(missing) > 3)
        raise UsageError(f"{what} needs the server packages, which are not installed ({names}): {INSTALL}")
