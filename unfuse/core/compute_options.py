"""Settings of compute processes, and the parallel degrees of `--parallel`.

The settings are equal for all stages of a worker. The kinds of parallelism are CFG parallel (`cfg`), pipeline parallel
(`layers`), sequence parallel (`ring` and `ulysses`), tensor parallel (`tensor`), spatial tiles of the VAE (`tiles`) and
FSDP (`shard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd, prod
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.offload_options import offloaded
from unfuse.core.plan import ROLE_GROUPS, StageSpec

PARALLEL_KINDS = ("cfg", "layers", "ring", "ulysses", "tensor", "tiles", "shard")
"""The kinds of parallelism, outermost first: neighbouring ranks belong to one group of the last kind."""

SHARD = "shard"
"""FSDP: weights are sharded over ranks that compute different data."""

OVERLAY_KINDS = ("tiles", SHARD)
"""Kinds that reuse the ranks of the other kinds. They add ranks only if no other kind is named."""

SHARDING_KINDS = ("layers", SHARD)
"""Kinds whose degree divides the bytes of weights on each rank."""

WEIGHT_SPLITTING_KINDS = (*SHARDING_KINDS, "tensor")
"""Kinds whose ranks do not each have all weights."""

RESIDENT_KINDS = ("layers", "tensor")
"""Kinds whose ranks keep their part of the weights on the device. FSDP can offload it."""

MAX_RANKS = 64  # the most ranks of a worker
AUTO = "auto"  # value of --parallel: as many ranks as the worker has devices, see `choose_parallel`


class ParallelDegrees(msgspec.Struct, frozen=True):
    """How a stage is spread over ranks: the degree of each kind of parallelism."""

    #: By kind. Empty: the stage is on one rank.
    degrees: Mapping[str, int] = {}

    @property
    def ranks(self) -> Mapping[str, int]:
        """The degrees whose product is the number of ranks."""
        base_degrees = {kind: degree for kind, degree in self.degrees.items() if kind not in OVERLAY_KINDS}
        return base_degrees or dict([*self.degrees.items()][:1])

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.ranks.values())

    @property
    def parts(self) -> int:
        """The number of shards of the weights. Each rank has one."""
        return prod(self.degrees.get(kind, 1) for kind in SHARDING_KINDS)

    def __str__(self) -> str:
        return "+".join(f"{kind}:{degree}" for kind, degree in self.degrees.items())

    @classmethod
    def parse(cls, text: str) -> ParallelDegrees:
        """Return the degrees in a text like `ulysses:2+cfg:2`. Raises ConfigError."""
        degrees: dict[str, int] = {}
        for entry in text.split("+"):
            kind, _, degree = (part.strip() for part in entry.partition(":"))
            if kind not in PARALLEL_KINDS or kind in degrees:
                raise UsageError(
                    f"--parallel: {entry!r} is not KIND:N; kinds are {', '.join(PARALLEL_KINDS)}, each once"
                )
            if not degree.isdecimal() or not 2 <= int(degree) <= MAX_RANKS:
                raise UsageError(f"--parallel: {entry!r} needs a number of ranks from 2 to {MAX_RANKS} after {kind}:")
            degrees[kind] = int(degree)

        ordered = cls({kind: degrees[kind] for kind in PARALLEL_KINDS if kind in degrees})
        if ordered.size > MAX_RANKS:
            raise UsageError(f"--parallel: {text} needs {ordered.size} ranks, but a worker has at most {MAX_RANKS}")
        return ordered

    def smaller(self) -> ParallelDegrees:
        """Return degrees for half of the ranks.

        If the degree of the last kind cannot be halved, that kind is left out.
        """
        *others, (kind, degree) = self.ranks.items()
        ranks = dict(others) if degree % 2 or degree == 2 else {**dict(others), kind: degree // 2}
        overlays = {kind: gcd(self.degrees.get(kind, 1), prod(ranks.values())) for kind in OVERLAY_KINDS}
        return ParallelDegrees(ranks | {kind: degree for kind, degree in overlays.items() if degree > 1})

    def refusal(self, allowed: Mapping[str, int]) -> str:
        """Return why a stage does not support these degrees, with advice; "" if it does.

        `allowed` is as `StageSpec.parallelism`: by kind, the number that the degree must divide (0: any degree), or,
        for `layers`, the largest degree. With `ulysses` and `tensor`, both degrees together must divide the heads.
        """
        if len(splitting := [kind for kind in WEIGHT_SPLITTING_KINDS if kind in self.degrees]) > 1:
            return f"{' and '.join(splitting)} cannot be combined, because both split the weights: use one of them"

        for kind, degree in self.degrees.items():
            if kind not in allowed:
                return f"{kind} is not supported for this role; supported: {', '.join(sorted(allowed)) or 'none'}"
            divisible = allowed[kind] // (self.degrees.get("tensor", 1) if kind == "ulysses" else 1)
            # overlay kinds use the ranks of the other kinds, so their degree must divide the number of ranks
            divisible = self.size if kind in OVERLAY_KINDS else divisible
            if kind == "layers" and degree > divisible:
                return f"{kind}:{degree} exceeds the number of blocks: use {kind}:{divisible}"
            if kind != "layers" and divisible and divisible % degree:
                divisors = (divisor for divisor in range(2, divisible + 1) if divisible % divisor == 0)
                nearest = min(divisors, key=lambda divisor: (abs(divisor - degree), divisor), default=1)
                advice = f"use {kind}:{nearest}" if nearest > 1 else f"leave {kind} out"
                return f"{kind}:{degree} does not divide {divisible}: {advice}"
        return ""


def parse_parallel(text: str) -> dict[str, ParallelDegrees]:
    """Return the degrees of each role in a text like `denoiser=ulysses:2+cfg:2,decoder=tiles:2`.

    Raises ConfigError.
    """
    if text == AUTO:
        raise UsageError(f"--parallel {AUTO} configures one worker: use it with `unfuse worker`, or set ROLE=KIND:N")
    spreads: dict[str, ParallelDegrees] = {}
    for entry in filter(None, text.split(",")):
        role, _, degrees = (part.strip() for part in entry.partition("="))
        roles = ROLE_GROUPS.get(role, (role,))
        if not role or not degrees or not spreads.keys().isdisjoint(roles):
            raise UsageError(f"--parallel {text}: {entry!r} is not ROLE=KIND:N, with each role at most once")
        spreads |= dict.fromkeys(roles, ParallelDegrees.parse(degrees))
    return spreads


def joined_by(text: str) -> dict[str, str]:
    """Return, by role, the name in `--parallel` that stands for it and other roles.

    These roles share one worker: `language` stands for `prefill` and `decode`.
    """
    names = {entry.partition("=")[0].strip() for entry in text.split(",")}
    return {role: name for name in names for role in ROLE_GROUPS.get(name, ())}


def worker_parallelism(text: str, roles: frozenset[str] | None) -> dict[str, ParallelDegrees]:
    """Return the degrees that `--parallel` sets for a worker of these roles (None: all roles).

    Raises ConfigError if the roles need different numbers of ranks, and if roles that share one model differ.
    """
    spreads = {role: spread for role, spread in parse_parallel(text).items() if roles is None or role in roles}
    if len(sizes := {spread.size for spread in spreads.values()}) > 1:
        raise UsageError(
            f"--parallel {text}: the roles of a worker must have the same number of ranks, not {sorted(sizes)}"
        )
    for group, members in ROLE_GROUPS.items():
        if (roles is None or roles.issuperset(members)) and len({str(spreads.get(role)) for role in members}) > 1:
            raise UsageError(
                f"--parallel {text}: {' and '.join(members)} share the model of a worker: set {group}=KIND:N for both, "
                f"or start separate workers with --workers {','.join(f'{role}=1' for role in members)}"
            )
    return spreads


def split_devices(devices: str, option: str = "") -> tuple[str, ...]:
    """Return the devices in a text like `cuda:0+cuda:1`.

    Raises ConfigError if a GPU is in it twice. `cuda` is `cuda:0`. `option`: the option and its value, for the message.
    The default is `--device` with `devices`.
    """
    names = tuple(device.strip() for device in devices.split("+"))
    gpus = [name if ":" in name else f"{name}:0" for name in names if name not in ("auto", "cpu")]
    if repeated := sorted({name for name in gpus if gpus.count(name) > 1}):
        raise UsageError(
            f"{option or f'--device {devices}'}: two ranks cannot use the same GPU, and {repeated[0]} is named twice"
        )
    return names


def rank_devices(devices: str, spreads: Mapping[str, ParallelDegrees]) -> tuple[str, ...]:
    """Return the device of each rank of a worker.

    `devices` is a text like `cpu`, `cpu+cpu` or `cuda:0+cuda:1`. `auto` and `cpu` stand for as many ranks as `spreads`
    need. Raises ConfigError for another number of devices than ranks, and for two ranks on one GPU.
    """
    names = split_devices(devices)
    size = next((spread.size for spread in spreads.values()), 1)
    if len(names) == 1 and names[0] in ("auto", "cpu"):
        names *= size
    if len(names) != size:
        parallel = ",".join(f"{role}={spread}" for role, spread in spreads.items()) or "not set"
        examples = f"{'+'.join(['cpu'] * size)} or {'+'.join(f'cuda:{n}' for n in range(size))}"
        raise UsageError(
            f"--device {devices}: a worker needs one device per rank, here {size} (--parallel: {parallel}), "
            f"such as {examples}"
        )
    return names


def smaller_layouts(devices: str, spreads: Mapping[str, ParallelDegrees]) -> Iterator[tuple[str, str]]:
    """Yield (devices, `--parallel`) for a worker that lacks some of its devices.

    A worker with a failed GPU can use the remaining ones. First come both halves of the devices, then the quarters, and
    so on down to one device.
    """
    names = devices.split("+")
    while spreads := {role: spread for role, spread in spreads.items() if spread.degrees}:
        spreads = {role: spread.smaller() for role, spread in spreads.items()}
        size = max(spread.size for spread in spreads.values())
        parallel = ",".join(f"{role}={spread}" for role, spread in spreads.items() if spread.degrees)
        subsets = ("+".join(names[start : start + size]) for start in range(0, len(names) - size + 1, size))
        yield from ((subset, parallel) for subset in dict.fromkeys(subsets))


def refuse(spreads: Mapping[str, ParallelDegrees], stages: Iterable[StageSpec], offload: str = "none") -> None:
    """Raise ConfigError if these stages do not support these degrees.

    The message names the supported degrees.
    A role that no stage has is refused too, and so are components that are offloaded although ranks split
    their weights by `layers` or `tensor`.
    """
    stages = list(stages)
    for role, spread in spreads.items():
        allowed_by_stage = [stage.parallelism for stage in stages if stage.role == role]
        components = dict.fromkeys(name for stage in stages if stage.role == role for name in stage.components)
        is_resident = any(kind in spread.degrees for kind in RESIDENT_KINDS)
        if is_resident and (moved := offloaded(offload, components)):
            exceptions = ",".join(f"{component}=none" for component in moved)
            others = f", or use {SHARD}" if all(SHARD in allowed for allowed in allowed_by_stage) else ""
            raise UsageError(
                f"--parallel {role}={spread} cannot be combined with --offload {offload}: leave one of them out, or "
                f"add {exceptions} to --offload{others}"
            )
        if not allowed_by_stage:
            known = ", ".join(dict.fromkeys(stage.role for stage in stages))
            raise UsageError(f"--parallel {role}={spread}: no stage has that role; roles are {known}")
        if refusal := spread.refusal(_common_spreads(allowed_by_stage)):
            raise ConfigError(f"--parallel {role}={spread}: {refusal}")


def choose_parallel(devices: int, stages: Iterable[StageSpec]) -> str:
    """Return the `--parallel` for most of these devices; "" for one rank.

    The role that computes in steps, such as a denoiser, decides the number of ranks: the largest one for which
    `_degree_options` has degrees that fit. Other roles of the worker get as many ranks if they can, else one.
    """
    stages = list(stages)
    allowed_by_role = {
        role: _common_spreads([stage.parallelism for stage in stages if stage.role == role]) for role in _roles(stages)
    }
    stepping_roles = {stage.role for stage in stages if stage.work.forwards}
    deciding_roles = [role for role in allowed_by_role if role in stepping_roles] or list(allowed_by_role)

    for size in range(min(devices, MAX_RANKS), 1, -1):
        spreads = {
            role: spread for role, allowed in allowed_by_role.items() if (spread := _fitting_degrees(size, allowed))
        }
        if spreads.keys() & {*deciding_roles}:
            return ",".join(f"{role}={spread}" for role, spread in spreads.items())
    return ""


def _roles(stages: Iterable[StageSpec]) -> dict[str, None]:
    """Return the roles of the stages, each once, in order."""
    return dict.fromkeys(stage.role for stage in stages)


def _common_spreads(allowed_by_stage: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the parallelism that all of several stages support, as in `StageSpec.parallelism`."""
    limits_by_kind = {
        kind: [allowed[kind] for allowed in allowed_by_stage]
        for kind in allowed_by_stage[0]
        if all(kind in allowed for allowed in allowed_by_stage)
    }
    # gcd(0, n) is n: a stage that allows any degree adds no condition
    return {kind: min(limits) if kind == "layers" else gcd(*limits) for kind, limits in limits_by_kind.items()}


