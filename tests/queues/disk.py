"""A disk that fails when it is told to: SQLite runs on it without knowing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

REAL = "unix"


class Disk(apsw.VFS):
    """Counts what changes files. The change numbered `stops_at` is done by half and raises `error`.

    Later ones never reach the disk, as if the process had ended there; with `stops_at` None again, they do.
    While it is `full`, nothing is written.
    """

    def __init__(self) -> None:
        super().__init__("disk", REAL, makedefault=True)
        self.changes = 0
        self.stops_at: int | None = None
        self.full = False
        self._synced: dict[Path, bytes] = {}

    @property
    def stopped(self) -> bool:
        return self.stops_at is not None and self.changes >= self.stops_at

    def change(self, do: Callable[[], None], half: Callable[[], None] = lambda: None) -> None:
        """Count a change, and do it if the disk still works."""
        self.changes += 1
        if self.stops_at is None or self.changes < self.stops_at:
            do()
        elif self.changes == self.stops_at:
            half()
            raise apsw.IOError("the disk has stopped")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return _File(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self.change(lambda: super(Disk, self).xDelete(filename, syncdir))

    def synced(self, path: Path) -> None:
        self._synced[path] = path.read_bytes() if path.exists() else b""

    def lose_power(self, database: Path) -> None:
        """Undo whatever was written since the last sync of each file."""
        for path in (database, Path(f"{database}-wal")):
            if path.exists():
                path.write_bytes(self._synced[path])


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self._disk = disk
        self._path = Path(name.filename() if isinstance(name, apsw.URIFilename) else str(name))
        disk.synced(self._path)
        super().__init__(REAL, name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        if self._disk.full:
            raise apsw.FullError("no room")
        write = super().xWrite
        kept = bytes(data)
        self._disk.change(lambda: write(kept, offset), lambda: write(kept[: len(kept) // 2], offset))

    def xTruncate(self, size: int) -> None:
        truncate = super().xTruncate
        self._disk.change(lambda: truncate(size))

    def xSync(self, flags: int) -> None:
        sync = super().xSync

        def synced() -> None:
            sync(flags)
            self._disk.synced(self._path)

        self._disk.change(synced)


@contextmanager
def failing_disk() -> Iterator[Disk]:
    """What SQLite opens within the block lies on this disk."""
    disk = Disk()
    try:
        yield disk
    finally:
        apsw.VFS(f"plain{id(disk)}", REAL, makedefault=True)
        disk.unregister()
