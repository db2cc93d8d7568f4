"""A lock that finalizers may use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock


class FinalizerLock:
    """A lock (`with lock:`) to which finalizers post work instead of waiting for it.

    A finalizer may run at any point of any thread, even inside the lock, so it must not wait for it: it posts.
    Posted work runs under the lock: soon, and before the next `with lock:` body that starts after the post. It must not
    raise.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._left: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._run()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._settle()

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` under the lock: at once if it is free, else when its holder releases it."""
        self._left.append(work)
        self._settle()

    def _settle(self) -> None:
        while self._left and self._lock.acquire(blocking=False):
            try:
                self._run()
            finally:
                self._lock.release()

    def _run(self) -> None:
        while self._left:
            self._left.popleft()()
