"""Encodes of real classes that run out of memory above a size of tile: the request goes on, and its stage says so."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from tests.models.short_memory import short_of_memory
from tests.worker.test_step_loop import Bench
from tools import tiny, tiny_whole
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.messages import TaskCompleted, TaskFailed
from unfuse.core.plan import Params
from unfuse.models import find
from unfuse.models.base import RuntimeOptions

SIDE = 64
"""Pixels along a side of the picture, where nothing else decides. Most tiny VAEs have 4 pixels a latent."""


class Kind(NamedTuple):
    stage: str
    tensor: str
    """What the stage makes with the VAE."""
    sides: tuple[int, ...]
    """Pixels along the longest side that the VAE encodes at once, at each rung of the ladder."""
    frames: int = 1


KINDS = {
    "flux": Kind("redraw_encode", "moments", (64, 48, 32)),
    "klein": Kind("image_encode", "image_latents", (64, 48, 32)),
    "wan-image": Kind("image_encode", "condition", (64, 32), frames=5),
}


def picture() -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class Encode:
    """A loop of one stage of a model, whose uploaded picture is always the same."""

    def __init__(self, folder: Path, kind: str, options: ComputeOptions, stage: str = "", **params: Any) -> None:
        model = (tiny if kind in tiny.KINDS else tiny_whole).build(kind, folder / kind)
        family = find(model)
        spec = family.model_spec("m", model)
        self.name = stage or KINDS[kind].stage
        runtime = RuntimeOptions("cpu", spec.dtypes, options)
        (stage_spec,) = (found for found in spec.pipeline.stages if found.name == self.name)
        self.stage: Any = family.load(stage_spec, model, runtime)
        holder = getattr(self.stage, "_encoder", None) or self.stage._pipeline
        self.vae = holder.vae
        self.pool = "print" if stage else "count"  # the undivided stage makes files
        self.bench = Bench(folder, {self.pool: self.stage}, 1)
        self.params: Params = {"height": SIDE, "width": SIDE, "num_frames": 1, **params}

    def run(self) -> TaskCompleted | TaskFailed:
        lease = self.bench.run(self.pool, derived=DerivedFacts(image_hashes={"image": "hash"}), **self.params)
        self.bench.results.attach(lease.task.request, "image", picture())
        end = self.bench.outcome(lease)
        assert isinstance(end, TaskCompleted | TaskFailed)
        return end

    def tensor(self, done: TaskCompleted, name: str) -> np.ndarray[Any, Any]:
        assert done.output is not None
        with self.bench.store.get(done.output, verify=True) as tensors:
            return np.array(tensors[name])


@pytest.mark.parametrize(
    "kind", [kind if kind == "flux" else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]
)
def test_encode_out_of_memory_is_tiled_at_each_size_of_the_ladder(kind: str, tmp_path: Path) -> None:
    stage, tensor, rungs, frames = KINDS[kind]
    encode = Encode(tmp_path, kind, ComputeOptions(), num_frames=frames)
    done = encode.run()
    assert isinstance(done, TaskCompleted) and done.vae == ""
    whole = encode.tensor(done, tensor)

    for larger, most in pairwise(rungs):
        with short_of_memory(encode.vae.encoder, most) as sides:
            done = encode.run()
            assert isinstance(done, TaskCompleted) and done.vae == "tiled"
            assert sides[:2] == [larger, larger] and max(sides[2:]) == most, "alone, once more, in smaller tiles"
            del sides[:]
            again = encode.run()
            assert isinstance(again, TaskCompleted) and again.vae == "tiled"
            assert max(sides) == most, "the size is known to need tiles"
        tiled = encode.tensor(done, tensor)
        assert np.array_equal(tiled, encode.tensor(again, tensor))
        assert tiled.shape == whole.shape and not np.array_equal(tiled, whole)
    assert not encode.vae.use_tiling, "as it is configured"


def test_encode_that_never_fits_and_exact_only_fail_the_request(tmp_path: Path) -> None:
    for options, most, says in (
        (ComputeOptions(), 16, "reduce the request"),
        (ComputeOptions(exact_only=True), 32, "forbids"),
    ):
        encode = Encode(tmp_path / says.replace(" ", ""), "flux", options)
        with short_of_memory(encode.vae.encoder, most):
            failed = encode.run()
        assert isinstance(failed, TaskFailed)
        assert (failed.kind, failed.reason) == ("permanent", "out_of_memory")
        assert f"for {SIDE}x{SIDE}" in failed.message and says in failed.message


@pytest.mark.nightly
@pytest.mark.parametrize("exact_only", [False, True])
def test_undivided_pipeline_repeats_only_its_encode(exact_only: bool, tmp_path: Path) -> None:
    params = {"prompt": "a", "negative_prompt": None, "guidance_scale": 1.0, "num_inference_steps": 3, "seed": 1}
    params |= {"strength": 1.0, "output_format": "png"}
    encode = Encode(tmp_path, "sd-image", ComputeOptions(exact_only=exact_only), "whole", **params)
    texts = list[int]()
    encode.stage._pipeline.text_encoder.register_forward_hook(lambda *_: texts.append(1))
    encode.run()
    calls = len(texts)
    with short_of_memory(encode.vae.encoder, 32) as sides:
        end = encode.run()
    assert len(texts) == 2 * calls, "what was computed before the encode was not lost"
    if exact_only:
        assert isinstance(end, TaskFailed) and "--exact-only forbids" in end.message
        return
    assert isinstance(end, TaskCompleted) and end.vae == "tiled"
    assert sides[:4] == [64, 64, 48, 32]
