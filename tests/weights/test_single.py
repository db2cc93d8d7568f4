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
from unfuse.stages.base import StageInput, SteppedStage
from unfuse.weights.folder import ModelFolder
from unfuse.weights.single import may_be_class

JOBS = {job.name: job for job in c.FILES[:3]}


def latents(folder: Path, job: c.Job, stages: c.Load) -> np.ndarray:
    loaded = stages(folder)
    stage = loaded["denoise"]
    assert isinstance(stage, SteppedStage)
    (output,) = stage.run([StageInput(job.params, c.encode(loaded, job.params, {}))])
    found: np.ndarray = output.tensors["latents"].float().numpy()  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("name", JOBS)
def test_single_file_latents_are_identical_to_diffusers(name: str, undivided: c.Undivided, stages: c.Load) -> None:
    job = JOBS[name]
    assert np.array_equal(latents(undivided.folder(job.model), job, stages), undivided.result(name)["latents"])


def test_tensor_naming_does_not_change_latents_and_quantization_does(undivided: c.Undivided) -> None:
    """Equal but for rounding: on some CPUs where weights lie in memory decides which kernels take them."""
    names = "lora-none", "single", "even", "quantized", "lora-quantized"
    plain, single, even, quantized, adapted = (undivided.result(name)["latents"] for name in names)
    assert np.abs(single - plain).max() < 1e-5 * np.abs(plain).max()
    assert 0 < np.abs(quantized - even).mean() < 0.1 < np.abs(quantized - adapted).mean()


def test_gguf_denoiser_stays_quantized_and_has_no_parallelism(undivided: c.Undivided, stages: c.Load) -> None:
    folder = undivided.folder("wan-gguf")
    (spec,) = (spec for spec in find(folder).model_spec("m", folder).pipeline.stages if spec.kind == "denoise")
    assert not spec.parallelism
    kinds = {type(module).__name__ for module in stages(folder)["denoise"]._denoiser.transformers[0].modules()}  # type: ignore[attr-defined]
    assert "GGUFLinear" in kinds


@pytest.fixture
def single(undivided: c.Undivided, tmp_path: Path) -> Path:
    return Path(shutil.copytree(undivided.folder("wan-single"), tmp_path / "model"))


def test_changed_single_file_changes_the_identity(single: Path) -> None:
    one = ModelFolder(single).identity("transformer")
    file = single / "transformer/tuned.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert ModelFolder(single).identity("transformer") != one


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("tuned.safetensors", b"\x80\x04K\x01.", "not a safetensors file"),
        ("tuned.gguf", b"GGUF", "not a GGUF file"),
        ("tuned.gguf", b"GGUF\3\0\0\0" + b"\xff" * 16, "not a GGUF file"),
        ("tuned.ckpt", b"", "not safetensors"),
    ],
)
def test_invalid_single_file_is_rejected_before_loading(name: str, data: bytes, says: str, single: Path) -> None:
    (single / "transformer/tuned.safetensors").unlink()
    (single / "transformer" / name).write_bytes(data)
    with pytest.raises(ConfigError, match=says):
        find(single).model_spec("m", single)


def test_two_single_files_in_a_component_are_rejected(single: Path) -> None:
    shutil.copy(single / "transformer/tuned.safetensors", single / "transformer/other.safetensors")
    with pytest.raises(ConfigError, match="keep only one of them in transformer"):
        find(single).model_spec("m", single)


def test_single_file_of_another_model_fails_to_load(single: Path, undivided: c.Undivided, stages: c.Load) -> None:
    (other,) = undivided.folder("flux").glob("transformer/*.safetensors")
    shutil.copy(other, single / "transformer/tuned.safetensors")
    with pytest.raises(ConfigError, match="component transformer"):
        stages(single)


def test_single_file_of_another_model_is_rejected_before_loading(
    copied: Callable[[str], Path], undivided: c.Undivided
) -> None:
    """So it is by `doctor` and `POST /v1/models`, which read headers alone."""
    for kind in ("wan-gguf", "wan-single"):
        folder = copied("flux")
        (own,) = folder.glob("transformer/*.safetensors")
        own.unlink()
        (other,) = undivided.folder(kind).glob("transformer/tuned*")
        shutil.copy(other, folder / "transformer")
        with pytest.raises(
            ConfigError, match=rf"{other.name} is of another model.*use a file of a FluxTransformer2DModel"
        ):
            find(folder).model_spec("m", folder)
        shutil.rmtree(folder)


REFINER = "txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.bias"


@pytest.mark.parametrize(
    ("kind", "names", "architecture", "fits"),
    [
        ("FluxTransformer2DModel", (), "flux", True),
        ("FluxTransformer2DModel", (), "wan", False),
        ("FluxTransformer2DModel", (), "llama", False),
        ("FluxTransformer2DModel", (), "of-tomorrow", True),
        ("FluxTransformer2DModel", ("head.modulation",), "", False),
        ("FluxTransformer2DModel", ("model.diffusion_model.head.modulation",), "", False),
        ("FluxTransformer2DModel", ("double_blocks.0.img_attn.norm.key_norm.scale",), "", True),
        ("Flux2Transformer2DModel", ("double_blocks.0.img_attn.norm.key_norm.scale",), "flux", True),
        ("WanTransformer3DModel", ("head.modulation",), "wan", True),
        (
            "HunyuanVideoTransformer3DModel",
            ("txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.bias",),
            "",
            True,
        ),
        ("UNet2DConditionModel", ("input_blocks.0.0.weight",), "sdxl", True),
        ("UNet2DConditionModel", ("joint_blocks.0.context_block.adaLN_modulation.1.bias",), "", False),
        ("AutoencoderKL", ("head.modulation",), "wan", True),
    ],
)
def test_single_file_class_is_detected_by_architecture_and_tensor_names(
    kind: str, names: tuple[str, ...], architecture: str, fits: bool
) -> None:
    assert may_be_class(kind, names, architecture) is fits
