"""Places workers on devices, by the bytes of components and free memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from unfuse.arena.limits import readable_bytes
from unfuse.core.compute_device import CONTEXT
from unfuse.core.compute_options import (
    RESIDENT_KINDS,
    SHARD,
    WEIGHT_SPLITTING_KINDS,
    ComputeOptions,
    MaxLoadedModels,
    ParallelDegrees,
    joined_by,
    parse_parallel,
    rank_devices,
    split_devices,
    worker_parallelism,
)
from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.offload_options import Offload
from unfuse.core.plan import ALL_STAGES, ROLE_GROUPS, roles_of
from unfuse.planning.component_memory import (
    KV_CACHE,
    QUANTIZE,
    ComponentMemory,
    Needs,
    quantized_needs,
    smaller_needs,
)

CPU = "cpu"

#: The value of `--workers` that selects a layout.
AUTO = "auto"
#: The value of `--workers` for one worker for each role.
SPLIT = "split"
#: The value of `--workers` for no worker.
NONE = "none"

#: GPU memory of a rank for exchanges: NCCL's default buffers of 4 MiB, for at most 32 channels in 2 directions.
EXCHANGE_BUFFERS = 2 * 32 * (4 << 20)
SMALL_ARENA = 64 << 20  # the smallest arena that is advised
SLOW = "--offload sequential", "--place"  # beginnings of advice that makes requests many times slower
PROCESS = 288 << 20  # host memory that a worker needs for libraries, in addition to its weights and its arena
NO_DEVICE = "there is no device"  # the beginning of the error for a device that the machine does not have
MAX_WORKERS = 1024  # the most workers of one role


class Device(msgspec.Struct, frozen=True):
    """A device that workers may use."""

    #: Such as "cuda:0"; "cpu" is the host and its memory.
    name: str
    #: Free bytes.
    free: int
    #: Whether it computes in bfloat16.
    has_bfloat16: bool = True
    #: Name of the GPU's model; "": unknown.
    model: str = ""
    #: Whether it is a GPU without memory of its own.
    uses_host_memory: bool = False


class Memory(NamedTuple):
    """A memory, and the devices that use it."""

    #: The names of the devices.
    devices: tuple[str, ...]
    #: Free bytes.
    free: int

    @property
    def name(self) -> str:
        """The devices as part of a sentence."""
        return " and ".join(self.devices) + (" (one memory)" if len(self.devices) > 1 else "")

    def left(self, needed: Mapping[str, int]) -> int:
        """Return the bytes that these needs by device leave. Below 0, they do not fit."""
        return self.free - sum(needed.get(device, 0) for device in self.devices)


def memories(devices: Iterable[Device]) -> list[Memory]:
    """Return the memory of each device, and that which host and GPUs share."""
    devices = list(devices)
    separate = [Memory((device.name,), device.free) for device in devices]
    sharing = tuple(device.name for device in devices if device.uses_host_memory)
    return separate + [Memory((CPU, *sharing), device.free) for device in devices if sharing and device.name == CPU]


def left_bytes(needed: Mapping[str, int], devices: Iterable[Device]) -> dict[str, int]:
    """Return the bytes that these needs by device leave on each device."""
    left = dict[str, int]()
    for memory in memories(devices):
        for name in memory.devices:
            left[name] = min(left.get(name, memory.free), memory.left(needed))
    return left


class WorkerPlan(msgspec.Struct, frozen=True):
    """The workers to start, and how they compute.

    A worker is named by the stages that it runs: a role, several roles as `a+b`, or `all`.
    """

    #: Number of workers of each name; None: one for each role.
    counts: Mapping[str, int] | None = None
    #: Devices that `--place` names for workers, by the worker's name.
    place: Mapping[str, tuple[str, ...]] = {}
    #: Compute options of all workers.
    compute: ComputeOptions = ComputeOptions()
    #: Bytes of each worker's arena.
    arena: int = 0
    #: Roles whose workers are placed before others.
    first: frozenset[str] = frozenset()
    #: Roles whose weights can be sharded over ranks.
    shardable_roles: frozenset[str] = frozenset()
    #: Whether `counts` and `max_loaded_models` are still to be chosen (`--workers auto`).
    auto: bool = False
    #: "1": a worker loads one model at a time (model swapping). "all": it loads all models at its start.
    max_loaded_models: MaxLoadedModels = "all"
    #: Bytes of each model's KV cache, for all ranks together; 0: what the plan leaves on the device.
    kv: int = 0
    #: Whether the layout was chosen, so that another change may come with another layout.
    is_layout_free: bool = False
    #: Names in `--parallel` of roles whose weights tensor parallelism divides, with the number that its degree divides.
    tensor_roles: Mapping[str, int] = {}

    def worker_counts(self, roles: Iterable[str]) -> dict[str, int]:
        """Return the number of workers of each name, for models with these roles.

        Raises ConfigError for an unknown role, and for a place of a worker that is not started.
        """
        known = list(roles)
        for name in (*self.place, *(self.counts or ())):
            if unknown := sorted((roles_of(name) or set()) - {*known}):
                raise UsageError(f"no stage has the role {unknown[0]}: roles are {', '.join(known)}, and {ALL_STAGES}")

        shared_names = joined_by(self.compute.parallel)
        one_each = {shared_names.get(role, role): 1 for role in known}
        counts = one_each if self.counts is None else dict(self.counts)
        if unused := [name for name in self.place if not counts.get(name)]:
            started = ", ".join(name for name, count in counts.items() if count)
            raise UsageError(
                f"--place {unused[0]}: no worker of that name is started, only: {started or NONE}; place one of these, "
                f"or add {unused[0]}=1 to --workers"
            )
        return counts

    def goes_first(self, worker: str) -> bool:
        """Whether a worker of this name is placed before others."""
        return bool((roles_of(worker) or self.first) & self.first)


class PlacedWorker(msgspec.Struct, frozen=True):
    """A worker to start, on its device."""

    #: Name of the worker: a role, several roles as `a+b`, or `all`.
    role: str
    #: Device, or one for each rank, as in `cuda:0+cuda:1`.
    device: str
    #: The largest set of components that are loaded at one time, on each rank.
    parts: tuple[ComponentMemory, ...]

    @property
    def devices(self) -> list[str]:
        """The device of each rank."""
        return self.device.split("+")

    @property
    def on_cpu(self) -> bool:
        """Whether it runs on the CPU."""
        return is_cpu_only([self.device])

    def device_bytes(self, plan: WorkerPlan) -> Counter[str]:
        """Return the bytes that it needs on each device.

        On a GPU, activations of one request of the default size are included.
        """
        ranks = len(self.devices)
        host = ranks * PROCESS + plan.arena
        if self.on_cpu:
            return Counter(
                {CPU: host + sum(part.bytes * (ranks if part.differs_by_rank else 1) for part in self.parts)}
            )

        offloads = [(part, part.offload(plan.compute.offload)) for part in self.parts]
        fixed = [part for part, how in offloads if how == "none"]
        # weights that are not in use are in pinned host memory, and the last ones that ran stay on the device
        moved = [(part, part.resident(how)) for part, how in offloads if how != "none"]
        last = max((resident for _, resident in moved), default=0)
        peaks = [last + part.activations for part in fixed] + [resident + part.activations for part, resident in moved]
        sizes = (plan.kv // ranks or part.bytes if part.component == KV_CACHE else part.bytes for part in fixed)
        steady = CONTEXT + self._preview_bytes + (EXCHANGE_BUFFERS if ranks > 1 else 0) + sum(sizes)
        return Counter(
            dict.fromkeys(self.devices, steady + max(peaks, default=0))
            | {CPU: host + sum(part.bytes * (ranks if part.differs_by_rank else 1) for part, _ in moved)}
        )

    @property
    def _preview_bytes(self) -> int:
        """The bytes of VAEs that it loads for previews only."""
        decoded = {name for part in self.parts if part.component == "vae" for name in part.models}
        return sum(part.preview_bytes for part in self.parts if not decoded.issuperset(part.models))


def parse_place(text: str) -> dict[str, tuple[str, ...]]:
    """Return the devices by role in a text like `encoder=cuda:0,denoiser=cuda:0,denoiser=cuda:1`.

    `denoiser=cuda:0+cuda:1` is one worker, with a rank on each device. Raises ConfigError.
    """
    places: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, text.split(",")):
        role, _, devices = entry.partition("=")
        if not role.strip() or not devices.strip():
            raise UsageError(f"--place {text}: {entry!r} is not ROLE=DEVICE")
        split_devices(devices, f"--place {entry.strip()}")  # raises ConfigError
        places[role.strip()] = (*places.get(role.strip(), ()), with_index(devices))
    return places


def parse_workers(text: str) -> dict[str, int] | None:
    """Return the counts in a plan like `all=2` or `encoder+decoder=1,denoiser=2`.

    They are empty for "none", and None for "split". Raises ConfigError.
    """
    if text == SPLIT:
        return None
    if text == NONE:
        return {}
    counts: dict[str, int] = {}
    for entry in filter(None, text.split(",")):
        role, equals, count = (part.strip() for part in entry.partition("="))
        roles_of(role)  # raises ConfigError for an empty role
        if role in counts or (equals and not (count.isdecimal() and int(count) <= MAX_WORKERS)):
            raise UsageError(
                f"--workers {text}: {entry!r} is not ROLE=N; name each role once, with N at most {MAX_WORKERS}"
            )
        counts[role] = int(count or 1)
    if not counts:
        raise UsageError(f"--workers {text!r}: use auto, none, split, or a plan like all=2 or encoder=1,denoiser=2")
    return counts


def devices_of(role: str, plan: WorkerPlan, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the devices that a role may run on.

    They are those of `--place`, else `--device`, else every GPU, else the CPU. If `--device` names a device for each
    rank, roles without parallelism may run on any of them.
    """
    if role in plan.place:
        return plan.place[role]
    if plan.compute.device != "auto":
        device = with_index(plan.compute.device)
        has_ranks = worker_parallelism(plan.compute.parallel, roles_of(role))
        return (device,) if has_ranks else (*dict.fromkeys(split_devices(device)),)
    return tuple(device.name for device in devices if device.name != CPU) or (CPU,)


