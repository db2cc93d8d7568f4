"""The file of a SQLite queue: one row a request, one process, one thread that writes what has changed."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import cast

import apsw
import msgspec
import structlog

from unfuse.core.errors import ConfigError, InUse, TransientError, UsageError
from unfuse.core.request import Event, RequestContext
from unfuse.core.task import OutputDeltas, Task
from unfuse.queues.base import SCHEMA, DeclaredModels
from unfuse.queues.index import IndexEntry

APPLICATION = 0x756E6675  # SQLite's application_id of a queue of unfuse

TABLES = """
CREATE TABLE requests (number INTEGER PRIMARY KEY, id TEXT NOT NULL, body BLOB NOT NULL) STRICT;
CREATE TABLE starts (number INTEGER NOT NULL) STRICT;
INSERT INTO starts VALUES (-1);
CREATE TABLE pieces (
    id TEXT, stage TEXT, first INTEGER, after INTEGER, body BLOB, PRIMARY KEY (id, stage, first)
) WITHOUT ROWID, STRICT;
CREATE TABLE secrets (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID, STRICT;
CREATE TABLE declarations (name TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID, STRICT;
"""
"""A row of `pieces` has what was recorded at one time: the pieces from number `first` up to `after`."""

FIND_PIECES = """
SELECT first, body FROM pieces WHERE id = :id AND stage = :stage AND first >= (
    SELECT coalesce(max(first), 0) FROM pieces WHERE id = :id AND stage = :stage AND first <= :after
) ORDER BY first LIMIT :limit
"""
"""As many rows as there may be pieces, beginning with the one that has number `after`."""

MAGIC = b"SQLite format 3\0"  # the first bytes of every SQLite database

MOUNTS = Path("/proc/self/mountinfo")
REMOTE = {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}
LOCAL_FUSE = "fuse.fuse-overlayfs"

FULL = (errno.ENOSPC, errno.EDQUOT)  # the errors of the system when the disk is full
NO_ROOM = "the disk of the queue is full: make room there"

log = structlog.get_logger(__name__)


class StoredTask(msgspec.Struct, frozen=True, array_like=True):
    """A task that is queued, or leased if it has a token: then to `worker`, `since` that time.

    `returned` counts how often each worker has turned it down. `since` and `pushed` are Unix seconds.
    """

    arrival: int
    task: Task
    pushed: float
    returned: dict[str, int]
    worker: str = ""
    token: bytes = b""
    since: float = 0.0


class RequestRow(msgspec.Struct, frozen=True):
    """A whole stored request: any change replaces its row. `last` is the highest number of an event."""

    context: RequestContext
    stages: tuple[str, ...]
    tasks: tuple[StoredTask, ...]
    events: tuple[Event, ...]
    last: int


class Journal:
    """The file. It is locked while it is open, and one thread writes it.

    `rows` and `declared` have what the file held at the start, `appended` how many pieces it has by request and stage.
    `damaged` maps the id of a row that cannot be read to its number and the error.

    Raises TransientError if the disk is full, and ConfigError if the queue cannot be kept there for another reason.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._decoder = path, msgspec.msgpack.Decoder(RequestRow)
        self.rows: list[tuple[int, RequestRow]] = []
        self.damaged: dict[str, tuple[int, str]] = {}
        self.appended: dict[str, dict[str, int]] = {}
        self.declared: dict[str, DeclaredModels] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _refuse_remote(path)
            _refuse_foreign(path)
            with ExitStack() as opened:
                lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
                _lock(path, opened.enter_context(os.fdopen(lock, "r+b", 0)))
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
                self._file = apsw.Connection(str(path))
                opened.callback(self._file.close, force=True)
                self._read()
                self._opened = opened.pop_all()
        except (InUse, TransientError):
            raise
        except (OSError, apsw.Error, msgspec.MsgspecError, ConfigError) as error:
            if isinstance(error, OSError) and error.errno in FULL:
                raise TransientError(NO_ROOM) from error
            kind = UsageError if isinstance(error, UsageError) else ConfigError
            raise kind(f"the queue cannot be kept in {path}: {error}") from error
        self.thread = ThreadPoolExecutor(1, "queue")

    def write(
        self, rows: Sequence[tuple[int, RequestRow | None]], durable: bool, pieces: Sequence[OutputDeltas] = ()
    ) -> None:
        """Replace these rows, delete those that are None with what belongs to them, and add these pieces.

        That is one transaction; without `durable` it is not synced. Raises TransientError, with nothing changed, when
        the disk is full.
        """
        kept = [(number, row.context.id, msgspec.msgpack.encode(row)) for number, row in rows if row is not None]
        gone = [(number,) for number, row in rows if row is None]
        grown = [
            (*one.claim.key, one.offset, one.offset + len(one.pieces), msgspec.msgpack.encode(one.pieces))
            for one in pieces
        ]
        with self._disk_may_be_full():
            self._file.pragma("synchronous", "FULL" if durable else "NORMAL")
            self._file.execute("BEGIN IMMEDIATE")
            if gone:
                self._file.executemany("DELETE FROM pieces WHERE id = (SELECT id FROM requests WHERE number = ?)", gone)
                self._file.executemany("DELETE FROM requests WHERE number = ?", gone)
            self._file.executemany("INSERT OR REPLACE INTO requests VALUES (?, ?, ?)", kept)
            self._file.executemany("INSERT INTO pieces VALUES (?, ?, ?, ?, ?)", grown)
            if gone:
                self._file.execute("PRAGMA incremental_vacuum").fetchall()
            self._file.execute("COMMIT")

    def row(self, number: int) -> RequestRow | None:
        """The row of that number as it is in the file, if there is one; to be called in the thread that writes."""
        found = self._file.execute("SELECT body FROM requests WHERE number = ?", (number,)).fetchall()
        return self._decoder.decode(cast(bytes, found[0][0])) if found else None

    def pieces(self, id: str, stage: str, after: int, limit: int) -> list[bytes]:
        """The pieces of a stage from number `after` on, up to `limit`; to be called in the thread that writes."""
        found: list[bytes] = []
        asked = {"id": id, "stage": stage, "after": after, "limit": limit}
        for first, body in self._file.execute(FIND_PIECES, asked):
            found += msgspec.msgpack.decode(cast(bytes, body), type=list[bytes])[max(0, after - cast(int, first)) :]
        return found[:limit]

    def secret(self, name: str, proposed: str) -> str:
        """Return the secret of that name, stored durably. Must be called in the writer thread."""
        self._file.pragma("synchronous", "FULL")
        self._file.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (name, proposed))
        ((value,),) = self._file.execute("SELECT value FROM secrets WHERE name = ?", (name,))
        return str(value)

    def declare(self, name: str, declaration: DeclaredModels) -> None:
        """Replace the declaration of that name durably; to be called in the thread that writes.

        Raises TransientError, with nothing changed, when the disk is full.
        """
        self._file.pragma("synchronous", "FULL")
        with self._disk_may_be_full():
            body = msgspec.msgpack.encode(declaration)
            self._file.execute("INSERT OR REPLACE INTO declarations VALUES (?, ?)", (name, body))

    def close(self) -> None:
        """Close and unlock the file."""
        self.thread.shutdown()
        self._opened.close()

    @contextmanager
    def _disk_may_be_full(self) -> Iterator[None]:
        """A context that raises TransientError, with nothing changed, where the disk is full."""
        try:
            yield
        except apsw.Error as error:
            if not isinstance(error, apsw.FullError) and self._file.system_errno not in FULL:
                raise
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise TransientError(NO_ROOM) from error

    def _read(self) -> None:
        """Prepare the file, and read what it holds. Raises TransientError if the disk is full."""
        with self._disk_may_be_full():
            self.start = self._begin()
        for number, id, body in self._file.execute("SELECT number, id, body FROM requests ORDER BY number"):
            try:
                self.rows.append((cast(int, number), self._decoder.decode(cast(bytes, body))))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self.damaged[str(id)] = cast(int, number), str(error)
        for name, body in self._file.execute("SELECT name, body FROM declarations"):
            try:
                self.declared[str(name)] = msgspec.msgpack.decode(cast(bytes, body), type=DeclaredModels)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                log.error("a declaration cannot be read, and is left out", name=name, reason=str(error))
        for id, stage, count in self._file.execute("SELECT id, stage, max(after) FROM pieces GROUP BY 1, 2"):
            self.appended.setdefault(str(id), {})[str(stage)] = cast(int, count)

    def _begin(self) -> int:
        """Check and prepare the file; returns how often it was opened before."""
        file = self._file
        file.pragma("locking_mode", "EXCLUSIVE")
        is_new = not file.pragma("schema_version")
        _check_ours(file)
        if is_new:
            file.pragma("auto_vacuum", "INCREMENTAL")
        file.pragma("journal_mode", "WAL")
        file.pragma("synchronous", "FULL")
        file.execute("BEGIN IMMEDIATE")
        if is_new:
            file.execute(TABLES)
            file.pragma("application_id", APPLICATION)
            file.pragma("user_version", SCHEMA)
        file.execute("UPDATE starts SET number = number + 1")
        file.execute("COMMIT")
        ((start,),) = file.execute("SELECT number FROM starts")
        return cast(int, start)


def _lock(path: Path, file: FileIO) -> None:
    """Lock this file beside the queue's, and write our process id into it. Raises InUse if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InUse(
            f"the queue cannot be kept in {path}: process {file.read().decode()} has it: end that one, or give this "
            "one another folder with UNFUSE_DATA_DIR, or another file with --queue sqlite:PATH; servers share a queue "
            "that is --queue redis://HOST:PORT/DATABASE"
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()).encode())


def _check_ours(file: apsw.Connection) -> None:
    """Raise UsageError for a database that is not a queue of this schema."""
    if not file.pragma("schema_version"):
        return
    if file.pragma("application_id") != APPLICATION:
        raise UsageError("it holds something else: give this one a file of its own, with --queue sqlite:PATH")
    if (found := file.pragma("user_version")) != SCHEMA:
        raise UsageError(
            f"it was written by another version of unfuse (schema {found}, this one reads {SCHEMA}): name another "
            "file with --queue sqlite:PATH, or delete this one"
        )


def _refuse_foreign(path: Path) -> None:
    """Raise UsageError for a file of something else. The file is only read: nothing changes in it or beside it."""
    if not path.exists():
        return
    if not path.is_file():
        raise UsageError("it is no file: give this one a file of its own")
    with path.open("rb") as file:
        begins = file.read(len(MAGIC))
    if begins not in (b"", MAGIC):
        raise UsageError("it is not a database, it holds something else: give this one a file of its own")
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    # a torn database may still be repaired from its journal, when it is opened
    with suppress(apsw.Error), closing(apsw.Connection(f"{path.as_uri()}?immutable=1", flags=flags)) as look:
        _check_ours(look)


def _refuse_remote(path: Path) -> None:
    """Raise ConfigError if the folder is on a network file system, where locks and syncs cannot be trusted."""
    device = path.parent.stat().st_dev
    for line in MOUNTS.read_text().splitlines():
        kind = line.partition(" - ")[2].split()[0]
        is_remote = kind in REMOTE or (kind.startswith("fuse.") and kind != LOCAL_FUSE)
        if is_remote and line.split()[2] == f"{os.major(device)}:{os.minor(device)}":
            raise ConfigError(
                f"it is on a network file system ({kind}): choose a disk of this machine, with --queue sqlite:PATH"
            )


FULL_PAUSE_S = 1.0  # seconds until a write is tried again after the disk was full


@dataclass(eq=False, slots=True)
class _Batch:
    """One transaction: changed requests, new pieces by requests' numbers; `done` is set when it has ended."""

    done: asyncio.Future[None]
    entries: dict[int, IndexEntry] = field(default_factory=dict)
    pieces: dict[int, list[OutputDeltas]] = field(default_factory=dict)
    durable: bool = False


def _merged(batches: Sequence[_Batch]) -> _Batch:
    """One batch with the content of these."""
    merged = _Batch(asyncio.get_running_loop().create_future())
    for batch in batches:
        merged.entries |= batch.entries
        for number, pieces in batch.pieces.items():
            merged.pieces.setdefault(number, []).extend(pieces)
        merged.durable |= batch.durable
    return merged


class JournalWriter:
    """Writes one transaction after the other; each has all that changed during the one before.

    `row` gives the row of an entry when its transaction begins. While the disk is full, writing is tried again. When
    the file cannot be written for another reason, `broken` is called, and nothing is written any more.
    """

    def __init__(
        self, journal: Journal, row: Callable[[IndexEntry], RequestRow | None], broken: Callable[[], object]
    ) -> None:
        self._journal, self._row, self._on_broken = journal, row, broken
        self._writing: _Batch | None = None
        self._next: _Batch | None = None
        self._broken = self._full = ""
        self._trying: asyncio.TimerHandle | None = None

    def check(self) -> None:
        """Raise TransientError while nothing can be written. To be called before each change."""
        self.check_file()
        if self._full:
            raise TransientError(self._full)

    def check_file(self) -> None:
        """Raise TransientError once writing has failed for good."""
        if self._broken:
            raise TransientError(self._broken)

    def note(self, entry: IndexEntry, durable: bool = False) -> None:
        """Have the next transaction write this entry, and sync the disk if `durable`."""
        if batch := self._upcoming():
            batch.entries[entry.number] = entry
            batch.durable |= durable

    def append(self, entry: IndexEntry, pieces: OutputDeltas) -> None:
        """Have the next transaction add pieces of an entry's stage, and sync the disk."""
        if batch := self._upcoming():
            batch.pieces.setdefault(entry.number, []).append(pieces)
            batch.durable = True

    def is_blocked(self, entry: IndexEntry) -> bool:
        """Whether a change of the entry waits for room on the disk."""
        return bool(self._full and self._unwritten(entry))

    def is_written(self, entry: IndexEntry) -> bool:
        """Whether no change of the entry waits to be written."""
        return not self._unwritten(entry)

    async def wait_until_written(self, entry: IndexEntry) -> None:
        """Wait until the entry is written as it is now. Raises TransientError if the disk is full or writing failed."""
        for batch in self._unwritten(entry)[-1:]:
            await asyncio.shield(batch.done)
            if self.is_blocked(entry):
                raise TransientError(self._full)
        self.check_file()

    async def close(self) -> None:
        """Write everything that is left, unless the disk is full."""
        while (batch := self._next or self._writing) and not self._full:
            await batch.done
        if self._trying is not None:
            self._trying.cancel()

    def _upcoming(self) -> _Batch | None:
        """The batch of the next transaction, if there will be one."""
        if self._next is None and not self._broken:
            loop = asyncio.get_running_loop()
            self._next = _Batch(loop.create_future())
            loop.call_soon(self._flush)
        return self._next

    def _unwritten(self, entry: IndexEntry) -> list[_Batch]:
        batches = [batch for batch in (self._writing, self._next) if batch]
        return [batch for batch in batches if entry.number in batch.entries or entry.number in batch.pieces]

    def _flush(self) -> None:
        """Begin the next transaction, unless one is being written."""
        if self._writing is None and self._next is not None:
            batch, self._next = self._next, None
            self._writing = batch
            try:
                rows = [(number, self._row(entry)) for number, entry in batch.entries.items()]
                dropped = {number for number, row in rows if row is None}
                pieces = [one for number in batch.pieces.keys() - dropped for one in batch.pieces[number]]
                loop = asyncio.get_running_loop()
                writing = loop.run_in_executor(self._journal.thread, self._journal.write, rows, batch.durable, pieces)
                writing.add_done_callback(lambda written: self._written(written.exception()))
            except Exception as error:  # otherwise callers would wait for ever
                self._written(error)

    def _written(self, error: BaseException | None) -> None:
        """A transaction has ended: begin the next one, or the same again later if the disk was full."""
        batches, self._writing = [self._writing], None
        if error is not None:
            batches, self._next = [*batches, self._next], None
            if not self._full:
                log.error("the queue's file cannot be written", file=str(self._journal.path), reason=str(error))
        self._full = ""
        if isinstance(error, TransientError):
            self._full = "the disk of the queue is full: nothing is accepted or changed until there is room again"
            self._next = _merged([batch for batch in batches if batch])
            self._trying = asyncio.get_running_loop().call_later(FULL_PAUSE_S, self._flush)
        elif error is not None:
            self._broken = (
                f"the queue's file cannot be written ({error}): repair the disk, then start the server again; "
                "all that was accepted is kept"
            )
            self._on_broken()
        for batch in filter(None, batches):
            batch.done.set_result(None)
        if error is None:
            self._flush()
