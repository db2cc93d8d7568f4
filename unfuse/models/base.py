"""The model family port: describe, divide and load one kind of model."""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash
from msgspec.structs import asdict, replace
from typing_extensions import override

from unfuse.core.compute_options import SHARD, ComputeOptions
from unfuse.core.errors import ConfigError
from unfuse.core.modalities import MediaLimits
from unfuse.core.model_spec import AcceptedInput, ModelSpec
from unfuse.core.object_ref import DTYPES as WIDTHS
from unfuse.core.offload_options import Offload, offload_of, require_gpu
from unfuse.core.plan import Params, Pipeline, StageSpec
from unfuse.models.declared import call_defaults
from unfuse.models.defaults import ServingConfig, read_serving
from unfuse.models.encoders import component_parallel_plan, encoder_parallelism
from unfuse.models.noise_schedulers import draws_noise, is_split
from unfuse.parallel.parallel_plan import ParallelPlan
from unfuse.stages.attention import check_masks, set_attention
from unfuse.stages.base import Stage
from unfuse.stages.specs import DENOISE, IMAGE_ENCODE, VAE_DECODE
from unfuse.weights.folder import INDEX, ModelFolder, choose_dtypes
from unfuse.weights.gguf_model import GgufModel
from unfuse.weights.quantized import check, is_whole_number, packed_bytes
from unfuse.weights.shared import MappedTensors, load_together, move_to, resident_tensors
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

#: Packages that a few noise schedulers need. unfuse does not install them.
EXTRAS = ("scipy", "torchsde")

#: Exceptions that classes raise for configurations and files that they cannot read.
READ_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    RuntimeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    ImportError,
)

#: A callback for each loaded component: name, seconds, bytes of memory.
Report = Callable[[str, float, int], None]


class RuntimeOptions(msgspec.Struct, frozen=True):
    """How a stage's components run: devices, dtypes, parallelism and options."""

    #: The device of this rank.
    device: str
    #: The dtype of each component.
    dtypes: Mapping[str, str]
    #: The settings that all stages of the worker share, such as batching and offload.
    options: ComputeOptions = ComputeOptions()
    #: The folder of LoRA adapters; "" for none.
    loras: str = ""
    #: The ranks over which the stage is spread; None for one rank.
    mesh: Mesh | None = None
    #: Bytes of the KV cache, for all ranks together. 0: a share of the free memory.
    kv: int = 0
    #: Objects that the stages of one process share, such as models.
    shared_objects: dict[Hashable, Any] = {}
    #: All ranks of the worker, which load the same components in the same order.
    group: Group | None = None
    #: The folder of adapters that were fetched from other machines.
    adapter_folder: str = ""


