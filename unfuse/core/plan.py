"""Pipelines and execution plans: a model's graph of stages, and that graph compiled for one request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from hashlib import blake2b

import msgspec

from unfuse.core.codec import encode
from unfuse.core.errors import ConfigError
from unfuse.core.media import Room, Work, Workload
from unfuse.core.parameters import Params as Params, Value as Value

ALL = "all"
"""What a worker of every role is started with."""


class StageSpec(msgspec.Struct, frozen=True):
    """A node of a pipeline, and all that is known of its kind.

    `components` are the folders its workers load; the first names its pool. `inputs` and `outputs` are value names that
    join stages. A stage with `per_sample` runs once for each picture of a request, the others once a request.
    `reads` names all parameters that the output of a stage without inputs depends on (an upload goes by its hash, under
    its name): requests with the same values may then share one. Without it, or with inputs, each has its own.
    Workers that are started with `role` run it, and hold `slots` tasks at a time unless they are told otherwise: some
    run, the inputs of the others come. `needs` is what a task takes of resources that workers name.
    """

    name: str
    kind: str
    components: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    per_sample: bool = False
    room: Room = Room()
    reads: tuple[str, ...] = ()
    role: str = ""
    slots: int = 2
    work: Workload = Workload()
    needs: dict[str, Room] = {}


class Pipeline(msgspec.Struct, frozen=True):
    """A model's graph of stages."""

    stages: tuple[StageSpec, ...]

    def validate(self) -> None:
        """Raise ConfigError unless names join without a circle, every output is made once and results are written."""
        producers = self.producers()
        if len({stage.name for stage in self.stages}) != len(self.stages):
            raise ConfigError("two stages of the pipeline have one name")
        if dotted := [stage.name for stage in self.stages if "." in stage.name]:
            raise ConfigError(f"stage names hold no dot (it sets a picture's index apart), unlike {', '.join(dotted)}")
        if all(stage.outputs for stage in self.stages):
            raise ConfigError("no stage of the pipeline is without outputs: none writes results")
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
            if not stage.per_sample and any(producers[name].per_sample for name in stage.inputs):
                raise ConfigError(f"stage {stage.name} runs once a request but reads a stage that runs once a picture")

    def producers(self) -> dict[str, StageSpec]:
        """Which stage makes which output."""
        return {name: stage for stage in self.stages for name in stage.outputs}


class PlannedStage(msgspec.Struct, frozen=True):
    """A stage of one request: where it waits, which stages it comes after, what is particular to it.

    `params` override the request's (a sample has its own seed and index); `room` is the predicted bytes of its output;
    `final` stages write results. `cache` is the key under which other requests find its output, "" if none is to.
    `cost` is what it was predicted to take when the request came, in seconds of compute; `work` is how much it has to
    do (0, 0 in a request of a version that did not write it down), `needs` what it takes of other resources.
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


class ExecutionPlan(msgspec.Struct, frozen=True):
    """A pipeline compiled for one request, in an order in which it could run."""

    stages: tuple[PlannedStage, ...]

    def stage(self, name: str) -> PlannedStage:
        """The stage of that name. Raises KeyError."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    def moved(self, pools: Mapping[str, str]) -> ExecutionPlan:
        """The plan with other pools for these stages, by name, which share no output with others there."""
        return ExecutionPlan(
            tuple(
                stage if pool == stage.pool else msgspec.structs.replace(stage, pool=pool, cache="")
                for stage in self.stages
                for pool in [pools.get(stage.name, stage.pool)]
            )
        )

    def consumers(self, name: str) -> tuple[PlannedStage, ...]:
        """The stages that read the output of `name`."""
        return tuple(stage for stage in self.stages if name in stage.after)


def pool_name(stage: StageSpec, weights: Mapping[str, str], dtypes: Mapping[str, str]) -> str:
    """The pool that a card declares for a stage: the workers for one kind of one component in one dtype."""
    component = stage.components[0]
    return f"{stage.kind}:{weights[component][:12]}:{dtypes[component]}"


class Choice(msgspec.Struct, frozen=True):
    """Which stages a worker runs: those of some roles (None: any), and of some components (none: any)."""

    roles: frozenset[str] | None = None
    components: tuple[str, ...] = ()

    def takes(self, stage: StageSpec) -> bool:
        """Whether a stage is one of them: the component that names its pool decides."""
        of_role = self.roles is None or stage.role in self.roles
        return of_role and (not self.components or stage.components[0] in self.components)


def roles_of(text: str) -> frozenset[str] | None:
    """The roles of a worker that is started with `a`, or with `a+b`; None, which is all of them, for ALL.

    Raises ConfigError for what names none.
    """
    roles = [role.strip() for role in text.split("+")]
    if not all(roles):
        raise ConfigError(f"{text!r} is no role: write one such as denoiser, several as encoder+decoder, or {ALL}")
    return None if ALL in roles else frozenset(roles)


def slots_of(roles: frozenset[str] | None, stages: Iterable[StageSpec]) -> int:
    """Tasks that a worker of these roles holds at a time unless it is told otherwise: the least that one role has."""
    return min((stage.slots for stage in stages if roles is None or stage.role in roles), default=1)


def cache_key(*parts: object) -> str:
    """128 bits, as hex, of everything that an output depends on. Raises ProtocolError for what is no message."""
    return blake2b(encode(parts), digest_size=16).hexdigest()


def compile_plan(
    pipeline: Pipeline,
    pools: Mapping[str, str],
    params: Params,
    samples: Iterable[Params],
    shared_by: tuple[str, ...] | None = None,
) -> ExecutionPlan:
    """Fan a validated pipeline out over the samples of one request.

    `pools` maps stage names to pools; `samples` holds what differs between the pictures of the request. `shared_by`
    says, beside what a stage reads, which requests may share its output; None: this one shares none.
    """
    producers = pipeline.producers()
    order = TopologicalSorter({s.name: [producers[n].name for n in s.inputs] for s in pipeline.stages}).static_order()
    specs = {spec.name: spec for spec in pipeline.stages}
    each = list(samples)
    planned: list[PlannedStage] = []
    for spec in (specs[name] for name in order):
        room = spec.room.bytes(params)
        for index, own in enumerate(each if spec.per_sample else [{}]):
            feeds = dict.fromkeys(producers[name].name for name in spec.inputs)
            after = tuple(f"{name}.{index}" if specs[name].per_sample else name for name in feeds)
            name = f"{spec.name}.{index}" if spec.per_sample else spec.name
            read = [(key, (params | own).get(key)) for key in sorted(spec.reads) if not spec.inputs]
            cache = cache_key(shared_by, pools[spec.name], read) if read and shared_by is not None else ""
            planned.append(
                PlannedStage(
                    name, spec.kind, pools[spec.name], after, own, room, not spec.outputs, cache,
                    work=spec.work.of(params), needs={name: need.bytes(params) for name, need in spec.needs.items()},
                )
            )  # fmt: skip
    return ExecutionPlan(tuple(planned))
