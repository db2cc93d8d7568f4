"""Videos play at the rate of their family's model."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import av
import pytest

from tests.answers.sampled import TOGETHER
from tools.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.row("P45", "K18")]


def test_cogvideox_plays_at_eight_frames_a_second(
    sampled: Callable[[str], Path], served: Callable[..., Server]
) -> None:
    server = served(*map(sampled, TOGETHER))

    told = server.post("/v1/videos", {"model": str(sampled("cogvideox")), "prompt": "cats", "num_inference_steps": 2})
    assert server.finished(told["id"])["status"] == "completed"

    with av.open(io.BytesIO(server.result(told["id"]))) as container:
        assert container.streams.video[0].average_rate == 8
    assert "is assumed to be" not in server.log()
