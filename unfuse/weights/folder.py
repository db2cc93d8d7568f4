"""A model's folder in the layout of diffusers or transformers, read as JSON and bytes.

Nothing is executed as code, and torch is not imported. In the hub library's cache, files that were not downloaded are
known too, from the listing of their commit.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
import xxhash

from unfuse.core.errors import ConfigError
from unfuse.weights.fingerprints import FINGERPRINTS, Algorithm
from unfuse.weights.gguf import GGUF, QUANTIZED, REPAIR, contents
from unfuse.weights.quantized import SETTING, codes, is_whole_number, refusal
from unfuse.weights.single import may_be_class, single_of, singles_of, tensor_names

#: The file with a model's defaults and limits.
SERVING = "serving.json"

#: The file that describes a pipeline of diffusers.
INDEX = "model_index.json"

#: The configuration file of a component with weights.
CONFIG = "config.json"

#: The component of a model that has no other.
SINGLE_COMPONENT = "model"

#: The components of a vision-language model of transformers: parts of one class, whose weights are in the same files.
LANGUAGE, VISION = "language", "vision"

#: The part of a tensor's name that marks those of the vision encoder.
VISION_PREFIX = "visual."

#: Configuration files of components that have no weights. A second one of a kind is called tokenizer_2, and so on.
CONFIGS = {
    "scheduler": "scheduler_config.json",
    "tokenizer": "tokenizer_config.json",
    "image_processor": "preprocessor_config.json",
    "feature_extractor": "preprocessor_config.json",
    "processor": "tokenizer_config.json",
}

#: Suffixes of files that are read beside weights. None of them can be code or a pickle.
PLAIN = frozenset({".json", ".txt", ".model", ".jinja"})

#: Where diffusers and transformers look for weights, in this order. An index names shards.
WEIGHTS = (
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "model.safetensors",
    "model.safetensors.index.json",
)

#: The names of tensors of a single expert of a mixture of experts. The model has one tensor for all experts of a layer.
SINGLE_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")

#: The names of dtypes in safetensors files.
STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

#: The configuration file of a LoRA adapter.
ADAPTER = "adapter_config.json"
_ADAPTER = "a LoRA adapter, which is not a model: serve its base model with --loras FOLDER"
_PICKLE = "weights that are not safetensors: save the model again as safetensors"

#: Files that may be there instead of a model or its weights, and what to do about them.
UNSERVED = {
    ADAPTER: _ADAPTER,
    "adapter_model.*": _ADAPTER,
    "pytorch_lora_weights.*": _ADAPTER,
    "*.gguf": "GGUF weights, which are supported only as a local file of a language model, or in a denoiser's folder: "
    "use the path of the file, or replace the weights in the denoiser's folder by it",
    "*model.*.safetensors": "a weight variant, which is not supported: save the model without a variant",
    "*.safetensors": "a checkpoint outside diffusers' layout: replace the weights in its component's folder by it",
    "*.bin": _PICKLE,
    "*.ckpt": _PICKLE,
    "*.pt": _PICKLE,
    "*.pth": _PICKLE,
}

#: Seconds before each further request for a header.
PAUSES_S = (0.5, 1.0, 2.0)

#: Bytes at the start of a safetensors file with the length of its JSON header, little-endian.
HEADER_LENGTH = 8

#: Digits of the hub's hash of a large file. Small files have shorter git hashes.
SHA256_DIGITS = 64

#: The longest header of a safetensors file in bytes, as in the hub's library. A longer one would be slow to parse.
MAX_HEADER = 25_000_000


class HubFile(msgspec.Struct, frozen=True):
    """A file's size and the hub's hashes of its content."""

    #: Bytes.
    size: int
    #: The git hash. "" in a folder that is not from the hub.
    blob_id: str = ""
    #: The SHA-256 hash of a large file.
    lfs_sha256: str | None = None

    @property
    def digest(self) -> str:
        """The hub's hash of its content; "" if there is none."""
        return self.lfs_sha256 or self.blob_id

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of `digest`."""
        return "sha256" if len(self.digest) == SHA256_DIGITS else "git"


class _Tree(msgspec.Struct, frozen=True):
    """The listing of a commit, as the hub library caches it."""

    format_version: Literal[1]
    files: dict[str, HubFile]


class _Tensor(TypedDict):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class ModelFolder:
    """The folder of a model.

    Every method raises ConfigError if a file that it needs is missing.
    A pipeline of diffusers has a folder per component. A model of transformers is one component, `SINGLE_COMPONENT`, or
    `LANGUAGE` and `VISION` if it is a vision-language model; its files are in the folder itself.
    """

    def __init__(self, path: Path) -> None:
        #: The folder.
        self.path = path
        kind, _, name = path.parent.parent.name.partition("--")
        is_snapshot = name and (kind, path.parent.name) == ("models", "snapshots")
        #: The name and commit of a model in the hub library's cache; None for a plain folder.
        self.hub = (name.replace("--", "/"), path.name) if is_snapshot else None

    @property
    def home(self) -> Path:
        """The folder that contains all its files."""
        return self.path

    @property
    def created(self) -> int:
        """When it was saved, in Unix seconds.

        0 for a model from the hub, where the time differs between machines.
        """
        return 0 if self.hub else int((self.path / (CONFIG if self.is_transformers_model else INDEX)).stat().st_mtime)

    @cached_property
    def is_transformers_model(self) -> bool:
        """Whether it is a model of transformers, not a pipeline."""
        config = self.path / CONFIG
        return not (self.path / INDEX).exists() and config.exists() and "architectures" in self.optional_config(CONFIG)

    @property
    def kind(self) -> str:
        """The class in its configuration: of the pipeline, or of the model itself."""
        if self.is_transformers_model:
            return str(next(iter(self.config(SINGLE_COMPONENT).get("architectures") or ()), None))
        return str(self.index().get("_class_name"))

    def components(self) -> list[str]:
        """Return the names of its components."""
        if self.is_transformers_model:
            return [LANGUAGE, VISION] if "vision_config" in self.config(SINGLE_COMPONENT) else [SINGLE_COMPONENT]
        pairs = ((name, pair) for name, pair in self.index().items() if isinstance(pair, list) and len(pair) == 2)
        return [
            name for name, pair in pairs if not name.startswith("_") and all(isinstance(item, str) for item in pair)
        ]

    def class_of(self, component: str) -> str:
        """Return the name of a component's class in its library."""
        return self.kind if self.is_transformers_model else str(self.index()[component][1])

    def optional_config(self, name: str) -> dict[str, Any]:
        """Return an optional file of settings; empty if it does not exist."""
        return self._json(name, "its settings are unknown") if (self.path / name).exists() else {}

    def index(self) -> dict[str, Any]:
        """Return model_index.json: the pipeline's class, and each component's library and class."""
        return self._json(INDEX, "this is not a model in diffusers' layout")

    def config(self, component: str) -> dict[str, Any]:
        """Return the configuration of a component, in whichever file it is."""
        name = f"{self.component_path(component)}{_config_name(component)}"
        return self._json(name, f"component {component} is incomplete")

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Raise ConfigError for invalid values that are read from a configuration in this block.

        `what` names the configuration in the message.
        """
        try:
            yield
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"model {self.path}: {what} configuration: {error!r}") from error

    def weights(self, component: str) -> list[Path]:
        """Return the weight files of a component.

        Raises ConfigError if one is not on this disk or is incomplete.
        """
        files = [self.path / self.component_path(component) / name for name in self.weight_names(component)]
        if missing := [file.name for file in files if not file.exists()]:
            raise self._missing_error(component, missing[0])
        return files

    def weight_names(self, component: str) -> list[str]:
        """Return the names of a component's weight files; none for a tokenizer or the like.

        Variants are not included. Files on this disk are checked to be complete.
        Raises ConfigError for weights that are not supported.
        """
        config = self.config(component)
        files = self._list(self.component_path(component).rstrip("/"))
        if _config_name(component) != CONFIG:
            return []
        if (settings := config.get(SETTING)) and (reason := refusal(settings, self.is_transformers_model)):
            raise ConfigError(f"model {self.path}: component {component} is quantized ({SETTING}) {reason}")

        usual = next((name for name in WEIGHTS if name in files and ADAPTER not in files), "")
        weights_file = usual or self.single(component)
        if not weights_file and (reason := self._unloadable(component, files)):
            raise ConfigError(f"model {self.path}: {reason}")

        names = ["*.safetensors"] if not weights_file or weights_file.endswith(".json") else [weights_file]
        if weights_file.endswith(".json"):
            listing = self._json(
                f"{self.component_path(component)}{weights_file}", f"component {component} is incomplete"
            )
            shards = listing.get("weight_map")
            if shards and isinstance(shards, dict):
                names = sorted({str(name) for name in shards.values()})

        for name in names:
            if name not in files:
                raise self._missing_error(component, name)
            if (self.path / self.component_path(component) / name).exists():
                self._tensors(component, name)
        return names

    def _unloadable(self, component: str, files: Collection[str]) -> str:
        """Return why none of a component's files can be its weights, as a sentence.

        "" if files are only missing.
        """
        if len(several := singles_of(files)) > 1:
            both = " and ".join(several[:2])
            place = self.component_path(component) or "the folder"
            reason = f"{both}, each of which may have all weights: keep only one of them in {place}"
            return f"component {component} has {len(several)} weight files, {reason}"
        instead = unserved(files)
        if (other := single_of(files, ADAPTER)).endswith(".safetensors"):
            instead = f"{other}, but its library reads only model.safetensors: rename the file"
        return f"the weights of component {component} are {instead}" if instead else ""

    def single(self, component: str) -> str:
        """Return the file of another tool with all weights of a component.

        "" if the component is in its library's layout.
        """
        is_diffusers = "_class_name" in self.config(component)
        return (
            single_of(self._list(self.component_path(component).rstrip("/")), ADAPTER, *WEIGHTS) if is_diffusers else ""
        )

    def is_quantized(self, component: str) -> bool:
        """Return whether a component stays quantized in memory: GGUF, or quantized by torchao."""
        return self.single(component).endswith(GGUF) or bool(self.quantization(component))

    def quantization(self, component: str) -> Any:
        """Return a component's quantization settings, or None."""
        return self.config(component).get(SETTING)

    def size(self, component: str) -> int:
        """Return the size of a component's files in bytes."""
        return sum(file.size for file in self._files(component).values())

    def tensors(self, component: str) -> dict[str, tuple[str, int]]:
        """Return a component's tensors from the headers of its files, by name.

        Each is a dtype (F32, BF16, ...) and a number of elements.
        """
        files = self.weight_names(component)
        tensors = {name: tensor for file in files for name, tensor in self._tensors(component, file).items()}
        if component not in (LANGUAGE, VISION):
            return tensors
        return {name: tensor for name, tensor in tensors.items() if (VISION_PREFIX in name) == (component == VISION)}

    def stores_dtype(self, component: str, dtype: str) -> bool:
        """Return whether the files store a component's floats in this dtype, as they are used.

        Processes can then map the files.
        """
        tensors = self.tensors(component)
        kinds = {stored for stored, _ in tensors.values() if not is_whole_number(stored)}
        if has_single_experts(tensors) or self.single(component) or self.is_quantized(component):
            return False
        return kinds == {STORED[dtype]}

    def identity(self, *components: str) -> str:
        """Return a fingerprint of components, equal for equal copies and different if any byte differs.

        It is the xxh3-128 hash over name, size and content of each file. The content is represented by the hub's hash,
        or by a fingerprint of all its bytes. Raises ConfigError for a file that cannot be read.
        """
        digest = xxhash.xxh3_128()
        for component in components:
            for name, file in self._files(component).items():
                digest.update(f"{name}\0{file.size}\0".encode())
                digest.update(self._content(f"{self.component_path(component)}{name}", file))
        return digest.hexdigest()

    def files(self, component: str) -> dict[str, Path]:
        """Return the files that a component's identity covers, by path in the model's folder."""
        names = (f"{self.component_path(component)}{name}" for name in self._files(component))
        return {name: self.path / name for name in names}

    def component_path(self, component: str) -> str:
        """Return the path of a component's files: "name/", or "" for the folder itself."""
        return (
            "" if component in (SINGLE_COMPONENT, LANGUAGE, VISION) and self.is_transformers_model else f"{component}/"
        )

    def missing_files(self, components: Iterable[str]) -> dict[str, HubFile]:
        """Return the weight files of these components that are not downloaded yet, by path."""
        paths = (
            f"{self.component_path(component)}{name}"
            for component in components
            for name in self.weight_names(component)
        )
        listed = self._tree or {}
        return {path: listed[path] for path in paths if path in listed and not (self.path / path).exists()}

    def _files(self, component: str) -> dict[str, HubFile]:
        """Return a component's files that its identity covers, by name."""
        weights = self.weight_names(component)
        files = sorted(self._list(self.component_path(component).rstrip("/")).items())
        plain = {name for name, _ in files if Path(name).suffix in PLAIN and ".index." not in name and name != SERVING}
        return {name: file for name, file in files if name in weights or name in plain}

    def _tensors(self, component: str, name: str) -> dict[str, tuple[str, int]]:
        """Return the tensors in a weight file, from its header.

        Reads the header from this disk or the hub. Raises ConfigError if the file is of another class, or its dtypes
        are not supported.
        """
        file = self.path / self.component_path(component) / name
        if file.suffix == GGUF:
            gguf = contents(file)
            self._refuse_other(component, name, gguf.tensors, str(gguf.metadata.get("general.architecture", "")))
            return {
                key: (f"GGUF {QUANTIZED[tensor.kind][0]}", prod(tensor.shape)) for key, tensor in gguf.tensors.items()
            }

        if file.exists() or self.hub is None:
            tensors = {key: (str(entry["dtype"]), prod(entry["shape"])) for key, entry in header(file).items()}
        else:
            try:
                remote = _header_at_hub(*self.hub, f"{self.component_path(component)}{name}")
            except hub_errors() as error:
                raise self._missing_error(component, name) from error
            tensors = {key: (str(entry.dtype), prod(entry.shape)) for key, entry in remote.items()}

        if self.quantization(component):
            return tensors
        if name == self.single(component):
            tensors = {key: tensors[key] for key in tensor_names(component, tensors)}
            self._refuse_other(component, name, tensors)
        if any(dtype.startswith("F8") for dtype, _ in tensors.values()):
            reason = "has 8-bit floats, which are not supported: use the model in its original precision"
            raise ConfigError(f"model {self.path}: {component}/{name} {reason}")
        if reason := codes(tensors):
            raise ConfigError(f"model {self.path}: {component}/{name} {reason}")
        return tensors

    def _refuse_other(self, component: str, name: str, tensors: Collection[str], architecture: str = "") -> None:
        """Raise ConfigError if a component's single file is of another class of models."""
        kind = self.class_of(component)
        file = f"{self.component_path(component)}{name}"
        if not may_be_class(kind, tensors, architecture):
            by = f"architecture {architecture[:40]}" if architecture else "by its tensors"
            raise ConfigError(f"model {self.path}: {file} is of another model ({by}): use a file of a {kind}")

    def _list(self, folder: str) -> dict[str, HubFile]:
        """Return the files directly in a folder of the model, by name.

        Includes files of the commit that were not downloaded.
        """
        if self._tree is not None:
            split = ((*path.rpartition("/"), file) for path, file in self._tree.items())
            return {name: file for parent, _, name, file in split if parent == folder}
        present = [file for file in (self.path / folder).glob("*") if file.is_file()]
        linked = {file: os.readlink(file) for file in present if self.hub and file.is_symlink()}
        named = {file: name for file, link in linked.items() if self._is_blob(file, name := Path(link).name)}
        return {file.name: HubFile(file.stat().st_size, named.get(file, "")) for file in present}

    def _content(self, path: str, file: HubFile) -> bytes:
        """Return the input for the identity that represents a file's content.

        For a model from the hub that is the hub's hash. A file that replaces the link to the hub's blob is hashed with
        the same algorithm, so that an exact copy has the same identity.
        """
        local = self.path / path
        listed = file.digest
        if not listed:
            return FINGERPRINTS.content(local)

        # The hub's library creates the link last. Copying a file over it overwrites the blob, which keeps its old name.
        if not local.exists():
            return listed.encode()
        if self._is_blob(local, listed) and local.stat().st_ctime_ns <= local.lstat().st_ctime_ns:
            return listed.encode()
        return FINGERPRINTS.hash_file(local, file.algorithm).encode()

    def _is_blob(self, file: Path, name: str) -> bool:
        """Return whether a snapshot's file is a link to this blob in the cache."""
        return file.resolve() == (self.path.parent.parent / "blobs" / name).resolve()

    @cached_property
    def _tree(self) -> dict[str, HubFile] | None:
        """All files of the commit, by path.

        None for a plain folder, and if only the downloaded files are known.
        """
        if self.hub is None:
            return None
        name, commit = self.hub
        try:
            listing = (self.path.parent.parent / "trees" / f"{commit}.json").read_bytes()
            return msgspec.json.decode(listing, type=_Tree).files
        except (OSError, msgspec.MsgspecError, RecursionError):
            from huggingface_hub.hf_api import RepoFile, list_repo_tree

        try:
            listed = [f for f in list_repo_tree(name, recursive=True, revision=commit) if isinstance(f, RepoFile)]
        except hub_errors():
            return None
        return {f.path: HubFile(f.size, f.blob_id, f.lfs.sha256 if f.lfs else None) for f in listed}

    def _missing_error(self, component: str, name: str) -> ConfigError:
        """Return the error for a missing file of a component."""
        remedy = REPAIR
        if self.hub is not None:
            download = f"hf download {self.hub[0]} --revision {self.hub[1]} --include '{component}/*'"
            remedy = f"download it while the hub is reachable: {download}"
        return ConfigError(f"model {self.path}: component {component} lacks {component}/{name}; {remedy}")

    def _json(self, name: str, consequence: str) -> dict[str, Any]:
        """Return the JSON object in a file. Raises ConfigError with the consequence of the failure."""
        try:
            return msgspec.convert(
                json.loads((self.path / name).read_bytes()), dict[str, Any]
            )  # it may contain -Infinity
        except OSError as error:
            reason = f"{name} cannot be read ({error.strerror}), so {consequence}; {REPAIR}"
            if instead := unserved(self._list(name.rpartition("/")[0])):
                reason = f"{name} is missing; the folder has {instead}"
            raise ConfigError(f"model {self.path}: {reason}") from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ConfigError(f"model {self.path}: {name} is not valid: {error}") from error


