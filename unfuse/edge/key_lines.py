"""Lines of a key file: `NAME sha256:HEX [admin=yes] [read=yes] [models=a,b] [rate=60/min] [concurrent=4]`.

A file has hashes, so that whoever reads it has no key. A line with a plain key works too.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from hashlib import sha256

import msgspec

from unfuse.core.errors import UsageError
from unfuse.core.request import Allowance

DEFAULT_TENANT = "default"
HASHED = "sha256:"
LEAST_CHARACTERS = 16
"""Fewest characters of a key that `--api-key` accepts. Shorter keys can be guessed, also from their hash."""

MOST_BYTES = 8 << 20
"""Largest key file that is read."""

MOST = 10**6
"""Highest number that a limit can have."""

LINE = "NAME sha256:HEX [admin=yes] [read=yes] [models=a,b] [rate=60/min] [concurrent=4]"
FIELDS = ("admin", "read", "models", "rate", "concurrent")
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
NAME_RULE = "1 to 64 letters, digits and . _ @ -"

_KEY = re.compile(r"[!-~]+")
_HEX = re.compile(r"[0-9a-f]{64}")
_NUMBER, _RATE = re.compile(r"[1-9][0-9]{0,6}"), re.compile(r"([1-9][0-9]{0,6})/(s|min|h|d)")
_PER_S = {"s": 1, "min": 60, "h": 3600, "d": 86400}


class Key(msgspec.Struct, frozen=True):
    """What a key opens.

    `admin`: it sees all tenants. `only_reads`: it creates, cancels and deletes nothing, and sees all metrics.
    `models`: all that it may use, by the names that clients use; None is any. `allowance`: the limits of its tenant,
    which all keys of the tenant share.
    """

    tenant: str
    admin: bool = False
    only_reads: bool = False
    models: frozenset[str] | None = None
    allowance: Allowance = Allowance()


Known = dict[bytes, Key]
"""Keys by their hashes."""


class KeyLine(msgspec.Struct, frozen=True):
    """One key of a file, as it is written there."""

    index: int
    """The index of its line in the file."""
    where: str
    """File and line, for messages."""
    name: str
    """The tenant."""
    digest: bytes
    plain: str
    """The key itself if the line has it, "" if the line has its hash."""
    start: int
    """Where the key or its hash begins in the line."""
    fields: tuple[str, ...]
    """Words after the key, like rate=60/min."""
    is_named: bool
    """Whether the line has a name; a key alone is of the default tenant."""


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key, by which keys are compared and stored."""
    return sha256(key.encode(errors="surrogateescape")).digest()


def hash_of(key: str) -> str:
    """Return the hash of a key as a line has it."""
    return HASHED + digest_of(key).hex()


def read_file(file: str) -> str:
    """Return the text of a key file. Raises UsageError for one that is missing, unreadable, no file, or huge."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOENT:
            raise UsageError(
                f"there is no key file {file}: `unfuse keys add NAME --file {file}` makes it; a key itself is given by "
                "--api-key"
            ) from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"the key file {file} cannot be read: {reason}") from error
    try:
        data = _read_regular(file, descriptor)
    except OSError as error:
        raise UsageError(f"the key file {file} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"the key file {file} cannot be read: it is not text in UTF-8; write lines: {LINE}") from error


def _read_regular(file: str, descriptor: int) -> bytes:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
        raise UsageError(f"the key file {file} cannot be read: it is {kind}; name a file of lines: {LINE}")
    data = bytearray()
    while len(data) <= MOST_BYTES and (more := os.read(descriptor, 1 << 20)):
        data += more
    if len(data) > MOST_BYTES:
        raise UsageError(f"the key file {file} is larger than {MOST_BYTES >> 20} MiB: is it the right file?")
    return bytes(data)


def entries_of(text: str, file: str) -> Iterator[KeyLine]:
    """Return the keys in the text of a file, in order. Raises UsageError for a line that has no known form."""
    for index, line in enumerate(text.splitlines()):
        words = list(re.finditer(r"\S+", line))
        if not words or words[0][0].startswith("#"):
            continue
        where = f"{file}, line {index + 1}"
        name = words[0][0] if len(words) > 1 else DEFAULT_TENANT
        secret, fields = words[min(1, len(words) - 1)], tuple(word[0] for word in words[2:])
        if len(words) > 1 and secret[0].partition("=")[0] in FIELDS and "=" in secret[0]:
            raise UsageError(f"{where}: what has limits needs a name, write {LINE}")
        if not NAME.fullmatch(name):
            raise UsageError(f"{where}: a name has {NAME_RULE}; write {LINE}")
        digest, plain = _secret(where, secret[0])
        yield KeyLine(index, where, name, digest, plain, secret.start(), fields, len(words) > 1)


def _secret(where: str, word: str) -> tuple[bytes, str]:
    """Return the digest of a key and, if it is plain, the key."""
    if word.lower().startswith(HASHED):
        digits = word[len(HASHED) :].lower()
        if not _HEX.fullmatch(digits):
            raise UsageError(f"{where}: {HASHED} needs 64 hex digits; `unfuse keys add NAME` writes such a line")
        return bytes.fromhex(digits), ""
    if not _KEY.fullmatch(word):
        raise UsageError(f"{where}: a key has printable ASCII characters only; `unfuse keys add NAME` makes one")
    return digest_of(word), word


def known_of(entries: Iterator[KeyLine]) -> Known:
    """Return the keys by their hashes. Raises UsageError for a line that contradicts an earlier one."""
    known: Known = {}
    lines: dict[bytes, str] = {}
    limits: dict[str, tuple[Allowance, str]] = {}
    for entry in entries:
        key = key_of(entry.where, entry.name, entry.fields)
        before = known.get(entry.digest)
        if before and entry.is_named and before != key:
            earlier = lines[entry.digest]
            raise UsageError(
                f"{entry.where}: the key of {entry.name} is on another line too ({earlier}), which says something "
                "else: delete one"
            )
        if before:
            continue
        allowance, first = limits.setdefault(key.tenant, (key.allowance, entry.where))
        if allowance != key.allowance:
            raise UsageError(
                f"{entry.where}: {entry.name} has other limits on another line ({first}): all keys of a name share "
                "rate and concurrent, write the same"
            )
        known[entry.digest], lines[entry.digest] = key, entry.where
    return known


def key_of(where: str, tenant: str, fields: Sequence[str]) -> Key:
    """Return what a key opens whose line has these fields. Raises UsageError, which begins with `where`."""
    given = dict(field.partition("=")[::2] for field in fields)
    if len(given) != len(fields) or any("=" not in field for field in fields) or given.keys() - set(FIELDS):
        raise UsageError(f"{where}: write {LINE}")
    for name in ("admin", "read"):
        if given.get(name, "yes") not in ("yes", "no"):
            raise UsageError(f"{where}: {name} can be yes or no")
    models = frozenset(filter(None, given["models"].split(","))) if "models" in given else None
    rate, concurrent = _RATE.fullmatch(given.get("rate", "1/s")), _NUMBER.fullmatch(given.get("concurrent", "1"))
    if not rate or not concurrent or max(int(rate[1]), int(concurrent[0])) > MOST:
        raise UsageError(f"{where}: rate is like 10/s, 60/min, 500/h or 1000/d, and concurrent a number, up to {MOST}")
    allowance = Allowance(int(concurrent[0]) if "concurrent" in given else 0)
    if "rate" in given:
        allowance = Allowance(allowance.concurrent, int(rate[1]), _PER_S[rate[2]])
    return Key(tenant, given.get("admin") == "yes", given.get("read") == "yes", models, allowance)
