"""A video, as an `openai` client, a person and a browser get it from a real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from tests.integration.pictures import VIDEO, digest
from tools.server import Server, environment, unfuse, until

HERE = Path(__file__).parent
TWO = Path(sys.prefix) / "openai-2"
CAPTION = "a red circle on white"


def frames_of(path: Path) -> list[Any]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def made(server: Server, **asked: Any) -> str:
    """The id of a video that is done."""
    id = str(server.post("/v1/videos", {"prompt": CAPTION, **asked})["id"])
    assert server.finished(id)["status"] == "completed"
    return id


def read(url: str, **headers: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        return bytes(answer.read())


@pytest.mark.parametrize("major", [pytest.param("2", marks=pytest.mark.nightly), "3"])
def test_openai_client_creates_lists_and_deletes_videos(server: Server, tmp_path: Path, major: str) -> None:
    """The client's older major lies beside ours; `make` puts it there."""
    if major == "2" and not TWO.is_dir() and not os.environ.get("CI"):
        pytest.skip(f"no openai 2.x in {TWO}: `make test` installs it")
    variables = environment(tmp_path) | ({"PYTHONPATH": str(TWO)} if major == "2" else {})
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(HERE / "ask_video.py"), server.url, major]
    subprocess.run(command, cwd=tmp_path, env=variables, check=True)

    report = json.loads((tmp_path / "report.json").read_text())
    video = report["video"]
    shown = (video["status"], video["progress"], video["seconds"], video["size"])
    assert shown == ("completed", 100, "2.125", "128x128")
    frames = frames_of(tmp_path / "video.mp4")
    assert [frame.shape for frame in frames] == [(128, 128, 3)] * 17
    with Image.open(tmp_path / "thumbnail.webp") as image:
        thumbnail = np.asarray(image.convert("RGB"), dtype=int)
    assert abs(thumbnail - frames[0]).mean() < 12
    assert (report["running"], report["listed"], report["deleted"], report["gone"]) == ("in_progress", True, True, True)
    assert report["events"][-1][0] == "image_generation.completed"
    assert 1 <= [kind for kind, _ in report["events"]].count("image_generation.partial_image") <= 2
    assert all(size > 100 for _, size in report["events"])


def test_deleting_running_video_frees_worker_and_memory(server: Server) -> None:
    id = server.post("/v1/videos", {"prompt": CAPTION, "num_inference_steps": 100})["id"]
    until(lambda: server.get(f"/v1/videos/{id}")["progress"] > 0, "the video to be on its way")
    urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/videos/{id}", method="DELETE"), timeout=30).close()
    assert server.get(f"/v1/videos/{id}") is None
    assert made(server, num_frames=5)
    until(lambda: not any(worker["used"] for worker in server.get("/v1/workers")["data"]), "its memory to be back")


def test_video_content_supports_range_requests(server: Server) -> None:
    url = f"{server.url}/v1/videos/{made(server, num_frames=5)}/content"
    whole = read(url)
    assert read(url, range="bytes=100-199") == whole[100:200]


def test_video_frames_match_undivided_pipeline(server: Server, references: dict[str, list[list[str]]]) -> None:
    id = made(server, **VIDEO, output_format="png")
    assert [[digest(server.result(id, index)) for index in range(9)]] == references["video"]


def test_generate_writes_mp4_and_png_frames_of_default_length(server: Server, tmp_path: Path) -> None:
    asked = ["generate", CAPTION, "--seed", "7", "--steps", "5", "--server", server.url, "-o"]
    for name in ("out.mp4", "out-%04d.png"):
        command = unfuse(*asked, name)
        subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), check=True, capture_output=True)
    lossless = [np.asarray(Image.open(path), dtype=int) for path in sorted(tmp_path.glob("out-*.png"))]
    frames = frames_of(tmp_path / "out.mp4")
    assert sorted(path.name for path in tmp_path.glob("out-*.png")) == [f"out-{index:04d}.png" for index in range(9)]
    assert max(abs(frame - other).mean() for frame, other in zip(frames, lossless, strict=True)) < 12


FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PLAY = """async url => {
    const video = document.createElement("video");
    video.muted = true;
    video.src = url;
    document.body.append(video);
    await new Promise((ended, failed) => {
        video.onended = ended;
        video.onerror = () => failed(new Error(video.error.message));
        video.play();
    });
    return [video.videoWidth, video.videoHeight, video.currentTime, video.duration];
}"""


@contextmanager
def page_of(server: Server) -> Iterator[Any]:
    """A page of a real browser, at this server."""
    browser = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        browser = None
    if browser is None and not os.environ.get("CI"):
        pytest.skip("no browser: install Debian's chromium and PyPI's playwright")
    assert browser is not None, "CI has chromium and playwright: .ci/run installs the one, the test extra the other"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=FLAGS)
        page = chromium.new_page()
        page.goto(f"{server.url}/health")
        yield page
        chromium.close()


def test_browser_plays_video_to_its_end(server: Server) -> None:
    id = made(server, num_frames=17, num_inference_steps=5)
    with page_of(server) as page:
        width, height, now, duration = page.evaluate(PLAY, f"/v1/videos/{id}/content")
    assert (width, height) == (128, 128)
    assert now == duration
    assert duration == pytest.approx(17 / 8, abs=0.01)
