"""Split against undivided on one machine in one run, two cores on each side.

Latency of one request, in interleaved pairs, and throughput of 32 requests at once. The undivided side gets whichever
is better for it: one process with two threads, or two processes with one. `python -m bench.split [PAIRS]`
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from bench.report import NO_CACHE, ratio, show, spread
from tools.server import Server, environment, serving

ROOT = Path(__file__).parents[1]
SHAPES = ROOT / "unfuse" / "models" / "shapes"
BATCH = 32
ROUNDS = 3
Case = dict[str, object]
STEPS = (20, 100)
SIDES = (128, 256)
"""Steps and pixels of a request: the model's defaults, a request of most of a second, and one of more than a second."""


class Undivided:
    """Processes that each hold the whole pipeline. `options` are what bench/undivided.py takes after the threads."""

    def __init__(self, processes: int, threads: int, folder: Path = SHAPES, *options: str) -> None:
        command = [sys.executable, str(ROOT / "bench" / "undivided.py"), str(folder), str(threads), *options]
        variables = environment(Path(tempfile.gettempdir())) | {"OMP_NUM_THREADS": str(threads)}
        self.processes = [
            subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(processes)
        ]
        self.free: SimpleQueue[int] = SimpleQueue()
        for index, process in enumerate(self.processes):
            assert process.stdout and process.stdout.readline() == b"ready\n"
            self.free.put(index)

    def run(self, index: int, case: Case | list[Case]) -> Case:
        """What a process answers when it has made a case, or several together."""
        process = self.processes[index]
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(case).encode() + b"\n")
        process.stdin.flush()
        answer: Case = json.loads(process.stdout.readline())
        return answer

    def next(self, case: Case | list[Case]) -> Case:
        """Have the next process that is free make it."""
        index = self.free.get()
        try:
            return self.run(index, case)
        finally:
            self.free.put(index)

    def batch(self, cases: list[Case]) -> float:
        began = time.perf_counter()
        shares = [cases[index :: len(self.processes)] for index in range(len(self.processes))]

        def work(index: int) -> None:
            for case in shares[index]:
                self.run(index, case)

        with ThreadPoolExecutor(len(shares)) as pool:
            list(pool.map(work, range(len(shares))))
        return time.perf_counter() - began

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin
            process.stdin.close()
            process.wait()


def case(seed: int, steps: int, side: int = SIDES[0]) -> Case:
    defaults = json.loads((SHAPES / "serving.json").read_text())["defaults"]
    defaults.pop("fps")
    size = {"width": side, "height": side, "num_frames": 1}
    return defaults | size | {"prompt": "a red circle on white", "seed": seed, "num_inference_steps": steps}


def ours(server: Server, seed: int, steps: int, side: int = SIDES[0]) -> None:
    asked = {"prompt": "a red circle on white", "seed": seed, "num_inference_steps": steps, "size": f"{side}x{side}"}
    server.post("/v1/images/generations", asked)


def timed(work: object, *arguments: object) -> float:
    began = time.perf_counter()
    work(*arguments)  # type: ignore[operator]
    return time.perf_counter() - began


def batch(server: Server, steps: int) -> float:
    with ThreadPoolExecutor(BATCH) as pool:
        return timed(lambda: list(pool.map(lambda seed: ours(server, seed, steps), range(BATCH))))


def latency(server: Server, fused: Undivided, pairs: int, steps: int, side: int = SIDES[0]) -> dict[str, object]:
    for seed in range(3):
        ours(server, seed, steps, side)
        fused.run(0, case(seed, steps, side))
    split, whole = [], []
    for seed in range(pairs):
        split.append(timed(ours, server, seed, steps, side))
        whole.append(timed(fused.run, 0, case(seed, steps, side)))
    return {"split_s": spread(split), "undivided_s": spread(whole), "split_over_undivided": ratio(split, whole)}


def throughput(server: Server, fused: Undivided, twins: Undivided) -> dict[str, object]:
    cases = [case(seed, STEPS[0]) for seed in range(BATCH)]
    rounds = [(batch(server, STEPS[0]), fused.batch(cases), twins.batch(cases)) for _ in range(ROUNDS)]
    split, one, two = map(list, zip(*rounds, strict=True))
    best = [min(pair) for pair in zip(one, two, strict=True)]
    return {
        "seconds": {"split": split, "undivided_1x2": one, "undivided_2x1": two},
        "over_best_undivided": ratio(best, split),
    }


def main() -> None:
    pairs = int(sys.argv[1]) if sys.argv[1:] else 15
    fused, twins = Undivided(1, 2), Undivided(2, 1)
    for threads, denoisers in ((1, 1), (2, 1), (1, 2)):
        with tempfile.TemporaryDirectory() as folder:
            plan = f"encoder=1,denoiser={denoisers},decoder=1"
            options = ("--threads", str(threads), "--workers", plan, "--arena", "64MiB", *NO_CACHE)
            with serving(Path(folder), *options) as server:
                server.ready()
                show(
                    "split",
                    threads_per_stage=threads,
                    denoisers=denoisers,
                    latency={
                        f"{side} px, {steps} steps": latency(server, fused, pairs, steps, side)
                        for side, steps in ((SIDES[0], STEPS[0]), (SIDES[0], STEPS[1]), (SIDES[1], STEPS[1]))
                    },
                    throughput_of_32=throughput(server, fused, twins),
                )
    fused.close()
    twins.close()


if __name__ == "__main__":
    main()
