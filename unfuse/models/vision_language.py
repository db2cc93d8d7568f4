"""Language models of transformers that see: Qwen2.5-VL, Qwen3-VL, and its mixture of experts.

A worker for vision loads the vision tower alone, one for prefill or decode all but that. What the tower makes of a
picture, embeddings and deepstack features, is what a prompt has in place of the picture's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from PIL.Image import Resampling
from typing_extensions import override

from unfuse.core.errors import ConfigError, PermanentError
from unfuse.core.object_ref import ALIGNMENT, DTYPES as WIDTHS
from unfuse.core.parameters import Room
from unfuse.core.plan import Pipeline, StageSpec
from unfuse.core.vision import Grid, PixelBounds, Vision
from unfuse.models.base import Loader, Report, Runtime
from unfuse.models.encoders import SEES as SEEING
from unfuse.models.language import LanguageFamily, axis_of
from unfuse.stages.specs import VISION_ENCODE
from unfuse.weights.folder import CONFIGS, LANGUAGE, SEES, VISION, WHOLE, ModelFolder

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from unfuse.stages.base import Stage
    from unfuse.stages.sequences import Sequences
    from unfuse.stages.vision_encode import Seen, View

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
            replace(VISION_ENCODE, components=(VISION,), room=Room(4096 + layers * ALIGNMENT, each, 1, ("tokens",))),
            replace(prefill, inputs=VISION_ENCODE.outputs),
            replace(decode, inputs=(*decode.inputs, *VISION_ENCODE.outputs)),
        ))  # fmt: skip

    @override
    def spreads(self, model: ModelFolder) -> dict[str, dict[str, int]]:
        sees = SEEING.common(model.config(WHOLE)["vision_config"])
        return super().spreads(model) | {VISION_ENCODE.kind: {"tensor": sees}}

    @override
    def vision(self, model: ModelFolder) -> Vision:
        config, sees = model.config(WHOLE), model.config(WHOLE)["vision_config"]
        pictures, timed = model.beside(PROCESSOR), model.kind in TIMED
        videos = model.beside(VIDEOS) or pictures
        if not pictures:
            raise ConfigError(f"model {model.path} has no {PROCESSOR}, which says how pictures are prepared")
        patch, merge = int(sees["patch_size"]), int(sees.get("spatial_merge_size", 2))
        side = (patch * merge) ** 2
        if (said := int(pictures.get("patch_size", 14))) != patch:
            raise ConfigError(f"model {model.path}: {PROCESSOR} has patches of {said}, and the model of {patch}")
        return Vision(
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
    def load(self, spec: StageSpec, folder: Path, runtime: Runtime, report: Report | None = None) -> Stage:
        if spec.kind != VISION_ENCODE.kind:
            return super().load(spec, folder, runtime, report)
        from unfuse.stages.vision_encode import VisionEncode

        stage = VisionEncode(Tower(folder, runtime, report))
        stage.exact = runtime.options.batching == "exact"
        return stage

    @override
    def opened(self, folder: Path, runtime: Runtime, report: Report | None) -> Sequences:
        from unfuse.stages.sequences import open_model

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

    def __init__(self, folder: Path, runtime: Runtime, report: Report | None) -> None:
        from transformers import AutoImageProcessor

        files = ModelFolder(folder)
        loader = _loader(files, runtime, report)
        self._tower, self._device = loader.model(VISION, _seeing).model.visual, loader.device
        self._processor = AutoImageProcessor.from_pretrained(str(folder), local_files_only=True)
        self._vision, self._said = FAMILY.vision(files), self._processor.to_dict() | files.beside(VIDEOS)
        sees = files.config(WHOLE)["vision_config"]
        self.dtype, self.width = runtime.dtypes[VISION], int(sees["out_hidden_size"])
        self.deep = len(sees.get("deepstack_visual_indexes") or ())

    def encode(self, views: Sequence[View]) -> list[Seen]:
        """Each in a forward of its own."""
        return [self._seen(self._video(view) if view.video else self._picture(view), view.grid) for view in views]

    def _picture(self, view: View) -> Tensor:
        """The patches of a picture, as the processor prepares them."""
        made = self._processor(images=[*view.images], return_tensors="pt")
        if [tuple(grid) for grid in made["image_grid_thw"].tolist()] != [view.grid]:
            raise PermanentError(f"a picture has become patches of {made['image_grid_thw'].tolist()}, not {view.grid}")
        patches: Tensor = made["pixel_values"]
        return patches

    def _video(self, view: View) -> Tensor:
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

    def _seen(self, patches: Tensor, grid: Grid) -> Seen:
        import torch

        from unfuse.stages.vision_encode import Seen

        grids = torch.tensor([grid], device=self._device)
        made = self._tower(patches.to(self._device, self._tower.dtype), grid_thw=grids)
        deep = getattr(made, "deepstack_features", None) or ()
        return Seen(made.pooler_output.clone(), [layer.clone() for layer in deep])


def _loader(files: ModelFolder, runtime: Runtime, report: Report | None) -> Loader:
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


FAMILY = VisionLanguage()
