"""Text encoding: a prompt, and under guidance its negative, become embeddings."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages.base import Stage, StageInput, StageOutput, Tensors, need
from unfuse.stages.guidance import NEGATIVE, guided


class TextEncoder(Protocol):
    """What a family says about text: tokenizer and encoder in memory."""

    def encode(self, text: str, length: int) -> Tensors:
        """Embeddings by name, each with a batch axis of 1, for a text cut or padded to `length` tokens."""
        ...


class TextEncode(Stage):
    """Prompt in, embeddings out: each by its name, and the negative ones after NEGATIVE (None without guidance)."""

    kind = "text_encode"

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder

    def verify(self, task: StageInput) -> None:
        """Raise PermanentError unless there is a prompt, a guidance scale and a length."""
        need(task.params, "prompt", str)
        guided(task.params)
        length = need(task.params, "max_sequence_length", int)
        if length < 1:
            raise PermanentError(f"max_sequence_length must be at least 1, not {length}")

    def batch_key(self, params: Params) -> Hashable:
        """Texts of one length may be encoded together."""
        return params.get("max_sequence_length")

    @torch.no_grad()
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        """Encode each task's texts alone, as an undivided pipeline does."""
        return [self._encode(task.params) for task in batch]

    def _encode(self, params: Params) -> StageOutput:
        length = need(params, "max_sequence_length", int)
        positive = self._encoder.encode(need(params, "prompt", str), length)
        negative: Tensors = dict.fromkeys(positive)
        if guided(params):
            text = params.get("negative_prompt")
            negative = self._encoder.encode(text if isinstance(text, str) else "", length)
        return StageOutput({**positive, **{NEGATIVE + name: value for name, value in negative.items()}})
