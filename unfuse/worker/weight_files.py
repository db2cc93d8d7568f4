"""Detects model files that change after a worker loaded them. Pools of such files must not be served any more."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import structlog

from unfuse.core.card import ModelCard
from unfuse.core.errors import ConfigError
from unfuse.core.messages import ChangedFile
from unfuse.core.plan import Choice
from unfuse.models import card_of
from unfuse.weights.fingerprints import COARSE_S, FileState
from unfuse.weights.gguf_model import files_of

log = structlog.get_logger(__name__)

Models = Sequence[tuple[str, str, str]]  # (name, folder, dtype)
States = Mapping[Path, FileState]


class LoadedModel(NamedTuple):
    """A registered model: its declared `pools` by stage, and its `files` with the pools loaded from them.

    `files` has only the files that are loaded from this model's folder.
    """

    card: ModelCard
    folder: Path
    dtype: str
    pools: Mapping[str, str]
    files: Mapping[Path, frozenset[str]]


class WeightFiles:
    """Compares the files that a worker has loaded with their present state. `changed` has the affected pools.

    `before` has the states of files before the cards were made, so that every later change is detected. For a missing
    file its present state is used. A pool is loaded from the first model that has it, or, if the worker loads models
    `in_turns`, from any of them.
    """

    def __init__(
        self, models: Models, cards: Sequence[ModelCard], choice: Choice, before: States, in_turns: bool = False
    ) -> None:
        self.changed: dict[str, ChangedFile] = {}
        self.left_out: frozenset[str] = frozenset()
        """Pools that the compute process did not load at its last start, because their files had changed."""
        self._models: list[LoadedModel] = []
        self._loaded: dict[Path, FileState | None] = {}
        self._spoiled: dict[Path, tuple[FileState | None, frozenset[str]]] = {}
        self._seen: dict[Path, tuple[FileState | None, float]] = {}
        """Modified states, with the time when each was first seen, in monotonic seconds."""
        known = set[str]()
        for card, (_, folder, dtype) in zip(cards, models, strict=True):
            model = _loaded_model(card, Path(folder), dtype, choice, frozenset() if in_turns else frozenset(known))
            known.update(model.pools.values())
            self._models.append(model)
            self._loaded |= {path: before.get(path) or _state_of(path) for path in model.files}

    def look(self) -> bool:
        """Check size and times of all files, and update `changed`. Returns whether it differs from before.

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
        for pool in self.left_out:
            known = changed.get(pool) or self.changed.get(pool)
            changed[pool] = ChangedFile(known.name if known else "a file", compared=True)
        if changed == self.changed:
            return False
        for file in {*changed.values()} - {*self.changed.values()}:
            log.warning("a model file has changed", reason=str(file))
        if not changed:
            log.info("all model files have the bytes that were loaded")
        self.changed = changed
        return True

    def compare(self) -> None:
        """Compare the bytes of modified files with those that were loaded, once they are no longer written to.

        Reads these files completely, so it may take long.
        """
        for model in self._models:
            states = {
                path: state
                for owner, path, state in self._differing()
                if owner is model and not self._spoiled_by(path, state)
            }
            if not states or not all(self._is_written(path, state) for path, state in states.items()):
                continue
            other = _pools_with_other_bytes(model)
            for path, state in states.items():
                if spoiled := model.files[path] & other:
                    self._spoiled[path] = state, spoiled
                else:
                    self._loaded[path] = state

    def overwritten(self, pool: str) -> ChangedFile | None:
        """Return a file of a pool that was modified in place, or None. Memory that maps it has changed too."""
        for model, path, state in self._differing():
            loaded = self._loaded[path]
            in_place = state and loaded and (state.device, state.inode) == (loaded.device, loaded.inode)
            spoiled = self._spoiled_by(path, state)
            if in_place and pool in (spoiled or model.files[path]):
                return ChangedFile(_name_of(model, path), compared=bool(spoiled))
        return None

    def _differing(self) -> list[tuple[LoadedModel, Path, FileState | None]]:
        """Return the files whose state is not that at loading, with their present states."""
        return [
            (model, path, state)
            for model in self._models
            for path in model.files
            if (state := _state_of(path)) != self._loaded[path]
        ]

    def _is_written(self, path: Path, state: FileState | None) -> bool:
        """Whether a file is no longer written to, by its times or because its state did not change for long enough.

        Times are not reliable if a clock was set back, or if that of a file server is ahead.
        """
        seen, since = self._seen.get(path, (None, 0.0))
        was_same = seen == state and time.monotonic() - since >= COARSE_S
        return state is None or was_same or state.is_settled(time.time())

    def _spoiled_by(self, path: Path, state: FileState | None) -> frozenset[str]:
        """Return the pools for which a file in that state has other bytes; empty if it was not compared."""
        compared, pools = self._spoiled.get(path, (None, frozenset[str]()))
        return pools if compared == state else frozenset()


def states_of(folder: Path) -> dict[Path, FileState]:
    """Return the states of a model's files: of a single file, or of a folder and its direct subfolders."""
    if folder.is_file():
        return {folder: FileState.of(folder)}
    paths = [path for pattern in ("*", "*/*") for path in folder.glob(pattern)]
    return {path: state for path in paths if (state := _state_of(path))}


def _state_of(path: Path) -> FileState | None:
    """Return the state of a file, or None if it is missing."""
    try:
        return FileState.of(path)
    except OSError:
        return None


def _name_of(model: LoadedModel, path: Path) -> str:
    """Return a file's name relative to its model's folder, or its own name if the model is a single file."""
    return path.name if path == model.folder else path.relative_to(model.folder).as_posix()


def _loaded_model(card: ModelCard, folder: Path, dtype: str, choice: Choice, known: frozenset[str]) -> LoadedModel:
    """Return the part of a model that is loaded: the chosen stages, except those whose pools are `known`."""
    pools, files, reads = card.pools(choice), defaultdict[Path, set[str]](set), files_of(folder)
    for stage in card.pipeline.stages:
        if stage.name in pools and pools[stage.name] not in known:
            for path in chain.from_iterable(reads.files(component).values() for component in stage.components):
                files[path].add(pools[stage.name])
    return LoadedModel(card, folder, dtype, pools, {path: frozenset(named) for path, named in files.items()})


def _pools_with_other_bytes(model: LoadedModel) -> frozenset[str]:
    """Return the pools of a model that its present files no longer make; all of them if the files cannot be read."""
    try:
        pools = card_of(model.card.name, model.folder, model.dtype).pools()
    except (ConfigError, OSError):
        pools = {}
    return frozenset(pool for stage, pool in model.pools.items() if pools.get(stage) != pool)
