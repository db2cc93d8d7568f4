"""Wan: text to picture and text to video with one text encoder, a video transformer and a causal video VAE.

The stages do what diffusers' WanPipeline does, in its order of operations, on its components. A picture is a video of
one frame. Checked against diffusers 0.42.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from unfuse.core.card import Limits
from unfuse.core.errors import ConfigError
from unfuse.core.object_ref import ALIGNMENT, DTYPES
from unfuse.core.plan import Params, Pipeline, Room
from unfuse.models.base import DiffusersFamily, Loader, with_encoders
from unfuse.models.flow import FlowDenoiser, need_channels, norm
from unfuse.models.folder import ModelFolder
from unfuse.models.text import T5_TOKENIZERS, text_stage
from unfuse.stages.base import need
from unfuse.stages.guidance import guidance_scale

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from unfuse.stages.denoise import NoiseScheduler

PIXEL_MULTIPLE = 16
"""WanPipeline refuses other sizes, whatever the VAE."""

FPS = 16
"""What the published models were trained at."""

LATENT_BYTES = DTYPES["float32"]


@dataclass(frozen=True)
class Shape:
    """Sizes that follow from a model's configurations, and the latents they give a request."""

    channels: int
    text_dim: int
    image_dim: int | None
    """Width of the image embeddings; None of a model that takes no picture."""
    spatial: int
    temporal: int
    patch: tuple[int, int, int]
    longest: int
    """Most patches along one axis that the rotary embedding has room for."""

    @classmethod
    def of(cls, folder: ModelFolder) -> Shape:
        """Read the configurations of transformer and VAE; the published ones do not give the VAE's scale factors.

        Raises ConfigError when they do not fit each other.
        """
        transformer, vae = folder.config("transformer"), folder.config("vae")
        with folder.reading("transformer or vae"):
            frames, rows, columns = transformer["patch_size"]
            halvings = [bool(also_time) for also_time in vae["temperal_downsample"]]
            shape = cls(
                int(vae["z_dim"]), int(transformer["text_dim"]), transformer.get("image_dim"),
                int(vae.get("scale_factor_spatial") or 2 ** len(halvings) * (vae.get("patch_size") or 1)),
                int(vae.get("scale_factor_temporal") or 2 ** sum(halvings)),
                (int(frames), int(rows), int(columns)), int(transformer["rope_max_seq_len"]),
            )  # fmt: skip
            channels = int(transformer["in_channels"])
        need_channels(folder, shape.channels + (shape.condition if shape.image_dim is not None else 0), channels)
        return shape

    @property
    def condition(self) -> int:
        """Channels that stand for a given picture: a mask of the frames it fills, and latents."""
        return self.temporal + self.channels

    def latents(self, params: Params) -> tuple[int, ...]:
        """(1, channels, frames, height, width) of a request's latents, its sizes rounded as WanPipeline rounds them."""
        frames = need(params, "num_frames", int)
        if frames % self.temporal != 1:
            frames = frames // self.temporal * self.temporal + 1
        rows, columns = self.spatial * self.patch[1], self.spatial * self.patch[2]
        return (
            1,
            self.channels,
            (max(frames, 1) - 1) // self.temporal + 1,
            need(params, "height", int) // rows * self.patch[1],
            need(params, "width", int) // columns * self.patch[2],
        )

    def limits(self, defaults: Params) -> Limits:
        """What can be asked for, as far as the configurations say: twice the default length of a video at most."""
        multiple = lcm(PIXEL_MULTIPLE, self.spatial * self.patch[1], self.spatial * self.patch[2])
        longest = min(self.patch[1:]) * self.spatial * self.longest
        return Limits(
            size_multiple=multiple,
            min_size=multiple,
            max_size=min(Limits().max_size, longest // multiple * multiple),
            max_frames=min(2 * need(defaults, "num_frames", int) - 1, self._most_frames()),
            frame_multiple=self.temporal,
            max_sequence_length=need(defaults, "max_sequence_length", int),
        )

    def need_room(self, limits: Limits) -> None:
        """Raise ConfigError when the rotary embedding ends before the limits do."""
        longest = min(self.patch[1:]) * self.spatial * self.longest
        if limits.max_size > longest or limits.max_frames > self._most_frames():
            most = f"{longest} pixels and {self._most_frames()} frames"
            raise ConfigError(f"serving.json: the transformer's rope_max_seq_len allows {most}; lower the limits")

    def _most_frames(self) -> int:
        return (self.longest * self.patch[0] - 1) * self.temporal + 1


class WanText:
    """Tokenizer and text encoder; `encode` is a TextEncoder's."""

    def __init__(self, loader: Loader) -> None:
        self._tokenizer, self._encoder = loader.plain("tokenizer"), loader.model("text_encoder")
        self._device = loader.device

    def guidance(self, params: Params) -> float:
        """See TextEncoder."""
        return guidance_scale(params)

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """`prompt_embeds` (texts, length, text dim); behind a text's own tokens they are zero."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        tokens = self._tokenizer(
            [prompt_clean(text) for text in texts],
            padding="max_length",
            max_length=length,
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = tokens.attention_mask.to(self._device)
        hidden = self._encoder(tokens.input_ids.to(self._device), mask).last_hidden_state
        embeds = hidden.new_zeros(hidden.shape, dtype=self._encoder.dtype)
        for row, used in enumerate(mask.sum(1).tolist()):
            embeds[row, :used] = hidden[row, :used]
        return {"prompt_embeds": embeds}


class WanDenoiser(FlowDenoiser):
    """Transformer and the configuration of its noise scheduler; a Denoiser. A picture, where one is taken, conditions.

    `image_embeds` (1, tokens, image dim) and `condition` (1, mask and latent channels, frames, height, width).
    """

    def __init__(self, loader: Loader) -> None:
        self._shape = shape = Shape.of(loader.folder)
        super().__init__(loader)
        self.embeds = {"prompt_embeds": (1, None, shape.text_dim)}
        if shape.image_dim is not None:
            grid = (1, shape.condition, None, None, None)
            self.conditions = {"image_embeds": (1, None, shape.image_dim), "condition": grid}

    def verify(self, params: Params) -> None:
        """See Denoiser."""
        self._shape.latents(params)

    def guidance(self, params: Params) -> float:
        """See Denoiser."""
        return guidance_scale(params)

    def draw(self, params: Params, generator: torch.Generator) -> Tensor:
        """Float32 (1, channels, frames, height, width)."""
        import torch

        return torch.randn(self._shape.latents(params), generator=generator, device=generator.device)

    def noise_scheduler(self, params: Params, latents: Tensor) -> NoiseScheduler:
        """See Denoiser."""
        return self._fresh(latents, num_inference_steps=need(params, "num_inference_steps", int))

    def predict(self, latents: Tensor, timestep: Tensor, inputs: Mapping[str, Tensor], params: Params) -> Tensor:
        """The velocity, shaped as the latents."""
        import torch

        condition = inputs.get("condition")
        velocity: Tensor = self._transformer(
            hidden_states=latents if condition is None else torch.cat([latents, condition], 1),
            timestep=timestep,
            encoder_hidden_states=inputs["prompt_embeds"],
            encoder_hidden_states_image=inputs.get("image_embeds"),
            return_dict=False,
        )[0]
        return velocity


class WanVae:
    """The VAE; a VaeDecoder."""

    def __init__(self, loader: Loader) -> None:
        self.vae, self.device = loader.vae(), loader.device
        self.latents = (1, int(self.vae.config.z_dim), None, None, None)

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        """Latents are a grid already."""
        return latents.to(self.device, self.vae.dtype)

    def decode(self, grid: Tensor) -> Tensor:
        """Pixels of latents that were normalised per channel."""
        mean, scale = norm(self.vae, grid)
        pixels: Tensor = self.vae.decode(grid / scale + mean, return_dict=False)[0]
        return pixels


class Wan(DiffusersFamily):
    """Text encoding, denoising and VAE decoding of a WanPipeline folder."""

    name = "wan"
    source = ("pipelines/wan/pipeline_wan.py", "WanPipeline")
    classes = {
        "tokenizer": ("transformers", T5_TOKENIZERS),
        "text_encoder": ("transformers", ("UMT5EncoderModel",)),
        "transformer": ("diffusers", ("WanTransformer3DModel",)),
        "scheduler": ("diffusers", ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")),
        "vae": ("diffusers", ("AutoencoderKLWan",)),
    }
    text_encoders = {"text_encode": WanText}
    denoiser = WanDenoiser
    vae = WanVae

    def components(self, folder: ModelFolder) -> dict[str, tuple[str, str]]:
        """See DiffusersFamily; Wan 2.2 is refused."""
        index = folder.index()
        if any(index.get("transformer_2") or ()) or index.get("boundary_ratio") is not None:
            raise ConfigError(f"model {folder.path} denoises with two transformers (Wan 2.2), which is not served yet")
        if index.get("expand_timesteps"):
            reason = "has a timestep for each token (Wan 2.2 5B), which is not served yet"
            raise ConfigError(f"model {folder.path} {reason}")
        return super().components(folder)

    def standard(self, folder: ModelFolder) -> Params:
        """See DiffusersFamily."""
        return {"fps": FPS, "negative_prompt": ""}

    def limits(self, folder: ModelFolder, defaults: Params) -> Limits:
        """See DiffusersFamily."""
        shape = Shape.of(folder)
        if (shape.image_dim is not None) != self.takes_image:
            wants = "no picture, and its class is" if self.takes_image else "a picture, and its class is not"
            raise ConfigError(f"model {folder.path}: the transformer takes {wants} for image to video")
        return shape.limits(defaults)

    def pipeline(self, folder: ModelFolder, limits: Limits, widths: Mapping[str, int]) -> Pipeline:
        """See DiffusersFamily. Raises ConfigError when serving.json goes further than the transformer."""
        shape = Shape.of(folder)
        shape.need_room(limits)
        embeds = limits.max_sequence_length * shape.text_dim * widths["text_encoder"]
        per_pixel = shape.channels * LATENT_BYTES / shape.spatial**2
        text = text_stage({"prompt_embeds": embeds}, "guidance_scale")
        return with_encoders((text,), Room(ALIGNMENT, per_pixel, shape.temporal))


FAMILY = Wan()
