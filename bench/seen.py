"""Chats that show pictures: `serve` with one worker for all, with what sees apart, and with two of that, beside
`generate` of the undivided model, in one run.

Latency of one chat, undivided and served with all cores; throughput of chats at a time, with one thread a process: as
many undivided processes as cores. Then one chat of many pictures, by encoders. A narrow random Qwen3-VL on one machine,
so that nothing is pulled; every chat is encoded anew. `--part long` has one chat of 1K, 4K and 16K tokens with answers
of 256 and 512. How long transfers take by length, what a small buffer costs, and memory by blocks against fixed room
are in bench/tokens.py, the peak memory of either side is in bench/sides.py.
`python -m bench.seen [ROUNDS] [--part usual|long]`
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from bench.report import ratio, show, table
from tools.server import Server, environment, serving
from tools.tiny_vision import KINDS, make_vision_model

PEER = Path(__file__).parents[1] / "tools" / "sees_undivided.py"
CORES = len(os.sched_getaffinity(0))
SIDE = 32
"""Pixels of a token, each way."""
LAYOUTS = ("all=1", "vision=1,language=1", "vision=2,language=1")
SCENES = {
    "1 picture of 1K tokens, 16 new": (32, 1, 0, 16),
    "4 pictures, 2.3K tokens, 16 new": (24, 4, 0, 16),
    "8 frames of a video, 1K tokens, 16 new": (16, 0, 8, 16),
}
"""The tokens of a side, pictures, frames, and tokens to make."""
LONG = {
    "1 picture, 1K tokens, 256 new": (32, 1, 0, 256),
    "4 pictures, 4K tokens, 512 new": (32, 4, 0, 512),
    "32 frames of a video, 16K tokens, 512 new": (32, 0, 32, 512),
}
POSITIONS, MOST_SEEN = 8192, 1024
"""The context of the model, and the tokens of its largest picture or video."""
LONG_POSITIONS, LONG_SEEN = 20 * 1024, 16 * 1024
CLIENTS, FEW = (1, 4, 16, 64), (12, 1, 0, 8)
MOST = 64
"""Of so many chats at a time there is a single round."""
MANY = (20, 8, 0, 1)
ROUNDS = 3
Scene = tuple[int, int, int, int]


class Shots:
    """Chats of scenes, as each side is asked for them; no two have a picture in common."""

    def __init__(self, folder: Path, positions: int = POSITIONS, most: int = MOST_SEEN) -> None:
        self._folder, self._number = folder, 0
        self.model = make_vision_model(folder / "narrow", KINDS[1], positions=positions, width=256, most=most)

    def chat(self, scene: Scene) -> tuple[dict[str, Any], dict[str, Any]]:
        """The body of a call, and a case."""
        side, pictures, frames, most = scene
        files = [self._draw(side * SIDE) for _ in range(pictures + frames)]
        urls = [f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}" for file in files]
        shown: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls[:pictures]]
        shown += [{"type": "video", "video": urls[pictures:], "fps": 2}] if frames else []
        said = {"type": "text", "text": "what is the lazy dog"}
        body = {"messages": [{"role": "user", "content": [*shown, said]}], "max_tokens": most, "cache": False}
        plain = [{"type": "image"}] * pictures + [{"type": "video"}] * bool(frames)
        names = [str(file) for file in files]
        case = {"folder": str(self.model), "messages": [{"role": "user", "content": [*plain, said]}], "most": most}
        seen = {"pictures": names[:pictures], "frames": names[pictures:], "fps": 2, "least": most}
        return {**body, "temperature": 0, "logit_bias": {"2": -100}}, {**case, **seen}

    def _draw(self, side: int) -> Path:
        self._number += 1
        colours = np.random.default_rng(self._number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        data = io.BytesIO()
        Image.fromarray(colours).resize((side, side)).save(data, "PNG")
        file = self._folder / f"{self._number}.png"
        file.write_bytes(data.getvalue())
        return file


class Undivided:
    """Processes of transformers alone, which take chats in turns."""

    def __init__(self, stack: ExitStack, processes: int, threads: int) -> None:
        self.processes = list[subprocess.Popen[str]]()
        self._free = SimpleQueue[subprocess.Popen[str]]()
        variables = environment(Path(tempfile.gettempdir())) | {"OMP_NUM_THREADS": str(threads)}
        for _ in range(processes):
            process = subprocess.Popen(
                [sys.executable, "-I", str(PEER), str(threads)],
                env=variables,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self.processes.append(stack.enter_context(process))
            self._free.put(process)

    def ask(self, chat: tuple[dict[str, Any], dict[str, Any]]) -> int:
        """The tokens of the prompt."""
        process = self._free.get()
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps([chat[1]]) + "\n")
        process.stdin.flush()
        (made,) = json.loads(process.stdout.readline())
        self._free.put(process)
        return len(made["prompt"])


def served(stack: ExitStack, model: Path, layout: str, threads: int) -> Callable[[Any], int]:
    """How a layout is asked: returns the tokens of the prompt."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    flags = "--workers", layout, "--threads", str(threads), "--kv", "256MiB", "--arena", "512MiB"
    server: Server = stack.enter_context(serving(folder, str(model), *flags)).ready()
    return lambda chat: int(server.post("/v1/chat/completions", chat[0])["usage"]["prompt_tokens"])


