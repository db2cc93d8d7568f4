"""Prefill and decode of a language model, over sequences in one paged KV cache.

The state of a sequence is its tokens, and how many of them are in the KV cache. Missing tokens are computed in chunks,
one chunk per step (chunked prefill). A sequence from another worker, a retracted one, and one of a failed attempt
therefore continue in the same way.
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
from unfuse.core.text import MAX_PREFIX_BLOCKS, PREFILL_CHUNK_TOKENS, Answer, TokenDelta, unpack_ids
from unfuse.core.vision import MediaItem
from unfuse.language.detokenize import AnswerText, StopConditions
from unfuse.language.grammars import ConstraintAfterReasoning, GrammarMatcher, Grammars
from unfuse.language.paged_kv import KvSequence, NoKvBlocks
from unfuse.language.sampling import SampledToken, sample_all
from unfuse.language.sampling_params import NextToken, SamplingParams
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
from unfuse.stages.kv_transfer import CHUNKS, LAST_CHUNK, KvBlocks, KvReader, KvWriter
from unfuse.stages.sequence_pool import PromptStage, SequencePool, SequenceState

if TYPE_CHECKING:
    from torch import Tensor

    from unfuse.language.tokenizer import ChatTokenizer
    from unfuse.parallel.group import Group


#: The length of the made-up prompt of a warm-up, in tokens.
WARM_UP_TOKENS = 16
#: Seconds that a step waits for a grammar if it has nothing else to compute.
PATIENCE_S = 0.005

#: A sampled token, or the error of sampling. None: the grammar has not computed the allowed tokens yet.
Drawn = SampledToken | PermanentError | None

#: Sampling parameters that are required numbers.
SAMPLED = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


@dataclass(frozen=True)
class PrefillState(SequenceState):
    """A prompt during prefill."""

    #: Tokens in the KV cache before the last step.
    cached_tokens: int = 0
    #: Writes the KV of the prompt into the object that decode reads.
    handed_tokens: KvWriter = field(kw_only=True)

    @property
    def blocks(self) -> list[PrefixBlock]:
        """The chunks that the last step completed."""
        chunk_numbers = range(self.cached_tokens // PREFILL_CHUNK_TOKENS, self.done // PREFILL_CHUNK_TOKENS)
        return [PrefixBlock(number, partial(self.handed_tokens.prefix_block, number)) for number in chunk_numbers]


class Prefill(PromptStage[PrefillState]):
    """Chunked prefill: computes the KV of all tokens of a prompt except the last.

    Decode starts with the last token.
    """

    kind = "prefill"
    can_overlap = True

    @override
    def warm_up(self) -> None:
        kv = self._sequences.start(0)
        self._sequences.forward([SequenceState(kv, [0] * WARM_UP_TOKENS)], exact=self.exact)
        self._sequences.free(kv)

    @override
    def start(self, task: StageInput) -> PrefillState:
        ids = unpack_ids(task.uploads[PROMPT])
        vision_inputs = self._sequences.vision_inputs(ids, task)

        with self._sequences.common_prefix(task.priority) as kv:
            cached_tokens = self._sequences.write_prefix_blocks(kv, task.prefix, len(ids) - 1)
            writer = self._sequences.writer(kv, len(ids) - 1)

        self._sequences.prompts += 1
        return PrefillState(
            kv, ids[:-1], cached_tokens, vision=vision_inputs, cached_tokens=cached_tokens, handed_tokens=writer
        )

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
        return replace(state, done=result, cached_tokens=state.done)

    @override
    def prefix_blocks(self, state: PrefillState) -> Sequence[PrefixBlock]:
        return state.blocks

    @override
    def progress(self, state: PrefillState) -> tuple[int, int]:
        chunks = max(1, -(-len(state.ids) // PREFILL_CHUNK_TOKENS))
        return (chunks if state.done == len(state.ids) else state.done // PREFILL_CHUNK_TOKENS), chunks

    @override
    def outline(self, state: PrefillState) -> Sequence[tuple[str, str, tuple[int, ...]]]:
        return self._sequences.layout(len(state.ids)).outline()

    @override
    def write_to(self, state: PrefillState, output: OpenOutput) -> None:
        state.handed_tokens.redirect(output)

    @override
    def finish(self, state: PrefillState) -> StageOutput:
        return StageOutput(state.handed_tokens.finish())

    @override
    def release(self, state: PrefillState) -> None:
        self._sequences.prompts -= 1
        self._sequences.free(state.kv)


@dataclass(frozen=True)
class RecomputedChunks(PrefillState):
    """Whole chunks of a prompt and its answer, recomputed as prefill computes them.

    Only chunks with tokens of the answer are recomputed. Decode computed each of these tokens alone, and its KV then
    has other bytes than in a chunk. The prefix cache must have the bytes of chunks, because prefill computes chunks.
    """

    #: The digests of the chunks, by their number.
    digests: tuple[str, ...] = ()

    @property
    @override
    def blocks(self) -> list[PrefixBlock]:
        """The chunks that the last step completed, with their digests."""
        return [replace(block, digest=self.digests[block.number]) for block in super().blocks]

    @property
    def complete(self) -> bool:
        """Whether all chunks are computed."""
        return self.done == len(self.ids)

    def stepped(self, done: int) -> RecomputedChunks | None:
        """Return the state after a step that left `done` tokens in the KV cache.

        None if a chunk did not fit: the remaining chunks are not computed.
        """
        return replace(self, cached_tokens=self.done, done=done) if done > self.done else None


@dataclass(frozen=True)
class DecodeState(SequenceState):
    """A sequence during decode. Its tokens from `prompt` on are the answer."""

    #: Tokens of the prompt.
    prompt: int = 0
    #: The sampling parameters of the request.
    sampling: SamplingParams = SamplingParams()
    #: The text of the answer.
    words: AnswerText = field(kw_only=True)
    #: The token of the last step, or None.
    sampled: SampledToken | None = None
    #: The grammar that the answer must match, or None.
    constraint: GrammarMatcher | None = None
    #: The pictures and videos of the prompt.
    media: tuple[MediaItem, ...] = ()
    #: Whether the answer is added to the prefix cache.
    extends: bool = False
    #: Whether the last token has been drawn.
    is_over: bool = False
    #: Chunks of the answer to recompute for the prefix cache, after the last token is drawn; or None.
    recomputed: RecomputedChunks | None = None

    @property
    @override
    def max_length(self) -> int:
        """The most tokens that the sequence may have."""
        return self.prompt + self.words.max_tokens

    @property
    def answer(self) -> list[int]:
        """The token ids of the answer so far."""
        return self.ids[self.prompt :]

    @override
    def chunk(self, *, exact: bool) -> list[int]:
        """Return the tokens to compute next.

        `exact`: chunks end where those of prefill ended, and the tokens after them are computed one by one, as they
        were before.
        """
        remaining_prompt = self.prompt - 1 - self.kv.length
        return super().chunk(exact=exact)[: max(1, remaining_prompt) if exact else None]


class ReceivedKv(StreamedInput):
    """Receives the KV of a prompt in chunks (`StreamedInput`).

    If the cache has no room for the whole prompt, the data is dropped, and decode computes the prompt's tokens.

    `tokens`: how many tokens of the prompt the object has.
    """

    def __init__(self, sequences: SequencePool, priority: int, tokens: int) -> None:
        self._sequences = sequences
        with sequences.common_prefix(priority) as self.kv:
            self._reader = KvReader(self.kv, sequences.layout(tokens), sequences.heads)
            with suppress(NoKvBlocks):
                self.kv.extend(tokens)

    @property
    def tokens(self) -> int:
        """The number of received tokens; 0 until all are received."""
        return self.kv.length if self._reader.is_complete else 0

    @override
    def write(self, piece: Tensor) -> None:
        self._reader.write(piece)

    @override
    def drop(self) -> None:
        self._sequences.free(self.kv)


class Decode(PromptStage[DecodeState]):
    """Decode with continuous batching: one new token per sequence and step.

    Tokens that are missing in the KV cache are computed first. After the last token, whole chunks of the answer are
    recomputed for the prefix cache if it is to be extended: see `RecomputedChunks`.

    `group`: with tensor parallelism, the ranks. Rank 0 samples and follows grammars; the other ranks use its tokens.
    """

    kind = "decode"
    can_overlap = all_together = True

    def __init__(
        self, sequences: SequencePool, tokenizer: ChatTokenizer, grammars: Grammars, group: Group | None = None
    ) -> None:
        super().__init__(sequences)
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._group = group

    @override
    def warm_up(self) -> None:
        """Decode one token of a made-up prompt, whose KV is written like that of prefill."""
        layout = self._sequences.layout(WARM_UP_TOKENS - 1)
        tensors = {name: torch.zeros(shape, dtype=layout.dtype) for name, _, shape in layout.outline()}
        kv, kv_blocks = self._sequences.start(0), self._kv_blocks(tensors, layout.tokens)
        assert kv_blocks
        cached_tokens = self._sequences.write_received_kv(kv, kv_blocks)
        answer_text = AnswerText(self._tokenizer, StopConditions(), 1)
        state = DecodeState(
            kv,
            [0] * (cached_tokens + 1),
            cached_tokens,
            received_kv=kv_blocks,
            prompt=cached_tokens + 1,
            words=answer_text,
        )

        (next_state,) = next_states(self, [state])
        self.release(state)
        if isinstance(next_state, Exception):
            raise next_state
        self.new_chunks(next_state)

    @override
    def uploads_of(self, derived: DerivedFacts) -> Sequence[str]:
        return (PROMPT, GRAMMAR) if derived.grammar else (PROMPT,)

    @override
    def receive(self, derived: DerivedFacts, priority: int, names: Collection[str]) -> ReceivedKv | None:
        if {*names} != {CHUNKS, LAST_CHUNK}:
            return None
        return ReceivedKv(self._sequences, priority, derived.prompt_tokens - 1)

    @override
    def start(self, task: StageInput) -> DecodeState:
        """Return the state before the first step.

        KV that has no room in the cache now is written once there is room.
        """
        prompt = unpack_ids(task.uploads[PROMPT])
        max_tokens, derived = need(task.params, "max_tokens", int), task.derived

        answer_text = AnswerText(self._tokenizer, ending(task.params, derived), max_tokens, derived.parsing)
        ids = [*prompt]
        for data in task.recorded:
            delta: TokenDelta = decode(data, TokenDelta)
            answer_text.add(delta.id, delta.logprob, tuple((id, logprob) for id, _, logprob in delta.top))
            ids.append(delta.id)

        vision_inputs = self._sequences.vision_inputs(prompt, task)
        sampling_params = msgspec.structs.replace(sampling(task.params), end_ids=tuple(answer_text.end_ids))

        if isinstance(task.received, ReceivedKv):
            kv = task.received.kv
            cached_tokens = task.received.tokens
            kv_blocks = None
        else:
            kv_blocks = self._kv_blocks(task.tensors, len(prompt) - 1)
            with self._sequences.common_prefix(task.priority) as kv:
                cached_tokens = self._sequences.write_received_kv(kv, kv_blocks) if kv_blocks else 0

        state = DecodeState(
            kv,
            ids,
            cached_tokens,
            vision=vision_inputs,
            received_kv=kv_blocks,
            prompt=len(prompt),
            sampling=sampling_params,
            words=answer_text,
            media=derived.media,
            extends=task.extends,
        )
        try:
            state = replace(state, constraint=self._open_constraint(task))

            # An attempt that resumes after the last token of an answer has nothing left to compute.
            return replace(state, is_over=bool(answer_text.finish_reason) or (bool(task.recorded) and _is_last(state)))
        except BaseException:
            self.release(state)
            raise

    def _open_constraint(self, task: StageInput) -> GrammarMatcher | None:
        """Return the task's grammar; None without one, and on ranks other than 0."""
        grammar = task.uploads.get(GRAMMAR)
        if grammar is None or (self._group and self._group.rank):
            return None
        parsing = task.derived.parsing

        constraint: GrammarMatcher
        constraint = matcher = self._grammars.open(grammar)
        if parsing and parsing.reasoning:
            constraint = ConstraintAfterReasoning(matcher, parsing, self._tokenizer)
        self._sequences.constraints.add(constraint)
        return constraint

    @override
    def waits(self, state: DecodeState) -> bool:
        return not state.is_over and state.constraint is not None and state.constraint.waits()

    def _kv_blocks(self, tensors: Tensors, tokens: int) -> KvBlocks | None:
        """Return prefill's KV of the first `tokens` tokens; None if tensors do not fit."""
        return KvBlocks(tokens, tensors) if self._sequences.layout(tokens).fits(tensors) else None

    @override
    def step(self, batch: Sequence[DecodeState]) -> list[tuple[int, SampledToken | None] | Exception]:
        return self._run_step(batch, exact=False)

    @override
    def step_alone(self, state: DecodeState) -> tuple[int, SampledToken | None] | Exception:
        return self._run_step([state], exact=self.exact)[0]

    def _run_step(
        self, batch: Sequence[DecodeState], *, exact: bool
    ) -> list[tuple[int, SampledToken | None] | Exception]:
        """Run one step: compute KV and logits, and sample.

        Returns (tokens in the KV cache, sampled token or None), or an error, for each state. Grammars compute their
        allowed tokens during the forward. If one is late, its state samples nothing and the step is wasted. Ranks
        compute every state, because only rank 0 knows which grammars are late.
        """
        unfinished = [state for state in batch if not state.is_over]
        recomputed = [state.recomputed for state in batch if state.recomputed]
        constraints = [state.constraint for state in unfinished if state.constraint]
        if len(constraints) == len(batch) and all(constraint.waits() for constraint in constraints):
            constraints[0].waits(PATIENCE_S)

        active = [state for state in unfinished if self._group or not self.waits(state)]
        for state in active:
            if state.constraint:
                state.constraint.query(state.answer)

        logits = self._sequences.forward([*active, *recomputed], exact=exact)[: len(active)]

        samplable = [
            (state, next_logits) for state, next_logits in zip(active, logits, strict=True) if next_logits is not None
        ]

        results: dict[KvSequence, tuple[int, SampledToken | None] | Exception] = {}
        results |= {state.kv: (state.kv.length, None) for state in (*active, *recomputed)}
        for (state, _), token in zip(samplable, self._sample_all(samplable), strict=True):
            if isinstance(token, PermanentError):
                results[state.kv] = token
            else:
                # Without a token the step does not count: the next one computes its last tokens again, for the logits.
                results[state.kv] = (state.kv.length if token else state.done), token

        return [results.get(state.kv, (state.done, None)) for state in batch]

    def _sample_all(self, samplable: Sequence[tuple[DecodeState, Tensor]]) -> list[Drawn]:
        """Sample the next token of each state, from logits (vocabulary,).

        On several ranks, rank 0 samples for all.
        """
        group = self._group
        sampled_tokens = _sample_tokens(samplable) if group is None or group.rank == 0 else []
        if group is None or not samplable:
            return sampled_tokens

        # This raises the error of a rank whose forward failed, instead of waiting for its tokens.
        group.meet()
        packed = encode([str(token) if isinstance(token, PermanentError) else token for token in sampled_tokens])
        tokens: list[SampledToken | str | None] = decode(group.exchange(packed)[0], list[SampledToken | str | None])
        return [PermanentError(token) if isinstance(token, str) else token for token in tokens]

    @override
    def advance(self, state: DecodeState, result: tuple[int, SampledToken | None]) -> DecodeState:
        done, sampled = result
        if state.is_over:
            return replace(state, sampled=None, recomputed=state.recomputed and state.recomputed.stepped(done))
        if sampled:
            state.ids.append(sampled.token)

        state = replace(state, done=done, sampled=sampled)
        if not (sampled and _is_last(state)):
            return state
        return replace(state, is_over=True, recomputed=self._recomputed_chunks(state))

    def _recomputed_chunks(self, state: DecodeState) -> RecomputedChunks | None:
        """Return the chunks of a finished answer to recompute for the prefix cache.

        None if no later prompt would find them.
        """
        first_chunk = (state.prompt - 1) // PREFILL_CHUNK_TOKENS
        chunks = min((len(state.ids) - 1) // PREFILL_CHUNK_TOKENS, MAX_PREFIX_BLOCKS)

        # Templates leave reasoning out of later turns, so no later prompt starts with these tokens.
        if not state.extends or first_chunk >= chunks or state.words.has_reasoning:
            return None
        # If the prompt ends with a picture, the tokens after it have other positions than in a longer prompt.
        if state.vision and not state.vision.ends_in_text:
            return None

        # The answer is complete, so every other sequence may take these blocks.
        self._sequences.step_back(state.kv)
        digests = self._sequences.digests(state.ids[: state.prompt], state.answer, state.media)
        writer = self._sequences.writer(state.kv, chunks * PREFILL_CHUNK_TOKENS, first_chunk)
        return RecomputedChunks(
            state.kv,
            state.ids[: chunks * PREFILL_CHUNK_TOKENS],
            first_chunk * PREFILL_CHUNK_TOKENS,
            cached_tokens=first_chunk * PREFILL_CHUNK_TOKENS,
            vision=state.vision,
            handed_tokens=writer,
            is_preemptible=True,
            digests=digests,
        )

    @override
    def prefix_blocks(self, state: DecodeState) -> Sequence[PrefixBlock]:
        return state.recomputed.blocks if state.recomputed else ()

    @override
    def progress(self, state: DecodeState) -> tuple[int, int]:
        """Return (tokens of the answer so far, its final number or its maximum).

        While a finished answer still has chunks to recompute, one token less counts as done.
        """
        answer_tokens = len(state.ids) - state.prompt
        is_over = state.is_over or state.words.finish_reason or (answer_tokens and state.ids[-1] in state.words.end_ids)
        has_chunks_left = state.recomputed is not None and not state.recomputed.complete
        return (
            answer_tokens - 1 if has_chunks_left else answer_tokens,
            answer_tokens if is_over else state.words.max_tokens,
        )

    @override
    def new_chunks(self, state: DecodeState) -> Sequence[bytes]:
        if state.sampled is None:
            return []
        sampled = state.sampled
        return [encode(state.words.add(sampled.token, sampled.logprob, sampled.top))]

    @override
    def finish(self, state: DecodeState) -> StageOutput:
        answer_text = state.words
        answer = Answer(
            "".join(delta.text for delta in answer_text.deltas),
            answer_text.finish_reason,
            answer_text.deltas,
            answer_text.stop_reason,
        )
        return StageOutput(media=(EncodedMedia("application/json", msgspec.json.encode(answer)),))

    @override
    def release(self, state: DecodeState) -> None:
        self._sequences.free(state.kv)
        if state.constraint:
            self._sequences.constraints.discard(state.constraint)
            state.constraint.close()


def _is_last(state: DecodeState) -> bool:
    """Return whether the last token ends the answer, by its id or the maximum length.

    Stop strings are not checked.
    """
    return len(state.answer) == state.words.max_tokens or state.ids[-1] in state.words.end_ids


def _sample_tokens(samplable: Sequence[tuple[DecodeState, Tensor]]) -> list[Drawn]:
    """Sample a token of each state from logits (vocabulary,).

    None: the allowed tokens are not known yet.
    """
    inputs = [_sampling_input(state, logits) for state, logits in samplable]
    tokens = iter(sample_all([text for text in inputs if isinstance(text, NextToken)]))
    return [next(tokens) if isinstance(text, NextToken) else text for text in inputs]


def _sampling_input(state: DecodeState, logits: Tensor) -> NextToken | PermanentError | None:
    """Return the inputs of sampling a state's next token, or an error.

    None: the grammar has not computed the allowed tokens yet.
    """
    allowed = None
    try:
        if state.constraint:
            allowed = None if state.constraint.waits() else state.constraint.allowed(state.answer)
            if allowed is None:
                return None
    except PermanentError as error:
        return error
    return NextToken(logits, state.sampling, len(state.ids), state.ids[: state.prompt], state.answer, allowed)


def sampling(params: Params) -> SamplingParams:
    """Return the sampling parameters of a request. Raises PermanentError."""
    values: dict[str, Any] = {name: need(params, name, float) for name in SAMPLED}
    values |= {"min_tokens": _min_tokens(params)}
    values |= {"bad_words": tuple(map(tuple, json.loads(str(params.get("bad_words") or "[]"))))}

    biases = {int(token): bias for token, bias in json.loads(need(params, "logit_bias", str)).items()}
    logprobs = need(params, "logprobs", int) if params.get("logprobs") is not None else None
    seed, top_k = need(params, "seed", int), need(params, "top_k", int)
    return SamplingParams(**values, top_k=top_k, seed=seed, logit_bias=biases, logprobs=logprobs)


def ending(params: Params, derived: DerivedFacts) -> StopConditions:
    """Return the stop conditions of a request. Raises PermanentError."""
    return StopConditions(
        tuple(json.loads(need(params, "stop", str))),
        frozenset(json.loads(str(params.get("stop_token_ids") or "[]"))),
        bool(params.get("ignore_eos")) and not derived.grammar,
        _min_tokens(params),
        bool(params.get("include_stop_str_in_output")),
        derived.continues,
        params.get("skip_special_tokens") is False,
    )


def _min_tokens(params: Params) -> int:
    """Return the parameter `min_tokens`, or 0."""
    return need(params, "min_tokens", int) if params.get("min_tokens") else 0
