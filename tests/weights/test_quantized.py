"""Transformers and encoders that torchao has quantized make the bits that diffusers makes of the same folder."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models import conftest as c
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import ConfigError
from unfuse.models import find
from unfuse.models.base import RuntimeOptions
from unfuse.planning.placement import CPU, Device, WorkerPlan
from unfuse.service.plan import read_models
from unfuse.stages.base import Stage
from unfuse.weights.folder import ModelFolder
from unfuse.weights.quantized import check, library

JOBS = {job.name: job for job in c.QUANTIZED}
Copied = Callable[[str], Path]


def load(folder: Path, kind: str, dtype: str = "float32", loras: str = "", offload: Any = "none") -> Stage:
    card = find(folder).model_spec("m", folder, dtype)
    (spec,) = (spec for spec in card.pipeline.stages if spec.kind == kind)
    return find(folder).load(spec, folder, RuntimeOptions("cpu", card.dtypes, ComputeOptions(offload=offload), loras))


def said(folder: Path, component: str, **changes: object) -> Path:
    """The folder, with that in what a configuration says of quantizing."""
    file = folder / component / "config.json"
    config = json.loads(file.read_text())
    c.edit(file, quantization_config={**config.get("quantization_config", {}), **changes})
    return folder


@pytest.mark.parametrize("name", JOBS)
def test_torchao_model_outputs_are_identical_to_diffusers(name: str, undivided: c.Undivided, stages: c.Load) -> None:
    job, expected = JOBS[name], undivided.result(name)
    loaded = stages(undivided.folder(job.model), job.dtype)
    [(latents, pixels)] = c.divided(loaded, job.params, {}, [job.params["seed"]])
    assert np.array_equal(latents.float().numpy(), expected["latents"])
    assert np.array_equal(pixels, expected["pixels"])


def test_weights_stay_quantized_in_memory_and_change_the_output(undivided: c.Undivided, stages: c.Load) -> None:
    folder = undivided.folder("wan-int8")
    transformer = stages(folder)["denoise"]._denoiser.transformers[0]  # type: ignore[attr-defined]
    assert type(transformer.blocks[0].attn1.to_q.weight.data).__name__ == "Int8Tensor"
    [(plain, _)] = c.divided(stages(undivided.folder("wan")), c.wan_params(20, num_frames=5), {}, [20])
    assert 0 < np.abs(plain.numpy() - undivided.result("torchao-video")["latents"]).mean() < 0.5


def test_plan_counts_packed_bytes_without_parallelism_or_lora(undivided: c.Undivided) -> None:
    cpu = (Device(CPU, 1 << 36),)
    plain, packed = (
        read_models([str(undivided.folder(kind))], "", WorkerPlan(None, {}, ComputeOptions()), cpu)[0]
        for kind in ("wan", "wan-int8")
    )
    for part in ("transformer", "text_encoder"):
        file = next((packed.folder / part).glob("*.safetensors")).stat().st_size
        assert file <= packed.components[part].memory < plain.components[part].memory
        assert not packed.components[part].mapped
    spreads = {spec.kind: spec.parallelism for spec in packed.spec.pipeline.stages}
    assert not spreads["denoise"] and not spreads["text_encode"] and spreads["vae_decode"]
    assert plain.spec.takes_lora and not packed.spec.takes_lora


def test_plan_counts_dtype_upcast_of_float8_models(undivided: c.Undivided) -> None:
    folder, cpu = str(undivided.folder("wan-float8")), (Device(CPU, 1 << 36),)
    half, full = (
        read_models([folder], "", WorkerPlan(None, {}, ComputeOptions(dtype=dtype)), cpu)[0]
        .components["transformer"]
        .memory
        for dtype in ("bfloat16", "float32")
    )
    assert half < full


def test_quantized_denoiser_ignores_the_loras_folder(undivided: c.Undivided) -> None:
    stage = load(undivided.folder("wan-int8"), "denoise", loras=str(undivided.folder("loras")))
    assert stage._adapters is None  # type: ignore[attr-defined]


def test_unsupported_quantized_setups_are_rejected_before_loading(
    copied: Copied, undivided: c.Undivided, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers

    monkeypatch.setattr(diffusers.WanTransformer3DModel, "from_pretrained", None)
    with pytest.raises(ConfigError, match="does not support --offload"):
        load(undivided.folder("wan-int8"), "denoise", offload="model")
    with pytest.raises(ConfigError, match="quantized for bfloat16: use --dtype transformer=bfloat16"):
        load(undivided.folder("wan-float8"), "denoise")
    folder = said(copied("wan-int8"), "transformer", quant_type={"default": {"_type": "Int4WeightOnlyConfig"}})
    with pytest.raises(ConfigError, match="Int4WeightOnlyConfig, which needs a GPU"):
        load(folder, "denoise")
    check("transformer", ModelFolder(folder).quantization("transformer"), (), "float32", "cuda", "none")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "by bitsandbytes, which is not supported"),
        ({"quant_method": ["torchao"]}, "which is not supported"),
        ({"quant_method": "torchao", "quant_type": "int8wo"}, "without the quantization type"),
        ({"quant_type": {"default": {"_type": "quantize_", "_data": {}}}}, "with quantize_, which is not supported"),
        (
            {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": [{"_type": "os.system"}]}}},
            "os.system",
        ),
    ],
)
def test_unsupported_quantization_methods_are_rejected_by_name(
    changes: dict[str, object], says: str, copied: Copied
) -> None:
    folder = said(copied("wan-int8"), "transformer", **changes)
    with pytest.raises(ConfigError, match=says):
        find(folder).model_spec("m", folder)


def test_pickled_torchao_weights_are_rejected(copied: Copied) -> None:
    folder = copied("wan-int8")
    next((folder / "transformer").glob("*.safetensors")).unlink()
    (folder / "transformer/diffusion_pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(ConfigError, match="not safetensors: save the model again"):
        find(folder).model_spec("m", folder)


def test_torchao_language_model_is_rejected(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="not supported for language models: use GGUF"):
        ModelFolder(tmp_path).weight_names("model")


def test_quantized_weights_get_a_pool_of_their_own(copied: Copied, undivided: c.Undivided) -> None:
    folder = copied("wan-int8")
    cards = [find(one).model_spec("m", one) for one in (folder, undivided.folder("wan"))]
    assert cards[0].pools()["denoise"] != cards[1].pools()["denoise"]
    assert cards[0].pools()["vae_decode"] == cards[1].pools()["vae_decode"]


def test_missing_torchao_raises_an_error_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library([None, {}]) == set()
    assert library([{"quant_method": "torchao"}]) == {"torchao"}
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r"pip install 'unfuse\[torchao\]'"):
        library([{"quant_method": "torchao"}])


def test_one_part_of_a_model_may_be_quantized(copied: Copied, undivided: c.Undivided, stages: c.Load) -> None:
    folder = copied("wan-int8")
    shutil.rmtree(folder / "text_encoder")
    shutil.copytree(undivided.folder("wan") / "text_encoder", folder / "text_encoder")
    card = find(folder).model_spec("m", folder)
    assert {spec.kind: bool(spec.parallelism) for spec in card.pipeline.stages}["text_encode"]
    assert c.divided(stages(folder), c.wan_params(), {}, [1])
