"""Derive the options of a service, and its plan, from settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from unfuse.core.checking import check_request
from unfuse.core.errors import ConfigError, InvalidParameter, NotFound, UnsupportedRequest, UsageError
from unfuse.core.messages import StorageLocations
from unfuse.core.modalities import IMAGE, UPLOADS, VIDEO
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Params, StageSelector, StageSpec, roles_of
from unfuse.edge.access import AccessPolicy
from unfuse.edge.keys import ApiKeys
from unfuse.launch import resolve_launcher
from unfuse.launch.base import OpenLauncher
from unfuse.planning.machine import usable_devices
from unfuse.planning.placement import NONE, WorkerPlan
from unfuse.server.chat_formats import OutputParsers
from unfuse.server.links import parse_public_url
from unfuse.server.request_objects import Prices
from unfuse.service.addresses import listen_addresses, require_engines, trusted_keys
from unfuse.service.groups import ServeSettings, Settings
from unfuse.service.plan import (
    COSTS,
    ServingPlan,
    device_memory,
    host_resources,
    parse_counts,
    plan_models,
    resources,
    slots_by_role,
    worker_plan,
)
from unfuse.service.private_files import warn_of_wide_permissions
from unfuse.service.settings import LoadedSettings
from unfuse.stages import specs
from unfuse.weights.adapters import AdapterFolder, require_peft
from unfuse.weights.fingerprints import FINGERPRINTS
from unfuse.weights.gguf_model import open_files
from unfuse.weights.quantized import library
from unfuse.weights.source import parse_component_sources
from unfuse.wire.address import Trust
from unfuse.worker.checkpoints import CheckpointPolicy
from unfuse.worker.registration import pools_of

log = structlog.get_logger(__name__)


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a service, and the values derived from them before it starts."""

    #: All settings. A field below takes precedence over the setting that it is derived from.
    settings: Settings

    #: The API keys that clients may send.
    keys: ApiKeys

    #: The hosts, origins and proxies that requests may come from.
    access: AccessPolicy

    #: The price of an hour by device kind.
    prices: Prices

    #: The URL of the queue backend.
    queue: str

    #: Where workers store stage outputs, copies and results.
    storage: StorageLocations

    #: Control addresses for workers. If none is a unix socket, the service adds one in the run folder.
    listen: tuple[str, ...]

    #: The keys that the scheduler trusts over TCP; None without keys.
    trust: Trust

    #: The wanted workers: counts by role, devices, compute options.
    workers: WorkerPlan

    #: The most bytes to plan for, by device. Other devices are planned with their free memory.
    device_memory: Mapping[str, int]

    #: For each role whose pools may scale to zero: the slots that all of its workers would have in total.
    scale_to_zero: Mapping[str, int]

    #: Amounts of named resources of each worker.
    resources: Mapping[str, int]

    #: The file in which stage costs are recorded; None records none.
    costs: Path | None

    #: Default parameters, which take precedence over the models' own defaults.
    default_params: Params

    #: Starts workers on other machines; None starts them here.
    launcher: OpenLauncher | None

    #: The base URL of links in responses; "" uses the address that the client used.
    public_url: str

    #: The parsers of tool calls and reasoning in chat answers.
    parsers: OutputParsers

    @property
    def serve(self) -> ServeSettings:
        """The settings of the server."""
        return self.settings.serve


def plan_service(options: ServeOptions, models: Mapping[str, str] | None = None) -> ServingPlan:
    """Return the plan for these options: which worker serves which stages on which device.

    `models`: the source of each model by name, in place of the models of the options.

    No weights are loaded. Raises ConfigError for models that cannot be served, or do not fit.
    """
    devices = usable_devices(
        options.device_memory,
        elsewhere=options.launcher is not None,
        warn=lambda problem: log.warning("GPUs cannot be used", reason=problem),
    )
    for kind in options.prices.unused_kinds([device.name for device in devices]):
        log.warning(
            "a price is set for devices that are not on this machine", kind=kind, counts="workers on other machines"
        )

    serve = options.serve
    component_sources = parse_component_sources(serve.component_source)
    names = serve.models if models is None else models
    if component_sources and len(names) > 1:
        raise UsageError("--component-source needs a single model: serve the others by another server")
    plan = plan_models(
        names, serve.revision, options.workers, devices, host_resources(options.settings), sources=component_sources
    )
    if plan.refusal:
        raise ConfigError(plan.refusal)
    model_specs = [model.spec for model in plan.models]
    check_stage_kinds(serve, model_specs)
    # Raises ConfigError if a stage needs a resource that these workers do not have.
    for worker in plan.workers:
        pools_of(model_specs, StageSelector(roles_of(worker.role)), options.resources)
    if options.launcher is None:
        require_libraries(plan, options.storage.adapters)
    return plan


def serve_options(loaded: LoadedSettings) -> ServeOptions:
    """Return the options of a service for these settings.

    As a side effect, keys for TCP addresses are created if there are none, and fingerprints of weights are cached in
    the data folder. Raises ConfigError.
    """
    settings, serve = loaded.settings, loaded.settings.serve
    FINGERPRINTS.cache_in(Path(settings.data_dir))
    slots_by_role(settings)  # raises for malformed entries before anything starts
    options = ServeOptions(
        settings=settings,
        keys=ApiKeys((*serve.api_key, *filter(None, [settings.api_key])), serve.api_keys),
        public_url=parse_public_url(serve.public_url),
        access=AccessPolicy(serve.allowed_hosts, serve.allowed_origins, serve.trusted_proxies),
        prices=Prices(serve.price),
        queue=serve.queue.replace("DATA_DIR", settings.data_dir),
        storage=storage_locations(settings),
        listen=listen_addresses(settings),
        launcher=resolve_launcher(serve.launcher),
        trust=trusted_keys(settings, "scheduler"),
        workers=worker_plan(settings),
        device_memory=device_memory(settings),
        scale_to_zero=parse_counts("--scale-to-zero", serve.scale_to_zero, "ROLE=N, like denoiser=2"),
        resources=resources(settings),
        costs=Path(settings.data_dir, COSTS),
        default_params=default_params(settings),
        parsers=OutputParsers(serve.tool_call_parser, serve.reasoning_parser),
    )
    # Workers without keys open no transfer engine, and workers on other machines have libraries of their own.
    if options.trust is not None and serve.workers != NONE and options.launcher is None:
        require_engines(settings.transfer.engine)
    return options


