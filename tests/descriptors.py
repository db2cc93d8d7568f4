"""What this process holds open."""

import gc
import os
import warnings


def settled() -> None:
    """Let go of what earlier tests of this process have left to be collected, before descriptors are counted.

    What they left open is theirs to answer for, not the test's that counts.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def descriptors() -> list[str]:
    """The numbers of all open descriptors."""
    return os.listdir("/proc/self/fd")
