"""Creating calls: each becomes a request, for whose answer its client may wait.

A repeat with the same Idempotency-Key gets the earlier request. A request is cancelled if its client disconnects while
it waits for the answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from anyio import to_thread
from msgspec.structs import replace as replace_struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from unfuse.core.checking import check, check_delivery, size_from
from unfuse.core.derived_facts import GRAMMAR, DerivedFacts, expected_tokens
from unfuse.core.errors import InvalidParameter, KeyUnavailable, NotFound, TransientError, UnfuseError
from unfuse.core.modalities import LAST_FRAME, MASK, MEDIA, UPLOAD, Modality
from unfuse.core.model_spec import ModelSpec
from unfuse.core.parameters import Params
from unfuse.core.pixels import size_of
from unfuse.core.request import (
    Caller,
    Delivery,
    GenerationRequest,
    RequestContext,
    RequestRecord,
    TenantLimits,
    request_ids,
)
from unfuse.core.text_parameters import PromptTokens
from unfuse.edge.access import Refusal, envelope
from unfuse.language.grammars import grammar_digest
from unfuse.queues.base import RequestFilter
from unfuse.server.auth import Principal
from unfuse.server.body import read_pictures
from unfuse.server.errors import refusal_of
from unfuse.server.gateway import Gateway
from unfuse.server.responses import sse_event, sse_response
from unfuse.server.result_cache import result_key

MAX_KEY = 255

#: The header, `true`, of a client whose Idempotency-Key was never used before: there is no earlier request.
NEW_KEY = "unfuse-new-key"


@dataclass(frozen=True)
class RequestInputs:
    """What a request has beside its parameters. For a chat most of it is read before these are checked."""

    #: Attachments by name.
    files: Mapping[str, bytes] = field(default_factory=dict)
    #: Facts about them.
    derived: DerivedFacts = DerivedFacts()
    #: What the tokenizer made of the fields; None: they are no chat.
    tokens: PromptTokens | None = None
    #: Digests of the beginnings of the prompt, which other prompts may have too, the shortest first.
    begins: tuple[str, ...] = ()
    #: Packed grammars of the answer, the strictest first. The first that can be compiled is used.
    grammars: tuple[bytes, ...] = ()
    #: The parameter that sets the format of the answer.
    grammar_param: str = ""


@dataclass(frozen=True)
class CreatingCall:
    """A creating call: who asks, its fields, its medium. `upload` is the name of its field for a picture, if any.

    That of another one may go `beside` it. One that `waits` is answered with what was made, unless its
    client prefers not to wait.
    """

    gateway: Gateway
    request: Request
    caller: Principal
    given: dict[str, object]
    medium: Modality
    upload: str = ""
    waits: bool = False
    beside: str = ""
    #: Reads the prompt out of the fields.
    read: Callable[[ModelSpec, Mapping[str, object]], RequestInputs] | None = None

    @property
    def files(self) -> list[str]:
        """The fields for pictures."""
        return [name for name in (self.upload, self.beside) if name]

    @property
    def prefers_not_to_wait(self) -> bool:
        """Whether the client says that it does not wait for its request."""
        preferences = ",".join(self.request.headers.getlist("prefer")).split(",")
        return any(preference.partition(";")[0].strip().lower() == "respond-async" for preference in preferences)

    async def accept(self) -> tuple[RequestRecord, Delivery]:
        """Return the request: a new one, or the earlier one with the same Idempotency-Key.

        Raises InvalidParameter, UnknownModel, Overloaded, and Refusal for an Idempotency-Key that another body used.
        """
        gateway = self.gateway
        with gateway.refusals_logged(self.caller.tenant, self.given.get("model")):
            delivery = check_delivery(self.given, self.medium)
            if delivery.webhook:
                gateway.webhooks.http.require(delivery.webhook)
            key = self.request.headers.get("idempotency-key", "")
            if len(key) > MAX_KEY:
                raise InvalidParameter(
                    f"Idempotency-Key must be 1 to {MAX_KEY} characters long, not {len(key)}", "Idempotency-Key"
                )
            fingerprint = await to_thread.run_sync(_fingerprint, self.request.scope["path"], self.given)
            only_client_can_use_it = self.waits and not self.prefers_not_to_wait and not key and not delivery.webhook
            caller = Caller(
                tenant=self.caller.tenant,
                idempotency_key=key,
                fingerprint=fingerprint,
                cancel_on_disconnect=gateway.cancels and only_client_can_use_it,
                allowance=self.caller.allowance,
                base_url=gateway.base_of(self.request),
            )
            id = gateway.queue.placed(request_ids(self.medium), caller)
            record = await self._earlier(key, id) or await self._submit(id, caller, delivery)
            if key and record.context.caller.fingerprint != fingerprint:
                message = f"Idempotency-Key {key!r} was used with another body: repeat that body, or send another key"
                headers = {"x-should-retry": "false"}
                raise Refusal(409, "idempotency_conflict", message, "Idempotency-Key", headers)
            return record, delivery

    async def _earlier(self, key: str, id: str) -> RequestRecord | None:
        """Return the tenant's request with this Idempotency-Key, or None. A new one would get this id.

        A client may say that it never used the key before. Raises KeyUnavailable while it cannot be known, or the new
        request could not be stored with those of its key.
        """
        if not key:
            return None
        if self.request.headers.get(NEW_KEY) == "true":
            await self._require_place(id)
            return None
        known = await self.gateway.queue.list(RequestFilter(tenant=self.caller.tenant, idempotency_key=key), limit=1)
        return known[0] if known else None

    async def _require_place(self, id: str) -> None:
        """Raise KeyUnavailable while the part of the queue is away where a request of this id would live."""
        queue = self.gateway.queue
        try:
            if queue.answers(id):
                await queue.load(id)
        except NotFound:
            return
        except TransientError:
            if queue.answers(id):
                raise
        if not queue.answers(id):
            helps = self.caller.allowance == TenantLimits()  # else all of the tenant's requests live there
            raise (KeyUnavailable if helps else TransientError)(
                "the shard of the queue for this call does not answer: repeat the call later"
            )

    async def _submit(self, id: str, caller: Caller, delivery: Delivery) -> RequestRecord:
        """Check everything, cheap checks first; store the attachments, then submit the request.

        The attachments are deleted again if it does not become a request.
        """
        gateway, pictures = self.gateway, self._pictures()
        fields = {name: value for name, value in self.given.items() if name not in self.files}
        asked, card = await self._model(fields.get("model"), pictures)
        prompt = await self._prompt(card, fields)
        named = replace_struct(card, name=asked)  # as the client calls it: its own may be a folder here
        params, n = check(
            named, fields, self.medium,
            strict=gateway.strict, uploads=pictures, files=self.files, tokens=prompt.tokens,
        )  # fmt: skip
        inputs = await self._inputs(named, params, pictures, prompt)
        if UPLOAD in pictures:
            size = await to_thread.run_sync(size_of, inputs.files[UPLOAD], limiter=gateway.decoding)
            params |= size_from(card, fields, params, size)
        request = GenerationRequest(
            id=id,
            model=card.name,
            params=params,
            n=n,
            alias=asked,
            time_limit_s=gateway.time_limits.get(self.medium.name, 0.0) or None,
            result_cache_key=result_key(card, self.given, params, inputs.derived, n, delivery),
            hint=card.vocabulary.hint(asked, str(params.get("prompt", ""))) if card.vocabulary else "",
            derived=inputs.derived,
        )
        if gateway.result_cache and (record := await gateway.result_cache.answer(request, caller, delivery)):
            return record
        unused = bool(inputs.files)
        try:
            for name, data in inputs.files.items():
                await to_thread.run_sync(gateway.results.attach, id, name, data)
            record = await gateway.scheduler.submit(card, request, caller, delivery, inputs.begins)
            unused = unused and record.context.id != id
        except TransientError:
            unused = False  # a queue that does not answer may have accepted it
            raise
        finally:
            if unused:
                await to_thread.run_sync(gateway.results.delete, id)
        return record

    async def _prompt(self, card: ModelSpec, fields: Mapping[str, object]) -> RequestInputs:
        """What a chat brings. Raises InvalidParameter."""
        if self.read is None:
            return RequestInputs()
        fields = await self.gateway.image_fetcher.fetched(card, fields)
        return await to_thread.run_sync(self.read, card, fields, limiter=self.gateway.decoding)

    async def _inputs(
        self, card: ModelSpec, params: Params, pictures: Mapping[str, object], prompt: RequestInputs
    ) -> RequestInputs:
        """Read everything that takes long, once the parameters are checked. Raises InvalidParameter."""
        gateway, files = self.gateway, dict(prompt.files)
        derived = replace_struct(prompt.derived, expected_tokens=expected_tokens(params))
        if prompt.grammars:
            files[GRAMMAR] = await gateway.grammar_checker.choose(prompt.grammars, prompt.grammar_param)
            derived = replace_struct(derived, grammar=grammar_digest(files[GRAMMAR]))
        if "lora" in params:
            derived = replace_struct(derived, lora_id=await gateway.lora_ids(card, str(params["lora"])))
        if pictures:
            found = await to_thread.run_sync(read_pictures, pictures, self.upload, limiter=gateway.decoding)
            hashes = {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}
            files, derived = files | found, replace_struct(derived, pictures=hashes)
        return replace(prompt, files=files, derived=derived)

    def _pictures(self) -> dict[str, object]:
        """The values of the fields for pictures, by the attachments that they become."""
        first, beside = (self.given.get(name) if name else None for name in (self.upload, self.beside))
        several = [one for one in (first if isinstance(first, list) else [first]) if one is not None]
        found = {f"{UPLOAD}_{number}" if number > 1 else UPLOAD: one for number, one in enumerate(several, 1)}
        return found if beside is None else {**found, self.beside: beside}

    async def _model(self, name: object, pictures: Mapping[str, object]) -> tuple[str, ModelSpec]:
        """The model that was asked for, if it can do what is asked. Raises InvalidParameter, UnknownModel."""
        asked, card = await self.gateway.model(name, self.caller.models)
        medium = self.medium
        if not medium.made_by(card.limits):
            others = " or ".join(other.plural for other in MEDIA if other.made_by(card.limits))
            hint = f": ask it for {others}" if others else ""
            raise InvalidParameter(f"model {asked} makes no {medium.name}{hint}", "model")
        if card.accepted(UPLOAD).min and UPLOAD not in pictures:
            where = self.upload or "image to /v1/images/edits, or as input_reference to /v1/videos"
            raise InvalidParameter(f"model {asked} starts from a picture: send one as {where}", self.upload or "model")
        for param, what, able in self._needs(pictures):
            if not able(card):
                served = await self.gateway.models(self.caller.models)
                can = [one for one, fit in sorted(served.items()) if medium.made_by(fit.limits) and able(fit)]
                hint = f"{', '.join(can)} can" if can else "no model that is served can"
                raise InvalidParameter(f"model {asked} cannot {what}; {hint}", param)
        if card.accepted(LAST_FRAME).min and LAST_FRAME not in pictures:
            between = f"model {asked} makes what lies between two pictures"
            raise InvalidParameter(f"{between}: send the last one as {LAST_FRAME}", LAST_FRAME)
        return asked, card

    def _needs(self, pictures: Mapping[str, object]) -> Iterator[tuple[str, str, Callable[[ModelSpec], bool]]]:
        """What a model has to do with the pictures: by which field, in words, and whether it can."""
        count = len(pictures.keys() - {MASK, LAST_FRAME})
        if MASK in pictures:
            yield MASK, "keep to a mask", lambda card: card.accepted(MASK).max > 0
        if count:
            what = "start from a picture" if count == 1 else f"start from {count} pictures"
            yield self.upload, what, lambda card: card.accepted(UPLOAD).max >= count
        if LAST_FRAME in pictures:
            yield LAST_FRAME, f"end with a {LAST_FRAME}", lambda card: card.accepted(LAST_FRAME).max > 0


async def respond_async(call: CreatingCall, record: RequestRecord) -> JSONResponse | None:
    """The answer to a client that prefers not to wait for its request."""
    if not call.prefers_not_to_wait:
        return None
    location = f"{call.gateway.base_of(call.request)}/v1/requests/{record.context.id}"
    headers = {"location": location, "preference-applied": "respond-async"}
    return JSONResponse(await call.gateway.view(call.request, record), 202, headers)


def _fingerprint(path: str, given: dict[str, object]) -> str:
    text = json.dumps(given, sort_keys=True, default=lambda file: hashlib.sha256(file).hexdigest())
    return hashlib.sha256(f"{path} {text}".encode()).hexdigest()


async def answer_call(
    call: CreatingCall,
    events: Callable[[RequestRecord], AsyncIterator[bytes]],
    reply: Callable[[RequestContext, Delivery], bytes],
) -> Response:
    """Answer a call: by the request alone if its client prefers not to wait; by events of what is made, if it streams;
    else, once it is completed, by a `reply`, which is made in a thread.
    """
    record, delivery = await call.accept()
    if accepted := await respond_async(call, record):
        return accepted
    caller = WaitingClient(call.gateway, call.request, record)
    if delivery.stream:
        return sse_response(caller.events(events(record)))
    try:
        context = await call.gateway.completed(record.context.id)
        return Response(await to_thread.run_sync(reply, context, delivery), media_type="application/json")
    finally:
        caller.is_answered = True


class WaitingClient:
    """A client that waits for its request. If it disconnects before the answer, its request is cancelled.

    The request is not cancelled if the server closes the connection, because it shuts down or failed.
    """

    def __init__(self, gateway: Gateway, request: Request, record: RequestRecord) -> None:
        self._gateway, self._request, self._id = gateway, request, record.context.id
        self.is_answered = False  # whether the answer is there, whatever it is
        if record.context.caller.cancel_on_disconnect and not record.context.over:
            gateway.background.once("waiting for a client to disconnect", self._await_disconnect)

    async def events(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the events, which are the answer once the last was sent; an error is the last event."""
        with self._gateway.awaiting(self._id):
            try:
                async for event in events:
                    yield event
            except UnfuseError as error:
                yield sse_event(envelope(refusal_of(error)))
        self.is_answered = True

    async def _await_disconnect(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        if not self.is_answered and not self._gateway.scheduler.draining:
            await self._gateway.scheduler.client_disconnected(self._id)
