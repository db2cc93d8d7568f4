"""FLUX.1: text-to-image, with two text encoders in parallel.

CLIP returns one vector for the whole prompt, T5 one for each of its tokens. The stages do what diffusers' FluxPipeline
does, in its order of operations, with its components. Checked against diffusers 0.42.

`guidance_scale` is an input of a transformer that was distilled for it (dev), and not used by another (schnell).
Classifier-free guidance is independent of it. It applies with a `negative_prompt` and a `true_cfg_scale` above 1.

FLUX.1 Kontext edits an image by a text: the same, with a reference image that the VAE encodes, as in diffusers'
FluxKontextPipeline. Text encoders and VAE are those of FLUX.1, so that both kinds share their pools.
The reference is resized to one of the preferred sizes of about a megapixel, the one with the nearest aspect ratio. The
requested size is that of the result, as in a call with an equally large `max_area`. A call without `max_area` makes a
megapixel of that aspect ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from typing_extensions import override

from unfuse.core.errors import PermanentError
from unfuse.core.modalities import UPLOAD, MediaLimits, OutputSize
from unfuse.core.model_spec import START_IMAGE
from unfuse.core.object_ref import ALIGNMENT
from unfuse.core.plan import Params, StageSpec
from unfuse.models.base import Loader
from unfuse.models.components import (
    CLIP_TOKENIZERS,
    PATCH,
    T5_TOKENIZERS,
    GridPictureVae,
    PackedDenoiser,
    PictureEncoder,
    PictureFamily,
    PictureShape,
    need_channels,
    text_stage,
)
from unfuse.models.text_encoders import ClipTextEncoder, T5TextEncoder
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim, TensorParallelLayers
from unfuse.stages.base import need
from unfuse.stages.specs import IMAGE_ENCODE
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from unfuse.stages.denoise import RowFacts


@dataclass(frozen=True)
class Shape(PictureShape):
    """The sizes in a model's configurations."""

    text_dim: int  # width of T5's embeddings
    pooled_dim: int  # width of CLIP's pooled embeddings
    distilled: bool  # whether the guidance scale is an input

    @classmethod
    def read(cls, folder: ModelFolder) -> Shape:
        """Read the transformer's and VAE's configurations. Raises ConfigError for a misfit."""
        transformer, vae = folder.config("transformer"), PictureShape.of_vae(folder)
        with folder.reading("transformer"):
            shape = cls(
                **vars(vae),
                text_dim=int(transformer["joint_attention_dim"]),
                pooled_dim=int(transformer["pooled_projection_dim"]),
                distilled=bool(transformer["guidance_embeds"]),
            )
            channels = int(transformer["in_channels"])
        need_channels(folder, shape.channels * PATCH**2, channels)
        return shape


