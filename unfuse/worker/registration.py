"""Decides what a worker serves: its options, the models' cards, its stages and their pools."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import msgspec
import structlog

from unfuse.core.compute_options import (
    AUTO,
    USUAL_BATCH,
    ComputeOptions,
    MaxLoadedModels,
    choose_parallel,
    own_spreads,
    parse_parallel,
    ranked,
    refuse,
)
from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.messages import Registered, StorageLocations
from unfuse.core.model_spec import ModelSpec, is_path, name_of
from unfuse.core.plan import StageSelector, StageSpec, roles_of, slots_of
from unfuse.models import fetch
from unfuse.stores.results import sees
from unfuse.stores.tensor_store import TensorStore
from unfuse.transfer.base import TransferOptions
from unfuse.weights.hub import DownloadProgress
from unfuse.weights.source import is_local, resolve_source, split_name, with_components
from unfuse.wire.address import Trust
from unfuse.worker.compute_messages import LoadModels
from unfuse.worker.loaded_models import Models, Sets, States, states_of

log = structlog.get_logger(__name__)


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a worker.

    `role` is one role, several as `a+b`, or all; of `a,b` it has one loaded at a time, and of all models one where
    `max_loaded_models` is 1. With `components`, it runs only stages whose first component is one of them. It holds
    `slots` tasks at a time (0: the default of its role). `arena` and `kv` are in bytes; inputs of more than `buffer`
    tokens arrive in pieces; `resources` has the amounts of further named resources.
    Without `models`, the scheduler says what to serve.

    It talks to one of the `schedulers` at a time. Compute is killed if it makes no progress for `stall_s` seconds or
    takes more than `memory_limit` bytes (0: any). When the worker is drained, running tasks get `drain_timeout` seconds
    to finish. `transfer` says how objects move between nodes; workers of one node meet in the folder `run_dir`. Objects
    are freed when no scheduler has answered for `orphan_s` seconds. What outlives the process is in `data_dir`. Probes
    ask how it is at `health`, HOST:PORT. Of its one model, components come from `component_sources`. `gpus` is how
    many GPUs there are, counted for `--parallel auto` alone.
    """

    role: str
    schedulers: tuple[str, ...]
    node: str
    trust: Trust
    models: tuple[str, ...]
    components: tuple[str, ...]
    compute: ComputeOptions
    slots: int
    arena: int
    kv: int
    buffer: int
    resources: Mapping[str, int]
    stall_s: float
    memory_limit: int
    drain_timeout: float
    transfer: TransferOptions
    run_dir: str
    data_dir: str
    orphan_s: float
    health: str
    max_loaded_models: MaxLoadedModels
    gpus: int
    component_sources: Mapping[str, str]


class ServedStages(msgspec.Struct, frozen=True):
    """What a worker serves: models, their cards and pools; how many tasks it holds at a time; its ranks' devices.

    What its tasks of the declared pools in `read_here` make is read by others of its own. `states` are the states of
    the models' files before the cards were made.
    """

    models: Models
    cards: tuple[ModelSpec, ...]
    pools: tuple[str, ...]
    slots: int
    devices: tuple[str, ...]
    read_here: frozenset[str] = frozenset()
    states: States = {}
    parallel: str = ""


def decide_served(welcome: Registered, options: WorkerOptions, choice: StageSelector) -> ServedStages:
    """Decide what a worker of the chosen stages serves for this scheduler, and fetch its models.

    Raises ConfigError if their settings contradict, if there is nothing to serve, or a stage needs results that are not
    here.
    """
    compute = options.compute
    if welcome.outcome not in ({}, compute.outcome):
        wanted = " ".join(f"--{name} {value}" for name, value in welcome.outcome.items())
        raise ConfigError(f"the workers of one scheduler must have equal settings: start this one with {wanted}")
    offered, own = {model[0]: model for model in welcome.models}, compute.dtype
    asked = [offered.get(name, (name, name, own)) for name in options.models]
    chosen = tuple((name, _source_here(name, source), dtype if own == "auto" else own)
                   for name, source, dtype in asked)  # fmt: skip
    if not (chosen or welcome.models):
        raise ConfigError("the scheduler serves no model yet: say which one with --model")
    sources = chosen or welcome.models
    if components := options.component_sources:
        if len(sources) > 1:
            raise UsageError("--component-source is for one model: name it by --model")
        name, source, dtype = sources[0]
        sources = ((name, with_components(split_name(source)[0], components), dtype),)
    folders = [resolve_source(source or name) for name, source, _ in sources if is_local(source or name)]
    states = dict(chain.from_iterable(states_of(folder).items() for folder in folders))
    found = [(*fetch(name, choice, source, dtype=dtype, tell=_tell), dtype) for name, source, dtype in sources]
    cards = tuple(card for card, _, _ in found)
    models = tuple((card.name, str(folder), dtype) for card, folder, dtype in found)
    stages = [stage for card in cards for stage in card.pipeline.stages if choice.takes(stage)]
    device, parallel = choose_ranks(compute.device, compute.parallel, options.gpus, stages)
    spreads = own_spreads(parallel, choice.roles)
    refuse(spreads, [stage for card in cards for stage in card.pipeline.stages], compute.offload)
    refuse_unseen(stages, welcome.places)
    batch = (
        (compute.max_batch or USUAL_BATCH)
        if compute.batching == "batched" or any(stage.shares for stage in stages)
        else 1
    )
    slots = max(options.slots or slots_of(stages), batch + 1)
    devices = ranked(device, spreads)
    pools = pools_of(cards, choice, options.resources)
    return ServedStages(models, cards, pools, slots, devices, _read_here(cards, choice), states, parallel)


