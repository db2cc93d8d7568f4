"""Adapters (LoRA) of denoisers: those that a folder holds, and the few of them that a transformer has loaded.

Every entry of a file that would have no effect is refused, by its name, shape and values. Who only looks into the
folder imports no torch, and so does the gateway, which checks the headers before a request is queued.
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

from unfuse.core.errors import ConfigError, NotFound, PermanentError, Unsuitable
from unfuse.core.parameters import scales
from unfuse.core.plan import Params

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


Value = TypeVar("Value")

MAX_BYTES = 4 << 30  # of an adapter's file: they are far smaller than what they adapt
SHOWN = 20  # the most names that an error lists
UNET = "unet"  # the component for whose adapters other tools number the blocks differently
ENCODER = "text_encoder"  # prefix of the names of text encoders
COMPILED = "_orig_mod"  # torch inserts this into the names of compiled modules
PAIRED = ("A.weight", "B.weight", "B.bias")
"""Ends of the names of a low-rank pair's tensors, after `lora_`."""

CHUNK = 1 << 20
NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
ID = re.compile(r"[0-9a-f]{32}")
BROKEN = ValueError, LookupError, RuntimeError, AttributeError, TypeError, AssertionError, ArithmeticError
"""The errors of diffusers and peft for a file that is not an adapter of the model."""


def require_peft() -> None:
    """Raise ConfigError where the library that applies adapters is not installed."""
    if find_spec("peft") is None:
        raise ConfigError("--loras needs the library peft: pip install 'unfuse[lora]'")


class AdapterFolder:
    """The adapters in a folder: NAME.safetensors is NAME. Its content is known by an id, the file's xxh3-128 hash.

    The folder `kept`, if any, has files of another machine, each by its id.
    """

    def __init__(self, folder: str, kept: str = "") -> None:
        self._folder, self._kept = Path(folder), kept
        self._known: dict[Path, tuple[tuple[int, ...], str, str]] = {}  # state, id and refusal of each file

    def files(self) -> dict[str, Path]:
        """The files of all adapters, by name, in order: those directly in the folder."""
        inside = self._folder.resolve()
        found = {file.stem: file.resolve() for file in sorted(inside.glob("*.safetensors"))}
        return {
            name: file
            for name, file in found.items()
            if NAME.fullmatch(name) and file.is_relative_to(inside) and file.is_file()
        }

    def id_of(self, name: str) -> str:
        """The id of an adapter. A file that has changed is read again, which may take long. Raises NotFound."""
        return self._read(self._file(name))[0]

    def check(self, named: str) -> None:
        """Look for adapters that a request names, and into their headers. Raises NotFound, and Unsuitable."""
        for name, _ in scales(named):
            if reason := _refusal(self._file(name)):
                raise Unsuitable(f"lora {name!r} {reason}")

    def _file(self, name: str) -> Path:
        known = self.files()
        if name not in known:
            shown = ", ".join([*known][:SHOWN]) or "none"
            more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
            odd = not NAME.fullmatch(name) and name in {file.stem for file in self._folder.glob("*.safetensors")}
            how = f"; rename {name}.safetensors: served are names of letters, digits, '.', '_' and '-'" if odd else ""
            raise NotFound(f"no lora {name!r} is there; there are {shown}{more}{how}")
        if (size := known[name].stat().st_size) > MAX_BYTES:
            raise NotFound(f"lora {name!r} has {size} bytes, and no more than {MAX_BYTES} are read")
        return known[name]

    def _read(self, file: Path) -> tuple[str, str]:
        """The id of a file, and why no model can use it; "" if one may."""
        stat = file.stat()
        as_it_is = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
        if file not in self._known or self._known[file][0] != as_it_is:
            with file.open("rb") as stream:
                id = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
            self._known[file] = as_it_is, id, _refusal(file)
        return self._known[file][1:]

    def ids_of(self, named: str) -> str:
        """Return the ids of all adapters that a request names, separated by commas.

        Raises NotFound, and Unsuitable if a file's header shows that no model can use it.
        """
        read = {name: self._read(self._file(name)) for name, _ in scales(named)}
        ids = {name: id for name, (id, _) in read.items()}
        for name, (_, reason) in read.items():
            if reason:
                raise Unsuitable(f"lora {name!r} {reason}")
        for name, id in ids.items():
            if twin := next((other for other in ids if other != name and ids[other] == id), ""):
                raise NotFound(f"loras {name!r} and {twin!r} are one file: name one of them, with the scale of both")
        return ",".join(ids.values())

    def file(self, name: str, id: str) -> Path:
        """The file of an adapter whose content has that id. Raises NotFound, and PermanentError if it has another."""
        if (kept := self.kept(id)).is_file() and self._read(kept)[0] == id:
            return kept
        if self.id_of(name) != id:
            raise PermanentError(f"lora {name!r} is not the one that was asked for: its file here has another content")
        return self.files()[name]

    def has(self, name: str, id: str) -> bool:
        """Whether that content is here."""
        try:
            return bool(self.file(name, id))
        except (NotFound, PermanentError):
            return False

    def kept(self, id: str) -> Path:
        """Where the file with that content is, once it came from another machine. Raises PermanentError for no id."""
        if not ID.fullmatch(id):
            raise PermanentError(f"{id[:40]!r} is no id of an adapter")
        return Path(self._kept or self._folder / ".kept", f"{id}.safetensors")

    def part(self, name: str, id: str, offset: int) -> tuple[int, bytes]:
        """The size of an adapter's file, and up to CHUNK of its bytes. Raises what `file` does."""
        with self.file(name, id).open("rb") as stream:
            stream.seek(offset)
            return os.fstat(stream.fileno()).st_size, stream.read(CHUNK)


