"""The workers of a plan as a launcher starts them, by whichever process."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import asdict

from unfuse.core.plan import roles_of
from unfuse.core.spread import fewer, own_spreads
from unfuse.launch.base import WorkerSpec
from unfuse.launch.forks import Forks, InheritedForks
from unfuse.service.addresses import keys_folder
from unfuse.service.groups import Settings
from unfuse.service.plan import Plan
from unfuse.service.resources import counts
from unfuse.service.settings import FIELDS


class WorkerSlots(msgspec.Struct, frozen=True):
    """Tasks that a worker holds at a time: the least of its roles `by_role`, else `each` (0: what its stages say)."""

    by_role: Mapping[str, int] = {}
    each: int = 0

    @classmethod
    def of(cls, settings: Settings) -> WorkerSlots:
        """As they are set. Raises ConfigError for a malformed entry."""
        return cls(counts("--slots", settings.serve.slots, "ROLE=N, like denoiser=2"), settings.worker.slots)


def flags_of(settings: Settings) -> dict[str, object]:
    """What each worker is told beside how to compute, by flag."""
    return {
        "keys": keys_folder(settings, "worker"),
        "memory-limit": settings.worker.memory_limit,
        "stall-s": settings.lease.stall_s,
        "kv": settings.kv.bytes,
        **({"listen": settings.worker.listen} if settings.worker.listen else {}),
    }


def environment_of(settings: Settings) -> dict[str, str]:
    """The same by variable; each is one worker, whatever started it."""
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


def forked(planned: Plan, begun: Forks | InheritedForks | None = None) -> Forks | InheritedForks | None:
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
    return begun or Forks([str(model.folder) for model in planned.models])


def specs_of(
    planned: Plan, cores: int, slots: WorkerSlots, told: Mapping[str, object], environment: Mapping[str, str],
    models: tuple[str, ...] = (),
) -> list[WorkerSpec]:  # fmt: skip
    """The workers to start, which share these cores, for these `models` or what their scheduler offers when they start.
    Each gets its dtypes from the scheduler, since models differ.
    """
    wanted, workers = planned.wanted, planned.workers
    ranks = sum(len(worker.devices) for worker in workers)
    threads = wanted.compute.threads or max(1, cores // max(1, ranks))
    common = asdict(wanted.compute) | {"threads": threads, "dtype": "auto", "arena": wanted.arena, **told}
    common["max_loaded_models"] = wanted.max_loaded_models
    del common["device"]
    specs = []
    for worker in workers:
        roles = roles_of(worker.role)
        given = [count for role, count in slots.by_role.items() if roles is None or role in roles]
        own = common | {"slots": min(given, default=slots.each)}
        if worker.on_cpu:
            own["offload"] = "none"
        flags = {name.replace("_", "-"): str(value) for name, value in own.items()}
        smaller = tuple(
            WorkerSpec(worker.role, device, flags | {"parallel": parallel}, environment, models=models)
            for device, parallel in fewer(worker.device, own_spreads(wanted.compute.parallel, roles))
        )
        specs.append(WorkerSpec(worker.role, worker.device, flags, environment, smaller, models))
    return specs
