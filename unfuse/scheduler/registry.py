"""The registry of workers, models and pools, as one scheduler sees it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import structlog
from msgspec.structs import replace

from unfuse.core.messages import WorkerInfo
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import StageSelector, declared_pool, roles_of
from unfuse.core.task import Lease
from unfuse.core.worker_status import ChangedFile
from unfuse.queues.base import DeclaredModels, RegisteredWorker, WorkerRegistry

#: Prefix of the names of declarations that admit or dismiss one model. The model's name follows.
ADMITTED = "model "

log = structlog.get_logger(__name__)


class Registry:
    """Workers, models and pools of one queue.

    A pool is live if a worker serves it (`live_pools`). Otherwise it is scaled to zero if that is declared
    (`scaled_to_zero`), and unavailable if not (`unavailable_pools`). Methods that are not coroutines answer from the
    last read of the queue, so their answers may be stale.

    lease_ttl: seconds since the last heartbeat for which a worker counts as live.
    specs: specs of the configured models.
    scalable_roles: roles whose pools may scale to zero, with the number of slots that their workers have.
    cold_start_limit: most seconds by which cold starts move a request's deadline.
    """

    def __init__(
        self,
        queue: WorkerRegistry,
        lease_ttl: float,
        specs: Sequence[ModelSpec] = (),
        scalable_roles: Mapping[str, int] = MappingProxyType({}),
        cold_start_limit: float = 0.0,
    ) -> None:
        self._queue = queue
        self._lease_ttl = lease_ttl
        self._scalable_roles = scalable_roles
        self.cold_start_limit = cold_start_limit
        self._cards = {spec.name: spec for spec in specs}
        #: By declared pool, the number of live workers of each pool that can serve it.
        self._live_pools: dict[str, Counter[str]] = {}
        #: By declared pool, the changed model file because of which live workers do not serve it.
        self._changed: dict[str, ChangedFile] = {}
        #: The workers with recent heartbeats that run no tasks because of a device.
        self.unhealthy: list[WorkerInfo] = []
        #: By live worker, the pools whose weights are loaded.
        self._loaded_pools: dict[str, frozenset[str]] = {}
        #: Slots of the declared pools that may scale to zero.
        self._scalable_pools: dict[str, int] = {}
        #: (model, worker) pairs for which a difference of weights was logged.
        self._logged_differences: set[tuple[str, str]] = set()
        #: All registered workers by id, including those without a recent heartbeat.
        self.known_workers: dict[str, WorkerInfo] = {}
        #: Names of the models that were admitted while schedulers ran.
        self.admitted = set[str]()
        #: Admitted models that cannot be served, by name.
        self.failed: dict[str, DeclaredModels] = {}

    async def workers(self) -> Sequence[RegisteredWorker]:
        """Return the live workers: those with a heartbeat within `lease_ttl` and healthy devices.

        Refreshes this registry.
        """
        members = await self._queue.workers()
        oldest_heartbeat = await self._queue.now() - self._lease_ttl
        self.known_workers.clear()
        self.known_workers.update((member.info.id, member.info) for member in members)
        recent = [member for member in members if member.last_heartbeat >= oldest_heartbeat]
        live = [member for member in recent if member.info.status.device_fault is None]
        self.unhealthy = [member.info for member in recent if member.info.status.device_fault]
        live_pools: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._changed = {pool: file for member in live for pool, file in member.info.changed.items()}
        for member in live:
            for pool in member.info.pools:
                live_pools[declared_pool(pool)][pool] += 1
        self._live_pools = dict(live_pools)
        self._loaded_pools = {member.info.id: frozenset(member.info.available_pools) for member in live}
        return live

    async def model_specs(self) -> dict[str, ModelSpec]:
        """Return the specs of the served models, by name. Refreshes this registry.

        A live worker's spec of a model takes precedence over a declared one, and that over a configured one. Among
        several workers, the last one's spec counts. Dismissed and failed models are left out.
        """
        declarations = await self._queue.declarations()
        admitted = {
            name.removeprefix(ADMITTED): models for name, models in declarations.items() if name.startswith(ADMITTED)
        }
        self.admitted = {name for name, models in admitted.items() if models.is_current}
        self.failed = {name: models for name, models in admitted.items() if models.failure}

        declared = [models for models in declarations.values() if not models.failure]
        # The declaration in the queue may be of another scheduler, without this one's models, so these are added.
        configured = self._declaration([*self._cards.values()])
        self._scalable_pools = {
            pool: slots for models in (configured, *declared) for pool, slots in models.scalable_to_zero.items()
        }
        specs = self._cards | {spec.name: spec for models in declared for spec in models.models}
        for member in await self.workers():
            for model_spec in member.models:
                self._log_difference(specs.get(model_spec.name), model_spec, member.info.id)
                specs[model_spec.name] = model_spec
        not_served = self.failed.keys() | {name for models in declared for name in models.withdrawn}
        return {name: spec for name, spec in specs.items() if name not in not_served}

    @property
    def configured(self) -> Collection[str]:
        """The names of the configured models, in their order."""
        return self._cards.keys()

    def live_pools(self, pool: str) -> Mapping[str, int]:
        """Return the live pools that can serve a declared pool, with their numbers of workers.

        These pools differ in their numerics only.
        """
        return self._live_pools.get(declared_pool(pool), {})

    def has_other(self, pool: str, worker: str) -> bool:
        """Return whether another live worker has loaded the weights of this pool."""
        return any(id != worker and pool in pools for id, pools in self._loaded_pools.items())

    def is_exact(self, pool: str) -> bool:
        """Return whether a live pool is batch-invariant: a result does not depend on its batch."""
        workers = [info for info in self.known_workers.values() if pool in info.pools]
        return pool in self.live_pools(pool) and any(info.numerics.get("batching") == "exact" for info in workers)

    def waiting_pool(self, pool: str) -> str:
        """Return the pool in which a task of this pool should wait.

        That is the pool itself if it is live, else the equivalent live pool with most workers, if there is one.
        """
        live_pools = self.live_pools(pool)
        return pool if pool in live_pools or not live_pools else max(sorted(live_pools), key=live_pools.__getitem__)

    def state(self, pool: str) -> str:
        """Return the state of a pool: "live", "scaled_to_zero" or "unavailable"."""
        if pool in self.live_pools(pool):
            return "live"
        return "scaled_to_zero" if declared_pool(pool) in self._scalable_pools else "unavailable"

    def changed_file(self, *pools: str) -> ChangedFile | None:
        """Return the changed model file that leaves one of these pools without workers, or None.

        Files whose bytes were compared come first, then the order is by name.
        """
        pools_without_workers = (declared_pool(pool) for pool in pools if not self.live_pools(pool))
        files = (self._changed[pool] for pool in pools_without_workers if pool in self._changed)
        return min(files, key=lambda file: (not file.compared, file.name), default=None)

    def device_fault(self, *pools: str) -> str:
        """Return why a device leaves one of these pools without workers; "" if none does."""
        without_workers = {declared_pool(pool) for pool in pools if not self.live_pools(pool)}
        infos = (info for info in self.unhealthy if not without_workers.isdisjoint(map(declared_pool, info.pools)))
        return next((f"worker {info.id} is unhealthy: {info.status.device_fault}" for info in infos), "")

    def scaled_to_zero(self) -> Mapping[str, int]:
        """Return the declared pools that are scaled to zero, with their workers' future slots."""
        return {pool: slots for pool, slots in self._scalable_pools.items() if not self.live_pools(pool)}

    async def declare(self, specs: Sequence[ModelSpec]) -> None:
        """Declare these models to all schedulers of the queue, whether or not workers are live.

        An earlier dismissal or failure of one of them is withdrawn.
        """
        await self._queue.declare("serve", self._declaration(specs))
        declared = await self._queue.declarations()
        for spec in specs:
            record = declared.get(ADMITTED + spec.name)
            if record and (record.withdrawn or record.failure):
                await self.withdraw(spec.name)

    async def admit(self, spec: ModelSpec, server: str = "", *, overwrite: bool = False) -> bool:
        """Add a model to all schedulers of the queue, unless its name is taken.

        Returns whether it was added.

        server: the server that serves it again after a restart ("": none).
        overwrite: whether to replace an existing record of this name.
        """
        declaration = replace(self._declaration([spec]), source="admin", server=server)
        return await self._queue.declare(ADMITTED + spec.name, declaration, new=not overwrite)

    def _declaration(self, specs: Sequence[ModelSpec]) -> DeclaredModels:
        """Return a declaration of these models, with their pools that may scale to zero."""
        selectors = ((StageSelector(roles_of(role)), slots) for role, slots in self._scalable_roles.items())
        scalable_pools = {
            pool: slots for selector, slots in selectors for spec in specs for pool in spec.pools(selector).values()
        }
        return DeclaredModels(tuple(specs), scalable_pools)

    async def admin_records(self) -> dict[str, DeclaredModels]:
        """Return the records of models that an admin added, by name.

        Dismissed and failed models are included.
        """
        declared = (await self._queue.declarations()).items()
        admitted = {name.removeprefix(ADMITTED): models for name, models in declared if name.startswith(ADMITTED)}
        return {name: models for name, models in admitted.items() if models.source == "admin" and models.models}

    async def dismiss(self, name: str) -> None:
        """Stop serving a model on all schedulers until it is admitted or declared again.

        A model that an admin added stays recorded until `delete_dismissed` is called, since its accepted requests are
        still served.
        """
        record = (await self.admin_records()).get(name, DeclaredModels(()))
        await self._queue.declare(ADMITTED + name, replace(record, withdrawn=(name,), failure=""))

    async def delete_dismissed(self, name: str) -> None:
        """Delete the record of a dismissed model, after its last request has ended."""
        if (await self.dismissed_models()).intersection([name]):
            await self._queue.declare(ADMITTED + name, DeclaredModels((), withdrawn=(name,)))

    async def fail_model(self, spec: ModelSpec, reason: str, server: str = "") -> None:
        """Record why a model cannot be served, unless it was dismissed meanwhile.

        server: the server that loads it again after a restart ("": none).
        """
        if spec.name not in await self.dismissed_models():
            failed = DeclaredModels((spec,), source="admin", server=server, failure=reason)
            await self._queue.declare(ADMITTED + spec.name, failed)

    async def withdraw(self, name: str) -> None:
        """Delete the record by which a model was admitted, dismissed or failed."""
        await self._queue.declare(ADMITTED + name, DeclaredModels(()))

    async def dismissed_models(self) -> frozenset[str]:
        """Return the names of the dismissed models."""
        return frozenset(name for models in (await self._queue.declarations()).values() for name in models.withdrawn)

    async def unavailable_pools(self) -> dict[str, list[str]]:
        """Return the unavailable declared pools, by model. Empty if all served models can run.

        Pools that are scaled to zero are available.
        """
        specs = await self.model_specs()
        missing = {
            name: sorted(
                {
                    pool
                    for pool in spec.pools().values()
                    if not self.live_pools(pool) and pool not in self._scalable_pools
                }
            )
            for name, spec in specs.items()
        }
        return {name: pools for name, pools in missing.items() if pools}

    def pools(self, specs: Mapping[str, ModelSpec]) -> dict[str, list[str]]:
        """Return the names of the models of each pool, by pool.

        The pools are all live ones, and the declared ones without a live equivalent.

        specs: the models to consider, by name.
        """
        models: defaultdict[str, list[str]] = defaultdict(list)
        for name, spec in sorted(specs.items()):
            for pool in sorted(set(spec.pools().values())):
                for serving in sorted(self.live_pools(pool)) or [pool]:
                    models[serving].append(name)
        return models

    async def owners(self, leases: Sequence[Lease]) -> Mapping[str, WorkerInfo]:
        """Return the known workers that own inputs or checkpoints of these leases, by id."""
        owners = {ref.owner for lease in leases for ref in lease.input_objects}
        if not owners <= self.known_workers.keys():
            await self.workers()
        return {owner: self.known_workers[owner] for owner in owners if owner in self.known_workers}

    def _log_difference(self, previous: ModelSpec | None, spec: ModelSpec, worker: str) -> None:
        """Log once that a worker has other weights for a model name.

        New requests use the latest weights.
        """
        is_logged = (spec.name, worker) in self._logged_differences
        if previous is not None and previous.weights != spec.weights and not is_logged:
            self._logged_differences.add((spec.name, worker))
            log.warning("worker has other weights for a model, new requests use them", model=spec.name, worker=worker)
