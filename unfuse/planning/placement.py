"""Decides which worker runs on which device, by the components' bytes and the devices' free bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from unfuse.arena.limits import readable_bytes
from unfuse.core.compute_options import (
    PARTING,
    SHARD,
    ComputeOptions,
    MaxLoadedModels,
    Offload,
    ParallelDegrees,
    joined_by,
    own_spreads,
    parse_parallel,
    ranked,
)
from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.plan import ALL, roles_of

CPU = "cpu"
AUTO, SPLIT, NONE = "auto", "split", "none"
"""The values of `--workers` that are no plan: what fits, one worker for each role, and no worker."""

CONTEXT = 512 << 20  # GPU memory that a process takes before its first weight: the context and the libraries' kernels
PROCESS = 288 << 20  # host memory that a worker takes beside its weights and its arena, for libraries
NO_DEVICE = "there is no device"  # the beginning of the refusal of a device that is named and not there
MOST = 1024  # the most workers of one kind
LAYER = 2 << 30  # more bytes than any layer of a served model takes; the largest are embeddings of a large vocabulary
Needs = Mapping[str, "tuple[ComponentMemory, ...]"]  # what each worker of a role holds, by role


class ComponentMemory(msgspec.Struct, frozen=True):
    """A component as a worker holds it, for these models; `bytes` is what it takes in its dtype, on each rank. Of these
    ranks have a share each of `shared`, if they are spread by `tensor`.

    What is `mapped` is read from files as it is: on CPUs, all workers together take that memory once. A worker has one
    that is there `once` for all of its stages. In host memory its ranks have one together, unless it is `parted`, so
    that each has another part.
    """

    component: str
    dtype: str
    bytes: int
    models: tuple[str, ...] = ()
    mapped: bool = False
    shared: int = 0
    once: bool = False
    parted: bool = False

    def stored_as(self, dtype: str) -> ComponentMemory:
        """The same component in float32 or bfloat16. Of a VAE, and of what is not float32, there is no bfloat16."""
        has_half = self.dtype == "float32" and not self.component.startswith("vae")
        if self.dtype == dtype or not (has_half or dtype == "float32"):
            return self
        factor = 2 if dtype == "float32" else 1 / 2
        sizes = {"bytes": int(self.bytes * factor), "shared": int(self.shared * factor)}
        return replace(self, dtype=dtype, mapped=False, **sizes)

    def of_rank(self, spread: ParallelDegrees) -> ComponentMemory:
        """What a rank has of it."""
        lacks = self.shared - -(-self.shared // spread.degrees.get("tensor", 1))
        own = -(-(self.bytes - lacks) // spread.parts)
        return replace(self, bytes=own, mapped=False, parted=True) if own < self.bytes else self

    def resident(self, offload: Offload) -> int:
        """The most bytes of it that are on a GPU at one time. A VAE is loaded whole, others also layer by layer."""
        layers = offload == "sequential" and not self.component.startswith("vae")
        return min(self.bytes, LAYER) if layers else self.bytes


class Device(msgspec.Struct, frozen=True):
    """A device that workers may use, and its free bytes; "cpu" is the host and its memory."""

    name: str
    free: int


class WorkerPlan(msgspec.Struct, frozen=True):
    """Workers to start, and how they compute.

    A worker is named by what it serves: a role, several as `a+b`, or all. `counts` is how many there are of each; None
    is one for each role. `place` has the devices that were named for them. With `auto`, all of that is still to be
    chosen. Workers of the roles in `first` are placed first; `parted` are roles of which a rank can hold a part of the
    weights.
    """

    counts: Mapping[str, int] | None = None
    place: Mapping[str, tuple[str, ...]] = {}
    compute: ComputeOptions = ComputeOptions()
    arena: int = 0
    first: frozenset[str] = frozenset()
    parted: frozenset[str] = frozenset()
    auto: bool = False
    max_loaded_models: MaxLoadedModels = "all"

    def numbers(self, roles: Iterable[str]) -> dict[str, int]:
        """The number of workers by roles, for models with these roles.

        Raises ConfigError for an unknown role, and for a place of a worker that is not started.
        """
        known = list(roles)
        for named in (*self.place, *(self.counts or ())):
            if unknown := sorted((roles_of(named) or set()) - {*known}):
                raise UsageError(f"no stage has the role {unknown[0]}: roles are {', '.join(known)}, and {ALL}")
        words = joined_by(self.compute.parallel)
        one_each = {words.get(role, role): 1 for role in known}
        found = one_each if self.counts is None else dict(self.counts)
        if idle := [name for name in self.place if not found.get(name)]:
            started = ", ".join(name for name, count in found.items() if count)
            raise UsageError(
                f"--place {idle[0]}: no worker of that name is started, only: {started or NONE}; place one of these, "
                f"or write {idle[0]}=1 in --workers"
            )
        return found

    def goes_first(self, worker: str) -> bool:
        """Whether a worker of these roles is placed before others."""
        return bool((roles_of(worker) or self.first) & self.first)


class PlacedWorker(msgspec.Struct, frozen=True):
    """A worker to start and the most that it has loaded at a time; device `cuda:0+cuda:1` is for two ranks."""

    role: str
    device: str
    parts: tuple[ComponentMemory, ...]

    @property
    def devices(self) -> list[str]:
        """The device of each rank."""
        return self.device.split("+")

    @property
    def on_cpu(self) -> bool:
        """Whether it runs on the CPU."""
        return only_cpu([self.device])

    def takes(self, wanted: WorkerPlan) -> Counter[str]:
        """The bytes that it takes, by device, without activations."""
        ranks, weights = len(self.devices), sum(part.bytes for part in self.parts)
        host = ranks * PROCESS + wanted.arena
        if self.on_cpu:
            return Counter({CPU: host + sum(part.bytes * (ranks if part.parted else 1) for part in self.parts)})
        offload = wanted.compute.offload
        if offload == "none":
            return Counter(dict.fromkeys(self.devices, CONTEXT + weights) | {CPU: host})
        resident = max((part.resident(offload) for part in self.parts), default=0)
        return Counter(dict.fromkeys(self.devices, CONTEXT + resident) | {CPU: host + weights})


def parse_place(text: str) -> dict[str, tuple[str, ...]]:
    """Devices by role, of `encoder=cuda:0,denoiser=cuda:0,denoiser=cuda:1`. Raises ConfigError.

    `denoiser=cuda:0+cuda:1` is one worker, with a rank on each.
    """
    found: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, text.split(",")):
        role, _, devices = entry.partition("=")
        if not role.strip() or not devices.strip():
            raise UsageError(f"--place {text}: {entry!r} is not ROLE=DEVICE")
        found[role.strip()] = (*found.get(role.strip(), ()), numbered(devices))
    return found


def parse_workers(text: str) -> dict[str, int] | None:
    """Return the counts of a plan like `all=2` or `encoder+decoder=1,denoiser=2`, none of "none", None of "split".

    Raises ConfigError.
    """
    if text == SPLIT:
        return None
    if text == NONE:
        return {}
    found: dict[str, int] = {}
    for entry in filter(None, text.split(",")):
        role, equals, count = (part.strip() for part in entry.partition("="))
        roles_of(role)
        if role in found or (equals and not (count.isdecimal() and int(count) <= MOST)):
            raise UsageError(f"--workers {text}: {entry!r} is not ROLE=N, each role once and N at most {MOST}")
        found[role] = int(count or 1)
    if not found:
        raise UsageError(f"--workers {text!r}: write auto, none, split, or a plan like all=2 or encoder=1,denoiser=2")
    return found


def devices_of(role: str, wanted: WorkerPlan, devices: Sequence[Device]) -> tuple[str, ...]:
    """The devices a role may run on: those named for it, else `--device`, else every GPU, else the CPU.

    Where `--device` names ranks, roles that are not spread may run on any of them.
    """
    if role in wanted.place:
        return wanted.place[role]
    if wanted.compute.device != "auto":
        named = numbered(wanted.compute.device)
        return (named,) if own_spreads(wanted.compute.parallel, roles_of(role)) else (*dict.fromkeys(named.split("+")),)
    return tuple(device.name for device in devices if device.name != CPU) or (CPU,)


def only_cpu(devices: Iterable[str]) -> bool:
    """Whether no GPU is among these, ranks' devices included."""
    return all(device == CPU for names in devices for device in names.split("+"))


