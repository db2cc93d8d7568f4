"""All that is measured and tested on a GPU, piece by piece, each in less than ten minutes, without network.

    make gpu [GPU_PYTHON=python3] [GPU="--within 540 --folder DIR --tiny"]

Pieces that are done are in a log, one JSON line each, and not done again: where a machine is lent for minutes, say it
again until nothing is left. One run lasts at most `--within` seconds. A piece that had them all and was not done is in
the log as such; one that was cut short is not. Models of real size stay in `--folder` for the next run.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu import ONCE, REAL

TESTS = "tests"
WITHIN_S = 540.0


def pieces() -> dict[str, list[str]]:
    """The commands by name, cheapest first; each is a process of its own, so that memory is free behind it."""
    measured = {part: ["--part", part] for part in ONCE}
    measured |= {f"{one.kind} {part}": ["--kind", one.kind, "--part", part] for one in REAL for part in one.parts}
    benches = {name: ["-m", "bench.gpu", *arguments] for name, arguments in measured.items()}
    return {TESTS: ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]} | benches


def done(log: Path) -> dict[str, dict[str, Any]]:
    """What the log has, by piece."""
    lines = log.read_text().splitlines() if log.exists() else []
    return {line["piece"]: line for line in map(json.loads, lines)}


def with_folder(command: list[str], asked: argparse.Namespace) -> list[str]:
    """A bench's command with where its models are; others as they are."""
    own = ["--tiny"] if asked.tiny else ["--folder", str(asked.folder), "--keep"]
    return [*command, *own] if "bench.gpu" in command else command


def run(piece: str, command: list[str], within: float) -> dict[str, Any] | None:
    """A piece's line for the log; None if it was not done in so many seconds."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        said, _ = process.communicate(timeout=max(0.0, within))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it ends the servers that it has started
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return None
    line = {"piece": piece, "exit": process.returncode, "seconds": round(time.monotonic() - began, 1)}
    if piece == TESTS or process.returncode:
        return line | {"said": said[-2000:]}
    return line | {"figures": json.loads(said)}


def main() -> None:
    words = argparse.ArgumentParser(
        prog="python -m bench.gpu_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--log", type=Path, default=Path("gpu.jsonl"))
    words.add_argument("--within", type=float, default=WITHIN_S)
    words.add_argument("--folder", type=Path, default=Path("gpu-models"))
    words.add_argument("--tiny", action="store_true")
    asked = words.parse_args()
    end = time.monotonic() + asked.within
    for piece, command in pieces().items():
        if piece in done(asked.log) or (asked.tiny and piece == TESTS):
            continue
        began = time.monotonic()
        line = run(piece, with_folder(command, asked), end - began)
        if line is None and end - began > 0.9 * asked.within:
            line = {"piece": piece, "exit": None, "said": f"not done within {asked.within:.0f} s"}
        if line is None:
            break
        with asked.log.open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(f"{piece}: exit {line['exit']}", file=sys.stderr)
    found = done(asked.log)
    left = [piece for piece in pieces() if piece not in found]
    bad = [piece for piece, line in found.items() if line["exit"] != 0 or '"failed":' in json.dumps(line)]
    print(
        f"{len(found)} pieces are in {asked.log}; left: {', '.join(left) or 'none'}; failed: {', '.join(bad) or 'none'}"
    )
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
