"""The compute process: loads the stages of its role and runs the step loop.

Of a worker, only this process uses torch. `python -m unfuse.worker.compute FD`, or a fork of a process that has
imported this module, is started with one end of a socket pair. It ends when the other end closes, even during a
forward.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import structlog
import xxhash
from msgspec.structs import replace

from unfuse.arena.client import ArenaClient
from unfuse.arena.limits import readable_bytes
from unfuse.arena.protocol import peer_of
from unfuse.core.codec import decode, encode
from unfuse.core.compute_device import ComputeDevice
from unfuse.core.compute_options import Batching, worker_parallelism
from unfuse.core.errors import ConfigError, DeviceUnusable, PermanentError, UnfuseError
from unfuse.core.host_memory import available_memory
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import StageSelector, StageSpec
from unfuse.core.retries import first_line
from unfuse.core.worker_status import DeviceId
from unfuse.models import find, read_model_spec, resolve_source
from unfuse.models.base import RuntimeOptions
from unfuse.stages.base import Stage
from unfuse.stores.results import copies_here, open_results
from unfuse.stores.tensor_store import TensorStore
from unfuse.transfer.base import ProcessPairs
from unfuse.weights.fingerprints import FINGERPRINTS
from unfuse.weights.gguf_model import open_files
from unfuse.weights.quantized import library
from unfuse.worker import compute_messages as messages
from unfuse.worker.batch_invariance import InvarianceResults
from unfuse.worker.batch_sizes import BatchSizesFile
from unfuse.worker.checkpoints import CheckpointPolicy
from unfuse.worker.device_errors import device_failure, is_device_error
from unfuse.worker.load_memory import explain_out_of_memory
from unfuse.worker.ranks import Ranks
from unfuse.worker.records import mute_libraries, write_records
from unfuse.worker.step_loop import StepLoop

if TYPE_CHECKING:
    from unfuse.parallel.group import Group

#: What ranks compare: their sorted numerics and pools.
AGREED = tuple[list[tuple[str, str]], list[str]]

log = structlog.get_logger(__name__)


class PairServer:
    """Serves transfer pairs in the compute process.

    `open` returns the pairs. It is called when the first PairCall arrives.
    """

    def __init__(self, open: Callable[[], ProcessPairs], send: Callable[[messages.FromCompute], None]) -> None:
        self._open, self._send = open, send
        self._lock = Lock()
        self._pairs: ProcessPairs | None = None

    def serve(self, call: messages.PairCall) -> None:
        """Serve a call in a thread of its own, and send its answer.

        A failure there does not end the process.
        """
        Thread(target=self._serve, args=(call,), name="transfer-pair", daemon=True).start()

    def _serve(self, call: messages.PairCall) -> None:
        try:
            with self._lock:
                pairs = self._pairs = self._pairs or self._open()
            port = getattr(pairs, call.method)(call.pair, *call.arguments)
        except Exception as error:  # errors of torch have no common base
            self._send(messages.PairDone(call.pair, error=f"{type(error).__name__}: {error}"))
        else:
            if call.method != "part":
                self._send(messages.PairDone(call.pair, port or 0))


def compute(descriptor: int) -> None:
    """Run a compute process until its parent ends.

    `descriptor` is this process's end of the socket pair with the worker's parent.
    """
    write_records(sys.stderr)
    mute_libraries()
    connection = socket.socket(fileno=descriptor)
    Path("/proc/self/comm").write_text(f"compute {peer_of(connection)[0]}")  # `ps` then shows the worker's process id
    channel = messages.ComputeChannel(connection)
    try:
        load = channel.receive()
    except EOFError:
        return
    if not isinstance(load, messages.LoadModels):
        raise SystemExit("the first message must be LoadModels")

    # The thread runs before the stages are loaded: if the parent ends meanwhile, this process must end too.
    inbox = queue.SimpleQueue[messages.ForLoop]()
    Thread(target=_listen, args=(channel, inbox, load), daemon=True).start()
    try:
        load = replace(load, compute=replace(load.compute, batching=_batching(load)))
        group = _join_group(load)
        device, numerics, stages, plain = _load_stages(load, channel, group)
    except (UnfuseError, OSError, ValueError) as error:
        channel.send(messages.LoadFailed(str(error), by_device=isinstance(error, DeviceUnusable)))
        return
    except RuntimeError as error:
        if not is_device_error(error):
            raise
        channel.send(messages.LoadFailed(f"the device failed while models were loaded: {first_line(error)}", True))
        os._exit(1)  # an orderly exit would use the device

    resources = {name: amount for stage in stages.values() for name, amount in stage.resources.items()}
    left_out = (load.pools or load.registered) - stages.keys()
    loop = _make_step_loop(load, group, device, numerics, stages, plain, inbox, channel)
    channel.send(messages.ModelsLoaded(_device_name(device), numerics, resources, left_out, _device_id(device)))
    try:
        loop.run()
    except Exception as error:
        if not is_device_error(error):
            raise
        channel.send(device_failure(error, load.rank))
        os._exit(1)


def _make_step_loop(
    load: messages.LoadModels,
    group: Group | None,
    device: str,
    numerics: Mapping[str, str],
    stages: Mapping[str, Stage],
    plain: Collection[str],
    inbox: queue.SimpleQueue[messages.ForLoop],
    channel: messages.ComputeChannel,
) -> StepLoop:
    """Return the step loop over the loaded stages."""
    places, scope = load.storage, _scope(numerics)
    store = TensorStore.create(
        places.store,
        owner=load.owner,
        node=load.node,
        address=load.arena,
        write_token=load.write_token,
        threshold=places.threshold,
        spill_capacity=places.spill_capacity,
        durable=places.durable,
        copies=copies_here(places),
        run_dir=load.run_dir,
    )
    return StepLoop(
        stages,
        store,
        open_results(places.results, places.results_store_id),
        inbox,
        channel.send,
        load.compute.max_batch,
        plain,
        places.encodings,
        CheckpointPolicy.parse(places.checkpoint),
        _invariance_results(load, scope),
        Ranks(group, channel.send),
        load.compute.loop == "overlapped",
        compute_device(device),
        BatchSizesFile(_data_file(load, messages.BATCH_SIZES), scope) if load.rank == 0 else None,
    )


def free_bytes(device: str) -> int:
    """Return the bytes of a device that this process can still use."""
    if device.startswith("cpu"):
        return available_memory()
    from unfuse.parallel.accelerator import Accelerator

    return Accelerator(device).free_bytes()


def _batching(load: messages.LoadModels) -> Batching:
    """Return the batching of this worker.

    Families that are batched by default have no exact batches, so `exact-or-batched` is `batched` for them alone.
    """
    batching = load.compute.batching
    if batching in ("exact", "batched"):
        return batching
    if all(find(resolve_source(source)).batches for _, source, _ in load.models):
        return "batched"
    return "exact" if batching == "auto" else batching


def compute_device(name: str) -> ComputeDevice:
    """Return the device of that name, as the step loop uses it."""
    if name.startswith("cpu"):
        return ComputeDevice()
    from unfuse.parallel.accelerator import Accelerator

    return Accelerator(name)


def _scope(numerics: Mapping[str, str]) -> str:
    """Return the scope of what is measured here.

    It has the numerics and the processor's name, since libraries choose kernels by it.
    """
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    processor = next((line for line in lines if line.startswith("model name")), "")
    return xxhash.xxh3_64_hexdigest(encode((sorted(numerics.items()), processor)))


def _data_file(load: messages.LoadModels, name: str) -> Path | None:
    """Return a file of the data folder; None without a data folder."""
    return Path(load.data_dir, name) if load.data_dir else None


def _invariance_results(load: messages.LoadModels, scope: str) -> InvarianceResults | None:
    """Return the invariance results of exact batching; None for other batching modes."""
    if load.compute.batching == "batched":
        return None
    or_batched = load.compute.batching == "exact-or-batched"
    return InvarianceResults(_data_file(load, messages.EXACTNESS), scope, or_batched=or_batched)


def _listen(
    channel: messages.ComputeChannel, inbox: queue.SimpleQueue[messages.ForLoop], load: messages.LoadModels
) -> None:
    """Put messages into the step loop's inbox, and serve pair calls at once.

    When the parent is gone, the process ends, even during a long forward.
    """
    pairs = PairServer(partial(_pairs, load), channel.send)
    while True:
        try:
            message = channel.receive()
        except (EOFError, OSError):
            os._exit(0)  # sys.exit would end only this thread
        if isinstance(message, messages.LoadModels):
            raise PermanentError("a compute process can load only once")
        if isinstance(message, messages.PairCall):
            pairs.serve(message)
        else:
            inbox.put(message)


def _pairs(load: messages.LoadModels) -> ProcessPairs:
    """Return the transfer pairs between this worker's arena and those of other workers."""
    from unfuse.parallel.pairs import TorchPairs

    arena = ArenaClient(load.arena, load.write_token, Path(load.run_dir) if load.run_dir else None)
    return TorchPairs(arena.memory, _device(load, with_torch=True))