def is_cpu_only(devices: Iterable[str]) -> bool:
    """Whether none of these devices is a GPU.

    An entry may have a device for each rank, as in `cuda:0+cuda:1`.
    """
    return all(device == CPU for names in devices for device in names.split("+"))


def place_workers(needs: Needs, plan: WorkerPlan, devices: Sequence[Device]) -> tuple[PlacedWorker, ...]:
    """Return the workers to start, each on a device with enough free memory.

    A role with named devices has at least one worker on each, and more workers go to them in turn. All others go to the
    device with most free memory, those of `WorkerPlan.first` before the rest. Workers that load one model at a time
    (model swapping) go to all devices in turn. With `--offload model`, also of single components, roles that would
    share a GPU become one worker of all roles, so that one component at a time is on the GPU.

    Raises ConfigError for an unknown device, and if the workers do not fit: the message has the sums, the free memory,
    and what would help.
    """
    if not any(plan.worker_counts(needs).values()):
        return ()
    if plan.max_loaded_models == "1":
        needs = _largest_model(needs)
    placed = _assign_devices(needs, plan, devices)
    offloads = any(part.offload(plan.compute.offload) != "none" for worker in placed for part in worker.parts)
    if offloads and all(worker.on_cpu for worker in placed):
        raise ConfigError(f"--offload {plan.compute.offload} needs a GPU: on a CPU weights are in host memory anyway")
    if full_memories := _full_memories(placed, plan, devices):
        raise ConfigError(_refusal(full_memories, placed, needs, plan, devices))
    return placed


