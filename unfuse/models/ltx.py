"""LTX-Video: text-to-video with one text encoder.

The stages do what diffusers' LTXPipeline does, in its order of operations, with its components. Checked against
diffusers 0.42.

The position of each patch is an input of the transformer: in pixels and, by `fps`, in seconds. A folder whose VAE draws
noise while it decodes is served undivided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash
from msgspec.structs import replace
from typing_extensions import override

from unfuse.core.errors import ConfigError
from unfuse.core.modalities import MediaLimits
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Params, StageSpec
from unfuse.models.base import Loader
from unfuse.models.components import (
    T5_TOKENIZERS,
    FlowDenoiser,
    VideoFamily,
    VideoShape,
    need_channels,
    text_stage,
)
from unfuse.models.text_encoders import T5TextEncoder
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim, TensorParallelLayers
from unfuse.stages.base import UNCONDITIONAL, guidance_scale, need
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from unfuse.stages.denoise import RowFacts


@dataclass(frozen=True)
class Shape(VideoShape):
    """The sizes in a model's configurations."""

    text_dim: int  # width of the prompt embeddings

    @classmethod
    def read(cls, folder: ModelFolder) -> Shape:
        """Read the configurations. Raises ConfigError for a misfit, or a VAE that draws noise."""
        transformer, vae = folder.config("transformer"), folder.config("vae")
        with folder.reading("transformer or vae"):
            block_scale = 2 ** sum(map(bool, vae["spatio_temporal_scaling"]))
            shape = cls(
                int(vae["latent_channels"]),
                int(vae.get("spatial_compression_ratio") or int(vae["patch_size"]) * block_scale),
                int(vae.get("temporal_compression_ratio") or int(vae["patch_size_t"]) * block_scale),
                int(transformer["caption_channels"]),
            )
            channels = int(transformer["in_channels"])
            patches = (transformer["patch_size"], transformer["patch_size_t"])
        need_channels(folder, shape.channels, channels)
        if patches != (1, 1) or any(vae.get("decoder_inject_noise") or ()):
            reason = "a VAE that draws noise, or a transformer with a patch size above 1, is not supported"
            raise ConfigError(f"model {folder.path}: {reason}")
        return shape


class LtxTextEncoder(T5TextEncoder):
    """T5 as a TextEncoder."""

    @override
    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """Return `prompt_embeds`, and `prompt_mask` (texts, length): 1.0 for a text's tokens."""
        mask = self._tokens(texts, length).attention_mask.to(self._encoder.dtype)
        return {**super().encode(texts, length), "prompt_mask": mask}


