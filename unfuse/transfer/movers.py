"""Threads that run transfer sessions, some for each owner, so that a slow owner does not hold up others' sessions."""

from __future__ import annotations

import itertools
import time
from heapq import heappop, heappush
from math import inf
from threading import Condition, Lock, Thread, current_thread
from typing import Protocol

SPARE_S = 10.0  # seconds for which an idle thread waits for a session: starting one delays a pull by a third of a ms


class SteppedSession(Protocol):
    """A session as the movers see it."""

    def step(self) -> float | None:
        """Do a piece of work. Returns the seconds until the next step is due, None at the end. Never raises."""

    def cancel(self) -> None:
        """Make the next step the last."""


class SessionThreads:
    """At most `most` threads for each owner; one more comes with a session that finds none, and goes SPARE_S after it.

    The sessions of an owner take turns, each when its next step is due.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._owners: dict[str, _OwnerThreads] = {}
        self._stopped = False

    def add(self, owner: str, session: SteppedSession) -> None:
        """Run a session until it is over."""
        with self._lock:
            threads = self._owners.setdefault(owner, _OwnerThreads(self._lock))
            threads.sessions += 1
            threads.schedule(session, 0)
            if len(threads.running) < min(self._most, threads.sessions):
                thread = Thread(target=self._run, args=(owner, threads), name="transfer", daemon=True)
                threads.running.append(thread)
                thread.start()

    def stop(self) -> None:
        """Tell all threads to end; `join` then ends the sessions."""
        with self._lock:
            self._stopped = True
            for threads in self._owners.values():
                threads.changed.notify_all()

    def join(self) -> None:
        """After `stop`: wait until all threads have ended, and end the sessions that are left."""
        with self._lock:
            owners = list(self._owners.values())
            running = [thread for threads in owners for thread in threads.running]
        for thread in running:
            thread.join()
        for threads in owners:
            for _, _, session in threads.due:
                session.cancel()
                session.step()

    def _run(self, owner: str, threads: _OwnerThreads) -> None:
        while session := self._next(owner, threads):
            delay = session.step()
            with self._lock:
                if delay is None:
                    threads.sessions -= 1
                    threads.changed.notify_all()
                else:
                    threads.schedule(session, delay)

    def _next(self, owner: str, threads: _OwnerThreads) -> SteppedSession | None:
        """Wait for the next session that is due; None if this thread must end, having been one too many for long."""
        with self._lock:
            ends = inf
            while not self._stopped:
                now, due = time.monotonic(), threads.due[0][0] if threads.due else inf
                if due <= now:
                    return heappop(threads.due)[2]
                ends = min(ends, now + SPARE_S) if len(threads.running) > threads.sessions else inf
                if ends <= now:
                    break
                threads.changed.wait(None if due == ends == inf else min(due, ends) - now)
            if not self._stopped:
                threads.running.remove(current_thread())
                if not threads.running:
                    del self._owners[owner]
            return None


class _OwnerThreads:
    """The threads for one owner, the number of its sessions, and a heap of those that no thread has, by due time."""

    def __init__(self, lock: Lock) -> None:
        self.changed = Condition(lock)
        self.due: list[tuple[float, int, SteppedSession]] = []
        self.running: list[Thread] = []
        self.sessions = 0
        self._turns = itertools.count()

    def schedule(self, session: SteppedSession, delay: float) -> None:
        """Let a thread do the session's next step in `delay` seconds, after those that are due before."""
        heappush(self.due, (time.monotonic() + delay, next(self._turns), session))
        self.changed.notify()