def _refusal(file: Path) -> str:
    """Why no model can use a file, by its header; "" if one may, or if it is not a safetensors file."""
    from safetensors import SafetensorError

    with suppress(OSError, SafetensorError):  # the worker that loads the file reports the error
        return refusal(entries(file))
    return ""


class LoadedAdapters:
    """The adapters of one transformer, the `part` of its model: at most `most` are loaded, or as many as a request
    names, which are active.

    They are read and applied by diffusers, in the formats that its `pipeline` class knows, and stay on the device.
    Raises ConfigError where the library peft is missing.
    """

    def __init__(
        self, loras: AdapterFolder, transformer: Any, pipeline: Callable[[], Any], device: Any, most: int,
        part: str = "transformer",
    ) -> None:  # fmt: skip
        require_peft()
        self._loras, self._transformer, self._pipeline = loras, transformer, pipeline
        self._device, self._most, self._part = device, most, part
        self._loaded: list[str] = []  # the least recently used first
        self._active: dict[str, float] | None = {}

    def use(self, params: Params, lora_id: str) -> None:
        """Make the next forward run with the adapters of a request, or with none, which gives the model's exact bits.

        `lora_id` has the hashes of their contents ("": no adapters). Raises PermanentError and NotFound when one cannot
        be had.
        """
        named, usual = scales(str(params.get("lora") or "")), float(params.get("lora_scale") or 0.0)
        ids = lora_id.split(",")
        wanted = {id: usual if one is None else one for id, (_, one) in zip(ids, named, strict=True) if id}
        if wanted == self._active and [*wanted] == [*self._active]:
            return
        self._active = None  # should anything fail on the way, nothing is taken for granted
        if wanted:
            self._keep(dict(zip(ids, (name for name, _ in named), strict=True)))
            self._transformer.enable_lora()
            self._transformer.set_adapters([*wanted], [*wanted.values()])
        else:
            self._transformer.disable_lora()
        self._active = wanted

    def _keep(self, names: Mapping[str, str]) -> None:
        """Have these loaded, by id, in the place of the least recently used of the others."""
        self._loaded = [id for id in self._loaded if id not in names] + [id for id in self._loaded if id in names]
        missing = [id for id in names if id not in self._loaded]
        spare = len(self._loaded) + len(missing) - max(self._most, len(names))
        for id in self._loaded[: max(spare, 0)]:
            self._forget(id)
            self._loaded.remove(id)
        for id in missing:
            self._load(names[id], id)
            self._loaded.append(id)

    def _forget(self, id: str) -> None:
        self._transformer.set_adapters([], [])
        self._transformer.delete_adapters(id)

    def _load(self, name: str, id: str) -> None:
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
            raise Unsuitable(f"lora {name!r} cannot be loaded: {' '.join(str(error).split())}") from error
        except BROKEN as error:
            self._remove(id)
            shown = " ".join(str(error).split()) or repr(error)
            raise Unsuitable(
                f"lora {name!r} cannot be loaded: it is for another model, or saved in a format that diffusers cannot "
                f"read ({shown})"
            ) from error
        except Exception:
            self._remove(id)
            raise
        for part in self._parts().values():
            for key, tensor in part.named_parameters():
                if id in key.split(".") and not tensor.is_meta:  # as where the layer is on another rank
                    tensor.data = tensor.data.to(self._device)

    def _checked(self, name: str, file: Path) -> tuple[set[str], dict[str, float]]:
        """Return the names of the converted tensors of a file, and its alphas by layer, unless they are merged in.

        Raises Unsuitable if an entry would be dropped, does not fit the model, or contains NaN.
        """
        from safetensors.torch import load_file

        from unfuse.weights.traced import sources_of, traced

        if reason := refusal(entries(file)):
            raise Unsuitable(f"lora {name!r} {reason}")
        tensors = load_file(file)
        if reason := not_finite(tensors):
            raise Unsuitable(f"lora {name!r} {reason}")

        copies, read = traced(tensors)
        converted, *alphas = self._pipeline().lora_state_dict(copies, **self._ways())
        alike = {key for key in read if key.endswith("alpha")}
        if key := left_out(tensors, sources_of((converted, alphas)) | alike):
            raise Unsuitable(f"lora {name!r} {unapplied(key)}")
        found = self._converted(converted)
        if misfit := self._misfit(found):
            raise Unsuitable(f"lora {name!r} {misfit}")
        return {_plain(key) for key in found}, self._alphas(alphas)

    def _alphas(self, read: Sequence[Mapping[str, Any] | None]) -> dict[str, float]:
        """Return the alphas by layer, from the values that diffusers' reader returns beside the tensors."""
        named = {key: float(alpha) for one in read for key, alpha in (one or {}).items() if key.endswith(".alpha")}
        halves = {key.removesuffix(".alpha"): alpha for key, alpha in named.items()}
        halves = {key if key.endswith(".weight") else f"{key}.lora.down.weight": one for key, one in halves.items()}
        return {key.partition(".lora_")[0]: alpha for key, alpha in self._converted(halves).items()}

    def _scale(self, id: str, alphas: Mapping[str, float]) -> None:
        """Set the alpha of each layer to that of the file, or to the layer's rank if the file has none.

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
        """Raise Unsuitable unless the model has each converted tensor, and only zeros in any other one."""
        there = _adapted(self._parts(), id)
        if missing := sorted(set(wanted) - there.keys()):
            raise Unsuitable(f"lora {name!r} holds {missing[0]}, which takes no effect in this model: {REMEDY}")
        for key, tensor in there.items():  # peft does not initialize tensors that the file lacks
            if key not in wanted and (tensor.is_meta or bool(tensor.any())):
                raise Unsuitable(f"lora {name!r} lacks {key}, which its other tensors need: save it again")

    def _remove(self, id: str) -> None:
        """Remove the tensors of a failed load from the model."""
        for part in self._parts().values():
            if id in getattr(part, "peft_config", {}):
                part.delete_adapters(id) if hasattr(part, "delete_adapters") else part.delete_adapter(id)

    def _parts(self) -> dict[str, Any]:
        """The components that may be adapted, by the prefix of their keys."""
        return {self._part: self._transformer}

    def _ways(self) -> dict[str, Any]:
        """The options for that class."""
        how: dict[str, Any] = {"return_alphas": True, "return_lora_metadata": True}
        if self._part == UNET:
            how["unet_config"] = self._transformer.config  # to translate other tools' block numbers
        return how

    def _converted(self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """Return tensors, or other values, by peft's names, also for files with diffusers' older names."""
        from diffusers.utils import convert_unet_state_dict_to_peft

        return dict(convert_unet_state_dict_to_peft(tensors))

    def _misfit(self, tensors: Mapping[str, Tensor]) -> str:
        return _misfit(self._parts(), tensors)

    def _apply(self, name: str, id: str, file: Path) -> None:
        model, how = self._transformer, {"use_safetensors": True, "local_files_only": True, **self._ways()}
        tensors, *alphas, metadata = self._pipeline().lora_state_dict(str(file), **how)
        self._loras.file(name, id)  # it was not changed while it was read
        tensors = fitted(self._converted(tensors))
        how = {"network_alphas": (alphas or [None])[0], "metadata": metadata, "low_cpu_mem_usage": True}
        model.load_lora_adapter(tensors, adapter_name=id, prefix=self._part, **how)


class LoadedPipelineAdapters(LoadedAdapters):
    """Those of a whole pipeline, put where its own loader puts them, text encoders too."""

    @override
    def _forget(self, id: str) -> None:
        self._transformer.delete_adapters(id)

    @override
    def _parts(self) -> dict[str, Any]:
        return {key: part for key, part in self._transformer.components.items() if hasattr(part, "named_parameters")}

    @override
    def _ways(self) -> dict[str, Any]:
        parts, how = self._parts(), {"return_alphas": True, "return_lora_metadata": True}
        return how | ({"unet_config": parts[UNET].config} if UNET in parts and "text_encoder_2" in parts else {})

    @override
    def _converted(self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """Return the tensors by peft's names. Those of text encoders are renamed as in diffusers' loader."""
        from diffusers.utils import convert_state_dict_to_diffusers, convert_state_dict_to_peft

        encoders = {key: part for key, part in self._parts().items() if key.startswith(ENCODER)}
        found = {key: one for key, one in tensors.items() if key.partition(".")[0] not in encoders}
        found = super()._converted(found)
        for part, encoder in encoders.items():
            own = {key.removeprefix(f"{part}."): one for key, one in tensors.items() if key.startswith(f"{part}.")}
            own = convert_state_dict_to_peft(convert_state_dict_to_diffusers(own)) if own else {}
            flat = "" if hasattr(encoder, "text_model") else "text_model."
            found |= {f"{part}.{key.removeprefix(flat)}": one for key, one in own.items()}
        return found

    @override
    def _misfit(self, tensors: Mapping[str, Tensor]) -> str:
        misfit = _misfit(self._parts(), tensors, applied=(*PAIRED, "magnitude_vector", "magnitude_vector.weight"))
        if misfit or any(key.partition(".")[0] in ("transformer", UNET) for key in tensors):
            return misfit
        return "has no tensors for this model's denoiser: it was made for another model"

    @override
    def _apply(self, name: str, id: str, file: Path) -> None:
        how = {"use_safetensors": True, "local_files_only": True, "low_cpu_mem_usage": True}
        self._transformer.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=id, **how)
        self._loras.file(name, id)  # it was not changed while it was read


def _plain(key: str) -> str:
    """Return a tensor's name without the suffix that peft adds to magnitude vectors."""
    return key.removesuffix(".weight") if "lora_magnitude_vector" in key else key


