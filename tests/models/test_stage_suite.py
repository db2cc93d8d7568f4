"""Every stage of every family keeps the promises that the published suite knows."""

from __future__ import annotations

import pytest

from tests.models import conftest as c
from unfuse.models import find
from unfuse.testing import check_stage

ONE_OF_EACH = list(
    {(job.model, "image" in job.params): job for job in reversed(c.JOBS) if job.dtype == "float32"}.values()
)


@pytest.mark.parametrize("chosen", ONE_OF_EACH, ids=lambda job: job.name)
def test_stages_of_every_family_pass_the_stage_test_suite(
    chosen: c.Job, undivided: c.Undivided, stages: c.Load
) -> None:
    folder = undivided.folder(chosen.model)
    loaded, specs = stages(folder), {spec.name: spec for spec in find(folder).model_spec("m", folder).pipeline.stages}
    params = {**chosen.params, "output_format": "png"}
    uploads = undivided.uploads(params)
    tensors = c.encode(loaded, params, uploads)
    for name, stage in loaded.items():
        if not {*stage.uploads} <= uploads.keys():
            continue
        given = {wanted: tensors[wanted] for wanted in specs[name].inputs if wanted in tensors}
        check_stage(stage, [c.task(params, given, uploads)])
        tensors |= c.run(stage, params, given, uploads).tensors
