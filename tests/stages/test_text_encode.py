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


def test_prompt_and_negative_prompt_are_encoded_with_guidance() -> None:
    tensors, asked = run(PARAMS)

    assert asked == [["ab"], ["c"]]
    assert sorted(tensors) == ["embeds", "negative_embeds", "negative_pooled", "pooled"]
    assert tensors["embeds"] is not None and tensors["embeds"].tolist() == [[97, 98, 32, 32]]
    assert tensors["negative_embeds"] is not None and tensors["negative_embeds"].tolist() == [[99, 32, 32, 32]]


@pytest.mark.parametrize("scale", [1.0, 0, 0.3])
def test_negative_embeddings_are_none_without_guidance(scale: float) -> None:
    tensors, asked = run({**PARAMS, "guidance_scale": scale})

    assert asked == [["ab"]]
    assert tensors["negative_embeds"] is None
    assert tensors["negative_pooled"] is None


@pytest.mark.parametrize("left_out", [{}, {"negative_prompt": None}, {"negative_prompt": ""}])
def test_missing_negative_prompt_defaults_to_empty_text(left_out: Params) -> None:
    _, asked = run({name: value for name, value in PARAMS.items() if name != "negative_prompt"} | left_out)

    assert asked == [["ab"], [""]]


def test_encoded_tensors_require_no_gradient() -> None:
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
def test_verify_rejects_missing_or_invalid_parameters(change: Params) -> None:
    with pytest.raises(PermanentError, match=next(iter(change))):
        TextEncode(Letters()).verify(StageInput({**PARAMS, **change}, {}))


def key(stage: Stage, params: Params) -> Hashable:
    return stage.batch_key(StageInput(params, {}))


def test_batch_key_groups_texts_of_equal_max_sequence_length() -> None:
    stage = TextEncode(Letters())

    assert key(stage, PARAMS) == stage.batch_key(StageInput({**PARAMS, "prompt": "other", "width": 512}, {}))
    assert key(stage, PARAMS) != stage.batch_key(StageInput({**PARAMS, "max_sequence_length": 5}, {}))


def test_text_batch_runs_two_forwards_with_results_equal_to_solo_runs() -> None:
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
