"""Any other pipeline of diffusers, undivided: one stage, which does what a call of it does.

What can be asked for is what the call takes, as its source declares it. Of its components each is loaded by itself, as
those of other families are: from safetensors, by a class of diffusers or transformers; no code of a model is run.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from math import lcm
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict, replace
from typing_extensions import override

from unfuse.core.errors import ConfigError
from unfuse.core.modalities import LAST_FRAME, REFERENCES, UPLOAD, MediaLimits
from unfuse.core.model_spec import AcceptedInput, ModelSpec
from unfuse.core.plan import Params, Pipeline, StageSpec, Value
from unfuse.models.base import READ_ERRORS, Family, Loader, Report, RuntimeOptions, weights_ids
from unfuse.models.declared import VIDEO, DeclaredPipeline, declared, frame_rate, has_pipelines
from unfuse.models.defaults import RequestDefaults, ServingConfig, read_serving
from unfuse.stages.base import Stage
from unfuse.stages.specs import WHOLE
from unfuse.weights.folder import ModelFolder, choose_dtypes
from unfuse.weights.source import source_of

LIBRARIES = ("diffusers", "transformers")

TAKES = (
    "prompt", "negative_prompt", "height", "width", "num_frames", "num_inference_steps", "guidance_scale",
    "guidance_scale_2", "true_cfg_scale", "max_sequence_length", "strength", UPLOAD,
)  # fmt: skip
"""Parameters of requests that calls take under the same name."""

SEEN = {
    "Flux2KleinKVPipeline": False, "Flux2KleinPipeline": False, "Flux2Pipeline": False,
    "QwenImageEditPlusPipeline": True,
}  # fmt: skip
"""Classes whose call sees a list of pictures, and whether it needs one. For others a list is a batch of requests."""

LAST = "last_image"  # what calls call the last frame of a video
RATES = ("frame_rate", "fps")  # what calls call frames a second

BEYOND = (
    "mask_image", "mask", "video", "control_image", "control_video", "control_mode", "audio", "depth_map",
    "conditions", "source_prompt", "class_labels", "image_embeds", "target_image", "example_image",
)  # fmt: skip
"""What a call may be about that no request can bring."""

ASKED = {
    "size": "width", "width": "width", "height": "height",
    "negative_prompt": "negative_prompt", "guidance_scale": "guidance_scale",
    "num_inference_steps": "num_inference_steps",
}  # fmt: skip
"""Parameters of requests that are refused where a call does not take these."""

OWN_SIZES = ("Kandinsky5I2IPipeline",)
"""Classes that only make pictures of certain sizes, and replace any other requested size."""

ENLARGE = {"StableDiffusionUpscalePipeline": 4, "StableDiffusionLatentUpscalePipeline": 2}
"""Upscaling classes, with the factor for each side of the picture."""

MAIN = ("transformer", "unet", "prior", "decoder")  # what tells models apart; the first names a pool
SIDE, GUESSED_RATE, STEPS = 512, 16, 50  # defaults if neither the call nor a configuration has any
LENGTHS = 4  # a video may be so many times as long as is usual for it


class UndividedFamily(Family):
    """Models of any class that diffusers has and that makes pictures or videos of a prompt."""

    @override
    def card(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        model, serving = ModelFolder(folder), read_serving(folder, ServingConfig)
        found = _declared(model)
        components = self.components(model)
        dtypes = choose_dtypes(dtype, components)
        standard = _standard(model, found)
        limits = serving.bounds(_limits(model, found, serving.over(standard)))
        first = sorted(components, key=lambda one: (one not in MAIN, not model.weight_names(one)))
        pipeline = Pipeline((replace(WHOLE, components=tuple(first)),))
        said = sorted((key, str(value)) for key, value in model.index().items() if key not in components)
        recipe = f"whole {found.name} {sorted(dtypes.items())} {said}"
        return ModelSpec(
            name=name,
            source=source_of(folder),
            family=f"whole {found.name}",
            pipeline=pipeline,
            limits=asdict(limits),
            defaults=serving.within(limits, standard),
            quality=msgspec.to_builtins(serving.quality),
            vocabulary=serving.vocabulary,
            weights=weights_ids(model, pipeline, recipe),
            dtypes=dtypes,
            created=model.created,
            takes_lora=found.loras and not any(map(model.quantisation, components)),
            accepts=tuple(_accepts(found)),
            follows_picture=found.name not in OWN_SIZES and not _has_fixed_size(model),
            picture_scale=_picture_scale(found),
            undivided=_undivided(model, found, serving),
        )

    @override
    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        """Raises ConfigError with --offload, which a pipeline's choice of device would not follow."""
        from unfuse.stages.undivided import UndividedStage
        from unfuse.weights.adapters import AdapterFolder, LoadedPipelineAdapters

        model = ModelFolder(folder)
        found = _declared(model)
        if runtime.options.offload != "none":
            raise ConfigError(f"--offload cannot be used with a {found.name}: leave it out")
        loader = Loader(model, self.components(model), runtime, report)
        takes = {name: name for name in TAKES if name in found.takes}
        takes |= {rate: "fps" for rate in found.takes if rate in RATES}
        takes |= {LAST: LAST_FRAME} if LAST in found.takes else {}
        pipeline, loras, draws_there = _pipeline(loader, found.name), None, runtime.options.noise_device != "cpu"
        if runtime.loras and found.loras and not any(map(model.quantisation, loader.folder.components())):
            most = runtime.options.max_loras
            loras = LoadedPipelineAdapters(
                AdapterFolder(runtime.loras, runtime.kept), pipeline, lambda: pipeline, loader.device, most
            )
        uploads = (UPLOAD,) if UPLOAD in takes and SEEN.get(found.name, True) else ()
        return UndividedStage(pipeline, takes, loader.device, draws_there, loras, _picture_scale(found), uploads)

    @override
    def prepare(self, folder: Path) -> None:
        import_module("unfuse.stages.undivided")
        model = ModelFolder(folder)
        getattr(import_module("diffusers"), _declared(model).name)
        for library, name in self.components(model).values():
            getattr(import_module(library), name, None)

    def components(self, folder: ModelFolder) -> dict[str, tuple[str, str]]:
        """Library and class of each component. Raises ConfigError for classes of anybody else, which are never run."""
        found = {}
        for name in folder.components():
            library, kind = folder.index()[name]
            if library not in LIBRARIES and not has_pipelines(library):
                raise ConfigError(
                    f"model {folder.path}: component {name} is a class of its own ({str(library)[:60]}), and no code "
                    "that comes with a model is run: only classes of diffusers and transformers are"
                )
            found[name] = (library if library in LIBRARIES else f"diffusers.pipelines.{library}", kind)
        return found