class Family(ABC):
    """A kind of model, without state: its stages, its limits, and how its components load."""

    #: Whether its stages compute with torch. Other families get numpy arrays, and their processes never import torch.
    torch = True

    #: Installed packages, besides torch, on whose versions the bytes of its results depend.
    libraries: tuple[str, ...] = ("diffusers", "transformers")

    #: Whether its requests are batched by default, with results equal within a tolerance. `--batching` overrides it.
    batches = False

    #: How its transformers are split for sequence, tensor and pipeline parallelism.
    parallel_plans: ParallelPlan | None = None

    def supports(self, folder: ModelFolder) -> bool:
        """Return whether the family supports this folder of one of its classes.

        Other folders are served undivided.
        """
        return True

    @abstractmethod
    def model_spec(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        """Return the spec of the model in a folder, served as `name`.

        Must not import torch, directly or indirectly: gateway, scheduler and a worker's parent call it. Equal folders
        and dtypes must give equal specs on every machine. Raises ConfigError if the model is not supported.
        """

    def not_offloaded(self, folder: ModelFolder) -> Collection[str]:
        """Return the components that stay on the device with any `--offload`."""
        return ()

    @abstractmethod
    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        """Return a stage of the model, with its weights on the device.

        Must not read other components' weights. The runtime's dtypes are those of the model spec. Raises ConfigError,
        naming the component, if one cannot be loaded.
        """

    def prepare(self, folder: Path) -> None:  # noqa: B027 - there may be nothing to do
        """Import the modules that loading the stages needs, before processes are forked.

        Must not start a thread or use a GPU. Modules that are not imported here are imported when needed.
        """


class DiffusersFamily(Family):
    """A family that is a diffusers pipeline.

    Subclasses define its limits, its stages, and how these load.
    """

    #: The family's name. Models of one family with equal text encoders and VAEs share the pools of these stages.
    name: str
    #: The pipeline's file, relative to the diffusers package, and class. Its call has the defaults.
    source: tuple[str, str]
    #: The library and supported classes of each component.
    classes: Mapping[str, tuple[str, tuple[str, ...]]]
    #: The text encoders by stage kind.
    text_encoders: Mapping[str, Callable[[Loader], TextEncoder]]
    #: The image encoder, if a stage encodes an image for the denoiser.
    image_encoder: Callable[[Loader], ImageEncoder]
    denoiser: Callable[[Loader], Denoiser]
    vae: Callable[[Loader], VaeDecoder]
    #: Reads the sizes of its latents. Raises ConfigError for configurations that do not fit each other.
    shape: Callable[[ModelFolder], Any]
    #: Whether latents pass between stages in float32, not in the dtype of the transformer.
    float32_latents = False
    #: The uploads that it supports.
    accepts: tuple[AcceptedInput, ...] = ()
    #: Whether diffusers can load LoRA adapters into its transformer.
    takes_lora = True
    parallel_plans: ParallelPlan
    #: The component that adapters are for.
    adapts = "transformer"
    #: Whether an unsupported folder is served undivided instead of refused.
    else_whole = False

    @override
    def supports(self, folder: ModelFolder) -> bool:
        try:
            if not is_split(folder, self.classes):
                return False
            is_complete = self.else_whole and all((folder.path / name).exists() for name in self.components(folder))
            return not is_complete or bool(self.standard(folder))
        except ConfigError:
            return False

    @override
    def model_spec(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        model = ModelFolder(folder)
        serving = read_serving(folder, ServingConfig)
        components = self.components(model)
        dtypes = choose_dtypes(dtype, components)

        standard = {**call_defaults(*self.source), **self.standard(model)}
        limits = serving.bounds(self.limits(model, serving.with_standard(standard)))
        pipeline = self.pipeline(model, limits, {component: WIDTHS[dtypes[component]] for component in dtypes})
        return ModelSpec(
            name=name,
            source=source_of(folder),
            family=self.name,
            pipeline=pipeline.with_parallelism(self.parallelism(model)),
            limits=asdict(limits),
            defaults=serving.with_limits(limits, standard),
            quality=msgspec.to_builtins(serving.quality),
            vocabulary=serving.vocabulary,
            weights=weights_ids(model, pipeline, self.name, self.settings(model.index())),
            dtypes=dtypes,
            classes={component: class_name for component, (_, class_name) in components.items()},
            created=model.created,
            accepts=self.accepts,
            takes_lora=self.takes_lora and not model.quantization(self.adapts),
        )

    @override
    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        if runtime.loras and spec.kind == DENOISE.kind and runtime.mesh and "tensor" in runtime.mesh.degrees:
            raise ConfigError(f"--loras cannot be combined with --parallel {spec.role}=tensor: leave one of them out")
        model = ModelFolder(folder)
        stage = self.stage(spec.kind, Loader(model, self.components(model), runtime, report, self.parallel_plans))
        stage.exact = runtime.options.batching != "batched"
        return stage

    @override
    def prepare(self, folder: Path) -> None:
        for module in ("denoise", "image_encode", "text_encode", "vae_decode"):
            import_module(f"unfuse.stages.{module}")
        for library, name in self.components(ModelFolder(folder)).values():
            getattr(import_module(library), name)

    def components(self, folder: ModelFolder) -> dict[str, tuple[str, str]]:
        """Return the library and class of each component, from model_index.json.

        Raises ConfigError for an unsupported class.
        """
        index = folder.index()
        served = self.served(index)
        for component, (library, names) in served.items():
            entry = index.get(component)
            if not isinstance(entry, list) or len(entry) != 2 or entry[0] != library or entry[1] not in names:
                raise ConfigError(
                    f"model {folder.path}: {INDEX} declares component {component} as {str(entry)[:80]}; "
                    f"supported: {library} {' or '.join(names)}"
                )
        return {component: tuple(index[component]) for component in served}

    def served(self, index: Mapping[str, Any]) -> Mapping[str, tuple[str, tuple[str, ...]]]:
        """Return the entries of `classes` that a model with this model_index.json has."""
        return self.classes

    def settings(self, index: Mapping[str, Any]) -> dict[str, str]:
        """Return settings in model_index.json that change what a component does, by component."""
        return {}

    def parallelism(self, folder: ModelFolder) -> dict[str, dict[str, int]]:
        """Return the kinds of parallelism that each stage kind supports.

        By stage kind, a number of heads or layers for each parallel kind, as `ParallelDegrees.refusal` reads it.
        """
        denoisers = [name for name in self.components(folder) if name.startswith(self.adapts)]
        denoise = {} if any(map(folder.is_quantized, denoisers)) else self.denoiser_parallelism(folder)
        parallelism = {DENOISE.kind: denoise, VAE_DECODE.kind: {"tiles": 0}}
        return parallelism | encoder_parallelism(folder, self.components(folder))

    def denoiser_parallelism(self, folder: ModelFolder) -> dict[str, int]:
        """Return the kinds of parallelism that denoising supports, from the transformer's configuration."""
        with folder.reading("transformer"):
            config = folder.config("transformer")
            heads, common = int(config["num_attention_heads"]), self.parallel_plans.matrices.common(config)
            blocks = int(config["num_layers"]) + int(config.get("num_single_layers") or 0)
        return {"ulysses": heads, "ring": 0, "cfg": 2, "tensor": common, "layers": blocks, "shard": 0}

    @abstractmethod
    def standard(self, folder: ModelFolder) -> Params:
        """Return defaults that the pipeline's call lacks, or that differ from it."""

    @abstractmethod
    def limits(self, folder: ModelFolder, defaults: Params) -> MediaLimits:
        """Return the limits of requests that follow from the configurations.

        Raises ConfigError for configurations that do not fit each other.
        """

    @abstractmethod
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        """Return the encoding stages, with the largest size of their outputs.

        `widths`: bytes per number, by component.
        """

    def pipeline(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Pipeline:
        """Return the pipeline: the encoders, denoising of all their outputs, and VAE decoding."""
        encoders = self.encoders(folder, limits, widths)
        inputs = tuple(name for encoder in encoders for name in encoder.outputs)
        denoisers = [name for name in self.components(folder) if name.startswith(self.adapts)]
        width = WIDTHS["float32"] if self.float32_latents else widths[self.adapts]
        latent_size = self.shape(folder).latent_size(width)
        components = (*denoisers, "scheduler")
        denoise = replace(DENOISE, components=components, inputs=inputs, output_size=latent_size, batch_invariant=True)
        return Pipeline((*encoders, denoise, VAE_DECODE))

    def has_zeros(self, index: Mapping[str, Any]) -> bool:
        """Return whether model_index.json replaces a missing negative prompt by zero embeddings."""
        return False

    def redraw(self, loader: Loader, dtype: torch.dtype) -> Redraw | None:
        """Return how images are redrawn with a transformer in this dtype; None if not supported."""
        return None

    def stage(self, kind: str, loader: Loader) -> Stage:
        """Return the stage of this kind. Raises ConfigError if it cannot be loaded.

        A denoiser loads the VAE when its first preview is due.
        """
        from unfuse.stages.denoise import Denoise
        from unfuse.stages.image_encode import ImageEncode
        from unfuse.stages.text_encode import TextEncode
        from unfuse.stages.vae_decode import PreviewDecoder, VaeDecode

        device = None if loader.runtime.group else loader.device  # None: ranks must agree on tiles
        if kind in self.text_encoders:
            return TextEncode(self.text_encoders[kind](loader), kind, self.has_zeros(loader.folder.index()))
        if kind == IMAGE_ENCODE.kind:
            return ImageEncode(self.image_encoder(loader), loader.runtime.options, device)
        if kind == DENOISE.kind:
            denoiser, runtime = self.denoiser(loader), loader.runtime
            check_masks(runtime.options.attention, denoiser.masks)
            preview = PreviewDecoder(lambda: self.vae(loader.for_this_rank))
            adapters = self._adapters(loader, denoiser)
            redraw = self.redraw(loader, denoiser.dtype)
            return Denoise(denoiser, runtime.options, preview, adapters, runtime.mesh, redraw)
        if kind == VAE_DECODE.kind:
            return VaeDecode(self.vae(loader), loader.runtime.options, device)
        raise ConfigError(f"model {loader.folder.path} has no stage of kind {kind}")

    def _adapters(self, loader: Loader, denoiser: Denoiser) -> LoadedAdapters | None:
        """Return the LoRA adapters of the denoiser's transformer, or None if disabled.

        With two transformers they are for the first, as in diffusers.
        """
        from unfuse.weights.adapters import AdapterFolder, LoadedAdapters

        runtime = loader.runtime
        if not runtime.loras or not self.takes_lora or loader.folder.quantization(self.adapts):
            return None
        if offload_of(runtime.options.offload, self.adapts) == "sequential":
            raise ConfigError("--loras cannot be combined with --offload sequential: use --offload model")
        pipeline = partial(getattr, import_module("diffusers"), self.source[1])
        files = AdapterFolder(runtime.loras, runtime.adapter_folder)
        transformer, max_loras = denoiser.transformers[0], runtime.options.max_loras
        return LoadedAdapters(files, transformer, pipeline, loader.device, max_loras, self.adapts)


def weights_ids(
    folder: ModelFolder, pipeline: Pipeline, recipe: str, settings: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Return the identity (a hash) of each component of a pipeline.

    The identity of a stage's first component names the stage's pool, and covers the stage's other components too:
    workers with equal transformers and different noise schedulers must not share a pool.

    `recipe`: names how a family uses its components. Families with one recipe share the pools of equal components.
    `settings`: adds to the recipe for single components.
    """
    single = {component: (component,) for stage in pipeline.stages for component in stage.components}
    groups = {**single, **{stage.components[0]: stage.components for stage in pipeline.stages}}
    texts = ((name, f"{recipe}{settings.get(name, '')}\0{folder.identity(*group)}") for name, group in groups.items())
    return {component: xxhash.xxh3_128_hexdigest(text.encode()) for component, text in texts}


class Loader:
    """Loads components of one model onto one device, ready to run."""

    def __init__(
        self,
        folder: ModelFolder,
        classes: Mapping[str, tuple[str, str]],
        runtime: RuntimeOptions,
        report: Report | None,
        plan: ParallelPlan | None = None,
    ) -> None:
        self.folder = folder
        self.runtime = runtime
        self._classes = classes  # library and class of each component
        self._report = report
        self._plan = plan  # of the model's transformers

    @property
    def for_this_rank(self) -> Loader:
        """The same loader for components that only this rank loads."""
        return Loader(
            self.folder, self._classes, replace(self.runtime, mesh=None, group=None), self._report, self._plan
        )

    @property
    def without_offload(self) -> Loader:
        """The same loader for components that stay on the device."""
        runtime = replace(self.runtime, options=replace(self.runtime.options, offload="none"))
        return Loader(self.folder, self._classes, runtime, self._report, self._plan)

    @property
    def device(self) -> torch.device:
        """The device on which its components run. Offloaded weights may be elsewhere."""
        import torch

        return torch.device(self.runtime.device)

    def model(self, component: str, select_part: Callable[[Any], Any] | None = None) -> Any:
        """Return a component with weights, on the device.

        `select_part`: turns its class into that of a part of the model, so that only this part is loaded.
        Raises ConfigError if the files lack weights, or the class does not have all weights of the files.
        """
        start = time.monotonic()
        runtime = self.runtime
        library, name = self._classes[component]
        files, dtype = self.folder.weights(component), runtime.dtypes[component]
        quantized = self.folder.quantization(component)
        offload = offload_of(runtime.options.offload, component)
        check(component, quantized, files, dtype, self.device.type, offload)
        require_gpu(offload, self.device.type)

        load = partial(self._load_checked, component, select_part)
        mesh, plan = runtime.mesh, component_parallel_plan(component, name, self._plan)
        is_sharded = offload != "none" and isinstance(plan, ParallelPlan) and bool(mesh and SHARD in mesh.degrees)
        pins = offload != "none" and not is_sharded
        converts = not (isinstance(self.folder, GgufModel) or quantized or self.folder.stores_dtype(component, dtype))
        # Weights that each rank would pin or convert are loaded once for all ranks. Others are mapped from the files.
        if runtime.group and (pins or converts):
            model = load_together(runtime.group, self.folder, component, library, load, pins)
            mapped = MappedTensors(resident_tensors(model))
        else:
            model = load()
            mapped = MappedTensors(())

        set_attention(model, runtime.options.attention, component, self.device.type)

        # Sharded before it moves, so that a device needs no memory for the whole model.
        if mesh and plan:
            from unfuse.parallel.spreading import parallelize
            from unfuse.weights.pinned import offloading_shards

            with offloading_shards(model, mesh.degrees[SHARD], self.device) if is_sharded else nullcontext() as policy:
                parallelize(model, plan, mesh, policy)
        mapped.copy_out(resident_tensors(model))
        model = self._place(model, offload, is_shared=bool(runtime.group), is_sharded=is_sharded)
        self._report_load(component, start, sum(map(packed_bytes, resident_tensors(model))))
        return model

    def _load_checked(self, component: str, select_part: Callable[[Any], Any] | None, path: Path | None = None) -> Any:
        """Load a component from `path`, or for None from its own folder.

        Raises ConfigError if tensors are missing, unexpected, or stored as integers.
        """
        import torch

        name, dtype = self.class_of(component), getattr(torch, self.runtime.dtypes[component])
        options = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
        model, info = self._load(component, options, select_part, path)
        if missing := sorted(info["missing_keys"]):
            raise ConfigError(
                f"model {self.folder.path}: the weights of component {component} lack {missing[0]} "
                f"({len(missing)} tensors in total): {name} would use random weights"
            )
        if unused := sorted(unplaced(model, info["unexpected_keys"])):
            raise ConfigError(
                f"model {self.folder.path}: the weights of component {component} have {unused[0]} "
                f"({len(unused)} tensors in total), which {name} does not have in its configuration: use the weights "
                "of this configuration, in their original precision"
            )
        if not self.folder.quantization(component) and (tensor := self._integer_tensor(component, model)):
            raise ConfigError(
                f"model {self.folder.path}: {component} has {tensor} as integers, but {name} needs floats: use it in "
                "its original precision"
            )
        return model.eval()

    def _integer_tensor(self, component: str, model: Any) -> str:
        """Return the first floating-point tensor that the files store as integers; or ""."""
        stored = self.folder.tensors(component)
        floats = (key for key, tensor in model.state_dict().items() if tensor.is_floating_point() and key in stored)
        return next((key for key in floats if is_whole_number(stored[key][0])), "")

    def class_of(self, component: str) -> str:
        """Return the name of a component's class in its library."""
        return self._classes[component][1]

    def vae(self) -> Any:
        """Return the VAE, with VAE slicing or tiling as `--vae` requests.

        It is tiled, too, if ranks share the tiles. With slicing or tiling it processes images one by one. It is
        stateless, so all stages of a process share it: those that encode pictures, and those that decode.
        """
        runtime = self.runtime
        # The VAE of previews is loaded without a mesh. The other one may be patched to share its tiles with ranks.
        key = "vae", self.folder.path, runtime.dtypes["vae"], runtime.mesh is None
        if key not in runtime.shared_objects:
            runtime.shared_objects[key] = self._load_vae()
        return runtime.shared_objects[key]

    def _load_vae(self) -> Any:
        vae = self.model("vae")
        mode, mesh = self.runtime.options.vae, self.runtime.mesh
        mode = "tiled" if mesh and "tiles" in mesh.degrees else mode
        if mode != "whole":
            vae.enable_slicing()
        if mode == "tiled":
            vae.enable_tiling()
        if mesh and "tiles" in mesh.degrees:
            from unfuse.parallel import tiles

            tiles.parallelize_tiles(vae, mesh.axis("tiles"))
        return vae

    def noise_scheduler(self) -> Any:
        """Return a split model's noise scheduler. Raises ConfigError if it draws noise between steps."""
        scheduler = self.plain("scheduler")
        if draws_noise(scheduler.config):
            raise ConfigError(
                f"model {self.folder.path}: its noise scheduler draws noise between steps, which is only supported "
                "for undivided pipelines"
            )
        return scheduler

    def plain(self, component: str) -> Any:
        """Return a component without weights, such as a tokenizer or a noise scheduler."""
        start = time.monotonic()
        self.folder.config(component)
        loaded = self._load(component, {}, None, None)
        self._report_load(component, start, self.folder.size(component))
        return loaded

    def _place(self, model: Any, offload: Offload, *, is_shared: bool, is_sharded: bool) -> Any:
        """Return the model on the device, or offloaded until it runs there."""
        if offload == "none":
            return move_to(model, self.device)
        from unfuse.weights.offload import offload_model

        return offload_model(model, self.device, offload, is_shared=is_shared, is_sharded=is_sharded)

    def _load(
        self, component: str, options: dict[str, Any], select_part: Callable[[Any], Any] | None, path: Path | None
    ) -> Any:
        """Return what the component's class loads with these options. Raises ConfigError if it fails."""
        from safetensors import SafetensorError

        library, name = self._classes[component]
        import_module(f"{library.partition('.')[0]}.utils.logging").disable_progress_bar()
        full_class = getattr(import_module(library), name, None)
        if full_class is None:
            raise ConfigError(f"component {component} of {self.folder.path} is a {name}, which {library} does not have")
        loaded_class = select_part(full_class) if select_part else full_class
        path = path or self.folder.path / self.folder.component_path(component)

        try:
            if isinstance(self.folder, GgufModel):
                return self.folder.load(loaded_class, options["dtype"]), {"missing_keys": (), "unexpected_keys": ()}
            if (single := self.folder.single(component)) and path.is_relative_to(self.folder.path):
                return load_single(loaded_class, path / single, options["dtype"])
            return loaded_class.from_pretrained(str(path), local_files_only=True, **options)
        except (*READ_ERRORS, SafetensorError) as error:
            raise ConfigError(self._explain(component, path, full_class, error)) from error

    def _explain(self, component: str, path: Path, kind: Any, error: Exception) -> str:
        """Return why a component cannot be loaded, as a sentence.

        For a component without weights, it names the wrong field of the configuration.
        """
        reason = " ".join(str(error).split()) or type(error).__name__
        sentence = f"component {component} in {path} cannot be loaded as {self.class_of(component)}"
        if isinstance(error, ImportError):
            missing = "" if "pip install" in reason else next((f": pip install {n}" for n in EXTRAS if n in reason), "")
            return f"{sentence}: {reason.rstrip('.')}{missing}"
        if self.folder.weight_names(component) or not hasattr(kind, "config_name"):
            return f"{sentence}: {reason}"
        config = self.folder.config(component)
        if field := unreadable_field(kind, config):
            value = msgspec.json.encode(config[field]).decode()[:80]
            sentence += f": {kind.config_name} says {field} is {value}, correct that field"
        return f"{sentence}: {reason[:200]}"

    def _report_load(self, component: str, start: float, size: int) -> None:
        """Report a component that was loaded since `start`, in `size` bytes."""
        if self._report is not None:
            self._report(component, time.monotonic() - start, size)


def unreadable_field(kind: Any, config: Mapping[str, Any]) -> str:
    """Return the field of a configuration that prevents instantiating its class; or "".

    Without that field, and so with its default value, the class can be instantiated. "" if no single field is at fault.
    """
    known = inspect.signature(kind.__init__).parameters
    arguments = {name: value for name, value in config.items() if name in known}
    for name in arguments:
        try:
            kind(**{other: value for other, value in arguments.items() if other != name})
        except READ_ERRORS:
            continue
        return name
    return ""
