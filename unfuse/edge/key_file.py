"""Changes of a key file: add and remove keys, and write hashes in the place of plain keys.

Each change replaces the file as a whole, keeps comments, order, mode and owner, and holds a lock meanwhile. A file that
would not be accepted by a server is never written.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from unfuse.core.errors import ConfigError, UsageError
from unfuse.edge.key_lines import (
    HASHED,
    LEAST_CHARACTERS,
    MOST_BYTES,
    NAME,
    NAME_RULE,
    Key,
    KeyLine,
    entries_of,
    hash_of,
    key_of,
    known_of,
    read_file,
)  # fmt: skip

SHOWN_DIGITS = 8
"""Digits of a hash that a list shows."""

LEAST_DIGITS = 4
"""Fewest digits by which a key can be removed."""


def rows_of(file: Path) -> list[tuple[KeyLine, Key]]:
    """Return the keys of a file, in order, with what each opens. Raises UsageError."""
    entries = list(entries_of(read_file(str(file)), str(file)))
    known = known_of(iter(entries))
    return [(entry, known[entry.digest]) for entry in entries]


def add(file: Path, tenant: str, fields: Mapping[str, str]) -> str:
    """Make a key, add the line with its hash to a file, and return the key. Makes the file if there is none.

    Raises UsageError for a name or field that a line cannot have, ConfigError if the file cannot be written.
    """
    if not NAME.fullmatch(tenant):
        raise UsageError(f"NAME is {NAME_RULE}, not {tenant[:80]!r}")
    for name, value in fields.items():
        if value.split() != [value]:
            raise UsageError(f"--{name} {value[:80]!r} has spaces: write several models as a,b, and a rate as 60/min")
        key_of(f"--{name} {value[:80]}", tenant, [f"{name}={value}"])
    key = f"sk-{secrets.token_urlsafe(32)}"
    line = " ".join([tenant, hash_of(key), *(f"{name}={value}" for name, value in fields.items())])

    def added(text: str) -> str:
        end = (re.findall(r"\r?\n", text) or ["\n"])[-1]
        return f"{text}{'' if not text or text.endswith(end) else end}{line}{end}"

    _change(file, added, makes=True)
    return key


def remove(file: Path, which: str) -> list[KeyLine]:
    """Remove all keys of a name, or the one key whose hash begins so, and return what was removed.

    Raises UsageError if no key or several keys are meant, and for the last key of a file.
    """
    removed: list[KeyLine] = []

    def kept(text: str) -> str:
        entries = list(entries_of(text, str(file)))
        removed.extend(_meant(entries, which, file))
        if len(removed) == len(entries):
            raise UsageError(
                f"{file} would have no key left, and a running server then keeps the keys that it has: add another key "
                "first (`unfuse keys add NAME`), or stop the server and delete the file"
            )
        gone = {entry.index for entry in removed}
        return "".join(line for index, line in enumerate(text.splitlines(keepends=True)) if index not in gone)

    _change(file, kept)
    return removed


def hash_keys(file: Path) -> tuple[int, list[str]]:
    """Write the hashes of plain keys in their place.

    Returns how many there were, and the names of those that are so short that their hash tells the key.
    """
    plain: list[KeyLine] = []

    def hashed(text: str) -> str:
        plain.extend(entry for entry in entries_of(text, str(file)) if entry.plain)
        lines = text.splitlines(keepends=True)
        for entry in plain:
            line, end = lines[entry.index], entry.start + len(entry.plain)
            lines[entry.index] = line[: entry.start] + hash_of(entry.plain) + line[end:]
        return "".join(lines)

    _change(file, hashed)
    return len(plain), [entry.name for entry in plain if len(entry.plain) < LEAST_CHARACTERS]


def _meant(entries: Sequence[KeyLine], which: str, file: Path) -> list[KeyLine]:
    """Return the keys that a name or the beginning of a hash stands for. Raises UsageError for none or several."""
    digits = which.lower().removeprefix(HASHED)
    by_name = [entry for entry in entries if entry.name == which]
    by_hash = [entry for entry in entries if len(digits) >= LEAST_DIGITS and entry.digest.hex().startswith(digits)]
    if by_name and by_hash and by_name != by_hash:
        raise UsageError(f"{which} is a name and the beginning of a hash in {file}: write more digits of the hash")
    if not (found := by_name or by_hash):
        raise UsageError(
            f"no key in {file} has the name {which[:80]!r}, or a hash that begins so ({LEAST_DIGITS} digits or more): "
            "`unfuse keys ls` lists them"
        )
    if not by_name and len({entry.digest for entry in found}) > 1:
        raise UsageError(f"{len(found)} keys in {file} have a hash that begins with {digits}: write more digits")
    return found


def _change(file: Path, change: Callable[[str], str], *, makes: bool = False) -> None:
    """Replace the text of a file by what `change` returns for it, unless a server would refuse that."""
    place = Path(os.path.realpath(file))  # a link stays one
    try:
        if makes:
            place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.parent):
            text = "" if makes and not place.exists() else read_file(str(file))
            fresh = change(text)
            if len(fresh.encode()) > MOST_BYTES:
                raise UsageError(f"{file} would be larger than {MOST_BYTES >> 20} MiB, which a server does not read")
            known_of(entries_of(fresh, str(file)))
            if fresh != text:
                _replace(place, fresh)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not makes:
            read_file(str(file))
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock on the key files of a folder, so that of two changes at once none is lost."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(place: Path, text: str) -> None:
    fresh = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as written:
            written.write(text)
            written.flush()
            if place.exists():
                _copy_owner(place, descriptor)
            os.fsync(descriptor)
        fresh.replace(place)
    finally:
        fresh.unlink(missing_ok=True)


def _copy_owner(place: Path, descriptor: int) -> None:
    """Give a new file the mode and owner of the one that it replaces: a server may run as another user."""
    before, now = place.stat(), os.fstat(descriptor)
    if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
        try:
            os.fchown(descriptor, before.st_uid, before.st_gid)
        except PermissionError as error:
            raise ConfigError(
                f"{place} belongs to another user or group, whose server could not read it any more: run this as that "
                "user, or as root"
            ) from error
    os.fchmod(descriptor, before.st_mode & 0o777)
