"""A lock that finalizers may use: posted work never waits, and is never left behind."""

import gc
import threading
import weakref

from unfuse.arena.objects import FinalizerLock


def test_work_posted_while_unlocked_runs_at_once() -> None:
    done: list[int] = []
    FinalizerLock().post(lambda: done.append(1))
    assert done == [1]


def test_work_posted_while_locked_runs_at_release() -> None:
    turn, done = FinalizerLock(), []
    with turn:
        turn.post(lambda: done.append(1))
        assert done == []
    assert done == [1]


def test_finalizer_run_while_locked_does_not_deadlock() -> None:
    class Thing:
        pass

    turn, done = FinalizerLock(), []
    thing = Thing()
    weakref.finalize(thing, turn.post, lambda: done.append(1))
    thing.itself = thing  # type: ignore[attr-defined]
    del thing
    with turn:
        gc.collect()
    assert done == [1]


def test_work_posted_while_another_thread_locks_runs_before_next_holder() -> None:
    turn, done = FinalizerLock(), []
    inside, go_on = threading.Event(), threading.Event()

    def occupy() -> None:
        with turn:
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=occupy)
    thread.start()
    inside.wait(10)
    turn.post(lambda: done.append(1))
    assert done == []
    go_on.set()
    with turn:
        assert done == [1]
    thread.join()


def test_work_posted_from_many_threads_is_not_lost() -> None:
    turn, done = FinalizerLock(), []

    def post() -> None:
        for _ in range(500):
            turn.post(lambda: done.append(1))
            with turn:
                pass

    threads = [threading.Thread(target=post) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4000
