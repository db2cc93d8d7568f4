"""A worker's connection to its schedulers: it talks to one of them, and to the next one if that one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from unfuse.core.messages import Ask, Beat, Hello, Stranger, ToScheduler, ToWorker, Welcome
from unfuse.wire.address import Trust, keys_for
from unfuse.wire.dealer import Dealer

ANSWER_S = 10.0  # seconds, beside those the message asks to wait, after which a silent scheduler counts as gone
BEAT_S = 3.0  # seconds after which a heartbeat without an answer counts as missed
MISSES = 2  # the number of missed heartbeats in a row after which the scheduler counts as gone
RETRY_S, RETRY_MOST_S = 0.1, 2.0  # the pause, in seconds, after all schedulers failed: the first, and the longest

log = structlog.get_logger(__name__)


class Link:
    """The connection to one of these schedulers, in turn. The worker calls `hello` once; the link repeats it.

    It never gives up: a message that gets no answer is sent to the next scheduler, or to the same one again, so any
    message may arrive twice. `renewed` is called after each Welcome, since that scheduler knows no earlier Ask.
    """

    def __init__(self, addresses: Sequence[str], trust: Trust, renewed: Callable[[], None]) -> None:
        for address in addresses:
            keys_for(address, trust)
        self._addresses, self._trust, self._renewed = list(addresses), trust, renewed
        self._dealer = Dealer(self._addresses[0], trust)
        self._hello: Hello
        self._welcome: Welcome | None = None
        self._lock = asyncio.Lock()
        self._tried = 0
        self._missed = 0
        self.heard = 0  # how many answers have come, from all schedulers

    @property
    def connected(self) -> bool:
        """Whether a scheduler has welcomed the worker, and is not known to be gone."""
        return self._welcome is not None

    async def hello(self, hello: Hello) -> Welcome:
        """Introduce the worker to this scheduler, and keep the message for all later ones."""
        self._hello, self._welcome = hello, None
        _, welcome = await self._connected()
        return welcome

    async def call(self, message: ToScheduler, timeout: float = ANSWER_S) -> ToWorker:
        """Send a message again and again until a scheduler answers within `timeout` seconds; returns the answer."""
        while True:
            with suppress(OSError):
                return await self.once(message, timeout)

    async def once(self, message: ToScheduler, timeout: float = ANSWER_S) -> ToWorker:
        """Send a message once; returns the answer, within `timeout` seconds plus those that the message asks to wait.

        Raises TimeoutError or ConnectionError if there is none: then the next call may go to another scheduler.
        """
        dealer, _ = await self._connected()
        try:
            answer = await dealer.call(message, timeout + (message.wait if isinstance(message, Ask) else 0))
        except TimeoutError:
            self._missed += 1 if isinstance(message, Beat) else MISSES
            if self._missed >= MISSES:
                await self._leave(dealer, "it does not answer")
            raise
        except ConnectionError as error:
            await self._leave(dealer, str(error))
            raise
        self._missed = 0
        self.heard += 1
        if isinstance(answer, Stranger):
            if dealer is self._dealer:
                self._welcome = None
            raise ConnectionError("it was restarted")
        return answer

    async def close(self) -> None:
        """Close the connection."""
        await self._dealer.close(linger=1.0)

    async def _connected(self) -> tuple[Dealer, Welcome]:
        """The connection to a scheduler that has answered Hello, and its Welcome."""
        async with self._lock:
            while self._welcome is None:
                try:
                    answer = await self._dealer.call(self._hello, BEAT_S * MISSES)
                except OSError as error:
                    await self._next(str(error) or "it does not answer")
                    continue
                if not isinstance(answer, Welcome):
                    await self._next(f"it did not welcome this worker: {answer}")
                    continue
                self._welcome = answer
                self._tried = self._missed = 0
                self.heard += 1
                self._renewed()
            return self._dealer, self._welcome

    async def _leave(self, dealer: Dealer, reason: str) -> None:
        """Connect to the next scheduler, unless another call has done so already."""
        async with self._lock:
            if dealer is self._dealer:
                await self._next(reason)

    async def _next(self, reason: str) -> None:
        left = self._dealer.address
        if self._tried < len(self._addresses):
            what = "the scheduler is gone" if self.heard else "the scheduler does not answer yet: waiting for it"
            log.warning(what, scheduler=left, reason=reason)
        self._welcome, self._missed = None, 0
        self._tried += 1
        rounds, more = divmod(self._tried, len(self._addresses))
        await self._dealer.close()
        if not more:
            await asyncio.sleep(min(RETRY_S * rounds, RETRY_MOST_S))
        following = self._addresses.index(left) + 1
        self._dealer = Dealer(self._addresses[following % len(self._addresses)], self._trust)
