"""Z-Image: text to picture with one language model, which reads the prompt as a chat's message.

The stages do what diffusers' ZImagePipeline does, in its order of operations, on its components. Checked against
diffusers 0.42.

A prompt has as many embeddings as it has tokens. They travel padded to one length, with a mask. Guidance applies with a
`guidance_scale` above 0, and goes so much beyond the prompt's own prediction, away from the negative prompt's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unfuse.core.errors import ConfigError
from unfuse.core.modalities import MediaLimits
from unfuse.core.object_ref import DTYPES
from unfuse.core.plan import Params, StageSpec
from unfuse.models.base import Loader
from unfuse.models.components import (
    FAST_TOKENIZERS,
    PATCH,
    FlowDenoiser,
    GridPictureVae,
    MaskedTextEncoder,
    PictureFamily,
    PictureShape,
    need_channels,
    shift,
    text_stage,
)
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim, TensorParallelLayers
from unfuse.stages.base import TOWARDS, guidance_scale, need
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from unfuse.stages.denoise import NoiseScheduler

FRAMES = 1  # latents along time that the pipeline has the transformer see as one
USUAL = 1024  # the pipeline's side in pixels, whatever the VAE


@dataclass(frozen=True)
class Shape(PictureShape):
    """Sizes that follow from a model's configurations."""

    text_dim: int

    @classmethod
    def of(cls, folder: ModelFolder) -> Shape:
        """Read the configurations. Raises ConfigError when they do not fit each other."""
        vae, transformer = PictureShape.of_vae(folder), folder.config("transformer")
        with folder.reading("transformer"):
            sides = PATCH in transformer["all_patch_size"] and FRAMES in transformer["all_f_patch_size"]
            longest, text_dim = min(map(int, transformer["axes_lens"][1:])), int(transformer["cap_feat_dim"])
            usual = USUAL // vae.multiple * vae.multiple
            shape = cls(vae.channels, vae.scale, vae.multiple, usual, longest * vae.multiple, text_dim)
            found = int(transformer["in_channels"])
        need_channels(folder, vae.channels, found)
        if not sides or transformer.get("siglip_feat_dim") is not None:
            raise ConfigError(f"model {folder.path}: its transformer sees more than text, or other patches")
        return shape


def beyond(params: Params) -> float:
    """How much further than the negative prompt's a prediction goes."""
    return 1.0 + guidance_scale(params)


class ChatTextEncoder(MaskedTextEncoder):
    """A language model's hidden states but one layer; a TextEncoder."""

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """`prompt_embeds` (texts, length, text dim); `prompt_embeds_mask` (texts, length) is 1 at a text's tokens."""
        tokens = self._tokens(texts, length)
        used = tokens.attention_mask.bool()
        given = {"input_ids": tokens.input_ids, "attention_mask": used}
        hidden = self._encoder(**given, output_hidden_states=True).hidden_states[-2]
        embeds, mask = hidden.new_zeros(hidden.shape), tokens.attention_mask.new_zeros(used.shape)
        for row, (states, own) in enumerate(zip(hidden, used, strict=True)):
            count = int(own.sum())
            embeds[row, :count], mask[row, :count] = states[own], 1
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}

    @override
    def _tokens(self, texts: Sequence[str], length: int, padding: str = "max_length") -> Any:
        how = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": True}
        said = [self._tokenizer.apply_chat_template([{"role": "user", "content": text}], **how) for text in texts]
        return super()._tokens(said, length, padding)


