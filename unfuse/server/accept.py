"""How a creating call becomes a request: read, joined to an earlier one if it is a repeat, checked, submitted."""

from __future__ import annotations

import hashlib
import json
import time

from starlette.requests import Request

from unfuse.core.errors import InvalidParameter
from unfuse.core.params import Delivery, check, check_delivery
from unfuse.core.request import Record
from unfuse.queues.base import Filter
from unfuse.server.errors import Refusal
from unfuse.server.gateway import Gateway

MAX_BODY = 2 * 1024 * 1024
"""Bytes of a JSON body; reading stops there."""

REPEAT_WITHIN_S = 15 * 60
"""How long a client's silent repeat joins its first call."""

MAX_KEY = 255


async def read_json(request: Request) -> dict[str, object]:
    """The JSON object in a body. Raises Refusal for another type of body, or a larger one, and InvalidParameter."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "unsupported_media_type", "send the body as JSON, with 'Content-Type: application/json'")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise Refusal(413, "body_too_large", f"the body is larger than the {MAX_BODY} bytes that are read")
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise InvalidParameter('the body must be a JSON object, such as {"prompt": "a red circle on white"}')
    return given


async def accept(gateway: Gateway, request: Request, tenant: str, given: dict[str, object]) -> tuple[Record, Delivery]:
    """The request that a body asks for: a new one, or the earlier one that this call repeats.

    Raises InvalidParameter, UnknownModel, Overloaded, and Refusal for an Idempotency-Key that another body used.
    """
    delivery = check_delivery(given)
    key = request.headers.get("idempotency-key", "")
    if len(key) > MAX_KEY:
        message = f"Idempotency-Key must be 1 to {MAX_KEY} characters long, not {len(key)}"
        raise InvalidParameter(message, "Idempotency-Key")
    fingerprint = hashlib.sha256(f"{request.url.path} {json.dumps(given, sort_keys=True)}".encode()).hexdigest()
    record = await _earlier(gateway, request, tenant, key, fingerprint)
    if record is None:
        card = await gateway.model(given.get("model"))
        params, n = check(card, given)
        record = await gateway.submit(card, params, n, tenant, key, fingerprint, delivery)
    if key and record.context.fingerprint != fingerprint:
        message = f"Idempotency-Key {key!r} was used with another body: repeat that body, or send another key"
        headers = {"x-should-retry": "false"}
        raise Refusal(409, "idempotency_conflict", message, "Idempotency-Key", headers)
    return record, delivery


async def _earlier(gateway: Gateway, request: Request, tenant: str, key: str, fingerprint: str) -> Record | None:
    if key:
        known = await gateway.queue.list(Filter(tenant=tenant, idempotency_key=key), limit=1)
        return known[0] if known else None
    if request.headers.get("x-stainless-retry-count", "0") in ("", "0"):
        return None
    known = await gateway.queue.list(Filter(tenant=tenant, fingerprint=fingerprint), limit=1)
    recent = [record for record in known if time.time() - record.context.created_at < REPEAT_WITHIN_S]
    return recent[0] if recent else None
