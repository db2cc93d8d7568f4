"""What a model weighs, by its files' headers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from unfuse.cli.components import components, header
from unfuse.core.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of one component with weights, one without, and one that is left out."""
    (tmp_path / "vae").mkdir()
    (tmp_path / "scheduler").mkdir()
    index = {
        "_class_name": "APipeline", "vae": ["diffusers", "AVae"], "scheduler": ["diffusers", "AScheduler"],
        "image_encoder": [None, None], "boundary": 0.5,
    }  # fmt: skip
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    tensors = {"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.float16)}
    save_file(tensors, tmp_path / "vae" / "w.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_weights_are_counted_without_being_read(model: Path) -> None:
    vae, scheduler = components(model)

    assert (vae.name, vae.kind, vae.bytes, vae.parameters) == ("vae", "AVae", 3 * 5 * 4 + 7 * 2, 22)
    assert vae.dtypes == {"F32": 1, "F16": 1}
    assert (scheduler.name, scheduler.bytes, scheduler.dtypes) == ("scheduler", 0, {})


def test_a_missing_component_is_named(model: Path) -> None:
    (model / "scheduler").rmdir()
    with pytest.raises(ConfigError, match="lacks the folder .*scheduler"):
        components(model)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no model_index\.json"):
        components(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 64, b"\x05\x00\x00\x00\x00\x00\x00\x00{oops"])
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        header(file)
