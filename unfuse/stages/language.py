"""Prefill and decode of a language model: both grow sequences in one paged KV, with the same ragged forward.

A state is its tokens, and how many of them are in the KV. Whatever is not there yet is computed, a chunk a step: so a
sequence that comes from another worker, one whose blocks were taken, and one of an attempt that died go on alike.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from typing_extensions import override

from unfuse.core.codec import decode, encode
from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.core.text import CHUNK, Answer, Piece, TextLoad, unpacked
from unfuse.stages.base import JointStage, Media, StageInput, StageOutput, Tensors, need
from unfuse.stages.detokenize import Detokenizer, Pieces, Stops
from unfuse.stages.language_model import LanguageModel
from unfuse.stages.paged_kv import KvSequence, KvUsage, NoBlocks, PagedKv
from unfuse.stages.sampling import Sampled, Sampling, sample

if TYPE_CHECKING:
    from torch import Tensor


PROMPT = "prompt"
"""The upload that has the ids of a prompt's tokens, as `core.text.packed` has them."""

SAMPLED = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


@dataclass(frozen=True)
class Growing:
    """A sequence: its `ids`, which later states of it share, and of which `done` were in the KV before this step."""

    kv: KvSequence
    ids: list[int]
    done: int = 0

    def chunk(self, *, exact: bool) -> list[int]:
        """The tokens to add next; where they were added before, `exact` says to do so in the same chunks."""
        start = self.kv.length
        return self.ids[start : start - start % CHUNK + CHUNK]


class Sequences:
    """All sequences of a process, in one KV. Where that is full, the last ones give up theirs, and wait.

    Those of higher priority come before others, and of one priority the older. So the first one can always go on, and
    none is lost: what a sequence gave up is computed again from its tokens.
    """

    def __init__(self, model: LanguageModel, kv: PagedKv) -> None:
        self._model, self._kv = model, kv
        self._ranks: dict[KvSequence, tuple[int, int]] = {}
        self._begun = 0
        self.retracted, self.prompts = 0, 0
        """How often a sequence gave up its blocks, and how many sequences are prompts that are prefilled."""

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self._kv.keys)

    def usage(self) -> KvUsage:
        """What of the KV is taken."""
        return self._kv.usage()

    def load(self) -> TextLoad:
        """What there is of blocks and prompts."""
        usage = self.usage()
        return TextLoad(usage.used, usage.free, self.prompts)

    def begin(self, priority: int) -> KvSequence:
        """A sequence, the youngest of its priority."""
        sequence = self._kv.sequence()
        self._begun += 1
        self._ranks[sequence] = -priority, self._begun
        return sequence

    def take(self, sequence: KvSequence, prefix: Sequence[Tensors], most: int) -> int:
        """Put portions that others have made in their place, while they are such, and there is room.

        Returns how many tokens there are then, `most` or less.
        """
        heads, _, width = self._kv.keys[0].shape
        for portion in prefix:
            both, start = portion.get("kv"), sequence.length
            if both is None or both.shape != (self.layers, 2, heads, CHUNK, width) or start + CHUNK > most:
                break
            try:
                sequence.grow(CHUNK)
            except NoBlocks:
                break
            for layer, (keys, values) in enumerate(both):
                sequence.write(layer, keys, values, start)
        return sequence.length

    def end(self, sequence: KvSequence) -> None:
        """It is of no use any more."""
        sequence.free()
        self._ranks.pop(sequence, None)

    def forward(self, states: Sequence[Growing], *, exact: bool = False) -> list[Tensor | None]:
        """Add the next chunk of each to the KV. Returns the logits behind those whose tokens are all there then."""
        parts = dict[KvSequence, list[int]]()
        for state in sorted(states, key=lambda state: self._ranks[state.kv]):
            state.kv.truncate(min(state.done, state.kv.length))  # of a step that was made before, to compare
            chunk = state.chunk(exact=exact)
            if chunk and self._make_room(state.kv, len(chunk)):
                parts[state.kv] = chunk
        made = self._model.forward([*parts.items()], alone=exact)
        logits = dict(zip(parts, made, strict=True))
        return [logits.get(state.kv) if state.kv.length == len(state.ids) else None for state in states]

    def _make_room(self, sequence: KvSequence, tokens: int) -> bool:
        """Grow a sequence, if need be in place of those behind it. False if it has to wait for those before it."""
        while True:
            try:
                sequence.grow(tokens)
                return True
            except NoBlocks:
                last = max(
                    (other for other in self._ranks if other.length), key=self._ranks.__getitem__, default=sequence
                )
                if self._ranks[last] <= self._ranks[sequence]:
                    return False
                last.free()
                self.retracted += 1


