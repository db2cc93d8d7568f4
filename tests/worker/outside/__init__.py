"""A package from elsewhere that brings a family, as installing it would."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def install(patch: pytest.MonkeyPatch) -> None:
    """Have it found here and in every process that is started from now on."""
    patch.syspath_prepend(str(HERE))
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")])))


def model(folder: Path) -> Path:
    """A model of that family: three components without weights."""
    components = ("tokenizer", "tokenizer_2", "tokenizer_3")
    folder.mkdir(parents=True, exist_ok=True)
    index = {"_class_name": "OutsidePipeline", **{name: ["outside_family", "Text"] for name in components}}
    (folder / "model_index.json").write_text(json.dumps(index))
    for name in components:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "tokenizer_config.json").write_text(json.dumps({"part": name}))
    return folder
