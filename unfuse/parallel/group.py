"""The ranks of one worker: how they find each other, agree, and exchange tensors. Gloo between CPUs, NCCL between GPUs.

Every rank makes the same calls in the same order. A rank that fails before the first exchange of a step tells the
others, and all go on; what fails later leaves the others waiting, so it ends the process, and the worker's parent
starts all ranks anew.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
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
from unfuse.core.compute_options import KINDS, SHARING, ParallelDegrees
from unfuse.core.errors import ConfigError, PermanentError, TransientError, UnfuseError, Unsuitable
from unfuse.core.retries import rule_of
from unfuse.parallel.devices import EXCHANGES

T = TypeVar("T")

LOOPBACK = "lo"  # the network interface on which gloo listens: ranks are processes of one machine
SMALL = 1 << 16  # bytes of a tensor that each rank adds up whole: one exchange is faster than two with half of each


class RankFailed(TransientError):
    """Another rank could not do its part of a step, for a reason that may pass."""


class RankError(UnfuseError):
    """Another rank raised an exception that no rule in `core/retries.py` names."""


ERRORS: dict[str, type[Exception]] = {
    "memory": torch.OutOfMemoryError, "device": getattr(torch, "AcceleratorError", RuntimeError), "request": Unsuitable,
    "permanent": PermanentError, "unknown": RankError,
}  # fmt: skip
"""The exception that ranks raise after the failure of another one, by the cause of its retry rule, so that the same
rule applies to them. RankFailed for all other causes."""


class Group:
    """All ranks of a worker, of which this process is number `rank` of `size`.

    They meet in the file `rendezvous`, which is used once. An exchange that takes longer than `limit_s` seconds ends
    the process.
    """

    def __init__(self, rank: int, size: int, rendezvous: str, device: str, limit_s: float) -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.folder = Path(rendezvous).parent  # where they met
        self.waited_s = 0.0  # seconds spent in exchanges so far
        self.limit, self._met = timedelta(seconds=limit_s), True
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        kind, on_gpu = self.device.type, self.device.type in EXCHANGES
        if on_gpu:
            torch.get_device_module(self.device).set_device(self.device)
        elif kind != "cpu":
            raise ConfigError(f"--device {device}: torch has nothing by which ranks on such devices exchange tensors")
        dist.init_process_group(
            f"cpu:gloo,{kind}:{EXCHANGES[kind]}" if on_gpu else "gloo", init_method=f"file://{rendezvous}", rank=rank,
            world_size=size, timeout=self.limit, device_id=self.device if on_gpu else None,
        )  # fmt: skip

    def exchange(self, own: bytes) -> list[bytes]:
        """What each rank gives, in their order."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.wait(lambda: dist.all_gather(lengths, torch.tensor([len(own)])))
        sizes = [int(length) for length in lengths]
        if not any(sizes):
            return [b""] * self.size
        padded = torch.frombuffer(bytearray(own.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        given = [torch.empty_like(padded) for _ in range(self.size)]
        self.wait(lambda: dist.all_gather(given, padded))
        return [bytes(data[:size].numpy()) for data, size in zip(given, sizes, strict=True)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run one step on all ranks. Raises an exception in ERRORS, or RankFailed, if another rank failed."""
        self._met = False
        try:
            yield
            self.meet()
        except _Told as told:
            raise told.error from None
        except Exception as error:
            if self._met:
                self._end(f"it failed amid a step: {type(error).__name__}: {error}")
            self._met = True
            self.exchange(encode((rule_of(error).cause, f"{type(error).__name__}: {error}")))
            raise

    def meet(self) -> None:
        """See to it that all ranks have come so far in their step; called before their first exchange."""
        if self._met:
            return
        self._met = True
        for rank, said in enumerate(self.exchange(b"")):
            if said:
                failed: tuple[str, str] = decode(said, tuple[str, str])
                raise _Told(ERRORS.get(failed[0], RankFailed)(f"rank {rank}: {failed[1]}"))

    def wait(self, exchange: Callable[[], T]) -> T:
        """Make an exchange. One that fails ends the process: what other ranks have of it is not known."""
        began = time.monotonic()
        try:
            return exchange()
        except RuntimeError as error:
            self._end(f"an exchange with other ranks failed: {str(error).splitlines()[0]}")
        finally:
            self.waited_s += time.monotonic() - began

    def _end(self, reason: str) -> NoReturn:
        """End at once: an orderly end would wait for other ranks."""
        sys.stderr.write(f"rank {self.rank} ends: {reason}\n")
        sys.stderr.flush()
        os._exit(1)

    def mesh(self, spread: ParallelDegrees) -> Mesh:
        """The ranks as that spread has them. Every rank calls this, in the same order."""
        return Mesh(self, spread)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


class _Told(Exception):
    """Another rank has told of an error: nobody need be told of this one."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Mesh:
    """The ranks of a stage, arranged by the kinds over which it is spread. Each rank has a place along each kind."""

    def __init__(self, group: Group, spread: ParallelDegrees) -> None:
        self.group, self.degrees, self._ranks = group, spread.degrees, spread.ranks
        self._places = [*product(*(range(degree) for degree in self._ranks.values()))]
        self._made: dict[tuple[str, ...], Axis] = {}

    def axis(self, *kinds: str) -> Axis:
        """The ranks that differ from this one in their place along these kinds alone, itself included. Those of
        kinds that take the ranks of others are neighbours.
        """
        along = tuple(kind for kind in KINDS if kind in kinds and kind in self.degrees)
        if along not in self._made:
            self._made[along] = self._axis(along)
        return self._made[along]

    def _axis(self, along: Sequence[str]) -> Axis:
        """All ranks make all groups, as torch asks."""
        own: Axis | None = None
        same: dict[tuple[int, ...], list[int]] = {}
        share = next((self.degrees[kind] for kind in along if kind in SHARING), 0)
        for rank, place in enumerate(self._places):
            others = tuple(at for kind, at in zip(self._ranks, place, strict=True) if kind not in along)
            others = (rank // share,) if share else others
            same.setdefault(others, []).append(rank)
        for ranks in same.values():
            made = dist.new_group(ranks, timeout=self.group.limit)
            if self.group.rank in ranks:
                own = Axis(self.group, made, ranks.index(self.group.rank), len(ranks))
                own.gather(torch.zeros(1, device=self.group.device))  # from now on nobody needs the rendezvous
        assert own is not None  # each rank has a place
        return own


class Axis:
    """Some ranks in a row, of which this process is number `rank` of `size`, and what they exchange."""

    def __init__(self, group: Group, ranks: dist.ProcessGroup, rank: int, size: int) -> None:
        self.group, self._ranks, self.rank, self.size = group, ranks, rank, size

    def transpose(self, tensor: Tensor) -> Tensor:
        """Of a tensor (size, …), row `r` goes to rank `r`; row `r` of the result is what rank `r` had for this one."""
        given = tensor.contiguous()
        made = torch.empty_like(given)
        self._wait(lambda: dist.all_to_all_single(made, given, group=self._ranks))
        return made

    def gather(self, tensor: Tensor) -> Tensor:
        """(size, …): what each rank has, of equal shapes."""
        given = tensor.contiguous()
        made = given.new_empty(self.size, *given.shape)
        self._wait(lambda: dist.all_gather([*made.unbind(0)], given, group=self._ranks))
        return made

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of what ranks have, of equal shapes; in their order, so that rows do not depend on their batch."""
        if tensor.nbytes <= SMALL:
            return reduce(torch.add, self.gather(tensor).float().unbind(0)).to(tensor.dtype)
        numbers = functional.pad(tensor.flatten(), (0, -tensor.numel() % self.size))
        parts = self.transpose(numbers.view(self.size, -1))
        own = reduce(torch.add, parts.float().unbind(0)).to(tensor.dtype)
        return self.gather(own).flatten()[: tensor.numel()].view(tensor.shape)

    def hand_out(self, tensor: Tensor, giver: int) -> Tensor:
        """What rank `giver` has; the others give a tensor like it."""
        made = tensor.contiguous() if self.rank == giver else torch.empty_like(tensor).contiguous()
        self._wait(lambda: dist.broadcast(made, group=self._ranks, group_src=giver))
        return made

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to give a tensor to the next rank, the last one's to the first. Call what is returned for what came."""
        given, came = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        before, behind = ((self.rank + step) % self.size for step in (-1, 1))
        ways = [
            dist.P2POp(dist.isend, given, group=self._ranks, group_peer=behind),
            dist.P2POp(dist.irecv, came, group=self._ranks, group_peer=before),
        ]
        works = self._wait(lambda: dist.batch_isend_irecv(ways))

        def arrived() -> Tensor:
            for work in works:
                self._wait(work.wait)
            return came

        return arrived

    @property
    def mesh(self) -> DeviceMesh:
        """The same ranks for torch's own kinds."""
        return DeviceMesh.from_group(self._ranks, self.group.device.type)

    def _wait(self, exchange: Callable[[], T]) -> T:
        self.group.meet()
        return self.group.wait(exchange)


def give_back() -> None:
    """Return to the system what was let go: of weights that came and went more would stay here than others take."""
    ctypes.CDLL(None).malloc_trim(0)