def place(needs: Needs, wanted: WorkerPlan, devices: Sequence[Device]) -> tuple[PlacedWorker, ...]:
    """The workers to start, each on a device that has room for it and for the others there.

    A role has a worker for each device that was named for it, and takes turns if more are wanted; the rest go where
    most is free, those of the roles that are `first` before others. Workers that have one model loaded at a time take
    turns over all devices. With `--offload model`, roles that would share a GPU are one worker of all, so that one
    component at a time is on it. Raises ConfigError for a device that is not there and for what cannot fit: it says the
    sums, what is free, and what would help.
    """
    if not any(wanted.numbers(needs).values()):
        return ()
    if wanted.max_loaded_models == "1":
        needs = _largest_model(needs)
    placed = _arrange(needs, wanted, devices)
    if wanted.compute.offload != "none" and all(worker.on_cpu for worker in placed):
        raise ConfigError(f"--offload {wanted.compute.offload} needs a GPU: on a CPU weights are in host memory anyway")
    if short := _short(placed, wanted, devices):
        raise ConfigError(_refusal(short, placed, needs, wanted, devices))
    return placed


def taken(placed: Sequence[PlacedWorker], wanted: WorkerPlan) -> Counter[str]:
    """The bytes that these workers take together, by device."""
    return sum(each_takes(placed, wanted), Counter())