def taken_bytes(placed: Sequence[PlacedWorker], plan: WorkerPlan) -> Counter[str]:
    """Return the bytes that these workers need together, by device."""
    return sum(worker_bytes(placed, plan), Counter())


def worker_bytes(placed: Sequence[PlacedWorker], plan: WorkerPlan) -> list[Counter[str]]:
    """Return the bytes that each of these workers needs, by device.

    Memory that several workers map together counts for the first of them.
    """
    counted_parts: set[ComponentMemory] = set()
    bytes_by_worker: list[Counter[str]] = []
    for worker in placed:
        mapped = {part for part in worker.parts if part.mapped and worker.on_cpu}
        bytes_by_worker.append(
            worker.device_bytes(plan) - Counter({CPU: sum(part.bytes for part in mapped & counted_parts)})
        )
        counted_parts |= mapped
    return bytes_by_worker


def _assign_devices(needs: Needs, plan: WorkerPlan, devices: Sequence[Device]) -> tuple[PlacedWorker, ...]:
    """Choose a device for each worker, without a check that all of them fit."""
    needed = Counter[str]()
    free = left_bytes(needed, devices)
    gpu_models = {device.name: device.model for device in devices}
    placed: list[PlacedWorker] = []
    counts = plan.worker_counts(needs)
    for role in sorted(counts, key=lambda role: not plan.goes_first(role)):
        allowed = devices_of(role, plan, devices)
        if missing := sorted({name for names in allowed for name in names.split("+")} - {*free}):
            raise ConfigError(f"{NO_DEVICE} {missing[0]} for the {role}; available are {', '.join(free)}")

        placed_devices = plan.place.get(role, ())
        spreads = worker_parallelism(plan.compute.parallel, roles_of(role))
        rotation = placed_devices or (allowed if plan.max_loaded_models == "1" else ())
        for index in range(max(counts[role], len(placed_devices))):
            name = rotation[index % len(rotation)] if rotation else _pick_device(allowed, free, gpu_models, spreads)
            worker = PlacedWorker(role, "+".join(rank_devices(name, spreads)), parts_of(role, needs, spreads))
            _check_ranks(worker, gpu_models)
            placed.append(worker)
            needed += worker.device_bytes(plan)
            free = left_bytes(needed, devices)  # may become negative: `place_workers` compares the sums afterwards

    # the workers of the first roles were placed first, but are started in the order of the counts
    order = list(counts)
    return _join_offloaded(sorted(placed, key=lambda worker: order.index(worker.role)), needs, plan)