def _adapted(parts: Mapping[str, Module], id: str) -> dict[str, Tensor]:
    """Return the tensors of an adapter in the components of a model, by their names in a file."""
    found: dict[str, Tensor] = {}
    for part, model in parts.items():
        for key, tensor in model.named_parameters():
            names = key.split(".")
            if id in names:
                own = ".".join(name for name in names if name not in (id, COMPILED))
                found[_plain(f"{part}.{own}")] = tensor
    return found


def _misfit(parts: Mapping[str, Module], tensors: Mapping[str, Tensor], applied: Collection[str] = PAIRED) -> str:
    """Return why these tensors do not fit these components, as the end of a sentence; "" if they fit.

    `applied` are the ends of tensor names that are supported.
    """
    layers = {f"{part}.{path}": layer for part, model in parts.items() for path, layer in model.named_modules()}
    for key in tensors:
        path, _, end = key.partition(".lora_")
        if ".lokr_" in key and "magnitude_vector" in applied:
            continue
        if key.startswith(ENCODER) and not any(part.startswith(ENCODER) for part in parts):
            return f"holds {key}, but only the denoiser is adapted: save it without the text encoder's tensors"
        weight = getattr(layers.get(path), "weight", None)
        if weight is None:
            return f"holds {key}, but the model has no such layer: it was made for another model"
        down, up = (tensors.get(f"{path}.lora_{side}.weight") for side in "AB")
        if down is None or up is None or end not in applied:
            return f"holds {key}, which is not part of a low-rank pair: only low-rank pairs are supported"
        own = tuple(getattr(weight, "quant_shape", weight.shape))
        shapes = [tuple(side.shape) for side in (down, up)]
        if shapes[0][1:] != own[1:] or shapes[1][:2] != (own[0], shapes[0][0]):
            pair = f"the pair for it is {shapes[0]} and {shapes[1]}"
            return f"does not fit the model: {path} is {own}, but {pair}: it was made for another model"
        if end == "B.bias" and tuple(tensors[key].shape) != own[:1]:
            return f"does not fit the model: {key} has {len(tensors[key])} values, but {path} has {own[0]} outputs"
    return "" if tensors else "is empty"