def each_takes(placed: Sequence[PlacedWorker], wanted: WorkerPlan) -> list[Counter[str]]:
    """The bytes that each of these workers takes, by device; what several map counts for the first of them."""
    known: set[ComponentMemory] = set()
    found = []
    for worker in placed:
        mapped = {part for part in worker.parts if part.mapped and worker.on_cpu}
        found.append(worker.takes(wanted) - Counter({CPU: sum(part.bytes for part in mapped & known)}))
        known |= mapped
    return found


def _arrange(needs: Needs, wanted: WorkerPlan, devices: Sequence[Device]) -> tuple[PlacedWorker, ...]:
    room = {device.name: device.free for device in devices}
    placed: list[PlacedWorker] = []
    counts = wanted.numbers(needs)
    for role in sorted(counts, key=lambda role: not wanted.goes_first(role)):
        able = devices_of(role, wanted, devices)
        if missing := sorted({name for names in able for name in names.split("+")} - {*room}):
            raise ConfigError(f"{NO_DEVICE} {missing[0]} for the {role}; there are {', '.join(room)}")
        named, spreads = wanted.place.get(role, ()), own_spreads(wanted.compute.parallel, roles_of(role))
        turns = named or (able if wanted.max_loaded_models == "1" else ())
        for number in range(max(counts[role], len(named))):
            name = turns[number % len(turns)] if turns else _roomiest(able, room, spreads)
            worker = PlacedWorker(role, "+".join(ranked(name, spreads)), parts_of(role, needs, spreads))
            placed.append(worker)
            for where, size in worker.takes(wanted).items():
                room[where] -= size
    order = list(counts)
    return _together(sorted(placed, key=lambda worker: order.index(worker.role)), needs, wanted)


def _largest_model(needs: Needs) -> Needs:
    """What the roles of the largest model hold. Workers do not map it together: each may have another model loaded."""

    def of_model(name: str) -> Needs:
        own = {role: (part for part in parts if name in part.models) for role, parts in needs.items()}
        return {role: tuple(replace(part, mapped=False) for part in parts) for role, parts in own.items()}

    models = dict.fromkeys(name for parts in needs.values() for part in parts for name in part.models)
    return max(map(of_model, models), key=lambda own: sum(part.bytes for part in parts_of(ALL, own, {})), default=needs)


def _roomiest(able: Sequence[str], room: Mapping[str, int], spreads: Mapping[str, ParallelDegrees]) -> str:
    """Where most is free: one device, or of GPUs as many as there are ranks."""
    ordered = sorted(able, key=lambda name: -min(room[one] for one in name.split("+")))
    size = next((spread.size for spread in spreads.values()), 1)
    if size == 1 or ordered[0] == CPU or "+" in ordered[0]:
        return ordered[0]
    if size > len(ordered):
        said = ",".join(f"{role}={spread}" for role, spread in spreads.items())
        raise ConfigError(f"--parallel {said} needs {size} GPUs, and there are {len(ordered)}: {', '.join(able)}")
    return "+".join(ordered[:size])


def parts_of(role: str, needs: Needs, spreads: Mapping[str, ParallelDegrees]) -> tuple[ComponentMemory, ...]:
    """What a worker with these roles holds, or each of its ranks."""
    roles, spread = roles_of(role), {name: spreads.get(name, ParallelDegrees()) for name in needs}
    own = [(name, part) for name, parts in needs.items() if roles is None or name in roles for part in parts]
    held = [part for _, part in own]
    parts = [(name, part) for at, (name, part) in enumerate(own) if not (part.once and part in held[:at])]
    return tuple(part.of_rank(spread[name]) for name, part in parts)


