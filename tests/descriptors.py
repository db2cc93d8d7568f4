"""What this process holds open."""

import gc
import os
import warnings
from contextlib import suppress


def settled() -> None:
    """Let go of what earlier tests of this process have left to be collected, before descriptors are counted.

    What they left open is theirs to answer for, not the test's that counts.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def descriptors() -> set[tuple[str, str]]:
    """All open descriptors: the number and the file or socket of each.

    A test compares by `<=`: what others close meanwhile is not its affair.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed them
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
