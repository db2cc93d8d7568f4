"""The sets of weights of a worker that has one of them loaded at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress

import structlog
from msgspec.structs import replace

from unfuse.core.card import ModelCard
from unfuse.core.errors import ConfigError
from unfuse.core.plan import Choice, roles_of
from unfuse.core.pool import declared, manned
from unfuse.core.task import Lease
from unfuse.weights.gguf_model import files_of
from unfuse.weights.source import resolve_source
from unfuse.worker.compute_messages import Load
from unfuse.worker.executor import Executor
from unfuse.worker.options import WorkerOptions
from unfuse.worker.registration import Models, Served

PAUSE_S = 0.05  # seconds between two looks whether a swap can begin

log = structlog.get_logger(__name__)

Sets = Mapping[str, frozenset[str]]  # declared pools by the names of sets; none where everything is loaded at all times


def sets_of(served: Served, options: WorkerOptions) -> Sets:
    """The sets of a worker: a model each, or of `a,b` a role each; none if there is one. Raises ConfigError."""
    parts, cards = options.role.split(","), served.cards
    one_model = options.max_loaded_models == "1"
    if one_model and len(parts) > 1:
        raise ConfigError(
            f"--max-loaded-models 1 and --role {options.role} both say what is loaded at a time: leave one out"
        )
    if one_model:
        choice = Choice(roles_of(options.role), options.components)
        found = {card.name: {*card.pools(choice).values()} for card in cards}
    else:
        chosen = {part.strip(): Choice(roles_of(part), options.components) for part in parts}
        found = {name: {pool for card in cards for pool in card.pools(one).values()} for name, one in chosen.items()}
    sets = {name: frozenset(pools) for name, pools in found.items() if pools}
    return sets if len(sets) > 1 else {}


class Swapping:
    """Which of its `sets` a worker has loaded, or everything without sets. `loads` is what each rank loads of all."""

    def __init__(self, sets: Sets, loads: Sequence[Load], cards: Sequence[ModelCard] = ()) -> None:
        self.sets, self._loads, self._cards, self._read = sets, loads, cards, ""
        self.holds, self.load_s, self.going = next(iter(sets), ""), 0.0, ""
        """The set that is loaded ("" while another one is), the seconds that took, and the one that is due, if any."""

    def pools_of_sets(self, outcome: Mapping[str, str], changed: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
        """Return the pools of each set for this outcome, without those in `changed`."""
        return {
            name: tuple(manned(pool, outcome) for pool in sorted(pools.difference(changed)))
            for name, pools in self.sets.items()
        }

    def loads(self, name: str) -> list[Load]:
        """What each rank is to load for a set."""
        return [replace(load, pools=self.sets.get(name, frozenset()), holds=name) for load in self._loads]

    def fits(self, lease: Lease) -> bool:
        """Whether a task is of the set that is loaded."""
        return not self.sets or declared(lease.task.planned.pool) in self.sets.get(self.holds, ())

    async def to(
        self, name: str, executor: Executor, withdraw: Callable[[], Awaitable[object]], idle: asyncio.Event
    ) -> None:
        """Take no more tasks, and once those that run have ended, have another set loaded: `loaded` is called then."""
        if self.going or name == self.holds or name not in self.sets:  # it is told until it has said that it has that
            return
        self.going = name
        await withdraw()
        await self.ahead(name)
        await idle.wait()
        while not (executor.ready and idle.is_set()):  # it may have been given a task meanwhile, or start again
            await asyncio.sleep(PAUSE_S)
        log.info("swapping", out=self.holds, into=name)
        self.holds = ""
        executor.swap(self.loads(name))

    def loaded(self, executor: Executor | None) -> None:
        """Compute has started: with another set, with the one before if that could not be loaded, or after it died."""
        if executor and executor.ready:
            self.going = self.going if self.holds else ""
            self.holds, self.load_s = executor.loaded

    async def ahead(self, name: str) -> None:
        """Have the kernel read the weights of the next set into the page cache, as far as there is room, once."""
        if name in self.sets and name != self._read:
            self._read = name
            await asyncio.to_thread(_read_ahead, self._loads[0].models, self._cards, self.sets[name])


def _read_ahead(models: Models, cards: Sequence[ModelCard], pools: Collection[str]) -> None:
    """Ask for the files of these declared pools. What cannot be read loading will tell of."""
    folders = {name: source for name, source, _ in models}
    named = {
        (card.name, component)
        for card in cards for stage in card.pipeline.stages if card.pools()[stage.name] in pools
        for component in stage.components
    }  # fmt: skip
    for model, component in sorted(named):
        with suppress(OSError, ConfigError):
            for path in files_of(resolve_source(folders[model])).weights(component):
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
