"""A machine with pretended GPUs, for servers and workers: the variables that they start with."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.pretend.faults import Fault, order_faults
from tests.pretend.process import SETTINGS, VARIABLE

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).with_name("site")
SMI = Path(__file__).with_name("nvidia_smi.py")


@dataclass(frozen=True)
class PretendedMachine:
    """A folder with a stand-in for `nvidia-smi`, settings and orders of faults."""

    #: The folder.
    folder: Path

    @classmethod
    def create(
        cls,
        folder: Path,
        count: int = 2,
        capacity: int = 80 << 30,
        name: str = "Pretended GPU",
        capability: str = "9.0",
    ) -> PretendedMachine:
        """Make one with so many GPUs, of so many bytes and of a compute capability each."""
        tools = folder / "bin"
        tools.mkdir(parents=True)
        (folder / SETTINGS).write_text(
            json.dumps({"count": count, "capacity": capacity, "name": name, "capability": capability})
        )
        smi = tools / "nvidia-smi"
        smi.write_text(f'#!/bin/sh\nexec {sys.executable} -I {SMI} "$@"\n')
        smi.chmod(0o755)
        return cls(folder)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of the processes that have these GPUs."""
        imports = [str(SITE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            VARIABLE: str(self.folder),
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(imports),
        }

    def order(self, *faults: Fault) -> None:
        """Let its processes fail so from now on; without faults, no more."""
        order_faults(self.folder, *faults)
