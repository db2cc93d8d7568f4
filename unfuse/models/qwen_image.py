"""Qwen-Image: text to picture with one large text encoder, which reads the prompt inside a template.

The stages do what diffusers' QwenImagePipeline does, in its order of operations, on its components. Checked against
diffusers 0.42.

A prompt has as many embeddings as it has tokens. They travel padded to one length, with a mask, so that requests and
the halves of guidance can share a forward; one of equally long texts sees neither padding nor mask, as undivided.

Guidance by a negative prompt applies with a `negative_prompt` and a `true_cfg_scale` above 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    GuidedTextEncoder,
    PackedDenoiser,
    PictureFamily,
    PictureShape,
    need_channels,
    text_stage,
)
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim, TensorParallelLayers
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    from torch import Tensor

MOST_TOKENS = 1024  # where the pipeline cuts a prompt, whatever the length that is asked for


@dataclass(frozen=True)
class Shape(PictureShape):
    """Sizes that follow from a model's configurations."""

    text_dim: int

    @classmethod
    def of(cls, folder: ModelFolder) -> Shape:
        """Read the configurations of transformer and VAE. Raises ConfigError when they do not fit each other."""
        transformer, vae = folder.config("transformer"), PictureShape.of_vae(folder)
        with folder.reading("transformer"):
            channels, text_dim = int(transformer["in_channels"]), int(transformer["joint_attention_dim"])
            shape = cls(**vars(vae), text_dim=text_dim)
        need_channels(folder, shape.channels * PATCH**2, channels)
        if transformer.get("guidance_embeds"):
            raise ConfigError(f"model {folder.path} was distilled for guidance, which diffusers cannot run")
        return shape


class QwenTextEncoder(GuidedTextEncoder):
    """The language part of Qwen2.5-VL; a TextEncoder."""

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """`prompt_embeds` (texts, length, text dim); `prompt_embeds_mask` (texts, length) is 1 at a text's tokens."""
        tokens, start = self._templated(texts)
        given = {"input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask}
        hidden = self._encoder(**given, output_hidden_states=True).hidden_states[-1]
        embeds = hidden.new_zeros(len(texts), length, hidden.shape[-1], dtype=self._encoder.dtype)
        mask = tokens.attention_mask.new_zeros(len(texts), length)
        for row, (states, used) in enumerate(zip(hidden, tokens.attention_mask.bool(), strict=True)):
            own = states[used][start : start + length]
            embeds[row, : len(own)], mask[row, : len(own)] = own, 1
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}

    @override
    def exact_batch_key(self, text: str, length: int) -> int:
        """How many tokens there are: all of a batch are padded to the longest."""
        tokens, _ = self._templated([text])
        return int(tokens.input_ids.shape[1])

    def _templated(self, texts: Sequence[str]) -> tuple[Any, int]:
        """The tokens of the texts in their template, and how many come before a text."""
        from diffusers.modular_pipelines.qwenimage.prompt_templates import (
            QWENIMAGE_PROMPT_TEMPLATE as TEMPLATE,
            QWENIMAGE_PROMPT_TEMPLATE_START_IDX as START,
        )

        return self._tokens([TEMPLATE.format(text) for text in texts], MOST_TOKENS + START, "longest"), START


class QwenImageDenoiser(PackedDenoiser):
    """Transformer and the configuration of its noise scheduler; a Denoiser."""

    def __init__(self, loader: Loader) -> None:
        shape = Shape.of(loader.folder)
        super().__init__(loader, shape)
        self.embeds, self.masks = {"prompt_embeds": (1, None, shape.text_dim)}, {"prompt_embeds_mask": (1, None)}

    def predict(self, latents: Tensor, timestep: Tensor, inputs: Mapping[str, Tensor], params: Params) -> Tensor:
        """The velocity, shaped as the latents."""
        mask = inputs["prompt_embeds_mask"]
        lengths = mask.sum(1).tolist()
        longest = max(lengths)
        return self._predicted(
            hidden_states=latents,
            timestep=timestep.to(latents.dtype) / 1000,
            encoder_hidden_states=inputs["prompt_embeds"][:, :longest],
            encoder_hidden_states_mask=mask[:, :longest] if min(lengths) < longest else None,
            img_shapes=[[(1, *self._shape.patches(params))]] * len(latents),
        )

    @override
    def combine(self, towards: Tensor, away: Tensor, scale: float, timestep: Tensor, params: Params) -> Tensor:
        """Each patch as long as the prompt alone would have it."""
        import torch

        combined = super().combine(towards, away, scale, timestep, params)
        wanted, found = (torch.norm(each, dim=-1, keepdim=True) for each in (towards, combined))
        rescaled: Tensor = combined * (wanted / found)
        return rescaled


class QwenImageVae(GridVae):
    """The VAE; a VaeDecoder of patches."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self._shape = PictureShape.of_vae(loader.folder)
        self.latents = (1, None, self._shape.channels * PATCH**2)

    @override
    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        return super().unpack(self._shape.unpack(latents, params), params)


class QwenImage(PictureFamily):
    """The stages of a QwenImagePipeline folder."""

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
    shape = Shape.of
    packs = True
    starts = ("image", "mask")
    cut = ParallelPlan(
        blocks=("transformer_blocks",),
        attention="attn",
        order=("text", "image"),
        enter={"hidden_states": SequenceDim(1, ("image",)), "encoder_hidden_states": SequenceDim(1, ("text",))},
        follow={
            "encoder_hidden_states_mask": (SequenceDim(1, ("text",)),),
            "image_rotary_emb": (SequenceDim(0, ("image",)), SequenceDim(0, ("text",))),
            "modulate_index": (SequenceDim(1, ("image",)),),
        },
        leave=(SequenceDim(1, ()), SequenceDim(1, ("image",))),
        matrices=TensorParallelLayers(
            outputs=("*.to_[qkv]", "*.add_[qkv]_proj", "*.net.0.proj"),
            inputs=("*.to_out.0", "*.to_add_out", "*.net.2"),
            gathered=("*.???_mod.1",),
            divided=("num_attention_heads",),
        ),
        gives=("encoder_hidden_states", "hidden_states"),
    )

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        shape = Shape.of(folder)
        length, width = limits.max_sequence_length, shape.text_dim * widths["text_encoder"]
        text = text_stage({"prompt_embeds": length * width, "prompt_embeds_mask": length * DTYPES["int64"]})
        return (text,)


FAMILY = QwenImage()
