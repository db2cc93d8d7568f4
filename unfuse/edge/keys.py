"""API keys: the format of key files, the keys of a server, edits of files.

A line is `NAME sha256:HEX [admin=yes] [read=yes] [models=a,b] [rate=60/min] [concurrent=4]`. A file has hashes, so that
its readers get no key; a line with a plain key works too. Keys are compared by their hashes, so the time of a
comparison reveals nothing about them.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import msgspec
import structlog
from anyio import to_thread

from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.request import TenantLimits

DEFAULT_TENANT = "default"
HASHED = "sha256:"

#: Fewest characters of a key that `--api-key` accepts. Shorter keys can be guessed, also from their hash.
MIN_KEY_CHARS = 16

#: Largest key file that is read.
MAX_FILE_BYTES = 8 << 20

#: Highest number that a limit can have.
MAX_LIMIT = 10**6

LINE = "NAME sha256:HEX [admin=yes] [read=yes] [models=a,b] [rate=60/min] [concurrent=4]"
FIELDS = ("admin", "read", "models", "rate", "concurrent")
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
NAME_RULE = "1 to 64 letters, digits and . _ @ -"

_KEY = re.compile(r"[!-~]+")
_PATH = re.compile(r"(/|\./|\.\./|~/).*|.*\.[A-Za-z]{1,5}")
_HEX = re.compile(r"[0-9a-f]{64}")
_NUMBER, _RATE = re.compile(r"[1-9][0-9]{0,6}"), re.compile(r"([1-9][0-9]{0,6})/(s|min|h|d)")
_PER_S = {"s": 1, "min": 60, "h": 3600, "d": 86400}


#: Seconds between two checks of the files. A changed file is read once two checks in a row found the same state.
CHECK_INTERVAL_S = 1.0

#: Digits of a hash that a list shows.
LISTED_DIGITS = 8

#: Fewest digits by which a key can be removed.
MIN_DIGITS = 4

NOBODY = (
    "no API key has admin rights, so nobody can list workers, pools and other tenants' requests: write admin=yes on a "
    "line of"
)

log = structlog.get_logger(__name__)


class ApiKey(msgspec.Struct, frozen=True):
    """The rights of one API key."""

    #: The tenant that requests with the key belong to.
    tenant: str
    #: Whether it may see and change the requests of all tenants, and use the routes for admins.
    admin: bool = False
    #: Whether it may not create, cancel or delete anything. It sees all metrics.
    read_only: bool = False
    #: Public names of the models that it may use; None is any.
    models: frozenset[str] | None = None
    #: The limits of its tenant, which all keys of the tenant share.
    limits: TenantLimits = TenantLimits()


#: The rights of keys, by the SHA-256 of the key.
KeyRights = dict[bytes, ApiKey]


class KeyLine(msgspec.Struct, frozen=True):
    """One line with a key in a key file."""

    #: The index of its line in the file, from 0.
    index: int
    #: File and line, for messages.
    location: str
    #: The tenant.
    name: str
    #: The SHA-256 of the key.
    digest: bytes
    #: The key itself if the line has it, "" if the line has its hash.
    plain: str
    #: Where the key or its hash begins in the line.
    start: int
    #: Words after the key, like rate=60/min.
    fields: tuple[str, ...]
    #: Whether the line has a name; a key alone is of the default tenant.
    is_named: bool


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key, by which keys are compared and stored."""
    return sha256(key.encode(errors="surrogateescape")).digest()


def hash_of(key: str) -> str:
    """Return the hash of a key as a line has it."""
    return HASHED + digest_of(key).hex()


def read_file(file: str) -> str:
    """Return the text of a key file.

    Raises UsageError if it is missing, unreadable, no regular file, or too large.
    """
    try:
        # O_NONBLOCK: opening a pipe must not wait for its writer.
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
            is_file = stat.S_ISREG(os.fstat(opened.fileno()).st_mode)
            data = opened.read(MAX_FILE_BYTES + 1) if is_file else b""
        reason = "" if is_file else f"it is a pipe or a device; use a file with lines: {LINE}"
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no key file {file}: create it with `unfuse keys add NAME --file {file}`, or pass a key itself "
            "by --api-key"
        ) from error
    except IsADirectoryError:
        reason = f"it is a folder; use a file with lines: {LINE}"
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", error))

    if reason:
        raise UsageError(f"the key file {file} cannot be read: {reason}")
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"the key file {file} is larger than {MAX_FILE_BYTES >> 20} MiB: is it the right file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"the key file {file} cannot be read: it is not UTF-8 text; write lines: {LINE}") from error


