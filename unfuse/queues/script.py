"""The Lua script of the Redis queue, its codec, and caches of records.

The codec encodes the arguments of calls and decodes the replies.
"""

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
from unfuse.queues.base import (
    INDEXED_FIELDS,
    SCHEMA_VERSION,
    DamagedRecord,
    RegisteredWorker,
    check_numbers,
    remaining_of,
)

#: The files of the script, in order: a Lua function sees only the locals that are defined above it.
PARTS = ("common", "pieces", "index", "left", "requests", "history", "cached", "returned", "leases", "tasks")
#: All verbs as one script, and the SHA-1 by which Redis finds it when it is loaded.
SCRIPT = "\n".join(
    [
        f"local SCHEMA = '{SCHEMA_VERSION}'",
        *(files("unfuse.queues").joinpath("scripts", f"{name}.lua").read_text() for name in PARTS),
    ]
)
SCRIPT_ID = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()

#: The exception for each error code of the script. "LIMITED", which has a number, is apart: see `error`.
REFUSALS: dict[str, type[errors.UnfuseError]] = {
    "NOTFOUND": errors.NotFound,
    "LEASELOST": errors.LeaseLost,
    "CONFLICT": errors.Conflict,
    "OVERLOADED": errors.Overloaded,
    "DAMAGED": errors.RecordDamaged,
    "PROTOCOL": errors.ProtocolError,
    "MISPLACED": errors.ConfigError,
}
#: Kinds of unreadable records that can be dropped. Others, for example an event, are skipped.
DROPPABLE = ("request", "worker", "card", "lease", "declaration")
#: The server's errors when the script finds data that it does not expect.
BROKEN = re.compile(r"WRONGTYPE|attempt to |bad argument|not an integer|not a valid float")
#: The server's error when it is out of memory.
FULL = re.compile(r"\bOOM\b|used memory > 'maxmemory'")


T = TypeVar("T")


def raw(data: bytes) -> msgspec.Raw:
    """Return bytes as a msgpack string, since the script's decoder has no binary type."""
    return msgspec.Raw(b"\xdb" + len(data).to_bytes(4, "big") + data)


