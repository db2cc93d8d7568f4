"""Texts that follow a grammar, in the decode stage: whatever is late, full or begun anew, they are the same ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from msgspec.structs import replace

from tests.models.test_language import Model, prefilled, task, to_the_end
from tools.tiny_language import make_language_model
from unfuse.core.codec import encode
from unfuse.core.derived_facts import GRAMMAR
from unfuse.core.errors import PermanentError
from unfuse.core.text_parameters import schema_text
from unfuse.language.grammars import Grammar, InvalidGrammar, pack_grammar
from unfuse.stages.base import StageInput, next_states
from unfuse.stages.language import Decode, DecodeState

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON = pack_grammar(Grammar("json_schema", schema_text(SCHEMA, True, "x")), "x")
MOST = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    torch.set_num_threads(1)
    yield Model(make_language_model(tmp_path_factory.mktemp("language"), positions=2048))


class Even:
    """A grammar by which every id but those that end a text is even; its answers come when `late` says so."""

    def __init__(self, size: int, late: Sequence[bool] = ()) -> None:
        self.size, self.mask, self.opened = size, bytes([0b01010101]) * (size // 8), list[Even]()
        self.late, self.compiling, self.overdue, self.closed = [*late], False, False, 0
        self.asked = list[int]()

    def open(self, grammar: bytes) -> Even:
        self.opened.append(Even(self.size, self.late))
        return self.opened[-1]

    def query(self, ids: Sequence[int]) -> None:
        self.asked.append(len(ids))

    def waits(self, wait_s: float = 0.0) -> bool:
        self.overdue = self.overdue and bool(self.late) and self.late.pop()
        return self.overdue

    def allowed(self, ids: Sequence[int]) -> bytes | None:
        assert self.asked[-1] == len(ids), "it was not asked before the forward"
        self.overdue = bool(self.late) and self.late.pop()
        return None if self.overdue else self.mask

    def close(self) -> None:
        self.closed += 1


def held(model: Model, words: int, **asked: Any) -> StageInput:
    given = task(model.card, model.ids(words), max_tokens=MOST, **{"temperature": 1, **asked})
    derived = replace(given.derived, grammar="0")
    return replace(given, derived=derived, uploads={**given.uploads, GRAMMAR: JSON})


def with_grammars(model: Model, grammars: Any, tokens: int = 4096, batching: str = "batched") -> Decode:
    _, decode = model.stages(tokens, batching)
    decode._grammars = grammars
    return decode


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    late=st.lists(st.booleans(), max_size=80),
    words=st.sampled_from([3, 300]),
    batching=st.sampled_from(["batched", "exact"]),
)
def test_late_grammar_masks_do_not_change_the_generated_tokens(
    model: Model, late: list[bool], words: int, batching: str
) -> None:
    """Beside one without a grammar, which waits for nothing."""
    size = model.tokenizer.size
    expected = to_the_end(
        decode := with_grammars(model, Even(size), batching=batching), [decode.start(held(model, words))]
    )[0]
    grammars = Even(size, late)
    decode = with_grammars(model, grammars, batching=batching)
    free = task(model.card, model.ids(5), max_tokens=8)
    (alone,) = to_the_end(decode, [decode.start(free)])
    state, other = decode.start(held(model, words)), decode.start(free)
    (made,) = to_the_end(decode, [state])
    assert made == expected and all(id % 2 == 0 for id in made)
    assert [one.closed for one in grammars.opened] == [1]
    assert to_the_end(decode, [other])[0] == alone


def test_late_grammar_mask_does_not_block_other_sequences(model: Model) -> None:
    """Given one whose answer never comes, when both step, then the other goes on, and this one asks once."""
    grammars = Even(model.tokenizer.size, [True] * 1000)
    decode = with_grammars(model, grammars)
    late, free = decode.start(held(model, 3)), decode.start(task(model.card, model.ids(5), max_tokens=8))
    for _ in range(8):
        late, free = (state for state in next_states(decode, [late, free]) if isinstance(state, DecodeState))
    assert decode.progress(free) == (8, 8) and decode.progress(late) == (0, MOST)
    assert decode.waits(late) and not decode.waits(free)
    assert grammars.opened[0].asked == [0]


def test_grammar_sequences_get_the_same_tokens_with_a_full_kv_cache(model: Model) -> None:
    grammars = Even(model.tokenizer.size, [False, True, False] * 400)
    tasks = [held(model, 600, seed=seed) for seed in range(4)]
    roomy = with_grammars(model, Even(model.tokenizer.size), 16_000, "exact")
    expected = [to_the_end(roomy, [roomy.start(one)])[0] for one in tasks]
    decode = with_grammars(model, grammars, 2080, "exact")
    assert sum(len(model.ids(600)) for _ in tasks) > 2080
    assert to_the_end(decode, [decode.start(one) for one in tasks]) == expected


@pytest.mark.parametrize("batching", ["batched", "exact"])
def test_new_attempt_resumes_grammar_output_from_recorded_deltas(model: Model, batching: str) -> None:
    """Given a text of an earlier attempt, as far as it was recorded, then the next one ends it as that would have."""
    _, decode = model.stages(batching=batching)
    asked = held(model, 9, seed=5)
    state, pieces = decode.start(asked), list[bytes]()
    while decode.progress(state)[0] < decode.progress(state)[1]:
        (state,) = (one for one in next_states(decode, [state]) if isinstance(one, DecodeState))
        pieces += decode.new_chunks(state)
    whole = state.ids[state.prompt :]
    assert jsonable(model, whole)
    for length in (1, len(whole) // 2, len(whole) - 1):
        again = decode.start(replace(asked, recorded=tuple(pieces[:length])))
        assert to_the_end(decode, [again])[0] == whole


def jsonable(model: Model, ids: list[int]) -> bool:
    return 0 <= json.loads(model.tokenizer.decode(ids))["a"] <= 99


def test_invalid_grammar_fails_only_its_own_sequence(model: Model) -> None:
    """Also one that is found out late; its mates get what they would get."""
    _, decode = model.stages()
    bad = replace(held(model, 3), uploads={**held(model, 3).uploads, GRAMMAR: encode(Grammar("regex", "((("))})
    states: list[DecodeState] = [decode.start(bad), decode.start(held(model, 4))]
    ended: Exception | None = None
    while ended is None:
        first, second = next_states(decode, states)
        assert isinstance(second, DecodeState)
        states[1] = second
        if isinstance(first, Exception):
            ended = first
        else:
            states[0] = first
    assert isinstance(ended, InvalidGrammar) and isinstance(ended, PermanentError)
    decode.release(states[0])
    (made,) = to_the_end(decode, [states[1]])
    assert jsonable(model, made)
    assert not decode._sequences.constraints


def test_sequences_waiting_for_their_grammar_are_counted(model: Model) -> None:
    _, decode = model.stages()
    states = [decode.start(held(model, 3)), decode.start(held(model, 4)), decode.start(task(model.card, model.ids(5)))]
    assert decode._sequences.load().grammars == 2  # the program has only begun
    assert all(jsonable(model, made) for made in to_the_end(decode, states[:2]))
    assert decode._sequences.load().grammars == 0
    decode.release(states[2])


@pytest.mark.parametrize("fails", ["write_prefix_blocks", "write_received_kv", "open"])
def test_failed_start_frees_kv_blocks_prompts_and_grammars(
    model: Model, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Given a prompt for whose prefix memory runs out, a text for whose keys and values it does, and one whose grammar
    cannot be opened, then no block, no prompt and no grammar is left."""

    def fail(*of: Any) -> None:
        if fails != "open":
            of[0].extend(32)
        raise RuntimeError("out of memory")

    prefill, decode = model.stages()
    given = held(model, 3)
    given = replace(given, tensors=prefilled(prefill, task(model.card, model.ids(3))))
    texts = decode._sequences
    if fails == "open":
        decode._grammars = Even(model.tokenizer.size)
        monkeypatch.setattr(decode._grammars, "open", fail)
    else:
        monkeypatch.setattr(texts, fails, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        (prefill if fails == "write_prefix_blocks" else decode).start(given)
    load = texts.load()
    assert (load.used, load.prompts, load.grammars, texts.leftovers()) == (0, 0, 0, {})
    assert not texts.constraints
