"""What the undivided pipeline and pools make of the same requests, how fast, and in how much memory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import msgspec

from unfuse.client import Client
from unfuse.core.checking import check, size_from
from unfuse.core.errors import PermanentError
from unfuse.core.modalities import medium_for
from unfuse.core.model_spec import ModelSpec
from unfuse.core.pixels import size_of
from unfuse.launch.base import Hear
from unfuse.launch.local import OutputPump
from unfuse.models.undivided import Undivided
from unfuse.planning.machine import gpus
from unfuse.scheduler.costs import Costs
from unfuse.service.plan import ServingPlan

Digests = tuple[str, ...]  # the SHA-256 of each file of a request


Request = dict[str, Any]  # what a client asks for


class ComparisonFigures(msgspec.Struct, frozen=True):
    """What was measured of one side: median seconds of a request alone, requests a second by how many came at once,
    peak bytes of the largest process, of all together with their arenas, and of the GPUs; files by request.
    """

    latency: float
    throughput: dict[int, float]
    largest: int
    memory: int
    gpu: int
    digests: list[Digests]


class UndividedPipeline:
    """The undivided pipeline in a process, one request after the other. `hear` gets each line that it writes.

    `made` is called after each request.
    """

    def __init__(self, plan: ServingPlan, image: Path | None, hear: Hear, made: Callable[[], object]) -> None:
        model = plan.models[0]
        device = next(worker.device for worker in plan.workers if plan.wanted.goes_first(worker.role))
        dtypes = dict(part.split("=", 1) for part in model.dtypes.split(","))
        self._card, self._made, self._best = model.card, made, 0
        self._alike, *_ = self._choices = threads_to_try(plan)
        self._wanted = Undivided(str(model.folder), device, dtypes, str(image or ""))
        self._output = OutputPump(hear)
        writing = self._output.pipe(0)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "unfuse.models.undivided"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=writing, start_new_session=True,
        )  # fmt: skip
        os.close(writing)

    def __enter__(self) -> Self:
        self._answer(self._wanted)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind:
            self._process.kill()
        self._process.communicate()
        self._output.close()

    def make(self, requests: Sequence[Request], alike: bool = False) -> list[Digests]:
        """Make all of these; `alike` with as many CPU threads a forward as a worker of the plan has."""
        if not self._best and not alike:
            self._best = min(self._choices, key=lambda threads: self._seconds(threads, requests[0]))
        return [self._request(self._alike if alike else self._best, request) for request in requests]

    def _seconds(self, threads: int, request: Request) -> float:
        """How long it takes with so many threads, once they are there."""
        self._request(threads, request)
        began = time.perf_counter()
        self._request(threads, request)
        return time.perf_counter() - began

    def _request(self, threads: int, request: Request) -> Digests:
        found = self._answer((threads, check(self._card, request, medium_for(request))[0]))
        self._made()
        return found

    def memory(self) -> tuple[list[int], int]:
        """Most bytes that its process had, and bytes that it shares."""
        return [_peak(self._process.pid)], 0

    def _answer(self, asked: object) -> Digests:
        if self._process.stdin and self._process.stdout:
            self._process.stdin.write(msgspec.json.encode(asked) + b"\n")
            self._process.stdin.flush()
            if answer := self._process.stdout.readline():
                return msgspec.json.decode(answer, type=Digests)
        raise PermanentError("the undivided pipeline failed; its message is above")


class ComparedPools:
    """Workers of our own, which take all requests at once. `made` is called after each of them."""

    def __init__(self, client: Client, image: Path | None, made: Callable[[], object]) -> None:
        self._client, self._made = client, made
        self._picture: dict[str, Any] = {} if image is None else {"image": image}

    def make(self, requests: Sequence[Request], alike: bool = False) -> list[Digests]:
        """Make all of these, asked for at once."""
        found = []
        for request in [self._client.submit(**one, **self._picture, cache=False) for one in requests]:
            found.append(tuple(hashlib.sha256(data).hexdigest() for data in request.result().data))
            self._made()
        return found

    def memory(self) -> tuple[list[int], int]:
        """Most bytes that each of their processes had, and bytes that they share."""
        workers = self._client.workers()
        parents = [int(worker["pid"]) for worker in workers]
        children = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in parents]
        pids = [*parents, *(int(pid) for line in children for pid in line)]
        return [_peak(pid) for pid in pids], sum(int(worker["room"]) for worker in workers)


def threads_to_try(plan: ServingPlan) -> list[int]:
    """The numbers of CPU threads that the undivided pipeline may suit best: first that of each worker of the plan."""
    cores = len(os.sched_getaffinity(0))
    alike = plan.wanted.compute.threads or max(1, cores // len(plan.workers))
    return list(dict.fromkeys((alike, cores)))


def requests_of(rounds: int, counts: Sequence[int]) -> int:
    """How many requests `measure` makes of a side; of the pipeline two more for each number of threads it tries."""
    return 2 * rounds + 1 + sum(counts)


def predicted_s(plan: ServingPlan, asked: dict[str, Any], costs: Path | None) -> float | None:
    """Seconds of a request by what its stages took on this machine; None if one of them never ran."""
    card, known = plan.models[0].card, Costs(costs)
    params, _ = check(card, asked, medium_for(asked))
    pools = card.pools()
    took = [known.seconds(pools[stage.name], stage.work.of(params)) for stage in card.pipeline.stages]
    return None if None in took else sum(seconds or 0.0 for seconds in took)


def sized(card: ModelSpec, asked: dict[str, Any], image: Path | None) -> dict[str, Any]:
    """Return the parameters with the size that follows from the picture, so that both sides make the same size."""
    return asked if image is None else asked | size_from(card, asked, card.defaults, size_of(image.read_bytes()))


def measure(
    side: UndividedPipeline | ComparedPools, asked: Request, rounds: int, counts: Sequence[int]
) -> ComparisonFigures:
    """Requests to compare, then some one by one, then many at once, with the same seeds whichever side it is."""

    def requests(first: int, count: int) -> list[Request]:
        return [asked | {"seed": seed} for seed in range(first, first + count)]

    def seconds(first: int, count: int) -> float:
        """The seconds that `count` concurrent requests take, with consecutive seeds."""
        began = time.perf_counter()
        side.make(requests(first, count))
        return time.perf_counter() - began

    free = _free()
    digests = side.make(requests(0, rounds), alike=True)
    seconds(0, 1)
    latency = median(seconds(seed, 1) for seed in range(rounds))
    throughput = {count: count / seconds(0, count) for count in counts}
    peaks, shared = side.memory()
    return ComparisonFigures(latency, throughput, max(peaks), sum(peaks) + shared, max(0, free - _free()), digests)


def _peak(pid: int) -> int:
    """The most memory a process has had resident beside what it shares, in bytes."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    sizes = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}
    return sizes["VmHWM"] - sizes["RssShmem"]


