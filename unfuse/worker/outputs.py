"""Stores what a task made: tensors for later stages in the arena, files for the client in the result store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unfuse.core.errors import PermanentError
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import ResultFile
from unfuse.stages.base import Media, StageOutput
from unfuse.stores.results import ResultStore
from unfuse.stores.tensor_store import TensorStore
from unfuse.worker.turn import Job

ROOM_S = 2.0
"""Seconds that an output waits for room in a full arena. Readers may free some; meanwhile nothing runs here."""


def put(store: TensorStore, job: Job, output: StageOutput, encodings: Mapping[str, str]) -> ObjectRef | None:
    """Store tensors, narrowed as `encodings` says for the kind of the stage; None for a final stage, which has none."""
    task = job.lease.task
    if task.final:
        return None
    encoding = encodings.get(task.kind, "none")
    return store.put(
        output.tensors, request=task.request, stage=task.stage, attempt=task.attempt, wait=ROOM_S, encoding=encoding
    )


def write(results: ResultStore, job: Job, media: Sequence[Media]) -> tuple[ResultFile, ...]:
    """Store files, from the index of the task's picture on. Raises ResultsUnavailable where they cannot be now."""
    task = job.lease.task
    first = task.params.get("index") or 0
    if not isinstance(first, int):
        raise PermanentError(f"stage {task.stage} was given the picture index {first!r}")
    return tuple(
        results.put(task.request, first + offset, one.content_type, one.data) for offset, one in enumerate(media)
    )
