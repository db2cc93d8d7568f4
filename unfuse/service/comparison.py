"""Compare the undivided diffusers pipeline with unfuse: speed, memory, and equality of results."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Self

import msgspec

from unfuse.client import Client
from unfuse.core.checking import check_request, size_from
from unfuse.core.errors import PermanentError
from unfuse.core.modalities import modality_for
from unfuse.core.model_spec import ModelSpec
from unfuse.core.pixels import size_of
from unfuse.launch.base import LineSink
from unfuse.launch.local import OutputPump
from unfuse.models.undivided import Undivided
from unfuse.planning.gpus import search_gpus
from unfuse.scheduler.costs import Costs
from unfuse.service.plan import ServingPlan

#: The SHA-256 of each file of a request's result.
Digests = tuple[str, ...]

#: The parameters of a request.
Request = dict[str, Any]

#: The relative difference up to which figures of two runs count as equal.
ALIKE = 0.05


class ComparisonFigures(msgspec.Struct, frozen=True):
    """The measurements of one side of a comparison."""

    #: Median seconds of a request alone.
    latency: float

    #: Requests per second, by the number of concurrent requests.
    throughput: dict[int, float]

    #: Peak resident bytes of the largest process, without shared memory.
    largest: int

    #: The sum of the peak resident bytes of all processes, and the bytes of their arenas.
    memory: int

    #: GPU bytes that this side allocated: the difference of the free memory before and after its requests.
    gpu: int

    #: The digests of the files of each request whose result is compared.
    digests: list[Digests]


class UndividedPipeline:
    """The undivided pipeline in a process of its own, which runs requests one by one.

    `plan`: the plan of unfuse, whose first model, dtypes and denoiser device are used.
    `image`: the reference image of all requests, or None.
    `on_line`: called with each line that the process writes to standard error.
    `on_request_done`: called after each request.
    """

    def __init__(
        self, plan: ServingPlan, image: Path | None, on_line: LineSink, on_request_done: Callable[[], object]
    ) -> None:
        model = plan.models[0]
        device = next(worker.device for worker in plan.workers if plan.worker_plan.goes_first(worker.role))
        dtypes = dict(part.split("=", 1) for part in model.dtypes.split(","))
        self._spec = model.spec
        self._on_request_done = on_request_done
        self._thread_counts = threads_to_try(plan)
        #: The number of threads with which requests are fastest; 0 until it is measured.
        self._best_threads = 0

        compute = plan.worker_plan.compute
        self._options = Undivided(
            str(model.folder), device, dtypes, str(image or ""), compute.fp32_precision, compute.attention
        )
        self._output = OutputPump(on_line)
        stderr = self._output.pipe(0)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "unfuse.models.undivided"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,  # only this process receives Ctrl-C
        )
        os.close(stderr)

    def __enter__(self) -> Self:
        self._call(self._options)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind:
            self._process.kill()
        self._process.communicate()  # closes its standard input, after which it exits
        self._output.close()

    def generate(self, requests: Sequence[Request], use_worker_threads: bool = False) -> list[Digests]:
        """Run these requests one by one, and return the digests of their results.

        `use_worker_threads`: use as many CPU threads as a worker of the plan, instead of the fastest number.
        """
        if not self._best_threads and not use_worker_threads:
            self._best_threads = min(self._thread_counts, key=lambda threads: self._seconds(threads, requests[0]))
        # Results are only byte-identical with equal numbers of threads.
        threads = self._thread_counts[0] if use_worker_threads else self._best_threads
        return [self._run_request(threads, request) for request in requests]

    def _seconds(self, threads: int, request: Request) -> float:
        """Return the seconds of a request, after a first run that starts the threads."""
        self._run_request(threads, request)
        started_at = time.perf_counter()
        self._run_request(threads, request)
        return time.perf_counter() - started_at

    def _run_request(self, threads: int, request: Request) -> Digests:
        """Run one request, and return the digests of its result."""
        digests = self._call((threads, check_request(self._spec, request, modality_for(request))[0]))
        self._on_request_done()
        return digests

    def memory(self) -> tuple[list[int], int]:
        """Return the peak bytes of the only process, and 0 bytes of arenas."""
        return [_peak(self._process.pid)], 0

    def _call(self, message: object) -> Digests:
        """Return the process's answer to a message. Raises PermanentError if it has ended."""
        if self._process.stdin and self._process.stdout:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
            if answer := self._process.stdout.readline():
                return msgspec.json.decode(answer, type=Digests)
        raise PermanentError("the undivided pipeline failed; its message is above")


