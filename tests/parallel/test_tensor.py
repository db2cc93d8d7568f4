"""What of a model's weights a rank keeps when they are cut, and that plans count so much."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.models.conftest import Undivided
from unfuse.core.compute_options import ParallelDegrees
from unfuse.core.errors import ConfigError
from unfuse.core.plan import StageSpec
from unfuse.models import find
from unfuse.models.base import Loader, RuntimeOptions
from unfuse.parallel.parallel_plan import TensorParallelLayers
from unfuse.planning.placement import Device, WorkerPlan
from unfuse.service.plan import components_by_role, read_models
from unfuse.weights.folder import ModelFolder

pytestmark = pytest.mark.slow

BLOCKS = re.compile(r"^(?!.*visual|text_fusion).*((blocks?|layers)\.\d+\..*weight|embed_tokens.weight)$")
"""Weights of blocks and words. What sees in a model for text is left whole, and Krea's few blocks for text are."""

SPEAK = ("qwen-image", "klein")
"""Models whose text encoder speaks, with words whose weights may be those of the words that it reads."""

MODELS = [
    ("wan", "text_encoder"),
    ("wan", "transformer"),
    ("wan-image", "image_encoder"),
    ("wan-image", "transformer"),
    ("wan-2.2", "transformer_2"),
    ("flux", "text_encoder"),
    ("flux", "text_encoder_2"),
    ("flux", "transformer"),
    ("hunyuan-video", "text_encoder"),
    ("hunyuan-video", "transformer"),
    ("qwen-image", "text_encoder"),
    ("qwen-image", "transformer"),
    ("klein", "text_encoder"),
    ("klein", "transformer"),
    ("krea", "text_encoder"),
    ("krea", "transformer"),
    ("sd3", "text_encoder"),
    ("sd3", "text_encoder_3"),
    ("sd3-medium", "transformer"),
    ("z-image", "text_encoder"),
    ("z-image", "transformer"),
    ("kontext", "transformer"),
]


def runtime(rank: int, dtypes: dict[str, str], **given: Any) -> RuntimeOptions:
    """That of one of two ranks, which exchange nothing: they only load."""
    axis = SimpleNamespace(rank=rank, size=2)
    mesh: Any = SimpleNamespace(degrees={"tensor": 2}, axis=lambda *kinds: axis)
    return RuntimeOptions("cpu", dtypes, mesh=mesh, **given)


@pytest.mark.parametrize(("model", "component"), MODELS)
def test_each_tensor_parallel_rank_loads_half_of_the_block_matrices(
    model: str, component: str, undivided: Undivided
) -> None:
    folder = ModelFolder(undivided.folder(model))
    family = find(folder.path)

    def sizes(given: RuntimeOptions) -> tuple[dict[str, int], int]:
        """Elements of the matrices of blocks, and all bytes."""
        loaded = Loader(folder, family.components(folder), given, None, family.parallel_plans).model(component)
        weights, kept = loaded.state_dict().items(), loaded.state_dict().keys()
        stored = [buffer for name, buffer in loaded.named_buffers() if name in kept]
        takes = sum(tensor.nbytes for tensor in (*loaded.parameters(), *stored))
        return {name: tensor.numel() for name, tensor in weights if BLOCKS.match(name) and tensor.dim() > 1}, takes

    dtypes = {component: "float32"}
    whole, takes = sizes(RuntimeOptions("cpu", dtypes))
    assert len(whole) > 5
    (plan,) = read_models([str(folder.path)], "", WorkerPlan(), (Device("cpu", 1 << 40),))
    (part,) = (part for parts in components_by_role([plan]).values() for part in parts if part.component == component)
    assert part.of_rank(ParallelDegrees({"ulysses": 2})) == replace(part, activations=-(-part.activations // 2))
    assert part.bytes == takes
    most = part.of_rank(ParallelDegrees({"tensor": 2, "cfg": 2})).bytes
    for rank in (0, 1):
        kept, takes = sizes(runtime(rank, dtypes))
        assert most == takes if rank == 0 else 0.9 * most < takes <= most
        words = [name for name in whole if name.endswith("embed_tokens.weight") and model in SPEAK]
        assert [name for name in whole if 2 * kept[name] != whole[name]] == words


def test_loras_with_tensor_parallel_denoiser_are_rejected_before_loading(undivided: Undivided) -> None:
    folder = undivided.folder("wan")
    family = find(folder)
    spec = {stage.name: stage for stage in family.model_spec("model", folder).pipeline.stages}
    adapted = runtime(0, {}, loras="/a/folder")

    def refusal(stage: StageSpec, given: RuntimeOptions) -> str:
        with pytest.raises(ConfigError) as error:
            family.load(stage, folder / "nothing", given)
        return str(error.value)

    assert "--loras cannot be combined with --parallel denoiser=tensor" in refusal(spec["denoise"], adapted)
    assert "nothing" in refusal(spec["text_encode"], adapted)


SAID = {
    "wan": {"text_encode": 4, "denoise": 2},
    "wan-2.2": {"text_encode": 4, "denoise": 2},
    "wan-image": {"text_encode": 4, "image_encode": 4, "denoise": 2},
    "wan-2.2-image": {"text_encode": 4, "image_encode": 0, "denoise": 2},
    "flux": {"text_encode": 4, "text_encode_2": 4, "denoise": 2},
    "hunyuan-video": {"text_encode": 2, "text_encode_2": 4, "denoise": 2},
    "qwen-image": {"text_encode": 2, "denoise": 2},
    "klein": {"text_encode": 2, "denoise": 2},
    "krea": {"text_encode": 2, "denoise": 2},
}
"""Heads, or those of keys where they are fewer; by 0 a stage may be spread that has nothing to cut."""


@pytest.mark.parametrize("model", SAID)
def test_stages_declare_the_number_that_tensor_degrees_must_divide(model: str, undivided: Undivided) -> None:
    folder = undivided.folder(model)
    stages = find(folder).model_spec("model", folder).pipeline.stages
    assert {stage.name: stage.parallelism["tensor"] for stage in stages if "tensor" in stage.parallelism} == SAID[model]


@pytest.mark.parametrize(
    ("config", "common"),
    [
        ({"heads": 12, "width": 40}, 4),
        ({"heads": 12, "width": None}, 12),
        ({"heads": 12}, 1),
        ({"heads": 5, "text_config": {"heads": 12, "width": 40}}, 4),
    ],
)
def test_tensor_degree_must_divide_the_gcd_of_the_config_dimensions(config: dict[str, Any], common: int) -> None:
    assert TensorParallelLayers((), (), ("heads", "width")).common(config) == common
