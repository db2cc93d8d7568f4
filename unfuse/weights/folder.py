"""A model in diffusers' layout: its parts as JSON and bytes, never read as code, without torch.

In the hub library's cache, files that were not downloaded are known too: by the listing of their commit.
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
from unfuse.weights.gguf import GGUF, QUANTISED, REPAIR, contents
from unfuse.weights.quantized import SETTING, codes, is_whole_number, refusal
from unfuse.weights.single import is_of, own_names, single_of, singles_of

SERVING = "serving.json"
"""The file of a folder with its defaults and limits."""

INDEX = "model_index.json"
CONFIG = "config.json"
WHOLE = "model"  # the component of a model that has no other
LANGUAGE, VISION = "language", "vision"
"""The components of a model of transformers that sees: parts of one class, which lie in the same files."""
SEES = "visual."  # what names of the tensors have that are the vision's
CONFIGS = {
    "scheduler": "scheduler_config.json", "tokenizer": "tokenizer_config.json",
    "image_processor": "preprocessor_config.json", "feature_extractor": "preprocessor_config.json",
    "processor": "tokenizer_config.json",
}  # fmt: skip
"""Configuration files of components that have no weights; a second one of a kind is called tokenizer_2, and so on."""

PLAIN = frozenset({".json", ".txt", ".model", ".jinja"})
"""Suffixes of what is read beside weights: nothing that could be code or a pickle."""

WEIGHTS = (
    "diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors",
    "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip
"""Where diffusers and transformers look for weights, in their order; an index names shards."""

SINGLE_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")
"""The names of tensors of one expert of a language model, which has those of a layer in one tensor."""

STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # what safetensors files call these types

ADAPTER = "adapter_config.json"
_ADAPTER = "an adapter (LoRA), which is not a model: serve its base model, and this with --loras FOLDER"
_PICKLE = "weights that are not safetensors: save the model anew with its library"
UNSERVED = {
    ADAPTER: _ADAPTER, "adapter_model.*": _ADAPTER, "pytorch_lora_weights.*": _ADAPTER,
    "*.gguf": "quantised weights (GGUF), which are served of language models, and from a file on this disk: "
    "give such a file, or put one of a denoiser in the place of the weights in its folder",
    "*model.*.safetensors": "a variant, and only plain weights are served: save the model without a variant",
    "*.safetensors": "a checkpoint outside diffusers' layout: put it in its component's folder, for the weights there",
    "*.bin": _PICKLE, "*.ckpt": _PICKLE, "*.pt": _PICKLE, "*.pth": _PICKLE,
}  # fmt: skip
"""Files that are found in place of a model or its weights, and what is to be done."""

PAUSES_S = (0.5, 1.0, 2.0)  # before a header is asked for again
HEADER_LENGTH = 8  # a safetensors file begins with the length of its JSON header, as 8 bytes, least first
SHA256_DIGITS = 64  # length of the hub's name for a large file; small files have shorter git hashes
MAX_HEADER = 25_000_000  # longest header of a safetensors file, in bytes, as the hub's library has it: more is slow


class HubFile(msgspec.Struct, frozen=True):
    """Bytes of a file, and the hub's names of its content: none in a plain folder."""

    size: int
    blob_id: str = ""
    lfs_sha256: str | None = None

    @property
    def digest(self) -> str:
        """The hub's hash of its content."""
        return self.lfs_sha256 or self.blob_id

    @property
    def algorithm(self) -> Algorithm:
        """By which that is computed."""
        return "sha256" if len(self.digest) == SHA256_DIGITS else "git"


class _Tree(msgspec.Struct, frozen=True):
    """The listing of a commit, as the hub library caches it."""

    format_version: Literal[1]
    files: dict[str, HubFile]


