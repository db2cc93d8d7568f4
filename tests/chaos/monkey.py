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
from typing import Any

from tests.chaos.checker import Fault, Held
from tests.chaos.cluster import LEASE_S, ROLES, START_S, Cluster, Gateway, Process, until
from tests.chaos.history import Leaks
from tests.disks import fill

LOST_LEASES = 2
"""Leases that one stage of a request may lose by our doing: a third is left to chance, a fourth would end it."""

QUIETLY = "kill worker, all else well"
"""Tells how long a lost lease takes by itself."""

FROZEN_S = LEASE_S + 1.5
"""Longer than a lease and the sweep that ends it."""

SETTLE_S = LEASE_S + 1.0
"""Between two faults that leave nobody who could end a lease: each forgives all leases once, and then they must end."""

LASTS_S = LEASE_S + 2.0
"""How long a disk stays full and a shard is away: longer than a lease, and than it takes to make other faults."""

DRAIN_S = 60.0


class Monkey:
    """Does what it is told to as soon as it may. `faults` is what it did."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster, self._rng = cluster, random.Random(f"monkey {seed}")
        self.faults: list[Fault] = []
        self._hit: dict[tuple[str, str], Held] = {}
        self._lost = Counter[tuple[str, str]]()
        self._thaw_at: dict[Process, float] = {}
        self._mend_at: dict[str, tuple[float, Callable[[], object]]] = {}
        """When, and how, a fault ends that lasts, by its kind."""
        self._unseen: list[dict[str, Any]] = []
        """The requests that ran when a shard was killed: those that live there cannot be seen."""
        self._settled_at = 0.0

    def rampage(self, plan: Mapping[str, int], busy: Callable[[], bool]) -> None:
        """So many faults of each kind in random order; ends early when nobody is at work any more."""
        deeds = {
            "kill compute": self._kill_compute,
            "kill worker": self._kill_worker,
            "kill scheduler": partial(self._end_gateway, "kill scheduler"),
            "kill redis": self._kill_redis,
            "kill primary": partial(self._fail_over, "kill primary"),
            "freeze primary": partial(self._fail_over, "freeze primary"),
            "freeze worker": self._freeze,
            QUIETLY: self._kill_one,
            "restart worker": self._restart_worker,
            "restart scheduler": partial(self._end_gateway, "restart scheduler"),
            "kill shard": self._kill_shard,
            "fill disk": self._fill_disk,
        }
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
        for kind in list(self._mend_at):
            self._mend(kind)
        self._cluster.ready()

    def _one_of(self, deeds: Mapping[str, Callable[[], bool]], todo: Sequence[str]) -> int:
        """Do the first of what is to be done that may be done now; returns its place, counted from 1, or 0."""
        self._cluster.require_alive()
        self._end_what_is_due()
        return next((number for number, kind in enumerate(todo[:8], 1) if deeds[kind]()), 0)

    def _kill_compute(self) -> bool:
        """`kill -9` of a compute process. A stage that has lost one is let finish first: its next crash is its last."""
        if self._unseen or not self._recovered() or (victim := self._victim()) is None:
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

    def _restart_worker(self) -> bool:
        """SIGTERM to a worker while another of its role is up; one is started in its place when it has ended."""
        return self._lose("restart worker", _restart)

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

    def _end_gateway(self, kind: str) -> bool:
        """End a gateway with its scheduler, when all are up; it is started again at the same addresses."""
        gateways = self._cluster.gateways
        if not self._control_is_up(settled=len(gateways) == 1):
            return False
        victim: Gateway = self._rng.choice(gateways)
        self._note(kind, victim.name, (), True)
        if kind.startswith("kill"):
            victim.kill()
            time.sleep(self._rng.uniform(0, 0.5))
            victim.start()
        else:
            _restart(victim)
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

    def _kill_shard(self) -> bool:
        """`kill -9` of one of the servers that have a part of the queue each, which is away for a while."""
        shards = self._cluster.shards
        if not shards or self._unseen or not self._control_is_up(settled=True):
            return False
        victim = self._rng.choice(shards)
        self._unseen = self._cluster.running()
        if not self._unseen:
            return False
        self._note("kill shard", victim.name, (), True, LASTS_S)
        self._cluster.away.append(victim)
        victim.kill()

        def come_back() -> None:
            victim.start()
            victim.ready()
            self._cluster.away.remove(victim)
            self._unseen = []
            self._settled_at = time.monotonic() + SETTLE_S

        self._mend_at["kill shard"] = time.monotonic() + LASTS_S, come_back
        return True

    def _fill_disk(self) -> bool:
        """Leave no room on the disk of the results, and of a queue in SQLite, for a while."""
        disk = self._cluster.disk
        if disk is None or "fill disk" in self._mend_at or not self._control_is_up(settled=True):
            return False
        self._note("fill disk", disk.name, (), True, LASTS_S)
        fill(disk)

        def make_room() -> None:
            (disk / "filler").unlink()
            self._settled_at = time.monotonic() + SETTLE_S

        self._mend_at["fill disk"] = time.monotonic() + LASTS_S, make_room
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
        asked = "/v1/workers" if "fill disk" in self._mend_at else "/ready"  # nothing is ready without room for results
        if not all(gateway.get(asked) for gateway in self._cluster.gateways):
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
        """The tasks that it has leased, as far as is known of requests that cannot be seen now."""
        views = {view["id"]: view for view in self._cluster.running()}
        views |= {
            view["id"]: view
            for view in self._unseen
            if view["id"] not in views and self._cluster.get(f"/v1/requests/{view['id']}") is None
        }
        return tuple(
            Held(view["id"], stage["name"], stage["attempt"])
            for view in views.values()
            for stage in view["stages"]
            if stage["status"] == "leased" and stage["worker"] == worker
        )

    def _recovered(self) -> bool:
        """Whether every stage that was hit, and must not be again, is done or has ended with its request.

        A worker may lease a task after its tasks were listed and before it is killed. Such a task is missing in the
        list, but its request counts the crash.
        """
        unfinished = self._cluster.unfinished()
        if unfinished is None:
            return False
        crashed = (stage for view in unfinished for stage in view["stages"] if stage["crashes"])
        if any(stage["status"] != "done" for stage in crashed):
            return False
        for key, task in list(self._hit.items()):
            view = self._cluster.get(f"/v1/requests/{task.request}")
            if view is None:
                return False
            (stage,) = (stage for stage in view["stages"] if stage["name"] == task.stage)
            if view["status"] in ("queued", "in_progress") and stage["status"] != "done":
                return False
            del self._hit[key]
        return True

    def _end_what_is_due(self) -> None:
        for process, at in list(self._thaw_at.items()):
            if time.monotonic() >= at:
                self._thaw(process)
        for kind, (at, _) in list(self._mend_at.items()):
            if time.monotonic() >= at:
                self._mend(kind)

    def _mend(self, kind: str) -> None:
        _, mend = self._mend_at.pop(kind)
        mend()

    def _thaw(self, process: Process) -> None:
        del self._thaw_at[process]
        process.send_all(signal.SIGCONT)

    def _note(self, kind: str, victim: str, held: tuple[Held, ...], spare: bool, lasts: float = 0.0) -> None:
        self.faults.append(Fault(time.time(), kind, victim, held, spare, lasts))


def _restart(process: Process) -> None:
    """Have it end in order, however long that takes, and start another in its place."""
    process.send(signal.SIGTERM)
    process.popen.wait(START_S)
    process.start()


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
    unfinished = cluster.unfinished()
    return Leaks(
        sum(one["used"] for one in members),
        sum(one["leased"] for one in members),
        sum(pool["waiting"] for pool in pools),
        1 if unfinished is None else len(unfinished),
        cluster.said("memory leak in a worker"),
    )
