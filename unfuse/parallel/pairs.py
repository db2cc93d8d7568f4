"""Sends bytes between two processes of different workers: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from unfuse.parallel.devices import set_current

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

c10d: Any = torch.distributed  # its types leave out groups other than the default one

#: The ranks of a pair: the sender and the receiver.
SENDER, RECEIVER = 0, 1


class TorchPairs:
    """The transfer pairs of this process, by name, over torch.distributed.

    They send from `memory` and receive into it; NCCL copies through the GPU `device`. The methods are those of
    `transfer.base.ProcessPairs`, but they may also raise torch's errors (RuntimeError), and KeyError for an unknown
    pair. Only one thread at a time may use a pair. Any thread may remove it.

    `memory`: host memory, uint8 (bytes,).
    """

    def __init__(self, memory: NDArray[np.uint8], device: str) -> None:
        self._memory, self._device = torch.from_numpy(memory), device
        self._pairs: dict[str, Future[_Pair]] = {}

    def offer(self, pair: str, backend: str, host: str, patience_s: float) -> int:
        """Open the sending end of a pair. Returns the port for the receiver.

        Returns at once. A thread waits for the receiver, at most `patience_s` seconds. If that fails, `move` raises
        the error.
        """
        # The port must be known before the receiver joins, so the store gets a socket that listens already.
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

        `at`: the host and port of the sender. `host`: that of this process.
        """
        connection = self._pairs[pair] = Future[_Pair]()
        connection.set_result(_Pair(RECEIVER, backend, self._device, host, patience_s, at))

    def move(self, pair: str, start: int, stop: int) -> None:
        """Move the bytes [start, stop) of `memory`, from the process that offered the pair."""
        self._pairs[pair].result().move(self._memory[start:stop])

    def part(self, pair: str) -> None:
        """Remove a pair, if it exists.

        A move in progress ends with its last byte, or at the timeout.
        """
        self._pairs.pop(pair, None)


class _Pair:
    """A process group of two processes, which meet in a TCPStore.

    `rank`: SENDER or RECEIVER. The sender serves the store.
    `host`: the address of this process.
    `timeout_s`: the most seconds to connect, and for a move.
    `store_address`: host and port of the store.
    `listen_fd`: the file descriptor of the sender's listening socket.
    """

    def __init__(
        self,
        rank: int,
        backend: str,
        device: str,
        host: str,
        timeout_s: float,
        store_address: tuple[str, int],
        listen_fd: int = -1,
    ) -> None:
        is_sender = rank == SENDER
        timeout = timedelta(seconds=timeout_s)
        store = c10d.TCPStore(
            *store_address,
            is_master=is_sender,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listen_fd if is_sender else None,
        )

        self._is_sender = is_sender
        self._device = torch.device("cpu" if backend == "gloo" else device)
        set_current(self._device)

        if backend == "gloo":
            group_class, options = c10d.ProcessGroupGloo, c10d.ProcessGroupGloo._Options()
            options._devices = [group_class.create_device(hostname=host)]
        else:
            group_class, options = c10d.ProcessGroupNCCL, c10d.ProcessGroupNCCL.Options()

        options._timeout = timeout
        self._group: Any = group_class(store, rank, 2, options)

    def move(self, data: torch.Tensor) -> None:
        """Send these bytes, or receive into them: uint8 (bytes,)."""
        set_current(self._device)  # each call of a pair has a thread of its own
        on_host = self._device.type == "cpu"
        if self._is_sender:
            buffer = data.to(self._device)
            self._group.send([buffer], RECEIVER, 0).wait()
        else:
            buffer = data if on_host else torch.empty_like(data, device=self._device)
            self._group.recv([buffer], SENDER, 0).wait()
        if on_host:
            return
        torch.accelerator.synchronize(self._device)  # `wait` returns before an NCCL transfer is done on the GPU
        if not self._is_sender:
            data.copy_(buffer)