def has_single_experts(names: Iterable[str]) -> bool:
    """Return whether these tensors have each expert by itself.

    The library then joins them when it loads the model.
    """
    return any(SINGLE_EXPERT.search(name) for name in names)


def header(file: Path) -> dict[str, Any]:
    """Return a safetensors file's tensors by name: dtype, shape, data_offsets.

    Raises ConfigError if the file is not valid or not complete.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(HEADER_LENGTH), "little")
            raw = stream.read(length) if length <= MAX_HEADER else b""
            size = os.fstat(stream.fileno()).st_size
        described = msgspec.json.decode(raw, type=dict[str, Any])
        described.pop("__metadata__", None)
        tensors = msgspec.convert(described, dict[str, _Tensor])
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); {REPAIR}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        large = f", or its header is larger than {MAX_HEADER} bytes" * (length > MAX_HEADER)
        raise ConfigError(f"{file} is not a safetensors file, or truncated{large}: download it again") from error

    data = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    if size != (expected := HEADER_LENGTH + length + data):
        reason = f"it has {size} bytes, but its header requires {expected}"
        raise ConfigError(f"{file} is incomplete: {reason}: download it again")
    return dict(tensors)


def _header_at_hub(hub: str, commit: str, path: str) -> dict[str, Any]:
    """Return the header of a file at the hub, without downloading the rest.

    Retries when the connection breaks.
    """
    from httpx2 import TransportError
    from huggingface_hub import parse_safetensors_file_metadata

    for pause in PAUSES_S:
        with suppress(TransportError):
            return dict(parse_safetensors_file_metadata(hub, path, revision=commit).tensors)
        time.sleep(pause)
    return dict(parse_safetensors_file_metadata(hub, path, revision=commit).tensors)


def unserved(names: Iterable[str]) -> str | None:
    """Return a sentence about the first unsupported file, and what to do; None without one."""
    files = sorted(set(names).difference(WEIGHTS))
    matches = ((name, reason) for pattern, reason in UNSERVED.items() for name in files if fnmatchcase(name, pattern))
    return next((f"{name}, {reason}" for name, reason in matches), None)


def hub_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that the hub library raises when a download or listing fails."""
    import httpx2
    from huggingface_hub.errors import SafetensorsParsingError

    return OSError, ValueError, httpx2.HTTPError, SafetensorsParsingError


