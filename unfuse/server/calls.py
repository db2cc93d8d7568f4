"""Creating calls: turn a call's fields into a submitted request, and answer its client.

A repeat with the same idempotency key gets the earlier request. A request may be cancelled when the client that waits
for its answer disconnects.
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

from unfuse.core.checking import check_delivery, check_request, size_from
from unfuse.core.derived_facts import GRAMMAR, DerivedFacts, expected_tokens
from unfuse.core.errors import InvalidParameter, KeyUnavailable, NotFound, TransientError, UnfuseError
from unfuse.core.modalities import LAST_FRAME, MASK, MODALITIES, UPLOAD, Modality
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
from unfuse.edge.access import ApiError, envelope
from unfuse.language.grammars import grammar_digest
from unfuse.queues.base import RequestFilter
from unfuse.server.auth import Principal
from unfuse.server.body import read_images
from unfuse.server.errors import refusal_of
from unfuse.server.gateway import Gateway
from unfuse.server.responses import sse_event, sse_response
from unfuse.server.result_cache import result_key
from unfuse.server.route_parameters import MAX_KEY, NEW_KEY


@dataclass(frozen=True)
class RequestInputs:
    """The inputs of a request, other than its parameters.

    Those of a chat's prompt are read before the parameters are checked, because their check needs its tokens.
    """

    #: Attachments by name.
    files: Mapping[str, bytes] = field(default_factory=dict)
    #: Facts about the attachments and the prompt, such as hashes and the number of tokens.
    derived: DerivedFacts = DerivedFacts()
    #: The tokens of the prompt, for the check of the parameters; None if the request is no chat.
    tokens: PromptTokens | None = None
    #: Digests of the prompt's prefixes, for prefix caching: the shortest first.
    prefix_digests: tuple[str, ...] = ()
    #: Packed grammars of the answer, the strictest first. The first that can be compiled is used.
    grammars: tuple[bytes, ...] = ()
    #: The parameter that sets the format of the answer.
    grammar_param: str = ""


@dataclass(frozen=True)
class GenerationCall:
    """A call that creates a request of one modality."""

    #: The gateway that accepts the request.
    gateway: Gateway
    #: The HTTP request of the client.
    request: Request
    #: The caller, with the rights of its API key.
    caller: Principal
    #: The fields of the body, by name.
    fields: dict[str, object]
    #: The modality of the result.
    modality: Modality
    #: The name of the field for the pictures to start from; "" if there is none.
    image_field: str = ""
    #: Whether the result is the answer. The client may prefer not to wait for it.
    waits_for_result: bool = False
    #: The name of the field for a second picture: the mask, or the last frame; "" if there is none.
    second_image_field: str = ""
    #: Reads the prompt of a chat out of the fields; None for other requests. It is run in a thread.
    read_prompt: Callable[[ModelSpec, Mapping[str, object]], RequestInputs] | None = None

    @property
    def files(self) -> list[str]:
        """The names of the fields for pictures."""
        return [name for name in (self.image_field, self.second_image_field) if name]

    @property
    def prefers_not_to_wait(self) -> bool:
        """Whether the client sent `Prefer: respond-async` (RFC 7240)."""
        preferences = ",".join(self.request.headers.getlist("prefer")).split(",")
        return any(preference.partition(";")[0].strip().lower() == "respond-async" for preference in preferences)

    async def accept(self) -> tuple[RequestRecord, Delivery]:
        """Submit the request, or return the earlier one with the same idempotency key.

        Raises InvalidParameter, UnknownModel, Overloaded, TransientError, and ApiError (409) for an idempotency key
        that was used with another body.
        """
        gateway = self.gateway
        with gateway.log_refusals(self.caller.tenant, self.fields.get("model")):
            delivery = check_delivery(self.fields, self.modality)
            if delivery.webhook:
                gateway.webhooks.http.require(delivery.webhook)

            key = self.request.headers.get("idempotency-key", "")
            if len(key) > MAX_KEY:
                raise InvalidParameter(
                    f"Idempotency-Key must be 1 to {MAX_KEY} characters long, not {len(key)}", "Idempotency-Key"
                )
            # The fields may have megabytes of pictures, so they are hashed in a thread.
            fingerprint = await to_thread.run_sync(_fingerprint, self.request.scope["path"], self.fields)
            # Without a key or a webhook, nobody else learns of the result: it is useless once the client is gone.
            only_client_can_use_it = (
                self.waits_for_result and not self.prefers_not_to_wait and not key and not delivery.webhook
            )

            caller = Caller(
                tenant=self.caller.tenant,
                idempotency_key=key,
                fingerprint=fingerprint,
                cancel_on_disconnect=gateway.cancels and only_client_can_use_it,
                limits=self.caller.limits,
                base_url=gateway.base_url(self.request),
            )

            # In a sharded queue, all requests with one idempotency key are on one shard, so that repeats find it.
            id = gateway.queue.choose_id(request_ids(self.modality), caller)
            record = await self._earlier(key, id) or await self._submit(id, caller, delivery)

            # Another call with this key may have been faster: then `_submit` returns the request of that call.
            if key and record.context.caller.fingerprint != fingerprint:
                message = f"Idempotency-Key {key!r} was used with another body: repeat that body, or send another key"
                headers = {"x-should-retry": "false"}
                raise ApiError(409, "idempotency_conflict", message, "Idempotency-Key", headers)
            return record, delivery

    async def _earlier(self, key: str, id: str) -> RequestRecord | None:
        """Return the tenant's request with this idempotency key, or None.

        With the header NEW_KEY no request is looked up. Then the shard of the queue where the new request `id` would be
        stored must be reachable. Raises KeyUnavailable, TransientError.
        """
        if not key:
            return None
        if self.request.headers.get(NEW_KEY) == "true":
            await self._require_shard(id)
            return None

        same_key = RequestFilter(tenant=self.caller.tenant, idempotency_key=key)
        records = await self.gateway.queue.list(same_key, limit=1)
        return records[0] if records else None

    async def _require_shard(self, id: str) -> None:
        """Raise an error while the shard that would store the request `id` is unreachable.

        It is KeyUnavailable if a request with another key could be on another shard, else TransientError.
        """
        queue = self.gateway.queue
        try:
            if queue.is_reachable(id):
                await queue.load(id)  # raises NotFound for a new id, if the shard responds
        except NotFound:
            return
        except TransientError:
            if queue.is_reachable(id):
                raise
        if not queue.is_reachable(id):
            # All requests of a tenant with limits are on one shard, so another key would not help it.
            other_key_helps = self.caller.limits == TenantLimits()
            raise (KeyUnavailable if other_key_helps else TransientError)(
                "the queue shard for this call does not respond: repeat the call later"
            )

    async def _submit(self, id: str, caller: Caller, delivery: Delivery) -> RequestRecord:
        """Check the fields, cheap checks first; then store the attachments and submit the request.

        The attachments are deleted again if no request with this id is created.
        """
        gateway = self.gateway
        pictures = self._pictures()
        fields = {name: value for name, value in self.fields.items() if name not in self.files}
        public_name, spec = await self._model(fields.get("model"), pictures)
        prompt = await self._read_prompt(spec, fields)

        # Errors of the checks name the model as clients do: its internal name may be a folder of this machine.
        public_spec = replace_struct(spec, name=public_name)
        params, n = check_request(
            public_spec,
            fields,
            self.modality,
            strict=gateway.strict,
            uploads=pictures,
            files=self.files,
            tokens=prompt.tokens,
        )
        inputs = await self._read_inputs(public_spec, params, pictures, prompt)
        if UPLOAD in pictures:
            size = await to_thread.run_sync(size_of, inputs.files[UPLOAD], limiter=gateway.decoding)
            params |= size_from(spec, fields, params, size)

        request = GenerationRequest(
            id=id,
            model=spec.name,
            params=params,
            n=n,
            alias=public_name,
            time_limit_s=gateway.time_limits.get(self.modality.name, 0.0) or None,
            result_cache_key=result_key(spec, self.fields, params, inputs.derived, n, delivery),
            hint=spec.vocabulary.hint(public_name, str(params.get("prompt", ""))) if spec.vocabulary else "",
            derived=inputs.derived,
        )
        if gateway.result_cache and (record := await gateway.result_cache.find(request, caller, delivery)):
            return record
        return await self._store_and_submit(spec, request, caller, delivery, inputs)

    async def _store_and_submit(
        self, spec: ModelSpec, request: GenerationRequest, caller: Caller, delivery: Delivery, inputs: RequestInputs
    ) -> RequestRecord:
        """Store the attachments and submit the request. Unused attachments are deleted."""
        gateway = self.gateway
        attachments_unused = bool(inputs.files)
        try:
            for name, data in inputs.files.items():
                await to_thread.run_sync(gateway.results.attach, request.id, name, data)
            record = await gateway.scheduler.submit(spec, request, caller, delivery, inputs.prefix_digests)
            # `submit` returns an earlier request if this one is its repeat.
            attachments_unused = attachments_unused and record.context.id != request.id
        except TransientError:
            attachments_unused = False  # an unreachable queue may have accepted the request
            raise
        finally:
            if attachments_unused:
                await to_thread.run_sync(gateway.results.delete, request.id)
        return record

    async def _read_prompt(self, spec: ModelSpec, fields: Mapping[str, object]) -> RequestInputs:
        """Return the inputs of a chat's prompt; none for other requests. Raises InvalidParameter."""
        if self.read_prompt is None:
            return RequestInputs()
        fields = await self.gateway.image_fetcher.fetched(spec, fields)
        return await to_thread.run_sync(self.read_prompt, spec, fields, limiter=self.gateway.decoding)

    async def _read_inputs(
        self, spec: ModelSpec, params: Params, pictures: Mapping[str, object], prompt: RequestInputs
    ) -> RequestInputs:
        """Return the prompt's inputs with those that are slow to read: grammar, adapters, pictures.

        The parameters are checked before. Raises InvalidParameter.
        """
        gateway = self.gateway
        files = dict(prompt.files)
        derived = replace_struct(prompt.derived, expected_tokens=expected_tokens(params))
        if prompt.grammars:
            files[GRAMMAR] = await gateway.grammar_checker.choose(prompt.grammars, prompt.grammar_param)
            derived = replace_struct(derived, grammar=grammar_digest(files[GRAMMAR]))
        if "lora" in params:
            derived = replace_struct(derived, lora_id=await gateway.lora_ids(spec, str(params["lora"])))
        if pictures:
            uploads = await to_thread.run_sync(read_images, pictures, self.image_field, limiter=gateway.decoding)
            hashes = {name: hashlib.sha256(data).hexdigest() for name, data in uploads.items()}
            files |= uploads
            derived = replace_struct(derived, image_hashes=hashes)
        return replace(prompt, files=files, derived=derived)

    def _pictures(self) -> dict[str, object]:
        """Return the values of the picture fields, by the names of their attachments."""
        images, second_image = (
            self.fields.get(name) if name else None for name in (self.image_field, self.second_image_field)
        )
        values = [value for value in (images if isinstance(images, list) else [images]) if value is not None]
        pictures = {f"{UPLOAD}_{number}" if number > 1 else UPLOAD: value for number, value in enumerate(values, 1)}
        return pictures if second_image is None else {**pictures, self.second_image_field: second_image}

    async def _model(self, name: object, pictures: Mapping[str, object]) -> tuple[str, ModelSpec]:
        """Return the public name and the spec of the requested model.

        Raises UnknownModel, and InvalidParameter if the model does not support the modality or the pictures.
        """
        public_name, spec = await self.gateway.model(name, self.caller.models)
        modality = self.modality
        if not modality.is_supported_by(spec.limits):
            other_media = " or ".join(other.plural for other in MODALITIES if other.is_supported_by(spec.limits))
            hint = f": request {other_media} instead" if other_media else ""
            raise InvalidParameter(f"model {public_name} does not generate {modality.plural}{hint}", "model")

        if spec.accepted_input(UPLOAD).min and UPLOAD not in pictures:
            field_hint = self.image_field or "image to /v1/images/edits, or as input_reference to /v1/videos"
            raise InvalidParameter(
                f"model {public_name} needs a picture to start from: send one as {field_hint}",
                self.image_field or "model",
            )

        for param, action, is_able in self._required_abilities(pictures):
            if not is_able(spec):
                served = await self.gateway.models(self.caller.models)
                able_models = [
                    name
                    for name, other in sorted(served.items())
                    if modality.is_supported_by(other.limits) and is_able(other)
                ]
                hint = f"{', '.join(able_models)} can" if able_models else "no served model can"
                raise InvalidParameter(f"model {public_name} cannot {action}; {hint}", param)

        if spec.accepted_input(LAST_FRAME).min and LAST_FRAME not in pictures:
            message = f"model {public_name} generates a video between two pictures"
            raise InvalidParameter(f"{message}: send the last one as {LAST_FRAME}", LAST_FRAME)
        return public_name, spec

    def _required_abilities(
        self, pictures: Mapping[str, object]
    ) -> Iterator[tuple[str, str, Callable[[ModelSpec], bool]]]:
        """Yield each ability that the pictures require of a model.

        It is (field for the picture, ability in words for an error, test of a model).
        """
        count = len(pictures.keys() - {MASK, LAST_FRAME})
        if MASK in pictures:
            yield MASK, "use a mask", lambda spec: spec.accepted_input(MASK).max > 0
        if count:
            action = "start from a picture" if count == 1 else f"start from {count} pictures"
            yield self.image_field, action, lambda spec: spec.accepted_input(UPLOAD).max >= count
        if LAST_FRAME in pictures:
            yield LAST_FRAME, f"end with a {LAST_FRAME}", lambda spec: spec.accepted_input(LAST_FRAME).max > 0