def choose_ranks(device: str, parallel: str, gpus: int, stages: Sequence[StageSpec]) -> tuple[str, str]:
    """Return the devices of a worker and how its stages are spread: as they say, or with `auto` over most devices.

    The devices are those that `device` names, else the machine's `gpus`.
    """
    if parallel != AUTO:
        return device, parallel
    named = device.split("+")
    there = gpus if device == "auto" else len(named)
    chosen = choose_parallel(there, stages)
    ranks = max((spread.size for spread in parse_parallel(chosen).values()), default=1)
    log.info("chose ranks by the number of devices", devices=there, ranks=ranks, parallel=chosen or "none")
    if ranks < there:
        log.warning(
            "some devices are not used: give the worker fewer, or choose by --parallel ROLE=KIND:N",
            devices=there, used=ranks, stages=[stage.name for stage in stages],
        )  # fmt: skip
    return device if device == "auto" else "+".join(named[:ranks]), chosen


def _source_here(name: str, offered: str) -> str:
    """Return what a model that `--model` names is found by.

    That is where the scheduler says that it is, if that is here. Otherwise it is its name, if it is here by that,
    unless components come from elsewhere. A name that an admin gave a model may be that of something else here.
    """
    is_its_own = is_path(name) or name_of(offered).partition("@")[0] == name
    is_by_name = is_its_own and is_local(name) and not is_local(offered) and not split_name(offered)[1]
    return name if is_by_name else offered


def refuse_unseen(stages: Sequence[StageSpec], places: StorageLocations) -> None:
    """Raise ConfigError for stages that need the result store, where that is another machine's folder."""
    needing = sorted({stage.role for stage in stages if stage.needs_results})
    if needing and not sees(places.results, places.mark):
        raise ConfigError(
            f"results are in {places.results} on the scheduler's machine, which this one does not see, and the role "
            f"{needing[0]} needs them: share that folder at the same path, have the scheduler serve with "
            "--results s3://BUCKET/PREFIX, or leave that role to its machine"
        )


def _read_here(cards: Sequence[ModelSpec], choice: StageSelector) -> frozenset[str]:
    """The declared pools of the chosen stages whose outputs chosen stages read."""
    found = set[str]()
    for card in cards:
        pools, producers = card.pools(choice), card.pipeline.producers()
        made = {producers[name].name for stage in card.pipeline.stages if choice.takes(stage) for name in stage.inputs}
        found |= {pools[name] for name in made & pools.keys()}
    return frozenset(found)


def loads_of(
    served: ServedStages, choice: StageSelector, options: WorkerOptions, store: TensorStore, places: StorageLocations
) -> list[LoadModels]:
    """What each rank is to load."""
    replace = msgspec.structs.replace
    own = store.owner, store.node, store.address, store.write_token
    load = LoadModels(served.models, choice, options.compute, *own, places, options.run_dir, options.data_dir)
    load = replace(load, ranks=len(served.devices), kv=options.kv, registered=frozenset(served.pools))
    return [
        replace(load, rank=rank, compute=replace(options.compute, device=device, parallel=served.parallel))
        for rank, device in enumerate(served.devices)
    ]


def _tell(brought: DownloadProgress) -> None:
    """Log how far a download is; who shows that in one place need not show each line."""
    log.info("fetching", passing=True, **msgspec.structs.asdict(brought))


def pools_of(cards: Sequence[ModelSpec], choice: StageSelector, resources: Collection[str] = ()) -> tuple[str, ...]:
    """The declared pools of the chosen stages.

    Raises ConfigError for a role that no stage has, a choice without a stage, or a stage whose resource is missing.
    """
    stages = [stage for card in cards for stage in card.pipeline.stages]
    known = {stage.role for stage in stages}
    if unknown := sorted((choice.roles or set()) - known):
        raise ConfigError(f"no stage has the role {unknown[0]}: roles are {', '.join(sorted(known))}")
    pools = tuple(dict.fromkeys(pool for card in cards for pool in card.pools(choice).values()))
    if not pools:
        role, named = "+".join(sorted(choice.roles or {"all"})), sorted({stage.components[0] for stage in stages})
        raise ConfigError(f"no stage is both --role {role} and --component: components are {', '.join(named)}")
    for stage in filter(choice.takes, stages):
        if missing := sorted(stage.needs.keys() - resources - {*stage.brings}):
            raise ConfigError(
                f"stage {stage.name} needs the resource {missing[0]}, of which this worker has none: "
                f"start it with --resources {missing[0]}=N"
            )
    return pools


def sets_of(served: ServedStages, options: WorkerOptions) -> Sets:
    """The sets of a worker: a model each, or of `a,b` a role each; none if there is one. Raises ConfigError."""
    parts, cards = options.role.split(","), served.cards
    one_model = options.max_loaded_models == "1"
    if one_model and len(parts) > 1:
        raise ConfigError(
            f"--max-loaded-models 1 and --role {options.role} both say what is loaded at a time: leave one out"
        )
    if one_model:
        choice = StageSelector(roles_of(options.role), options.components)
        found = {card.name: {*card.pools(choice).values()} for card in cards}
    else:
        chosen = {part.strip(): StageSelector(roles_of(part), options.components) for part in parts}
        found = {name: {pool for card in cards for pool in card.pools(one).values()} for name, one in chosen.items()}
    sets = {name: frozenset(pools) for name, pools in found.items() if pools}
    return sets if len(sets) > 1 else {}
