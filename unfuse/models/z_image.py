"""Z-Image: text-to-image with one language model, which reads the prompt as a chat message.

The stages do what diffusers' ZImagePipeline does, in its order of operations, with its components. Checked against
diffusers 0.42.

A prompt has as many embeddings as tokens. They are padded to one length, with a mask. Classifier-free guidance applies
with a `guidance_scale` above 0. The scale counts from the prompt's own prediction: it corresponds to a CFG scale of
1 + `guidance_scale`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
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
    PictureFamily,
    PictureShape,
    need_channels,
    shift,
    text_stage,
)
from unfuse.models.text_encoders import MaskedTextEncoder
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim, TensorParallelLayers
from unfuse.stages.base import CONDITIONAL, guidance_scale, need
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from unfuse.stages.denoise import NoiseScheduler, RowFacts

FRAMES = 1  # latents along time that the pipeline has the transformer see as one
USUAL = 1024  # default side in pixels, whatever the VAE


@dataclass(frozen=True)
class Shape(PictureShape):
    """The sizes in a model's configurations."""

    text_dim: int  # width of the prompt embeddings

    @classmethod
    def read(cls, folder: ModelFolder) -> Shape:
        """Read the configurations. Raises ConfigError if they do not fit each other."""
        vae, transformer = PictureShape.of_vae(folder), folder.config("transformer")
        with folder.reading("transformer"):
            has_patches = PATCH in transformer["all_patch_size"] and FRAMES in transformer["all_f_patch_size"]
            longest, text_dim = min(map(int, transformer["axes_lens"][1:])), int(transformer["cap_feat_dim"])
            usual = USUAL // vae.multiple * vae.multiple
            shape = cls(vae.channels, vae.scale, vae.multiple, usual, longest * vae.multiple, text_dim)
            channels = int(transformer["in_channels"])
        need_channels(folder, vae.channels, channels)
        if not has_patches or transformer.get("siglip_feat_dim") is not None:
            reason = "a transformer with image inputs, or with another patch size, is not supported"
            raise ConfigError(f"model {folder.path}: {reason}")
        return shape


def beyond(params: Params) -> float:
    """Return the scale of classifier-free guidance (CFG): 1 + `guidance_scale`."""
    return 1.0 + guidance_scale(params)


class ChatTextEncoder(MaskedTextEncoder):
    """A language model as a TextEncoder of its last hidden states but one."""

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """Return `prompt_embeds` (texts, length, text dim) and `prompt_embeds_mask`.

        The mask (texts, length) is 1 for a text's tokens.
        """
        tokens = self._tokens(texts, length)
        is_token = tokens.attention_mask.bool()
        inputs = {"input_ids": tokens.input_ids, "attention_mask": is_token}
        hidden = self._encoder(**inputs, output_hidden_states=True).hidden_states[-2]

        # The tokenizer may pad on either side. The outputs are padded at the end.
        embeds = hidden.new_zeros(hidden.shape)
        mask = tokens.attention_mask.new_zeros(is_token.shape)
        for row, (states, (start, stop)) in enumerate(zip(hidden, tokens.spans, strict=True)):
            embeds[row, : stop - start] = states[start:stop]
            mask[row, : stop - start] = 1
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}

    @override
    def _tokenize(self, texts: Sequence[str], length: int, padding: str = "max_length") -> Any:
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": True}
        chats = [[{"role": "user", "content": text}] for text in texts]
        prompts = [self._tokenizer.apply_chat_template(chat, **options) for chat in chats]
        return super()._tokenize(prompts, length, padding)


class ZImageDenoiser(FlowDenoiser):
    """The Z-Image transformer as a Denoiser."""

    first, guidance = CONDITIONAL, staticmethod(beyond)

    def __init__(self, loader: Loader) -> None:
        shape = Shape.read(loader.folder)
        super().__init__(loader, shape.latents)
        self.embeds = {"prompt_embeds": (1, None, shape.text_dim)}
        self.masks = {"prompt_embeds_mask": (1, None)}

    @override
    def noise_dtype(self, params: Params) -> torch.dtype | None:
        """Return the transformer's dtype for image-to-image, else None for float32."""
        return self.dtype if params.get("strength") else None

    def noise_scheduler(self, params: Params, latents: Tensor) -> NoiseScheduler:
        """Return a noise scheduler, with a timestep shift by size if configured."""
        import torch

        steps = need(params, "num_inference_steps", int)
        mu = shift(self._scheduler.config, latents.shape[-2] // PATCH * (latents.shape[-1] // PATCH))
        return self._fresh(latents, sigmas=torch.linspace(1.0, 1 / steps, steps).tolist(), mu=mu)

    def predict(
        self,
        latents: Tensor,
        timestep: Tensor,
        inputs: Mapping[str, Tensor],
        params: Params,
        facts: Sequence[RowFacts],
    ) -> Tensor:
        """Return the velocity in float32, in the shape of the latents.

        The transformer's output has the opposite sign.
        """
        import torch

        lengths = [length for row_facts in facts for length in row_facts.tokens]
        outputs = self._transformer(
            [*latents.unsqueeze(2)],
            (1000 - timestep) / 1000,
            [text[:length] for text, length in zip(inputs["prompt_embeds"], lengths, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack([output.float() for output in outputs]).squeeze(2)

    @override
    def combine(self, towards: Tensor, away: Tensor, scale: float, phase: Hashable, params: Params) -> Tensor:
        """Return the guided prediction, beyond `towards` by `guidance_scale` times the difference."""
        return towards + guidance_scale(params) * (towards - away)


class ZImage(PictureFamily):
    """The family of ZImagePipeline."""

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
    shape = Shape.read
    else_whole = float32_latents = True
    starts = ("image", "mask")
    parallel_plans = ParallelPlan(
        blocks=("layers",),
        attention="attention",
        order=("tokens",),
        block_inputs={"x": SequenceDim(1, ("tokens",))},
        follow={"freqs_cis": (SequenceDim(1, ("tokens",)),)},
        block_outputs=(SequenceDim(1, ("tokens",)),),
        matrices=TensorParallelLayers(
            outputs=("*.attention.to_[qkv]", "*.feed_forward.w[13]"),
            inputs=("*.attention.to_out.0", "*.feed_forward.w2"),
            gathered=("layers.*.adaLN_modulation.0",),
            heads=("*.attention.heads",),
            divided=("n_heads",),
        ),
        updated_inputs=("x",),
    )

    @override
    def denoiser_parallelism(self, folder: ModelFolder) -> dict[str, int]:
        config = folder.config("transformer")
        with folder.reading("transformer"):
            heads, width, blocks = (int(config[name]) for name in ("n_heads", "dim", "n_layers"))
        common = gcd(heads, int(width / 3 * 8))  # of the heads and of the feed-forward's width
        return {"ulysses": heads, "ring": 0, "cfg": 2, "tensor": common, "layers": blocks, "shard": 0}

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        shape, length = Shape.read(folder), limits.max_sequence_length
        sizes = {
            "prompt_embeds": length * shape.text_dim * widths["text_encoder"],
            "prompt_embeds_mask": length * DTYPES["int64"],
        }
        return (text_stage(sizes, "guidance_scale"),)


FAMILY = ZImage()
