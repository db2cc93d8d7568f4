"""Stable Diffusion 3 and 3.5: text to picture, with three text encoders side by side: two CLIPs and T5.

CLIP's two vectors of a token lie side by side, and before those of T5. The stages do what diffusers'
StableDiffusion3Pipeline does, in its order of operations, on its components. Checked against diffusers 0.42.

Guidance by `guidance_scale` goes away from the negative prompt, an empty one if none is given. A folder without T5 is
served undivided.
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
    ProjectedClipTextEncoder,
    T5TextEncoder,
    need_channels,
    shift,
    text_stage,
)
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim, TensorParallelLayers
from unfuse.stages.base import AWAY, guidance_scale, need
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    from torch import Tensor

    from unfuse.stages.denoise import NoiseScheduler

DUAL = "dual_attention_layers"  # blocks in which the picture also sees itself alone


@dataclass(frozen=True)
class Shape(PictureShape):
    """Sizes that follow from a model's configurations."""

    patch: int
    text_dim: int
    clips: tuple[int, ...]  # widths of what each CLIP makes of a token, and projects of all
    tokens: int

    @classmethod
    def of(cls, folder: ModelFolder) -> Shape:
        """Read the configurations. Raises ConfigError when they do not fit each other."""
        vae, transformer = PictureShape.of_vae(folder), folder.config("transformer")
        clips = [folder.config(name) for name in ("text_encoder", "text_encoder_2")]
        with folder.reading("transformer or text_encoder"):
            patch = int(transformer["patch_size"])
            shape = cls(
                vae.channels, vae.scale, vae.scale * patch, int(transformer["sample_size"]) * vae.scale,
                int(transformer["pos_embed_max_size"]) * patch * vae.scale, patch,
                int(transformer["joint_attention_dim"]),
                tuple(int(clip[key]) for clip in clips for key in ("hidden_size", "projection_dim")),
                int(clips[0]["max_position_embeddings"]),
            )  # fmt: skip
            found = int(transformer["in_channels"])
        need_channels(folder, vae.channels, found)
        return shape


class Sd3T5TextEncoder(T5TextEncoder):
    """T5; a TextEncoder."""

    name = "prompt_embeds_3"


class Sd3Denoiser(GridDenoiser):
    """Transformer and the configuration of its noise scheduler; a Denoiser."""

    first = AWAY

    def __init__(self, loader: Loader) -> None:
        shape = Shape.of(loader.folder)
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
        """Where the configuration says so, the more patches, the longer it stays at high noise."""
        config, steps = self._scheduler.config, need(params, "num_inference_steps", int)
        if not config.get("use_dynamic_shifting"):
            return self._fresh(latents, num_inference_steps=steps)
        rows, columns = (side // self._patch for side in latents.shape[-2:])
        return self._fresh(latents, num_inference_steps=steps, mu=shift(config, rows * columns))

    def predict(self, latents: Tensor, timestep: Tensor, inputs: Mapping[str, Tensor], params: Params) -> Tensor:
        """The velocity, shaped as the latents."""
        import torch

        clip, t5 = torch.cat([inputs["prompt_embeds"], inputs["prompt_embeds_2"]], -1), inputs["prompt_embeds_3"]
        clip = torch.nn.functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
        pooled = torch.cat([inputs["pooled_prompt_embeds"], inputs["pooled_prompt_embeds_2"]], -1)
        return self._predicted(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=torch.cat([clip, t5], -2),
            pooled_projections=pooled,
        )


class Sd3(PictureFamily):
    """The stages of a StableDiffusion3Pipeline folder."""

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
            ProjectedClipTextEncoder, names=["prompt_embeds_2", "pooled_prompt_embeds_2"], end="_2"
        ),
        "text_encode_3": partial(Sd3T5TextEncoder, end="_3", guidance=guidance_scale),
    }
    denoiser = Sd3Denoiser
    vae = GridPictureVae
    shape = Shape.of
    else_whole = True
    starts = ("image",)
    cut = ParallelPlan(
        blocks=("transformer_blocks",),
        attention="attn",
        order=("image", "text"),
        enter={"hidden_states": SequenceDim(1, ("image",)), "encoder_hidden_states": SequenceDim(1, ("text",))},
        leave=(SequenceDim(1, ()), SequenceDim(1, ("image",))),
        matrices=TensorParallelLayers(
            outputs=("transformer_blocks.*.to_[qkv]", "*.add_[qkv]_proj", "transformer_blocks.*.net.0.proj"),
            inputs=("transformer_blocks.*.to_out.0", "*.to_add_out", "transformer_blocks.*.net.2"),
            gathered=("transformer_blocks.*.norm1*.linear",),
            heads=("transformer_blocks.*.attn.heads", "transformer_blocks.*.attn2.heads"),
            divided=("num_attention_heads",),
        ),
        gives=("encoder_hidden_states", "hidden_states"),
    )

    @override
    def denoiser_spreads(self, folder: ModelFolder) -> dict[str, int]:
        """The last block makes no text to be handed on; a picture that sees itself alone cannot be shared out."""
        found = super().denoiser_spreads(folder)
        without = {"layers", *(("ulysses", "ring") if folder.config("transformer").get(DUAL) else ())}
        return {kind: found[kind] for kind in found if kind not in without}

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        shape, stages = Shape.of(folder), []
        for end, (width, pooled) in {"": shape.clips[:2], "_2": shape.clips[2:]}.items():
            numbers = {f"prompt_embeds{end}": shape.tokens * width, f"pooled_prompt_embeds{end}": pooled}
            own = {name: size * widths[f"text_encoder{end}"] for name, size in numbers.items()}
            stages.append(text_stage(own, "guidance_scale", end))
        embeds = limits.max_sequence_length * shape.text_dim * widths["text_encoder_3"]
        stages.append(text_stage({"prompt_embeds_3": embeds}, "guidance_scale", "_3"))
        return stages


FAMILY = Sd3()
