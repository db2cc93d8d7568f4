"""Two processes of different workers, of which one gives the other bytes: gloo between CPUs, NCCL between GPUs."""

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
GIVER, TAKER = 0, 1  # the ranks of a pair


class TorchPairs:
    """The pairs that this process is in, by name; they move bytes of `memory`, NCCL by way of the GPU `device`.

    These are the methods of `transfer.base.Pairs`, but torch's errors (RuntimeError) come as they are, and KeyError for
    a pair that is not known. One thread at a time uses a pair; any may end it.
    """

    def __init__(self, memory: NDArray[np.uint8], device: str) -> None:
        self._memory, self._device = torch.from_numpy(memory), device
        self._pairs: dict[str, Future[_Pair]] = {}

    def offer(self, pair: str, backend: str, host: str, patience_s: float) -> int:
        """Only a thread waits for the other process, for `patience_s` at most."""
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port: int = listener.getsockname()[1]
        made = self._pairs[pair] = Future()

        def meet() -> None:
            try:
                made.set_result(_Pair(GIVER, backend, self._device, host, patience_s, (host, port), listener.detach()))
            except Exception as error:
                made.set_exception(error)

        Thread(target=meet, name="transfer-pair", daemon=True).start()
        return port

    def join(self, pair: str, backend: str, host: str, patience_s: float, at: tuple[str, int]) -> None:
        """Returns when both are there."""
        made = self._pairs[pair] = Future[_Pair]()
        made.set_result(_Pair(TAKER, backend, self._device, host, patience_s, at))

    def move(self, pair: str, start: int, stop: int) -> None:
        """Whoever offered the pair gives."""
        self._pairs[pair].result().move(self._memory[start:stop])

    def part(self, pair: str) -> None:
        """A pair that is moving ends when that piece has come, or after its patience."""
        self._pairs.pop(pair, None)


class _Pair:
    """A group of two, which meet in the store at a host and port: the giver listens there."""

    def __init__(
        self, rank: int, backend: str, device: str, host: str, patience_s: float, at: tuple[str, int], listens: int = -1
    ) -> None:
        gives, limit = rank == GIVER, timedelta(seconds=patience_s)
        store = c10d.TCPStore(
            *at, is_master=gives, timeout=limit, wait_for_workers=False, master_listen_fd=listens if gives else None
        )
        self._gives, self._device = gives, torch.device("cpu" if backend == "gloo" else device)
        if backend == "gloo":
            kind, options = c10d.ProcessGroupGloo, c10d.ProcessGroupGloo._Options()
            options._devices = [kind.create_device(hostname=host)]
        else:
            kind, options = c10d.ProcessGroupNCCL, c10d.ProcessGroupNCCL.Options()
        options._timeout = limit
        self._group: Any = kind(store, rank, 2, options)

    def move(self, data: torch.Tensor) -> None:
        """Give bytes, or take them."""
        there = data.to(self._device)
        if self._gives:
            self._group.send([there], TAKER, 0).wait()
        else:
            self._group.recv([there], GIVER, 0).wait()
        if there is not data:
            torch.accelerator.synchronize(self._device)
            data.copy_(there)