def _join_group(load: messages.LoadModels) -> Group | None:
    """Return the group of the worker's ranks; None for a single rank."""
    if load.ranks == 1:
        return None
    from unfuse.parallel.group import Group

    device = _device(load, with_torch=True)
    with explain_out_of_memory(lambda: "the buffers of ranks", device, partial(free_bytes, device)):
        return Group(load.rank, load.ranks, load.rendezvous, device, load.compute.collective_s)


def _check_agreement(group: Group | None, numerics: Mapping[str, str], pools: Collection[str]) -> None:
    """Raise ConfigError if another rank has another GPU, version or weights."""
    encoded = group.exchange(encode((sorted(numerics.items()), sorted(pools)))) if group else []
    differing = next((rank for rank, data in enumerate(encoded) if data != encoded[0]), None)
    if differing is None:
        return
    first: dict[str, str] = dict(decode(encoded[0], AGREED)[0])
    other: dict[str, str] = dict(decode(encoded[differing], AGREED)[0])
    names = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
    differences = [f"{name} is {other.get(name, 'missing')!r}, not {first.get(name, 'missing')!r}" for name in names]
    advice = ": ranks need GPUs of one model, so name such GPUs by --device or --place" if "device" in names else ""
    raise ConfigError(
        f"rank {differing} does not compute the same results as rank 0: "
        f"{', '.join(differences) or 'its weights differ'}{advice}"
    )


