"""Reads the standard error of processes at all times, and passes it on line by line."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import BinaryIO

from unfuse.launch.base import Hear

PART = 1 << 16  # the most bytes of a line; a longer one is cut
WAITING = 10_000  # the most lines that wait to be passed on; then the oldest are dropped and counted

LAST_S = 2.0
"""How long the end waits for a pipe that somebody keeps open, and for what is still to be told: who hears may be stuck,
as a terminal that was stopped is."""


def pass_on(number: int, line: bytes) -> None:
    """Write a line to our own standard error."""
    with suppress(OSError, ValueError):
        sys.stderr.write(line.decode(errors="replace") + "\n")
        sys.stderr.flush()


class Output:
    """Pipes that are always emptied, so that a process that writes to one never waits for the receiver of its lines.

    One thread reads each, another tells: hearing may take long, or stand still.
    """

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._lines: deque[tuple[int, bytes]] = deque()
        self._lost = 0
        self._changed = threading.Condition()
        self._closing = False
        self._readers: list[threading.Thread] = []
        self._teller = threading.Thread(target=self._tell, name="tell output", daemon=True)
        self._teller.start()

    def pipe(self, number: int) -> int:
        """The writing end of a new pipe for the process of this number; the caller closes it."""
        reading, writing = os.pipe()
        self.read(number, reading)
        return writing

    def read(self, number: int, reading: int) -> None:
        """Read what the process of this number writes to the other end of this pipe, and close it at its end."""
        reader = threading.Thread(target=self._read, args=(number, os.fdopen(reading, "rb")), daemon=True)
        reader.start()
        self._readers = [*(thread for thread in self._readers if thread.is_alive()), reader]

    def tell(self, number: int, line: bytes) -> None:
        """Have a line told as that of the process of this number. Never waits."""
        with self._changed:
            if len(self._lines) == WAITING:
                self._lines.popleft()
                self._lost += 1
            self._lines.append((number, line))
            self._changed.notify()

    def close(self) -> None:
        """Pass on the lines that are left, after the processes have ended."""
        for reader in self._readers:
            reader.join(LAST_S)
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._teller.join(LAST_S)

    def _read(self, number: int, pipe: BinaryIO) -> None:
        with pipe:
            while line := pipe.readline(PART):
                self.tell(number, line.rstrip(b"\r\n"))

    def _tell(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closing)
                if not self._lines:
                    return
                lost, self._lost = self._lost, 0
                number, line = self._lines.popleft()
            if lost:
                self._hear(number, b"%d earlier lines were not read in time and are lost" % lost)
            self._hear(number, line)
