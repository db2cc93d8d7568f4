"""The modes in which a VAE decodes with less memory: their order, and which of them the next decode starts with."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import OutOfMemory
from unfuse.core.plan import Params
from unfuse.stages.base import StageInput, next_states
from unfuse.stages.vae_decode import VaeDecode, VaeDecodeState
from unfuse.stages.vae_memory import AS_CONFIGURED, ONLY_SIZE, DecodeMode, VaeModes


def square_tiles(**own: Any) -> SimpleNamespace:
    """What diffusers reads of AutoencoderKL, whose tiles are square."""
    tiles = {"tile_sample_min_size": 512, "tile_latent_min_size": 64, "tile_overlap_factor": 0.25}
    return SimpleNamespace(**{"use_slicing": False, "use_tiling": False} | tiles | own)


def strided_tiles(**own: Any) -> SimpleNamespace:
    """What diffusers reads of the VAEs of videos, whose tiles have strides."""
    sides = dict.fromkeys(("tile_sample_min_height", "tile_sample_min_width"), 256)
    strides = dict.fromkeys(("tile_sample_stride_height", "tile_sample_stride_width"), 192)
    flags = {"use_slicing": False, "use_tiling": False, "spatial_compression_ratio": 8}
    return SimpleNamespace(**flags | sides | strides | own)


def rungs(modes: VaeModes, size: tuple[int, ...], rows: int = 1) -> list[DecodeMode]:
    """All modes of a size, from the first to the last."""
    found = [modes.mode(size)]
    while mode := modes.reduce(size, found[-1], rows):
        found.append(mode)
    return found


@pytest.mark.parametrize(
    ("vae", "size", "tiles"),
    [
        (square_tiles(), (4, 128, 64), [64, 32, 16, 8]),
        (square_tiles(), (4, 64, 32), [32, 16, 8]),
        (square_tiles(use_tiling=True), (4, 128, 128), [32, 16, 8]),
        (square_tiles(), (4, 8, 8), []),
        (strided_tiles(), (16, 5, 60, 104), [32, 16, 8]),
        (strided_tiles(spatial_compression_ratio=16), (16, 5, 60, 104), [16, 8]),
        (SimpleNamespace(use_slicing=False, use_tiling=False), (4, 64, 64), [ONLY_SIZE]),
        (SimpleNamespace(use_slicing=False, use_tiling=True), (4, 64, 64), []),
        (SimpleNamespace(), (4, 64, 64), []),
        (None, (4, 64, 64), []),
    ],
)
def test_tiles_become_smaller_down_to_eight_latents(vae: Any, size: tuple[int, ...], tiles: list[int]) -> None:
    assert [mode.tile for mode in rungs(VaeModes(vae), size)] == [0, *tiles]


def test_batch_is_sliced_before_it_is_tiled() -> None:
    found = rungs(VaeModes(square_tiles()), (4, 16, 16), rows=2)
    assert found == [AS_CONFIGURED, DecodeMode(True), DecodeMode(True, 8)]
    assert [mode.vae for mode in found] == ["", "", "tiled"]


@pytest.mark.parametrize(
    ("vae", "expected"),
    [
        (square_tiles(), {"tile_sample_min_size": 128, "tile_latent_min_size": 16}),
        (strided_tiles(), {"tile_sample_min_height": 128, "tile_sample_stride_width": 96}),
    ],
)
def test_mode_sets_the_attributes_of_diffusers_and_restores_them(vae: Any, expected: dict[str, int]) -> None:
    before, modes = dict(vars(vae)), VaeModes(vae)
    with pytest.raises(ZeroDivisionError), modes.use(DecodeMode(True, 16)):
        assert vars(vae).items() >= (expected | {"use_tiling": True, "use_slicing": True}).items()
        raise ZeroDivisionError
    assert vars(vae) == before


def test_exact_only_refuses_tiles_but_not_slices() -> None:
    modes = VaeModes(square_tiles(), exact_only=True)
    mode = modes.reduce((4, 16, 16), AS_CONFIGURED, rows=2)
    assert mode == DecodeMode(True)
    with pytest.raises(OutOfMemory, match="--exact-only forbids"):
        modes.reduce((4, 16, 16), mode, rows=2)


def test_next_decode_of_a_size_starts_in_its_last_mode() -> None:
    modes = VaeModes(square_tiles())
    modes.reduce((4, 32, 32), AS_CONFIGURED)
    assert [modes.mode(size).tile for size in ((4, 32, 32), (4, 32, 16))] == [16, 0]


def test_size_is_decoded_whole_again_once_more_memory_is_free() -> None:
    free = [100]
    modes = VaeModes(square_tiles(), free=lambda: free[0])
    modes.reduce((4, 32, 32), AS_CONFIGURED)
    free[0] = 125
    assert modes.mode((4, 32, 32)).tile == 16
    free[0] = 126
    assert modes.mode((4, 32, 32)) == AS_CONFIGURED


class Vae(SimpleNamespace):
    """A VAE whose decode returns its latents, and runs out of memory above `most` numbers of a tile."""

    def __init__(self, most: int, fails_at: int = 0) -> None:
        super().__init__(**vars(strided_tiles(spatial_compression_ratio=1, tile_sample_min_height=32)))
        self.most, self.fails_at, self.calls = most, fails_at, 0

    def decode(self, grid: Tensor) -> Tensor:
        self.calls += 1
        numbers = min(self.tile_sample_min_height, grid.shape[-1]) ** 2 if self.use_tiling else grid.shape[-1] ** 2
        if numbers > self.most and self.calls > self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return grid + self.use_tiling * 0.5


class Decoder:
    """A decoder of such a VAE: a video comes in pieces of one frame, unless it is tiled."""

    latents = (1, 3, None, None, None)

    def __init__(self, vae: Vae) -> None:
        self.vae = vae

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        return latents

    def decode(self, grid: Tensor) -> Tensor:
        return self.vae.decode(grid)

    def fragment_count(self, grid: Tensor) -> int:
        return 1 if self.vae.use_tiling else grid.shape[2]

    def decode_fragments(self, grid: Tensor) -> Iterator[Tensor]:
        for frame in range(grid.shape[2]):
            yield self.vae.decode(grid[:, :, frame : frame + 1])


def started(stage: VaeDecode, frames: int = 1) -> VaeDecodeState:
    return stage.start(StageInput({"output_format": "png"}, {"latents": torch.zeros(1, 3, frames, 32, 32)}))


def levels(stage: VaeDecode, state: VaeDecodeState) -> list[float]:
    """The brightness of each frame of the files: 128 of a whole decode, 191 of tiles."""
    import io

    import numpy as np
    from PIL import Image

    return [float(np.asarray(Image.open(io.BytesIO(file.data))).mean()) for file in stage.finish(state).media]


def test_picture_is_decoded_in_tiles_after_reduce_memory() -> None:
    stage = VaeDecode(Decoder(Vae(most=64)))
    state = started(stage)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            stage.step([state])
        assert stage.reduce_memory(state) is state

    (state,) = next_states(stage, [state])
    assert stage.progress(state) == (1, 1)
    assert stage.finish(state).vae == "tiled"
    assert levels(stage, started_and_done(stage)) == [191]
    assert stage.reduce_memory(state) is None


def started_and_done(stage: VaeDecode) -> VaeDecodeState:
    """A later request of the same size, which starts in tiles."""
    (state,) = next_states(stage, [started(stage)])
    return state  # type: ignore[no-any-return]


def test_repeated_piece_of_a_video_continues_its_file() -> None:
    stage = VaeDecode(Decoder(vae := Vae(most=0, fails_at=2)))
    state = started(stage, frames=3)
    for _ in range(2):
        (state,) = next_states(stage, [state])
    with pytest.raises(torch.OutOfMemoryError):
        stage.step([state])

    vae.most = 2000
    (state,) = next_states(stage, [state])
    assert stage.progress(state) == (3, 3)
    assert levels(stage, state) == [128] * 3
    assert stage.finish(state).vae == ""


def test_rest_of_a_video_comes_from_tiles_and_its_first_frames_stay() -> None:
    stage = VaeDecode(Decoder(Vae(most=300, fails_at=1)))
    state = started(stage, frames=3)
    (state,) = next_states(stage, [state])
    with pytest.raises(torch.OutOfMemoryError):
        stage.step([state])

    assert stage.reduce_memory(state) is state
    assert stage.progress(state) == (1, 2)
    (state,) = next_states(stage, [state])
    assert stage.progress(state) == (2, 2)
    assert levels(stage, state) == [128, 191, 191]
    assert stage.finish(state).vae == "tiled"


def test_step_that_another_rank_could_not_make_is_encoded_once() -> None:
    stage = VaeDecode(Decoder(Vae(most=2000)))
    states = [started(stage), started(stage)]
    stage.step(states)  # here it worked, but another rank ran out of memory

    states = next_states(stage, states)
    assert [stage.progress(state) for state in states] == [(1, 1)] * 2
    assert [len(stage.finish(state).media) for state in states] == [1, 1]


@pytest.mark.parametrize("frames", [1, 3])
def test_ranks_have_equal_steps_after_one_of_them_ran_out_of_memory(frames: int) -> None:
    ranks = [VaeDecode(Decoder(Vae(most=2000))), VaeDecode(Decoder(Vae(most=300)))]
    states = [started(stage, frames) for stage in ranks]
    ranks[0].step([states[0]])  # here it worked, but not on the other rank
    with pytest.raises(torch.OutOfMemoryError):
        ranks[1].step([states[1]])

    for stage, state in zip(ranks, states, strict=True):
        assert stage.reduce_memory(state) is state
        while len({*stage.progress(state)}) > 1:
            (state,) = next_states(stage, [state])
    assert [stage.progress(state) for stage, state in zip(ranks, states, strict=True)] == [(1, 1)] * 2
    assert [levels(stage, state) for stage, state in zip(ranks, states, strict=True)] == [[191] * frames] * 2


def test_exact_only_fails_instead_of_decoding_in_tiles() -> None:
    stage = VaeDecode(Decoder(Vae(most=64)), ComputeOptions(exact_only=True))
    with pytest.raises(OutOfMemory, match="--exact-only"):
        stage.reduce_memory(started(stage))
