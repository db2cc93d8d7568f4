"""Adapters (LoRA) under load: each picture is that of its own diffusers run, whatever else is being made."""

from __future__ import annotations

import base64
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen
from typing import Any

import openai
import pytest
import xxhash

from tests.integration.pictures import SHAPES, defaults, digest, undivided
from tests.netns import second_host
from tools.server import START_S, Server, computes_of, environment, serving, unfuse, until
from tools.tiny import adapter

STEPS, MORE = 4, 100
PROMPTS = ("a red circle on white", "a blue star on black", "a green ring on gray")
ADAPTERS: list[dict[str, Any]] = [
    {},
    {"lora": "plain"},
    {"lora": ["alpha:-0.5", {"name": "plain", "scale": 0.8}]},
    {"lora": "plain", "lora_scale": 0.4},
]
CASES = [{"prompt": prompt, "seed": seed} | own for own in ADAPTERS for seed, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    adapter(SHAPES, folder, "plain", 1)
    adapter(SHAPES, folder, "alpha", 2, 3, 6.0, to_k=5)
    return folder


@pytest.fixture(scope="module")
def expected(loras: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The pixels of the cases, undivided."""
    asked = {**defaults(), "num_inference_steps": STEPS}
    cases = [{**asked, **case} for case in CASES]
    for case in cases:
        scales = {"alpha": -0.5, "plain": 0.8} if isinstance(case.get("lora"), list) else {}
        scales = scales or ({case["lora"]: case.get("lora_scale", 1.0)} if "lora" in case else {})
        case["loras"] = [[str(loras / f"{name}.safetensors"), scale] for name, scale in scales.items()]
        case.pop("lora", None), case.pop("lora_scale", None)
    found = [frames[0] for frames in undivided(SHAPES, tmp_path_factory.mktemp("reference"), cases)]
    assert len(set(found)) == len(CASES)
    return found


@pytest.fixture(scope="module")
def server(loras: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Encoder and decoder; tests bring the denoiser, which has two slots."""
    with serving(
        tmp_path_factory.mktemp("serve"), "--workers", "none", "--loras", str(loras), UNFUSE_LEASE__TTL_S="2"
    ) as server:
        until(lambda: server.get("/health"), "the server to answer", server.process)
        server.worker("encoder+decoder")
        yield server


@pytest.fixture(scope="module")
def denoiser(request: pytest.FixtureRequest, server: Server) -> Iterator[Popen[bytes]]:
    worker = server.worker("denoiser", "--max-loras", str(request.param))
    server.ready()
    yield worker
    server.killed(worker)
    server.workers.remove(worker)
    until(lambda: server.get("/ready") is None, "the denoiser to be missed")


def load(server: Server) -> list[str]:
    """The pixels of all cases, asked for by eight clients at once in a random order."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=START_S)

    def ask(place: int) -> tuple[int, str]:
        own = {name: value for name, value in CASES[place].items() if name != "prompt"}
        reply = client.images.generate(
            prompt=CASES[place]["prompt"], size="auto", extra_body={**own, "num_inference_steps": STEPS}
        )
        assert reply.data and reply.data[0].b64_json
        return place, digest(base64.b64decode(reply.data[0].b64_json))

    with client, ThreadPoolExecutor(8) as clients:
        made = dict(clients.map(ask, random.Random(1).sample(range(len(CASES)), len(CASES))))
    return [made[place] for place in range(len(CASES))]


@pytest.mark.parametrize("denoiser", [4], indirect=True)
def test_mixed_lora_load_matches_undivided_diffusers_runs(
    server: Server, denoiser: Popen[bytes], expected: list[str]
) -> None:
    assert load(server) == expected


@pytest.mark.parametrize("denoiser", [4], indirect=True)
def test_generate_cli_applies_lora_flags(
    server: Server, denoiser: Popen[bytes], expected: list[str], tmp_path: Path
) -> None:
    case = CASES[2 * len(PROMPTS)]
    flags = ["--lora", "alpha:-0.5", "--lora", "plain", "--lora-scale", "0.8"]
    flags += ["--seed", str(case["seed"]), "--steps", str(STEPS)]
    command = unfuse("generate", case["prompt"], *flags, "--server", server.url, "-o", "out.png")
    subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), check=True, capture_output=True)

    assert digest((tmp_path / "out.png").read_bytes()) == expected[2 * len(PROMPTS)]


@pytest.mark.nightly
@pytest.mark.parametrize("denoiser", [1], indirect=True)
def test_max_loras_1_denoiser_keeps_images_correct_after_a_crash(
    server: Server, denoiser: Popen[bytes], expected: list[str]
) -> None:
    """Given a denoiser that has to load an adapter anew whenever it changes, when its compute process is killed while
    one is in use, then all requests are completed by the next one with the pictures they should have."""
    id = server.submit(**CASES[3], size="auto", num_inference_steps=MORE)
    assert any(event["type"] == "progress" for event in server.events(id))
    (compute,) = computes_of(denoiser.pid)
    with ThreadPoolExecutor(1) as other:
        loading = other.submit(load, server)
        compute.send_signal(signal.SIGKILL)
        assert loading.result() == expected
    assert server.finished(id)["status"] == "completed"


def test_models_list_shows_loras_and_unknown_loras_return_400(server: Server) -> None:
    assert [model["loras"] for model in server.get("/v1/models")["data"]] == [["alpha", "plain"]]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        for name, why in (("other", "available: alpha, plain"), ("../plain", "lora '../plain' does not exist")):
            with pytest.raises(openai.BadRequestError, match=why):
                client.images.generate(prompt="a red circle", extra_body={"lora": name})


@pytest.mark.nightly
def test_worker_on_another_host_downloads_lora_files_added_later(
    tmp_path: Path, expected: list[str], loras: Path
) -> None:
    """Given a denoiser on another host, which sees an empty folder, when adapters are put into the server's, then
    pictures are those of undivided runs, and the files lie at the other host by their content."""
    seen, home = tmp_path / "loras", tmp_path / "home"
    seen.mkdir()
    home.mkdir()
    subprocess.run(unfuse("keys", "new", str(tmp_path / "keys")), env=environment(tmp_path), check=True)
    keys = "--keys", str(tmp_path / "keys")
    with (
        second_host() as host,
        serving(
            tmp_path, "--workers", "encoder=1,decoder=1", "--arena", "64MiB", "--loras", str(seen), *keys, at=host.near
        ) as server,
    ):
        host.hide(seen)
        until(lambda: server.get("/health"), "the server to answer", server.process)
        server.worker("denoiser", *keys, within=host.enter, UNFUSE_DATA_DIR=str(home))
        server.ready()
        for name in ("plain", "alpha"):
            shutil.copy(loras / f"{name}.safetensors", seen)
        for place in (3, 6, 9):
            id = server.submit(**CASES[place], size="auto", num_inference_steps=STEPS)
            assert server.finished(id)["status"] == "completed", server.finished(id)["error"]
            assert digest(server.result(id)) == expected[place]
        brought = {xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in loras.glob("*.safetensors")}
        assert {file.stem for file in (home / "loras").iterdir()} == brought
