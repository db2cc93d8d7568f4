"""LoRA adapters of denoisers: files in a folder, and those that a transformer has loaded.

Every entry of a file that would have no effect is refused, by its name, shape and values. Reading the folder does not
import torch, so that the gateway can check the headers before a request is queued.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from warnings import catch_warnings

import xxhash
from typing_extensions import override

from unfuse.core.errors import ConfigError, NotFound, PermanentError, UnsupportedRequest
from unfuse.core.parameters import split_scaled
from unfuse.core.plan import Params

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Value = TypeVar("Value")

#: The largest file of an adapter in bytes. Adapters are far smaller than the models that they adapt.
MAX_BYTES = 4 << 30
#: The most names that an error lists.
MAX_LISTED = 20
#: The component for whose adapters other tools number the blocks differently.
UNET = "unet"
#: The prefix of the names of text encoders.
ENCODER = "text_encoder"
#: The part that torch inserts into the names of compiled modules.
COMPILED = "_orig_mod"
#: The suffixes of the tensor names of a low-rank pair, after `lora_`.
PAIRED = ("A.weight", "B.weight", "B.bias")
#: Bytes of an adapter that `AdapterFolder.read_chunk` returns at once.
CHUNK = 1 << 20
#: Valid names of adapters.
NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
#: Valid ids of adapters: xxh3-128 hashes.
ID = re.compile(r"[0-9a-f]{32}")
#: The errors of diffusers and peft for a file that is not an adapter of the model.
BROKEN = ValueError, LookupError, RuntimeError, AttributeError, TypeError, AssertionError, ArithmeticError


def require_peft() -> None:
    """Raise ConfigError if peft is missing, the library that applies adapters."""
    if find_spec("peft") is None:
        raise ConfigError("--loras needs the library peft: pip install 'unfuse[lora]'")


class AdapterFolder:
    """The LoRA adapters in a folder: NAME.safetensors is the adapter NAME.

    An adapter's id is the xxh3-128 hash of its file. Files of other machines are in `fetched_folder`, by their ids.
    """

    def __init__(self, folder: str, fetched_folder: str = "") -> None:
        self._folder = Path(folder)
        self._fetched_folder = fetched_folder
        self._known: dict[Path, tuple[tuple[int, ...], str, str]] = {}  # state, id and refusal of each file

    def files(self) -> dict[str, Path]:
        """Return the files of all adapters directly in the folder by name, sorted."""
        inside = self._folder.resolve()
        resolved = {file.stem: file.resolve() for file in sorted(inside.glob("*.safetensors"))}
        return {
            name: file
            for name, file in resolved.items()
            if NAME.fullmatch(name) and file.is_relative_to(inside) and file.is_file()
        }

    def id_of(self, name: str) -> str:
        """Return an adapter's id. A changed file is hashed again, slowly. Raises NotFound."""
        return self._read(self._file(name))[0]

    def check(self, named: str) -> None:
        """Check a request's adapters by their files' headers. Raises NotFound, and UnsupportedRequest."""
        for name, _ in split_scaled(named):
            if reason := _refusal(self._file(name)):
                raise UnsupportedRequest(f"lora {name!r} {reason}")

    def _file(self, name: str) -> Path:
        """Return an adapter's file. Raises NotFound if it is missing or too large."""
        known = self.files()
        if name not in known:
            listed = ", ".join([*known][:MAX_LISTED]) or "none"
            more = f" and {len(known) - MAX_LISTED} more" if len(known) > MAX_LISTED else ""
            is_misnamed = not NAME.fullmatch(name) and name in {
                file.stem for file in self._folder.glob("*.safetensors")
            }
            how = (
                f"; rename {name}.safetensors: names may have only letters, digits, '.', '_' and '-'"
                if is_misnamed
                else ""
            )
            raise NotFound(f"lora {name!r} does not exist; available: {listed}{more}{how}")
        if (size := known[name].stat().st_size) > MAX_BYTES:
            raise NotFound(f"lora {name!r} has {size} bytes, which exceeds the limit of {MAX_BYTES}")
        return known[name]

    def _read(self, file: Path) -> tuple[str, str]:
        """Return a file's id, and why no model can use it ("" if one may).

        Cached.
        """
        stat = file.stat()
        state = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
        if file not in self._known or self._known[file][0] != state:
            with file.open("rb") as stream:
                id = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
            self._known[file] = state, id, _refusal(file)
        return self._known[file][1:]

    def ids_of(self, named: str) -> str:
        """Return the ids of all adapters that a request names, separated by commas.

        Raises NotFound, and UnsupportedRequest if a file's header shows that no model can use it.
        """
        read = {name: self._read(self._file(name)) for name, _ in split_scaled(named)}
        ids = {name: id for name, (id, _) in read.items()}
        for name, (_, reason) in read.items():
            if reason:
                raise UnsupportedRequest(f"lora {name!r} {reason}")
        for name, id in ids.items():
            if twin := next((other for other in ids if other != name and ids[other] == id), ""):
                raise NotFound(f"loras {name!r} and {twin!r} are equal: send one of them, with the sum of scales")
        return ",".join(ids.values())

    def file(self, name: str, id: str) -> Path:
        """Return an adapter's file with this id. Raises NotFound, and PermanentError for another id."""
        if (fetched := self.fetched_path(id)).is_file() and self._read(fetched)[0] == id:
            return fetched
        if self.id_of(name) != id:
            raise PermanentError(f"lora {name!r} is not the requested one: its file on this machine has other content")
        return self.files()[name]

    def is_available(self, name: str, id: str) -> bool:
        """Return whether the adapter with this id is on this machine."""
        try:
            return bool(self.file(name, id))
        except (NotFound, PermanentError):
            return False

    def fetched_path(self, id: str) -> Path:
        """Return the path of another machine's file by its id. Raises PermanentError."""
        if not ID.fullmatch(id):
            raise PermanentError(f"{id[:40]!r} is not the id of an adapter")
        return Path(self._fetched_folder or self._folder / ".kept", f"{id}.safetensors")

    def read_chunk(self, name: str, id: str, offset: int) -> tuple[int, bytes]:
        """Return a file's size, and up to CHUNK bytes from `offset`. Raises as `file` does."""
        with self.file(name, id).open("rb") as stream:
            stream.seek(offset)
            return os.fstat(stream.fileno()).st_size, stream.read(CHUNK)


