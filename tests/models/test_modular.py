"""The general family: its table says what diffusers declares, and a class is listed only if it was compared."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import conftest as c
from tests.models.test_exact import BLOCKS
from unfuse.core.errors import ConfigError, PermanentError
from unfuse.core.modalities import IMAGE_UPLOADS
from unfuse.core.plan import Pipeline
from unfuse.models import FAMILIES, find
from unfuse.models.base import Loader, RuntimeOptions
from unfuse.models.modular import BLOCKS as NAMES, KLEIN, KREA, SIZES, Modular
from unfuse.stages.base import StageInput
from unfuse.weights.offload import offload_model

UNREAD = {"condition_images"}
OTHER = {"generator", "latents", "output_type"}
"""Inputs that are neither parameters nor what an earlier stage made."""


def pipeline_of(kind: str, undivided: c.Undivided) -> tuple[Modular, Pipeline]:
    family = find(undivided.folder(kind))
    assert isinstance(family, Modular)
    return family, family.model_spec("m", undivided.folder(kind)).pipeline


@pytest.mark.parametrize("kind", BLOCKS)
def test_stage_specs_match_the_inputs_declared_by_diffusers_blocks(kind: str, undivided: c.Undivided) -> None:
    import diffusers

    family, pipeline = pipeline_of(kind, undivided)
    blocks = getattr(diffusers, family.blocks[kind.endswith("distilled")])().sub_blocks
    made: set[str] = set()
    for spec in pipeline.stages:
        block = blocks[NAMES[spec.kind]]
        declared = {part.name for part in block.inputs}
        loaded = {part.name for part in block.expected_components if part.default_creation_method != "from_config"}
        guided = any(part.name == "guider" for part in block.expected_components)

        assert set(spec.components) == loaded
        assert {*spec.inputs} - {SIZES} <= declared
        assert {*spec.outputs} - {SIZES} == ({part.name for part in block.outputs} if spec.outputs else set()) - UNREAD
        if spec.only_with:
            assert (spec.depends_on_params, spec.only_with) == (IMAGE_UPLOADS, "image")
        elif spec.depends_on_params:
            assert set(spec.depends_on_params) - {"guidance_scale"} == declared & {
                "prompt",
                "negative_prompt",
                "max_sequence_length",
            }
            assert ("guidance_scale" in spec.depends_on_params) == guided
        made |= set(spec.outputs)
        produced = {part.name for inner in block.sub_blocks.values() for part in inner.intermediate_outputs}
        assert set(block.required_inputs) - made - produced <= {"prompt", *c.wan_params()} | OTHER, "all that it needs"


def test_all_modular_pipelines_have_jobs_in_the_exactness_tests() -> None:
    """By test_exact, whose jobs these are."""
    import diffusers

    ours = {name for name, place in FAMILIES.items() if ".modular:" in place}
    models = {job.model for job in c.JOBS}

    assert ours == {KLEIN.source[1], KREA.source[1]}
    assert set(BLOCKS) <= models
    assert all(issubclass(getattr(diffusers, name), diffusers.DiffusionPipeline) for name in ours)


def test_model_spec_has_the_defaults_of_the_pipeline_call(copied: Callable[[str], Path]) -> None:
    krea, klein = (find(folder).model_spec("m", folder) for folder in (copied("krea"), copied("klein")))

    assert krea.defaults == {
        "height": 1024,
        "width": 1024,
        "num_frames": 1,
        "num_inference_steps": 28,
        "guidance_scale": 4.5,
        "max_sequence_length": 512,
        "negative_prompt": None,
    }
    assert (klein.defaults["height"], klein.defaults["guidance_scale"]) == (512, 4.0)
    assert klein.limits["size_multiple"] == 8


def test_distilled_model_reads_no_negative_prompt_and_shares_only_vae_pool(
    undivided: c.Undivided,
) -> None:
    guided, distilled = (
        find(folder).model_spec("m", folder) for folder in map(undivided.folder, ("krea", "krea-distilled"))
    )

    assert distilled.pipeline.stages[0].outputs == ("prompt_embeds", "prompt_embeds_mask")
    assert distilled.pipeline.stages[0].depends_on_params == ("prompt", "max_sequence_length")
    shared = {name for name, pool in guided.pools().items() if distilled.pools()[name] == pool}
    assert shared == {"vae_decode"}


@pytest.mark.parametrize(
    ("file", "changes", "sentence"),
    [
        ("model_index.json", {"patch_size": 4}, "patch_size is 4, but only 2 is supported"),
        ("model_index.json", {"text_encoder_select_layers": [1]}, "text_encoder_select_layers is [1], but only"),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderKL"]}, "supported: diffusers AutoencoderKLQwenImage"),
        ("transformer/config.json", {"text_hidden_dim": None}, "transformer configuration: TypeError"),
    ],
)
def test_unsupported_components_or_configs_raise_config_error(
    file: str, changes: dict[str, Any], sentence: str, copied: Callable[[str], Path]
) -> None:
    folder = copied("krea")
    c.edit(folder / file, **changes)

    with pytest.raises(ConfigError, match=re.escape(sentence)):
        find(folder).model_spec("mine", folder)


@pytest.mark.parametrize("offload", ["model", "sequential"])
@pytest.mark.parametrize("kind", ["krea", "klein"])
def test_blocks_with_offload_make_the_same_bytes(
    kind: str, offload: Any, undivided: c.Undivided, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host stands in for a GPU: the block finds the device in the offload hooks."""
    folder, host = undivided.folder(kind), torch.device("cpu")

    def results(place: Callable[[Loader, Any], Any]) -> list[tuple[torch.Tensor, np.ndarray]]:
        monkeypatch.setattr(Loader, "_place", lambda loader, model, how, **_: place(loader, model))
        card = find(folder).model_spec("m", folder)
        runtime = RuntimeOptions("cpu", card.dtypes, c.EXACT, shared_objects={})
        stages = {spec.name: find(folder).load(spec, folder, runtime) for spec in card.pipeline.stages}
        return [*c.divided(stages, c.block_params(), {}, [1])]

    ((expected, images),) = results(lambda loader, model: model)
    ((latents, offloaded_images),) = results(lambda loader, model: offload_model(model, host, offload))
    assert torch.equal(latents, expected) and np.array_equal(offloaded_images, images)


