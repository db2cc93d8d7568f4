"""LTX-Video: text to video with one text encoder.

The stages do what diffusers' LTXPipeline does, in its order of operations, on its components. Checked against
diffusers 0.42.

The transformer is told where and when each patch is: in pixels, and by `fps` in seconds. A folder whose VAE draws noise
while it decodes is served undivided.
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
    T5TextEncoder,
    VideoFamily,
    VideoShape,
    need_channels,
    text_stage,
)
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim, TensorParallelLayers
from unfuse.stages.base import AWAY, guidance_scale, need
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Shape(VideoShape):
    """Sizes that follow from a model's configurations."""

    text_dim: int

    @classmethod
    def of(cls, folder: ModelFolder) -> Shape:
        """Read the configurations. Raises ConfigError when they do not fit each other, or for a VAE that draws noise"""
        transformer, vae = folder.config("transformer"), folder.config("vae")
        with folder.reading("transformer or vae"):
            halvings = 2 ** sum(map(bool, vae["spatio_temporal_scaling"]))
            shape = cls(
                int(vae["latent_channels"]),
                int(vae.get("spatial_compression_ratio") or int(vae["patch_size"]) * halvings),
                int(vae.get("temporal_compression_ratio") or int(vae["patch_size_t"]) * halvings),
                int(transformer["caption_channels"]),
            )
            channels, patches = (
                int(transformer["in_channels"]),
                (transformer["patch_size"], transformer["patch_size_t"]),
            )
        need_channels(folder, shape.channels, channels)
        if patches != (1, 1) or any(vae.get("decoder_inject_noise") or ()):
            raise ConfigError(f"model {folder.path}: its VAE draws noise, or its transformer has larger patches")
        return shape


class LtxTextEncoder(T5TextEncoder):
    """T5; a TextEncoder."""

    @override
    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """Beside embeddings `prompt_mask` (texts, length), which is 1.0 at a text's tokens."""
        mask = self._tokens(texts, length).attention_mask.to(self._encoder.dtype)
        return {**super().encode(texts, length), "prompt_mask": mask}


class LtxDenoiser(FlowDenoiser):
    """Transformer and the configuration of its noise scheduler; a Denoiser. Latents are (1, patches, channels)."""

    first, guidance = AWAY, staticmethod(guidance_scale)
    reads = {"fps": int}
    noise_scheduler = FlowDenoiser.shifted

    def __init__(self, loader: Loader) -> None:
        self._shape = shape = Shape.of(loader.folder)
        super().__init__(loader, shape.latents)
        self.embeds = {"prompt_embeds": (1, None, shape.text_dim), "prompt_mask": (1, None)}

    @override
    def draw(self, params: Params, generator: torch.Generator) -> Tensor:
        return super().draw(params, generator).flatten(2).transpose(1, 2)

    @override
    def constants(self, params: Params) -> dict[str, Tensor]:
        """`coords` (1, 3, patches): when and where each is."""
        import torch

        axes = (torch.arange(side, dtype=torch.float32, device=self.device) for side in self._shape.grid(params))
        apart = self._shape.temporal / need(params, "fps", int), self._shape.spatial, self._shape.spatial
        places = torch.cartesian_prod(*axes).T
        return {"coords": torch.stack([place * by for place, by in zip(places, apart, strict=True)])[None]}

    def predict(self, latents: Tensor, timestep: Tensor, inputs: Mapping[str, Tensor], params: Params) -> Tensor:
        """The velocity in float32, shaped as the latents."""
        velocity = self._predicted(
            hidden_states=latents,
            encoder_hidden_states=inputs["prompt_embeds"],
            timestep=timestep,
            encoder_attention_mask=inputs["prompt_mask"],
            video_coords=inputs["coords"],
        )
        return velocity.float()


class LtxVae:
    """The VAE; a VaeDecoder."""

    def __init__(self, loader: Loader) -> None:
        import torch

        self._vae, self._device, self._shape = loader.vae(), loader.device, Shape.of(loader.folder)
        self._rounded = getattr(torch, loader.runtime.dtypes["text_encoder"])
        self.latents: tuple[int | None, ...] = (1, None, self._shape.channels)

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        """With each channel's mean and deviation, rounded as the text's embeddings are."""
        sides, vae = self._shape.grid(params), self._vae
        grid = latents.to(self._device).transpose(1, 2).reshape(1, self._shape.channels, *sides)
        mean, deviation = (one.view(1, -1, 1, 1, 1).to(grid) for one in (vae.latents_mean, vae.latents_std))
        scaled: Tensor = grid * deviation / vae.config.scaling_factor + mean
        return scaled.to(self._rounded).to(vae.dtype)

    def decode(self, grid: Tensor) -> Tensor:
        """Pixels; a VAE that takes a timestep is given that of no noise."""
        timestep = grid.new_zeros(len(grid)) if self._vae.config.timestep_conditioning else None
        pixels: Tensor = self._vae.decode(grid, timestep, return_dict=False)[0]
        return pixels


class Ltx(VideoFamily):
    """The stages of an LTXPipeline folder."""

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
    shape = Shape.of
    pixel_multiple = 32
    denoiser = LtxDenoiser
    vae = LtxVae
    else_whole = True
    cut = ParallelPlan(
        blocks=("transformer_blocks",),
        attention="attn1",
        order=("tokens",),
        enter={"hidden_states": SequenceDim(1, ("tokens",))},
        follow={"image_rotary_emb": (SequenceDim(1, ("tokens",)),)},
        leave=(SequenceDim(1, ("tokens",)),),
        matrices=TensorParallelLayers((), (), ()),
    )

    @override
    def card(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        """The text encoder's dtype is also one of what the VAE is given."""
        card = super().card(name, folder, dtype)
        vae = xxhash.xxh3_128_hexdigest(f"{card.weights['vae']} {card.dtypes['text_encoder']}".encode())
        return replace(card, weights={**card.weights, "vae": vae})

    @override
    def denoiser_spreads(self, folder: ModelFolder) -> dict[str, int]:
        """Places are turned into all heads at once, which cannot be shared out as weights."""
        found = super().denoiser_spreads(folder)
        return {kind: found[kind] for kind in found if kind != "tensor"}

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        shape = Shape.of(folder)
        each = limits.max_sequence_length * widths["text_encoder"]
        return (text_stage({"prompt_embeds": each * shape.text_dim, "prompt_mask": each}, "guidance_scale"),)


FAMILY = Ltx()
