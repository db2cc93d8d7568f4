"""Language models of transformers: Llama, Qwen2, Qwen3 (also MoE), Qwen2.5-VL and Qwen3-VL.

For a vision-language model, a worker for vision encoding loads only the vision encoder. A worker for prefill or decode
loads all other weights. The vision encoder's outputs, embeddings and deepstack features, replace an image's tokens in
the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import convert, to_builtins
from msgspec.structs import asdict, replace
from PIL.Image import Resampling
from typing_extensions import override

from unfuse.arena.limits import readable_bytes
from unfuse.core.errors import ConfigError, PermanentError
from unfuse.core.host_memory import available_memory
from unfuse.core.model_spec import ModelSpec
from unfuse.core.object_ref import ALIGNMENT, DTYPES as WIDTHS
from unfuse.core.parameters import OutputSize
from unfuse.core.plan import Params, Pipeline, StageSpec
from unfuse.core.text_parameters import TextLimits
from unfuse.core.vision import Grid, PixelBounds, VisionConfig
from unfuse.models.base import Family, Loader, Report, RuntimeOptions, weights_ids
from unfuse.models.defaults import TextServingConfig, read_serving
from unfuse.models.encoders import ENCODERS, VISION_MODEL as SEEING
from unfuse.stages.refusal import refusal
from unfuse.stages.specs import DECODE, PREFILL, VISION_ENCODE
from unfuse.weights.folder import (
    CONFIGS,
    LANGUAGE,
    SERVING,
    SINGLE_COMPONENT,
    VISION,
    VISION_PREFIX,
    ModelFolder,
    choose_dtypes,
)
from unfuse.weights.gguf import GGUF
from unfuse.weights.gguf_model import open_files
from unfuse.weights.source import source_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from unfuse.parallel.group import Axis
    from unfuse.stages.base import Stage
    from unfuse.stages.sequence_pool import SequencePool
    from unfuse.stages.vision_encode import VisionFeatures, VisionInput


#: Tokens per block of the KV cache.
BLOCK = 16

#: The defaults in generation_config.json. Its names are those of request parameters.
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class LanguageFamily(Family):
    """Language models without vision: one component, which prefill and decode both load."""

    libraries = ("transformers",)
    batches = True
    #: Its components. Prefill and decode both load the first one.
    component_names: tuple[str, ...] = (SINGLE_COMPONENT,)

    @override
    def model_spec(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        model = open_files(folder)
        dtypes = choose_dtypes(dtype, self.component_names)
        config = self.speaks(model)
        with model.reading("model"):
            limits = TextLimits(int(config["max_position_embeddings"]), int(config["vocab_size"]))
            pipeline, vision = self.pipeline(model, dtypes), self.vision(model)
        if reason := refusal(config, multimodal=vision is not None):
            raise ConfigError(f"model {folder} cannot be served: {reason}")

        serving = read_serving(model.home, TextServingConfig)
        limits = _apply_limits(limits, serving.limits)
        weights = weights_ids(model, pipeline, "language")
        # KV caches of equal models are one resource, in tokens: a task needs its prompt's, and up to a block more.
        resource = f"kv:{weights[self.component_names[0]][:12]}:{dtypes[self.component_names[0]]}"
        kv_fields = {"needs": {resource: OutputSize(BLOCK, 1, 1, ("prompt_tokens",))}, "provides": (resource,)}
        pipeline = Pipeline(
            tuple(replace(stage, **kv_fields) if stage.kind == DECODE.kind else stage for stage in pipeline.stages)
        ).with_parallelism(self.parallelism(model))
        return ModelSpec(
            name=name,
            source=source_of(folder),
            family="language",
            pipeline=pipeline,
            limits=asdict(limits),
            defaults=self._defaults(model) | to_builtins(serving.defaults),
            weights=weights,
            dtypes=dtypes,
            classes={name: model.class_of(name) for name in self.component_names},
            created=model.created,
            vision=vision,
        )

    def speaks(self, model: ModelFolder) -> dict[str, Any]:
        """Return the configuration of the model's language part."""
        return model.config(SINGLE_COMPONENT)

    def pipeline(self, model: ModelFolder, dtypes: Mapping[str, str]) -> Pipeline:
        """Return the pipeline of prefill and decode. `dtypes`: the dtype of each component."""
        first = self.component_names[:1]
        kv_bytes = bytes_per_token(self.speaks(model), WIDTHS[dtypes[first[0]]])
        prefill = replace(PREFILL, components=first, output_size=OutputSize(4096, kv_bytes, 1, ("prompt_tokens",)))
        return Pipeline((prefill, replace(DECODE, components=first)))

    def parallelism(self, model: ModelFolder) -> dict[str, dict[str, int]]:
        """Return the kinds of parallelism that each stage kind supports: only tensor parallelism.

        With pipeline parallelism (`layers`), ranks would wait for each other at each token. With FSDP (`shard`), all
        weights would be transferred for each token.
        """
        config = self.speaks(model)
        supported = {
            "tensor": ENCODERS[model.kind].common({"num_key_value_heads": config["num_attention_heads"], **config})
        }
        return {PREFILL.kind: supported, DECODE.kind: supported}

    def vision(self, model: ModelFolder) -> VisionConfig | None:
        """Return how the model reads images and videos, or None if it does not."""
        return None

    @override
    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        from unfuse.language.grammars import Grammars
        from unfuse.language.tokenizer import ChatTokenizer
        from unfuse.stages.language import Decode, Prefill

        # Prefill and decode in one process share the weights and the KV cache.
        shared = runtime.shared_objects
        key = (folder, runtime.dtypes[self.component_names[0]])
        if key not in shared:
            shared[key] = self.opened(folder, runtime, report), ChatTokenizer.read(folder), Grammars(str(folder))
        pool, tokenizer, grammars = shared[key]

        stage = Prefill(pool) if spec.kind == PREFILL.kind else Decode(pool, tokenizer, grammars, runtime.group)
        stage.resources = dict.fromkeys(spec.provides, pool.tokens)
        stage.exact = runtime.options.batching in ("exact", "exact-or-batched")
        return stage

    def opened(self, folder: Path, runtime: RuntimeOptions, report: Report | None) -> SequencePool:
        """Load the model, and return it with an empty paged KV cache."""
        from unfuse.stages.sequence_pool import open_model

        files = open_files(folder)
        model = Loader(files, {SINGLE_COMPONENT: ("transformers", files.kind)}, runtime, report).model(SINGLE_COMPONENT)
        capacity, gathers = self.kv_capacity(folder, runtime), gathers_texts(runtime)
        return open_model(model, runtime.device, capacity, axis=tensor_axis(runtime), gathers=gathers)

    @override
    def prepare(self, folder: Path) -> None:
        import_module("unfuse.stages.language")
        getattr(import_module("transformers"), open_files(folder).kind)
        if folder.suffix == GGUF:
            import_module("gguf.quants")

    def kv_capacity(self, folder: Path, runtime: RuntimeOptions) -> int:
        """Return the capacity of the KV cache in tokens, equal on all ranks.

        It is the capacity of the rank with the least memory. `runtime.kv` is for all ranks together.
        Raises ConfigError if the longest text does not fit.
        """
        files = open_files(folder)
        group, axis = runtime.group, tensor_axis(runtime)
        degree = axis.size if axis else 1
        token_bytes = bytes_per_token(self.speaks(files), WIDTHS[runtime.dtypes[self.component_names[0]]]) // degree
        max_tokens = int(self.model_spec("", folder).limits["max_tokens"]) + BLOCK
        ranks = group.size if group else 1

        needed = max_tokens * token_bytes
        cache_bytes = runtime.kv // ranks or _default_kv_bytes(runtime.device, needed, ranks)
        if group:
            cache_bytes = min(int(rank_bytes) for rank_bytes in group.exchange(str(cache_bytes).encode()))
        if cache_bytes < needed:
            raise ConfigError(
                f"the KV cache needs {readable_bytes(needed)} for the longest text, {max_tokens} tokens, but has only "
                f"{readable_bytes(cache_bytes)}: increase --kv, or set a limit max_tokens in {files.home / SERVING}"
            )
        return cache_bytes // token_bytes

    def _defaults(self, model: ModelFolder) -> Params:
        """Return the defaults in generation_config.json, with temperature 0 if it disables sampling."""
        config = model.optional_config("generation_config.json")
        defaults: Params = {name: config[name] for name in DEFAULTS if isinstance(config.get(name), int | float)}
        return defaults | ({"temperature": 0.0} if config.get("do_sample") is False else {})


