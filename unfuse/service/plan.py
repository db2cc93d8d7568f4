"""Plans what to start, by the models' JSON files and the headers of their weights. No weights are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from unfuse.core.compute_options import SHARD, fewer, own_spreads, parse_parallel, refuse
from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.model_spec import ModelSpec
from unfuse.core.object_ref import DTYPES
from unfuse.core.plan import ALL, Pipeline, StageSpec, roles_of
from unfuse.core.task import ARENA, SLOTS
from unfuse.launch.base import WorkerSpec
from unfuse.launch.local import ForkServers, InheritedForks
from unfuse.models import card_of, find, resolve_source
from unfuse.models.encoders import shared_of
from unfuse.planning.layout import HostResources, LayoutSearch, layouts
from unfuse.planning.machine import CONTROL_GROUP, cpus
from unfuse.planning.placement import (
    AUTO,
    ComponentMemory,
    Device,
    PlacedWorker,
    WorkerPlan,
    devices_of,
    numbered,
    only_cpu,
    parse_place,
    parse_workers,
    place,
    taken,
)
from unfuse.service.addresses import keys_folder
from unfuse.service.groups import SHARED_ARENA, Settings
from unfuse.service.settings import FIELDS, ByteSize
from unfuse.stages.specs import PREFILL
from unfuse.weights.folder import STORED, ModelFolder, choose_dtypes, parse_dtypes
from unfuse.weights.gguf_model import files_of
from unfuse.weights.source import with_components


class PlannedComponent(msgspec.Struct, frozen=True):
    """A part of a model: its class, the number of its tensors' elements, bytes of its files, and bytes in its dtype,
    of which ranks can share `shared`.

    What is `mapped` has that dtype in its files, so that on CPUs processes read the same memory.
    """

    name: str
    kind: str
    parameters: int
    files: int
    dtype: str
    memory: int
    mapped: bool = False
    shared: int = 0


class PlannedModel(msgspec.Struct, frozen=True):
    """A model and its components. `dtypes` is `--dtype` with "auto" replaced by a type."""

    card: ModelSpec
    folder: Path
    dtypes: str
    components: dict[str, PlannedComponent]


class ServingPlan(msgspec.Struct, frozen=True):
    """Which workers would serve what; `refusal` says why there are none. The first device is the host.

    `layouts` are those among which one was chosen, if it was left to us.
    """

    models: tuple[PlannedModel, ...]
    needs: dict[str, tuple[ComponentMemory, ...]]
    wanted: WorkerPlan
    devices: tuple[Device, ...]
    workers: tuple[PlacedWorker, ...]
    refusal: str = ""
    layouts: LayoutSearch | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Every component of every worker, with its bytes."""
        return [
            {
                "worker": number, "role": worker.role, "device": worker.device, "component": part.component,
                "dtype": part.dtype, "memory": ByteSize(part.bytes), "models": part.models,
            }
            for number, worker in enumerate(self.workers, 1) for part in worker.parts
        ]  # fmt: skip

    def missing_roles(self) -> list[str]:
        """The roles that none of these workers has."""
        roles = [roles_of(worker.role) for worker in self.workers]
        return [role for role in self.needs if not any(own is None or role in own for own in roles)]

    def repeats(self) -> dict[str, int]:
        """The components that a worker has more than once for the same models, with how often."""
        counts = [Counter((part.component, part.models) for part in worker.parts) for worker in self.workers]
        return {name: times for count in counts for (name, _), times in count.items() if times > 1}

    def memory(self) -> list[dict[str, Any]]:
        """Bytes that the workers take by device, their processes and arenas counted, and the bytes that are free."""
        takes = taken(self.workers, self.wanted)
        return [
            {"device": device.name, "takes": ByteSize(takes[device.name]), "free": ByteSize(device.free)}
            for device in self.devices if takes[device.name]
        ]  # fmt: skip


