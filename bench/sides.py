"""Peak memory of the encode side and of the language side of chats that show pictures, beside `generate` undivided.

A worker for `vision`, and one for `language` that pulls from it by tcp, as if on another machine. One chat of each
scene, then several at a time, in the order of their bytes, since peaks are those since the start. Resident is what a
compute process had at most, its libraries and weights too; arena is what lay there at most: outputs on the encode side,
what was pulled, and keys and values of prompts, on the language side. Fixed is the room of 8K tokens for each chat at a
time, as systems with embedding buffers reserve it, and its share in use the mean length by 8K. A narrow random
Qwen3-VL, one thread a process.
`python -m bench.sides [CHATS]`
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

from bench.report import show, table
from bench.seen import LONG_POSITIONS, LONG_SEEN, Scene, Shots, Undivided
from bench.servers import TOLD_S, pulled
from tools.server import Server, computes_of, serving
from unfuse.wire.keys import create_keys

MIB = 1 << 20
FIXED = 8192
"""Tokens for which a buffer of fixed size has room."""
SCENES: dict[str, Scene] = {
    "1 picture, 1K tokens": (32, 1, 0, 8),
    "4 pictures, 4K tokens": (32, 4, 0, 8),
    "32 frames of a video, 16K tokens": (32, 0, 32, 8),
}
CHATS = 8
SIDES = {"vision": "encode side", "language": "language side"}
ARENA = "1GiB"


def resident(pid: int) -> int:
    """The most bytes that were resident in a process since it began."""
    (kilobytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(kilobytes) << 10


def told(server: Server) -> dict[str, dict[str, int]]:
    """Bytes by role: the most that was resident in the compute process, and that lay in the arena."""
    workers = {worker["role"]: worker for worker in server.get("/v1/workers")["data"]}
    return {
        role: {
            "resident": max(resident(process.pid) for process in computes_of(worker["pid"])),
            "arena": worker["high_water"],
        }
        for role, worker in workers.items()
    }


def asked(server: Server, chats: list[Any]) -> list[int]:
    """The tokens of each prompt; all chats at a time."""
    with ThreadPoolExecutor(len(chats)) as pool:
        made = [*pool.map(lambda chat: server.post("/v1/chat/completions", chat[0]), chats)]
    time.sleep(TOLD_S)
    return [one["usage"]["prompt_tokens"] for one in made]


def row(peaks: dict[str, dict[str, int]], tokens: list[int], token_bytes: float) -> dict[str, Any]:
    """What each side had at most, and what rooms of fixed size would take for as many chats at a time."""
    fixed = len(tokens) * FIXED * token_bytes
    found: dict[str, Any] = {"tokens a chat": round(mean(tokens))}
    for role, side in SIDES.items():
        found[f"{side}: resident, MiB"] = peaks[role]["resident"] >> 20
        found[f"{side}: arena, MiB"] = round(peaks[role]["arena"] / MIB, 1)
        found[f"{side}: saved"] = f"{1 - peaks[role]['arena'] / fixed:.0%}"
    return found | {"fixed, MiB": round(fixed / MIB, 1), "fixed, share in use": f"{mean(tokens) / FIXED:.0%}"}


def undivided(shots: Shots, scenes: dict[str, Scene]) -> dict[str, int]:
    """What one process of `generate` had resident at most, after a chat of each scene."""
    found = dict[str, int]()
    with ExitStack() as stack:
        one = Undivided(stack, 1, 1)
        for name, scene in scenes.items():
            one.ask(shots.chat(scene))
            found[name] = resident(one.processes[0].pid) >> 20
    return found


def size_of(scene: Scene) -> int:
    """The tokens of its pictures, or of its video, whose frames are seen in pairs."""
    side, pictures, frames, _ = scene
    return side**2 * (pictures + -(-frames // 2))


def measure(shots: Shots, scenes: dict[str, Scene], at_a_time: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """A row for each scene and number of chats."""
    cases = [(name, chats) for name in scenes for chats in at_a_time]
    rows, seen = dict[str, dict[str, Any]](), 0
    with tempfile.TemporaryDirectory() as folder:
        create_keys(Path(folder, "keys"))
        keys = ("--keys", f"{folder}/keys")
        with serving(Path(folder), str(shots.model), "--workers", "none", *keys, at="127.0.0.1") as server:
            for role in SIDES:
                flags = (*keys, "--threads", "1", "--kv", "512MiB", "--arena", ARENA)
                server.worker(role, *flags, UNFUSE_RUN_DIR=f"{folder}/{role}")
            server.ready()
            for name, chats in sorted(cases, key=lambda case: size_of(scenes[case[0]]) * case[1]):
                tokens = asked(server, [shots.chat(scenes[name]) for _ in range(chats)])
                seen += sum(tokens)
                rows[f"{name}, {chats} at a time"] = row(told(server), tokens, pulled(server) / seen)
    return rows


def main() -> None:
    chats = int(sys.argv[1]) if sys.argv[1:] else CHATS
    with tempfile.TemporaryDirectory() as folder:
        shots = Shots(Path(folder), LONG_POSITIONS, LONG_SEEN)
        rows = measure(shots, SCENES, (1, chats))
        for name, resident_mib in undivided(shots, SCENES).items():
            rows[f"{name}, 1 at a time"]["generate: resident, MiB"] = resident_mib
    show("sides", chats=chats, fixed_tokens=FIXED, rows=rows)
    table("peak memory", rows)


if __name__ == "__main__":
    main()