def _apply_limits(derived: TextLimits, limits: dict[str, int | float]) -> TextLimits:
    """Return the model's limits, reduced to those of serving.json.

    Raises ConfigError for an unknown limit, or one above the model's.
    """
    known = asdict(derived)
    if unknown := sorted(limits.keys() - known):
        raise ConfigError(f"{SERVING}: unknown limit {unknown[0]!r}; known are {', '.join(known)}")
    for name in ("max_tokens", "vocabulary"):
        if not 0 < limits.get(name, known[name]) <= known[name]:
            raise ConfigError(f"{SERVING}: limit {name} {limits[name]} must be 1 to the model's {known[name]}")
    return convert({**known, **limits}, TextLimits)


def gathers_texts(runtime: RuntimeOptions) -> bool:
    """Return whether the texts of a batched decode step attend in one call."""
    return runtime.options.decode_attention == "gathered"


def tensor_axis(runtime: RuntimeOptions) -> Axis | None:
    """Return the tensor parallel axis, whose ranks share the heads; or None."""
    return runtime.mesh.axis("tensor") if runtime.mesh and "tensor" in runtime.mesh.degrees else None


def _default_kv_bytes(device: str, needed: int, ranks: int) -> int:
    """Return the default bytes for a rank's KV cache.

    A quarter of the free memory. If one longest text needs more (`needed`), at most three quarters. Ranks on CPUs share
    the free memory.
    """
    from unfuse.parallel.devices import memory

    free = available_memory() // ranks if device.startswith("cpu") else memory(device)[0]
    return max(free // 4, min(needed, free // 4 * 3))


def bytes_per_token(config: dict[str, Any], width: int) -> int:
    """Return the KV cache's bytes per token, with `width` bytes per number."""
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    return 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * head_dim * width


FAMILY = LanguageFamily()


#: The configuration files of image and video preprocessing.
PROCESSOR = CONFIGS["image_processor"]
VIDEOS = "video_preprocessor_config.json"

#: Classes of models whose prompts have each group of a video's frames separately, after its timestamp.
TIMED = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")


class VisionLanguage(LanguageFamily):
    """Vision-language models: prefill and decode load the language model, vision encoding the rest."""

    component_names = (LANGUAGE, VISION)

    @override
    def speaks(self, model: ModelFolder) -> dict[str, Any]:
        config = model.config(SINGLE_COMPONENT)
        return dict(config.get("text_config") or config)

    @override
    def pipeline(self, model: ModelFolder, dtypes: Mapping[str, str]) -> Pipeline:
        vision_config = model.config(SINGLE_COMPONENT)["vision_config"]
        layers = 1 + len(vision_config.get("deepstack_visual_indexes") or ())
        token_bytes = int(vision_config["out_hidden_size"]) * WIDTHS[dtypes[VISION]] * layers
        output_size = OutputSize(4096 + layers * ALIGNMENT, token_bytes, 1, ("tokens",))

        prefill, decode = super().pipeline(model, dtypes).stages
        return Pipeline(
            (
                replace(VISION_ENCODE, components=(VISION,), output_size=output_size),
                replace(prefill, inputs=VISION_ENCODE.outputs),
                replace(decode, inputs=(*decode.inputs, *VISION_ENCODE.outputs)),
            )
        )

    @override
    def parallelism(self, model: ModelFolder) -> dict[str, dict[str, int]]:
        heads = SEEING.common(model.config(SINGLE_COMPONENT)["vision_config"])
        return super().parallelism(model) | {VISION_ENCODE.kind: {"tensor": heads}}

    @override
    def vision(self, model: ModelFolder) -> VisionConfig:
        config = model.config(SINGLE_COMPONENT)
        vision_config = config["vision_config"]
        image_settings = model.optional_config(PROCESSOR)
        video_settings = model.optional_config(VIDEOS) or image_settings
        if not image_settings:
            raise ConfigError(f"model {model.path} has no {PROCESSOR}, which configures image preprocessing")
        patch, merge = int(vision_config["patch_size"]), int(vision_config.get("spatial_merge_size", 2))
        token_pixels = (patch * merge) ** 2
        if (processor_patch := int(image_settings.get("patch_size", 14))) != patch:
            raise ConfigError(
                f"model {model.path}: {PROCESSOR} has the patch size {processor_patch}, but the model {patch}"
            )

        # Settings that the files lack have the defaults of transformers' image and video processors.
        return VisionConfig(
            picture=int(config["image_token_id"]),
            video=int(config["video_token_id"]),
            begin_id=int(config["vision_start_token_id"]),
            end_id=int(config["vision_end_token_id"]),
            patch=patch,
            merge=merge,
            group=int(vision_config.get("temporal_patch_size", 2)),
            pictures=_pixel_bounds(image_settings, 56 * 56, 28 * 28 * 1280),
            videos=_pixel_bounds(video_settings, 128 * token_pixels, 768 * token_pixels),
            images=PixelBounds(int(video_settings.get("min_frames", 4)), int(video_settings.get("max_frames", 768))),
            rate=float(video_settings.get("fps") or 2),
            timed=model.kind in TIMED,
            pace=float(vision_config.get("tokens_per_second", 4)),
        )

    @override
    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        if spec.kind != VISION_ENCODE.kind:
            return super().load(spec, folder, runtime, report)
        from unfuse.stages.vision_encode import VisionEncode

        stage = VisionEncode(Tower(folder, runtime, report))
        stage.exact = runtime.options.batching in ("exact", "exact-or-batched")
        return stage

    @override
    def opened(self, folder: Path, runtime: RuntimeOptions, report: Report | None) -> SequencePool:
        from unfuse.stages.sequence_pool import open_model

        files = ModelFolder(folder)
        model = _loader(files, runtime, report).model(LANGUAGE, _language_class)
        layers = len(files.config(SINGLE_COMPONENT)["vision_config"].get("deepstack_visual_indexes") or ())
        capacity, vision = self.kv_capacity(folder, runtime), self.vision(files)
        gathers = gathers_texts(runtime)
        return open_model(model, runtime.device, capacity, vision, layers, tensor_axis(runtime), gathers=gathers)

    @override
    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        import_module("unfuse.stages.vision_encode")
        import_module("transformers").AutoImageProcessor  # noqa: B018 - the lookup imports it


class Tower:
    """The vision encoder and its preprocessing, as a VisionEncoder."""

    def __init__(self, folder: Path, runtime: RuntimeOptions, report: Report | None) -> None:
        from transformers import AutoImageProcessor

        files = ModelFolder(folder)
        loader = _loader(files, runtime, report)
        self._tower = loader.model(VISION, _vision_class).model.visual
        self._device = loader.device
        self._processor = AutoImageProcessor.from_pretrained(str(folder), local_files_only=True)
        self._vision = VISION_LANGUAGE.vision(files)
        self._video_settings = self._processor.to_dict() | files.optional_config(VIDEOS)

        vision_config = files.config(SINGLE_COMPONENT)["vision_config"]
        self.dtype = runtime.dtypes[VISION]
        #: Width of an embedding.
        self.width = int(vision_config["out_hidden_size"])
        #: The number of layers with deepstack features; 0 for a model without them.
        self.deep = len(vision_config.get("deepstack_visual_indexes") or ())

    def encode(self, views: Sequence[VisionInput]) -> list[VisionFeatures]:
        """Return the features of each image or video, each from a forward of its own."""
        return [
            self._forward(self._video_patches(view) if view.video else self._image_patches(view), view.grid)
            for view in views
        ]

    def _image_patches(self, view: VisionInput) -> Tensor:
        """Return an image's patches from transformers' processor, (patches, values)."""
        inputs = self._processor(images=[*view.images], return_tensors="pt")
        grids = inputs["image_grid_thw"].tolist()
        if [tuple(grid) for grid in grids] != [view.grid]:
            raise PermanentError(f"the processor returned patches of {grids} for a picture, not {view.grid}")
        patches: Tensor = inputs["pixel_values"]
        return patches

    def _video_patches(self, view: VisionInput) -> Tensor:
        """Return a video's patches, (patches, values).

        They are ordered by group of frames, by rows and columns of tokens, then within a token.
        """
        import torch

        vision = self._vision
        groups, rows, columns = view.grid
        size = columns * vision.patch, rows * vision.patch
        frames = [self._normalize(image.resize(size, Resampling.BICUBIC)) for image in view.images]
        frames += frames[-1:] * (-len(frames) % vision.group)  # the last frame fills an incomplete group
        if len(frames) != groups * vision.group:
            raise PermanentError(f"a video has {len(frames)} frames, not {groups * vision.group}")

        # Dimensions: group, frame, channel; token row, patch row, pixel row; token column, patch column, pixel column.
        row_dims, column_dims = ((side // vision.merge, vision.merge, vision.patch) for side in (rows, columns))
        pixels = torch.stack(frames).reshape(groups, vision.group, -1, *row_dims, *column_dims)
        patches = pixels.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return patches.reshape(groups * rows * columns, -1)

    def _normalize(self, image: Image) -> Tensor:
        """Return a frame as normalized pixels, (channels, height, width)."""
        import numpy as np
        import torch

        pixels = torch.from_numpy(np.array(image.convert("RGB"), np.float32)) / 255
        mean, deviation = (torch.tensor(self._video_settings[name]) for name in ("image_mean", "image_std"))
        return ((pixels - mean) / deviation).permute(2, 0, 1)

    def _forward(self, patches: Tensor, grid: Grid) -> VisionFeatures:
        """Return the features of one image or video from its patches (patches, values)."""
        import torch

        from unfuse.stages.vision_encode import VisionFeatures

        grids = torch.tensor([grid], device=self._device)
        outputs = self._tower(patches.to(self._device, self._tower.dtype), grid_thw=grids)
        deepstack = getattr(outputs, "deepstack_features", None) or ()
        return VisionFeatures(outputs.pooler_output.clone(), [layer.clone() for layer in deepstack])


def _loader(files: ModelFolder, runtime: RuntimeOptions, report: Report | None) -> Loader:
    """Return a loader of the language model and the vision encoder."""
    return Loader(files, dict.fromkeys((LANGUAGE, VISION), ("transformers", files.kind)), runtime, report)


def _pixel_bounds(settings: dict[str, Any], default_min: int, default_max: int) -> PixelBounds:
    """Return the least and most pixels of an image or video.

    Files have `min_pixels` and `max_pixels`, or in `size` `shortest_edge` and `longest_edge`, which are pixels, too.
    """
    size = settings.get("size") or {}
    size_min, size_max = size.get("shortest_edge", default_min), size.get("longest_edge", default_max)
    return PixelBounds(int(settings.get("min_pixels") or size_min), int(settings.get("max_pixels") or size_max))


def _language_class(model_class: Any) -> Any:
    """Return the model's class without the vision encoder."""
    return _without_modules(model_class, ["model.visual"], VISION_PREFIX)


def _vision_class(model_class: Any) -> Any:
    """Return the model's class with nothing but the vision encoder."""
    language = "language_model", "lm_head"
    return _without_modules(model_class, ["model.language_model", "lm_head"], *language, _tied_weights_keys={})


def _without_modules(model_class: Any, removed: Sequence[str], *ignored_weights: str, **attributes: Any) -> Any:
    """Return a subclass of the model's class without some modules.

    It has the name and module of that class, by which transformers maps the names of weights in files.

    `removed`: the names of the modules.
    `ignored_weights`: regular expressions of weights in files that belong to the removed modules.
    `attributes`: further attributes of the subclass.
    """

    def init(model: Any, config: Any) -> None:
        model_class.__init__(model, config)
        for parent, _, name in (module.rpartition(".") for module in removed):
            setattr(model.get_submodule(parent), name, None)

    members = {
        "__init__": init,
        "__module__": model_class.__module__,
        "_keys_to_ignore_on_load_unexpected": [*ignored_weights],
    }
    return type(model_class.__name__, (model_class,), {**members, **attributes})


VISION_LANGUAGE = VisionLanguage()
