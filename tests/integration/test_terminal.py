"""The command as people type it: on a terminal, and into a pipe; left alone, and interrupted at any moment."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

COMMAND = [sys.executable, "-m", "unfuse"]
PROMPT = "a red circle on white"
TOKEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+")


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment whose data folder and temporary folder are the test's own."""
    for name in ("data", "tmp"):
        (tmp_path / name).mkdir()
    own = {"UNFUSE_DATA_DIR": str(tmp_path / "data"), "TMPDIR": str(tmp_path / "tmp"), "TERM": "xterm", "COLUMNS": "80"}
    return {name: value for name, value in os.environ.items() if not name.startswith("UNFUSE_SERVE")} | own


def on_terminal(
    arguments: list[str], environment: dict[str, str], interrupt: Callable[[str], bool] = lambda text: False
) -> tuple[int, str]:
    """Run a command on a terminal; Ctrl-C is typed once `interrupt` says so. Its exit code, and what it wrote."""
    pid, terminal = pty.fork()
    if not pid:
        os.execve(sys.executable, [*COMMAND, *arguments], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    written, typed = b"", False
    while data := _read(terminal):
        written += data
        if not typed and interrupt(written.decode(errors="replace")):
            typed = bool(os.write(terminal, b"\x03"))
    os.close(terminal)
    # at Ctrl-C a terminal drops what waits to be shown, which may end in the middle of a character
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode(errors="replace")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # nobody has its other end any more
        return b""


def screen(written: str) -> list[str]:
    """The lines that are left on a terminal to which this was written."""
    lines, row, column = [""], 0, 0
    for token in TOKEN.findall(written):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.endswith("A") and token.startswith("\x1b["):
            row -= int(token[2:-1] or 1)
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]


def nothing_left(tmp_path: Path) -> bool:
    """Whether the data folder has at most what was learned of batches, and the temporary one nothing."""
    learned = {f"{name}.{ending}" for name in ("exactness", "batch-sizes") for ending in ("json", "lock")}
    return {path.name for path in (tmp_path / "data").iterdir()} <= learned and not [
        *(tmp_path / "tmp").glob("unfuse-passing-*")
    ]


def test_progress_bars_stay_intact_among_log_lines(tmp_path: Path, home: dict[str, str]) -> None:
    out = tmp_path / "out.png"
    code, written = on_terminal(["--log-level", "debug", "generate", PROMPT, "-o", str(out), "--steps", "5"], home)
    lines = screen(written)

    assert code == 0
    with Image.open(out) as picture:
        assert picture.size == (128, 128)
    assert "loading unfuse/shapes: all " in written
    bars = [line for line in lines if "━" in line]
    assert [bar.split()[0] for bar in bars] == ["text_encode", "denoise.0", "vae_decode.0"]
    assert "5/5" in bars[1]
    assert [number for number, line in enumerate(lines) if "━" in line] == [
        *range(lines.index(bars[0]), lines.index(bars[0]) + 3)
    ]
    assert [line for line in lines if " ready " in line], "as text, above the bars"
    assert not [line for line in lines if line.startswith("{")]
    assert nothing_left(tmp_path)


@pytest.mark.nightly
def test_ctrl_c_preserves_finished_images(tmp_path: Path, home: dict[str, str]) -> None:
    pictures = ["-n", "6", "--seed", "5", "-o", str(tmp_path / "out.png")]
    arguments = ["generate", PROMPT, *pictures, "--workers", "split"]  # which makes the last two after the others
    # A result is stored behind its last step: with the third picture's, the first is there.
    code, written = on_terminal(arguments, home, lambda text: bool(re.search(r"vae_decode\.2 [^\n]* 1/1", text)))

    files = sorted(path.name for path in tmp_path.glob("out*.png"))
    assert code == 130
    assert 1 <= len(files) < 6
    assert files == [f"out-{index}.png" for index in range(len(files))]
    assert f"interrupted: kept {len(files)} of 6" in written
    assert f"{files[-1]} (seed {5 + len(files) - 1})" in written
    assert "Traceback" not in written
    assert nothing_left(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "code", "moment"),
    [
        (signal.SIGINT, 130, "inspecting"),
        (signal.SIGTERM, 143, "request req_"),
        (signal.SIGINT, 130, "importing"),
        (signal.SIGTERM, 143, "all importing"),
    ],
)
def test_generate_exits_without_traceback_on_signal_during_start(
    tmp_path: Path, home: dict[str, str], moment: str, number: int, code: int
) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", PROMPT, "-o", str(tmp_path / "out.png")],
        env=home,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said = ""
    assert process.stderr
    while moment not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    os.killpg(process.pid, number)  # as Ctrl-C does
    out, rest = process.communicate()
    assert (process.returncode, out) == (code, "")
    assert "Traceback" not in said + rest
    assert nothing_left(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_serve_exits_without_traceback_on_signal_during_load(home: dict[str, str], number: int, code: int) -> None:
    command = [*COMMAND, "serve", "--port", "0", "--queue", "memory", "--log-format", "json", "--log-level", "debug"]
    with subprocess.Popen(command, env=home, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        said = next(line for line in process.stderr if '"importing"' in line)
        process.send_signal(number)
        rest = process.stderr.read()
    assert process.returncode == code
    assert "Traceback" not in said + rest
    assert "Error" not in rest


@pytest.mark.nightly
def test_quiet_generate_prints_only_the_output_path(tmp_path: Path, home: dict[str, str]) -> None:
    arguments = ["generate", PROMPT, "-o", str(tmp_path / "out.png"), "--steps", "3", "-q"]
    done = subprocess.run([*COMMAND, *arguments], env=home, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith(f"{tmp_path}/out.png (seed ")


def test_busy_port_is_reported_in_one_line_with_advice(home: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [*COMMAND, "serve", "--workers", "none", "--port", port, "--queue", "memory", "-q"]
        done = subprocess.run(command, env=home, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"unfuse: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port\n"
