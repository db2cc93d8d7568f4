"""Text encoders that families share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unfuse.core.plan import Params
from unfuse.models.base import Loader
from unfuse.models.components import true_cfg_scale
from unfuse.stages.base import guidance_scale

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """The tokens of some texts, on a device."""

    #: The token ids, (texts, length).
    input_ids: Tensor
    #: 1 for a text's tokens, 0 for padding, (texts, length).
    attention_mask: Tensor
    #: The first token of each text, and the first after its last. Read on the host, so that nobody waits for a device.
    spans: Sequence[tuple[int, int]]

    @classmethod
    def on(cls, device: torch.device, tokenized: Any) -> Tokens:
        """Return what a tokenizer made on the host, copied to a device."""
        from unfuse.stages.device_copies import to_device

        ids, mask = tokenized.input_ids, tokenized.attention_mask
        starts, counts = mask.argmax(1).tolist(), mask.sum(1).tolist()
        spans = [(start, start + count) for start, count in zip(starts, counts, strict=True)]
        return cls(to_device(ids, device), to_device(mask, device), spans)


def disable_kv_cache(encoder: Any) -> None:
    """Make a language model that encodes texts store no keys and values.

    Nothing would read them.

    Its results are the same.
    """
    for config in (encoder.config, encoder.config.get_text_config()):
        if getattr(config, "use_cache", False):
            config.use_cache = False


class GuidedTextEncoder:
    """A tokenizer and text encoder for classifier-free guidance; their names end in `suffix`.

    The scale is `true_cfg_scale`, unless `guidance` returns another one.
    """

    def __init__(self, loader: Loader, suffix: str = "", guidance: Callable[[Params], float] = true_cfg_scale) -> None:
        self._tokenizer, self._encoder = loader.plain(f"tokenizer{suffix}"), loader.model(f"text_encoder{suffix}")
        self._device, self.guidance = loader.device, guidance
        disable_kv_cache(self._encoder)

    def exact_batch_key(self, text: str, length: int) -> Hashable:
        """Return (): requests share forwards if the encoder attends to padding as to text."""
        return ()

    def _tokenize(self, texts: Sequence[str], length: int, padding: str = "max_length") -> Any:
        """Return ids and attention mask on the host, each (texts, length), truncated or padded."""
        options = {"padding": padding, "max_length": length, "truncation": True, "return_tensors": "pt"}
        return self._tokenizer(list(texts), return_attention_mask=True, **options)

    def _tokens(self, texts: Sequence[str], length: int) -> Tokens:
        """Return those on the device, with the number of tokens of each text."""
        return Tokens.on(self._device, self._tokenize(texts, length))


class MaskedTextEncoder(GuidedTextEncoder):
    """A text encoder that masks padding. `_tokenize` may insert texts into a template."""

    @override
    def exact_batch_key(self, text: str, length: int) -> bool:
        """Return whether the text fills the length: then no mask is used."""
        return bool(self._tokenize([text], length).attention_mask.all())


class T5TextEncoder(GuidedTextEncoder):
    """T5 as a TextEncoder."""

    name = "prompt_embeds"

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """Return `name` (texts, length, text dim). Attention includes the padding."""
        hidden = self._encoder(self._tokens(texts, length).input_ids, output_hidden_states=False)[0]
        return {self.name: hidden.to(self._encoder.dtype)}


class ClipTextEncoder(GuidedTextEncoder):
    """CLIP as a TextEncoder of pooled embeddings."""

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """Return `pooled_prompt_embeds` (texts, pooled dim). Texts always have CLIP's length."""
        tokens = self._tokens(texts, self._tokenizer.model_max_length)
        pooled = self._encoder(tokens.input_ids, output_hidden_states=False).pooler_output
        return {"pooled_prompt_embeds": pooled.to(self._encoder.dtype)}


class ProjectedClipTextEncoder(GuidedTextEncoder):
    """CLIP as a TextEncoder of its last hidden states but one, and projected embeddings."""

    def __init__(self, loader: Loader, names: Sequence[str], suffix: str = "") -> None:
        super().__init__(loader, suffix, guidance_scale)
        self._names = names

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """Return `names[0]` (texts, tokens, width) and, if named, `names[1]` (texts, projected dim)."""
        tokens = self._tokens(texts, self._tokenizer.model_max_length)
        outputs = self._encoder(tokens.input_ids, output_hidden_states=True)
        return dict(zip(self._names, (outputs.hidden_states[-2], outputs[0]), strict=False))
