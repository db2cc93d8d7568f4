"""Pipelines, execution plans and pools: graphs of stages, compiled for requests.

The workers of one pool are interchangeable: they produce the same bytes. A model spec declares the pool of a stage by
its stage kind, and the class, weights and dtype of its component. Workers add the hash of their numerics, which is
everything else that results depend on: `vae_decode:AutoencoderKL:1f2e3d4c5b6a:float32@0a1b2c3d`. The id has no such
hash while no worker has served the pool, and for workers that report no numerics. Code uses this id. People see the
name that `readable_pool` makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
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

ALL_STAGES = "all"  # the role of a worker that runs all stages
NOTHING_DERIVED = DerivedFacts()
ROLE_GROUPS = {"language": ("prefill", "decode")}  # names for several roles

MAX_LABEL = 63  # characters of a DNS label
MAX_KIND, MAX_DTYPE = 24, 16  # characters of these parts of a readable name; the class may use the rest
_WORDS = re.compile(  # of a class's name: Autoencoder KL, T5 Encoder, Unet 2D Condition
    r"""\d+D(?![a-z])
    | (?: [A-Z]+(?![a-z]) | [A-Z]?[a-z]+ ) (?: \d+ (?! \d | D(?![a-z]) ) )?
    | \d+""",
    re.VERBOSE,
)


class StageSpec(msgspec.Struct, frozen=True):
    """A node of a pipeline: its kind, role, inputs, output size, work and parallelism.

    Parameters here are those of the request and the facts that the server derives from it (`DerivedFacts.values`).
    """

    #: Unique within the pipeline, without a dot.
    name: str
    #: Stage kind, such as denoise. It selects the code that runs the stage.
    kind: str
    #: Folders of the components that its workers load. The first one names the pool.
    components: tuple[str, ...]
    #: Names of the values that it reads. It depends on the stages that produce them.
    inputs: tuple[str, ...] = ()
    #: Names of the values that it produces. A stage without outputs writes results.
    outputs: tuple[str, ...] = ()
    #: Whether it runs once for each sample (each result of a request), and not once for the request.
    per_sample: bool = False
    #: Predicted bytes of its output.
    output_size: OutputSize = OutputSize()
    #: All parameters that the output depends on (an upload by the hash of its bytes). Requests with equal values share
    #: one output. A stage with inputs, or without `depends_on_params`, shares no output.
    depends_on_params: tuple[str, ...] = ()
    #: Role of the workers that run the stage, such as denoiser.
    role: str = ""
    #: Default number of tasks of a worker: some run, the others wait for their inputs.
    slots: int = 2
    #: Predicted work.
    work: Workload = Workload()
    #: Amounts of further named resources that a task needs.
    needs: dict[str, OutputSize] = {}
    #: Resources, out of `needs`, that workers provide by themselves, in the amount for which they have memory.
    provides: tuple[str, ...] = ()
    #: Whether requests may share a forward even in an exact pool, where each must get the bytes that it has alone.
    batch_invariant: bool = False
    #: Kinds of parallelism that it supports. The value is the number that the degree must divide (0: any degree), or,
    #: for `layers`, the largest degree.
    parallelism: dict[str, int] = {}
    #: Prefix caching: whether it can start after prefix blocks that other tasks computed (`Stage.prefix_blocks`).
    prefix_cached: bool = False
    #: Name of an input: it adds prefix blocks to those of the stage that produces this input. "": it adds none.
    extends_prefix_of: str = ""
    #: "shown": it runs once for each picture or video in the prompt, which is the only one in the derived facts of that
    #: run. A reader of its output reads the outputs of all runs. "": it runs once for a request or sample.
    per_item: Literal["", "shown"] = ""
    #: Whether it reads the request's uploads from the result store.
    uploads: bool = False
    #: Name of a parameter: the stage runs only for requests that have it. "": it always runs.
    only_with: str = ""

    @property
    def needs_results(self) -> bool:
        """Whether it reads from the result store, or writes to it."""
        return self.uploads or not self.outputs


class Pipeline(msgspec.Struct, frozen=True):
    """A model's graph of stages."""

    #: The stages, in any order. Their inputs and outputs connect them.
    stages: tuple[StageSpec, ...]

    def validate(self) -> None:
        """Raise ConfigError unless the stages form a graph without cycles whose last stage writes results."""
        producers = self.producers()

        if len({stage.name for stage in self.stages}) != len(self.stages):
            raise ConfigError("two stages of the pipeline have the same name")
        if dotted := [stage.name for stage in self.stages if "." in stage.name]:
            raise ConfigError(f"stage names cannot have a dot (a picture's index follows one): {', '.join(dotted)}")
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
            raise ConfigError(f"the pipeline's stages form a cycle: {' → '.join(error.args[1])}") from error

        for stage in self.stages:
            if stage.extends_prefix_of and stage.extends_prefix_of not in stage.inputs:
                raise ConfigError(
                    f"stage {stage.name} extends {stage.extends_prefix_of}, which is not one of its inputs"
                )
            if not stage.per_sample and any(producers[name].per_sample for name in stage.inputs):
                raise ConfigError(f"stage {stage.name} runs once per request, but an input once per picture")

    def with_parallelism(self, kinds: Mapping[str, dict[str, int]]) -> Pipeline:
        """Return the pipeline with other `StageSpec.parallelism` for the stage kinds in `kinds`."""
        return Pipeline(
            tuple(
                msgspec.structs.replace(stage, parallelism=kinds.get(stage.kind, stage.parallelism))
                for stage in self.stages
            )
        )

    def producers(self) -> dict[str, StageSpec]:
        """Return the stage that produces each output, by the name of the output."""
        return {name: stage for stage in self.stages for name in stage.outputs}


