"""Tells webhooks that their requests are over, signed by the rules of Standard Webhooks, until they have heard it.

What is left to tell is on the requests' contexts: any gateway goes on where another one stopped.
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
from unfuse.server.links import WEBHOOK_LASTS_S, SignedLinks
from unfuse.server.outbound_http import OutboundHttp, host_of
from unfuse.server.request_objects import FREE, Prices, request_object

REVIEW_S = 10.0  # seconds between two looks for what other gateways left untold
MOST = 1024  # How many requests one gateway tells of, or waits for, at one time. Others are found by a later look.
AT_ONCE, AT_ONCE_EACH = 64, 4  # calls under way at one time, and to one host: one that hangs holds up nobody else
LEAST_SECRET = 24  # the fewest bytes of a secret, by the rules of Standard Webhooks
GONE = 410  # the status by which a target says that it never wants to hear of anything again

log = structlog.get_logger(__name__)


class Webhooks(Observer):
    """The webhooks of one gateway. Raises ConfigError for secrets or hosts that cannot be used, or miss one another."""

    def __init__(self, targets: Sequence[str] = (), secrets: Sequence[str] = (), prices: Prices = FREE) -> None:
        self._prices = prices
        self.http = OutboundHttp(targets, needs=" and --webhook-secret")
        self._signers = [_signer(secret) for secret in secrets]
        if self.http and not self._signers:
            raise UsageError("--webhook-hosts needs --webhook-secret: make one by `openssl rand -base64 32`")
        self._told: dict[str, asyncio.Task[None]] = {}
        self._background = Supervisor()
        self._all = asyncio.Semaphore(AT_ONCE)
        self._hosts = WeakValueDictionary[str, asyncio.Semaphore]()

    def start(self, scheduler: Scheduler, links: SignedLinks) -> None:
        """Start delivering webhooks that are due, and those of requests that end here. `links` signs their links."""
        if self.http:
            self._scheduler, self._deliveries, self._links = scheduler, scheduler.webhook_deliveries, links
            scheduler.observers.add(self)
            self._background.forever("looking for webhooks that have not heard", self._review)

    async def close(self) -> None:
        """End it. What is not told yet others tell, or this one when it begins again."""
        await self._background.close()
        await self.http.close()

    def ended(self, context: RequestContext) -> None:
        """Have the webhook of a request that is over told."""
        if context.unheard and context.id not in self._told and len(self._told) < MOST:
            self._told[context.id] = self._background.once("telling a webhook", lambda: self._tell(context))
            self._told[context.id].add_done_callback(lambda _: self._told.pop(context.id, None))

    async def _review(self) -> None:
        async for context in self._deliveries.pending():
            self.ended(context)
        await asyncio.sleep(REVIEW_S)

    async def _tell(self, context: RequestContext) -> None:
        """Tell one webhook, as often as is needed, unless others do."""
        with suppress(NotFound):
            while context.unheard:
                await asyncio.sleep(max(0.0, context.webhook.next_at - self._scheduler.clock.wall()))
                each = self._hosts.setdefault(host_of(context.delivery.webhook), asyncio.Semaphore(AT_ONCE_EACH))
                async with each, self._all:
                    context, is_ours = await self._deliveries.take(context.id)
                    if is_ours:
                        context = await self._attempt(context)

    async def _attempt(self, context: RequestContext) -> RequestContext:
        """Call it once, and record what came of it."""
        reason, status, url = "", 0, context.delivery.webhook
        try:
            self.http.require(url)
            status = await self.http.call(url, *await self._message(context))
        except (InvalidParameter, TransientError) as error:
            reason = str(error)
        told = {"request": context.id, "host": host_of(url), "attempt": context.webhook.attempts}
        if 200 <= status < 300:
            log.info("webhook heard", **told)
            self._scheduler.observers.tell(Observer.told, "heard")
            return await self._deliveries.heard(context.id)
        reason = reason or f"it answered {status}" + " (redirects are not followed)" * (300 <= status < 400)
        context = await self._deliveries.failed(context.id, reason, for_good=status == GONE)
        state = context.webhook.state
        log.warning("webhook failed", **told, reason=reason, state=state)
        self._scheduler.observers.tell(Observer.told, "given_up" if state == "given_up" else "failed")
        return context

    async def _message(self, context: RequestContext) -> tuple[dict[str, str], bytes]:
        """The headers and the body: what happened, and the request as its tenant sees it."""
        happened = context.status if context.status in ("completed", "cancelled") else "failed"
        at = datetime.fromtimestamp(context.completed_at or 0.0, UTC).isoformat()
        sign = await self._links.signer(WEBHOOK_LASTS_S)
        data = request_object(RequestRecord(context), context.caller.base_url, prices=self._prices, sign=sign)
        body = msgspec.json.encode({"type": f"request.{happened}", "timestamp": at, "data": data})
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
    """What signs by a secret, or by that in a file. Raises ConfigError, which does not tell it."""
    is_file = os.path.isfile(secret)
    if not is_file and is_path_like(secret):
        raise UsageError(
            "--webhook-secret looks like the path of a file, and there is no such file: make it by "
            "`openssl rand -base64 32`, or write whsec_ before a secret that begins with /"
        )
    try:
        told = Path(secret).read_text().strip() if is_file else secret
        coded = told.removeprefix("whsec_")
        if len(base64.b64decode(coded + "=" * (-len(coded) % 4), validate=True)) >= LEAST_SECRET:
            return Signer(told)
    except (OSError, ValueError) as error:
        raise UsageError("--webhook-secret is no base64, as `openssl rand -base64 32` makes it") from error
    raise UsageError(f"--webhook-secret is shorter than {LEAST_SECRET} bytes: make one by `openssl rand -base64 32`")
