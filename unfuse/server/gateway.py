"""What the routes share: the scheduler, the result store, who may ask, and who is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request

from unfuse.core.card import ModelCard
from unfuse.core.errors import NotFound, UnknownModel
from unfuse.core.request import Record
from unfuse.queues.base import Filter
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.errors import Refusal
from unfuse.server.metrics import Metrics
from unfuse.stores.results import ResultStore

PICTURES_AT_ONCE = 2
"""Uploads decoded at a time: each may take 160 MB while it is."""

_PAGE = 200


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
        self.decoding = CapacityLimiter(PICTURES_AT_ONCE)
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

    def follow(self, record: Record) -> None:
        """Count a request that was accepted, and what becomes of it once it is over (or the queue closes)."""
        request = record.context.id
        if request not in self._followed and not record.context.over:
            self.metrics.submitted()
            self._followed[request] = asyncio.create_task(self._follow(request))
            self._followed[request].add_done_callback(lambda _: self._followed.pop(request))

    async def load(self, request: str, tenant: str) -> Record:
        """A tenant's own request. Raises NotFound, also for another's."""
        record = await self.queue.load(request)
        if record.context.tenant != tenant:
            raise NotFound(f"no request {request} is known (any more)")
        return record

    async def find(
        self, which: Filter, wanted: Callable[[Record], bool], after: str | None, limit: float
    ) -> list[Record]:
        """At least `limit` requests, if there are as many behind that of id `after`, newest first. Raises NotFound."""
        found: list[Record] = []
        while len(found) < limit:
            page = await self.queue.list(which, after=after, limit=_PAGE)
            found += [record for record in page if wanted(record)]
            if len(page) < _PAGE:
                break
            after = page[-1].context.id
        return found

    async def delete(self, request: str) -> None:
        """End a request and forget it, with its files."""
        await self.scheduler.cancel(request)
        if following := self._followed.get(request):
            await asyncio.wait({following})
        await to_thread.run_sync(self.results.delete, request)
        await self.queue.drop(request)

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
        context = (await self.queue.load(request)).context
        self.metrics.ended(context)
        if context.over and context.params.keys() & {"image", "preview_every"}:
            await to_thread.run_sync(self.results.detach, request)


def is_video(record: Record) -> bool:
    """Whether a request is one of /v1/videos, as its id tells."""
    return record.context.id.startswith("video_")


def base_of(request: Request) -> str:
    """Where the client reached this gateway: what the addresses it is given begin with."""
    return str(request.base_url).rstrip("/")


def gateway_of(request: Request) -> Gateway:
    """The gateway behind a request: a dependency of every route."""
    gateway: Gateway = request.app.state.gateway
    return gateway
