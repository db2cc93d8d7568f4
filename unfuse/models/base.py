"""The family port: everything unfuse knows of one kind of model, in one file."""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash
from msgspec.structs import asdict, replace
from typing_extensions import override

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import ConfigError
from unfuse.core.modalities import MediaLimits
from unfuse.core.model_spec import AcceptedInput, ModelSpec
from unfuse.core.object_ref import DTYPES as WIDTHS
from unfuse.core.plan import Params, Pipeline, StageSpec
from unfuse.models.declared import call_defaults, scheduler_classes
from unfuse.models.defaults import ServingConfig, read_serving
from unfuse.models.encoders import cut_of, encoder_spreads
from unfuse.parallel.parallel_plan import ParallelPlan
from unfuse.stages.base import Stage
from unfuse.stages.specs import DENOISE, IMAGE_ENCODE, VAE_DECODE
from unfuse.weights.folder import INDEX, ModelFolder, choose_dtypes
from unfuse.weights.gguf_model import GgufModel
from unfuse.weights.quantized import check, is_whole_number, packed_bytes
from unfuse.weights.shared import MappedTensors, held, load_together, moved
from unfuse.weights.single import load_single, unplaced
from unfuse.weights.source import source_of

if TYPE_CHECKING:
    import torch

    from unfuse.parallel.group import Group, Mesh
    from unfuse.stages.denoise import Denoiser
    from unfuse.stages.image_encode import ImageEncoder, Redraw
    from unfuse.stages.text_encode import TextEncoder
    from unfuse.stages.vae_decode import VaeDecoder
    from unfuse.weights.adapters import LoadedAdapters

EXTRAS = ("scipy", "torchsde")  # packages that a few noise schedulers need; unfuse does not install them

EULER = "FlowMatchEulerDiscreteScheduler"
MULTISTEP = ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "DEISMultistepScheduler")
"""Multistep schedulers. They draw no noise between steps, except with the configurations that `draws_noise` finds."""

READ_ERRORS = (
    OSError, ValueError, TypeError, RuntimeError, LookupError, AttributeError, ArithmeticError, AssertionError,
    ImportError,
)  # fmt: skip
"""Exceptions that classes raise for configurations and files that they cannot read."""

Report = Callable[[str, float, int], None]  # called for each loaded component: name, seconds, bytes of memory


class RuntimeOptions(msgspec.Struct, frozen=True):
    """How a stage's components are to run: on which device, in which dtype by component, and what was set.

    `loras` is the folder of adapters (LoRA), if any, `kept` has borrowed ones, `mesh` the ranks that share it if
    there are several, `kv` the bytes for keys and values of tokens (0: as there is room). Stages of one process find in
    `shared` what they have in common. `group` are all ranks of the worker, which load the same, in the same order.
    """

    device: str
    dtypes: Mapping[str, str]
    options: ComputeOptions = ComputeOptions()
    loras: str = ""
    mesh: Mesh | None = None
    kv: int = 0
    shared: dict[Hashable, Any] = {}
    group: Group | None = None
    kept: str = ""


