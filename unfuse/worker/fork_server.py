"""The fork server: imports torch and the models' classes once, and forks compute processes.

So each process has a short cold start and shares memory with the others. A launcher starts `python -m
unfuse.worker.fork_server FD FOLDER...` with the folders of the models and one end of a SOCK_SEQPACKET pair. The workers
have the other end, so no other process can send requests. The server ends when the other end is closed everywhere.

The server has one thread, uses no GPU, and opens nothing that it does not need. Its children close all descriptors that
they inherit, so that none keeps another child's socket open.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import selectors
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

import msgspec

from unfuse.core.codec import decode, encode
from unfuse.core.errors import ProtocolError
from unfuse.models import find, resolve_source

#: Most bytes of a Fork, which has an environment.
MAX_REQUEST = 256 * 1024

#: The module of the compute process.
COMPUTE = "unfuse.worker.compute"

#: A folder with an entry for each thread of this process.
THREADS = "/proc/self/task"


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Request to fork a compute process.

    Three descriptors come with it: the process's channel, its standard output and error, and a socket for answers. The
    server answers with Forked and a pidfd, and with Ended when the process has ended; or with NotForked.
    """

    #: All environment variables of the process.
    environment: dict[str, str]


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The answer to a Fork: the process runs."""

    #: The process id.
    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The second answer to a Fork: the process has ended."""

    #: The exit code; below 0, the negative number of the signal that ended the process.
    code: int


class NotForked(msgspec.Struct, frozen=True, tag=True):
    """The answer to a Fork: the process was not started."""

    #: Why it was not started.
    reason: str


def import_for(models: Sequence[str]) -> str:
    """Import all that computing with these models needs. Returns why forking is impossible, or "".

    Warnings of libraries about their own imports, such as optional parts that cannot be loaded, are not logged, because
    they would be on the first screen of a server.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import_module(COMPUTE)
        for model in models:
            folder = resolve_source(model, components=())
            find(folder).prepare(folder)
    except Exception as error:  # a process that imports by itself will report the same where it can be read
        return f"imports failed: {error!r}"
    finally:
        logging.disable(disabled)

    # A fork has only the forking thread: a lock that another thread holds would stay locked for ever.
    if (threads := len(os.listdir(THREADS))) > 1:
        return f"imports left {threads} threads running"
    gc.collect()
    gc.freeze()  # otherwise, a collection would write to all pages that children share
    return ""


class ForkServer:
    """Forks compute processes on request at this socket, and reports how they end.

    With a `refusal`, it answers every request with that reason.
    """

    def __init__(self, requests: socket.socket, refusal: str = "") -> None:
        self._requests, self._refusal = requests, refusal
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the other end of the socket is closed."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._report_end(key.fd, *key.data)
                elif not self._serve_request():
                    return

    def _serve_request(self) -> bool:
        """Serve one request. Returns False if the other end of the socket is closed."""
        data, descriptors, flags, _ = socket.recv_fds(self._requests, MAX_REQUEST, 3)
        if not data:
            return False
        try:
            if len(descriptors) < 3 or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError("the number of descriptors or the size of the message is wrong")
            fork: Fork = decode(data, Fork)
            with socket.socket(fileno=descriptors[2]) as reply:
                descriptors.remove(reply.fileno())  # `reply` closes it
                self._fork(fork, descriptors[0], descriptors[1], reply)
        except (ProtocolError, OSError) as error:
            sys.stderr.write(f"the fork server could not serve a request: {error}\n")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _fork(self, fork: Fork, channel: int, log: int, reply: socket.socket) -> None:
        """Fork a compute process and answer."""
        try:
            pid = -1 if self._refusal else os.fork()
        except OSError as error:
            return _send(reply, NotForked(str(error)))
        if pid < 0:
            return _send(reply, NotForked(self._refusal))
        if not pid:
            _become_compute(channel, log, fork.environment)
        pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, (pid, reply.dup()))
        return _send(reply, Forked(pid), pidfd)

    def _report_end(self, pidfd: int, pid: int, reply: socket.socket) -> None:
        """Report how a process ended."""
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with reply:
            _send(reply, Ended(os.waitstatus_to_exitcode(status)))


def _send(reply: socket.socket, message: Forked | Ended | NotForked, *descriptors: int) -> None:
    """Send a message.

    If the requester is gone, nothing is sent. Its end of the child's channel is closed then, which ends the child.
    """
    with contextlib.suppress(OSError):
        socket.send_fds(reply, [encode(message)], descriptors, socket.MSG_DONTWAIT)


def _become_compute(channel: int, log: int, environment: Mapping[str, str]) -> NoReturn:
    """Run a compute process in this child, and then end the child.

    It ends by os._exit, since the exit functions and open files of the fork server are not the child's.
    """
    code = 1
    try:
        os.setsid()
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.closerange(sys.stderr.fileno() + 1, channel)  # sockets of the fork server and of other children
        os.closerange(channel + 1, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environment)
        import_module(COMPUTE).compute(channel)
        code = 0
    except SystemExit as end:
        sys.stderr.write(f"{end}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    ForkServer(socket.socket(fileno=int(sys.argv[1])), import_for(sys.argv[2:])).run()
