"""The write-behind journal of a SQLite queue, written by one thread.

It has one row for each request.
"""

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

from unfuse.core.errors import ConfigError, FileInUse, TransientError, UsageError
from unfuse.core.paths import create_private_folder
from unfuse.core.request import Event, RequestContext
from unfuse.core.task import OutputDeltas, Task
from unfuse.queues.base import SCHEMA_VERSION, DeclaredModels
from unfuse.queues.index import IndexEntry

#: SQLite's application_id of an unfuse queue.
APPLICATION_ID = 0x756E6675

#: The schema. A row of `pieces` has the output deltas of one call: those with numbers `first` ≤ number < `after`.
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

#: Selects up to `limit` rows of a stage, starting with the row that has delta number `after`.
FIND_PIECES = """
SELECT first, body FROM pieces WHERE id = :id AND stage = :stage AND first >= (
    SELECT coalesce(max(first), 0) FROM pieces WHERE id = :id AND stage = :stage AND first <= :after
) ORDER BY first LIMIT :limit
"""

#: The first bytes of every SQLite database.
MAGIC = b"SQLite format 3\0"

#: The mount table of this process.
MOUNTS = Path("/proc/self/mountinfo")
#: Types of network file systems.
REMOTE = {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}
#: The only FUSE file system that is known to be local.
LOCAL_FUSE = "fuse.fuse-overlayfs"

#: The system's errors when the disk or the quota is full.
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
NO_ROOM = "the disk of the queue is full: free some space"

#: Seconds between two tries to write to a full disk.
FULL_PAUSE_S = 1.0

log = structlog.get_logger(__name__)


class StoredTask(msgspec.Struct, frozen=True, array_like=True):
    """A stored task: queued, or leased if it has a token."""

    #: Number of arrival among all pushed tasks.
    arrival: int
    #: The task, with the number of its next or running attempt.
    task: Task
    #: When it was pushed, in Unix seconds.
    pushed: float
    #: How often each worker has turned it down.
    returned: dict[str, int]
    #: The worker that leased it.
    worker: str = ""
    #: The lease token. Empty: the task is queued.
    token: bytes = b""
    #: When it was leased, in Unix seconds.
    since: float = 0.0


class RequestRow(msgspec.Struct, frozen=True):
    """A whole stored request. Any change replaces its row."""

    #: The context after the last change that was written.
    context: RequestContext
    #: All stages that ever had a task.
    stages: tuple[str, ...]
    #: Tasks that wait or are leased.
    tasks: tuple[StoredTask, ...]
    #: The durable events (`EventHistory.undroppable`).
    events: tuple[Event, ...]
    #: Highest number of an event so far.
    last_event: int


