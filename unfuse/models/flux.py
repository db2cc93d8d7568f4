"""FLUX.1: text to picture, with two text encoders side by side.

CLIP gives one vector for the whole prompt, T5 one for each of its tokens. The stages do what diffusers' FluxPipeline
does, in its order of operations, on its components. Checked against diffusers 0.42.

`guidance_scale` is an input of a transformer that was distilled for it (dev), and not read by another (schnell).
Guidance by a negative prompt is beside it: it applies with a `negative_prompt` and a `true_cfg_scale` above 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unfuse.core.card import Limits
from unfuse.core.errors import ConfigError
from unfuse.core.object_ref import ALIGNMENT
from unfuse.core.plan import Params, Pipeline, Room, StageSpec
from unfuse.models.base import T5_TOKENIZERS, DiffusersFamily, Loader
from unfuse.models.folder import ModelFolder
from unfuse.stages.base import need

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from unfuse.stages.denoise import NoiseScheduler

PATCH = 2
"""Side of the square of latents that the transformer sees as one."""

DEFAULT_CELLS = 128
"""FluxPipeline's default size, in latents."""


def true_cfg_scale(params: Params) -> float:
    """How much further than the negative prompt's a prediction goes; 1 without a negative prompt."""
    return 1.0 if params.get("negative_prompt") is None else need(params, "true_cfg_scale", float)


@dataclass(frozen=True)
class Shape:
    """Sizes that follow from a model's configurations."""

    channels: int
    scale: int
    text_dim: int
    pooled_dim: int
    distilled: bool
    """Whether the guidance scale is an input."""

    @classmethod
    def of(cls, folder: ModelFolder) -> Shape:
        """Read the configurations of transformer and VAE. Raises ConfigError when they do not fit each other."""
        transformer, vae = folder.config("transformer"), folder.config("vae")
        try:
            shape = cls(
                int(vae["latent_channels"]), 2 ** (len(vae["block_out_channels"]) - 1),
                int(transformer["joint_attention_dim"]), int(transformer["pooled_projection_dim"]),
                bool(transformer["guidance_embeds"]),
            )  # fmt: skip
            channels = int(transformer["in_channels"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"model {folder.path}: transformer or vae configuration: {error!r}") from error
        fit = shape.channels * PATCH**2
        if channels != fit:
            reason = f"by its VAE the transformer has {fit} channels, by its configuration {channels}"
            raise ConfigError(f"model {folder.path}: {reason}")
        return shape


class FluxText:
    """A tokenizer and its text encoder; what ends their names tells the two pairs apart."""

    end = ""

    def __init__(self, loader: Loader) -> None:
        self._tokenizer, self._encoder = loader.plain("tokenizer" + self.end), loader.model("text_encoder" + self.end)
        self._device = loader.device

    def guidance(self, params: Params) -> float:
        """See TextEncoder."""
        return true_cfg_scale(params)

    def _encoded(self, texts: Sequence[str], length: int) -> Any:
        """What the encoder makes of the texts; it attends to the padding too."""
        how = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "pt"}
        ids = self._tokenizer(list(texts), **how).input_ids
        return self._encoder(ids.to(self._device), output_hidden_states=False)


class ClipText(FluxText):
    """CLIP; a TextEncoder."""

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """`pooled_prompt_embeds` (texts, pooled dim) of as many tokens as CLIP has, whatever the length."""
        pooled = self._encoded(texts, self._tokenizer.model_max_length).pooler_output
        return {"pooled_prompt_embeds": pooled.to(self._encoder.dtype)}


class T5Text(FluxText):
    """T5; a TextEncoder."""

    end = "_2"

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """`prompt_embeds` (texts, length, text dim)."""
        return {"prompt_embeds": self._encoded(texts, length)[0].to(self._encoder.dtype)}


class FluxDenoiser:
    """Transformer and the configuration of its noise scheduler; a Denoiser.

    Latents are packed: (rows, patches, channels of a patch).
    """

    def __init__(self, loader: Loader) -> None:
        self._shape = shape = Shape.of(loader.folder)
        self._scheduler, self._transformer = loader.noise_scheduler(), loader.model("transformer")
        self.device, self.dtype = loader.device, self._transformer.dtype
        self.embeds = {"pooled_prompt_embeds": (1, shape.pooled_dim), "prompt_embeds": (1, None, shape.text_dim)}
        self.conditions: dict[str, tuple[int | None, ...]] = {}

    def verify(self, params: Params) -> None:
        """See Denoiser."""
        _patches(params, self._shape.scale)
        need(params, "guidance_scale", float)

    def guidance(self, params: Params) -> float:
        """See Denoiser."""
        return true_cfg_scale(params)

    def draw(self, params: Params, generator: torch.Generator) -> Tensor:
        """In the transformer's dtype, which in an undivided pipeline is the prompt embeddings' too."""
        import torch

        rows, columns = _patches(params, self._shape.scale)
        grid = (1, self._shape.channels, PATCH * rows, PATCH * columns)
        noise = torch.randn(grid, generator=generator, device=generator.device, dtype=self.dtype)
        packed = noise.view(1, -1, rows, PATCH, columns, PATCH).permute(0, 2, 4, 1, 3, 5)
        return packed.reshape(1, rows * columns, -1)

    def constants(self, params: Params) -> dict[str, Tensor]:
        """Where each patch is, and the guidance scale if it is an input."""
        import torch

        rows, columns = _patches(params, self._shape.scale)
        axes = (torch.arange(side, dtype=torch.float32) for side in (1, rows, columns))
        found = {"img_ids": torch.cartesian_prod(*axes)[None].to(self.device, self.dtype)}
        if self._shape.distilled:
            scale = need(params, "guidance_scale", float)
            found["guidance"] = torch.tensor([scale], dtype=torch.float32, device=self.device)
        return found

    def noise_scheduler(self, params: Params, latents: Tensor) -> NoiseScheduler:
        """A new one of the same configuration; the more patches, the longer it stays at high noise."""
        import numpy as np

        steps, config = need(params, "num_inference_steps", int), self._scheduler.config
        low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        low_shift, high_shift = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
        slope = (high_shift - low_shift) / (high - low)
        mu = latents.shape[1] * slope + (low_shift - slope * low)
        fresh = type(self._scheduler).from_config(config)
        fresh.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu, device=latents.device)
        fresh.set_begin_index(0)
        found: NoiseScheduler = fresh
        return found

    def predict(self, latents: Tensor, timestep: Tensor, inputs: Mapping[str, Tensor], params: Params) -> Tensor:
        """The velocity, shaped as the latents."""
        text = inputs["prompt_embeds"]
        velocity: Tensor = self._transformer(
            hidden_states=latents,
            timestep=timestep.to(latents.dtype) / 1000,
            guidance=inputs.get("guidance"),
            pooled_projections=inputs["pooled_prompt_embeds"],
            encoder_hidden_states=text,
            txt_ids=text.new_zeros(text.shape[1], 3),
            img_ids=inputs["img_ids"][0],
            return_dict=False,
        )[0]
        return velocity


