"""Flags of torch that decide the bytes of results on CUDA devices. A build for CPUs has them too."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.messages import StorageLocations
from unfuse.core.plan import StageSelector
from unfuse.models import find, resolve_source
from unfuse.parallel.kernel_flags import SDPA_BACKENDS, kernel_flags, set_kernel_flags
from unfuse.worker import compute
from unfuse.worker.compute_messages import ComputeChannel, LoadModels

FLAGS = {"tf32": "off", "cudnn": "deterministic", "sdpa": "cudnn+flash+math+mem_efficient"}


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Flags that are as far from ours as can be, and torch's own afterwards."""
    backends = torch.backends
    before = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.deterministic
    backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = backends.cudnn.benchmark = True
    backends.cuda.enable_flash_sdp(False)
    yield
    backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.deterministic = before
    backends.cudnn.benchmark = False
    for backend in SDPA_BACKENDS:
        getattr(backends.cuda, f"enable_{backend}_sdp")(True)


def test_float32_is_float32_on_cuda_and_kernels_are_not_chosen_by_timings() -> None:
    assert set_kernel_flags("cuda:1", "ieee") == FLAGS
    assert not (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)
    assert not torch.backends.cudnn.benchmark and torch.backends.cudnn.deterministic
    assert all(getattr(torch.backends.cuda, f"{backend}_sdp_enabled")() for backend in SDPA_BACKENDS)
    assert torch.get_float32_matmul_precision() == "highest"


def test_setting_allows_tf32_and_makes_other_numerics() -> None:
    assert set_kernel_flags("cuda", "tf32") == {**FLAGS, "tf32": "matmul+cudnn"}
    assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("device", ["cpu", "xpu:0", "mps"])
def test_other_devices_have_no_flags_in_their_numerics(device: str) -> None:
    before = kernel_flags()
    assert set_kernel_flags(device, "ieee") == {}
    assert kernel_flags() == before


class Loading(Exception):
    """Raised when the first stage would be loaded."""


def flags_at_the_first_load(monkeypatch: pytest.MonkeyPatch, device: str, **options: Any) -> tuple[dict[str, str], ...]:
    """The numerics of a worker on this device, and torch's flags when its first stage is loaded."""
    source = "unfuse/shapes"
    numerics = list[dict[str, str]]()
    monkeypatch.setattr(compute, "_device", lambda load, with_torch: device)
    monkeypatch.setattr(compute, "_device_name", lambda device: device)
    monkeypatch.setattr(compute, "_check_agreement", lambda group, values, pools: numerics.append(values))

    def load(*_: object) -> None:
        raise Loading

    monkeypatch.setattr(type(find(resolve_source(source))), "load", load)
    models = LoadModels(
        ((source, source, "auto"),),
        StageSelector(),
        ComputeOptions(**options),
        "w",
        "n",
        "",
        b"",
        StorageLocations("memory"),
    )
    with pytest.raises(Loading):
        compute._load_stages(models, cast(ComputeChannel, SimpleNamespace(send=bool)), None)
    return numerics[0], kernel_flags()


def test_flags_are_set_before_a_stage_is_loaded_and_are_part_of_the_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    numerics, flags = flags_at_the_first_load(monkeypatch, "cuda:0")
    assert flags == FLAGS
    assert flags.items() <= numerics.items()
    numerics, _ = flags_at_the_first_load(monkeypatch, "cuda:0", fp32_precision="tf32")
    assert numerics["tf32"] == "matmul+cudnn"


def test_numerics_of_a_cpu_have_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    numerics, _ = flags_at_the_first_load(monkeypatch, "cpu", fp32_precision="tf32")
    assert numerics.keys().isdisjoint(FLAGS)
