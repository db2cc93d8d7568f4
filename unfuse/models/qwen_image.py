"""Qwen-Image: text-to-image with one large text encoder, which reads the prompt in a template.

The stages do what diffusers' QwenImagePipeline does, in its order of operations, with its components. Checked against
diffusers 0.42.

A prompt has as many embeddings as tokens. They are padded to one length, with a mask, so that requests and the two
halves of guidance can share a forward. A forward of equally long texts has neither padding nor mask, as in an undivided
pipeline.

Classifier-free guidance applies with a `negative_prompt` and a `true_cfg_scale` above 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
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
    GridVae,
    PackedDenoiser,
    PictureFamily,
    PictureShape,
    need_channels,
    text_stage,
)
from unfuse.models.text_encoders import GuidedTextEncoder, Tokens
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim, TensorParallelLayers
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    from torch import Tensor

    from unfuse.stages.denoise import RowFacts

#: The length at which the pipeline truncates a prompt, whatever the requested length.
MAX_TOKENS = 1024


@dataclass(frozen=True)
class Shape(PictureShape):
    """The sizes in a model's configurations."""

    text_dim: int  # width of the prompt embeddings

    @classmethod
    def read(cls, folder: ModelFolder) -> Shape:
        """Read the transformer's and VAE's configurations. Raises ConfigError for a misfit."""
        transformer, vae = folder.config("transformer"), PictureShape.of_vae(folder)
        with folder.reading("transformer"):
            channels, text_dim = int(transformer["in_channels"]), int(transformer["joint_attention_dim"])
            shape = cls(**vars(vae), text_dim=text_dim)
        need_channels(folder, shape.channels * PATCH**2, channels)
        if transformer.get("guidance_embeds"):
            raise ConfigError(f"model {folder.path} is guidance-distilled, which diffusers does not support")
        return shape


class QwenTextEncoder(GuidedTextEncoder):
    """The language model of Qwen2.5-VL as a TextEncoder."""

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """Return `prompt_embeds` (texts, length, text dim) and `prompt_embeds_mask`.

        The mask (texts, length) is 1 for a text's tokens.
        """
        tokenized, template_tokens = self._tokenize_in_template(texts)
        tokens = Tokens.on(self._device, tokenized)
        inputs = {"input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask}
        hidden = self._encoder(**inputs, output_hidden_states=True).hidden_states[-1]
        embeds = hidden.new_zeros(len(texts), length, hidden.shape[-1], dtype=self._encoder.dtype)
        mask = tokens.attention_mask.new_zeros(len(texts), length)

        for row, (states, (start, stop)) in enumerate(zip(hidden, tokens.spans, strict=True)):
            text_states = states[start:stop][template_tokens : template_tokens + length]
            embeds[row, : len(text_states)] = text_states
            mask[row, : len(text_states)] = 1
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}

    @override
    def exact_batch_key(self, text: str, length: int) -> int:
        """Return the number of tokens, because a batch is padded to the longest text."""
        tokenized, _ = self._tokenize_in_template([text])
        return int(tokenized.input_ids.shape[1])

    def _tokenize_in_template(self, texts: Sequence[str]) -> tuple[Any, int]:
        """Return the tokens of the texts in their template, and how many precede a text."""
        from diffusers.modular_pipelines.qwenimage.prompt_templates import (
            QWENIMAGE_PROMPT_TEMPLATE as TEMPLATE,
            QWENIMAGE_PROMPT_TEMPLATE_START_IDX as START,
        )

        return self._tokenize([TEMPLATE.format(text) for text in texts], MAX_TOKENS + START, "longest"), START


