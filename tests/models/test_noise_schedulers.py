"""Every noise scheduler of diffusers: served as diffusers serves it, or refused in a sentence."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from numpy.typing import NDArray

from tests.answers.sampled import scheduled
from tests.forking import isolated
from tests.models import conftest as c
from tools import tiny, tiny_whole
from unfuse.core.errors import ConfigError, UnfuseError
from unfuse.core.plan import Params
from unfuse.core.registry import resolve
from unfuse.models import FAMILIES, find, read_model_spec
from unfuse.models.base import DiffusersFamily, Loader, RuntimeOptions, unreadable_field
from unfuse.models.declared import declared_pipeline, scheduler_classes
from unfuse.models.noise_schedulers import EULER, MULTISTEP, draws_noise, is_split
from unfuse.models.undivided_family import misfit
from unfuse.weights.folder import ModelFolder

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "answers" / "undivided.py"

SPLIT = {
    "HunyuanVideoPipeline": (EULER, "UniPCMultistepScheduler"),
    "StableDiffusionXLPipeline": ("EulerDiscreteScheduler",),
    "WanImageToVideoPipeline": (EULER, *MULTISTEP),
    "WanPipeline": (EULER, *MULTISTEP),
}
"""Noise schedulers whose steps a family's stages make, where these are not flow matching by Euler alone."""


