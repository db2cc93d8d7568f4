"""A process, perhaps another user's, that would be a worker and minds no rule. It prints what came of it."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import zmq
import zmq.asyncio
import zmq.utils.monitor

from unfuse.core.codec import decode, encode
from unfuse.core.messages import Register, RequestTasks, ToWorker, WorkerInfo

EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


HEARD = {"Registered", "LeasesGranted", "HeartbeatReply", "Rejected", "UnknownWorker"}
"""What it gets if it is heard."""


async def says(endpoint: str, uid: int | None = None) -> list[str]:
    """What happens to a stranger that wants to be a worker there: events, and the kinds of the answers it gets."""
    command = [sys.executable, "-m", "tests.stranger", endpoint, *([str(uid)] if uid else [])]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout
    found: list[str] = json.loads(await process.stdout.read())
    await process.wait()
    return found


def main(endpoint: str, uid: int | None) -> list[str]:
    """Connect, introduce itself, ask for work; ends with the answer, or once it was refused."""
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    happened: list[str] = []
    peer = zmq.Context().socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    monitor = peer.get_monitor_socket(EVENTS)
    peer.connect(endpoint)
    info = WorkerInfo("stranger", "node", "all", ("pool",), 1, "unix:@x", 1 << 20)
    for message in (Register(info, (), b"s" * 16), RequestTasks(1, None, 0.0)):
        peer.send_multipart([b"1", encode(message)])
    poller = zmq.Poller()
    poller.register(peer, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    while not happened or happened[-1] == "CONNECTED":
        ready = dict(poller.poll())
        if peer in ready:
            happened.append(type(decode(peer.recv_multipart()[1], ToWorker)).__name__)
        elif monitor in ready:
            happened.append(zmq.utils.monitor.recv_monitor_message(monitor)["event"].name)
    return happened


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else None)))  # noqa: T201