def wanted(settings: Settings) -> WorkerPlan:
    """The workers that these settings ask for. Raises ConfigError."""
    workers, parallel, loaded = settings.serve.workers, settings.compute.parallel, settings.worker.max_loaded_models
    devices = parse_place(settings.serve.place)
    auto = workers == AUTO and not (devices or parallel)
    counts = None if workers == AUTO else parse_workers(workers)
    whole = auto or (counts is not None and not counts.keys() - {ALL})
    if loaded == "1" and (parallel or not whole):
        raise UsageError("--max-loaded-models 1 needs workers of all stages: write --workers all=1 without --parallel")
    arena = settings.arena.bytes or SHARED_ARENA
    return WorkerPlan(counts, devices, settings.compute, arena, auto=auto, max_loaded_models=loaded)


def plan_for(
    names: Iterable[str],
    revision: str,
    wanted: WorkerPlan,
    devices: tuple[Device, ...],
    means: HostResources | None = None,
    *,
    results: bool = True,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> ServingPlan:
    """Read the models' metadata, choose a layout if that is wanted, and place the workers. No weights are loaded.

    `names` may map them to where their models are, if not by that name: a folder, a file or a hub name.
    Without `results` only of roles that need no result store; these workers are called by those roles.
    Raises ConfigError for what cannot be served; what does not fit is a plan with a refusal.
    """
    models = look_into(names, revision, wanted, devices, sources)
    if not results:
        models = _without_results(models)
    needed = needs(models)
    stages = [stage for model in models for stage in model.card.pipeline.stages]
    wanted = replace(
        wanted,
        first=frozenset(stage.role for stage in stages if stage.work.forwards),
        parted=frozenset(stage.role for stage in stages if SHARD in stage.spreads),
    )
    wanted.numbers(needed)
    refuse(parse_parallel(wanted.compute.parallel), stages, wanted.compute.offload)
    looked = None
    if wanted.auto:
        looked = layouts([model.card for model in models], needed, wanted, devices, means or HostResources())
        wanted = looked.chosen.of(wanted)
    try:
        placed = place(needed, wanted, devices)
        if not results:
            placed = tuple(replace(one, role="+".join(needed) if one.role == ALL else one.role) for one in placed)
        return ServingPlan(models, needed, wanted, devices, placed, layouts=looked)
    except ConfigError as error:
        return ServingPlan(models, needed, wanted, devices, (), str(error), looked)


def roles_apart(cards: Iterable[ModelSpec]) -> tuple[str, ...]:
    """The roles of which no stage needs the result store, so that they may run where it is not seen."""
    stages = [stage for card in cards for stage in card.pipeline.stages]
    needing = {stage.role for stage in stages if stage.needs_results}
    return tuple(dict.fromkeys(stage.role for stage in stages if stage.role not in needing))


def _without_results(models: Iterable[PlannedModel]) -> tuple[PlannedModel, ...]:
    """What is left of models without the roles that need the result store. Raises ConfigError if nothing is."""
    models, left = tuple(models), []
    apart = roles_apart(model.card for model in models)
    for model in models:
        stages = tuple(stage for stage in model.card.pipeline.stages if stage.role in apart)
        left.append(replace(model, card=replace(model.card, pipeline=Pipeline(stages))))
    found = tuple(model for model in left if model.card.pipeline.stages)
    if not found:
        raise ConfigError(
            "every stage of these models needs the folder of results, which is on the scheduler's machine and not seen "
            "here: share it at the same path, or have the scheduler serve with --results s3://BUCKET/PREFIX"
        )
    return found


def look_into(
    names: Iterable[str], revision: str, wanted: WorkerPlan, devices: Sequence[Device],
    sources: Mapping[str, str] = MappingProxyType({}),
) -> tuple[PlannedModel, ...]:  # fmt: skip
    """These models, as the workers wanted would serve them, with components from these sources.

    Raises ConfigError, also for a vain `--dtype`.
    """
    spec = wanted.compute.dtype
    found_by = names if isinstance(names, Mapping) else {name: name for name in names}
    folders = {
        name: resolve_source(with_components(source, sources), revision or None, ())
        for name, source in found_by.items()
    }
    cards = {name: card_of(name, folder) for name, folder in folders.items()}
    choose_dtypes(spec, sorted({component for card in cards.values() for component in card.dtypes}))
    roles = dict.fromkeys(stage.role for card in cards.values() for stage in card.pipeline.stages)
    workers = [roles_of(one) for one in wanted.numbers(roles) if not only_cpu(devices_of(one, wanted, devices))]
    on_gpu = {role for role in roles if any(held is None or role in held for held in workers)}
    found = []
    for name, folder in folders.items():
        dtypes, files = explicit_dtypes(cards[name], spec, on_gpu), files_of(folder)
        text = ",".join(f"{component}={dtype}" for component, dtype in dtypes.items())
        components = {component: _component(files, component, dtype) for component, dtype in dtypes.items()}
        found.append(PlannedModel(card_of(name, folder, text), folder, text, components))
    return tuple(found)


def _component(files: ModelFolder, name: str, dtype: str) -> PlannedComponent:
    tensors, kind, width = files.tensors(name), files.class_of(name), DTYPES[dtype]
    elements = {tensor: number for tensor, (_, number) in tensors.items()}
    shared, whole = shared_of(name, kind, find(files.path).cut, elements), sum(elements.values())
    mapped, memory = files.has(name, dtype), whole * width
    if files.is_quantised(name):  # in memory as in its files, but for floats that become wider
        stored = {STORED[one]: DTYPES[one] for one in STORED}
        memory = files.size(name) + sum(n * max(width - stored.get(is_, width), 0) for is_, n in tensors.values())
    return PlannedComponent(name, kind, whole, files.size(name), dtype, memory, mapped, shared * width)


def explicit_dtypes(card: ModelSpec, spec: str, on_gpu: Collection[str]) -> dict[str, str]:
    """Return the dtype of each component by `--dtype`. "auto" is bfloat16 on GPUs, but float32 for VAEs and on CPUs.

    The result must be the same in the gateway and in workers, because they must agree on pools.
    """
    rest, named = parse_dtypes(spec)
    fast = {
        component
        for stage in card.pipeline.stages if stage.role in on_gpu
        for component in stage.components
    }  # fmt: skip
    automatic = {name: "bfloat16" if name in fast and not name.startswith("vae") else "float32" for name in card.dtypes}
    usual = automatic if rest == "auto" else dict.fromkeys(card.dtypes, rest)
    return {name: named.get(name, usual[name]) for name in card.dtypes}


def needs(models: Iterable[PlannedModel]) -> dict[str, tuple[ComponentMemory, ...]]:
    """What a worker of each role holds: every pool of its stages once, even if several models share it."""
    pools: dict[str, dict[str, tuple[StageSpec, PlannedModel]]] = {}
    for model in models:
        for stage in model.card.pipeline.stages:
            pools.setdefault(model.card.pools()[stage.name], {})[model.card.name] = (stage, model)
    found: dict[str, tuple[ComponentMemory, ...]] = {}
    for users in pools.values():
        stage, model = next(iter(users.values()))
        held, once = (model.components[name] for name in stage.components), files_of(model.folder).is_whole
        parts = tuple(
            ComponentMemory(one.name, one.dtype, one.memory, tuple(users), one.mapped, one.shared, once)
            for one in held
            if one.memory
        )
        found[stage.role] = (*found.get(stage.role, ()), *parts, *_texts(stage, model, tuple(users)))
    return found


def _texts(stage: StageSpec, model: PlannedModel, users: tuple[str, ...]) -> Iterator[ComponentMemory]:
    """Keys and values of the longest text, for which a stage that makes or takes them has room at the least."""
    for name in PREFILL.outputs:
        if name in (*stage.inputs, *stage.outputs):
            producer = model.card.pipeline.producers()[name]
            size = producer.room.bytes({"prompt_tokens": int(model.card.limits["max_tokens"])})
            dtype = model.components[stage.components[0]].dtype
            yield ComponentMemory("keys and values", dtype, size, users, shared=size, once=True)


COSTS = "costs.json"
"""The file in the data folder with what stages took."""


def resources(settings: Settings) -> dict[str, int]:
    """The amounts of named resources of each worker. Raises ConfigError for a malformed one."""
    found = counts("--resources", settings.worker.resources, "NAME=N, like kv_blocks=4096")
    if own := sorted(found.keys() & {SLOTS, ARENA}):
        raise UsageError(f"--resources {own[0]}: every worker has that, and as much as --{own[0]} says")
    return found


def device_memory(settings: Settings) -> dict[str, int]:
    """What is planned for on devices at most, in bytes. Raises ConfigError for a malformed one."""
    found = {}
    for entry in settings.serve.device_memory:
        name, _, size = entry.partition("=")
        try:
            found[numbered(name)] = ByteSize.parse(size)
        except ValueError as error:
            raise UsageError(f"--device-memory {entry}: write DEVICE=SIZE, like cuda:0=20GiB: {error}") from error
    return found


def means(settings: Settings) -> HostResources:
    """What there is to compute with on this machine, by these settings."""
    return HostResources(max(1, int(cpus(CONTROL_GROUP))), settings.worker.memory_limit, Path(settings.data_dir, COSTS))


def counts(flag: str, given: tuple[str, ...], example: str) -> dict[str, int]:
    """The numbers of a flag, by name. Raises ConfigError for a malformed one."""
    found = {}
    for entry in given:
        name, _, count = entry.partition("=")
        if not name or not count.isdecimal() or not int(count):
            raise UsageError(f"{flag} {entry}: write {example}")
        found[name] = int(count)
    return found


def slots_by_role(settings: Settings) -> dict[str, int]:
    """Tasks that a worker of each role holds at a time, as they are set. Raises ConfigError for a malformed entry."""
    return counts("--slots", settings.serve.slots, "ROLE=N, like denoiser=2")


def environment_of(settings: Settings) -> dict[str, str]:
    """Environment variables that every worker gets, whatever starts it."""
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
        )
    }


