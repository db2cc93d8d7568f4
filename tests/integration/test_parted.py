"""Ranks that hold a part of the weights each: what they make, and how much memory they take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.integration.test_ranks import alone as alone, hold, ranks
from tools.server import serving
from unfuse.models import resolve_source

DEEP, WIDE, LIMIT = 24, 22_000, "575MiB"
"""Blocks, and the width of their feed-forwards, so that all weights take 300 MB in bfloat16; and less than a process
with all of them takes.
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("spread", "equal"),
    [
        ("layers:2", True),
        ("shard:2", False),
        ("cfg:2+layers:2", True),
        ("ulysses:2+shard:2", False),
    ],
)
def test_layer_and_weight_sharded_ranks_match_one_rank(
    spread: str, equal: bool, alone: dict[int, bytes], tmp_path: Path
) -> None:
    with ranks(tmp_path, spread) as server:
        hold(server, spread, equal, alone)


def widened(folder: Path) -> Path:
    """The built-in model with many blocks, and feed-forwards that have zeros behind what they had."""
    shutil.copytree(resolve_source("unfuse/shapes"), folder)
    (file,) = (folder / "transformer").glob("*.safetensors")
    config = folder / "transformer" / "config.json"
    said = json.loads(config.read_text())
    tensors = load_file(file)
    for name, tensor in [*tensors.items()]:
        if ".ffn.net.0." in name or name.endswith(".ffn.net.2.weight"):
            axis = 0 if ".net.0." in name else 1
            behind = [(0, WIDE - size if number == axis else 0) for number, size in enumerate(tensor.shape)]
            tensors[name] = np.pad(tensor, behind)
        if name.startswith("blocks."):
            _, block, rest = name.split(".", 2)
            more = range(int(block) + said["num_layers"], DEEP, said["num_layers"])
            tensors |= {f"blocks.{number}.{rest}": tensors[name] for number in more}
    save_file(tensors, file)
    config.write_text(json.dumps({**said, "ffn_dim": WIDE, "num_layers": DEEP}))
    return folder


@pytest.mark.nightly
def test_two_ranks_serve_a_model_over_the_memory_limit_of_one(tmp_path: Path) -> None:
    """What weights take that are not as their file has them is memory of the process."""
    model = widened(tmp_path / "wide")
    limit = ("--workers", "split", "--threads", "1", "--dtype", "transformer=bfloat16", "--memory-limit", LIMIT)
    ended = {}
    for how in ("", "layers:2", "shard:2"):
        spread = ("--parallel", f"denoiser={how}") if how else ()
        place = tmp_path / (how or "one")
        place.mkdir()
        with serving(place, str(model), *limit, *spread) as server:
            server.ready()
            request = server.submit("a red circle on white", seed=1, num_inference_steps=8)
            ended[how] = server.finished(request)
    assert "--memory-limit allows 575.0 MiB" in ended[""]["error"]["message"]
    assert [ended[how]["status"] for how in ("layers:2", "shard:2")] == ["completed", "completed"]
