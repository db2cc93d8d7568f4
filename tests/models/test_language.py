"""Prefill and decode of language models: tokens are those of transformers' own `generate`, whatever happens."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from tests.stages.test_handed_kv import Output
from tools.tiny_language import KINDS, TEXT as SAID, make_language_model
from unfuse.arena.arena import Arena
from unfuse.core.checking import check_request
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import ConfigError, PermanentError
from unfuse.core.modalities import TEXT
from unfuse.core.model_spec import ModelSpec
from unfuse.core.object_ref import ObjectRef
from unfuse.core.text import TextStats, pack_ids
from unfuse.core.text_parameters import PromptTokens
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.models import find, read_model_spec
from unfuse.models.base import RuntimeOptions
from unfuse.models.language import bytes_per_token
from unfuse.stages.base import StageInput, next_states
from unfuse.stages.language import PREFILL_CHUNK_TOKENS, Decode, DecodeState, Prefill, PrefillState
from unfuse.stores.base import checksums_of
from unfuse.testing.fake_transfer import FakeEngine
from unfuse.transfer.base import TransferOptions
from unfuse.transfer.session import RingBuffer, Transfers
from unfuse.weights.folder import SINGLE_COMPONENT
from unfuse.weights.gguf_model import open_files

MOST = 12
TOKEN_BYTES = 512
"""Of the keys and values of a tiny model."""


class Model:
    """A tiny one, and what transformers makes of it."""

    def __init__(self, folder: Path, reference: Any = None) -> None:
        self.folder, self.card, self.tokenizer = folder, read_model_spec("m", folder), ChatTokenizer.read(folder)
        self.reference = reference or transformers.AutoModelForCausalLM.from_pretrained(folder)

    def stages(self, tokens: int = 4096, batching: Any = "batched") -> tuple[Prefill, Decode]:
        """Both, with room for so many tokens."""
        config, shared = self.reference.config.to_dict(), dict[Any, Any]()
        options = ComputeOptions(batching=batching)
        run = RuntimeOptions(
            "cpu", self.card.dtypes, options, kv=tokens * bytes_per_token(config, 4), shared_objects=shared
        )
        prefill, decode = (find(self.folder).load(spec, self.folder, run) for spec in self.card.pipeline.stages)
        assert isinstance(prefill, Prefill) and isinstance(decode, Decode)
        return prefill, decode

    def ids(self, words: int) -> list[int]:
        """A prompt of so many words."""
        said = SAID.split()
        text = " ".join(random.Random(words).choice(said) for _ in range(words))
        return self.tokenizer.prompt([{"role": "user", "content": text}])

    def generated(self, ids: list[int], most: int = MOST) -> list[int]:
        """The likeliest answer."""
        made = self.reference.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=most)
        return list(made[0, len(ids) :].tolist())


def task(card: ModelSpec, ids: list[int], tensors: Mapping[str, Any] | None = None, **asked: Any) -> StageInput:
    given = {"messages": [], "temperature": 0, "max_tokens": MOST, "seed": 1, **asked}
    params, _ = check_request(card, given, TEXT, tokens=PromptTokens(len(ids)))
    return StageInput(params, tensors or {}, {"prompt": pack_ids(ids)}, derived=DerivedFacts(prompt_tokens=len(ids)))


def prefilled(prefill: Prefill, given: StageInput) -> Mapping[str, Any]:
    (output,) = prefill.run([given])
    return {name: tensor.clone() for name, tensor in output.tensors.items() if tensor is not None}


def to_the_end(decode: Decode, states: list[DecodeState]) -> list[list[int]]:
    """Step all that have not ended, together, until none is left."""
    going = dict(enumerate(states))
    made = dict[int, list[int]]()
    while going:
        stepped = next_states(decode, [*going.values()])
        for number, state in zip([*going], stepped, strict=True):
            assert not isinstance(state, Exception)
            going[number] = state
            done, steps = decode.progress(state)
            if done == steps:
                made[number] = state.ids[state.prompt :]
                decode.release(going.pop(number))
    return [made[number] for number in range(len(states))]


def answered(model: Model, prompts: list[list[int]], together: bool, most: int = MOST) -> list[list[int]]:
    """Answers to prompts that are prefilled one by one, and decoded together or each in forwards of its own."""
    prefill, decode = model.stages(16_384, "batched" if together else "exact")
    given = [task(model.card, ids, max_tokens=most) for ids in prompts]
    kept = [prefilled(prefill, one) for one in given]
    states = [decode.start(StageInput(one.params, kv, one.uploads)) for one, kv in zip(given, kept, strict=True)]
    return to_the_end(decode, states) if together else [to_the_end(decode, [state])[0] for state in states]


@pytest.fixture(scope="module", params=[*KINDS[:3], pytest.param(KINDS[3], marks=pytest.mark.nightly)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    torch.set_num_threads(1)
    yield Model(make_language_model(tmp_path_factory.mktemp("language"), request.param, positions=2048))


@pytest.mark.parametrize(("kind", "routes"), [(KINDS[2], False), (KINDS[3], True)])
def test_weight_files_are_mmapped_unless_experts_are_merged(tmp_path: Path, kind: str, routes: bool) -> None:
    """The files of a mixture have each expert by itself, and the model has those of a layer in one tensor."""
    files = open_files(make_language_model(tmp_path, kind))
    assert any(".experts.3." in name for name in files.tensors(SINGLE_COMPONENT)) == routes
    assert files.stores_dtype(SINGLE_COMPONENT, "float32") != routes


@pytest.mark.parametrize("together", [False, True], ids=["one a forward", "batched"])
def test_ragged_prompts_get_the_same_tokens_as_transformers_generate(model: Model, together: bool) -> None:
    """Given prompts of one word to some hundred, the longest of several chunks, when they are prefilled and decoded,
    each alone or all together, then they get the tokens of the undivided model."""
    prompts = [model.ids(words) for words in (1, 2, 3, 5, 8, 13, 21, 34, 55, 144, 300, 700, *range(4, 12))]
    assert max(map(len, prompts)) > 2 * PREFILL_CHUNK_TOKENS
    assert answered(model, prompts, together) == [model.generated(ids) for ids in prompts]


def test_retracted_sequences_get_all_tokens_when_the_kv_cache_is_full(model: Model, tmp_path: Path) -> None:
    """Given room for the longest of six requests, and little more, when all are decoded at one time, then some give up
    what they have, and each gets the tokens that it gets alone. Less room than one may need is refused."""
    prompts = [model.ids(words) for words in (60, 10, 40, 20, 30, 50)]
    most = max(map(len, prompts)) + MOST
    folder = shutil.copytree(model.folder, tmp_path / "short")
    (folder / "serving.json").write_text(json.dumps({"limits": {"max_tokens": most}}))
    with pytest.raises(ConfigError, match="increase --kv"):
        Model(folder).stages(most)
    _, decode = Model(folder).stages(most + 16)
    states = [decode.start(task(model.card, ids)) for ids in prompts]
    assert to_the_end(decode, states) == [model.generated(ids) for ids in prompts]
    assert decode._sequences.retracted
    assert decode._sequences.usage().used == 0


def test_kv_capacity_of_ranks_is_that_of_the_smallest_rank(model: Model) -> None:
    """What was set is for all of them; each has half of the heads."""
    family, most = find(model.folder), int(model.card.limits["max_tokens"]) + 16
    for others, tokens in ((1 << 40, 4096), (TOKEN_BYTES // 2 * 3000, 3000)):
        group: Any = SimpleNamespace(size=2, exchange=lambda own, others=others: [own, str(others).encode()])
        mesh: Any = SimpleNamespace(degrees={"tensor": 2}, axis=lambda kind: SimpleNamespace(size=2))
        run = RuntimeOptions("cpu", model.card.dtypes, mesh=mesh, group=group, kv=4096 * TOKEN_BYTES)
        assert family.kv_capacity(model.folder, run) == tokens  # type: ignore[attr-defined]
    group.exchange = lambda own: [own, str((most - 1) * TOKEN_BYTES // 2).encode()]
    with pytest.raises(ConfigError, match="increase --kv"):
        family.kv_capacity(model.folder, run)  # type: ignore[attr-defined]


def test_nan_logits_fail_their_sequence_and_not_the_batch(model: Model) -> None:
    _, decode = model.stages()
    embeddings = decode._sequences._model._decoder.get_input_embeddings().weight.data
    lost, kept = [*model.ids(5), 7], model.ids(6)
    before = embeddings[7].clone()
    embeddings[7] = float("nan")
    assert 7 not in kept
    failed, going = next_states(decode, [decode.start(task(model.card, ids)) for ids in (lost, kept)])
    embeddings[7] = before
    assert isinstance(failed, PermanentError) and "weights may be damaged" in str(failed)
    assert isinstance(going, DecodeState) and going.ids[-1] == model.generated(kept, 1)[0]


def computed(stage: Prefill | Decode, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The first and the last token of each part that the stage computes from now on."""
    seen, forward = list[tuple[int, int]](), stage._sequences._model.forward

    def counted(parts: Sequence[Any], *how: Any) -> Any:
        seen.extend((kv.length - len(chunk), kv.length) for kv, chunk, _ in parts)
        return forward(parts, *how)

    monkeypatch.setattr(stage._sequences._model, "forward", counted)
    return seen


