"""Every stage of every family keeps the promises that the published suite knows."""

from __future__ import annotations

import pytest

from tests.models import conftest as c
from unfuse.stages.base import StageInput
from unfuse.testing import check_stage

ONE_OF_EACH = list({job.model: job for job in reversed(c.JOBS) if job.dtype == "float32"}.values())


@pytest.mark.parametrize("chosen", ONE_OF_EACH, ids=lambda job: job.model.rpartition("/")[2])
def test_the_suite_passes(chosen: c.Job, undivided: c.Undivided, stages: c.Load) -> None:
    loaded = stages(undivided.folder(chosen.model))
    params = {**chosen.params, "output_format": "png"}
    uploads = undivided.uploads(params)
    tensors = c.encode(loaded, params, uploads)
    for name, stage in loaded.items():
        given = {} if "encode" in name else tensors
        check_stage(stage, [StageInput(params, given, uploads)])
        tensors |= {} if "encode" in name else c.run(stage, params, tensors).tensors
