"""A second host, made of a network namespace: what two machines would show and one does not."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMBERS = count(os.getpid() * 16)


class SecondHost:
    """Joined to this one by a cable of its own: they reach each other at `near` (here) and `far` (there) only.

    It has its own loopback and its own abstract unix sockets, and shares the file system and the clock. The cable is
    called `link` at both ends.
    """

    def __init__(self) -> None:
        number = next(NUMBERS) % (1 << 14)
        self.name, self.link = f"unfuse-{os.getpid()}-{number}", f"uf{number}"
        place = f"10.77.{number >> 6}", number % 64 * 4  # 10.77.0.0/16 has room for as many pairs
        self.near, self.far = (f"{place[0]}.{place[1] + end}" for end in (1, 2))
        self._root = [] if os.geteuid() == 0 else ["sudo", "-n", "-E"]

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command that runs a command there, as this user and in this folder."""
        inside = [*self._root, "ip", "netns", "exec", self.name]
        if self._root:
            inside += ["setpriv", f"--reuid={os.getuid()}", f"--regid={os.getgid()}", "--clear-groups"]
        return [*inside, "env", f"PYTHONPATH={ROOT}", *command]

    def make(self) -> None:
        """Raises OSError or CalledProcessError where that is not allowed."""
        self._do(f"ip netns add {self.name}")
        self._do(f"ip link add {self.link} type veth peer name {self.link} netns {self.name}")
        self._do(f"ip addr add {self.near}/30 dev {self.link}")
        self._do(f"ip link set {self.link} up")
        for line in (f"addr add {self.far}/30 dev {self.link}", f"link set {self.link} up", "link set lo up"):
            self._do(f"ip -n {self.name} {line}")

    def remove(self) -> None:
        """What runs there goes on without a network. Never fails."""
        for line in (f"ip link del {self.link}", f"ip netns del {self.name}"):
            with suppress(OSError):
                subprocess.run([*self._root, *line.split()], capture_output=True, check=False)

    def _do(self, line: str) -> None:
        subprocess.run([*self._root, *line.split()], capture_output=True, check=True, text=True)


@contextmanager
def second_host() -> Iterator[SecondHost]:
    """A host for as long as this lasts. Where none can be made the test is skipped, and fails with CI=true."""
    host = SecondHost()
    try:
        try:
            host.make()
        except (OSError, subprocess.CalledProcessError) as error:
            reason = f"no network namespace can be made here: {getattr(error, 'stderr', '') or error}"
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
        yield host
    finally:
        host.remove()
