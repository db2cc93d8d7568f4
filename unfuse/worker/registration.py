"""Decides what a worker serves: its options, model specs, stages and pools."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import msgspec
import structlog

from unfuse.core.compute_options import (
    AUTO,
    DEFAULT_MAX_BATCH,
    ComputeOptions,
    MaxLoadedModels,
    choose_parallel,
    parse_parallel,
    rank_devices,
    refuse,
    split_devices,
    worker_parallelism,
)
from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.messages import Registered, StorageLocations
from unfuse.core.model_spec import ModelSpec, is_path, name_of
from unfuse.core.offload_options import check_offload
from unfuse.core.plan import StageSelector, StageSpec, pool_with_numerics, readable_pool, roles_of, slots_of
from unfuse.models import fetch
from unfuse.stages.attention import check_attention
from unfuse.stores import BACKENDS, BLOB_STORES
from unfuse.stores.results import is_same_store
from unfuse.stores.tensor_store import TensorStore
from unfuse.transfer.base import TransferOptions
from unfuse.weights.hub import DownloadProgress
from unfuse.weights.source import is_local, resolve_source, split_name, with_components
from unfuse.wire.address import Trust
from unfuse.worker.compute_messages import LoadModels
from unfuse.worker.loaded_models import Models, Sets, States, states_of

log = structlog.get_logger(__name__)


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a worker."""

    #: One role, several as `a+b`, or all. Of `a,b` one is loaded at a time.
    role: str

    #: Addresses of the schedulers. The worker uses one at a time.
    schedulers: tuple[str, ...]

    #: Name of the worker's machine.
    node: str

    #: The keys for schedulers over TCP; "insecure" trusts every peer. None if no address needs keys.
    trusted_keys: Trust

    #: The models to serve. Empty means those that the scheduler names.
    models: tuple[str, ...]

    #: If not empty, only stages whose first component is one of these are run.
    components: tuple[str, ...]

    #: How the compute processes compute: device, threads, batching, the parallel plan, and more.
    compute: ComputeOptions

    #: Number of tasks at a time. 0 means the default of the role.
    slots: int

    #: Bytes of the arena.
    arena: int

    #: Bytes of the KV cache. 0 means what the device has room for.
    kv: int

    #: Inputs of more tokens than this are received in chunks.
    buffer: int

    #: Amounts of further named resources.
    resources: Mapping[str, int]

    #: Seconds without progress after which compute processes are killed.
    stall_s: float

    #: Bytes of memory above which a compute process is killed. 0 means any.
    memory_limit: int

    #: Seconds that running tasks get to finish when the worker is drained.
    drain_timeout: float

    #: How objects move between nodes.
    transfer: TransferOptions

    #: Folder with the sockets of this node's workers.
    run_dir: str

    #: Folder for data that outlives the process.
    data_dir: str

    #: Seconds without an answer of a scheduler after which objects are freed.
    orphan_s: float

    #: URLs of stores in the worker's own settings. Of a scheduler over TCP, other URLs must name stores of unfuse.
    own_stores: frozenset[str]

    #: HOST:PORT of the health endpoint for probes. Empty means none.
    health: str

    #: With "1", one model is loaded at a time, and models are swapped.
    max_loaded_models: MaxLoadedModels

    #: Number of GPUs of this machine, counted only for `--parallel auto`.
    gpus: int

    #: Sources of single components, by name. Only if one model is served.
    component_sources: Mapping[str, str]


class ServedStages(msgspec.Struct, frozen=True):
    """The models, pools, slots and ranks of a worker."""

    #: The fetched models as (name, folder, dtype).
    models: Models

    #: The models' specs.
    specs: tuple[ModelSpec, ...]

    #: The declared pools of the chosen stages.
    pools: tuple[str, ...]

    #: Number of tasks at a time.
    slots: int

    #: The device of each rank.
    devices: tuple[str, ...]

    #: Declared pools whose outputs are read by other stages of this worker.
    local_inputs: frozenset[str] = frozenset()

    #: States of the models' files before the specs were made.
    states: States = {}

    #: The parallel plan, as `--parallel` has it.
    parallel: str = ""


