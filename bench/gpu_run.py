"""Measure and test on a GPU in pieces of at most 90 seconds, without network. The most valuable pieces come first.

    make gpu [GPU_PYTHON=python3] [GPU="--log gpu.jsonl --within 540 --device cuda:0"]
    python -m bench.gpu_run [--log FILE] [--within S] [--device DEVICE] [--tiny] [--list] [PIECE]...

Each piece is a process of its own, so that it starts with free GPU memory, and a crash of the device ends only one
piece. Facts are added to the log the moment they are known, as JSON lines. A piece that has ended gets a line with its
exit code, and does not run again: where a machine is lent for minutes, run the command again with the same log. A piece
that needs longer than its limit is ended and recorded as such. A piece that the end of `--within` cut off runs again.

If this Python lacks a package, the command names the wheels to bring (see `python -m bench.gpu_wheels`). `--tiny`
computes on the CPU with tiny models, to check that all pieces run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.gpu_pieces import Piece, pieces

#: Seconds that a piece has after SIGINT to end the servers that it started.
END_S = 15.0

#: Least seconds that must be left for a piece to start.
START_S = 20.0

#: Packages that every piece imports.
PACKAGES = ("torch", "transformers", "diffusers", "msgspec", "structlog", "zmq", "fastapi", "uvloop", "xxhash", "PIL")


def read_log(log: Path) -> dict[str, dict[str, Any]]:
    """Return the last line of each piece that has ended, by its name."""
    lines = map(json.loads, log.read_text().splitlines()) if log.exists() else iter(())
    return {line["piece"]: line for line in lines if "exit" in line}


def missing(packages: tuple[str, ...]) -> list[str]:
    """Return those of these packages that are not installed."""
    return [name for name in packages if find_spec(name) is None]


def run(piece: Piece, device: str, log: Path, limit: float) -> dict[str, Any] | None:
    """Run a piece for at most `limit` seconds. Returns its last line for the log; None if it did not end."""
    began = time.monotonic()
    variables = {"GPU_DEVICE": device, "GPU_LOG": str(log.resolve()), "GPU_PIECE": piece.name, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *piece.command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return None
    line = {"piece": piece.name, "exit": process.returncode, "seconds": round(time.monotonic() - began, 1)}
    return line | ({"output": output[-2000:]} if process.returncode or piece.is_test else {})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help="run only these pieces")
    parser.add_argument("--log", type=Path, default=Path("gpu.jsonl"), help="file with the results (gpu.jsonl)")
    parser.add_argument("--within", type=float, default=540.0, help="most seconds of this run (540)")
    parser.add_argument("--device", default="cuda:0", help="device to compute on (cuda:0)")
    parser.add_argument("--tiny", action="store_true", help="compute on the CPU with tiny models")
    parser.add_argument("--list", action="store_true", help="list the pieces and their limits in seconds")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = "cpu" if arguments.tiny else arguments.device
    selected = [
        piece for piece in pieces(device, arguments.tiny) if not arguments.pieces or piece.name in arguments.pieces
    ]
    if arguments.list:
        print("\n".join(f"{piece.seconds:4.0f}  {piece.name}" for piece in selected))
        return
    if lacking := missing(PACKAGES):
        sys.exit(
            f"this Python lacks {', '.join(lacking)}: bring their wheels, with those of `python -m bench.gpu_wheels`, "
            "and add the folder in which they are unpacked to PYTHONPATH"
        )

    end = time.monotonic() + arguments.within
    for piece in selected:
        left = end - time.monotonic()
        if piece.name in read_log(arguments.log):
            continue
        if left < START_S:
            break
        if lacking := missing(piece.packages):
            print(f"{piece.name}: skipped, since this Python lacks {', '.join(lacking)}", file=sys.stderr)
            continue
        line = run(piece, device, arguments.log, min(piece.seconds, left))
        if line is None and left >= piece.seconds:
            line = {"piece": piece.name, "exit": None, "output": f"did not end within {piece.seconds:g} s"}
        if line is None:
            break
        with arguments.log.open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(f"{piece.name}: exit {line['exit']}, {line.get('seconds', piece.seconds)} s", file=sys.stderr)

    ended = read_log(arguments.log)
    remaining = [piece.name for piece in selected if piece.name not in ended]
    failed = [name for name, line in ended.items() if line["exit"] != 0]
    print(
        f"{len(ended)} pieces are in {arguments.log}; remaining: {', '.join(remaining) or 'none'}; "
        f"failed: {', '.join(failed) or 'none'}"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
