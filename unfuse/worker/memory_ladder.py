"""The memory ladder: what follows when a task runs out of memory.

Each failure takes the task one rung further, until its step succeeds or the task fails:

1. The allocator's cache is emptied. A batch is halved, and larger batches of its kind are no longer tried.
2. A task that was alone is repeated alone, because another process may have used the memory for a moment.
3. Its stage makes the step smaller (`Stage.reduce_memory`): a VAE's work is sliced, then in ever smaller tiles.
4. The task fails, with a sentence that names the size and what to do.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import structlog

from unfuse.arena.limits import readable_bytes
from unfuse.core.compute_device import ComputeDevice
from unfuse.core.errors import OutOfMemory
from unfuse.core.plan import Params
from unfuse.core.retries import first_line, is_out_of_memory
from unfuse.core.task import Task
from unfuse.core.worker_status import MemoryRetry
from unfuse.worker.compute_messages import MemoryShortage, about, memory_advice
from unfuse.worker.job import Job

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: Bytes of other processes on the device from which a task may fail only because of them.
OTHERS = 1 << 30

#: Bytes of cache that are returned to a device which other processes use.
LARGE_CACHE = 1 << 30


class MemoryLadder:
    """Decides what follows when tasks of one compute process run out of memory.

    `send` gets a report of each such error.
    """

    def __init__(
        self, device: ComputeDevice | None = None, send: Callable[[MemoryShortage], object] = lambda shortage: None
    ) -> None:
        self._device = device or ComputeDevice()
        self._send = send

    def recover(self, error: BaseException) -> None:
        """Free the tensors in an error's traceback, and the allocator's cache."""
        clear_frames(error)
        try:
            self._device.empty_cache()
        except RuntimeError as failure:  # the next forward reports what is wrong with the device
            log.warning("the cache of the device cannot be emptied", reason=str(failure))

    def halve(self, size: int, error: Exception, limit_size: Callable[[int], None]) -> None:
        """Have later batches halved, after a batch of this size has run out of memory."""
        self.recover(error)
        self._report(error, "halved")
        limit_size(size)

    def next_rung(
        self, batch: Sequence[Job], error: Exception, limit_size: Callable[[int], None]
    ) -> OutOfMemory | None:
        """Take the next rung for a batch whose step has run out of memory.

        `limit_size` halves the size of later batches of its kind. Returns None if the step is computed again, else the
        error of its only task.
        """
        if len(batch) > 1:
            self.halve(len(batch), error, limit_size)
            return None
        self.recover(error)
        (job,) = batch
        if not job.repeats_step:
            job.repeats_step = True
            self._report(error, "repeated")
            return None
        try:
            state = job.stage.reduce_memory(job.state)
        except OutOfMemory as refusal:  # with a smaller step, the result would have other bytes
            return self.explain(job.lease.task, error, str(refusal))
        if state is None:
            return self.explain(job.lease.task, error)
        job.state = state
        self._report(error, "reduced")
        log.warning("out of memory: the step is computed in smaller parts", **about(job.claim))
        return None

    def repeat(self, task: Task, compute: Callable[[], T]) -> T:
        """Return what `compute` returns; it is repeated once if it runs out of memory.

        Raises OutOfMemory if it does so again.
        """
        try:
            return compute()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.recover(error)
            self._report(error, "repeated")
        try:
            return compute()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.recover(error)
            raise self.explain(task, error) from error

    def explain(self, task: Task, error: Exception, refusal: str = "") -> OutOfMemory:
        """Return the error of a task that does not fit, as a sentence.

        `refusal`: why a smaller step was not tried. The error is `shared` if other processes use the device too.
        """
        if isinstance(error, OutOfMemory):
            return error
        self._report(error)
        try:
            others = self._device.used_by_others()
        except RuntimeError:  # the device does not answer
            others = 0
        size = size_of(task.params)
        reason = first_line(error).rstrip(".")
        place, advice = memory_advice(error, uses_host_memory=self._device.uses_host_memory)
        sentence = (
            f"{place} does not have enough memory for {size or 'this request'} in stage {task.stage}, even alone: "
            f"{reason}; reduce the request ({'smaller size' if size else 'shorter text'}), or {advice}"
        )
        if refusal:
            sentence += f"; {refusal}"
        if is_shared := others >= OTHERS:
            sentence += f"; other processes use {readable_bytes(others)} of the device"
        explained = OutOfMemory(sentence, is_shared)
        explained.__cause__ = error
        return explained

    def _report(self, error: BaseException, retry: MemoryRetry | Literal[""] = "") -> None:
        """Report an error and what follows.

        It is about the rank that the error names, else about the first one.
        """
        self._send(MemoryShortage(getattr(error, "rank", 0), retry))

    def give_back(self) -> None:
        """Return a large cache to the device if other processes use the device."""
        try:
            if self._device.cached_bytes() >= LARGE_CACHE and self._device.used_by_others() >= OTHERS:
                self._device.empty_cache()
        except RuntimeError as failure:  # the next forward reports what is wrong with the device
            log.warning("the memory of the device cannot be read", reason=str(failure))


def clear_frames(error: BaseException) -> None:
    """Free the local variables in the tracebacks of an error and its causes.

    Otherwise the tensors of a failed forward stay allocated as long as the error exists.
    """
    causes: list[BaseException] = [error]
    for cause in causes:
        traceback.clear_frames(cause.__traceback__)
        causes += [other for other in (cause.__cause__, cause.__context__) if other and other not in causes]


def size_of(params: Params) -> str:
    """Return the size of a request, such as 832x480 with 81 frames; "" for texts."""
    width, height, frames = (params.get(name) for name in ("width", "height", "num_frames"))
    if not (width and height):
        return ""
    return f"{width}x{height}" + (f" with {frames} frames" if isinstance(frames, int) and frames > 1 else "")
