"""Language models on ranks: what they say, see and hand on is what one rank does, and each holds its share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.seen import SIZES, draw
from tests.models.gguf_files import write_gguf
from tests.parallel.conftest import run_ranks
from tests.parallel.test_tensor import runtime
from tools.tiny_language import KINDS, make_language_model
from tools.tiny_vision import KINDS as SEE, make_vision_model
from unfuse.core.compute_options import ParallelDegrees, parse_parallel, refuse
from unfuse.core.errors import ConfigError
from unfuse.models import read_model_spec
from unfuse.models.base import Loader, RuntimeOptions, resident_tensors
from unfuse.models.language import _language_class, _vision_class
from unfuse.planning.placement import Device, WorkerPlan
from unfuse.service.plan import components_by_role, read_models
from unfuse.weights.folder import LANGUAGE, SINGLE_COMPONENT, VISION, ModelFolder
from unfuse.weights.gguf_model import open_files

pytestmark = pytest.mark.slow

TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-2}
"""Of the largest number among keys and values, and among what is seen."""

ROUTED = {("Qwen3VLMoe", "bfloat16"), (KINDS[3], "bfloat16")}
"""Where one token of 250 goes to other experts, because two are as likely but for rounding."""

GGUF = "tiny.gguf"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model of each kind, and two pictures."""
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        make_language_model(root / kind, kind, positions=1024)
    for kind in SEE:
        make_vision_model(root / kind, kind)
    for number, size in enumerate(SIZES):
        draw(root / f"{number}.png", *size, number)
    write_gguf(root / GGUF, root / KINDS[0])
    return root


@pytest.mark.parametrize(
    "asked",
    [
        [*((kind, "float32") for kind in (*KINDS, *SEE)), (GGUF, "float32"), (KINDS[1], "bfloat16")],
        pytest.param([(kind, "bfloat16") for kind in (*KINDS, *SEE)], marks=pytest.mark.nightly),
    ],
    ids=["float32", "bfloat16"],
)
def test_two_ranks_generate_the_same_text_and_kv_as_one(
    asked: list[tuple[str, str]], root: Path, tmp_path: Path
) -> None:
    """Given prompts that end within a chunk, at once and behind two, when one rank, or two with half of the heads each,
    prefill them, from the other's portions too, then keys and values are equal but for rounding, those that an answer
    leaves as well, and the texts that both decode of either's, or of none, are the same, whatever the second rank would
    draw; also where they come in pieces, and where not all have room, and both ranks do alike."""
    codes = run_ranks("texts", 2, tmp_path, asked, str(root))
    assert codes == [0, 0], "\n".join((tmp_path / f"log{rank}").read_text()[-3000:] for rank in range(2))
    first, second = (json.loads((tmp_path / f"out{rank}").read_text()) for rank in range(2))
    for name, dtype in asked:
        found, other = first[f"{name} {dtype}"], second[f"{name} {dtype}"]
        assert found["apart"] <= TOLERANCE[dtype] or (name, dtype) in ROUTED
        assert (found["ranks"], found["left"]) == (other["ranks"], other["left"])
        assert found["left"][0] == 0
        if dtype == "float32":
            assert found["ranks"] == found["one"], name
        if "room" in found:
            assert found["room"] == [[8192, 2], [8192, 1]]
        if "received" in found:
            assert found["received"] == other["received"] == found["ranks"][::3]
        if "close" in found:
            assert found["close"] == other["close"] == found["ranks"] and found["left"][2]


@pytest.mark.parametrize("kind", [*KINDS, *SEE])
def test_planned_bytes_match_the_tensor_parallel_weights_of_a_rank(kind: str, root: Path) -> None:
    """Words stay whole, and norms, and what routes to experts."""
    files = open_files(root / kind)
    parts = {VISION: _vision_class, LANGUAGE: _language_class} if kind in SEE else {SINGLE_COMPONENT: None}
    (plan,) = read_models([str(files.path)], "", WorkerPlan(), (Device("cpu", 1 << 40),))
    for component, part in parts.items():
        planned, *_ = (
            one for role in components_by_role([plan]).values() for one in role if one.component == component
        )
        whole, half, less = (size(files, component, part, rank) for rank in (None, 0, 1))
        assert whole - planned.bytes == half - planned.of_rank(ParallelDegrees({"tensor": 2})).bytes < 0.02 * whole
        assert less <= half < 0.75 * whole


def size(files: ModelFolder, component: str, part: Callable[[Any], Any] | None, rank: int | None) -> int:
    """Bytes of what one of two ranks has, or one alone (None)."""
    dtypes = {component: "float32"}
    given = RuntimeOptions("cpu", dtypes) if rank is None else runtime(rank, dtypes)
    loader = Loader(files, {component: ("transformers", files.kind)}, given, None)
    return sum(tensor.nbytes for tensor in resident_tensors(loader.model(component, part)))


@pytest.mark.parametrize(
    ("kind", "said", "says"),
    [
        (KINDS[0], "language=tensor:4", "tensor:4 does not divide 2: use tensor:2"),
        (KINDS[1], "decode=tensor:3", "tensor:3 does not divide 2: use tensor:2"),
        (KINDS[2], "prefill=shard:2", "shard is not supported for this role; supported: tensor"),
        (SEE[0], "vision=tensor:4", "tensor:4 does not divide 2: use tensor:2"),
        (SEE[1], "vision=layers:2", "layers is not supported for this role; supported: tensor"),
        (SEE[2], "language=ulysses:2", "ulysses is not supported for this role; supported: tensor"),
    ],
)
def test_unsupported_language_model_parallelism_raises_config_error(
    kind: str, said: str, says: str, root: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        refuse(parse_parallel(said), read_model_spec("m", root / kind).pipeline.stages)


def test_language_stages_declare_key_value_heads_as_tensor_degree_limit(root: Path) -> None:
    """Heads of keys, of which there are two, are fewer than those of queries."""
    for kind in (*KINDS, *SEE):
        stages = read_model_spec("m", root / kind).pipeline.stages
        assert {stage.name: stage.parallelism for stage in stages} == {stage.name: {"tensor": 2} for stage in stages}