def _together(placed: list[PlacedWorker], needs: Needs, wanted: WorkerPlan) -> tuple[PlacedWorker, ...]:
    """One worker for all roles of a GPU whose components take turns."""
    gpus = dict.fromkeys(worker.device for worker in placed if not worker.on_cpu)
    for gpu in gpus if wanted.compute.offload == "model" else ():
        here = {worker.role: worker.parts for worker in placed if worker.device == gpu}
        if here.keys() == needs.keys() and len(here) > 1:
            whole = PlacedWorker(ALL, gpu, tuple(part for parts in here.values() for part in parts))
            placed = [*(worker for worker in placed if worker.device != gpu), whole]
    return tuple(placed)


def _short(placed: Sequence[PlacedWorker], wanted: WorkerPlan, devices: Sequence[Device]) -> list[Device]:
    needed = taken(placed, wanted)
    return [device for device in devices if needed[device.name] > device.free]


def _refusal(
    short: list[Device], placed: Sequence[PlacedWorker], needs: Needs, wanted: WorkerPlan, devices: Sequence[Device]
) -> str:
    sums = []
    takes = each_takes(placed, wanted)
    for device in short:
        each = [(worker.role, take[device.name]) for worker, take in zip(placed, takes, strict=True)]
        shares = " + ".join(f"{role} {readable_bytes(size)}" for role, size in each if size)
        total = readable_bytes(sum(size for _, size in each))
        sums.append(f"{device.name} would hold {total} ({shares}) and has {readable_bytes(device.free)} free")
    others = [f"{device.name} has {readable_bytes(device.free)} free" for device in devices if device not in short]
    ways = [way for way, other, less in _ways(needs, wanted, devices) if _fits(other, less, devices)]
    helps = f"it would fit with {', or with '.join(ways)}" if ways else (
        "none of fewer workers, --arena, --dtype, --parallel, --offload and --place is enough alone: "
        "it takes more memory"
    )  # fmt: skip
    return f"the models do not fit: {'; '.join([*sums, *others])}; activations come on top; {helps}"


def _fits(needs: Needs, wanted: WorkerPlan, devices: Sequence[Device]) -> bool:
    with suppress(ConfigError):  # of ranks there are more than devices
        return not _short(_arrange(needs, wanted, devices), wanted, devices)
    return False


def _ways(needs: Needs, wanted: WorkerPlan, devices: Sequence[Device]) -> Iterator[tuple[str, Needs, WorkerPlan]]:
    """What a person could do if the workers do not fit, and what would then be needed and wanted."""
    numbers = wanted.numbers(needs)
    counts = {role: min(1, count) for role, count in numbers.items()}
    if counts != numbers:
        yield "one worker for each role", needs, replace(wanted, counts=counts)
    yield "--arena 64MiB", needs, replace(wanted, arena=min(64 << 20, wanted.arena))
    halved = {role: tuple(part.stored_as("bfloat16") for part in parts) for role, parts in needs.items()}
    yield "--dtype bfloat16", halved, wanted
    roles = [role for role in numbers if not only_cpu(devices_of(role, wanted, devices))]
    spreads = parse_parallel(wanted.compute.parallel)
    parted = {role for role, spread in spreads.items() if {*PARTING} & {*spread.degrees}}
    for role in sorted(wanted.parted - parted):
        spread = spreads.get(role, ParallelDegrees())
        more = spreads | {role: ParallelDegrees({**spread.degrees, SHARD: max(2, spread.size)})}
        text = ",".join(f"{role}={how}" for role, how in more.items())
        yield f"--parallel {text}", needs, replace(wanted, compute=replace(wanted.compute, parallel=text))
    offloads: tuple[Offload, ...] = ("model", "sequential") if roles and not parted else ()
    for offload in offloads:
        yield f"--offload {offload}", needs, replace(wanted, compute=replace(wanted.compute, offload=offload))
    for role in roles:
        whose = roles_of(role)
        moved = {
            name: tuple(part.stored_as("float32") for part in parts) if whose is None or name in whose else parts
            for name, parts in needs.items()
        }
        yield f"--place {role}={CPU}", moved, replace(wanted, place={**wanted.place, role: (CPU,)})


def numbered(name: str) -> str:
    """One device, or those of ranks, with the number that a kind alone stands for."""
    return "+".join(f"{one}:0" if one != CPU and ":" not in one else one for one in map(str.strip, name.split("+")))
