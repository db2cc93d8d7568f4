"""What `pip install unfuse` brings is enough for command and client, and other verbs say what to install.

Only the base dependencies, and what those ask for, can be imported by the processes that these tests start.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from tests.server.served import Served
from unfuse.service.installed import SERVER

ROOT = Path(__file__).parents[2]

BEGIN = """
import asyncio, os, signal, socket, sys
from importlib.machinery import PathFinder

ALLOWED, GONE = set({allowed!r}), {gone!r}

class Alone(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in ALLOWED or top.startswith("_sysconfigdata") or top in sys.stdlib_module_names and top not in GONE
        return PathFinder.find_spec(name, path, target) if known else None

sys.meta_path[sys.meta_path.index(PathFinder)] = Alone
for name in GONE:
    sys.modules.pop(name, None)
    for module in (os, signal, socket):
        vars(module).pop(name, None)
"""
"""Runs before anything else in a process that has nothing but what is ALLOWED, and nothing that is GONE."""

COMMAND = "from unfuse.cli.main import main; main()"
ELSEWHERE = (
    """
from types import SimpleNamespace
import unfuse.service.installed as installed
installed.sys = SimpleNamespace(platform="darwin")
"""
    + COMMAND
)

OF_UNIX = (
    "fcntl",
    "resource",
    "pwd",
    "grp",
    "termios",
    "tty",
    "getuid",
    "geteuid",
    "sched_getaffinity",
    "fork",
    "statvfs",
    "memfd_create",
    "killpg",
    "sysconf",
    "SIGKILL",
    "SIGHUP",
)
"""Modules, and what is in os, signal and socket, that are not there on Windows."""


@cache
def base() -> frozenset[str]:
    """The distributions that a plain install brings."""
    found: set[str] = set()
    seek = requirements(ROOT.joinpath("pyproject.toml").read_text())
    while seek:
        name = seek.pop()
        if name in found:
            continue
        found.add(name)
        asked = [line for line in metadata.requires(name) or () if "extra ==" not in line]
        seek += [canonical(re.split(r"[^\w.-]", line)[0]) for line in asked if is_installed(line)]
    return frozenset(found)


def requirements(text: str) -> list[str]:
    (listed,) = re.findall(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return [canonical(name) for name in re.findall(r'^    "([\w.-]+)', listed, re.MULTILINE)]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def is_installed(line: str) -> bool:
    """Whether it is: what is for other systems or versions of Python need not be."""
    try:
        return bool(metadata.version(re.split(r"[^\w.-]", line)[0]))
    except metadata.PackageNotFoundError:
        return False


@cache
def importable() -> tuple[str, ...]:
    """The packages of those distributions, and ours."""
    by_package = metadata.packages_distributions()
    names = {package for package, owners in by_package.items() if {canonical(one) for one in owners} & base()}
    return (*sorted(names), "unfuse", "__main__")


def alone(
    program: str, *arguments: str, gone: Iterable[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    code = BEGIN.format(allowed=importable(), gone=tuple(gone)) + program
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | variables,
    )


def test_base_install_has_few_dependencies() -> None:
    assert requirements(ROOT.joinpath("pyproject.toml").read_text()) == [
        "httpx2",
        "msgspec",
        "pillow",
        "rich",
        "structlog",
        "typer",
        "typing-extensions",
        "xxhash",
    ]
    assert not set(SERVER) & set(importable())
    assert len(base()) < 25


@pytest.mark.slow
def test_isolated_process_cannot_import_server_or_unix_modules() -> None:
    assert "No module named 'numpy'" in alone("import numpy").stderr
    assert "No module named 'fcntl'" in alone("import fcntl", gone=OF_UNIX).stderr


@pytest.mark.slow
@pytest.mark.parametrize("gone", [(), pytest.param(OF_UNIX, marks=pytest.mark.nightly)], ids=["here", "elsewhere"])
def test_clients_and_cli_work_with_base_dependencies_only(
    served: Served, tmp_path: Path, gone: tuple[str, ...]
) -> None:
    program = f"""
import asyncio, unfuse
with unfuse.connect({served.url!r}) as client:
    print(len(client.generate("a red circle", model="test/pictures").images))
async def ask():
    async with unfuse.aconnect({served.url!r}) as client:
        print(len((await client.generate("a red circle", model="test/pictures")).data))
asyncio.run(ask())
"""
    done = alone(program, gone=gone)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["1", "1"], "")
    for arguments in (["--help"], ["version"], ["config", "show"], ["generate", "--help"], ["serve", "--help"]):
        done = alone(COMMAND, *arguments, gone=gone)
        assert (done.returncode, done.stderr) == (0, ""), arguments
    made = ["generate", "a red circle", "-m", "test/pictures", "--server", served.url, "-o", str(tmp_path / "out.png")]
    done = alone(COMMAND, *made, gone=gone)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    for arguments in (["requests", "ls", "--json"], ["models", "--json"], ["dead", "ls", "--json"]):
        done = alone(COMMAND, *arguments, gone=gone, UNFUSE_SERVER=served.url)
        assert isinstance(json.loads(done.stdout), list), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["serve"],
        ["worker", "--role", "all"],
        ["doctor"],
        ["compare", "unfuse/shapes"],
        ["pull", "x"],
        ["disk"],
        ["keys", "new", "folder"],
        ["keys", "add", "joe"],
        ["generate", "a red circle"],
        ["chat", "hello"],
    ],
    ids=lambda arguments: "-".join(arguments[:2]),
)
def test_server_subcommand_without_server_packages_exits_2_with_pip_hint(arguments: list[str]) -> None:
    done = alone(COMMAND, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"unfuse: (`unfuse [\w ]+`|working without --server URL) needs the server packages, which are not installed "
        r"\(apsw, diffusers, fastapi, …\): pip install 'unfuse\[serve\]'\n",
        done.stderr,
    )


@pytest.mark.slow
def test_server_subcommand_on_another_system_exits_2_and_needs_linux() -> None:
    done = alone(ELSEWHERE, "doctor")
    assert done.returncode == 2
    assert "`unfuse doctor` needs Linux; client commands also run here" in done.stderr


@pytest.mark.slow
def test_import_error_of_optional_features_names_the_extra_to_install() -> None:
    for name in ("local", "TensorStore"):
        assert re.search(
            rf"ImportError: unfuse.{name} needs the package \w+: pip install 'unfuse\[serve\]'\n$",
            alone(f"import unfuse; unfuse.{name}").stderr,
        )
    video = """
from unfuse.client import Result
Result({"id": "req_0", "result": [{"content_type": "video/mp4", "url": "/0"}]}, [b""]).images
"""
    assert "ImportError: frames of a video need the library av: pip install 'unfuse[video]'\n" in alone(video).stderr
