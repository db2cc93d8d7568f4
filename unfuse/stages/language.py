"""Decode of a language model, and what it has in common with prefill: sequences that grow in one paged KV.

A state is its tokens, and how many of them are in the KV. Whatever is not there yet is computed, a chunk a step: so a
sequence that comes from another worker, one whose blocks were taken, and one of an attempt that died go on alike.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from unfuse.core.codec import decode, encode
from unfuse.core.errors import PermanentError
from unfuse.core.grammar import GRAMMAR
from unfuse.core.plan import Params
from unfuse.core.text import CHUNK, Answer, Piece, unpacked
from unfuse.stages.base import JointStage, Media, OpenOutput, Receiving, StageInput, StageOutput, Tensors, need
from unfuse.stages.constraint import Constraint, Grammars
from unfuse.stages.handed_kv import CHUNKS, REST, KvReader, KvWriter
from unfuse.stages.paged_kv import KvSequence, NoBlocks
from unfuse.stages.sampling import Sampled, Sampling, sample
from unfuse.stages.sequences import Growing, Sequences
from unfuse.stages.words import Tokenizer, Words

if TYPE_CHECKING:
    from torch import Tensor


PROMPT = "prompt"
"""The upload that has the ids of a prompt's tokens, as `core.text.packed` has them."""

PATIENCE_S = 0.005
"""How long a step waits where there is nothing else to do."""

SAMPLED = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


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
        ids = unpacked(task.uploads[PROMPT])
        sight = self._sequences.sight(ids, task)
        self._sequences.prompts += 1
        kv, handed = self._sequences.begin(task.priority), self._sequences.layout(len(ids) - 1)
        taken = self._sequences.take(kv, task.prefix, len(ids) - 1)
        return Prefilling(kv, ids[:-1], taken, sight=sight, before=taken, handed=KvWriter(kv, handed))

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
        return self._sequences.portion(state.kv, number)

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


@dataclass(frozen=True)
class Writing(Growing):
    """A sequence whose tokens from number `prompt` on are the answer; the last step made `sampled`, if anything.

    The answer has to match what a `constraint` says.
    """

    prompt: int = 0
    how: Sampling = Sampling()
    words: Words | None = None
    sampled: Sampled | None = None
    constraint: Constraint | None = None

    @property
    def answer(self) -> list[int]:
        """The ids of the answer so far."""
        return self.ids[self.prompt :]

    @override
    def chunk(self, *, exact: bool) -> list[int]:
        """Where bytes count, chunks end where those of prefill ended, and the tokens behind them come one by one."""
        left = self.prompt - 1 - self.kv.length
        return super().chunk(exact=exact)[: max(1, left) if exact else None]


class ReceivedKv(Receiving):
    """Keys and values of a prompt that come in pieces; what there is no room for is computed again."""

    def __init__(self, sequences: Sequences, priority: int, tokens: int) -> None:
        self.kv, self._sequences = sequences.begin(priority), sequences
        self._reader = KvReader(self.kv, sequences.layout(tokens))
        with suppress(NoBlocks):
            self.kv.grow(tokens)

    @property
    def tokens(self) -> int:
        """How many are there."""
        return self.kv.length if self._reader.whole else 0

    @override
    def take(self, piece: Tensor) -> None:
        self._reader.take(piece)

    @override
    def drop(self) -> None:
        self._sequences.end(self.kv)


