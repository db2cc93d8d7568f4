"""Adds facts to the log of `make gpu` the moment they are known."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def record(fact: str, **figures: object) -> None:
    """Add a JSON line to the log that `bench.gpu_run` named, and print it."""
    line = json.dumps({"piece": os.environ.get("GPU_PIECE", ""), "fact": fact, **figures}, default=str)
    if path := os.environ.get("GPU_LOG"):
        with open(path, "a") as log:
            log.write(line + "\n")
    print(line, flush=True)


class Facts:
    """Records facts, and goes on after one that fails."""

    def __init__(self) -> None:
        #: Number of facts that failed.
        self.failed = 0

    def measure(self, fact: str, work: Callable[..., Mapping[str, Any]], *arguments: object) -> None:
        """Record the figures that `work` returns, or the error that it raises, with the seconds that it took."""
        began = time.monotonic()
        try:
            record(fact, **work(*arguments), took_s=round(time.monotonic() - began, 2))
        except Exception as error:  # the other facts of the piece must be measured too
            self.failed += 1
            record(fact, failed=f"{type(error).__name__}: {str(error)[:300]}", at=traceback.format_exc()[-900:])

    def end(self) -> None:
        """End the process, with exit code 1 if a fact failed."""
        sys.exit(bool(self.failed))
