"""Decodes of real classes that run out of memory above a size of tile: the picture arrives, and says how."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.models.short_memory import short_of_memory
from tests.worker.test_step_loop import Bench
from tools import tiny, tiny_whole
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.messages import TaskCompleted, TaskFailed
from unfuse.core.plan import Params
from unfuse.core.request import new_request_id
from unfuse.models import find
from unfuse.models.base import RuntimeOptions
from unfuse.stages.base import Stage

SIDE = 64
"""Pixels along a side. The tiny VAEs have 4 pixels a latent, and so 16 latents, of which a tile has 8."""

FORWARDS = 4
"""How often a request of three steps runs the UNet of the undivided model."""

KINDS = {"flux": ((1, 64, 16), 1), "wan": ((1, 4, 3, 16, 16), 5), "klein": ((1, 16, 8, 8), 1)}
"""By kind of model, the shape of its latents and the frames."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def built(kind: str) -> Path:
        maker = tiny if kind in KINDS else tiny_whole
        return maker.build(kind, tmp_path_factory.mktemp("models") / kind)

    return built


def stage_of(folder: Path, name: str, options: ComputeOptions) -> tuple[Stage, Any]:
    """A stage of a model, and its VAE."""
    family = find(folder)
    model = family.model_spec("m", folder)
    runtime = RuntimeOptions("cpu", model.dtypes, options)
    (spec,) = (spec for spec in model.pipeline.stages if spec.name == name)
    stage: Any = family.load(spec, folder, runtime)
    holder = getattr(stage, "_decoder", None) or getattr(stage, "_block", None) or stage._pipeline
    return stage, holder.vae


class Decode:
    """A loop of one final stage, whose latents are always the same."""

    def __init__(self, folder: Path, stage: Stage, shape: tuple[int, ...] = (), **params: Any) -> None:
        self.bench = Bench(folder, {"print": stage}, 1)
        self.params: Params = {"output_format": "png", "height": SIDE, "width": SIDE, "num_frames": 1, **params}
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(0)) if shape else torch.zeros(1)
        names = {"latents": latents}
        self.ref = self.bench.store.put(names, request=new_request_id(), stage="before", attempt=1)

    def run(self) -> tuple[TaskCompleted | TaskFailed, np.ndarray[Any, Any]]:
        lease = self.bench.run("print", self.ref, **self.params)
        end = self.bench.outcome(lease)
        assert isinstance(end, TaskCompleted | TaskFailed)
        files = end.results if isinstance(end, TaskCompleted) else ()
        request, results = lease.task.request, self.bench.results
        return end, np.stack([np.asarray(Image.open(io.BytesIO(results.read(request, f.index)))) for f in files] or [0])


@pytest.mark.parametrize("kind", KINDS)
def test_decode_out_of_memory_is_tiled_and_later_ones_start_in_tiles(kind: str, folder: Any, tmp_path: Path) -> None:
    shape, frames = KINDS[kind]
    stage, vae = stage_of(folder(kind), "vae_decode", ComputeOptions())
    decode = Decode(tmp_path, stage, shape, num_frames=frames)
    done, whole = decode.run()
    assert isinstance(done, TaskCompleted) and done.vae == ""

    with short_of_memory(vae.decoder, 8) as sides:
        done, tiled = decode.run()
        assert isinstance(done, TaskCompleted) and done.vae == "tiled"
        first = sides.index(8)
        assert sides[:2] == [16, 16] and 8 < max(sides[2:first], default=16) <= 16, "alone, once more, in larger tiles"
        assert max(sides[first:]) == 8
        del sides[:]
        done, again = decode.run()
        assert isinstance(done, TaskCompleted) and done.vae == "tiled"
        assert max(sides) == 8, "the size is known to need tiles"

    assert tiled.shape == whole.shape == (frames, SIDE, SIDE, 3)
    assert np.array_equal(tiled, again) and not np.array_equal(tiled, whole)
    assert np.abs(tiled.astype(int) - whole).mean() < 48
    assert not vae.use_tiling, "as it is configured"


@pytest.mark.parametrize("kind", KINDS)
def test_decode_that_never_fits_and_exact_only_fail_the_request(kind: str, folder: Any, tmp_path: Path) -> None:
    shape, frames = KINDS[kind]
    for options, most, says in (
        (ComputeOptions(), 4, "reduce the request"),
        (ComputeOptions(exact_only=True), 8, "forbids"),
    ):
        stage, vae = stage_of(folder(kind), "vae_decode", options)
        with short_of_memory(vae.decoder, most):
            failed, _ = Decode(tmp_path / says.replace(" ", ""), stage, shape, num_frames=frames).run()
        assert isinstance(failed, TaskFailed)
        assert (failed.kind, failed.reason) == ("permanent", "out_of_memory")
        assert f"for {SIDE}x{SIDE}" in failed.message and says in failed.message


@pytest.mark.parametrize("exact_only", [False, True])
def test_undivided_pipeline_repeats_only_its_decode(exact_only: bool, folder: Any, tmp_path: Path) -> None:
    stage, vae = stage_of(folder("sd"), "whole", ComputeOptions(exact_only=exact_only))
    params = {"prompt": "a", "negative_prompt": None, "guidance_scale": 1.0, "num_inference_steps": 3, "seed": 1}
    decode = Decode(tmp_path, stage, **params)
    forwards = list[int]()
    stage._pipeline.unet.register_forward_hook(lambda *_: forwards.append(1))  # type: ignore[attr-defined]
    decode.run()
    with short_of_memory(vae.decoder, 8) as sides:
        end, picture = decode.run()
    assert len(forwards) == 2 * FORWARDS, "the denoised latents were not lost"
    if exact_only:
        assert isinstance(end, TaskFailed) and "--exact-only forbids" in end.message
        return
    assert isinstance(end, TaskCompleted) and end.vae == "tiled"
    assert (picture.shape, sides[:4]) == ((1, SIDE, SIDE, 3), [16, 16, 12, 8])


def test_undivided_pipeline_out_of_memory_between_steps_starts_over(folder: Any, tmp_path: Path) -> None:
    stage, _ = stage_of(folder("sd"), "whole", ComputeOptions())
    params = {"prompt": "a", "negative_prompt": None, "guidance_scale": 1.0, "num_inference_steps": 3, "seed": 1}
    decode = Decode(tmp_path, stage, **params)
    forwards = list[int]()

    def count(*_: object) -> None:
        forwards.append(1)
        if len(forwards) == FORWARDS + 2:
            raise RuntimeError("CUDA error: out of memory")

    stage._pipeline.unet.register_forward_pre_hook(count)  # type: ignore[attr-defined]
    (_, first), (end, second) = decode.run(), decode.run()
    assert isinstance(end, TaskCompleted)
    assert np.array_equal(first, second) and len(forwards) == FORWARDS + 2 + FORWARDS
