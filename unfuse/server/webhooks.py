"""Webhook delivery: call a request's webhook when it ends, and retry until the receiver accepts.

Messages are signed as Standard Webhooks specifies. The state of a delivery is part of the request's context, so any
gateway can continue the deliveries of another.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
import structlog
from standardwebhooks import Webhook as Signer

from unfuse import __version__
from unfuse.core.errors import InvalidParameter, NotFound, TransientError, UsageError
from unfuse.core.request import RequestContext, RequestRecord
from unfuse.core.supervisor import Supervisor
from unfuse.edge.keys import is_path_like
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.links import WEBHOOK_LINK_TTL_S, SignedLinks
from unfuse.server.outbound_http import OutboundHttp, host_of
from unfuse.server.request_objects import FREE, Prices, request_object

#: Seconds between two searches for pending deliveries, which other gateways may have left.
REVIEW_S = 10.0

#: The most deliveries that one gateway has in progress, including their pauses. A later search finds the others.
MAX_DELIVERIES = 1024

#: The most calls at one time, in all and to one host, so that a slow host does not block the others.
MAX_CALLS, MAX_CALLS_PER_HOST = 64, 4

#: The fewest bytes of a secret, as Standard Webhooks specifies.
MIN_SECRET_BYTES = 24

#: The status by which a receiver refuses all further attempts.
GONE = 410

log = structlog.get_logger(__name__)


class Webhooks(Observer):
    """Delivers the webhooks of one gateway.

    hosts: the hosts that may be called, as in `OutboundHttp`. Without any, webhooks are off.
    secrets: the signing secrets, or files with one secret each. A message has a signature for each.
    prices: the prices for the cost in the request object.

    Raises UsageError for secrets or hosts that cannot be used, and for hosts without a secret.
    """

    def __init__(self, hosts: Sequence[str] = (), secrets: Sequence[str] = (), prices: Prices = FREE) -> None:
        self._prices = prices
        self.http = OutboundHttp(hosts, needs=" and --webhook-secret")
        self._signers = [_signer(secret) for secret in secrets]
        if self.http and not self._signers:
            raise UsageError("--webhook-hosts needs --webhook-secret: make one by `openssl rand -base64 32`")
        self._deliveries_in_progress: dict[str, asyncio.Task[None]] = {}  # by request id
        self._background = Supervisor()
        self._call_limit = asyncio.Semaphore(MAX_CALLS)
        # A host's semaphore exists as long as a delivery uses it.
        self._host_limits = WeakValueDictionary[str, asyncio.Semaphore]()

    def start(self, scheduler: Scheduler, links: SignedLinks) -> None:
        """Start delivering pending webhooks, and those of requests that this scheduler ends.

        `links` signs the links to results in the messages.
        """
        if self.http:
            self._scheduler = scheduler
            self._deliveries = scheduler.webhook_deliveries
            self._links = links
            scheduler.observers.add(self)
            self._background.start_loop("starting pending webhook deliveries", self._deliver_pending)

    async def close(self) -> None:
        """Stop all deliveries. Other gateways, or this one after a restart, continue them."""
        await self._background.close()
        await self.http.close()

    def on_ended(self, context: RequestContext) -> None:
        """Start the delivery of the webhook of a request, if it is pending."""
        in_progress = self._deliveries_in_progress
        if context.webhook_pending and context.id not in in_progress and len(in_progress) < MAX_DELIVERIES:
            in_progress[context.id] = self._background.start("delivering a webhook", lambda: self._deliver(context))
            in_progress[context.id].add_done_callback(lambda _: in_progress.pop(context.id, None))

    async def _deliver_pending(self) -> None:
        """Start all pending deliveries once, then pause."""
        async for context in self._deliveries.pending():
            self.on_ended(context)
        await asyncio.sleep(REVIEW_S)

    async def _deliver(self, context: RequestContext) -> None:
        """Call one webhook until it is accepted or has failed for good.

        An attempt that another gateway has claimed is not made here.
        """
        with suppress(NotFound):
            while context.webhook_pending:
                await asyncio.sleep(max(0.0, context.webhook.next_at - self._scheduler.clock.wall()))
                host = host_of(context.delivery.webhook)
                host_limit = self._host_limits.setdefault(host, asyncio.Semaphore(MAX_CALLS_PER_HOST))

                # The host's limit comes first, so that deliveries to a slow host do not use up the limit of all calls.
                async with host_limit, self._call_limit:
                    context, is_claimed = await self._deliveries.claim(context.id)
                    if is_claimed:
                        context = await self._attempt(context)

    async def _attempt(self, context: RequestContext) -> RequestContext:
        """Call the webhook once, and record the outcome. Returns the new context."""
        reason = ""
        status = 0
        url = context.delivery.webhook
        try:
            self.http.require(url)
            status = await self.http.call(url, *await self._message(context))
        except (InvalidParameter, TransientError) as error:
            reason = str(error)

        log_fields = {"request": context.id, "host": host_of(url), "attempt": context.webhook.attempts}
        if 200 <= status < 300:
            log.info("webhook delivered", **log_fields)
            self._scheduler.observers.notify(Observer.on_webhook_attempt, "delivered")
            return await self._deliveries.record_delivered(context.id)

        reason = reason or f"the receiver responded with status {status}" + " (redirects are not followed)" * (
            300 <= status < 400
        )
        context = await self._deliveries.record_failed(context.id, reason, for_good=status == GONE)
        state = context.webhook.state
        log.warning("webhook failed", **log_fields, reason=reason, state=state)
        self._scheduler.observers.notify(Observer.on_webhook_attempt, "given_up" if state == "given_up" else "failed")
        return context

    async def _message(self, context: RequestContext) -> tuple[dict[str, str], bytes]:
        """Return the headers and the body of a message.

        The body has the outcome of the request, and the request object.
        """
        outcome = context.status if context.status in ("completed", "cancelled") else "failed"
        ended_at = datetime.fromtimestamp(context.completed_at or 0.0, UTC).isoformat()
        sign = await self._links.signer(WEBHOOK_LINK_TTL_S)
        data = request_object(RequestRecord(context), context.caller.base_url, prices=self._prices, sign=sign)
        body = msgspec.json.encode({"type": f"request.{outcome}", "timestamp": ended_at, "data": data})

        now = datetime.fromtimestamp(self._scheduler.clock.wall(), UTC)
        signatures = [signer.sign(context.id, now, body.decode()) for signer in self._signers]
        return {
            "content-type": "application/json",
            "user-agent": f"unfuse/{__version__}",
            "webhook-id": context.id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(signatures),
        }, body


def _signer(secret: str) -> Signer:
    """Return a signer with this secret, or with the one in this file.

    Raises UsageError, whose message does not contain the secret.
    """
    is_file = os.path.isfile(secret)
    if not is_file and is_path_like(secret):
        raise UsageError(
            "--webhook-secret looks like a file path, but there is no such file: create it with `openssl rand -base64 "
            "32`, or write whsec_ before a secret that begins with /"
        )

    try:
        text = Path(secret).read_text().strip() if is_file else secret
        encoded = text.removeprefix("whsec_")
        if len(base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)) >= MIN_SECRET_BYTES:
            return Signer(text)
    except (OSError, ValueError) as error:
        raise UsageError(
            "--webhook-secret cannot be read as base64: create it with `openssl rand -base64 32`"
        ) from error
    raise UsageError(
        f"--webhook-secret is shorter than {MIN_SECRET_BYTES} bytes: create one with `openssl rand -base64 32`"
    )
