"""The keys of the HTTP API: who each one is, what it opens, and how much it may ask for.

They are told apart by their hashes, so that how long a look takes says nothing about them. Files are read again when
they change; what is wrong with a changed one is logged, and the keys stay as they were.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import msgspec
import structlog
from anyio import to_thread

from unfuse.core.errors import ConfigError
from unfuse.core.request import Allowance

DEFAULT_TENANT = "default"
ADMIN = "admin"  # the tenant of an admin key that has no name
LOOK_S = 1.0  # Seconds between two looks at the files. One that has changed is read once it was the same twice.
MOST = 10**6  # the highest number that a limit can have

_NUMBER, _RATE = re.compile(r"[1-9][0-9]{0,6}"), re.compile(r"([1-9][0-9]{0,6})/(s|min|h|d)")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_PER_S = {"s": 1, "min": 60, "h": 3600, "d": 86400}
LINE = "NAME KEY [admin=yes] [read=yes] [models=a,b] [rate=60/min] [concurrent=4]"
FIELDS = ("admin", "read", "models", "rate", "concurrent")

log = structlog.get_logger(__name__)


class Key(msgspec.Struct, frozen=True):
    """What a key opens. An `admin` sees all tenants; one that `only_reads` asks for nothing; `models` are all that it
    may ask for, by the names that clients use (None: any). Its `tenant` may have this much, by all of its keys.
    """

    tenant: str
    admin: bool = False
    only_reads: bool = False
    models: frozenset[str] | None = None
    allowance: Allowance = Allowance()


Known = dict[bytes, Key]  # keys by their hashes
Stamp = tuple[tuple[int, int, int] | None, ...]  # what tells whether files have changed


class Keys:
    """The keys of one server. `given` and `admins` have keys, lines, or files of lines; those of `admins` are admins'.

    A sole key is an admin's too. Whether any is needed is settled at the start. Raises ConfigError.
    """

    def __init__(self, given: Sequence[str] = (), admins: Sequence[str] = ()) -> None:
        entries = [(entry, False) for entry in given] + [(entry, True) for entry in admins]
        self._entries = [(entry, admin, os.path.isfile(entry)) for entry, admin in entries]
        self._files = [entry for entry, _, is_file in self._entries if is_file]
        self._read_at = self._seen = self._stamp()
        self._calls = defaultdict[bytes, set[asyncio.Timeout]](set)
        self._known = self._read()
        has_admin = any(key.admin for key in self._known.values())
        self._sole = next(iter(self._known)) if len(self._known) == 1 else b""
        self._known = self._with_sole(self._known)
        nobody = "no key is an admin's: workers, pools and other tenants' requests are closed (--admin-key)"
        self.note = "" if has_admin or not self else "the one API key is an admin's" if self._sole else nobody
        """A line to print at the start: who may see workers, pools and other tenants' requests; "" if it is clear."""

    def __bool__(self) -> bool:
        return bool(self._entries)

    def of(self, shown: str) -> Key | None:
        """What the key that somebody shows opens; None if it is none."""
        return self._known.get(_hash(shown))

    def all(self) -> list[Key]:
        """What all keys open."""
        return list(self._known.values())

    @contextmanager
    def lasting(self, shown: str, call: asyncio.Timeout) -> Iterator[None]:
        """While this block lasts, the call ends when the key that it shows opens less than before."""
        hashed = _hash(shown)
        self._calls[hashed].add(call)
        try:
            yield
        finally:
            self._calls[hashed].discard(call)
            if not self._calls[hashed]:
                del self._calls[hashed]

    async def look(self) -> None:
        """Wait, then read the files again if they have changed and are the same as at the last look."""
        await asyncio.sleep(LOOK_S)
        before, self._seen = self._seen, await to_thread.run_sync(self._stamp)
        if self._seen == self._read_at or self._seen != before:
            return
        self._read_at = self._seen
        try:
            fresh = await to_thread.run_sync(self._read)
        except ConfigError as error:
            log.error("keys stay as they were", reason=str(error))
            return
        self._take(self._with_sole(fresh))

    def _take(self, fresh: Known) -> None:
        old, self._known = self._known, fresh
        gone = [hashed for hashed, key in old.items() if _opens_less(fresh.get(hashed), key)]
        for call in [call for hashed in gone for call in self._calls.get(hashed, ())]:
            if not call.expired():
                call.reschedule(asyncio.get_running_loop().time())
        added = sorted(key.tenant for hashed, key in fresh.items() if hashed not in old)
        removed = sorted(key.tenant for hashed, key in old.items() if hashed not in fresh)
        log.info("keys were read again", keys=len(fresh), added=added, removed=removed)

    def _with_sole(self, known: Known) -> Known:
        """The keys, of which a sole one is an admin's if it was so at the start: removing others makes nobody one."""
        if list(known) != [self._sole]:
            return known
        return {hashed: msgspec.structs.replace(key, admin=True) for hashed, key in known.items()}

    def _stamp(self) -> Stamp:
        return tuple(map(_stamp_of, self._files))

    def _read(self) -> Known:
        """All keys. Raises ConfigError, which tells none of them."""
        known: Known = {}
        for entry, admin, is_file in self._entries:
            for where, line in _lines(entry) if is_file else [("a key that is given", entry)]:
                _add(known, where, line, admin)
        if self._entries and not known:
            raise ConfigError(f"there is no key in {', '.join(self._files) or 'what is given'}: write {LINE}")
        return known


