"""Stores what a task made: tensors for later stages in the arena, files for the client in the result store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import structlog

from unfuse.core.errors import PermanentError, TransientError
from unfuse.core.messages import Announced, Keep
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import prefix_key
from unfuse.core.request import ResultFile
from unfuse.stages.base import Media, StageOutput, Tensors
from unfuse.stores.results import ResultStore
from unfuse.stores.tensor_store import TensorStore
from unfuse.worker.turn import Job

log = structlog.get_logger(__name__)

ROOM_S = 2.0  # seconds an output waits for room in a full arena; readers may free some, and nothing runs here meanwhile


def announce(
    store: TensorStore, job: Job, encodings: Mapping[str, str], tell: Callable[[Announced], object] | None
) -> None:
    """Have a task that begins write its output where others may read it meanwhile, and `tell` of it.

    It comes whole, at the end, if it is to be narrowed, if there is no room yet, and where nobody can be told. One of
    several is told of however small it is: who reads all of them begins with those that are there.
    """
    task, outline = job.lease.task, job.stage.outline(job.state)
    if not outline or tell is None or task.planned.final or encodings.get(task.planned.kind, "none") != "none":
        return
    with suppress(TransientError):
        job.output = store.begin(
            outline, request=task.request, stage=task.stage, attempt=task.attempt, small=task.several
        )
    if job.output:
        job.stage.write_to(job.state, job.output)
        tell(Announced(job.claim, job.output.ref))


def put(store: TensorStore, job: Job, output: StageOutput, encodings: Mapping[str, str]) -> ObjectRef | None:
    """Store tensors, narrowed as `encodings` says for the kind of the stage; None for a final stage, which has none.

    What was written where others read it is only sealed.
    """
    task = job.lease.task
    if job.output:
        job.output.fill(output.tensors)
        return job.output.finish()
    if task.planned.final:
        return None
    encoding = encodings.get(task.planned.kind, "none")
    return store.put(
        output.tensors, request=task.request, stage=task.stage, attempt=task.attempt, wait=ROOM_S, encoding=encoding
    )


def read_prefix_blocks(job: Job) -> list[tuple[str, str, Tensors]]:
    """Return the prefix blocks that the last step completed, each with its key, its digest and copies of its tensors.

    The digest is empty if the key is one of the task's own `prefixes`. The state may change afterwards. A block that
    cannot be read is left out, with those behind it.
    """
    task, found = job.lease.task, list[tuple[str, str, Tensors]]()
    try:
        for block in job.stage.prefix_blocks(job.state):
            if block.number < len(task.planned.prefixes):
                found.append((task.planned.prefixes[block.number], "", block.read()))
            elif task.planned.extends:
                found.append((prefix_key(task.planned.extends, block.digest), block.digest, block.read()))
    except Exception as error:  # the task itself goes on, on every rank: others compute what they do not find
        log.info("not kept", request=task.request, stage=task.stage, reason=str(error))
    return found


def store_prefix_blocks(store: TensorStore, job: Job) -> Iterator[Keep]:
    """Store what `read_prefix_blocks` has read. A block that cannot be stored is left out, with those behind it."""
    task, blocks = job.lease.task, job.prefix_blocks
    job.prefix_blocks = []
    for key, digest, tensors in blocks:
        try:
            ref = store.put(tensors, request=task.request, stage=task.stage, attempt=task.attempt)
        except Exception as error:  # as above
            log.info("not kept", request=task.request, stage=task.stage, reason=str(error))
            return
        yield Keep(job.claim, key, ref, digest)


def write(results: ResultStore, job: Job, media: Sequence[Media]) -> tuple[ResultFile, ...]:
    """Store files, from the index of the task's picture on. Raises ResultsUnavailable where they cannot be now."""
    task = job.lease.task
    first = task.params.get("index") or 0
    if not isinstance(first, int):
        raise PermanentError(f"stage {task.stage} was given the picture index {first!r}")
    return tuple(results.put(task.request, at, one.content_type, one.data) for at, one in enumerate(media, first))
