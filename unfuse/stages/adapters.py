"""Adapters (LoRA) of denoisers: those that a folder holds, and the few of them that a transformer has loaded.

Who only looks into the folder imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings

import xxhash
from typing_extensions import override

from unfuse.core.errors import ConfigError, NotFound, PermanentError, Unsuitable
from unfuse.core.parameters import scales
from unfuse.core.plan import Params

if TYPE_CHECKING:
    from torch import Tensor

MAX_BYTES = 4 << 30  # of an adapter's file: they are far smaller than what they adapt
SHOWN = 20  # the most names that an error lists
UNET = "unet"  # the part of a model whose adapters other tools number otherwise

CHUNK = 1 << 20
NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
ID = re.compile(r"[0-9a-f]{32}")
BROKEN = OSError, ValueError, LookupError, RuntimeError, AttributeError, TypeError
"""The errors of diffusers for a file that is not an adapter."""


class Loras:
    """The adapters in a folder: NAME.safetensors is NAME. Its content is known by an id, the file's xxh3-128 hash.

    The folder `kept`, if any, has files of another machine, each by its id.
    """

    def __init__(self, folder: str, kept: str = "") -> None:
        self._folder, self._kept = Path(folder), kept
        self._ids: dict[Path, tuple[tuple[int, ...], str]] = {}

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
        known = self.files()
        if name not in known:
            shown = ", ".join([*known][:SHOWN]) or "none"
            more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
            odd = not NAME.fullmatch(name) and name in {file.stem for file in self._folder.glob("*.safetensors")}
            how = f"; rename {name}.safetensors: served are names of letters, digits, '.', '_' and '-'" if odd else ""
            raise NotFound(f"no lora {name!r} is there; there are {shown}{more}{how}")
        if (size := known[name].stat().st_size) > MAX_BYTES:
            raise NotFound(f"lora {name!r} has {size} bytes, and no more than {MAX_BYTES} are read")
        return self._id(known[name])

    def _id(self, file: Path) -> str:
        stat = file.stat()
        as_it_is = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
        if file not in self._ids or self._ids[file][0] != as_it_is:
            digest = xxhash.xxh3_128()
            with file.open("rb") as stream:
                while piece := stream.read(CHUNK):
                    digest.update(piece)
            self._ids[file] = as_it_is, digest.hexdigest()
        return self._ids[file][1]

    def ids_of(self, named: str) -> str:
        """The ids of all adapters that a request names, with commas between. Raises NotFound."""
        ids = {name: self.id_of(name) for name, _ in scales(named)}
        for name, id in ids.items():
            if twin := next((other for other in ids if other != name and ids[other] == id), ""):
                raise NotFound(f"loras {name!r} and {twin!r} are one file: name one of them, with the scale of both")
        return ",".join(ids.values())

    def file(self, name: str, id: str) -> Path:
        """The file of an adapter whose content has that id. Raises NotFound, and PermanentError if it has another."""
        if (kept := self.kept(id)).is_file() and self._id(kept) == id:
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


class Adapters:
    """The adapters of one transformer, the `part` of its model: at most `most` are loaded, or as many as a request
    names, which are active.

    They are read and applied by diffusers, in the formats that its `pipeline` class knows, and stay on the device.
    Raises ConfigError where the library peft is missing.
    """

    def __init__(
        self, loras: Loras, transformer: Any, pipeline: Callable[[], Any], device: Any, most: int,
        part: str = "transformer",
    ) -> None:  # fmt: skip
        if find_spec("peft") is None:
            raise ConfigError("--loras needs the library peft: pip install 'unfuse[lora]'")
        self._loras, self._transformer, self._pipeline = loras, transformer, pipeline
        self._device, self._most, self._part = device, most, part
        self._loaded: list[str] = []  # the least recently used first
        self._active: dict[str, float] | None = {}

    def use(self, params: Params) -> None:
        """Make the next forward run with the adapters of a request, or with none, which gives the model's exact bits.

        Raises PermanentError and NotFound when one cannot be had.
        """
        named, usual = scales(str(params.get("lora") or "")), float(params.get("lora_scale") or 0.0)
        ids = str(params.get("lora_id") or "").split(",")
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
        from safetensors import SafetensorError

        file = self._loras.file(name, id)
        try:
            with catch_warnings(action="ignore", category=UserWarning):  # that there are several adapters now
                self._apply(name, id, file)
        except (*BROKEN, SafetensorError) as error:
            raise Unsuitable(f"lora {name!r} cannot be loaded: {' '.join(str(error).split())}") from error
        for part in self._parts():
            for key, tensor in part.named_parameters():
                if id in key.split(".") and not tensor.is_meta:  # as where the layer is on another rank
                    tensor.data = tensor.data.to(self._device)

    def _parts(self) -> list[Any]:
        """What may have been adapted."""
        return [self._transformer]

    def _apply(self, name: str, id: str, file: Path) -> None:
        model = self._transformer
        how: dict[str, Any] = {"use_safetensors": True, "local_files_only": True}
        how |= {"return_alphas": True, "return_lora_metadata": True}
        if self._part == UNET:
            how["unet_config"] = model.config  # by which other tools' numbers of blocks are read
        tensors, *alphas, metadata = self._pipeline().lora_state_dict(str(file), **how)
        self._loras.file(name, id)  # it was not changed while it was read
        if self._part == UNET:
            from diffusers.utils import convert_unet_state_dict_to_peft

            tensors = convert_unet_state_dict_to_peft(tensors)
        if misfit := _misfit(model, tensors, f"{self._part}."):
            raise Unsuitable(f"lora {name!r} {misfit}")
        how = {"network_alphas": (alphas or [None])[0], "metadata": metadata, "low_cpu_mem_usage": True}
        model.load_lora_adapter(tensors, adapter_name=id, prefix=self._part, **how)


class PipelineAdapters(Adapters):
    """Those of a whole pipeline, put where its own loader puts them, text encoders too."""

    @override
    def _forget(self, id: str) -> None:
        self._transformer.delete_adapters(id)

    @override
    def _parts(self) -> list[Any]:
        return [part for part in self._transformer.components.values() if hasattr(part, "named_parameters")]

    @override
    def _apply(self, name: str, id: str, file: Path) -> None:
        pipeline = self._transformer
        how = {"use_safetensors": True, "local_files_only": True}
        if alien := _alien(pipeline, pipeline.lora_state_dict(str(file), **how)):
            raise Unsuitable(f"lora {name!r} holds {alien}, and the model has no such layer: it is for another one")
        how |= {"low_cpu_mem_usage": True}
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=id, **how)
        self._loras.file(name, id)  # it was not changed while it was read
        adapted = {part for part, names in pipeline.get_list_adapters().items() if id in names}
        if not adapted & {"transformer", UNET}:
            if adapted:
                pipeline.delete_adapters(id)
            raise Unsuitable(f"lora {name!r} has nothing for this model's denoiser: it was made for another one")


def _alien(pipeline: Any, read: Any) -> str:
    """The first key beside those of text encoders that no layer of the pipeline has; "" if there is none."""
    from diffusers.utils import convert_unet_state_dict_to_peft

    tensors = convert_unet_state_dict_to_peft(read[0] if isinstance(read, tuple) else read)
    parts = {part: model for part, model in pipeline.components.items() if hasattr(model, "named_modules")}
    layers = {f"{part}.{layer}" for part, model in parts.items() for layer, _ in model.named_modules()}
    keys = (key for key in tensors if ".lora" in key and not key.startswith("text_encoder"))
    return next((key for key in keys if key.partition(".lora")[0] not in layers), "")


def _misfit(transformer: Any, tensors: Mapping[str, Tensor], prefix: str) -> str:
    """Why these tensors are not an adapter of this transformer, whose keys begin so, in words; "" if they are."""
    layers = dict(transformer.named_modules())
    for key in tensors:
        path, _, part = key.partition(".lora_")
        if key.startswith("text_encoder"):
            return f"holds {key}, and only the denoiser is adapted: save it without its text encoder's part"
        weight = getattr(layers.get(path.removeprefix(prefix)), "weight", None)
        if not path.startswith(prefix) or weight is None:
            return f"holds {key}, and the model has no such layer: it was made for another one"
        down, up = (tensors.get(f"{path}.lora_{side}.weight") for side in "AB")
        if down is None or up is None or part not in ("A.weight", "B.weight", "B.bias"):
            return f"holds {key}, which is no half of a low-rank pair: only such are applied"
        own = getattr(weight, "quant_shape", weight.shape)
        if down.shape[1:] != own[1:] or up.shape[:2] != (own[0], down.shape[0]):
            shapes = " and ".join(str(tuple(side.shape)) for side in (down, up))
            return f"does not fit the model: {path} is {tuple(own)}, and the pair for it is {shapes}"
    return "" if tensors else "is empty"
