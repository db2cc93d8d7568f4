"""The main job, as a person and as an `openai` client would do it, compared with the undivided pipeline."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.pictures import CAPTIONS, CASES, defaults, digest
from tools.server import Server, environment, serving, unfuse, until


@pytest.fixture(scope="module")
def expected(references: dict[str, list[list[str]]]) -> list[str]:
    """SHA-256 of the pixels the undivided pipeline makes of CASES, with the model's own defaults."""
    return [frames[0] for frames in references["cases"]]


def picture(client: openai.OpenAI, case: dict[str, Any]) -> bytes:
    prompt, size = case["prompt"], case.get("size", "auto")
    extra = {name: value for name, value in case.items() if name not in ("prompt", "size")}
    reply = client.images.generate(prompt=prompt, size=size, model="unfuse/shapes", extra_body=extra)
    return base64.b64decode(reply.data[0].b64_json)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_concurrent_openai_requests_match_the_undivided_pipeline(client: openai.OpenAI, expected: list[str]) -> None:
    with ThreadPoolExecutor(len(CASES)) as pool:
        pictures = list(pool.map(lambda case: picture(client, case), CASES))
    assert [digest(picture) for picture in pictures] == expected


TWO = Path(sys.prefix) / "openai-2"
ASK_WITH_TWO = """
import base64, sys, openai
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
assert openai.__version__.startswith("2."), openai.__version__
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
ask = lambda seed: client.images.generate(prompt=sys.argv[2], extra_body={"seed": seed}).data[0].b64_json
with ThreadPoolExecutor(8) as pool:
    for index, picture in enumerate(pool.map(ask, [11] * 8)):
        open(f"{index}.png", "wb").write(base64.b64decode(picture))
"""


def test_openai_2_client_gets_the_same_images_concurrently(server: Server, tmp_path: Path, expected: list[str]) -> None:
    """The client's second major lies beside ours; `make` puts it there."""
    if not TWO.is_dir() and not os.environ.get("CI"):
        pytest.skip(f"no openai 2.x in {TWO}: `make test` installs it")
    variables = environment(tmp_path) | {"PYTHONPATH": str(TWO)}
    command = [sys.executable, "-c", ASK_WITH_TWO, server.url, CAPTIONS[0]]
    subprocess.run(command, cwd=tmp_path, env=variables, check=True)
    assert {digest((tmp_path / f"{index}.png").read_bytes()) for index in range(8)} == {expected[0]}


def test_n_images_use_consecutive_seeds(client: openai.OpenAI, expected: list[str]) -> None:
    reply = client.images.generate(prompt=CAPTIONS[0], n=3, extra_body={"seed": 11})
    digests = [digest(base64.b64decode(item.b64_json)) for item in reply.data]
    assert digests == [expected[0], expected[4], expected[5]]


def test_request_events_are_in_order_and_stages_report_their_times(server: Server) -> None:
    request = server.submit(CAPTIONS[1], seed=3, cache=False, num_inference_steps=20)
    seen = list(server.events(request))
    types = [event["type"] for event in seen]
    assert (types[0], types[-1]) == ("queued", "completed")
    steps = [event["step"] for event in seen if event["type"] == "progress" and event["stage"] == "denoise.0"]
    assert steps == list(range(1, 21))
    stages = [event["stage"] for event in seen if event["type"] == "stage_completed"]
    assert stages == ["text_encode", "denoise.0", "vae_decode.0"]
    shown = server.get(f"/v1/requests/{request}")
    assert shown["status"] == "completed"
    assert all(stage["run_s"] > 0 and stage["queued_s"] >= 0 and stage["worker"] for stage in shown["stages"])
    listed = server.get("/v1/requests?limit=1")["data"]
    assert [item["id"] for item in listed] == [request]


def test_finished_requests_free_their_arena_memory(server: Server) -> None:
    server.finished(server.submit(CAPTIONS[2], seed=1))
    until(
        lambda: not any(worker["used"] for worker in server.get("/v1/workers")["data"]),
        "the workers to release the request's tensors",
    )