class PlannedStage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stage of one request, with its pool and parameters."""

    #: Unique within the plan: the name of its spec, with ".N" for run N of a stage that runs several times.
    name: str
    #: Stage kind.
    kind: str
    #: Id of the pool whose workers run it.
    pool: str
    #: Names of the stages whose outputs it reads.
    after: tuple[str, ...]
    #: Parameters that override the request's: a sample has its own seed and index.
    params: Params
    #: Predicted bytes of its output.
    output_size: int
    #: Whether it writes results.
    final: bool
    #: Key in the encoder cache, under which other requests find its output; "": it is not shared.
    cache_key: str = ""
    #: Seconds of compute, as predicted when the request arrived.
    cost: float = 0.0
    #: Predicted work.
    work: Work = (0.0, 0.0)
    #: Amounts of further named resources that it needs.
    needs: dict[str, int] = {}
    #: Keys in the prefix cache of the prefix blocks that it computes, in order.
    prefixes: tuple[str, ...] = ()
    #: `prefix_space` of the prefix blocks that it adds to those of another stage; "": it adds none.
    extends_prefix_of: str = ""
    #: Replaces the request's derived facts; None: it has those of the request.
    derived: DerivedFacts | None = None


class ExecutionPlan(msgspec.Struct, frozen=True):
    """A pipeline compiled for one request."""

    #: The stages. Each one follows all stages whose outputs it reads.
    stages: tuple[PlannedStage, ...]

    def stage(self, name: str) -> PlannedStage:
        """Return the stage of that name. Raises KeyError."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    def with_pools(self, pools: Mapping[str, str]) -> ExecutionPlan:
        """Return the plan with other pools for some stages, by stage name.

        A moved stage shares no outputs and no prefix blocks, since its numerics may differ. A stage that reads its
        output adds no prefix blocks either.
        """
        moved = {stage.name for stage in self.stages if pools.get(stage.name, stage.pool) != stage.pool}
        stages: list[PlannedStage] = []
        for stage in self.stages:
            if stage.name in moved:
                stage = msgspec.structs.replace(
                    stage, pool=pools[stage.name], cache_key="", prefixes=(), extends_prefix_of=""
                )
            elif moved & {*stage.after}:
                stage = msgspec.structs.replace(stage, extends_prefix_of="")
            stages.append(stage)
        return ExecutionPlan(tuple(stages))

    def consumers(self, name: str) -> tuple[PlannedStage, ...]:
        """Return the stages that read the output of `name`."""
        return tuple(stage for stage in self.stages if name in stage.after)


