"""LoRA adapters on a pretended GPU make the CPU's bytes: loaded, at another scale, and none again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pretend.families import cases
from tests.pretend.gpus import PretendedGpus
from tests.pretend.running import GPU, LoadedModel, Run, differing, load, run_request
from tools import tiny
from unfuse.weights.adapters import AdapterFolder

pytestmark = pytest.mark.nightly

KINDS = ("flux", "wan", "wan-2.2", "sdxl", "sd3", "z-image", "ltx", "kontext")
REQUESTS = ({}, {"lora": "first", "lora_scale": 0.8}, {"lora": "second,first:-0.3", "lora_scale": 1.0}, {})


@pytest.mark.parametrize("offload", ["none", "model"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_second_gpu_have_bytes_of_cpu(kind: str, offload: str, tmp_path: Path) -> None:
    folder, loras = tiny.build(kind, tmp_path / kind), tmp_path / "loras"
    for seed, name in enumerate(("first", "second")):
        tiny.adapter(folder, loras, name, seed)
    adapters = AdapterFolder(str(loras))

    def runs(model: LoadedModel) -> list[Run]:
        plain = cases(kind)["plain"]
        ids = [adapters.ids_of(request["lora"]) if "lora" in request else "" for request in REQUESTS]
        return [
            run_request(model, plain | request, lora_id=lora_id) for request, lora_id in zip(REQUESTS, ids, strict=True)
        ]

    expected = runs(load(folder, loras=str(loras)))
    assert differing(expected[0], expected[1]) and differing(expected[1], expected[2])
    with PretendedGpus():
        found = runs(load(folder, GPU, loras=str(loras), offload=offload))
    assert [differing(*pair) for pair in zip(expected, found, strict=True)] == [[]] * len(REQUESTS)
