"""Plan the workers to start, from models' JSON files and headers of weights.

No weights are loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from unfuse.core.compute_options import (
    SHARD,
    ComputeOptions,
    parse_parallel,
    refuse,
    smaller_layouts,
    worker_parallelism,
)
from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.model_spec import ModelSpec
from unfuse.core.object_ref import DTYPES
from unfuse.core.offload_options import check_offload, parse_offload
from unfuse.core.plan import ALL_STAGES, ROLE_GROUPS, Pipeline, StageSpec, roles_of
from unfuse.core.task import ARENA, SLOTS
from unfuse.launch.base import WorkerSpec
from unfuse.launch.local import ForkServers, InheritedForks
from unfuse.models import find, read_model_spec, resolve_source
from unfuse.models.encoders import sharded_elements
from unfuse.models.float16 import FLOAT16_CLASSES
from unfuse.models.peaks import component_peak, default_size
from unfuse.planning.component_memory import KV_CACHE, ComponentMemory
from unfuse.planning.kv_memory import kv_option, with_kv_caches
from unfuse.planning.layout import HostResources, LayoutSearch, search_layouts
from unfuse.planning.machine import CONTROL_GROUP, usable_cpus
from unfuse.planning.placement import (
    AUTO,
    Device,
    PlacedWorker,
    WorkerPlan,
    memories,
    parse_place,
    parse_workers,
    place_workers,
    taken_bytes,
    with_index,
)
from unfuse.planning.size_limits import size_limits
from unfuse.service.addresses import keys_folder
from unfuse.service.dtypes import explicit_dtypes, roles_on_gpus
from unfuse.service.groups import SHARED_ARENA, Settings
from unfuse.service.settings import FIELDS, ByteSize
from unfuse.stages.attention import check_attention
from unfuse.stages.specs import DECODE, DENOISE, PREFILL
from unfuse.weights.folder import STORED, ModelFolder, choose_dtypes
from unfuse.weights.gguf_model import open_files
from unfuse.weights.source import with_components


class PlannedComponent(msgspec.Struct, frozen=True):
    """A component of a model, such as a text encoder, with its sizes."""

    #: The component's name in the model's index, such as "text_encoder".
    name: str

    #: The name of its class in diffusers or transformers.
    kind: str

    #: The number of elements of all its tensors.
    parameters: int

    #: Bytes of its weights files on disk.
    files: int

    #: The dtype that it is loaded in.
    dtype: str

    #: Bytes of its weights in memory, in that dtype.
    memory: int

    #: Whether its files already have the dtype. On CPUs, processes then map the files and share the memory.
    mapped: bool = False

    #: The part of `memory` that tensor parallel ranks can divide among each other, in bytes.
    tensor_parallel_bytes: int = 0

    #: Whether its weights can be in host memory while they are not used (`--offload`).
    can_offload: bool = True

    #: Predicted bytes on a GPU beside the weights, while it computes one request of the model's default size.
    activations: int = 0

    #: The same with `--vae tiled`.
    tiled_activations: int = 0


class PlannedModel(msgspec.Struct, frozen=True):
    """A model and its components, as workers will load it."""

    #: The model spec, with pools for these dtypes.
    spec: ModelSpec

    #: The folder, or file, of its weights.
    folder: Path

    #: The value of `--dtype` that names the dtype of each component: "COMPONENT=DTYPE,…".
    dtypes: str

    #: The components by name.
    components: dict[str, PlannedComponent]


class ServingPlan(msgspec.Struct, frozen=True):
    """Which workers serve which stages of which models, on which devices."""

    #: The models to serve, in the order in which workers load them.
    models: tuple[PlannedModel, ...]

    #: By role, the components that a worker of the role loads, with their bytes.
    needs: dict[str, tuple[ComponentMemory, ...]]

    #: The wanted workers, with the counts and devices of the chosen layout.
    worker_plan: WorkerPlan

    #: The devices that workers may be placed on. The first is the host.
    devices: tuple[Device, ...]

    #: The workers to start. Empty if the plan is refused.
    workers: tuple[PlacedWorker, ...]

    #: Why the models do not fit; "" if they do.
    refusal: str = ""

    #: The layouts among which one was chosen; None if the settings name the layout.
    layouts: LayoutSearch | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Return a table row for each component of each worker, with its bytes."""
        return [
            {
                "worker": number,
                "role": worker.role,
                "device": worker.device,
                "component": part.component,
                "dtype": part.dtype,
                "memory": ByteSize(part.bytes),
                "activations": ByteSize(0 if worker.on_cpu else part.activations),
                "models": part.models,
            }
            for number, worker in enumerate(self.workers, 1)
            for part in worker.parts
        ]

    def missing_roles(self) -> list[str]:
        """Return the roles that none of the workers has."""
        role_sets = [roles_of(worker.role) for worker in self.workers]  # None stands for all roles
        return [role for role in self.needs if not any(roles is None or role in roles for roles in role_sets)]

    def repeats(self) -> dict[str, int]:
        """Return the number of copies of components that a worker loads several times."""
        counters = [Counter((part.component, part.models) for part in worker.parts) for worker in self.workers]
        return {component: times for counter in counters for (component, _), times in counter.items() if times > 1}

    def memory(self) -> list[dict[str, Any]]:
        """Return a table row for each used memory, with used and free bytes.

        Processes and arenas of the workers are included, and on GPUs the activations of one request.
        """
        used = taken_bytes(self.workers, self.worker_plan)
        return [
            {"device": memory.name, "takes": ByteSize(memory.free - memory.left(used)), "free": ByteSize(memory.free)}
            for memory in memories(self.devices)
            if memory.left(used) < memory.free
        ]


