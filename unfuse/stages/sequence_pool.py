"""The sequences of a language model in one paged KV: who has room, what each adds to it, what others may go on from."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unfuse.core.derived_facts import PROMPT
from unfuse.core.errors import PermanentError
from unfuse.core.text import CHUNK, TextStats, beginnings, unpacked
from unfuse.core.vision import MediaItem, VisionConfig, places_of
from unfuse.language.grammars import GrammarMatcher
from unfuse.language.paged_kv import KvSequence, KvUsage, NoKvBlocks, PagedKvCache
from unfuse.stages.base import StageInput, State, SteppedStage, Tensors
from unfuse.stages.kv_transfer import KvBlocks, KvLayout, KvWriter, SharedKvWriter
from unfuse.stages.language_model import LanguageModel, VisionInputs

if TYPE_CHECKING:
    from torch import Tensor

    from unfuse.parallel.group import Axis


LAST = 1 << 62  # the place of sequences that every other one comes before


@dataclass(frozen=True)
class SequenceState:
    """A sequence: `ids`, which later states share, `done` of them in the KV before this step, `sight` it shows."""

    kv: KvSequence
    ids: list[int]
    done: int = 0
    sight: VisionInputs | None = field(default=None, kw_only=True)
    handed: KvWriter | None = field(default=None, kw_only=True)
    """Writes what the sequence has for another worker, if it is for one."""
    given: KvBlocks | None = field(default=None, kw_only=True)
    """What another worker has made of it, as long as that can be read."""
    yields: bool = field(default=False, kw_only=True)
    """Whether it does without what there is no room for, rather than take that of others, or wait for it."""

    @property
    def elsewhere(self) -> KvBlocks | None:
        """What is there of its beginning beside the KV."""
        return self.handed.written if self.handed else self.given

    @property
    def most(self) -> int:
        """How many tokens it may have."""
        return len(self.ids)

    def chunk(self, *, exact: bool) -> list[int]:
        """The tokens to add next; where they were added before, `exact` says to do so in the same chunks."""
        start = self.kv.length
        return self.ids[start : start - start % CHUNK + CHUNK]


class SequencePool:
    """All sequences of a process, in one KV. Where that is full, the last ones give up theirs, and wait.

    Those of higher priority come before others, and of one priority the older. So the first one can always go on, and
    none is lost: what a sequence gave up is put in place again where it is there elsewhere, and else computed again
    from its tokens. Of several ranks each has some of the heads, and otherwise the same sequences: all make the same
    calls, in the same order.
    """

    def __init__(
        self,
        model: LanguageModel,
        kv: PagedKvCache,
        vision: VisionConfig | None = None,
        deep: int = 0,
        axis: Axis | None = None,
    ) -> None:
        self._model, self._kv, self._vision, self._deep, self._axis = model, kv, vision, deep, axis
        rank, self._share = axis.rank if axis else 0, kv.keys[0].shape[0]
        self.heads = slice(rank * self._share, (rank + 1) * self._share)
        """Those of the model whose keys and values are here."""
        self._ranks: dict[KvSequence, tuple[int, int]] = {}
        self._wanted: dict[KvSequence, int] = {}
        self._begun = 0
        self.retracted, self.prompts = 0, 0
        """How often a sequence gave up its blocks, and how many sequences are prompts that are prefilled."""
        self.constraints = set[GrammarMatcher]()  # those of the texts that have to match a grammar

    @property
    def tokens(self) -> int:
        """How many tokens the KV has room for, in whole blocks."""
        return self.usage().blocks * self._kv.block

    def layout(self, tokens: int) -> KvLayout:
        """How so many tokens of a sequence are handed on."""
        heads = self._share * (self._axis.size if self._axis else 1)
        return KvLayout(len(self._kv.keys), heads, self._kv.keys[0].shape[-1], self._kv.keys[0].dtype, tokens)

    def writer(self, sequence: KvSequence, tokens: int, first: int = 0) -> KvWriter:
        """What hands so many tokens of a sequence on, without its `first` chunks."""
        layout = self.layout(tokens)
        return SharedKvWriter(sequence, layout, self._axis, first) if self._axis else KvWriter(sequence, layout, first)

    def usage(self) -> KvUsage:
        """What of the KV is taken."""
        return self._kv.usage()

    def load(self) -> TextStats:
        """What there is of blocks and prompts, and of texts whose grammar is not compiled yet."""
        usage = self.usage()
        compiling = sum(constraint.compiling for constraint in self.constraints)
        return TextStats(usage.used, usage.free, self.prompts, compiling)

    def sight(self, ids: Sequence[int], task: StageInput) -> VisionInputs | None:
        """What a prompt of these ids shows; None of one that shows nothing. Raises PermanentError."""
        if self._vision is None or not task.derived.shown:
            return None
        return VisionInputs(ids, task.derived.shown, task.tensors, self._vision, self._deep)

    def leftovers(self) -> dict[str, int]:
        """Bytes that sequences have, and blocks that none has, by name: none while no state of a task exists."""
        size, left = self._kv.block_bytes, self.usage().used
        found = dict[str, int]()
        for sequence, (_, number) in self._ranks.items():
            found[f"sequence {number} of {sequence.length} tokens"] = sequence.blocks * size
            left -= sequence.blocks
        return found | ({f"{left} blocks of no sequence": left * size} if left else {})

    def end_all(self) -> None:
        """End every sequence, while no state of a task exists."""
        for sequence in [*self._ranks]:
            self.end(sequence)

    @contextmanager
    def beginning(self, priority: int) -> Iterator[KvSequence]:
        """Begin a sequence for a state that is made in the block. It ends if the block fails."""
        sequence = self.begin(priority)
        try:
            yield sequence
        except BaseException:
            self.end(sequence)
            raise

    def digests(self, prompt: Sequence[int], answer: Sequence[int], shown: Sequence[MediaItem]) -> tuple[str, ...]:
        """The digests by which prompts that go on behind an answer find its chunks and those of its prompt.

        `shown` is what the prompt shows.
        """
        places = places_of(self._vision, prompt, shown) if self._vision and shown else ()
        return beginnings([*prompt, *answer], places)

    def begin(self, priority: int) -> KvSequence:
        """A sequence, the youngest of its priority."""
        sequence = self._kv.sequence()
        self._begun += 1
        self._ranks[sequence] = -priority, self._begun
        return sequence

    def take(self, sequence: KvSequence, prefix: Sequence[Tensors], most: int) -> int:
        """Put others' prefix blocks in place while there is room. Returns the tokens there are, up to `most`."""
        layout = self.layout(CHUNK)
        for block in prefix:
            both, start = block.get("kv"), sequence.length
            shape = layout.layers, 2, layout.heads, CHUNK, layout.width
            if both is None or both.shape != shape or start + CHUNK > most:
                break
            try:
                sequence.grow(CHUNK)
            except NoKvBlocks:
                break
            for layer, (keys, values) in enumerate(both):
                sequence.write(layer, keys[self.heads], values[self.heads], start)
        return sequence.length

    def put(self, sequence: KvSequence, given: KvBlocks) -> int:
        """Put what another worker has made in its place, where there is room now. Returns how many tokens there are."""
        with suppress(NoKvBlocks):
            sequence.grow(given.tokens)
            self._put(sequence, given)
        return sequence.length

    def step_back(self, sequence: KvSequence) -> None:
        """Let every other sequence come before it, and take its room where they need that."""
        self._begun += 1
        self._ranks[sequence] = LAST, self._begun

    def end(self, sequence: KvSequence) -> None:
        """It is of no use any more."""
        sequence.free()
        self._ranks.pop(sequence, None)
        self._wanted.pop(sequence, None)

    def forward(self, states: Sequence[SequenceState], *, exact: bool = False) -> list[Tensor | None]:
        """Add the next chunk of each to the KV. Returns the logits behind those whose tokens are all there then."""
        parts, handed = dict[KvSequence, tuple[list[int], VisionInputs | None]](), list[KvWriter]()
        for state in sorted(states, key=lambda state: self._ranks[state.kv]):
            if chunk := self._next(state, exact):
                parts[state.kv] = chunk, state.sight
                handed += [state.handed] if state.handed else []

        def hand_on(layer: int) -> None:
            for writer in handed:
                writer.layer(layer)

        run = [(kv, *part) for kv, part in parts.items()]
        try:
            made = self._model.forward(run, exact, hand_on if handed else None)
        except BaseException:
            for kv, chunk, _ in run:  # or it would count as computed, where it was before the sequence gave it up
                kv.truncate(kv.length - len(chunk))
            raise
        for state in states:
            if state.handed:
                state.handed.stepped()
        logits = dict(zip(parts, made, strict=True))
        return [logits.get(state.kv) if state.kv.length == len(state.ids) else None for state in states]

    def _next(self, state: SequenceState, exact: bool) -> list[int]:
        """The tokens that a sequence adds now, for which it has taken room; none if it has to wait, or to yield."""
        state.kv.truncate(min(state.done, state.kv.length))  # of a step that was made before, to compare
        self._wanted[state.kv] = self._kv.blocks(state.most if exact else len(state.ids))
        if state.yields and state.kv.length < state.done:
            return []
        if not (state.kv.length or state.yields or self._begins(state)):
            return []
        chunk = state.chunk(exact=exact)
        return chunk if chunk and self._make_room(state.kv, len(chunk)) else []

    def _begins(self, state: SequenceState) -> bool:
        """Whether a sequence that has nothing takes room: if there is enough for all tokens that it has by now.

        Else it would soon give up again what it had computed again. Where that is one token a forward, there has to be
        enough for all that it may have, beside what those before it may.
        """
        before = [other for other, rank in self._ranks.items() if other.length and rank < self._ranks[state.kv]]
        held = sum(max(other.blocks, self._wanted.get(other, 0)) for other in before)
        if self._wanted[state.kv] + held > self.usage().blocks:
            return False
        if given := state.elsewhere:
            self._make_room(state.kv, given.tokens)
            self._put(state.kv, given)
        return True

    def _put(self, sequence: KvSequence, given: KvBlocks) -> None:
        for start, layer, unit in self.layout(given.tokens).read(given.tensors):
            own = unit[self.heads]
            sequence.write(layer, own[:, 0], own[:, 1], start)

    def _make_room(self, sequence: KvSequence, tokens: int) -> bool:
        """Grow a sequence, if need be in place of those behind it. False if it has to wait for those before it."""
        while True:
            try:
                sequence.grow(tokens)
                return True
            except NoKvBlocks:
                last = max((one for one in self._ranks if one.length), key=self._ranks.__getitem__, default=sequence)
                if self._ranks[last] <= self._ranks[sequence]:
                    return False
                last.free()
                self.retracted += self._ranks[last][0] != LAST


