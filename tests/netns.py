"""A second host, made of namespaces: what two machines would show and one does not."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMBERS = count(os.getpid() * 16)
SETTLE = 'hostname "$1" && mount "$2" -o "$3" "$4" "$5" && echo $$ && exec sleep infinity'


class SecondHost:
    """Joined to this one by a cable of its own: they reach each other at `near` (here) and `far` (there) only.

    It has its own loopback, its own run folder, and the host name `called`, by default that of this host; all else of
    the file system, and the clock, they share. With `shared`, as containers of one pod, also what is in the run folder,
    which then lies at another path there. The cable is called `link` at both ends.
    """

    def __init__(self, called: str = "", shared: bool = False) -> None:
        number = next(NUMBERS) % (1 << 14)
        self.name, self.link = f"unfuse-{os.getpid()}-{number}", f"uf{number}"
        self.called, self._shared = called or os.uname().nodename, shared
        place = f"10.77.{number >> 6}", number % 64 * 4  # 10.77.0.0/16 has room for as many pairs
        self.near, self.far = (f"{place[0]}.{place[1] + end}" for end in (1, 2))
        self._root = [] if os.geteuid() == 0 else ["sudo", "-n", "-E"]
        self._run_here = os.environ["UNFUSE_RUN_DIR"]
        self._run_there = tempfile.mkdtemp(prefix="pod-") if shared else self._run_here
        self._pid = 0

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command that runs a command there, as this user and in this folder."""
        inside = [*self._root, "nsenter", f"--target={self._pid}", "--mount", "--uts", "--net"]
        if self._root:
            inside += ["setpriv", f"--reuid={os.getuid()}", f"--regid={os.getgid()}", "--clear-groups"]
        return [
            *inside,
            "env",
            f"--chdir={Path.cwd()}",
            f"PYTHONPATH={ROOT}",
            f"UNFUSE_RUN_DIR={self._run_there}",
            *command,
        ]

    def make(self) -> subprocess.Popen[str]:
        """Its first process. Raises OSError or CalledProcessError where that is not allowed."""
        self._do(f"ip netns add {self.name}")
        self._do(f"ip link add {self.link} type veth peer name {self.link} netns {self.name}")
        self._do(f"ip addr add {self.near}/30 dev {self.link}")
        self._do(f"ip link set {self.link} up")
        for line in (f"addr add {self.far}/30 dev {self.link}", f"link set {self.link} up", "link set lo up"):
            self._do(f"ip -n {self.name} {line}")
        folder = ["--bind", "rw", self._run_here, self._run_there]
        if not self._shared:
            folder = ["-ttmpfs", f"mode=0700,uid={os.getuid()},gid={os.getgid()}", "unfuse", self._run_there]
        namespaces = ["ip", "netns", "exec", self.name, "unshare", "--mount", "--uts"]
        command = [*self._root, *namespaces, "sh", "-c", SETTLE, "sh", self.called, *folder]
        first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert first.stdout and first.stderr
        if not (pid := first.stdout.readline()):
            raise OSError(first.communicate()[1])
        self._pid = int(pid)
        return first

    def hide(self, folder: Path) -> None:
        """Have it see an empty folder there, as a machine with a disk of its own would."""
        inside = f"nsenter --target={self._pid} --mount mount -t tmpfs -o mode=0700,uid={os.getuid()} hidden"
        self._do(f"{inside} {folder}")

    def remove(self) -> None:
        """What runs there goes on without a network. Never fails."""
        end = [f"kill -9 {self._pid}"] if self._pid else []
        for line in (*end, f"ip link del {self.link}", f"ip netns del {self.name}"):
            with suppress(OSError):
                subprocess.run([*self._root, *line.split()], capture_output=True, check=False)
        if self._shared:
            os.rmdir(self._run_there)

    def _do(self, line: str) -> None:
        subprocess.run([*self._root, *line.split()], capture_output=True, check=True, text=True)


@contextmanager
def second_host(called: str = "", shared: bool = False) -> Iterator[SecondHost]:
    """A host for as long as this lasts. Where none can be made the test is skipped, and fails with CI=true."""
    host = SecondHost(called, shared)
    try:
        first = host.make()
    except (OSError, subprocess.CalledProcessError) as error:
        host.remove()
        reason = f"no second host can be made here: {getattr(error, 'stderr', '') or error}"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with first:
        try:
            yield host
        finally:
            host.remove()