def log_warnings(options: ServeOptions) -> None:
    """Log what is unsafe: API keys in plain text, and data that others can read."""
    if options.keys.warning:
        log.warning(options.keys.warning)
    storage = options.storage
    stores = (storage.store.removeprefix("spill:").partition("+")[2] or storage.store, storage.results, storage.durable)
    warn_of_wide_permissions(options.settings.data_dir, options.queue, *stores)


def default_params(settings: Settings) -> Params:
    """Return the default parameters of requests.

    Raises UsageError if `--feature-cache` cannot be combined with the pools' batching or parallelism.
    """
    threshold = settings.serve.feature_cache
    if threshold and settings.compute.parallel:
        raise UsageError(
            f"--feature-cache {threshold:g} cannot be used with --parallel {settings.compute.parallel}: leave one out"
        )
    if settings.compute.batching == "batched":
        return {"feature_cache": threshold}
    if threshold:
        raise UsageError(f"--feature-cache {threshold:g} is not exact, because it skips work: add --batching batched")
    return {}


def storage_locations(settings: Settings) -> StorageLocations:
    """Return where workers store stage outputs, copies and results. Raises ConfigError.

    DATA_DIR in a URL stands for the data folder.
    """
    serve = settings.serve
    CheckpointPolicy.parse(serve.checkpoint)  # raises for a malformed policy before any worker starts
    if serve.store == "memory":
        raise UsageError("--store memory works only within one process, but workers are several: use shared_memory")
    results, store, durable = (
        url.replace("DATA_DIR", settings.data_dir) for url in (serve.results, serve.store, serve.durable)
    )
    encodings = dict(entry.partition("=")[::2] for entry in serve.encode)
    if unknown := set(encodings.values()) - {"bf16", "fp16", "int4"}:
        raise UsageError(
            f"--encode {min(unknown) or serve.encode[0]}: write KIND=bf16, KIND=fp16 or KIND=int4, like denoise=bf16"
        )
    if serve.loras and not Path(serve.loras).is_dir():
        raise UsageError(f"--loras {serve.loras}: there is no such folder")

    loras = str(Path(serve.loras).resolve()) if serve.loras else ""
    return StorageLocations(
        results,
        store,
        settings.spill.threshold,
        settings.spill.capacity,
        durable,
        serve.durable_stages,
        encodings,
        serve.checkpoint,
        loras,
    )


def require_libraries(plan: ServingPlan, loras: str) -> None:
    """Raise ConfigError, with what to install, if the workers of a plan lack a library.

    `loras`: the folder of LoRA adapters, or "". Only roles that are placed first load them, such as denoisers.
    """
    if not plan.workers:
        return
    loads_adapters = any(plan.worker_plan.goes_first(worker.role) for worker in plan.workers)
    if loras and loads_adapters and any(model.spec.takes_lora for model in plan.models):
        require_peft()
    for model in plan.models:
        files = open_files(model.folder)
        library(files.quantization(component) for component in model.components)


def check_first_model(plan: ServingPlan, arguments: Mapping[str, Any], loras: str) -> None:
    """Raise InvalidParameter if a gateway would refuse this request for a plan's first model.

    `arguments`: the arguments of `Client.submit`.
    `loras`: the folder of LoRA adapters, or "".

    A modality that the model does not generate is not checked here: the gateway refuses it.
    """
    spec = plan.models[0].spec
    modality = VIDEO if arguments.get("video") else IMAGE
    if not modality.is_supported_by(spec.limits):
        return

    fields = {name: value for name, value in arguments.items() if name not in (*UPLOADS, "video")}
    params, _ = check_request(spec, fields, modality, uploads=[name for name in UPLOADS if name in arguments])
    if "lora" not in params:
        return
    if not spec.takes_lora:
        raise InvalidParameter(f"model {spec.name} does not support LoRA adapters: leave lora out", "lora")
    if not loras:
        raise InvalidParameter(
            "--lora names a file in the folder of LoRA adapters: set that folder by --loras FOLDER", "lora"
        )
    try:
        AdapterFolder(loras).check(str(params["lora"]))
    except (NotFound, UnsupportedRequest) as error:
        raise InvalidParameter(str(error), "lora") from error


#: The stage kinds of the built-in model families. Model families of other packages may have further ones.
BUILT_IN = frozenset(spec.kind for spec in vars(specs).values() if isinstance(spec, StageSpec))


def check_stage_kinds(serve: ServeSettings, model_specs: Sequence[ModelSpec]) -> None:
    """Raise UsageError if --encode or --durable-stages names an unknown stage kind."""
    kinds = BUILT_IN | {stage.kind for spec in model_specs for stage in spec.pipeline.stages}
    entries = [("--encode", entry, entry.partition("=")[0]) for entry in serve.encode]
    entries += [("--durable-stages", kind, kind) for kind in serve.durable_stages]
    for flag, entry, kind in entries:
        if kind not in kinds:
            raise UsageError(f"{flag} {entry}: there is no stage kind {kind!r}; kinds are {', '.join(sorted(kinds))}")
