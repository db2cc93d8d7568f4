"""The gateway: the state that all routes share.

That is the scheduler, the result store, API keys, metrics, and the callers that wait for requests.
"""

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
    InvalidParameter,
    NotFound,
    Overloaded,
    RecordDamaged,
    ResultsUnavailable,
    TransientError,
    UnknownModel,
    UnsupportedRequest,
)
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Params
from unfuse.core.request import MODERATION_BLOCKED, TERMINAL_EVENTS, RequestContext, RequestRecord, billed_seconds
from unfuse.core.supervisor import Supervisor
from unfuse.edge.access import ApiError
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
from unfuse.server.served_models import ModelAdder, ModelNames
from unfuse.server.webhooks import Webhooks
from unfuse.stores.results import FRAGMENT, ResultStore
from unfuse.weights.adapters import AdapterFolder

#: The HTTP status for a failed request by its error code; 500 for any other code.
STATUSES = {"invalid_parameter": 400, MODERATION_BLOCKED: 400, WEIGHTS_CHANGED: 503, MODEL_FAILED: 503}

#: How many uploads are decoded or LoRA adapters hashed at one time. One decoded upload may take 160 MB.
PICTURES_AT_ONCE = 2

log = structlog.get_logger(__name__)


class Gateway(Observer):
    """The components of one server, as its routes use them.

    It counts and logs the scheduler's transitions.

    The caller starts and closes the scheduler and all other components.

    scheduler: accepts, runs and cancels requests.
    results: the result store, for uploads and results.
    keys: the API keys. Without keys, every caller is the tenant `default`.
    names: public model name → internal name, for models that have another name here.
    default_params: parameters that override the defaults of every model.
    loras: the folder of LoRA adapters; "" for none.
    strict: whether parameters that would have no effect are refused.
    time_limits: seconds that the stages of a request may run, by modality; 0 or missing is no limit.
    store: the backend of the workers' tensor stores, for the labels of metrics.
    cancel_on_disconnect: whether a request is cancelled when the client that waits for it disconnects.
    cache_results: whether equal requests get the cached results of an earlier one.
    webhooks: delivers webhooks when requests end; None delivers none.
    prices: prices of device time; by default requests have no cost in money.
    image_fetcher: fetches pictures of chats by their addresses; None fetches none.
    model_adder: adds models at run time; by default no model can be added.
    public_url: the base of links in responses; "" for the address that the client used.
    parsers: the names of the parsers of tool calls and reasoning.
    open_metrics: whether everybody sees all metrics.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        results: ResultStore,
        *,
        keys: ApiKeys | None = None,
        names: Mapping[str, str] | None = None,
        default_params: Params | None = None,
        loras: str = "",
        strict: bool = False,
        time_limits: Mapping[str, float] | None = None,
        store: str = "shared_memory",
        cancel_on_disconnect: bool = False,
        cache_results: bool = False,
        webhooks: Webhooks | None = None,
        prices: Prices = FREE,
        image_fetcher: ImageFetcher | None = None,
        model_adder: ModelAdder | None = None,
        public_url: str = "",
        parsers: OutputParsers | None = None,
        open_metrics: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.queue = scheduler.queue
        self.results = results
        self.keys = keys or ApiKeys()
        self.links = SignedLinks(scheduler.queue, scheduler.clock, signs=bool(self.keys))
        self.names = ModelNames(names or {})
        self.strict = strict
        self.time_limits = time_limits or {}
        self.cancels = cancel_on_disconnect
        self.open_metrics = open_metrics
        self._default_params = default_params or {}
        self._prices = prices
        self._public_url = public_url

        self.metrics = Metrics(store, self.names.public_name)
        self.decoding = CapacityLimiter(PICTURES_AT_ONCE)
        self.grammar_checker = GrammarChecker(self.metrics)
        self.image_fetcher = image_fetcher or ImageFetcher()
        self.result_cache = ResultCache(scheduler, results) if cache_results else None
        self.loras = AdapterFolder(loras) if loras else None
        self.joining = model_adder or ModelAdder()
        self.parsers = parsers or OutputParsers()
        self.background = Supervisor()
        self.webhooks = webhooks or Webhooks()

        self.awaited = Counter[str]()  # request id → number of callers that wait for it in this gateway
        self._attachment_deletions: dict[str, asyncio.Task[None]] = {}  # request id → task that deletes its attachments
        self._store_error = ""  # why results could not be stored at the last check; "": they could
        scheduler.observers.add(self.metrics, self)

    async def models(self, allowed: frozenset[str] | None = None) -> dict[str, ModelSpec]:
        """Return the served models by public name; with `allowed`, only these."""
        specs = await self.scheduler.registry.model_specs()
        specs = {name: replace(spec, defaults=spec.defaults | self._default_params) for name, spec in specs.items()}
        return {
            name: spec for name, spec in self.names.by_public_name(specs).items() if allowed is None or name in allowed
        }

    async def model(self, name: object, allowed: frozenset[str] | None = None) -> tuple[str, ModelSpec]:
        """Return the public name and spec of a served model; for None the default.

        Raises UnknownModel for a name that is not served or not in `allowed`, InvalidParameter if no name is sent and
        there is no default, and ApiError (503) while no model is served or if the added model has failed.
        """
        served = await self.models(allowed)
        served_names = ", ".join(sorted(served))
        if isinstance(name, str) and (failed_model := self.failed_models(allowed).get(name)):
            raise ApiError(
                503,
                MODEL_FAILED,
                f"model {name!r} cannot be served: {failed_model.failure}",
                "model",
                {"x-should-retry": "false"},
            )

        if not served and allowed is not None:
            raise UnknownModel("no served model is available to this API key", "model")
        if not served:
            raise ApiError(503, "no_model", "no model is served yet: start a worker", headers={"retry-after": "2"})

        if name is None:
            if default := self.default_model(served):
                return default, served[default]
            raise InvalidParameter(f"model is missing: send one of {served_names}", "model")

        public_name = self.names.resolve(name) if isinstance(name, str) else ""
        if public_name not in served:
            raise UnknownModel(f"model {_loggable(name)!r} is not served: send one of {served_names}", "model")
        return public_name, served[public_name]

    def default_model(self, served: Mapping[str, ModelSpec]) -> str | None:
        """Return the name of the model for requests without one, or None.

        It is the first of the `served` models that the server was started with. If there is none, it is the only
        served model, which may have several names.
        """
        configured = self.scheduler.registry.configured
        if configured_names := [name for name, spec in served.items() if spec.name in configured]:
            return configured_names[0]
        return next(iter(served)) if len({spec.name for spec in served.values()}) == 1 else None

    def failed_models(self, allowed: frozenset[str] | None = None) -> dict[str, DeclaredModels]:
        """Return the added models that cannot be served, by public name, restricted as in `models`.

        The state is that of the registry's last refresh.
        """
        failures = {self.names.public_name(name): models for name, models in self.scheduler.registry.failed.items()}
        return {name: models for name, models in failures.items() if allowed is None or name in allowed}

    async def lora_ids(self, spec: ModelSpec, lora: str) -> str:
        """Return the content hashes of the LoRA adapters in the parameter `lora`.

        Workers use them to load the same contents. Raises InvalidParameter if the model takes no adapters, if no
        adapters are served, or if one is unknown or does not fit.
        """
        if not spec.takes_lora:
            raise InvalidParameter(f"model {spec.name} does not support LoRA adapters: leave lora out", "lora")
        if self.loras is None:
            raise InvalidParameter("the server has no LoRA adapters: start it with --loras FOLDER", "lora")
        try:
            return await to_thread.run_sync(self.loras.ids_of, lora, limiter=self.decoding)
        except (NotFound, UnsupportedRequest) as error:
            raise InvalidParameter(str(error), "lora") from error

    @override
    def on_submitted(self, context: RequestContext) -> None:
        log.info("accepted", request=context.id, model=context.request.model, tenant=context.caller.tenant)

    @override
    def on_ended(self, context: RequestContext) -> None:
        """Log a request that this scheduler ended, count its costs, and delete its attachments.

        Any gateway may have accepted the request. A dead letter keeps its uploads for a retry.
        """
        self.on_billed(context, billed_seconds(context))

        fields: dict[str, object] = {"model": context.request.model, "tenant": context.caller.tenant}
        fields |= {"status": context.status, "dead": context.is_dead_letter}
        if context.error:
            fields |= {"code": context.error.code, "stage": context.error.stage}
        seconds = round((context.completed_at or 0.0) - context.created_at, 3)
        log.info("ended", request=context.id, **fields, seconds=seconds)

        self.delete_attachments(context, FRAGMENT if context.is_dead_letter else "")

    @override
    def on_billed(self, context: RequestContext, seconds: Mapping[str, float]) -> None:
        """Count the device seconds of a request for its tenant.

        A tenant that has no key any more is counted as `other`.
        """
        known_tenants = {DEFAULT_TENANT, *(key.tenant for key in self.keys.all())}
        tenant = context.caller.tenant if context.caller.tenant in known_tenants else "other"
        self.metrics.count_device_seconds(self.names.public_name(context.request.model), tenant, seconds, self._prices)

    @contextmanager
    def log_refusals(self, tenant: str, model: object) -> Iterator[None]:
        """Log each refusal of a creating call, and count those by admission control.

        The error is raised again.

        Of the client's fields, only the names of the model and of the wrong parameter are logged.
        """
        try:
            yield
        except (InvalidParameter, Overloaded, ApiError) as error:
            refusal = refusal_of(error)
            fields = {"model": _loggable(model), "tenant": tenant}
            if isinstance(error, Overloaded):
                self.metrics.count("unfuse_requests_rejected_total")
                fields["reason"] = str(error)
            log.info("rejected", status=refusal.status, code=refusal.code, param=refusal.param, **fields)
            raise

    async def view(self, request: Request, record: RequestRecord, *, evidence: bool = False) -> dict[str, object]:
        """Return the request object of a record, as its caller sees it.

        See `request_object` for `evidence`.
        """
        return (await self.views(request, [record], evidence=evidence))[0]

    async def views(
        self, request: Request, records: Sequence[RequestRecord], *, evidence: bool = False
    ) -> list[dict[str, object]]:
        """Return the request objects of records, as the caller sees them. See `request_object` for `evidence`."""
        base_url, sign = self.base_url(request), await self.links.signer()
        now = self.scheduler.clock.wall()
        views = []
        for record in records:
            eta = self.scheduler.eta(record)
            state, seconds_left = self.scheduler.awaited_condition(record)
            view = request_object(record, base_url, eta, evidence=evidence, prices=self._prices, sign=sign, wall=now)
            views.append(view if seconds_left is None else view | {"state": state})
        return views

    def delete_attachments(self, context: RequestContext, prefix: str = "") -> None:
        """Delete the attachments of an ended request in the background.

        Only those whose names start with `prefix` are deleted.
        """
        if context.has_attachments:
            request = context.id
            self._attachment_deletions[request] = asyncio.create_task(self._delete_attachments(request, prefix))
            self._attachment_deletions[request].add_done_callback(
                lambda _: self._attachment_deletions.pop(request, None)
            )

    async def _delete_attachments(self, request: str, prefix: str) -> None:
        with self.background.log_errors("deleting attachments"):
            await to_thread.run_sync(self.results.detach, request, prefix)

    def base_url(self, request: Request) -> str:
        """Return the base of links in responses: `public_url`, or the address that the client used."""
        return self._public_url or str(request.base_url).rstrip("/")

    async def load(self, request: str, tenant: str | None) -> RequestRecord:
        """Return the record of a request. Raises NotFound if it is unknown or another tenant's.

        With `tenant` None, requests of all tenants are returned.
        """
        with suppress(NotFound):
            record = await self.queue.load(request)
            if tenant in (None, record.context.caller.tenant):
                return record
        raise NotFound(f"request {request} does not exist, or was deleted")

    async def delete(self, request: str) -> None:
        """Cancel a request, and delete its record and all its files."""
        await self.scheduler.cancel(request)

        # The record is deleted last, so that an interrupted deletion of the files can be repeated.
        if deletion := self._attachment_deletions.get(request):
            await asyncio.wait({deletion})
        await to_thread.run_sync(self.results.delete, request)
        await self.queue.drop(request)

    async def results_writable(self) -> tuple[bool, int]:
        """Return whether results can be stored, and how many tasks wait for that.

        Results cannot be stored if this gateway's check fails, or if a task of any worker waits. A new reason is
        logged once.
        """
        waiting = sum(worker.info.status.waiting_for_results for worker in await self.scheduler.registry.workers())
        reason = ""
        try:
            await to_thread.run_sync(self.results.check)
        except ResultsUnavailable as error:
            reason = str(error.__cause__)

        if reason and reason != self._store_error:
            log.error("results cannot be stored", reason=reason)
        self._store_error = reason
        return not (reason or waiting), waiting

    @contextmanager
    def awaiting(self, id: str) -> Iterator[None]:
        """Return a context in which a caller of this gateway waits for a request."""
        self.awaited[id] += 1
        try:
            yield
        finally:
            self.awaited[id] -= 1
            if not self.awaited[id]:
                del self.awaited[id]

    async def awaited_within(self, seconds: float) -> bool:
        """Return whether a caller here waits for a request that may end within `seconds`.

        That is a request that is over, is predicted to end in time, or has no prediction: its model is new, or the
        shard of the queue with its record is unreachable at the moment.
        """
        for id in list(self.awaited):
            try:
                record = await self.queue.load(id)
            except (NotFound, RecordDamaged):
                continue
            except TransientError:
                return True
            eta = self.scheduler.eta(record)
            if record.context.is_over or eta is None or eta <= seconds:
                return True
        return False

    async def completed(self, id: str) -> RequestContext:
        """Wait until a request is over, and return its context.

        Cancelling this call does not affect the request.

        Raises ApiError:

        - 503 `stopping`, with Retry-After, if this server stops first.
        - 503 `lost`, with Retry-After, if the queue has lost the request. The call may be repeated.
        - The status for its error code if the request ended without a result. The call must not be repeated.

        Raises NotFound if the request was deleted after its end.
        """
        retry_later = {"retry-after": "2"}
        stopping = ApiError(
            503, "stopping", f"the server is stopping; request {id} may still be completed", headers=retry_later
        )
        lost = ApiError(503, "lost", f"the queue has lost request {id}: repeat the call", headers=retry_later)

        has_ended = False
        try:
            with self.awaiting(id):
                async for event in self.queue.watch(id):
                    has_ended = event.type in TERMINAL_EVENTS
                context = (await self.queue.load(id)).context
        except NotFound as error:  # a server of the queue restarted without its data
            raise (error if has_ended else lost) from None
        except asyncio.CancelledError as error:  # the HTTP server cancels pending calls when it ends
            raise (stopping if self.scheduler.draining else error) from None

        if context.status == "completed":
            return context
        if not context.is_over:  # the queue was closed, which ends `watch`
            raise stopping
        message = context.error.message if context.error else f"the request was {context.status}"
        code = context.error.code if context.error else context.status
        status = {"cancelled": 409, "expired": 504}.get(context.status, STATUSES.get(code, 500))
        raise ApiError(status, code, f"{id}: {message}", headers={"x-should-retry": "false"})


def _loggable(name: object) -> str:
    """Return a model name that a client sent, for a log or an error.

    A text is cut to 80 characters. It is "" for None, and the type for any other value.
    """
    if name is None:
        return ""
    return name[:80] if isinstance(name, str) else f"({type(name).__name__})"


async def gateway_of(request: Request) -> Gateway:
    """Return the gateway of a call. Every route depends on it.

    It is a coroutine because FastAPI runs plain functions in a thread.
    """
    gateway: Gateway = request.app.state.gateway
    return gateway


#: The type of a route's parameter that gets the gateway.
GatewayDep = Annotated[Gateway, Depends(gateway_of)]
