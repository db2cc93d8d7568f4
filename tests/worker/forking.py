"""A fork server as a launcher starts it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from unfuse.core.compute_options import compute_environment

PAIR = socket.AF_UNIX, socket.SOCK_SEQPACKET


@contextmanager
def forking(models: Sequence[str]) -> Iterator[tuple[socket.socket, subprocess.Popen[str]]]:
    """The socket at which it is asked, and its process. It has to end by itself when the block does."""
    ours, theirs = socket.socketpair(*PAIR)
    command = [sys.executable, "-m", "unfuse.worker.fork_server", str(theirs.fileno()), *models]
    environment = compute_environment(1, os.environ)
    with subprocess.Popen(
        command, pass_fds=[theirs.fileno()], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        theirs.close()
        try:
            with ours:
                yield ours, process
            assert process.wait(60) == 0  # since nobody holds the socket
        finally:
            process.kill()
