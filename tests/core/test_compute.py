"""The environment of processes that compute."""

from __future__ import annotations

import pytest

from unfuse.core.compute_options import WAITING, compute_environment


def test_compute_environment_sets_passive_omp_waiting_and_threads() -> None:
    """Given a caller that says nothing of it, then OpenMP's threads do not spin, and are as many as is set."""
    found = compute_environment(2, {"PATH": "/bin", "OMP_NUM_THREADS": "64"})
    assert (found["OMP_WAIT_POLICY"], found["OMP_NUM_THREADS"], found["PATH"]) == ("PASSIVE", "2", "/bin")


@pytest.mark.parametrize("name", WAITING)
def test_compute_environment_preserves_caller_omp_settings(name: str) -> None:
    found = compute_environment(2, {name: "7"})
    assert {known: found[known] for known in WAITING if known in found} == {name: "7"}
