"""What a person is told when a model does not fit into memory while it loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.test_retries import HOST, OUT_OF_MEMORY
from tools.cards import STILL
from unfuse.core.errors import ConfigError
from unfuse.worker.compute import LoadProgress
from unfuse.worker.load_memory import explain_out_of_memory


@pytest.mark.parametrize("text", [text for text in OUT_OF_MEMORY if not any(word in text for word in HOST)])
def test_out_of_memory_while_loading_is_a_sentence(text: str) -> None:
    with (
        pytest.raises(ConfigError) as raised,
        explain_out_of_memory(lambda: "transformer in stage denoise of m", "cuda:0", lambda: 3 << 30),
    ):
        raise RuntimeError(text)
    assert str(raised.value) == (
        "out of memory while loading transformer in stage denoise of m: 3.0 GiB of cuda:0 are free; stop other "
        "programs on it, choose another one with --device or --place, or use --offload or quantized weights "
        f"({text.splitlines()[0].rstrip('.')})"
    )


def test_wrapped_error_is_explained_and_other_errors_pass() -> None:
    with pytest.raises(ConfigError, match="host|of cpu are free; stop"), explain_out_of_memory(str, "cpu", lambda: 1):
        raise ConfigError("component vae cannot be loaded") from MemoryError()
    with pytest.raises(ConfigError, match="^no such file$"), explain_out_of_memory(str, "cpu", lambda: 1):
        raise ConfigError("no such file")


def test_lack_of_host_memory_while_a_gpu_is_loaded_names_the_host() -> None:
    """As when weights are pinned for offload."""
    with (
        pytest.raises(ConfigError, match="while loading vae: .* of cpu are free; stop other programs, start fewer"),
        explain_out_of_memory(lambda: "vae", "cuda:0", lambda: 1 << 40),
    ):
        raise RuntimeError("cudaHostAlloc failed")


def test_device_that_does_not_answer_is_still_explained() -> None:
    def free() -> int:
        raise RuntimeError("device lost")

    for device, name in {"cuda:0": "cuda:0", "auto": "the device"}.items():
        with (
            pytest.raises(ConfigError, match=f"{name} has too little free memory; stop other programs"),
            explain_out_of_memory(str, device, free),
        ):
            raise RuntimeError("CUDA error: out of memory")


def test_component_that_is_loaded_next_is_named_with_its_bytes(tmp_path: Path) -> None:
    denoise = next(stage for stage in STILL.pipeline.stages if stage.kind == "denoise")
    for name in denoise.components:
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(bytes(2048))
    progress = LoadProgress([(denoise, tmp_path)], lambda message: None)
    progress.start_stage("m", denoise, tmp_path)
    assert progress.describe_next() == f"{denoise.components[0]} in stage denoise of m, whose files have 2.0 KiB"
    for name in denoise.components:
        progress.loaded(name, 0.1, 1)
    assert progress.describe_next() == "stage denoise of m"
