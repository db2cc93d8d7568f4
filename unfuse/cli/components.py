"""What a model's components weigh, from its JSON files and the headers of its safetensors: no weight is read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from unfuse.core.errors import ConfigError

MAX_HEADER = 100 * 1024 * 1024
"""Longest header of a safetensors file, in bytes, as its own library has it."""

WEIGHT_FILES = "*.safetensors"


class Component(msgspec.Struct, frozen=True):
    """A folder of a model: its class, bytes of weights on disk, parameters, and tensors by dtype."""

    name: str
    kind: str
    bytes: int
    parameters: int
    dtypes: dict[str, int]


def components(folder: Path) -> list[Component]:
    """The components that `model_index.json` names. Raises ConfigError for a folder that cannot be read as a model."""
    index = _read(folder / "model_index.json")
    found = []
    for name, entry in index.items():
        if isinstance(entry, list) and len(entry) == 2 and entry[1] is not None:
            found.append(_component(folder / name, str(entry[1])))
    return found


def _component(folder: Path, kind: str) -> Component:
    if not folder.is_dir():
        raise ConfigError(f"the model lacks the folder {folder}, which its model_index.json names")
    dtypes: Counter[str] = Counter()
    total = parameters = 0
    for file in sorted(folder.glob(WEIGHT_FILES)):
        for tensor in header(file).values():
            count = 1
            for side in tensor["shape"]:
                count *= side
            first, last = tensor["data_offsets"]
            dtypes[tensor["dtype"]] += 1
            parameters += count
            total += last - first
    return Component(folder.name, kind, total, parameters, dict(dtypes))


def header(file: Path) -> dict[str, Any]:
    """Tensors of a safetensors file by name: dtype, shape, data_offsets. Raises ConfigError for any other file."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        raw = stream.read(length) if 0 < length <= MAX_HEADER else b""
    try:
        tensors = json.loads(raw)
    except ValueError as error:
        raise ConfigError(f"{file} is not a safetensors file: fetch it again") from error
    tensors.pop("__metadata__", None)
    return dict(tensors)


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except OSError as error:
        raise ConfigError(f"{file.parent} is not a model in diffusers' format: it has no {file.name}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
