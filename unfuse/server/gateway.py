"""What all routes share: the scheduler, the result store, API keys, waiting for requests, metrics."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated

import structlog
from anyio import CapacityLimiter, to_thread
from fastapi import Depends
from msgspec.structs import replace
from starlette.requests import Request
from typing_extensions import override

from unfuse.core.errors import (
    Damaged,
    InvalidParameter,
    NotFound,
    Overloaded,
    ResultsUnavailable,
    TransientError,
    UnknownModel,
    Unsuitable,
)
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Params
from unfuse.core.request import MODERATION_BLOCKED, TERMINAL_EVENTS, RequestContext, RequestRecord, billed_seconds
from unfuse.core.supervisor import Supervisor
from unfuse.edge.access import Refusal
from unfuse.edge.keys import DEFAULT_TENANT, ApiKeys
from unfuse.queues.base import DeclaredModels
from unfuse.scheduler.lifecycle import MODEL_FAILED, WEIGHTS_CHANGED
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.chat_formats import GrammarChecker, OutputParsers
from unfuse.server.errors import refusal_of
from unfuse.server.links import SignedLinks
from unfuse.server.metrics import Metrics
from unfuse.server.multimodal_messages import ImageFetcher
from unfuse.server.request_objects import FREE, Prices, request_object
from unfuse.server.result_cache import ResultCache
from unfuse.server.served_models import AddModel, ModelNames
from unfuse.server.webhooks import Webhooks
from unfuse.stores.results import PART, ResultStore
from unfuse.weights.adapters import AdapterFolder

#: The HTTP status for a failed request by its error code; 500 for any other code.
STATUSES = {"invalid_parameter": 400, MODERATION_BLOCKED: 400, WEIGHTS_CHANGED: 503, MODEL_FAILED: 503}

#: How many uploads are decoded at one time, since each may take 160 MB; and how many adapters are read.
PICTURES_AT_ONCE = 2


log = structlog.get_logger(__name__)


class Gateway(Observer):
    """The parts one application serves. The scheduler's life, and that of all parts, is the caller's.

    Without `keys`, every caller is the tenant `default`. `names` maps the names that clients use to those of models
    that go by another one here. `standard` is what every request gets beside its model's defaults, where it does not
    say otherwise; `loras` is the folder of adapters, if any. A `strict` one refuses what it would have to ignore.
    `time_limits` are seconds that a request's stages may run, by medium; 0 or none: any number. `store` is the kind of
    place where workers keep outputs. With `cancels`, a request whose waiting client disconnects is cancelled. With one
    that `reuses`, equal requests get equal results without being made again. Without `webhooks` nobody is told of the
    ends of requests; without `prices` they cost no money; without `image_fetcher` no picture is fetched; `joining` adds
    models; `parsers` selects the parsers of answers. Links begin with the `public_url` ("": with the address that the
    client used). With `open_metrics`, everybody sees all metrics. What the scheduler does it counts and logs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        results: ResultStore,
        *,
        keys: ApiKeys | None = None,
        names: Mapping[str, str] | None = None,
        standard: Params | None = None,
        loras: str = "",
        strict: bool = False,
        time_limits: Mapping[str, float] | None = None,
        store: str = "shared_memory",
        cancels: bool = False,
        reuses: bool = False,
        webhooks: Webhooks | None = None,
        prices: Prices = FREE,
        image_fetcher: ImageFetcher | None = None,
        joining: AddModel | None = None,
        public_url: str = "",
        parsers: OutputParsers | None = None,
        open_metrics: bool = False,
    ) -> None:
        self.scheduler, self.queue, self.results = scheduler, scheduler.queue, results
        self.keys, self._prices, self._public_url = keys or ApiKeys(), prices, public_url
        self.links = SignedLinks(scheduler.queue, scheduler.clock, signs=bool(self.keys))
        self.names, self._standard, self.strict = ModelNames(names or {}), standard or {}, strict
        self.metrics = Metrics(store, self.names.shown)
        self.decoding = CapacityLimiter(PICTURES_AT_ONCE)
        self.grammar_checker, self.image_fetcher = GrammarChecker(self.metrics), image_fetcher or ImageFetcher()
        self.time_limits = time_limits or {}
        self.cancels, self.open_metrics = cancels, open_metrics
        self.result_cache = ResultCache(scheduler, results) if reuses else None
        self.loras = AdapterFolder(loras) if loras else None
        self.joining, self._no_room = joining or AddModel(), ""
        self.parsers = parsers or OutputParsers()
        self.awaited = Counter[str]()  # how many callers wait here for each request
        self._releasing: dict[str, asyncio.Task[None]] = {}
        self.background, self.webhooks = Supervisor(), webhooks or Webhooks()
        scheduler.observers.add(self.metrics, self)

    async def models(self, only: frozenset[str] | None = None) -> dict[str, ModelSpec]:
        """The served models, by the names that clients use; of these `only`, if any are said."""
        found = await self.scheduler.registry.cards()
        cards = {name: replace(card, defaults=card.defaults | self._standard) for name, card in found.items()}
        return {name: card for name, card in self.names.of(cards).items() if only is None or name in only}

    async def model(self, name: object, only: frozenset[str] | None = None) -> tuple[str, ModelSpec]:
        """A served model, by the name clients use; without a name (None) the default one.

        Raises UnknownModel, also for one that is not among these `only`, InvalidParameter where none is the default,
        and Refusal while nothing is served at all, or for a model that was added and cannot be served.
        """
        served = await self.models(only)
        known = ", ".join(sorted(served))
        if isinstance(name, str) and (failed := self.failed(only).get(name)):
            raise Refusal(
                503,
                MODEL_FAILED,
                f"model {name!r} cannot be served: {failed.failed}",
                "model",
                {"x-should-retry": "false"},
            )
        if not served and only is not None:
            raise UnknownModel("no model that this key may use is served", "model")
        if not served:
            raise Refusal(503, "no_model", "no model is served yet: start a worker", headers={"retry-after": "2"})
        if name is None:
            if default := self.default(served):
                return default, served[default]
            raise InvalidParameter(f"model is missing: send one of {known}", "model")
        found = self.names.asked(name) if isinstance(name, str) else ""
        if found not in served:
            raise UnknownModel(f"no model {_shown(name)!r} is served: one of {known}", "model")
        return found, served[found]

    def default(self, served: Mapping[str, ModelSpec]) -> str | None:
        """Which of these models is meant by requests without one: the first that the server was started with.

        Where it was started with none of them, it is the only one, if there is one alone.
        """
        configured = self.scheduler.registry.configured
        if named := [name for name, card in served.items() if card.name in configured]:
            return named[0]
        return next(iter(served)) if len({card.name for card in served.values()}) == 1 else None

    def failed(self, only: frozenset[str] | None = None) -> dict[str, DeclaredModels]:
        """The added models that cannot be served, by name, as of the last look; of these `only`."""
        found = {self.names.shown(own): one for own, one in self.scheduler.registry.failed.items()}
        return {name: one for name, one in found.items() if only is None or name in only}

    async def lora_ids(self, card: ModelSpec, named: str) -> str:
        """The hashes of adapters' contents, so that workers use the same. Raises InvalidParameter."""
        if not card.takes_lora:
            raise InvalidParameter(f"model {card.name} takes no lora: leave it out", "lora")
        if self.loras is None:
            raise InvalidParameter("no lora is served here: start the server with --loras FOLDER", "lora")
        try:
            return await to_thread.run_sync(self.loras.ids_of, named, limiter=self.decoding)
        except (NotFound, Unsuitable) as error:
            raise InvalidParameter(str(error), "lora") from error

    @override
    def submitted(self, context: RequestContext) -> None:
        log.info("accepted", request=context.id, model=context.request.model, tenant=context.caller.tenant)

    @override
    def ended(self, context: RequestContext) -> None:
        """Log a request that this scheduler ended, whichever accepted it, count what it cost, delete its uploads."""
        self.billed(context, billed_seconds(context))
        told: dict[str, object] = {"model": context.request.model, "tenant": context.caller.tenant}
        told |= {"status": context.status, "dead": context.dead}
        if context.error:
            told |= {"code": context.error.code, "stage": context.error.stage}
        seconds = round((context.completed_at or 0.0) - context.created_at, 3)
        log.info("ended", request=context.id, **told, seconds=seconds)
        self.release(context, PART if context.dead else "")

    @override
    def billed(self, context: RequestContext, seconds: Mapping[str, float]) -> None:
        """Count what a request has used, of a tenant that has no key any more as of `other`."""
        known = {DEFAULT_TENANT, *(key.tenant for key in self.keys.all())}
        tenant = context.caller.tenant if context.caller.tenant in known else "other"
        self.metrics.charged(self.names.shown(context.request.model), tenant, seconds, self._prices)

    @contextmanager
    def refusals_logged(self, tenant: str, model: object) -> Iterator[None]:
        """Count and log the refusal of a creating call. Of what the client sent, only names are logged."""
        try:
            yield
        except (InvalidParameter, Overloaded, Refusal) as error:
            refusal, told = refusal_of(error), {"model": _shown(model), "tenant": tenant}
            if isinstance(error, Overloaded):
                self.metrics.count("unfuse_requests_rejected_total")
                told["reason"] = str(error)
            log.info("rejected", status=refusal.status, code=refusal.code, param=refusal.param, **told)
            raise

    async def view(self, request: Request, record: RequestRecord, *, evidence: bool = False) -> dict[str, object]:
        """A request as the caller sees it."""
        return (await self.views(request, [record], evidence=evidence))[0]

    async def views(
        self, request: Request, records: Sequence[RequestRecord], *, evidence: bool = False
    ) -> list[dict[str, object]]:
        """Requests as the caller sees them."""
        base, sign = self.base_of(request), await self.links.signer()
        wall = self.scheduler.clock.wall()
        found = []
        for record in records:
            eta, (state, until) = self.scheduler.eta(record), self.scheduler.awaited(record)
            shown = request_object(record, base, eta, evidence=evidence, prices=self._prices, sign=sign, wall=wall)
            found.append(shown if until is None else shown | {"state": state})
        return found

    def release(self, context: RequestContext, beginning: str = "") -> None:
        """Delete in the background the attachments of a request that has ended whose names begin like that."""
        if context.has_attachments:
            request = context.id
            self._releasing[request] = asyncio.create_task(self._release(request, beginning))
            self._releasing[request].add_done_callback(lambda _: self._releasing.pop(request, None))

    async def _release(self, request: str, beginning: str) -> None:
        with self.background.besides("letting go of attachments"):
            await to_thread.run_sync(self.results.detach, request, beginning)

    def base_of(self, request: Request) -> str:
        """Return the base of links in responses: `public_url`, or the address that the client used."""
        return self._public_url or str(request.base_url).rstrip("/")

    async def load(self, request: str, tenant: str | None) -> RequestRecord:
        """A request of this tenant, or of any (None). Raises NotFound if it is unknown or another tenant's."""
        with suppress(NotFound):
            record = await self.queue.load(request)
            if tenant in (None, record.context.caller.tenant):
                return record
        raise NotFound(f"no request {request} is known (any more)")

    async def delete(self, request: str) -> None:
        """End a request, and delete it with its files."""
        await self.scheduler.cancel(request)
        if releasing := self._releasing.get(request):
            await asyncio.wait({releasing})
        await to_thread.run_sync(self.results.delete, request)
        await self.queue.drop(request)

    async def unwritten(self) -> tuple[bool, int]:
        """Whether results can be stored now, as far as is known, and how many tasks wait for that."""
        waiting = sum(member.info.status.waiting_for_results for member in await self.scheduler.registry.workers())
        why = ""
        try:
            await to_thread.run_sync(self.results.check)
        except ResultsUnavailable as error:
            why = str(error.__cause__)
        if why and why != self._no_room:
            log.error("results cannot be kept", reason=why)
        self._no_room = why
        return not (why or waiting), waiting

    @contextmanager
    def awaiting(self, id: str) -> Iterator[None]:
        """A context in which a caller waits here for a request."""
        self.awaited[id] += 1
        try:
            yield
        finally:
            self.awaited[id] -= 1
            if not self.awaited[id]:
                del self.awaited[id]

    async def awaited_within(self, seconds: float) -> bool:
        """Whether a caller waits here for a request that may be over in so many seconds, as far as is predicted.

        Nothing is predicted while the part of the queue is away that has the request: it may come back.
        """
        for id in list(self.awaited):
            try:
                record = await self.queue.load(id)
            except (NotFound, Damaged):
                continue
            except TransientError:
                return True
            eta = self.scheduler.eta(record)
            if record.context.over or eta is None or eta <= seconds:
                return True
        return False

    async def completed(self, id: str) -> RequestContext:
        """Wait until a request is over, and return it. A caller that stops waiting does not affect it.

        Raises Refusal when the queue closes first, and for one without a result, whose call must not be repeated; also
        for one that the queue has lost, whose call may be. Raises NotFound for one that was deleted after its end.
        """
        again = {"retry-after": "2"}
        stopping = Refusal(503, "stopping", f"the server is stopping; {id} may still be completed", headers=again)
        lost = Refusal(503, "lost", f"request {id} is not in the queue any more: repeat the call", headers=again)
        has_ended = False
        try:
            with self.awaiting(id):
                async for event in self.queue.watch(id):
                    has_ended = event.type in TERMINAL_EVENTS
                context = (await self.queue.load(id)).context
        except NotFound as error:  # a server of the queue came back without its data
            raise (error if has_ended else lost) from None
        except asyncio.CancelledError as error:  # the HTTP server cuts short what it still answers when it ends
            raise (stopping if self.scheduler.draining else error) from None
        if context.status == "completed":
            return context
        if not context.over:
            raise stopping
        why = context.error.message if context.error else f"the request was {context.status}"
        code = context.error.code if context.error else context.status
        status = {"cancelled": 409, "expired": 504}.get(context.status, STATUSES.get(code, 500))
        raise Refusal(status, code, f"{id}: {why}", headers={"x-should-retry": "false"})


def _shown(name: object) -> str:
    """What a client sent as a model's name, for a log or an error: shortened, and only its type if it is no text."""
    if name is None:
        return ""
    return name[:80] if isinstance(name, str) else f"({type(name).__name__})"


async def gateway_of(request: Request) -> Gateway:
    """The gateway of a call: a dependency of every route; it is a coroutine, so that it needs no thread."""
    gateway: Gateway = request.app.state.gateway
    return gateway


Served = Annotated[Gateway, Depends(gateway_of)]
