"""`unfuse compare` on the built-in model: both sides run, for pictures and for a video, and agree byte for byte."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tools.server import environment, unfuse


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="pictures"),
        pytest.param(("--frames", "5", "--steps", "4"), id="video"),
    ],
)
def test_compare_reports_equal_outputs_and_gains_over_diffusers(tmp_path: Path, more: tuple[str, ...]) -> None:
    command = unfuse("compare", "unfuse/shapes", "--rounds", "2", "--levels", "1,2", "--json", *more)
    ran = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["requests"], found["equal"]) == (2, 2)
    measures = {row["measure"]: row for row in found["figures"]}
    assert {
        "latency of one request, s",
        "requests a second, 2 at once",
        "largest process",
        "all processes",
    } <= measures.keys()
    assert all(row["diffusers"] > 0 and row["unfuse"] > 0 and row["gain"] > 0 for row in found["figures"])
    for name, row in measures.items():  # above 1, unfuse is better
        assert (row["gain"] > 1) == ((row["unfuse"] > row["diffusers"]) == name.startswith("requests a second"))
    assert "faster" in found["verdict"] or "equally fast" in found["verdict"]
    first = next(line for line in ran.stderr.splitlines() if "requests" in line)
    assert re.match(r"1[02] requests with diffusers, then 8 requests with unfuse: ", first)
    assert re.search(r"^estimate: about \S+ \w+, at \S+ s a request$", ran.stderr, re.MULTILINE)


@pytest.mark.slow
def test_compare_batches_names_each_stage_and_size(tmp_path: Path) -> None:
    command = unfuse("compare", "unfuse/shapes", "--batches", "2,4", "--steps", "2", "--json")
    ran = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)["batches"]
    assert {(row["stage"], row["size"]) for row in rows} >= {("text_encode", 2), ("denoise", 4), ("vae_decode", 0)}
    assert all(row["equal"] and not row["because_of"] for row in rows)
