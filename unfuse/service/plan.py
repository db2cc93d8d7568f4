"""Plans what to start, by the models' JSON files and the headers of their weights. No weights are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from unfuse.core.card import ModelCard
from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.object_ref import DTYPES
from unfuse.core.plan import ALL, Pipeline, StageSpec, roles_of
from unfuse.core.spread import SHARD, parse_parallel, refuse
from unfuse.models import card_of, find, resolve_source
from unfuse.models.encoders import shared_of
from unfuse.planning.layout import SWAP, Layouts, Means, layouts
from unfuse.planning.placement import (
    Device,
    Part,
    Placed,
    Wanted,
    devices_of,
    only_cpu,
    parse_place,
    parse_workers,
    place,
    taken,
)
from unfuse.service.groups import SHARED_ARENA, Settings
from unfuse.service.size import Size
from unfuse.stages.specs import PREFILL
from unfuse.weights.folder import STORED, ModelFolder, choose_dtypes, parse_dtypes
from unfuse.weights.gguf_model import files_of
from unfuse.weights.source import with_components

AUTO, SPLIT, NONE = "auto", ("split", "true"), ("none", "false")
"""Values of `--workers`: what fits, and is fastest; one worker for each role; no workers."""


class Component(msgspec.Struct, frozen=True):
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


class Model(msgspec.Struct, frozen=True):
    """A model and its components. `dtypes` is `--dtype` with "auto" replaced by a type."""

    card: ModelCard
    folder: Path
    dtypes: str
    components: dict[str, Component]


class Plan(msgspec.Struct, frozen=True):
    """Which workers would serve what; `refusal` says why there are none. The first device is the host.

    `layouts` are those among which one was chosen, if it was left to us.
    """

    models: tuple[Model, ...]
    needs: dict[str, tuple[Part, ...]]
    wanted: Wanted
    devices: tuple[Device, ...]
    workers: tuple[Placed, ...]
    refusal: str = ""
    layouts: Layouts | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Every component of every worker, with its bytes."""
        return [
            {
                "worker": number, "role": worker.role, "device": worker.device, "component": part.component,
                "dtype": part.dtype, "memory": Size(part.bytes), "models": part.models,
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
            {"device": device.name, "takes": Size(takes[device.name]), "free": Size(device.free)}
            for device in self.devices if takes[device.name]
        ]  # fmt: skip


def wanted(settings: Settings) -> Wanted:
    """The workers that these settings ask for. Raises ConfigError."""
    serve, text = settings.serve, settings.serve.workers
    counts = {"encoder": serve.encoders, "denoiser": serve.denoisers, "decoder": serve.decoders}
    named, arena = parse_place(serve.place), settings.arena.bytes or SHARED_ARENA
    if text in NONE:
        return Wanted({}, {}, settings.compute, split=False)
    changed = sorted(f"--{role}s" for role, count in counts.items() if count != 1)
    if text in SPLIT or (text == AUTO and (changed or named or settings.compute.parallel)):
        return Wanted(counts, named, settings.compute, arena)
    if text == AUTO:
        return Wanted({}, {}, settings.compute, arena, auto=True)
    if text == SWAP and (settings.compute.parallel or named):
        raise UsageError("--workers swap is one worker on each device: leave out --parallel and --place")
    if changed:
        raise UsageError(f"--workers {text} and {changed[0]} both say how many: leave one out")
    if text == SWAP:
        return Wanted({ALL: 1}, {}, settings.compute, arena, split=False, swap=True)
    return Wanted(parse_workers(text), named, settings.compute, arena, split=False)


def plan_for(
    names: Iterable[str], revision: str, wanted: Wanted, devices: tuple[Device, ...], means: Means | None = None,
    *, results: bool = True, sources: Mapping[str, str] = MappingProxyType({}),
) -> Plan:  # fmt: skip
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
        looked = layouts([model.card for model in models], needed, wanted, devices, means or Means())
        wanted = looked.chosen.of(wanted)
    try:
        placed = place(needed, wanted, devices)
        if not results:
            placed = tuple(replace(one, role="+".join(needed) if one.role == ALL else one.role) for one in placed)
        return Plan(models, needed, wanted, devices, placed, layouts=looked)
    except ConfigError as error:
        return Plan(models, needed, wanted, devices, (), str(error), looked)


def roles_apart(cards: Iterable[ModelCard]) -> tuple[str, ...]:
    """The roles of which no stage needs the result store, so that they may run where it is not seen."""
    stages = [stage for card in cards for stage in card.pipeline.stages]
    needing = {stage.role for stage in stages if stage.needs_results}
    return tuple(dict.fromkeys(stage.role for stage in stages if stage.role not in needing))


def _without_results(models: Iterable[Model]) -> tuple[Model, ...]:
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
    names: Iterable[str], revision: str, wanted: Wanted, devices: Sequence[Device],
    sources: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Model, ...]:  # fmt: skip
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
        found.append(Model(card_of(name, folder, text), folder, text, components))
    return tuple(found)


def _component(files: ModelFolder, name: str, dtype: str) -> Component:
    tensors, kind, width = files.tensors(name), files.class_of(name), DTYPES[dtype]
    elements = {tensor: number for tensor, (_, number) in tensors.items()}
    shared, whole = shared_of(name, kind, find(files.path).cut, elements), sum(elements.values())
    mapped, memory = files.has(name, dtype), whole * width
    if files.is_quantised(name):  # in memory as in its files, but for floats that become wider
        stored = {STORED[one]: DTYPES[one] for one in STORED}
        memory = files.size(name) + sum(n * max(width - stored.get(is_, width), 0) for is_, n in tensors.values())
    return Component(name, kind, whole, files.size(name), dtype, memory, mapped, shared * width)


def explicit_dtypes(card: ModelCard, spec: str, on_gpu: Collection[str]) -> dict[str, str]:
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


def needs(models: Iterable[Model]) -> dict[str, tuple[Part, ...]]:
    """What a worker of each role holds: every pool of its stages once, even if several models share it."""
    pools: dict[str, dict[str, tuple[StageSpec, Model]]] = {}
    for model in models:
        for stage in model.card.pipeline.stages:
            pools.setdefault(model.card.pools()[stage.name], {})[model.card.name] = (stage, model)
    found: dict[str, tuple[Part, ...]] = {}
    for users in pools.values():
        stage, model = next(iter(users.values()))
        held, once = (model.components[name] for name in stage.components), files_of(model.folder).is_whole
        parts = tuple(
            Part(one.name, one.dtype, one.memory, tuple(users), one.mapped, one.shared, once)
            for one in held
            if one.memory
        )
        found[stage.role] = (*found.get(stage.role, ()), *parts, *_texts(stage, model, tuple(users)))
    return found


def _texts(stage: StageSpec, model: Model, users: tuple[str, ...]) -> Iterator[Part]:
    """Keys and values of the longest text, for which a stage that makes or takes them has room at the least."""
    for name in PREFILL.outputs:
        if name in (*stage.inputs, *stage.outputs):
            producer = model.card.pipeline.producers()[name]
            size = producer.room.bytes({"prompt_tokens": int(model.card.limits["max_tokens"])})
            dtype = model.components[stage.components[0]].dtype
            yield Part("keys and values", dtype, size, users, shared=size, once=True)
