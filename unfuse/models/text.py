"""What families share about text: a tokenizer with its encoder, CLIP, and when a negative prompt guides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unfuse.core.plan import Params
from unfuse.models.base import Loader
from unfuse.stages.base import need

if TYPE_CHECKING:
    from torch import Tensor


def true_cfg_scale(params: Params) -> float:
    """How much further than the negative prompt's a prediction goes; 1 without a negative prompt."""
    return 1.0 if params.get("negative_prompt") is None else need(params, "true_cfg_scale", float)


class TruthfulText:
    """A tokenizer and its text encoder, of a model that a negative prompt guides; what ends their names tells pairs."""

    end = ""

    def __init__(self, loader: Loader) -> None:
        self._tokenizer, self._encoder = loader.plain("tokenizer" + self.end), loader.model("text_encoder" + self.end)
        self._device = loader.device

    def guidance(self, params: Params) -> float:
        """See TextEncoder."""
        return true_cfg_scale(params)

    def _tokens(self, texts: Sequence[str], length: int, padding: str = "max_length") -> Any:
        """Ids and attention mask of the texts, cut or padded to so many tokens."""
        how = {"padding": padding, "max_length": length, "truncation": True, "return_tensors": "pt"}
        return self._tokenizer(list(texts), **how).to(self._device)


class ClipText(TruthfulText):
    """CLIP; a TextEncoder."""

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """`pooled_prompt_embeds` (texts, pooled dim) of as many tokens as CLIP has, whatever the length."""
        tokens = self._tokens(texts, self._tokenizer.model_max_length)
        pooled = self._encoder(tokens.input_ids, output_hidden_states=False).pooler_output
        return {"pooled_prompt_embeds": pooled.to(self._encoder.dtype)}
