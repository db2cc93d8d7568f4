"""The options of a worker."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from unfuse.core.compute import ComputeOptions, MaxLoadedModels
from unfuse.transfer.base import TransferOptions
from unfuse.wire.address import Trust

EXACTNESS = "exactness.json"  # the file, in the data folder, with what batches were found exact
KEPT_LORAS = "loras"  # the folder, in the data folder, with adapters that came from another machine


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
