"""Pipelines, execution plans and pools: a model's graph of stages, and that graph compiled for one request.

Workers of one pool are interchangeable: they make the same bytes. A model's card declares the pool of a stage: the
stage kind, and the weights and dtype of its component. Workers add the hash of their outcome, which is everything else
that results depend on: `denoise:1f2e3d4c5b6a:float32@0a1b2c3d`. A pool that no worker has served yet has no outcome,
nor has one whose workers report none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from hashlib import blake2b
from typing import Literal

import msgspec

from unfuse.core.codec import encode
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import ConfigError
from unfuse.core.modalities import OutputSize, Work, Workload
from unfuse.core.parameters import Params as Params, Value as Value
from unfuse.core.vision import MediaItem

ALL = "all"  # the role of a worker that runs all stages
NOTHING_DERIVED = DerivedFacts()
TOGETHER = {"language": ("prefill", "decode")}  # words for several roles


class StageSpec(msgspec.Struct, frozen=True):
    """A node of a pipeline, and everything that unfuse knows about its kind.

    `components` are the folders that its workers load; the first names its pool. `inputs` and `outputs` are names of
    values; a stage that reads a value depends on the stage that makes it. A `per_sample` stage runs once for each
    picture of a request, the others once a request. `reads` names all parameters that the output depends on (an upload
    by the hash of its bytes): requests with equal values share one output. A stage with inputs, or without `reads`,
    shares nothing. Parameters here are those of the request, and what the server derives from it
    (`DerivedFacts.values`).
    Workers of the role `role` run this stage and hold `slots` tasks at a time by default: some run,
    the others wait for their inputs. `needs` says how much of further named resources a task takes; those that it
    `brings`, workers have by themselves, as much as they found room for. Requests may share forwards of
    a stage that `shares` also where each has to get the bytes that it has alone. It `spreads` over ranks by
    these kinds, each with what their number must divide (0: nothing), or of `layers` their most. A stage that
    `goes_on` can begin behind what others have made of the same beginning: see `Stage.prefix_blocks`. A stage that
    `extends` an input adds prefix blocks to those of the stage that makes this input. A stage for `each`
    picture or video that a prompt shows has that one alone in its Derived; who reads it reads all.
    One that takes `uploads` reads what the gateway keeps of a request in the result store. One with a `when` is there
    only for requests that have this parameter.
    """

    name: str
    kind: str
    components: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    per_sample: bool = False
    room: OutputSize = OutputSize()
    reads: tuple[str, ...] = ()
    role: str = ""
    slots: int = 2
    work: Workload = Workload()
    needs: dict[str, OutputSize] = {}
    brings: tuple[str, ...] = ()
    shares: bool = False
    spreads: dict[str, int] = {}
    goes_on: bool = False
    extends: str = ""
    each: Literal["", "shown"] = ""
    uploads: bool = False
    when: str = ""

    @property
    def needs_results(self) -> bool:
        """Whether it reads from the result store, or writes to it."""
        return self.uploads or not self.outputs


class Pipeline(msgspec.Struct, frozen=True):
    """A model's graph of stages."""

    stages: tuple[StageSpec, ...]

    def validate(self) -> None:
        """Raise ConfigError unless the stages form a graph without cycles whose last stage writes results."""
        producers = self.producers()
        if len({stage.name for stage in self.stages}) != len(self.stages):
            raise ConfigError("two stages of the pipeline have the same name")
        if dotted := [stage.name for stage in self.stages if "." in stage.name]:
            raise ConfigError(f"stage names have no dot (a picture's index follows one): {', '.join(dotted)}")
        if all(stage.outputs for stage in self.stages):
            raise ConfigError("every stage of the pipeline has outputs: none writes results")
        if sum(len(stage.outputs) for stage in self.stages) != len(producers):
            raise ConfigError("two stages of the pipeline make the same output")
        missing = sorted({name for stage in self.stages for name in stage.inputs} - set(producers))
        if missing:
            raise ConfigError(f"no stage of the pipeline makes {', '.join(missing)}")
        try:
            TopologicalSorter({s.name: {producers[name].name for name in s.inputs} for s in self.stages}).prepare()
        except CycleError as error:
            raise ConfigError(f"the pipeline's stages wait for each other: {' → '.join(error.args[1])}") from error
        for stage in self.stages:
            if stage.extends and stage.extends not in stage.inputs:
                raise ConfigError(f"stage {stage.name} extends {stage.extends}, which is not one of its inputs")
            if not stage.per_sample and any(producers[name].per_sample for name in stage.inputs):
                raise ConfigError(f"stage {stage.name} runs once a request but reads a stage that runs once a picture")

    def spread(self, kinds: Mapping[str, dict[str, int]]) -> Pipeline:
        """The pipeline whose stages of these kinds may be spread so."""
        return Pipeline(
            tuple(msgspec.structs.replace(stage, spreads=kinds.get(stage.kind, stage.spreads)) for stage in self.stages)
        )

    def producers(self) -> dict[str, StageSpec]:
        """The stage that makes each output, by the name of the output."""
        return {name: stage for stage in self.stages for name in stage.outputs}


