"""A denoiser that is one file in another tool's layout, or GGUF, makes the bits that diffusers makes of that file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.models import conftest as c
from unfuse.core.errors import ConfigError
from unfuse.models import find
from unfuse.models.folder import ModelFolder
from unfuse.stages.base import StageInput, SteppedStage

JOBS = {job.name: job for job in c.FILES[:3]}


def latents(folder: Path, job: c.Job, stages: c.Load) -> np.ndarray:
    loaded = stages(folder)
    stage = loaded["denoise"]
    assert isinstance(stage, SteppedStage)
    (output,) = stage.run([StageInput(job.params, c.encode(loaded, job.params, {}))])
    found: np.ndarray = output.tensors["latents"].float().numpy()  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("name", JOBS)
def test_latents_are_those_of_what_diffusers_loads(name: str, undivided: c.Undivided, stages: c.Load) -> None:
    job = JOBS[name]
    assert np.array_equal(latents(undivided.folder(job.model), job, stages), undivided.result(name)["latents"])


def test_the_names_of_another_tool_change_nothing_and_eight_bits_do(undivided: c.Undivided) -> None:
    """Equal but for rounding: on some CPUs where weights lie in memory decides which kernels take them."""
    names = "lora-none", "single", "even", "quantised", "lora-quantised"
    plain, single, even, quantised, adapted = (undivided.result(name)["latents"] for name in names)
    assert np.abs(single - plain).max() < 1e-5 * np.abs(plain).max()
    assert 0 < np.abs(quantised - even).mean() < 0.1 < np.abs(quantised - adapted).mean()


def test_what_is_quantised_stays_so_in_memory_and_is_not_spread(undivided: c.Undivided, stages: c.Load) -> None:
    folder = undivided.folder("wan-gguf")
    (spec,) = (spec for spec in find(folder).card("m", folder).pipeline.stages if spec.kind == "denoise")
    assert not spec.spreads
    kinds = {type(module).__name__ for module in stages(folder)["denoise"]._denoiser.transformers[0].modules()}  # type: ignore[attr-defined]
    assert "GGUFLinear" in kinds


@pytest.fixture
def single(undivided: c.Undivided, tmp_path: Path) -> Path:
    return Path(shutil.copytree(undivided.folder("wan-single"), tmp_path / "model"))


def test_another_file_is_another_model(single: Path) -> None:
    one = ModelFolder(single).identity("transformer")
    file = single / "transformer/tuned.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert ModelFolder(single).identity("transformer") != one


@pytest.mark.parametrize(("name", "data", "says"), [
    ("tuned.safetensors", b"\x80\x04K\x01.", "not a safetensors file"),
    ("tuned.gguf", b"GGUF", "not a GGUF file"),
    ("tuned.gguf", b"GGUF\3\0\0\0" + b"\xff" * 16, "not a GGUF file"),
    ("tuned.ckpt", b"", "not safetensors"),
])  # fmt: skip
def test_what_is_no_such_file_is_refused_before_anything_is_loaded(
    name: str, data: bytes, says: str, single: Path
) -> None:
    (single / "transformer/tuned.safetensors").unlink()
    (single / "transformer" / name).write_bytes(data)
    with pytest.raises(ConfigError, match=says):
        find(single).card("m", single)


def test_one_of_two_files_is_not_chosen(single: Path) -> None:
    shutil.copy(single / "transformer/tuned.safetensors", single / "transformer/other.safetensors")
    with pytest.raises(ConfigError, match="keep only one of them in transformer"):
        find(single).card("m", single)


def test_the_file_of_another_model_names_what_it_lacks(single: Path, undivided: c.Undivided, stages: c.Load) -> None:
    (other,) = undivided.folder("flux").glob("transformer/*.safetensors")
    shutil.copy(other, single / "transformer/tuned.safetensors")
    with pytest.raises(ConfigError, match="component transformer"):
        stages(single)


def test_a_gguf_file_of_another_architecture_says_what_to_give(
    copied: Callable[[str], Path], undivided: c.Undivided, stages: c.Load
) -> None:
    """diffusers stumbles on it in its own way, which is no sentence."""
    folder = copied("flux")
    (own,), (other,) = (
        undivided.folder(kind).glob(f"transformer/*.{suffix}")
        for kind, suffix in (("flux", "safetensors"), ("wan-gguf", "gguf"))
    )
    (folder / "transformer" / own.name).unlink()
    shutil.copy(other, folder / "transformer")
    with pytest.raises(ConfigError, match=rf"{other.name} is of another model, .*give one of a FluxTransformer2DModel"):
        stages(folder)
