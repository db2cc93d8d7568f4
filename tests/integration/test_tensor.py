"""Encoder and denoiser of two ranks each, which have half of the weights, served: pictures but for rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.integration.test_ranks import ROUNDING, alone as alone, compute_of_denoiser, own, picture, pixels, ranks


@pytest.mark.nightly
def test_tensor_parallel_images_match_single_rank(alone: dict[int, bytes], tmp_path: Path) -> None:
    """Requests that share forwards have the bytes that they have by themselves."""
    with ranks(tmp_path, "tensor:2,encoder=tensor:2") as server:
        assert len(compute_of_denoiser(server)) == 2
        for seed, expected in alone.items():
            assert np.abs(pixels(picture(server, seed, **own(seed))) - pixels(expected)).max() <= ROUNDING
        first = picture(server, 0, **own(0))
        asked = [server.submit("a red circle on white", seed=seed, **own(0)) for seed in (0, 7, 8, 0, 9, 0)]
        assert all(server.finished(request)["status"] == "completed" for request in asked)
        assert [server.result(asked[place]) for place in (0, 3, 5)] == [first] * 3