def entries_of(text: str, file: str) -> Iterator[KeyLine]:
    """Return the keys in the text of a file, in order.

    Raises UsageError for a line that has no known form.
    """
    for index, line in enumerate(text.splitlines()):
        words = list(re.finditer(r"\S+", line))
        if not words or words[0][0].startswith("#"):
            continue

        location = f"{file}, line {index + 1}"
        name = words[0][0] if len(words) > 1 else DEFAULT_TENANT
        secret, fields = words[min(1, len(words) - 1)], tuple(word[0] for word in words[2:])
        if len(words) > 1 and secret[0].partition("=")[0] in FIELDS and "=" in secret[0]:
            raise UsageError(f"{location}: a key with limits needs a name: write {LINE}")
        if not NAME.fullmatch(name):
            raise UsageError(f"{location}: a name must have {NAME_RULE}: write {LINE}")
        digest, plain = _secret(location, secret[0])
        yield KeyLine(index, location, name, digest, plain, secret.start(), fields, len(words) > 1)


def _secret(location: str, word: str) -> tuple[bytes, str]:
    """Return the digest of a key and, if it is plain, the key."""
    if word.lower().startswith(HASHED):
        digits = word[len(HASHED) :].lower()
        if not _HEX.fullmatch(digits):
            raise UsageError(f"{location}: {HASHED} needs 64 hex digits: create the line with `unfuse keys add NAME`")
        return bytes.fromhex(digits), ""

    if not _KEY.fullmatch(word):
        raise UsageError(
            f"{location}: a key may have printable ASCII characters only: create one with `unfuse keys add NAME`"
        )
    return digest_of(word), word


def rights_of(entries: Iterable[KeyLine]) -> KeyRights:
    """Return the rights of keys by hash.

    Raises UsageError for a line that contradicts an earlier one.
    """
    rights: KeyRights = {}
    locations: dict[bytes, str] = {}
    limits_by_tenant: dict[str, tuple[TenantLimits, str]] = {}
    for entry in entries:
        key = key_of(entry.location, entry.name, entry.fields)
        known_key = rights.get(entry.digest)
        if known_key and entry.is_named and known_key != key:
            earlier_location = locations[entry.digest]
            raise UsageError(
                f"{entry.location}: the key of {entry.name} is also on another line ({earlier_location}) with other "
                "fields: delete one of them"
            )

        # A repeated key without a name, for example the one of --api-key, has the rights of the earlier line.
        if known_key:
            continue

        tenant_limits, first_location = limits_by_tenant.setdefault(key.tenant, (key.limits, entry.location))
        if tenant_limits != key.limits:
            raise UsageError(
                f"{entry.location}: {entry.name} has other limits on another line ({first_location}): all keys of a "
                "name share rate and concurrent, so write the same"
            )
        rights[entry.digest] = key
        locations[entry.digest] = entry.location
    return rights


def key_of(location: str, tenant: str, fields: Sequence[str]) -> ApiKey:
    """Return the rights of a key from the fields of its line.

    location: the file and line, or the option, with which the message of an error begins. Raises UsageError.
    """
    values = dict(field.partition("=")[::2] for field in fields)
    if len(values) != len(fields) or any("=" not in field for field in fields) or values.keys() - set(FIELDS):
        raise UsageError(f"{location}: write {LINE}")
    for name in ("admin", "read"):
        if values.get(name, "yes") not in ("yes", "no"):
            raise UsageError(f"{location}: {name} must be yes or no")

    models = frozenset(filter(None, values["models"].split(","))) if "models" in values else None
    rate, concurrent = _RATE.fullmatch(values.get("rate", "1/s")), _NUMBER.fullmatch(values.get("concurrent", "1"))
    if not rate or not concurrent or max(int(rate[1]), int(concurrent[0])) > MAX_LIMIT:
        raise UsageError(
            f"{location}: rate must be like 10/s, 60/min, 500/h or 1000/d, and concurrent a number, both up to "
            f"{MAX_LIMIT}"
        )

    limits = TenantLimits(int(concurrent[0]) if "concurrent" in values else 0)
    if "rate" in values:
        limits = TenantLimits(limits.concurrent, int(rate[1]), _PER_S[rate[2]])
    return ApiKey(tenant, values.get("admin") == "yes", values.get("read") == "yes", models, limits)