def pool_name(
    stage: StageSpec, weights: Mapping[str, str], dtypes: Mapping[str, str], classes: Mapping[str, str]
) -> str:
    """Return the id of the pool that a model spec declares for a stage.

    It has the stage kind, and the class, weights and dtype of the stage's first component.
    """
    component = stage.components[0]
    class_name = re.sub(r"\W", "", classes.get(component, ""))
    return f"{stage.kind}:{class_name}:{weights[component][:12]}:{dtypes[component]}"


@lru_cache(maxsize=4096)
def readable_pool(pool: str) -> str:
    """Return the name of a pool that people see, from the pool's id.

    It is a DNS label of at most 63 characters, with the stage kind, the component's class, the dtype and a hash of the
    id: `vae-decode-autoencoder-kl-bf16-3049ab12`.
    """
    parts = declared_pool(pool).split(":")
    class_name = parts[1] if len(parts) == 4 else ""
    words = _WORDS.findall(class_name.removesuffix("Model").replace("UNet", "Unet"))
    dtype = re.sub(r"^(b?)float(?=\d)", r"\1f", parts[-1] if len(parts) > 1 else "")
    digest = blake2b(pool.encode(errors="surrogatepass"), digest_size=4).hexdigest()

    kind_label, dtype_label = _label(parts[0], MAX_KIND), _label(dtype, MAX_DTYPE)
    max_class_chars = MAX_LABEL - len(f"{kind_label}--{dtype_label}-{digest}")
    return "-".join(filter(None, (kind_label, _label("-".join(words), max_class_chars), dtype_label, digest)))


def _label(text: str, max_chars: int) -> str:
    """Return a text as a part of a DNS label, cut to `max_chars` characters."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:max_chars].strip("-")


class StageSelector(msgspec.Struct, frozen=True):
    """Which stages a worker runs."""

    #: Roles of the stages; None: any role.
    roles: frozenset[str] | None = None
    #: Components of the stages; empty: any component.
    components: tuple[str, ...] = ()

    def selects(self, stage: StageSpec) -> bool:
        """Whether the worker runs this stage. Of the stage's components, only the first counts."""
        has_role = self.roles is None or stage.role in self.roles
        return has_role and (not self.components or stage.components[0] in self.components)


def roles_of(text: str) -> frozenset[str] | None:
    """Return the roles in `a`, `a+b` or `a,b`; None for `all`, which means all roles.

    A name of several roles stands for these (ROLE_GROUPS). Raises ConfigError for an empty role.
    """
    roles = [role.strip() for role in text.replace(",", "+").split("+")]
    if not all(roles):
        raise ConfigError(
            f"{text!r} is not a role: write one such as denoiser, several as encoder+decoder, or {ALL_STAGES}"
        )
    return None if ALL_STAGES in roles else frozenset(name for role in roles for name in ROLE_GROUPS.get(role, (role,)))


def slots_of(stages: Iterable[StageSpec]) -> int:
    """Return the default number of tasks of a worker: the least `slots` of its stages."""
    return min((stage.slots for stage in stages), default=1)


def cache_key(*parts: object) -> str:
    """Return a hash (128 bits, as hex) of what an output depends on.

    Raises ProtocolError for a part that cannot be encoded.
    """
    return blake2b(encode(parts), digest_size=16).hexdigest()


def prefix_space(shared_by: tuple[str, ...], pool: str) -> str:
    """Return the common part of the keys of all prefix blocks that may be shared.

    These are the blocks that stages of this pool compute for requests with equal `shared_by`.
    """
    return cache_key(shared_by, pool)


def prefix_key(space: str, digest: str) -> str:
    """Return the key of a prefix block in the prefix cache.

    `digest` identifies all tokens up to the end of the block.
    """
    return cache_key(space, digest)


