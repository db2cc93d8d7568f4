"""The process group of one worker: its ranks meet and exchange tensors.

Over torch.distributed: gloo between CPUs, NCCL between CUDA GPUs (other devices: see `devices.EXCHANGES`).

Every rank makes the same calls in the same order. A rank that fails before the first exchange of a step reports its
error to the others, and all ranks continue. A rank that fails later would leave the others waiting, so its process
exits, and the worker's parent restarts all ranks.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from itertools import product
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from unfuse.core.codec import decode, encode
from unfuse.core.compute_options import OVERLAY_KINDS, PARALLEL_KINDS, ParallelDegrees
from unfuse.core.errors import ConfigError, PermanentError, TransientError, UnfuseError, UnsupportedRequest
from unfuse.core.retries import DEVICE, MEMORY, first_line, rule_of
from unfuse.parallel.devices import EXCHANGES, set_current
from unfuse.parallel.exchange_times import ExchangeTimes

T = TypeVar("T")

CPU = torch.device("cpu")

#: The network interface on which gloo listens. Loopback, because all ranks are processes of one machine.
LOOPBACK = "lo"

#: Bytes up to which every rank sums the whole tensor, because one exchange is then faster than two of its parts.
SMALL = 1 << 16


class RankFailed(TransientError):
    """Another rank failed in this step for a temporary reason."""


class RankError(UnfuseError):
    """Another rank raised an exception that no retry rule in `core/retries.py` names."""


class RankOutOfMemory(torch.OutOfMemoryError):
    """The device of another rank, `rank`, has too little memory."""

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


class RankDeviceError(RuntimeError):
    """The device of another rank, `rank`, failed."""

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


#: The exception that the other ranks raise when one rank fails, by the cause of its retry rule.
#: The same retry policy then applies on all ranks. RankFailed for all other causes.
ERRORS: dict[str, type[Exception]] = {
    "request": UnsupportedRequest,
    "permanent": PermanentError,
    "unknown": RankError,
}


class Group:
    """The process group of all ranks of a worker.

    `rank`, `size`: the rank of this process, and the number of ranks.
    `rendezvous`: the path of the file through which the ranks meet; used once.
    `device`: the torch name of this rank's device.
    `limit_s`: seconds after which a pending exchange ends the process.
    Raises ConfigError for a kind of device between which torch cannot exchange tensors.
    """

    #: The folder of the rendezvous file.
    folder: Path
    #: The most time that an exchange may take.
    limit: timedelta

    def __init__(self, rank: int, size: int, rendezvous: str, device: str, limit_s: float) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.folder = Path(rendezvous).parent
        self._times = ExchangeTimes(self.device)
        self.limit = timedelta(seconds=limit_s)
        self._has_met = True  # whether the ranks have met in the current step; True outside of steps

        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        kind, on_gpu = self.device.type, self.device.type in EXCHANGES
        if on_gpu:
            set_current(self.device)
        elif kind != "cpu":
            raise ConfigError(f"--device {device}: torch has no communication backend for ranks on such devices")

        dist.init_process_group(
            f"cpu:gloo,{kind}:{EXCHANGES[kind]}" if on_gpu else "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=size,
            timeout=self.limit,
            device_id=self.device if on_gpu else None,
        )

    def exchange(self, data: bytes) -> list[bytes]:
        """Send this rank's bytes to all ranks. Returns those of each, in rank order.

        Lengths may differ. Without any bytes, there is one exchange instead of two.
        """
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.wait(lambda: dist.all_gather(lengths, torch.tensor([len(data)])))
        sizes = [int(length) for length in lengths]
        if not any(sizes):
            return [b""] * self.size

        padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        received = [torch.empty_like(padded) for _ in range(self.size)]
        self.wait(lambda: dist.all_gather(received, padded))
        return [bytes(buffer[:size].numpy()) for buffer, size in zip(received, sizes, strict=True)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run one step on all ranks.

        If another rank failed before its first exchange, raises the exception for its cause in ERRORS, RankDeviceError
        for its device, or RankFailed.
        If this rank fails after its first exchange, its process exits.
        """
        self._has_met = False
        try:
            yield
            self.meet()
        except _RemoteError as remote:
            raise remote.error from None
        except Exception as error:
            # After the first exchange the other ranks wait in a collective, where no error can be reported to them.
            if self._has_met and rule_of(error) is DEVICE:
                raise  # the process reports the device and ends
            if self._has_met:
                self._exit(f"it failed during a step: {type(error).__name__}: {error}")
            self._has_met = True
            self.exchange(encode((rule_of(error).cause, f"{type(error).__name__}: {error}")))
            raise

    def meet(self) -> None:
        """Wait until all ranks reach their first exchange of this step. Later calls do nothing.

        Raises _RemoteError if a rank failed before. `together` then raises the exception that it contains.
        """
        if self._has_met:
            return
        self._has_met = True
        for rank, report in enumerate(self.exchange(b"")):
            if report:
                failure: tuple[str, str] = decode(report, tuple[str, str])
                cause, message = failure
                if cause == DEVICE.cause:
                    raise _RemoteError(RankDeviceError(message, rank))
                message = f"rank {rank}: {message}"
                if cause == MEMORY.cause:
                    raise _RemoteError(RankOutOfMemory(message, rank))
                raise _RemoteError(ERRORS.get(cause, RankFailed)(message))

    @property
    def waited_s(self) -> float:
        """Seconds of finished exchanges; those of a GPU are known a little later."""
        return self._times.seconds

    def wait(self, exchange: Callable[[], T], device: torch.device = CPU) -> T:
        """Run an exchange of tensors of this device, and return its result.

        If it fails, this process exits. After a failed exchange it is unknown which ranks have its data.
        """
        try:
            with self._times.measure(device):
                return exchange()
        except RuntimeError as error:
            if rule_of(error) is DEVICE:
                raise
            self._exit(f"an exchange with other ranks failed: {first_line(error)}")

    def _exit(self, reason: str) -> NoReturn:
        """Exit immediately, because an orderly exit would wait for other ranks."""
        sys.stderr.write(f"rank {self.rank} exits: {reason}\n")
        sys.stderr.flush()
        os._exit(1)

    def mesh(self, degrees: ParallelDegrees) -> Mesh:
        """Return a device mesh of the ranks with these parallel degrees.

        All ranks make the same calls, in the same order.
        """
        return Mesh(self, degrees)

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


