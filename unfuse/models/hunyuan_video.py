"""HunyuanVideo: text-to-video, with Llama and CLIP in parallel.

Llama reads the prompt in a template that instructs it to describe a video. It returns a vector for each token after the
template's start, CLIP one for the whole prompt. The stages do what diffusers' HunyuanVideoPipeline does, in its order
of operations, with its components. Checked against diffusers 0.42.

`guidance_scale` is an input of the transformer. Classifier-free guidance is independent of it. It applies with a
`negative_prompt` and a `true_cfg_scale` above 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unfuse.core.modalities import MediaLimits
from unfuse.core.object_ref import DTYPES
from unfuse.core.plan import Params, StageSpec
from unfuse.models.base import Loader
from unfuse.models.components import (
    CLIP_TOKENIZERS,
    FAST_TOKENIZERS,
    FlowDenoiser,
    GridVae,
    VideoFamily,
    VideoShape,
    need_channels,
    text_stage,
)
from unfuse.models.noise_schedulers import EULER
from unfuse.models.text_encoders import ClipTextEncoder, MaskedTextEncoder
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim, TensorParallelLayers
from unfuse.stages.base import need
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    from torch import Tensor

    from unfuse.stages.denoise import NoiseScheduler, RowFacts

#: The index of Llama's hidden states that are the prompt embeddings: the last two layers are omitted.
HIDDEN = -3


@dataclass(frozen=True)
class Shape(VideoShape):
    """The sizes in a model's configurations."""

    patch: int  # latents of a token along a side
    text_dim: int  # width of Llama's embeddings
    pooled_dim: int  # width of CLIP's pooled embeddings

    @classmethod
    def read(cls, folder: ModelFolder) -> Shape:
        """Read the transformer's and VAE's configurations. Raises ConfigError for a misfit."""
        transformer, vae = folder.config("transformer"), folder.config("vae")
        with folder.reading("transformer or vae"):
            shape = cls(
                channels=int(vae["latent_channels"]),
                spatial=int(vae["spatial_compression_ratio"]),
                temporal=int(vae["temporal_compression_ratio"]),
                patch=int(transformer["patch_size"]),
                text_dim=int(transformer["text_embed_dim"]),
                pooled_dim=int(transformer["pooled_projection_dim"]),
            )
            channels = int(transformer["in_channels"])
        need_channels(folder, shape.channels, channels)
        return shape

    @property
    @override
    def multiple(self) -> int:
        return self.spatial * self.patch


class LlamaTextEncoder(MaskedTextEncoder):
    """Llama as a TextEncoder."""

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """Return `prompt_embeds` (texts, length, text dim) and `prompt_attention_mask`.

        The mask (texts, length) is 1 for a text's tokens.
        """
        _, start = self._template()
        tokens = self._tokens(texts, length)
        mask = tokens.attention_mask

        states = self._encoder(input_ids=tokens.input_ids, attention_mask=mask, output_hidden_states=True).hidden_states
        embeds = states[HIDDEN].to(self._encoder.dtype)
        # Cloned, because a slice would keep the template's states in memory, too.
        return {"prompt_embeds": embeds[:, start:].clone(), "prompt_attention_mask": mask[:, start:].clone()}

    @override
    def _tokenize(self, texts: Sequence[str], length: int, padding: str = "max_length") -> Any:
        template, start = self._template()
        return super()._tokenize([template.format(text) for text in texts], length + start, padding)

    def _template(self) -> tuple[str, int]:
        """Return the template, and the number of its tokens before the text."""
        from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE as TEMPLATE

        return str(TEMPLATE["template"]), int(TEMPLATE["crop_start"])


