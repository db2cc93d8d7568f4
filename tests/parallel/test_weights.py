"""What the first rank has made of files, all have: the bytes of one that loads alone, in memory that is there once."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import Linear, Sequential

from tests.parallel.conftest import run_ranks
from tools.tiny import KINDS, build
from unfuse.parallel.weights import write
from unfuse.weights.shared import map_from

pytestmark = pytest.mark.slow

DTYPES = "bfloat16", "float16", "bfloat16,vae=bfloat16"


def loaded(folder: Path, root: Path, cases: Sequence[tuple[str, str, str]], ranks: int = 2) -> list[list[list[Any]]]:
    """What each rank says of these models, dtypes and spreads."""
    codes = run_ranks("loading", ranks, folder, cases, str(root))
    assert codes == [0] * ranks, (folder / "log0").read_text()[-2000:]
    return [[json.loads(line) for line in (folder / f"out{rank}").read_text().splitlines()] for rank in range(ranks)]


@pytest.mark.parametrize("kinds", [("wan", "flux"), pytest.param(KINDS, marks=pytest.mark.nightly)], ids=["two", "all"])
def test_ranks_share_one_copy_of_correct_weights(kinds: Sequence[str], tmp_path: Path) -> None:
    """Also what is kept in float32 of a model in half precision."""
    for kind in kinds:
        build(kind, tmp_path / kind)
    for said in loaded(tmp_path, tmp_path, [(kind, dtype, "") for kind in kinds for dtype in DTYPES]):
        assert {kind for kind, *_ in said} == {*kinds}
        for kind, component, wrong, size, common, made in said:
            assert wrong == [], (kind, component)
            assert common > size / 2 if made else common == 0, (kind, component)


@pytest.mark.nightly
def test_ranks_with_partial_weights_share_no_memory_and_load_less(tmp_path: Path) -> None:
    build("flux", tmp_path / "flux")
    whole = {one[1]: one[3] for one in loaded(tmp_path, tmp_path, [("flux", "bfloat16", "")])[0]}
    for how in ("layers:2", "shard:2", "tensor:2"):
        place = tmp_path / how
        place.mkdir()
        for said in loaded(place, tmp_path, [("flux", "bfloat16", how)]):
            ((*_, size, common, _),) = (one for one in said if one[1] == "transformer")
            assert common == 0
            assert size < 0.7 * whole["transformer"]
            assert how != "shard:2" or 2 * size == whole["transformer"]


def test_load_failure_of_rank_0_fails_all_ranks_with_the_same_reason(tmp_path: Path) -> None:
    folder = build("wan", tmp_path / "wan")
    (file,) = (folder / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    del tensors["proj_out.weight"]
    save_file(tensors, file)
    first, second = loaded(tmp_path, tmp_path, [("wan", "bfloat16", "")])
    assert first == second
    assert not [*tmp_path.glob(".weights.*")]
    (reason,) = (said for _, component, said, *_ in first if component == "transformer")
    assert "component transformer lack proj_out.weight (1 tensors in total)" in reason


def test_mapped_weights_alias_the_shared_file_without_a_copy() -> None:
    """What another process changes shows: here it is this one."""
    model, file = Sequential(Linear(16, 16), Linear(16, 3)), os.memfd_create("weights")
    model[1].bias = model[0].bias = torch.nn.Parameter(torch.arange(3.0))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write(file, dict(model.state_dict()))
    map_from(model, Path(f"/proc/self/fd/{file}"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    end = os.fstat(file).st_size
    os.pwrite(file, b"\0" * end, 0)
    assert not any(tensor.any() for tensor in model.state_dict().values())
    os.close(file)
