"""Pipelines without a family, each served as one undivided stage: the pixels of diffusers' own call."""

from __future__ import annotations

import json
import subprocess
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.pictures import digest, undivided
from tests.models.conftest import draw_pictures
from tools.server import Server, environment, serving, unfuse
from tools.tiny import SERVING, adapter
from tools.tiny_whole import VIDEOS, build

BY_DAY = ("sd", "auraflow", "cogvideox", "sd-image")
FROM_TEXT = BY_DAY[:3]
BY_NIGHT = ("pixart-alpha", "pixart-sigma", "sana", "lumina2")

OWN = {
    "pixart-alpha": {"height": 256, "width": 256, "num_inference_steps": 2},
    "pixart-sigma": {"height": 256, "width": 256, "num_inference_steps": 2},
    "sana": {"num_inference_steps": 2},
    "lumina2": {"max_sequence_length": 256},
}
"""Two pipelines bin sizes, to shapes of 256 pixels or more; the words before Lumina's prompt are many."""

CASES: list[dict[str, Any]] = [
    {"prompt": "a red circle", "seed": 3},
    {"prompt": "a ring", "seed": 5, "negative_prompt": "blurred", "guidance_scale": 2.5, "num_inference_steps": 3},
]


def defaults(kind: str) -> dict[str, Any]:
    frames = {"num_frames": 9} if kind in VIDEOS else {}
    return {**SERVING, **frames, **OWN.get(kind, {})}


@contextmanager
def served(root: Path, kinds: tuple[str, ...]) -> Iterator[Server]:
    for kind in kinds:
        build(kind, root / kind)
        if kind == "auraflow":
            adapter(root / kind, root / "loras", "made", 1)
        (root / kind / "serving.json").write_text(json.dumps({"defaults": defaults(kind)}))
    names = [argument for kind in kinds for argument in ("--served-model-name", kind)]
    names += ["--loras", str(root / "loras")] if "auraflow" in kinds else []
    with serving(
        root, *(str(root / kind) for kind in kinds), *names, "--arena", "64MiB", OMP_NUM_THREADS="1"
    ) as server:
        yield server.ready()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("whole")
    draw_pictures(root)
    with served(root, BY_DAY) as server:
        yield server


@pytest.fixture(scope="module")
def server_by_night(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("whole"), BY_NIGHT) as server:
        yield server


def calls(kind: str) -> list[dict[str, Any]]:
    """What diffusers' own pipeline is called with for each of CASES."""
    known = {"sd": {"max_sequence_length"}, "pixart-alpha": {"max_sequence_length"}}
    usual = {name: value for name, value in defaults(kind).items() if name not in known.get(kind, ())}
    return [{"model": kind, **usual, **case} for case in CASES]


def submitted(server: Server, kind: str, case: dict[str, Any]) -> str:
    if kind not in VIDEOS:
        return server.submit(model=kind, **case)
    body = {"model": kind, "output_format": "png", "size": "32x32", **case}
    return str(server.post("/v1/videos", body)["id"])


def frames(server: Server, request: str) -> list[str]:
    shown = server.finished(request)
    assert shown["status"] == "completed", shown["error"]
    return [digest(server.result(request, place)) for place in range(len(shown["result"]))]


def has_the_pixels_of_diffusers(server: Server, kinds: tuple[str, ...]) -> None:
    expected = iter(undivided(Path(), server.folder, [call for kind in kinds for call in calls(kind)]))
    asked = [(kind, submitted(server, kind, case)) for kind in kinds for case in CASES]

    made = [(kind, frames(server, request)) for kind, request in asked]
    assert made == [(kind, next(expected)) for kind, _ in asked]
    assert len({digests[0] for _, digests in made}) == len(made)


def test_undivided_pipelines_match_diffusers_pixels(server: Server) -> None:
    """Of all three models at once, which take turns."""
    has_the_pixels_of_diffusers(server, FROM_TEXT)


@pytest.mark.nightly
def test_further_undivided_pipelines_match_diffusers_pixels(server_by_night: Server) -> None:
    has_the_pixels_of_diffusers(server_by_night, BY_NIGHT)


def test_undivided_pipeline_reports_step_progress(server: Server) -> None:
    """Of few that take long enough, not all: steps are told of at most ten times a second."""
    request = submitted(server, "auraflow", {"prompt": "a star", "seed": 1, "num_inference_steps": 40})

    told = [(event["step"], event["steps"]) for event in server.events(request) if event["type"] == "progress"]
    assert told[-1] == (40, 40) and {steps for _, steps in told} == {40}
    assert len(told) > 2 and told == sorted(told)
    (stage,) = server.get(f"/v1/requests/{request}")["stages"]
    assert stage["name"] == "whole.0"


def test_running_undivided_request_is_cancelled_and_others_continue(server: Server) -> None:
    alone = frames(server, submitted(server, "auraflow", CASES[0]))
    request = submitted(server, "auraflow", {"prompt": "a star", "seed": 1, "num_inference_steps": 1000})
    assert any(event["type"] == "progress" for event in server.events(request))

    server.post(f"/v1/requests/{request}/cancel", {})
    assert server.finished(request)["status"] == "cancelled"
    assert frames(server, submitted(server, "auraflow", CASES[0])) == alone


