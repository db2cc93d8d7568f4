"""Forks processes that run modules and scripts: `forking_server.py FD IMPORT...`. See tests/forking.py.

It imports nothing of unfuse and of the tests unless it is told to.
"""

import array
import atexit
import gc
import json
import os
import runpy
import selectors
import socket
import sys
import threading
import traceback
from contextlib import suppress
from importlib import import_module

MOST_BYTES = 1 << 17
MOST_DESCRIPTORS = 16

selector = selectors.DefaultSelector()


def imported(name):
    module, _, attribute = name.partition(":")
    found = import_module(module)
    if attribute:
        getattr(found, attribute)


def placed(descriptors, numbers):
    """Move the received descriptors to these numbers, and close all others."""
    high = [os.dup2(descriptor, 1024 + index) for index, descriptor in enumerate(descriptors)]
    os.closerange(3, 1024)
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
    os.closerange(1024, os.sysconf("SC_OPEN_MAX"))


def run(command, cwd, environment, own_session):
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if own_session:
        os.setsid()
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    kind, script, *arguments = command
    sys.argv = [script, *arguments]
    if kind == "-m":
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def become(asked, descriptors):
    """Be that process from here on, to its end."""
    code = 1
    try:
        placed(descriptors, asked.pop("numbers"))
        run(**asked)
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        if code and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def received(requests):
    """The next message and its descriptors; an empty message when there will be none."""
    size = array.array("i").itemsize
    message, ancillary, _, _ = requests.recvmsg(MOST_BYTES, socket.CMSG_LEN(MOST_DESCRIPTORS * size))
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data[: len(data) - len(data) % size])
    return message, list(descriptors)


def main():
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        with suppress(ModuleNotFoundError):  # a process that needs a missing package says so itself
            imported(name)
    gc.collect()
    gc.freeze()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                pid, ended = key.data
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                os.write(ended, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(ended)
                continue
            message, descriptors = received(requests)
            if not message:
                return
            ended, *handed = descriptors
            pid = os.fork()
            if not pid:
                become(json.loads(message), handed)
            for descriptor in handed:
                os.close(descriptor)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, ended))
            requests.sendall(str(pid).encode())


if __name__ == "__main__":
    main()
