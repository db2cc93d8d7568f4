"""A parameter takes one line of a medium's table: it is documented, typed, sent, and refused out of its bounds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import unfuse
from unfuse.client import Client, connect
from unfuse.core.errors import InvalidParameter

pytestmark = pytest.mark.slow

TABLE = "COMMON = (\n"
LINE = '    Parameter("sharpness", "integer", 1, 9, description="how sharp the edges are"),\n'
REFUSAL = "sharpness must be 1 to 9, not 12"


class Package:
    """A copy of the package in which that line was added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(Path(unfuse.__file__).parent, folder / "unfuse", ignore=shutil.ignore_patterns("__pycache__"))
        table = folder / "unfuse" / "core" / "modalities.py"
        source = table.read_text()
        assert source.count(TABLE) == 1
        table.write_text(source.replace(TABLE, TABLE + LINE))

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "UNFUSE_DATA_DIR": str(self.folder), **variables}
        command = [sys.executable, "-m", "unfuse", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        with self.start(*arguments, **variables) as process:
            out, err = process.communicate()
        return process.returncode, out, err


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return Package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def server(package: Package) -> Iterator[Client]:
    """A client, which knows nothing of the line, of a server that has it."""
    with package.start("serve", "--workers", "none", "--port", "0", "--drain-timeout", "0") as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if " at http://" in line)
        with connect(said.split()[-1]) as client:
            yield client
        process.terminate()
        process.stderr.read()


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/videos"])
def test_new_parameter_appears_in_the_openapi_document(server: Client, path: str) -> None:
    body = server.get("/openapi.json")["paths"][path]["post"]["requestBody"]["content"]
    schema = {"type": "integer", "minimum": 1, "maximum": 9, "description": "how sharp the edges are"}
    assert body["application/json"]["schema"]["properties"]["sharpness"]["anyOf"][0] == schema


def test_new_parameter_appears_in_the_help_of_generate(package: Package) -> None:
    code, out, _ = package.run("generate", "--help")
    assert code == 0
    assert "--sharpness <int>" in out
    assert "How sharp the edges are. [1 to 9]" in " ".join(out.split())


def test_client_sends_the_new_parameter(server: Client) -> None:
    for asked in ({"sharpness": 3}, {"sharpness": "3", "seconds": 1}):
        request = server.submit("a red circle on white", **asked)
        assert request.view["params"]["sharpness"] == 3
        request.cancel()


def test_client_gets_invalid_parameter_for_out_of_bounds_values(server: Client) -> None:
    for asked in ({}, {"seconds": 1}):
        with pytest.raises(InvalidParameter) as caught:
            server.submit("a red circle on white", sharpness=12, **asked)
        assert (str(caught.value), caught.value.param) == (REFUSAL, "sharpness")
    with pytest.raises(InvalidParameter, match="did you mean sharpness"):
        server.submit("a red circle on white", sharpnes=3)


def test_cli_sends_the_new_parameter(package: Package, server: Client, tmp_path: Path) -> None:
    asked = ["generate", "a red circle on white", "-o", str(tmp_path / "out.png"), "--sharpness", "3"]
    with package.start(*asked, UNFUSE_SERVER=server.url) as process:
        assert process.stderr is not None
        mine = next(line for line in process.stderr if line.startswith("request ")).split()[1]
        request = server.request(mine)
        assert request.view["params"]["sharpness"] == 3
        request.cancel()
        process.stderr.read()
    assert process.returncode == 1


def test_cli_exits_2_for_out_of_bounds_values(package: Package, tmp_path: Path) -> None:
    for name in ("out.png", "out.mp4"):
        code, out, err = package.run("generate", "a star", "-o", str(tmp_path / name), "--sharpness", "12")
        assert (code, out, err) == (2, "", f"unfuse: {REFUSAL}\n")
    code, _, err = package.run("generate", "a star", "--sharpnes", "3")
    assert code == 2
    assert "--sharpness" in err


def test_shell_completion_offers_the_new_parameter(package: Package) -> None:
    typed = {"_UNFUSE_COMPLETE": "complete_bash", "COMP_WORDS": "unfuse generate --sharp", "COMP_CWORD": "2"}
    assert package.run(**typed)[1].split() == ["--sharpness"]