def worker_plan(settings: Settings) -> WorkerPlan:
    """Return the wanted workers by these settings.

    Raises ConfigError for a malformed plan, and UsageError for settings that exclude each other.
    """
    workers = settings.serve.workers
    parallel = settings.compute.parallel
    max_loaded_models = settings.worker.max_loaded_models
    devices = parse_place(settings.serve.place)
    parse_offload(settings.compute.offload)  # raises UsageError
    is_automatic = workers == AUTO and not (devices or parallel)
    counts = None if workers == AUTO else parse_workers(workers)
    has_all_stages = is_automatic or (counts is not None and not counts.keys() - {ALL_STAGES})
    if max_loaded_models == "1" and (parallel or not has_all_stages):
        raise UsageError("--max-loaded-models 1 needs workers of all stages: write --workers all=1 without --parallel")

    arena = settings.arena.bytes or SHARED_ARENA
    return WorkerPlan(
        counts,
        devices,
        settings.compute,
        arena,
        auto=is_automatic,
        max_loaded_models=max_loaded_models,
        kv=settings.kv.bytes,
    )


def plan_models(
    names: Iterable[str],
    revision: str,
    wanted: WorkerPlan,
    devices: tuple[Device, ...],
    host: HostResources | None = None,
    *,
    has_results: bool = True,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> ServingPlan:
    """Read the models' metadata, choose a layout if none is set, and place the workers.

    `names`: the models' names; or a mapping from names to sources: a folder, a file or a hub name.
    `revision`: the branch, tag or commit of models from the hub, or "".
    `wanted`: the wanted workers.
    `devices`: the devices to place them on. The first is the host.
    `host`: the host's resources, from which a layout is chosen.
    `has_results`: whether the result store can be reached here. If not, only roles that do not need it are planned, and
    a worker of all stages gets these roles.
    `sources`: sources of single components by name.

    No weights are loaded. Raises ConfigError for models that cannot be served. If the models do not fit, the plan has
    a refusal.
    """
    models = read_models(names, revision, wanted, devices, sources)
    if not has_results:
        models = _without_results(models)
    needs = components_by_role(models)
    stages = [stage for model in models for stage in model.spec.pipeline.stages]
    wanted = replace(
        wanted,
        first=frozenset(stage.role for stage in stages if stage.work.forwards),
        shardable_roles=frozenset(stage.role for stage in stages if SHARD in stage.parallelism),
        tensor_roles={
            next((name for name, members in ROLE_GROUPS.items() if stage.role in members), stage.role): heads
            for stage in stages
            if stage.kind in (PREFILL.kind, DECODE.kind) and (heads := stage.parallelism.get("tensor", 0))
        },
    )
    wanted.worker_counts(needs)  # raises for unknown roles
    _check_options(wanted.compute, stages)
    layouts = None
    if wanted.auto:
        layouts = search_layouts([model.spec for model in models], needs, wanted, devices, host or HostResources())
        layouts = replace(layouts, is_partial=not has_results)
        wanted = layouts.chosen.apply_to(wanted)

    try:
        workers = with_kv_caches(place_workers(needs, wanted, devices), wanted, devices)
        if not has_results:
            workers = tuple(
                replace(worker, role="+".join(needs) if worker.role == ALL_STAGES else worker.role)
                for worker in workers
            )
        specs = (replace(model.spec, limits=size_limits(model.spec, workers, wanted, devices)) for model in models)
        models = tuple(replace(model, spec=spec) for model, spec in zip(models, specs, strict=True))
        return ServingPlan(models, needs, wanted, devices, workers, layouts=layouts)
    except ConfigError as error:
        return ServingPlan(models, needs, wanted, devices, (), str(error), layouts)


def _check_options(compute: ComputeOptions, stages: Sequence[StageSpec]) -> None:
    """Raise ConfigError for parallelism or attention that these stages cannot have."""
    spreads = parse_parallel(compute.parallel)
    refuse(spreads, stages, compute.offload)
    check_attention(compute.attention, stages, spreads)


def roles_apart(specs: Iterable[ModelSpec]) -> tuple[str, ...]:
    """Return the roles without a stage that needs the result store.

    They can run on machines that cannot reach it.
    """
    stages = [stage for spec in specs for stage in spec.pipeline.stages]
    roles_with_results = {stage.role for stage in stages if stage.needs_results}
    return tuple(dict.fromkeys(stage.role for stage in stages if stage.role not in roles_with_results))


def _without_results(models: Iterable[PlannedModel]) -> tuple[PlannedModel, ...]:
    """Return the models with only stages of roles that need no result store.

    A model without these roles is left out. Raises ConfigError if no model remains.
    """
    models = tuple(models)
    roles = roles_apart(model.spec for model in models)
    reduced = []
    for model in models:
        stages = tuple(stage for stage in model.spec.pipeline.stages if stage.role in roles)
        reduced.append(replace(model, spec=replace(model.spec, pipeline=Pipeline(stages))))

    remaining = tuple(model for model in reduced if model.spec.pipeline.stages)
    if not remaining:
        raise ConfigError(
            "every stage of these models needs the result folder of the scheduler's machine, which this machine "
            "cannot access: mount it at the same path, or start the server with --results s3://BUCKET/PREFIX"
        )
    return remaining


def read_models(
    names: Iterable[str],
    revision: str,
    wanted: WorkerPlan,
    devices: Sequence[Device],
    sources: Mapping[str, str] = MappingProxyType({}),
) -> tuple[PlannedModel, ...]:
    """Read the models' metadata, with the dtypes that the wanted workers would load.

    The parameters are those of `plan_models`.
    Raises ConfigError, also for a `--dtype` or `--offload` with a component that no model has.
    """
    dtype_spec = wanted.compute.dtype
    source_by_name = names if isinstance(names, Mapping) else {name: name for name in names}
    folders = {
        name: resolve_source(with_components(source, sources), revision or None, ())
        for name, source in source_by_name.items()
    }
    specs = {name: read_model_spec(name, folder) for name, folder in folders.items()}
    # Raises for an unknown component. It is checked against all models, since each may have only some components.
    components = sorted({component for model_spec in specs.values() for component in model_spec.dtypes})
    choose_dtypes(dtype_spec, components)
    check_offload(wanted.compute.offload, components)

    roles = dict.fromkeys(stage.role for model_spec in specs.values() for stage in model_spec.pipeline.stages)
    gpu_roles = roles_on_gpus(roles, wanted, devices)
    models = []
    for name, folder in folders.items():
        files = open_files(folder)
        dtypes = explicit_dtypes(specs[name], dtype_spec, gpu_roles, files)
        model_dtypes = ",".join(f"{component}={dtype}" for component, dtype in dtypes.items())
        planned = {
            component: with_activations(
                _component(files, component, dtype), specs[name], files, tiled=wanted.compute.vae == "tiled"
            )
            for component, dtype in dtypes.items()
        }
        # The spec is read again, since the dtypes are part of the names of pools.
        models.append(PlannedModel(read_model_spec(name, folder, model_dtypes), folder, model_dtypes, planned))
    return tuple(models)


def _component(files: ModelFolder, name: str, dtype: str) -> PlannedComponent:
    """Return a component with its sizes, read from the headers of its weights."""
    tensors = files.tensors(name)
    kind = files.class_of(name)
    dtype_bytes = DTYPES[dtype]
    elements = {tensor: count for tensor, (_, count) in tensors.items()}
    sharded = sharded_elements(name, kind, find(files.path).parallel_plans, elements)
    parameters = sum(elements.values())
    mapped = files.stores_dtype(name, dtype)

    memory = parameters * dtype_bytes
    # Quantized weights stay in memory as they are in the files. Only floats are loaded in a wider dtype.
    if files.is_quantized(name):
        file_dtype_bytes = {STORED[stored]: DTYPES[stored] for stored in STORED}
        memory = files.size(name) + sum(
            count * max(dtype_bytes - file_dtype_bytes.get(stored, dtype_bytes), 0)
            for stored, count in tensors.values()
        )
    family = find(files.path)
    can_offload = not files.quantization(name) and name not in family.not_offloaded(files)
    sizes = parameters, files.size(name), dtype, memory
    return PlannedComponent(name, kind, *sizes, mapped, sharded * dtype_bytes, can_offload)


def with_activations(
    component: PlannedComponent, model_spec: ModelSpec, files: ModelFolder, *, tiled: bool
) -> PlannedComponent:
    """Return the component with the predicted bytes of its activations.

    `tiled`: whether the VAE processes pictures in tiles.
    """
    if not component.parameters:
        return component
    size = replace(default_size(model_spec, files), width=DTYPES[component.dtype])
    config = files.config(component.name)
    whole, in_tiles = (
        component_peak(component.name, component.kind, config, replace(size, tiled=is_tiled))
        for is_tiled in (False, True)
    )
    return replace(component, activations=in_tiles if tiled else whole, tiled_activations=in_tiles)


def components_by_role(models: Iterable[PlannedModel]) -> dict[str, tuple[ComponentMemory, ...]]:
    """Return the components that a worker of each role loads, with their bytes.

    A component of a pool that several models share is listed once.
    """
    pools: dict[str, dict[str, tuple[StageSpec, PlannedModel]]] = {}
    for model in models:
        for stage in model.spec.pipeline.stages:
            pools.setdefault(model.spec.pools()[stage.name], {})[model.spec.name] = (stage, model)

    needs: dict[str, tuple[ComponentMemory, ...]] = {}
    for users in pools.values():
        stage, model = next(iter(users.values()))
        is_transformers_model = open_files(model.folder).is_transformers_model
        components = (model.components[name] for name in stage.components)
        vae, previewing = model.components.get("vae"), (DENOISE.kind, stage.components[0])
        parts = tuple(
            ComponentMemory(
                component.name,
                component.dtype,
                component.memory,
                tuple(users),
                component.mapped,
                component.tensor_parallel_bytes,
                shared_by_stages=is_transformers_model or component is vae,
                can_offload=component.can_offload,
                activations=component.activations,
                tiled_activations=component.tiled_activations,
                is_float16_safe=component.kind in FLOAT16_CLASSES,
                preview_bytes=vae.memory if vae and (stage.kind, component.name) == previewing else 0,
            )
            for component in components
            if component.memory
        )
        needs[stage.role] = (*needs.get(stage.role, ()), *parts, *_kv_cache(stage, model, tuple(users)))
    return needs


def _kv_cache(stage: StageSpec, model: PlannedModel, users: tuple[str, ...]) -> Iterator[ComponentMemory]:
    """Yield the least KV cache of a stage: room for the longest text."""
    for name in PREFILL.outputs:
        if name in (*stage.inputs, *stage.outputs):
            producer = model.spec.pipeline.producers()[name]
            size = producer.output_size.bytes({"prompt_tokens": int(model.spec.limits["max_tokens"])})
            dtype = model.components[stage.components[0]].dtype
            yield ComponentMemory(KV_CACHE, dtype, size, users, tensor_parallel_bytes=size, shared_by_stages=True)


#: The file in the data folder with measured stage costs.
COSTS = "costs.json"


def resources(settings: Settings) -> dict[str, int]:
    """Return the amount of each named resource of a worker. Raises UsageError."""
    amounts = parse_counts("--resources", settings.worker.resources, "NAME=N, like kv_blocks=4096")
    if reserved := sorted(amounts.keys() & {SLOTS, ARENA}):
        raise UsageError(
            f"--resources {reserved[0]}: every worker has this resource already, set its amount by --{reserved[0]}"
        )
    return amounts


def device_memory(settings: Settings) -> dict[str, int]:
    """Return the most bytes to plan for, by device. Raises UsageError for a malformed entry."""
    limits = {}
    for entry in settings.serve.device_memory:
        name, _, size = entry.partition("=")
        try:
            limits[with_index(name)] = ByteSize.parse(size)
        except ValueError as error:
            raise UsageError(f"--device-memory {entry}: write DEVICE=SIZE, like cuda:0=20GiB: {error}") from error
    return limits


def host_resources(settings: Settings) -> HostResources:
    """Return the host's CPU cores, memory limit per process, and file of stage costs."""
    return HostResources(
        max(1, int(usable_cpus(CONTROL_GROUP))), settings.worker.memory_limit, Path(settings.data_dir, COSTS)
    )


def parse_counts(flag: str, entries: tuple[str, ...], example: str) -> dict[str, int]:
    """Return the numbers of a flag's NAME=N entries by name.

    Raises UsageError, which names the flag and the example, for an entry that is malformed or 0.
    """
    counts = {}
    for entry in entries:
        name, _, count = entry.partition("=")
        if not name or not count.isdecimal() or not int(count):
            raise UsageError(f"{flag} {entry}: write {example}")
        counts[name] = int(count)
    return counts


def slots_by_role(settings: Settings) -> dict[str, int]:
    """Return the slots of each worker by role, as `--slots` sets them. Raises UsageError."""
    return parse_counts("--slots", settings.serve.slots, "ROLE=N, like denoiser=2")


def environment_of(settings: Settings) -> dict[str, str]:
    """Return the environment variables of every worker, whatever launcher starts it."""
    # Workers inherit the variables of this process. `workers` and `health` are emptied, since a worker that a launcher
    # starts must use neither.
    return {
        FIELDS[name].variable: FIELDS[name].written(value)
        for name, value in (
            ("run_dir", settings.run_dir),
            ("data_dir", settings.data_dir),
            ("insecure_listen", settings.insecure_listen),
            ("store.orphan_s", settings.store.orphan_s),
            ("worker.workers", ""),
            ("worker.health", ""),
            ("worker.resources", settings.worker.resources),
            ("buffer.tokens", settings.buffer.tokens),
            *((f"transfer.{key}", value) for key, value in asdict(settings.transfer).items()),
            # flags of this kind have no value
            *((f"compute.{key}", value) for key, value in asdict(settings.compute).items() if isinstance(value, bool)),
        )
    }


def forked(
    plan: ServingPlan, running: ForkServers | InheritedForks | None = None
) -> ForkServers | InheritedForks | None:
    """Return the fork server for a plan's workers on CPUs, or None without such workers.

    `running`: a fork server that runs already. An inherited one is copied. Any other one is used, or closed if the plan
    has no workers on CPUs.
    """
    on_cpu = any(worker.on_cpu for worker in plan.workers)
    if isinstance(running, InheritedForks):
        return running.copy() if on_cpu else None
    if not on_cpu:
        if running:
            running.close()
        return None
    return running or ForkServers([str(model.folder) for model in plan.models])


def worker_specs(
    plan: ServingPlan,
    settings: Settings,
    extra_flags: Mapping[str, object],
    extra_environment: Mapping[str, str],
    models: tuple[str, ...] = (),
    *,
    elsewhere: bool = False,
) -> list[WorkerSpec]:
    """Return the worker processes to start for a plan: their flags and environment.

    `extra_flags`: flags in addition to those that follow from the settings.
    `extra_environment`: environment variables in addition to those that follow from the settings.
    `models`: the models to load; if empty, each worker loads those that the scheduler offers when it starts.
    `elsewhere`: whether the workers run on other machines. They then use the data and run folders of these machines.

    The CPU cores are divided among the workers. Each gets its dtypes from the scheduler, since these differ by model.
    """
    wanted, workers = plan.worker_plan, plan.workers
    ranks = sum(len(worker.devices) for worker in workers)
    slots = slots_by_role(settings)
    threads = wanted.compute.threads or max(1, host_resources(settings).cores // max(1, ranks))
    valued_options = {name: value for name, value in asdict(wanted.compute).items() if not isinstance(value, bool)}
    common_options = valued_options | {
        "threads": threads,
        "dtype": "auto",
        "arena": wanted.arena,
        **extra_flags,
        "keys": keys_folder(settings, "worker"),
        "memory-limit": settings.worker.memory_limit,
        "stall-s": settings.lease.stall_s,
        "kv": settings.kv.bytes,
        "drain-timeout": settings.serve.drain_timeout,
        "max_loaded_models": wanted.max_loaded_models,
        **({"listen": settings.worker.listen} if settings.worker.listen else {}),
    }
    del common_options["device"]  # each spec has its own

    environment = {**environment_of(settings), **extra_environment}
    for folder in ("run_dir", "data_dir") if elsewhere else ():
        del environment[FIELDS[folder].variable]

    specs = []
    for worker in workers:
        roles = roles_of(worker.role)
        role_slots = [count for role, count in slots.items() if roles is None or role in roles]
        options = common_options | {"slots": min(role_slots, default=settings.worker.slots)}
        options["kv"] = settings.kv.bytes or kv_option(worker, wanted)
        if worker.on_cpu:
            options["offload"] = "none"  # a worker on CPUs has its weights in host memory anyway
        flags = {name.replace("_", "-"): str(value) for name, value in options.items()}
        smaller_specs = tuple(
            WorkerSpec(worker.role, device, flags | {"parallel": parallel}, environment, models=models)
            for device, parallel in smaller_layouts(worker.device, worker_parallelism(wanted.compute.parallel, roles))
        )
        specs.append(WorkerSpec(worker.role, worker.device, flags, environment, smaller_specs, models))
    return specs