def open_model(model: Any, device: str, tokens: int) -> Sequences:
    """A model of transformers, with a KV for so many tokens. Raises ConfigError for one that is not served."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = config.num_hidden_layers, config.num_key_value_heads, width
    kv = PagedKv(*shape, tokens, dtype=model.dtype, device=device)
    return Sequences(LanguageModel(model, kv), kv)


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
        _verify(task)

    @override
    def batch_key(self, params: Params) -> Hashable:
        return ()

    @override
    def start(self, task: StageInput) -> Prefilling:
        self._sequences.prompts += 1
        kv, ids = self._sequences.begin(task.priority), unpacked(task.uploads[PROMPT])[:-1]
        taken = self._sequences.take(kv, task.prefix, len(ids))
        return Prefilling(kv, ids, taken, taken)

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
        span, layers = (number * CHUNK, (number + 1) * CHUNK), range(self._sequences.layers)
        return {"kv": torch.stack([torch.stack(state.kv.read(layer, *span)) for layer in layers])}

    @override
    def progress(self, state: Prefilling) -> tuple[int, int]:
        chunks = max(1, -(-len(state.ids) // CHUNK))
        return (chunks if state.done == len(state.ids) else state.done // CHUNK), chunks

    @override
    def finish(self, state: Prefilling) -> StageOutput:
        layers = range(self._sequences.layers)
        return StageOutput({f"kv{layer}": torch.stack(state.kv.read(layer)) for layer in layers})

    @override
    def let_go(self, state: Prefilling) -> None:
        self._sequences.prompts -= 1
        self._sequences.end(state.kv)


class Tokenizer(Pieces, Protocol):
    """What decoding needs of a tokenizer: the ids that end a text, and the text of some."""

    stops: frozenset[int]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids."""
        ...


class Words:
    """The text of an answer, as far as it may be shown; it ends with a token or a text that stops it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], most: int) -> None:
        self._ends, self._detokenizer, self._stops = tokenizer.stops, Detokenizer(tokenizer), Stops(stops)
        self.most, self.made = most, list[Piece]()
        self.ended = ""
        """Why the answer is over: "stop" or "length"."""

    def add(self, token: int, logprob: float | None, top: tuple[tuple[int, str, float], ...]) -> Piece:
        """Add a token."""
        over = token in self._ends
        text, stopped = ("", False) if over else self._stops.feed(self._detokenizer.add(token))
        self.ended = "stop" if over or stopped else "length" if len(self.made) + 1 == self.most else ""
        if self.ended and not stopped:
            more, stopped = self._stops.feed(self._detokenizer.finish())
            text += more + ("" if stopped else self._stops.finish())
            self.ended = "stop" if stopped else self.ended
        self.made.append(Piece(token, text, logprob, top))
        return self.made[-1]


@dataclass(frozen=True)
class Writing(Growing):
    """A sequence whose tokens from number `prompt` on are the answer; the last step made `sampled`, if anything."""

    prompt: int = 0
    how: Sampling = Sampling()
    words: Words | None = None
    sampled: Sampled | None = None

    @override
    def chunk(self, *, exact: bool) -> list[int]:
        """Where bytes count, chunks end where those of prefill ended, and the tokens behind them come one by one."""
        left = self.prompt - 1 - self.kv.length
        return super().chunk(exact=exact)[: max(1, left) if exact else None]


class Decode(JointStage[Writing, "tuple[int, Sampled | None]"]):
    """Makes one token a step, once all that are there are in the KV."""

    kind = "decode"
    uploads = (PROMPT,)
    goes_ahead = all_together = True

    def __init__(self, sequences: Sequences, tokenizer: Tokenizer) -> None:
        self.texts = self._sequences = sequences
        self._tokenizer = tokenizer

    @override
    def verify(self, task: StageInput) -> None:
        _verify(task)

    @override
    def batch_key(self, params: Params) -> Hashable:
        return ()

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
        kv = self._sequences.begin(task.priority)
        return Writing(kv, ids, self._taken(kv, task.tensors), len(prompt), sampling(task.params), words)

    def _taken(self, kv: KvSequence, tensors: Tensors) -> int:
        """Put the KV that prefill made in its place. Returns how many tokens it has."""
        given = [tensors.get(f"kv{layer}") for layer in range(self._sequences.layers)]
        layers = [tensor for tensor in given if tensor is not None]
        if len(layers) < len(given):
            return 0
        try:
            kv.grow(layers[0].shape[2])
        except NoBlocks:
            return 0
        for layer, both in enumerate(layers):
            kv.write(layer, both[0], both[1])
        return kv.length

    @override
    def compute(self, batch: Sequence[Writing]) -> list[tuple[int, Sampled | None] | Exception]:
        return [*self._computed(batch, exact=False)]

    @override
    def alone(self, state: Writing) -> tuple[int, Sampled | None]:
        return self._computed([state], exact=self.exact)[0]

    def _computed(self, batch: Sequence[Writing], *, exact: bool) -> list[tuple[int, Sampled | None]]:
        logits = self._sequences.forward(batch, exact=exact)
        return [(state.kv.length, _sampled(state, of)) for state, of in zip(batch, logits, strict=True)]

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


def _verify(task: StageInput) -> None:
    if len(unpacked(task.uploads[PROMPT])) != need(task.params, "prompt_tokens", int):
        raise PermanentError("the prompt is not as long as it was said to be")


def _sampled(state: Writing, logits: Tensor | None) -> Sampled | None:
    if logits is None:
        return None
    return sample(logits, state.how, len(state.ids), state.ids[: state.prompt], state.ids[state.prompt :])


def sampling(params: Params) -> Sampling:
    """How a request's tokens are drawn."""
    numbers = {name: need(params, name, float) for name in SAMPLED}
    biases = {int(token): bias for token, bias in json.loads(need(params, "logit_bias", str)).items()}
    shown = need(params, "logprobs", int) if params.get("logprobs") is not None else None
    seed, top_k = need(params, "seed", int), need(params, "top_k", int)
    return Sampling(**numbers, top_k=top_k, seed=seed, logit_bias=biases, logprobs=shown)
