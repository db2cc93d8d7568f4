"""Threads that run transfer sessions, some for each owner.

So a slow owner does not delay the sessions of others.
"""

from __future__ import annotations

import itertools
import time
from heapq import heappop, heappush
from math import inf
from threading import Condition, Lock, Thread, current_thread
from typing import Protocol

#: Seconds that an idle thread waits for a session. Starting a thread delays a pull by a third of a millisecond.
IDLE_THREAD_S = 10.0


class SteppedSession(Protocol):
    """A transfer session, as its threads see it."""

    def step(self) -> float | None:
        """Do one step.

        Returns the seconds until the next is due, or None at the end. Never raises.
        """

    def cancel(self) -> None:
        """Make the next step the last."""


class SessionThreads:
    """Runs the sessions of each owner in at most `max_threads` threads.

    A thread is started for a session if all threads of its owner have one. It ends after IDLE_THREAD_S without a
    session. The sessions of an owner run round-robin, each when its next step is due.
    """

    def __init__(self, max_threads: int) -> None:
        self._most = max_threads
        self._lock = Lock()
        self._owners: dict[str, _OwnerThreads] = {}
        self._stopped = False

    def add(self, owner: str, session: SteppedSession) -> None:
        """Run a session until its end."""
        with self._lock:
            threads = self._owners.setdefault(owner, _OwnerThreads(self._lock))
            threads.sessions += 1
            threads.schedule(session, 0)
            if len(threads.running) < min(self._most, threads.sessions):
                thread = Thread(target=self._run, args=(owner, threads), name="transfer", daemon=True)
                threads.running.append(thread)
                thread.start()

    def stop(self) -> None:
        """Make all threads end. `join` then ends the sessions."""
        with self._lock:
            self._stopped = True
            for threads in self._owners.values():
                threads.changed.notify_all()

    def join(self) -> None:
        """Wait until all threads have ended, then end the remaining sessions. Call `stop` first."""
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
        """Run sessions of an owner until this thread must end."""
        while session := self._wait_for_due(owner, threads):
            delay = session.step()
            with self._lock:
                if delay is None:
                    threads.sessions -= 1
                    threads.changed.notify_all()  # threads without a session now count their idle time
                else:
                    threads.schedule(session, delay)

    def _wait_for_due(self, owner: str, threads: _OwnerThreads) -> SteppedSession | None:
        """Wait for the next due session. Returns None if this thread must end.

        It must end after `stop`, or if there were more threads than sessions for IDLE_THREAD_S.
        """
        with self._lock:
            ends_at = inf
            while not self._stopped:
                now, due = time.monotonic(), threads.due[0][0] if threads.due else inf
                if due <= now:
                    return heappop(threads.due)[2]
                ends_at = min(ends_at, now + IDLE_THREAD_S) if len(threads.running) > threads.sessions else inf
                if ends_at <= now:
                    break
                threads.changed.wait(None if due == ends_at == inf else min(due, ends_at) - now)

            # After `stop`, `join` still needs the owners and their threads.
            if not self._stopped:
                threads.running.remove(current_thread())
                if not threads.running:
                    del self._owners[owner]
            return None


class _OwnerThreads:
    """The threads and sessions of one owner."""

    def __init__(self, lock: Lock) -> None:
        self.changed = Condition(lock)

        #: A heap of the sessions that no thread runs, by due time.
        self.due: list[tuple[float, int, SteppedSession]] = []

        #: Threads that were started and have not ended.
        self.running: list[Thread] = []

        #: Number of sessions that have not ended.
        self.sessions = 0

        #: Numbers the entries of `due`: of equal times, the first scheduled is the first due.
        self._order = itertools.count()

    def schedule(self, session: SteppedSession, delay: float) -> None:
        """Run the session's next step in `delay` seconds, after those that are due before."""
        heappush(self.due, (time.monotonic() + delay, next(self._order), session))
        self.changed.notify()