class PlannedStage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stage of one request: its pool, and the stages that it comes `after`.

    `params` override the request's (a sample has its own seed and index). `room` is the predicted bytes of its output.
    `final` stages write results. `cache` is the key under which other requests find its output ("": they do not).
    `cost` is the predicted seconds of compute, at the time the request came. `work` is how much it has to do. `needs`
    is what it takes of further named resources. `prefixes` are the keys under which others find what it makes on the
    way, in the order in which it makes that. `extends` is the `prefix_space` of the prefix blocks that it adds to
    those of another stage ("": it adds none). `derived` takes the place of the request's (None: it has the request's).
    """

    name: str
    kind: str
    pool: str
    after: tuple[str, ...]
    params: Params
    room: int
    final: bool
    cache: str = ""
    cost: float = 0.0
    work: Work = (0.0, 0.0)
    needs: dict[str, int] = {}
    prefixes: tuple[str, ...] = ()
    extends: str = ""
    derived: DerivedFacts | None = None


class ExecutionPlan(msgspec.Struct, frozen=True):
    """A pipeline compiled for one request; each stage stands behind those that it comes after."""

    stages: tuple[PlannedStage, ...]

    def stage(self, name: str) -> PlannedStage:
        """The stage of that name. Raises KeyError."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    def moved(self, pools: Mapping[str, str]) -> ExecutionPlan:
        """The plan with other pools for some stages, by stage name. A moved stage shares its output no longer."""
        moved = {stage.name for stage in self.stages if pools.get(stage.name, stage.pool) != stage.pool}
        stages: list[PlannedStage] = []
        for stage in self.stages:
            if stage.name in moved:
                stage = msgspec.structs.replace(stage, pool=pools[stage.name], cache="", prefixes=(), extends="")
            elif moved & {*stage.after}:
                stage = msgspec.structs.replace(stage, extends="")
            stages.append(stage)
        return ExecutionPlan(tuple(stages))

    def consumers(self, name: str) -> tuple[PlannedStage, ...]:
        """The stages that read the output of `name`."""
        return tuple(stage for stage in self.stages if name in stage.after)


def pool_name(stage: StageSpec, weights: Mapping[str, str], dtypes: Mapping[str, str]) -> str:
    """The pool that a card declares for a stage: its kind, and the weights and dtype of its first component."""
    component = stage.components[0]
    return f"{stage.kind}:{weights[component][:12]}:{dtypes[component]}"


class StageSelector(msgspec.Struct, frozen=True):
    """Which stages a worker runs: those of these roles (None: any) and of these components (empty: any)."""

    roles: frozenset[str] | None = None
    components: tuple[str, ...] = ()

    def takes(self, stage: StageSpec) -> bool:
        """Whether the worker runs this stage; of its components, only the first counts."""
        of_role = self.roles is None or stage.role in self.roles
        return of_role and (not self.components or stage.components[0] in self.components)


def roles_of(text: str) -> frozenset[str] | None:
    """The roles in `a`, `a+b` or `a,b`; None, which means all, for ALL. Raises ConfigError for an empty role."""
    roles = [role.strip() for role in text.replace(",", "+").split("+")]
    if not all(roles):
        raise ConfigError(f"{text!r} is not a role: write one such as denoiser, several as encoder+decoder, or {ALL}")
    return None if ALL in roles else frozenset(one for role in roles for one in TOGETHER.get(role, (role,)))


def slots_of(stages: Iterable[StageSpec]) -> int:
    """How many tasks a worker of these stages holds at a time by default: the least of their `slots`."""
    return min((stage.slots for stage in stages), default=1)


def cache_key(*parts: object) -> str:
    """A hash (128 bits, as hex) of what an output depends on. Raises ProtocolError for what cannot be encoded."""
    return blake2b(encode(parts), digest_size=16).hexdigest()


