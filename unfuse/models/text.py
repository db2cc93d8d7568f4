"""What families share about text: its stages and those behind, a tokenizer with its encoder, CLIP, negative prompts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from typing_extensions import override

from unfuse.core.media import Room
from unfuse.core.object_ref import ALIGNMENT
from unfuse.core.plan import Params, Pipeline, StageSpec
from unfuse.models.base import Loader
from unfuse.stages.base import need
from unfuse.stages.guidance import NEGATIVE
from unfuse.stages.specs import DENOISE, TEXT_ENCODE, VAE_DECODE

if TYPE_CHECKING:
    from torch import Tensor

FAST_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # what any tokenizer may be saved as
T5_TOKENIZERS = ("T5TokenizerFast", "T5Tokenizer", *FAST_TOKENIZERS)
CLIP_TOKENIZERS = ("CLIPTokenizer", "CLIPTokenizerFast")


def text_stage(sizes: Mapping[str, int], scale: str = "true_cfg_scale", end: str = "") -> StageSpec:
    """Encoding of prompt and negative prompt; `sizes` are the most bytes of each output, `scale` is that of guidance.

    `end` is what ends the names of a model's second text encoder and its tokenizer.
    """
    return replace(
        TEXT_ENCODE,
        name=TEXT_ENCODE.name + end,
        kind=TEXT_ENCODE.kind + end,
        components=(f"text_encoder{end}", f"tokenizer{end}"),
        outputs=(*sizes, *(NEGATIVE + name for name in sizes)),
        room=Room(2 * sum(size + ALIGNMENT for size in sizes.values())),
        reads=("prompt", "negative_prompt", scale, "max_sequence_length"),
        shares=True,
    )


def with_encoders(
    encoders: Iterable[StageSpec], latents: Room, transformers: Iterable[str] = ("transformer",)
) -> Pipeline:
    """Those encoders, then denoising of all that they make, then VAE decoding; `latents` is the room these take."""
    encoders = tuple(encoders)
    inputs = tuple(name for encoder in encoders for name in encoder.outputs)
    denoise = replace(DENOISE, components=(*transformers, "scheduler"), inputs=inputs, room=latents, shares=True)
    return Pipeline((*encoders, denoise, VAE_DECODE))


def true_cfg_scale(params: Params) -> float:
    """How much further than the negative prompt's a prediction goes; 1 without a negative prompt."""
    return 1.0 if params.get("negative_prompt") is None else need(params, "true_cfg_scale", float)


class TruthfulText:
    """A tokenizer and its text encoder, of a model that a negative prompt guides; `end` is what ends their names.

    It guides by the true guidance scale, of models that were not distilled with one, unless another is given.
    """

    def __init__(self, loader: Loader, end: str = "", guidance: Callable[[Params], float] = true_cfg_scale) -> None:
        self._tokenizer, self._encoder = loader.plain(f"tokenizer{end}"), loader.model(f"text_encoder{end}")
        self._device, self.guidance = loader.device, guidance

    def exact_batch_key(self, text: str, length: int) -> Hashable:
        """Nothing, as long as the encoder sees padding as it sees other tokens."""
        return ()

    def _tokens(self, texts: Sequence[str], length: int, padding: str = "max_length") -> Any:
        """Ids and attention mask of the texts, cut or padded to so many tokens."""
        how = {"padding": padding, "max_length": length, "truncation": True, "return_tensors": "pt"}
        return self._tokenizer(list(texts), return_attention_mask=True, **how).to(self._device)


class MaskedText(TruthfulText):
    """One that does not see padding. `_tokens` may put texts into a template first."""

    @override
    def exact_batch_key(self, text: str, length: int) -> bool:
        """Whether there is padding: without, no mask is computed with."""
        return bool(self._tokens([text], length).attention_mask.all())


class T5Text(TruthfulText):
    """T5; a TextEncoder."""

    name = "prompt_embeds"

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """By its name (texts, length, text dim); it attends to the padding too."""
        hidden = self._encoder(self._tokens(texts, length).input_ids, output_hidden_states=False)[0]
        return {self.name: hidden.to(self._encoder.dtype)}


class ClipText(TruthfulText):
    """CLIP; a TextEncoder."""

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """`pooled_prompt_embeds` (texts, pooled dim) of as many tokens as CLIP has, whatever the length."""
        tokens = self._tokens(texts, self._tokenizer.model_max_length)
        pooled = self._encoder(tokens.input_ids, output_hidden_states=False).pooler_output
        return {"pooled_prompt_embeds": pooled.to(self._encoder.dtype)}