class ComparedPools:
    """The workers of a private service, which run all requests at once.

    `client`: a client of the service.
    `image`: the reference image of all requests, or None.
    `on_request_done`: called after each request.
    """

    def __init__(self, client: Client, image: Path | None, on_request_done: Callable[[], object]) -> None:
        self._client = client
        self._on_request_done = on_request_done
        self._uploads: dict[str, Any] = {} if image is None else {"image": image}

    def generate(self, requests: Sequence[Request], use_worker_threads: bool = False) -> list[Digests]:
        """Run these requests concurrently, and return the digests of their results.

        Workers always use the threads of their plan, so `use_worker_threads` changes nothing.
        """
        digests = []
        # cache=False: an encoder output of an earlier request would make this one look faster than it is.
        for request in [self._client.submit(**params, **self._uploads, cache=False) for params in requests]:
            digests.append(tuple(hashlib.sha256(data).hexdigest() for data in request.result().data))
            self._on_request_done()
        return digests

    def memory(self) -> tuple[list[int], int]:
        """Return the peak bytes of each worker process, and the bytes of their arenas."""
        workers = self._client.workers()
        parents = [int(worker["pid"]) for worker in workers]
        children = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in parents]
        pids = [*parents, *(int(pid) for line in children for pid in line)]
        return [_peak(pid) for pid in pids], sum(int(worker["arena_bytes"]) for worker in workers)


def threads_to_try(plan: ServingPlan) -> list[int]:
    """Return the numbers of CPU threads to try for the undivided pipeline.

    The first is the number of each worker of the plan. The second is the number of all cores, if that differs.
    """
    cores = len(os.sched_getaffinity(0))
    worker_threads = plan.worker_plan.compute.threads or max(1, cores // len(plan.workers))
    return list(dict.fromkeys((worker_threads, cores)))


def requests_of(rounds: int, counts: Sequence[int]) -> int:
    """Return the number of requests that `measure` sends to one side.

    The undivided pipeline runs two more for each number of threads that it tries.
    """
    return 2 * rounds + 1 + sum(counts)


def predicted_s(plan: ServingPlan, request: dict[str, Any], costs: Path | None) -> float | None:
    """Return the predicted seconds of a request, or None without a prediction.

    It is the sum of the recorded costs of its stages. There is none if a stage never ran on this machine.
    """
    spec = plan.models[0].spec
    recorded_costs = Costs(costs)
    params, _ = check_request(spec, request, modality_for(request))
    pools = spec.pools()
    stage_seconds = [recorded_costs.seconds(pools[stage.name], stage.work.of(params)) for stage in spec.pipeline.stages]
    return None if None in stage_seconds else sum(seconds or 0.0 for seconds in stage_seconds)


def with_duration(spec: ModelSpec, request: dict[str, Any], image: Path | None) -> dict[str, Any]:
    """Return the parameters of a request with the size that follows from the reference image.

    Both sides then generate the same size. Without an image, the parameters are unchanged.
    """
    return request if image is None else request | size_from(spec, request, spec.defaults, size_of(image.read_bytes()))


def measure(
    side: UndividedPipeline | ComparedPools, params: Request, rounds: int, counts: Sequence[int]
) -> ComparisonFigures:
    """Measure one side: requests to compare, then single ones, then concurrent ones.

    The first seed of each series is 0, so both sides run the same requests.

    `params`: the parameters of all requests.
    `rounds`: the number of requests to compare, and of requests whose latency is measured.
    `counts`: the numbers of concurrent requests.
    """

    def requests(first_seed: int, count: int) -> list[Request]:
        return [params | {"seed": seed} for seed in range(first_seed, first_seed + count)]

    def seconds(first_seed: int, count: int) -> float:
        """Return the seconds of `count` concurrent requests with consecutive seeds."""
        started_at = time.perf_counter()
        side.generate(requests(first_seed, count))
        return time.perf_counter() - started_at

    free_before = _free_gpu_memory()
    digests = side.generate(requests(0, rounds), use_worker_threads=True)
    seconds(0, 1)  # warm up
    latency = median(seconds(seed, 1) for seed in range(rounds))
    throughput = {count: count / seconds(0, count) for count in counts}

    peaks, arena_bytes = side.memory()
    return ComparisonFigures(
        latency, throughput, max(peaks), sum(peaks) + arena_bytes, max(0, free_before - _free_gpu_memory()), digests
    )


def _peak(pid: int) -> int:
    """Return the peak resident bytes of a process, without shared memory."""
    # Arenas are shared memory, which would be counted once for each process that maps it.
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    bytes_by_field = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}
    return bytes_by_field["VmHWM"] - bytes_by_field["RssShmem"]


def _free_gpu_memory() -> int:
    """Return the free bytes of all GPUs."""
    return sum(gpu.free for gpu in search_gpus().gpus)