def _largest_model(needs: Needs) -> Needs:
    """Return the needs of the largest model alone, for model swapping.

    Its memory is not mapped by several workers together, because each worker may have another model loaded.
    """

    def of_model(name: str) -> Needs:
        model_parts = {role: (part for part in parts if name in part.models) for role, parts in needs.items()}
        return {role: tuple(replace(part, mapped=False) for part in parts) for role, parts in model_parts.items()}

    models = dict.fromkeys(name for parts in needs.values() for part in parts for name in part.models)
    return max(
        map(of_model, models),
        key=lambda candidate: sum(part.bytes for part in parts_of(ALL_STAGES, candidate, {})),
        default=needs,
    )


def _pick_device(
    allowed: Sequence[str],
    free: Mapping[str, int],
    gpu_models: Mapping[str, str],
    spreads: Mapping[str, ParallelDegrees],
) -> str:
    """Return the device with most free memory, or one for each rank.

    The GPUs of ranks are of one model, if there are enough.
    Raises ConfigError for too few GPUs.
    """
    ordered = sorted(allowed, key=lambda names: -min(free[name] for name in names.split("+")))
    size = next((spread.size for spread in spreads.values()), 1)
    if size == 1 or ordered[0] == CPU or "+" in ordered[0]:
        return ordered[0]
    if size > len(ordered):
        parallel = ",".join(f"{role}={spread}" for role, spread in spreads.items())
        raise ConfigError(
            f"--parallel {parallel} needs {size} GPUs, and there are {len(ordered)}: {', '.join(allowed)}"
        )
    groups = [
        [name for name in ordered if gpu_models[name] == model][:size]
        for model in dict.fromkeys(gpu_models[name] for name in ordered)
    ]
    # without such a group, the error names the GPUs with most free memory
    groups = [group for group in groups if len(group) == size] or [[*ordered[:size]]]
    roomiest = max(groups, key=lambda group: free[group[-1]])
    return "+".join(roomiest)


def _check_ranks(worker: PlacedWorker, gpu_models: Mapping[str, str]) -> None:
    """Raise ConfigError if the ranks of a worker are on GPUs of different models.

    Their results differ, so the worker would refuse to start.
    """
    models = {name: gpu_models[name] for name in worker.devices if gpu_models[name]}
    if len({*models.values()}) > 1:
        gpus = ", ".join(f"{name} is {model}" for name, model in models.items())
        raise ConfigError(
            f"the ranks of a worker need GPUs of one model, since results depend on it, and for the {worker.role} "
            f"{gpus}: name GPUs of one model by --device or --place, or use fewer ranks"
        )