class FluxDenoiser(PackedDenoiser):
    """The FLUX.1 transformer as a Denoiser."""

    required_params = {"guidance_scale": float}

    def __init__(self, loader: Loader) -> None:
        shape = Shape.read(loader.folder)
        super().__init__(loader, shape)
        self._distilled = shape.distilled
        self.embeds = {"pooled_prompt_embeds": (1, shape.pooled_dim), "prompt_embeds": (1, None, shape.text_dim)}

    def constants(self, params: Params, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the positions `img_ids` (1, patches, 3) and, if it is an input, `guidance` (1,)."""
        import torch

        rows, columns = self._shape.patches(params)
        # The first coordinate is a plane: 0 for the latents, 1 for a reference.
        axes = (torch.arange(side, dtype=torch.float32) for side in (1, rows, columns))
        constants = {"img_ids": torch.cartesian_prod(*axes)[None].to(self.device, self.dtype)}
        if self._distilled:
            scale = need(params, "guidance_scale", float)
            constants["guidance"] = torch.tensor([scale], dtype=torch.float32, device=self.device)
        return constants

    def predict(
        self,
        latents: Tensor,
        timestep: Tensor,
        inputs: Mapping[str, Tensor],
        params: Params,
        facts: Sequence[RowFacts],
    ) -> Tensor:
        """Return the velocity, in the shape of the latents."""
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
    """The VAE as a VaeDecoder of packed latents."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self._shape = PictureShape.of_vae(loader.folder)
        self.latents = (1, None, self._shape.channels * PATCH**2)

    @override
    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        return super().unpack(self._shape.unpack(latents, params).squeeze(2), params)


class Flux(PictureFamily):
    """The family of FluxPipeline."""

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
    text_encoders = {"text_encode": ClipTextEncoder, "text_encode_2": partial(T5TextEncoder, suffix="_2")}
    denoiser = FluxDenoiser
    vae = FluxVae
    shape = Shape.read
    packs = True
    starts: Sequence[str] = ("image", "mask")
    parallel_plans = ParallelPlan(
        blocks=("transformer_blocks", "single_transformer_blocks"),
        attention="attn",
        order=("text", "image"),
        block_inputs={"hidden_states": SequenceDim(1, ("image",)), "encoder_hidden_states": SequenceDim(1, ("text",))},
        follow={"image_rotary_emb": (SequenceDim(0, ("text", "image")),)},
        block_outputs=(SequenceDim(1, ()), SequenceDim(1, ("image",))),
        matrices=TensorParallelLayers(
            outputs=("*.to_[qkv]", "*.add_[qkv]_proj", "*.net.0.proj", "*.proj_mlp"),
            inputs=("*.to_out.0", "*.to_add_out", "*.net.2", "single_*.proj_out"),
            packed={"single_*.proj_out": (1, 1)},
            gathered=("*_blocks.*.norm*.linear",),
            divided=("num_attention_heads",),
        ),
        updated_inputs=("encoder_hidden_states", "hidden_states"),
    )

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        shape = Shape.read(folder)
        embeds_bytes = limits.max_sequence_length * shape.text_dim * widths["text_encoder_2"]
        clip = text_stage({"pooled_prompt_embeds": shape.pooled_dim * widths["text_encoder"]})
        t5 = text_stage({"prompt_embeds": embeds_bytes}, suffix="_2")
        return clip, t5


FAMILY = Flux()


#: Pixels of the largest size to which a reference is resized.
MAX_PIXELS = 1328 * 800


class Reference(PictureEncoder):
    """The VAE as an ImageEncoder of the reference image."""

    one_by_one = True  # references of other aspect ratios have other sizes

    def __init__(self, loader: Loader) -> None:
        self.vae, self._device = loader.vae(), loader.device
        self._side = PictureShape.of_vae(loader.folder).multiple

    def encode(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> dict[str, Tensor]:
        """Return the denoiser's `condition` (1, channels, height, width), of one image."""
        from diffusers.image_processor import VaeImageProcessor

        (picture,) = pictures[UPLOAD]
        vae, size = self.vae, self.size(pictures, params)
        processor = VaeImageProcessor(vae_scale_factor=self._side)
        pixels = processor.preprocess(processor.resize(picture, *size), *size).to(self._device, vae.dtype)
        latents = vae.encode(pixels).latent_dist.mode()
        return {"condition": (latents - vae.config.shift_factor) * vae.config.scaling_factor}

    @override
    def size(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> tuple[int, int]:
        """Return the preferred height and width whose aspect ratio is next to the image's."""
        from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS as SIZES

        (picture,) = pictures[UPLOAD]
        side = self._side
        columns, rows = (length // side for length in picture.size)
        if not rows or not columns:
            raise PermanentError(f"the picture is smaller than {side}×{side}: send a larger one")

        _, width, height = min((abs(columns / rows - w / h), w, h) for w, h in SIZES)
        return height // side * side, width // side * side


class KontextDenoiser(FluxDenoiser):
    """The FLUX.1 Kontext transformer as a Denoiser.

    The reference's patches follow the latents, at the same positions in another plane.
    """

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self.conditions = {"condition": (1, self._shape.channels, None, None)}

    @override
    def constants(self, params: Params, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the constants of FLUX.1, with the reference's positions after those of the latents."""
        import torch

        constants = super().constants(params, inputs)
        sides = (side // PATCH for side in inputs["condition"].shape[-2:])
        rows, columns = (torch.arange(side, dtype=torch.float32) for side in sides)
        reference_ids = torch.cartesian_prod(torch.ones(1), rows, columns)[None].to(constants["img_ids"])
        return {**constants, "img_ids": torch.cat([constants["img_ids"], reference_ids], 1)}

    @override
    def predict(
        self,
        latents: Tensor,
        timestep: Tensor,
        inputs: Mapping[str, Tensor],
        params: Params,
        facts: Sequence[RowFacts],
    ) -> Tensor:
        import torch

        patches = torch.cat([latents, self._shape.pack(inputs["condition"].to(latents.dtype))], 1)
        return super().predict(patches, timestep, inputs, params, facts)[:, : latents.shape[1]]


class Kontext(Flux):
    """The family of FluxKontextPipeline. Texts and image are encoded in parallel."""

    source = ("pipelines/flux/pipeline_flux_kontext.py", "FluxKontextPipeline")
    image_encoder = Reference
    denoiser = KontextDenoiser
    accepts = (START_IMAGE,)
    starts = ()
    else_whole = True

    @override
    def settings(self, index: Mapping[str, Any]) -> dict[str, str]:
        """Return a setting by which the transformer's pool is not that of a FLUX.1 transformer."""
        return {"transformer": "reference"}

    @override
    def parallelism(self, folder: ModelFolder) -> dict[str, dict[str, int]]:
        return {IMAGE_ENCODE.kind: {"tiles": 0}} | super().parallelism(folder)

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        shape = PictureShape.of_vae(folder)
        latents_bytes = MAX_PIXELS // shape.scale**2 * shape.channels * widths["vae"]
        image_stage = replace(
            IMAGE_ENCODE,
            components=("vae",),
            outputs=("condition",),
            output_size=OutputSize(latents_bytes + ALIGNMENT),
            depends_on_params=("image",),
        )
        return (*super().encoders(folder, limits, widths), image_stage)


KONTEXT = Kontext()
