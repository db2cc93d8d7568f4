"""How long stages may run, by `--image-timeout` and `--video-timeout`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.server import Server, serving, until

BODY = {"prompt": "a red circle on white", "seed": 1, "num_inference_steps": 100}


def asked(server: Server, path: str) -> str:
    """The id of a request at that path."""
    return str(server.post(path, BODY, prefer="respond-async")["id"])


def denoising(server: Server, request: str) -> Any:
    """Whether it has made a step of denoising."""
    shown = server.get(f"/v1/requests/{request}")
    return shown["stage"] == "denoise.0" and shown["step"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flag", "path"), [("--image-timeout", "/v1/images/generations"), ("--video-timeout", "/v1/videos")]
)
def test_request_expires_after_image_or_video_timeout(flag: str, path: str, tmp_path: Path) -> None:
    """Given a request like one that was measured, when its compute process is stopped amid steps, then it expires."""
    with serving(tmp_path, "--workers", "all=1", "--arena", "64MiB", flag, "1") as server:
        server.ready()
        assert server.finished(asked(server, path))["status"] == "completed"
        request = asked(server, path)
        until(lambda: denoising(server, request), "it to make a step", server.process)
        compute = server.compute_of(request, "denoise.0")
        compute.suspend()
        try:
            ended = server.finished(request)
        finally:
            compute.resume()

    assert (ended["status"], ended["error"]["code"]) == ("expired", "expired")
    assert "the stages of the request ran for more than" in ended["error"]["message"]