def parts_of(role: str, needs: Needs, spreads: Mapping[str, ParallelDegrees]) -> tuple[ComponentMemory, ...]:
    """Return the components that a worker of these roles loads, per rank."""
    roles = roles_of(role)
    spread_by_role = {name: spreads.get(name, ParallelDegrees()) for name in needs}
    # a component that one copy serves is counted once, although several roles need it
    role_parts = [(name, part) for name, parts in needs.items() if roles is None or name in roles for part in parts]
    components = [part for _, part in role_parts]
    distinct = [
        (name, part)
        for index, (name, part) in enumerate(role_parts)
        if not (part.shared_by_stages and part in components[:index])
    ]
    return tuple(part.of_rank(spread_by_role[name]) for name, part in distinct)


def _join_offloaded(placed: list[PlacedWorker], needs: Needs, plan: WorkerPlan) -> tuple[PlacedWorker, ...]:
    """With `--offload model`, replace the workers of all roles on one GPU by one."""
    gpus = dict.fromkeys(worker.device for worker in placed if not worker.on_cpu)
    for gpu in gpus:
        parts_here = {worker.role: worker.parts for worker in placed if worker.device == gpu}
        takes_turns = any(
            part.offload(plan.compute.offload) == "model" for parts in parts_here.values() for part in parts
        )
        if takes_turns and parts_here.keys() == needs.keys() and len(parts_here) > 1:
            parts = parts_of(ALL_STAGES, needs, parse_parallel(plan.compute.parallel))
            joined = PlacedWorker(ALL_STAGES, gpu, parts)
            placed = [*(worker for worker in placed if worker.device != gpu), joined]
    return tuple(placed)


def _full_memories(placed: Sequence[PlacedWorker], plan: WorkerPlan, devices: Sequence[Device]) -> list[Memory]:
    """Return the memories of which these workers need more than is free."""
    needed = taken_bytes(placed, plan)
    full = [memory for memory in memories(devices) if memory.left(needed) < 0]
    # a shared memory says more than one of its devices
    return [memory for memory in full if not any({*memory.devices} < {*other.devices} for other in full)]


def _refusal(
    full_memories: list[Memory],
    placed: Sequence[PlacedWorker],
    needs: Needs,
    plan: WorkerPlan,
    devices: Sequence[Device],
) -> str:
    """Return the error message for workers that do not fit.

    It has the sums, the free memory, and what would help.
    """
    sums = []
    bytes_by_worker = worker_bytes(placed, plan)
    for memory in full_memories:
        sizes = [
            (worker.role, sum(by_device[name] for name in memory.devices))
            for worker, by_device in zip(placed, bytes_by_worker, strict=True)
        ]
        shares = " + ".join(f"{role} {readable_bytes(size)}" for role, size in sizes if size)
        total = readable_bytes(sum(size for _, size in sizes))
        sums.append(f"{memory.name} would need {total} ({shares}) and has {readable_bytes(memory.free)} free")
    full_names = {name for memory in full_memories for name in memory.devices}
    others = [
        f"{device.name} has {readable_bytes(device.free)} free" for device in devices if device.name not in full_names
    ]

    return f"the models do not fit: {'; '.join([*sums, *others])}; {_advice(needs, plan, devices)}"


def _advice(needs: Needs, plan: WorkerPlan, devices: Sequence[Device]) -> str:
    """Return the changes with which the workers fit, as few at a time as possible."""
    remedies = [*_remedies(needs, plan, devices)]

    def fits(remedy: _Remedy) -> bool:
        return _fits(remedy.needs, remedy.plan, devices)

    fitting = [remedy.text for remedy in remedies if fits(remedy)]
    # of several degrees of one kind of parallelism, the smallest
    smallest = {text.partition(":")[0]: text for text in reversed(fitting)}
    advice = [*reversed(smallest.values())]
    if all(text.startswith(SLOW) for text in advice):
        # the second change is one of the plan with the first
        pairs = [
            (remedy.text, more.text)
            for remedy in remedies
            if remedy.text not in fitting
            for more in _remedies(remedy.needs, remedy.plan, devices)
            if more.text != remedy.text and (not advice or more.text.startswith(QUANTIZE)) and fits(more)
        ]
        pairs.sort(key=lambda pair: any(text.startswith(SLOW) for text in pair))
        advice += [" and ".join(pair) for pair in pairs[:1]]
    if advice:
        return f"it would fit with {', or with '.join(advice)}"
    return (
        "no two changes of --workers, --arena, --dtype, --vae, --parallel, --offload, --place or the weights are "
        "enough: more memory is needed"
    )