def compile_plan(
    pipeline: Pipeline,
    pools: Mapping[str, str],
    params: Params,
    samples: Iterable[Params],
    shared_by: tuple[str, ...] | None = None,
    prefix_digests: Sequence[str] = (),
    derived: DerivedFacts = NOTHING_DERIVED,
) -> ExecutionPlan:
    """Compile a validated pipeline for one request.

    - `pools`: the pool of each stage, by stage name.
    - `params`: parameters of the request.
    - `samples`: for each sample, its own parameters.
    - `shared_by`: requests with equal values may share outputs of stages that read the same values, and prefix blocks
      of equal prompts. None: this request shares nothing.
    - `prefix_digests`: digests of the prompt's prefix blocks, the shortest prefix first.
    - `derived`: facts that the server derived from the request.
    """
    producers = pipeline.producers()
    order = TopologicalSorter({s.name: [producers[n].name for n in s.inputs] for s in pipeline.stages}).static_order()
    specs = {spec.name: spec for spec in pipeline.stages}
    sample_params = list(samples)
    request_values = params | derived.values()
    runs = {spec.name: _runs(spec, request_values, sample_params, derived) for spec in pipeline.stages}

    planned: list[PlannedStage] = []
    for spec in (specs[name] for name in order):
        sources = dict.fromkeys(producers[name].name for name in spec.inputs)
        digests = prefix_digests if spec.prefix_cached and shared_by is not None else ()
        space = prefix_space(shared_by or (), pools[spec.name])

        for index, (name, overrides, item) in enumerate(runs[spec.name]):
            values = request_values | overrides | (msgspec.structs.asdict(item) if item else {})
            dependencies = [(key, values.get(key)) for key in sorted(spec.depends_on_params)]
            # the key covers parameters alone, and not the content of inputs
            is_shared = dependencies and not spec.inputs and shared_by is not None
            # sample N reads run N of a stage that runs once per sample, and all runs of any other stage
            source_runs = (
                runs[source][index : index + 1] if specs[source].per_sample else runs[source] for source in sources
            )
            planned.append(
                PlannedStage(
                    name=name,
                    kind=spec.kind,
                    pool=pools[spec.name],
                    after=tuple(source for stage_runs in source_runs for source, *_ in stage_runs),
                    params=overrides,
                    output_size=spec.output_size.bytes(values),
                    final=not spec.outputs,
                    cache_key=cache_key(shared_by, pools[spec.name], dependencies) if is_shared else "",
                    work=spec.work.of(values),
                    needs={resource: need.bytes(values) for resource, need in spec.needs.items()},
                    prefixes=tuple(prefix_key(space, digest) for digest in digests),
                    extends_prefix_of=_extended_space(spec, producers, pools, shared_by),
                    derived=DerivedFacts(media=(item,)) if item else None,
                )
            )
    return ExecutionPlan(tuple(planned))


def _extended_space(
    spec: StageSpec, producers: Mapping[str, StageSpec], pools: Mapping[str, str], shared_by: tuple[str, ...] | None
) -> str:
    """Return the prefix space of the blocks that a stage adds, or "".

    Blocks are not shared if the request shares nothing, or if the two pools have different numerics.
    """
    if not spec.extends_prefix_of or shared_by is None:
        return ""
    # keys and values of another rounding would change the bytes of answers
    source = pools[producers[spec.extends_prefix_of].name]
    return prefix_space(shared_by, source) if numerics_of(source) == numerics_of(pools[spec.name]) else ""


def _runs(
    spec: StageSpec, values: Params, samples: Sequence[Params], derived: DerivedFacts
) -> list[tuple[str, Params, MediaItem | None]]:
    """Return the runs of a stage as (name, sample's parameters, picture or video).

    Equal pictures share one run.
    """
    if spec.only_with and values.get(spec.only_with) is None:
        return []
    if spec.per_item:
        return [(f"{spec.name}.{index}", {}, item) for index, item in enumerate(dict.fromkeys(derived.media))]
    if spec.per_sample:
        return [(f"{spec.name}.{index}", overrides, None) for index, overrides in enumerate(samples)]
    return [(spec.name, {}, None)]


def pool_with_numerics(pool: str, numerics: Mapping[str, str]) -> str:
    """Return the id of a declared pool for workers of these numerics.

    It is the declared id, followed by "@" and a hash.
    """
    if not numerics:
        return pool
    return f"{pool}@{blake2b(encode(sorted(numerics.items())), digest_size=4).hexdigest()}"


def declared_pool(pool: str) -> str:
    """Return the id of a pool without the hash of its numerics.

    Workers of pools with equal declared ids can run the same tasks.
    """
    return pool.partition("@")[0]


def numerics_of(pool: str) -> str:
    """Return the hash of the numerics in a pool's id; "" if it has none."""
    return pool.partition("@")[2]
