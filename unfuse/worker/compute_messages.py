"""Messages between a worker's parent and its compute process: length-prefixed, over a socketpair, never pickled."""

from __future__ import annotations

import asyncio
import socket
import threading

import msgspec

from unfuse.core.codec import MAX_BYTES, decode, encode
from unfuse.core.compute import ComputeOptions
from unfuse.core.framing import HEADER_BYTES, frame, length_of, read_message
from unfuse.core.messages import Done, Failed, Places
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import Choice
from unfuse.core.task import Claim, Lease


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load the chosen stages of these (name, source, dtype) models, then say Ready.

    `owner`, `node`, `arena` and `write_token` open the worker's own arena; `places` are the stores, and other arenas of
    this machine are in `run_dir`.
    """

    models: tuple[tuple[str, str, str], ...]
    choice: Choice
    compute: ComputeOptions
    owner: str
    node: str
    arena: str
    write_token: bytes
    places: Places
    run_dir: str = ""


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run a leased task. `peers` gives (node, arena address) of the owners of its inputs."""

    lease: Lease
    peers: dict[str, tuple[str, str]]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop a task at its next step and drop it; answered by Stopped unless it has ended already.

    With `save`, its state is saved before, as StateSaved says.
    """

    claim: Claim
    save: bool = False


class Loading(msgspec.Struct, frozen=True, tag=True):
    """A stage is going to be loaded; `done` of the `total` bytes of all stages' files are."""

    model: str
    stage: str
    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A component is in memory, where it takes `bytes`; with it `done` of the `total` bytes of files are loaded."""

    component: str
    seconds: float
    bytes: int
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Everything is loaded; `device` is where: cpu, or the name of the GPU.

    `outcome` is what the bytes of results depend on beside weights, dtypes and parameters.
    """

    device: str
    outcome: dict[str, str] = {}


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Nothing can run: the sentence says why. The process ends."""

    message: str


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """Steps `first`…`step` of `steps` are done, with `previews` of some; step 0 says that the task began."""

    claim: Claim
    step: int
    steps: int
    first: int
    previews: tuple[int, ...] = ()


class StateSaved(msgspec.Struct, frozen=True, tag=True):
    """A task's state after so many steps is saved: it is in the arena."""

    claim: Claim
    checkpoint: ObjectRef
    step: int


class Waits(msgspec.Struct, frozen=True, tag=True):
    """A task waits until the result store takes what it made, or gives what was uploaded for it. Said at each try."""

    claim: Claim


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """A cancelled task is dropped."""

    claim: Claim


ToCompute = Load | Run | Cancel
FromCompute = Loading | Loaded | Ready | LoadFailed | Stepped | StateSaved | Waits | Stopped | Done | Failed


class ComputeChannel:
    """The compute process's end. `receive` blocks; `send` may be called from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: FromCompute) -> None:
        """Send to the parent. Raises BrokenPipeError when it is gone."""
        data = frame(encode(message))
        with self._lock:
            self._connection.sendall(data)

    def receive(self) -> ToCompute:
        """The next message. Raises EOFError when the parent is gone."""
        return decode(read_message(self._read, MAX_BYTES), ToCompute)

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return bytes(data)


class ParentChannel:
    """The parent's end, for one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, connection: socket.socket) -> ParentChannel:
        """Take over one end of a socketpair."""
        return cls(*await asyncio.open_unix_connection(sock=connection))

    async def send(self, message: ToCompute) -> None:
        """Send to the compute process; a process that is gone is noticed by `receive`."""
        self._writer.write(frame(encode(message)))

    async def receive(self) -> FromCompute:
        """The next message. Raises EOFError when the compute process is gone."""
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            return decode(await self._reader.readexactly(length_of(header, MAX_BYTES)), FromCompute)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error

    def close(self) -> None:
        """Hang up: the compute process ends."""
        self._writer.close()
