"""Prefill of a language model: the keys and values of a prompt, chunk by chunk, which others read meanwhile."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from unfuse.core.plan import Params
from unfuse.core.text import CHUNK, unpacked
from unfuse.stages.base import JointStage, OpenOutput, StageInput, StageOutput, Tensors
from unfuse.stages.handed_kv import KvWriter
from unfuse.stages.language import PROMPT, Growing, Sequences, verify_prompt


@dataclass(frozen=True)
class Prefilling(Growing):
    """A prompt, of which `before` tokens were in the KV before the last step."""

    before: int = 0


class Prefill(JointStage[Prefilling, int]):
    """Computes the KV of all tokens of a prompt but the last one, which `decode` begins with."""

    kind = "prefill"
    uploads = (PROMPT,)

    def __init__(self, sequences: Sequences) -> None:
        self.texts = self._sequences = sequences

    @override
    def verify(self, task: StageInput) -> None:
        verify_prompt(task)

    @override
    def batch_key(self, params: Params) -> Hashable:
        return ()

    @override
    def start(self, task: StageInput) -> Prefilling:
        self._sequences.prompts += 1
        kv, ids = self._sequences.begin(task.priority), unpacked(task.uploads[PROMPT])[:-1]
        taken = self._sequences.take(kv, task.prefix, len(ids))
        return Prefilling(kv, ids, taken, KvWriter(kv, self._sequences.layout(len(ids))), taken)

    @override
    def compute(self, batch: Sequence[Prefilling]) -> list[int | Exception]:
        self._sequences.forward(batch)
        return [state.kv.length for state in batch]

    @override
    def alone(self, state: Prefilling) -> int:
        self._sequences.forward([state], exact=self.exact)
        return state.kv.length

    @override
    def advance(self, state: Prefilling, computed: int) -> Prefilling:
        return replace(state, done=computed, before=state.done)

    @override
    def kept(self, state: Prefilling) -> Sequence[int]:
        return range(state.before // CHUNK, state.done // CHUNK)

    @override
    def portion(self, state: Prefilling, number: int) -> Tensors:
        """Keys and values of a chunk, of shape (layers, 2, heads, CHUNK, width)."""
        span, layers = (number * CHUNK, (number + 1) * CHUNK), range(self._sequences.layout(0).layers)
        return {"kv": torch.stack([torch.stack(state.kv.read(layer, *span)) for layer in layers])}

    @override
    def progress(self, state: Prefilling) -> tuple[int, int]:
        chunks = max(1, -(-len(state.ids) // CHUNK))
        return (chunks if state.done == len(state.ids) else state.done // CHUNK), chunks

    @override
    def outline(self, state: Prefilling) -> Sequence[tuple[str, str, tuple[int, ...]]]:
        return self._sequences.layout(len(state.ids)).outline()

    @override
    def write_to(self, state: Prefilling, output: OpenOutput) -> None:
        assert state.handed
        state.handed.to(output)

    @override
    def finish(self, state: Prefilling) -> StageOutput:
        assert state.handed
        return StageOutput(state.handed.finish())

    @override
    def let_go(self, state: Prefilling) -> None:
        self._sequences.prompts -= 1
        self._sequences.end(state.kv)
