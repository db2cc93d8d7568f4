"""A file with what compute processes measured, by key, for the next start."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import structlog

from unfuse.weights.fingerprints import add_entry

log = structlog.get_logger(__name__)

Entry = TypeVar("Entry")


class ResultsFile(Generic[Entry]):
    """The measured values of one kind, in a JSON file that several processes share.

    - `file`: None keeps nothing.
    - `entry_type`: the type of the values. A file with others counts as unreadable.

    A file that cannot be read or written only costs measurements.
    """

    def __init__(self, file: Path | None, entry_type: type[Entry]) -> None:
        self._file, self._entry_type = file, entry_type

    def read(self) -> dict[str, Entry]:
        """Return all entries by name, the latest last."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, self._entry_type]) if self._file else {}  # type: ignore[name-defined]
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("measured results cannot be read", file=str(self._file), reason=str(error))
            return {}

    def write(self, name: str, entry: Entry) -> None:
        """Add an entry to the file. Entries that other processes added meanwhile stay."""
        if self._file is None:
            return
        try:
            add_entry(self._file, self.read, name, entry)
        except OSError as error:
            log.warning("measured results cannot be written", file=str(self._file), reason=str(error))
