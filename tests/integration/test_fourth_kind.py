"""A stage kind that unfuse has never heard of, with a role of its own: all it takes is in this file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from safetensors.numpy import save_file

from tests.integration.harness import serving, until
from unfuse.core.card import Limits, ModelCard
from unfuse.core.plan import Pipeline, Room, StageSpec, Workload
from unfuse.models.base import Family, Report, Runtime, choose_dtypes, weights_ids
from unfuse.models.folder import ModelFolder
from unfuse.stages.base import Media, Stage, StageInput, StageOutput
from unfuse.stages.specs import TEXT_ENCODE

PARTS = ("reader", "mirror")
PIPELINE = Pipeline(
    (
        replace(TEXT_ENCODE, components=("reader",), outputs=("text",), room=Room(4096), reads=("prompt",)),
        StageSpec(
            "mirror", "mirror", ("mirror",), ("text",), per_sample=True, role="mirrorer", slots=3,
            work=Workload("num_inference_steps"),
        ),
    )
)  # fmt: skip


class Read(Stage):
    """The prompt, as numbers."""

    kind = "text_encode"

    def verify(self, task: StageInput) -> None:
        assert task.params["prompt"]

    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        texts = [str(task.params["prompt"]).encode() for task in batch]
        return [StageOutput({"text": np.frombuffer(text, np.uint8)}) for text in texts]


class Mirror(Stage):
    """These numbers backwards."""

    kind = "mirror"

    def verify(self, task: StageInput) -> None:
        assert "text" in task.tensors

    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        turned = [bytes(np.asarray(task.tensors["text"]))[::-1] for task in batch]
        return [StageOutput(media=(Media("text/plain", text),)) for text in turned]


class Mirrors(Family):
    """A model of these two stages."""

    torch = False

    def card(self, name: str, folder: Path, dtype: str = "auto") -> ModelCard:
        ids = weights_ids(ModelFolder(folder), PIPELINE, "mirrors")
        defaults = {"width": 64, "height": 64, "num_inference_steps": 2, "max_sequence_length": 16, "fps": 8}
        return ModelCard(
            name, str(folder), "mirrors", PIPELINE, Limits(), defaults, ids, choose_dtypes("float32", PARTS)
        )

    def load(self, spec: StageSpec, folder: Path, runtime: Runtime, report: Report | None = None) -> Stage:
        return Mirror() if spec.kind == "mirror" else Read()


FAMILY = Mirrors()


def test_a_stage_of_a_new_kind_is_served_from_workers_of_its_own(tmp_path: Path) -> None:
    site, model = tmp_path / "site", tmp_path / "model"
    info = site / "mirrors-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(__file__, site / "mirrors.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mirrors\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[unfuse.families]\nMirrorPipeline = mirrors:FAMILY\n")
    for part in PARTS:
        (model / part).mkdir(parents=True)
        (model / part / "config.json").write_text("{}")
        save_file({"weight": np.zeros(1, np.float32)}, model / part / "model.safetensors")
    index = {"_class_name": "MirrorPipeline", **{part: ["mirrors", part] for part in PARTS}}
    (model / "model_index.json").write_text(json.dumps(index))
    paths = [str(site), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    with serving(tmp_path, str(model), "--workers", "encoder=1,mirrorer=2", "--arena", "8MiB", **variables) as server:
        server.ready()
        until(lambda: len(server.get("/v1/workers")["data"]) == 3, "all workers to be there", server.process)
        request = server.finished(server.submit("a star"))
        workers = server.get("/v1/workers")["data"]
        assert request["status"] == "completed", request["error"]
        assert server.result(request["id"]) == b"rats a"
        assert sorted((one["role"], one["slots"]) for one in workers) == [
            ("encoder", 4), ("mirrorer", 3), ("mirrorer", 3)
        ]  # fmt: skip
        (mirror,) = (stage for stage in request["stages"] if stage["name"] == "mirror.0")
        assert mirror["pool"].startswith("mirror:")