def _stages_to_load(load: messages.LoadModels) -> dict[str, tuple[StageSpec, ModelSpec, Path]]:
    """Return the stages to load, as (stage spec, model spec, folder) by declared pool.

    Stages of files that have changed since the worker started are left out, because they belong to other pools now.
    Raises ConfigError if no stage remains, and if a model cannot be read and `registered` is empty.
    """
    models = [(name, resolve_source(source), dtype) for name, source, dtype in load.models]
    selected = {load.loaded_model} & {name for name, _, _ in models}  # if the set is a model, no other model is read
    pools, wanted = load.pools or load.registered, dict[str, tuple[StageSpec, ModelSpec, Path]]()
    refusal = ConfigError("the files of all models have changed since the worker started: restart the worker")
    for name, folder, dtype in models:
        if selected and name not in selected:
            continue
        try:
            model_spec = read_model_spec(name, folder, dtype)
        except ConfigError as error:
            if not load.registered:
                raise
            refusal = error
            continue
        declared_pools = model_spec.pools(load.choice)
        for spec in model_spec.pipeline.stages:
            pool = declared_pools.get(spec.name)
            if pool and (pool in pools or not pools):
                wanted.setdefault(pool, (spec, model_spec, folder))

    if not wanted:
        raise refusal
    return wanted


