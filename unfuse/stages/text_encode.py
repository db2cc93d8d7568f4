"""Text encoding: a prompt, and under guidance its negative, become embeddings."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

import torch

from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages.base import NEGATIVE, OneStepState, Stage, StageInput, StageOutput, Tensors, applies, need
from unfuse.stages.batch_invariant_ops import one_by_one


class TextEncoder(Protocol):
    """What a family says about text: tokenizer and encoder in memory."""

    def guidance(self, params: Params) -> float:
        """The request's guidance scale: the negative prompt is encoded where that applies."""

    def encode(self, texts: Sequence[str], length: int) -> Tensors:
        """Embeddings by name, with a batch axis of one row a text, each text cut or padded to `length` tokens."""

    def exact_batch_key(self, text: str, length: int) -> Hashable:
        """What texts of one such length must have in common to be encoded together as they are alone."""


class TextEncode(Stage):
    """Prompt in, embeddings out by name, negative ones after NEGATIVE, or None; `kind` tells two encoders apart.

    With `zeros`, requests without a negative prompt are guided away from zeros, not from an empty text.
    """

    def __init__(self, encoder: TextEncoder, kind: str = "text_encode", zeros: bool = False) -> None:
        self._encoder, self._zeros = encoder, zeros
        self.kind = kind

    def verify(self, task: StageInput) -> None:
        """Raise PermanentError unless there is a prompt, a guidance scale and a length."""
        need(task.params, "prompt", str)
        self._encoder.guidance(task.params)
        length = need(task.params, "max_sequence_length", int)
        if length < 1:
            raise PermanentError(f"max_sequence_length must be at least 1, not {length}")

    def batch_key(self, task: StageInput) -> Hashable:
        """Texts of one length may be encoded together."""
        return task.params.get("max_sequence_length")

    def exact_batch_key(self, state: OneStepState) -> Hashable:
        """How the encoder's work depends on the lengths of the texts."""
        params = state.task.params
        length = need(params, "max_sequence_length", int)
        texts = [need(params, "prompt", str), *self._negatives([params])]
        return tuple(self._encoder.exact_batch_key(text, length) for text in texts)

    @torch.no_grad()
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        """One forward for the prompts, another for the negative prompts: an undivided pipeline's two, for one task."""
        tasks = [task.params for task in batch]
        length = need(tasks[0], "max_sequence_length", int)
        guided = [params for params in tasks if applies(self._encoder.guidance(params))]
        prompts = self._encode([need(params, "prompt", str) for params in tasks], length)
        negatives = self._encode(self._negatives(guided), length)
        outputs = []
        for params, positive in zip(tasks, prompts, strict=True):
            negative = next(negatives) if params in guided else dict.fromkeys(positive)
            if self._zeros and params in guided and params.get("negative_prompt") is None:
                negative = {name: None if made is None else torch.zeros_like(made) for name, made in positive.items()}
            outputs.append(StageOutput({**positive, **{NEGATIVE + name: value for name, value in negative.items()}}))
        return outputs

    def _negatives(self, tasks: Sequence[Params]) -> list[str]:
        """The negative prompts of those that are guided."""
        guided = (params for params in tasks if applies(self._encoder.guidance(params)))
        return [str(params.get("negative_prompt") or "") for params in guided]

    def _encode(self, texts: Sequence[str], length: int) -> Iterator[Tensors]:
        """The embeddings of each text."""
        if not texts:
            return
        with one_by_one(len(texts) if self.exact else 1):
            together = self._encoder.encode(texts, length)
        for row in range(len(texts)):
            yield {name: None if value is None else value[row : row + 1] for name, value in together.items()}