class ApiKeys:
    """The API keys that a running server accepts.

    It is false if no keys are configured.

    keys: keys of the command line. The key is an admin's if it is the only one and there are no files.
    files: key files. A key in a file is an admin's if its line says so.

    Files are read again when they change. If a changed file is wrong, the error is logged and the keys stay as they
    were. Whether calls need a key is decided at the start. Raises UsageError for a key or a file that cannot be used.
    """

    def __init__(self, keys: Sequence[str] = (), files: Sequence[str] = ()) -> None:
        self._keys = tuple(dict.fromkeys(key.strip() for key in keys))
        self._files = tuple(files)
        for key in self._keys:
            _require_key(key)
        self._is_only_key = len(self._keys) == 1 and not self._files
        self._read_stamp = self._stamp()  # state of the files when they were read
        self._last_stamp = self._read_stamp  # state of the files at the last check
        self._calls = defaultdict[bytes, set[asyncio.Timeout]](set)  # calls in progress, by the hash of their key
        self._failure = ""  # why the files could not be read again
        self._plain_files: list[str] = []  # files that have plain keys
        self._rights = self._read()

    def __bool__(self) -> bool:
        return bool(self._keys or self._files)

    @property
    def admin_note(self) -> str:
        """A line about admin keys to print at the start, or "".

        The line states that no key has admin rights, or that the only key has them.
        """
        if not self or any(key.admin for key in self._rights.values()) and self._files:
            return ""
        if self._is_only_key:
            return "the only API key has admin rights"
        return f"{NOBODY} {self._files[0] if self._files else '--api-keys FILE (`unfuse keys add NAME --admin`)'}"

    @property
    def warning(self) -> str:
        """A warning about plain keys in files to log at the start, or ""."""
        if not self._plain_files:
            return ""
        commands = ", ".join(f"`unfuse keys hash {file}`" for file in self._plain_files)
        return f"keys are stored as plain text: replace them by their hashes with {commands}"

    def find(self, key: str) -> ApiKey | None:
        """Return the rights of a key that a client sends, or None if unknown."""
        return self._rights.get(digest_of(key))

    def all(self) -> list[ApiKey]:
        """Return the rights of all keys."""
        return list(self._rights.values())

    @contextmanager
    def end_when_withdrawn(self, key: str, call: asyncio.Timeout) -> Iterator[None]:
        """Return a context in which the timeout `call` expires when the key is withdrawn.

        A key is withdrawn if it is removed, gets another tenant, or is no admin's any more.
        """
        digest = digest_of(key)
        self._calls[digest].add(call)
        try:
            yield
        finally:
            self._calls[digest].discard(call)
            if not self._calls[digest]:
                del self._calls[digest]

    async def reload_if_changed(self) -> None:
        """Wait for CHECK_INTERVAL_S, then read the files again if they have changed.

        Files that cannot be read are tried again at each check, and the reason is logged once.
        """
        await asyncio.sleep(CHECK_INTERVAL_S)
        previous, self._last_stamp = self._last_stamp, await to_thread.run_sync(self._stamp)

        # Two checks in a row must find the same state, so that a file is not read while it is written.
        if self._last_stamp != previous or self._last_stamp == self._read_stamp and not self._failure:
            return
        self._read_stamp = self._last_stamp
        try:
            keys = await to_thread.run_sync(self._read)
        except ConfigError as error:
            if str(error) != self._failure:
                log.error("API keys are unchanged: the key files cannot be reloaded", reason=str(error))
            self._failure = str(error)
            return
        self._failure = ""
        self._replace_keys(keys)

    def _replace_keys(self, keys: KeyRights) -> None:
        """Replace all keys, and end the calls in progress whose keys are withdrawn."""
        old_rights, self._rights = self._rights, keys
        withdrawn = [digest for digest, key in old_rights.items() if _is_withdrawn(keys.get(digest), key)]
        for call in [call for digest in withdrawn for call in self._calls.get(digest, ())]:
            if not call.expired():
                call.reschedule(asyncio.get_running_loop().time())

        added = sorted(key.tenant for digest, key in keys.items() if digest not in old_rights)
        removed = sorted(key.tenant for digest, key in old_rights.items() if digest not in keys)
        log.info("API keys reloaded", keys=len(keys), added=added, removed=removed)

    def _stamp(self) -> tuple[tuple[int, int, int, int] | None, ...]:
        """Return a value that differs when the files have changed."""
        return tuple(map(_stamp_of, self._files))

    def _read(self) -> KeyRights:
        """Read the files. Returns all keys. Raises UsageError, whose message has no key."""
        entries: list[KeyLine] = []
        plain_files: list[str] = []
        for file in self._files:
            file_entries = list(entries_of(read_file(file), file))
            if not file_entries:
                raise UsageError(f"there is no key in {file}: add one with `unfuse keys add NAME --file {file}`")
            plain_files += [file] if any(entry.plain for entry in file_entries) else []
            entries += file_entries
        for key in self._keys:
            entries.append(KeyLine(0, "--api-key", DEFAULT_TENANT, digest_of(key), key, 0, (), False))

        rights = rights_of(entries)
        self._plain_files = plain_files
        if self._is_only_key:
            rights = {digest: ApiKey(key.tenant, admin=True) for digest, key in rights.items()}
        return rights


