"""Folders of published models with real configurations and sparse files: they have sizes, and no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGURATIONS = Path(__file__).with_name("real_models")
NAMES = tuple(sorted(file.stem for file in CONFIGURATIONS.glob("*.json")))
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}

GB24, GB80 = "23.4GiB", "79GiB"
"""What is free on a card of 24 GB and on one of 80 GB."""


def configuration(name: str) -> dict[str, Any]:
    """The committed description of a model."""
    described: dict[str, Any] = json.loads((CONFIGURATIONS / f"{name}.json").read_text())
    return described


def make_folder(name: str, folder: Path) -> Path:
    """A folder with the model's configurations, whose weights files are sparse."""
    described = configuration(name)
    components = described["components"]
    folder.mkdir(parents=True)
    if not described["pipeline"]:
        (component,) = components.values()
        _write(folder, component, "config.json", "model.safetensors")
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
        return folder
    index = {entry: [one["library"], one["class"]] for entry, one in components.items()}
    (folder / "model_index.json").write_text(
        json.dumps({"_class_name": described["pipeline"], **described["index"], **index})
    )
    for entry, one in components.items():
        (folder / entry).mkdir()
        scheduler, tokenizer = entry == "scheduler", "tokenizer" in entry
        config = "scheduler_config.json" if scheduler else "tokenizer_config.json" if tokenizer else "config.json"
        weights = "model.safetensors" if one["library"] == "transformers" else "diffusion_pytorch_model.safetensors"
        _write(folder / entry, one, config, weights)
    return folder


PREPROCESSOR = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056}
"""Of Qwen2.5-VL: its values are those of the class."""


def _write(folder: Path, component: dict[str, Any], config: str, weights: str) -> None:
    """Write a component's configuration, and sparse weights with as many numbers as it has."""
    (folder / config).write_text(json.dumps(component.get("config", {})))
    if not (numbers := component.get("parameters", 0)):
        return
    seen = component.get("vision_parameters", 0)
    names = {"visual.weight": seen, "model.weight": numbers - seen} if seen else {"weight": numbers}
    header, offset = {}, 0
    for name, count in names.items():
        size = count * WIDTHS[component["stored"]]
        header[name] = {"dtype": component["stored"], "shape": [count], "data_offsets": [offset, offset + size]}
        offset += size
    described = json.dumps(header).encode()
    with (folder / weights).open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        file.truncate(8 + len(described) + offset)