def test_urgent_undivided_request_preempts_and_both_match_solo_runs(server: Server) -> None:
    """Given two requests that are amid their calls at one time, of one model."""
    case = {"prompt": "a star", "seed": 1, "num_inference_steps": 60}
    alone = [frames(server, submitted(server, "sd", one)) for one in (case, CASES[0])]

    first = submitted(server, "sd", case)
    assert any(event["type"] == "progress" for event in server.events(first))
    second = submitted(server, "sd", {**CASES[0], "priority": 5})
    assert [frames(server, first), frames(server, second)] == alone
    done = [server.get(f"/v1/requests/{request}")["completed_at"] for request in (second, first)]
    assert done == sorted(done)


@pytest.mark.parametrize(
    ("kind", "asked", "reason"),
    [
        ("sd", {"preview_every": 1}, "takes no preview_every: leave it out"),
        ("sd", {"size": "36x32"}, "must be a multiple of 8"),
        ("sd", {"guidance_scale_2": 1.0}, "unknown parameter 'guidance_scale_2'"),
        ("auraflow", {"lora": "any"}, "lora 'any' does not exist; available: made"),
    ],
)
def test_parameter_unsupported_by_undivided_pipeline_returns_400(
    server: Server, kind: str, asked: dict[str, Any], reason: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.submit("a star", model=kind, **asked)
    assert refused.value.code == 400 and reason in refused.value.read().decode()


def test_reason_for_undivided_pipeline_is_logged(server: Server) -> None:
    assert "sd is not split: StableDiffusionPipeline has no stages" in server.log()


def test_lora_applies_only_to_its_own_undivided_request(server: Server) -> None:
    """Given a request with it, and one without, which are amid their calls at one time."""
    cases = [{**CASES[0], "num_inference_steps": 20, "lora": "made", "lora_scale": 0.5}, CASES[0]]
    (call, _), file = calls("auraflow"), server.folder / "loras" / "made.safetensors"
    with_it, without = undivided(
        Path(), server.folder, [{**call, "num_inference_steps": 20, "loras": [[str(file), 0.5]]}, call]
    )

    first = submitted(server, "auraflow", cases[0])
    assert any(event["type"] == "progress" for event in server.events(first))
    second = submitted(server, "auraflow", {**cases[1], "priority": 5})
    assert [frames(server, first), frames(server, second)] == [with_it, without]


def test_lora_of_another_model_fails_request_with_named_adapter(server: Server) -> None:
    shown = server.finished(submitted(server, "sd", {**CASES[0], "lora": "made"}))

    assert shown["status"] == "failed" and "lora 'made'" in shown["error"]["message"], shown
    assert frames(server, submitted(server, "sd", CASES[0]))


def test_lora_key_without_matching_layer_returns_400(server: Server) -> None:
    """diffusers leaves such out without an error."""
    loras = server.folder / "loras"
    tensors = load_file(loras / "made.safetensors")
    stray = {f"transformer.stray.to_q.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}
    save_file({**tensors, **stray}, loras / "stray.safetensors")
    says = "contains transformer.stray.to_q.lora_A.weight, but the model has no such layer"
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match=says),
    ):
        client.images.generate(model="auraflow", prompt="a ring", extra_body={**CASES[0], "lora": "stray"})


def test_undivided_image_to_image_matches_diffusers(server: Server) -> None:
    """It makes fewer steps than it is asked for, and another size than the picture's, if one is asked for."""
    call = {"model": "sd-image", "prompt": "a ring", "seed": 5, "num_inference_steps": 4, "image": "sky.png"}
    expected, half = undivided(Path(), server.folder, [call, {**call, "strength": 0.5}])
    picture = server.folder / "sky.png"

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        reply = client.images.edit(model="sd-image", prompt="a ring", image=picture, extra_body={"seed": "5"})
        assert frames(server, reply.model_extra["id"]) == expected
        reply = client.images.edit(
            model="sd-image", prompt="a ring", image=picture, extra_body={"seed": "5", "strength": "0.5"}
        )
        assert frames(server, reply.model_extra["id"]) == half != expected
        reply = client.images.edit(model="sd-image", prompt="a ring", image=picture, size="64x32")
        assert reply.size == "64x32"
    with pytest.raises(urllib.error.HTTPError):
        server.submit("a ring", model="sd-image")


@pytest.mark.nightly
def test_undivided_request_is_retried_with_same_bytes_after_kill(server: Server) -> None:
    case = {**CASES[0], "num_inference_steps": 1000}
    alone = frames(server, submitted(server, "auraflow", case))
    request = submitted(server, "auraflow", case)
    assert any(event["type"] == "progress" for event in server.events(request))

    server.compute_of(request, "whole.0").kill()
    assert frames(server, request) == alone
    (stage,) = server.get(f"/v1/requests/{request}")["stages"]
    assert stage["attempt"] > 1


def test_doctor_reports_reason_for_undivided_pipeline(server: Server) -> None:
    model = str(server.folder / "auraflow")
    told = [
        subprocess.run(unfuse("doctor", model, *more), env=environment(server.folder), capture_output=True, check=True)
        for more in ((), ("--json",))
    ]

    assert f"{model} is not split: AuraFlowPipeline has no stages" in told[0].stdout.decode()
    assert "AuraFlowPipeline" in json.loads(told[1].stdout)["undivided"][model]