def _undivided(model: ModelFolder, found: DeclaredPipeline, serving: ServingConfig) -> str:
    """Return why the model has one stage, and whether the frame rate of its videos is a guess."""
    said = f"unfuse has no stages for {found.name} with these parts, so each request runs as one call of it"
    if found.medium != VIDEO or "fps" in serving.over({}) or _frame_rate(model, found):
        return said
    return f"{said}; its rate of {GUESSED_RATE} frames a second is a guess: set defaults.fps in serving.json"


PREVIEWS = ("preview_every", "partial_images")  # what latents become is for a pipeline alone to say


def _declared(model: ModelFolder) -> DeclaredPipeline:
    """What diffusers says of the class. Raises ConfigError for one that it has not, and one that cannot be asked."""
    kind = model.index().get("_class_name")
    found = declared(kind) if isinstance(kind, str) else None
    if found is None:
        raise ConfigError(
            f"model {model.path} is a {str(kind)[:80]}, which is no pipeline that the installed diffusers has, and no "
            "code that comes with a model is run"
        )
    beside = ("image_embeds",) if UPLOAD in found.takes else ()
    beyond = [name for name in found.needs if name not in (*TAKES, *beside)]
    beyond += [name for name in BEYOND if name in found.takes and name not in beside]
    if not found.medium:
        reason = "makes neither pictures nor silent videos"
    elif "prompt" not in found.takes or "generator" not in found.takes:
        reason = f"takes no {'prompt' if 'prompt' not in found.takes else 'seed'}"
    elif beyond:
        reason = f"takes {beyond[0]}, which no request can bring"
    else:
        return found
    raise ConfigError(f"model {model.path} cannot be served: a {found.name} {reason}")


def _standard(model: ModelFolder, found: DeclaredPipeline) -> Params:
    """The defaults of the call, and where it leaves them to the configurations, theirs."""
    known = {name: value for name, value in found.takes.items() if name in RequestDefaults.__struct_fields__}
    standard = {name: value for name, value in known.items() if value is not None or name == "negative_prompt"}
    (height, width), parts = _usual_size(model), model.components()
    rate = _frame_rate(model, found) or GUESSED_RATE
    frames = model.config("transformer").get("sample_frames") if found.medium == VIDEO and "transformer" in parts else 1
    usual: Params = {
        "height": height,
        "width": width,
        "num_frames": frames or 1,
        "num_inference_steps": STEPS,
        "fps": rate,
    }
    return usual | standard


