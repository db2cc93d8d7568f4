"""Language models of transformers: Llama, Qwen2, Qwen3 (also MoE), Qwen2.5-VL and Qwen3-VL.

For a vision-language model, a vision worker loads only the vision encoder, and a worker for prefill or decode all other
weights. The vision encoder's outputs, embeddings and deepstack features, replace an image's tokens in the prompt.
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

from unfuse.arena.limits import available_memory, readable_bytes
from unfuse.core.errors import ConfigError, PermanentError
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
    #: Its components. The first is that of prefill and decode.
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
        kv = f"kv:{weights[self.component_names[0]][:12]}:{dtypes[self.component_names[0]]}"
        kv_resource = {"needs": {kv: OutputSize(BLOCK, 1, 1, ("prompt_tokens",))}, "provides": (kv,)}
        pipeline = Pipeline(
            tuple(replace(stage, **kv_resource) if stage.kind == DECODE.kind else stage for stage in pipeline.stages)
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
            classes={part: model.class_of(part) for part in self.component_names},
            created=model.created,
            vision=vision,
        )

    def speaks(self, model: ModelFolder) -> dict[str, Any]:
        """Return the configuration of the language model."""
        return model.config(SINGLE_COMPONENT)

    def pipeline(self, model: ModelFolder, dtypes: Mapping[str, str]) -> Pipeline:
        """Return its stages. `dtypes` are those of its parts."""
        parts = self.component_names[:1]
        kv_bytes = bytes_per_token(self.speaks(model), WIDTHS[dtypes[parts[0]]])
        prefill = replace(PREFILL, components=parts, output_size=OutputSize(4096, kv_bytes, 1, ("prompt_tokens",)))
        return Pipeline((prefill, replace(DECODE, components=parts)))

    def parallelism(self, model: ModelFolder) -> dict[str, dict[str, int]]:
        """Return how each stage kind may be spread over ranks: by tensor parallelism only.

        With pipeline parallelism (`layers`), ranks would wait for each other at each token. With FSDP (`shard`), all
        weights would be transferred for each token.
        """
        config = self.speaks(model)
        spreads = {
            "tensor": ENCODERS[model.kind].common({"num_key_value_heads": config["num_attention_heads"], **config})
        }
        return {PREFILL.kind: spreads, DECODE.kind: spreads}

    def vision(self, model: ModelFolder) -> VisionConfig | None:
        """Return how the model reads images and videos, or None if it does not."""
        return None

    @override
    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        from unfuse.language.grammars import Grammars
        from unfuse.language.tokenizer import ChatTokenizer
        from unfuse.stages.language import Decode, Prefill

        shared = runtime.shared_objects
        key = (folder, runtime.dtypes[self.component_names[0]])
        if key not in shared:
            shared[key] = self.opened(folder, runtime, report), ChatTokenizer.read(folder), Grammars(str(folder))
        opened, tokenizer, grammars = shared[key]
        stage = Prefill(opened) if spec.kind == PREFILL.kind else Decode(opened, tokenizer, grammars, runtime.group)
        stage.resources = dict.fromkeys(spec.provides, opened.tokens)
        stage.exact = runtime.options.batching == "exact"
        return stage

    def opened(self, folder: Path, runtime: RuntimeOptions, report: Report | None) -> SequencePool:
        """Load the model, and return it with an empty paged KV cache."""
        from unfuse.stages.sequence_pool import open_model

        files = open_files(folder)
        model = Loader(files, {SINGLE_COMPONENT: ("transformers", files.kind)}, runtime, report).model(SINGLE_COMPONENT)
        return open_model(model, runtime.device, self.kv_capacity(folder, runtime), axis=tensor_axis(runtime))

    @override
    def prepare(self, folder: Path) -> None:
        import_module("unfuse.stages.language")
        getattr(import_module("transformers"), open_files(folder).kind)
        if folder.suffix == GGUF:
            import_module("gguf.quants")

    def kv_capacity(self, folder: Path, runtime: RuntimeOptions) -> int:
        """Return the capacity of the KV cache in tokens.

        All ranks have the capacity of the one with the least memory. `runtime.kv` is for all of them together.
        Raises ConfigError if the longest text does not fit.
        """
        files, group, axis = open_files(folder), runtime.group, tensor_axis(runtime)
        shares = axis.size if axis else 1
        token_bytes = bytes_per_token(self.speaks(files), WIDTHS[runtime.dtypes[self.component_names[0]]]) // shares
        max_tokens = int(self.model_spec("", folder).limits["max_tokens"]) + BLOCK
        ranks = group.size if group else 1

        needed = max_tokens * token_bytes
        room = runtime.kv // ranks or _default_kv_bytes(runtime.device, needed, ranks)
        if group:
            room = min(int(rank_room) for rank_room in group.exchange(str(room).encode()))
        if room < needed:
            raise ConfigError(
                f"the KV cache needs {readable_bytes(needed)} for the longest text, {max_tokens} tokens, but has only "
                f"{readable_bytes(room)}: increase --kv, or set a limit max_tokens in {files.home / SERVING}"
            )
        return room // token_bytes

    def _defaults(self, model: ModelFolder) -> Params:
        """Return the defaults in generation_config.json; temperature 0 if it disables sampling."""
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


def tensor_axis(runtime: RuntimeOptions) -> Axis | None:
    """Return the ranks that share the heads by tensor parallelism, or None."""
    return runtime.mesh.axis("tensor") if runtime.mesh and "tensor" in runtime.mesh.degrees else None


def _default_kv_bytes(device: str, least: int, ranks: int) -> int:
    """Return the default bytes for a rank's KV cache.

    A quarter of the free memory, or enough for one longest text (`least`), but at most three quarters. Ranks on CPUs
    share the free memory.
    """
    from unfuse.parallel.devices import memory

    free = available_memory() // ranks if device.startswith("cpu") else memory(device)[0]
    return max(free // 4, min(least, free // 4 * 3))


def bytes_per_token(config: dict[str, Any], width: int) -> int:
    """Return the KV cache's bytes per token, with `width` bytes per number."""
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or config["hidden_size"] // heads)
    return 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * size * width


