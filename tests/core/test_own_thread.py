"""Work in a thread for which nobody has to wait."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from unfuse.core.supervisor import in_own_thread

HANGS = """
import asyncio, threading
from unfuse.core.supervisor import in_own_thread

async def main():
    begun, never = threading.Event(), threading.Event()
    work = asyncio.create_task(in_own_thread(lambda: (begun.set(), never.wait())))
    await asyncio.to_thread(begun.wait)
    work.cancel()

asyncio.run(main())
print("ended")
"""


async def test_the_caller_gets_what_the_work_returns_or_raises() -> None:
    assert await in_own_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await in_own_thread(lambda: 1 // 0)


async def test_a_caller_that_is_cancelled_does_not_wait() -> None:
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        goes_on.wait()
        ended.set()

    waits = asyncio.create_task(in_own_thread(work))
    await asyncio.to_thread(begun.wait)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert not ended.is_set()
    goes_on.set()
    await asyncio.to_thread(ended.wait)


@pytest.mark.slow
def test_the_end_of_a_process_does_not_wait_for_work_that_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