def _fits(needs: Needs, plan: WorkerPlan, devices: Sequence[Device]) -> bool:
    """Return whether these workers fit.

    If the layout is free, one worker of all stages may fit instead.
    """
    plans = [plan, replace(plan, counts={ALL_STAGES: 1})] if plan.is_layout_free and not plan.place else [plan]
    for candidate in plans:
        with suppress(ConfigError):  # there may be more ranks than devices
            if not _full_memories(_assign_devices(needs, candidate, devices), candidate, devices):
                return True
    return False


class _Remedy(NamedTuple):
    """A change with which workers may fit."""

    #: The change, as advice.
    text: str
    #: The needs after it.
    needs: Needs
    #: The plan after it.
    plan: WorkerPlan


def _remedies(needs: Needs, plan: WorkerPlan, devices: Sequence[Device]) -> Iterator[_Remedy]:
    """Yield changes with which the workers may fit, those that cost least first."""
    counts = plan.worker_counts(needs)
    single_counts = {role: min(1, count) for role, count in counts.items()}
    if single_counts != counts:
        yield _Remedy("one worker for each role", needs, replace(plan, counts=single_counts))
    if plan.arena > SMALL_ARENA:
        yield _Remedy("--arena 64MiB", needs, replace(plan, arena=SMALL_ARENA))
    gpus = [device.name for device in devices if device.name != CPU]
    gpu_roles = [role for role in counts if not is_cpu_only(devices_of(role, plan, devices))]
    has_bfloat16 = not gpu_roles or all(device.has_bfloat16 for device in devices)
    smaller = smaller_needs(needs, on_gpu=bool(gpu_roles), has_bfloat16=has_bfloat16)
    yield from (_Remedy(text, changed, plan) for text, changed in smaller)

    spreads = parse_parallel(plan.compute.parallel)
    split_roles = {role for role, spread in spreads.items() if {*WEIGHT_SPLITTING_KINDS} & {*spread.degrees}}
    for text in _split_weights(plan, len(gpus), split_roles):
        yield _Remedy(f"--parallel {text}", needs, replace(plan, compute=replace(plan.compute, parallel=text)))

    can_offload = not any({*RESIDENT_KINDS} & {*spread.degrees} for spread in spreads.values())
    offloads: tuple[Offload, ...] = (
        ("model", "sequential") if gpu_roles and plan.compute.offload == "none" and can_offload else ()
    )
    fixed = sorted({part.component for parts in needs.values() for part in parts if not part.can_offload})
    for offload in offloads:
        text = ",".join([offload, *(f"{component}=none" for component in fixed)])
        yield _Remedy(f"--offload {text}", needs, replace(plan, compute=replace(plan.compute, offload=text)))
    if gpu_roles and not spreads:  # quantized weights are not divided
        offered = quantized_needs(needs, torchao=plan.compute.offload == "none")
        yield from (_Remedy(text, changed, plan) for text, changed in offered)

    for role in gpu_roles:
        roles = roles_of(role)
        moved_needs = {
            name: tuple(part.stored_as("float32") for part in parts) if roles is None or name in roles else parts
            for name, parts in needs.items()
        }
        yield _Remedy(f"--place {role}={CPU}", moved_needs, replace(plan, place={**plan.place, role: (CPU,)}))


def _split_weights(plan: WorkerPlan, gpus: int, split_roles: set[str]) -> Iterator[str]:
    """Yield values of `--parallel` that divide the weights of a role over the GPUs."""
    spreads = parse_parallel(plan.compute.parallel)
    kinds = {role: (SHARD, 0) for role in sorted(plan.shardable_roles)}
    kinds |= {role: ("tensor", heads) for role, heads in plan.tensor_roles.items()}
    for role, (kind, divisible) in kinds.items():
        spread = spreads.get(role, ParallelDegrees())
        if split_roles.intersection(ROLE_GROUPS.get(role, (role,))):
            continue
        for degree in (2, 4, 8) if spread.size == 1 else (spread.size,):
            if degree <= max(2, gpus) and divisible % degree == 0:
                split = spreads | {role: ParallelDegrees({**spread.degrees, kind: degree})}
                yield ",".join(f"{name}={degrees}" for name, degrees in split.items())


def with_index(name: str) -> str:
    """Return a device name, or those of ranks, with a number: `cuda` becomes `cuda:0`."""
    devices = map(str.strip, name.split("+"))
    return "+".join(f"{device}:0" if device != CPU and ":" not in device else device for device in devices)