class Journal:
    """The SQLite file of a queue, locked while it is open.

    One thread writes it. Raises TransientError if the disk is full, and ConfigError if the file cannot be used for
    another reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._decoder = msgspec.msgpack.Decoder(RequestRow)
        #: All readable rows at the start, with their numbers of arrival.
        self.rows: list[tuple[int, RequestRow]] = []
        #: Number of arrival and error of each unreadable row, by request id.
        self.damaged: dict[str, tuple[int, str]] = {}
        #: Number of output deltas at the start, by request and stage.
        self.deltas: dict[str, dict[str, int]] = {}
        #: All readable declarations at the start, by name.
        self.declared: dict[str, DeclaredModels] = {}
        try:
            create_private_folder(path.parent)
            _refuse_remote(path)
            _refuse_foreign(path)
            with ExitStack() as resources:
                lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
                _lock(path, resources.enter_context(os.fdopen(lock, "r+b", 0)))
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite itself would use wider permissions
                self._file = apsw.Connection(str(path))
                resources.callback(self._file.close, force=True)
                self._read()
                self._resources = resources.pop_all()
        except (FileInUse, TransientError):
            raise
        except (OSError, apsw.Error, msgspec.MsgspecError, ConfigError) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
                raise TransientError(NO_ROOM) from error
            error_type = UsageError if isinstance(error, UsageError) else ConfigError
            raise error_type(f"the queue cannot use {path}: {error}") from error
        self.thread = ThreadPoolExecutor(1, "queue")

    def write(
        self, rows: Sequence[tuple[int, RequestRow | None]], durable: bool, pieces: Sequence[OutputDeltas] = ()
    ) -> None:
        """Write rows and output deltas in one transaction. To be called in the writer thread.

        `rows`: the new row by number of arrival. None deletes the row and its deltas.
        `durable`: whether to sync the disk.
        Raises TransientError, with nothing changed, if the disk is full.
        """
        changed = [(number, row.context.id, msgspec.msgpack.encode(row)) for number, row in rows if row is not None]
        deleted = [(number,) for number, row in rows if row is None]
        appended = [
            (
                *output.claim.key,
                output.offset,
                output.offset + len(output.deltas),
                msgspec.msgpack.encode(output.deltas),
            )
            for output in pieces
        ]
        with self._disk_may_be_full():
            self._file.pragma("synchronous", "FULL" if durable else "NORMAL")
            self._file.execute("BEGIN IMMEDIATE")
            if deleted:
                # The deltas first: they are found by the id in the request's row.
                self._file.executemany(
                    "DELETE FROM pieces WHERE id = (SELECT id FROM requests WHERE number = ?)", deleted
                )
                self._file.executemany("DELETE FROM requests WHERE number = ?", deleted)
            self._file.executemany("INSERT OR REPLACE INTO requests VALUES (?, ?, ?)", changed)
            self._file.executemany("INSERT INTO pieces VALUES (?, ?, ?, ?, ?)", appended)
            if deleted:
                self._file.execute("PRAGMA incremental_vacuum").fetchall()
            self._file.execute("COMMIT")

    def row(self, number: int) -> RequestRow | None:
        """Return the stored row of this number, or None.

        To be called in the writer thread.
        """
        rows = self._file.execute("SELECT body FROM requests WHERE number = ?", (number,)).fetchall()
        return self._decoder.decode(cast(bytes, rows[0][0])) if rows else None

    def pieces(self, id: str, stage: str, after: int, limit: int) -> list[bytes]:
        """Return up to `limit` output deltas of a stage, from number `after` on.

        To be called in the writer thread.
        """
        deltas: list[bytes] = []
        parameters = {"id": id, "stage": stage, "after": after, "limit": limit}
        for first, body in self._file.execute(FIND_PIECES, parameters):
            deltas += msgspec.msgpack.decode(cast(bytes, body), type=list[bytes])[max(0, after - cast(int, first)) :]
        return deltas[:limit]

    def secret(self, name: str, proposed: str) -> str:
        """Return the secret of this name, stored durably. To be called in the writer thread."""
        self._file.pragma("synchronous", "FULL")
        self._file.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (name, proposed))
        ((value,),) = self._file.execute("SELECT value FROM secrets WHERE name = ?", (name,))
        return str(value)

    def declare(self, name: str, declaration: DeclaredModels) -> None:
        """Replace the declaration of this name durably. To be called in the writer thread.

        Raises TransientError, with nothing changed, if the disk is full.
        """
        self._file.pragma("synchronous", "FULL")
        with self._disk_may_be_full():
            body = msgspec.msgpack.encode(declaration)
            self._file.execute("INSERT OR REPLACE INTO declarations VALUES (?, ?)", (name, body))

    def close(self) -> None:
        """Stop the writer thread, then close and unlock the file."""
        self.thread.shutdown()
        self._resources.close()

    @contextmanager
    def _disk_may_be_full(self) -> Iterator[None]:
        """Roll back and raise TransientError if the disk is full. A context manager."""
        try:
            yield
        except apsw.Error as error:
            if not isinstance(error, apsw.FullError) and self._file.system_errno not in DISK_FULL_ERRORS:
                raise
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise TransientError(NO_ROOM) from error

    def _read(self) -> None:
        """Prepare the file and load its content. Raises TransientError if the disk is full."""
        with self._disk_may_be_full():
            #: How often the file was opened before.
            self.start = self._prepare()

        for number, id, body in self._file.execute("SELECT number, id, body FROM requests ORDER BY number"):
            try:
                self.rows.append((cast(int, number), self._decoder.decode(cast(bytes, body))))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self.damaged[str(id)] = cast(int, number), str(error)

        for name, body in self._file.execute("SELECT name, body FROM declarations"):
            try:
                self.declared[str(name)] = msgspec.msgpack.decode(cast(bytes, body), type=DeclaredModels)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                log.error("a stored declaration cannot be read and is ignored", name=name, reason=str(error))

        for id, stage, count in self._file.execute("SELECT id, stage, max(after) FROM pieces GROUP BY 1, 2"):
            self.deltas.setdefault(str(id), {})[str(stage)] = cast(int, count)

    def _prepare(self) -> int:
        """Check the file, and create its tables if it is new.

        Returns how often it was opened before.
        """
        file = self._file
        file.pragma("locking_mode", "EXCLUSIVE")
        is_new = not file.pragma("schema_version")
        _check_ours(file)
        if is_new:  # SQLite needs this setting before the first table
            file.pragma("auto_vacuum", "INCREMENTAL")
        file.pragma("journal_mode", "WAL")
        file.pragma("synchronous", "FULL")
        file.execute("BEGIN IMMEDIATE")
        if is_new:
            file.execute(TABLES)
            file.pragma("application_id", APPLICATION_ID)
            file.pragma("user_version", SCHEMA_VERSION)
        file.execute("UPDATE starts SET number = number + 1")
        file.execute("COMMIT")
        ((start,),) = file.execute("SELECT number FROM starts")
        return cast(int, start)


def _lock(path: Path, file: FileIO) -> None:
    """Lock the queue's lock file, and write our process id into it.

    Raises FileInUse if it is locked.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FileInUse(
            f"the queue cannot use {path}: process {file.read().decode()} uses it. Stop that process, or use another "
            "folder with UNFUSE_DATA_DIR, or another file with --queue sqlite:PATH. To share a queue between servers, "
            "use --queue redis://HOST:PORT/DATABASE"
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()).encode())