def _libraries_of(models: Iterable[tuple[str, Path, str]], choice: StageSelector) -> set[str]:
    """Return the libraries of the chosen stages of all models: (name, folder, dtypes).

    Those of models that are not loaded now are among them: pool names must survive a model swap.
    """
    libraries = set[str]()
    for name, folder, dtype in models:
        family = find(folder)
        libraries |= {"torch", *family.libraries} if family.torch else set()
        configs = list[object]()
        with suppress(ConfigError):  # a model whose files were damaged is left out, as when stages are selected
            stages = read_model_spec(name, folder, dtype).pipeline.stages
            components = [component for stage in stages if choice.selects(stage) for component in stage.components]
            configs += map(open_files(folder).quantization, components)
        libraries |= library(configs)
    return libraries


def _load_stages(
    load: messages.LoadModels, channel: messages.ComputeChannel, group: Group | None
) -> tuple[str, dict[str, str], dict[str, Stage], set[str]]:
    """Load the stages.

    Returns the device, the numerics, the stages by declared pool, and the pools that take numpy arrays.
    """
    if load.data_dir:
        FINGERPRINTS.cache_in(Path(load.data_dir))
    models = [(name, resolve_source(source), dtype) for name, source, dtype in load.models]
    wanted = _stages_to_load(load)
    progress = LoadProgress([(spec, folder) for spec, _, folder in wanted.values()], channel.send)

    libraries = _libraries_of(models, load.choice)
    device = _device(load, bool(libraries))
    flags = _set_kernel_flags(load, device) if libraries else {}
    spreads = worker_parallelism(load.compute.parallel, load.choice.roles)
    _require_dtypes(device, wanted.values())
    numerics = numerics_of(load, device, libraries) | flags
    _check_agreement(group, numerics, wanted)

    stages: dict[str, Stage] = {}
    plain, shared = set[str](), dict[Hashable, Any]()
    for pool, (spec, model_spec, folder) in wanted.items():
        family, mesh = find(folder), group.mesh(spreads[spec.role]) if group and spec.role in spreads else None
        adapter_folder = str(Path(load.data_dir, messages.ADAPTER_FOLDER)) if load.data_dir else ""
        runtime = RuntimeOptions(
            device, model_spec.dtypes, load.compute, load.storage.adapters, mesh, load.kv, shared, group, adapter_folder
        )
        progress.start_stage(model_spec.name, spec, folder)
        with explain_out_of_memory(progress.describe_next, device, partial(free_bytes, device)):
            stages[pool] = family.load(spec, folder, runtime, progress.loaded)
        plain |= set() if family.torch else {pool}
    for pool, stage in stages.items():
        spec, model_spec, _ = wanted[pool]
        _warm_up(stage, f"stage {spec.name} of {model_spec.name}", device)
    return device, numerics, stages, plain


def _warm_up(stage: Stage, name: str, device: str) -> None:
    """Warm up a stage of this name. Raises ConfigError if it runs out of memory."""
    with explain_out_of_memory(lambda: name, device, partial(free_bytes, device), "warming up"):
        stage.warm_up()


def _require_dtypes(device: str, stages: Iterable[tuple[StageSpec, ModelSpec, Path]]) -> None:
    """Raise ConfigError if the device does not compute in the dtypes of these stages."""
    if not device.startswith("cpu"):
        from unfuse.parallel.devices import require_dtypes

        require_dtypes(device, {spec.dtypes[name] for stage, spec, _ in stages for name in stage.components})


class LoadProgress:
    """Reports which stage is loading, and how many bytes of all files are loaded."""

    def __init__(
        self,
        stages: Iterable[tuple[StageSpec, Path]],
        send: Callable[[messages.LoadingStage | messages.ComponentLoaded], None],
    ) -> None:
        paths = {
            (folder, name): open_files(folder).component_path(name)
            for spec, folder in stages
            for name in spec.components
        }
        self._remaining = {key: _bytes_of(key[0] / path) for key, path in paths.items()}
        self._total = sum(self._remaining.values())
        self._send = send
        self._folder = Path()
        self._stage, self._components = "", tuple[str, ...]()

    def start_stage(self, model: str, stage: StageSpec, folder: Path) -> None:
        """Report that this stage is loaded next."""
        self._folder, self._components = folder, stage.components
        self._stage = f"stage {stage.name} of {model}"
        self._send(messages.LoadingStage(model, stage.name, self._total - sum(self._remaining.values()), self._total))

    def describe_next(self) -> str:
        """Return what is loaded now, with its bytes.

        It is the largest component of the stage that is not loaded yet.
        """
        sizes = {name: self._remaining.get((self._folder, name), 0) for name in self._components}
        component = max(sizes, key=lambda name: sizes[name])
        if not sizes[component]:
            return self._stage
        return f"{component} in {self._stage}, whose files have {readable_bytes(sizes[component])}"

    def loaded(self, component: str, seconds: float, size: int) -> None:
        """Report that a component of the current stage is loaded.

        Loading took `seconds`, and the component uses `size` bytes of memory.
        """
        self._remaining.pop((self._folder, component), None)
        self._send(
            messages.ComponentLoaded(component, seconds, size, self._total - sum(self._remaining.values()), self._total)
        )


