"""Decode of a language model, and what it has in common with prefill: sequences that grow in one paged KV.

A state is its tokens, and how many of them are in the KV. Whatever is not there yet is computed, a chunk a step: so a
sequence that comes from another worker, one whose blocks were taken, and one of an attempt that died go on alike.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from typing_extensions import override

from unfuse.core.codec import decode, encode
from unfuse.core.derived_facts import GRAMMAR, PROMPT, DerivedFacts
from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.core.text import CHUNK, MOST_SHARED, Answer, TokenDelta, unpacked
from unfuse.core.vision import MediaItem
from unfuse.language.detokenize import AnswerText, StopConditions
from unfuse.language.grammars import ConstraintAfterReasoning, GrammarMatcher, Grammars
from unfuse.language.paged_kv import KvSequence, NoKvBlocks
from unfuse.language.sampling import SampledToken, SamplingParams, sample
from unfuse.stages.base import (
    EncodedMedia,
    OpenOutput,
    PrefixBlock,
    StageInput,
    StageOutput,
    StreamedInput,
    Tensors,
    need,
    next_states,
)
from unfuse.stages.kv_transfer import CHUNKS, REST, KvBlocks, KvReader, KvWriter
from unfuse.stages.sequence_pool import PromptStage, SequencePool, SequenceState

if TYPE_CHECKING:
    from torch import Tensor

    from unfuse.language.tokenizer import ChatTokenizer
    from unfuse.parallel.group import Group


MADE_UP = 16  # tokens of the prompts that stages warm up with
PATIENCE_S = 0.005  # how long a step waits where there is nothing else to do

Drawn = SampledToken | PermanentError | None
"""A token, why there cannot be one, or that there is none yet, since it is not known what may follow."""

SAMPLED = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


@dataclass(frozen=True)
class PrefillState(SequenceState):
    """A prompt, of which `before` tokens were in the KV before the last step."""

    before: int = 0
    handed: KvWriter = field(kw_only=True)

    @property
    def blocks(self) -> list[PrefixBlock]:
        """The chunks that the last step completed."""
        numbers = range(self.before // CHUNK, self.done // CHUNK)
        return [PrefixBlock(number, partial(self.handed.prefix_block, number)) for number in numbers]


class Prefill(PromptStage[PrefillState]):
    """Computes the KV of all tokens of a prompt but the last one, which `decode` begins with."""

    kind = "prefill"
    can_overlap = True

    @override
    def warm_up(self) -> None:
        kv = self._sequences.begin(0)
        self._sequences.forward([SequenceState(kv, [0] * MADE_UP)], exact=self.exact)
        self._sequences.end(kv)

    @override
    def start(self, task: StageInput) -> PrefillState:
        ids = unpacked(task.uploads[PROMPT])
        sight = self._sequences.sight(ids, task)
        with self._sequences.beginning(task.priority) as kv:
            taken = self._sequences.take(kv, task.prefix, len(ids) - 1)
            handed = self._sequences.writer(kv, len(ids) - 1)
        self._sequences.prompts += 1
        return PrefillState(kv, ids[:-1], taken, sight=sight, before=taken, handed=handed)

    @override
    def step(self, batch: Sequence[PrefillState]) -> list[int | Exception]:
        self._sequences.forward(batch)
        return [state.kv.length for state in batch]

    @override
    def step_alone(self, state: PrefillState) -> int:
        self._sequences.forward([state], exact=self.exact)
        return state.kv.length

    @override
    def advance(self, state: PrefillState, result: int) -> PrefillState:
        return replace(state, done=result, before=state.done)

    @override
    def prefix_blocks(self, state: PrefillState) -> Sequence[PrefixBlock]:
        return state.blocks

    @override
    def progress(self, state: PrefillState) -> tuple[int, int]:
        chunks = max(1, -(-len(state.ids) // CHUNK))
        return (chunks if state.done == len(state.ids) else state.done // CHUNK), chunks

    @override
    def outline(self, state: PrefillState) -> Sequence[tuple[str, str, tuple[int, ...]]]:
        return self._sequences.layout(len(state.ids)).outline()

    @override
    def write_to(self, state: PrefillState, output: OpenOutput) -> None:
        state.handed.to(output)

    @override
    def finish(self, state: PrefillState) -> StageOutput:
        return StageOutput(state.handed.finish())

    @override
    def let_go(self, state: PrefillState) -> None:
        self._sequences.prompts -= 1
        self._sequences.end(state.kv)


@dataclass(frozen=True)
class RecomputedChunks(PrefillState):
    """The whole chunks of a prompt and its answer, those with tokens of the answer computed again as prefill does it.

    A token by itself has other bytes than the same token in a chunk, and a later prompt is to have those of its chunk.
    `digests` are those of the chunks.
    """

    digests: tuple[str, ...] = ()

    @property
    @override
    def blocks(self) -> list[PrefixBlock]:
        return [replace(block, digest=self.digests[block.number]) for block in super().blocks]

    @property
    def complete(self) -> bool:
        """Whether all chunks are computed."""
        return self.done == len(self.ids)

    def stepped(self, done: int) -> RecomputedChunks | None:
        """What a step that left so many tokens in the KV made of it; None where there was no room for a chunk."""
        return replace(self, before=self.done, done=done) if done > self.done else None


@dataclass(frozen=True)
class DecodeState(SequenceState):
    """A sequence whose tokens from `prompt` on are the answer, under a `constraint`; the last step made `sampled`."""

    prompt: int = 0
    how: SamplingParams = SamplingParams()
    words: AnswerText = field(kw_only=True)
    sampled: SampledToken | None = None
    constraint: GrammarMatcher | None = None
    shown: tuple[MediaItem, ...] = ()
    """The pictures and videos of the prompt, as JSON."""
    extends: bool = False
    """Whether the answer goes into the prefix cache."""
    over: bool = False
    """Whether the last token is drawn."""
    again: RecomputedChunks | None = None
    """Chunks of the answer that are still to be computed for the prefix cache, once the last token is drawn."""

    @property
    @override
    def most(self) -> int:
        return self.prompt + self.words.most

    @property
    def answer(self) -> list[int]:
        """The ids of the answer so far."""
        return self.ids[self.prompt :]

    @override
    def chunk(self, *, exact: bool) -> list[int]:
        """Where bytes count, chunks end where those of prefill ended, and the tokens behind them come one by one."""
        left = self.prompt - 1 - self.kv.length
        return super().chunk(exact=exact)[: max(1, left) if exact else None]


class ReceivedKv(StreamedInput):
    """Keys and values of a prompt that come in pieces; what there is no room for is computed again."""

    def __init__(self, sequences: SequencePool, priority: int, tokens: int) -> None:
        self._sequences = sequences
        with sequences.beginning(priority) as self.kv:
            self._reader = KvReader(self.kv, sequences.layout(tokens), sequences.heads)
            with suppress(NoKvBlocks):
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


class Decode(PromptStage[DecodeState]):
    """Makes one token a step, once all that are there are in the KV.

    Behind the last one it computes whole chunks of the answer, where others may go on from that: see
    `RecomputedChunks`. Of several ranks, a `group`, the first one draws, and follows grammars; the others go on with
    what it has drawn.
    """

    kind = "decode"
    can_overlap = all_together = True

    def __init__(
        self, sequences: SequencePool, tokenizer: ChatTokenizer, grammars: Grammars, group: Group | None = None
    ) -> None:
        super().__init__(sequences)
        self._tokenizer, self._grammars, self._group = tokenizer, grammars, group

    @override
    def warm_up(self) -> None:
        """A token of a made-up prompt, whose keys and values are put in place as those that come from prefill."""
        layout = self._sequences.layout(MADE_UP - 1)
        tensors = {name: torch.zeros(shape, dtype=layout.dtype) for name, _, shape in layout.outline()}
        kv, given = self._sequences.begin(0), self._given(tensors, layout.tokens)
        assert given
        done, words = self._sequences.put(kv, given), AnswerText(self._tokenizer, StopConditions(), 1)
        state = DecodeState(kv, [0] * (done + 1), done, given=given, prompt=done + 1, words=words)
        (made,) = next_states(self, [state])
        self.let_go(state)
        if isinstance(made, Exception):
            raise made
        self.grown(made)

    @override
    def uploads_of(self, derived: DerivedFacts) -> Sequence[str]:
        return (PROMPT, GRAMMAR) if derived.grammar else (PROMPT,)

    @override
    def receive(self, derived: DerivedFacts, priority: int, names: Collection[str]) -> ReceivedKv | None:
        if {*names} != {CHUNKS, REST}:
            return None
        return ReceivedKv(self._sequences, priority, derived.prompt_tokens - 1)

    @override
    def start(self, task: StageInput) -> DecodeState:
        """Where there is no room for the KV that came, it is put in place when there is."""
        prompt = unpacked(task.uploads[PROMPT])
        most, derived = need(task.params, "max_tokens", int), task.derived
        words = AnswerText(self._tokenizer, ending(task.params, derived), most, derived.reading)
        ids = [*prompt]
        for data in task.recorded:
            piece: TokenDelta = decode(data, TokenDelta)
            words.add(piece.id, piece.logprob, tuple((id, logprob) for id, _, logprob in piece.top))
            ids.append(piece.id)
        sight = self._sequences.sight(prompt, task)
        how = msgspec.structs.replace(sampling(task.params), ends=tuple(words.ends))
        if isinstance(task.received, ReceivedKv):
            kv, done, given = task.received.kv, task.received.tokens, None
        else:
            given = self._given(task.tensors, len(prompt) - 1)
            with self._sequences.beginning(task.priority) as kv:
                done = self._sequences.put(kv, given) if given else 0
        state = DecodeState(
            kv, ids, done, sight=sight, given=given, prompt=len(prompt), how=how, words=words, shown=derived.shown,
            extends=task.extends,
        )  # fmt: skip
        try:
            state = replace(state, constraint=self._constraint(task))
            return replace(state, over=bool(words.ended) or (bool(task.recorded) and _is_last(state)))
        except BaseException:
            self.let_go(state)
            raise

    def _constraint(self, task: StageInput) -> GrammarMatcher | None:
        grammar = task.uploads.get(GRAMMAR)
        if grammar is None or (self._group and self._group.rank):
            return None
        reading = task.derived.reading
        constraint: GrammarMatcher
        constraint = opened = self._grammars.open(grammar)
        if reading and reading.reasoning:
            constraint = ConstraintAfterReasoning(opened, reading, self._tokenizer)
        self._sequences.constraints.add(constraint)
        return constraint

    @override
    def waits(self, state: DecodeState) -> bool:
        return not state.over and state.constraint is not None and state.constraint.waits()

    def _given(self, tensors: Tensors, tokens: int) -> KvBlocks | None:
        """The KV that prefill made of so many tokens; None if it is no such KV."""
        return KvBlocks(tokens, tensors) if self._sequences.layout(tokens).fits(tensors) else None

    @override
    def step(self, batch: Sequence[DecodeState]) -> list[tuple[int, SampledToken | None] | Exception]:
        return self._computed(batch, exact=False)

    @override
    def step_alone(self, state: DecodeState) -> tuple[int, SampledToken | None] | Exception:
        return self._computed([state], exact=self.exact)[0]

    def _computed(
        self, batch: Sequence[DecodeState], *, exact: bool
    ) -> list[tuple[int, SampledToken | None] | Exception]:
        """What may follow by a grammar is found out during the forward; where that is late, the step was in vain.

        Ranks make it for all states, since the others do not know of what the first one waits for.
        """
        writing = [state for state in batch if not state.over]
        again = [state.again for state in batch if state.again]
        constrained = [state.constraint for state in writing if state.constraint]
        if len(constrained) == len(batch) and all(one.waits() for one in constrained):
            constrained[0].waits(PATIENCE_S)
        going = [state for state in writing if self._group or not self.waits(state)]
        for state in going:
            if state.constraint:
                state.constraint.begin(state.answer)
        logits = self._sequences.forward([*going, *again], exact=exact)[: len(going)]
        ends = [(state, behind) for state, behind in zip(going, logits, strict=True) if behind is not None]
        made: dict[KvSequence, tuple[int, SampledToken | None] | Exception] = {}
        made |= {state.kv: (state.kv.length, None) for state in (*going, *again)}
        for (state, _), drawn in zip(ends, self._drawn(ends), strict=True):
            if isinstance(drawn, PermanentError):
                made[state.kv] = drawn
            else:
                made[state.kv] = (state.kv.length if drawn else state.done), drawn
        return [made.get(state.kv, (state.done, None)) for state in batch]

    def _drawn(self, ends: Sequence[tuple[DecodeState, Tensor]]) -> list[Drawn]:
        """What follows each of these, by the logits behind it."""
        group = self._group
        own = [_draw(*end) for end in ends] if group is None or group.rank == 0 else []
        if group is None or not ends:
            return own
        group.meet()
        said = encode([str(drawn) if isinstance(drawn, PermanentError) else drawn for drawn in own])
        told: list[SampledToken | str | None] = decode(group.exchange(said)[0], list[SampledToken | str | None])
        return [PermanentError(drawn) if isinstance(drawn, str) else drawn for drawn in told]

    @override
    def advance(self, state: DecodeState, result: tuple[int, SampledToken | None]) -> DecodeState:
        done, sampled = result
        if state.over:
            return replace(state, sampled=None, again=state.again and state.again.stepped(done))
        if sampled:
            state.ids.append(sampled.token)
        state = replace(state, done=done, sampled=sampled)
        if not (sampled and _is_last(state)):
            return state
        return replace(state, over=True, again=self._again(state))

    def _again(self, state: DecodeState) -> RecomputedChunks | None:
        """What is to be computed again of a text that is over; None if nobody would find it."""
        first, chunks = (state.prompt - 1) // CHUNK, min((len(state.ids) - 1) // CHUNK, MOST_SHARED)
        if not state.extends or first >= chunks or state.words.has_reasoning:
            return None
        if state.sight and not state.sight.ends_in_text:
            return None
        self._sequences.step_back(state.kv)
        digests = self._sequences.digests(state.ids[: state.prompt], state.answer, state.shown)
        handed = self._sequences.writer(state.kv, chunks * CHUNK, first)
        return RecomputedChunks(
            state.kv, state.ids[: chunks * CHUNK], first * CHUNK, before=first * CHUNK, sight=state.sight,
            handed=handed, yields=True, digests=digests,
        )  # fmt: skip

    @override
    def prefix_blocks(self, state: DecodeState) -> Sequence[PrefixBlock]:
        return state.again.blocks if state.again else ()

    @override
    def progress(self, state: DecodeState) -> tuple[int, int]:
        """The tokens; as if the last one were to come, while a text that is over has something left to do."""
        made = len(state.ids) - state.prompt
        over = state.over or state.words.ended or (made and state.ids[-1] in state.words.ends)
        left = state.again is not None and not state.again.complete
        return made - 1 if left else made, made if over else state.words.most

    @override
    def grown(self, state: DecodeState) -> Sequence[bytes]:
        if state.sampled is None:
            return []
        made = state.sampled
        return [encode(state.words.add(made.token, made.logprob, made.top))]

    @override
    def finish(self, state: DecodeState) -> StageOutput:
        words = state.words
        answer = Answer("".join(piece.text for piece in words.made), words.ended, words.made, words.stop_reason)
        return StageOutput(media=(EncodedMedia("application/json", msgspec.json.encode(answer)),))

    @override
    def let_go(self, state: DecodeState) -> None:
        self._sequences.end(state.kv)
        if state.constraint:
            self._sequences.constraints.discard(state.constraint)
            state.constraint.close()


def _is_last(state: DecodeState) -> bool:
    """Whether the last token of an answer ends it, whatever its text."""
    return len(state.answer) == state.words.most or state.ids[-1] in state.words.ends


def _draw(state: DecodeState, logits: Tensor) -> Drawn:
    try:
        allowed = None
        if state.constraint:
            allowed = None if state.constraint.waits() else state.constraint.allowed(state.answer)
            if allowed is None:
                return None
        return sample(logits, state.how, len(state.ids), state.ids[: state.prompt], state.answer, allowed)
    except PermanentError as error:
        return error


def sampling(params: Params) -> SamplingParams:
    """How a request's tokens are drawn."""
    said: dict[str, Any] = {name: need(params, name, float) for name in SAMPLED}
    said |= {"min_tokens": _least(params)}
    said |= {"bad_words": tuple(map(tuple, json.loads(str(params.get("bad_words") or "[]"))))}
    biases = {int(token): bias for token, bias in json.loads(need(params, "logit_bias", str)).items()}
    shown = need(params, "logprobs", int) if params.get("logprobs") is not None else None
    seed, top_k = need(params, "seed", int), need(params, "top_k", int)
    return SamplingParams(**said, top_k=top_k, seed=seed, logit_bias=biases, logprobs=shown)


def ending(params: Params, derived: DerivedFacts) -> StopConditions:
    """Return the stop conditions of a request."""
    return StopConditions(
        tuple(json.loads(need(params, "stop", str))),
        frozenset(json.loads(str(params.get("stop_token_ids") or "[]"))),
        bool(params.get("ignore_eos")) and not derived.grammar,
        _least(params),
        bool(params.get("include_stop_str_in_output")),
        derived.continues,
        params.get("skip_special_tokens") is False,
    )


def _least(params: Params) -> int:
    return need(params, "min_tokens", int) if params.get("min_tokens") else 0