async def respond_async(call: GenerationCall, record: RequestRecord) -> JSONResponse | None:
    """Return a response 202 with the request object, or None if the client waits."""
    if not call.prefers_not_to_wait:
        return None
    location = f"{call.gateway.base_url(call.request)}/v1/requests/{record.context.id}"
    headers = {"location": location, "preference-applied": "respond-async"}
    return JSONResponse(await call.gateway.view(call.request, record), 202, headers)


def _fingerprint(path: str, fields: dict[str, object]) -> str:
    """Return a hash of a call's path and fields.

    Calls with the same idempotency key must have the same hash.
    """
    text = json.dumps(fields, sort_keys=True, default=lambda file: hashlib.sha256(file).hexdigest())
    return hashlib.sha256(f"{path} {text}".encode()).hexdigest()


async def answer_call(
    call: GenerationCall,
    events: Callable[[RequestRecord], AsyncIterator[bytes]],
    reply: Callable[[RequestContext, Delivery], bytes],
) -> Response:
    """Submit a call's request, and return its response.

    It is 202 with the request object if the client prefers not to wait. It is a stream of `events` if the client wants
    one. Otherwise it is the `reply` as JSON, once the request is completed. `reply` is run in a thread.
    """
    record, delivery = await call.accept()
    if async_response := await respond_async(call, record):
        return async_response
    client = WaitingClient(call.gateway, call.request, record)
    if delivery.stream:
        return sse_response(client.events(events(record)))
    try:
        context = await call.gateway.completed(record.context.id)
        return Response(await to_thread.run_sync(reply, context, delivery), media_type="application/json")
    finally:
        client.is_answered = True


class WaitingClient:
    """A waiting client, whose request is cancelled if it disconnects before the answer.

    Only requests with `Caller.cancel_on_disconnect` are cancelled, and not while the server is shutting down.
    """

    def __init__(self, gateway: Gateway, request: Request, record: RequestRecord) -> None:
        self._gateway = gateway
        self._request = request
        self._id = record.context.id
        self.is_answered = False  # whether the result or an error is ready: then a disconnect cancels nothing
        if record.context.caller.cancel_on_disconnect and not record.context.is_over:
            gateway.background.start("waiting for a client to disconnect", self._await_disconnect)

    async def events(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the events of the answer. An error becomes the last event."""
        with self._gateway.awaiting(self._id):
            try:
                async for event in events:
                    yield event
            except UnfuseError as error:
                yield sse_event(envelope(refusal_of(error)))

        # This is not in `finally`: a stream that ends early has no answer, so the request is cancelled.
        self.is_answered = True

    async def _await_disconnect(self) -> None:
        """Wait until the client disconnects, and cancel its request if it has no answer yet."""
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        if not self.is_answered and not self._gateway.scheduler.draining:
            await self._gateway.scheduler.client_disconnected(self._id)
