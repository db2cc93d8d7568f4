"""Stable Diffusion 3 and 3.5: text-to-image, with three text encoders in parallel.

They are two CLIPs and T5. The hidden states of both CLIPs are joined along their width, and precede those of T5.
The stages do what diffusers' StableDiffusion3Pipeline does, in its order of operations, with its components. Checked
against diffusers 0.42.

Classifier-free guidance by `guidance_scale` uses the negative prompt, an empty one if there is none. A folder without
T5 is served undivided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import override

from unfuse.core.modalities import MediaLimits
from unfuse.core.plan import Params, StageSpec
from unfuse.models.base import Loader
from unfuse.models.components import (
    CLIP_TOKENIZERS,
    T5_TOKENIZERS,
    GridDenoiser,
    GridPictureVae,
    PictureFamily,
    PictureShape,
    need_channels,
    shift,
    text_stage,
)
from unfuse.models.text_encoders import ProjectedClipTextEncoder, T5TextEncoder
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim, TensorParallelLayers
from unfuse.stages.base import UNCONDITIONAL, guidance_scale, need
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    from torch import Tensor

    from unfuse.stages.denoise import NoiseScheduler, RowFacts

#: The setting for blocks in which the image also has an attention of its own.
DUAL = "dual_attention_layers"


@dataclass(frozen=True)
class Shape(PictureShape):
    """The sizes in a model's configurations."""

    patch: int  # latents of a token along a side
    text_dim: int  # width of T5's embeddings
    clips: tuple[int, ...]  # widths of each CLIP's hidden states and pooled embeddings
    tokens: int  # length of texts for CLIP

    @classmethod
    def read(cls, folder: ModelFolder) -> Shape:
        """Read the configurations. Raises ConfigError if they do not fit each other."""
        vae, transformer = PictureShape.of_vae(folder), folder.config("transformer")
        clips = [folder.config(name) for name in ("text_encoder", "text_encoder_2")]
        with folder.reading("transformer or text_encoder"):
            patch = int(transformer["patch_size"])
            shape = cls(
                channels=vae.channels,
                scale=vae.scale,
                multiple=vae.scale * patch,
                usual=int(transformer["sample_size"]) * vae.scale,
                longest=int(transformer["pos_embed_max_size"]) * patch * vae.scale,
                patch=patch,
                text_dim=int(transformer["joint_attention_dim"]),
                clips=tuple(int(clip[key]) for clip in clips for key in ("hidden_size", "projection_dim")),
                tokens=int(clips[0]["max_position_embeddings"]),
            )
            channels = int(transformer["in_channels"])
        need_channels(folder, vae.channels, channels)
        return shape


class Sd3T5TextEncoder(T5TextEncoder):
    """T5 as a TextEncoder of `prompt_embeds_3`."""

    name = "prompt_embeds_3"