class HunyuanVideoDenoiser(FlowDenoiser):
    """The HunyuanVideo transformer as a Denoiser."""

    required_params = {"guidance_scale": float}

    def __init__(self, loader: Loader) -> None:
        shape = Shape.read(loader.folder)
        super().__init__(loader, shape.latents)
        self.embeds = {"prompt_embeds": (1, None, shape.text_dim), "pooled_prompt_embeds": (1, shape.pooled_dim)}
        self.masks = {"prompt_attention_mask": (1, None)}

    def constants(self, params: Params, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `guidance` (1,). A transformer without guidance distillation ignores it."""
        import torch

        scale = need(params, "guidance_scale", float)
        return {"guidance": torch.tensor([scale], dtype=self.dtype, device=self.device) * 1000.0}

    def noise_scheduler(self, params: Params, latents: Tensor) -> NoiseScheduler:
        """Return a noise scheduler with evenly spaced noise levels (sigmas) from 1."""
        import numpy as np

        # The scheduler appends the last level, 0.
        return self._fresh(latents, sigmas=np.linspace(1.0, 0.0, need(params, "num_inference_steps", int) + 1)[:-1])

    def predict(
        self,
        latents: Tensor,
        timestep: Tensor,
        inputs: Mapping[str, Tensor],
        params: Params,
        facts: Sequence[RowFacts],
    ) -> Tensor:
        """Return the velocity, in the shape of the latents.

        All timesteps are rounded to the dtype of the latents. An undivided pipeline rounds them from the second step
        on, which is the same: the first is 1000, exact in every dtype.
        """
        return self._predicted(
            hidden_states=latents,
            timestep=timestep.to(latents.dtype),
            encoder_hidden_states=inputs["prompt_embeds"],
            encoder_attention_mask=inputs["prompt_attention_mask"].to(self.dtype),
            pooled_projections=inputs["pooled_prompt_embeds"],
            guidance=inputs["guidance"],
        )


class HunyuanVideoVae(GridVae):
    """The VAE as a VaeDecoder."""

    @override
    def decode(self, grid: Tensor) -> Tensor:
        """Return pixels (rows, 3, frames, height, width).

        The latents have one scaling factor for all channels.
        """
        return self._decoded(grid / self.vae.config.scaling_factor)


class HunyuanVideo(VideoFamily):
    """The family of HunyuanVideoPipeline."""

    name = "hunyuan_video"
    source = ("pipelines/hunyuan_video/pipeline_hunyuan_video.py", "HunyuanVideoPipeline")
    classes = {
        "tokenizer": ("transformers", ("LlamaTokenizerFast", "LlamaTokenizer", *FAST_TOKENIZERS)),
        "text_encoder": ("transformers", ("LlamaModel",)),
        "tokenizer_2": ("transformers", CLIP_TOKENIZERS),
        "text_encoder_2": ("transformers", ("CLIPTextModel",)),
        "transformer": ("diffusers", ("HunyuanVideoTransformer3DModel",)),
        "scheduler": ("diffusers", (EULER, "UniPCMultistepScheduler")),
        "vae": ("diffusers", ("AutoencoderKLHunyuanVideo",)),
    }
    text_encoders = {"text_encode": LlamaTextEncoder, "text_encode_2": partial(ClipTextEncoder, suffix="_2")}
    shape = Shape.read
    pixel_multiple = 16
    denoiser = HunyuanVideoDenoiser
    vae = partial(HunyuanVideoVae, channels="latent_channels")
    parallel_plans = ParallelPlan(
        blocks=("transformer_blocks", "single_transformer_blocks"),
        attention="attn",
        order=("image", "text"),
        block_inputs={"hidden_states": SequenceDim(1, ("image",)), "encoder_hidden_states": SequenceDim(1, ("text",))},
        follow={"freqs_cis": (SequenceDim(0, ("image",)),), "image_rotary_emb": (SequenceDim(0, ("image",)),)},
        block_outputs=(SequenceDim(1, ("image",)), SequenceDim(1, ())),
        matrices=TensorParallelLayers(
            outputs=("*_blocks.*.to_[qkv]", "*.add_[qkv]_proj", "*_blocks.*.net.0.proj", "*.proj_mlp"),
            inputs=("*_blocks.*.to_out.0", "*.to_add_out", "*_blocks.*.net.2", "single_*.proj_out"),
            packed={"single_*.proj_out": (1, 1)},
            gathered=("*_blocks.*.norm*.linear",),
            heads=("*_blocks.*.attn.heads",),
            divided=("num_attention_heads",),
        ),
        updated_inputs=("hidden_states", "encoder_hidden_states"),
    )

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        shape = Shape.read(folder)
        length, width = limits.max_sequence_length, shape.text_dim * widths["text_encoder"]
        llama = text_stage({"prompt_embeds": length * width, "prompt_attention_mask": length * DTYPES["int64"]})
        clip = text_stage({"pooled_prompt_embeds": shape.pooled_dim * widths["text_encoder_2"]}, suffix="_2")
        return llama, clip


FAMILY = HunyuanVideo()
