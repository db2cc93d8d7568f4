"""Which libraries enter the numerics of a worker that serves several models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from unfuse.core.errors import ConfigError
from unfuse.core.plan import Pipeline, StageSelector, StageSpec
from unfuse.worker import compute

STAGES = (
    StageSpec("encode", "encode", ("text_encoder",), role="encoder"),
    StageSpec("denoise", "denoise", ("transformer",), role="denoiser"),
)


@pytest.mark.parametrize(
    ("roles", "libraries"),
    [
        (None, {"torch", "diffusers", "torchao"}),
        ({"denoiser"}, {"torch", "diffusers", "torchao"}),
        ({"encoder"}, {"torch", "diffusers"}),
    ],
)
def test_quantization_of_any_model_enters_the_numerics(
    monkeypatch: pytest.MonkeyPatch, roles: set[str] | None, libraries: set[str]
) -> None:
    """Whichever of them is loaded: a swap must not change the names of pools."""

    def read(name: str, folder: Path, dtype: str) -> SimpleNamespace:
        if name == "damaged":
            raise ConfigError("no such file")
        return SimpleNamespace(pipeline=Pipeline(STAGES))

    def files(folder: Path) -> SimpleNamespace:
        is_quantized = folder.name == "quantized"
        return SimpleNamespace(
            quantization=lambda name: {"bits": 8} if is_quantized and name == "transformer" else None
        )

    monkeypatch.setattr(compute, "find", lambda folder: SimpleNamespace(torch=True, libraries=("diffusers",)))
    monkeypatch.setattr(compute, "read_model_spec", read)
    monkeypatch.setattr(compute, "open_files", files)
    monkeypatch.setattr(compute, "library", lambda configs: {"torchao"} if any(configs) else set())
    models = [(name, Path(name), "auto") for name in ("plain", "damaged", "quantized")]
    choice = StageSelector(frozenset(roles) if roles else None)
    assert compute._libraries_of(models, choice) == libraries
