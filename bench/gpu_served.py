"""What a server makes of a model on a device: parts of `bench/gpu.py`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

from bench.load import closed_loop
from bench.model import PROMPTS
from bench.report import NO_CACHE
from bench.stream import first_frame
from tools.server import Server, computes_of, environment, serving
from unfuse.core.errors import PermanentError

CLIENTS = 16
SEEDS = 8
RUNS = 3


@dataclass(frozen=True)
class Served:
    """A model's folder on a device; `request` is (width, height, frames) in `steps`; small pictures are `side` wide."""

    folder: Path
    device: str
    request: tuple[int, int, int]
    steps: int
    side: int

    def compare(self) -> dict[str, Any]:
        """What `unfuse compare` says: diffusers, unfuse and their ratio by measure; how many requests were equal."""
        width, height, frames = self.request
        video = ["--frames", str(frames)] if frames > 1 else []
        size = ["--size", f"{width}x{height}", "--steps", str(self.steps), *video]
        command = [
            sys.executable,
            "-m",
            "unfuse",
            "compare",
            str(self.folder),
            "--json",
            "--device",
            self.device,
            *size,
            "--rounds",
            str(RUNS),
            "--levels",
            "1,4",
        ]
        with tempfile.TemporaryDirectory() as data:
            done = subprocess.run(command, env=environment(Path(data)), capture_output=True, text=True)
        if done.returncode:
            raise PermanentError(done.stderr[-2000:])
        said = json.loads(done.stdout)
        rows = {row.pop("measure"): row for row in said["figures"]}
        return rows | {"equal": f"{said['equal']} of {said['requests']}"}

    def rates(self) -> dict[str, Any]:
        """Small pictures for 16 clients, sharing forwards where no byte changes, and wherever they can."""
        found = self._rates({how: ("--batching", how) for how in ("exact", "batched")})
        return found | {"batched_over_exact": over(found, "batched", "exact")}

    def layouts(self) -> dict[str, Any]:
        """The same with all stages in a worker, a worker for each, and as `serve` chooses."""
        found = self._rates({how: ("--workers", how) for how in ("all=1", "split", "auto")})
        return found | {"split_over_all": over(found, "split", "all=1"), "auto_over_all": over(found, "auto", "all=1")}

    def stream(self) -> dict[str, Any]:
        """Of the request as a video: seconds from the end of denoising until a client has a frame, and all."""
        width, height, frames = self.request
        video = {"num_frames": frames, "size": f"{width}x{height}", "num_inference_steps": 2}
        options = (str(self.folder), "--device", self.device, "--workers", "all=1")
        with tempfile.TemporaryDirectory() as data, serving(Path(data), *options) as server:
            return first_frame(server.ready(), RUNS, video)

    def _rates(self, each: dict[str, tuple[str, ...]]) -> dict[str, Any]:
        """Pictures a second of servers with these options, one server at a time: a device may not hold two."""
        return {name: {"requests_per_s": round(self._rate(options), 2)} for name, options in each.items()}

    def _rate(self, options: tuple[str, ...]) -> float:
        call = {"prompt": PROMPTS[0], "size": f"{self.side}x{self.side}", "num_inference_steps": self.steps}
        rates = []
        with ExitStack() as stack:
            data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            started = serving(data, str(self.folder), "--device", self.device, *options, *NO_CACHE)
            server: Server = stack.enter_context(started).ready()
            for _ in range(RUNS + 1):
                wall, _ = closed_loop(
                    lambda seed: server.post("/v1/images/generations", call | {"seed": seed}), CLIENTS, 2 * CLIENTS
                )
                rates.append(2 * CLIENTS / wall)
        return median(rates[1:])


#: The values of `--workers` that are compared.
LAYOUTS = {"whole": "all=1", "split": "split"}


def same_bytes(folder: Path, data: Path, device: str, workers: str, memory: Callable[[], int]) -> dict[str, Any]:
    """Serve a tiny model. Returns whether requests have equal bytes alone, in company and after their worker's crash.

    `memory` returns MiB of the GPU that are in use.
    """
    before = memory()
    data.mkdir(exist_ok=True)
    options = ("--device", device, "--workers", workers, "--arena", "64MiB", *NO_CACHE)
    with serving(data, str(folder), *options) as server, ThreadPoolExecutor(SEEDS) as clients:
        server.ready()
        figures: dict[str, Any] = {"gpu_mib": memory() - before}

        def picture(seed: int) -> str:
            body = {"prompt": f"picture {seed % 3}", "seed": seed, "size": "32x32", "num_inference_steps": 6 + seed % 3}
            return str(server.post("/v1/images/generations", body)["data"][0]["b64_json"])

        alone = [picture(seed) for seed in range(SEEDS)]
        figures["equal_in_company"] = [*clients.map(picture, range(SEEDS))] == alone
        running = [clients.submit(picture, seed) for seed in range(SEEDS)]
        workers_shown = server.get("/v1/workers")["data"]
        for process in computes_of(*(worker["pid"] for worker in workers_shown)):
            process.kill()
        figures["equal_after_kill"] = [future.result() for future in running] == alone
        figures["devices"] = [worker["device"] for worker in workers_shown]
        figures["batch_invariance"] = {pool["id"]: pool["batch_invariance"] for pool in server.get("/v1/pools")["data"]}
        figures["sha256"] = sha256("".join(alone).encode()).hexdigest()
        return figures


def over(found: dict[str, Any], one: str, other: str) -> float:
    return round(found[one]["requests_per_s"] / found[other]["requests_per_s"], 2)
