"""Keys and values of answers, kept for the next turn of a chat: the bits of prefill, and the tokens of `generate`."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.models.test_language import Model, computed, prefilled, task
from tests.worker.test_step_loop import Bench
from tools.tiny_language import KINDS, make_language_model
from unfuse.core.codec import decode as read
from unfuse.core.messages import CachePrefix, StepProgress, TaskCompleted, TaskStopped
from unfuse.core.plan import prefix_key
from unfuse.core.task import Lease, OutputDeltas
from unfuse.core.text import (
    PREFILL_CHUNK_TOKENS,
    AnswerParsing,
    ReasoningFormat,
    TokenDelta,
    prefix_digests,
    unpack_ids,
)
from unfuse.stages.base import StageInput, Tensors, next_states
from unfuse.stages.language import Decode, DecodeState, Prefill
from unfuse.worker.batch_invariance import InvarianceResults
from unfuse.worker.compute_messages import CancelTask
from unfuse.worker.step_loop import StepLoop

NO_END = {"0": -100, "1": -100, "2": -100}
"""Biases against the special tokens, so that answers are as long as they may be."""

Portions = dict[str, Tensors]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    torch.set_num_threads(1)
    yield Model(make_language_model(tmp_path_factory.mktemp("language") / "tiny", KINDS[0], positions=2048))


def some_ids(number: int, seed: int) -> list[int]:
    """Ids of a text without special tokens."""
    chance = random.Random(seed)
    return [chance.randrange(3, 200) for _ in range(number)]


def asked(model: Model, ids: list[int], most: int, **more: Any) -> StageInput:
    """A task whose answer is to be found by others, of so many of the likeliest tokens."""
    given = task(model.card, ids, max_tokens=most, logit_bias=NO_END, **more)
    return msgspec.structs.replace(given, extends=True)


def likeliest(model: Model, ids: list[int], most: int) -> list[int]:
    """The same answer, by transformers alone."""
    banned = {"suppress_tokens": [int(id) for id in NO_END]}
    made = model.reference.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=most, **banned)
    return list(made[0, len(ids) :].tolist())


def prefilling(prefill: Prefill, given: StageInput, found: Portions) -> tuple[Mapping[str, Any], int]:
    """The keys and values of a prompt, and how many chunks of it were found; what it completes is added to them."""
    digests = prefix_digests(unpack_ids(given.uploads["prompt"]))
    known = [found[digest] for digest in digests if digest in found]
    state = prefill.start(msgspec.structs.replace(given, prefix=tuple(known)))
    started, _ = prefill.progress(state)
    while len({*prefill.progress(state)}) > 1:
        (stepped,) = next_states(prefill, [state])
        assert not isinstance(stepped, Exception)
        state = stepped
        found |= {digests[block.number]: block.copy() for block in prefill.prefix_blocks(state)}
    made = {name: tensor.clone() for name, tensor in prefill.finish(state).tensors.items() if tensor is not None}
    prefill.release(state)
    return made, started


def stepped(decode: Decode, states: Sequence[DecodeState], found: Portions) -> list[DecodeState]:
    """All of these, a step further; what is kept of them is added to what is found."""
    made = list[DecodeState]()
    for state in next_states(decode, states):
        assert isinstance(state, DecodeState)
        decode.new_chunks(state)
        found |= {block.digest: block.copy() for block in decode.prefix_blocks(state)}
        made.append(state)
    return made


def over(decode: Decode, state: DecodeState) -> bool:
    step, steps = decode.progress(state)
    return step == steps


def answering(decode: Decode, given: StageInput, kv: Mapping[str, Any], found: Portions) -> list[int]:
    """An answer, of which whole chunks are added to what is found."""
    state = decode.start(msgspec.structs.replace(given, tensors=kv))
    while not over(decode, state):
        (state,) = stepped(decode, [state], found)
    decode.release(state)
    return state.answer


@pytest.mark.parametrize("batching", ["batched", "exact"])
@pytest.mark.parametrize(
    ("prompt", "answer", "chunks"),
    [
        (40, 240, 1),
        (256, 1, 1),
        (100, 156, 0),
        *(pytest.param(*more, marks=pytest.mark.nightly) for more in [(256, 2, 1), (257, 256, 1), (20, 500, 2)]),
    ],
)
def test_next_turn_reuses_kv_of_completion_with_identical_bits(
    model: Model, batching: str, prompt: int, answer: int, chunks: int
) -> None:
    """Given a turn of a chat, when the next one begins with its prompt and its answer, then it finds all whole chunks
    of both, has keys and values with the bits that it has without, and the tokens that `generate` makes."""
    prefill, decode = model.stages(4096, batching)
    ids, found = some_ids(prompt, prompt + answer), Portions()
    first = asked(model, ids, answer)
    kv, started = prefilling(prefill, first, found)
    said = answering(decode, first, kv, found)
    assert (len(said), started) == (answer, 0)
    assert said[-12:] == likeliest(model, [*ids, *said[:-12]], min(12, answer))

    following = [*ids, *said, *some_ids(60, 7)]
    assert {*prefix_digests(following)} & found.keys() == {*prefix_digests([*ids, *said])}
    assert len(found) == len(prefix_digests(ids)) + chunks == (prompt + answer - 1) // PREFILL_CHUNK_TOKENS
    second = asked(model, following, 12)
    again, started = prefilling(prefill, second, dict(found))
    alone = prefilled(prefill, second)
    assert started == len(found)
    assert all(torch.equal(again[name], alone[name]) for name in alone)
    assert answering(decode, second, again, {}) == likeliest(model, following, 12)
    assert decode._sequences.usage().used == 0


@pytest.mark.parametrize("batching", ["batched", "exact"])
def test_each_chat_turn_reuses_prefix_blocks_of_all_previous_turns(model: Model, batching: str) -> None:
    """Given a chat of four turns, when each is answered, then it finds every whole chunk of those before, and all bits
    are those of the same chat without a cache."""
    prefill, decode = model.stages(4096, batching)
    ids, found = some_ids(30, 1), Portions()
    for turn in range(4):
        given = asked(model, ids, 150)
        kv, started = prefilling(prefill, given, found)
        assert started == ((len(ids) - 41) // PREFILL_CHUNK_TOKENS if turn else 0)
        alone = prefilled(prefill, given)
        assert all(torch.equal(kv[name], alone[name]) for name in alone)
        ids = [*ids, *answering(decode, given, kv, found), *some_ids(40, turn + 2)]
    assert len(ids) > 2 * PREFILL_CHUNK_TOKENS


def test_kv_of_single_token_decode_differs_from_chunked_prefill(model: Model) -> None:
    """Which is why answers are computed again: else these tests could not fail."""
    prefill, decode = model.stages(4096, "exact")
    ids = some_ids(40, 3)
    given = msgspec.structs.replace(asked(model, ids, 300), extends=False)
    state = decode.start(given)
    while not over(decode, state):
        (state,) = stepped(decode, [state], {})
    own = torch.stack([torch.stack(state.kv.read(layer, 0, PREFILL_CHUNK_TOKENS)) for layer in range(2)])
    found = Portions()
    prefilling(prefill, asked(model, state.ids, 1), found)
    assert not torch.equal(own, found[prefix_digests(state.ids)[0]]["kv"])


def test_batched_sequences_each_store_their_prefix_blocks(model: Model) -> None:
    """Given four texts in shared forwards, which end one after the other, then each has its tokens, and what is found
    of each is what prefill makes of it, but for rounding."""
    prefill, decode = model.stages(8192)
    prompts = [some_ids(200 + number, number) for number in range(4)]
    given = [asked(model, ids, 70 + 9 * number) for number, ids in enumerate(prompts)]
    found = Portions()
    states = [decode.start(one) for one in given]
    while going := [state for state in states if not over(decode, state)]:
        after = dict(zip(map(id, going), stepped(decode, going, found), strict=True))
        states = [after.get(id(state), state) for state in states]
    assert [state.answer for state in states] == [
        likeliest(model, ids, 70 + 9 * number) for number, ids in enumerate(prompts)
    ]
    for state in states:
        expected = Portions()
        prefilling(prefill, asked(model, [*state.ids, 5], 1), expected)
        for digest in prefix_digests(state.ids):
            torch.testing.assert_close(found[digest]["kv"], expected[digest]["kv"], atol=1e-4, rtol=1e-4)


def test_prefix_block_recompute_does_not_retract_other_sequences(model: Model, tmp_path: Path) -> None:
    """Given a text that is over and recomputes a chunk, when another one takes the room that this needs, then that goes
    on at once, nothing is retracted, and the first one ends with its answer, and without its chunk."""
    folder = shutil.copytree(model.folder, tmp_path / "short")
    (folder / "serving.json").write_text(json.dumps({"limits": {"max_tokens": 600}}))
    _, decode = Model(folder).stages(640)
    ids, found = some_ids(200, 4), Portions()
    state = decode.start(asked(model, ids, 330))
    while not state.is_over:
        (state,) = stepped(decode, [state], found)
    assert not over(decode, state) and not found

    other = decode.start(task(model.card, some_ids(590, 5), max_tokens=4, logit_bias=NO_END))
    for _ in range(3):
        state, other = stepped(decode, [state, other], found)
    assert other.kv.length > 2 * PREFILL_CHUNK_TOKENS
    assert over(decode, state)
    assert state.answer == likeliest(model, ids, 330)
    assert decode._sequences.retracted == 0
    assert len(found) <= 1
    decode.release(state)
    while not over(decode, other):
        (other,) = stepped(decode, [other], found)
    assert other.answer == likeliest(model, some_ids(590, 5), 4)


@pytest.mark.parametrize(
    "reasons", [{}, {"starts_in_reasoning": True}, {"has_reasoning": True}], ids=["alone", "opened", "over"]
)
def test_unreusable_completion_is_not_recomputed(
    model: Model, monkeypatch: pytest.MonkeyPatch, reasons: dict[str, bool]
) -> None:
    """Given an answer that shares nothing, or with reasoning, which no later turn has, then nothing of it is kept."""
    _, decode = model.stages()
    given = asked(model, some_ids(250, 6), 20)
    reading = AnswerParsing(reasoning=ReasoningFormat("some"), **reasons) if reasons else None
    derived = msgspec.structs.replace(given.derived, parsing=reading)
    given = msgspec.structs.replace(given, derived=derived, extends=bool(reasons))
    seen, found = computed(decode, monkeypatch), Portions()
    assert len(answering(decode, given, {}, found)) == 20
    assert not found
    assert seen == [(0, 250), *((place, place + 1) for place in range(250, 269))]


def test_prefix_blocks_of_completion_are_limited(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.stages.language.MAX_PREFIX_BLOCKS", 2)
    _, decode = model.stages(4096)
    ids, found = some_ids(500, 8), Portions()
    said = answering(decode, asked(model, ids, 300), {}, found)
    assert [*found] == [prefix_digests([*ids, *said])[1]]


def looped(model: Model, folder: Path, overlapped: bool, given: Sequence[StageInput]) -> tuple[Bench, list[Lease]]:
    """An exact loop that has been given these tasks; what `extends` is in one space."""
    _, decode = model.stages(4096, "exact")
    bench = Bench(folder, {"talk": decode}, 4, overlapped)
    own = bench.store, bench.results, bench.inbox, bench.sent.append
    bench.loop = StepLoop({"talk": decode}, *own, 4, exactness=InvarianceResults(None), overlapped=overlapped)
    leases = []
    for one in given:
        leases.append(bench.run("talk", extends="space" if one.extends else "", derived=one.derived, **one.params))
        bench.results.attach(leases[-1].task.request, "prompt", one.uploads["prompt"])
    return bench, leases


@pytest.mark.parametrize("overlapped", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_both_step_loops_store_prefix_blocks_identical_to_prefill(
    model: Model, tmp_path: Path, overlapped: bool
) -> None:
    """Given a text that others go on from, one that ends by a stop string, and one that is for itself, when a loop
    makes all three, then the first has left its chunks, bit for bit, and its progress never went back."""
    prefill, _ = model.stages(4096, "exact")
    ids = some_ids(250, 11)
    said = likeliest(model, ids, 270)
    texts = [model.tokenizer.decode([id]) for id in said[100:]]
    stop = next(text for text in texts if text.isascii() and text.strip())
    first, stopped = asked(model, ids, 270), asked(model, ids, 270, stop=[stop])
    bench, leases = looped(model, tmp_path, overlapped, [first, stopped, msgspec.structs.replace(first, extends=False)])
    assert all(isinstance(bench.outcome(lease), TaskCompleted) for lease in leases)

    kept = [message for message in bench.sent if isinstance(message, CachePrefix)]
    digests, expected = prefix_digests([*ids, *said]), Portions()
    prefilling(prefill, asked(model, [*ids, *said], 1), expected)
    assert [message.claim for message in kept] == [leases[0].claim] * 2
    assert [message.digest for message in kept] == [*digests]
    assert [message.key for message in kept] == [prefix_key("space", digest) for digest in digests]
    for message in kept:
        assert torch.equal(bench.store.get(message.output, as_torch=True)["kv"], expected[message.digest]["kv"])

    own = [message for message in bench.sent if getattr(message, "claim", None) == leases[0].claim]
    pieces = [
        read(piece, TokenDelta).id for message in own if isinstance(message, OutputDeltas) for piece in message.deltas
    ]
    steps = [message.step for message in own if isinstance(message, StepProgress)]
    assert (pieces, isinstance(own[-1], TaskCompleted)) == (said, True)
    assert (steps, steps[-1]) == (sorted(steps), 270)
    assert bench.loop._factory._stages["talk"]._sequences.usage().used == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlapped", [False, True], ids=["normal", "overlapped"])
def test_cancelled_sequence_stores_only_whole_prefix_blocks(model: Model, tmp_path: Path, overlapped: bool) -> None:
    """Given a text that is over and has recomputed the first of two chunks, when it is cancelled, then it has left that
    one alone."""
    bench, (lease,) = looped(model, tmp_path, overlapped, [asked(model, some_ids(250, 11), 270)])
    bench.turn()
    job = bench.loop._jobs[lease.claim]
    while not job.state.is_over:
        bench.turn()
    assert not any(isinstance(message, CachePrefix) for message in bench.sent)
    bench.turn()
    bench.inbox.put(CancelTask(lease.claim))
    assert isinstance(bench.outcome(lease), TaskStopped)
    assert sum(isinstance(message, CachePrefix) for message in bench.sent) == 1
    assert job.stage._sequences.usage().used == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("left", [0, 1])
def test_resumed_attempt_generates_no_tokens_beyond_the_limit(model: Model, left: int) -> None:
    """Given an attempt that died behind its last token, or one before it, when the next one goes on, then the answer
    has as many tokens as it may have."""
    _, decode = model.stages()
    given = msgspec.structs.replace(asked(model, some_ids(250, 9), 12), extends=False)
    state, recorded = decode.start(given), list[bytes]()
    while not over(decode, state):
        (after,) = next_states(decode, [state])
        assert isinstance(after, DecodeState)
        state = after
        recorded += decode.new_chunks(state)
    expected = decode.finish(state)
    decode.release(state)
    again = msgspec.structs.replace(given, recorded=tuple(recorded[: len(recorded) - left]), extends=True)
    state = decode.start(again)
    for _ in range(1 + left):
        (after,) = next_states(decode, [state])
        assert isinstance(after, DecodeState)
        state = after
        decode.new_chunks(state)
    assert (len(state.answer), decode.finish(state)) == (12, expected)
    assert over(decode, state) == (left == 0)
