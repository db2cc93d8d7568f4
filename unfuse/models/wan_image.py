"""Wan image to video: what text to video does, and a picture that is encoded twice, by CLIP and by the VAE.

A last frame may go beside the first, or has to, by what the transformer sees.

The stages do what diffusers' WanImageToVideoPipeline does, in its order of operations. Text encoder and VAE are those
of text to video, so that both kinds of model share their pools. Checked against diffusers 0.42.

Wan 2.2 has no CLIP. Where each token has a timestep (the 5B), the VAE encodes the picture alone, as the first frame.

For CLIP a picture is prepared by the class that model_index.json names, which is what an undivided pipeline loads too.
CLIPImageProcessorPil is Pillow everywhere; the other two are torchvision where it is installed, else Pillow. Resizing
differs a little between them, so the same seed gives the same video only on machines that have the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs
from msgspec.structs import replace
from typing_extensions import override

from unfuse.core.card import START_PICTURE, AcceptedInput, ModelCard
from unfuse.core.errors import ConfigError
from unfuse.core.media import LAST_FRAME, PIXELS, UPLOAD, Limits, Room
from unfuse.core.object_ref import ALIGNMENT
from unfuse.core.plan import Params, Pipeline
from unfuse.models.base import Loader
from unfuse.models.flow_matching import norm
from unfuse.models.text import with_encoders
from unfuse.models.wan import LATENT_BYTES, Shape, Wan, WanVae
from unfuse.stages.base import Stage
from unfuse.stages.specs import IMAGE_ENCODE
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

ENCODED_FRAMES = 4  # what AutoencoderKLWan encodes at a time after the first frame, always; it drops a rest


class WanPicture:
    """CLIP's image encoder, where there is one, and the VAE; an ImageEncoder."""

    def __init__(self, loader: Loader, sees: bool) -> None:
        self._clip = (loader.plain("image_processor"), loader.model("image_encoder")) if sees else None
        self._vae, self._shape = WanVae(loader), Shape.of(loader.folder)

    def verify(self, params: Params) -> None:
        """Raise PermanentError for a size that does not fit."""
        self._shape.latents(params)

    def encode(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> dict[str, Tensor]:
        """The `condition` for the denoiser, and where the model sees pictures `image_embeds`, each a row a picture."""
        condition = {"condition": self._condition(pictures, params)}
        if self._clip is None:
            return condition
        processor, encoder = self._clip
        in_rows = [one for row in zip(*pictures.values(), strict=True) for one in row]
        pixels = processor(images=in_rows, return_tensors="pt").to(self._vae.device)
        seen = encoder(**pixels, output_hidden_states=True).hidden_states[-2]
        return {"image_embeds": seen.unflatten(0, (-1, 2)) if LAST_FRAME in pictures else seen, **condition}

    def _condition(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> Tensor:
        """Float32 latents, of the first frame alone or of it, grey, and the last frame if there is one, behind a mask
        that is 1 where pictures are. The mask says so of each frame in the groups that latents are of.
        """
        import torch
        from diffusers.video_processor import VideoProcessor

        vae, temporal, spatial = self._vae.vae, self._shape.temporal, self._shape.spatial
        _, _, groups, rows, columns = self._shape.latents(params)
        size = {"height": rows * spatial, "width": columns * spatial}
        processor = VideoProcessor(vae_scale_factor=spatial)
        given = {name: processor.preprocess(list(of), **size) for name, of in pictures.items()}
        first, last = given[UPLOAD], given.get(LAST_FRAME)
        video = first.new_zeros(
            *first.shape[:2], 1 if self._shape.first else (groups - 1) * temporal + 1, *first.shape[2:]
        )
        video[:, :, 0] = first
        if last is not None:
            video[:, :, -1] = last
        latents = vae.encode(video.to(self._vae.device, vae.dtype)).latent_dist.mode().float()
        mean, scale = norm(vae, latents)
        normed: Tensor = (latents - mean) * scale
        if self._shape.first:
            return normed
        mask = latents.new_zeros(len(first), temporal, groups, rows, columns)
        mask[:, :, 0] = 1
        if last is not None:
            mask[:, -1, -1] = 1
        return torch.cat([mask, normed], dim=1)


class WanImage(Wan):
    """The stages of a WanImageToVideoPipeline folder; text and picture are encoded side by side."""

    source = ("pipelines/wan/pipeline_wan_i2v.py", "WanImageToVideoPipeline")
    classes = Wan.classes | {
        "image_encoder": ("transformers", ("CLIPVisionModel", "CLIPVisionModelWithProjection")),
        "image_processor": ("transformers", ("CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil")),
    }
    accepts = (START_PICTURE,)

    @override
    def card(self, name: str, folder: Path, dtype: str = "auto") -> ModelCard:
        card = super().card(name, folder, dtype)
        return replace(card, accepts=(*card.accepts, *_last_frame(Shape.of(ModelFolder(folder)))))

    @override
    def components(self, folder: ModelFolder) -> dict[str, tuple[str, str]]:
        """What was called Fast when it was saved has lost that word since."""
        found = super().components(folder)
        renamed = {part: (found[part][0], found[part][1].removesuffix("Fast")) for part in found if "image" in part}
        return found | renamed

    @override
    def served(self, index: Mapping[str, Any]) -> Mapping[str, tuple[str, tuple[str, ...]]]:
        """CLIP's two parts go together."""
        found = super().served(index)
        sees = any(index.get("image_encoder") or ())
        return {part: known for part, known in found.items() if sees or not part.startswith("image")}

    @override
    def settings(self, index: Mapping[str, Any]) -> dict[str, str]:
        """A first frame alone is encoded otherwise by an equal VAE."""
        found = super().settings(index)
        return {**found, "vae": "first frame"} if index.get("expand_timesteps") else found

    @override
    def limits(self, folder: ModelFolder, defaults: Params) -> Limits:
        limits = super().limits(folder, defaults)
        return structs.replace(limits, frame_multiple=lcm(limits.frame_multiple, ENCODED_FRAMES))

    @override
    def spreads(self, folder: ModelFolder) -> dict[str, dict[str, int]]:
        """Of a picture, what CLIP does by weights, and what the VAE does by tiles; texts have no tiles to share."""
        ways = {IMAGE_ENCODE.kind: {"tensor": 0}} | super().spreads(folder)
        return {kind: ways[kind] | ({"tiles": 0} if kind.endswith("_encode") else {}) for kind in ways}

    @override
    def pipeline(self, folder: ModelFolder, limits: Limits, widths: Mapping[str, int]) -> Pipeline:
        text, denoise, _ = super().pipeline(folder, limits, widths).stages
        shape, sees = Shape.of(folder), [part for part in self.components(folder) if part.startswith("image")]
        if shape.image_dim is not None and not sees:
            raise ConfigError(
                f"model {folder.path}: the transformer takes CLIP's embeddings, and there is no image_encoder"
            )
        channels, frames = (shape.channels, limits.max_frames) if shape.first else (shape.condition, shape.temporal)
        embeds = _embeds(folder) * widths["image_encoder"] * (1 + shape.ends) + ALIGNMENT if sees else 0
        picture = replace(
            IMAGE_ENCODE,
            components=(*sees, "vae"),
            outputs=("image_embeds", "condition") if sees else ("condition",),
            room=Room(embeds + ALIGNMENT, channels * LATENT_BYTES / shape.spatial**2, frames),
            reads=("image", *PIXELS, LAST_FRAME),
        )
        return with_encoders((text, picture), denoise.room, denoise.components[:-1])

    @override
    def stage(self, kind: str, loader: Loader) -> Stage:
        """The image encoder reads the transformer's configuration too, not its weights."""
        from unfuse.stages.image_encode import ImageEncode

        if kind != "image_encode":
            return super().stage(kind, loader)
        stage = ImageEncode(WanPicture(loader, "image_encoder" in self.components(loader.folder)))
        stage.beside = (LAST_FRAME,)
        return stage


def _last_frame(shape: Shape) -> tuple[AcceptedInput, ...]:
    """CLIP's embeddings of both have a place in some transformers, which then need both; others do not see the last."""
    if shape.ends or (shape.pictured and shape.image_dim is None):
        return (AcceptedInput(LAST_FRAME, "end", min=int(shape.ends)),)
    return ()


def _embeds(folder: ModelFolder) -> int:
    """Numbers that CLIP makes of a picture."""
    clip = folder.config("image_encoder")
    with folder.reading("image_encoder"):
        return ((int(clip["image_size"]) // int(clip["patch_size"])) ** 2 + 1) * int(clip["hidden_size"])


FAMILY = WanImage()
