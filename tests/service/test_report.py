"""What a start says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace

from tools.cards import MOVING, PICTURES, STILL
from unfuse import __version__
from unfuse.core.model_spec import START_IMAGE, ModelSpec
from unfuse.planning.component_memory import ComponentMemory
from unfuse.planning.placement import CPU, Device, PlacedWorker, WorkerPlan
from unfuse.service.plan import PlannedModel, ServingPlan
from unfuse.service.report import StartScreen

URL = "http://127.0.0.1:8000"
ROLES = ("encoder", "denoiser", "decoder")
TALKING = replace(PICTURES, name="test/talking", limits={"max_tokens": 2048})
FILMING = replace(MOVING, accepts=(), limits=MOVING.limits | {"max_size": 0})


def planned(*cards: ModelSpec, workers: tuple[PlacedWorker, ...] = (), wanted: WorkerPlan | None = None) -> ServingPlan:
    models = tuple(PlannedModel(card, Path("/nowhere"), "", {}) for card in cards)
    devices = Device(CPU, 8 << 30), Device("cuda:0", 24 << 30)
    return ServingPlan(models, {}, wanted or WorkerPlan(), devices, workers)


def example(card: ModelSpec, *more: ModelSpec, names: dict[str, str] | None = None, keyed: bool = False) -> list[str]:
    """The words of the command that the screen proposes."""
    return shlex.split(StartScreen(planned(card, *more), names or {}, keyed=keyed).example(URL))


@pytest.mark.parametrize(
    ("card", "path", "fields"),
    [
        (PICTURES, "/v1/images/generations", {"prompt", "response_format"}),
        (FILMING, "/v1/videos", {"prompt"}),
        (TALKING, "/v1/chat/completions", {"messages"}),
    ],
)
def test_example_command_uses_the_endpoint_of_the_model(card: ModelSpec, path: str, fields: set[str]) -> None:
    curl, address, *_, body = example(card)
    assert (curl, address) == ("curl", URL + path)
    assert json.loads(body).keys() == fields


@pytest.mark.parametrize(
    ("card", "path", "field"),
    [
        (replace(STILL, accepts=(START_IMAGE,)), "/v1/images/edits", "image=@FILE"),
        (MOVING, "/v1/videos", "input_reference=@FILE"),
    ],
)
def test_example_command_uploads_an_image_if_the_model_needs_it(card: ModelSpec, path: str, field: str) -> None:
    words = example(card)
    assert words[1] == URL + path
    assert {"prompt=a red circle on white", field} <= {*words}
    assert words.count("-F") == len(words[2:]) // 2


def test_example_command_contains_the_model_name_and_an_api_key() -> None:
    words = example(PICTURES, TALKING, names={"it's": PICTURES.name, "talk": TALKING.name}, keyed=True)
    assert json.loads(words[-1])["model"] == "it's"
    assert "authorization: Bearer KEY" in words


def test_model_in_a_folder_is_shown_by_its_client_name() -> None:
    screen = StartScreen(planned(replace(PICTURES, name="/models/flux"), TALKING), {}, keyed=False)
    assert screen.opening()[0].startswith(f"serving flux (/models/flux), {TALKING.name} with unfuse ")
    assert json.loads(shlex.split(screen.example(URL))[-1])["model"] == "flux"


def test_start_screen_lists_models_workers_and_memory() -> None:
    part = ComponentMemory("transformer", "float32", 2 << 30)
    workers = (*[PlacedWorker("denoiser", "cuda:0", (part,))] * 2, PlacedWorker("encoder", CPU, (part,)))
    lines = StartScreen(
        planned(PICTURES, workers=workers), {"flux": PICTURES.name, "f": PICTURES.name}, keyed=False
    ).opening()
    assert lines[0] == f"serving flux (test/pictures) with unfuse {__version__}"
    workers_line = r"workers: 2 × denoiser on cuda:0, 1 × encoder on cpu; memory: "
    assert re.fullmatch(workers_line + r"cpu .* of 8.0 GiB free, cuda:0 5.4 GiB of 24.0 GiB free", lines[1])
    assert len(lines) == 2


def test_start_screen_lists_dtypes_on_gpus_without_bfloat16() -> None:
    parts = ComponentMemory("transformer", "float16", 1), ComponentMemory("text_encoder_2", "float32", 1)
    workers = tuple(PlacedWorker("all", device, parts) for device in ("cuda:0", "cuda:1"))
    devices = Device("cuda:0", 1 << 40, has_bfloat16=False), Device("cuda:1", 1 << 40)
    plan = replace(planned(PICTURES, workers=workers), devices=devices)
    line = "cuda:0 without bfloat16, so dtypes are: transformer float16, text_encoder_2 float32"
    assert line in StartScreen(plan, {}, keyed=False).opening()
    plan = replace(plan, workers=workers[1:])
    assert line not in StartScreen(plan, {}, keyed=False).opening()


def test_start_screen_explains_undivided_models_and_missing_workers() -> None:
    lines = StartScreen(planned(replace(PICTURES, undivided_reason="it is whole")), {}, keyed=False).opening()
    assert lines[1:] == [
        "test/pictures is not split: it is whole",
        "no worker is started here: requests wait until one registers (unfuse worker)",
    ]


@pytest.mark.parametrize(("seconds", "took"), [(0.04, "0.0"), (3.14, "3.1"), (9.99, "10.0"), (13.4, "13")])
def test_ready_message_reports_the_start_time(seconds: float, took: str) -> None:
    screen = StartScreen(planned(PICTURES), {}, keyed=False)
    first, second = screen.ready(URL, seconds)
    assert first == f"ready in {took} s: open {URL}/docs, or try"
    assert second.strip() == screen.example(URL)


def test_start_screen_is_not_ready_while_a_role_has_no_worker() -> None:
    part = ComponentMemory("transformer", "float32", 1)
    own = replace(
        planned(PICTURES, workers=(PlacedWorker("denoiser", CPU, (part,)),)), needs=dict.fromkeys(ROLES, (part,))
    )
    assert StartScreen(own, {}, keyed=False).ready(URL, 13.4) == [
        "the workers of this machine are ready in 13 s: requests wait for workers of other roles (encoder, decoder)"
    ]
    for roles in (["all"], ["encoder+denoiser", "decoder"]):
        workers = tuple(PlacedWorker(role, CPU, (part,)) for role in roles)
        assert (
            StartScreen(replace(own, workers=workers), {}, keyed=False).ready(URL, 13.4)[0].startswith("ready in 13 s")
        )