def test_retracted_sequence_reloads_its_kv_from_prefill_output(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given room for two of five texts, and what prefill made of each, when all are decoded at one time, then they get
    the tokens that they get alone, and of no prompt anything but the last token is computed."""
    prompts = [model.ids(words) for words in range(60, 65)]
    most = max(map(len, prompts)) + MOST
    folder = shutil.copytree(model.folder, tmp_path / "short")
    (folder / "serving.json").write_text(json.dumps({"limits": {"max_tokens": most}}))
    prefill, decode = Model(folder).stages(2 * most + 16)
    given = [task(model.card, ids) for ids in prompts]
    kept = [prefilled(prefill, one) for one in given]
    seen = computed(decode, monkeypatch)
    states = [decode.start(StageInput(one.params, kv, one.uploads)) for one, kv in zip(given, kept, strict=True)]
    assert to_the_end(decode, states) == [model.generated(ids) for ids in prompts]
    assert decode._sequences.retracted
    assert min(start for start, _ in seen) == min(map(len, prompts)) - 1


@pytest.mark.parametrize(("batching", "times"), [("batched", 3), ("exact", 1)])
def test_retractions_recompute_a_bounded_number_of_tokens(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batching: str, times: int
) -> None:
    """Given room for a text and a half, when four are written at one time, then each goes on when there is room for
    all of it, so that together they compute a few times as much as alone; one a forward, no more than alone."""
    most, answer = 300, 150
    folder = shutil.copytree(model.folder, tmp_path / "short")
    (folder / "serving.json").write_text(json.dumps({"limits": {"max_tokens": most}}))
    _, decode = Model(folder).stages(most + 16, batching)
    asked = {"max_tokens": answer, "logit_bias": {str(id): -100 for id in model.tokenizer.stops}}
    prompts = [model.ids(words) for words in (20, 21, 22, 23)]
    going = [decode.start(task(model.card, ids, **asked)) for ids in prompts]
    seen, ended = computed(decode, monkeypatch), 0
    while going:
        batches = [going] if batching == "batched" else [[state] for state in going]
        stepped = [state for batch in batches for state in next_states(decode, batch)]
        states = [state for state in stepped if isinstance(state, DecodeState)]
        going = [state for state in states if len(state.answer) < answer]
        for state in states:
            if state not in going:
                ended += 1
                decode.release(state)
    assert ended == len(prompts)
    assert sum(stop - start for start, stop in seen) <= times * sum(len(ids) + answer for ids in prompts)


@pytest.mark.parametrize("batching", ["batched", "exact"])
def test_retracted_prefill_reloads_the_chunks_it_already_wrote(
    model: Model, monkeypatch: pytest.MonkeyPatch, batching: str
) -> None:
    """Given a prompt of several chunks whose keys and values are read while it is computed, when it gives up its room
    amid that, then its first chunks are computed once, and the output is that of a calm run."""
    prefill, _ = model.stages(batching=batching)
    given = task(model.card, model.ids(700))
    calm = prefilled(prefill, given)
    seen = computed(prefill, monkeypatch)
    state = prefill.start(given)
    output = Output(prefill._sequences.layout(len(state.ids)), 1 << 30)
    prefill.write_to(state, output)
    while (steps := prefill.progress(state))[0] < steps[1]:
        (stepped,) = next_states(prefill, [state])
        assert isinstance(stepped, PrefillState)
        state = stepped
        if len(seen) == 2:
            state.kv.free()
    assert prefill.finish(state).tensors == {}
    assert [start for start, _ in seen] == [*range(0, len(state.ids), PREFILL_CHUNK_TOKENS)]
    assert all(torch.equal(output.tensors[name], calm[name]) for name in calm)


def test_failed_forward_is_recomputed_by_the_next_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a text that gave up its room amid its answer, when the forward that computes it again fails, then it is
    computed by the next one."""
    _, decode = model.stages()
    (state,) = next_states(decode, [decode.start(task(model.card, ids := model.ids(20)))])
    assert isinstance(state, DecodeState)
    forward = decode._sequences._model.forward
    state.kv.free()
    for values in decode._sequences._kv.values:
        values.fill_(torch.nan)
    monkeypatch.setattr(decode._sequences._model, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next_states(decode, [state])
    monkeypatch.setattr(decode._sequences._model, "forward", forward)
    assert to_the_end(decode, [state]) == [model.generated(ids)]


@pytest.mark.parametrize("batching", ["batched", "exact"])
def test_warm_up_computes_a_dummy_prompt_and_frees_its_kv(
    model: Model, monkeypatch: pytest.MonkeyPatch, batching: str
) -> None:
    stages = model.stages(batching=batching)
    seen = computed(stages[0], monkeypatch)
    for stage in stages:
        stage.warm_up()
    assert seen == [(0, 16), (15, 16)]
    assert stages[0].texts and stages[0].texts.load() == TextStats(0, 256)


def test_new_attempt_resumes_from_recorded_token_deltas(model: Model) -> None:
    """Given an attempt that ended after some tokens, when the next one begins with these and the same KV, or without
    it, then its tokens follow: those of an attempt that was not disturbed."""
    prefill, decode = model.stages()
    ids = model.ids(20)
    given = task(model.card, ids)
    kv, state, recorded = prefilled(prefill, given), decode.start(given), list[bytes]()
    for _ in range(5):
        (stepped,) = next_states(decode, [state])
        assert isinstance(stepped, DecodeState)
        state = stepped
        recorded += decode.new_chunks(state)
    decode.release(state)
    assert len(recorded) == 5
    for tensors in (kv, {}):
        again = decode.start(StageInput(given.params, tensors, given.uploads, recorded))
        assert decode.progress(again)[0] == 5
        assert to_the_end(decode, [again]) == [model.generated(ids)]


def test_higher_priority_sequence_retracts_lower_priority_ones(model: Model, tmp_path: Path) -> None:
    """Given a text that fills the KV, when an urgent one comes later, then that goes on at once, though it is younger,
    and the first one when it has ended; both get their tokens."""
    first, urgent = model.ids(60), model.ids(50)
    folder = shutil.copytree(model.folder, tmp_path / "short")
    (folder / "serving.json").write_text(json.dumps({"limits": {"max_tokens": len(first) + MOST}}))
    _, decode = Model(folder).stages(len(first) + MOST + 16)
    (slow,) = next_states(decode, [decode.start(task(model.card, first))])
    given = task(model.card, urgent)
    fast = decode.start(StageInput(given.params, {}, given.uploads, (), 5))
    assert isinstance(slow, DecodeState)
    assert to_the_end(decode, [fast]) == [model.generated(urgent)]
    assert slow.kv.length == 0
    assert to_the_end(decode, [slow]) == [model.generated(first)]
    younger = decode.start(StageInput(given.params, {}, given.uploads, (), -5))
    (held,) = next_states(decode, [decode.start(task(model.card, first))])
    (waits,) = next_states(decode, [younger])
    assert isinstance(waits, DecodeState) and isinstance(held, DecodeState)
    assert (waits.done, waits.sampled) == (0, None)
    assert held.kv.length


def pieces_of(decode: Decode, given: StageInput, *recorded: bytes) -> list[bytes]:
    """All pieces of a text, the first of them from the attempt before."""
    state, made = decode.start(msgspec.structs.replace(given, recorded=recorded)), [*recorded]
    while decode.progress(state)[0] < decode.progress(state)[1]:
        (stepped,) = next_states(decode, [state])
        assert isinstance(stepped, DecodeState)
        state = stepped
        made += decode.new_chunks(state)
    decode.release(state)
    return made


@pytest.mark.parametrize("words", [1, 20, 700])
def test_retry_in_an_exact_pool_has_bitwise_equal_deltas_and_logprobs(model: Model, words: int) -> None:
    """Given a text with the probabilities of its tokens, when an attempt that died is followed by another, with the KV
    of prefill or without, then each that follows is as probable as before, to the last bit."""
    prefill, decode = model.stages(batching="exact")
    given = task(model.card, model.ids(words), temperature=1, logprobs=True, top_logprobs=5, max_tokens=40)
    split = msgspec.structs.replace(given, tensors=prefilled(prefill, given))
    calm = pieces_of(decode, split)
    for again in (split, given):
        for died in (1, 25):
            assert pieces_of(decode, again, *calm[:died]) == calm


def test_kv_of_100000_tokens_is_received_through_a_small_ring_buffer(tmp_path: Path, arena: Arena) -> None:
    """Given keys and values of a long prompt in another arena, when a decoder takes them through a window, then it has
    every one of them, and draws the token that it draws from the whole."""
    tokens, options = 100_000, TransferOptions(insecure=True)
    model = Model(make_language_model(tmp_path / "long", positions=tokens + 16))
    _, decode = model.stages(2 * tokens + 64)
    owner, reader = FakeEngine(options), FakeEngine(options)
    transfers = Transfers({"fake": reader}, lambda _: {"fake": address}, options)
    address = owner.serve(arena)
    source = torch.Generator().manual_seed(1)
    outline = decode._sequences.layout(tokens - 1).outline()
    made = {name: torch.rand(shape, generator=source) for name, _, shape in outline}
    data = torch.cat([made[name].flatten() for name in made]).view(torch.uint8).numpy()
    extent = arena.create(data.nbytes, "req_a")
    arena.writable(extent)[:] = data
    arena.seal(extent.id)
    whole = ObjectRef(
        extent.id,
        "owner",
        "",
        "req_a",
        "prefill",
        1,
        extent.generation,
        data.nbytes,
        (),
        checksums_of(data),
        extent.key,
        0.0,
    )
    given = task(model.card, torch.randint(3, 200, (tokens,), generator=source).tolist(), max_tokens=1)
    window = RingBuffer(np.empty(8192 * TOKEN_BYTES, np.uint8), whole)
    session, received = transfers.fetch(whole, window), decode.receive(given.derived, 0, made)
    for piece in window:
        received.write(torch.from_numpy(piece))
    session.result(60)
    states = [
        decode.start(msgspec.structs.replace(given, tensors=tensors, received=came))
        for tensors, came in (({}, received), (made, None))
    ]
    assert [state.done for state in states] == [tokens - 1] * 2
    for layer in range(2):
        (keys, values), (others, more) = (state.kv.read(layer) for state in states)
        assert torch.equal(keys, others) and torch.equal(values, more)
    assert len({to_the_end(decode, [state])[0][0] for state in states}) == 1
    transfers.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(64 << 20)
    yield arena
    arena.close()
