"""Settings of compute processes, equal for all stages of a worker; and what `--parallel` says of their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd, prod
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.plan import TOGETHER, StageSpec

KINDS = ("cfg", "layers", "ring", "ulysses", "tensor", "tiles", "shard")
"""The kinds, outermost first: ranks that are next to each other share the last of them."""

SHARD = "shard"  # the kind that parts weights among ranks that compute different things
SHARING = ("tiles", SHARD)  # the kinds that take ranks that others make; only where there are no others they make ranks
HOLD = ("layers", SHARD)  # the kinds of which each rank holds a part of the weights
PARTING = (*HOLD, "tensor")  # the kinds that leave a rank without some weights
MOST = 64  # the most ranks of a worker
AUTO = "auto"  # as --parallel of a worker: as many ranks as it has devices, see `choose_parallel`


class ParallelDegrees(msgspec.Struct, frozen=True):
    """The degree of each kind. Without any, a stage is on one rank."""

    degrees: Mapping[str, int] = {}

    @property
    def ranks(self) -> Mapping[str, int]:
        """The degrees whose product is the number of ranks."""
        own = {kind: degree for kind, degree in self.degrees.items() if kind not in SHARING}
        return own or dict([*self.degrees.items()][:1])

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return prod(self.ranks.values())

    @property
    def parts(self) -> int:
        """Of so many parts of the weights a rank holds one."""
        return prod(self.degrees.get(kind, 1) for kind in HOLD)

    def __str__(self) -> str:
        return "+".join(f"{kind}:{degree}" for kind, degree in self.degrees.items())

    @classmethod
    def parse(cls, text: str) -> ParallelDegrees:
        """Of `ulysses:2+cfg:2`. Raises ConfigError."""
        degrees: dict[str, int] = {}
        for entry in text.split("+"):
            kind, _, degree = (part.strip() for part in entry.partition(":"))
            if kind not in KINDS or kind in degrees:
                raise UsageError(f"--parallel: {entry!r} is not KIND:N with a KIND of {', '.join(KINDS)}, each once")
            if not degree.isdecimal() or not 2 <= int(degree) <= MOST:
                raise UsageError(f"--parallel: {entry!r} needs a number of ranks from 2 to {MOST} behind {kind}:")
            degrees[kind] = int(degree)
        found = cls({kind: degrees[kind] for kind in KINDS if kind in degrees})
        if found.size > MOST:
            raise UsageError(f"--parallel: {text} is {found.size} ranks, and a worker has at most {MOST}")
        return found

    def smaller(self) -> ParallelDegrees:
        """One with half of the ranks, or with none of the last kind where that cannot be halved."""
        *others, (kind, degree) = self.ranks.items()
        ranks = dict(others) if degree % 2 or degree == 2 else {**dict(others), kind: degree // 2}
        shares = {kind: gcd(self.degrees.get(kind, 1), prod(ranks.values())) for kind in SHARING}
        return ParallelDegrees(ranks | {kind: share for kind, share in shares.items() if share > 1})

    def refusal(self, allowed: Mapping[str, int]) -> str:
        """Why a stage cannot be spread so; "" if it can. `allowed` has the kinds by which it can, each with the number
        that degrees must divide (0: any will do), or of `layers` the most, and names what would go instead. Heads are
        shared out twice by `ulysses` beside `tensor`.
        """
        if len(parting := [kind for kind in PARTING if kind in self.degrees]) > 1:
            return f"{' and '.join(parting)} both part the weights: leave one of them out"
        for kind, degree in self.degrees.items():
            if kind not in allowed:
                return f"it cannot be spread by {kind}, only by {', '.join(sorted(allowed)) or 'nothing'}"
            whole = allowed[kind] // (self.degrees.get("tensor", 1) if kind == "ulysses" else 1)
            whole = self.size if kind in SHARING else whole
            if kind == "layers" and degree > whole:
                return f"{kind}:{degree} is more than there are blocks: use {kind}:{whole}"
            if kind != "layers" and whole and whole % degree:
                fitting = (other for other in range(2, whole + 1) if whole % other == 0)
                near = min(fitting, key=lambda other: (abs(other - degree), other), default=1)
                other = f"use {kind}:{near}" if near > 1 else f"leave {kind} out"
                return f"{kind}:{degree} does not divide {whole}: {other}"
        return ""


def parse_parallel(text: str) -> dict[str, ParallelDegrees]:
    """How the stages of each role are spread, of `denoiser=ulysses:2+cfg:2,decoder=tiles:2`. Raises ConfigError."""
    if text == AUTO:
        raise UsageError(f"--parallel {AUTO} is for one worker: give it to `unfuse worker`, or write ROLE=KIND:N")
    found: dict[str, ParallelDegrees] = {}
    for entry in filter(None, text.split(",")):
        role, _, how = (part.strip() for part in entry.partition("="))
        roles = TOGETHER.get(role, (role,))
        if not role or not how or not found.keys().isdisjoint(roles):
            raise UsageError(f"--parallel {text}: {entry!r} is not ROLE=KIND:N, each role once")
        found |= dict.fromkeys(roles, ParallelDegrees.parse(how))
    return found


def joined_by(text: str) -> dict[str, str]:
    """Roles that `--parallel` names by one word, which is to be one worker, with that word."""
    named = {entry.partition("=")[0].strip() for entry in text.split(",")}
    return {role: word for word in named for role in TOGETHER.get(word, ())}


def own_spreads(text: str, roles: frozenset[str] | None) -> dict[str, ParallelDegrees]:
    """What `--parallel` says of a worker of these roles (None: all).

    Raises ConfigError if they differ in size, and for roles with one model that do not share it out alike.
    """
    own = {role: spread for role, spread in parse_parallel(text).items() if roles is None or role in roles}
    if len(sizes := {spread.size for spread in own.values()}) > 1:
        raise UsageError(
            f"--parallel {text}: one worker has one number of ranks, and its roles ask for {sorted(sizes)}"
        )
    for word, named in TOGETHER.items():
        if (roles is None or roles.issuperset(named)) and len({str(own.get(role)) for role in named}) > 1:
            raise UsageError(
                f"--parallel {text}: {' and '.join(named)} of one worker have one model: say {word}=KIND:N for both, "
                f"or give each a worker of its own, with --workers {','.join(f'{role}=1' for role in named)}"
            )
    return own


def ranked(devices: str, spreads: Mapping[str, ParallelDegrees]) -> tuple[str, ...]:
    """The device of each rank of a worker that is so spread, of `cpu`, `cpu+cpu` or `cuda:0+cuda:1`.

    With auto, each finds its own. Raises ConfigError for a number that does not fit, and for two ranks on one GPU.
    """
    named = tuple(device.strip() for device in devices.split("+"))
    size = next((spread.size for spread in spreads.values()), 1)
    if len(named) == 1 and named[0] in ("auto", "cpu"):
        named *= size
    shared = {"auto", "cpu"}
    if len({*named} - shared) + sum(device in shared for device in named) < len(named):
        raise UsageError(f"--device {devices}: two ranks would have one GPU, and each needs its own")
    if len(named) != size:
        said = ",".join(f"{role}={spread}" for role, spread in spreads.items()) or "nothing"
        raise UsageError(
            f"--device {devices} is {len(named)} ranks, and --parallel says {said} of this worker, which is {size}: "
            f"name {size} of them, like {'+'.join(['cpu'] * size)} or {'+'.join(f'cuda:{n}' for n in range(size))}"
        )
    return named


def fewer(devices: str, spreads: Mapping[str, ParallelDegrees]) -> Iterator[tuple[str, str]]:
    """Devices of a worker that is so spread, and `--parallel`, with which it may go on where it has not all of them:
    half of them, either half, and so on; the last is one device.
    """
    named = devices.split("+")
    while spreads := {role: spread for role, spread in spreads.items() if spread.degrees}:
        spreads = {role: spread.smaller() for role, spread in spreads.items()}
        size = max(spread.size for spread in spreads.values())
        parallel = ",".join(f"{role}={spread}" for role, spread in spreads.items() if spread.degrees)
        parts = ("+".join(named[first : first + size]) for first in range(0, len(named) - size + 1, size))
        yield from ((part, parallel) for part in dict.fromkeys(parts))


def refuse(spreads: Mapping[str, ParallelDegrees], stages: Iterable[StageSpec], offload: str = "none") -> None:
    """Raise ConfigError for a role that no stage has, or one of whose stages none can be spread so, naming what can."""
    stages = list(stages)
    for role, spread in spreads.items():
        if offload != "none" and any(kind in spread.degrees for kind in PARTING):
            raise UsageError(
                f"--parallel {role}={spread} and --offload {offload} both say where weights are that do not run: "
                "leave one of them out"
            )
        ways = [stage.spreads for stage in stages if stage.role == role]
        if not ways:
            known = ", ".join(dict.fromkeys(stage.role for stage in stages))
            raise UsageError(f"--parallel {role}={spread}: no stage has that role; roles are {known}")
        if refusal := spread.refusal(_common(ways)):
            raise ConfigError(f"--parallel {role}={spread}: {refusal}")


def choose_parallel(devices: int, stages: Iterable[StageSpec]) -> str:
    """Return the `--parallel` that spreads these stages over most of so many devices; "" for one rank.

    The role that computes in steps, such as a denoiser, decides how many ranks there are: the largest number by which
    one of `_ways` divides it. Other roles of the worker have as many ranks where they can, else one.
    """
    stages = list(stages)
    roles = {role: _common([stage.spreads for stage in stages if stage.role == role]) for role in _roles(stages)}
    stepping = {stage.role for stage in stages if stage.work.forwards}
    deciding = [role for role in roles if role in stepping] or list(roles)
    for size in range(min(devices, MOST), 1, -1):
        found = {role: spread for role, allowed in roles.items() if (spread := _fitting(size, allowed))}
        if found.keys() & {*deciding}:
            return ",".join(f"{role}={spread}" for role, spread in found.items())
    return ""


def _roles(stages: Iterable[StageSpec]) -> dict[str, None]:
    return dict.fromkeys(stage.role for stage in stages)


def _common(ways: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The kinds by which all of several stages can be spread, as `ParallelDegrees.refusal` reads them."""
    each = {kind: [way[kind] for way in ways] for kind in ways[0] if all(kind in way for way in ways)}
    return {kind: min(most) if kind == "layers" else gcd(*most) for kind, most in each.items()}


