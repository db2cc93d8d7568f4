"""Wheel and sdist as they are built, and the wheel in environments that have only what it asks for."""

from __future__ import annotations

import re
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.packages import ROOT, Built, Place, build, client_alone, whole_server
from tools.server import Server

pytestmark = pytest.mark.nightly

PROGRAM = """
import asyncio, sys, unfuse
with unfuse.connect(sys.argv[1]) as client:
    client.generate("a red circle on white").save("one.png")
async def ask():
    async with unfuse.aconnect(sys.argv[1]) as client:
        (await client.generate("a red circle on white", num_frames=5)).save("two.mp4")
asyncio.run(ask())
print("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def client(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """An environment with the wheel alone."""
    place = Place(tmp_path_factory.mktemp("client") / "venv")
    place.install(str(built.wheel))
    return place


def test_wheel_has_only_the_package_and_sdist_all_its_sources(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    listed = subprocess.run(["git", "ls-files", "unfuse"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert names == {*listed.stdout.splitlines()}
    assert {"unfuse/py.typed", "unfuse/models/shapes/model_index.json"} <= names
    with tarfile.open(built.sdist) as sdist:
        sources = {name.partition("/")[2] for name in sdist.getnames()}
    assert names <= sources
    assert {"pyproject.toml", "constraints.txt", "tests/integration/test_packages.py"} <= sources


def test_cli_and_client_run_without_torch_and_server_packages(built: Built, client: Place, server: Server) -> None:
    assert not {"torch", "diffusers", "numpy", "fastapi", "pyzmq"} & set(client.installed())
    assert "Usage: unfuse" in client.run("unfuse", "--help")
    assert re.fullmatch(r"unfuse \d+\.\d+\.\d+(\.dev\d+)?\n", client.run("unfuse", "version"))
    assert client.run("python", "-c", "import unfuse; print(unfuse.__version__)") == f"{built.version}\n"
    client.run("unfuse", "generate", "a red circle on white", "--server", server.url, "-o", "out.png")
    assert client.run("python", "-c", PROGRAM, server.url) == "False\n"
    files = [client.bin.parent / name for name in ("out.png", "one.png", "two.mp4")]
    assert [file.stat().st_size > 100 for file in files] == [True] * 3
    assert "unfuse/shapes" in client.run("unfuse", "models", UNFUSE_SERVER=server.url)
    for verb in (["serve"], ["worker", "--role", "all"], ["doctor"], ["pull", "x"]):
        assert client.run("unfuse", *verb, ends=2).endswith("pip install 'unfuse[serve]'\n")


def test_sdist_installs(built: Built, tmp_path: Path) -> None:
    place = Place(tmp_path / "venv")
    place.install(str(built.sdist))
    assert place.run("unfuse", "version") == f"unfuse {built.version}\n"


def test_clean_environment_installs_generates_and_serves_an_image(
    built: Built, server: Server, tmp_path: Path, record_property: Callable[[str, str], None]
) -> None:
    record_property("counted", client_alone(built, tmp_path / "client", server.url))
    record_property("counted", whole_server(built, tmp_path / "server", "--constraint", str(ROOT / "constraints.txt")))