class _Tensor(TypedDict):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class ModelFolder:
    """Reads a model's folder. Every method raises ConfigError, naming the file, when what it needs is not there.

    `hub` is the name and the commit of a model in the hub library's cache, None of a plain folder. A model of
    transformers is one component, `WHOLE`, or `LANGUAGE` and `VISION` where it sees; files lie in the folder itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        kind, _, name = path.parent.parent.name.partition("--")
        snapshot = name and (kind, path.parent.name) == ("models", "snapshots")
        self.hub = (name.replace("--", "/"), path.name) if snapshot else None

    @property
    def home(self) -> Path:
        """The folder in which all lies that belongs to it."""
        return self.path

    @property
    def created(self) -> int:
        """When it was saved, in Unix seconds; 0 for what comes from a hub, where every machine has its own."""
        return 0 if self.hub else int((self.path / (CONFIG if self.is_whole else INDEX)).stat().st_mtime)

    @cached_property
    def is_whole(self) -> bool:
        """Whether it is a model of transformers."""
        config = self.path / CONFIG
        return not (self.path / INDEX).exists() and config.exists() and "architectures" in self.beside(CONFIG)

    @property
    def kind(self) -> str:
        """The class that it says it is: of its pipeline, or of the model itself."""
        if self.is_whole:
            return str(next(iter(self.config(WHOLE).get("architectures") or ()), None))
        return str(self.index().get("_class_name"))

    def components(self) -> list[str]:
        """The names of its components."""
        if self.is_whole:
            return [LANGUAGE, VISION] if "vision_config" in self.config(WHOLE) else [WHOLE]
        pairs = ((name, pair) for name, pair in self.index().items() if isinstance(pair, list) and len(pair) == 2)
        return [name for name, pair in pairs if not name.startswith("_") and all(isinstance(one, str) for one in pair)]

    def class_of(self, component: str) -> str:
        """The class of a component, in its library."""
        return self.kind if self.is_whole else str(self.index()[component][1])

    def beside(self, name: str) -> dict[str, Any]:
        """A file of settings that need not be there; empty if it is not."""
        return self._json(name, "it is of no use") if (self.path / name).exists() else {}

    def index(self) -> dict[str, Any]:
        """What model_index.json says: the pipeline's class, and library and class of each component."""
        return self._json(INDEX, "this is no model in diffusers' layout")

    def config(self, component: str) -> dict[str, Any]:
        """The configuration of a component, whatever its file is called."""
        name = f"{self.at(component)}{_config_name(component)}"
        return self._json(name, f"component {component} is incomplete")

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Raises ConfigError, naming a configuration, for what is wrong with the values that are read of it inside."""
        try:
            yield
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"model {self.path}: {what} configuration: {error!r}") from error

    def weights(self, component: str) -> list[Path]:
        """The safetensors files that a component is loaded from, every one on this disk and whole."""
        files = [self.path / self.at(component) / name for name in self.weight_names(component)]
        if missing := [file.name for file in files if not file.exists()]:
            raise self._lacks(component, missing[0])
        return files

    def weight_names(self, component: str) -> list[str]:
        """The names of those files; variants do not count, and those on this disk are whole. None of a tokenizer.

        Raises ConfigError for weights that are not served.
        """
        config, files = self.config(component), self._inside(self.at(component).rstrip("/"))
        if _config_name(component) != CONFIG:
            return []
        if (said := config.get(SETTING)) and (reason := refusal(said, self.is_whole)):
            raise ConfigError(f"model {self.path}: component {component} is quantised ({SETTING}) {reason}")
        found = next((name for name in WEIGHTS if name in files and ADAPTER not in files), "") or self.single(component)
        if not found and (reason := self._unloadable(component, files)):
            raise ConfigError(f"model {self.path}: {reason}")
        names = ["*.safetensors"] if not found or found.endswith(".json") else [found]
        if found.endswith(".json"):
            listing = self._json(f"{self.at(component)}{found}", f"component {component} is incomplete")
            shards = listing.get("weight_map")
            if shards and isinstance(shards, dict):
                names = sorted({str(name) for name in shards.values()})
        for name in names:
            if name not in files:
                raise self._lacks(component, name)
            if (self.path / self.at(component) / name).exists():
                self._tensors(component, name)
        return names

    def _unloadable(self, component: str, files: Collection[str]) -> str:
        """Return why none of a component's files can be its weights, as a sentence; "" if files are only missing."""
        if len(several := singles_of(files)) > 1:
            both, place = " and ".join(several[:2]), self.at(component) or "the folder"
            reason = f"{both}, and each may hold all weights: keep only one of them in {place}"
            return f"component {component} has {len(several)} weight files, {reason}"
        instead = unserved(files)
        if (other := single_of(files, ADAPTER)).endswith(".safetensors"):
            instead = f"{other}, and the library of its class reads model.safetensors alone: rename that file"
        return f"the weights of component {component} are {instead}" if instead else ""

    def single(self, component: str) -> str:
        """The one file of another tool from which a component is loaded; "" of one in its library's layout."""
        ours = "_class_name" in self.config(component)
        return single_of(self._inside(self.at(component).rstrip("/")), ADAPTER, *WEIGHTS) if ours else ""

    def is_quantised(self, component: str) -> bool:
        """Whether a component stays in memory as it lies in its files: GGUF, or what torchao has quantised."""
        return self.single(component).endswith(GGUF) or bool(self.quantisation(component))

    def quantisation(self, component: str) -> Any:
        """What a component's configuration says of how its weights are quantised, if they are."""
        return self.config(component).get(SETTING)

    def size(self, component: str) -> int:
        """Bytes of a component's files."""
        return sum(file.size for file in self._files(component).values())

    def tensors(self, component: str) -> dict[str, tuple[str, int]]:
        """A component's tensors: dtype (F32, BF16, ...) and elements by name, as the headers of its files have them."""
        files = self.weight_names(component)
        found = {name: tensor for file in files for name, tensor in self._tensors(component, file).items()}
        if component not in (LANGUAGE, VISION):
            return found
        return {name: tensor for name, tensor in found.items() if (SEES in name) == (component == VISION)}

    def has(self, component: str, dtype: str) -> bool:
        """Whether files have all floats of a component as they are used, in that dtype, so that processes map them."""
        tensors = self.tensors(component)
        kinds = {stored for stored, _ in tensors.values() if not is_whole_number(stored)}
        if has_single_experts(tensors) or self.single(component) or self.is_quantised(component):
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
                digest.update(self._content(f"{self.at(component)}{name}", file))
        return digest.hexdigest()

    def files(self, component: str) -> dict[str, Path]:
        """The files of a component that its identity covers, by their names in the model's folder."""
        names = (f"{self.at(component)}{name}" for name in self._files(component))
        return {name: self.path / name for name in names}

    def at(self, component: str) -> str:
        """Where the files of a component lie in the folder: "name/", or "" for the folder itself."""
        return "" if component in (WHOLE, LANGUAGE, VISION) and self.is_whole else f"{component}/"

    def lacking(self, components: Iterable[str]) -> dict[str, HubFile]:
        """The weights of these components that the hub lists and that are not on this disk, by path."""
        paths = (f"{self.at(component)}{name}" for component in components for name in self.weight_names(component))
        listed = self._tree or {}
        return {path: listed[path] for path in paths if path in listed and not (self.path / path).exists()}

    def _files(self, component: str) -> dict[str, HubFile]:
        weights = self.weight_names(component)
        files = sorted(self._inside(self.at(component).rstrip("/")).items())
        plain = {name for name, _ in files if Path(name).suffix in PLAIN and ".index." not in name and name != SERVING}
        return {name: file for name, file in files if name in weights or name in plain}

    def _tensors(self, component: str, name: str) -> dict[str, tuple[str, int]]:
        """Those in a weight file, from its header: here, or at the hub."""
        file = self.path / self.at(component) / name
        if file.suffix == GGUF:
            read = contents(file)
            self._refuse_other(component, name, read.tensors, str(read.said.get("general.architecture", "")))
            return {key: (f"GGUF {QUANTISED[one.kind][0]}", prod(one.shape)) for key, one in read.tensors.items()}
        if file.exists() or self.hub is None:
            found = {key: (str(one["dtype"]), prod(one["shape"])) for key, one in header(file).items()}
        else:
            try:
                asked = _header_at(*self.hub, f"{self.at(component)}{name}")
            except hub_errors() as error:
                raise self._lacks(component, name) from error
            found = {key: (str(one.dtype), prod(one.shape)) for key, one in asked.items()}
        if self.quantisation(component):
            return found
        if name == self.single(component):
            found = {key: found[key] for key in own_names(component, found)}
            self._refuse_other(component, name, found)
        if any(dtype.startswith("F8") for dtype, _ in found.values()):
            reason = "has 8-bit floats, which are not served: give the model in its original precision"
            raise ConfigError(f"model {self.path}: {component}/{name} {reason}")
        if reason := codes(found):
            raise ConfigError(f"model {self.path}: {component}/{name} {reason}")
        return found

    def _refuse_other(self, component: str, name: str, tensors: Collection[str], architecture: str = "") -> None:
        """Raise ConfigError if a component's single file is of another class of models."""
        kind, file = self.class_of(component), f"{self.at(component)}{name}"
        if not is_of(kind, tensors, architecture):
            by = f"architecture {architecture[:40]}" if architecture else "by its tensors"
            raise ConfigError(f"model {self.path}: {file} is of another model, {by}: give one of a {kind}")

    def _inside(self, folder: str) -> dict[str, HubFile]:
        """The files directly in a folder of the model by name, also those that were not downloaded."""
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
        here, listed = self.path / path, file.digest
        if not listed:
            return FINGERPRINTS.content(here)
        # The hub's library creates the link last. Copying a file over it overwrites the blob, which keeps its old name.
        if not here.exists() or (self._is_blob(here, listed) and here.stat().st_ctime_ns <= here.lstat().st_ctime_ns):
            return listed.encode()
        return FINGERPRINTS.of(here, file.algorithm).encode()

    def _is_blob(self, file: Path, name: str) -> bool:
        """Whether a file of a snapshot is a link to the blob of that name in the hub's cache."""
        return file.resolve() == (self.path.parent.parent / "blobs" / name).resolve()

    @cached_property
    def _tree(self) -> dict[str, HubFile] | None:
        """All files of the commit; None of a plain folder, and where only those that were downloaded are known."""
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

    def _lacks(self, component: str, name: str) -> ConfigError:
        remedy = REPAIR
        if self.hub is not None:
            download = f"hf download {self.hub[0]} --revision {self.hub[1]} --include '{component}/*'"
            remedy = f"bring it while the hub can be reached: {download}"
        return ConfigError(f"model {self.path}: component {component} lacks {component}/{name}; {remedy}")

    def _json(self, name: str, consequence: str) -> dict[str, Any]:
        try:
            return msgspec.convert(json.loads((self.path / name).read_bytes()), dict[str, Any])  # may hold -Infinity
        except OSError as error:
            reason = f"{name} cannot be read ({error.strerror}), so {consequence}; {REPAIR}"
            if instead := unserved(self._inside(name.rpartition("/")[0])):
                reason = f"{name} is not there, but {instead}"
            raise ConfigError(f"model {self.path}: {reason}") from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ConfigError(f"model {self.path}: {name} is not valid: {error}") from error


