"""Stores in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("store_child.py")
ROOT = Path(__file__).parents[2]


class Process:
    """A store in a process of its own, of this host or by `enter` of another, which does what is asked of it."""

    def __init__(self, enter: Callable[[list[str]], list[str]] = list, **options: Any) -> None:
        self.process = subprocess.Popen(
            enter([sys.executable, str(CHILD), json.dumps(options)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.where: dict[str, str] = self._answer()

    def __call__(self, verb: str, *arguments: Any) -> Any:
        assert self.process.stdin
        self.process.stdin.write(json.dumps([verb, arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise Refused(answer["error"], answer["message"])
        return answer["answer"]

    def kill(self) -> int:
        """Kill −9, wait, and return the exit status."""
        self.process.kill()
        return self.end()

    def end(self) -> int:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()
        return self.process.wait(600)


class Refused(Exception):
    """A child's answer was an error of this name."""


Start = Callable[..., Process]