class LtxDenoiser(FlowDenoiser):
    """The LTX transformer as a Denoiser. Latents are (1, patches, channels)."""

    first, guidance = UNCONDITIONAL, staticmethod(guidance_scale)
    required_params = {"fps": int}
    noise_scheduler = FlowDenoiser.shifted

    def __init__(self, loader: Loader) -> None:
        self._shape = shape = Shape.read(loader.folder)
        super().__init__(loader, shape.latents)
        self.embeds = {"prompt_embeds": (1, None, shape.text_dim), "prompt_mask": (1, None)}

    @override
    def sample_noise(self, params: Params, generator: torch.Generator) -> Tensor:
        return super().sample_noise(params, generator).flatten(2).transpose(1, 2)

    @override
    def constants(self, params: Params, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `coords` (1, 3, patches): each patch's time in seconds, row and column in pixels."""
        import torch

        axes = (torch.arange(side, dtype=torch.float32, device=self.device) for side in self._shape.grid(params))
        scales = self._shape.temporal / need(params, "fps", int), self._shape.spatial, self._shape.spatial
        positions = torch.cartesian_prod(*axes).T
        scaled = [position * scale for position, scale in zip(positions, scales, strict=True)]
        return {"coords": torch.stack(scaled)[None]}

    def predict(
        self,
        latents: Tensor,
        timestep: Tensor,
        inputs: Mapping[str, Tensor],
        params: Params,
        facts: Sequence[RowFacts],
    ) -> Tensor:
        """Return the velocity in float32, in the shape of the latents."""
        velocity = self._predicted(
            hidden_states=latents,
            encoder_hidden_states=inputs["prompt_embeds"],
            timestep=timestep,
            encoder_attention_mask=inputs["prompt_mask"],
            video_coords=inputs["coords"],
        )
        return velocity.float()


class LtxVae:
    """The VAE as a VaeDecoder."""

    def __init__(self, loader: Loader) -> None:
        import torch

        self.vae, self._device = loader.vae(), loader.device
        self._shape = Shape.read(loader.folder)
        self._text_dtype = getattr(torch, loader.runtime.dtypes["text_encoder"])
        self.latents: tuple[int | None, ...] = (1, None, self._shape.channels)

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        """Return denormalized latents as a grid (1, channels, frames, height, width).

        They are rounded to the dtype of the text embeddings, as in the pipeline.
        """
        from unfuse.stages.device_copies import to_device

        sides, vae = self._shape.grid(params), self.vae
        grid = to_device(latents, self._device).transpose(1, 2).reshape(1, self._shape.channels, *sides)
        mean, deviation = (values.view(1, -1, 1, 1, 1).to(grid) for values in (vae.latents_mean, vae.latents_std))
        scaled: Tensor = grid * deviation / vae.config.scaling_factor + mean
        return scaled.to(self._text_dtype).to(vae.dtype)

    def decode(self, grid: Tensor) -> Tensor:
        """Return pixels (rows, 3, frames, height, width).

        A VAE with timestep conditioning gets the timestep without noise, 0.
        """
        timestep = grid.new_zeros(len(grid)) if self.vae.config.timestep_conditioning else None
        pixels: Tensor = self.vae.decode(grid, timestep, return_dict=False)[0]
        return pixels


class Ltx(VideoFamily):
    """The family of LTXPipeline."""

    name = "ltx"
    source = ("pipelines/ltx/pipeline_ltx.py", "LTXPipeline")
    classes = {
        "tokenizer": ("transformers", T5_TOKENIZERS),
        "text_encoder": ("transformers", ("T5EncoderModel",)),
        "transformer": ("diffusers", ("LTXVideoTransformer3DModel",)),
        "scheduler": ("diffusers", ("FlowMatchEulerDiscreteScheduler",)),
        "vae": ("diffusers", ("AutoencoderKLLTXVideo",)),
    }
    text_encoders = {"text_encode": partial(LtxTextEncoder, guidance=guidance_scale)}
    shape = Shape.read
    pixel_multiple = 32
    denoiser = LtxDenoiser
    vae = LtxVae
    else_whole = True
    parallel_plans = ParallelPlan(
        blocks=("transformer_blocks",),
        attention="attn1",
        order=("tokens",),
        block_inputs={"hidden_states": SequenceDim(1, ("tokens",))},
        follow={"image_rotary_emb": (SequenceDim(1, ("tokens",)),)},
        block_outputs=(SequenceDim(1, ("tokens",)),),
        matrices=TensorParallelLayers((), (), ()),
    )

    @override
    def model_spec(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        """Return the model spec.

        The identity of the VAE covers the dtype of the text encoder, to which latents are rounded before decoding.
        """
        spec = super().model_spec(name, folder, dtype)
        vae_id = xxhash.xxh3_128_hexdigest(f"{spec.weights['vae']} {spec.dtypes['text_encoder']}".encode())
        return replace(spec, weights={**spec.weights, "vae": vae_id})

    @override
    def denoiser_parallelism(self, folder: ModelFolder) -> dict[str, int]:
        """Return the kinds of parallelism that denoising supports.

        Not tensor parallelism, because the rotary embedding applies to all heads at once.
        """
        supported = super().denoiser_parallelism(folder)
        return {kind: supported[kind] for kind in supported if kind != "tensor"}

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        shape = Shape.read(folder)
        mask_bytes = limits.max_sequence_length * widths["text_encoder"]
        sizes = {"prompt_embeds": mask_bytes * shape.text_dim, "prompt_mask": mask_bytes}
        return (text_stage(sizes, "guidance_scale"),)


FAMILY = Ltx()