def prefix_space(shared_by: tuple[str, ...], pool: str) -> str:
    """What the keys of all prefix blocks have in common that stages of a pool make for those requests."""
    return cache_key(shared_by, pool)


def prefix_key(space: str, digest: str) -> str:
    """The key under which a prefix block is found; the digest identifies everything up to its end."""
    return cache_key(space, digest)


def compile_plan(
    pipeline: Pipeline,
    pools: Mapping[str, str],
    params: Params,
    samples: Iterable[Params],
    shared_by: tuple[str, ...] | None = None,
    begins: Sequence[str] = (),
    derived: DerivedFacts = NOTHING_DERIVED,
) -> ExecutionPlan:
    """Compile a validated pipeline for one request.

    `pools` maps stage names to pools. `samples` holds, for each picture, the parameters that are its own. `derived` is
    what the server derives from the request. Requests with
    equal `shared_by` may share outputs of stages that read the same values (None: this request shares none), and what
    stages that go on make of the same beginnings: `begins` has the digest of each, the shortest first.
    """
    producers = pipeline.producers()
    order = TopologicalSorter({s.name: [producers[n].name for n in s.inputs] for s in pipeline.stages}).static_order()
    specs = {spec.name: spec for spec in pipeline.stages}
    own_of, known = list(samples), params | derived.values()
    runs = {spec.name: _runs(spec, known, own_of, derived) for spec in pipeline.stages}
    planned: list[PlannedStage] = []
    for spec in (specs[name] for name in order):
        sources = dict.fromkeys(producers[name].name for name in spec.inputs)
        keys = begins if spec.goes_on and shared_by is not None else ()
        space = prefix_space(shared_by or (), pools[spec.name])
        for index, (name, own, shown) in enumerate(runs[spec.name]):
            given = known | own | (msgspec.structs.asdict(shown) if shown else {})
            read = [(key, given.get(key)) for key in sorted(spec.reads)]
            is_shared = read and not spec.inputs and shared_by is not None
            before = (runs[one][index : index + 1] if specs[one].per_sample else runs[one] for one in sources)
            planned.append(
                PlannedStage(
                    name=name,
                    kind=spec.kind,
                    pool=pools[spec.name],
                    after=tuple(one for several in before for one, *_ in several),
                    params=own,
                    room=spec.room.bytes(given),
                    final=not spec.outputs,
                    cache=cache_key(shared_by, pools[spec.name], read) if is_shared else "",
                    work=spec.work.of(given),
                    needs={name: need.bytes(given) for name, need in spec.needs.items()},
                    prefixes=tuple(prefix_key(space, digest) for digest in keys),
                    extends=_extended(spec, producers, pools, shared_by),
                    derived=DerivedFacts(shown=(shown,)) if shown else None,
                )
            )
    return ExecutionPlan(tuple(planned))


def _extended(
    spec: StageSpec, producers: Mapping[str, StageSpec], pools: Mapping[str, str], shared_by: tuple[str, ...] | None
) -> str:
    """The space of the prefix blocks that a stage adds; "" if nobody shares them, or a pool makes other bytes."""
    if not spec.extends or shared_by is None:
        return ""
    source = pools[producers[spec.extends].name]
    return prefix_space(shared_by, source) if outcome_of(source) == outcome_of(pools[spec.name]) else ""


def _runs(
    spec: StageSpec, known: Params, samples: Sequence[Params], derived: DerivedFacts
) -> list[tuple[str, Params, MediaItem | None]]:
    """Each run of a stage: its name, the parameters of its sample, and what of the prompt it is for.

    Runs for equal pictures are one.
    """
    if spec.when and known.get(spec.when) is None:
        return []
    if spec.each:
        return [(f"{spec.name}.{index}", {}, one) for index, one in enumerate(dict.fromkeys(derived.shown))]
    if spec.per_sample:
        return [(f"{spec.name}.{index}", own, None) for index, own in enumerate(samples)]
    return [(spec.name, {}, None)]


def manned(pool: str, outcome: Mapping[str, str]) -> str:
    """The name of a declared pool for workers of this outcome."""
    if not outcome:
        return pool
    return f"{pool}@{blake2b(encode(sorted(outcome.items())), digest_size=4).hexdigest()}"


def declared(pool: str) -> str:
    """The name of the pool without its outcome. Workers of equal declared pools can do the same tasks."""
    return pool.partition("@")[0]


def outcome_of(pool: str) -> str:
    """The hash of the outcome in a pool's name, "" if it has none."""
    return pool.partition("@")[2]