def _check_ours(file: apsw.Connection) -> None:
    """Raise UsageError unless the database is empty or a queue of this schema version."""
    if not file.pragma("schema_version"):
        return
    if file.pragma("application_id") != APPLICATION_ID:
        raise UsageError("it is the database of another program: use another file with --queue sqlite:PATH")
    if (version := file.pragma("user_version")) != SCHEMA_VERSION:
        raise UsageError(
            f"it was written by another version of unfuse (schema {version}, this version needs {SCHEMA_VERSION}): use "
            "another file with --queue sqlite:PATH, or delete this one"
        )


def _refuse_foreign(path: Path) -> None:
    """Raise UsageError for a file that is not a queue of this schema version.

    The file is not changed, and no files are created in its folder.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise UsageError("it is not a file: use another path with --queue sqlite:PATH")
    with path.open("rb") as file:
        first_bytes = file.read(len(MAGIC))
    if first_bytes not in (b"", MAGIC):
        raise UsageError("it is not a SQLite database: use another file with --queue sqlite:PATH")
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    # SQLite errors are ignored: a torn database may still be repaired from its journal when it is opened.
    with suppress(apsw.Error), closing(apsw.Connection(f"{path.as_uri()}?immutable=1", flags=flags)) as connection:
        _check_ours(connection)


def _refuse_remote(path: Path) -> None:
    """Raise ConfigError if the queue's folder is on a network file system.

    Locks and syncs are unreliable there.
    """
    device = path.parent.stat().st_dev
    for line in MOUNTS.read_text().splitlines():
        kind = line.partition(" - ")[2].split()[0]
        is_remote = kind in REMOTE or (kind.startswith("fuse.") and kind != LOCAL_FUSE)
        if is_remote and line.split()[2] == f"{os.major(device)}:{os.minor(device)}":
            raise ConfigError(f"it is on a network file system ({kind}): use a local disk with --queue sqlite:PATH")


@dataclass(eq=False, slots=True)
class _Batch:
    """The content of one transaction."""

    #: Completed when the transaction has ended, successfully or not.
    done: asyncio.Future[None]
    #: Changed requests, by number of arrival.
    entries: dict[int, IndexEntry] = field(default_factory=dict)
    #: New output deltas, by number of arrival of their request.
    pieces: dict[int, list[OutputDeltas]] = field(default_factory=dict)
    #: Whether to sync the disk.
    durable: bool = False


def _merge(batches: Sequence[_Batch]) -> _Batch:
    """Return one batch with the content of all of these."""
    merged = _Batch(asyncio.get_running_loop().create_future())
    for batch in batches:
        merged.entries |= batch.entries
        for number, pieces in batch.pieces.items():
            merged.pieces.setdefault(number, []).extend(pieces)
        merged.durable |= batch.durable
    return merged


class JournalWriter:
    """Batches changes into transactions: each has all changes made during the one before.

    `row` returns the row of an entry when its transaction begins, None if the request was dropped. While the disk is
    full, the write is repeated. If the file cannot be written for another reason, `broken` is called, and nothing is
    written any more.
    """

    def __init__(
        self, journal: Journal, row: Callable[[IndexEntry], RequestRow | None], broken: Callable[[], object]
    ) -> None:
        self._journal = journal
        self._row = row
        self._on_broken = broken
        #: The batch that is being written.
        self._writing: _Batch | None = None
        #: The batch of the next transaction.
        self._next: _Batch | None = None
        #: Why nothing can be written any more, or at present. "": it can.
        self._broken = ""
        self._full = ""
        self._retry: asyncio.TimerHandle | None = None

    def check(self) -> None:
        """Raise TransientError while nothing can be written. To be called before each change."""
        self.check_file()
        if self._full:
            raise TransientError(self._full)

    def check_file(self) -> None:
        """Raise TransientError once writing has failed permanently."""
        if self._broken:
            raise TransientError(self._broken)

    def add(self, entry: IndexEntry, durable: bool = False) -> None:
        """Add an entry to the next transaction. `durable` syncs the disk."""
        if batch := self._next_batch():
            batch.entries[entry.number] = entry
            batch.durable |= durable

    def append(self, entry: IndexEntry, pieces: OutputDeltas) -> None:
        """Add output deltas of an entry's stage to the next transaction, which syncs the disk."""
        if batch := self._next_batch():
            batch.pieces.setdefault(entry.number, []).append(pieces)
            batch.durable = True

    def is_blocked(self, entry: IndexEntry) -> bool:
        """Return whether the entry has unwritten changes while the disk is full."""
        return bool(self._full and self._unwritten(entry))

    def is_written(self, entry: IndexEntry) -> bool:
        """Return whether the entry has no unwritten changes."""
        return not self._unwritten(entry)

    async def wait_until_written(self, entry: IndexEntry) -> None:
        """Wait until the entry's present state is written.

        Raises TransientError if the disk is full or the file cannot be written.
        """
        for batch in self._unwritten(entry)[-1:]:
            # Shielded: a caller that is cancelled must not cancel the future that others wait for.
            await asyncio.shield(batch.done)
            if self.is_blocked(entry):
                raise TransientError(self._full)
        self.check_file()

    async def close(self) -> None:
        """Write all changes, unless the disk is full."""
        while (batch := self._next or self._writing) and not self._full:
            await batch.done
        if self._retry is not None:
            self._retry.cancel()

    def _next_batch(self) -> _Batch | None:
        """Return the batch of the next transaction, or None if the file is broken."""
        if self._next is None and not self._broken:
            loop = asyncio.get_running_loop()
            self._next = _Batch(loop.create_future())
            loop.call_soon(self._flush)
        return self._next

    def _unwritten(self, entry: IndexEntry) -> list[_Batch]:
        """Return the batches with changes of an entry, the running transaction first."""
        batches = [batch for batch in (self._writing, self._next) if batch]
        return [batch for batch in batches if entry.number in batch.entries or entry.number in batch.pieces]

    def _flush(self) -> None:
        """Start the next transaction, unless one is running."""
        if self._writing is None and self._next is not None:
            batch, self._next = self._next, None
            self._writing = batch
            try:
                rows = [(number, self._row(entry)) for number, entry in batch.entries.items()]
                dropped = {number for number, row in rows if row is None}
                pieces = [deltas for number in batch.pieces.keys() - dropped for deltas in batch.pieces[number]]
                loop = asyncio.get_running_loop()
                write = loop.run_in_executor(self._journal.thread, self._journal.write, rows, batch.durable, pieces)
                write.add_done_callback(lambda write: self._on_written(write.exception()))
            except Exception as error:  # callers would otherwise wait forever
                self._on_written(error)

    def _on_written(self, error: BaseException | None) -> None:
        """Complete a transaction, then start the next one.

        If the disk was full, the transaction is repeated after FULL_PAUSE_S. After another error, nothing is written
        any more.
        """
        batches, self._writing = [self._writing], None
        if error is not None:
            batches, self._next = [*batches, self._next], None
            if not self._full:
                log.error("the queue's file cannot be written", file=str(self._journal.path), reason=str(error))
        self._full = ""
        if isinstance(error, TransientError):
            self._full = "the disk of the queue is full: requests and changes are refused until space is free"
            self._next = _merge([batch for batch in batches if batch])
            self._retry = asyncio.get_running_loop().call_later(FULL_PAUSE_S, self._flush)
        elif error is not None:
            self._broken = (
                f"the queue's file cannot be written ({error}): repair the disk, then restart the server. "
                "Accepted requests are not lost"
            )
            self._on_broken()
        for batch in filter(None, batches):
            batch.done.set_result(None)
        if error is None:
            self._flush()
