"""Language models and those that see, on a pretended GPU, answer with the CPU's tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.seen import SIZES, draw
from tests.models.test_language import task
from tests.models.test_vision_language import Chat, messages
from tests.pretend import decode_calls
from tests.pretend.decode_calls import stage_of
from tests.pretend.gpus import PretendedGpus
from tests.pretend.running import GPU, LoadedModel, bytes_of, held_by, load, on_host
from tools import tiny_language, tiny_vision
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.stages.base import StageInput, next_states

pytestmark = pytest.mark.nightly

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "top-p": {"temperature": 0.9, "top_p": 0.6},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
}


def prefilled(model: LoadedModel, asked: StageInput) -> dict[str, Any]:
    """The keys and values of a prompt, on the host."""
    (output,) = stage_of(model, "prefill").run([asked])
    return on_host(output.tensors)


def decoded(model: LoadedModel, tasks: Sequence[StageInput]) -> list[Any]:
    """The tokens of answers that are computed together, and what a client reads of each."""
    decode = stage_of(model, "decode")
    states, chunks = [decode.start(one) for one in tasks], list[bytes]()
    while any(len({*decode.progress(state)}) > 1 for state in states):
        going = [number for number, state in enumerate(states) if len({*decode.progress(state)}) > 1]
        for number, state in zip(going, next_states(decode, [states[number] for number in going]), strict=True):
            assert not isinstance(state, Exception)
            chunks += decode.new_chunks(state)
            states[number] = state
    answers = [[*state.ids] for state in states]
    for state in states:
        decode.release(state)
    return [*answers, chunks]


def texts(model: LoadedModel, folder: Path, **asked: Any) -> list[Any]:
    """Three prompts, the longest of several chunks, prefilled one by one and decoded together."""
    tokenizer, words = ChatTokenizer.read(folder), tiny_language.TEXT.split()
    tasks, found = [], list[Any]()
    for count in (3, 40, 200):
        text = " ".join(random.Random(count).choices(words, k=count))
        first = task(model.spec, tokenizer.prompt([{"role": "user", "content": text}]), **asked)
        keys_and_values = prefilled(model, first)
        found += [bytes_of(tensor) for tensor in keys_and_values.values() if tensor is not None]
        tasks.append(StageInput(first.params, keys_and_values, first.uploads, derived=first.derived))
    return [*found, *decoded(model, tasks)]


@pytest.mark.parametrize(
    ("batching", "attention"), [("exact", "in-place"), ("batched", "in-place"), ("batched", "gathered")]
)
@pytest.mark.parametrize("kind", tiny_language.KINDS)
def test_language_model_on_second_gpu_has_tokens_of_cpu(
    kind: str, batching: str, attention: str, tmp_path: Path
) -> None:
    folder = tiny_language.make_language_model(tmp_path / "model", kind, positions=2048)
    options = {"batching": batching, "decode_attention": attention}
    on_cpu = load(folder, **options)
    expected = {name: texts(on_cpu, folder, **asked) for name, asked in SAMPLING.items()}
    with PretendedGpus() as gpus:
        model = load(folder, GPU, **options)
        found = {name: texts(model, folder, **asked) for name, asked in SAMPLING.items()}
        held = held_by(gpus)
        texts(model, folder)
        assert held_by(gpus) == held and held.keys() == {GPU}
    assert [name for name in expected if expected[name] != found[name]] == []


@pytest.mark.parametrize("sampling", decode_calls.SAMPLING)
def test_decode_step_of_many_texts_has_the_calls_and_waits_of_few(sampling: str, tmp_path: Path) -> None:
    folder = tiny_language.make_language_model(tmp_path / "model", positions=2048)
    with PretendedGpus() as gpus:
        prefilled = decode_calls.Texts(folder, 9, gpus)
        few, many = (prefilled.count(texts, decode_calls.SAMPLING[sampling]) for texts in (2, 9))
    assert many == few
    assert many["waits"] == 1


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_vision_model_on_second_gpu_has_tokens_of_cpu(kind: str, tmp_path: Path) -> None:
    folder = tiny_vision.make_vision_model(tmp_path / "model", kind)
    pictures = [draw(tmp_path / f"{number}.png", *size, number) for number, size in enumerate(SIZES)]
    chat = Chat(folder, messages(pictures))

    def answer(model: LoadedModel) -> list[Any]:
        features = on_host(chat.encoded(stage_of(model, "vision_encode")))
        inputs = features | prefilled(model, chat.task(features))
        return [bytes_of(tensor) for tensor in inputs.values() if tensor is not None] + decoded(
            model, [chat.task(inputs)]
        )

    expected = answer(load(folder))
    with PretendedGpus():
        assert answer(load(folder, GPU)) == expected