class QwenImageDenoiser(PackedDenoiser):
    """The Qwen-Image transformer as a Denoiser."""

    def __init__(self, loader: Loader) -> None:
        shape = Shape.read(loader.folder)
        super().__init__(loader, shape)
        self.embeds = {"prompt_embeds": (1, None, shape.text_dim)}
        self.masks = {"prompt_embeds_mask": (1, None)}

    def predict(
        self,
        latents: Tensor,
        timestep: Tensor,
        inputs: Mapping[str, Tensor],
        params: Params,
        facts: Sequence[RowFacts],
    ) -> Tensor:
        """Return the velocity, in the shape of the latents."""
        mask = inputs["prompt_embeds_mask"]
        lengths = [length for row_facts in facts for length in row_facts.tokens]
        longest = max(lengths)

        # Without padding no mask is passed, as in the undivided pipeline: attention with a mask rounds differently.
        return self._predicted(
            hidden_states=latents,
            timestep=timestep.to(latents.dtype) / 1000,
            encoder_hidden_states=inputs["prompt_embeds"][:, :longest],
            encoder_hidden_states_mask=mask[:, :longest] if min(lengths) < longest else None,
            img_shapes=[[(1, *self._shape.patches(params))]] * len(latents),
        )

    @override
    def combine(self, towards: Tensor, away: Tensor, scale: float, phase: Hashable, params: Params) -> Tensor:
        """Return the guided prediction, with each patch rescaled to its norm in `towards`."""
        import torch

        combined = super().combine(towards, away, scale, phase, params)
        target_norm, norm = (torch.norm(prediction, dim=-1, keepdim=True) for prediction in (towards, combined))
        rescaled: Tensor = combined * (target_norm / norm)
        return rescaled


class QwenImageVae(GridVae):
    """The VAE as a VaeDecoder of packed latents."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self._shape = PictureShape.of_vae(loader.folder)
        self.latents = (1, None, self._shape.channels * PATCH**2)

    @override
    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        return super().unpack(self._shape.unpack(latents, params), params)


class QwenImage(PictureFamily):
    """The family of QwenImagePipeline."""

    name = "qwen_image"
    source = ("pipelines/qwenimage/pipeline_qwenimage.py", "QwenImagePipeline")
    classes = {
        "tokenizer": ("transformers", ("Qwen2Tokenizer", "Qwen2TokenizerFast", *FAST_TOKENIZERS)),
        "text_encoder": ("transformers", ("Qwen2_5_VLForConditionalGeneration",)),
        "transformer": ("diffusers", ("QwenImageTransformer2DModel",)),
        "scheduler": ("diffusers", ("FlowMatchEulerDiscreteScheduler",)),
        "vae": ("diffusers", ("AutoencoderKLQwenImage",)),
    }
    text_encoders = {"text_encode": QwenTextEncoder}
    denoiser = QwenImageDenoiser
    vae = QwenImageVae
    shape = Shape.read
    packs = True
    starts = ("image", "mask")
    parallel_plans = ParallelPlan(
        blocks=("transformer_blocks",),
        attention="attn",
        order=("text", "image"),
        block_inputs={"hidden_states": SequenceDim(1, ("image",)), "encoder_hidden_states": SequenceDim(1, ("text",))},
        follow={
            "encoder_hidden_states_mask": (SequenceDim(1, ("text",)),),
            "image_rotary_emb": (SequenceDim(0, ("image",)), SequenceDim(0, ("text",))),
            "modulate_index": (SequenceDim(1, ("image",)),),
        },
        block_outputs=(SequenceDim(1, ()), SequenceDim(1, ("image",))),
        matrices=TensorParallelLayers(
            outputs=("*.to_[qkv]", "*.add_[qkv]_proj", "*.net.0.proj"),
            inputs=("*.to_out.0", "*.to_add_out", "*.net.2"),
            gathered=("*.???_mod.1",),
            divided=("num_attention_heads",),
        ),
        updated_inputs=("encoder_hidden_states", "hidden_states"),
    )

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        shape = Shape.read(folder)
        length, width = limits.max_sequence_length, shape.text_dim * widths["text_encoder"]
        stage = text_stage({"prompt_embeds": length * width, "prompt_embeds_mask": length * DTYPES["int64"]})
        return (stage,)


FAMILY = QwenImage()
