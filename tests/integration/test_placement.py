"""Where workers run, and what models share: real servers, one line of `--place` each."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops

from tests.integration.comparing import kind_of
from tools.addresses import free_port
from tools.server import Server, environment, serving, unfuse, until

SHAPES = Path(__file__).parents[2] / "unfuse" / "models" / "shapes"
PROMPT = "a red circle on white"


@pytest.fixture(scope="module")
def sibling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with another noise scheduler, so that its denoiser is another one."""
    folder = shutil.copytree(SHAPES, tmp_path_factory.mktemp("models") / "sibling")
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shift": 6.0}))
    return folder


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, sibling: Path) -> Iterator[Server]:
    """One server of two models that share their encoder and their VAE."""
    arguments = [
        "unfuse/shapes",
        str(sibling),
        "--arena",
        "64MiB",
        "--place",
        "encoder=cpu,denoiser=cpu,denoiser=cpu,decoder=cpu",
        "--served-model-name",
        "plain",
        "--served-model-name",
        "shifted",
        "--log-level",
        "debug",
    ]
    with serving(tmp_path_factory.mktemp("both"), *arguments) as server:
        server.ready()
        until(lambda: len(server.get("/v1/workers")["data"]) == 4, "both denoisers", server.process)
        yield server


def picture(server: Server, model: str) -> Image.Image:
    request = server.submit(PROMPT, model=model, seed=11)
    assert server.finished(request)["status"] == "completed"
    return Image.open(io.BytesIO(server.result(request))).convert("RGB")


def test_two_models_share_encoder_and_decoder_but_not_denoiser_pools(both: Server) -> None:
    pools: dict[str, list[tuple[list[str], int]]] = {"text-encode": [], "denoise": [], "vae-decode": []}
    for pool in both.get("/v1/pools")["data"]:
        pools[kind_of(pool["id"])].append((sorted(pool["models"]), len(pool["workers"])))
    assert pools["text-encode"] == [(["plain", "shifted"], 1)]
    assert pools["vae-decode"] == [(["plain", "shifted"], 1)]
    assert sorted(pools["denoise"]) == [(["plain"], 2), (["shifted"], 2)]

    plain, shifted = picture(both, "plain"), picture(both, "shifted")
    assert plain.size == shifted.size == (128, 128)
    assert ImageChops.difference(plain, shifted).getbbox() is not None


def test_device_listed_twice_in_place_starts_two_workers(both: Server) -> None:
    roles = sorted(worker["role"] for worker in both.get("/v1/workers")["data"])
    assert roles == ["decoder", "denoiser", "denoiser", "encoder"]


def test_debug_log_shows_component_placement_and_loaded_bytes(both: Server) -> None:
    text = both.log()
    table, _, rest = text.partition("activations need additional memory")
    assert table.count("transformer") == 4  # two denoisers of two models
    assert table.count("text_encoder") == 1
    assert "loaded" not in table
    logged = [json.loads(line) for line in rest.splitlines() if line.startswith("{")]
    loads: list[dict[str, Any]] = [line for line in logged if line["event"] == "loaded"]
    weights = {(line["role"], line["device"], line["component"]): line["bytes"] for line in loads}
    assert 1981072 * 4 <= weights["denoiser", "cpu", "transformer"] < 1981072 * 4.1  # its buffers come on top
    assert {role for role, _, component in weights if component == "text_encoder"} == {"encoder"}


def test_models_list_uses_served_model_names(both: Server) -> None:
    assert [model["id"] for model in both.get("/v1/models")["data"]] == ["plain", "shifted"]


@pytest.mark.nightly
def test_per_component_dtype_applies_to_all_workers(tmp_path: Path) -> None:
    with serving(
        tmp_path, "--arena", "64MiB", "--workers", "encoder=1,denoiser=1", "--dtype", "transformer=bfloat16"
    ) as server:
        server.worker("decoder", "--dtype", "float16")
        server.ready()
        pools = [pool["id"] for pool in server.get("/v1/pools")["data"]]
        assert {kind_of(pool): pool.split("-")[-2] for pool in pools} == {
            "text-encode": "f32",
            "denoise": "bf16",
            "vae-decode": "f32",
        }
        assert picture(server, "unfuse/shapes").size == (128, 128)


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["--place", "denoiser=cuda:63"], "there is no device cuda:63 for the denoiser; available are cpu", 1),
        (["--arena", "100TiB"], "cpu would need 300.0 TiB (encoder 100.0 TiB + denoiser 100.0 TiB", 1),
        (["--dtype", "unet=float16"], "unknown component 'unet'", 1),
        (["--device", "cpu", "--offload", "sequential"], "--offload sequential needs a GPU", 1),
        (["--served-model-name", "a", "unfuse/shapes", str(SHAPES)], "--served-model-name has 1 values", 2),
    ],
)
def test_impossible_placement_fails_the_start_with_one_line(
    tmp_path: Path, arguments: list[str], says: str, code: int
) -> None:
    command = unfuse("serve", *arguments, "--port", str(free_port()))
    failed = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    assert failed.returncode == code
    assert says in failed.stderr.splitlines()[-1]
    assert "loaded" not in failed.stderr
    assert "Traceback" not in failed.stderr