def minimal(folder: Path, name: str, **config: Any) -> ModelFolder:
    """Return a folder of which only the noise scheduler is there, of that class and configuration."""
    (folder / "scheduler").mkdir(parents=True, exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": name, **config}))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "M", "scheduler": ["diffusers", name]}))
    return ModelFolder(folder)


def test_all_diffusers_noise_scheduler_names_are_parsed_from_source() -> None:
    public = {name for name in dir(diffusers) if name.endswith("Scheduler") and name in diffusers.__all__}
    kinds = {name for name in public if inspect.isclass(found := getattr(diffusers, name)) and _is_scheduler(found)}

    assert len(kinds) > 40
    assert kinds <= scheduler_classes() | {"KarrasDiffusionSchedulers"}


def _is_scheduler(kind: type) -> bool:
    return issubclass(kind, SchedulerMixin)


def families() -> dict[str, DiffusersFamily]:
    """The families that have stages for a pipeline of diffusers, by its class."""
    found = {name: resolve(FAMILIES, name, "family") for name in FAMILIES}
    return {name: family for name, family in found.items() if isinstance(family, DiffusersFamily)}


def test_unsupported_noise_schedulers_use_the_undivided_pipeline(tmp_path: Path) -> None:
    for pipeline, family in families().items():
        assert declared_pipeline(pipeline) is not None, "the rest needs an undivided pipeline"
        for name in sorted(scheduler_classes()):
            known = name in SPLIT.get(pipeline, (EULER,))
            assert is_split(minimal(tmp_path, name), family.classes) is known, (pipeline, name)


@pytest.mark.parametrize(
    ("config", "draws"),
    [
        ({}, False),
        ({"stochastic_sampling": True}, True),
        ({"stochastic_sampling": False}, False),
        ({"algorithm_type": "sde-dpmsolver++"}, True),
        ({"algorithm_type": "dpmsolver++"}, False),
    ],
)
def test_stochastic_noise_scheduler_is_detected_from_its_config(config: dict[str, Any], draws: bool) -> None:
    assert draws_noise(config) is draws


@pytest.mark.row("K5")
def test_stochastic_noise_schedulers_use_the_undivided_pipeline(tmp_path: Path) -> None:
    for pipeline, family in families().items():
        for name in family.classes["scheduler"][1]:
            for drawing in ({"stochastic_sampling": True}, {"algorithm_type": "sde-dpmsolver++"}):
                assert not is_split(minimal(tmp_path, name, **drawing), family.classes), pipeline


@pytest.mark.row("P47")
@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("EDMEulerScheduler", {"sigma_min": None}, "scheduler_config.json says sigma_min is null, correct that field"),
        ("DDIMScheduler", {"beta_schedule": "none"}, 'says beta_schedule is "none", correct that field'),
        ("DDIMScheduler", {"num_train_timesteps": "many"}, 'says num_train_timesteps is "many"'),
        ("EulerDiscreteScheduler", {"use_beta_sigmas": True}, "pip install scipy"),
        ("LMSDiscreteScheduler", {}, "pip install scipy"),
        ("DPMSolverSDEScheduler", {}, "pip install torchsde"),
        ("OwnScheduler", {}, "is a OwnScheduler, which diffusers does not have"),
    ],
)
def test_invalid_noise_scheduler_config_raises_one_line_error(
    name: str, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    loader = Loader(
        minimal(tmp_path, name, **config), {"scheduler": ("diffusers", name)}, RuntimeOptions("cpu", {}), None
    )

    with pytest.raises(ConfigError, match=reason) as refused:
        loader.plain("scheduler")
    assert "\n" not in str(refused.value) and "scheduler" in str(refused.value)


def test_no_config_field_is_named_if_several_are_invalid() -> None:
    several = {"num_train_timesteps": "many", "beta_schedule": "none"}

    assert unreadable_field(diffusers.DDIMScheduler, several) == ""
    assert unreadable_field(diffusers.DDIMScheduler, {"beta_schedule": "none"}) == "beta_schedule"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of diffusers' schedulers under numpy 2
@pytest.mark.parametrize(
    ("pipeline", "kind", "config", "reason"),
    [
        ("FluxPipeline", "FlowMatchHeunDiscreteScheduler", {}, "passes mu to its noise scheduler, which FlowMatchHeun"),
        ("FluxPipeline", "DDIMScheduler", {}, "uses set_begin_index of its noise scheduler, which DDIM"),
        ("FluxPipeline", "DPMSolverMultistepScheduler", {"use_flow_sigmas": True}, "needs use_dynamic_shifting"),
        ("FluxPipeline", "UniPCMultistepScheduler", {"use_flow_sigmas": True}, ""),
        ("FluxPipeline", "UniPCMultistepScheduler", {"use_flow_sigmas": True, "use_dynamic_shifting": True}, ""),
        ("LTXPipeline", "UniPCMultistepScheduler", {"use_flow_sigmas": True}, ""),
        ("LTXPipeline", "UniPCMultistepScheduler", {}, "passes mu and sigmas to its noise scheduler, which UniPC"),
        ("HunyuanVideoPipeline", "EDMEulerScheduler", {}, "passes sigmas to its noise scheduler, which EDMEuler"),
        (
            "HunyuanVideoPipeline",
            "EulerDiscreteScheduler",
            {"use_dynamic_shifting": True},
            "",
        ),  # a field of other classes
        ("QwenImagePipeline", "DPMSolverMultistepScheduler", {"use_dynamic_shifting": True}, "passes sigmas to its"),
        ("StableDiffusionPipeline", "FlowMatchEulerDiscreteScheduler", {}, "uses init_noise_sigma"),
        ("StableDiffusionPipeline", "LCMScheduler", {}, ""),
        ("StableDiffusion3Pipeline", "FlowMatchHeunDiscreteScheduler", {}, ""),
        ("WanPipeline", "FlowMatchHeunDiscreteScheduler", {}, ""),
        ("WanPipeline", "HeliosScheduler", {}, "needs a pipeline with stages"),
    ],
)
def test_incompatible_noise_scheduler_is_detected_before_a_request(
    pipeline: str, kind: str, config: dict[str, Any], reason: str
) -> None:
    made = object.__new__(getattr(diffusers, pipeline))
    object.__setattr__(made, "scheduler", getattr(diffusers, kind).from_config(config))

    assert misfit(made) == reason or (reason and reason in misfit(made))


def made(folder: Path, params: Params) -> NDArray[np.uint8]:
    """Pixels of what the stages make of a request. Raises what they raise."""
    card, family = read_model_spec("m", folder), find(folder)
    tensors: dict[str, Any] = {}
    for spec in card.pipeline.stages:
        if not spec.only_with:
            stage = family.load(spec, folder, RuntimeOptions("cpu", card.dtypes))
            output = c.run(stage, {**card.defaults, **params}, {name: tensors.get(name) for name in spec.inputs})
            tensors |= output.tensors
    return c.frames(output.media)


LACKING = ("CosineDPMSolverMultistepScheduler", "DPMSolverSDEScheduler", "LMSDiscreteScheduler")
"""Schedulers that need a package which is not installed."""

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
"""What a flow model says in the configurations of schedulers that are not for flows alone."""


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # what diffusers' schedulers say of their configurations
@pytest.mark.row("K10", "K5")
@pytest.mark.parametrize("kind", ["wan", "flux", "qwen-image", "hunyuan-video", "ltx", "sd3", "z-image", "sdxl", "sd"])
def test_each_noise_scheduler_matches_diffusers_pixels_or_is_rejected(kind: str, tmp_path: Path) -> None:
    """Given a model with each noise scheduler in turn; the reference is a process without unfuse."""
    source = (tiny.build if kind in tiny.KINDS else tiny_whole.build)(kind, tmp_path / "source")
    own = json.loads((source / "scheduler" / "scheduler_config.json").read_text())
    flows = "num_train_timesteps" in own and "beta_start" not in own
    params = {"prompt": "cats", "height": 32, "width": 32, "num_inference_steps": 4, "max_sequence_length": 24}
    params |= {"num_frames": 5} if kind in ("wan", "hunyuan-video", "ltx") else {}
    jobs = []
    for name in sorted(scheduler_classes()):
        known = inspect.signature(getattr(diffusers, name, object).__init__).parameters
        if name in LACKING or not known.keys() - {"self", "args", "kwargs"}:
            continue
        told = {**own, **(FLOW if flows and "use_flow_sigmas" in known else {})}
        config = {key: value for key, value in told.items() if key in known}
        folder = scheduled(source, tmp_path / name, name, **config)
        jobs.append({"name": name, "folder": str(folder), "params": params, "seed": 5, "may_fail": True})
    (out := tmp_path / "out").mkdir()
    told = json.dumps([{"dtype": "float32", **job} for job in jobs])
    isolated(SCRIPT, str(out), folder=out, given=told)

    equal = 0
    for job in jobs:
        pixels = out / f"{job['name']}.npy"
        try:
            ours = made(Path(str(job["folder"])), {**params, "seed": 5, "output_format": "png"})
        except (UnfuseError, RuntimeError):  # schedulers of texts fail at the shapes of latents
            assert not pixels.exists(), f"diffusers makes a picture with {job['name']}"
            continue
        assert pixels.exists() and np.array_equal(ours, np.load(pixels)), job["name"]
        equal += 1
    assert equal >= 3  # as many as Qwen-Image's pipeline can have, the least of all