class ZImageDenoiser(FlowDenoiser):
    """Transformer and the configuration of its noise scheduler; a Denoiser."""

    first, guidance = TOWARDS, staticmethod(beyond)

    def __init__(self, loader: Loader) -> None:
        shape = Shape.of(loader.folder)
        super().__init__(loader, shape.latents)
        self.embeds, self.masks = {"prompt_embeds": (1, None, shape.text_dim)}, {"prompt_embeds_mask": (1, None)}

    @override
    def noise_dtype(self, params: Params) -> torch.dtype | None:
        """Where a picture is redrawn, the transformer's dtype."""
        return self.dtype if params.get("strength") else None

    def noise_scheduler(self, params: Params, latents: Tensor) -> NoiseScheduler:
        """The more patches, the longer it stays at high noise, where the configuration says so."""
        import torch

        steps = need(params, "num_inference_steps", int)
        mu = shift(self._scheduler.config, latents.shape[-2] // PATCH * (latents.shape[-1] // PATCH))
        return self._fresh(latents, sigmas=torch.linspace(1.0, 1 / steps, steps).tolist(), mu=mu)

    def predict(self, latents: Tensor, timestep: Tensor, inputs: Mapping[str, Tensor], params: Params) -> Tensor:
        """The velocity in float32, shaped as the latents. The transformer gives its opposite."""
        import torch

        texts = zip(inputs["prompt_embeds"], inputs["prompt_embeds_mask"].sum(1).tolist(), strict=True)
        made = self._transformer(
            [*latents.unsqueeze(2)],
            (1000 - timestep) / 1000,
            [text[:count] for text, count in texts],
            return_dict=False,
        )[0]
        return -torch.stack([one.float() for one in made]).squeeze(2)

    @override
    def combine(self, towards: Tensor, away: Tensor, scale: float, timestep: Tensor, params: Params) -> Tensor:
        """So many times the way from the one to the other, beyond the other."""
        return towards + guidance_scale(params) * (towards - away)


class ZImage(PictureFamily):
    """The stages of a ZImagePipeline folder."""

    name = "z_image"
    source = ("pipelines/z_image/pipeline_z_image.py", "ZImagePipeline")
    classes = {
        "tokenizer": ("transformers", ("Qwen2Tokenizer", "Qwen2TokenizerFast", *FAST_TOKENIZERS)),
        "text_encoder": ("transformers", ("Qwen3Model", "Qwen3ForCausalLM")),
        "transformer": ("diffusers", ("ZImageTransformer2DModel",)),
        "scheduler": ("diffusers", ("FlowMatchEulerDiscreteScheduler",)),
        "vae": ("diffusers", ("AutoencoderKL",)),
    }
    text_encoders = {"text_encode": partial(ChatTextEncoder, guidance=beyond)}
    denoiser = ZImageDenoiser
    vae = partial(GridPictureVae, cast_first=True)
    shape = Shape.of
    else_whole = float32_latents = True
    starts = ("image", "mask")
    cut = ParallelPlan(
        blocks=("layers",),
        attention="attention",
        order=("tokens",),
        enter={"x": SequenceDim(1, ("tokens",))},
        follow={"freqs_cis": (SequenceDim(1, ("tokens",)),)},
        leave=(SequenceDim(1, ("tokens",)),),
        matrices=TensorParallelLayers(
            outputs=("*.attention.to_[qkv]", "*.feed_forward.w[13]"),
            inputs=("*.attention.to_out.0", "*.feed_forward.w2"),
            gathered=("layers.*.adaLN_modulation.0",),
            heads=("*.attention.heads",),
            divided=("n_heads",),
        ),
        gives=("x",),
    )

    @override
    def denoiser_spreads(self, folder: ModelFolder) -> dict[str, int]:
        config = folder.config("transformer")
        with folder.reading("transformer"):
            heads, width, blocks = (int(config[name]) for name in ("n_heads", "dim", "n_layers"))
        common = gcd(heads, int(width / 3 * 8))
        return {"ulysses": heads, "ring": 0, "cfg": 2, "tensor": common, "layers": blocks, "shard": 0}

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        shape, length = Shape.of(folder), limits.max_sequence_length
        sizes = {
            "prompt_embeds": length * shape.text_dim * widths["text_encoder"],
            "prompt_embeds_mask": length * DTYPES["int64"],
        }
        return (text_stage(sizes, "guidance_scale"),)


FAMILY = ZImage()