HALVES = (("lora_A", "lora_B"), ("lora_down", "lora_up"), (".down.", ".up."))
"""Parts of the names of the two halves of a low-rank pair, down and up, in the order in which they are tried."""

BEYOND = {
    "dora_scale": "DoRA", "lora_magnitude_vector": "DoRA", ".hada_": "LoHa", ".lokr_": "LoKr", ".oft_": "OFT",
    ".lora_mid": "a pair with a third matrix", ".diff_m": "a difference of modulation",
    ".diff_b": "a difference of a bias", ".diff": "a whole difference of weights",
}  # fmt: skip
"""Kinds of other entries than low-rank pairs, by a part of their names."""

NOWHERE = ("dora_scale", ".hada_", ".oft_", ".lora_mid")
"""Parts of the names of entries that are not supported for any model."""

ONLY = "only low-rank pairs (LoRA) with their alphas are applied"
REMEDY = "save it without that, or merge it into the model's weights"


class TensorEntry(NamedTuple):
    """An entry of a safetensors file: the file's name for its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]


def entries(file: Path) -> dict[str, TensorEntry]:
    """Return the entries of a safetensors file by name. Raises SafetensorError and OSError."""
    from safetensors import safe_open

    with safe_open(file, "numpy") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        return {name: TensorEntry(one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}


def refusal(found: Mapping[str, TensorEntry]) -> str:
    """Return why a file with these entries cannot be used with any model, as the end of a sentence; else ""."""
    if not found:
        return "is empty"
    for name, entry in found.items():
        if any(part in name for part in NOWHERE):
            return unapplied(name)
        if not name.endswith("alpha") and (reason := _codes(name, entry.dtype)):
            return reason
    for name, entry in found.items():
        other, is_down = other_half(name)
        if not other:
            continue
        if other not in found:
            return f"holds {name} without {other}, the other half of the low-rank pair: save it again with both"
        pair = (entry.shape, found[other].shape)
        down, up = pair if is_down else pair[::-1]
        if len(down) > 1 and len(up) > 1 and down[0] != up[1]:
            return f"holds {name} and {other} of different ranks ({down[0]} and {up[1]}): save it again"
    return ""


def other_half(name: str) -> tuple[str, bool]:
    """Return the name of the pair's other half, and whether `name` is the down half; "" for other entries."""
    for down, up in HALVES if "lora" in name else ():
        for own, other in ((down, up), (up, down)):
            before, found, after = name.rpartition(own)
            if found and after in ("weight", ".weight", ".default.weight"):
                return f"{before}{other}{after}", own == down
    return "", False


