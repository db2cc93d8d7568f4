"""What the queue in Redis and its Lua scripts say to each other."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

import msgspec

from unfuse.core.card import ModelCard
from unfuse.core.codec import decode, encode
from unfuse.core.errors import Conflict, Damaged, LeaseLost, NotFound, Overloaded, TransientError, UnfuseError
from unfuse.core.event import Event
from unfuse.core.messages import WorkerInfo
from unfuse.core.request import Change, Record, RequestContext, Running
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.base import Declaration, Member
from unfuse.queues.remaining import remaining_of

PARTS = ("common", "index", "left", "requests", "history", "cached", "returned", "leases", "tasks")
SCRIPT = "\n".join(files("unfuse.queues").joinpath("scripts", f"{name}.lua").read_text() for name in PARTS)
SCRIPT_ID = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
"""All verbs as one script, and what Redis knows it by once it is loaded."""


REFUSALS: dict[str, type[UnfuseError]] = {
    "NOTFOUND": NotFound,
    "LEASELOST": LeaseLost,
    "CONFLICT": Conflict,
    "OVERLOADED": Overloaded,
    "DAMAGED": Damaged,
}
DROPPABLE = ("request", "worker", "card", "lease", "declaration")
"""What of it there is to be dropped: an event, say, is only passed over."""

BROKEN = re.compile(r"WRONGTYPE|attempt to |bad argument|not an integer|not a valid float")
"""What a server says of a script that met what it did not expect."""


def raw(data: bytes) -> msgspec.Raw:
    """Bytes as a string of msgpack: the scripts' reader knows no other kind."""
    return msgspec.Raw(b"\xdb" + len(data).to_bytes(4, "big") + data)


def text(value: object) -> str:
    """A field of a request as it is stored and searched for."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _mark(attempt: int, token: bytes) -> msgspec.Raw:
    return raw(b"%d:%b" % (attempt, token))


def shown(claim: Claim) -> dict[str, Any]:
    """A claim; the script compares its mark."""
    mark = _mark(claim.attempt, claim.token)
    return {"request": claim.request, "stage": claim.stage, "attempt": claim.attempt, "mark": mark}


def task(task: bytes, attempt: bytes) -> Task:
    """The stored task; its attempt is kept beside it."""
    return msgspec.structs.replace(decode(task, Task), attempt=int(attempt))


def lease(stored: bytes, attempt: bytes, worker: bytes, mark: bytes, expires: bytes, _: bytes) -> Lease:
    """A lease as it is answered."""
    return Lease(task(stored, attempt), worker.decode(), mark.partition(b":")[2], float(expires))


def record(reply: Sequence[Any]) -> Record:
    """A request as it is answered."""
    context, running, position = reply[:3]
    return Record(decode(context, RequestContext), decode(running, tuple[Running, ...]), position)


def error(met: Exception, place: str) -> UnfuseError:
    """What a refusal of the scripts, or of the server at that place, is here."""
    kind, _, text = str(met).partition(" ")
    if kind in REFUSALS:
        return REFUSALS[kind](text)
    if BROKEN.search(str(met)):
        return Damaged(f"the queue at {place} holds something else than it should: {met}")
    return TransientError(f"the queue at {place} does not answer: {met}")


def member(info: bytes, cards: tuple[ModelCard, ...], seen: bytes, leased: bytes) -> Member:
    """A worker as it is answered, with its cards."""
    return Member(decode(info, WorkerInfo), cards, float(seen), int(leased or 0))


def shown_text(name: bytes) -> str:
    """A name that may hold anything, for people."""
    return name.decode(errors="backslashreplace")


def stored(shown: str) -> msgspec.Raw:
    """The name that `shown_text` shows so."""
    return raw(re.sub(rb"\\x([0-9a-f]{2})", lambda found: bytes.fromhex(found[1].decode()), shown.encode()))


@lru_cache(maxsize=64)
def declaration(stored: bytes) -> Declaration:
    """What somebody declared, which hardly ever changes."""
    return decode(stored, Declaration)


@lru_cache(maxsize=64)
def cards(brought: bytes) -> tuple[ModelCard, ...]:
    """A worker's cards, which are read with every answer to who is there and hardly ever change."""
    return decode(brought, tuple[ModelCard, ...])


def pushed(task: Task) -> dict[str, Any]:
    """A task with its rank, bytes that sort as (−priority, order) does: a float's bits do, its sign out of the way."""
    (bits,) = struct.unpack(">Q", struct.pack(">d", task.order + 0.0))
    rank = struct.pack(">QQ", 2**63 - 1 - task.priority, bits ^ (2**64 - 1 if bits >> 63 else 2**63))
    names = ("stage", "attempt", "pool", "room", "near", "affinity", "priority", "not_before", "needs")
    return {name: getattr(task, name) for name in names} | {"task": raw(encode(task)), "rank": raw(rank)}


def facts(context: RequestContext, push: Sequence[Task], events: Sequence[Event]) -> dict[str, Any]:
    """What `submit` and `commit` send: the context, what of it scripts look at, and what comes with it."""
    done = {name: _mark(s.attempt, s.token) for name, s in context.stages.items() if s.status == "done"}
    names = ("version", "over", "tenant", "idempotency_key", "fingerprint", "status", "dead", "cost", "completed_at")
    facts = {name: getattr(context, name) for name in names}
    stored: dict[str, Any] = {name: text(value) for name, value in facts.items()}
    stored |= {"context": raw(encode(context)), "done": raw(msgspec.msgpack.encode(done))}
    share = counted(context)
    stored |= {"left": share["packed"], "counted": share["counted"]}
    fields = [part for item in stored.items() for part in item]
    facts |= {"id": context.id, "fields": fields, "left": share["left"]}
    return facts | {"push": [pushed(task) for task in push], "events": events}


def changed(change: Change) -> dict[str, Any]:
    """What `commit` sends."""
    more = {"close": change.close, "claim": change.claim and shown(change.claim)}
    return facts(change.context, change.push, change.events) | more


UNREADABLE = {"packed": raw(msgspec.msgpack.encode({}))}
"""What is counted of a request that cannot be read."""


def counted(context: RequestContext) -> dict[str, Any]:
    """What is left of a request, by pool and as it is stored, and the version at which that is so."""
    left = remaining_of(context)
    return {"left": left, "packed": raw(msgspec.msgpack.encode(left)), "counted": text(context.version)}