class Family(ABC):
    """One kind of model, stateless: the stages it has, what bounds a request, how each stage's components load."""

    torch = True
    """Whether its stages compute with torch. Those of a family that does not are given numpy arrays, and a process that
    runs no others never imports torch."""

    libraries: tuple[str, ...] = ("diffusers", "transformers")
    """Installed packages, beside torch, on whose versions the bytes of its results depend."""

    batches = False
    """Whether its requests share forwards, equal within a tolerance, unless `--batching` says otherwise."""

    cut: ParallelPlan | None = None
    """Where its transformers may be cut, to be spread over ranks."""

    def takes(self, folder: ModelFolder) -> bool:
        """Whether a folder of a class that this family is for is served by it; another is served undivided."""
        return True

    @abstractmethod
    def card(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        """The card of the model in a folder, served as `name`.

        Must not import torch, nor what imports it: gateway, scheduler and a worker's parent call it. Equal folders and
        dtypes give equal cards, wherever the card is made. Raises ConfigError for what cannot be served.
        """

    @abstractmethod
    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        """A stage of that model with its weights on the device; no other component's weights are read.

        The runtime's dtypes are the card's. Raises ConfigError, naming the component, when one cannot be loaded.
        """

    def prepare(self, folder: Path) -> None:  # noqa: B027 - there may be nothing to do
        """Import what loading the stages of that model would, once for all processes that are forked from this one.

        It starts no thread and touches no GPU. What is not imported here is imported when it is needed.
        """


class DiffusersFamily(Family):
    """A family that is a diffusers pipeline. Subclasses add its limits, its stages, and how these load."""

    name: str
    """Also its recipe: models of one name do the same with equal text encoders and VAEs, and share their pools."""
    source: tuple[str, str]
    """The pipeline's file, relative to the diffusers package, and class: its call has the defaults."""
    classes: Mapping[str, tuple[str, tuple[str, ...]]]
    """Library and known classes of each component."""
    text_encoders: Mapping[str, Callable[[Loader], TextEncoder]]
    """By stage kind."""
    image_encoder: Callable[[Loader], ImageEncoder]
    """Of a family with a stage that encodes a picture for its denoiser."""
    denoiser: Callable[[Loader], Denoiser]
    vae: Callable[[Loader], VaeDecoder]
    shape: Callable[[ModelFolder], Any]
    """Reads the sizes of its latents. Raises ConfigError for configurations that do not fit each other."""
    float32_latents = False
    """Whether latents are handed on in float32, not in the dtype of the transformer."""
    accepts: tuple[AcceptedInput, ...] = ()
    takes_lora = True
    """Whether diffusers loads adapters (LoRA) into its transformer."""
    cut: ParallelPlan
    adapts = "transformer"
    """The component that adapters are for."""
    else_whole = False
    """Whether a folder that does not fit is served undivided, not refused."""

    @override
    def takes(self, folder: ModelFolder) -> bool:
        try:
            if not is_split(folder, self.classes):
                return False
            whole = self.else_whole and all((folder.path / part).exists() for part in self.components(folder))
            return not whole or bool(self.standard(folder))
        except ConfigError:
            return False

    @override
    def card(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        model, serving = ModelFolder(folder), read_serving(folder, ServingConfig)
        dtypes = choose_dtypes(dtype, self.components(model))
        standard = {**call_defaults(*self.source), **self.standard(model)}
        limits = serving.bounds(self.limits(model, serving.over(standard)))
        pipeline = self.pipeline(model, limits, {component: WIDTHS[dtypes[component]] for component in dtypes})
        return ModelSpec(
            name=name,
            source=source_of(folder),
            family=self.name,
            pipeline=pipeline.spread(self.spreads(model)),
            limits=asdict(limits),
            defaults=serving.within(limits, standard),
            quality=msgspec.to_builtins(serving.quality),
            vocabulary=serving.vocabulary,
            weights=weights_ids(model, pipeline, self.name, self.settings(model.index())),
            dtypes=dtypes,
            created=model.created,
            accepts=self.accepts,
            takes_lora=self.takes_lora and not model.quantisation(self.adapts),
        )

    @override
    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        if runtime.loras and spec.kind == DENOISE.kind and runtime.mesh and "tensor" in runtime.mesh.degrees:
            raise ConfigError(f"--loras does not go with {spec.role}=tensor, which cuts weights: leave one out")
        model = ModelFolder(folder)
        stage = self.stage(spec.kind, Loader(model, self.components(model), runtime, report, self.cut))
        stage.exact = runtime.options.batching != "batched"
        return stage

    @override
    def prepare(self, folder: Path) -> None:
        for module in ("denoise", "image_encode", "text_encode", "vae_decode"):
            import_module(f"unfuse.stages.{module}")
        for library, name in self.components(ModelFolder(folder)).values():
            getattr(import_module(library), name)

    def components(self, folder: ModelFolder) -> dict[str, tuple[str, str]]:
        """Library and class of each component, by model_index.json. Raises ConfigError for what is not served."""
        index = folder.index()
        served = self.served(index)
        for component, (library, names) in served.items():
            entry = index.get(component)
            if not isinstance(entry, list) or len(entry) != 2 or entry[0] != library or entry[1] not in names:
                raise ConfigError(
                    f"model {folder.path}: {INDEX} gives component {component} as {str(entry)[:80]}; "
                    f"served is {library} {' or '.join(names)}"
                )
        return {component: tuple(index[component]) for component in served}

    def served(self, index: Mapping[str, Any]) -> Mapping[str, tuple[str, tuple[str, ...]]]:
        """The classes of `classes` that model_index.json has."""
        return self.classes

    def settings(self, index: Mapping[str, Any]) -> dict[str, str]:
        """Settings in model_index.json that make equal components behave differently, by component."""
        return {}

    def spreads(self, folder: ModelFolder) -> dict[str, dict[str, int]]:
        """By stage kind, the kinds by which a stage may be spread over ranks, as `Spread.refusal` reads them."""
        denoises = [name for name in self.components(folder) if name.startswith(self.adapts)]
        denoise = {} if any(map(folder.is_quantised, denoises)) else self.denoiser_spreads(folder)
        ways = {DENOISE.kind: denoise, VAE_DECODE.kind: {"tiles": 0}}
        return ways | encoder_spreads(folder, self.components(folder))

    def denoiser_spreads(self, folder: ModelFolder) -> dict[str, int]:
        """Those of denoising, by the transformer's configuration."""
        with folder.reading("transformer"):
            config = folder.config("transformer")
            heads, common = int(config["num_attention_heads"]), self.cut.matrices.common(config)
            blocks = int(config["num_layers"]) + int(config.get("num_single_layers") or 0)
        return {"ulysses": heads, "ring": 0, "cfg": 2, "tensor": common, "layers": blocks, "shard": 0}

    @abstractmethod
    def standard(self, folder: ModelFolder) -> Params:
        """Defaults that the pipeline's call does not have, or has otherwise."""

    @abstractmethod
    def limits(self, folder: ModelFolder, defaults: Params) -> MediaLimits:
        """What can be asked for, as far as the configurations say. Raises ConfigError for some that do not fit."""

    @abstractmethod
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        """The stages that encode, and the most room of their outputs; `widths` are bytes of a number, by component."""

    def pipeline(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Pipeline:
        """The encoders, then denoising of all that they make, then VAE decoding."""
        encoders = self.encoders(folder, limits, widths)
        inputs = tuple(name for encoder in encoders for name in encoder.outputs)
        denoisers = [name for name in self.components(folder) if name.startswith(self.adapts)]
        width = WIDTHS["float32"] if self.float32_latents else widths[self.adapts]
        room, components = self.shape(folder).room(width), (*denoisers, "scheduler")
        denoise = replace(DENOISE, components=components, inputs=inputs, room=room, shares=True)
        return Pipeline((*encoders, denoise, VAE_DECODE))

    def has_zeros(self, index: Mapping[str, Any]) -> bool:
        """Whether, by model_index.json, zeros stand for a negative prompt that is not there."""
        return False

    def redraw(self, loader: Loader, dtype: torch.dtype) -> Redraw | None:
        """How pictures are redrawn with a transformer in that dtype; None of a family that does not do that."""
        return None

    def stage(self, kind: str, loader: Loader) -> Stage:
        """The stage of that kind; a denoiser loads the VAE when its first preview is due. Raises ConfigError."""
        from unfuse.stages.denoise import Denoise
        from unfuse.stages.image_encode import ImageEncode
        from unfuse.stages.text_encode import TextEncode
        from unfuse.stages.vae_decode import PreviewDecoder, VaeDecode

        if kind in self.text_encoders:
            return TextEncode(self.text_encoders[kind](loader), kind, self.has_zeros(loader.folder.index()))
        if kind == IMAGE_ENCODE.kind:
            return ImageEncode(self.image_encoder(loader))
        if kind == DENOISE.kind:
            denoiser, runtime = self.denoiser(loader), loader.runtime
            preview, adapters = PreviewDecoder(lambda: self.vae(loader.alone)), self._adapters(loader, denoiser)
            redraw = self.redraw(loader, denoiser.dtype)
            return Denoise(denoiser, runtime.options, preview, adapters, runtime.mesh, redraw)
        if kind == VAE_DECODE.kind:
            return VaeDecode(self.vae(loader))
        raise ConfigError(f"model {loader.folder.path} has no stage of kind {kind}")

    def _adapters(self, loader: Loader, denoiser: Denoiser) -> LoadedAdapters | None:
        """Those of the transformer that the denoiser has loaded; where it has two, of the first, as in diffusers."""
        from unfuse.weights.adapters import AdapterFolder, LoadedAdapters

        runtime = loader.runtime
        if not runtime.loras or not self.takes_lora or loader.folder.quantisation(self.adapts):
            return None
        if runtime.options.offload == "sequential":
            raise ConfigError("--loras does not go with --offload sequential: use --offload model")
        pipeline = partial(getattr, import_module("diffusers"), self.source[1])
        transformer, most = denoiser.transformers[0], runtime.options.max_loras
        return LoadedAdapters(
            AdapterFolder(runtime.loras, runtime.kept), transformer, pipeline, loader.device, most, self.adapts
        )


def weights_ids(
    folder: ModelFolder, pipeline: Pipeline, recipe: str, settings: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """The identity of each component of a pipeline.

    That of a stage's first component, which names the stage's pool, covers the others of the stage too: workers whose
    transformers are equal and whose noise schedulers are not must not share a pool. `recipe` names what a family does
    with its components: of equal ones, families that do the same share pools, and others do not; `settings` adds to it
    for single components.
    """
    alone = {component: (component,) for stage in pipeline.stages for component in stage.components}
    groups = {**alone, **{stage.components[0]: stage.components for stage in pipeline.stages}}
    named = ((part, f"{recipe}{settings.get(part, '')}\0{folder.identity(*group)}") for part, group in groups.items())
    return {component: xxhash.xxh3_128_hexdigest(name.encode()) for component, name in named}


class Loader:
    """Loads components of one model onto one device, ready to compute, by class and from their own subfolders."""

    def __init__(
        self,
        folder: ModelFolder,
        classes: Mapping[str, tuple[str, str]],
        runtime: RuntimeOptions,
        report: Report | None,
        cut: ParallelPlan | None = None,
    ) -> None:
        self.folder, self.runtime, self._classes, self._report, self._cut = folder, runtime, classes, report, cut

    @property
    def alone(self) -> Loader:
        """One for what this rank loads, and others do not."""
        return Loader(self.folder, self._classes, replace(self.runtime, mesh=None, group=None), self._report, self._cut)

    @property
    def device(self) -> torch.device:
        """Where its components compute; one that is offloaded may lie elsewhere meanwhile."""
        import torch

        return torch.device(self.runtime.device)

    def model(self, component: str, part: Callable[[Any], Any] | None = None) -> Any:
        """A component with weights, all of which must be in its safetensors files.

        `part` makes of its class that of a part of it, which alone is loaded then.
        """
        began, runtime, (library, name) = time.monotonic(), self.runtime, self._classes[component]
        files, dtype, how = self.folder.weights(component), runtime.dtypes[component], runtime.options.offload
        check(component, quantised := self.folder.quantisation(component), files, dtype, self.device.type, how)
        load, group, offload = partial(self._checked, component, part), runtime.group, how != "none"
        made = not isinstance(self.folder, GgufModel) and not quantised and not self.folder.has(component, dtype)
        if group and (offload or made):
            model = load_together(group, self.folder, component, library, load, offload)
            mapped = MappedTensors(held(model))
        else:
            model, mapped = load(), MappedTensors(())
        if runtime.mesh and (cut := cut_of(component, name, self._cut)):
            from unfuse.parallel.spreading import spread

            spread(model, cut, runtime.mesh)
        mapped.leave(held(model))
        model = self._settle(model)
        self._tell(component, began, sum(map(packed_bytes, held(model))))
        return model

    def _checked(self, component: str, part: Callable[[Any], Any] | None, path: Path | None = None) -> Any:
        """A component with weights, of its own folder or another one that has all of them."""
        import torch

        name, dtype = self.class_of(component), getattr(torch, self.runtime.dtypes[component])
        options = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
        model, info = self._read(component, options, part, path)
        if missing := sorted(info["missing_keys"]):
            raise ConfigError(
                f"model {self.folder.path}: the weights of component {component} lack {missing[0]} "
                f"({len(missing)} tensors in all): {name} would run on random numbers"
            )
        if unused := sorted(unplaced(model, info["unexpected_keys"])):
            raise ConfigError(
                f"model {self.folder.path}: the weights of component {component} have {unused[0]} "
                f"({len(unused)} tensors in all), which {name} with its configuration has no place for: give the "
                "weights that belong to this configuration, in their original precision"
            )
        if not self.folder.quantisation(component) and (whole := self._rounded(component, model)):
            raise ConfigError(
                f"model {self.folder.path}: {component} has {whole} as integers, where {name} has floats: give it in "
                "its original precision"
            )
        return model.eval()

    def _rounded(self, component: str, model: Any) -> str:
        """The first floating-point tensor of a model that its files store as integers; "" if there is none."""
        stored = self.folder.tensors(component)
        floats = (key for key, tensor in model.state_dict().items() if tensor.is_floating_point() and key in stored)
        return next((key for key in floats if is_whole_number(stored[key][0])), "")

    def class_of(self, component: str) -> str:
        """The class of a component, in its library."""
        return self._classes[component][1]

    def vae(self) -> Any:
        """The VAE, as `--vae` says, or in tiles if ranks share these; in tiles it takes pictures one by one."""
        vae, how, mesh = self.model("vae"), self.runtime.options.vae, self.runtime.mesh
        how = "tiled" if mesh and "tiles" in mesh.degrees else how
        if how != "whole":
            vae.enable_slicing()
        if how == "tiled":
            vae.enable_tiling()
        if mesh and "tiles" in mesh.degrees:
            from unfuse.parallel import tiles

            tiles.spread(vae, mesh.axis("tiles"))
        return vae

    def noise_scheduler(self) -> Any:
        """The noise scheduler of a split model. Raises ConfigError if it draws noise between steps."""
        scheduler = self.plain("scheduler")
        if draws_noise(scheduler.config):
            raise ConfigError(
                f"model {self.folder.path}: its noise scheduler draws noise between steps, which is only supported "
                "for undivided pipelines"
            )
        return scheduler

    def plain(self, component: str) -> Any:
        """A component without weights, such as a tokenizer or a noise scheduler."""
        began = time.monotonic()
        self.folder.config(component)
        found = self._read(component, {}, None, None)
        self._tell(component, began, self.folder.size(component))
        return found

    def _settle(self, model: Any) -> Any:
        """The model on the device, or resting until it runs there."""
        offload = self.runtime.options.offload
        if offload == "none":
            return moved(model, self.device)
        if self.device.type == "cpu":
            raise ConfigError(f"--offload {offload} needs a GPU: on a CPU weights are in host memory anyway")
        from unfuse.weights.offload import rest

        return rest(model, self.device, offload)

    def _read(
        self, component: str, options: dict[str, Any], part: Callable[[Any], Any] | None, path: Path | None
    ) -> Any:
        from safetensors import SafetensorError

        library, name = self._classes[component]
        import_module(f"{library.partition('.')[0]}.utils.logging").disable_progress_bar()
        whole = getattr(import_module(library), name, None)
        if whole is None:
            raise ConfigError(f"component {component} of {self.folder.path} is a {name}, which {library} does not have")
        kind = part(whole) if part else whole
        path = path or self.folder.path / self.folder.at(component)
        try:
            if isinstance(self.folder, GgufModel):
                return self.folder.load(kind, options["dtype"]), {"missing_keys": (), "unexpected_keys": ()}
            if (single := self.folder.single(component)) and path.is_relative_to(self.folder.path):
                return load_single(kind, path / single, options["dtype"])
            return kind.from_pretrained(str(path), local_files_only=True, **options)
        except (*READ_ERRORS, SafetensorError) as error:
            raise ConfigError(self._unreadable(component, path, whole, error)) from error

    def _unreadable(self, component: str, path: Path, kind: Any, error: Exception) -> str:
        """Why a component cannot be loaded. For one without weights, names the wrong field of its configuration."""
        reason = " ".join(str(error).split()) or type(error).__name__
        sentence = f"component {component} in {path} cannot be loaded as {self.class_of(component)}"
        if isinstance(error, ImportError):
            lacking = "" if "pip install" in reason else next((f": pip install {n}" for n in EXTRAS if n in reason), "")
            return f"{sentence}: {reason.rstrip('.')}{lacking}"
        if self.folder.weight_names(component) or not hasattr(kind, "config_name"):
            return f"{sentence}: {reason}"
        config = self.folder.config(component)
        if field := unreadable_field(kind, config):
            value = msgspec.json.encode(config[field]).decode()[:80]
            sentence += f": {kind.config_name} says {field} is {value}, correct that field"
        return f"{sentence}: {reason[:200]}"

    def _tell(self, component: str, began: float, size: int) -> None:
        if self._report is not None:
            self._report(component, time.monotonic() - began, size)


def draws_noise(config: Mapping[str, Any]) -> bool:
    """Return whether this configuration makes a deterministic scheduler class draw noise between steps."""
    return bool(config.get("stochastic_sampling")) or str(config.get("algorithm_type")).startswith("sde")


def is_split(folder: ModelFolder, classes: Mapping[str, tuple[str, tuple[str, ...]]]) -> bool:
    """Return whether a family's denoise stage supports the folder's noise scheduler.

    With any other scheduler of diffusers, the model is served undivided: the pipeline itself calls the scheduler. For
    a class that is not a scheduler of diffusers this returns True, and the family refuses it. A folder without the
    scheduler's configuration has the components of other stages alone.

    Args:
        folder: the model, whose index names the scheduler's class.
        classes: library and known classes of each component of the family.
    """
    entry = folder.index().get("scheduler")
    if "scheduler" not in classes or not isinstance(entry, list) or len(entry) != 2 or entry[0] != "diffusers":
        return True
    if entry[1] in classes["scheduler"][1]:
        return not draws_noise(folder.beside("scheduler/scheduler_config.json"))
    return entry[1] not in scheduler_classes()


def unreadable_field(kind: Any, config: Mapping[str, Any]) -> str:
    """Return the field of a configuration because of which its class cannot be instantiated; "" if not a single one.

    It is the field without which (with its default value) the class can be instantiated.
    """
    known = inspect.signature(kind.__init__).parameters
    given = {name: value for name, value in config.items() if name in known}
    for name in given:
        try:
            kind(**{other: value for other, value in given.items() if other != name})
        except READ_ERRORS:
            continue
        return name
    return ""
