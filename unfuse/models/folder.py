"""A model on disk in diffusers' layout: its parts as JSON and bytes, never read as code, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from unfuse.core.errors import ConfigError

INDEX = "model_index.json"
CONFIG = "config.json"
CONFIGS = {"scheduler": "scheduler_config.json", "tokenizer": "tokenizer_config.json"}
"""Configuration files of components that have no weights; a second one of a kind is called tokenizer_2, and so on."""

SUFFIXES = frozenset({".json", ".safetensors", ".txt", ".model"})
REPAIR = "download or save the model again"

WHOLE_BYTES = 64 * 1024 * 1024
"""Files up to this size are hashed whole."""

SAMPLES = 64
SAMPLE_BYTES = 64 * 1024
HEADER_LENGTH = 8
"""A safetensors file begins with the length of its JSON header, as 8 bytes, least first."""


class ModelFolder:
    """Reads a model's folder. Every method raises ConfigError, naming the file, when what it needs is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def index(self) -> dict[str, Any]:
        """What model_index.json says: the pipeline's class, and library and class of each component."""
        return self._json(INDEX, "this is no model in diffusers' layout")

    def config(self, component: str) -> dict[str, Any]:
        """The configuration of a component, whatever its file is called."""
        return self._json(f"{component}/{_config_name(component)}", f"component {component} is incomplete")

    def weights(self, component: str) -> list[Path]:
        """The safetensors files of a component, every shard that its index names among them."""
        folder = self.path / component
        files = sorted(folder.glob("*.safetensors"))
        named = {CONFIG} if files else {CONFIG, "*.safetensors"}
        for shards in folder.glob("*.safetensors.index.json"):
            index = self._json(f"{component}/{shards.name}", f"component {component} is incomplete")
            named.update(index.get("weight_map", {}).values())
        present = {file.name for file in files} | {CONFIG}
        if missing := sorted(named - present):
            raise ConfigError(f"model {self.path}: component {component} lacks {component}/{missing[0]}; {REPAIR}")
        return files

    def size(self, component: str) -> int:
        """Bytes of a component's files."""
        return sum(file.stat().st_size for file in self._files(component))

    def identity(self, *components: str) -> str:
        """What tells components from others: equal for equal copies, other for another configuration or weights.

        xxh3-128 over name, size and content of each file. Of a file above WHOLE_BYTES the content is sampled: its
        safetensors header (names, shapes and offsets of all tensors) and SAMPLES pieces spread over the rest; a change
        that leaves all of these alone goes unseen.
        """
        digest = xxhash.xxh3_128()
        for file in (file for component in components for file in self._files(component)):
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            for piece in _content(file, size):
                digest.update(piece)
        return digest.hexdigest()

    def _files(self, component: str) -> list[Path]:
        self.config(component)
        if _config_name(component) == CONFIG:
            self.weights(component)
        files = (self.path / component).iterdir()
        return sorted(file for file in files if file.suffix in SUFFIXES and file.is_file())

    def _json(self, name: str, consequence: str) -> dict[str, Any]:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=dict[str, Any])
        except OSError as error:
            reason = f"{name} cannot be read ({error.strerror}), so {consequence}"
            raise ConfigError(f"model {self.path}: {reason}; {REPAIR}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"model {self.path}: {name} is not valid: {error}") from error


def _config_name(component: str) -> str:
    return CONFIGS.get(component.partition("_")[0], CONFIG)


def _content(file: Path, size: int) -> Iterator[bytes]:
    if size <= WHOLE_BYTES:
        yield file.read_bytes()
        return
    with file.open("rb") as stream:
        head = stream.read(HEADER_LENGTH)
        data = HEADER_LENGTH + min(int.from_bytes(head, "little"), WHOLE_BYTES - SAMPLE_BYTES)
        yield head + stream.read(data - HEADER_LENGTH)
        for sample in range(SAMPLES):
            stream.seek(data + (size - data - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            yield stream.read(SAMPLE_BYTES)