def text(value: object) -> str:
    """Return a request field as text, in the form that is stored and compared."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _mark(attempt: int, token: bytes) -> msgspec.Raw:
    """Return the value that identifies a lease in the script: attempt and token."""
    return raw(b"%d:%b" % (attempt, token))


def claim_fields(claim: Claim) -> dict[str, Any]:
    """Encode a claim for the script."""
    mark = _mark(claim.attempt, claim.token)
    return {"request": claim.request, "stage": claim.stage, "attempt": claim.attempt, "mark": mark}


def delta_fields(output: OutputDeltas) -> dict[str, Any]:
    """Encode output deltas for the script."""
    pieces = [raw(delta) for delta in output.deltas]
    return {"claim": claim_fields(output.claim), "offset": output.offset, "pieces": pieces}


def task(stored: bytes, attempt: bytes) -> Task:
    """Decode a stored task. Its attempt is stored separately."""
    return msgspec.structs.replace(decode(stored, Task), attempt=int(attempt))


def lease(stored: bytes, attempt: bytes, worker: bytes, mark: bytes, expires: bytes, _: bytes) -> Lease:
    """Decode a lease from the fields of a reply.

    The last field, the name of the task, is not used.
    """
    return Lease(task(stored, attempt), worker.decode(), mark.partition(b":")[2], float(expires))


def record(reply: Sequence[Any], sent_context: RequestContext | None = None) -> RequestRecord:
    """Decode a record from the fields of a reply.

    `sent_context`: the context in the call's arguments. The reply has no context if this one was stored.
    An unreadable number of arrival becomes 0: the record loses its place in lists.
    """
    data, running, position, _, number = reply
    context = sent_context if data is None and sent_context else decode(data, RequestContext)
    is_number = isinstance(number, int) or (number or b"").isdigit()
    return RequestRecord(context, decode(running, tuple[RunningStage, ...]), position, int(number) if is_number else 0)


def error(cause: Exception, server: str) -> errors.UnfuseError:
    """Return the exception for an error of the script, or of the connection to `server`."""
    code, _, message = str(cause).partition(" ")
    if code == "LIMITED":
        seconds, _, message = message.partition(" ")
        return errors.LimitReached(message, float(seconds))
    if code in REFUSALS:
        return REFUSALS[code](message)
    if BROKEN.search(str(cause)):
        return errors.RecordDamaged(f"the queue at {server} contains unexpected data: {cause}")
    if FULL.search(str(cause)):
        return errors.TransientError(f"the queue at {server} is out of memory: increase maxmemory, or free memory")
    return errors.TransientError(f"the queue at {server} does not respond: {str(cause) or 'timeout'}")


def member(info: bytes, specs: tuple[ModelSpec, ...], last_heartbeat: bytes, leased: bytes) -> RegisteredWorker:
    """Decode a worker from the fields of a reply."""
    return RegisteredWorker(decode(info, WorkerInfo), specs, float(last_heartbeat), int(leased or 0))


def printable_name(name: bytes) -> str:
    """Return a name as printable text. Bytes that are not UTF-8 are escaped."""
    return name.decode(errors="backslashreplace")


def raw_name(printable: str) -> msgspec.Raw:
    """Return the bytes of a printable name, as a msgpack string: the inverse of `printable_name`."""
    return raw(re.sub(rb"\\x([0-9a-f]{2})", lambda match: bytes.fromhex(match[1].decode()), printable.encode()))


@lru_cache(maxsize=128)
def decoded(stored: bytes, kind: type[T]) -> T:
    """Decode a declaration or a worker's model specs, with a cache.

    They are read often and rarely change.
    """
    return decode(stored, kind)


def task_fields(task: Task) -> dict[str, Any]:
    """Encode a task for the script, with a rank of 16 bytes.

    Ranks sort like (−priority, order). The bits of a float sort like the float once the sign bit, and for negative
    numbers every bit, is inverted.
    """
    (bits,) = struct.unpack(">Q", struct.pack(">d", task.order + 0.0))  # + 0.0 turns −0.0 into 0.0
    rank = struct.pack(">QQ", 2**63 - 1 - task.priority, bits ^ (2**64 - 1 if bits >> 63 else 2**63))
    names = ("stage", "attempt", "preferred_node", "affinity", "priority", "not_before", "avoid_worker")
    planned = task.planned
    fields = {name: getattr(task, name) for name in names} | {"task": raw(encode(task)), "rank": raw(rank)}
    return fields | {"pool": planned.pool, "room": planned.output_size, "needs": planned.needs}


def context_fields(context: RequestContext, push: Sequence[Task], events: Sequence[Event]) -> dict[str, Any]:
    """Encode the arguments of `submit` and `commit`: context, indexed fields, tasks and events.

    Raises ProtocolError for a number that cannot be stored.
    """
    check_numbers(context, *push, *events)
    done = {name: _mark(s.attempt, s.token) for name, s in context.stages.items() if s.status == "done"}
    remaining = remaining_of(context)
    facts: dict[str, Any] = {name: getattr(context, name) for name in ("version", "status", "cost", "completed_at")}
    facts |= {name: get(context) for name, get in INDEXED_FIELDS.items() if name != "video"}
    stored: dict[str, Any] = {name: text(value) for name, value in facts.items()}
    stored |= {
        "context": raw(encode(context)),
        "done": raw(msgspec.msgpack.encode(done)),
        "left": raw(msgspec.msgpack.encode(remaining)),
    }
    return facts | {
        "id": context.id,
        "left": remaining,
        "fields": [argument for item in stored.items() for argument in item],
        "push": [task_fields(task) for task in push],
        "events": events,
    }


def change_fields(change: Change) -> dict[str, Any]:
    """Encode the arguments of `commit`."""
    change_only = {"close": change.close, "claim": change.claim and claim_fields(change.claim)}
    return context_fields(change.context, change.push, change.events) | change_only


#: Most unreadable records that are remembered: enough to start a repair.
MAX_UNREADABLE = 1000


class UnreadableRecords:
    """Records that could not be decoded, by kind and id.

    The records themselves stay in Redis.
    """

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], str] = {}
        self._errors = RepeatedErrors()

    def read(self, kind: str, id: str, read: Callable[..., T], *stored: Any) -> T | None:
        """Decode a stored record with `read`. An unreadable record is logged, and None is returned."""
        try:
            record = read(*stored)
        except (ProtocolError, TypeError, ValueError) as error:
            self.note(kind, id, str(error))
            return None
        self._reasons.pop((kind, id), None)
        return record

    def note(self, kind: str, id: str, reason: str) -> None:
        """Log an unreadable record, and store why it is unreadable."""
        self._errors.log(f"reading a {kind}", ProtocolError(reason), id=id)
        if len(self._reasons) < MAX_UNREADABLE:
            self._reasons[kind, id] = reason

    def remove(self, id: str) -> None:
        """Forget the records of this id, because they were dropped or are readable again."""
        self._reasons = {key: reason for key, reason in self._reasons.items() if key[1] != id}

    def all(self) -> list[DamagedRecord]:
        """Return all remembered records."""
        return [DamagedRecord(id, kind, reason) for (kind, id), reason in self._reasons.items()]


#: Most cached records. The one that was stored longest ago is evicted.
MAX_CACHED_RECORDS = 1024
#: Longest age of a cached record, in seconds. Its `ran_s` is extrapolated, without the gaps that
#: `TaskQueue.sweep_expired` leaves out, so it must not be old.
CACHED_RECORD_S = 10.0


class RecordCache:
    """A cache of active records, which may be stale.

    Other processes may have changed them, and steps are not updated. `commit` detects stale records, by their version
    and the claim's lease.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: Records by request id, in the order of `put`, each with the time of its last update.
        self._records: dict[str, tuple[RequestRecord, float]] = {}

    def put(self, record: RequestRecord) -> RequestRecord:
        """Cache a record that was stored just now, and return it.

        The record of a request that is over is not cached.
        """
        self._records.pop(record.context.id, None)
        if not record.context.is_over:
            self._records[record.context.id] = record, self._clock.now()
            if len(self._records) > MAX_CACHED_RECORDS:
                del self._records[next(iter(self._records))]
        return record

    def leased(self, leases: Iterable[Lease], since: float) -> None:
        """Add new leases to the cached records. `since` is the Unix time of the leases."""
        for lease in leases:
            task = lease.task
            if record := self._current(task.request):
                others = (run for run in record.running if run.stage != task.stage)
                running = (*others, RunningStage(task.stage, task.attempt, lease.worker, since))
                updated = msgspec.structs.replace(record, running=running, position=None)
                self._records[task.request] = updated, self._clock.now()

    def of(self, claim: Claim) -> RequestRecord | None:
        """Return the cached record of a leased task's request, or None.

        None if no recent record is cached, or it does not show this lease.
        """
        record = self._current(claim.request)
        has_lease = record and any((run.stage, run.attempt) == (claim.stage, claim.attempt) for run in record.running)
        return record if has_lease else None

    def _current(self, request: str) -> RequestRecord | None:
        """Return a cached record with `ran_s` as of now, or None if none is recent."""
        record, cached_at = self._records.get(request, (None, 0.0))
        age = self._clock.now() - cached_at
        if record is None or age > CACHED_RECORD_S:
            return None
        running = (msgspec.structs.replace(run, ran_s=run.ran_s + age) for run in record.running)
        return msgspec.structs.replace(record, running=tuple(running))