@pytest.mark.parametrize(
    ("stage", "params", "tensors", "sentence"),
    [
        ("text_encode", {"prompt": None}, {}, "parameter prompt must be of type str"),
        ("text_encode", {"guidance_scale": None}, {}, "parameter guidance_scale must be of type float"),
        ("text_encode", {"negative_prompt": 3}, {}, "parameter negative_prompt must be of type str"),
        ("denoise", {}, {"prompt_embeds": (1, 21, 12, 16)}, "input prompt_embeds_mask is missing"),
        ("denoise", {"seed": None}, {}, "parameter seed must be of type int"),
        ("denoise", {"num_inference_steps": 2.5}, {}, "parameter num_inference_steps must be of type int"),
        ("vae_decode", {}, {}, "input latents is missing"),
        ("vae_decode", {"height": None}, {"latents": (1, 4, 1, 8, 8)}, "parameter height must be of type int"),
    ],
)
def test_stages_reject_missing_inputs_and_invalid_parameters(
    stage: str,
    params: dict[str, Any],
    tensors: dict[str, tuple[int, ...]],
    sentence: str,
    undivided: c.Undivided,
    stages: c.Load,
) -> None:
    task = StageInput({**c.block_params(), **params}, {name: torch.zeros(shape) for name, shape in tensors.items()})

    with pytest.raises(PermanentError, match=sentence):
        stages(undivided.folder("krea"))[stage].verify(task)


def test_denoise_batch_key_depends_on_seed_and_not_on_prompt(undivided: c.Undivided, stages: c.Load) -> None:
    denoise = stages(undivided.folder("krea"))["denoise"]

    usual, reworded, other = (
        denoise.batch_key(StageInput(params, {}))
        for params in (c.block_params(), c.block_params(prompt="read by another stage"), c.block_params(1))
    )
    assert usual == reworded != other


@pytest.mark.parametrize("kind", BLOCKS)
def test_denoise_writes_no_progress_bar_to_stderr(
    kind: str, undivided: c.Undivided, stages: c.Load, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else a worker's log is full of progress bars."""
    loaded, params = stages(undivided.folder(kind)), c.block_params()
    encoded = c.encode(loaded, params, {})
    capfd.readouterr()

    c.run(loaded["denoise"], params, encoded)

    assert capfd.readouterr().err == ""


def test_non_finite_pixels_raise_permanent_error(undivided: c.Undivided, stages: c.Load) -> None:
    latents = torch.full((1, 4, 1, 8, 8), torch.nan)

    with pytest.raises(PermanentError, match="pixels that are not finite"):
        c.run(stages(undivided.folder("krea"))["vae_decode"], c.block_params(), {"latents": latents})


@pytest.mark.parametrize("kind", ["klein", "krea"])
def test_modular_model_spec_does_not_support_lora(kind: str, undivided: c.Undivided) -> None:
    """Its card says so, where a family of our own says the other."""
    for model, takes in ((kind, False), ("wan", True)):
        folder = undivided.folder(model)
        assert find(folder).model_spec("m", folder).takes_lora == takes