FAMILY = LanguageFamily()


#: The configuration files of image and video preprocessing.
PROCESSOR = CONFIGS["image_processor"]
VIDEOS = "video_preprocessor_config.json"

#: Models whose prompts have each group of a video's frames separately, after its timestamp.
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
        room = OutputSize(4096 + layers * ALIGNMENT, token_bytes, 1, ("tokens",))
        prefill, decode = super().pipeline(model, dtypes).stages
        return Pipeline(
            (
                replace(VISION_ENCODE, components=(VISION,), output_size=room),
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
        pictures = model.optional_config(PROCESSOR)
        videos = model.optional_config(VIDEOS) or pictures
        if not pictures:
            raise ConfigError(f"model {model.path} has no {PROCESSOR}, which configures image preprocessing")
        patch, merge = int(vision_config["patch_size"]), int(vision_config.get("spatial_merge_size", 2))
        side = (patch * merge) ** 2
        if (processor_patch := int(pictures.get("patch_size", 14))) != patch:
            raise ConfigError(
                f"model {model.path}: {PROCESSOR} has the patch size {processor_patch}, but the model {patch}"
            )
        return VisionConfig(
            picture=int(config["image_token_id"]),
            video=int(config["video_token_id"]),
            begin_id=int(config["vision_start_token_id"]),
            end_id=int(config["vision_end_token_id"]),
            patch=patch,
            merge=merge,
            group=int(vision_config.get("temporal_patch_size", 2)),
            pictures=_pixel_bounds(pictures, 56 * 56, 28 * 28 * 1280),
            videos=_pixel_bounds(videos, 128 * side, 768 * side),
            images=PixelBounds(int(videos.get("min_frames", 4)), int(videos.get("max_frames", 768))),
            rate=float(videos.get("fps") or 2),
            timed=model.kind in TIMED,
            pace=float(vision_config.get("tokens_per_second", 4)),
        )

    @override
    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        if spec.kind != VISION_ENCODE.kind:
            return super().load(spec, folder, runtime, report)
        from unfuse.stages.vision_encode import VisionEncode

        stage = VisionEncode(Tower(folder, runtime, report))
        stage.exact = runtime.options.batching == "exact"
        return stage

    @override
    def opened(self, folder: Path, runtime: RuntimeOptions, report: Report | None) -> SequencePool:
        from unfuse.stages.sequence_pool import open_model

        files = ModelFolder(folder)
        model = _loader(files, runtime, report).model(LANGUAGE, _language_class)
        deep = len(files.config(SINGLE_COMPONENT)["vision_config"].get("deepstack_visual_indexes") or ())
        room, vision = self.kv_capacity(folder, runtime), self.vision(files)
        return open_model(model, runtime.device, room, vision, deep, tensor_axis(runtime))

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
        #: The number of layers with deepstack features.
        self.deep = len(vision_config.get("deepstack_visual_indexes") or ())

    def encode(self, views: Sequence[VisionInput]) -> list[VisionFeatures]:
        """Return the features of each input, from a separate forward."""
        return [
            self._forward(self._video_patches(view) if view.video else self._image_patches(view), view.grid)
            for view in views
        ]

    def _image_patches(self, view: VisionInput) -> Tensor:
        """Return an image's patches from the processor, (patches, values)."""
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
        frames += frames[-1:] * (-len(frames) % vision.group)
        if len(frames) != groups * vision.group:
            raise PermanentError(f"a video has {len(frames)} frames, not {groups * vision.group}")

        rows_of, columns_of = ((side // vision.merge, vision.merge, vision.patch) for side in (rows, columns))
        whole = torch.stack(frames).reshape(groups, vision.group, -1, *rows_of, *columns_of)
        patches = whole.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
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
        deep = getattr(outputs, "deepstack_features", None) or ()
        return VisionFeatures(outputs.pooler_output.clone(), [layer.clone() for layer in deep])


def _loader(files: ModelFolder, runtime: RuntimeOptions, report: Report | None) -> Loader:
    """Return a loader of the language model and the vision encoder."""
    return Loader(files, dict.fromkeys((LANGUAGE, VISION), ("transformers", files.kind)), runtime, report)


def _pixel_bounds(settings: dict[str, Any], least: int, most: int) -> PixelBounds:
    """Return the least and most pixels of an image, from either of two notations."""
    size = settings.get("size") or {}
    fewest, largest = size.get("shortest_edge", least), size.get("longest_edge", most)
    return PixelBounds(int(settings.get("min_pixels") or fewest), int(settings.get("max_pixels") or largest))


def _language_class(whole: Any) -> Any:
    """Return the model's class without the vision encoder."""
    return _without_modules(whole, ["model.visual"], VISION_PREFIX)


def _vision_class(whole: Any) -> Any:
    """Return the model's class with nothing but the vision encoder."""
    language = "language_model", "lm_head"
    return _without_modules(whole, ["model.language_model", "lm_head"], *language, _tied_weights_keys={})


def _without_modules(whole: Any, without: Sequence[str], *unread: str, **attributes: Any) -> Any:
    """Return a class of the model without some modules.

    It has the name and module of the whole model's class, by which transformers maps the names of weights in files.

    `unread`: regular expressions of weights that are then ignored.
    `attributes`: further attributes of the class.
    """

    def init(model: Any, config: Any) -> None:
        whole.__init__(model, config)
        for parent, _, name in (module.rpartition(".") for module in without):
            setattr(model.get_submodule(parent), name, None)

    members = {"__init__": init, "__module__": whole.__module__, "_keys_to_ignore_on_load_unexpected": [*unread]}
    return type(whole.__name__, (whole,), {**members, **attributes})


VISION_LANGUAGE = VisionLanguage()