class _RemoteError(Exception):
    """Another rank reported an error, so this rank must not report one of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Mesh:
    """The device mesh of a stage: each rank has a coordinate along each parallel kind."""

    def __init__(self, group: Group, degrees: ParallelDegrees) -> None:
        self.group = group
        self.degrees = degrees.degrees
        self._rank_degrees = degrees.ranks  # without the kinds that reuse the ranks of others
        self._coordinates = [*product(*(range(degree) for degree in self._rank_degrees.values()))]
        self._axes: dict[tuple[str, ...], Axis] = {}

    def axis(self, *kinds: str) -> Axis:
        """Return the axis of this rank along these parallel kinds.

        The axis contains this rank, and all ranks whose coordinates differ from its own only along these kinds. Kinds
        in OVERLAY_KINDS reuse the ranks of other kinds: their axis has neighbouring ranks.
        """
        present = tuple(kind for kind in PARALLEL_KINDS if kind in kinds and kind in self.degrees)
        if present not in self._axes:
            self._axes[present] = self._create_axis(present)
        return self._axes[present]

    def _create_axis(self, kinds: Sequence[str]) -> Axis:
        """Return a new axis of this rank along these parallel kinds.

        Creates the process groups of all axes along these kinds, because torch requires this of every rank.
        """
        own_axis: Axis | None = None
        ranks_by_key: dict[tuple[int, ...], list[int]] = {}
        overlay_degree = next((self.degrees[kind] for kind in kinds if kind in OVERLAY_KINDS), 0)

        for rank, coordinates in enumerate(self._coordinates):
            key = tuple(at for kind, at in zip(self._rank_degrees, coordinates, strict=True) if kind not in kinds)
            key = (rank // overlay_degree,) if overlay_degree else key
            ranks_by_key.setdefault(key, []).append(rank)

        for ranks in ranks_by_key.values():
            process_group = dist.new_group(ranks, timeout=self.group.limit)
            if self.group.rank in ranks:
                own_axis = Axis(self.group, process_group, ranks.index(self.group.rank), len(ranks))
                # The first exchange connects the ranks. The rendezvous file is not needed any more after it.
                own_axis.gather(torch.zeros(1, device=self.group.device))

        assert own_axis is not None  # each rank has coordinates
        return own_axis


class Axis:
    """A process group of some ranks in a row, and its collective operations.

    `group`: the group of all ranks of the worker.
    `rank`, `size`: the rank of this process within the axis, and its number of ranks.
    """

    def __init__(self, group: Group, process_group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self._process_group = process_group

    def transpose(self, tensor: Tensor) -> Tensor:
        """Send a row to each rank, and return the rows received (all-to-all).

        `tensor` is (size, …). Its row `r` goes to rank `r`. Returns (size, …): row `r` came from rank `r`.
        """
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        self._wait(lambda: dist.all_to_all_single(received, sent, group=self._process_group))
        return received

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks (all-gather).

        `tensor` is (…), of equal shape on all ranks. Returns (size, …), in rank order.
        """
        sent = tensor.contiguous()
        received = sent.new_empty(self.size, *sent.shape)
        flat = received.flatten(), sent.flatten()  # views; a list of parts would be copied once more
        self._wait(lambda: dist.all_gather_into_tensor(*flat, group=self._process_group))
        return received

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks (all-reduce).

        `tensor` is (…), of equal shape on all ranks. Returns the same shape and dtype. Summed in float32 and in rank
        order, for batch invariance: a row's sum does not depend on the rest of its batch.
        """
        if tensor.nbytes <= SMALL:
            return reduce(torch.add, self.gather(tensor).float().unbind(0)).to(tensor.dtype)

        # Each rank sums one part, by itself: an all-reduce adds in an order that depends on a number's position.
        padded = functional.pad(tensor.flatten(), (0, -tensor.numel() % self.size))
        parts = self.transpose(padded.view(self.size, -1))
        own_part = reduce(torch.add, parts.float().unbind(0)).to(tensor.dtype)
        return self.gather(own_part).flatten()[: tensor.numel()].view(tensor.shape)

    def scatter(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of rank `source` on all ranks (broadcast).

        `tensor` is (…). The other ranks pass one of the same shape and dtype.
        """
        result = tensor.contiguous() if self.rank == source else torch.empty_like(tensor).contiguous()
        self._wait(lambda: dist.broadcast(result, group=self._process_group, group_src=source))
        return result

    def send_to_next(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to send a tensor to the next rank of the ring.

        The last rank sends to the first. Returns a function that waits for the tensor of the previous rank, of the same
        shape, and returns it.
        """
        sent = tensor.contiguous()
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        previous_rank, next_rank = ((self.rank + step) % self.size for step in (-1, 1))
        operations = [
            dist.P2POp(dist.isend, sent, group=self._process_group, group_peer=next_rank),
            dist.P2POp(dist.irecv, received, group=self._process_group, group_peer=previous_rank),
        ]
        works = self._wait(lambda: dist.batch_isend_irecv(operations))

        def wait_for_tensor() -> Tensor:
            for work in works:
                self._wait(work.wait)
            return received

        return wait_for_tensor

    @property
    def mesh(self) -> DeviceMesh:
        """The same ranks as a torch DeviceMesh, for torch's own parallelism (FSDP2)."""
        return DeviceMesh.from_group(self._process_group, self.group.device.type)

    def _wait(self, exchange: Callable[[], T]) -> T:
        """Run an exchange, after all ranks have reached their first one of the step."""
        self.group.meet()
        return self.group.wait(exchange, self.group.device)


def trim_heap() -> None:
    """Return freed heap memory to the system, where other processes can use it.

    The allocator would otherwise retain the memory of weights that were loaded and freed.
    """
    ctypes.CDLL(None).malloc_trim(0)
