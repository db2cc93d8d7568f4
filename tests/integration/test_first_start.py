"""The first screen of `unfuse serve`, and the first things that a person does with it."""

from __future__ import annotations

import io
import json
import subprocess
import urllib.request
from pathlib import Path

from PIL import Image

from tools.server import Server, environment, unfuse, until

LINES_OF_A_SCREEN = 24


def test_serve_prints_model_layout_address_and_a_working_command(server: Server, tmp_path: Path) -> None:
    until(lambda: "\nready in " in server.log(), "the end of the start", server.process)
    screen = server.log().partition("\nready in ")[0].splitlines()
    logged = [json.loads(line) for line in screen if line.startswith("{")]  # warnings where a machine is overloaded
    details = {record["event"] for record in logged if record["level"] in ("info", "debug")}
    assert not details - {"accepted", "ended"}, "what other tests may have asked for meanwhile"
    progress = ("loading ", "inspecting ", "working ")  # on a terminal it stays in one place
    said = [line for line in screen if not line.startswith(("{", *progress))]
    assert [line.split()[0] for line in said] == ["serving", "layout", "workers:", "requests"], screen
    assert len(said) + 2 < LINES_OF_A_SCREEN
    assert said[0].startswith("serving unfuse/shapes with unfuse ")
    assert " all on cpu; memory: cpu " in said[2]
    assert said[3] == f"requests are accepted at {server.url}"

    ready, command = server.log().partition("\nready in ")[2].splitlines()[:2]
    assert ready.endswith(f" s: open {server.url}/docs, or try")
    made = subprocess.run(["sh", "-c", f"{command} -sS --fail"], capture_output=True, text=True, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    with urllib.request.urlopen(json.loads(made.stdout)["data"][0]["url"], timeout=30) as picture:
        assert Image.open(io.BytesIO(picture.read())).size == (128, 128)


def test_generate_from_stdin_warns_of_unknown_words_and_keeps_old_files(server: Server, tmp_path: Path) -> None:
    (tmp_path / "out.png").write_bytes(b"mine")
    variables = environment(tmp_path) | {"UNFUSE_SERVER": server.url}
    command = unfuse("generate", "-", "--steps", "2", "--json")
    made = subprocess.run(
        command, cwd=tmp_path, env=variables, input="a spaceship over a red circle\n", capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert "unfuse/shapes was not trained on spaceship: it generates one or two shapes, such as" in made.stderr
    assert json.loads(made.stdout)["files"] == ["out-2.png"]
    assert "out.png exists, so the new file is out-2.png" in made.stderr
    assert (tmp_path / "out.png").read_bytes() == b"mine"
    with Image.open(tmp_path / "out-2.png") as picture:
        assert picture.size == (128, 128)
    assert "a server of yours runs on this machine" not in made.stderr, "it is asked"
