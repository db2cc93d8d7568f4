"""Text encoding: a prompt, and its negative under guidance, become embeddings."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

import torch

from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages.base import NEGATIVE, OneStepState, Stage, StageInput, StageOutput, Tensors, applies, need
from unfuse.stages.batch_invariant_ops import one_by_one


class TextEncoder(Protocol):
    """What a model family provides for text encoding: a tokenizer and an encoder in memory."""

    def guidance(self, params: Params) -> float:
        """Return the request's guidance scale. The negative prompt is encoded if guidance applies."""

    def encode(self, texts: Sequence[str], length: int) -> Tensors:
        """Return embeddings by name, each (texts, …): one row per text.

        Token embeddings are (texts, tokens, width), pooled ones (texts, width). Each text is cut or padded to `length`
        tokens. A value may be None.
        """

    def exact_batch_key(self, text: str, length: int) -> Hashable:
        """Return a key: texts with equal keys get the same bytes together as alone.

        Compared between texts of equal `length` only.
        """


class TextEncode(Stage):
    """The text encoder stage: prompt in, embeddings by name out.

    Embeddings of the negative prompt have the prefix NEGATIVE; they are None without guidance. A pipeline with two
    encoders has two such stages, told apart by `kind`.

    `zeros`: a request without a negative prompt is guided away from zeros, not from an empty text.
    """

    def __init__(self, encoder: TextEncoder, kind: str = "text_encode", zeros: bool = False) -> None:
        self._encoder, self._zeros = encoder, zeros
        self.kind = kind

    def verify(self, task: StageInput) -> None:
        """Raise PermanentError without a prompt, a guidance scale or a valid length."""
        need(task.params, "prompt", str)
        self._encoder.guidance(task.params)
        length = need(task.params, "max_sequence_length", int)
        if length < 1:
            raise PermanentError(f"max_sequence_length must be at least 1, not {length}")

    def batch_key(self, task: StageInput) -> Hashable:
        """Return the padded length: texts of one length may be encoded together."""
        return task.params.get("max_sequence_length")

    def exact_batch_key(self, state: OneStepState) -> Hashable:
        """Return the encoder's key for the request's prompt and negative prompt."""
        params = state.task.params
        length = need(params, "max_sequence_length", int)
        texts = [need(params, "prompt", str), *self._negative_prompts([params])]
        return tuple(self._encoder.exact_batch_key(text, length) for text in texts)

    @torch.no_grad()
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        """Encode all prompts in one forward, and all negative prompts in another.

        For one task these are the two forwards of an undivided pipeline. Each embedding is (1, …).
        """
        requests = [task.params for task in batch]
        length = need(requests[0], "max_sequence_length", int)
        guided = [params for params in requests if applies(self._encoder.guidance(params))]

        prompts = self._encode([need(params, "prompt", str) for params in requests], length)
        negatives = self._encode(self._negative_prompts(guided), length)

        outputs = []
        # `negatives` has no row for a request without guidance, so the rows are taken one by one.
        for params, positive in zip(requests, prompts, strict=True):
            negative = next(negatives) if params in guided else dict.fromkeys(positive)
            if self._zeros and params in guided and params.get("negative_prompt") is None:
                negative = {
                    name: None if value is None else torch.zeros_like(value) for name, value in positive.items()
                }
            outputs.append(StageOutput({**positive, **{NEGATIVE + name: value for name, value in negative.items()}}))

        return outputs

    def _negative_prompts(self, requests: Sequence[Params]) -> list[str]:
        """Return the negative prompts of the guided requests, "" where there is none."""
        guided = (params for params in requests if applies(self._encoder.guidance(params)))
        return [str(params.get("negative_prompt") or "") for params in guided]

    def _encode(self, texts: Sequence[str], length: int) -> Iterator[Tensors]:
        """Yield the embeddings of each text by name, each (1, …)."""
        if not texts:
            return
        with one_by_one(len(texts) if self.exact else 1):
            embeddings = self._encoder.encode(texts, length)
        for row in range(len(texts)):
            yield {name: None if value is None else value[row : row + 1] for name, value in embeddings.items()}
