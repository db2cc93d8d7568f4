"""Kills, stops and starts parts of a cluster by a seed, paced so that the system always has a way on.

The pace is the fault model: one worker of each role stays up, a task is not hit by more crashes and lost leases than
its budgets allow, and at least one gateway is up (but for a queue that belongs to one).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from tests.chaos.checker import Fault, Held
from tests.chaos.cluster import LEASE_S, ROLES, Cluster, Gateway, Process, until
from tests.chaos.history import Leaks

LOST_LEASES = 2
"""Leases that one stage of a request may lose by our doing: a third is left to chance, a fourth would end it."""

QUIETLY = "kill worker, all else well"
"""Tells how long a lost lease takes by itself."""

FROZEN_S = LEASE_S + 1.5
"""Longer than a lease and the sweep that ends it."""

SETTLE_S = LEASE_S + 1.0
"""Between two faults that leave nobody who could end a lease: each forgives all leases once, and then they must end."""

DRAIN_S = 60.0


class Monkey:
    """Does what it is told to as soon as it may. `faults` is what it did."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster, self._rng = cluster, random.Random(f"monkey {seed}")
        self.faults: list[Fault] = []
        self._hit: dict[tuple[str, str], Held] = {}
        self._lost = Counter[tuple[str, str]]()
        self._thaw_at: dict[Process, float] = {}
        self._settled_at = 0.0

    def rampage(self, plan: Mapping[str, int], busy: Callable[[], bool]) -> None:
        """So many faults of each kind in random order; ends early when nobody is at work any more."""
        deeds = {
            "kill compute": self._kill_compute, "kill worker": self._kill_worker, "kill scheduler": self._kill_gateway,
            "kill redis": self._kill_redis, "kill primary": partial(self._fail_over, "kill primary"),
            "freeze primary": partial(self._fail_over, "freeze primary"),
            "freeze worker": self._freeze, QUIETLY: self._kill_one,
        }  # fmt: skip
        todo = [kind for kind, count in plan.items() for _ in range(count)]
        self._rng.shuffle(todo)
        while todo and busy():
            number = until(lambda: self._one_of(deeds, todo), "a fault that may be made")
            del todo[number - 1]
        self.calm()

    def calm(self) -> None:
        """Whoever was stopped goes on, and everything is up again."""
        for process in list(self._thaw_at):
            self._thaw(process)
        self._cluster.ready()

    def _one_of(self, deeds: Mapping[str, Callable[[], bool]], todo: Sequence[str]) -> int:
        """Do the first of what is to be done that may be done now; returns its place, counted from 1, or 0."""
        self._cluster.require_alive()
        self._thaw_due()
        return next((number for number, kind in enumerate(todo[:8], 1) if deeds[kind]()), 0)

    def _kill_compute(self) -> bool:
        """`kill -9` of a compute process. A stage that has lost one is let finish first: its next crash is its last."""
        if not self._recovered() or (victim := self._victim()) is None:
            return False
        process, worker, spare = victim
        computes, held = process.children(), self._held(worker)
        if not computes or any((task.request, task.stage) in self._hit for task in held):
            return False
        self._note("kill compute", worker, held, spare)
        for pid in computes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._hit |= {(task.request, task.stage): task for task in held}
        return True

    def _kill_worker(self) -> bool:
        """`kill -9` of a worker while another of its role is up; a new one takes its place."""
        return self._lose("kill worker", Process.replace)

    def _kill_one(self) -> bool:
        """The same while all workers are up and nothing is lost, of one that holds something."""
        if not self._recovered() or self._thaw_at or len(self._cluster.members()) < len(self._cluster.workers):
            return False
        done = self._lose(QUIETLY, Process.replace, idle=False)
        if done:
            self._hit |= {(task.request, task.stage): task for task in self.faults[-1].held}
        return done

    def _freeze(self) -> bool:
        """SIGSTOP for longer than a lease, of a worker's parent alone or with its compute; then SIGCONT."""

        def stop(process: Process) -> None:
            (process.send_all if self._rng.random() < 0.5 else process.send)(signal.SIGSTOP)
            self._thaw_at[process] = time.monotonic() + FROZEN_S

        return not self._thaw_at and self._lose("freeze worker", stop)

    def _lose(self, kind: str, deed: Callable[[Process], object], idle: bool = True) -> bool:
        """Do that to a worker while another of its role is up, unless it holds nothing and may not be `idle`.

        No stage loses more leases by us than it may, nor one after its compute process.
        """
        if (victim := self._victim(need_spare=True)) is None:
            return False
        process, worker, spare = victim
        held = self._held(worker)
        keys = [(task.request, task.stage) for task in held]
        if any(self._lost[key] >= LOST_LEASES or key in self._hit for key in keys) or not (held or idle):
            return False
        self._lost.update(keys)
        self._note(kind, worker, held, spare)
        deed(process)
        return True

    def _kill_gateway(self) -> bool:
        """`kill -9` of a gateway with its scheduler, when all are up; it is started again at the same addresses."""
        gateways = self._cluster.gateways
        if not self._control_is_up(settled=len(gateways) == 1):
            return False
        victim: Gateway = self._rng.choice(gateways)
        self._note("kill scheduler", victim.name, (), True)
        victim.kill()
        time.sleep(self._rng.uniform(0, 0.5))
        victim.start()
        self._settled_at = time.monotonic() + SETTLE_S
        return True

    def _kill_redis(self) -> bool:
        redis = self._cluster.redis
        if redis is None or not self._control_is_up(settled=True):
            return False
        self._note("kill redis", redis.name, (), True)
        redis.kill()
        time.sleep(self._rng.uniform(0, 0.5))
        redis.start()
        redis.ready()
        self._settled_at = time.monotonic() + SETTLE_S
        return True

    def _fail_over(self, kind: str) -> bool:
        """Have another server of the service become its primary."""
        service = self._cluster.service
        if service is None or not self._control_is_up(settled=True):
            return False
        self._note(kind, f"redis at {service.primary.port}", (), True)
        service.fail_over(freeze=kind.startswith("freeze"))
        self._settled_at = time.monotonic() + SETTLE_S
        return True

    def _control_is_up(self, settled: bool) -> bool:
        """Whether all gateways answer, and have done so for long enough if it must be `settled`."""
        if not all(gateway.get("/ready") for gateway in self._cluster.gateways):
            self._settled_at = time.monotonic() + SETTLE_S
            return False
        return not settled or time.monotonic() >= self._settled_at

    def _victim(self, need_spare: bool = False) -> tuple[Process, str, bool] | None:
        """A worker that is up: its process, its id, and whether another of its role is up."""
        members = self._cluster.members()
        processes = self._cluster.workers
        able = [one for one in processes if one.alive and one.pid in members and one not in self._thaw_at]
        roles = Counter(members[one.pid]["role"] for one in able)
        able = [one for one in able if not need_spare or roles[members[one.pid]["role"]] > 1]
        if not able or len(roles) < len(ROLES):
            return None
        # whoever holds something is worth more
        busy = [one for one in able if members[one.pid]["leased"]]
        chosen = self._rng.choice(busy if busy and self._rng.random() < 0.8 else able)
        member = members[chosen.pid]
        return chosen, member["id"], roles[member["role"]] > 1

    def _held(self, worker: str) -> tuple[Held, ...]:
        """The tasks that it has leased."""
        return tuple(
            Held(view["id"], stage["name"], stage["attempt"])
            for view in self._cluster.running()
            for stage in view["stages"]
            if stage["status"] == "leased" and stage["worker"] == worker
        )

    def _recovered(self) -> bool:
        """Whether every stage that was hit, and must not be again, is done or has ended with its request."""
        for key, task in list(self._hit.items()):
            view = self._cluster.get(f"/v1/requests/{task.request}")
            if view is None:
                return False
            (stage,) = (stage for stage in view["stages"] if stage["name"] == task.stage)
            if view["status"] in ("queued", "in_progress") and stage["status"] != "done":
                return False
            del self._hit[key]
        return True

    def _thaw_due(self) -> None:
        for process, at in list(self._thaw_at.items()):
            if time.monotonic() >= at:
                self._thaw(process)

    def _thaw(self, process: Process) -> None:
        del self._thaw_at[process]
        process.send_all(signal.SIGCONT)

    def _note(self, kind: str, victim: str, held: tuple[Held, ...], spare: bool) -> None:
        self.faults.append(Fault(time.time(), kind, victim, held, spare))


def drained(cluster: Cluster) -> Leaks:
    """What is left once nothing is to be done any more; given time to go away."""
    left = Leaks()

    def empty() -> bool:
        nonlocal left
        left = _left(cluster)
        return not left.any

    with suppress(AssertionError):
        until(empty, "everything to be given back", DRAIN_S)
    return left


def _left(cluster: Cluster) -> Leaks:
    members = cluster.members().values()
    pools = (cluster.get("/v1/pools") or {"data": []})["data"]
    active = [
        one for status in ("queued", "in_progress")
        for one in (cluster.get(f"/v1/requests?status={status}&limit=1000") or {"data": [None]})["data"]
    ]  # fmt: skip
    return Leaks(
        sum(one["used"] for one in members),
        sum(one["leased"] for one in members),
        sum(pool["waiting"] for pool in pools),
        len(active),
        cluster.said("memory leak in a worker"),
    )
