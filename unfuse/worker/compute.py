"""The compute process: loads the stages of its role and runs the step loop. Only here is torch imported, if at all.

Started by the executor with one end of a socketpair; it ends when the other end closes, whatever it is doing.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from typing import Any

from unfuse.core.compute import ComputeOptions
from unfuse.core.errors import PermanentError, UnfuseError
from unfuse.core.plan import pool_name
from unfuse.models import find, resolve_source
from unfuse.models.base import Runtime
from unfuse.stages.base import OneStep, SteppedStage
from unfuse.stores.results import open_results
from unfuse.stores.tensor_store import TensorStore
from unfuse.worker.channel import Cancel, ComputeChannel, Load, Loaded, LoadFailed, Ready, Run
from unfuse.worker.checkpoints import Policy
from unfuse.worker.step_loop import StepLoop


def main() -> None:
    """Entry point: `python -m unfuse.worker.compute FD`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when we end
    channel = ComputeChannel(socket.socket(fileno=int(sys.argv[1])))
    load = channel.receive()
    if not isinstance(load, Load):
        raise SystemExit("the first message must be Load")
    inbox: queue.SimpleQueue[Run | Cancel] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, inbox), daemon=True).start()
    try:
        device, stages, plain = _load(load, channel)
    except (UnfuseError, OSError, ValueError) as error:
        channel.send(LoadFailed(str(error)))
        return
    places = load.places
    store = TensorStore.create(
        places.store, owner=load.owner, node=load.node, address=load.arena, write_token=load.write_token,
        threshold=places.threshold, spill_capacity=places.spill_capacity, durable=places.durable,
    )  # fmt: skip
    channel.send(Ready(_name(device)))
    StepLoop(
        stages, store, open_results(places.results), inbox, channel.send, load.compute.batch, plain, places.encodings,
        Policy.parse(places.checkpoint),
    ).run()  # fmt: skip


def _listen(channel: ComputeChannel, inbox: queue.SimpleQueue[Run | Cancel]) -> None:
    """Feed the loop; when the parent is gone, end at once, also from within a long forward."""
    while True:
        try:
            message = channel.receive()
        except (EOFError, OSError):
            os._exit(0)
        if isinstance(message, Load):
            raise PermanentError("a compute process loads once")
        inbox.put(message)


def _load(load: Load, channel: ComputeChannel) -> tuple[str, dict[str, SteppedStage[Any]], set[str]]:
    """The device, the stages by pool, and the pools whose stages take numpy arrays."""
    models = [(name, resolve_source(source), dtype) for name, source, dtype in load.models]
    device = _device(load.compute, any(find(folder).torch for _, folder, _ in models))
    stages: dict[str, SteppedStage[Any]] = {}
    plain: set[str] = set()
    for name, folder, dtype in models:
        family = find(folder)
        card = family.card(name, folder, dtype)
        runtime = Runtime(device, card.dtypes, load.compute, load.places.loras)
        for spec in card.pipeline.stages:
            pool = pool_name(spec, card.weights, card.dtypes)
            if pool in stages or (load.kinds is not None and spec.kind not in load.kinds):
                continue
            stage = family.load(spec, folder, runtime, lambda *found: channel.send(Loaded(*found)))
            stages[pool] = stage if isinstance(stage, SteppedStage) else OneStep(stage)
            plain |= set() if family.torch else {pool}
    return device, stages, plain


def _device(options: ComputeOptions, with_torch: bool) -> str:
    if not with_torch:
        return "cpu" if options.device == "auto" else options.device
    import torch

    torch.set_num_threads(options.threads)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    return found if options.device == "auto" else options.device


def _name(device: str) -> str:
    """What there may be several of, equally fast: a kind of GPU."""
    if not device.startswith("cuda"):
        return device
    import torch

    return torch.cuda.get_device_name(device)


if __name__ == "__main__":
    main()
