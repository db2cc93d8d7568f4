"""Counts what went wrong, from a history of clients and from what the server says when all is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

import msgspec

from tests.chaos.history import TERMINAL, Final, Leaks, Operation, Told

TERMINAL_EVENTS = ("completed", "failed", "cancelled")
CONTROL = (
    "kill scheduler",
    "restart scheduler",
    "kill redis",
    "kill primary",
    "freeze primary",
    "kill shard",
    "fill disk",
)
BESIDE = ", control plane away"
AWAY_S = 4.0
"""A fault of the control plane so close to another one may delay what is done about it."""


class Held(msgspec.Struct, frozen=True):
    """A task that a victim held when it was hit."""

    request: str
    stage: str
    attempt: int


class Fault(msgspec.Struct):
    """Something that was done to the system. `at` is Unix seconds, `held` is what the victim was at."""

    at: float
    kind: str
    victim: str
    held: tuple[Held, ...] = ()
    spare: bool = True
    """Whether another worker of the pool was up."""
    lasts: float = 0.0
    """For how many seconds at least it went on: other faults were made beside it."""


class Verdict(msgspec.Struct):
    """The counts; each of `wrongs` must be 0. Lists hold what was counted, for whoever looks into it."""

    name: str
    operations: int = 0
    acknowledged: int = 0
    completed: int = 0
    faults: dict[str, int] = {}
    beside: dict[str, list[str]] = {}
    """Faults that were made while another one went on, by that one."""
    refused: int = 0
    reconnects: int = 0
    recovered: int = 0
    resumed: int = 0
    """Denoisings that went on from a checkpoint."""
    poison_dead: int = 0
    recovery_s: dict[str, list[float]] = {}
    """Seconds from a fault to the next start of each task its victim held, by kind of fault."""
    lost: list[str] = []
    unexpected: list[str] = []
    duplicated: list[str] = []
    dead_lettered: list[str] = []
    wrong_bytes: list[str] = []
    stale: list[str] = []
    errors: list[str] = []
    leaks: Leaks = Leaks()

    @property
    def wrongs(self) -> dict[str, Any]:
        """What must be nothing."""
        return {
            "lost": self.lost,
            "unexpected": self.unexpected,
            "duplicated": self.duplicated,
            "dead_lettered": self.dead_lettered,
            "wrong_bytes": self.wrong_bytes,
            "stale": self.stale,
            "errors": self.errors,
            "leaks": msgspec.structs.asdict(self.leaks) if self.leaks.any else [],
        }

    @property
    def kills(self) -> int:
        return sum(count for kind, count in self.faults.items() if kind.startswith("kill"))

    def require_nothing_wrong(self) -> None:
        found = {name: wrong for name, wrong in self.wrongs.items() if wrong}
        assert not found, f"{self.name}: {msgspec.json.encode(found).decode()[:4000]}"


def check(name: str, history: Iterable[Operation], final: Final, faults: Sequence[Fault] = ()) -> Verdict:
    """Compare what clients were told with what became of it."""
    verdict = Verdict(name, faults=dict(Counter(fault.kind for fault in faults)), leaks=final.leaks)
    made_for: dict[str, list[str]] = {}
    for id, told in final.requests.items():
        made_for.setdefault(told.view["metadata"].get("operation", ""), []).append(id)
    known: set[str] = set()
    for operation in history:
        known.add(operation.key)
        _operation(verdict, operation, made_for.get(operation.key, []), final)
    for key, ids in made_for.items():
        if key not in known:
            verdict.unexpected += [f"{id}: nobody asked for it" for id in ids]
    for id, told in final.requests.items():
        _events(verdict, id, told)
    for lasting in (fault for fault in faults if fault.lasts):
        also = [other.kind for other in faults if lasting.at < other.at < lasting.at + lasting.lasts]
        verdict.beside.setdefault(lasting.kind, []).extend(also)
    for kind, seconds in _recoveries(faults, final):
        verdict.recovery_s.setdefault(kind, []).append(seconds)
    return verdict


def _operation(verdict: Verdict, operation: Operation, made: list[str], final: Final) -> None:
    asked, ids, key = operation.asked, sorted({*operation.ids, *made}), operation.key
    verdict.operations += 1
    verdict.acknowledged += bool(operation.ids)
    verdict.refused += operation.refused
    verdict.reconnects += operation.lost
    verdict.errors += [f"{key}: {what}" for what in operation.unwell]
    if len(ids) > 1:
        verdict.duplicated.append(f"{key} was made into {ids}")
    told = [(id, final.requests[id]) for id in ids if id in final.requests]
    hashes = {hash for _, one in told for hash in one.hashes} | {*operation.hashes}
    if len(hashes) > 1:
        verdict.duplicated.append(f"{key} has {len(hashes)} different results")
    if hashes - {asked.right}:
        verdict.wrong_bytes.append(f"{key} {ids}: {asked.prompt} {asked.seed}")
    verdict.recovered += any(one.view["attempts"] > 1 for _, one in told)
    verdict.resumed += sum(stage.get("resumed", 0) > 0 for _, one in told for stage in one.view.get("stages", ()))
    verdict.completed += any(one.view["status"] == "completed" for _, one in told)
    verdict.lost += [f"{id} of {key} is not known any more" for id in operation.ids if id not in final.requests]
    verdict.lost += [f"{id} of {key} is {t.view['status']}" for id, t in told if t.view["status"] not in TERMINAL]
    if asked.healthy:
        _healthy(verdict, operation, told, final)
    else:
        _poison(verdict, operation, told, final)


def _healthy(verdict: Verdict, operation: Operation, told: list[tuple[str, Told]], final: Final) -> None:
    key = operation.key
    if operation.turned_away:
        verdict.unexpected += [f"{id} of {key} was refused, and is there" for id, _ in told]
        return
    if operation.outcome != "ok":
        verdict.errors.append(f"{key} {operation.ids} ended as {operation.outcome}: {operation.error}")
    for id, one in told:
        status = one.view["status"]
        if id in final.dead:
            verdict.dead_lettered.append(f"{id} of {key}: {final.dead[id]}")
        elif status in TERMINAL and status != "completed":
            verdict.lost.append(f"{id} of {key} was {status}: {one.view['error']}")
        elif status == "completed" and not one.hashes:
            verdict.lost.append(f"{id} of {key} was completed without result")
    if not told and operation.outcome == "ok":
        verdict.lost.append(f"{key} was answered, and there is no request of it")


def _poison(verdict: Verdict, operation: Operation, told: list[tuple[str, Told]], final: Final) -> None:
    """Poison must not be completed; whether it was kept as a dead letter, with evidence, is counted."""
    if operation.outcome == "ok" or any(one.view["status"] == "completed" for _, one in told):
        verdict.unexpected.append(f"{operation.key} {operation.asked.prompt} was completed")
    verdict.poison_dead += any(id in final.dead for id, _ in told)


def _events(verdict: Verdict, id: str, told: Told) -> None:
    """A request ends once; a stage is completed by the newest of its attempts, and by whoever had it."""
    ends = [event["type"] for event in told.events if event["type"] in TERMINAL_EVENTS]
    if len(ends) > 1:
        verdict.duplicated.append(f"{id} ended {len(ends)} times: {ends}")
    if not ends and told.view["status"] in TERMINAL:
        verdict.lost.append(f"{id} is {told.view['status']}, and no event says so")
    if ends and told.events[-1]["type"] not in TERMINAL_EVENTS:
        verdict.stale.append(f"{id}: {told.events[-1]['type']} after it had ended")
    started: dict[str, dict[int, str]] = {}
    given_up: set[tuple[str, int]] = set()
    for event in told.events:
        stage, attempt = event["stage"], event["attempt"]
        tries = started.setdefault(stage, {})
        if event["type"] == "stage_started":
            tries[attempt] = event["worker"]
        elif event["type"] == "retrying":
            given_up.add((stage, attempt))
        elif event["type"] == "stage_completed":
            newer = max(tries, default=attempt) > attempt
            if newer or (stage, attempt) in given_up or tries.get(attempt, event["worker"]) != event["worker"]:
                verdict.stale.append(f"{id}: attempt {attempt} of {stage} by {event['worker']}, after {tries}")
            given_up.add((stage, attempt))


def _recoveries(faults: Sequence[Fault], final: Final) -> Iterable[tuple[str, float]]:
    """Seconds from each fault to the next start, or to the completion, of each task that its victim held.

    Left out is where no other worker of the pool was up; apart is where schedulers or their queue were away meanwhile.
    """
    away = [fault.at for fault in faults if fault.kind in CONTROL]
    for fault in faults:
        beside = any(abs(at - fault.at) < AWAY_S for at in away)
        for held in fault.held if fault.spare else ():
            events = final.requests[held.request].events if held.request in final.requests else []
            went_on = [event["at"] for event in events if event["at"] > fault.at and _goes_on(event, held)]
            if went_on:
                yield fault.kind + (BESIDE if beside else ""), min(went_on) - fault.at


def _goes_on(event: dict[str, Any], held: Held) -> bool:
    again = event["type"] == "stage_started" and event["attempt"] > held.attempt
    return event["stage"] == held.stage and (again or event["type"] == "stage_completed")


def quantile(values: Sequence[float], part: float) -> float:
    """The value that this part of them do not exceed; 0 of none."""
    return sorted(values)[max(0, ceil(part * len(values)) - 1)] if values else 0.0


def summary(told: Iterable[str]) -> str:
    """The table of verdicts that tests recorded as JSON."""
    return table([msgspec.json.decode(one, type=Verdict) for one in dict.fromkeys(told)])


def table(verdicts: Sequence[Verdict]) -> str:
    """The counts side by side."""
    head = (
        "drill",
        "requests",
        "completed",
        "faults",
        "recovered",
        "lost",
        "unexpected",
        "duplicated",
        "dead",
        "stale",
        "wrong",
        "errors",
        "leaks",
        "poison",
        "429",
        "retries",
    )
    rows = [head]
    for one in verdicts:
        counts = (
            one.operations,
            one.completed,
            sum(one.faults.values()),
            one.recovered,
            len(one.lost),
            len(one.unexpected),
            len(one.duplicated),
            len(one.dead_lettered),
            len(one.stale),
            len(one.wrong_bytes),
            len(one.errors),
            int(one.leaks.any),
            one.poison_dead,
            one.refused,
            one.reconnects,
        )
        rows.append((one.name, *map(str, counts)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    done, recovery = Counter[str](), dict[str, list[float]]()
    for one in verdicts:
        done.update(one.faults)
        for kind, seconds in one.recovery_s.items():
            recovery.setdefault(kind, []).extend(seconds)
    lines.append("faults: " + (", ".join(f"{count} {kind}" for kind, count in sorted(done.items())) or "none"))
    for kind, seconds in sorted(recovery.items()):
        p50, p99, most = (quantile(seconds, part) for part in (0.5, 0.99, 1.0))
        lines.append(
            f"recovery after {kind}: p50 {p50:.2f} s, p99 {p99:.2f} s, max {most:.2f} s of {len(seconds)} tasks"
        )
    return "\n".join(lines)
