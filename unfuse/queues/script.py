"""The Lua script of the queue in Redis: its arguments, its answers, and what this process remembers of those."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, TypeVar

import msgspec

from unfuse.core import errors
from unfuse.core.clock import Clock
from unfuse.core.codec import decode, encode
from unfuse.core.errors import ProtocolError
from unfuse.core.messages import WorkerInfo
from unfuse.core.model_spec import ModelSpec
from unfuse.core.request import Change, Event, RequestContext, RequestRecord, RunningStage
from unfuse.core.supervisor import RepeatedErrors
from unfuse.core.task import Claim, Lease, OutputDeltas, Task
from unfuse.queues.base import INDEXED_FIELDS, SCHEMA, DamagedRecord, RegisteredWorker, check_numbers, remaining_of

PARTS = ("common", "pieces", "index", "left", "requests", "history", "cached", "returned", "leases", "tasks")
#: All verbs as one script, and the SHA-1 by which Redis finds it when it is loaded.
SCRIPT = "\n".join(
    [
        f"local SCHEMA = '{SCHEMA}'",
        *(files("unfuse.queues").joinpath("scripts", f"{name}.lua").read_text() for name in PARTS),
    ]
)
SCRIPT_ID = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()

REFUSALS: dict[str, type[errors.UnfuseError]] = {
    "NOTFOUND": errors.NotFound,
    "LEASELOST": errors.LeaseLost,
    "CONFLICT": errors.Conflict,
    "OVERLOADED": errors.Overloaded,
    "DAMAGED": errors.Damaged,
    "PROTOCOL": errors.ProtocolError,
    "MISPLACED": errors.ConfigError,
}
#: Kinds of unreadable records that can be dropped; others, such as an event, are only passed over.
DROPPABLE = ("request", "worker", "card", "lease", "declaration")
#: Errors of the server when the script finds data that it does not expect.
BROKEN = re.compile(r"WRONGTYPE|attempt to |bad argument|not an integer|not a valid float")
#: The error of the server when it may take no more memory.
FULL = re.compile(r"\bOOM\b|used memory > 'maxmemory'")


T = TypeVar("T")


def raw(data: bytes) -> msgspec.Raw:
    """Bytes as a msgpack string, since the script's decoder has no binary type."""
    return msgspec.Raw(b"\xdb" + len(data).to_bytes(4, "big") + data)


def text(value: object) -> str:
    """A field of a request as text, in the form that is stored and searched for."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _mark(attempt: int, token: bytes) -> msgspec.Raw:
    return raw(b"%d:%b" % (attempt, token))


def claim_fields(claim: Claim) -> dict[str, Any]:
    """A claim for the script, which compares its mark."""
    mark = _mark(claim.attempt, claim.token)
    return {"request": claim.request, "stage": claim.stage, "attempt": claim.attempt, "mark": mark}


def grown_fields(grown: OutputDeltas) -> dict[str, Any]:
    """What an output has grown by, for the script."""
    pieces = [raw(piece) for piece in grown.pieces]
    return {"claim": claim_fields(grown.claim), "offset": grown.offset, "pieces": pieces}


def task(task: bytes, attempt: bytes) -> Task:
    """A stored task, with the attempt that is stored beside it."""
    return msgspec.structs.replace(decode(task, Task), attempt=int(attempt))


def lease(stored: bytes, attempt: bytes, worker: bytes, mark: bytes, expires: bytes, _: bytes) -> Lease:
    """A lease from the fields of an answer."""
    return Lease(task(stored, attempt), worker.decode(), mark.partition(b":")[2], float(expires))


def record(reply: Sequence[Any], sent: RequestContext | None = None) -> RequestRecord:
    """A record from the fields of an answer, which leaves out the context if it is the one that was sent.

    A number that cannot be read is 0: it costs its place in lists.
    """
    data, running, position, _, number = reply
    context = sent if data is None and sent else decode(data, RequestContext)
    is_number = isinstance(number, int) or (number or b"").isdigit()
    return RequestRecord(context, decode(running, tuple[RunningStage, ...]), position, int(number) if is_number else 0)


def error(met: Exception, place: str) -> errors.UnfuseError:
    """The exception for an error of the script, or of the server at `place`."""
    kind, _, text = str(met).partition(" ")
    if kind == "LIMITED":
        seconds, _, text = text.partition(" ")
        return errors.LimitReached(text, float(seconds))
    if kind in REFUSALS:
        return REFUSALS[kind](text)
    if BROKEN.search(str(met)):
        return errors.Damaged(f"the queue at {place} holds data that is not as expected: {met}")
    if FULL.search(str(met)):
        return errors.TransientError(f"the queue at {place} has no memory left: give it more (maxmemory), or make room")
    return errors.TransientError(f"the queue at {place} does not answer: {str(met) or 'it was silent'}")


def member(info: bytes, cards: tuple[ModelSpec, ...], seen: bytes, leased: bytes) -> RegisteredWorker:
    """A worker from the fields of an answer, with its cards."""
    return RegisteredWorker(decode(info, WorkerInfo), cards, float(seen), int(leased or 0))


def printable_name(name: bytes) -> str:
    """A name as text that people can read, whatever bytes it has."""
    return name.decode(errors="backslashreplace")


def raw_name(shown: str) -> msgspec.Raw:
    """The bytes of the name that `printable_name` returned, as a msgpack string."""
    return raw(re.sub(rb"\\x([0-9a-f]{2})", lambda found: bytes.fromhex(found[1].decode()), shown.encode()))


@lru_cache(maxsize=128)
def decoded(stored: bytes, kind: type[T]) -> T:
    """A declaration, or a worker's cards; cached, because they are read often and hardly ever change."""
    return decode(stored, kind)


