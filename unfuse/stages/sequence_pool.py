"""The sequences of a language model in one paged KV cache, with prefix caching.

Also their chunks, and the room for them in the cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unfuse.core.derived_facts import PROMPT
from unfuse.core.errors import PermanentError
from unfuse.core.text import PREFILL_CHUNK_TOKENS, TextStats, prefix_digests, unpack_ids
from unfuse.core.vision import MediaItem, VisionConfig, media_positions
from unfuse.language.grammars import GrammarMatcher
from unfuse.language.paged_kv import KvSequence, KvUsage, NoKvBlocks, PagedKvCache
from unfuse.stages.base import StageInput, State, SteppedStage, Tensors
from unfuse.stages.kv_transfer import KvBlocks, KvLayout, KvWriter, SharedKvWriter
from unfuse.stages.language_model import LanguageModel, VisionInputs

if TYPE_CHECKING:
    from torch import Tensor

    from unfuse.parallel.group import Axis


#: The order number of sequences that come after all others.
LAST = 1 << 62


@dataclass(frozen=True)
class SequenceState:
    """The state of one sequence of tokens."""

    #: Its keys and values.
    kv: KvSequence
    #: Its token ids. Later states share this list.
    ids: list[int]
    #: How many of its tokens were in the KV cache before this step.
    done: int = 0
    #: The pictures and videos of its prompt, or None.
    vision: VisionInputs | None = field(default=None, kw_only=True)
    #: Writes its KV for another worker; None if no worker needs it.
    handed_tokens: KvWriter | None = field(default=None, kw_only=True)
    #: Its KV from another worker. None: there is none, or it was received directly into the KV cache.
    received_kv: KvBlocks | None = field(default=None, kw_only=True)
    #: Whether the sequence ends if there is no room, instead of retracting others or waiting.
    is_preemptible: bool = field(default=False, kw_only=True)

    @property
    def external_kv(self) -> KvBlocks | None:
        """The KV of its first tokens outside the KV cache, or None."""
        return self.handed_tokens.written if self.handed_tokens else self.received_kv

    @property
    def max_length(self) -> int:
        """The most tokens that it may have."""
        return len(self.ids)

    def chunk(self, *, exact: bool) -> list[int]:
        """Return the next tokens to compute: up to the end of the current chunk.

        `exact`: tokens that were computed before must be computed again in the same chunks.
        """
        start = self.kv.length
        return self.ids[start : start - start % PREFILL_CHUNK_TOKENS + PREFILL_CHUNK_TOKENS]


class SequencePool:
    """All sequences of a process in one paged KV cache, with retraction.

    If the cache is full, the last sequences are retracted: their blocks are freed, and they wait. Sequences are ordered
    by priority, then by age, the oldest first. The first one can always continue, and no sequence is lost: a retracted
    one gets its KV back from where it is stored elsewhere, or is recomputed from its tokens.

    With tensor parallelism each rank has a share of the heads, and the same sequences. All ranks make the same calls in
    the same order.

    `deep`: the number of deepstack layers of the vision encoder.
    `axis`: the ranks of the model; None for one.
    """

    def __init__(
        self,
        model: LanguageModel,
        kv: PagedKvCache,
        vision: VisionConfig | None = None,
        deep: int = 0,
        axis: Axis | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._vision = vision
        self._deep = deep
        self._axis = axis
        self._own_heads = kv.keys[0].shape[0]
        rank = axis.rank if axis else 0
        #: The heads of the model whose keys and values this process has.
        self.heads = slice(rank * self._own_heads, (rank + 1) * self._own_heads)

        #: The order key of each sequence: (negative priority, start number). The smallest comes first.
        self._order: dict[KvSequence, tuple[int, int]] = {}
        #: The blocks that each sequence needs by its present tokens, or by the most that it may have.
        self._wanted_blocks: dict[KvSequence, int] = {}
        self._started = 0

        #: How often a sequence was retracted.
        self.retracted = 0
        #: How many sequences are prompts in prefill.
        self.prompts = 0
        #: The grammar constraints of the sequences that have one.
        self.constraints = set[GrammarMatcher]()

    @property
    def tokens(self) -> int:
        """The capacity of the KV cache in tokens, in whole blocks."""
        return self.usage().blocks * self._kv.block

    def layout(self, tokens: int) -> KvLayout:
        """Return the layout in which this many tokens of a sequence are transferred."""
        heads = self._own_heads * (self._axis.size if self._axis else 1)
        return KvLayout(len(self._kv.keys), heads, self._kv.keys[0].shape[-1], self._kv.keys[0].dtype, tokens)

    def writer(self, sequence: KvSequence, tokens: int, first_chunk: int = 0) -> KvWriter:
        """Return a writer that transfers the KV of a sequence's first `tokens` tokens.

        Chunks before `first_chunk` are not written.
        """
        layout = self.layout(tokens)
        return (
            SharedKvWriter(sequence, layout, self._axis, first_chunk)
            if self._axis
            else KvWriter(sequence, layout, first_chunk)
        )

    def usage(self) -> KvUsage:
        """Return the used and the total number of blocks."""
        return self._kv.usage()

    def load(self) -> TextStats:
        """Return the numbers of blocks, prompts in prefill, and texts whose grammar is being compiled."""
        usage = self.usage()
        compiling = sum(constraint.compiling for constraint in self.constraints)
        return TextStats(usage.used, usage.free, self.prompts, compiling)

    def vision_inputs(self, ids: Sequence[int], task: StageInput) -> VisionInputs | None:
        """Return the pictures and videos of a task's prompt, or None. Raises PermanentError.

        `ids`: the token ids of the prompt.
        """
        if self._vision is None or not task.derived.media:
            return None
        return VisionInputs(ids, task.derived.media, task.tensors, self._vision, self._deep)

    def leftovers(self) -> dict[str, int]:
        """Return leaked memory in bytes by owner: sequences, and blocks of no sequence.

        Call it only while no task has a state.
        """
        block_bytes, unowned_blocks = self._kv.block_bytes, self.usage().used
        leaked_bytes = dict[str, int]()
        for sequence, (_, number) in self._order.items():
            leaked_bytes[f"sequence {number} of {sequence.length} tokens"] = sequence.blocks * block_bytes
            unowned_blocks -= sequence.blocks
        return leaked_bytes | (
            {f"{unowned_blocks} blocks of no sequence": unowned_blocks * block_bytes} if unowned_blocks else {}
        )

    def end_all(self) -> None:
        """End every sequence. Call it only while no task has a state."""
        for sequence in [*self._order]:
            self.free(sequence)

    @contextmanager
    def common_prefix(self, priority: int) -> Iterator[KvSequence]:
        """Start a sequence for a state that is created in this context.

        Its memory is freed if the context is left by an error.
        """
        sequence = self.start(priority)
        try:
            yield sequence
        except BaseException:
            self.free(sequence)
            raise

    def digests(self, prompt: Sequence[int], answer: Sequence[int], media: Sequence[MediaItem]) -> tuple[str, ...]:
        """Return the digests for prefix caching of a prompt and its answer.

        Later prompts find the chunks of both under these digests. `media`: the pictures and videos of the prompt.
        """
        positions = media_positions(self._vision, prompt, media) if self._vision and media else ()
        return prefix_digests([*prompt, *answer], positions)

    def start(self, priority: int) -> KvSequence:
        """Start a sequence, the youngest of its priority."""
        sequence = self._kv.sequence()
        self._started += 1
        self._order[sequence] = -priority, self._started
        return sequence

    def write_prefix_blocks(self, sequence: KvSequence, prefix: Sequence[Tensors], max_tokens: int) -> int:
        """Write cached prefix blocks (prefix caching) while there is room.

        Returns the tokens in the cache.

        `prefix`: consecutive blocks; their tensor `kv` is (layers, 2, heads, PREFILL_CHUNK_TOKENS, width).
        `max_tokens`: the most tokens to write.
        """
        layout = self.layout(PREFILL_CHUNK_TOKENS)
        for block in prefix:
            block_kv, start = block.get("kv"), sequence.length
            shape = layout.layers, 2, layout.heads, PREFILL_CHUNK_TOKENS, layout.width
            if block_kv is None or block_kv.shape != shape or start + PREFILL_CHUNK_TOKENS > max_tokens:
                break
            try:
                sequence.extend(PREFILL_CHUNK_TOKENS)
            except NoKvBlocks:
                break
            for layer, (keys, values) in enumerate(block_kv):
                sequence.write(layer, keys[self.heads], values[self.heads], start)
        return sequence.length

    def write_received_kv(self, sequence: KvSequence, kv_blocks: KvBlocks) -> int:
        """Write KV from another worker, if there is room now.

        Returns the tokens in the cache.
        """
        with suppress(NoKvBlocks):
            sequence.extend(kv_blocks.tokens)
            self._write(sequence, kv_blocks)
        return sequence.length

    def step_back(self, sequence: KvSequence) -> None:
        """Put a sequence behind all others, which may then retract it."""
        self._started += 1
        self._order[sequence] = LAST, self._started

    def free(self, sequence: KvSequence) -> None:
        """Free a sequence."""
        sequence.free()
        self._order.pop(sequence, None)
        self._wanted_blocks.pop(sequence, None)

    def forward(self, states: Sequence[SequenceState], *, exact: bool = False) -> list[Tensor | None]:
        """Compute the next chunk of each sequence (chunked prefill, continuous batching).

        Returns, for each, logits (vocabulary,) after its last token, or None if some of its tokens are not computed
        yet.
        """
        chunks = dict[KvSequence, tuple[list[int], VisionInputs | None]]()
        writers = list[KvWriter]()

        # Earlier sequences take blocks first, and may retract later ones for them.
        for state in sorted(states, key=lambda state: self._order[state.kv]):
            if chunk := self._next_chunk(state, exact):
                chunks[state.kv] = chunk, state.vision
                writers += [state.handed_tokens] if state.handed_tokens else []

        def on_layer(layer: int) -> None:
            for writer in writers:
                writer.layer(layer)

        model_parts = [(kv, *chunk_and_vision) for kv, chunk_and_vision in chunks.items()]
        try:
            logits_per_part = self._model.forward(model_parts, exact, on_layer if writers else None)
        except BaseException:
            # Otherwise these tokens would count as computed: a retracted sequence has more tokens in `done`.
            for kv, chunk, _ in model_parts:
                kv.truncate(kv.length - len(chunk))
            raise

        for state in states:
            if state.handed_tokens:
                state.handed_tokens.stepped()

        logits = dict(zip(chunks, logits_per_part, strict=True))
        return [logits.get(state.kv) if state.kv.length == len(state.ids) else None for state in states]

    def _next_chunk(self, state: SequenceState, exact: bool) -> list[int]:
        """Return the tokens that a sequence adds in this step, and make room for them.

        Empty if the sequence has to wait.
        """
        # If a step is repeated to compare its results, the first run has already added its tokens.
        state.kv.truncate(min(state.done, state.kv.length))
        self._wanted_blocks[state.kv] = self._kv.blocks(state.max_length if exact else len(state.ids))

        if state.is_preemptible and state.kv.length < state.done:
            return []
        if not (state.kv.length or state.is_preemptible or self._may_start(state)):
            return []

        chunk = state.chunk(exact=exact)
        return chunk if chunk and self._make_room(state.kv, len(chunk)) else []

    def _may_start(self, state: SequenceState) -> bool:
        """Return whether an empty sequence may take room: if all its present tokens fit.

        Otherwise it would soon be retracted again. In exact pools, where recomputing takes one forward per token, there
        must be room for all tokens that it and the sequences before it may have. If its KV is stored elsewhere, this
        writes it.
        """
        sequences_before = [
            other for other, order in self._order.items() if other.length and order < self._order[state.kv]
        ]
        blocks_before = sum(max(other.blocks, self._wanted_blocks.get(other, 0)) for other in sequences_before)
        if self._wanted_blocks[state.kv] + blocks_before > self.usage().blocks:
            return False

        if stored_kv := state.external_kv:
            self._make_room(state.kv, stored_kv.tokens)
            self._write(state.kv, stored_kv)
        return True

    def _write(self, sequence: KvSequence, kv_blocks: KvBlocks) -> None:
        """Write KV from another worker into a sequence that has room for it."""
        for start, layer, unit in self.layout(kv_blocks.tokens).read(kv_blocks.tensors):
            own_unit = unit[self.heads]
            sequence.write(layer, own_unit[:, 0], own_unit[:, 1], start)

    def _make_room(self, sequence: KvSequence, tokens: int) -> bool:
        """Extend a sequence, retracting later ones if necessary.

        Returns False if it has to wait for earlier ones.
        """
        while True:
            try:
                sequence.extend(tokens)
                return True
            except NoKvBlocks:
                last_sequence = max(
                    (other for other in self._order if other.length), key=self._order.__getitem__, default=sequence
                )
                if self._order[last_sequence] <= self._order[sequence]:
                    return False
                last_sequence.free()
                # A finished answer is complete without its remaining chunks.
                self.retracted += self._order[last_sequence][0] != LAST


class PromptStage(SteppedStage[State]):
    """A stage of sequences that start with a prompt. All tasks may share a forward."""

    uploads = (PROMPT,)

    def __init__(self, sequences: SequencePool) -> None:
        self.texts = self._sequences = sequences

    @override
    def verify(self, task: StageInput) -> None:
        """Raise PermanentError if the prompt has another length than the request states."""
        if len(unpack_ids(task.uploads[PROMPT])) != task.derived.prompt_tokens:
            raise PermanentError("the prompt has another number of tokens than its request states")

    @override
    def batch_key(self, task: StageInput) -> Hashable:
        return ()


def open_model(
    model: Any,
    device: str,
    tokens: int,
    vision: VisionConfig | None = None,
    deep: int = 0,
    axis: Axis | None = None,
    *,
    gathers: bool = False,
) -> SequencePool:
    """Return a pool of sequences for a transformers model, with a new KV cache.

    `tokens`: the capacity of the KV cache.
    `vision`: how the model reads pictures and videos, or None.
    `deep`: the number of deepstack layers of the vision encoder.
    `axis`: the ranks over which the model is spread; each has a share of the heads.
    `gathers`: as in `LanguageModel`.
    Raises ConfigError for a model that is not served.
    """
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = config.num_hidden_layers, config.num_key_value_heads // (axis.size if axis else 1), width
    kv = PagedKvCache(*shape, tokens, dtype=model.dtype, device=device)
    return SequencePool(LanguageModel(model, kv, gathers=gathers), kv, vision, deep, axis)