def has_single_experts(names: Iterable[str]) -> bool:
    """Whether files with tensors of these names have each expert by itself, so that a library joins them to load."""
    return any(SINGLE_EXPERT.search(name) for name in names)


def header(file: Path) -> dict[str, Any]:
    """A safetensors file's tensors by name: dtype, shape, data_offsets. Raises ConfigError if it is no whole one."""
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
        raise ConfigError(f"{file} is not a safetensors file, or cut short{large}: fetch it again") from error
    data = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    if size != (whole := HEADER_LENGTH + length + data):
        raise ConfigError(f"{file} is not whole: it has {size} bytes, and {whole} by its header: fetch it again")
    return dict(tensors)


def _header_at(hub: str, commit: str, path: str) -> dict[str, Any]:
    """As a file of the hub has it in its first bytes; asked for again when the connection breaks off."""
    from httpx2 import TransportError
    from huggingface_hub import parse_safetensors_file_metadata

    for pause in PAUSES_S:
        with suppress(TransportError):
            return dict(parse_safetensors_file_metadata(hub, path, revision=commit).tensors)
        time.sleep(pause)
    return dict(parse_safetensors_file_metadata(hub, path, revision=commit).tensors)


def unserved(names: Iterable[str]) -> str | None:
    """A sentence on the first of some files that is not served, and what to do; None when there is none."""
    found = sorted(set(names).difference(WEIGHTS))
    fits = ((name, reason) for pattern, reason in UNSERVED.items() for name in found if fnmatchcase(name, pattern))
    return next((f"{name}, {reason}" for name, reason in fits), None)


