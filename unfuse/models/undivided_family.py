"""Any other diffusers pipeline, served undivided: one stage, which runs the pipeline's call.

The call's parameters in diffusers' source determine what a request can set. Each component is loaded by itself, as in
other families: from safetensors, by a class of diffusers or transformers. No code of a model is run.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator
from importlib import import_module
from math import lcm
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict, replace
from typing_extensions import override

from unfuse.core.errors import ConfigError
from unfuse.core.modalities import IMAGE_UPLOADS, LAST_FRAME, UPLOAD, MediaLimits
from unfuse.core.model_spec import AcceptedInput, ModelSpec
from unfuse.core.offload_options import offload_of
from unfuse.core.plan import Params, Pipeline, StageSpec, Value
from unfuse.models.base import READ_ERRORS, Family, Loader, Report, RuntimeOptions, weights_ids
from unfuse.models.declared import VIDEO, DeclaredPipeline, declared_pipeline, frame_rate, has_pipelines
from unfuse.models.defaults import RequestDefaults, ServingConfig, read_serving
from unfuse.stages.base import Stage
from unfuse.stages.specs import UNDIVIDED
from unfuse.weights.folder import ModelFolder, choose_dtypes
from unfuse.weights.source import source_of

#: Libraries whose classes are used for components.
LIBRARIES = ("diffusers", "transformers")

#: Parameters of requests that calls have under the same name.
PASSED_PARAMETERS = (
    "prompt",
    "negative_prompt",
    "height",
    "width",
    "num_frames",
    "num_inference_steps",
    "guidance_scale",
    "guidance_scale_2",
    "true_cfg_scale",
    "max_sequence_length",
    "strength",
    UPLOAD,
)

#: Classes whose call has a list of reference images, and whether it needs one. For others a list is a batch.
REFERENCE_CLASSES = {
    "Flux2KleinKVPipeline": False,
    "Flux2KleinPipeline": False,
    "Flux2Pipeline": False,
    "QwenImageEditPlusPipeline": True,
}

#: The calls' parameter for the last frame of a video.
LAST = "last_image"

#: The calls' parameters for frames per second.
RATES = ("frame_rate", "fps")

#: Parameters of calls that no request can set.
BEYOND = (
    "mask_image",
    "mask",
    "video",
    "control_image",
    "control_video",
    "control_mode",
    "audio",
    "depth_map",
    "conditions",
    "source_prompt",
    "class_labels",
    "image_embeds",
    "target_image",
    "example_image",
)

#: Parameters of requests that are refused if the call does not have the parameter on the right.
REQUIRED_PARAMETERS = {
    "size": "width",
    "width": "width",
    "height": "height",
    "negative_prompt": "negative_prompt",
    "guidance_scale": "guidance_scale",
    "num_inference_steps": "num_inference_steps",
}

#: Classes that make only images of certain sizes, and replace any other requested size.
FIXED_SIZES = ("Kandinsky5I2IPipeline",)

#: Upscaling classes, with the factor for each side of the image.
ENLARGE = {"StableDiffusionUpscalePipeline": 4, "StableDiffusionLatentUpscalePipeline": 2}

#: The components that distinguish models. The first one that a model has names the model's pool.
MAIN = ("transformer", "unet", "prior", "decoder")

#: Default side in pixels, if neither the call nor a configuration has one.
SIDE = 512
#: Default frames per second.
GUESSED_RATE = 16
#: Default number of denoising steps.
STEPS = 50

#: The longest video, as a multiple of the default length.
LENGTHS = 4


class UndividedFamily(Family):
    """Models of any diffusers class that makes images or videos from a prompt."""

    @override
    def model_spec(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        model = ModelFolder(folder)
        serving = read_serving(folder, ServingConfig)
        declaration = _declared(model)
        components = self.components(model)
        dtypes = choose_dtypes(dtype, components)
        standard = _standard(model, declaration)
        limits = serving.bounds(_limits(model, declaration, serving.with_standard(standard)))

        # The first component of a stage names its pool, so it should be one that distinguishes models.
        ordered = sorted(components, key=lambda name: (name not in MAIN, not model.weight_names(name)))
        pipeline = Pipeline((replace(UNDIVIDED, components=tuple(ordered)),))
        settings = sorted((key, str(value)) for key, value in model.index().items() if key not in components)
        recipe = f"whole {declaration.name} {sorted(dtypes.items())} {settings}"
        return ModelSpec(
            name=name,
            source=source_of(folder),
            family=f"whole {declaration.name}",
            pipeline=pipeline,
            limits=asdict(limits),
            defaults=serving.with_limits(limits, standard),
            quality=msgspec.to_builtins(serving.quality),
            vocabulary=serving.vocabulary,
            weights=weights_ids(model, pipeline, recipe),
            dtypes=dtypes,
            classes={ordered[0]: declaration.name},
            created=model.created,
            takes_lora=declaration.loras and not any(map(model.quantization, components)),
            accepts=tuple(_accepts(declaration)),
            follows_picture=declaration.name not in FIXED_SIZES and not _has_fixed_size(model),
            picture_scale=_picture_scale(declaration),
            undivided_reason=_undivided_reason(model, declaration, serving),
        )

    @override
    def not_offloaded(self, folder: ModelFolder) -> Collection[str]:
        return _declared(folder).not_offloaded

    @override
    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        from unfuse.stages.undivided import UndividedStage
        from unfuse.weights.adapters import AdapterFolder, LoadedPipelineAdapters

        model = ModelFolder(folder)
        declaration = _declared(model)
        loader = Loader(model, self.components(model), runtime, report)
        arguments = {name: name for name in PASSED_PARAMETERS if name in declaration.parameters}
        arguments |= {rate: "fps" for rate in declaration.parameters if rate in RATES}
        arguments |= {LAST: LAST_FRAME} if LAST in declaration.parameters else {}
        pipeline = _pipeline(loader, declaration)
        draws_on_device = runtime.options.noise_device != "cpu"

        loras = None
        if runtime.loras and declaration.loras and not any(map(model.quantization, loader.folder.components())):
            if any(offload_of(runtime.options.offload, name) == "sequential" for name in loader.folder.components()):
                raise ConfigError("--loras cannot be combined with --offload sequential: use --offload model")
            max_loras = runtime.options.max_loras
            files = AdapterFolder(runtime.loras, runtime.adapter_folder)
            loras = LoadedPipelineAdapters(files, pipeline, lambda: pipeline, loader.device, max_loras)

        required_uploads = (UPLOAD,) if UPLOAD in arguments and REFERENCE_CLASSES.get(declaration.name, True) else ()
        return UndividedStage(
            pipeline,
            arguments,
            loader.device,
            draws_on_device,
            loras,
            _picture_scale(declaration),
            required_uploads,
            runtime.options,
        )

    @override
    def prepare(self, folder: Path) -> None:
        import_module("unfuse.stages.undivided")
        model = ModelFolder(folder)
        getattr(import_module("diffusers"), _declared(model).name)
        for library, name in self.components(model).values():
            getattr(import_module(library), name, None)

    def components(self, folder: ModelFolder) -> dict[str, tuple[str, str]]:
        """Return the library and class of each component.

        Raises ConfigError for classes outside diffusers and transformers, which are never run.
        """
        classes = {}
        for name in folder.components():
            library, kind = folder.index()[name]
            if library not in LIBRARIES and not has_pipelines(library):
                raise ConfigError(
                    f"model {folder.path}: component {name} has a custom class ({str(library)[:60]}), and custom code "
                    "of models is not run: only classes of diffusers and transformers are supported"
                )
            classes[name] = (library if library in LIBRARIES else f"diffusers.pipelines.{library}", kind)
        return classes


def _undivided_reason(model: ModelFolder, declaration: DeclaredPipeline, serving: ServingConfig) -> str:
    """Return why the model has one stage, and whether its frame rate is assumed."""
    reason = f"{declaration.name} has no stages for these components, so each request is one call of the pipeline"
    if declaration.modality != VIDEO or "fps" in serving.with_standard({}) or _frame_rate(model, declaration):
        return reason
    return f"{reason}; its frame rate is assumed to be {GUESSED_RATE}: set defaults.fps in serving.json"


#: Parameters for previews, which are not supported: only the pipeline can decode its latents.
PREVIEWS = ("preview_every", "partial_images")


def _declared(model: ModelFolder) -> DeclaredPipeline:
    """Return the declaration of the model's class in diffusers' source.

    Raises ConfigError if diffusers does not have the class, or if its call needs an input that requests cannot set.
    """
    class_name = model.index().get("_class_name")
    declaration = declared_pipeline(class_name) if isinstance(class_name, str) else None
    if declaration is None:
        raise ConfigError(
            f"model {model.path} is a {str(class_name)[:80]}, which is not a pipeline of the installed diffusers, and "
            "custom code of models is not run"
        )

    # A call with an image computes these embeddings from it.
    optional = ("image_embeds",) if UPLOAD in declaration.parameters else ()
    unsupported = [name for name in declaration.required_inputs if name not in (*PASSED_PARAMETERS, *optional)]
    unsupported += [name for name in BEYOND if name in declaration.parameters and name not in optional]
    if not declaration.modality:
        reason = "generates neither pictures nor videos without sound"
    elif "prompt" not in declaration.parameters or "generator" not in declaration.parameters:
        reason = f"takes no {'prompt' if 'prompt' not in declaration.parameters else 'seed'}"
    elif unsupported:
        reason = f"takes {unsupported[0]}, which requests cannot set"
    else:
        return declaration
    raise ConfigError(f"model {model.path} cannot be served: a {declaration.name} {reason}")


def _standard(model: ModelFolder, declaration: DeclaredPipeline) -> Params:
    """Return the defaults of the call or, where it has none, of the configurations."""
    known = {name: value for name, value in declaration.parameters.items() if name in RequestDefaults.__struct_fields__}
    standard = {name: value for name, value in known.items() if value is not None or name == "negative_prompt"}

    height, width = _default_size(model)
    components = model.components()
    rate = _frame_rate(model, declaration) or GUESSED_RATE
    frames = (
        model.config("transformer").get("sample_frames")
        if declaration.modality == VIDEO and "transformer" in components
        else 1
    )
    defaults: Params = {
        "height": height,
        "width": width,
        "num_frames": frames or 1,
        "num_inference_steps": STEPS,
        "fps": rate,
    }
    return defaults | standard


def _frame_rate(model: ModelFolder, declaration: DeclaredPipeline) -> Value:
    """Return the frames per second of the call or class; None if unknown."""
    rate = next((declaration.parameters[name] for name in RATES if declaration.parameters.get(name) is not None), None)
    transformer = model.config("transformer") if "transformer" in model.components() else {}
    return rate or frame_rate(declaration.name, model.index(), transformer)


def _default_size(model: ModelFolder) -> tuple[int, int]:
    """Return the height and width on which the denoiser was trained, else SIDE, in pixels."""
    for name in MAIN:
        if name in model.components():
            with model.reading(name):
                size: Any = model.config(name).get("sample_size")
                height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
                if height and width:
                    return int(height) * _scale(model, "spatial"), int(width) * _scale(model, "spatial")
    return SIDE, SIDE


def _limits(model: ModelFolder, declaration: DeclaredPipeline, defaults: Params) -> MediaLimits:
    """Return the limits that follow from the configurations of VAE and transformer.

    The call itself refuses values beyond other limits.
    """
    patch = 1
    components = model.components()
    if "transformer" in components:
        with model.reading("transformer"):
            size = model.config("transformer").get("patch_size") or 1
            patch = int(size[-1] if isinstance(size, list) else size)
    multiple = lcm(_scale(model, "spatial") * patch, 16 if "transformer" in components else 8)
    if _picture_scale(declaration):
        multiple = _scale(model, "spatial") * patch  # the pipeline rounds a picture's sides down to this multiple
    frames, length = defaults.get("num_frames"), defaults.get("max_sequence_length")
    max_frames = LENGTHS * frames if declaration.modality == VIDEO and isinstance(frames, int) else 1
    return MediaLimits(
        size_multiple=multiple,
        min_size=multiple,
        max_frames=max_frames,
        frame_multiple=_scale(model, "temporal"),
        max_sequence_length=length if isinstance(length, int) else MediaLimits().max_sequence_length,
    )


def _picture_scale(declaration: DeclaredPipeline) -> int:
    """Return the factor by which sides of results differ from those of the start image.

    It is 0 if the call has parameters for the size, or no start image.
    """
    return (
        0
        if "width" in declaration.parameters or UPLOAD not in declaration.parameters
        else ENLARGE.get(declaration.name, 1)
    )


def _has_fixed_size(model: ModelFolder) -> bool:
    """Return whether learned positional embeddings allow only one size."""
    if "transformer" not in model.components():
        return False
    return bool(model.config("transformer").get("use_learned_positional_embeddings"))


def _accepts(declaration: DeclaredPipeline) -> Iterator[AcceptedInput]:
    """Yield the uploads that the call has, and the request parameters that it lacks.

    The latter have a maximum of 0. A size is not lacking if the start image can be resized to it.
    """
    if UPLOAD in declaration.parameters:
        min_count = int(REFERENCE_CLASSES.get(declaration.name, True))
        strength = declaration.parameters.get("strength")
        if declaration.name in REFERENCE_CLASSES:
            yield AcceptedInput(UPLOAD, "reference", min_count, len(IMAGE_UPLOADS))
        elif isinstance(strength, float):
            yield AcceptedInput(UPLOAD, "redraw", min_count, strength=strength)
        else:
            yield AcceptedInput(UPLOAD, min=min_count)
    if LAST in declaration.parameters:
        yield AcceptedInput(LAST_FRAME, "end")

    size_params = ("size", "width", "height") if _picture_scale(declaration) else ()
    missing = [
        name
        for name, needed in REQUIRED_PARAMETERS.items()
        if needed not in declaration.parameters and name not in size_params
    ]
    for name in (*missing, *PREVIEWS):
        yield AcceptedInput(name, max=0)


def _scale(model: ModelFolder, axis: str) -> int:
    """Return the pixels, or frames, per latent along an axis: "spatial" or "temporal"."""
    name = next((name for name in ("vae", "movq", "vqvae") if name in model.components()), None)
    if name is None:
        return 8 if axis == "spatial" else 1
    config = model.config(name)
    with model.reading(name):
        if ratio := config.get(f"{axis}_compression_ratio") or config.get(f"scale_factor_{axis}"):
            return int(ratio)
        if scaling := config.get("spatio_temporal_scaling"):
            return int(config["patch_size" if axis == "spatial" else "patch_size_t"]) << sum(map(bool, scaling))
        blocks = config.get("block_out_channels") or config.get("encoder_block_out_channels") or range(4)
        return 1 << (len(blocks) - 1) if axis == "spatial" else 1


def _pipeline(loader: Loader, declaration: DeclaredPipeline) -> Any:
    """Return the pipeline with its components and the settings of model_index.json. Raises ConfigError."""
    import diffusers

    pipeline_class = getattr(diffusers, declaration.name)
    index = loader.folder.index()
    known = inspect.signature(pipeline_class.__init__).parameters
    parts = loader.folder.components()
    settings = {key: value for key, value in index.items() if key in known and key not in parts and not _is_none(value)}
    settings |= {key: None for key, value in index.items() if key in known and _is_none(value)}

    # Not by `from_pretrained`, which imports files beside the weights, such as unet/diffusers.py.
    loaders = dict.fromkeys(parts, loader) | dict.fromkeys(declaration.not_offloaded, loader.without_offload)
    pipeline = pipeline_class(**settings, **{part: component(part, loaders[part]) for part in parts if part in known})
    if reason := misfit(pipeline):
        raise ConfigError(f"model {loader.folder.path}: {reason}, so diffusers cannot run it either")

    for part in (pipeline, *vars(pipeline).values()):
        if isinstance(part, diffusers.DiffusionPipeline):
            part.set_progress_bar_config(disable=True)
    return pipeline


def _is_none(entry: object) -> bool:
    """Return whether this entry of model_index.json is a component that the model lacks."""
    return isinstance(entry, list) and not any(entry)


def component(name: str, loader: Loader) -> Any:
    """Return a component of a pipeline, or of a block of a modular pipeline."""
    if not loader.folder.weight_names(name):
        return loader.plain(name)
    return casting(loader.vae()) if name == "vae" else loader.model(name)


def casting(vae: Any) -> Any:
    """Make a VAE cast latents to its dtype before it decodes them, and return it.

    Some pipelines decode latents of another dtype, which fails without the cast.
    """
    decode = vae.decode
    vae.decode = lambda latents, *args, **kwargs: decode(latents.to(vae.dtype), *args, **kwargs)
    return vae


#: Attributes of a noise scheduler that a pipeline uses in every call, if it uses them at all.
ALWAYS_USED = frozenset({"init_noise_sigma", "order", "scale_model_input", "set_begin_index", "step"})


def misfit(pipeline: Any) -> str:
    """Return why a pipeline would fail with its noise scheduler, as a sentence; or "".

    The attributes and arguments that the pipeline uses are found in its source. Uses that depend on a request are not
    checked.
    """
    scheduler = getattr(pipeline, "scheduler", None)
    if scheduler is None:
        return ""
    source = inspect.getsource(type(pipeline))
    guarded = re.findall(r"hasattr\(\s*self\.scheduler,\s*\"(\w+)\"", source)
    used = ALWAYS_USED & {*re.findall(r"self\.scheduler\.(\w+)", source)} - {*guarded}
    pipeline_class, scheduler_class = type(pipeline).__name__, type(scheduler).__name__
    for name in sorted(used):
        if not hasattr(scheduler, name):
            return f"{pipeline_class} uses {name} of its noise scheduler, which {scheduler_class} does not have"

    accepted = {*inspect.signature(scheduler.set_timesteps).parameters}
    if "stage_index" in accepted and "stage_index" not in source:
        return f"{scheduler_class} needs a pipeline with stages (stage_index), which {pipeline_class} does not have"

    passed = _always_passed(pipeline.__call__)
    # Pipelines that mention this setting pass no `sigmas` to a scheduler that has it.
    if "use_flow_sigmas" in source and scheduler.config.get("use_flow_sigmas"):
        passed.discard("sigmas")
    for name in sorted(passed - accepted):
        return (
            f"{pipeline_class} passes {name} to its noise scheduler, which {scheduler_class} with this configuration "
            "does not accept"
        )
    if not passed or (error := _rejection(scheduler, passed)) is None:
        return ""
    if "mu" in passed and _rejection(scheduler, passed - {"mu"}) is None:
        return (
            f"{pipeline_class} passes a shift (mu) to its noise scheduler, for which {scheduler_class} needs "
            "use_dynamic_shifting"
        )
    return (
        f"{pipeline_class} passes {' and '.join(sorted(passed))} to its noise scheduler, which {scheduler_class} "
        f"rejects ({error!r})"
    )


def _rejection(scheduler: Any, passed: set[str]) -> Exception | None:
    """Return the error that a noise scheduler raises for these arguments, or None.

    `passed`: which of `sigmas` and `mu` the pipeline passes. `sigmas` are tried as an array and as a list, because
    pipelines pass either. A shift (`mu`) is also passed to a scheduler that requires one.
    """
    import numpy as np

    # A configuration may have settings of other classes, so the setting alone does not show that a shift is accepted.
    takes_shift = "mu" in inspect.signature(scheduler.set_timesteps).parameters
    shifts = takes_shift and scheduler.config.get("use_dynamic_shifting")
    mu = {"mu": 0.5} if "mu" in passed or shifts else {}
    sigmas = np.linspace(1.0, 0.25, 4)
    attempts: list[dict[str, Any]] = [{"num_inference_steps": 4}]
    if "sigmas" in passed:
        attempts = [{"sigmas": sigmas}, {"sigmas": sigmas.tolist()}]

    rejection: Exception | None = None
    for arguments in attempts:
        try:
            copy.deepcopy(scheduler).set_timesteps(**arguments, **mu)
        except READ_ERRORS as error:
            rejection = error
        else:
            return None
    return rejection


def _always_passed(call: Any) -> set[str]:
    """Return which of `sigmas` and `mu` a pipeline's call always passes to its scheduler.

    These are the arguments of `retrieve_timesteps` that the call's own body assigns, outside of any branch.
    """
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(call)))).body
    assert isinstance(function, ast.FunctionDef)
    targets = [target for node in function.body if isinstance(node, ast.Assign) for target in node.targets]
    assigned = {target.id for target in targets if isinstance(target, ast.Name)}
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    keywords = [
        keyword for node in calls if ast.unparse(node.func) == "retrieve_timesteps" for keyword in node.keywords
    ]
    passed = {str(word.arg) for word in keywords if isinstance(word.value, ast.Name) and word.value.id in assigned}
    return passed & {"sigmas", "mu"}


FAMILY = UndividedFamily()
