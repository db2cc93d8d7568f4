"""Threads that move sessions on, some for each owner: one that waits for an owner keeps no other's session waiting."""

from __future__ import annotations

import itertools
import time
from heapq import heappop, heappush
from threading import Condition, Lock, Thread, current_thread
from typing import Protocol


class Stepwise(Protocol):
    """What is moved on."""

    def step(self) -> float | None:
        """Go on a little; returns in how many seconds to go on, None when it is over. Never raises."""

    def cancel(self) -> None:
        """Have the next step be the last."""


class Movers:
    """At most `most` threads an owner, and no more than it has sessions: they come and go with these.

    An owner's sessions take turns, each when its time has come.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._crews: dict[str, _Crew] = {}
        self._stopped = False

    def add(self, owner: str, session: Stepwise) -> None:
        """Move a session on until it is over."""
        with self._lock:
            crew = self._crews.setdefault(owner, _Crew(self._lock))
            crew.sessions += 1
            crew.plan(session, 0)
            if len(crew.threads) < self._most:
                thread = Thread(target=self._move, args=(owner, crew), name="transfer", daemon=True)
                crew.threads.append(thread)
                thread.start()

    def stop(self) -> None:
        """End every session soon."""
        with self._lock:
            self._stopped = True
            for crew in self._crews.values():
                crew.news.notify_all()

    def join(self) -> None:
        """Wait until that is so."""
        with self._lock:
            crews = list(self._crews.values())
            threads = [thread for crew in crews for thread in crew.threads]
        for thread in threads:
            thread.join()
        for crew in crews:
            for _, _, session in crew.due:
                session.cancel()
                session.step()

    def _move(self, owner: str, crew: _Crew) -> None:
        while session := self._next(owner, crew):
            delay = session.step()
            with self._lock:
                if delay is None:
                    crew.sessions -= 1
                    crew.news.notify_all()
                else:
                    crew.plan(session, delay)

    def _next(self, owner: str, crew: _Crew) -> Stepwise | None:
        """The next session whose time has come; None when this thread is one too many."""
        with self._lock:
            while not self._stopped and len(crew.threads) <= crew.sessions:
                wait = crew.due[0][0] - time.monotonic() if crew.due else None
                if wait is not None and wait <= 0:
                    return heappop(crew.due)[2]
                crew.news.wait(wait)
            if not self._stopped:
                crew.threads.remove(current_thread())
                if not crew.threads:
                    del self._crews[owner]
            return None


class _Crew:
    """One owner's sessions that are not over, when those that no thread has are due, and the threads."""

    def __init__(self, lock: Lock) -> None:
        self.news = Condition(lock)
        self.due: list[tuple[float, int, Stepwise]] = []
        self.threads: list[Thread] = []
        self.sessions = 0
        self._turns = itertools.count()

    def plan(self, session: Stepwise, delay: float) -> None:
        """Have a thread go on with it in so many seconds, after those that came before."""
        heappush(self.due, (time.monotonic() + delay, next(self._turns), session))
        self.news.notify()
