"""Stable Diffusion XL: text-to-image by a UNet, with two text encoders in parallel.

Both encoders are CLIPs. The second one's pooled embeddings are an input together with the image's sizes. The stages do
what diffusers' StableDiffusionXLPipeline does, in its order of operations, with its components, but add no watermark.
Checked against diffusers 0.42.

Classifier-free guidance by `guidance_scale` uses the negative prompt. Without one, not even an empty one, it uses zero
embeddings where model_index.json requests that. A folder with another noise scheduler, such as one that draws noise at
each step, is served undivided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unfuse.core.errors import ConfigError
from unfuse.core.modalities import MediaLimits
from unfuse.core.plan import Params, StageSpec
from unfuse.models.base import Loader
from unfuse.models.components import (
    CLIP_TOKENIZERS,
    GridDenoiser,
    GridPictureVae,
    PictureFamily,
    PictureShape,
    computing_in,
    forces_upcast,
    need_channels,
    text_stage,
)
from unfuse.models.text_encoders import ProjectedClipTextEncoder
from unfuse.stages.base import UNCONDITIONAL, need
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from unfuse.stages.denoise import RowFacts

#: The pipeline requires sides to be a multiple of this, whatever the VAE.
PIXEL_MULTIPLE = 8

#: The setting of model_index.json for zero embeddings without a negative prompt.
ZEROS = "force_zeros_for_empty_prompt"


@dataclass(frozen=True)
class Shape(PictureShape):
    """The sizes in a model's configurations."""

    widths: tuple[int, int]  # of the text encoders' hidden states
    pooled: int  # width of the pooled embeddings
    tokens: int  # length of texts

    @classmethod
    def read(cls, folder: ModelFolder) -> Shape:
        """Read the configurations. Raises ConfigError for a misfit, or another base model."""
        vae, unet = PictureShape.of_vae(folder), folder.config("unet")
        first, second = folder.config("text_encoder"), folder.config("text_encoder_2")
        with folder.reading("unet or text_encoder"):
            shape = cls(
                channels=vae.channels,
                scale=vae.scale,
                multiple=lcm(PIXEL_MULTIPLE, vae.scale),
                usual=int(unet["sample_size"]) * vae.scale,
                longest=vae.longest,
                widths=(int(first["hidden_size"]), int(second["hidden_size"])),
                pooled=int(second["projection_dim"]),
                tokens=int(second["max_position_embeddings"]),
            )
            channels, distilled = int(unet["in_channels"]), unet.get("time_cond_proj_dim")
        need_channels(folder, vae.channels, channels)
        if distilled is not None or folder.config("vae").get("latents_mean") is not None:
            raise ConfigError(f"model {folder.path}: its UNet or VAE is not that of Stable Diffusion XL's base")
        return shape


class SdxlDenoiser(GridDenoiser):
    """The UNet as a Denoiser."""

    first = UNCONDITIONAL

    def __init__(self, loader: Loader) -> None:
        shape = Shape.read(loader.folder)
        super().__init__(loader, shape.latents, "unet")
        first, second = shape.widths
        self.embeds = {
            "prompt_embeds": (1, None, first),
            "prompt_embeds_2": (1, None, second),
            "pooled_prompt_embeds": (1, shape.pooled),
        }

    def constants(self, params: Params, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `time_ids` (1, 6): original size, crop position (0, 0) and target size."""
        import torch

        size = [need(params, side, int) for side in ("height", "width")]
        return {"time_ids": torch.tensor([[*size, 0, 0, *size]], dtype=self.dtype, device=self.device)}

    def predict(
        self,
        latents: Tensor,
        timestep: Tensor,
        inputs: Mapping[str, Tensor],
        params: Params,
        facts: Sequence[RowFacts],
    ) -> Tensor:
        """Return the predicted noise or velocity, depending on the noise scheduler's configuration."""
        import torch

        added = {"text_embeds": inputs["pooled_prompt_embeds"], "time_ids": inputs["time_ids"]}
        return self._predicted(
            latents,
            timestep,
            encoder_hidden_states=torch.cat([inputs["prompt_embeds"], inputs["prompt_embeds_2"]], -1),
            added_cond_kwargs=added,
        )


class SdxlVae(GridPictureVae):
    """The VAE as a VaeDecoder.

    In float16 it decodes in float32 if its configuration has `force_upcast`.
    """

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        # If the pipeline upcasts the VAE, it also casts the latents before it scales them.
        self._cast_first = self.vae.dtype.itemsize == 2 and self.dtype.itemsize == 4

    @property
    @override
    def dtype(self) -> torch.dtype:
        import torch

        overflows = self.vae.dtype == torch.float16 and forces_upcast(self.vae)
        return torch.float32 if overflows else super().dtype

    @override
    def decode(self, grid: Tensor) -> Tensor:
        with computing_in(self.vae, grid.dtype):
            return super().decode(grid)


class Sdxl(PictureFamily):
    """The family of StableDiffusionXLPipeline."""

    name = "sdxl"
    source = ("pipelines/stable_diffusion_xl/pipeline_stable_diffusion_xl.py", "StableDiffusionXLPipeline")
    classes = {
        "tokenizer": ("transformers", CLIP_TOKENIZERS),
        "text_encoder": ("transformers", ("CLIPTextModel",)),
        "tokenizer_2": ("transformers", CLIP_TOKENIZERS),
        "text_encoder_2": ("transformers", ("CLIPTextModelWithProjection",)),
        "unet": ("diffusers", ("UNet2DConditionModel",)),
        "scheduler": ("diffusers", ("EulerDiscreteScheduler",)),
        "vae": ("diffusers", ("AutoencoderKL",)),
    }
    text_encoders = {
        "text_encode": partial(ProjectedClipTextEncoder, names=["prompt_embeds"]),
        "text_encode_2": partial(
            ProjectedClipTextEncoder, names=["prompt_embeds_2", "pooled_prompt_embeds"], suffix="_2"
        ),
    }
    denoiser = SdxlDenoiser
    shape = Shape.read
    else_whole = True
    starts = ("image", "mask")
    vae = SdxlVae
    whole_steps = True
    repeats = True
    upcasts = True
    adapts = "unet"

    @override
    def settings(self, index: Mapping[str, Any]) -> dict[str, str]:
        return {} if index.get(ZEROS, True) else dict.fromkeys(("text_encoder", "text_encoder_2"), "empty")

    @override
    def standard(self, folder: ModelFolder) -> Params:
        """Return the defaults. The call has no `max_sequence_length`: texts have CLIP's length."""
        return {**super().standard(folder), "max_sequence_length": Shape.read(folder).tokens}

    @override
    def denoiser_parallelism(self, folder: ModelFolder) -> dict[str, int]:
        """Return the kinds of parallelism that denoising supports: for a UNet only CFG parallel."""
        return {"cfg": 2}

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        shape = Shape.read(folder)
        bytes_1, bytes_2 = widths["text_encoder"], widths["text_encoder_2"]
        elements_1, elements_2 = (shape.tokens * width for width in shape.widths)
        first_stage = text_stage({"prompt_embeds": elements_1 * bytes_1}, "guidance_scale")
        sizes = {"prompt_embeds_2": elements_2 * bytes_2, "pooled_prompt_embeds": shape.pooled * bytes_2}
        return first_stage, text_stage(sizes, "guidance_scale", "_2")

    @override
    def has_zeros(self, index: Mapping[str, Any]) -> bool:
        return bool(index.get(ZEROS, True))


FAMILY = Sdxl()