def _require_key(key: str) -> None:
    """Raise UsageError for a short or malformed key of the command line."""
    advice = "`unfuse keys add NAME` makes a key and writes its hash to a file for --api-keys"
    if not _KEY.fullmatch(key):
        raise UsageError(
            f"--api-key (UNFUSE_API_KEY) must be one key of printable ASCII characters, without spaces: {advice}"
        )
    if key.lower().startswith(HASHED):
        raise UsageError(f"--api-key takes a key, not its hash: put the hash into a file for --api-keys, as {LINE}")
    if is_path_like(key):
        raise UsageError(
            "--api-key takes a key, but the value looks like a file path: pass a file of keys by --api-keys"
        )
    if len(key) < MIN_KEY_CHARS:
        raise UsageError(
            f"--api-key (UNFUSE_API_KEY) has {len(key)} characters, but a key needs at least {MIN_KEY_CHARS}: {advice}"
        )


def is_path_like(text: str) -> bool:
    """Return whether a text is, or looks like, the path of a file.

    A text is a path if the file or its folder exists.

    Callers refuse these texts as secrets: otherwise the path of a missing file would become the secret.
    """
    parent = os.path.dirname(text)
    return bool(_PATH.fullmatch(text)) or os.path.exists(text) or bool(parent) and os.path.isdir(parent)


def _stamp_of(file: str) -> tuple[int, int, int, int] | None:
    """Return a value that differs when the file has changed; None without access."""
    try:
        file_stat = os.stat(file)
    except (OSError, ValueError):
        return None
    return file_stat.st_mtime_ns, file_stat.st_ctime_ns, file_stat.st_size, file_stat.st_ino


def _is_withdrawn(new: ApiKey | None, old: ApiKey) -> bool:
    """Return whether calls in progress must end because of a key's new rights."""
    return new is None or new.tenant != old.tenant or old.admin and not new.admin


def rows_of(file: Path) -> list[tuple[KeyLine, ApiKey]]:
    """Return the lines with keys of a file, in order, with the rights of each.

    Raises UsageError.
    """
    entries = list(entries_of(read_file(str(file)), str(file)))
    rights = rights_of(entries)
    return [(entry, rights[entry.digest]) for entry in entries]


def add_key(file: Path, tenant: str, fields: Mapping[str, str]) -> str:
    """Create a key, add its hash to a key file, and return the key.

    A missing file is created.

    Raises UsageError for a name or field that a line cannot have, ConfigError if the file cannot be written.
    """
    if not NAME.fullmatch(tenant):
        raise UsageError(f"NAME must have {NAME_RULE}, not {tenant[:80]!r}")
    for name, value in fields.items():
        if value.split() != [value]:
            raise UsageError(f"--{name} {value[:80]!r} has spaces: write several models as a,b, and a rate as 60/min")
        key_of(f"--{name} {value[:80]}", tenant, [f"{name}={value}"])
    key = f"sk-{secrets.token_urlsafe(32)}"
    line = " ".join([tenant, hash_of(key), *(f"{name}={value}" for name, value in fields.items())])

    def with_line(text: str) -> str:
        line_end = (re.findall(r"\r?\n", text) or ["\n"])[-1]
        return f"{text}{'' if not text or text.endswith(line_end) else line_end}{line}{line_end}"

    _edit_file(file, with_line, create=True)
    return key


