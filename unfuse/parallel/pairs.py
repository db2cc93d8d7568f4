"""Sends bytes between two processes of different workers: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

c10d: Any = torch.distributed  # its types leave out groups beside the default one
#: The ranks of a pair: the sender and the receiver.
SENDER, RECEIVER = 0, 1


class TorchPairs:
    """The transfer pairs of this process, by name, over torch.distributed.

    They send from `memory` and receive into it; NCCL copies through the GPU `device`. The methods are those of
    `transfer.base.ProcessPairs`, but raise torch's errors (RuntimeError), and KeyError for an unknown pair.
    One thread at a time uses a pair; any thread may end it.

    `memory`: host memory, uint8 (bytes,).
    """

    def __init__(self, memory: NDArray[np.uint8], device: str) -> None:
        self._memory, self._device = torch.from_numpy(memory), device
        self._pairs: dict[str, Future[_Pair]] = {}

    def offer(self, pair: str, backend: str, host: str, patience_s: float) -> int:
        """Open the sending end of a pair. Returns the port for the receiver.

        Returns at once; a thread waits for the receiver, at most `patience_s` seconds.
        """
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port: int = listener.getsockname()[1]
        connection = self._pairs[pair] = Future()

        def connect() -> None:
            try:
                sender = _Pair(SENDER, backend, self._device, host, patience_s, (host, port), listener.detach())
                connection.set_result(sender)
            except Exception as error:
                connection.set_exception(error)

        Thread(target=connect, name="transfer-pair", daemon=True).start()
        return port

    def join(self, pair: str, backend: str, host: str, patience_s: float, at: tuple[str, int]) -> None:
        """Open the receiving end of a pair. Returns when both ends are connected.

        `at`: the host and port of the sender.
        """
        connection = self._pairs[pair] = Future[_Pair]()
        connection.set_result(_Pair(RECEIVER, backend, self._device, host, patience_s, at))

    def move(self, pair: str, start: int, stop: int) -> None:
        """Move the bytes [start, stop) of `memory`, from the process that offered the pair."""
        self._pairs[pair].result().move(self._memory[start:stop])

    def part(self, pair: str) -> None:
        """Remove a pair.

        A move in progress ends with its last byte, or at the timeout.
        """
        self._pairs.pop(pair, None)


class _Pair:
    """A process group of two, which meet in a TCPStore at a host and port.

    The sender serves the store. `listens`: the file descriptor of its listening socket.
    """

    def __init__(
        self, rank: int, backend: str, device: str, host: str, patience_s: float, at: tuple[str, int], listens: int = -1
    ) -> None:
        is_sender = rank == SENDER
        limit = timedelta(seconds=patience_s)
        store = c10d.TCPStore(
            *at,
            is_master=is_sender,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listens if is_sender else None,
        )

        self._is_sender = is_sender
        self._device = torch.device("cpu" if backend == "gloo" else device)

        if backend == "gloo":
            kind, options = c10d.ProcessGroupGloo, c10d.ProcessGroupGloo._Options()
            options._devices = [kind.create_device(hostname=host)]
        else:
            kind, options = c10d.ProcessGroupNCCL, c10d.ProcessGroupNCCL.Options()

        options._timeout = limit
        self._group: Any = kind(store, rank, 2, options)

    def move(self, data: torch.Tensor) -> None:
        """Send these bytes, or receive into them: uint8 (bytes,)."""
        buffer = data.to(self._device)
        if self._is_sender:
            self._group.send([buffer], RECEIVER, 0).wait()
        else:
            self._group.recv([buffer], SENDER, 0).wait()
        if buffer is not data:
            torch.accelerator.synchronize(self._device)
            data.copy_(buffer)
