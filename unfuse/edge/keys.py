"""The keys of a running server: which keys it knows, and what each opens.

Keys are compared by their hashes, so the time of a comparison tells nothing about them. Key files are read again when
they change. If a changed file is wrong, that is logged and the keys stay as they were.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog
from anyio import to_thread

from unfuse.core.errors import ConfigError, UsageError
from unfuse.edge.key_lines import (
    DEFAULT_TENANT,
    HASHED,
    LEAST_CHARACTERS,
    LINE,
    Key,
    KeyLine,
    Known,
    digest_of,
    entries_of,
    known_of,
    read_file,
)  # fmt: skip
from unfuse.edge.path_like import is_path_like

LOOK_S = 1.0
"""Seconds between two looks at the files. A file that has changed is read once two looks saw the same."""

NOBODY = "no key is an admin's: workers, pools and other tenants' requests are closed; write admin=yes on a line of"

_PRINTABLE = re.compile(r"[!-~]+")

log = structlog.get_logger(__name__)

Stamp = tuple[tuple[int, int, int, int] | None, ...]
"""What tells whether files have changed."""


class Keys:
    """The keys of one server: those that are `given`, and those in the lines of `files`.

    A given key is an admin's if it is the only key. In files, a key is an admin's if its line says so. Whether a key is
    needed at all is decided at the start. Raises UsageError for a key or a file that cannot be used.
    """

    def __init__(self, given: Sequence[str] = (), files: Sequence[str] = ()) -> None:
        self._given, self._files = tuple(dict.fromkeys(key.strip() for key in given)), tuple(files)
        for key in self._given:
            _require_key(key)
        self._read_at = self._seen = self._stamp()
        self._calls = defaultdict[bytes, set[asyncio.Timeout]](set)
        self._failure = ""
        self._plain: list[str] = []
        self._known = self._read()

    def __bool__(self) -> bool:
        return bool(self._given or self._files)

    @property
    def note(self) -> str:
        """A line to print at the start: who sees workers, pools and other tenants' requests; "" if that is clear."""
        if not self or any(key.admin for key in self._known.values()) and self._files:
            return ""
        if self._is_sole:
            return "the one API key is an admin's"
        return f"{NOBODY} {self._files[0] if self._files else '--api-keys FILE (`unfuse keys add NAME --admin`)'}"

    @property
    def warning(self) -> str:
        """A warning to log at the start, about plain keys in files; "" if there are none."""
        if not self._plain:
            return ""
        commands = ", ".join(f"`unfuse keys hash {file}`" for file in self._plain)
        return f"keys are stored as plain text: replace them by their hashes with {commands}"

    def of(self, shown: str) -> Key | None:
        """Return what the key that a client sends opens; None if it is unknown."""
        return self._known.get(digest_of(shown))

    def all(self) -> list[Key]:
        """Return what all keys open."""
        return list(self._known.values())

    @contextmanager
    def lasting(self, shown: str, call: asyncio.Timeout) -> Iterator[None]:
        """While this block lasts, the call ends when the key that it shows opens less than before."""
        digest = digest_of(shown)
        self._calls[digest].add(call)
        try:
            yield
        finally:
            self._calls[digest].discard(call)
            if not self._calls[digest]:
                del self._calls[digest]

    async def look(self) -> None:
        """Wait, then read the files again if they have changed and are the same as at the last look.

        A file that cannot be read is tried again at each look, and the reason is logged once.
        """
        await asyncio.sleep(LOOK_S)
        before, self._seen = self._seen, await to_thread.run_sync(self._stamp)
        if self._seen != before or self._seen == self._read_at and not self._failure:
            return
        self._read_at = self._seen
        try:
            fresh = await to_thread.run_sync(self._read)
        except ConfigError as error:
            if str(error) != self._failure:
                log.error("keys stay as they were", reason=str(error))
            self._failure = str(error)
            return
        self._failure = ""
        self._replace(fresh)

    def _replace(self, fresh: Known) -> None:
        old, self._known = self._known, fresh
        withdrawn = [digest for digest, key in old.items() if _opens_less(fresh.get(digest), key)]
        for call in [call for digest in withdrawn for call in self._calls.get(digest, ())]:
            if not call.expired():
                call.reschedule(asyncio.get_running_loop().time())
        added = sorted(key.tenant for digest, key in fresh.items() if digest not in old)
        removed = sorted(key.tenant for digest, key in old.items() if digest not in fresh)
        log.info("keys were read again", keys=len(fresh), added=added, removed=removed)

    @property
    def _is_sole(self) -> bool:
        return len(self._given) == 1 and not self._files

    def _stamp(self) -> Stamp:
        return tuple(map(_stamp_of, self._files))

    def _read(self) -> Known:
        """Return all keys. Raises UsageError, whose message has no key."""
        entries: list[KeyLine] = []
        plain: list[str] = []
        for file in self._files:
            found = list(entries_of(read_file(file), file))
            if not found:
                raise UsageError(f"there is no key in {file}: `unfuse keys add NAME --file {file}` adds one")
            plain += [file] if any(entry.plain for entry in found) else []
            entries += found
        for key in self._given:
            entries.append(KeyLine(0, "--api-key", DEFAULT_TENANT, digest_of(key), key, 0, (), False))
        known = known_of(iter(entries))
        self._plain = plain
        if self._is_sole:
            known = {digest: Key(key.tenant, admin=True) for digest, key in known.items()}
        return known


def _require_key(key: str) -> None:
    """Raise UsageError for a key of the command line that is short, or that is no key at all."""
    advice = "`unfuse keys add NAME` makes a key and writes its hash to a file for --api-keys"
    if not _PRINTABLE.fullmatch(key):
        raise UsageError(f"--api-key (UNFUSE_API_KEY) is one key, without spaces, in printable ASCII: {advice}")
    if key.lower().startswith(HASHED):
        raise UsageError(f"--api-key takes a key, not its hash: put the hash into a file for --api-keys, as {LINE}")
    if is_path_like(key):
        raise UsageError(
            "--api-key takes a key, and the one given looks like the path of a file: name a file of keys by --api-keys"
        )
    if len(key) < LEAST_CHARACTERS:
        raise UsageError(
            f"--api-key (UNFUSE_API_KEY) has {len(key)} characters, and a key has at least {LEAST_CHARACTERS}: {advice}"
        )


def _stamp_of(file: str) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _opens_less(now: Key | None, before: Key) -> bool:
    return now is None or now.tenant != before.tenant or before.admin and not now.admin