def _fitting(size: int, allowed: Mapping[str, int]) -> ParallelDegrees | None:
    """The first way in which a stage can be spread over so many ranks, or None."""
    ways = (ParallelDegrees(degrees) for degrees in _ways(size))
    return next((spread for spread in ways if not spread.refusal(allowed)), None)


def _ways(size: int) -> Iterator[Mapping[str, int]]:
    """Ways to have so many ranks, the one that exchanges least first. Each rank has all weights, but with `tensor`."""
    yield {"ulysses": size}
    yield {"tiles": size}
    for degree in range(size // 2, 1, -1):
        if size % degree == 0:
            yield {"ring": size // degree, "ulysses": degree}
    yield {"ring": size}
    yield {"tensor": size}
    yield {"cfg": size}


Batching = Literal["auto", "exact", "batched"]
Loop = Literal["normal", "overlapped"]
MaxLoadedModels = Literal["1", "all"]
Offload = Literal["none", "model", "sequential"]

USUAL_BATCH = 8  # how many tasks share a forward at most, where nobody says it


WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""The variables that say whether OpenMP's threads spin or sleep while they wait for each other."""


def compute_environment(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that computes with so many threads, where the caller's is `given`.

    Its libraries draw no progress bars. Threads that wait for each other sleep, unless the caller has chosen: one that
    spins takes its core from other processes, and then the thread that it waits for may be without one.
    """
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    waiting = {} if given.keys() & {*WAITING} else {"OMP_WAIT_POLICY": "PASSIVE"}
    return {**given, **waiting, **counts, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


class ComputeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How compute processes run their stages."""

    device: Annotated[str, Meta(
        description="Device to compute on, cpu, cuda:0 or xpu:0; auto takes the best. Several, like cuda:0+cuda:1, are "
        "those of a worker's ranks."
    )] = "auto"  # fmt: skip
    dtype: Annotated[str, Meta(
        description="Type of the weights: one for all, or by component (bfloat16,vae=float32). auto is "
        "float32 on a CPU; on a GPU bfloat16, and float32 for the VAE."
    )] = "auto"  # fmt: skip
    parallel: Annotated[str, Meta(
        description="How the stages of a role are spread over ranks, a compute process and device each: "
        "denoiser=ulysses:2 or denoiser=ulysses:2+cfg:2. Kinds: cfg, layers, ring, shard, tensor, tiles, "
        "ulysses. auto, for one worker: as many ranks as it has GPUs, if its stages can be divided so."
    )] = ""  # fmt: skip
    collective_s: Annotated[
        float,
        Meta(description="Most seconds that ranks wait for each other; then all of them are started again.", gt=0),
    ] = 60.0
    threads: Annotated[int, Meta(description="CPU threads of each compute process; 0 shares the cores out.", ge=0)] = 0
    offload: Annotated[Offload, Meta(
        description="What rests in pinned host memory while it does not run: nothing, whole components (model), or "
        "every layer (sequential)."
    )] = "none"  # fmt: skip
    batching: Annotated[Batching, Meta(
        description="exact gives each request the bytes of the undivided pipeline: it shares a forward where "
        "comparing showed that this changes none; in batched pools it always may, equal within a small "
        "tolerance. auto is exact, but batched for workers that have language models alone."
    )] = "auto"  # fmt: skip
    max_batch: Annotated[int, Meta(
        description="Most requests in one forward; 0 is 8, and as many as are there of texts that are decoded.",
        ge=0, le=256,
    )] = 0  # fmt: skip
    loop: Annotated[Loop, Meta(
        description="Loop of texts: overlapped sends a token, and stores a chunk of a prompt for other requests, while "
        "the next one is computed, in a thread of its own; normal does so before that. Tokens are the same."
    )] = "overlapped"  # fmt: skip
    max_loras: Annotated[int, Meta(description="Adapters (LoRA) that a denoiser keeps loaded.", ge=1, le=256)] = 4
    noise_device: Annotated[
        Literal["cpu", "cuda", "xpu", "mps"],
        Meta(
            description="Where noise is drawn: cpu equals torch.Generator('cpu') everywhere, others draw on the device."
        ),
    ] = "cpu"
    vae: Annotated[
        Literal["whole", "sliced", "tiled"],
        Meta(description="How the VAE works: at once, picture by picture, or in tiles, which takes less memory."),
    ] = "whole"

    @property
    def outcome(self) -> dict[str, str]:
        """The settings that change a result's bytes, by name: all workers of one scheduler must agree on them."""
        batching = "exact" if self.batching == "auto" else self.batching
        return {"batching": batching, "noise-device": self.noise_device, "vae": self.vae}
