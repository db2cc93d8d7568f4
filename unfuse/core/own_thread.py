"""Work in a thread of its own, for which no process waits when it ends."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(work: Callable[[], T]) -> T:
    """Return what `work` returns, which may take long, as where a server elsewhere does not answer.

    A caller that is cancelled does not wait for it, and neither does the end of the process, as it would for
    `asyncio.to_thread`.
    """
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(context.run(work))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
