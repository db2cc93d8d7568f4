"""Which batches give each request the bytes that it has alone: compared on the device that runs, and remembered."""

from __future__ import annotations

import fcntl
import os
import random
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog

from unfuse.stages.base import Media, Stage

TRUSTED = 3  # how many comparisons have to find no difference before batches of a size are no longer compared each time
CHECKED_AGAIN = 512  # of so many batches of a trusted size, one is compared again: a difference may hide for long
MOST = 4096  # the most verdicts that a process and a file keep, the latest: clients choose sizes, and so keys

Key = tuple[Hashable, ...]

log = structlog.get_logger(__name__)


class Verdict(msgspec.Struct, frozen=True):
    """What comparisons of a size found: so many times no difference, or a function that is to `blame` for one."""

    equal: int = 0
    blame: str = ""
    pool: str = ""
    size: int = 0

    @property
    def is_trusted(self) -> bool:
        """Whether requests may share a forward of this size."""
        return self.equal >= TRUSTED and not self.blame


UNSEEN = Verdict()


class Exactness:
    """The verdicts of one process, kept in a file that those of other processes and of earlier ones are in too.

    A key begins with a pool and has whatever else tasks must have in common. Verdicts are of one `scope`: the device,
    the versions and the settings under which they were found. Without a file, they end with the process; one that
    cannot be read or written costs comparisons, no more.
    """

    def __init__(self, file: Path | None, scope: str = "", chance: Callable[[], float] = random.random) -> None:
        self._file, self._scope, self._chance = file, scope, chance
        self._verdicts = self._read()

    def all(self) -> Sequence[Verdict]:
        """Every verdict, of whatever scope."""
        return [*self._verdicts.values()]

    def of(self, key: Key, size: int) -> Verdict:
        """What is known of batches of this size."""
        return self._verdicts.get(self._name(key, size), UNSEEN)

    def must_compare(self, key: Key, size: int) -> bool:
        """Whether the next batch of this size should be compared, unless it is known to make a difference."""
        verdict = self.of(key, size)
        return not verdict.blame and (not verdict.is_trusted or self._chance() * CHECKED_AGAIN < 1)

    def largest(self, key: Key, size: int) -> int:
        """Of this size, its half, its quarter and so on, the largest that is trusted or may still be; 0: none."""
        while size and self.of(key, size).blame:
            size //= 2
        return size

    def learn(self, key: Key, size: int, blame: str) -> None:
        """Remember a comparison: what is to blame for a difference, "" if there was none."""
        before = self.of(key, size)
        after = Verdict(before.equal + (not blame), blame, str(key[0]), size)
        self._verdicts.pop(self._name(key, size), None)
        self._verdicts[self._name(key, size)] = after
        if len(self._verdicts) > MOST:
            del self._verdicts[next(iter(self._verdicts))]
        if blame:
            log.warning("requests cannot share forwards exactly", key=str(key), size=size, because_of=blame)
        if after.is_trusted != before.is_trusted or blame:
            self._write(self._name(key, size), after)

    def _name(self, key: Key, size: int) -> str:
        return f"{self._scope} {key!r} {size}".strip()

    def _read(self) -> dict[str, Verdict]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, Verdict]) if self._file else {}
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("what was compared before cannot be read", file=str(self._file), reason=str(error))
            return {}

    def _write(self, name: str, verdict: Verdict) -> None:
        """Add a verdict to the file, beside those that other processes have added meanwhile."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                kept = self._read()
                kept.pop(name, None)
                kept[name] = verdict
                fresh = self._file.with_suffix(".new")
                fresh.write_bytes(msgspec.json.encode(dict([*kept.items()][-MOST:])))
                os.replace(fresh, self._file)
        except OSError as error:
            log.warning("what was compared cannot be kept", file=str(self._file), reason=str(error))


UNKNOWN = "a function that cannot be seen"


def difference(alone: Sequence[Any], together: Sequence[Any]) -> int | None:
    """The first of some states that has something else of a forward together than alone; None if there is none."""
    pairs = zip(alone, together, strict=True)
    return next((row for row, (own, shared) in enumerate(pairs) if not _equal(own, shared)), None)


def culprit(stage: Stage, states: Sequence[Any], row: int) -> str:
    """What is to blame for it. Computes both once more."""
    from unfuse.stages.one_by_one import first_difference

    return first_difference(lambda: stage.step_alone(states[row]), lambda: stage.step(states)) or UNKNOWN


def _equal(one: Any, other: Any) -> bool:
    """Whether two results, errors among them, are the same bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Exception):
        return str(one) == str(other)
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, msgspec.Struct) and not isinstance(one, Media):
        return _equal(msgspec.structs.asdict(one), msgspec.structs.asdict(other))
    if hasattr(one, "untyped_storage"):
        return bool(one.shape == other.shape and one.dtype == other.dtype and _bytes(one) == _bytes(other))
    return bool(one == other)


def _bytes(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().cpu().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
