"""FLUX.1 Kontext: a picture and a text to picture: what FLUX.1 does, with a reference picture that the VAE encodes.

The stages do what diffusers' FluxKontextPipeline does, in its order of operations, on its components. Text encoders and
VAE are those of FLUX.1, so that both kinds of model share their pools. Checked against diffusers 0.42.

The reference is brought to that size of about a megapixel whose shape is nearest to its own. The size that is asked for
is the picture's own, as in a call whose `max_area` is as large; a call that has none makes a megapixel of that shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from typing_extensions import override

from unfuse.core.card import START_PICTURE
from unfuse.core.errors import PermanentError
from unfuse.core.media import UPLOAD, Limits, Room
from unfuse.core.object_ref import ALIGNMENT
from unfuse.core.plan import Params, Pipeline
from unfuse.models.base import Loader
from unfuse.models.flow_matching import PATCH, Packing
from unfuse.models.flux import Flux, FluxDenoiser
from unfuse.models.text import with_encoders
from unfuse.stages.base import Stage
from unfuse.stages.specs import IMAGE_ENCODE
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

MOST_PIXELS = 1328 * 800  # the largest of the sizes to which a reference is brought


class Reference:
    """The VAE; an ImageEncoder."""

    def __init__(self, loader: Loader) -> None:
        self._vae, self._device, self._packing = loader.vae(), loader.device, Packing.of(loader.folder)

    def verify(self, params: Params) -> None:
        """It reads none."""

    def encode(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> dict[str, Tensor]:
        """The `condition` for the denoiser (1, channels, height, width), of one picture."""
        from diffusers.image_processor import VaeImageProcessor
        from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS as SIZES

        (picture,), side, vae = pictures[UPLOAD], self._packing.scale * PATCH, self._vae
        columns, rows = (length // side for length in picture.size)
        if not rows or not columns:
            raise PermanentError(f"the picture is smaller than {side}×{side}: send a larger one")
        _, width, height = min((abs(columns / rows - w / h), w, h) for w, h in SIZES)
        size = height // side * side, width // side * side
        processor = VaeImageProcessor(vae_scale_factor=side)
        pixels = processor.preprocess(processor.resize(picture, *size), *size).to(self._device, vae.dtype)
        latents = vae.encode(pixels).latent_dist.mode()
        return {"condition": (latents - vae.config.shift_factor) * vae.config.scaling_factor}


class KontextDenoiser(FluxDenoiser):
    """Transformer and the configuration of its noise scheduler; a Denoiser. The transformer sees the reference behind
    the latents, in the same places and another plane.
    """

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self.conditions = {"condition": (1, self._shape.channels, None, None)}

    @override
    def predict(self, latents: Tensor, timestep: Tensor, inputs: Mapping[str, Tensor], params: Params) -> Tensor:
        import torch

        reference = inputs["condition"].to(latents.dtype)
        rows, columns = (torch.arange(side // PATCH, dtype=torch.float32) for side in reference.shape[-2:])
        ids = torch.cartesian_prod(torch.ones(1), rows, columns)[None].to(inputs["img_ids"])
        seen = torch.cat([latents, self._packing.pack(reference)], 1)
        given = {**inputs, "img_ids": torch.cat([inputs["img_ids"][:1], ids], 1)}
        return super().predict(seen, timestep, given, params)[:, : latents.shape[1]]


class Kontext(Flux):
    """The stages of a FluxKontextPipeline folder; texts and picture are encoded side by side."""

    source = ("pipelines/flux/pipeline_flux_kontext.py", "FluxKontextPipeline")
    denoiser = KontextDenoiser
    accepts = (START_PICTURE,)
    starts = ()
    else_whole = True

    @override
    def settings(self, index: Mapping[str, Any]) -> dict[str, str]:
        """An equal transformer that sees no reference is another stage."""
        return {"transformer": "reference"}

    @override
    def spreads(self, folder: ModelFolder) -> dict[str, dict[str, int]]:
        return {IMAGE_ENCODE.kind: {"tiles": 0}} | super().spreads(folder)

    @override
    def pipeline(self, folder: ModelFolder, limits: Limits, widths: Mapping[str, int]) -> Pipeline:
        *texts, denoise, _ = super().pipeline(folder, limits, widths).stages
        packing = Packing.of(folder)
        latents = MOST_PIXELS // packing.scale**2 * packing.channels * widths["vae"]
        picture = replace(
            IMAGE_ENCODE, components=("vae",), outputs=("condition",), room=Room(latents + ALIGNMENT), reads=("image",)
        )
        return with_encoders((*texts, picture), denoise.room)

    @override
    def stage(self, kind: str, loader: Loader) -> Stage:
        """References of other shapes have other sizes."""
        from unfuse.stages.image_encode import ImageEncode

        if kind != IMAGE_ENCODE.kind:
            return super().stage(kind, loader)
        stage = ImageEncode(Reference(loader))
        stage.each = True
        return stage


FAMILY = Kontext()