class ComparisonProgress:
    """Counts the finished requests of a comparison, and estimates the time that remains.

    As text, it is the running side and its progress.

    `totals`: the number of requests of each side, in order.
    `predicted_s`: the predicted seconds of a request, or None.
    `write_line`: called with the number of requests and an estimate; and with a measured estimate after the first
    request.
    `clock`: returns the time in seconds.
    """

    def __init__(
        self,
        totals: Mapping[str, int],
        predicted_s: float | None,
        write_line: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._totals = dict(totals)
        self._write_line = write_line
        self._clock = clock

        #: The running side; "" before the first one.
        self._side = ""
        #: The number of finished requests of the running side.
        self._done = 0
        #: When the running side started.
        self._started_at = 0.0
        #: When the first request of the running side was done.
        self._first_done_at = 0.0
        #: Estimated seconds of a request.
        self._each_s = predicted_s or 0.0
        #: Whether `_each_s` was measured in this comparison, by a request of either side.
        self._is_known = False

        requests = ", then ".join(f"{count} requests with {side}" for side, count in totals.items())
        total_s = sum(totals.values()) * self._each_s
        estimate = f"about {duration(total_s)}, estimated from earlier measurements on this machine"
        write_line(f"{requests}: {estimate if total_s else 'an estimate follows after the first request'}")

    def start_side(self, side: str) -> None:
        """Start counting the requests of this side."""
        self._side = side
        self._done = 0
        self._started_at = self._clock()

    def count_finished(self) -> None:
        """Count a finished request of the running side."""
        self._done += 1
        now = self._clock()
        if self._done == 1:
            # A side's first request includes its warm-up, so it sets the estimate only if there is no better one.
            self._first_done_at = now
            self._each_s = self._each_s if self._is_known else now - self._started_at
        else:
            self._each_s = (now - self._first_done_at) / (self._done - 1)
        if not self._is_known:
            self._is_known = True
            self._write_line(f"estimate: about {duration(self.remaining_s)}, at {self._each_s:.2g} s a request")

    @property
    def remaining_s(self) -> float:
        """Estimated seconds until the requests of all sides are done.

        A request of a later side counts as long as one of the running side.
        """
        remaining = self._totals.get(self._side, 0) - self._done + sum(self._totals[side] for side in self._later_sides)
        return max(0, remaining) * self._each_s

    @property
    def _later_sides(self) -> list[str]:
        """The sides that have not started."""
        sides = [*self._totals]
        return sides[sides.index(self._side) + 1 :] if self._side else sides

    def __str__(self) -> str:
        if self._done == self._totals.get(self._side, 0):
            return f"starting {self._later_sides[0]}" if self._later_sides else "done"
        remaining = f", about {duration(self.remaining_s)} left" if self._is_known else ""
        return f"measuring {self._side}: {self._done} of {self._totals[self._side]} requests{remaining}"


def duration(seconds: float) -> str:
    """Return a duration as text: 40 s, 4 min, 1 h 20 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def comparison_summary(undivided: ComparisonFigures, split: ComparisonFigures, workers: int) -> str:
    """Return a sentence that compares the figures of diffusers and unfuse.

    `undivided`: the figures of diffusers.
    `split`: the figures of unfuse.
    `workers`: the number of workers of unfuse.
    """
    max_concurrency = max(undivided.throughput)
    latency_gain = undivided.latency / split.latency
    throughput_gain = split.throughput[max_concurrency] / undivided.throughput[max_concurrency]

    best_gain, worst_gain = max(latency_gain, throughput_gain), min(latency_gain, throughput_gain)
    if best_gain <= 1 + ALIKE and worst_gain >= 1 - ALIKE:
        verdict = "both are equally fast here"
    elif worst_gain >= 1 - ALIKE:
        verdict = "unfuse is faster here"
    elif best_gain <= 1 + ALIKE:
        verdict = "diffusers alone is faster here"
    else:
        verdict = "which is faster here depends on the number of concurrent requests"

    memory_ratio = split.memory / undivided.memory
    return (
        f"{verdict}: compared with diffusers, unfuse needs {_times(1 / latency_gain, 'the time', 'as much time')} for "
        f"one request, completes {_times(throughput_gain, 'as many', 'as many')} a second with {max_concurrency} at "
        f"once, and uses {_times(memory_ratio, 'the memory', 'as much memory')}: {workers} worker{'s' * (workers > 1)} "
        "instead of one process"
    )


def _times(factor: float, compared: str, equal_text: str) -> str:
    """Return "FACTOR times `compared`", or `equal_text` for a factor of about 1."""
    return f"{factor:.2g} times {compared}" if abs(factor - 1) > ALIKE else equal_text
