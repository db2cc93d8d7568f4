"""What families share that redraw pictures, whole or where a mask says: encoding these, and their latents.

The stages do what diffusers' pipelines for image to image and inpainting do with the components of a folder that text
to picture has. A request without a picture has one stage less. The picture is encoded where the VAE is anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from typing_extensions import override

from unfuse.core.card import AcceptedInput, ModelCard
from unfuse.core.media import UPLOAD, Room
from unfuse.core.object_ref import ALIGNMENT, DTYPES
from unfuse.core.plan import Params, Pipeline, StageSpec
from unfuse.models.base import DiffusersFamily, Loader
from unfuse.models.defaults import call_defaults
from unfuse.models.flow_matching import Packing
from unfuse.stages.base import Stage, need
from unfuse.stages.specs import DENOISE, REDRAW_ENCODE, VAE_DECODE
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor


NAMED = {"image": "Img2Img", "mask": "Inpaint"}  # diffusers' words for what a request brings


class OneVae(Loader):
    """Loads as another does, but the VAE once for all stages of a process: it remembers nothing between calls."""

    def __init__(self, other: Loader) -> None:
        super().__init__(other.folder, other._classes, other.runtime, other._report, other._cut)
        self._other = other

    @override
    def vae(self) -> Any:
        runtime = self.runtime
        key = "vae", self.folder.path, runtime.dtypes["vae"], runtime.mesh is None
        if key not in runtime.shared:
            runtime.shared[key] = self._other.vae()
        return runtime.shared[key]


def forces_upcast(vae: Any) -> bool:
    """Return whether a VAE's configuration asks for float32. False if its weights are not on this device (meta)."""
    return bool(vae.config.get("force_upcast")) and not any(weight.is_meta for weight in vae.parameters())


@contextmanager
def computing_in(vae: Any, dtype: torch.dtype) -> Iterator[None]:
    """Cast a VAE to another dtype for the duration of the block."""
    before = vae.dtype
    if before == dtype:
        yield
        return
    vae.to(dtype)
    try:
        yield
    finally:
        vae.to(before)


class PictureVae:
    """The VAE as an ImageEncoder. Pictures are stretched to the requested size.

    With `upcasts` it encodes in float32 if its configuration has `force_upcast`.
    """

    def __init__(self, loader: Loader, upcasts: bool = False) -> None:
        self._vae, self._device = loader.vae(), loader.device
        self._upcasts = upcasts and forces_upcast(self._vae)

    def verify(self, params: Params) -> None:
        """It reads a size."""
        need(params, "height", int), need(params, "width", int)

    def encode(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> dict[str, Tensor]:
        """The `moments` of the distribution from which latents are drawn, each a row a picture."""
        from diffusers.image_processor import VaeImageProcessor

        size = {side: need(params, side, int) for side in ("height", "width")}
        pixels = VaeImageProcessor(vae_scale_factor=1).preprocess(list(pictures[UPLOAD]), **size)
        dtype = self._vae.dtype
        pixels = pixels.to(self._device, dtype)
        if "z_dim" in self._vae.config:
            pixels = pixels.unsqueeze(2)
        if self._upcasts:
            pixels = pixels.float()
        with computing_in(self._vae, pixels.dtype):
            moments = self._vae.encode(pixels).latent_dist.parameters
        return {"moments": moments.reshape(*moments.shape[:2], *moments.shape[-2:])}


class Redrawing(DiffusersFamily):
    """A family whose VAE is an AutoencoderKL, and which diffusers has pipelines for that start from a picture."""

    starts: Sequence[str] = ()
    """What such a request may bring; in diffusers each has a pipeline of its own, whose strength is usual for it."""
    packs = False  # whether the transformer sees latents as patches
    whole_steps = False  # whether a step that the strength spares in part is not made
    upcasts = False  # whether the pipeline encodes in float32 if the VAE's configuration has force_upcast
    repeats = False  # whether the pipeline for inpainting repeats the picture's latents for each of a prompt's pictures

    @override
    def card(self, name: str, folder: Path, dtype: str = "auto") -> ModelCard:
        card = super().card(name, folder, dtype)
        if not self.starts:
            return card
        packing, width = Packing.of(ModelFolder(folder)), DTYPES["float32" if self.upcasts else card.dtypes["vae"]]
        room = (2 * packing.channels * width + DTYPES["float32"]) / packing.scale**2
        encode = replace(REDRAW_ENCODE, room=Room(2 * ALIGNMENT, room))

        def behind(stage: StageSpec) -> StageSpec:
            given = (*stage.inputs, *encode.outputs) if stage.kind == DENOISE.kind else stage.inputs
            return replace(stage, inputs=given)

        return replace(
            card,
            pipeline=Pipeline((encode, *map(behind, card.pipeline.stages))),
            accepts=tuple(AcceptedInput(what, "redraw", strength=self._usual_strength(what)) for what in self.starts),
        )

    def _usual_strength(self, upload: str) -> float:
        """The default of the pipeline that redraws with this upload: its file and class are named after this one's."""
        (file, name), how = self.source, NAMED[upload]
        call = call_defaults(file.replace(".py", f"_{how.lower()}.py"), name.replace("Pipeline", f"{how}Pipeline"))
        return float(call["strength"] or 0)

    @override
    def stage(self, kind: str, loader: Loader) -> Stage:
        from unfuse.stages.denoise import Denoise
        from unfuse.stages.redraw import Redraw, RedrawEncode

        if kind in (REDRAW_ENCODE.kind, VAE_DECODE.kind):
            loader = OneVae(loader)
        if kind == REDRAW_ENCODE.kind:
            return RedrawEncode(PictureVae(loader, self.upcasts))
        stage = super().stage(kind, loader)
        if isinstance(stage, Denoise) and self.starts:
            packing, config = Packing.of(loader.folder), loader.folder.config("vae")
            pack = packing.pack if self.packs else None
            stage.redraw = Redraw(config, packing.channels, stage.dtype, pack, self.whole_steps, self.repeats)
        return stage