def _config_name(component: str) -> str:
    """Return the name of a component's configuration file."""
    kind = component.rstrip("0123456789").rstrip("_")
    return next((file for name, file in CONFIGS.items() if kind.endswith(name)), CONFIG)


def parse_dtypes(spec: str) -> tuple[str, dict[str, str]]:
    """Return the default dtype of `--dtype`, and the dtypes by component.

    The default is "auto" if the option has none. The option is written as `bfloat16`,
    `transformer=bfloat16,vae=float32`, or both. Raises ConfigError for an unknown dtype.
    """
    default = "auto"
    named = dict[str, str]()
    for entry in spec.split(","):
        component, equals, dtype = (part.strip() for part in entry.rpartition("="))
        if dtype not in STORED and (equals or dtype != "auto"):
            raise ConfigError(f"--dtype {spec}: unknown dtype {dtype!r}, use auto, {', '.join(STORED)}")
        if equals:
            named[component] = dtype
        else:
            default = dtype
    return default, named


def choose_dtypes(spec: str, components: Collection[str]) -> dict[str, str]:
    """Return the dtype of each component by `--dtype`.

    "auto" is float32, the default of diffusers. A dtype without a component's name applies to every component, like
    `torch_dtype` in a diffusers script. Raises ConfigError for an unknown dtype or component.
    """
    default, named = parse_dtypes(spec)
    if unknown := sorted(set(named) - set(components)):
        raise ConfigError(f"--dtype {spec}: unknown component {unknown[0]!r}; known are {', '.join(components)}")
    return dict.fromkeys(components, "float32" if default == "auto" else default) | named