def test_cancelled_request_stops_and_the_next_one_completes(server: Server) -> None:
    request = server.submit(CAPTIONS[0], num_inference_steps=100)
    for event in server.events(request):
        if event["type"] == "progress" and event["stage"].startswith("denoise"):
            cancelled = server.post(f"/v1/requests/{request}/cancel", {})
            assert cancelled["status"] == "cancelled"
            break
    assert server.finished(request)["status"] == "cancelled"
    assert server.finished(server.submit(CAPTIONS[0]))["status"] == "completed"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"model": "no/such-model"}, "unfuse/shapes"),
        ({"size": "65x64"}, "64x64"),
        ({"num_inference_steps": 0}, "1 to 100"),
        ({"num_inference_steps": 10**9}, "1000000000"),
        ({"guidance_scale": "nan"}, "guidance_scale"),
        ({"seed": "NaN"}, "seed"),
        ({"prompt": "x" * 1_000_000}, "prompt"),
        ({"prompt": ["a", "list"]}, "prompt"),
        ({"n": 0}, "n must be"),
        ({"numinference_steps": 3}, "num_inference_steps"),
    ],
)
def test_invalid_image_parameters_are_rejected_and_queue_nothing(
    server: Server, body: dict[str, Any], says: str
) -> None:
    newest = server.get("/v1/requests?limit=1")["data"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post("/v1/images/generations", {"prompt": CAPTIONS[0]} | body)
    assert refused.value.code in ((400, 404) if "model" in body else (400,))
    assert says in json.loads(refused.value.read())["error"]["message"]
    assert server.get("/v1/requests?limit=1")["data"] == newest


def test_generate_without_a_terminal_prints_one_line_per_stage(tmp_path: Path, expected: list[str]) -> None:
    command = unfuse("generate", CAPTIONS[0], "-o", "out.png", "--seed", "11", "--json")
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert digest((tmp_path / "out.png").read_bytes()) == expected[0]
    lines = done.stderr.splitlines()
    assert lines[0] == "inspecting unfuse/shapes"
    for stage in ("text_encode", "denoise.0", "vae_decode.0"):
        assert len([line for line in lines if re.fullmatch(rf"{stage}: done in [0-9.]+ s", line)]) == 1
    assert "\x1b" not in done.stderr
    assert json.loads(done.stdout)["seed"] == 11


def test_generate_with_server_flag_matches_the_undivided_pipeline(
    server: Server, tmp_path: Path, expected: list[str]
) -> None:
    command = unfuse("generate", CAPTIONS[1], "-o", "out.png", "--seed", "12", "--server", server.url, "--json")
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert digest((tmp_path / "out.png").read_bytes()) == expected[1]
    assert json.loads(done.stdout)["seed"] == 12


def test_image_is_identical_after_a_denoiser_compute_crash(server: Server, expected: list[str]) -> None:
    request = server.submit(CAPTIONS[0], seed=99, num_inference_steps=100)
    for event in server.events(request):
        if event["type"] == "progress" and event["stage"] == "denoise.0" and event["step"] >= 3:
            compute = server.compute_of(request, "denoise.0")
            compute.kill()
            break
    shown = server.finished(request)
    assert (shown["status"], shown["attempts"]) == ("completed", 2)
    assert digest(server.result(request)) == expected[-1]
    assert server.compute_of(request, "denoise.0").pid != compute.pid


@pytest.mark.nightly
def test_restarted_server_returns_an_eta_for_the_first_request(server: Server, tmp_path: Path) -> None:
    """Given a server that made a picture, when another one starts with its data folder, then that knows the stages."""
    stages = {
        stage["name"]: stage for stage in server.finished(server.submit("a purple star on gray", seed=1))["stages"]
    }
    assert {name: stage["steps"] + stage["resumed"] for name, stage in stages.items()} == {
        "text_encode": 1,
        "denoise.0": defaults()["num_inference_steps"],
        "vae_decode.0": 1,
    }
    until((server.folder / "costs.json").exists, "what stages take to be kept", server.process)
    shutil.copy(server.folder / "costs.json", tmp_path)
    kept = json.loads((tmp_path / "costs.json").read_text())
    assert {device for devices in kept["times"].values() for device in devices} == {"cpu"}
    with serving(tmp_path, "--workers", "none") as heir:
        until(lambda: heir.get("/health") is not None, "the gateway", heir.process)
        asked = {"prompt": CAPTIONS[0], "num_inference_steps": 100}
        assert heir.post("/v1/images/generations", asked, prefer="respond-async")["eta_s"] > 0