def _refusal(file: Path) -> str:
    """Return why no model can use a file by its header; "" if one may."""
    from safetensors import SafetensorError

    with suppress(OSError, SafetensorError):  # the worker that loads the file reports the error
        return refusal(entries(file))
    return ""


class LoadedAdapters:
    """The LoRA adapters that one denoiser, the component `part`, has loaded.

    Those of the current request are active. At most `most` stay loaded, unless one request uses more. diffusers reads
    and applies them, in the formats that its class, which `pipeline` returns, supports. They stay on the device.
    Raises ConfigError if the library peft is missing.
    """

    def __init__(
        self,
        loras: AdapterFolder,
        transformer: Any,
        pipeline: Callable[[], Any],
        device: Any,
        most: int,
        part: str = "transformer",
    ) -> None:
        require_peft()
        self._loras, self._pipeline = loras, pipeline
        self._transformer, self._part = transformer, part
        self._device, self._most = device, most
        self._loaded: list[str] = []  # ids, the least recently used first
        self._active: dict[str, float] | None = {}  # scales by id; None if unknown after an error

    def use(self, params: Params, lora_id: str) -> None:
        """Activate the adapters of a request, with these ids, for the next forward.

        Without adapters, outputs are bit-identical to those of the unadapted model. Raises NotFound and PermanentError.
        """
        named = split_scaled(str(params.get("lora") or ""))
        default = float(params.get("lora_scale") or 0.0)
        ids = lora_id.split(",")
        wanted = {id: default if scale is None else scale for id, (_, scale) in zip(ids, named, strict=True) if id}
        if wanted == self._active and [*wanted] == [*self._active]:
            return

        self._active = None  # the state is unknown if an error is raised below
        if wanted:
            self._load_missing(dict(zip(ids, (name for name, _ in named), strict=True)))
            self._transformer.enable_lora()
            self._transformer.set_adapters([*wanted], [*wanted.values()])
        else:
            self._transformer.disable_lora()
        self._active = wanted

    def _load_missing(self, names: Mapping[str, str]) -> None:
        """Load these adapters, by id, and unload the least recently used of the others."""
        self._loaded = [id for id in self._loaded if id not in names] + [id for id in self._loaded if id in names]
        missing = [id for id in names if id not in self._loaded]
        surplus = len(self._loaded) + len(missing) - max(self._most, len(names))
        for id in self._loaded[: max(surplus, 0)]:
            self._unload(id)
            self._loaded.remove(id)
        for id in missing:
            self._load(names[id], id)
            self._loaded.append(id)

    def _unload(self, id: str) -> None:
        """Remove a loaded adapter from the model."""
        self._transformer.set_adapters([], [])
        self._transformer.delete_adapters(id)

    def _load(self, name: str, id: str) -> None:
        """Load an adapter. Raises UnsupportedRequest if it does not fit the model."""
        import torch
        from safetensors import SafetensorError

        file = self._loras.file(name, id)
        self._remove(id)  # the rest of an earlier load that ran out of memory
        try:
            with catch_warnings(action="ignore"):  # several adapters; alphas, which are set below
                wanted, alphas = self._checked(name, file)
                self._apply(name, id, file)
                self._verify(name, id, wanted)
                self._scale(id, alphas)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except SafetensorError as error:
            raise UnsupportedRequest(f"lora {name!r} cannot be loaded: {' '.join(str(error).split())}") from error
        except BROKEN as error:
            self._remove(id)
            reason = " ".join(str(error).split()) or repr(error)
            raise UnsupportedRequest(
                f"lora {name!r} cannot be loaded: it is for another model, or saved in a format that diffusers cannot "
                f"read ({reason})"
            ) from error
        except Exception:
            self._remove(id)
            raise
        for part in self._parts().values():
            for key, tensor in part.named_parameters():
                if id in key.split(".") and not tensor.is_meta:  # it is meta where the layer is on another rank
                    tensor.data = tensor.data.to(self._device)

    def _checked(self, name: str, file: Path) -> tuple[set[str], dict[str, float]]:
        """Return the names of a file's converted tensors, and its alphas by layer, if separate.

        Raises UnsupportedRequest if an entry would be dropped, does not fit the model, or contains NaN.
        """
        from safetensors.torch import load_file

        from unfuse.weights.traced import sources_of, traced

        if reason := refusal(entries(file)):
            raise UnsupportedRequest(f"lora {name!r} {reason}")
        tensors = load_file(file)
        if reason := not_finite(tensors):
            raise UnsupportedRequest(f"lora {name!r} {reason}")

        copies, read = traced(tensors)
        converted, *alphas = self._pipeline().lora_state_dict(copies, **self._load_options())
        read_alphas = {key for key in read if key.endswith("alpha")}
        if key := unused_entry(tensors, sources_of((converted, alphas)) | read_alphas):
            raise UnsupportedRequest(f"lora {name!r} {unapplied(key)}")
        renamed = self._convert_names(converted)
        if misfit := self._misfit(renamed):
            raise UnsupportedRequest(f"lora {name!r} {misfit}")
        return {_plain(key) for key in renamed}, self._alphas(alphas)

    def _alphas(self, read: Sequence[Mapping[str, Any] | None]) -> dict[str, float]:
        """Return the alphas by layer, from the values that diffusers' reader returns."""
        values = [(key, alpha) for group in read for key, alpha in (group or {}).items()]
        named = {key: float(alpha) for key, alpha in values if key.endswith(".alpha")}
        halves = {key.removesuffix(".alpha"): alpha for key, alpha in named.items()}
        halves = {key if key.endswith(".weight") else f"{key}.lora.down.weight": alpha for key, alpha in halves.items()}
        return {key.partition(".lora_")[0]: alpha for key, alpha in self._convert_names(halves).items()}

    def _scale(self, id: str, alphas: Mapping[str, float]) -> None:
        """Set each layer's alpha to that of the file, or to the layer's rank.

        diffusers sets the most common alpha for all layers of a UNet or a text encoder, because it looks for the others
        by names that only other tools use.
        """
        layers = {
            ".".join(name for name in f"{part}.{path}".split(".") if name != COMPILED): layer
            for part, model in self._parts().items()
            for path, layer in model.named_modules()
            if id in getattr(layer, "lora_alpha", ())
        }
        if not alphas or not alphas.keys() <= layers.keys():
            return
        for path, layer in layers.items():
            rank = layer.r[id]
            layer.lora_alpha[id] = alphas.get(path, rank)
            layer.scaling[id] = layer.lora_alpha[id] / rank

    def _verify(self, name: str, id: str, wanted: Collection[str]) -> None:
        """Raise UnsupportedRequest if a converted tensor is not loaded, or another is not zero."""
        loaded = _adapted(self._parts(), id)
        if missing := sorted(set(wanted) - loaded.keys()):
            raise UnsupportedRequest(f"lora {name!r} has {missing[0]}, which has no effect on this model: {REMEDY}")
        for key, tensor in loaded.items():  # peft does not initialize tensors that the file lacks
            if key not in wanted and (tensor.is_meta or bool(tensor.any())):
                raise UnsupportedRequest(f"lora {name!r} lacks {key}, which its other tensors need: save it again")

    def _remove(self, id: str) -> None:
        """Remove the tensors of a failed load from the model."""
        for part in self._parts().values():
            if id in getattr(part, "peft_config", {}):
                part.delete_adapters(id) if hasattr(part, "delete_adapters") else part.delete_adapter(id)

    def _parts(self) -> dict[str, Any]:
        """Return the components that may be adapted, by the prefix of their tensors."""
        return {self._part: self._transformer}

    def _load_options(self) -> dict[str, Any]:
        """Return the options of the pipeline class for reading a file."""
        options: dict[str, Any] = {"return_alphas": True, "return_lora_metadata": True}
        if self._part == UNET:
            options["unet_config"] = self._transformer.config  # to translate other tools' block numbers
        return options

    def _convert_names(self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """Return tensors, or other values, by peft's names, also from diffusers' older ones."""
        from diffusers.utils import convert_unet_state_dict_to_peft

        return dict(convert_unet_state_dict_to_peft(tensors))

    def _misfit(self, tensors: Mapping[str, Tensor]) -> str:
        """Return why tensors do not fit the model, as a sentence's end; or ""."""
        return _misfit(self._parts(), tensors)

    def _apply(self, name: str, id: str, file: Path) -> None:
        """Load a file's tensors into the model by diffusers.

        Raises PermanentError if the file has changed.
        """
        options = {"use_safetensors": True, "local_files_only": True, **self._load_options()}
        tensors, *alphas, metadata = self._pipeline().lora_state_dict(str(file), **options)
        self._loras.file(name, id)  # checks that it was not changed while it was read
        tensors = fitted(self._convert_names(tensors))
        options = {"network_alphas": (alphas or [None])[0], "metadata": metadata, "low_cpu_mem_usage": True}
        self._transformer.load_lora_adapter(tensors, adapter_name=id, prefix=self._part, **options)


class LoadedPipelineAdapters(LoadedAdapters):
    """The LoRA adapters of a pipeline and its text encoders, applied by its own loader."""

    @override
    def _unload(self, id: str) -> None:
        self._transformer.delete_adapters(id)

    @override
    def _parts(self) -> dict[str, Any]:
        return {key: part for key, part in self._transformer.components.items() if hasattr(part, "named_parameters")}

    @override
    def _load_options(self) -> dict[str, Any]:
        parts = self._parts()
        options = {"return_alphas": True, "return_lora_metadata": True}
        return options | ({"unet_config": parts[UNET].config} if UNET in parts and "text_encoder_2" in parts else {})

    @override
    def _convert_names(self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """Return the tensors by peft's names.

        Those of text encoders are renamed as in diffusers' loader.
        """
        from diffusers.utils import convert_state_dict_to_diffusers, convert_state_dict_to_peft

        encoders = {key: part for key, part in self._parts().items() if key.startswith(ENCODER)}
        others = {key: value for key, value in tensors.items() if key.partition(".")[0] not in encoders}
        converted = super()._convert_names(others)
        for part, encoder in encoders.items():
            prefix = f"{part}."
            values = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            values = convert_state_dict_to_peft(convert_state_dict_to_diffusers(values)) if values else {}
            flat = "" if hasattr(encoder, "text_model") else "text_model."
            converted |= {f"{part}.{key.removeprefix(flat)}": value for key, value in values.items()}
        return converted

    @override
    def _misfit(self, tensors: Mapping[str, Tensor]) -> str:
        misfit = _misfit(self._parts(), tensors, applied=(*PAIRED, "magnitude_vector", "magnitude_vector.weight"))
        if misfit or any(key.partition(".")[0] in ("transformer", UNET) for key in tensors):
            return misfit
        return "has no tensors for this model's denoiser: it was made for another model"

    @override
    def _apply(self, name: str, id: str, file: Path) -> None:
        options = {"use_safetensors": True, "local_files_only": True, "low_cpu_mem_usage": True}
        self._transformer.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=id, **options)
        self._loras.file(name, id)  # checks that it was not changed while it was read


def _plain(key: str) -> str:
    """Return a tensor's name without the suffix that peft adds to magnitude vectors."""
    return key.removesuffix(".weight") if "lora_magnitude_vector" in key else key


def _adapted(parts: Mapping[str, Module], id: str) -> dict[str, Tensor]:
    """Return an adapter's tensors in a model's components, by their names in a file."""
    tensors: dict[str, Tensor] = {}
    for part, model in parts.items():
        for key, tensor in model.named_parameters():
            names = key.split(".")
            if id in names:
                plain = ".".join(name for name in names if name not in (id, COMPILED))
                tensors[_plain(f"{part}.{plain}")] = tensor
    return tensors


def _misfit(parts: Mapping[str, Module], tensors: Mapping[str, Tensor], applied: Collection[str] = PAIRED) -> str:
    """Return why tensors do not fit components, as a sentence's end; or "".

    `applied`: supported suffixes.
    """
    layers = {f"{part}.{path}": layer for part, model in parts.items() for path, layer in model.named_modules()}
    for key in tensors:
        path, _, end = key.partition(".lora_")
        if ".lokr_" in key and "magnitude_vector" in applied:
            continue
        if key.startswith(ENCODER) and not any(part.startswith(ENCODER) for part in parts):
            return f"contains {key}, but only the denoiser is adapted: save it without the text encoder's tensors"
        weight = getattr(layers.get(path), "weight", None)
        if weight is None:
            return f"contains {key}, but the model has no such layer: it was made for another model"
        down, up = (tensors.get(f"{path}.lora_{side}.weight") for side in "AB")
        if down is None or up is None or end not in applied:
            return f"contains {key}, which is not part of a low-rank pair: only low-rank pairs are supported"
        shape = tuple(getattr(weight, "quant_shape", weight.shape))
        shapes = [tuple(side.shape) for side in (down, up)]
        if shapes[0][1:] != shape[1:] or shapes[1][:2] != (shape[0], shapes[0][0]):
            pair = f"the pair for it is {shapes[0]} and {shapes[1]}"
            return f"does not fit the model: {path} is {shape}, but {pair}: it was made for another model"
        if end == "B.bias" and tuple(tensors[key].shape) != shape[:1]:
            return f"does not fit the model: {key} has {len(tensors[key])} values, but {path} has {shape[0]} outputs"
    return "" if tensors else "is empty"


#: Parts of the names of the two halves of a low-rank pair, down and up, in the order in which they are tried.
HALVES = (("lora_A", "lora_B"), ("lora_down", "lora_up"), (".down.", ".up."))
#: Kinds of other entries than low-rank pairs, by a part of their names.
BEYOND = {
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    ".hada_": "LoHa",
    ".lokr_": "LoKr",
    ".oft_": "OFT",
    ".lora_mid": "a pair with a third matrix",
    ".diff_m": "a modulation difference",
    ".diff_b": "a bias difference",
    ".diff": "a full weight difference",
}
#: Parts of the names of entries that are not supported for any model.
NOWHERE = ("dora_scale", ".hada_", ".oft_", ".lora_mid")
#: Parts of error messages.
ONLY = "only low-rank pairs (LoRA) with their alphas are supported"
REMEDY = "save it without this tensor, or merge it into the model's weights"


class TensorEntry(NamedTuple):
    """The type of one entry of a safetensors file."""

    dtype: str  # as the file names it, such as "BF16"
    shape: tuple[int, ...]  # the dimensions


def entries(file: Path) -> dict[str, TensorEntry]:
    """Return the entries of a safetensors file by name. Raises SafetensorError and OSError."""
    from safetensors import safe_open

    with safe_open(file, "numpy") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        return {name: TensorEntry(entry.get_dtype(), tuple(entry.get_shape())) for name, entry in slices.items()}


def refusal(entries: Mapping[str, TensorEntry]) -> str:
    """Return why no model can use these entries, as a sentence's end; or ""."""
    if not entries:
        return "is empty"
    for name, entry in entries.items():
        if any(part in name for part in NOWHERE):
            return unapplied(name)
        if not name.endswith("alpha") and (reason := _codes(name, entry.dtype)):
            return reason
    for name, entry in entries.items():
        other, is_down = other_half(name)
        if not other:
            continue
        if other not in entries:
            return f"contains {name} without {other}, the other half of the low-rank pair: save it again with both"
        pair = (entry.shape, entries[other].shape)
        down, up = pair if is_down else pair[::-1]
        if len(down) > 1 and len(up) > 1 and down[0] != up[1]:
            return f"contains {name} and {other} of different ranks ({down[0]} and {up[1]}): save it again"
    return ""


def other_half(name: str) -> tuple[str, bool]:
    """Return the name of a pair's other half (or ""), and whether `name` is down."""
    for down, up in HALVES if "lora" in name else ():
        for half, other in ((down, up), (up, down)):
            before, separator, after = name.rpartition(half)
            if separator and after in ("weight", ".weight", ".default.weight"):
                return f"{before}{other}{after}", half == down
    return "", False


def unapplied(name: str) -> str:
    """Return why an entry without effect is refused, as a sentence's end."""
    kind = next((kind for part, kind in BEYOND.items() if part in name), "")
    entry = f"{name} ({kind})" if kind else name
    return f"contains {entry}, which is not applied to this model: {ONLY}; {REMEDY}"


def not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return which entry has NaN or infinite numbers, as a sentence's end; or ""."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            kind = "NaN" if bool(tensor.isnan().any()) else "infinite numbers"
            return f"contains {kind} in {name}: it was damaged in training or saving; download or save it again"
    return ""


def unused_entry(tensors: Mapping[str, Tensor], used: set[str]) -> str:
    """Return the first entry not in `used` that would have an effect; or "".

    A difference of zeros, a pair whose up half is zero, and an alpha equal to the rank have no effect.
    """
    zeros = set(_zeros(tensors))
    return next((name for name in tensors if name not in used and not _is_without_effect(name, tensors, zeros)), "")


def _zeros(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the names of differences and up halves that are zero."""
    for name, tensor in tensors.items():
        other, is_down = other_half(name)
        adds = name.endswith((".diff", ".diff_b")) or bool(other) and not is_down
        if adds and not bool(tensor.any()):
            yield name


def _is_without_effect(name: str, tensors: Mapping[str, Tensor], zeros: set[str]) -> bool:
    """Return whether an entry changes nothing. `zeros` are the names that `_zeros` yields."""
    if name in zeros or other_half(name)[0] in zeros:
        return True
    if not name.endswith(".alpha") or tensors[name].numel() != 1:
        return False
    path = name.removesuffix("alpha")
    halves = {half: other_half(half) for half in tensors if half.startswith(path)}
    ranks = {tensors[half].shape[0] for half, (_, is_down) in halves.items() if is_down}
    is_zero = any(half in zeros for half, (other, is_down) in halves.items() if other and not is_down)
    return is_zero or ranks == {float(tensors[name])}


def _codes(name: str, dtype: str) -> str:
    """Return why a quantized entry is refused, as a sentence's end; or ""."""
    if dtype.startswith(("I", "U", "B")) and dtype != "BF16":
        return f"contains {name} as integers ({dtype}): quantized adapters are not supported; save it in 16 bits"
    if dtype.startswith(("F8", "F6", "F4")):
        return f"contains {name} in floats of less than 16 bits ({dtype}), which is not supported; save it in 16 bits"
    return ""


def fitted(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the tensors, with zero biases for pairs without one if any has one.

    peft gives either all layers of an adapter a bias or none, and does not initialize a bias that the file lacks.
    """
    complete = dict(tensors)
    if any(name.endswith("lora_B.bias") for name in tensors):
        for name, tensor in tensors.items():
            if name.endswith("lora_B.weight"):
                complete.setdefault(f"{name.removesuffix('weight')}bias", tensor.new_zeros(tensor.shape[0]))
    return complete
