"""`--dtype bfloat16` is what `torch_dtype=torch.bfloat16` is in a script: one dtype for all components."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.answers.sampled import SIZE, called, drawn, pixels_of
from tools.server import Server, environment, unfuse

pytestmark = pytest.mark.slow

ASKED = {"size": "32x32", "num_inference_steps": 4, "guidance_scale": 3.0}


@pytest.mark.row("P43", "P44", "K17")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.nightly)])
def test_dtype_flag_produces_the_pixels_of_diffusers_torch_dtype(
    dtype: str, sampled: Callable[[str], Path], served: Callable[..., Server], tmp_path: Path
) -> None:
    """Given a model that is split, and one that is not."""
    models = {name: sampled(name) for name in ("sdxl", "sd")}
    server = served(*models.values(), "--dtype", dtype)
    params = {"prompt": "cats", **SIZE, "guidance_scale": 3.0}
    jobs = [{"name": name, "folder": str(model), "params": params, "dtype": dtype} for name, model in models.items()]

    wanted = called(tmp_path, jobs)

    for name, model in models.items():
        assert np.array_equal(pixels_of(drawn(server, model, **ASKED)[0]), wanted[name][0][0]), name


@pytest.mark.row("P44")
@pytest.mark.parametrize(("said", "vae"), [("bfloat16", "bfloat16"), ("bfloat16,vae=float32", "float32")])
def test_doctor_reports_the_dtype_of_each_component(
    said: str, vae: str, sampled: Callable[[str], Path], tmp_path: Path
) -> None:
    command = unfuse("doctor", str(sampled("sdxl")), "--device", "cpu", "--dtype", said, "--json")

    told = json.loads(subprocess.run(command, env=environment(tmp_path), capture_output=True, check=True).stdout)

    (components,) = told["models"].values()
    dtypes = {one["name"]: one["dtype"] for one in components if one["parameters"]}
    assert dtypes.pop("vae") == vae
    assert {*dtypes.values()} == {"bfloat16"}
