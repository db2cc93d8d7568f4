"""A server whose decoder runs out of memory: pictures arrive in tiles, say so, and are not reused."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tools.server import Server, serving, unfuse

pytestmark = pytest.mark.slow

TIGHT = {"PYTHONPATH": str(Path(__file__).parent / "tight_memory"), "TIGHT": "8"}
"""The VAE has 16 pixels a latent: above 128 pixels a side, a decode does not fit."""

ARGUMENTS = ("unfuse/shapes", "--threads", "1", "--workers", "split", "--reuse-results")


def stages(request: dict[str, Any]) -> dict[str, tuple[str | None, int]]:
    """How each stage of a request was decoded, and how often it ran."""
    return {stage["name"]: (stage["vae"], stage["attempt"]) for stage in request["stages"]}


def picture(server: Server, size: str) -> dict[str, Any]:
    id = server.submit("a red circle", seed=7, size=size, num_inference_steps=2)
    return server.finished(id)


def reused(server: Server, request: dict[str, Any]) -> bool:
    return any(event.get("message") == "reused" for event in server.events(request["id"]))


def test_tiled_answer_says_so_and_is_not_reused_and_denoising_runs_once(tmp_path: Path) -> None:
    with serving(tmp_path, *ARGUMENTS, **TIGHT) as server:
        server.ready()
        small, again = picture(server, "128x128"), picture(server, "128x128")
        assert (stages(small)["vae_decode.0"], reused(server, again)) == ((None, 1), True)

        for _ in range(2):
            request = picture(server, "256x256")
            assert request["status"] == "completed", request["error"]
            assert stages(request)["denoise.0"] == (None, 1)
            assert stages(request)["vae_decode.0"] == ("tiled", 1)
            assert not reused(server, request)
            assert Image.open(io.BytesIO(server.result(request["id"]))).size == (256, 256)

        shown = subprocess.run(
            unfuse("requests", "show", request["id"], "--server", server.url),
            capture_output=True,
            text=True,
            check=True,
        )
        assert "tiled" in shown.stdout
        assert server.log().count("the step is computed in smaller parts") == 1, "the size is known to need tiles"


@pytest.mark.nightly  # models/test_decode_memory.py has it by day, without a server
def test_exact_only_refuses_a_tiled_answer(tmp_path: Path) -> None:
    with serving(tmp_path, *ARGUMENTS, "--exact-only", **TIGHT) as server:
        server.ready()
        request = picture(server, "256x256")
        assert request["status"] == "failed"
        assert request["error"]["code"] == "out_of_memory"
        assert "256x256" in request["error"]["message"]
        assert "--exact-only forbids" in request["error"]["message"], json.dumps(request["error"])
        assert picture(server, "128x128")["status"] == "completed"