class Sd3Denoiser(GridDenoiser):
    """The SD3 transformer as a Denoiser."""

    first = UNCONDITIONAL

    def __init__(self, loader: Loader) -> None:
        shape = Shape.read(loader.folder)
        super().__init__(loader, shape.latents)
        self._patch = shape.patch
        first, pooled, second, pooled_2 = shape.clips
        self.embeds = {
            "prompt_embeds": (1, None, first),
            "pooled_prompt_embeds": (1, pooled),
            "prompt_embeds_2": (1, None, second),
            "pooled_prompt_embeds_2": (1, pooled_2),
            "prompt_embeds_3": (1, None, shape.text_dim),
        }

    def noise_scheduler(self, params: Params, latents: Tensor) -> NoiseScheduler:
        """Return a noise scheduler, with a timestep shift by size if configured."""
        config = self._scheduler.config
        steps = need(params, "num_inference_steps", int)
        if not config.get("use_dynamic_shifting"):
            return self._fresh(latents, num_inference_steps=steps)

        rows, columns = (side // self._patch for side in latents.shape[-2:])
        return self._fresh(latents, num_inference_steps=steps, mu=shift(config, rows * columns))

    def predict(
        self,
        latents: Tensor,
        timestep: Tensor,
        inputs: Mapping[str, Tensor],
        params: Params,
        facts: Sequence[RowFacts],
    ) -> Tensor:
        """Return the velocity, in the shape of the latents."""
        import torch

        t5 = inputs["prompt_embeds_3"]
        # CLIP's embeddings, side by side, are narrower than T5's: zeros fill the width.
        clip = torch.cat([inputs["prompt_embeds"], inputs["prompt_embeds_2"]], -1)
        clip = torch.nn.functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
        pooled = torch.cat([inputs["pooled_prompt_embeds"], inputs["pooled_prompt_embeds_2"]], -1)
        return self._predicted(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=torch.cat([clip, t5], -2),
            pooled_projections=pooled,
        )


class Sd3(PictureFamily):
    """The family of StableDiffusion3Pipeline."""

    name = "sd3"
    source = ("pipelines/stable_diffusion_3/pipeline_stable_diffusion_3.py", "StableDiffusion3Pipeline")
    classes = {
        "tokenizer": ("transformers", CLIP_TOKENIZERS),
        "text_encoder": ("transformers", ("CLIPTextModelWithProjection",)),
        "tokenizer_2": ("transformers", CLIP_TOKENIZERS),
        "text_encoder_2": ("transformers", ("CLIPTextModelWithProjection",)),
        "tokenizer_3": ("transformers", T5_TOKENIZERS),
        "text_encoder_3": ("transformers", ("T5EncoderModel",)),
        "transformer": ("diffusers", ("SD3Transformer2DModel",)),
        "scheduler": ("diffusers", ("FlowMatchEulerDiscreteScheduler",)),
        "vae": ("diffusers", ("AutoencoderKL",)),
    }
    text_encoders = {
        "text_encode": partial(ProjectedClipTextEncoder, names=["prompt_embeds", "pooled_prompt_embeds"]),
        "text_encode_2": partial(
            ProjectedClipTextEncoder, names=["prompt_embeds_2", "pooled_prompt_embeds_2"], suffix="_2"
        ),
        "text_encode_3": partial(Sd3T5TextEncoder, suffix="_3", guidance=guidance_scale),
    }
    denoiser = Sd3Denoiser
    vae = GridPictureVae
    shape = Shape.read
    else_whole = True
    starts = ("image",)
    parallel_plans = ParallelPlan(
        blocks=("transformer_blocks",),
        attention="attn",
        order=("image", "text"),
        block_inputs={"hidden_states": SequenceDim(1, ("image",)), "encoder_hidden_states": SequenceDim(1, ("text",))},
        block_outputs=(SequenceDim(1, ()), SequenceDim(1, ("image",))),
        matrices=TensorParallelLayers(
            outputs=("transformer_blocks.*.to_[qkv]", "*.add_[qkv]_proj", "transformer_blocks.*.net.0.proj"),
            inputs=("transformer_blocks.*.to_out.0", "*.to_add_out", "transformer_blocks.*.net.2"),
            gathered=("transformer_blocks.*.norm1*.linear",),
            heads=("transformer_blocks.*.attn.heads", "transformer_blocks.*.attn2.heads"),
            divided=("num_attention_heads",),
        ),
        updated_inputs=("encoder_hidden_states", "hidden_states"),
    )

    @override
    def denoiser_parallelism(self, folder: ModelFolder) -> dict[str, int]:
        """Return the kinds of parallelism that denoising supports.

        Not `layers`, because the last block has no text output. With dual attention not sequence parallelism.
        """
        supported = super().denoiser_parallelism(folder)
        excluded = {"layers", *(("ulysses", "ring") if folder.config("transformer").get(DUAL) else ())}
        return {kind: supported[kind] for kind in supported if kind not in excluded}

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        shape = Shape.read(folder)
        stages = []
        for suffix, (width, pooled) in {"": shape.clips[:2], "_2": shape.clips[2:]}.items():
            elements = {f"prompt_embeds{suffix}": shape.tokens * width, f"pooled_prompt_embeds{suffix}": pooled}
            sizes = {name: count * widths[f"text_encoder{suffix}"] for name, count in elements.items()}
            stages.append(text_stage(sizes, "guidance_scale", suffix))

        embeds_bytes = limits.max_sequence_length * shape.text_dim * widths["text_encoder_3"]
        stages.append(text_stage({"prompt_embeds_3": embeds_bytes}, "guidance_scale", "_3"))
        return stages


FAMILY = Sd3()
