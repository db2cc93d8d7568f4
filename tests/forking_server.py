"""Forks processes that run scripts: `forking_server.py FD IMPORT...`. See tests/forking.py.

It imports nothing of unfuse and of the tests unless it is told to.
"""

import gc
import json
import os
import runpy
import selectors
import socket
import sys
import traceback
from importlib import import_module

selector = selectors.DefaultSelector()


def imported(name):
    module, _, attribute = name.partition(":")
    found = import_module(module)
    if attribute:
        getattr(found, attribute)


def run(script, arguments, cwd, variables, files):
    os.chdir(cwd)
    os.environ.update(variables)
    for descriptor, (file, how) in enumerate(zip(files, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)):
        opened = os.open(file, how | (os.O_CREAT | os.O_TRUNC if descriptor else 0), 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = [script, *arguments]
    if script.endswith(".py"):
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def become(requests, asked):
    """Be a script from here on."""
    code = 1
    try:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        run(**asked)
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        if code and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        imported(name)
    gc.collect()
    gc.freeze()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                requests.sendall(json.dumps({"ended": key.data, "code": os.waitstatus_to_exitcode(status)}).encode())
                continue
            if not (message := requests.recv(1 << 17)):
                return
            pid = os.fork()
            if not pid:
                become(requests, json.loads(message))
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            requests.sendall(json.dumps({"pid": pid}).encode())


if __name__ == "__main__":
    main()