def _frame_rate(model: ModelFolder, found: DeclaredPipeline) -> Value:
    """Return the frames a second: the call's default, else that of the class; None for an unknown class."""
    asked = next((found.takes[name] for name in RATES if found.takes.get(name) is not None), None)
    transformer = model.config("transformer") if "transformer" in model.components() else {}
    return asked or frame_rate(found.name, model.index(), transformer)


def _usual_size(model: ModelFolder) -> tuple[int, int]:
    """Height and width in pixels of what the denoiser was trained on."""
    for name in MAIN:
        if name in model.components():
            with model.reading(name):
                size: Any = model.config(name).get("sample_size")
                height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
                if height and width:
                    return int(height) * _scale(model, "spatial"), int(width) * _scale(model, "spatial")
    return SIDE, SIDE


def _limits(model: ModelFolder, found: DeclaredPipeline, defaults: Params) -> MediaLimits:
    """Sides by what VAE and transformer do to them; what is not known of a pipeline is refused by its call."""
    patch, parts = 1, model.components()
    if "transformer" in parts:
        with model.reading("transformer"):
            size = model.config("transformer").get("patch_size") or 1
            patch = int(size[-1] if isinstance(size, list) else size)
    multiple = lcm(_scale(model, "spatial") * patch, 16 if "transformer" in parts else 8)
    if _picture_scale(found):
        multiple = _scale(model, "spatial") * patch  # the pipeline rounds a picture's sides down to this multiple
    frames, length = defaults.get("num_frames"), defaults.get("max_sequence_length")
    most = LENGTHS * frames if found.medium == VIDEO and isinstance(frames, int) else 1
    return MediaLimits(
        size_multiple=multiple,
        min_size=multiple,
        max_frames=most,
        frame_multiple=_scale(model, "temporal"),
        max_sequence_length=length if isinstance(length, int) else MediaLimits().max_sequence_length,
    )


def _picture_scale(found: DeclaredPipeline) -> int:
    """Return the scale of results relative to the start picture, for a call that takes no size; else 0."""
    return 0 if "width" in found.takes or UPLOAD not in found.takes else ENLARGE.get(found.name, 1)


def _has_fixed_size(model: ModelFolder) -> bool:
    """Return whether the denoiser has learned positional embeddings, which allow only one size."""
    if "transformer" not in model.components():
        return False
    return bool(model.config("transformer").get("use_learned_positional_embeddings"))


def _accepts(found: DeclaredPipeline) -> Iterator[AcceptedInput]:
    """The uploads that the call takes, and the request parameters that it does not.

    A size is taken if the picture can be resized.
    """
    if UPLOAD in found.takes:
        least, strength = int(SEEN.get(found.name, True)), found.takes.get("strength")
        if found.name in SEEN:
            yield AcceptedInput(UPLOAD, "reference", least, len(REFERENCES))
        elif isinstance(strength, float):
            yield AcceptedInput(UPLOAD, "redraw", least, strength=strength)
        else:
            yield AcceptedInput(UPLOAD, min=least)
    if LAST in found.takes:
        yield AcceptedInput(LAST_FRAME, "end")
    sized = ("size", "width", "height") if _picture_scale(found) else ()
    lacks = [asked for asked, own in ASKED.items() if own not in found.takes and asked not in sized]
    for name in (*lacks, *PREVIEWS):
        yield AcceptedInput(name, max=0)


def _scale(model: ModelFolder, axis: str) -> int:
    """Pixels along a side of one latent, or the frames that it is of."""
    name = next((name for name in ("vae", "movq", "vqvae") if name in model.components()), None)
    if name is None:
        return 8 if axis == "spatial" else 1
    config = model.config(name)
    with model.reading(name):
        if said := config.get(f"{axis}_compression_ratio") or config.get(f"scale_factor_{axis}"):
            return int(said)
        if halves := config.get("spatio_temporal_scaling"):
            return int(config["patch_size" if axis == "spatial" else "patch_size_t"]) << sum(map(bool, halves))
        blocks = config.get("block_out_channels") or config.get("encoder_block_out_channels") or range(4)
        return 1 << (len(blocks) - 1) if axis == "spatial" else 1


def _pipeline(loader: Loader, name: str) -> Any:
    """The pipeline with its components, and what else model_index.json says of it."""
    import diffusers

    kind, index = getattr(diffusers, name), loader.folder.index()
    known = inspect.signature(kind.__init__).parameters
    parts = loader.folder.components()
    given = {key: value for key, value in index.items() if key in known and key not in parts and not _is_none(value)}
    given |= {key: None for key, value in index.items() if key in known and _is_none(value)}
    pipeline = kind(**given, **{part: component(part, loader) for part in parts if part in known})
    if reason := misfit(pipeline):
        raise ConfigError(f"model {loader.folder.path}: {reason}, so diffusers cannot run it either")
    for one in (pipeline, *vars(pipeline).values()):
        if isinstance(one, diffusers.DiffusionPipeline):
            one.set_progress_bar_config(disable=True)
    return pipeline