class FluxVae:
    """The VAE; a VaeDecoder."""

    def __init__(self, loader: Loader) -> None:
        self._vae, self._device = loader.vae(), loader.device
        self._scale = 2 ** (len(self._vae.config.block_out_channels) - 1)
        self.latents = (1, None, int(self._vae.config.latent_channels) * PATCH**2)

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        """Patches put side by side, as a video of one frame, scaled and shifted in the dtype they come in."""
        rows, columns = _patches(params, self._scale)
        packed = latents.to(self._device).view(1, rows, columns, -1, PATCH, PATCH)
        grid = packed.permute(0, 3, 1, 4, 2, 5).reshape(1, -1, 1, PATCH * rows, PATCH * columns)
        scaled: Tensor = grid / self._vae.config.scaling_factor + self._vae.config.shift_factor
        return scaled.to(self._vae.dtype)

    def decode(self, grid: Tensor) -> Tensor:
        """Pixels of the one frame of each."""
        pixels: Tensor = self._vae.decode(grid.squeeze(2), return_dict=False)[0]
        return pixels.unsqueeze(2)


def _patches(params: Params, scale: int) -> tuple[int, int]:
    """Rows and columns of patches."""
    return need(params, "height", int) // (scale * PATCH), need(params, "width", int) // (scale * PATCH)


class Flux(DiffusersFamily):
    """The stages of a FluxPipeline folder."""

    name = "flux"
    source = ("pipelines/flux/pipeline_flux.py", "FluxPipeline")
    classes = {
        "tokenizer": ("transformers", ("CLIPTokenizer", "CLIPTokenizerFast")),
        "text_encoder": ("transformers", ("CLIPTextModel",)),
        "tokenizer_2": ("transformers", T5_TOKENIZERS),
        "text_encoder_2": ("transformers", ("T5EncoderModel",)),
        "transformer": ("diffusers", ("FluxTransformer2DModel",)),
        "scheduler": ("diffusers", ("FlowMatchEulerDiscreteScheduler",)),
        "vae": ("diffusers", ("AutoencoderKL",)),
    }
    text_encoders = {"text_encode": ClipText, "text_encode_2": T5Text}
    denoiser = FluxDenoiser
    vae = FluxVae

    def standard(self, folder: ModelFolder) -> Params:
        """See DiffusersFamily. There is no negative prompt unless one is given, not even an empty one."""
        side = DEFAULT_CELLS * Shape.of(folder).scale
        return {"width": side, "height": side, "num_frames": 1, "negative_prompt": None}

    def limits(self, folder: ModelFolder, defaults: Params) -> Limits:
        """See DiffusersFamily."""
        multiple, length = Shape.of(folder).scale * PATCH, need(defaults, "max_sequence_length", int)
        return Limits(size_multiple=multiple, min_size=multiple, frame_multiple=1, max_sequence_length=length)

    def pipeline(self, folder: ModelFolder, limits: Limits, widths: Mapping[str, int]) -> Pipeline:
        """See DiffusersFamily."""
        shape = Shape.of(folder)
        pooled = shape.pooled_dim * widths["text_encoder"]
        embeds = limits.max_sequence_length * shape.text_dim * widths["text_encoder_2"]
        reads = ("prompt", "negative_prompt", "true_cfg_scale", "max_sequence_length")
        clip = StageSpec(
            "text_encode", "text_encode", ("text_encoder", "tokenizer"), reads=reads,
            outputs=("pooled_prompt_embeds", "negative_pooled_prompt_embeds"), room=Room(2 * (pooled + ALIGNMENT)),
        )  # fmt: skip
        t5 = StageSpec(
            "text_encode_2", "text_encode_2", ("text_encoder_2", "tokenizer_2"), reads=reads,
            outputs=("prompt_embeds", "negative_prompt_embeds"), room=Room(2 * (embeds + ALIGNMENT)),
        )  # fmt: skip
        denoise = StageSpec(
            "denoise", "denoise", ("transformer", "scheduler"),
            inputs=(*clip.outputs, *t5.outputs), outputs=("latents",), per_sample=True,
            room=Room(ALIGNMENT, shape.channels * widths["transformer"] / shape.scale**2),
        )  # fmt: skip
        decode = StageSpec("vae_decode", "vae_decode", ("vae",), inputs=("latents",), per_sample=True)
        return Pipeline((clip, t5, denoise, decode))


FAMILY = Flux()
