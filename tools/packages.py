"""Builds wheel and sdist, and installs them as a user does: the wheel from its file, all else from a package index.

`python -m tools.packages` says what that takes on this machine, from nothing to a picture: of the client alone, against
a server that runs here, and of all that a server needs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path
from typing import NamedTuple

from tools.addresses import free_port
from tools.server import environment, serving, until

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PROMPT = "a red circle on white"


class Built(NamedTuple):
    """What `make dist` makes."""

    wheel: Path
    sdist: Path

    @property
    def version(self) -> str:
        """The version in the wheel's name."""
        return self.wheel.name.split("-")[1]


class Place:
    """A fresh environment, which sees nothing of this one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"
        (data := folder / "data").mkdir()
        self.data = data

    def install(self, *arguments: str) -> None:
        """Install by pip. Raises CalledProcessError."""
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)

    def run(self, program: str, *arguments: str, ends: int = 0, **variables: str) -> str:
        """What a program of it prints on both streams. Raises AssertionError if it ends otherwise."""
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            env=self.variables() | variables,
            cwd=self.bin.parent,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == ends, done.stdout
        return done.stdout

    def variables(self) -> dict[str, str]:
        """The environment variables of its programs, which see no clone."""
        return {name: value for name, value in environment(self.data).items() if name != "PYTHONPATH"}

    def installed(self) -> dict[str, str]:
        """The versions of what is installed, by name."""
        lines = self.run(
            "python", "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"
        ).splitlines()
        return {name.lower(): version for name, _, version in (line.partition("==") for line in lines) if version}


def build(folder: Path) -> Built:
    """Build both from the sources, as `make dist` does."""
    tools = Place(folder / "build")
    tools.install("--constraint", str(CONSTRAINTS), "build")
    subprocess.run(
        [tools.bin / "python", "-m", "build", "--outdir", folder / "dist"],
        cwd=ROOT,
        env=os.environ | {"PIP_CONSTRAINT": str(CONSTRAINTS)},
        check=True,
        capture_output=True,
    )
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return Built(wheel, sdist)


def next_release() -> str:
    """The release that CHANGELOG.md describes first."""
    return re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]


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


def serve_a_picture(place: Place) -> None:
    """Start the `unfuse serve` of an environment, and have the command there make a picture by it."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    log = place.data / "serve.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [place.bin / "unfuse", "serve", "--port", str(port), "--arena", "64MiB"],
            env=place.variables(),
            cwd=place.bin.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(lambda: answers(url + "/ready"), f"a server to be ready, whose log is {log}", server)
        place.run("unfuse", "generate", PROMPT, "--server", url, "-o", "served.png")
        assert place.run("unfuse", "version").split()[1] in answers(url + "/version")
    finally:
        server.terminate()
        server.wait()


def answers(url: str) -> str:
    """What a server answers with 200, else ""."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read(), "utf-8")
    except OSError:
        return ""


def whole_server(built: Built, folder: Path, *options: str) -> str:
    """Install the wheel with all that a server needs and have it make a picture; returns what it took."""
    began = time.monotonic()
    place = Place(folder)
    place.install("--no-compile", *options, f"{built.wheel}[serve]")
    installed = time.monotonic()
    place.run("unfuse", "generate", PROMPT, "-o", "out.png")
    ended = time.monotonic()
    serve_a_picture(place)
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
        print(whole_server(built, folder / "server", "--constraint", str(CONSTRAINTS)), flush=True)