class PromptStage(SteppedStage[State]):
    """A stage of sequences that begin with a prompt, all of which may share a forward."""

    uploads = (PROMPT,)

    def __init__(self, sequences: SequencePool) -> None:
        self.texts = self._sequences = sequences

    @override
    def verify(self, task: StageInput) -> None:
        """Raise PermanentError for a prompt of another length than was said."""
        if len(unpacked(task.uploads[PROMPT])) != task.derived.prompt_tokens:
            raise PermanentError("the prompt is not as long as it was said to be")

    @override
    def batch_key(self, task: StageInput) -> Hashable:
        return ()


def open_model(
    model: Any, device: str, tokens: int, vision: VisionConfig | None = None, deep: int = 0, axis: Axis | None = None
) -> SequencePool:
    """A model of transformers, with a KV for so many tokens. Raises ConfigError for one that is not served.

    One with `vision` reads what was encoded of pictures, with so many layers that add to deeper ones. Of one that is
    spread over the ranks of an `axis`, this one has a share of the heads.
    """
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = config.num_hidden_layers, config.num_key_value_heads // (axis.size if axis else 1), width
    kv = PagedKvCache(*shape, tokens, dtype=model.dtype, device=device)
    return SequencePool(LanguageModel(model, kv), kv, vision, deep, axis)
