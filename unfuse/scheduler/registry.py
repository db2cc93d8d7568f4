"""The registry of workers, models and pools, as one scheduler sees it."""

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

#: Prefix of the names of declarations that admit or dismiss one model. The model's name follows.
ADMITTED = "model "

log = structlog.get_logger(__name__)


class Registry:
    """Workers, models and pools of one queue.

    A pool is live if a worker serves it (`manned`), else scaled to zero if that is declared (`asleep`), else
    unavailable (`missing`). Methods that are not coroutines answer from the last read of the queue, possibly stale.

    lease_ttl: seconds since the last heartbeat for which a worker counts as live.
    cards: specs of the configured models.
    may_sleep: roles whose pools may scale to zero, with the number of slots that their workers have.
    wake_limit: most seconds by which cold starts move a request's deadline.
    """

    def __init__(
        self,
        queue: WorkerRegistry,
        lease_ttl: float,
        cards: Sequence[ModelSpec] = (),
        may_sleep: Mapping[str, int] = MappingProxyType({}),
        wake_limit: float = 0.0,
    ) -> None:
        self._queue = queue
        self._lease_ttl = lease_ttl
        self._may_sleep = may_sleep
        self.wake_limit = wake_limit
        self._cards = {card.name: card for card in cards}
        #: By declared pool, the number of live workers of each pool that can serve it.
        self._live_pools: dict[str, Counter[str]] = {}
        #: By declared pool, the changed model file because of which live workers do not serve it.
        self._changed: dict[str, ChangedFile] = {}
        #: By live worker, the pools whose weights are loaded.
        self._loaded_pools: dict[str, frozenset[str]] = {}
        #: Slots of the declared pools that may scale to zero.
        self._scalable_pools: dict[str, int] = {}
        #: (model, worker) pairs for which a difference of weights was logged.
        self._logged_differences: set[tuple[str, str]] = set()
        #: All registered workers by id, including those without a recent heartbeat.
        self.known: dict[str, WorkerInfo] = {}
        #: Names of the models that were admitted while schedulers ran.
        self.admitted = set[str]()
        #: Admitted models that cannot be served, by name.
        self.failed: dict[str, DeclaredModels] = {}

    async def workers(self) -> Sequence[RegisteredWorker]:
        """Return the live workers, those with a heartbeat within `lease_ttl`. Refreshes this registry."""
        members = await self._queue.workers()
        horizon = await self._queue.now() - self._lease_ttl
        self.known.clear()
        self.known.update((member.info.id, member.info) for member in members)
        live = [member for member in members if member.seen >= horizon]
        live_pools: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._changed = {pool: file for member in live for pool, file in member.info.changed.items()}
        for member in live:
            for pool in member.info.pools:
                live_pools[declared(pool)][pool] += 1
        self._live_pools = dict(live_pools)
        self._loaded_pools = {member.info.id: frozenset(member.info.open) for member in live}
        return live

    async def cards(self) -> dict[str, ModelSpec]:
        """Return the specs of the served models, by name. Refreshes this registry.

        The spec of the live worker that comes last wins, then declared ones, then configured ones. Dismissed and failed
        models are left out.
        """
        declarations = await self._queue.declared()
        admitted = {
            name.removeprefix(ADMITTED): models for name, models in declarations.items() if name.startswith(ADMITTED)
        }
        self.admitted = {name for name, models in admitted.items() if models.is_current}
        self.failed = {name: models for name, models in admitted.items() if models.failed}

        declared = [models for models in declarations.values() if not models.failed]
        configured = self._declaration([*self._cards.values()])  # the last scheduler that declared may serve others
        self._scalable_pools = {
            pool: slots for models in (configured, *declared) for pool, slots in models.asleep.items()
        }
        cards = self._cards | {card.name: card for models in declared for card in models.cards}
        for member in await self.workers():
            for card in member.cards:
                self._log_difference(cards.get(card.name), card, member.info.id)
                cards[card.name] = card
        not_served = self.failed.keys() | {name for models in declared for name in models.gone}
        return {name: card for name, card in cards.items() if name not in not_served}

    @property
    def configured(self) -> Collection[str]:
        """The names of the configured models, in their order."""
        return self._cards.keys()

    def manned(self, pool: str) -> Mapping[str, int]:
        """Return the live pools that can serve a declared pool, with their numbers of workers.

        They differ in their numerics only.
        """
        return self._live_pools.get(declared(pool), {})

    def has_other(self, pool: str, worker: str) -> bool:
        """Return whether another live worker has loaded the weights of this pool."""
        return any(id != worker and pool in pools for id, pools in self._loaded_pools.items())

    def is_exact(self, pool: str) -> bool:
        """Return whether a live pool is batch-invariant: a result does not depend on its batch."""
        workers = [info for info in self.known.values() if pool in info.pools]
        return pool in self.manned(pool) and any(info.outcome.get("batching") == "exact" for info in workers)

    def home(self, pool: str) -> str:
        """Return the pool in which a task of this pool should wait.

        That is the pool itself if it is live, else the equivalent live pool with most workers, if there is one.
        """
        live_pools = self.manned(pool)
        return pool if pool in live_pools or not live_pools else max(sorted(live_pools), key=live_pools.__getitem__)

    def state(self, pool: str) -> str:
        """Return the state of a pool: live, scaled to zero or unavailable.

        The values are "manned", "asleep" and "missing", in this order.
        """
        if pool in self.manned(pool):
            return "manned"
        return "asleep" if declared(pool) in self._scalable_pools else "missing"

    def changed_file(self, *pools: str) -> ChangedFile | None:
        """Return the changed model file that leaves one of these pools without workers, or None.

        Files whose bytes were compared come first, then the order is by name.
        """
        pools_without_workers = (declared(pool) for pool in pools if not self.manned(pool))
        files = (self._changed[pool] for pool in pools_without_workers if pool in self._changed)
        return min(files, key=lambda file: (not file.compared, file.name), default=None)

    def asleep(self) -> Mapping[str, int]:
        """Return the declared pools that are scaled to zero, with their workers' future slots."""
        return {pool: slots for pool, slots in self._scalable_pools.items() if not self.manned(pool)}

    async def declare(self, cards: Sequence[ModelSpec]) -> None:
        """Declare these models to all schedulers of the queue, whether or not workers are live.

        A former dismissal or failure of one of them is withdrawn.
        """
        await self._queue.declare("serve", self._declaration(cards))
        declared = await self._queue.declared()
        for card in cards:
            known = declared.get(ADMITTED + card.name)
            if known and (known.gone or known.failed):
                await self.withdraw(card.name)

    async def admit(self, card: ModelSpec, server: str = "", *, again: bool = False) -> bool:
        """Add a model to all schedulers of the queue, unless its name is taken.

        Returns whether it was added.

        server: the server that serves it again after a restart ("": none).
        again: replace an existing record of this name.
        """
        declaration = replace(self._declaration([card]), source="admin", server=server)
        return await self._queue.declare(ADMITTED + card.name, declaration, new=not again)

    def _declaration(self, cards: Sequence[ModelSpec]) -> DeclaredModels:
        """Return a declaration of these models, with their pools that may scale to zero."""
        roles = ((StageSelector(roles_of(role)), slots) for role, slots in self._may_sleep.items())
        asleep = {pool: slots for role, slots in roles for card in cards for pool in card.pools(role).values()}
        return DeclaredModels(tuple(cards), asleep)

    async def recorded(self) -> dict[str, DeclaredModels]:
        """Return the records of models that an admin added, by name.

        Dismissed and failed models are included.
        """
        declared = (await self._queue.declared()).items()
        admitted = {name.removeprefix(ADMITTED): models for name, models in declared if name.startswith(ADMITTED)}
        return {name: models for name, models in admitted.items() if models.source == "admin" and models.cards}

    async def dismiss(self, name: str) -> None:
        """Stop serving a model on all schedulers until it is admitted or declared again.

        A model that an admin added stays recorded until `left` is called, since its accepted requests are still served.
        """
        record = (await self.recorded()).get(name, DeclaredModels(()))
        await self._queue.declare(ADMITTED + name, replace(record, gone=(name,), failed=""))

    async def left(self, name: str) -> None:
        """Delete the record of a dismissed model, after its last request has ended."""
        if (await self.gone()).intersection([name]):
            await self._queue.declare(ADMITTED + name, DeclaredModels((), gone=(name,)))

    async def fail(self, card: ModelSpec, reason: str, server: str = "") -> None:
        """Record why a model cannot be served, unless it was dismissed meanwhile.

        server: the server that loads it again after a restart ("": none).
        """
        if card.name not in await self.gone():
            failed = DeclaredModels((card,), source="admin", server=server, failed=reason)
            await self._queue.declare(ADMITTED + card.name, failed)

    async def withdraw(self, name: str) -> None:
        """Delete the record by which a model was admitted, dismissed or failed."""
        await self._queue.declare(ADMITTED + name, DeclaredModels(()))

    async def gone(self) -> frozenset[str]:
        """Return the names of the dismissed models."""
        return frozenset(name for models in (await self._queue.declared()).values() for name in models.gone)

    async def missing(self) -> dict[str, list[str]]:
        """Return the unavailable declared pools, by model. Empty if all served models can run.

        Pools that are scaled to zero are available.
        """
        cards = await self.cards()
        missing = {
            name: sorted(
                {pool for pool in card.pools().values() if not self.manned(pool) and pool not in self._scalable_pools}
            )
            for name, card in cards.items()
        }
        return {name: pools for name, pools in missing.items() if pools}

    def pools(self, cards: Mapping[str, ModelSpec]) -> dict[str, list[str]]:
        """Return the names of the models of each pool.

        Pools are all live ones, and the declared ones without a live equivalent.

        cards: the models to consider, by name.
        """
        models: defaultdict[str, list[str]] = defaultdict(list)
        for name, card in sorted(cards.items()):
            for pool in sorted(set(card.pools().values())):
                for serving in sorted(self.manned(pool)) or [pool]:
                    models[serving].append(name)
        return models

    async def owners(self, leases: Sequence[Lease]) -> Mapping[str, WorkerInfo]:
        """Return the known workers that own inputs or checkpoints of these leases, by id."""
        owners = {ref.owner for lease in leases for ref in lease.reads}
        if not owners <= self.known.keys():
            await self.workers()
        return {owner: self.known[owner] for owner in owners if owner in self.known}

    def _log_difference(self, known: ModelSpec | None, card: ModelSpec, worker: str) -> None:
        """Log once that a worker has other weights for a model name.

        New requests use the latest weights.
        """
        is_logged = (card.name, worker) in self._logged_differences
        if known is not None and known.weights != card.weights and not is_logged:
            self._logged_differences.add((card.name, worker))
            log.warning("worker has other weights for a model, new requests use them", model=card.name, worker=worker)