def _is_none(entry: object) -> bool:
    """Whether that is a component which the model does not have."""
    return isinstance(entry, list) and not any(entry)


def component(name: str, loader: Loader) -> Any:
    """A component, ready for pipelines and their blocks."""
    if not loader.folder.weight_names(name):
        return loader.plain(name)
    return casting(loader.vae()) if name == "vae" else loader.model(name)


def casting(vae: Any) -> Any:
    """A VAE that takes latents of any dtype: some pipelines do not cast them."""
    decode = vae.decode
    vae.decode = lambda latents, *given, **named: decode(latents.to(vae.dtype), *given, **named)
    return vae


ALWAYS_USED = frozenset({"init_noise_sigma", "order", "scale_model_input", "set_begin_index", "step"})
"""Attributes of a noise scheduler that a pipeline uses in every call, if it uses them at all."""


def misfit(pipeline: Any) -> str:
    """Return why diffusers' pipeline would fail with its noise scheduler, as a sentence; "" if it may work.

    The used attributes and arguments are found in the pipeline's source. Uses that depend on a request are not checked.
    """
    scheduler = getattr(pipeline, "scheduler", None)
    if scheduler is None:
        return ""
    source = inspect.getsource(type(pipeline))
    guarded = re.findall(r"hasattr\(\s*self\.scheduler,\s*\"(\w+)\"", source)
    used = ALWAYS_USED & {*re.findall(r"self\.scheduler\.(\w+)", source)} - {*guarded}
    who, what = type(pipeline).__name__, type(scheduler).__name__
    for name in sorted(used):
        if not hasattr(scheduler, name):
            return f"{who} uses {name} of its noise scheduler, which {what} does not have"
    taken = {*inspect.signature(scheduler.set_timesteps).parameters}
    if "stage_index" in taken and "stage_index" not in source:
        return f"{what} needs a pipeline with stages (stage_index), which {who} does not have"
    given = _always_given(pipeline.__call__)
    if "use_flow_sigmas" in source and scheduler.config.get("use_flow_sigmas"):
        given.discard("sigmas")
    for name in sorted(given - taken):
        return f"{who} passes {name} to its noise scheduler, which {what} with this configuration does not accept"
    if not given or (error := _rejection(scheduler, given)) is None:
        return ""
    if "mu" in given and _rejection(scheduler, given - {"mu"}) is None:
        return f"{who} passes a shift (mu) to its noise scheduler, for which {what} needs use_dynamic_shifting"
    return f"{who} passes {' and '.join(sorted(given))} to its noise scheduler, which {what} rejects ({error!r})"


def _rejection(scheduler: Any, given: set[str]) -> Exception | None:
    """Return the error that a noise scheduler raises for such arguments (`sigmas`, `mu`); None if it accepts them.

    `sigmas` are tried as an array and as a list, since pipelines pass either. A shift (`mu`) is also given to a
    scheduler that requires one. Its configuration may have fields that belong to other classes.
    """
    import numpy as np

    takes_shift = "mu" in inspect.signature(scheduler.set_timesteps).parameters
    shifts = takes_shift and scheduler.config.get("use_dynamic_shifting")
    mu = {"mu": 0.5} if "mu" in given or shifts else {}
    sigmas = np.linspace(1.0, 0.25, 4)
    tried: list[dict[str, Any]] = [{"num_inference_steps": 4}]
    if "sigmas" in given:
        tried = [{"sigmas": sigmas}, {"sigmas": sigmas.tolist()}]
    found: Exception | None = None
    for arguments in tried:
        try:
            copy.deepcopy(scheduler).set_timesteps(**arguments, **mu)
        except READ_ERRORS as error:
            found = error
        else:
            return None
    return found


def _always_given(call: Any) -> set[str]:
    """Return which of `sigmas` and `mu` a pipeline's call passes to its noise scheduler in every request."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(call)))).body
    assert isinstance(function, ast.FunctionDef)
    targets = [target for one in function.body if isinstance(one, ast.Assign) for target in one.targets]
    assigned = {target.id for target in targets if isinstance(target, ast.Name)}
    calls = [one for one in ast.walk(function) if isinstance(one, ast.Call)]
    keywords = [word for one in calls if ast.unparse(one.func) == "retrieve_timesteps" for word in one.keywords]
    named = {str(word.arg) for word in keywords if isinstance(word.value, ast.Name) and word.value.id in assigned}
    return named & {"sigmas", "mu"}


FAMILY = UndividedFamily()
