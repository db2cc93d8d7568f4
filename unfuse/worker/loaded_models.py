"""The models and LoRA adapters of a worker: model swapping, changed files, adapter downloads."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import structlog
import xxhash
from msgspec.structs import replace

from unfuse.core.errors import ConfigError, NotFound, PermanentError, TransientError
from unfuse.core.messages import AdapterBytes, FetchAdapter, Rejected
from unfuse.core.model_spec import ModelSpec
from unfuse.core.parameters import split_scaled
from unfuse.core.paths import create_private_folder
from unfuse.core.plan import StageSelector, declared_pool, pool_with_numerics
from unfuse.core.task import Lease
from unfuse.core.worker_status import ChangedFile
from unfuse.models import read_model_spec
from unfuse.stages.specs import ADAPTED
from unfuse.weights.adapters import MAX_BYTES, AdapterFolder
from unfuse.weights.fingerprints import COARSE_S, FileState
from unfuse.weights.gguf_model import open_files
from unfuse.weights.source import resolve_source
from unfuse.worker.compute_messages import LoadModels
from unfuse.worker.executor import Executor
from unfuse.worker.link import SchedulerLink

log = structlog.get_logger(__name__)

#: Models as (name, source, dtype). Once fetched, the source is a folder of this machine.
Models = tuple[tuple[str, str, str], ...]

#: Declared pools by the name of a set, of which one is loaded at a time. Empty if everything is loaded at once.
Sets = Mapping[str, frozenset[str]]

#: The states of files when their model was read.
States = Mapping[Path, FileState]

#: Seconds between two checks whether a model swap can start.
PAUSE_S = 0.05

#: Most bytes of fetched adapters on a machine. The least recently used ones are deleted first.
MAX_ADAPTER_BYTES = 32 << 30

#: Seconds after which an unfinished download counts as left over from a killed process.
STALE_DOWNLOAD_S = 3600.0


class LoadedModel(NamedTuple):
    """A registered model with its pools and files."""

    #: The model's spec.
    spec: ModelSpec

    #: The model's folder, or its single file.
    folder: Path

    #: The requested dtype, as `--dtype` has it.
    dtype: str

    #: Declared pools by stage.
    pools: Mapping[str, str]

    #: The files loaded from `folder`, each with the pools that are loaded from it.
    files: Mapping[Path, frozenset[str]]


class WeightFiles:
    """Detects that the files of loaded models have changed. `changed` has the affected pools.

    - `initial_states`: states of files before the specs were made, so that every later change is detected. For a file
      that is not in it, the present state is used.
    - `swaps_models`: whether the worker swaps models. Then a pool may be loaded from any model that has it, else only
      from the first one.
    """

    def __init__(
        self,
        models: Models,
        specs: Sequence[ModelSpec],
        choice: StageSelector,
        initial_states: States,
        swaps_models: bool = False,
    ) -> None:
        #: The changed files, by affected pool.
        self.changed: dict[str, ChangedFile] = {}

        #: Pools that the compute process did not load at its last start, because their files had changed.
        self.left_out: frozenset[str] = frozenset()

        self._models: list[LoadedModel] = []

        # The state of each file when it was loaded. A later state whose bytes are the same replaces it.
        self._loaded: dict[Path, FileState | None] = {}

        # Modified states whose bytes were compared and differ, with the pools for which they differ.
        self._spoiled: dict[Path, tuple[FileState | None, frozenset[str]]] = {}

        # Modified states, with the monotonic time in seconds when each was first seen.
        self._seen: dict[Path, tuple[FileState | None, float]] = {}

        loaded_pools = set[str]()
        for spec, (_, folder, dtype) in zip(specs, models, strict=True):
            model = _loaded_model(
                spec, Path(folder), dtype, choice, frozenset() if swaps_models else frozenset(loaded_pools)
            )
            loaded_pools.update(model.pools.values())
            self._models.append(model)
            self._loaded |= {path: initial_states.get(path) or _state_of(path) for path in model.files}

    def refresh(self) -> bool:
        """Check size and times of all files. Returns whether this has altered `changed`.

        Pools of a modified file are in `changed` until its bytes are compared, and stay there if the bytes differ.
        """
        changed: dict[str, ChangedFile] = {}
        for model, path, state in self._differing():
            if path not in self._seen or self._seen[path][0] != state:
                self._seen[path] = state, time.monotonic()
            spoiled = self._spoiled_by(path, state)
            file = ChangedFile(_name_of(model, path), compared=bool(spoiled))
            for pool in spoiled or model.files[path]:
                if file.compared or pool not in changed:
                    changed[pool] = file

        # Compute cannot serve these pools before its next start, whatever their files have now.
        for pool in self.left_out:
            file_of_pool = changed.get(pool) or self.changed.get(pool)
            changed[pool] = ChangedFile(file_of_pool.name if file_of_pool else "a file", compared=True)

        if changed == self.changed:
            return False
        for file in {*changed.values()} - {*self.changed.values()}:
            log.warning("a model file has changed", reason=str(file))
        if not changed:
            log.info("all model files match the loaded weights")
        self.changed = changed
        return True

    def compare(self) -> None:
        """Compare the bytes of modified files with the loaded ones, once writing has ended.

        Reads these files completely, so it may take long.
        """
        for model in self._models:
            states = {
                path: state
                for owner, path, state in self._differing()
                if owner is model and not self._spoiled_by(path, state)
            }
            if not states or not all(self._is_fully_written(path, state) for path, state in states.items()):
                continue
            differing_pools = _pools_with_other_bytes(model)
            for path, state in states.items():
                if spoiled := model.files[path] & differing_pools:
                    self._spoiled[path] = state, spoiled
                else:
                    self._loaded[path] = state

    def overwritten(self, pool: str) -> ChangedFile | None:
        """Return a file of a pool that was modified in place, or None.

        Weights that are mapped from such a file have changed, too.
        """
        for model, path, state in self._differing():
            loaded = self._loaded[path]
            in_place = state and loaded and (state.device, state.inode) == (loaded.device, loaded.inode)
            spoiled = self._spoiled_by(path, state)
            if in_place and pool in (spoiled or model.files[path]):
                return ChangedFile(_name_of(model, path), compared=bool(spoiled))
        return None

    def _differing(self) -> list[tuple[LoadedModel, Path, FileState | None]]:
        """Return (model, file, present state) of the files that have changed since loading."""
        return [
            (model, path, state)
            for model in self._models
            for path in model.files
            if (state := _state_of(path)) != self._loaded[path]
        ]

    def _is_fully_written(self, path: Path, state: FileState | None) -> bool:
        """Whether a file is completely written: its times say so, or its state is stable.

        Times are not reliable if a clock was set back, or if that of a file server is ahead.
        """
        seen_state, seen_at = self._seen.get(path, (None, 0.0))
        is_stable = seen_state == state and time.monotonic() - seen_at >= COARSE_S
        return state is None or is_stable or state.is_settled(time.time())

    def _spoiled_by(self, path: Path, state: FileState | None) -> frozenset[str]:
        """Return the pools for which a file in that state is known to differ."""
        compared_state, pools = self._spoiled.get(path, (None, frozenset[str]()))
        return pools if compared_state == state else frozenset()


def states_of(folder: Path) -> dict[Path, FileState]:
    """Return the states of a model's files, by path.

    `folder` is a single file, or a folder, whose own files and those of its direct subfolders are read.
    """
    if folder.is_file():
        return {folder: FileState.read(folder)}
    paths = [path for pattern in ("*", "*/*") for path in folder.glob(pattern)]
    return {path: state for path in paths if (state := _state_of(path))}


def _state_of(path: Path) -> FileState | None:
    """Return the state of a file, or None if it is missing."""
    try:
        return FileState.read(path)
    except OSError:
        return None


def _name_of(model: LoadedModel, path: Path) -> str:
    """Return a file's name relative to its model's folder.

    If the model is a single file, this is the file's own name.
    """
    return path.name if path == model.folder else path.relative_to(model.folder).as_posix()


def _loaded_model(
    spec: ModelSpec, folder: Path, dtype: str, choice: StageSelector, skipped_pools: frozenset[str]
) -> LoadedModel:
    """Return a model with the files of its chosen stages, except those of `skipped_pools`."""
    pools = spec.pools(choice)
    pools_by_file = defaultdict[Path, set[str]](set)
    model_files = open_files(folder)
    for stage in spec.pipeline.stages:
        if stage.name in pools and pools[stage.name] not in skipped_pools:
            for path in chain.from_iterable(model_files.files(component).values() for component in stage.components):
                pools_by_file[path].add(pools[stage.name])
    return LoadedModel(spec, folder, dtype, pools, {path: frozenset(names) for path, names in pools_by_file.items()})


def _pools_with_other_bytes(model: LoadedModel) -> frozenset[str]:
    """Return the pools of a model whose weights its present files no longer have.

    If the files cannot be read, these are all pools.
    """
    try:
        pools = read_model_spec(model.spec.name, model.folder, model.dtype).pools()
    except (ConfigError, OSError):
        pools = {}
    return frozenset(pool for stage, pool in model.pools.items() if pools.get(stage) != pool)


class ModelSwapper:
    """Model swapping: a worker with several `sets` of weights loads one at a time.

    Without sets, everything is loaded. `loads`: what each rank would load of all sets together.
    """

    def __init__(self, sets: Sets, loads: Sequence[LoadModels], specs: Sequence[ModelSpec] = ()) -> None:
        self.sets = sets
        self._loads, self._specs = loads, specs
        self._read_ahead_set = ""

        #: The loaded set. Empty while another one loads, and without sets.
        self.loaded_model = next(iter(sets), "")

        #: Seconds that loading the set took.
        self.load_s = 0.0

        #: The set that is to be loaded next. Empty if none is.
        self.target_model = ""

    def pools_of_sets(self, numerics: Mapping[str, str], changed: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
        """Return the pools of each set with these numerics, without those in `changed`."""
        return {
            name: tuple(pool_with_numerics(pool, numerics) for pool in sorted(pools.difference(changed)))
            for name, pools in self.sets.items()
        }

    def loads(self, name: str) -> list[LoadModels]:
        """Return what each rank loads for a set."""
        return [replace(load, pools=self.sets.get(name, frozenset()), loaded_model=name) for load in self._loads]

    def is_loaded(self, lease: Lease) -> bool:
        """Whether a task is of the loaded set."""
        return not self.sets or pool_of(lease) in self.sets.get(self.loaded_model, ())

    async def swap_to(
        self, name: str, executor: Executor, withdraw: Callable[[], Awaitable[object]], idle: asyncio.Event
    ) -> None:
        """Start to load another set, once the running requests have ended.

        Until then, the worker requests only follow-up tasks of requests that it runs. `withdraw` withdraws its present
        request for tasks, and `idle` is set while no task runs. Call `loaded` when the executor has loaded the set.
        Does nothing during another swap, or if the set is loaded or unknown.
        """
        # The scheduler repeats the order until the worker confirms it.
        if self.target_model or name == self.loaded_model or name not in self.sets:
            return
        self.target_model = name
        await withdraw()
        await self.read_ahead(name)
        await idle.wait()
        while not (executor.ready and idle.is_set()):  # a task may have arrived meanwhile, or compute may restart
            await asyncio.sleep(PAUSE_S)
        log.info("swapping", out=self.loaded_model, into=name)
        self.loaded_model = ""
        executor.swap(self.loads(name))

    def loaded(self, executor: Executor) -> None:
        """Record which set compute has loaded, which may be the previous one."""
        if executor.ready:
            # If a set is still loaded, compute only restarted before a pending swap, which must still follow.
            self.target_model = self.target_model if self.loaded_model else ""
            self.loaded_model, self.load_s = executor.loaded

    async def read_ahead(self, name: str) -> None:
        """Read the next set's weights into the page cache, to shorten its cold start.

        Done once for each set. The kernel reads as much as there is room for.
        """
        if name in self.sets and name != self._read_ahead_set:
            self._read_ahead_set = name
            await asyncio.to_thread(_read_ahead, self._loads[0].models, self._specs, self.sets[name])


def _read_ahead(models: Models, specs: Sequence[ModelSpec], pools: Collection[str]) -> None:
    """Advise the kernel to read the weight files of these declared pools ahead.

    Files that cannot be read are skipped, since loading will report them.
    """
    folders = {name: source for name, source, _ in models}
    components = {
        (spec.name, component)
        for spec in specs
        for stage in spec.pipeline.stages
        if spec.pools()[stage.name] in pools
        for component in stage.components
    }
    for model, component in sorted(components):
        with suppress(OSError, ConfigError):
            for path in open_files(resolve_source(folders[model])).weights(component):
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


class AdapterFetcher:
    """Downloads LoRA adapters that this machine lacks from the scheduler.

    `folder` is this machine's folder of adapters. If it is empty, the scheduler serves no adapters, and nothing is
    fetched. Fetched adapters are stored in `download_folder`.
    """

    def __init__(self, link: SchedulerLink, folder: str, download_folder: Path) -> None:
        self._link = link
        self._loras = AdapterFolder(folder, str(download_folder))
        self._download_folder = download_folder
        self._has_adapters = bool(folder)
        self._lock = asyncio.Lock()

    async def fetch(self, lease: Lease) -> None:
        """Fetch the adapters of a task whose stage uses them.

        Raises NotFound, PermanentError or TransientError if one cannot be fetched.
        """
        task = lease.task
        if not task.derived.lora_id or task.planned.kind not in ADAPTED or not self._has_adapters:
            return
        for (name, _), id in zip(split_scaled(str(task.params["lora"])), task.derived.lora_id.split(","), strict=True):
            async with self._lock:  # tasks that start together need the same adapter only once
                if not await asyncio.to_thread(self._loras.is_available, name, id):
                    await self._download(name, id)

    async def _download(self, name: str, id: str) -> None:
        """Download an adapter and verify its content by its `id`, an XXH3 hash."""
        target = self._loras.fetched_path(id)
        partial_file = target.with_name(f".{id}.{secrets.token_hex(4)}")
        digest = xxhash.xxh3_128()
        offset = 0
        size = 1
        began = time.monotonic()

        # Other workers of the machine download into the same folder. Only a verified file gets its final name.
        try:
            create_private_folder(self._download_folder)
            with partial_file.open("wb") as stream:
                while offset < size:
                    answer = await self._link.call(FetchAdapter(name, id, offset))
                    if not isinstance(answer, AdapterBytes):
                        raise NotFound(
                            answer.message if isinstance(answer, Rejected) else f"lora {name!r} cannot be fetched"
                        )
                    size = size if offset else self._make_room(name, answer.size)
                    if answer.size != size or not answer.data or offset + len(answer.data) > size:
                        raise TransientError(f"lora {name!r} was changed while it was downloaded")
                    await asyncio.to_thread(stream.write, answer.data)
                    digest.update(answer.data)
                    offset += len(answer.data)
            if digest.hexdigest() != id:
                raise PermanentError(f"the downloaded lora {name!r} does not match its checksum {id}")
            partial_file.replace(target)
        except OSError as error:
            raise TransientError(
                f"lora {name!r} cannot be stored in {self._download_folder}: {error.strerror}"
            ) from error
        finally:
            partial_file.unlink(missing_ok=True)
        log.info(
            "downloaded an adapter from the scheduler", lora=name, id=id, bytes=size, seconds=time.monotonic() - began
        )

    def _make_room(self, name: str, size: int) -> int:
        """Delete old adapters to make room for a file of this size. Returns the size.

        Raises PermanentError if the file is too large for an adapter, and TransientError if the disk has no room.
        """
        if not 0 < size <= MAX_BYTES:
            raise PermanentError(f"lora {name!r} has {size} bytes: adapters may have 1 to {MAX_BYTES}")
        remaining, now = MAX_ADAPTER_BYTES - size, time.time()
        files = sorted(
            ((file, file.stat()) for file in self._download_folder.iterdir()), key=lambda entry: -entry[1].st_atime
        )
        for file, stat in files:
            remaining -= stat.st_size
            if remaining < 0 or (file.name.startswith(".") and now - stat.st_mtime > STALE_DOWNLOAD_S):
                file.unlink(missing_ok=True)
        if (free := shutil.disk_usage(self._download_folder).free) < size:
            raise TransientError(f"lora {name!r} needs {size} bytes, but {self._download_folder} has only {free} free")
        return size


def pool_of(lease: Lease) -> str:
    """Return the declared pool of a leased task."""
    return declared_pool(lease.task.planned.pool)
