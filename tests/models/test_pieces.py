"""Videos decoded a latent frame at a time: bit for bit what the VAE makes of all, whoever is decoded in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.examples import examples
from tests.models import conftest as c
from tests.weights.test_offload import HOST, VAE, places, transformer
from tools.tiny import CHANNELS, build
from unfuse.core.compute_options import ComputeOptions
from unfuse.models import find
from unfuse.models.base import Loader, RuntimeOptions
from unfuse.models.wan import WanVae
from unfuse.stages.base import StageInput
from unfuse.stages.vae_decode import VaeDecode
from unfuse.weights.folder import ModelFolder
from unfuse.weights.offload import offload_model

KINDS = ("wan", "wan-2.2-5b")
"""A VAE of each design: in the second, blocks have shortcuts, and pixels come in patches."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: build(kind, tmp_path_factory.mktemp("pieces") / kind) for kind in KINDS}


def loaded(folder: Path | str, dtype: str = "float32", how: str = "whole") -> WanVae:
    options = ComputeOptions(vae=how)  # type: ignore[arg-type]
    return WanVae(Loader(ModelFolder(Path(folder)), VAE, RuntimeOptions("cpu", {"vae": dtype}, options), None))


def latents(vae: WanVae, frames: int, seed: int = 0, height: int = 6, width: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, vae.latents[1], frames, height, width, generator=generator).to(vae.vae.dtype)


@torch.no_grad()
def test_first_fragment_has_one_frame_and_later_ones_the_vae_factor(folders: dict[str, Path]) -> None:
    for kind, each in zip(KINDS, (2, 4), strict=True):
        vae = loaded(folders[kind])
        pieces = [piece.shape[2] for piece in vae.decode_fragments(latents(vae, 3))]
        assert pieces == [1, each, each]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_interleaved_fragment_decoding_equals_decoding_each_video_whole(
    kind: str, dtype: str, folders: dict[str, Path]
) -> None:
    """The VAE object is shared: each request brings what its layers remember, and leaves none behind."""
    vae = loaded(folders[kind], dtype)

    @given(
        frames=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        seed=st.integers(0, 9),
        sides=st.tuples(st.integers(1, 5), st.integers(1, 5)),
        data=st.data(),
    )
    @settings(max_examples=examples(8), deadline=None)
    @torch.no_grad()
    def check(frames: list[int], seed: int, sides: tuple[int, int], data: st.DataObject) -> None:
        grids = [latents(vae, count, seed + number, *sides) for number, count in enumerate(frames)]
        expected = [vae.decode(grid) for grid in grids]
        turns = data.draw(st.permutations([number for number, count in enumerate(frames) for _ in range(count)]))
        pieces, made = [vae.decode_fragments(grid) for grid in grids], [list[Tensor]() for _ in grids]
        for number in turns:
            made[number].append(next(pieces[number]))
        for grid, parts, whole in zip(grids, made, expected, strict=True):
            assert vae.fragment_count(grid) == len(parts)
            assert torch.equal(torch.cat(parts, 2), whole)
        assert [torch.equal(vae.decode(grid), whole) for grid, whole in zip(grids, expected, strict=True)]

    check()


@torch.no_grad()
def test_tiled_vae_decodes_in_one_fragment(folders: dict[str, Path]) -> None:
    vae = loaded(folders["wan"], how="tiled")
    vae.vae.enable_tiling(32, 32, 16, 16)
    grid = latents(vae, 3, height=12, width=12)

    assert vae.fragment_count(grid) == 1
    assert not torch.equal(vae.decode(grid), loaded(folders["wan"]).decode(grid))


@torch.no_grad()
def test_offloaded_vae_is_reloaded_for_each_fragment(folders: dict[str, Path]) -> None:
    vae, busy = loaded(folders["wan"]), offload_model(transformer(), HOST, "model")
    grid = latents(vae, 3)
    expected = vae.decode(grid)
    vae.vae = offload_model(vae.vae, HOST, "model")
    resting, made = places(vae.vae), list[Tensor]()

    for piece in vae.decode_fragments(grid):
        assert places(vae.vae) != resting
        made.append(piece)
        busy(torch.zeros(1, 16, 1, 8, 8), torch.tensor([500]), torch.ones(1, 16, 96), return_dict=False)
        assert places(vae.vae) == resting

    assert torch.equal(torch.cat(made, 2), expected)


@pytest.mark.parametrize(("kind", "steps"), [("wan", 3), ("wan-2.2-5b", 3), ("hunyuan-video", 1)])
def test_only_a_causal_vae_decodes_in_several_steps(kind: str, steps: int, tmp_path: Path) -> None:
    folder = build(kind, tmp_path)
    family = find(folder)
    card = family.model_spec("m", folder)
    (spec,) = (spec for spec in card.pipeline.stages if spec.kind == "vae_decode")
    stage = family.load(spec, folder, RuntimeOptions("cpu", card.dtypes, c.EXACT))
    assert isinstance(stage, VaeDecode)

    given = torch.zeros(1, CHANNELS, 3, 6, 4)
    state = stage.start(StageInput({"output_format": "mp4", "fps": 8}, {"latents": given}))

    assert stage.progress(state) == (0, steps)