def timed(ask: Callable[[Any], int], chats: list[Any]) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(len(chats)) as pool:
        list(pool.map(ask, chats))
    return time.perf_counter() - began


def compared(
    shots: Shots, ways: dict[str, Callable[[Any], int]], scene: Scene, clients: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each way, in turns, for so many chats at a time, after a chat that warms up."""
    found = defaultdict[str, list[float]](list)
    for ask in ways.values():
        ask(shots.chat(scene))
    for turn in range(rounds):
        chats = [shots.chat(scene) for _ in range(clients)]
        names = [*ways]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(timed(ways[name], chats))
    return dict(found)


def row(found: dict[str, list[float]], chats: int = 0) -> dict[str, object]:
    """Medians, and what each is beside the first: seconds, or with so many `chats` how many a second."""
    first, *others = found
    named: dict[str, object] = {}
    for name in found:
        seconds = median(found[name])
        named[f"{name}, {'chats/s' if chats else 's'}"] = round(chats / seconds if chats else seconds, 3)
    for name in others:
        pair = (found[first], found[name]) if chats else (found[name], found[first])
        named[f"{name} ÷ {first}"] = round(ratio(*pair)["p50"], 2)
    return named


def one_chat(shots: Shots, scenes: dict[str, Scene], rounds: int) -> dict[str, dict[str, Any]]:
    """A row for each scene: seconds of one chat, undivided and by two layouts, with all cores."""
    with ExitStack() as stack:
        ways = {"generate": Undivided(stack, 1, CORES).ask}
        ways |= {layout: served(stack, shots.model, layout, CORES) for layout in LAYOUTS[:2]}
        return {name: row(compared(shots, ways, scene, 1, rounds)) for name, scene in scenes.items()}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("rounds", type=int, nargs="?", default=ROUNDS)
    options.add_argument("--part", choices=("usual", "long"), default="usual")
    given = options.parse_args()
    rounds, found = given.rounds, dict[str, dict[str, dict[str, Any]]]()
    with tempfile.TemporaryDirectory() as folder:
        if given.part == "long":
            found["one chat"] = one_chat(Shots(Path(folder), LONG_POSITIONS, LONG_SEEN), LONG, rounds)
            table("one chat", found["one chat"])
            show("seen", part="long", rounds=rounds, tables=found)
            return
        shots = Shots(Path(folder))
        found["one chat"] = one_chat(shots, SCENES, rounds)
        table("one chat", found["one chat"])
        with ExitStack() as stack:
            ways = {"generate": Undivided(stack, CORES, 1).ask}
            ways |= {layout: served(stack, shots.model, layout, 1) for layout in LAYOUTS}
            at_once = {
                str(clients): compared(shots, ways, FEW, clients, rounds if clients < MOST else 1)
                for clients in CLIENTS
            }
            found["chats at a time"] = {name: row(one, int(name)) for name, one in at_once.items()}
            table("chats at a time", found["chats at a time"])
            encoders = {name: ways[name] for name in LAYOUTS[1:]}
            found["one chat of many pictures"] = {
                f"{MANY[1]} pictures of {MANY[0] ** 2} tokens": row(compared(shots, encoders, MANY, 1, rounds))
            }
            table("one chat of many pictures", found["one chat of many pictures"])
    show("seen", rounds=rounds, tables=found)


if __name__ == "__main__":
    main()