def remove_keys(file: Path, name_or_hash: str) -> list[KeyLine]:
    """Remove all keys of a name, or the one key with a hash.

    Returns the removed lines.

    name_or_hash: the name, or the first digits of the hash.

    Raises UsageError if no key or several different keys match, and for the last key of a file.
    """
    removed: list[KeyLine] = []

    def without_keys(text: str) -> str:
        entries = list(entries_of(text, str(file)))
        removed.extend(_matching_keys(entries, name_or_hash, file))
        if len(removed) == len(entries):
            raise UsageError(
                f"{file} would have no key left, and a running server would ignore the change: add another key first "
                "(`unfuse keys add NAME`), or stop the server and delete the file"
            )
        removed_lines = {entry.index for entry in removed}
        return "".join(line for index, line in enumerate(text.splitlines(keepends=True)) if index not in removed_lines)

    _edit_file(file, without_keys)
    return removed


def hash_keys(file: Path) -> tuple[int, list[str]]:
    """Replace the plain keys in a file by their hashes.

    Returns the number of plain keys, and the names of those that are so short that they can be guessed from their hash.
    """
    plain_entries: list[KeyLine] = []

    def with_hashes(text: str) -> str:
        plain_entries.extend(entry for entry in entries_of(text, str(file)) if entry.plain)
        lines = text.splitlines(keepends=True)
        for entry in plain_entries:
            line, end = lines[entry.index], entry.start + len(entry.plain)
            lines[entry.index] = line[: entry.start] + hash_of(entry.plain) + line[end:]
        return "".join(lines)

    _edit_file(file, with_hashes)
    return len(plain_entries), [entry.name for entry in plain_entries if len(entry.plain) < MIN_KEY_CHARS]


def _matching_keys(entries: Sequence[KeyLine], name_or_hash: str, file: Path) -> list[KeyLine]:
    """Return the lines with this name, or with a hash that begins with these digits.

    Raises UsageError if none matches, if the text is both a name and a hash, or if keys with different hashes match.
    """
    digits = name_or_hash.lower().removeprefix(HASHED)
    by_name = [entry for entry in entries if entry.name == name_or_hash]
    by_hash = [entry for entry in entries if len(digits) >= MIN_DIGITS and entry.digest.hex().startswith(digits)]

    if by_name and by_hash and by_name != by_hash:
        raise UsageError(
            f"{name_or_hash} is both a name and the beginning of a hash in {file}: write more digits of the hash"
        )
    if not (matching := by_name or by_hash):
        raise UsageError(
            f"no key in {file} has the name {name_or_hash[:80]!r}, or a hash that begins with it ({MIN_DIGITS} digits "
            "or more): list the keys with `unfuse keys ls`"
        )
    if not by_name and len({entry.digest for entry in matching}) > 1:
        raise UsageError(f"{len(matching)} keys in {file} have a hash that begins with {digits}: write more digits")
    return matching


def _edit_file(file: Path, edit: Callable[[str], str], *, create: bool = False) -> None:
    """Replace the text of a key file by the result of `edit`.

    The file is replaced atomically, under a lock on its folder.

    The mode and owner of the file stay the same. With `create`, a missing file counts as an empty one.

    Raises UsageError for a new text that a server would refuse, ConfigError if the file cannot be written.
    """
    path = Path(os.path.realpath(file))  # a symbolic link is not replaced, but the file that it links to
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            text = "" if create and not path.exists() else read_file(str(file))
            new_text = edit(text)
            if len(new_text.encode()) > MAX_FILE_BYTES:
                raise UsageError(f"{file} would be larger than the maximum of {MAX_FILE_BYTES >> 20} MiB")
            rights_of(entries_of(new_text, str(file)))
            if new_text != text:
                _replace_file(path, new_text)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not create:
            read_file(str(file))  # raises the error for a missing file
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Return a context with the lock on the key files of a folder.

    The lock prevents that a concurrent edit is lost.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace_file(path: Path, text: str) -> None:
    """Write a file atomically: a temporary file replaces it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            if path.exists():
                _copy_owner(path, descriptor)
            os.fsync(descriptor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _copy_owner(path: Path, descriptor: int) -> None:
    """Copy the mode and owner of a file to the one that replaces it.

    A server that runs as another user must still be able to read it. Raises ConfigError.
    """
    old_stat, new_stat = path.stat(), os.fstat(descriptor)
    if (old_stat.st_uid, old_stat.st_gid) != (new_stat.st_uid, new_stat.st_gid):
        try:
            os.fchown(descriptor, old_stat.st_uid, old_stat.st_gid)
        except PermissionError as error:
            raise ConfigError(
                f"{path} belongs to another user or group, whose server could not read it afterwards: run this as "
                "that user, or as root"
            ) from error
    os.fchmod(descriptor, old_stat.st_mode & 0o777)