def _free() -> int:
    return sum(gpu.free for gpu in gpus())


if TYPE_CHECKING:
    from unfuse.service.comparison import ComparisonFigures

ALIKE = 0.05
"""By how much figures of two runs may differ and be called equal."""


class ComparisonProgress:
    """Counts the requests of a comparison. As text it is what runs now, and how much is left.

    `totals` are the requests of each side, in order. Before the first request it says how many there are, with an
    estimate from the `predicted_s` of one, if known; after the first request, an estimate from that.
    """

    def __init__(
        self, totals: Mapping[str, int], predicted_s: float | None, say: Callable[[str], object],
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._totals, self._say, self._now = dict(totals), say, now
        self._side, self._done, self._began, self._first = "", 0, 0.0, 0.0
        self._each_s = predicted_s or 0.0
        self._is_known = False
        requests = ", then ".join(f"{count} requests with {side}" for side, count in totals.items())
        whole = sum(totals.values()) * self._each_s
        known = f"about {duration(whole)}, by what stages took on this machine before"
        say(f"{requests}: {known if whole else 'the first one will tell how long that takes'}")

    def begin(self, side: str) -> None:
        """The requests of this side are made from now on."""
        self._side, self._done, self._began = side, 0, self._now()

    def made(self) -> None:
        """A request of this side is done."""
        self._done += 1
        now = self._now()
        if self._done == 1:
            self._first = now
            self._each_s = self._each_s if self._is_known else now - self._began
        else:
            self._each_s = (now - self._first) / (self._done - 1)
        if not self._is_known:
            self._is_known = True
            self._say(f"estimate: about {duration(self.left_s)}, at {self._each_s:.2g} s a request")

    @property
    def left_s(self) -> float:
        """Seconds until all requests are made, if each takes as long as those of late."""
        left = self._totals.get(self._side, 0) - self._done + sum(self._totals[side] for side in self._later)
        return max(0, left) * self._each_s

    @property
    def _later(self) -> list[str]:
        """The sides whose requests are still to be made."""
        sides = [*self._totals]
        return sides[sides.index(self._side) + 1 :] if self._side else sides

    def __str__(self) -> str:
        if self._done == self._totals.get(self._side, 0):
            return f"starting {self._later[0]}" if self._later else "done"
        left = f", about {duration(self.left_s)} left" if self._is_known else ""
        return f"measuring {self._side}: {self._done} of {self._totals[self._side]} requests{left}"


def duration(seconds: float) -> str:
    """A time in words: 40 s, 4 min, 1 h 20 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def verdict(whole: ComparisonFigures, split: ComparisonFigures, workers: int) -> str:
    """What the figures of diffusers and of so many workers come to, in a sentence."""
    most = max(whole.throughput)
    alone, at_once = whole.latency / split.latency, split.throughput[most] / whole.throughput[most]
    best, worst = max(alone, at_once), min(alone, at_once)
    if best <= 1 + ALIKE and worst >= 1 - ALIKE:
        faster = "both are equally fast here"
    elif worst >= 1 - ALIKE:
        faster = "unfuse is faster here"
    elif best <= 1 + ALIKE:
        faster = "diffusers alone is faster here"
    else:
        faster = "which is faster here depends on how many ask at once"
    memory = split.memory / whole.memory
    return (
        f"{faster}: compared with diffusers, unfuse needs {_times(1 / alone, 'the time', 'as much time')} for one "
        f"request, makes {_times(at_once, 'as many', 'as many')} a second with {most} at once, and takes "
        f"{_times(memory, 'the memory', 'as much memory')}: {workers} worker{'s' * (workers > 1)} beside one process"
    )


def _times(factor: float, what: str, equal: str) -> str:
    """So many times something, in words."""
    return f"{factor:.2g} times {what}" if abs(factor - 1) > ALIKE else equal