def _bytes_of(folder: Path) -> int:
    """Return the bytes of a file or a folder's files; 0 if missing."""
    if folder.is_file():
        return folder.stat().st_size
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) if folder.is_dir() else 0


def _device(load: messages.LoadModels, with_torch: bool) -> str:
    """Return the device of this process, and make it the current one of this thread.

    Raises ConfigError if the device is missing or has no memory for its context, or if there are fewer GPUs than ranks,
    and DeviceUnusable if the device fails its check.
    """
    configured = load.compute.device
    if not with_torch:
        return "cpu" if configured == "auto" else configured
    with explain_out_of_memory(lambda: "the device context", configured, partial(free_bytes, configured)):
        return _checked_device(load)


def _checked_device(load: messages.LoadModels) -> str:
    """Return the device of this process, which has passed its check. Raises as `_device`."""
    configured = load.compute.device
    import torch

    from unfuse.parallel.devices import accelerators, check, describe_devices, is_present, set_current

    torch.set_num_threads(load.compute.threads)
    if configured != "auto":
        set_current(is_present(configured))
        check(configured)
        return configured
    if (devices := accelerators()) and load.ranks > len(devices):
        raise ConfigError(f"--parallel {load.compute.parallel} needs {load.ranks} GPUs, and there are {len(devices)}")
    if not devices and torch.accelerator.current_accelerator():
        log.warning("no GPU can be used", torch=torch.__version__, reason=describe_devices()["problem"])
    chosen = devices[load.rank : load.rank + 1] or ["cpu"]
    check(chosen[0])
    return chosen[0].partition(":")[0] if load.ranks == 1 else chosen[0]


def _set_kernel_flags(load: messages.LoadModels, device: str) -> dict[str, str]:
    """Set the flags by which torch chooses kernels, and return them as numerics."""
    from unfuse.parallel.kernel_flags import set_kernel_flags

    return set_kernel_flags(device, load.compute.fp32_precision)


def numerics_of(load: messages.LoadModels, device: str, libraries: Collection[str]) -> dict[str, str]:
    """Return the numerics: settings, library versions and device, on which the bytes of results depend."""
    spreads = worker_parallelism(load.compute.parallel, load.choice.roles)
    settings = load.compute.numerics | {f"parallel-{role}": str(spread) for role, spread in spreads.items()}
    settings |= {f"encode-{kind}": encoding for kind, encoding in load.storage.encodings.items()}
    numerics = settings | {name: version(name) for name in libraries}
    if not libraries or not device.startswith("cpu"):
        return numerics | {"device": _device_name(device)}
    import torch

    return numerics | {"device": f"cpu {torch.backends.cpu.get_cpu_capability()}", "threads": str(load.compute.threads)}


def _device_id(device: str) -> DeviceId:
    """Return the index and the UUID of a device. A CPU has no UUID."""
    if device.startswith("cpu"):
        return DeviceId("cpu")
    from unfuse.parallel.devices import identity

    return identity(device)


def _device_name(device: str) -> str:
    """Return the name of the kind of device: cpu, or the model of the GPU."""
    if device.startswith("cpu"):
        return device
    from unfuse.parallel.devices import name_of

    return name_of(device)


if __name__ == "__main__":
    compute(int(sys.argv[1]))
