"""Wan image to video: what text to video does, and a picture that is encoded twice, by CLIP and by the VAE.

The stages do what diffusers' WanImageToVideoPipeline does, in its order of operations. Text encoder and VAE are those
of text to video, so that both kinds of model share their pools. Checked against diffusers 0.42.

For CLIP a picture is prepared by the class that model_index.json names, which is what an undivided pipeline loads too.
CLIPImageProcessorPil is Pillow everywhere; the other two are torchvision where it is installed, else Pillow. Resizing
differs a little between them, so the same seed gives the same video only on machines that have the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from typing import TYPE_CHECKING

from msgspec import structs

from unfuse.core.card import Limits
from unfuse.core.errors import ConfigError
from unfuse.core.object_ref import ALIGNMENT
from unfuse.core.plan import Params, Pipeline, Room, StageSpec
from unfuse.models.base import Loader, with_encoders
from unfuse.models.flow import norm
from unfuse.models.folder import ModelFolder
from unfuse.models.wan import LATENT_BYTES, Shape, Wan, WanVae
from unfuse.stages.base import Stage

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

ENCODED_FRAMES = 4
"""After the first frame AutoencoderKLWan encodes so many at a time, whatever its scale factor, and drops a rest."""


class WanPicture:
    """CLIP's image encoder and the VAE; an ImageEncoder."""

    def __init__(self, loader: Loader) -> None:
        self._processor, self._encoder = loader.plain("image_processor"), loader.model("image_encoder")
        self._vae, self._shape = WanVae(loader), Shape.of(loader.folder)

    def verify(self, params: Params) -> None:
        """See ImageEncoder."""
        self._shape.latents(params)

    def encode(self, pictures: Sequence[Image], params: Params) -> dict[str, Tensor]:
        """See WanDenoiser for the two."""
        pixels = self._processor(images=list(pictures), return_tensors="pt").to(self._vae.device)
        hidden = self._encoder(**pixels, output_hidden_states=True).hidden_states
        return {"image_embeds": hidden[-2], "condition": self._condition(pictures, params)}

    def _condition(self, pictures: Sequence[Image], params: Params) -> Tensor:
        """Float32: a mask that is 1 where the picture is, in the frames of each group, then latents of it and grey."""
        import torch
        from diffusers.video_processor import VideoProcessor

        vae, temporal, spatial = self._vae.vae, self._shape.temporal, self._shape.spatial
        _, _, groups, rows, columns = self._shape.latents(params)
        size = {"height": rows * spatial, "width": columns * spatial}
        first = VideoProcessor(vae_scale_factor=spatial).preprocess(list(pictures), **size)
        video = first.new_zeros(*first.shape[:2], (groups - 1) * temporal + 1, *first.shape[2:])
        video[:, :, 0] = first
        latents = vae.encode(video.to(self._vae.device, vae.dtype)).latent_dist.mode().float()
        mean, scale = norm(vae, latents)
        mask = latents.new_zeros(len(pictures), temporal, groups, rows, columns)
        mask[:, :, 0] = 1
        return torch.cat([mask, (latents - mean) * scale], dim=1)


class WanImage(Wan):
    """The stages of a WanImageToVideoPipeline folder; text and picture are encoded side by side."""

    source = ("pipelines/wan/pipeline_wan_i2v.py", "WanImageToVideoPipeline")
    classes = Wan.classes | {
        "image_encoder": ("transformers", ("CLIPVisionModel", "CLIPVisionModelWithProjection")),
        "image_processor": ("transformers", ("CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil")),
    }
    takes_image = True

    def components(self, folder: ModelFolder) -> dict[str, tuple[str, str]]:
        """See Wan. What was called Fast when it was saved has lost that word since."""
        found = super().components(folder)
        library, name = found["image_processor"]
        return found | {"image_processor": (library, name.removesuffix("Fast"))}

    def limits(self, folder: ModelFolder, defaults: Params) -> Limits:
        """See DiffusersFamily."""
        if folder.config("transformer").get("pos_embed_seq_len") is not None:
            raise ConfigError(f"model {folder.path} goes from a first picture to a last one, which is not served yet")
        limits = super().limits(folder, defaults)
        return structs.replace(limits, frame_multiple=lcm(limits.frame_multiple, ENCODED_FRAMES))

    def pipeline(self, folder: ModelFolder, limits: Limits, widths: Mapping[str, int]) -> Pipeline:
        """See Wan."""
        text, denoise, _ = super().pipeline(folder, limits, widths).stages
        shape, clip = Shape.of(folder), folder.config("image_encoder")
        with folder.reading("image_encoder"):
            tokens = (int(clip["image_size"]) // int(clip["patch_size"])) ** 2 + 1
            embeds = tokens * int(clip["hidden_size"]) * widths["image_encoder"]
        per_pixel = shape.condition * LATENT_BYTES / shape.spatial**2
        picture = StageSpec(
            "image_encode", "image_encode", ("image_encoder", "image_processor", "vae"),
            outputs=("image_embeds", "condition"), room=Room(embeds + 2 * ALIGNMENT, per_pixel, shape.temporal),
            reads=("image", "width", "height", "num_frames"),
        )  # fmt: skip
        return with_encoders((text, picture), denoise.room)

    def stage(self, kind: str, loader: Loader) -> Stage:
        """See Wan. The image encoder reads the transformer's configuration too, not its weights."""
        from unfuse.stages.image_encode import ImageEncode

        return ImageEncode(WanPicture(loader)) if kind == "image_encode" else super().stage(kind, loader)


FAMILY = WanImage()