def unapplied(name: str) -> str:
    """Return the end of a sentence that refuses an entry without effect."""
    kind = next((kind for part, kind in BEYOND.items() if part in name), "")
    shown = f"{name} ({kind})" if kind else name
    return f"holds {shown}, which is not applied to this model: {ONLY}; {REMEDY}"


def not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the end of a sentence about the first entry with NaN or infinite numbers; "" if there is none."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            kind = "NaN" if bool(tensor.isnan().any()) else "infinite numbers"
            return f"holds {kind} in {name}: it was damaged in training or saving; download or save it again"
    return ""


def left_out(tensors: Mapping[str, Tensor], used: set[str]) -> str:
    """Return the first entry that is not in `used` and would have an effect; "" if there is none.

    A difference of zeros, a pair whose up half is zero, and an alpha equal to the rank have no effect.
    """
    without = set(_zeros(tensors))
    return next((name for name in tensors if name not in used and not _is_without_effect(name, tensors, without)), "")


def _zeros(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in tensors.items():
        other, is_down = other_half(name)
        adds = name.endswith((".diff", ".diff_b")) or bool(other) and not is_down
        if adds and not bool(tensor.any()):
            yield name


def _is_without_effect(name: str, tensors: Mapping[str, Tensor], zeros: set[str]) -> bool:
    if name in zeros or other_half(name)[0] in zeros:
        return True
    if not name.endswith(".alpha") or tensors[name].numel() != 1:
        return False
    path = name.removesuffix("alpha")
    halves = {one: other_half(one) for one in tensors if one.startswith(path)}
    ranks = {tensors[one].shape[0] for one, (_, is_down) in halves.items() if is_down}
    is_zero = any(one in zeros for one, (other, is_down) in halves.items() if other and not is_down)
    return is_zero or ranks == {float(tensors[name])}


def _codes(name: str, dtype: str) -> str:
    """Return the end of a sentence that refuses a quantised entry; "" for floats of at least 16 bits."""
    if dtype.startswith(("I", "U", "B")) and dtype != "BF16":
        return f"holds {name} as integers ({dtype}): quantised adapters are not supported; save it in 16 bits"
    if dtype.startswith(("F8", "F6", "F4")):
        return f"holds {name} in floats of fewer than 16 bits ({dtype}), which are not supported; save it in 16 bits"
    return ""


def fitted(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the tensors, with a zero bias added to each pair without one, if any pair has a bias.

    peft gives either all layers of an adapter a bias or none, and does not initialize a bias that the file lacks.
    """
    found = dict(tensors)
    if any(name.endswith("lora_B.bias") for name in tensors):
        for name, tensor in tensors.items():
            if name.endswith("lora_B.weight"):
                found.setdefault(f"{name.removesuffix('weight')}bias", tensor.new_zeros(tensor.shape[0]))
    return found