def forked(
    planned: ServingPlan, begun: ForkServers | InheritedForks | None = None
) -> ForkServers | InheritedForks | None:
    """Return the fork server for a plan's workers on CPUs, or None if there are no such workers.

    It is `begun`, or a copy of that if it is inherited, or a new one.
    """
    on_cpu = any(worker.on_cpu for worker in planned.workers)
    if isinstance(begun, InheritedForks):
        return begun.copy() if on_cpu else None
    if not on_cpu:
        if begun:
            begun.close()
        return None
    return begun or ForkServers([str(model.folder) for model in planned.models])


def specs_of(
    planned: ServingPlan, settings: Settings, told: Mapping[str, object], more: Mapping[str, str],
    models: tuple[str, ...] = (), *, elsewhere: bool = False,
) -> list[WorkerSpec]:  # fmt: skip
    """The workers to start, which share the cores, for these `models` or what their scheduler offers when they start.

    They are `told` this by flag, and `more` by variable, beside what settings say. Each gets its dtypes from the
    scheduler, since models differ. Those `elsewhere` have the folders of their own machine.
    """
    wanted, workers = planned.wanted, planned.workers
    ranks, slots = sum(len(worker.devices) for worker in workers), slots_by_role(settings)
    threads = wanted.compute.threads or max(1, means(settings).cores // max(1, ranks))
    common = asdict(wanted.compute) | {
        "threads": threads,
        "dtype": "auto",
        "arena": wanted.arena,
        **told,
        "keys": keys_folder(settings, "worker"),
        "memory-limit": settings.worker.memory_limit,
        "stall-s": settings.lease.stall_s,
        "kv": settings.kv.bytes,
        "drain-timeout": settings.serve.drain_timeout,
        "max_loaded_models": wanted.max_loaded_models,
        **({"listen": settings.worker.listen} if settings.worker.listen else {}),
    }
    del common["device"]
    environment = {**environment_of(settings), **more}
    for folder in ("run_dir", "data_dir") if elsewhere else ():
        del environment[FIELDS[folder].variable]
    specs = []
    for worker in workers:
        roles = roles_of(worker.role)
        given = [count for role, count in slots.items() if roles is None or role in roles]
        own = common | {"slots": min(given, default=settings.worker.slots)}
        if worker.on_cpu:
            own["offload"] = "none"
        flags = {name.replace("_", "-"): str(value) for name, value in own.items()}
        smaller = tuple(
            WorkerSpec(worker.role, device, flags | {"parallel": parallel}, environment, models=models)
            for device, parallel in fewer(worker.device, own_spreads(wanted.compute.parallel, roles))
        )
        specs.append(WorkerSpec(worker.role, worker.device, flags, environment, smaller, models))
    return specs
