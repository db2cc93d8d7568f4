"""Pretended GPUs in the processes of a server: whatever process imports torch has them, if a variable names a folder.

Python imports `site/sitecustomize.py` at its start, which calls `install`. A process that computes sends its report to
whoever connects to its socket (`read_report`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.pretend.gpus import PretendedGpus

#: Names the folder of a pretended machine.
VARIABLE = "PRETENDED_GPUS"

#: A file of that folder: the number, name and bytes of its GPUs.
SETTINGS = "gpus.json"

FORK_SERVER = "unfuse.worker.fork_server"
"""The processes that it forks compute on the CPU."""


def install() -> None:
    """Pretend from the moment on when this process has imported torch; without the variable, never."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version(name).removesuffix("+cpu")  # else no GPU is looked for
    if FORK_SERVER not in sys.orig_argv:
        sys.meta_path.insert(0, _AfterImport("torch", partial(_pretend, Path(folder))))


class _AfterImport(MetaPathFinder):
    """Calls a function once a module is imported."""

    def __init__(self, module: str, function: Callable[[], None]) -> None:
        self._module, self._function = module, function

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_call(module: Any) -> None:
                execute(module)
                self._function()

            spec.loader.exec_module = execute_then_call  # type: ignore[method-assign]
        return spec


def _pretend(folder: Path) -> None:
    from tests.pretend.gpus import PretendedGpus

    gpus = PretendedGpus(**json.loads((folder / SETTINGS).read_text()), folder=folder)
    gpus.__enter__()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_address(os.getpid()))
    listener.listen()
    threading.Thread(target=_answer, args=(listener, gpus), name="pretended GPUs", daemon=True).start()


def _address(pid: int) -> str:
    """The socket of a process, in Linux's abstract namespace: paths of tests are too long for sockets."""
    return f"\0pretended-gpus-{pid}"


def _answer(listener: socket.socket, gpus: PretendedGpus) -> None:
    """Send the report to whoever connects."""
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(json.dumps(_report(gpus)).encode())


def _report(gpus: PretendedGpus) -> dict[str, Any]:
    return gpus.records.as_json() | {
        "held": gpus.memory.held(),
        "peak": dict(gpus.memory.peak),
        "pinned": gpus.memory.pinned,
        "broken": gpus.faults.broken,
    }


def read_report(pid: int) -> dict[str, Any]:
    """What a process did with its pretended GPUs so far. Raises OSError for one that has none."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(_address(pid))
        with connection.makefile("rb") as answer:
            report: dict[str, Any] = json.loads(answer.read())
    return report