class Decode(JointStage[Writing, "tuple[int, Sampled | None]"]):
    """Makes one token a step, once all that are there are in the KV."""

    kind = "decode"
    uploads = (PROMPT,)
    goes_ahead = all_together = True

    def __init__(self, sequences: Sequences, tokenizer: Tokenizer, grammars: Grammars) -> None:
        self.texts = self._sequences = sequences
        self._tokenizer, self._grammars = tokenizer, grammars

    @override
    def verify(self, task: StageInput) -> None:
        verify_prompt(task)

    @override
    def uploads_of(self, params: Params) -> Sequence[str]:
        return (PROMPT, GRAMMAR) if params.get(GRAMMAR) else (PROMPT,)

    @override
    def batch_key(self, params: Params) -> Hashable:
        return ()

    @override
    def receive(self, params: Params, priority: int, names: Collection[str]) -> ReceivedKv | None:
        if {*names} != {CHUNKS, REST}:
            return None
        return ReceivedKv(self._sequences, priority, need(params, "prompt_tokens", int) - 1)

    @override
    def start(self, task: StageInput) -> Writing:
        """Where there is no room for the KV that came, it is computed again when there is."""
        prompt = unpacked(task.uploads[PROMPT])
        words = Words(self._tokenizer, json.loads(need(task.params, "stop", str)), need(task.params, "max_tokens", int))
        ids = [*prompt]
        for data in task.recorded:
            piece: Piece = decode(data, Piece)
            words.add(piece.id, piece.logprob, piece.top)
            ids.append(piece.id)
        sight = self._sequences.sight(prompt, task)
        if isinstance(task.received, ReceivedKv):
            kv, done = task.received.kv, task.received.tokens
        else:
            kv = self._sequences.begin(task.priority)
            done = self._taken(kv, task.tensors, len(prompt) - 1)
        how, constraint = sampling(task.params), self._constraint(task)
        return Writing(kv, ids, done, sight=sight, prompt=len(prompt), how=how, words=words, constraint=constraint)

    def _constraint(self, task: StageInput) -> Constraint | None:
        grammar = task.uploads.get(GRAMMAR)
        if grammar is None:
            return None
        constraint = self._grammars.open(grammar)
        self._sequences.constraints.add(constraint)
        return constraint

    @override
    def waits(self, state: Writing) -> bool:
        return state.constraint is not None and state.constraint.waits()

    def _taken(self, kv: KvSequence, tensors: Tensors, tokens: int) -> int:
        """Put the KV that prefill made in its place. Returns how many tokens it has; none if it is no such KV."""
        layout = self._sequences.layout(tokens)
        if not layout.fits(tensors):
            return 0
        try:
            kv.grow(tokens)
        except NoBlocks:
            return 0
        for start, layer, unit in layout.read(tensors):
            kv.write(layer, unit[:, 0], unit[:, 1], start)
        return tokens

    @override
    def compute(self, batch: Sequence[Writing]) -> list[tuple[int, Sampled | None] | Exception]:
        return self._computed(batch, exact=False)

    @override
    def alone(self, state: Writing) -> tuple[int, Sampled | None] | Exception:
        return self._computed([state], exact=self.exact)[0]

    def _computed(self, batch: Sequence[Writing], *, exact: bool) -> list[tuple[int, Sampled | None] | Exception]:
        """What may follow by a grammar is found out during the forward; where that is late, the step was in vain."""
        constrained = [state.constraint for state in batch if state.constraint]
        if len(constrained) == len(batch) and all(one.waits() for one in constrained):
            constrained[0].waits(PATIENCE_S)
        going = [state for state in batch if not self.waits(state)]
        for state in going:
            if state.constraint:
                state.constraint.begin(state.answer)
        logits = dict(zip((state.kv for state in going), self._sequences.forward(going, exact=exact), strict=True))
        return [_sampled(state, logits[state.kv]) if state.kv in logits else (state.done, None) for state in batch]

    @override
    def advance(self, state: Writing, computed: tuple[int, Sampled | None]) -> Writing:
        done, sampled = computed
        if sampled:
            state.ids.append(sampled.token)
        return replace(state, done=done, sampled=sampled)

    @override
    def progress(self, state: Writing) -> tuple[int, int]:
        assert state.words
        made = len(state.ids) - state.prompt
        over = state.words.ended or (made and state.ids[-1] in self._tokenizer.stops)
        return made, made if over else state.words.most

    @override
    def grown(self, state: Writing) -> Sequence[bytes]:
        if state.sampled is None:
            return []
        assert state.words
        made = state.sampled
        top = tuple((id, self._tokenizer.decode([id]), logprob) for id, logprob in made.top)
        return [encode(state.words.add(made.token, made.logprob, top))]

    @override
    def finish(self, state: Writing) -> StageOutput:
        assert state.words
        answer = Answer("".join(piece.text for piece in state.words.made), state.words.ended, state.words.made)
        return StageOutput(media=(Media("application/json", msgspec.json.encode(answer)),))

    @override
    def let_go(self, state: Writing) -> None:
        self._sequences.end(state.kv)
        if state.constraint:
            self._sequences.constraints.discard(state.constraint)
            state.constraint.close()


def verify_prompt(task: StageInput) -> None:
    """Raise PermanentError for a prompt of another length than was said."""
    if len(unpacked(task.uploads[PROMPT])) != need(task.params, "prompt_tokens", int):
        raise PermanentError("the prompt is not as long as it was said to be")


def _sampled(state: Writing, logits: Tensor | None) -> tuple[int, Sampled | None] | Exception:
    """How many tokens are in the KV then, and which one comes next; without one, the last chunk may be made again."""
    if logits is None:
        return state.kv.length, None
    try:
        allowed = state.constraint.allowed(state.answer) if state.constraint else None
    except PermanentError as error:
        return error
    if state.constraint and allowed is None:
        return state.done, None
    prompt = state.ids[: state.prompt]
    return state.kv.length, sample(logits, state.how, len(state.ids), prompt, state.answer, allowed)


def sampling(params: Params) -> Sampling:
    """How a request's tokens are drawn."""
    numbers = {name: need(params, name, float) for name in SAMPLED}
    biases = {int(token): bias for token, bias in json.loads(need(params, "logit_bias", str)).items()}
    shown = need(params, "logprobs", int) if params.get("logprobs") is not None else None
    seed, top_k = need(params, "seed", int), need(params, "top_k", int)
    return Sampling(**numbers, top_k=top_k, seed=seed, logit_bias=biases, logprobs=shown)
