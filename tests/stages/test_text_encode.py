"""Text encoding, whatever the encoder: what is encoded, how often, and under which names."""

from collections.abc import Hashable, Sequence

import pytest
import torch
from torch import Tensor

from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages.base import Stage, StageInput, guidance_scale
from unfuse.stages.text_encode import TextEncode

PARAMS: Params = {"prompt": "ab", "negative_prompt": "c", "guidance_scale": 2.0, "max_sequence_length": 4}


class Letters:
    """An encoder whose embedding of a text is its letters; it keeps what it was asked, and would keep gradients."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.weight = torch.ones(1, requires_grad=True)

    def guidance(self, params: Params) -> float:
        return guidance_scale(params)

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        self.asked.append(list(texts))
        letters = torch.tensor([[float(ord(letter)) for letter in text.ljust(length)[:length]] for text in texts])
        return {"embeds": self.weight * letters, "pooled": letters.sum(1, keepdim=True)}


def run(params: Params) -> tuple[dict[str, Tensor | None], list[list[str]]]:
    encoder = Letters()
    stage = TextEncode(encoder)
    task = StageInput(params, {})
    stage.verify(task)
    (output,) = stage.run([task])
    return dict(output.tensors), encoder.asked


def test_both_texts_are_encoded_under_guidance() -> None:
    tensors, asked = run(PARAMS)

    assert asked == [["ab"], ["c"]]
    assert sorted(tensors) == ["embeds", "negative_embeds", "negative_pooled", "pooled"]
    assert tensors["embeds"] is not None and tensors["embeds"].tolist() == [[97, 98, 32, 32]]
    assert tensors["negative_embeds"] is not None and tensors["negative_embeds"].tolist() == [[99, 32, 32, 32]]


@pytest.mark.parametrize("scale", [1.0, 0, 0.3])
def test_without_guidance_the_negative_is_none(scale: float) -> None:
    tensors, asked = run({**PARAMS, "guidance_scale": scale})

    assert asked == [["ab"]]
    assert tensors["negative_embeds"] is None
    assert tensors["negative_pooled"] is None


@pytest.mark.parametrize("left_out", [{}, {"negative_prompt": None}, {"negative_prompt": ""}])
def test_a_negative_prompt_that_was_left_out_is_empty(left_out: Params) -> None:
    _, asked = run({name: value for name, value in PARAMS.items() if name != "negative_prompt"} | left_out)

    assert asked == [["ab"], [""]]


def test_no_gradient_leaves_the_stage() -> None:
    tensors, _ = run(PARAMS)

    assert not any(tensor.requires_grad for tensor in tensors.values() if tensor is not None)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": None},
        {"prompt": 3},
        {"guidance_scale": None},
        {"max_sequence_length": None},
        {"max_sequence_length": 0},
    ],
)
def test_a_task_that_lacks_something_is_refused(change: Params) -> None:
    with pytest.raises(PermanentError, match=next(iter(change))):
        TextEncode(Letters()).verify(StageInput({**PARAMS, **change}, {}))


def key(stage: Stage, params: Params) -> Hashable:
    return stage.batch_key(StageInput(params, {}))


def test_texts_of_one_length_share_a_batch() -> None:
    stage = TextEncode(Letters())

    assert key(stage, PARAMS) == stage.batch_key(StageInput({**PARAMS, "prompt": "other", "width": 512}, {}))
    assert key(stage, PARAMS) != stage.batch_key(StageInput({**PARAMS, "max_sequence_length": 5}, {}))


def test_a_batch_is_two_forwards_and_everyone_gets_what_is_theirs() -> None:
    encoder = Letters()
    tasks = [
        StageInput({**PARAMS, **change}, {})
        for change in ({}, {"prompt": "x", "guidance_scale": 1.0}, {"prompt": "y", "negative_prompt": "z"})
    ]
    outputs = TextEncode(encoder).run(tasks)

    assert encoder.asked == [["ab", "x", "y"], ["c", "z"]]
    for task, output in zip(tasks, outputs, strict=True):
        (alone,) = TextEncode(Letters()).run([task])
        assert {name: None if value is None else value.tolist() for name, value in output.tensors.items()} == {
            name: None if value is None else value.tolist() for name, value in alone.tensors.items()
        }