def hub_errors() -> tuple[type[Exception], ...]:
    """What the hub library raises when it cannot bring something, or not what was expected."""
    import httpx2
    from huggingface_hub.errors import SafetensorsParsingError

    return OSError, ValueError, httpx2.HTTPError, SafetensorsParsingError


def _config_name(component: str) -> str:
    kind = component.rstrip("0123456789").rstrip("_")
    return next((file for name, file in CONFIGS.items() if kind.endswith(name)), CONFIG)


def parse_dtypes(spec: str) -> tuple[str, dict[str, str]]:
    """What `--dtype` says: the dtype of whatever it does not name ("auto" if it does not say), and those by component.

    Written `bfloat16`, `transformer=bfloat16,vae=float32`, or both. Raises ConfigError for an unknown dtype.
    """
    rest, named = "auto", dict[str, str]()
    for entry in spec.split(","):
        component, equals, dtype = (part.strip() for part in entry.rpartition("="))
        if dtype not in STORED and (equals or dtype != "auto"):
            raise ConfigError(f"--dtype {spec}: unknown dtype {dtype!r}: one of auto, {', '.join(STORED)}")
        if equals:
            named[component] = dtype
        else:
            rest = dtype
    return rest, named


def choose_dtypes(spec: str, components: Collection[str]) -> dict[str, str]:
    """The dtype of each component by `--dtype`; "auto" is float32, which is what diffusers loads when told nothing.

    One dtype for all means every component, as `torch_dtype` of a diffusers script does.
    Raises ConfigError for an unknown dtype or component.
    """
    rest, named = parse_dtypes(spec)
    if unknown := sorted(set(named) - set(components)):
        raise ConfigError(f"--dtype {spec}: no component is called {unknown[0]!r}; known are {', '.join(components)}")
    return dict.fromkeys(components, "float32" if rest == "auto" else rest) | named
