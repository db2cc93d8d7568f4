"""Both ends of moving bytes in a compute process, for transfer engines whose library only that process has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from threading import Lock, Thread

from typing_extensions import override

from unfuse.transfer.base import Pairs
from unfuse.worker.compute_messages import ForPairs, FromCompute, Join, Move, Offer, PairDone, Part


class ComputePairs(Pairs):
    """The parent's end: asks the compute process, through `send`, and waits for its answers.

    Made on the event loop that `send` needs; threads call the methods of Pairs, and the loop the other ones. A call
    ends only when the process has answered or is gone: until then it may write to the arena.
    """

    def __init__(self, send: Callable[[ForPairs], Awaitable[bool]]) -> None:
        self._send, self._loop = send, asyncio.get_running_loop()
        self._waiting: dict[str, Future[int]] = {}

    @override
    def offer(self, pair: str, backend: str, host: str, patience_s: float) -> int:
        return self._ask(Offer(pair, backend, host, patience_s))

    @override
    def join(self, pair: str, backend: str, host: str, patience_s: float, at: tuple[str, int]) -> None:
        self._ask(Join(pair, backend, host, patience_s, at))

    @override
    def move(self, pair: str, start: int, stop: int) -> None:
        self._ask(Move(pair, start, stop))

    @override
    def part(self, pair: str) -> None:
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._tell(Part(pair)), self._loop)

    def heard(self, answer: PairDone) -> None:
        """The process has answered."""
        if waiting := self._waiting.pop(answer.pair, None):
            if answer.error:
                waiting.set_exception(ConnectionError(answer.error))
            else:
                waiting.set_result(answer.port)

    def lost(self) -> None:
        """The process is gone, and its pairs are."""
        while self._waiting:
            self._waiting.popitem()[1].set_exception(ConnectionError("the compute process ended"))

    def _ask(self, message: Offer | Join | Move) -> int:
        """Returns the port of the answer. Raises ConnectionError."""
        answer = Future[int]()
        asyncio.run_coroutine_threadsafe(self._tell(message, answer), self._loop)
        return answer.result()

    async def _tell(self, message: ForPairs, answer: Future[int] | None = None) -> None:
        if answer:
            self._waiting[message.pair] = answer
        if not await self._send(message):
            self.heard(PairDone(message.pair, error="no compute process runs"))


class PairServer:
    """The end in the compute process: does what messages ask of pairs, which `open` makes at the first."""

    def __init__(self, open: Callable[[], Pairs], send: Callable[[FromCompute], None]) -> None:
        self._open, self._send, self._lock = open, send, Lock()
        self._pairs: Pairs | None = None

    def take(self, message: ForPairs) -> None:
        """Do it in a thread, and answer. Nothing that fails there ends the process."""
        Thread(target=self._serve, args=(message,), name="transfer-pair", daemon=True).start()

    def _serve(self, message: ForPairs) -> None:
        port = 0
        try:
            with self._lock:
                pairs = self._pairs = self._pairs or self._open()
            match message:
                case Offer():
                    port = pairs.offer(message.pair, message.backend, message.host, message.patience_s)
                case Join():
                    pairs.join(message.pair, message.backend, message.host, message.patience_s, message.at)
                case Move():
                    pairs.move(message.pair, message.start, message.stop)
                case Part():
                    pairs.part(message.pair)
                    return
        except Exception as error:  # those of torch have no base of their own
            self._send(PairDone(message.pair, error=f"{type(error).__name__}: {error}"))
        else:
            self._send(PairDone(message.pair, port))