def task_fields(task: Task) -> dict[str, Any]:
    """A task for the script. Its rank is bytes that sort like (−priority, order); the bits of a float sort like it
    once the sign bit, and for negative numbers every bit, is inverted.
    """
    (bits,) = struct.unpack(">Q", struct.pack(">d", task.order + 0.0))
    rank = struct.pack(">QQ", 2**63 - 1 - task.priority, bits ^ (2**64 - 1 if bits >> 63 else 2**63))
    names, planned = ("stage", "attempt", "near", "affinity", "priority", "not_before", "avoids"), task.planned
    fields = {name: getattr(task, name) for name in names} | {"task": raw(encode(task)), "rank": raw(rank)}
    return fields | {"pool": planned.pool, "room": planned.room, "needs": planned.needs}


def context_fields(context: RequestContext, push: Sequence[Task], events: Sequence[Event]) -> dict[str, Any]:
    """The arguments of `submit` and `commit`: the context, the fields that the script reads, tasks and events.

    Raises ProtocolError for a number that cannot be stored.
    """
    check_numbers(context, *push, *events)
    done = {name: _mark(s.attempt, s.token) for name, s in context.stages.items() if s.status == "done"}
    left = remaining_of(context)
    facts: dict[str, Any] = {name: getattr(context, name) for name in ("version", "status", "cost", "completed_at")}
    facts |= {name: read(context) for name, read in INDEXED_FIELDS.items() if name != "video"}
    stored: dict[str, Any] = {name: text(value) for name, value in facts.items()}
    stored |= {
        "context": raw(encode(context)),
        "done": raw(msgspec.msgpack.encode(done)),
        "left": raw(msgspec.msgpack.encode(left)),
    }
    return facts | {
        "id": context.id,
        "left": left,
        "fields": [part for item in stored.items() for part in item],
        "push": [task_fields(task) for task in push],
        "events": events,
    }


def change_fields(change: Change) -> dict[str, Any]:
    """The arguments of `commit`."""
    more = {"close": change.close, "claim": change.claim and claim_fields(change.claim)}
    return context_fields(change.context, change.push, change.events) | more


MOST = 1000  # how many are remembered: enough to begin a repair


class UnreadableRecords:
    """Records that could not be read, by kind and id. The records themselves stay in Redis."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], str] = {}
        self._errors = RepeatedErrors()

    def read(self, kind: str, id: str, read: Callable[..., T], *stored: Any) -> T | None:
        """Return what `read` makes of the stored record; None, and log it, if it cannot be read."""
        try:
            found = read(*stored)
        except (ProtocolError, TypeError, ValueError) as error:
            self.note(kind, id, str(error))
            return None
        self._reasons.pop((kind, id), None)
        return found

    def note(self, kind: str, id: str, reason: str) -> None:
        """Log and remember a record that cannot be read."""
        self._errors.log(f"reading a {kind}", ProtocolError(reason), id=id)
        if len(self._reasons) < MOST:
            self._reasons[kind, id] = reason

    def forget(self, id: str) -> None:
        """Forget the records of this id, because they are gone."""
        self._reasons = {key: reason for key, reason in self._reasons.items() if key[1] != id}

    def all(self) -> list[DamagedRecord]:
        """All records that are remembered."""
        return [DamagedRecord(id, kind, reason) for (kind, id), reason in self._reasons.items()]


MOST_KNOWN = 1024  # requests that are known at most: those that were stored last
KNOWN_S = 10.0  # the longest time, in seconds, that a record is known: the queue may have left out a gap since


class KnownRecords:
    """What a queue was told of its active records, but for steps. Another process may have changed them since.

    What is decided by one is checked when it is committed: by its version, and by the lease that is shown.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[str, tuple[RequestRecord, float]] = {}

    def keep(self, record: RequestRecord) -> RequestRecord:
        """This is how a record was stored just now. Returns it."""
        self._records.pop(record.context.id, None)
        if not record.context.over:
            self._records[record.context.id] = record, self._clock.now()
            if len(self._records) > MOST_KNOWN:
                del self._records[next(iter(self._records))]
        return record

    def leased(self, leases: Iterable[Lease], since: float) -> None:
        """These leases were given, at that time in Unix seconds."""
        for lease in leases:
            task = lease.task
            if record := self._current(task.request):
                others = (run for run in record.running if run.stage != task.stage)
                running = (*others, RunningStage(task.stage, task.attempt, lease.worker, since))
                known = msgspec.structs.replace(record, running=running, position=None)
                self._records[task.request] = known, self._clock.now()

    def of(self, claim: Claim) -> RequestRecord | None:
        """The record of a leased task's request, if that lease was heard of."""
        record = self._current(claim.request)
        held = record and any((run.stage, run.attempt) == (claim.stage, claim.attempt) for run in record.running)
        return record if held else None

    def _current(self, request: str) -> RequestRecord | None:
        """The record of a request with the time that its stages have run by now; None if that is not known."""
        record, heard = self._records.get(request, (None, 0.0))
        passed = self._clock.now() - heard
        if record is None or passed > KNOWN_S:
            return None
        running = (msgspec.structs.replace(run, ran_s=run.ran_s + passed) for run in record.running)
        return msgspec.structs.replace(record, running=tuple(running))