def decide_served(registered: Registered, options: WorkerOptions, choice: StageSelector) -> ServedStages:
    """Decide which stages a worker serves, and fetch their models.

    `registered` is the scheduler's answer, with its models and required settings. Raises ConfigError if settings
    contradict each other, if there is nothing to serve, if a stage needs a result store that this machine lacks, or if
    a scheduler of another machine names a store that is not a part of unfuse.
    """
    compute = options.compute
    if options.trusted_keys is not None:
        require_listed_stores(registered.storage, options.own_stores)
    if registered.required_numerics not in ({}, compute.numerics):
        others = dict.fromkeys(compute.numerics.keys() - registered.required_numerics.keys(), "")
        defaults = {name: getattr(ComputeOptions(), name.replace("-", "_")) for name in others}
        flags = " ".join(f"--{name} {value}" for name, value in (registered.required_numerics | defaults).items())
        raise ConfigError(f"the workers of one scheduler must have equal settings: start this one with {flags}")
    if registered.exact_only and not compute.exact_only:
        raise ConfigError(
            "the server runs with --exact-only, which its workers need too: start this worker with --exact-only"
        )

    offered, worker_dtype = {model[0]: model for model in registered.models}, compute.dtype
    requested = [offered.get(name, (name, name, worker_dtype)) for name in options.models]
    chosen = tuple(
        (name, _source_here(name, source), dtype if worker_dtype == "auto" else worker_dtype)
        for name, source, dtype in requested
    )
    if not (chosen or registered.models):
        raise ConfigError("the scheduler serves no model yet: name one with --model")
    sources = chosen or registered.models
    if components := options.component_sources:
        if len(sources) > 1:
            raise UsageError("--component-source is for one model: select it with --model")
        name, source, dtype = sources[0]
        sources = ((name, with_components(split_name(source)[0], components), dtype),)

    # The states are read before the specs are made, so that a file that changes in between is noticed.
    folders = [resolve_source(source or name) for name, source, _ in sources if is_local(source or name)]
    states = dict(chain.from_iterable(states_of(folder).items() for folder in folders))
    fetched = [
        (*fetch(name, choice, source, dtype=dtype, on_progress=_log_download), dtype) for name, source, dtype in sources
    ]
    specs = tuple(spec for spec, _, _ in fetched)
    models = tuple((spec.name, str(folder), dtype) for spec, folder, dtype in fetched)

    stages = [stage for spec in specs for stage in spec.pipeline.stages if choice.selects(stage)]
    device, parallel = choose_ranks(compute.device, compute.parallel, options.gpus, stages)
    spreads = worker_parallelism(parallel, choice.roles)
    check_offload(compute.offload, sorted({component for spec in specs for component in spec.dtypes}))
    refuse(spreads, [stage for spec in specs for stage in spec.pipeline.stages], compute.offload)
    check_attention(compute.attention, stages, spreads)
    require_result_store(stages, registered.storage)
    # One slot more than a batch: the next task arrives and loads its inputs while the batch is full.
    batch = (
        (compute.max_batch or DEFAULT_MAX_BATCH)
        if compute.batching == "batched" or any(stage.batch_invariant for stage in stages)
        else 1
    )
    slots = max(options.slots or slots_of(stages), batch + 1)
    devices = rank_devices(device, spreads)
    pools = pools_of(specs, choice, options.resources)
    return ServedStages(models, specs, pools, slots, devices, _read_here(specs, choice), states, parallel)


