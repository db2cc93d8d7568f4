"""How a worker is started."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from unfuse.core.compute import ComputeOptions
from unfuse.transfer.base import TransferOptions
from unfuse.wire.address import Trust


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker is started. `role` is one, several as `a+b`, or all; with `components` it runs those of its stages
    alone whose pools are of one of them. It holds `slots` tasks at a time (0: as many as is usual for its role).
    `arena` is bytes, `resources` are what it has of others; without `models` the scheduler says what to serve.

    It talks to one of the `schedulers` at a time. Compute is killed when it makes no progress for `stall_s` seconds or
    takes more than `memory_limit` bytes (0: any). `drain_timeout` is the seconds that running tasks get to finish once
    the worker is told to leave. `transfer` is how its objects move between nodes, `run_dir` where those of one meet.
    They are given up when no scheduler was heard for `orphan_s` seconds.
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
    resources: Mapping[str, int]
    stall_s: float
    memory_limit: int
    drain_timeout: float
    transfer: TransferOptions
    run_dir: str
    orphan_s: float
