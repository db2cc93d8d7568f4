"""Language models of transformers: Llama, Qwen2, Qwen3 and its mixtures of experts; Qwen2.5-VL and Qwen3-VL, which see.

Of a model that sees, a worker for vision loads the vision tower alone, one for prefill or decode all but that. What the
tower makes of a picture, embeddings and deepstack features, is what a prompt has in place of the picture's tokens.
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
from unfuse.models.encoders import ENCODERS, SEES as SEEING
from unfuse.stages.refusal import refusal
from unfuse.stages.specs import DECODE, PREFILL, VISION_ENCODE
from unfuse.weights.folder import CONFIGS, LANGUAGE, SEES, SERVING, VISION, WHOLE, ModelFolder, choose_dtypes
from unfuse.weights.gguf import GGUF
from unfuse.weights.gguf_model import files_of
from unfuse.weights.source import source_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from unfuse.parallel.group import Axis
    from unfuse.stages.base import Stage
    from unfuse.stages.sequence_pool import SequencePool
    from unfuse.stages.vision_encode import VisionFeatures, VisionInput


BLOCK = 16  # tokens of a block of the KV

DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What generation_config.json may say, in the names of our parameters."""


class LanguageFamily(Family):
    """Each is one component, which prefill and decode both load whole; that comes first among its `parts`."""

    libraries = ("transformers",)
    batches = True
    parts: tuple[str, ...] = (WHOLE,)

    @override
    def card(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        model = files_of(folder)
        dtypes = choose_dtypes(dtype, self.parts)
        config = self.speaks(model)
        with model.reading("model"):
            limits = TextLimits(int(config["max_position_embeddings"]), int(config["vocab_size"]))
            pipeline, vision = self.pipeline(model, dtypes), self.vision(model)
        if reason := refusal(config, sees=vision is not None):
            raise ConfigError(f"model {folder} cannot be served: {reason}")
        serving = read_serving(model.home, TextServingConfig)
        limits = _bounded(limits, serving.limits)
        weights = weights_ids(model, pipeline, "language")
        kv = f"kv:{weights[self.parts[0]][:12]}:{dtypes[self.parts[0]]}"
        own = {"needs": {kv: OutputSize(BLOCK, 1, 1, ("prompt_tokens",))}, "brings": (kv,)}
        pipeline = Pipeline(
            tuple(replace(stage, **own) if stage.kind == DECODE.kind else stage for stage in pipeline.stages)
        ).spread(self.spreads(model))
        return ModelSpec(
            name=name,
            source=source_of(folder),
            family="language",
            pipeline=pipeline,
            limits=asdict(limits),
            defaults=self._defaults(model) | to_builtins(serving.defaults),
            weights=weights,
            dtypes=dtypes,
            created=model.created,
            vision=vision,
        )

    def speaks(self, model: ModelFolder) -> dict[str, Any]:
        """The configuration of what speaks in it."""
        return model.config(WHOLE)

    def pipeline(self, model: ModelFolder, dtypes: Mapping[str, str]) -> Pipeline:
        """Its stages; `dtypes` are those of its parts."""
        parts = self.parts[:1]
        each = bytes_per_token(self.speaks(model), WIDTHS[dtypes[parts[0]]])
        prefill = replace(PREFILL, components=parts, room=OutputSize(4096, each, 1, ("prompt_tokens",)))
        return Pipeline((prefill, replace(DECODE, components=parts)))

    def spreads(self, model: ModelFolder) -> dict[str, dict[str, int]]:
        """By stage kind, the kinds by which a stage may be spread over ranks, as `Spread.refusal` reads them.

        By `layers` ranks would wait for each other at each token, and by `shard` all weights would travel for it.
        """
        config = self.speaks(model)
        way = {"tensor": ENCODERS[model.kind].common({"num_key_value_heads": config["num_attention_heads"], **config})}
        return {PREFILL.kind: way, DECODE.kind: way}

    def vision(self, model: ModelFolder) -> VisionConfig | None:
        """What it makes of pictures, if it sees any."""
        return None

    @override
    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        from unfuse.language.grammars import Grammars
        from unfuse.language.tokenizer import ChatTokenizer
        from unfuse.stages.language import Decode, Prefill

        shared, key = runtime.shared, (folder, runtime.dtypes[self.parts[0]])
        if key not in shared:
            shared[key] = self.opened(folder, runtime, report), ChatTokenizer.read(folder), Grammars(str(folder))
        opened, tokenizer, grammars = shared[key]
        stage = Prefill(opened) if spec.kind == PREFILL.kind else Decode(opened, tokenizer, grammars, runtime.group)
        stage.resources = dict.fromkeys(spec.brings, opened.tokens)
        stage.exact = runtime.options.batching == "exact"
        return stage

    def opened(self, folder: Path, runtime: RuntimeOptions, report: Report | None) -> SequencePool:
        """The model with an empty KV."""
        from unfuse.stages.sequence_pool import open_model

        files = files_of(folder)
        model = Loader(files, {WHOLE: ("transformers", files.kind)}, runtime, report).model(WHOLE)
        return open_model(model, runtime.device, self.room(folder, runtime), axis=axis_of(runtime))

    @override
    def prepare(self, folder: Path) -> None:
        import_module("unfuse.stages.language")
        getattr(import_module("transformers"), files_of(folder).kind)
        if folder.suffix == GGUF:
            import_module("gguf.quants")

    def room(self, folder: Path, runtime: RuntimeOptions) -> int:
        """How many tokens the KV has room for. Raises ConfigError where that is less than the longest text.

        Ranks have room for equally many, as the one with least has; what was set is for all of them together.
        """
        files, group, axis = files_of(folder), runtime.group, axis_of(runtime)
        each = bytes_per_token(self.speaks(files), WIDTHS[runtime.dtypes[self.parts[0]]]) // (axis.size if axis else 1)
        most, ranks = int(self.card("", folder).limits["max_tokens"]) + BLOCK, group.size if group else 1
        room = runtime.kv // ranks or _usual(runtime.device, most * each, ranks)
        if group:
            room = min(int(said) for said in group.exchange(str(room).encode()))
        if room < most * each:
            raise ConfigError(
                f"keys and values of the longest text, {most} tokens, take {readable_bytes(most * each)}; there are "
                f"{readable_bytes(room)} for them: give --kv more, or set a limit max_tokens in {files.home / SERVING}"
            )
        return room // each

    def _defaults(self, model: ModelFolder) -> Params:
        """Those of generation_config.json, if the model has one; greedy if it says that nothing is drawn."""
        said = model.beside("generation_config.json")
        found: Params = {name: said[name] for name in DEFAULTS if isinstance(said.get(name), int | float)}
        return found | ({"temperature": 0.0} if said.get("do_sample") is False else {})


def _bounded(derived: TextLimits, said: dict[str, int | float]) -> TextLimits:
    """These limits, made smaller by those of serving.json. Raises ConfigError for what is no limit, or larger."""
    known = asdict(derived)
    if unknown := sorted(said.keys() - known):
        raise ConfigError(f"{SERVING}: unknown limit {unknown[0]!r}; known are {', '.join(known)}")
    for name in ("max_tokens", "vocabulary"):
        if not 0 < said.get(name, known[name]) <= known[name]:
            raise ConfigError(f"{SERVING}: limit {name} {said[name]} must be 1 to the model's {known[name]}")
    return convert({**known, **said}, TextLimits)


def axis_of(runtime: RuntimeOptions) -> Axis | None:
    """The ranks that each have a share of the heads, if there are several."""
    return runtime.mesh.axis("tensor") if runtime.mesh and "tensor" in runtime.mesh.degrees else None


def _usual(device: str, least: int, ranks: int) -> int:
    """Default bytes for keys and values: a quarter of what is free, which CPU ranks share, or one longest text."""
    from unfuse.parallel.devices import memory

    free = available_memory() // ranks if device.startswith("cpu") else memory(device)[0]
    return max(free // 4, min(least, free // 4 * 3))


def bytes_per_token(config: dict[str, Any], width: int) -> int:
    """Bytes of the keys and values of one token, in numbers of that width."""
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or config["hidden_size"] // heads)
    return 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * size * width


FAMILY = LanguageFamily()


PROCESSOR = CONFIGS["image_processor"]
VIDEOS = "video_preprocessor_config.json"
TIMED = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
"""Those to which each group of frames of a video is shown apart, behind its time."""


class VisionLanguage(LanguageFamily):
    """Prefill and decode load what speaks, vision encoding what sees."""

    parts = (LANGUAGE, VISION)

    @override
    def speaks(self, model: ModelFolder) -> dict[str, Any]:
        config = model.config(WHOLE)
        return dict(config.get("text_config") or config)

    @override
    def pipeline(self, model: ModelFolder, dtypes: Mapping[str, str]) -> Pipeline:
        sees = model.config(WHOLE)["vision_config"]
        layers = 1 + len(sees.get("deepstack_visual_indexes") or ())
        each = int(sees["out_hidden_size"]) * WIDTHS[dtypes[VISION]] * layers
        prefill, decode = super().pipeline(model, dtypes).stages
        return Pipeline((
            replace(
                VISION_ENCODE, components=(VISION,), room=OutputSize(4096 + layers * ALIGNMENT, each, 1, ("tokens",))
            ),
            replace(prefill, inputs=VISION_ENCODE.outputs),
            replace(decode, inputs=(*decode.inputs, *VISION_ENCODE.outputs)),
        ))  # fmt: skip

    @override
    def spreads(self, model: ModelFolder) -> dict[str, dict[str, int]]:
        sees = SEEING.common(model.config(WHOLE)["vision_config"])
        return super().spreads(model) | {VISION_ENCODE.kind: {"tensor": sees}}

    @override
    def vision(self, model: ModelFolder) -> VisionConfig:
        config, sees = model.config(WHOLE), model.config(WHOLE)["vision_config"]
        pictures, timed = model.beside(PROCESSOR), model.kind in TIMED
        videos = model.beside(VIDEOS) or pictures
        if not pictures:
            raise ConfigError(f"model {model.path} has no {PROCESSOR}, which says how pictures are prepared")
        patch, merge = int(sees["patch_size"]), int(sees.get("spatial_merge_size", 2))
        side = (patch * merge) ** 2
        if (said := int(pictures.get("patch_size", 14))) != patch:
            raise ConfigError(f"model {model.path}: {PROCESSOR} has patches of {said}, and the model of {patch}")
        return VisionConfig(
            picture=int(config["image_token_id"]),
            video=int(config["video_token_id"]),
            begin=int(config["vision_start_token_id"]),
            end=int(config["vision_end_token_id"]),
            patch=patch,
            merge=merge,
            group=int(sees.get("temporal_patch_size", 2)),
            pictures=_bounds(pictures, 56 * 56, 28 * 28 * 1280),
            videos=_bounds(videos, 128 * side, 768 * side),
            images=PixelBounds(int(videos.get("min_frames", 4)), int(videos.get("max_frames", 768))),
            rate=float(videos.get("fps") or 2),
            timed=timed,
            pace=float(sees.get("tokens_per_second", 4)),
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
        model = _loader(files, runtime, report).model(LANGUAGE, _speaking)
        deep = len(files.config(WHOLE)["vision_config"].get("deepstack_visual_indexes") or ())
        room, vision = self.room(folder, runtime), self.vision(files)
        return open_model(model, runtime.device, room, vision, deep, axis_of(runtime))

    @override
    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        import_module("unfuse.stages.vision_encode")
        import_module("transformers").AutoImageProcessor  # noqa: B018 - it is loaded when it is looked up


class Tower:
    """The vision tower, and what prepares pictures for it; a VisionEncoder."""

    def __init__(self, folder: Path, runtime: RuntimeOptions, report: Report | None) -> None:
        from transformers import AutoImageProcessor

        files = ModelFolder(folder)
        loader = _loader(files, runtime, report)
        self._tower, self._device = loader.model(VISION, _seeing).model.visual, loader.device
        self._processor = AutoImageProcessor.from_pretrained(str(folder), local_files_only=True)
        self._vision, self._said = VISION_LANGUAGE.vision(files), self._processor.to_dict() | files.beside(VIDEOS)
        sees = files.config(WHOLE)["vision_config"]
        self.dtype, self.width = runtime.dtypes[VISION], int(sees["out_hidden_size"])
        self.deep = len(sees.get("deepstack_visual_indexes") or ())

    def encode(self, views: Sequence[VisionInput]) -> list[VisionFeatures]:
        """Each in a forward of its own."""
        return [self._seen(self._video(view) if view.video else self._picture(view), view.grid) for view in views]

    def _picture(self, view: VisionInput) -> Tensor:
        """The patches of a picture, as the processor prepares them."""
        made = self._processor(images=[*view.images], return_tensors="pt")
        if [tuple(grid) for grid in made["image_grid_thw"].tolist()] != [view.grid]:
            raise PermanentError(f"a picture has become patches of {made['image_grid_thw'].tolist()}, not {view.grid}")
        patches: Tensor = made["pixel_values"]
        return patches

    def _video(self, view: VisionInput) -> Tensor:
        """The patches of a video: those of each group of frames, by rows and columns of tokens, then of each token."""
        import torch

        vision, (groups, rows, columns) = self._vision, view.grid
        size = columns * vision.patch, rows * vision.patch
        frames = [self._scaled(image.resize(size, Resampling.BICUBIC)) for image in view.images]
        frames += frames[-1:] * (-len(frames) % vision.group)
        if len(frames) != groups * vision.group:
            raise PermanentError(f"a video has {len(frames)} frames, not {groups * vision.group}")
        rows_of, columns_of = ((side // vision.merge, vision.merge, vision.patch) for side in (rows, columns))
        whole = torch.stack(frames).reshape(groups, vision.group, -1, *rows_of, *columns_of)
        patches = whole.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return patches.reshape(groups * rows * columns, -1)

    def _scaled(self, image: Image) -> Tensor:
        """A frame (colours, height, width) in the numbers that the tower is trained on."""
        import numpy as np
        import torch

        pixels = torch.from_numpy(np.array(image.convert("RGB"), np.float32)) / 255
        mean, spread = (torch.tensor(self._said[name]) for name in ("image_mean", "image_std"))
        return ((pixels - mean) / spread).permute(2, 0, 1)

    def _seen(self, patches: Tensor, grid: Grid) -> VisionFeatures:
        import torch

        from unfuse.stages.vision_encode import VisionFeatures

        grids = torch.tensor([grid], device=self._device)
        made = self._tower(patches.to(self._device, self._tower.dtype), grid_thw=grids)
        deep = getattr(made, "deepstack_features", None) or ()
        return VisionFeatures(made.pooler_output.clone(), [layer.clone() for layer in deep])


def _loader(files: ModelFolder, runtime: RuntimeOptions, report: Report | None) -> Loader:
    return Loader(files, dict.fromkeys((LANGUAGE, VISION), ("transformers", files.kind)), runtime, report)


def _bounds(said: dict[str, Any], least: int, most: int) -> PixelBounds:
    """The pixels that a configuration allows, in either of two spellings."""
    size = said.get("size") or {}
    fewest, largest = size.get("shortest_edge", least), size.get("longest_edge", most)
    return PixelBounds(int(said.get("min_pixels") or fewest), int(said.get("max_pixels") or largest))


def _speaking(whole: Any) -> Any:
    """The class of the model without its vision tower."""
    return _part(whole, ["model.visual"], SEES)


def _seeing(whole: Any) -> Any:
    """The class of the model that has nothing but its vision tower."""
    spoken = "language_model", "lm_head"
    return _part(whole, ["model.language_model", "lm_head"], *spoken, _tied_weights_keys={})


def _part(whole: Any, without: Sequence[str], *unread: str, **more: Any) -> Any:
    """A class that makes the model without some modules, whose weights are `unread` then, as regular expressions.

    transformers finds out by name and module of a class what files call its weights: so it has those of the whole.
    """

    def make(model: Any, config: Any) -> None:
        whole.__init__(model, config)
        for parent, _, name in (module.rpartition(".") for module in without):
            setattr(model.get_submodule(parent), name, None)

    own = {"__init__": make, "__module__": whole.__module__, "_keys_to_ignore_on_load_unexpected": [*unread]}
    return type(whole.__name__, (whole,), {**own, **more})


VISION_LANGUAGE = VisionLanguage()
