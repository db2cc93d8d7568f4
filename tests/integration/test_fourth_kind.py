"""A stage kind that unfuse has never heard of, with a role and a resource of its own: all it takes is in this file."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest
from msgspec.structs import asdict, replace
from safetensors.numpy import save_file

from tools.server import Server, serving, until
from unfuse.core.modalities import MediaLimits, OutputSize, Workload
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Pipeline, StageSpec
from unfuse.models.base import Family, Report, RuntimeOptions, weights_ids
from unfuse.stages.base import EncodedMedia, Stage, StageInput, StageOutput
from unfuse.stages.specs import TEXT_ENCODE
from unfuse.weights.folder import ModelFolder, choose_dtypes

PARTS = ("reader", "mirror")
PIPELINE = Pipeline(
    (
        replace(
            TEXT_ENCODE,
            components=("reader",),
            outputs=("text",),
            output_size=OutputSize(4096),
            depends_on_params=("prompt",),
        ),
        StageSpec(
            "mirror",
            "mirror",
            ("mirror",),
            ("text",),
            per_sample=True,
            role="mirrorer",
            slots=3,
            work=Workload("num_inference_steps"),
            needs={"silver": OutputSize(2)},
        ),
    )
)


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
        time.sleep(0.2)  # long enough for others to begin beside it, if they may
        turned = [bytes(np.asarray(task.tensors["text"]))[::-1] for task in batch]
        return [StageOutput(media=(EncodedMedia("text/plain", text),)) for text in turned]


class Mirrors(Family):
    """A model of these two stages."""

    torch = False

    def model_spec(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        ids = weights_ids(ModelFolder(folder), PIPELINE, "mirrors")
        defaults = {"width": 64, "height": 64, "num_inference_steps": 2, "max_sequence_length": 16, "fps": 8}
        return ModelSpec(
            name,
            str(folder),
            "mirrors",
            PIPELINE,
            asdict(MediaLimits()),
            defaults,
            ids,
            choose_dtypes("float32", PARTS),
        )

    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        return Mirror() if spec.kind == "mirror" else Read()


FAMILY = Mirrors()


Installed = tuple[str, dict[str, str]]


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    """The model's folder, and the variables under which the family is found as if it were installed."""
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
    return str(model), {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


FLAGS = ("--workers", "encoder=1,mirrorer=2", "--arena", "8MiB")


def test_custom_stage_kind_runs_on_workers_of_its_own_role(tmp_path: Path, installed: Installed) -> None:
    model, variables = installed
    with serving(tmp_path, model, *FLAGS, "--resources", "silver=3", **variables) as server:
        server.ready()
        until(lambda: len(server.get("/v1/workers")["data"]) == 3, "all workers to be there", server.process)
        requests = [server.finished(id) for id in [server.submit(f"a star {n}") for n in range(6)]]
        workers = server.get("/v1/workers")["data"]
        assert [request["status"] for request in requests] == ["completed"] * 6, requests
        assert server.result(requests[0]["id"]) == b"0 rats a"
        assert sorted((one["role"], one["slots"]) for one in workers) == [
            ("encoder", 4),
            ("mirrorer", 3),
            ("mirrorer", 3),
        ]
        mirrors = [stage for request in requests for stage in request["stages"] if stage["name"] == "mirror.0"]
        assert all(stage["pool"].startswith("mirror-") for stage in mirrors)
        used = [events_of(server, request["id"]) for request in requests]
        for worker in {worker for worker, _, _ in used}:
            turns = sorted((begun, ended) for other, begun, ended in used if other == worker)
            assert all(before[1] <= after[0] for before, after in pairwise(turns)), "two tasks had 4 of 3 silver"


def events_of(server: Server, request: str) -> tuple[str, float, float]:
    """The worker of a request's mirror, and when that began and ended."""
    events = [event for event in server.events(request) if event.get("stage") == "mirror.0"]
    begun, ended = (next(e for e in events if e["type"] == kind) for kind in ("stage_started", "stage_completed"))
    return begun["worker"], begun["at"], ended["at"]


def test_start_fails_if_no_worker_has_a_required_resource(tmp_path: Path, installed: Installed) -> None:
    model, variables = installed
    with serving(tmp_path, model, *FLAGS, **variables) as server:
        assert server.process.wait(60) == 1
    said = server.log()
    assert "stage mirror needs the resource silver, which this worker does not have" in said
    assert "--resources silver=N" in said
    assert "starting" not in said, "workers were started in vain"


def test_request_needing_more_resources_than_any_worker_returns_400(tmp_path: Path, installed: Installed) -> None:
    model, variables = installed
    with serving(tmp_path, model, *FLAGS, "--resources", "silver=1", **variables) as server:
        server.ready()
        with pytest.raises(HTTPError) as refused:
            server.submit("a star")
        assert refused.value.code == 400
        assert "needs 2 of the resource silver, but workers have at most 1" in refused.value.read().decode()
