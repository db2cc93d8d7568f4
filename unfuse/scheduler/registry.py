"""Who works for a queue, as one scheduler knows it: workers, the cards they bring, and the pools they man."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import structlog
from msgspec.structs import replace

from unfuse.core.messages import ChangedFile, WorkerInfo
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import StageSelector, declared, roles_of
from unfuse.core.task import Lease
from unfuse.queues.base import DeclaredModels, RegisteredWorker, WorkerRegistry

ADMITTED = "model "  # what a declaration is called, before a model's name, by which it was admitted or dismissed

log = structlog.get_logger(__name__)


class Registry:
    """Workers count as long as they were heard of within `lease_ttl` seconds. `cards` are those it was configured with.
    Workers of the roles in `may_sleep` may be away, for models declared here; each with the slots that they would have.
    `wake_limit` is the most seconds that a deadline moves while they come.

    A pool is manned; or asleep, where somebody declared that it may have no workers; or else it is missing. What is
    answered without waiting is as of the last look at the queue.
    """

    def __init__(
        self,
        queue: WorkerRegistry,
        lease_ttl: float,
        cards: Sequence[ModelSpec] = (),
        may_sleep: Mapping[str, int] = MappingProxyType({}),
        wake_limit: float = 0.0,
    ) -> None:
        self._queue, self._lease_ttl, self._may_sleep, self.wake_limit = queue, lease_ttl, may_sleep, wake_limit
        self._cards = {card.name: card for card in cards}
        self._manned: dict[str, Counter[str]] = {}
        self._changed: dict[str, ChangedFile] = {}
        self._open: dict[str, frozenset[str]] = {}
        self._asleep: dict[str, int] = {}
        self._differing: set[tuple[str, str]] = set()
        self.known: dict[str, WorkerInfo] = {}  # every registered worker by id, those that were silent lately too
        self.admitted = set[str]()  # the models that were admitted while schedulers ran
        self.failed: dict[str, DeclaredModels] = {}
        """Models that were admitted and cannot be served, by name."""

    async def workers(self) -> Sequence[RegisteredWorker]:
        """Workers heard of within a lease time."""
        members = await self._queue.workers()
        horizon = await self._queue.now() - self._lease_ttl
        self.known.clear()
        self.known.update((member.info.id, member.info) for member in members)
        live = [member for member in members if member.seen >= horizon]
        manned: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._changed = {pool: file for member in live for pool, file in member.info.changed.items()}
        for member in live:
            for pool in member.info.pools:
                manned[declared(pool)][pool] += 1
        self._manned = dict(manned)
        self._open = {member.info.id: frozenset(member.info.open) for member in live}
        return live

    async def cards(self) -> dict[str, ModelSpec]:
        """Served models by name: what a live worker says goes before what is declared or configured, and before
        those that came earlier. What was dismissed is not served, whoever brings it.
        """
        found = await self._queue.declared()
        admitted = {by.removeprefix(ADMITTED): one for by, one in found.items() if by.startswith(ADMITTED)}
        self.admitted = {name for name, one in admitted.items() if one.is_current}
        self.failed = {name: one for name, one in admitted.items() if one.failed}
        declared = [one for one in found.values() if not one.failed]
        own = self._declaration([*self._cards.values()])  # whoever declared last may serve other models
        self._asleep = {pool: slots for one in (own, *declared) for pool, slots in one.asleep.items()}
        cards = self._cards | {card.name: card for one in declared for card in one.cards}
        for member in await self.workers():
            for card in member.cards:
                self._compare(cards.get(card.name), card, member.info.id)
                cards[card.name] = card
        gone = self.failed.keys() | {name for one in declared for name in one.gone}
        return {name: card for name, card in cards.items() if name not in gone}

    @property
    def configured(self) -> Collection[str]:
        """The models that it was configured with, in their order."""
        return self._cards.keys()

    def manned(self, pool: str) -> Mapping[str, int]:
        """The pools with live workers that could serve what is declared for this one, and how many work in each."""
        return self._manned.get(declared(pool), {})

    def has_other(self, pool: str, worker: str) -> bool:
        """Return whether another live worker than this one has loaded that pool."""
        return any(id != worker and pool in pools for id, pools in self._open.items())

    def is_exact(self, pool: str) -> bool:
        """Whether live workers man that very pool, and give each request its bytes whatever else they run."""
        workers = [info for info in self.known.values() if pool in info.pools]
        return pool in self.manned(pool) and any(info.outcome.get("batching") == "exact" for info in workers)

    def home(self, pool: str) -> str:
        """Where a task of that pool waits for somebody: there, unless only other workers could serve it."""
        manned = self.manned(pool)
        return pool if pool in manned or not manned else max(sorted(manned), key=manned.__getitem__)

    def state(self, pool: str) -> str:
        """Whether it is manned, asleep or missing."""
        if pool in self.manned(pool):
            return "manned"
        return "asleep" if declared(pool) in self._asleep else "missing"

    def changed_file(self, *pools: str) -> ChangedFile | None:
        """Return the changed file because of which one of these pools has no workers; None if there is none."""
        lacking = (declared(pool) for pool in pools if not self.manned(pool))
        found = (self._changed[pool] for pool in lacking if pool in self._changed)
        return min(found, key=lambda file: (not file.compared, file.name), default=None)

    def asleep(self) -> Mapping[str, int]:
        """The slots of declared pools without workers that need none now."""
        return {pool: slots for pool, slots in self._asleep.items() if not self.manned(pool)}

    async def declare(self, cards: Sequence[ModelSpec]) -> None:
        """Have every scheduler of the queue know of these models, whoever serves them."""
        await self._queue.declare("serve", self._declaration(cards))
        declared = await self._queue.declared()
        for card in cards:
            known = declared.get(ADMITTED + card.name)
            if known and (known.gone or known.failed):
                await self.withdraw(card.name)

    async def admit(self, card: ModelSpec, server: str = "", *, again: bool = False) -> bool:
        """Have every scheduler of the queue serve this model too. Returns False if its name is taken.

        It is recorded, and the server of that name serves it when it starts: `again`, in place of the last record.
        """
        declaration = replace(self._declaration([card]), source="admin", server=server)
        return await self._queue.declare(ADMITTED + card.name, declaration, new=not again)

    def _declaration(self, cards: Sequence[ModelSpec]) -> DeclaredModels:
        roles = ((StageSelector(roles_of(role)), slots) for role, slots in self._may_sleep.items())
        asleep = {pool: slots for role, slots in roles for card in cards for pool in card.pools(role).values()}
        return DeclaredModels(tuple(cards), asleep)

    async def recorded(self) -> dict[str, DeclaredModels]:
        """The records of models that an admin added, by name, those that leave or failed included."""
        declared = (await self._queue.declared()).items()
        named = {by.removeprefix(ADMITTED): one for by, one in declared if by.startswith(ADMITTED)}
        return {name: one for name, one in named.items() if one.source == "admin" and one.cards}

    async def dismiss(self, name: str) -> None:
        """Have no scheduler of the queue serve this model any more, until it is admitted or declared again.

        What an admin added stays recorded until it `left`, since its accepted requests are still served.
        """
        known = (await self.recorded()).get(name, DeclaredModels(()))
        await self._queue.declare(ADMITTED + name, replace(known, gone=(name,), failed=""))

    async def left(self, name: str) -> None:
        """Record no longer a model that was dismissed, and whose requests are over."""
        if (await self.gone()).intersection([name]):
            await self._queue.declare(ADMITTED + name, DeclaredModels((), gone=(name,)))

    async def fail(self, card: ModelSpec, reason: str, server: str = "") -> None:
        """Say why a model cannot be served; with a `server`, that one tries it again when it starts.

        One that was dismissed meanwhile stays so.
        """
        if card.name not in await self.gone():
            failed = DeclaredModels((card,), source="admin", server=server, failed=reason)
            await self._queue.declare(ADMITTED + card.name, failed)

    async def withdraw(self, name: str) -> None:
        """Take back that this model was admitted or dismissed, and why it could not be served."""
        await self._queue.declare(ADMITTED + name, DeclaredModels(()))

    async def gone(self) -> frozenset[str]:
        """The models that were dismissed."""
        return frozenset(name for one in (await self._queue.declared()).values() for name in one.gone)

    async def missing(self) -> dict[str, list[str]]:
        """Declared pools without a live worker that should have one, by model; empty when everything served can run."""
        cards = await self.cards()
        lacking = {
            name: sorted({pool for pool in card.pools().values() if not self.manned(pool) and pool not in self._asleep})
            for name, card in cards.items()
        }
        return {name: pools for name, pools in lacking.items() if pools}

    def pools(self, cards: Mapping[str, ModelSpec]) -> dict[str, list[str]]:
        """Of these models by name, those of every pool: of all that are manned, and of declared ones that are not."""
        models: defaultdict[str, list[str]] = defaultdict(list)
        for name, card in sorted(cards.items()):
            for pool in sorted(set(card.pools().values())):
                for served in sorted(self.manned(pool)) or [pool]:
                    models[served].append(name)
        return models

    async def owners(self, leases: Sequence[Lease]) -> Mapping[str, WorkerInfo]:
        """Every worker that owns an input or a checkpoint of these leases, by id, as far as they are known."""
        owners = {ref.owner for lease in leases for ref in lease.reads}
        if not owners <= self.known.keys():
            await self.workers()
        return {owner: self.known[owner] for owner in owners if owner in self.known}

    def _compare(self, known: ModelSpec | None, card: ModelSpec, worker: str) -> None:
        """Say once that workers mean different things by one model: requests are for those that came last."""
        if known is not None and known.weights != card.weights and (card.name, worker) not in self._differing:
            self._differing.add((card.name, worker))
            log.warning(
                "a worker brings other weights of a model: new requests are for these", model=card.name, worker=worker
            )