def add(file: Path, tenant: str, fields: Mapping[str, str]) -> str:
    """Make a key, and add its line to a file, which is replaced as a whole. Raises ConfigError."""
    shown = f"sk-{secrets.token_urlsafe(32)}"
    if not _NAME.fullmatch(tenant):
        raise ConfigError(f"NAME is 1 to 64 letters, digits and . _ @ -, not {tenant[:80]!r}")
    line = " ".join([tenant, shown, *(f"{name}={value}" for name, value in fields.items())])
    fresh = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        before = "\n".join(text for _, text in _lines(str(file))) if file.exists() else ""
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
            written.write("\n".join(filter(None, [before, line])) + "\n")
        Keys((str(fresh),))
        fresh.replace(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    finally:
        fresh.unlink(missing_ok=True)
    return shown


def _add(known: Known, where: str, line: str, admin: bool) -> None:
    """Add the key of a line. Raises ConfigError for one that contradicts an earlier one."""
    if not (words := line.split()) or words[0].startswith("#"):
        return
    name = words[0] if len(words) > 1 else ADMIN if admin else ""
    shown = words[1] if len(words) > 1 else words[0]
    if len(words) > 1 and shown.partition("=")[0] in FIELDS:
        raise ConfigError(f"{where}: what has limits needs a name, write {LINE}")
    key = _key(where, name or DEFAULT_TENANT, words[2:], admin)
    if before := known.get(_hash(shown)):
        if len(words) > 1 and msgspec.structs.replace(key, admin=before.admin) != before:
            raise ConfigError(f"{where}: the key of {name} is on another line too, which says something else: drop one")
        key = msgspec.structs.replace(before, admin=before.admin or key.admin)
    for other in known.values():
        if other.tenant == key.tenant and other.allowance != key.allowance and name:
            raise ConfigError(f"{where}: {name} has other limits on another line: its keys share them, say the same")
    known[_hash(shown)] = key


def _key(where: str, tenant: str, said: Sequence[str], admin: bool) -> Key:
    given = dict(word.partition("=")[::2] for word in said)
    if len(given) != len(said) or any("=" not in word for word in said) or given.keys() - set(FIELDS):
        raise ConfigError(f"{where}: write {LINE}")
    for name in ("admin", "read"):
        if given.get(name, "yes") not in ("yes", "no"):
            raise ConfigError(f"{where}: {name} can be yes or no")
    models = frozenset(filter(None, given["models"].split(","))) if "models" in given else None
    rate, concurrent = _RATE.fullmatch(given.get("rate", "1/s")), _NUMBER.fullmatch(given.get("concurrent", "1"))
    if not rate or not concurrent or max(int(rate[1]), int(concurrent[0])) > MOST:
        raise ConfigError(f"{where}: rate is like 10/s, 60/min, 500/h or 1000/d, and concurrent a number, up to {MOST}")
    allowance = Allowance(int(concurrent[0]) if "concurrent" in given else 0)
    if "rate" in given:
        allowance = Allowance(allowance.concurrent, int(rate[1]), _PER_S[rate[2]])
    return Key(tenant, admin or given.get("admin") == "yes", given.get("read") == "yes", models, allowance)


def _lines(file: str) -> Iterator[tuple[str, str]]:
    """The lines of a file, and where each is. Raises ConfigError."""
    try:
        text = Path(file).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the key file {file} cannot be read: {error}") from error
    return ((f"{file}, line {number}", line.rstrip()) for number, line in enumerate(text.splitlines(), 1))


def _stamp_of(file: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _opens_less(now: Key | None, before: Key) -> bool:
    return now is None or now.tenant != before.tenant or before.admin and not now.admin


def _hash(shown: str) -> bytes:
    return blake2b(shown.encode(errors="surrogateescape"), digest_size=32).digest()
