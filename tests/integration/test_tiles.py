"""A VAE of several ranks, served: files of one rank that works in tiles, and no rank's end loses a request."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import psutil
import pytest

from tests.integration.test_families import submitted
from tests.models.conftest import draw_pictures
from tools.server import Server, all_gone, computes_of, serving, unfuse, until
from tools.tiny import build
from unfuse.models import resolve_source

WAIT_S = "4"
SIDES = ("448x288", "288x448", "32x32")
"""Six tiles, none of whose sides two divides; as many; and a picture that one tile holds."""
FILM = {"prompt": "a red circle on white", "seed": 3, "num_inference_steps": 2, "num_frames": 17, "size": "448x448"}


@contextmanager
def tiled(folder: Path, *arguments: str) -> Iterator[Server]:
    """Larger pictures than the built-in model was trained for, so that there are tiles."""
    model = shutil.copytree(resolve_source("unfuse/shapes"), folder / "shapes")
    said = json.loads((model / "serving.json").read_text())
    said["limits"]["max_size"] = 448
    (model / "serving.json").write_text(json.dumps(said))
    spread = ("--parallel", "decoder=tiles:2", "--collective-s", WAIT_S) if "tiled" not in arguments else ()
    with serving(folder, str(model), "--workers", "split", "--threads", "1", *spread, *arguments) as server:
        yield server.ready()


def pictures(server: Server) -> list[bytes]:
    """One of each size, and two more of the first, all at a time."""
    sizes = [*SIDES, SIDES[0], SIDES[0]]
    asked = [server.submit("a circle", seed=n, size=size, num_inference_steps=2) for n, size in enumerate(sizes)]
    assert {server.finished(one)["status"] for one in asked} == {"completed"}
    return [server.result(one) for one in asked]


def film(server: Server) -> str:
    return str(server.post("/v1/videos", FILM)["id"])


def content(server: Server, id: str, query: str = "") -> bytes:
    assert server.finished(id)["status"] == "completed"
    with urllib.request.urlopen(f"{server.url}/v1/videos/{id}/content{query}", timeout=600) as answer:
        return bytes(answer.read())


def ranks_of(server: Server, role: str = "decoder") -> list[psutil.Process]:
    (worker,) = (one for one in server.get("/v1/workers")["data"] if one["role"] == role)
    return computes_of(worker["pid"])


@pytest.mark.nightly
def test_tile_parallel_images_match_single_rank_vae_tiling(tmp_path: Path) -> None:
    with tiled(tmp_path / "one", "--vae", "tiled") as server:
        wanted = pictures(server)
    with tiled(tmp_path / "two") as server:
        assert len(ranks_of(server)) == 2
        assert pictures(server) == wanted


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
@pytest.mark.nightly
def test_tile_parallel_encode_of_start_image_matches_single_rank(tmp_path: Path) -> None:
    draw_pictures(tmp_path)
    model, made = build("wan-image-euler", tmp_path / "model"), []
    asked = {"prompt": "it turns", "image": "wall.jpg", "seed": 3, "num_frames": 5, "num_inference_steps": 1}
    case = {**asked, "size": "448x48"}
    for spread in ((), ("--parallel", "encoder=tiles:2")):
        (folder := tmp_path / str(len(spread))).mkdir()
        with serving(folder, str(model), "--workers", "split", "--threads", "1", "--vae", "tiled", *spread) as server:
            server.ready()
            assert len(ranks_of(server, "encoder")) == (2 if spread else 1)
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                video = submitted(str(model), case, server, client, tmp_path)
            assert server.finished(video)["status"] == "completed"
            made.append([server.result(video, place) for place in range(5)])
    assert made[1] == made[0]


@pytest.mark.nightly
def test_video_decode_is_retried_with_same_bytes_when_rank_dies_or_hangs(tmp_path: Path) -> None:
    with tiled(tmp_path / "one", "--vae", "tiled") as server:
        wanted = [content(server, film(server), query) for query in ("", "?stream=1")]
    with tiled(tmp_path / "two") as server:
        calm = film(server)
        assert [content(server, calm, query) for query in ("", "?stream=1")] == wanted
        for how in (signal.SIGKILL, signal.SIGSTOP):
            id, before = film(server), ranks_of(server)
            until(lambda id=id: decoding(server, id), "the decoder to begin")
            os.kill(before[1].pid, how)
            assert content(server, id) == wanted[0]
            assert server.get(f"/v1/requests/{id}")["attempts"] == 2
            until(lambda before=before: all_gone(before), "the ranks of before to end")


def decoding(server: Server, id: str) -> bool:
    (stage,) = (one for one in server.get(f"/v1/requests/{id}")["stages"] if one["name"] == "vae_decode.0")
    return stage["status"] == "leased"


@pytest.mark.nightly
def test_parallel_kind_unsupported_by_role_is_rejected_before_load() -> None:
    for said, reason in (
        ("denoiser=tiles:2", "tiles is not supported for this role; supported: cfg, "),
        ("encoder=tiles:2", "tiles is not supported for this role; supported: tensor"),
        ("decoder=ulysses:2", "ulysses is not supported for this role; supported: tiles"),
    ):
        command = unfuse("serve", "unfuse/shapes", "--port", "0", "--parallel", said)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        assert reason in done.stderr
        assert "Traceback" not in done.stderr
