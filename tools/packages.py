"""Builds wheel and sdist, and installs them as a user does: into a fresh environment, from a package index.

`python -m tools.packages` says what that takes on this machine, from nothing to a picture: of the client alone, against
a server that runs here, and of all that a server needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import NamedTuple

from tools.server import environment, serving

ROOT = Path(__file__).parents[1]
PROMPT = "a red circle on white"


class Built(NamedTuple):
    """What `python -m hatchling build` makes."""

    wheel: Path
    sdist: Path


class Place:
    """A fresh environment, which sees nothing of this one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"
        self.data = folder / "data"

    def install(self, *arguments: str) -> None:
        """Install by pip. Raises CalledProcessError."""
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)

    def run(self, program: str, *arguments: str, ends: int = 0, **variables: str) -> str:
        """What a program of it prints on both streams. Raises AssertionError if it ends otherwise."""
        own = {name: value for name, value in environment(self.data).items() if name != "PYTHONPATH"} | variables
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            env=own,
            cwd=self.bin.parent,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == ends, done.stdout
        return done.stdout

    def installed(self) -> dict[str, str]:
        """The versions of what is installed, by name."""
        lines = self.run(
            "python", "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"
        ).splitlines()
        return {name.lower(): version for name, _, version in (line.partition("==") for line in lines) if version}


def build(folder: Path) -> Built:
    """Build both from the sources, by what pyproject.toml names."""
    tools = Place(folder / "build")
    tools.install("hatchling>=1.27")
    subprocess.run(
        [tools.bin / "python", "-m", "hatchling", "build", "--directory", folder / "dist"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return Built(wheel, sdist)


def bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def client_alone(built: Built, folder: Path, url: str) -> str:
    """Install the wheel with its base dependencies and have that server make a picture; returns what it took."""
    began = time.monotonic()
    place = Place(folder)
    place.install(str(built.wheel))
    installed = time.monotonic()
    place.run("unfuse", "generate", PROMPT, "--server", url, "-o", "out.png")
    ended = time.monotonic()
    packages = place.installed()
    assert "torch" not in packages
    return (
        f"client alone: environment and wheel {installed - began:.1f} s ({len(packages)} packages, "
        f"{bytes_of(folder) / 2**20:.0f} MiB), first picture {ended - installed:.1f} s later"
    )


def whole_server(built: Built, folder: Path, *options: str) -> str:
    """Install the wheel with all that a server needs and have it make a picture; returns what it took."""
    began = time.monotonic()
    place = Place(folder)
    place.install(*options, f"{built.wheel}[serve]")
    installed = time.monotonic()
    place.run("unfuse", "generate", PROMPT, "-o", "out.png")
    ended = time.monotonic()
    return (
        f"server: environment and wheel[serve] {installed - began:.1f} s ({len(place.installed())} packages, "
        f"{bytes_of(folder) / 2**20:.0f} MiB), first picture {ended - installed:.1f} s later"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name), tempfile.mkdtemp(prefix="run-", dir=name)
        os.environ["UNFUSE_RUN_DIR"] = run
        built = build(folder)
        print(f"{built.wheel.name} {built.wheel.stat().st_size / 2**20:.1f} MiB, {built.sdist.name}", file=sys.stderr)
        (data := folder / "serve").mkdir()
        with serving(data, "--arena", "64MiB") as server:
            print(client_alone(built, folder / "client", server.ready().url), flush=True)
        print(whole_server(built, folder / "server", "--constraint", str(ROOT / "constraints.txt")), flush=True)
