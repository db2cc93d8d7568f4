"""What an encoder's output depends on is what its pipeline says: only then may requests share one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest

from tests.models import conftest as c
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.plan import Params, Value
from unfuse.models import find
from unfuse.stages.base import Stage, StageInput


class Declared(Mapping[str, Value]):
    """Parameters of which nothing but the declared ones can be read, nor seen to be there."""

    def __init__(self, params: Params, names: Collection[str]) -> None:
        self._params, self._names = params, names

    def __getitem__(self, name: str) -> Value:
        assert name in self._names, f"the stage reads {name}, which its pipeline does not say"
        return self._params[name]

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the stage looks at all parameters")

    def __len__(self) -> int:
        raise AssertionError("the stage counts the parameters")


def encoded(stage: Stage, params: Any, uploads: Mapping[str, bytes]) -> dict[str, Any]:
    derived = DerivedFacts(image_hashes=dict.fromkeys(uploads, "hash"))
    task = StageInput(params, {}, {name: uploads[name] for name in stage.uploads_of(derived)}, derived=derived)
    stage.verify(task)
    stage.batch_key(task)
    (output,) = stage.run([task])
    return dict(output.tensors)


def test_encoders_read_only_the_parameters_their_pipeline_declares(
    job: c.Job, undivided: c.Undivided, stages: c.Load
) -> None:
    folder, uploads = undivided.folder(job.model), undivided.uploads(job.params)
    specs = [spec for spec in find(folder).model_spec("model", folder).pipeline.stages if spec.role == "encoder"]
    assert specs
    for spec in specs:
        stage = stages(folder, job.dtype)[spec.name]
        assert set(stage.uploads) <= set(spec.depends_on_params), "an upload goes by its hash, which has its name"
        known = {name: data for name, data in uploads.items() if name in spec.depends_on_params}
        alone = encoded(stage, Declared(job.params, spec.depends_on_params), known)
        whole = encoded(stage, {**job.params, "output_format": "png"}, uploads)
        assert alone.keys() == whole.keys() == set(spec.outputs)
        for name, tensor in whole.items():
            assert alone[name] is tensor or alone[name].equal(tensor)


def test_reading_an_undeclared_parameter_is_detected(undivided: c.Undivided, stages: c.Load) -> None:
    folder = undivided.folder("wan")
    reads = find(folder).model_spec("model", folder).pipeline.stages[0].depends_on_params
    for left_out in reads:
        with pytest.raises(AssertionError, match=f"reads {left_out}"):
            names = set(reads) - {left_out}
            encoded(stages(folder)["text_encode"], Declared(c.wan_params(negative_prompt="n"), names), {})


def test_models_sharing_an_encoder_pool_declare_the_same_parameters(undivided: c.Undivided) -> None:
    """Text encoders of text to video and image to video are one pool: what either encodes may serve the other."""
    cards = [find(undivided.folder(kind)).model_spec(kind, undivided.folder(kind)) for kind in ("wan", "wan-image")]
    first, second = (
        {card.pools()[spec.name]: spec.depends_on_params for spec in card.pipeline.stages} for card in cards
    )
    assert any(first[pool] and first[pool] == second[pool] for pool in first.keys() & second.keys())
