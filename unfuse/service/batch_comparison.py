"""Runs the comparison of batches with requests alone, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from unfuse.core.checking import check_request
from unfuse.core.compute_options import compute_environment
from unfuse.core.errors import PermanentError, UsageError
from unfuse.core.modalities import modality_for
from unfuse.core.text_parameters import TEXT
from unfuse.launch.base import LineSink
from unfuse.launch.local import OutputPump
from unfuse.service.comparison import threads_to_try
from unfuse.service.plan import ServingPlan
from unfuse.worker.batch_comparison import BatchComparison, ComparedBatch


def compare_batches(
    plan: ServingPlan, params: dict[str, Any], image: Path | None, sizes: Sequence[int], on_line: LineSink
) -> list[ComparedBatch]:
    """Return the result of each stage and batch size of a plan's first model.

    It runs on the device of its denoiser, with the threads of a worker. `on_line` is called with each line that the
    process writes to standard error. Raises PermanentError if the process fails, and UsageError for a model without
    batches in exact pools.
    """
    model = plan.models[0]
    if TEXT.is_supported_by(model.spec.limits):
        raise UsageError(
            f"--batches: {model.spec.name} generates text, and such requests never share a forward in an exact pool: "
            "choose a model for pictures or videos"
        )

    worker = next(worker for worker in plan.workers if plan.worker_plan.goes_first(worker.role))
    threads, *_ = threads_to_try(plan)
    checked_params, _ = check_request(model.spec, params, modality_for(params))
    comparison = BatchComparison(
        str(model.folder),
        model.dtypes,
        replace(plan.worker_plan.compute, batching="exact", threads=threads, parallel=""),
        worker.device,
        tuple(sizes),
        checked_params,
        str(image or ""),
    )
    output = OutputPump(on_line)
    stderr = output.pipe(0)
    process = subprocess.Popen(
        [sys.executable, "-m", "unfuse.worker.batch_comparison"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=compute_environment(threads, os.environ),
    )
    os.close(stderr)
    answer, _ = process.communicate(msgspec.json.encode(comparison) + b"\n")
    output.close()
    if process.returncode:
        raise PermanentError("the comparison failed; its message is above")
    return msgspec.json.decode(answer, type=list[ComparedBatch])
