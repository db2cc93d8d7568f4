"""By day each trait of each model has a representative among the jobs that tests run; by night all jobs run."""

from __future__ import annotations

import pytest

from tests.models import conftest as c

MAX_BY_DAY = 90
"""Jobs by day: a further one costs half a second in all tests of every job."""


def test_daily_jobs_cover_every_trait_of_every_model() -> None:
    shown = {trait for job in c.JOBS if job.name in c.BY_DAY for trait in c.traits(job)}
    assert {trait for job in c.JOBS for trait in c.traits(job)} - shown == set()
    assert {job.model for job in c.JOBS} == {model for model, _ in shown}
    assert len(c.BY_DAY) <= MAX_BY_DAY < len(c.JOBS)


def test_daily_jobs_run_unmarked_and_all_others_nightly() -> None:
    """As pytest marks them."""
    marked: dict[str, list[str]] = {"day": [], "night": []}

    class Metafunc:
        fixturenames = ("job",)

        def parametrize(self, _: str, params: list[pytest.Mark]) -> None:
            for param in params:
                marked["night" if param.marks else "day"].append(param.id)

    c.pytest_generate_tests(Metafunc())
    assert set(marked["day"]) == c.BY_DAY
    assert sorted(marked["day"] + marked["night"]) == sorted(job.name for job in c.JOBS)


@pytest.mark.parametrize(
    ("params", "dtype", "trait"),
    [
        ({"negative_prompt": "blurred"}, "float32", "negative prompt"),
        ({"guidance_scale": 1.0}, "float32", "no guidance"),
        ({"num_frames": 5}, "float32", "video"),
        ({"width": 48}, "float32", "oblong"),
        ({"prompt": c.LONG}, "float32", "more text than the model reads"),
        ({"image": "sky.png", "mask": "hole.png"}, "float32", "mask"),
        ({}, c.WHOLE_HALF, c.WHOLE_HALF),
    ],
)
def test_job_parameters_and_dtype_determine_its_traits(params: dict[str, object], dtype: str, trait: str) -> None:
    plain, special = c.Job("plain", "wan", c.wan_params()), c.Job("special", "wan", c.wan_params(**params), dtype)
    assert ("wan", trait) in c.traits(special) - c.traits(plain)
