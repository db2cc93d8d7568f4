"""FLUX.1: text to picture, with two text encoders side by side.

CLIP gives one vector for the whole prompt, T5 one for each of its tokens. The stages do what diffusers' FluxPipeline
does, in its order of operations, on its components. Checked against diffusers 0.42.

`guidance_scale` is an input of a transformer that was distilled for it (dev), and not read by another (schnell).
Guidance by a negative prompt is beside it: it applies with a `negative_prompt` and a `true_cfg_scale` above 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import override

from unfuse.core.media import Limits, Room
from unfuse.core.object_ref import ALIGNMENT
from unfuse.core.plan import Params, Pipeline
from unfuse.models.base import Loader
from unfuse.models.flow_matching import PATCH, Packing, need_channels
from unfuse.models.packed import PackedDenoiser, PackedFamily
from unfuse.models.pictures import GridPictureVae
from unfuse.models.text import CLIP_TOKENIZERS, T5_TOKENIZERS, ClipText, T5Text, text_stage, with_encoders
from unfuse.parallel.cut import Along, Cut, Matrices
from unfuse.stages.base import need
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Shape(Packing):
    """Sizes that follow from a model's configurations."""

    text_dim: int
    pooled_dim: int
    distilled: bool  # whether the guidance scale is an input

    @classmethod
    def of(cls, folder: ModelFolder) -> Shape:
        """Read the configurations of transformer and VAE. Raises ConfigError when they do not fit each other."""
        transformer, packing = folder.config("transformer"), Packing.of(folder)
        with folder.reading("transformer"):
            shape = cls(
                packing.channels, packing.scale, int(transformer["joint_attention_dim"]),
                int(transformer["pooled_projection_dim"]), bool(transformer["guidance_embeds"]),
            )  # fmt: skip
            channels = int(transformer["in_channels"])
        need_channels(folder, shape.channels * PATCH**2, channels)
        return shape


class FluxDenoiser(PackedDenoiser):
    """Transformer and the configuration of its noise scheduler; a Denoiser."""

    reads = {"guidance_scale": float}

    def __init__(self, loader: Loader) -> None:
        self._shape = shape = Shape.of(loader.folder)
        super().__init__(loader, shape)
        self.embeds = {"pooled_prompt_embeds": (1, shape.pooled_dim), "prompt_embeds": (1, None, shape.text_dim)}

    def constants(self, params: Params) -> dict[str, Tensor]:
        """Where each patch is, and the guidance scale if it is an input."""
        import torch

        rows, columns = self._shape.patches(params)
        axes = (torch.arange(side, dtype=torch.float32) for side in (1, rows, columns))
        found = {"img_ids": torch.cartesian_prod(*axes)[None].to(self.device, self.dtype)}
        if self._shape.distilled:
            scale = need(params, "guidance_scale", float)
            found["guidance"] = torch.tensor([scale], dtype=torch.float32, device=self.device)
        return found

    def predict(self, latents: Tensor, timestep: Tensor, inputs: Mapping[str, Tensor], params: Params) -> Tensor:
        """The velocity, shaped as the latents."""
        text = inputs["prompt_embeds"]
        return self._predicted(
            hidden_states=latents,
            timestep=timestep.to(latents.dtype) / 1000,
            guidance=inputs.get("guidance"),
            pooled_projections=inputs["pooled_prompt_embeds"],
            encoder_hidden_states=text,
            txt_ids=text.new_zeros(text.shape[1], 3),
            img_ids=inputs["img_ids"][0],
        )


class FluxVae(GridPictureVae):
    """The VAE; a VaeDecoder of patches."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self._packing = Packing.of(loader.folder)
        self.latents = (1, None, self._packing.channels * PATCH**2)

    @override
    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        return super().unpack(self._packing.unpack(latents, params).squeeze(2), params)


class Flux(PackedFamily):
    """The stages of a FluxPipeline folder."""

    name = "flux"
    source = ("pipelines/flux/pipeline_flux.py", "FluxPipeline")
    classes = {
        "tokenizer": ("transformers", CLIP_TOKENIZERS),
        "text_encoder": ("transformers", ("CLIPTextModel",)),
        "tokenizer_2": ("transformers", T5_TOKENIZERS),
        "text_encoder_2": ("transformers", ("T5EncoderModel",)),
        "transformer": ("diffusers", ("FluxTransformer2DModel",)),
        "scheduler": ("diffusers", ("FlowMatchEulerDiscreteScheduler",)),
        "vae": ("diffusers", ("AutoencoderKL",)),
    }
    text_encoders = {"text_encode": ClipText, "text_encode_2": partial(T5Text, end="_2")}
    denoiser = FluxDenoiser
    vae = FluxVae
    packing = Shape.of
    starts: Sequence[str] = ("image", "mask")
    cut = Cut(
        blocks=("transformer_blocks", "single_transformer_blocks"),
        attention="attn",
        order=("text", "image"),
        enter={"hidden_states": Along(1, ("image",)), "encoder_hidden_states": Along(1, ("text",))},
        follow={"image_rotary_emb": (Along(0, ("text", "image")),)},
        leave=(Along(1, ()), Along(1, ("image",))),
        matrices=Matrices(
            outputs=("*.to_[qkv]", "*.add_[qkv]_proj", "*.net.0.proj", "*.proj_mlp"),
            inputs=("*.to_out.0", "*.to_add_out", "*.net.2", "single_*.proj_out"),
            packed={"single_*.proj_out": (1, 1)},
            gathered=("*_blocks.*.norm*.linear",),
            divided=("num_attention_heads",),
        ),
        gives=("encoder_hidden_states", "hidden_states"),
    )

    @override
    def pipeline(self, folder: ModelFolder, limits: Limits, widths: Mapping[str, int]) -> Pipeline:
        shape = Shape.of(folder)
        embeds = limits.max_sequence_length * shape.text_dim * widths["text_encoder_2"]
        clip = text_stage({"pooled_prompt_embeds": shape.pooled_dim * widths["text_encoder"]})
        t5 = text_stage({"prompt_embeds": embeds}, end="_2")
        room = Room(ALIGNMENT, shape.channels * widths["transformer"] / shape.scale**2)
        return with_encoders((clip, t5), room)


FAMILY = Flux()