def names_of(served: ServedStages, numerics: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the readable names of a worker's models and pools, for its log line."""
    pools = [readable_pool(pool_with_numerics(pool, numerics)) for pool in served.pools]
    return {"models": [spec.name for spec in served.specs], "pools": pools}


def choose_ranks(device: str, parallel: str, gpus: int, stages: Sequence[StageSpec]) -> tuple[str, str]:
    """Return the devices of a worker and its parallel plan.

    With `auto`, as many as possible of the named devices are used, or of the machine's `gpus` if none is named.
    """
    if parallel != AUTO:
        return device, parallel
    named_devices = split_devices(device)
    available = gpus if device == "auto" else len(named_devices)
    chosen = choose_parallel(available, stages)
    ranks = max((spread.size for spread in parse_parallel(chosen).values()), default=1)
    log.info("chose ranks by the number of devices", devices=available, ranks=ranks, parallel=chosen or "none")
    if ranks < available:
        log.warning(
            "some devices are not used: give the worker fewer devices, or set --parallel ROLE=KIND:N",
            devices=available,
            used=ranks,
            stages=[stage.name for stage in stages],
        )
    return device if device == "auto" else "+".join(named_devices[:ranks]), chosen


def _source_here(name: str, offered: str) -> str:
    """Return the source of a model that `--model` names.

    This is usually the scheduler's source (`offered`). It is the name instead if only a model of that name is on this
    machine, and no component has another source. A name that an admin gave a model is not used, because on this machine
    it may name another model.
    """
    names_the_source = is_path(name) or name_of(offered).partition("@")[0] == name
    uses_name = names_the_source and is_local(name) and not is_local(offered) and not split_name(offered)[1]
    return name if uses_name else offered


def require_listed_stores(locations: StorageLocations, own_urls: Collection[str]) -> None:
    """Raise ConfigError if a scheduler names a store that would be imported as `module:attr`.

    The import would run code that the scheduler chose. `own_urls`: the URLs in the worker's own settings, which are
    allowed.
    """
    listed = {*BACKENDS, *BLOB_STORES, "auto", "none"}
    for url in (locations.store, locations.results, locations.durable):
        parts = url.removeprefix("spill:").partition("+")[::2] if url.startswith("spill:") else (url,)
        if url not in own_urls and not {part.partition(":")[0] for part in parts} <= listed - {"spill"}:
            raise ConfigError(
                f"the scheduler names the store {url}, which is not a part of unfuse, and a worker imports code only "
                "by its own settings: set UNFUSE_SERVE__STORE, UNFUSE_SERVE__RESULTS or UNFUSE_SERVE__DURABLE of this "
                "worker to the same URL"
            )


def require_result_store(stages: Sequence[StageSpec], locations: StorageLocations) -> None:
    """Raise ConfigError if stages need a result store that this machine lacks."""
    roles = sorted({stage.role for stage in stages if stage.needs_results})
    if roles and not is_same_store(locations.results, locations.results_store_id):
        raise ConfigError(
            f"role {roles[0]} needs the scheduler's results folder {locations.results}, which this machine cannot "
            "access: mount it here at the same path, start the scheduler with --results s3://BUCKET/PREFIX, or run "
            "this role on the scheduler's machine"
        )


def _read_here(specs: Sequence[ModelSpec], choice: StageSelector) -> frozenset[str]:
    """Return the declared pools of the chosen stages whose outputs other chosen stages read."""
    read_pools = set[str]()
    for spec in specs:
        pools, producers = spec.pools(choice), spec.pipeline.producers()
        producers_read = {
            producers[name].name for stage in spec.pipeline.stages if choice.selects(stage) for name in stage.inputs
        }
        read_pools |= {pools[name] for name in producers_read & pools.keys()}
    return frozenset(read_pools)


def loads_by_rank(
    served: ServedStages, choice: StageSelector, options: WorkerOptions, store: TensorStore, locations: StorageLocations
) -> list[LoadModels]:
    """Return the message that makes each rank load its models, in order of ranks."""
    replace = msgspec.structs.replace
    arena_access = store.owner, store.node, store.address, store.write_token
    load = LoadModels(
        served.models, choice, options.compute, *arena_access, locations, options.run_dir, options.data_dir
    )
    load = replace(load, ranks=len(served.devices), kv=options.kv, registered=frozenset(served.pools))
    return [
        replace(load, rank=rank, compute=replace(options.compute, device=device, parallel=served.parallel))
        for rank, device in enumerate(served.devices)
    ]


def _log_download(progress: DownloadProgress) -> None:
    """Log the progress of a download.

    The field `passing` marks lines that a terminal may replace by the next one.
    """
    log.info("fetching", passing=True, **msgspec.structs.asdict(progress))


def pools_of(specs: Sequence[ModelSpec], choice: StageSelector, resources: Collection[str] = ()) -> tuple[str, ...]:
    """Return the declared pools of the chosen stages.

    `resources`: names of the resources that the worker has. Raises ConfigError for a role that no stage has, a choice
    without a stage, or a stage whose resource is missing.
    """
    stages = [stage for spec in specs for stage in spec.pipeline.stages]
    known_roles = {stage.role for stage in stages}
    if unknown := sorted((choice.roles or set()) - known_roles):
        raise ConfigError(f"no stage has the role {unknown[0]}: roles are {', '.join(sorted(known_roles))}")
    pools = tuple(dict.fromkeys(pool for spec in specs for pool in spec.pools(choice).values()))
    if not pools:
        role, component_names = (
            "+".join(sorted(choice.roles or {"all"})),
            sorted({stage.components[0] for stage in stages}),
        )
        raise ConfigError(
            f"no stage matches both --role {role} and --component: components are {', '.join(component_names)}"
        )
    for stage in filter(choice.selects, stages):
        if missing := sorted(stage.needs.keys() - resources - {*stage.provides}):
            raise ConfigError(
                f"stage {stage.name} needs the resource {missing[0]}, which this worker does not have: "
                f"start it with --resources {missing[0]}=N"
            )
    return pools


def swappable_sets(served: ServedStages, options: WorkerOptions) -> Sets:
    """Return the sets of pools that a worker loads one at a time.

    With `--max-loaded-models 1` a set is one model; with `--role a,b` it is one role. There are no sets if everything
    is loaded at once. Raises ConfigError if both options are set.
    """
    roles, specs = options.role.split(","), served.specs
    is_model_at_a_time = options.max_loaded_models == "1"
    if is_model_at_a_time and len(roles) > 1:
        raise ConfigError(
            f"--max-loaded-models 1 and --role {options.role} cannot be combined: both select what is loaded at a time"
        )
    if is_model_at_a_time:
        choice = StageSelector(roles_of(options.role), options.components)
        pools_of_sets = {spec.name: {*spec.pools(choice).values()} for spec in specs}
    else:
        choices = {role.strip(): StageSelector(roles_of(role), options.components) for role in roles}
        pools_of_sets = {
            name: {pool for spec in specs for pool in spec.pools(selector).values()}
            for name, selector in choices.items()
        }
    sets = {name: frozenset(pools) for name, pools in pools_of_sets.items() if pools}
    return sets if len(sets) > 1 else {}