def _fitting_degrees(size: int, allowed: Mapping[str, int]) -> ParallelDegrees | None:
    """Return the first of `_degree_options` that `allowed` permits; None if there is none."""
    candidates = (ParallelDegrees(degrees) for degrees in _degree_options(size))
    return next((degrees for degrees in candidates if not degrees.refusal(allowed)), None)


def _degree_options(size: int) -> Iterator[Mapping[str, int]]:
    """Yield degrees for this number of ranks, those with the least communication first.

    Each rank has all weights, except with `tensor`.
    """
    yield {"ulysses": size}
    yield {"tiles": size}
    for degree in range(size // 2, 1, -1):
        if size % degree == 0:
            yield {"ring": size // degree, "ulysses": degree}
    yield {"ring": size}
    yield {"tensor": size}
    yield {"cfg": size}


Batching = Literal["auto", "exact", "batched", "exact-or-batched"]
Fp32Precision = Literal["ieee", "tf32"]
Loop = Literal["normal", "overlapped"]
DecodeAttention = Literal["in-place", "gathered"]
MaxLoadedModels = Literal["1", "all"]

NATIVE_ATTENTION = "native"
"""The default of --attention: torch chooses a kernel by device, dtype and shape."""

DEFAULT_MAX_BATCH = 8  # the most tasks in one forward by default

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that decide whether OpenMP's threads spin or block while they wait for each other."""


def compute_environment(threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a compute process with this number of threads.

    It extends `environment`, which is the caller's. Libraries draw no progress bars. OpenMP threads block while they
    wait for each other, unless `environment` sets one of WAITING: a spinning thread occupies a core that the other
    thread may need.
    """
    thread_counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    wait_policy = {} if environment.keys() & {*WAITING} else {"OMP_WAIT_POLICY": "PASSIVE"}
    return {
        **environment,
        **wait_policy,
        **thread_counts,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


class ComputeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How compute processes run their stages."""

    device: Annotated[
        str,
        Meta(
            description="Device to compute on, such as cpu, cuda:0 or xpu:0. auto: a GPU if there is one, else the "
            "CPU. Several, such as cuda:0+cuda:1, are one for each rank of a worker.",
            extra={"level": "need"},
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        Meta(
            description="Data type of the weights, for all components or by component (bfloat16,vae=float32). auto: "
            "float32 on a CPU; on a GPU bfloat16, and float32 for the VAE. On an NVIDIA GPU without bfloat16: float16, "
            "and float32 for components that may overflow."
        ),
    ] = "auto"
    parallel: Annotated[
        str,
        Meta(
            description="Parallelism of the stages of a role over several ranks, such as denoiser=ulysses:2 or "
            "denoiser=ulysses:2+cfg:2. Each rank has its own compute process and device. Kinds: cfg, layers, ring, "
            "shard, tensor, tiles, ulysses. auto, for one worker: as many ranks as GPUs, if its stages support that."
        ),
    ] = ""
    collective_s: Annotated[
        float,
        Meta(
            description="Seconds that ranks wait for each other before all of them are restarted.",
            gt=0,
            extra={"level": "expert"},
        ),
    ] = 60.0
    threads: Annotated[
        int,
        Meta(
            description="CPU threads of each compute process. 0: `unfuse serve` divides the CPU cores among the "
            "processes, and `unfuse worker` uses 1.",
            ge=0,
        ),
    ] = 0
    offload: Annotated[
        str,
        Meta(
            description="What is stored in pinned host memory while the GPU does not use it: nothing (none), whole "
            "components (model), or each layer (sequential), which is slower and needs least GPU memory. For all "
            "components, or by component (text_encoder=model,vae=model). Results keep their bytes."
        ),
    ] = "none"
    batching: Annotated[
        Batching,
        Meta(
            description="exact: each request gets the same bytes as from the undivided pipeline; requests share a "
            "forward only where comparisons found no difference. batched: any requests may share a forward, and "
            "results are equal within a small tolerance. exact-or-batched: exact, until batches of three "
            "kinds of requests changed bytes in a pool; it is batched from then on. auto: batched for workers with "
            "only language models, else exact."
        ),
    ] = "auto"
    max_batch: Annotated[
        int,
        Meta(
            description="Maximum number of requests in one forward. 0: 8, and up to 256 sequences in decode.",
            ge=0,
            le=256,
        ),
    ] = 0
    loop: Annotated[
        Loop,
        Meta(
            description="Step loop of language models. overlapped: a separate thread sends each token, and stores each "
            "chunk of a prompt for prefix caching, while the next one is computed. normal: both are done before the "
            "next one is computed. Tokens are the same.",
            extra={"level": "expert"},
        ),
    ] = "overlapped"
    max_loras: Annotated[int, Meta(description="LoRA adapters that a denoiser keeps loaded.", ge=1, le=256)] = 4
    noise_device: Annotated[
        Literal["cpu", "cuda", "xpu", "mps"],
        Meta(
            description="Device that draws noise. cpu: the noise of torch.Generator('cpu') on every device; others: "
            "the noise is drawn on the device that computes."
        ),
    ] = "cpu"
    vae: Annotated[
        Literal["whole", "sliced", "tiled"],
        Meta(
            description="How the VAE processes pictures: at once (whole), one by one (sliced), or in tiles (tiled), "
            "which need less memory and change pixels near their borders."
        ),
    ] = "whole"
    exact_only: Annotated[
        bool,
        Meta(
            description="Fail a request whose VAE runs out of memory, instead of encoding or decoding in tiles, which "
            "change pixels."
        ),
    ] = False

    fp32_precision: Annotated[
        Fp32Precision,
        Meta(
            description="How products and convolutions of float32 weights compute on a CUDA device. ieee: in float32. "
            "tf32: their inputs are rounded to TF32 (10 bits), which is faster. Other devices always use float32.",
            extra={"level": "expert"},
        ),
    ] = "ieee"
    attention: Annotated[
        str,
        Meta(
            description="Kernels of the denoisers' attention, by diffusers' names: native (torch chooses), "
            "_native_cudnn, _native_flash, _native_efficient, _native_math, flash, flash_varlen, _flash_3, sage, "
            "xformers, and others. Never tried on a GPU.",
        ),
    ] = NATIVE_ATTENTION
    decode_attention: Annotated[
        DecodeAttention,
        Meta(
            description="How the texts of a batched decode step attend to their KV cache. in-place: in one call for "
            "each text. gathered: in one call for texts of similar length, over copies of at most 128 MiB. Results "
            "are equal within a small tolerance. Never tried on a GPU.",
            extra={"level": "expert"},
        ),
    ] = "in-place"

    @property
    def numerics(self) -> dict[str, str]:
        """The settings that change the bytes of a result.

        All workers of one scheduler must agree on them.
        """
        batching = "exact" if self.batching == "auto" else self.batching
        numerics: dict[str, str] = {"batching": batching, "noise-device": self.noise_device, "vae": self.vae}
        # Defaults are left out, so that pools have the same names as before these options.
        if self.attention != NATIVE_ATTENTION:
            numerics["attention"] = self.attention
        if self.decode_attention != "in-place":
            numerics["decode-attention"] = self.decode_attention
        return numerics
