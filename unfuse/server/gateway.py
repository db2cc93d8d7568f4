"""What the routes share: the scheduler, the result store, who may ask, and who is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import Request

from unfuse.core.card import ModelCard
from unfuse.core.errors import NotFound, Overloaded, UnknownModel
from unfuse.core.params import Delivery
from unfuse.core.plan import Params
from unfuse.core.request import Record
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.errors import Refusal
from unfuse.server.metrics import Metrics
from unfuse.stores.results import ResultStore


class Gateway:
    """The parts one application serves. `keys` maps API keys to tenants, `names` public names to models' own."""

    def __init__(
        self, scheduler: Scheduler, results: ResultStore, keys: Mapping[str, str], names: Mapping[str, str]
    ) -> None:
        self.scheduler = scheduler
        self.queue = scheduler.queue
        self.results = results
        self.keys = keys
        self.metrics = Metrics()
        self._names = names
        self._followed: dict[str, asyncio.Task[None]] = {}

    async def models(self) -> dict[str, ModelCard]:
        """Served models by the name clients use."""
        cards = await self.scheduler.cards()
        renamed = {public: cards[own] for public, own in self._names.items() if own in cards}
        return renamed | {name: card for name, card in cards.items() if name not in self._names.values()}

    async def model(self, name: object) -> ModelCard:
        """The card of a served model, which may be left out (None) where one alone is served.

        Raises UnknownModel, or Refusal while nothing is served at all.
        """
        served = await self.models()
        known = ", ".join(sorted(served))
        if not served:
            raise Refusal(503, "no_model", "no model is served yet: start a worker", headers={"retry-after": "2"})
        if name is None and len(served) == 1:
            return next(iter(served.values()))
        if name is None:
            raise UnknownModel(f"model is missing: one of {known}", "model")
        if not isinstance(name, str) or name not in served:
            raise UnknownModel(f"no model {str(name)[:80]!r} is served: one of {known}", "model")
        return served[name]

    async def submit(
        self, card: ModelCard, params: Params, n: int, tenant: str, key: str, fingerprint: str, delivery: Delivery
    ) -> Record:
        """Hand a checked request to the scheduler, and count its outcome once it is over (or the queue closes).

        Raises Overloaded.
        """
        try:
            record = await self.scheduler.submit(
                card,
                params,
                n=n,
                tenant=tenant,
                idempotency_key=key,
                fingerprint=fingerprint,
                priority=delivery.priority,
                timeout=delivery.timeout,
                metadata=delivery.metadata,
            )
        except Overloaded:
            self.metrics.rejected()
            raise
        if record.context.id not in self._followed and not record.context.over:
            self.metrics.submitted()
            task = asyncio.create_task(self._follow(record.context.id))
            self._followed[record.context.id] = task
            task.add_done_callback(lambda _: self._followed.pop(record.context.id))
        return record

    async def load(self, request: str, tenant: str) -> Record:
        """A tenant's own request. Raises NotFound, also for another's."""
        record = await self.queue.load(request)
        if record.context.tenant != tenant:
            raise NotFound(f"no request {request} is known (any more)")
        return record

    async def finished(self, record: Record) -> Record:
        """The request once it is over. A caller that stops waiting changes nothing for it.

        Raises Refusal when the queue closes first.
        """
        async for _ in self.queue.watch(record.context.id):
            pass
        record = await self.queue.load(record.context.id)
        if not record.context.over:
            message = f"the server is stopping; {record.context.id} may still be completed"
            raise Refusal(503, "stopping", message, headers={"retry-after": "2"})
        return record

    async def _follow(self, request: str) -> None:
        async for _ in self.queue.watch(request):
            pass
        self.metrics.ended((await self.queue.load(request)).context)


def gateway_of(request: Request) -> Gateway:
    """The gateway behind a request: a dependency of every route."""
    gateway: Gateway = request.app.state.gateway
    return gateway
